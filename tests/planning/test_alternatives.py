"""Alternatives that can be run can be run; what a plan does not use is worth nothing to it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.commands.explain import main
from polygon.cost.estimate import estimate
from polygon.cost.money import traffic_bytes
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue, files
from polygon.messages.explanation import better, describe_explanation, explanation_data
from polygon.planning import alternatives
from polygon.planning.alternatives import Alternative, Explainer, Explanation
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.nearby import allocation_of
from polygon.planning.objectives import ENERGY, STEP_TIME
from polygon.planning.search_engine import Effort, find_plan
from polygon.planning.what_ifs import (
    Change,
    Sensitivities,
    faster_link,
    link_changes,
    more_memory,
    one_more_node,
    sensitivities,
    usual_changes,
)
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

FAST = Effort(fluid_evaluations=200, exact_evaluations=8, patience=100)


def problem_of(groups, bytes_per_s=1e9):
    """A small model on linked regions given as lists of (type, nodes, devices per node), with cards for their links."""
    card = Link(latency_s=5e-5, bytes_per_s=bytes_per_s)
    cluster = cluster_of(groups, latency_s=0.005, bytes_per_s=bytes_per_s, egress_usd_per_gb=0.02, between=card)
    return Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))


WIDE = problem_of(([("a100-40gb", 1, 2)], [("a100-40gb", 1, 2)], [("t4", 1, 1)]), bytes_per_s=1e11)


def plan_for(problem):
    return find_plan(problem, np.random.default_rng(0), effort=FAST).plan


@pytest.fixture(scope="module", autouse=True)
def quick_ideas():
    """The searches behind ideas are shorter still: what is said of their plans holds for any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternatives, "SHORT", FAST)
        yield


@pytest.fixture(scope="module")
def wide_plan():
    return plan_for(WIDE)


@settings(max_examples=cases(2), deadline=None)
@given(
    bytes_per_s=st.sampled_from([1e8, 1e10]),
    groups=st.sampled_from(
        [
            ([("a100-40gb", 1, 2)], [("t4", 2, 2)]),
            ([("t4", 1, 2), ("a100-40gb", 1, 1)], [("t4", 1, 4)], [("a100-40gb", 1, 1)]),
        ]
    ),
)
def test_possible_alternatives_break_no_rule(groups, bytes_per_s):
    """What is called possible passes the checker at the cost that is shown; what is not says why."""
    problem = problem_of(groups, bytes_per_s)
    plan = plan_for(problem)
    explainer = Explainer(problem, plan)
    found = explainer.explain(count=3)
    assert len(found.alternatives) >= 8
    assert found.left_out == ()
    for alternative in (*found.alternatives, *found.different):
        if alternative.bill is None:
            assert alternative.reason
        else:
            assert violations(problem, alternative.plan) == []
            result = estimate(problem, alternative.plan)
            assert np.isclose(result.step_s, alternative.bill.step_s)
            assert np.isclose(result.cost_usd, alternative.bill.usd)
    structures = [explainer.structure(a.plan) for a in found.different]
    assert len(set(structures)) == len(structures)
    assert explainer.structure(plan) not in structures


@pytest.fixture(scope="module")
def wide_ideas(wide_plan):
    """What becomes of the ideas."""
    return Explainer(WIDE, wide_plan).explain(count=0)


def test_plans_of_ideas_are_among_those_that_differ(wide_plan, wide_ideas):
    """Each in other regions or of another number of stages is there, whatever the short search finds."""
    explainer = Explainer(WIDE, wide_plan)
    plans = [idea.plan for idea in wide_ideas.alternatives if idea.plan is not None]
    different = explainer.different_plans(1000, wide_ideas.alternatives)
    found = {explainer.structure(alternative.plan) for alternative in different}
    assert {explainer.structure(plan) for plan in plans} - {explainer.structure(wide_plan)} <= found


