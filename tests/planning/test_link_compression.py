"""What links carry and how often regions meet: never slower by being allowed more, never more than is allowed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.gap import Bounds
from polygon.bounds.lower_bound import lower_bound_s
from polygon.cost.convergence import allowed, assumptions
from polygon.cost.estimate import estimate, worker_memory
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.message import Message, Violation
from polygon.domain.model import Batch
from polygon.domain.plan import PARITY_LEVELS, Constraints, Plan, Problem
from polygon.messages.report import describe_plan
from polygon.planning.alternatives import Explainer
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.link_compression import (
    _best_mode,
    _busiest,
    _with_inside,
    _with_sums_inside,
    activation_modes,
    gradient_mode,
    link_seconds,
)
from polygon.planning.search_engine import Effort, find_plan
from polygon.planning.warmup_depths import Pacing
from polygon.planning.what_ifs import sensitivities, usual_changes
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases
from tests.small_problems import small_cluster, small_plan

FAST = Effort(fluid_evaluations=400, exact_evaluations=16, patience=200)
MODEL = small_gpt()


def problem_of(groups, bytes_per_s=1e8, latency_s=0.02, **constraints):
    """A small model on linked regions given as lists of (type, nodes, devices per node)."""
    return Problem(
        cluster=cluster_of(
            groups, latency_s=latency_s, bytes_per_s=bytes_per_s, node_bytes_per_s=1e11, egress_usd_per_gb=0.02
        ),
        model=MODEL,
        batch=Batch(global_batch=32, seq_len=512),
        constraints=Constraints(**constraints),
    )


def at(problem, level, **lists):
    return replace(problem, constraints=replace(problem.constraints, parity=level, **lists))


PAIR = [("a100-40gb", 1, 2)], [("a100-40gb", 1, 2)]
"""Two equal regions: data parallelism between them is one of the good plans."""


def one_stage(decoder, size=2):
    """All devices as one stage, nothing tensor-parallel."""
    x = np.zeros((1, len(decoder.classes)), dtype=np.int64)
    for c, (pool, tp) in enumerate(decoder.classes):
        if tp == 1:
            x[0, c] = decoder.problem.cluster.pools[pool].devices
    return Allocation(workers=x, micro_batch_size=size)


@st.composite
def problems(draw):
    members = st.tuples(st.sampled_from(["a100-40gb", "t4"]), st.integers(1, 2), st.sampled_from([1, 2]))
    groups = draw(st.lists(st.lists(members, min_size=1, max_size=2), min_size=2, max_size=3))
    return problem_of(
        groups,
        bytes_per_s=draw(st.sampled_from([1e7, 1e8, 1e9, 1e11])),
        latency_s=draw(st.sampled_from([1e-4, 0.02, 0.2])),
    )


@settings(max_examples=cases(12), deadline=None)
@given(problem=problems(), seed=st.integers(0, 9))
def test_more_allowed_is_never_slower(problem, seed):
    """The plan of an allocation takes no longer at a level of parity than at any gentler one, and breaks no rule."""
    rng, before_s = np.random.default_rng(seed), np.inf
    allocation = Candidates(Decoder(problem), 3).random(rng)
    for level in PARITY_LEVELS:
        own = at(problem, level)
        decoder = Decoder(own)
        plan = decoder.decode(allocation)
        if isinstance(plan, Plan):
            step_s = decoder.bill(plan).step_s
            assert violations(own, plan) == []
            assert step_s <= before_s * (1 + 1e-9)
            assert step_s >= lower_bound_s(CostTables(own)) * (1 - 1e-9)
            before_s = step_s


@settings(max_examples=cases(8), deadline=None)
@given(problem=problems(), seed=st.integers(0, 9))
def test_exact_parity_gives_the_unpacked_plan(problem, seed):
    """With nothing lossy allowed nothing is packed and all reduce in every step; a list of `none` says the same."""
    allocation = Candidates(Decoder(problem), 3).random(np.random.default_rng(seed))
    plan, listed = (
        Decoder(p).decode(allocation) for p in (at(problem, "exact"), at(problem, "safe", compressions=("none",)))
    )
    if isinstance(plan, Plan):
        assert plan.local_steps == 1
        assert all({u.activations, u.activation_gradients, u.weight_gradients} == {"none"} for u in plan.links)
        assert listed.links == plan.links and listed.stages == plan.stages


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("bytes_per_s", "expected"), [(1e8, "int8"), (1e13, "none")])
def test_packing_pays_for_itself_or_is_left(bytes_per_s, expected, precision):
    """A slow link is packed; on one that carries a message faster than a T4 packs it, nothing is. Where products read
    8 bits, activations have 16 all the same."""
    problem = problem_of(([("t4", 1, 1)], [("t4", 1, 1)]), bytes_per_s=bytes_per_s)
    problem = replace(problem, batch=replace(problem.batch, precision=precision))
    tables = CostTables(problem)
    assert set(activation_modes(tables, 1, ("none", "int8"))[~np.eye(2, dtype=bool)]) == {expected}
    plain, packed = (link_seconds(tables, 1e6, 2, mode)[0, 1] for mode in ("none", "int8"))
    assert (packed < plain) == (expected == "int8")


def test_packing_takes_the_devices_time():
    """Workers that pack and unpack are busy longer with a micro-batch by the codec's memory traffic, those far only."""
    problem = problem_of(([("t4", 1, 1)], [("t4", 1, 1)]), bytes_per_s=1e8, parity="any")
    decoder = Decoder(problem)
    x = np.zeros((2, len(decoder.classes)), dtype=np.int64)
    x[0, 0] = x[1, 1] = 1
    plan = decoder.decode(Allocation(workers=x, micro_batch_size=1), relax=False)
    tables = CostTables(problem)
    bare = replace(plan, links=tuple(replace(use, activations="none") for use in plan.links))
    packed = replace(plan, links=tuple(replace(use, activations="int8") for use in plan.links))
    values = 512 * MODEL.hidden_size
    rate = problem.cluster.catalogue["t4"].memory_bytes_per_s
    more = step_times(packed, tables).schedule.forward_s - step_times(bare, tables).schedule.forward_s
    assert more == pytest.approx([values * 105 / rate, values * 21 / rate])


