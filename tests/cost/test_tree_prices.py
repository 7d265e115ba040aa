"""What sums over trees of regions cost: times of links and ways, bytes, memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.money import step_bill
from polygon.cost.stage_reduction import room_of_sums
from polygon.cost.step_times import step_times
from polygon.cost.sum_trees import Standing, tree_times, ways_over
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem, Stage, SumTree, Worker
from polygon.domain.schedule import stage_spans
from tests.cost.test_step_times import far_problem, packed, replicas
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases
from tests.sum_trees import drawn_trees, equal_stars


def with_trees(plan: Plan, trees) -> Plan:
    return replace(plan, stages=tuple(replace(stage, trees=trees) for stage in plan.stages))


def drawn_plan(seed: int) -> tuple[Problem, Plan]:
    """The whole model on all nodes of three to five regions, whose links differ, as do messages and who waits."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 6))
    nodes = rng.integers(1, 5, n).tolist()
    groups = [[("t4", count, 2)] for count in nodes]
    cluster = cluster_of(
        groups,
        latency_s=rng.uniform(0.005, 0.2, (n, n)),
        bytes_per_s=rng.uniform(1e7, 1e9, (n, n)),
        capacity=float(rng.choice([np.inf, 5e8])),
        between=Link(latency_s=5e-5, bytes_per_s=float(rng.choice([1e8, 1e10]))),
    )
    model = small_gpt(tied_embeddings=False)
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=128, precision="fp32"))
    workers = tuple(Worker(pool=p, devices=(d,)) for p, pool in enumerate(cluster.pools) for d in
                    range(pool.first_device, pool.first_device + pool.devices))  # fmt: skip
    stages = (Stage(first_layer=0, last_layer=model.layers, workers=workers, zero=int(rng.integers(0, 3))),)
    plan = Plan(
        stages=stages,
        routes=np.arange(64)[:, None] % len(workers),
        micro_batch_size=1,
        spans=stage_spans(stages, (len(workers),)),
    )
    return problem, packed(plan, n, str(rng.choice(["none", "int8"])))


@settings(deadline=None, max_examples=cases(25))
@given(seed=st.integers(0, 10_000))
def test_equal_parts_are_trees_as_any_others(seed):
    """Every region the root of an equal part, parent of all: the price of a plan without trees, whoever waits."""
    problem, plain = drawn_plan(seed)
    tables = CostTables(problem)
    plan = with_trees(plain, equal_stars(range(len(problem.cluster.regions))))
    (before,), (after,) = (step_times(p, tables).reductions for p in (plain, plan))
    for name in ("across_s", "latency_s", "card_s", "total_s", "streamed_s", "last_s"):
        assert getattr(after, name) == pytest.approx(getattr(before, name))
    assert {(a, b): n for a, b, n in after.across_bytes} == pytest.approx(
        {(a, b): n for a, b, n in before.across_bytes}
    )
    assert (after.ways is None) == (before.ways is None)
    if after.ways is not None:
        np.testing.assert_allclose(after.ways.whole_s, before.ways.whole_s)
        np.testing.assert_allclose(after.ways.last_s, before.ways.last_s)
        assert after.ways.busy_s == pytest.approx(before.ways.busy_s)
    assert step_times(plan, tables).step_s == pytest.approx(step_times(plain, tables).step_s)


def standing(k: int, **changed) -> Standing:
    """Single nodes on links of 1 byte/s whose cards are never in the way."""
    ones = np.ones((k, k))
    free, counts = np.full((k, k), np.inf), np.ones(k, dtype=np.int64)
    return Standing(np.zeros((k, k)), ones, ones, free, free[0], free[0], counts, counts)._replace(**changed)


def test_links_carry_the_parts_of_their_trees_both_ways():
    """Half over region 0, whose links carry it up and down; half over 2, to which 0 sends over 1."""
    trees = (SumTree(part=0.5, root=0), SumTree(part=0.5, root=2, relays=((0, 1),)))
    found = tree_times(ways_over(trees, (0, 1, 2)), standing(3), 8.0, 0.0, 0.0, several=np.zeros(3, dtype=bool))
    np.testing.assert_allclose(found.busy_s, [[0, 8, 4], [8, 0, 4], [4, 4, 0]])