def test_one_region_only_means_one_region(wide_ideas):
    """The plan of an idea does what the idea says."""
    found = wide_ideas
    only_t4 = Message("idea.only_device", device="t4")
    for alternative in found.alternatives:
        if alternative.idea.kind == "idea.only_region" and alternative.plan:
            names = {WIDE.cluster.pools[w.pool].region for stage in alternative.plan.stages for w in stage.workers}
            assert {f"r{r}" for r in names} == {alternative.idea["region"]}
        if alternative.idea == only_t4 and alternative.plan:
            pools = {w.pool for stage in alternative.plan.stages for w in stage.workers}
            assert {WIDE.cluster.pools[p].device.name for p in pools} == {"t4"}
    assert any(alternative.idea == only_t4 for alternative in found.alternatives)


def test_one_uniform_split_is_the_best_of_all():
    """Not of the narrower ideas alone: over a slow link a pipeline of whole nodes beats data and plain pipelines."""
    problem = replace(problem_of(([("a100-40gb", 1, 4)],) * 2, 1e7), batch=Batch(global_batch=2, seq_len=512))
    explainer = Explainer(problem, plan_for(problem))
    (plain_3d,) = (work() for idea, _, work in explainer.ideas() if idea == Message("idea.plain_3d"))
    both = explainer.naive.best("both", lambda row: row["tp"] > 1 and row["pp"] > 1)
    narrow = explainer.naive.best("narrow", lambda row: row["tp"] == 1 or row["pp"] == 1)
    assert plain_3d.bill.step_s <= both.bill.step_s < narrow.bill.step_s


def test_no_packing_is_held_at_its_best_memory_options():
    """Packing inside a region also keeps fully sharded groups inside nodes: without it other options are quicker."""
    # Without packing fully sharded groups reach over both nodes of a region, in every micro-batch.
    problem = problem_of(([("a100-40gb", 2, 2)], [("a100-40gb", 2, 2)]), bytes_per_s=1e8)
    packed = {"activations": "int8", "activation_gradients": "int8", "weight_gradients": "int8"}
    links = tuple(LinkUse(source=a, target=b, **packed) for a in range(2) for b in range(2))
    plan = replace(uniform_plan(problem, ParallelConfig(dp=8, tp=1, pp=1, zero=3)), links=links)
    idea = next(i for i in Explainer(problem, plan).ideas() if i[0].kind == "idea.no_compression")
    bare = replace(plan, links=tuple(LinkUse(source=use.source, target=use.target) for use in plan.links))
    outcome = idea[2]()
    assert not any(getattr(use, name) != "none" for use in outcome.plan.links for name in outcome.plan.packings)
    assert outcome.bill.step_s < 0.9 * step_times(bare, CostTables(problem)).step_s


def test_no_time_no_answers_but_a_list_of_questions(wide_plan):
    """Ideas for which time is up are named, none is begun."""
    found = Explainer(WIDE, wide_plan).explain(seconds_left=lambda: 0.0)
    assert found.alternatives == ()
    assert Message("idea.plain_3d") in found.left_out
    assert sensitivities(WIDE, wide_plan, seconds_left=lambda: 0.0).left_out > 0


def test_allocation_and_plan_are_inverse(wide_plan):
    """Decoding the allocation of a found plan gives its workers again, and borders as near as polishing moves them."""
    decoder = Decoder(WIDE)
    again = decoder.decode(allocation_of(decoder, wide_plan))
    assert [s.workers for s in again.stages] == [s.workers for s in wide_plan.stages]
    assert [s.last_layer for s in again.stages] == pytest.approx([s.last_layer for s in wide_plan.stages], abs=2)


