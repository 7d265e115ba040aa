"""Every toggle of the page changes the numbers that it should, in the direction that it must."""

import json
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest

from polygon import Cluster
from polygon.cost.estimate import estimate
from polygon.cost.money import unpriced
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.messages.report import size
from polygon.web.sliders import NO_CHANGE, Changes, flat_s, keeps_bound, price, timed
from polygon.web.timeline import KINDS, timeline
from polygon.web.views import advice, front, sensitivities, traffic, view
from tests.cost.test_step_times import far_problem, replicas
from tests.exported_plans import DIMENSIONS, drawn, of_dimensions, wide


@pytest.fixture(scope="module")
def case():
    problem, plan = wide()
    return problem, plan, CostTables(problem)


def changed(case, **changes):
    problem, plan, tables = case
    return price(problem, plan, Changes.model_validate(changes), tables)


def test_no_change_is_the_plans_own_estimate(case):
    """Without changes the what-if is the estimate, to the last digit."""
    assert changed(case).estimate == estimate(*case)


@pytest.mark.parametrize(
    "changes",
    [{"bandwidth_factor": 2.0}, {"latency_factor": 3.0}, {"accumulation": 2}, {"local_steps": 8}, {"prefetch": 1.0},
     {"device_factors": {"v100-16gb": 2.0}}, {"activations": "int4"}, {"weight_gradients": "int4"}, {"streams": 2},
     {"price_factor": 2.0}, {"price_factor": 2.0, "bandwidth_factor": 2.0}],
)  # fmt: skip
def test_kept_tables_answer_like_fresh_ones(case, changes):
    """What is kept from question to question (places, memory) never changes an answer."""
    problem, plan, _ = case
    for other in ({}, changes, {}):
        fresh = price(problem, plan, Changes.model_validate(other), CostTables(problem))
        assert changed(case, **other).estimate == fresh.estimate


def test_links_of_a_view_are_between_regions_in_use(case):
    """Both ways of every two: of those that the plan leaves out nothing can go over a link."""
    problem, plan, _ = case
    used = {problem.cluster.regions[problem.cluster.pools[p].region].name for p in plan.devices_of_pools}
    more = tuple(replace(region, name=f"idle-{i}") for i, region in enumerate(problem.cluster.regions))
    n = 2 * len(more)
    cluster = replace(
        problem.cluster,
        regions=(*problem.cluster.regions, *more),
        latency_s=np.full((n, n), 0.01),
        bytes_per_s=np.full((n, n), 1e9),
        capacity_bytes_per_s=np.full((n, n), np.inf),
    )
    for one in (problem, replace(problem, cluster=cluster)):
        links = view(price(one, plan, NO_CHANGE, CostTables(one)), bound=False)["links"]
        assert {(link["source"], link["target"]) for link in links} == set(permutations(used, 2)) and len(used) > 1


def test_formulas_have_no_time_that_rounding_has_left(case):
    """A term that came out at -9e-16 s is said to be 0; speeds of 10,000 tokens/s and more have no power of ten."""
    priced = changed(case)
    terms = priced.estimate.terms | {"pipeline": -9e-16}
    priced = replace(priced, estimate=replace(priced.estimate, terms=terms, tokens_per_s=165358.4))
    said = {row["key"]: str(row["numbers"]) for row in view(priced, bound=False)["formulas"]}
    assert " pipeline 0 + " in said["step"] and said["tokens"].endswith(" = 165,358/s")