@pytest.mark.parametrize(("bytes_per_s", "packed"), [(1e8, True), (1e12, False)])
def test_links_inside_a_region_are_packed_where_that_pays(bytes_per_s, packed):
    """Two nodes of one region as two stages: a thin link between them is packed as if they were two regions."""
    thin = Link(latency_s=1e-4, bytes_per_s=bytes_per_s)
    cluster = cluster_of(([("a100-40gb", 2, 1)],), between=thin)
    model = replace(MODEL, tied_embeddings=False)  # sums of embeddings are packed between regions alone
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=32, seq_len=512))
    chain = np.zeros((2, 1), dtype=np.int64) + 1
    plan = Decoder(problem).decode(Allocation(workers=chain, micro_batch_size=2))
    assert {(use.source, use.target, use.activations, use.weight_gradients) for use in plan.links} == (
        {(0, 0, "int8", "none")} if packed else set()
    )
    assert violations(problem, plan) == []
    exact = Decoder(at(problem, "exact")).decode(Allocation(workers=chain, micro_batch_size=2))
    assert exact.links == ()
    assert estimate(problem, plan).step_s <= estimate(problem, exact).step_s
    regions = cluster_of(([("a100-40gb", 1, 1)],) * 2, latency_s=1e-4, bytes_per_s=bytes_per_s, between=thin)
    apart = replace(problem, cluster=regions)
    decoder = Decoder(apart)
    twin = decoder.decode(Allocation(workers=np.eye(2, dtype=np.int64), micro_batch_size=2))
    assert estimate(apart, twin).step_s == pytest.approx(estimate(problem, plan).step_s, rel=0.03)


def test_local_steps_save_the_link_and_cost_memory():
    """Regions that meet every H steps send H times less, are quicker on a thin link, and hold an outer optimizer, which
    ZeRO divides."""
    problem = problem_of(PAIR, bytes_per_s=1e7, parity="known")
    decoder = Decoder(problem)
    plan = decoder.decode(one_stage(decoder))
    assert plan.local_steps > 1
    assert violations(problem, plan) == []
    tables = CostTables(problem)
    every_step = replace(plan, local_steps=1)
    often, seldom = estimate(problem, every_step, tables), estimate(problem, plan, tables)
    assert seldom.step_s < often.step_s
    assert seldom.cross_region_bytes == pytest.approx(often.cross_region_bytes / plan.local_steps)
    assert sum(seldom.terms.values()) == pytest.approx(seldom.step_s)
    for zero, shards in ((0, 1), (1, 2)):
        plan = replace(plan, stages=(replace(plan.stages[0], zero=zero),))
        place = tables.placement(plan)
        held = [
            worker_memory(replace(plan, local_steps=steps), tables, place)[0].total_bytes
            for steps in (plan.local_steps, 1)
        ]
        assert held[0] - held[1] == pytest.approx(8 * MODEL.parameters / shards)


def test_local_steps_get_the_room_of_the_outer_optimizer():
    """A pipeline in each of two regions, whose micro-batches under way fill the memory: with local steps fewer are."""
    cluster = cluster_of([[("t4", 2, 1)]] * 2, latency_s=0.1, bytes_per_s=2e7)
    model = small_gpt(blocks=16, hidden_size=2304, head_dim=64, ffn_size=9216)
    limits = Constraints(local_steps=(1, 64))
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024), constraints=limits)
    plan = Decoder(problem).decode(Allocation(workers=np.ones((2, 2), dtype=np.int64), micro_batch_size=1))
    assert plan.local_steps == 64
    assert violations(problem, plan) == []
    tables = CostTables(problem)
    plain = replace(plan, local_steps=1, spans=tuple((64,) * stage.width for stage in plan.stages))
    filled = Pacing(plain, tables).best()[0]
    assert sum(map(sum, filled.spans)) > sum(map(sum, plan.spans))