def test_unused_links_are_worth_nothing_and_used_ones_never_cost(wide_plan):
    """The same plan: exactly 0 for links without traffic, at most 0 for the others; replanned: at most 0."""
    moved, reduced = traffic_bytes(WIDE, wide_plan, step_times(wide_plan, CostTables(WIDE)))
    traffic = moved + reduced + (moved + reduced).T
    pairs = [(a, b) for a in range(3) for b in range(a + 1, 3)]
    assert any(traffic[pair] > 0 for pair in pairs)
    changes = [Change(text=f"{a}-{b}", cluster=faster_link(WIDE.cluster, a, b, 1e9)) for a, b in pairs]
    found = sensitivities(WIDE, wide_plan, changes=changes, evaluations=2)
    step_s = estimate(WIDE, wide_plan).step_s
    for pair, row in zip(pairs, found.rows, strict=True):
        assert row.same_plan <= 1e-12
        assert row.replanned <= min(0, row.same_plan)
        assert row.step_s <= min(found.baseline_s, (1 + row.same_plan) * step_s * (1 + 1e-12))
        if traffic[pair] == 0:
            assert row.same_plan == 0


def test_a_second_node_is_found_useful():
    """One slow region alone: a node more, replanned, saves time; the same plan cannot know it."""
    problem = replace(problem_of(([("t4", 1, 1)],)), batch=Batch(global_batch=512, seq_len=512))
    plan = plan_for(problem)
    changes = [Change(text="t4", cluster=one_more_node(problem.cluster, 0), new_pool=0, keeps_devices=False)]
    (row,) = sensitivities(problem, plan, changes=changes, evaluations=2).rows
    assert row.same_plan == 0
    assert row.replanned < -0.3


def test_a_plan_for_least_energy_is_held_against_others_in_energy():
    """Its ideas are the best in that, and no worse than the same ideas worked out for time; those for time are no
    slower. Data and words say energy; devices of unknown power have no part of it."""
    problem = problem_of(([("a100-40gb", 1, 4)], [("t4", 2, 2)]), 1e9)
    plan = plan_for(problem)
    kinds = ("idea.only_device", "idea.random")
    found = {}
    for objective in (ENERGY, STEP_TIME):
        explainer = Explainer(problem, plan, objective=objective)
        works = [(idea, work) for idea, _, work in explainer.ideas() if idea.kind in kinds]
        found[objective.name] = {str(idea): outcome.bill for idea, work in works if (outcome := work()).bill}
    assert found["energy"] and found["energy"].keys() == found["time"].keys()
    for idea, bill in found["energy"].items():
        assert bill.energy_j <= found["time"][idea].energy_j * 1.0001
        assert bill.step_s >= found["time"][idea].step_s * 0.9999
    assert any(bill.energy_j < found["time"][idea].energy_j * 0.99 for idea, bill in found["energy"].items())


def test_parts_of_what_better_clusters_bring_are_of_what_the_plan_was_made_for():
    """Another node of a frugal device saves energy, whatever it does to the step; where nobody said what devices draw
    there are no parts of it."""
    problem = problem_of(([("t4", 1, 2)],))
    plan = plan_for(problem)
    cluster = problem.cluster
    frugal = replace(cluster.catalogue["t4"], power_w=cluster.catalogue["t4"].power_w / 2)
    change = Change(text="frugal", cluster=replace(cluster, catalogue=cluster.catalogue | {"t4": frugal}))
    (row,) = sensitivities(problem, plan, changes=[change], objective=ENERGY, evaluations=2).rows
    assert row.same_plan == pytest.approx(-0.5) and row.replanned <= -0.5 + 1e-9
    (row,) = sensitivities(problem, plan, changes=[change], evaluations=2).rows
    assert row.same_plan == 0