@pytest.mark.parametrize("dp", [1, 4])
def test_what_tied_embeddings_send_is_in_the_volume_of_their_time(dp):
    """Two stages of which both hold the weight: no stage of one worker has a sum of its own, the weight has; its values
    are summed once, by all who hold it."""
    nodes = [{"device": "a100-40gb", "count": 2, "devices_per_node": 4}]
    cluster = Cluster.from_dict({"regions": [{"name": "a", "nodes": nodes}]}).data
    problem = Problem(cluster=cluster, model=catalogue.model("gpt2"), batch=Batch(global_batch=16, seq_len=512))
    priced = price(problem, uniform_plan(problem, ParallelConfig(dp=dp, pp=2)), Changes())
    shown, model, each = traffic(priced), problem.model, problem.batch.gradient_bytes
    assert priced.times.tied_s > 0 and shown["dp_s"] >= priced.times.tied_s
    own = model.parameters - model.tied_values  # beside what the head holds once more
    assert shown["dp_bytes"] == 2 * each * ((dp - 1) * own + (2 * dp - 1) * model.tied_values)
    [said] = [str(row["numbers"]) for row in view(priced, bound=False)["formulas"] if row["key"] == "dp_bytes"]
    assert f" + 1 × 2 × {2 * dp - 1} × {model.tied_values:,} / 1) × {each} B = {size(shown['dp_bytes'])}" in said


def test_the_reduction_of_the_step_is_explained_by_its_parts():
    """Where ZeRO-3 sums micro-batch by micro-batch, that time is in the computing and is said to be: what is left of
    the step's reduction are the weights of the first layers."""
    problem, _ = wide()
    nodes = [{"device": "a100-40gb", "count": 2, "devices_per_node": 4}]
    cluster = Cluster.from_dict({"regions": [{"name": "a", "nodes": nodes}]}).data
    problem = replace(problem, cluster=cluster, batch=replace(problem.batch, global_batch=64))
    plan = uniform_plan(problem, ParallelConfig(dp=4, pp=2, zero=3, micro_batch_size=1, recompute="full"))
    priced = price(problem, plan, Changes())
    shown = traffic(priced)
    assert shown["dp_bytes"] > 0 and shown["dp_within"]
    assert priced.times.first_s > 0
    assert shown["dp_s"] == pytest.approx(priced.estimate.terms["reduction"])
    said = {row["key"]: str(row["numbers"]) for row in view(priced, bound=False)["formulas"]}
    assert said["dp_s"].startswith("sums micro-batch by micro-batch within compute")
    plan = uniform_plan(problem, ParallelConfig(dp=4, pp=2, zero=1, micro_batch_size=1, recompute="full"))
    priced = price(problem, plan, Changes())
    assert not traffic(priced)["dp_within"] and max(priced.reductions_s) > 0


def test_exposed_communication_is_what_the_terms_of_the_step_say():
    """Transfer and reduction, whatever makes them long; what is hidden is a part of all."""
    for problem, plan, tables in drawn(12):
        priced = price(problem, plan, Changes(), tables)
        found, terms = traffic(priced), priced.estimate.terms
        assert found["exposed_s"] == pytest.approx(terms["transfer"] + terms["reduction"])
        assert found["exposed_s"] <= found["total_s"] and 0 <= found["hidden"] <= 1


def test_no_link_sends_for_longer_than_the_pipeline_runs():
    """However slow links are: what a worker sends both ways, and to several others, goes on at the same time."""
    for problem, plan, tables in drawn(30):
        priced = price(problem, plan, Changes(bandwidth_factor=0.05), tables)
        assert 0 <= traffic(priced)["pp_s"] <= priced.times.ends_s.max() * (1 + 1e-9)


def test_packing_sends_fewer_bytes(case):
    """int4 moves less than int8, which moves less than nothing packed; of activations and of gradients."""
    for kind in ("activations", "weight_gradients"):
        moved = [changed(case, **{kind: mode}).estimate.cross_region_bytes for mode in ("int4", "int8", "none")]
        assert moved == sorted(moved) and moved[0] < moved[-1]


def test_gradients_are_packed_alike_on_all_links_that_add_up_together(case):
    """A gentler packing of one direction changes nothing: leaders add up the same numbers; a stronger one is all's."""
    links = changed(case).estimate.links
    one = max(links, key=lambda use: use.gradient_bytes)
    ends = {"source": one.source, "target": one.target}
    gentler, stronger = (
        changed(case, links=[ends | {"weight_gradients": mode}]).estimate.links for mode in ("none", "int4")
    )
    assert [use.gradient_bytes for use in gentler] == [use.gradient_bytes for use in links]
    fewer = {(new.source, new.target) for old, new in zip(links, stronger, strict=True) if new != old}
    assert {(one.source, one.target), (one.target, one.source)} <= fewer
    assert all(new.gradient_bytes <= old.gradient_bytes for old, new in zip(links, stronger, strict=True))