@settings(max_examples=cases(20), deadline=None)
@given(steps=st.integers(2, 500), bytes_per_s=st.sampled_from([1e7, 1e8, 1e9]))
def test_a_step_is_its_own_work_and_its_part_of_the_meeting(steps, bytes_per_s):
    """T(H) = T(no link's time) + (whole reduction) / H: the more local steps the shorter, towards regions alone."""
    problem = problem_of(PAIR, bytes_per_s=bytes_per_s, parity="any")
    decoder = Decoder(problem)
    plan = decoder.decode(one_stage(decoder))
    tables = CostTables(problem)
    times = step_times(replace(plan, local_steps=steps), tables)
    (whole,) = step_times(replace(plan, local_steps=1), tables).reductions
    alone_s = times.step_s - whole.streamed_s / steps
    later = step_times(replace(plan, local_steps=2 * steps), tables)
    assert later.step_s == pytest.approx(alone_s + whole.streamed_s / (2 * steps))
    assert later.step_s < times.step_s


def test_pipelines_across_regions_take_no_local_steps():
    """Where a micro-batch crosses regions there is nothing to train by itself; the checker says so too."""
    problem = problem_of(PAIR, parity="any")
    decoder = Decoder(problem)
    x = np.zeros((2, len(decoder.classes)), dtype=np.int64)
    columns = [decoder.classes.index((pool, 1)) for pool in (0, 1)]
    x[0, columns[0]] = x[1, columns[1]] = 2
    plan = decoder.decode(Allocation(workers=x, micro_batch_size=2))
    assert plan.local_steps == 1
    assert violations(problem, replace(plan, local_steps=4))[0].kind == "plan.local_steps_regions"


def test_what_is_not_allowed_names_the_level_it_needs():
    """int4 gradients and local steps under the default tolerance: refused, with the level that allows them."""
    problem = problem_of(PAIR, bytes_per_s=1e7)
    decoder = Decoder(problem)
    plan = decoder.decode(one_stage(decoder))
    plan = replace(
        plan, stages=tuple(replace(stage, zero=1) for stage in plan.stages)
    )  # local steps need whole weights
    int4 = replace(plan, links=tuple(replace(use, weight_gradients="int4") for use in plan.links))
    assert violations(problem, int4)[0]["why"] == Message("why.parity", parity="safe", needed="known")
    why = Message("why.parity", parity="safe", needed="known")
    refused = Violation("plan.local_steps_not_allowed", local_steps=30, why=why)
    assert refused in violations(problem, replace(plan, local_steps=30))
    assert violations(at(problem, "known"), replace(plan, local_steps=30)) == []
    assert violations(at(problem, "safe", local_steps=(1, 30)), replace(plan, local_steps=30)) == []


def test_the_search_answers_the_tolerance_and_says_what_it_assumes():
    """A thin link: `known` finds local steps and is quicker; report, why-not table and what-ifs tell of it."""
    problem = problem_of(PAIR, bytes_per_s=2e7, latency_s=0.1)
    problem = replace(problem, batch=Batch(global_batch=512, seq_len=512))
    safe = find_plan(problem, np.random.default_rng(0), effort=FAST)
    known = find_plan(at(problem, "known"), np.random.default_rng(0), effort=FAST)
    assert safe.plan.local_steps == 1 < known.plan.local_steps
    assert known.value_s < 0.9 * safe.value_s
    tables = CostTables(at(problem, "known"))
    priced, bounds, limited = estimate(tables.problem, known.plan, tables), Bounds.of(tables), Message("limits.none")
    text = describe_plan(tables.problem, known.plan, priced, bounds, limited)
    assumed = assumptions(tables.problem, known.plan)
    assert [line.kind for line in assumed].count("loss.equal_tokens") == 1 and len(assumed) > 1
    assert all(str(line) in text for line in assumed)
    ideas = {a.idea: a for a in Explainer(at(problem, "known"), known.plan).explain(count=0).alternatives}
    assert ideas[Message("idea.no_local_steps")].bill.step_s > known.value_s
    rejected = {a.idea: a for a in Explainer(problem, safe.plan).explain(count=0).alternatives}
    reason = rejected[Message("idea.parity", level="known")].reason
    assert reason.kind == "reason.at_parity" and reason["level"] == "safe" and reason["more"]["value"] <= 0
    changes = [c for c in usual_changes(problem, np.zeros((2, 2))) if c.parity]
    assert [c.parity for c in changes] == ["known", "any"]
    rows = sensitivities(problem, safe.plan, changes=changes[:1], evaluations=4).rows
    assert rows[0].replanned < 0