def test_no_alternative_of_unknown_power_is_said_to_take_less():
    """Its part is unknown, and its devices are named; of those that are known the parts are of energy."""
    problem = problem_of(([("t4", 1, 2)], [("a100-40gb", 1, 2)]), 1e9)
    silent = replace(problem.cluster.catalogue["a100-40gb"], power_w=0.0)
    cluster = replace(problem.cluster, catalogue=problem.cluster.catalogue | {"a100-40gb": silent})
    problem = replace(problem, cluster=cluster)
    decoder = Decoder(problem)
    alone = lambda name: plan_for(replace(problem, constraints=replace(problem.constraints, forbidden_devices=(name,))))  # noqa: E731
    t4, a100 = alone("a100-40gb"), alone("t4")
    answers = SimpleNamespace(bill=decoder.bill(t4), measure=ENERGY, why=None, what=None)
    idea = Message("idea.pipeline")
    silent = Alternative(idea=idea, naive=True, bill=decoder.bill(a100), plan=a100)
    twice = Alternative(idea=idea, naive=True, bill=replace(answers.bill, energy_j=2 * answers.bill.energy_j), plan=t4)
    answers.why = Explanation(alternatives=(silent, twice), different=(), left_out=())
    answers.what = Sensitivities(rows=(), baseline_s=1.0, baseline=1.0, left_out=0)
    assert better(problem, answers) is None
    data = explanation_data(problem, t4, answers)
    assert [row["worse_by"] for row in data["alternatives"]] == [None, pytest.approx(1.0)]
    assert data["unsaid"] == ["a100-40gb"] and data["objective"] == "energy"
    head, *rows = describe_explanation(problem, t4, answers, None).split("\n\n")[1].splitlines()
    assert head.split()[2] == "energy"
    assert ["unknown" in row for row in rows] == [True, False] and "+100.0%" in rows[1]


def test_no_tensor_parallelism_is_said_of_a_program_that_has_none():
    """Its widest workers are single devices: what they make is data parallelism, and no worker a node."""
    problem = replace(problem_of(([("a100-40gb", 1, 4)],)), runtime=catalogue.runtime("deepspeed"))
    explainer = Explainer(problem, plan_for(problem))
    (outcome,) = (work() for idea, _, work in explainer.ideas() if idea == Message("idea.tensor_parallel"))
    assert outcome.bill is None and outcome.reason == Message("reason.not_run", runtime="deepspeed")


def test_changes_change_what_they_say():
    """Bandwidth both ways, nodes, memory; the rest stays, and the usual changes ask about all of them."""
    cluster = WIDE.cluster
    wider = faster_link(cluster, 0, 2, 5.0)
    assert (wider.bytes_per_s - cluster.bytes_per_s == np.array([[0, 0, 5], [0, 0, 0], [5, 0, 0]])).all()
    assert one_more_node(cluster, 1).devices == cluster.devices + 2
    assert more_memory(cluster, "t4", 2.0).pools[2].device.memory_bytes == 2 * cluster.pools[2].device.memory_bytes
    asked = [change.text for change in usual_changes(WIDE, np.zeros((3, 3)), more_gbps=3)]
    assert Message("change.node", count=2, device="a100-40gb", region="r0") in asked
    assert {text["more_gbps"] for text in asked if text.kind == "change.bandwidth"} == {3}
    assert {"change.latency", "change.memory"} < {text.kind for text in asked}


def test_links_that_do_not_exist_are_refused():
    """Unknown regions, a region with itself, two regions without a link."""
    for pair, message in ((("r0", "r9"), "found 'r9'"), (("r0", "r0"), "two different regions")):
        with pytest.raises(InputError, match=message):
            link_changes(WIDE.cluster, [pair], 1.0)
    apart = replace(WIDE.cluster, bytes_per_s=np.zeros((3, 3)))
    with pytest.raises(InputError, match="with a link between them"):
        link_changes(apart, [("r0", "r1")], 1.0)


def test_command_answers_in_words_and_in_json(tmp_path, capsys, wide_plan):
    """Tables on stdout; the same as data; a whole run; one link only."""
    path = tmp_path / "plan.json"
    files.write_plan(path, WIDE, wide_plan)
    out = tmp_path / "why.json"
    arguments = [str(path), "--quiet", "--count", "1", "--tokens", "1e9", "--link", "r0", "r1", "-o", str(out)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for words in ("naive plans", "rejected ideas", "whole run", "between r0 and r1"):
        assert words in text
    data = files.read_json(out)
    assert len(data["sensitivities"]) == 2
    assert data["run"]["steps"] == int(np.ceil(1e9 / (32 * 512)))
    assert all(row["possible"] or row["reason"] for row in data["alternatives"])
    assert all(row["worse_by"] == row["slower_by"] for row in data["alternatives"]) and not data["unsaid"]