def test_accumulation_spreads_one_reduction_over_more_work(case):
    """k times the micro-batches take less than k times the step: one reduction serves them all."""
    before, after = changed(case), changed(case, accumulation=4)
    assert after.plan.micro_batches == 4 * before.plan.micro_batches
    assert after.estimate.step_s < 4 * before.estimate.step_s
    assert after.estimate.tokens_per_s > before.estimate.tokens_per_s


def test_local_steps_divide_the_meeting_of_regions(case):
    """With H local steps each step reduces inside the regions, and every H-th once more over all three levels."""
    before, after = changed(case), changed(case, local_steps=4)
    for seconds, old, new in zip(after.reductions_s, before.times.reductions, after.times.reductions, strict=True):
        assert new.across_s == 0 < old.across_s
        assert new.total_s == pytest.approx(old.node_s + old.region_s)
        assert seconds == pytest.approx(new.streamed_s + old.streamed_s / 4)


def test_prefetch_never_hurts_the_end_of_the_schedule(case):
    """Letting micro-batches pass hides messages: the step with it is no longer than without."""
    assert changed(case, prefetch=1.0).estimate.step_s <= changed(case, prefetch=0.0).estimate.step_s


def test_flat_algorithms_are_their_formulas(case):
    """p workers, worst hop a + n / b: the three closed forms of the module's docstring agree on a and n / b."""
    problem, plan, tables = case
    times = step_times(plan, tables)
    for s, stage in enumerate(plan.stages):
        p = stage.width
        ring, sharded, central = (
            flat_s(problem, plan, tables, times, s, name) for name in ("ring", "sharded-server", "central-server")
        )
        # Three equations in the two unknowns a and n / b.
        rows = np.array([[2 * (p - 1), 2 * (p - 1) / p], [2, 2 * (p - 1) / p], [2, 2 * (p - 1)]])
        found, *_ = np.linalg.lstsq(rows, np.array([ring, sharded, central]), rcond=None)
        assert rows @ found == pytest.approx([ring, sharded, central])
        assert (found >= 0).all()


def test_algorithm_replaces_the_reduction_alone(case):
    """Everything before it and the update stay, whichever stage is the last; the reduction becomes the server's."""
    before, after = changed(case), changed(case, algorithm="central-server")
    np.testing.assert_array_equal(after.times.ends_s, before.times.ends_s)
    assert after.estimate.terms["update"] == pytest.approx(before.estimate.terms["update"])
    assert sum(after.estimate.terms.values()) == pytest.approx(after.estimate.step_s)
    assert after.estimate.step_s != before.estimate.step_s


def test_one_chunk_is_the_whole_message(case):
    """A chunk as large as the buffer changes nothing; a tiny one pays its latencies many times."""
    before = changed(case)
    assert changed(case, chunk_mb=100_000.0).estimate.step_s == pytest.approx(before.estimate.step_s)
    assert changed(case, chunk_mb=0.01).estimate.step_s > before.estimate.step_s


def test_without_overlap_the_whole_reduction_follows_the_backward(case):
    """Overlap 1 is the plan; with 0 every stage reduces for all of its time after its last backward; never faster."""
    before, after = changed(case), changed(case, overlap=0.0)
    assert after.reductions_s == before.reductions_s
    assert after.bounds == before.bounds
    assert after.estimate.step_s > before.estimate.step_s
    assert changed(case, overlap=0.5).estimate.step_s <= after.estimate.step_s
    for s, whole_s in enumerate(after.reductions_s):
        begin_s, end_s = after.times.reduction_span_s(s)
        assert begin_s == after.times.ends_s[after.times.place.stage == s].max()
        assert end_s - begin_s == pytest.approx(whole_s)