def test_regions_inside_which_nothing_travels_get_no_packing():
    """A pipeline that leaves each region with every message has none; where two stages follow one another there is."""
    problem = problem_of(PAIR)
    problem = replace(problem, cluster=small_cluster(2, 2))
    for devices, inside in (((0, 2, 1), []), ((2, 0, 1), [(0, 0)]), ((0, 1, 2), [(0, 0)]), ((0, 2, 3), [(1, 1)])):
        plan = small_plan(problem.cluster, [(0, 2), (2, 4), (4, 6)], [[d] for d in devices], [[0, 0, 0]] * 4)
        found, pairs = _with_inside(problem, plan)
        assert pairs == inside
        assert {(use.source, use.target) for use in found.links if use.source == use.target} == set(inside)


def test_regions_that_send_to_others_may_pack_their_own_sums_as_well():
    """Two regions of two nodes behind slow TCP: a link between the regions stands for none inside them."""
    problem = Problem(
        cluster=cluster_of(
            ([("a100-40gb", 2, 1)],) * 2, bytes_per_s=1e8, between=Link(latency_s=1e-4, bytes_per_s=1e8)
        ),
        model=MODEL,
        batch=Batch(global_batch=32, seq_len=512),
    )
    decoder = Decoder(problem)
    plan = decoder.decode(one_stage(decoder), relax=False)
    between = tuple(use for use in plan.links if use.source != use.target)
    assert {(use.source, use.target) for use in between} == {(0, 1), (1, 0)}
    found, pairs = _with_sums_inside(decoder.tables, replace(plan, links=between), allowed(problem))
    assert pairs == [(0, 0), (1, 1)]
    assert [(use.source, use.target) for use in found.links[len(between) :]] == pairs


@pytest.mark.parametrize(
    ("bytes_per_s", "card", "mode"), [(1e7, 1e13, "int8"), (1e13, 1e13, "none"), (1e13, 1e8, "int8")]
)
def test_gradients_are_packed_as_is_quickest_for_a_block_s(bytes_per_s, card, mode):
    """Over a thin link, or a thin card before a wide one, a quarter of the bytes; where a link takes next to nothing
    packing itself would take longer."""
    cluster = cluster_of(PAIR, bytes_per_s=bytes_per_s, between=Link(latency_s=1e-5, bytes_per_s=card))
    tables = CostTables(replace(problem_of(PAIR), cluster=cluster))
    assert gradient_mode(tables, ("none", "int8")) == mode


def test_links_without_sums_pack_no_weight_gradients():
    """A pipeline with a stage a region: its report says nothing of gradients that travel nowhere. Where both regions
    hold the tied weight they add that up."""
    for tied, packed in ((False, False), (True, True)):
        problem = replace(problem_of(PAIR, bytes_per_s=1e7), model=small_gpt(tied_embeddings=tied))
        decoder = Decoder(problem)
        workers = np.zeros((2, len(decoder.classes)), dtype=np.int64)
        workers[[0, 1], [decoder.classes.index((pool, 1)) for pool in (0, 1)]] = 2
        plan = decoder.decode(Allocation(workers=workers, micro_batch_size=2))
        assert any(use.activations != "none" for use in plan.links)
        assert any(use.weight_gradients != "none" for use in plan.links) == packed
        assert ("int8 weight gradients" in " ".join(map(str, assumptions(problem, plan)))) == packed


def test_pairs_of_regions_go_by_the_micro_batches_between_them():
    """Three from r0 to r1 and one to r2, both ways; a stage that stays in its region crosses nothing."""
    problem = replace(problem_of(PAIR), cluster=small_cluster(2, 1, 1))
    routes = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]
    plan = small_plan(problem.cluster, [(0, 2), (2, 4), (4, 6)], [[0], [1], [2, 3]], routes)
    assert _busiest(problem, plan) == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert _busiest(problem, replace(plan, links=plan.links[1:])) == [(1, 0), (0, 2), (2, 0)]


def test_a_packing_that_wins_too_little_is_left():
    """`gain`: a part of the best value so far."""
    plan = small_plan(small_cluster(1, 1), [(0, 3), (3, 6)], [[0], [1]], [[0, 0]] * 4)
    pair = [(0, 1)]

    def value(candidate):
        return {"none": 1.0, "int8": 0.95}[candidate.link_use(0, 1).activations]

    for gain, expected in ((0.04, "int8"), (0.06, "none")):
        chosen, best = _best_mode(plan, 1.0, "activations", pair, ["none", "int8"], value, gain)
        assert (chosen.link_use(0, 1).activations, best) == (expected, value(chosen))