def test_a_way_takes_its_longest_link_and_a_layer_on_all_others():
    """Over 1 to the root and back: two links up, two down, each with latency; the last layer is a quarter."""
    latency_s = np.array([[0, 1, 50], [2, 0, 4], [50, 8, 0]], dtype=float)
    bytes_per_s = np.array([[1, 1, 1], [0.5, 1, 0.25], [1, 1, 1]])
    ways = ways_over((SumTree(part=1.0, root=2, relays=((0, 1),)),), (0, 1, 2))
    at = standing(3, latency_s=latency_s, bytes_per_s=bytes_per_s)
    found = tree_times(ways, at, 8.0, 0.25, 0.0, several=np.zeros(3, dtype=bool))
    rows = {(a, b): (far, way) for a, b, far, way in zip(found.source, found.target, found.latency_s, found.way_s,
                                                         strict=True) if (a, b) in ((0, 0), (0, 2))}  # fmt: skip
    # 0 -> 1: 8 s, 1 -> 2: 32 s, 2 -> 1: 8 s, 1 -> 0: 16 s.
    assert rows == {(0, 0): (1 + 4 + 8 + 2, 32 + 0.25 * (8 + 8 + 16)), (0, 2): (1 + 4, 32 + 0.25 * 8)}
    assert found.busy_s[0, 2] == found.busy_s[2, 0] == 0


def test_cards_egress_capacities_and_messages_hold_all_links_of_a_region_up():
    """Region 0 adds up for two others: it sends and hears twice what these do."""
    ways = ways_over((SumTree(part=1.0, root=0),), (0, 1, 2))
    wide, none = np.full((3, 3), 1e9), np.zeros(3, dtype=bool)

    def busy_s(message_s=0.0, **changed):
        return tree_times(ways, standing(3, bytes_per_s=wide, **changed), 8.0, 1.0, message_s, several=none).busy_s

    ends = np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(busy_s(cards=np.array([2.0, 9, 9])), 8 * ends)
    np.testing.assert_allclose(busy_s(egress=np.array([2.0, 4, 4])), [[0, 8, 8], [2, 0, 0], [2, 0, 0]])
    np.testing.assert_allclose(busy_s(capacity=np.full((3, 3), 4.0)), 2 * ends)
    # One message up and one down with each of both others.
    np.testing.assert_allclose(busy_s(message_s=3.0), 12 * ends, rtol=1e-6)


@settings(deadline=None, max_examples=cases(25))
@given(seed=st.integers(0, 10_000))
def test_trees_send_as_much_in_all_as_equal_parts(seed):
    """Two regions fewer than twice all: every one but the root sends once, and is sent the sum."""
    problem, plain = drawn_plan(seed)
    regions = range(len(problem.cluster.regions))
    trees = drawn_trees(np.random.default_rng(seed), regions)
    plan, tables = with_trees(plain, trees), CostTables(problem)
    before, after = (step_times(p, tables) for p in (plain, plan))
    bytes_of = [sum(n for _, _, n in times.reductions[0].across_bytes) for times in (before, after)]
    assert bytes_of[0] == pytest.approx(bytes_of[1])
    assert bytes_of[1] == pytest.approx(2 * (len(regions) - 1) * after.reductions[0].wire_bytes)
    assert step_bill(problem, plan, after).egress_bytes.sum() == pytest.approx(bytes_of[1])
    assert after.step_s >= float(after.ends_s.max())
    ways = ways_over(trees, tuple(regions))
    assert ways.sent.sum() == pytest.approx(2 * (len(regions) - 1))
    assert (ways.sent >= 1 - 1e-9).all()
    np.testing.assert_allclose(ways.dealt + ways.dealt.T, ways.parts)


def test_who_adds_up_for_others_needs_room_for_what_they_send():
    """A gradient under way on processors: what a region sends, and what it hears of its neighbours in all trees."""
    cluster = cluster_of([[("cpu-core", 1, 1)]] * 3)
    problem = replace(far_problem(3), cluster=cluster)
    workers = tuple(Worker(pool=r, devices=(r,)) for r in range(3))
    plain = replicas(problem)
    plain = replace(plain, stages=(replace(plain.stages[0], workers=workers),))
    tables = CostTables(problem)

    def heard(trees):
        plan = with_trees(plain, trees)
        rooms = room_of_sums(plan, tables.placement(plan), 0, tables.links, problem.runtime)
        return [room.heard for room in rooms]

    assert heard(()) == pytest.approx([1 + 4 / 3] * 3) == heard(equal_stars(range(3)))
    assert heard((SumTree(part=1.0, root=0),)) == [3, 2, 2]
    assert heard((SumTree(part=1.0, root=0, relays=((2, 1),)),)) == [2, 3, 2]