def test_where_regions_lead_by_turns_the_sliders_price_it_too():
    """They begin from the plan's own step, the mean over a cycle of regions, and never say less; a flat algorithm, for
    which each waits for all, has no such mean."""
    problem = far_problem(2, 2e9)
    rate = problem.cluster.bytes_per_s.copy()
    rate[1, 0] /= 4
    problem = replace(problem, cluster=replace(problem.cluster, bytes_per_s=rate))
    case = problem, replicas(problem), CostTables(problem)
    planned = changed(case)
    assert planned.times.ways is not None
    assert changed(case, overlap=1 - 1e-9).estimate.step_s == pytest.approx(planned.estimate.step_s)
    assert changed(case, chunk_mb=100_000.0).estimate.step_s == pytest.approx(planned.estimate.step_s)
    steps = [changed(case, overlap=part).estimate.step_s for part in (1.0, 0.5, 0.0)]
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert changed(case, chunk_mb=0.01).estimate.step_s > planned.estimate.step_s
    assert changed(case, algorithm="ring").times.ways is None


def test_a_runtime_that_hides_nothing_has_nothing_to_lose():
    """The slider of overlap takes away from what the runtime sums beside backward, and never adds any."""
    problem = far_problem(2)
    problem = replace(problem, runtime=replace(problem.runtime, dp_overlap="none"))
    case = problem, replicas(problem), CostTables(problem)
    assert changed(case, overlap=0.5).estimate.step_s == changed(case).estimate.step_s


def test_links_and_prices(case):
    """More bandwidth or less latency is never slower; few streams on long links are; prices scale money."""
    before = changed(case).estimate
    assert changed(case, bandwidth_factor=4.0).estimate.step_s < before.step_s
    assert changed(case, latency_factor=0.25).estimate.step_s < before.step_s
    assert changed(case, streams=1).estimate.step_s > before.step_s
    assert changed(case, price_factor=2.0).estimate.cost_usd == pytest.approx(2 * before.cost_usd)


def test_more_bandwidth_is_more_for_all_flows_together(case):
    """A link's capacity, which flows share, goes with its rate: of all links, and of one."""
    problem, plan, _ = case
    rate = problem.cluster.bytes_per_s
    cluster = problem.cluster.with_links(problem.cluster.latency_s, rate, np.where(np.isfinite(rate), rate / 50, rate))
    problem = replace(problem, cluster=cluster)
    before, tables = step_times(plan, CostTables(problem)).step_s, CostTables(problem)
    more = price(problem, plan, Changes(bandwidth_factor=4.0), tables)
    assert more.estimate.step_s < before
    a, b = (region.name for region in cluster.regions[:2])
    links = [{"source": x, "target": y, "bandwidth_factor": 4.0} for x, y in ((a, b), (b, a))]
    one = price(problem, plan, Changes.model_validate({"links": links}), tables).problem.cluster
    assert one.capacity_bytes_per_s[0, 1] == 4 * cluster.capacity_bytes_per_s[0, 1]
    assert (one.capacity_bytes_per_s[2:] == cluster.capacity_bytes_per_s[2:]).all()


def test_advice_is_computed_for_all_three_cases(case):
    """Each measure's step is what the same change prices to."""
    problem, plan, tables = case
    found = advice(problem, plan, Changes(), tables)
    assert set(found["cases"]) == {"balanced", "computation", "communication"}
    for measures in found["cases"].values():
        for measure in measures[:2]:
            assert measure["step_s"] == changed(case, **measure["change"]).estimate.step_s
        for measure in measures:  # of a larger batch the step says nothing: what counts is that of as many tokens
            assert measure["batch_factor"] == measure["change"].get("accumulation", 1)
            step_s = changed(case).estimate.step_s / (1 + measure["speedup"])
            assert measure["step_s"] / measure["batch_factor"] == pytest.approx(step_s)


def test_sensitivities_are_sorted_and_real(case):
    """Most first; the first one's saving is reproduced by asking for it."""
    problem, plan, tables = case
    rows = sensitivities(problem, plan, Changes(), tables)
    assert [row["saved_s"] for row in rows] == sorted((row["saved_s"] for row in rows), reverse=True)
    best = rows[0]
    factor = 2.0 if best["what"] == "bandwidth_factor" else 0.5
    pair = [best["source"], best["target"]]
    links = [{"source": a, "target": b, best["what"]: factor} for a, b in (pair, pair[::-1])]
    saved = changed(case).estimate.step_s - changed(case, links=links).estimate.step_s
    assert saved == pytest.approx(best["saved_s"])


def tiles(row):
    """Bars of a row that its worker itself does, in the order of time."""
    return sorted((a, b) for kind, _, a, b in row["bars"] if KINDS[kind] in ("F", "B", "exposed", "update"))


def test_timeline_names_every_moment_of_every_worker(case):
    """Work, exposed communication and update never overlap; what they leave of the step is the bubble's share."""
    stages = frozenset(range(len(case[1].stages)))
    shown = timeline(changed(case), opened=stages)
    assert len(shown["rows"]) == shown["workers"]
    free_s = []
    for row in shown["rows"]:
        mine = tiles(row)
        assert mine[0][0] >= 0 and mine[-1][1] <= shown["step_s"] * (1 + 1e-6)
        assert all(a[1] <= b[0] + 1e-5 for a, b in pairwise(mine))
        free_s.append(shown["step_s"] - sum(b - a for a, b in mine))
    assert np.mean(free_s) / shown["step_s"] == pytest.approx(shown["bubble_share"], abs=1e-4)


def test_a_stage_that_sums_nothing_apart_has_no_reduction_in_its_rows():
    """One worker, and sums micro-batch by micro-batch within the computing: no bar says that something is hidden."""
    nodes = [{"device": "a100-40gb", "count": 1, "devices_per_node": 2}]
    cluster = Cluster.from_dict({"regions": [{"name": "a", "nodes": nodes}]}).data
    problem = replace(wide()[0], cluster=cluster, model=catalogue.model("opt-350m"))
    tables, shown = CostTables(problem), {}
    for pp, dp, zero in ((2, 1, 0), (1, 2, 0), (1, 2, 3)):
        plan = uniform_plan(problem, ParallelConfig(pp=pp, dp=dp, tp=1, micro_batch_size=1, zero=zero))
        priced = price(problem, plan, NO_CHANGE, tables)
        rows = timeline(priced, opened=frozenset(range(pp)))["rows"]
        reduces = {bar[0] == KINDS.index("reduce") for row in rows for bar in row["bars"]}
        shown[pp, dp, zero] = max(priced.reductions_s) > 0, True in reduces
    assert shown == {(2, 1, 0): (False, False), (1, 2, 0): (True, True), (1, 2, 3): (False, False)}


def test_devices_of_several_stages_are_busy_idle_or_waiting_once():
    """Interleaved: a turn of one stage is no bubble of the other on its devices, and all moments of these sum up."""
    problem, plan, tables = of_dimensions(*DIMENSIONS[1])
    assert plan.chunks == 2
    priced = price(problem, plan, Changes(), tables)
    times, step_s = priced.times, priced.estimate.step_s
    shown = timeline(priced, opened=frozenset(range(len(plan.stages))))
    holders = len(times.schedule.holder) // plan.chunks
    counts = np.bincount(times.schedule.routes.ravel())
    busy_s = (counts * (times.schedule.forward_s + times.schedule.backward_s)).reshape(plan.chunks, holders).sum(axis=0)
    parts = busy_s.mean() / step_s + shown["bubble_share"] + shown["exposed_share"]
    assert parts + times.update_s.mean() / step_s == pytest.approx(1, abs=1e-6)
    for row in shown["rows"]:
        mine = sorted((a, b) for kind, _, a, b in row["bars"] if kind < KINDS.index("reduce"))
        assert all(a[1] <= b[0] + 1e-5 for a, b in pairwise(mine))
    stages = [max(group["busy"] for group in stage["workers"]) for stage in view(priced)["stages"]]
    groups = len(plan.stages) // plan.chunks
    assert stages[:groups] == stages[groups:]
    assert max(stages) == pytest.approx(busy_s.max() / step_s)
    assert sum(priced.estimate.terms.values()) == pytest.approx(step_s)
    assert priced.estimate.terms["compute"] > 0.8 * busy_s.max()
    assert priced.estimate.terms["pipeline"] >= 0


def test_a_closed_stage_has_one_row_and_a_window_only_what_it_shows(case):
    """The worker that ends last stands for its stage; a window gives the bars that lie in it, as they are."""
    priced = changed(case)
    whole = timeline(priced)
    assert [row["stage"] for row in whole["rows"]] == list(range(len(case[1].stages)))
    low, high = 0.3 * whole["step_s"], 0.5 * whole["step_s"]
    part = timeline(priced, from_s=low, to_s=high)
    for row, some in zip(whole["rows"], part["rows"], strict=True):
        assert some["bars"] == [bar for bar in row["bars"] if bar[3] > low and bar[2] < high]


def test_bands_keep_the_time_of_every_kind(case, monkeypatch):
    """Too many bars to draw become bands that sum to the same seconds, in a small answer."""
    priced = changed(case)
    exact = timeline(priced)
    monkeypatch.setattr("polygon.web.timeline.MOST_BARS_A_ROW", 3)
    coarse = timeline(priced)
    for row, bands in zip(exact["rows"], coarse["rows"], strict=True):
        for kind in range(4):
            whole_s = sum(b - a for k, _, a, b in row["bars"] if k == kind)
            band_s = sum((b - a) * parts[kind] for a, b, parts in bands["bands"])
            assert band_s == pytest.approx(whole_s, abs=2e-3 * exact["step_s"])
    assert len(json.dumps(coarse)) < 300_000


def test_free_links_leave_bubble_and_no_transfer_exposed(case):
    """With links a hundred times better, waiting for communication shrinks, and bubbles take their part."""
    problem, plan, tables = case
    before = timeline(changed(case))
    after = timeline(price(problem, plan, Changes(latency_factor=0.01, bandwidth_factor=100.0), tables))
    assert after["exposed_share"] < before["exposed_share"]


def test_faster_devices_compute_in_less_time(case):
    """Twice as fast ones of a type need half the time at the roofline; unknown types are refused."""
    problem, _, _ = case
    (name,) = {pool.device.name for pool in problem.cluster.pools}
    before, after = changed(case), changed(case, device_factors={name: 2.0})
    assert after.estimate.terms["compute"] < 0.7 * before.estimate.terms["compute"]
    assert after.bounds.step.seconds < before.bounds.step.seconds
    with pytest.raises(InputError, match="device_factors: found 'abacus'"):
        changed(case, device_factors={"abacus": 2.0})


def test_front_marks_what_nothing_beats():
    """A point is marked exactly if no other is at least as good in both and better in one; what nobody said the
    price or power of beats none, and is not marked."""
    at = ((1, 5, 1), (2, 2, 2), (3, 3, 0), (5, 1, 1), (1, 6, 9))
    points = [{"step_s": a, "usd_per_step": b, "energy_j": c, "unpriced": []} for a, b, c in at]
    unknown = {"step_s": 1, "usd_per_step": 0, "energy_j": 0, "unpriced": ["mine"]}
    rows = front([*points, unknown])
    assert [row["best"] for row in rows] == [True, True, False, True, False, False]
    assert [row["best_in_energy"] for row in rows] == [True, False, False, False, False, False]
    assert [row["best"] for row in front([*points, unknown | {"unpriced": []}])] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("changes", "holds"),
    [({"bandwidth_factor": 0.5}, True), ({"latency_factor": 4.0}, True), ({"streams": 1}, True),
     ({"prefetch": 0.0}, True), ({"price_factor": 2.0}, True), ({"overlap": 0.5, "bandwidth_factor": 0.5}, True),
     ({"bandwidth_factor": 2.0}, False), ({"latency_factor": 0.5}, False), ({"algorithm": "ring"}, False),
     ({"chunk_mb": 1.0}, False), ({"weight_gradients": "int4"}, False), ({"local_steps": 512}, False)],
)  # fmt: skip
def test_the_problems_own_bound_holds_for_what_is_no_better(case, changes, holds):
    """It is that of every plan that keeps the problem's limits (`int4` and 512 local steps do not), be it over slower
    links, or dearer; of others it is that of compute and path, which is weaker."""
    problem, plan, _ = case
    roomy = replace(problem, constraints=replace(problem.constraints, memory_headroom=0.0))
    case = roomy, plan, CostTables(roomy)
    before, after = changed(case).bounds, changed(case, **changes)
    assert after.estimate.step_s > after.bounds.step.seconds
    assert after.bounds.step == before.step if holds else after.bounds.step.seconds < before.step.seconds
    assert keeps_bound(changes) == holds or "weight_gradients" in changes or "local_steps" in changes
    assert after.bounds.usd == pytest.approx(changes.get("price_factor", 1.0) * before.usd) or not holds


@pytest.mark.parametrize(
    ("limits", "changes", "holds"),
    [({}, {"weight_gradients": "int4"}, False), ({}, {"local_steps": 512}, False),
     ({"most_step_s": 0.01, "egress_bytes_per_step": {"*": 0.0}, "memory_headroom": 0.0}, {"prefetch": 0.0}, True),
     ({"most_usd_per_hour": 1.0}, {"price_factor": 2.0}, False),
     ({"forbidden_devices": ("v100-16gb",)}, {}, False), ({"memory_headroom": 0.95}, {}, False)],
)  # fmt: skip
def test_a_plan_that_breaks_a_limit_has_one_bound_tried_or_kept(case, limits, changes, holds):
    """The problem's own where that knows nothing of the limit, as of a deadline; else compute and path of all devices,
    which no plan beats, the one that breaks the limit among them."""
    problem, plan, _ = case
    problem = replace(problem, constraints=replace(problem.constraints, **limits))
    tables = CostTables(problem)
    tried = price(problem, plan, Changes.model_validate(changes), tables)
    assert tried.broken or tried.over_memory_bytes
    like, other, *_ = timed(problem, plan, tried.changes, tables)
    kept = price(like, other, NO_CHANGE, tables if like is problem else None)
    for it in (tried, kept):
        assert ("regions" in it.bounds.step.parts) == holds
        assert 0 < it.bounds.step.seconds < it.estimate.step_s
    assert kept.bounds.step.seconds == pytest.approx(tried.bounds.step.seconds)


def test_cheaper_devices_under_a_budget_by_the_hour_may_be_more(case):
    """So the plan's own bound, which is that of what could be had at the old prices, is not that of the new."""
    problem, plan, _ = case
    now = changed(case).estimate
    budget = now.cost_usd / now.step_s * 4000
    problem = replace(problem, constraints=replace(problem.constraints, most_usd_per_hour=budget))
    cheaper = price(problem, plan, Changes(price_factor=0.25))
    assert not cheaper.broken and "regions" not in cheaper.bounds.step.parts


def test_advice_says_what_the_program_does_not_run():
    """Packings and local steps, which another program than ours has not; deeper prefetch is no such thing."""
    known = []
    for plans in ("any", "uniform"):
        problem = far_problem(2)
        problem = replace(problem, runtime=replace(problem.runtime, plans=plans))
        plan = replace(replicas(problem), links=(LinkUse(source=0, target=1), LinkUse(source=1, target=0)))
        cases = advice(problem, plan, NO_CHANGE, CostTables(problem))["cases"]
        rows = [row for kind in cases.values() for row in kind]
        known.append({row["key"] for row in rows if any(m.kind == "reason.not_run" for m in row["broken"])})
    assert known == [set(), {"pack_gradients", "pack_activations", "local_steps"}]


def test_what_nobody_said_the_price_of_has_none_at_other_prices():
    """So a plan, kept at prices so many times as high, does not say that it is free."""
    problem = far_problem(2)
    device = replace(problem.cluster.catalogue["t4"], price_usd_per_hour=0.0)
    problem = replace(problem, cluster=replace(problem.cluster, catalogue=problem.cluster.catalogue | {"t4": device}))
    dearer = price(problem, replicas(problem), Changes(price_factor=2.0))
    assert unpriced(dearer.problem, dearer.plan) == ["t4"]
