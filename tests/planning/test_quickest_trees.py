"""Trees that pack what regions sum into their links."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.reduction import TREE_REGIONS, levels_room, unequal_parts_s
from polygon.cost.step_times import step_times, unpaced_times
from polygon.cost.sum_trees import ways_over
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Problem, SumTree
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.efforts import EFFORTS
from polygon.planning.search_engine import find_plan
from polygon.planning.sum_trees import (
    QUICK,
    _quickest,
    _seen_together_s,
    able_groups,
    drafted,
    legal,
    with_quick_sums,
    with_trees,
)
from tests.cost.test_step_times import far_problem, replicas
from tests.cost.test_tree_prices import drawn_plan
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases
from tests.sum_trees import drawn_trees, equal_stars


def busy_s(trees, links, cards) -> float:
    """Seconds in which links and cards pass a byte of gradient."""
    ways = ways_over(trees, tuple(range(len(links))))
    carried = ways.dealt * links
    both = carried + carried.T
    return float(max(both.max(), (ways.sent * cards).max()))


def quickest(links, cards, dearness):
    free = np.zeros(len(links))
    arrays = (links, np.zeros_like(links), free, cards)
    return _quickest(tuple(range(len(links))), dearness, *(array.tobytes() for array in arrays))


def drawn_links(rng, k):
    """Seconds per byte of links between so many regions, the same both ways."""
    links = np.exp(rng.uniform(0, 3, (k, k)))
    return np.maximum(links, links.T)


@settings(deadline=None, max_examples=cases(30))
@given(seed=st.integers(0, 10_000), k=st.integers(3, 6))
def test_no_drawn_trees_pass_more(seed, k):
    """Of one kind of link both ways; less what is cut off of many small trees."""
    rng = np.random.default_rng(seed)
    links = drawn_links(rng, k)
    cards = rng.uniform(0, 2, k)
    best, stars = (busy_s(quickest(links, cards, dearness), links, cards) for dearness in (1.0, np.inf))
    assert best <= 1.02 * stars
    assert stars <= busy_s(equal_stars(range(k)), links, cards) * (1 + 1e-9)
    for _ in range(40):
        assert best <= 1.05 * busy_s(drawn_trees(rng, range(k), most=k), links, cards)


@settings(deadline=None, max_examples=cases(30))
@given(seed=st.integers(0, 10_000), k=st.integers(3, 8))
def test_the_relaxation_finds_parts_nearly_as_good_as_the_best(seed, k):
    """No better than trees without relays, no worse than equal parts."""
    rng = np.random.default_rng(seed)
    links = drawn_links(rng, k)
    room, free = levels_room(k, k), np.zeros(k)
    room.rates[:] = np.where(np.eye(k, dtype=bool), 0.0, 1 / links)
    found = unequal_parts_s(1.0, k, room)
    best, equal = (busy_s(trees, links, free) for trees in (quickest(links, free, np.inf), equal_stars(range(k))))
    assert best * (1 - 1e-9) <= found * (1 + 0.003 * k) and found <= min(equal * (1 + 1e-9), 1.5 * best)
    parts = room.parts[:k]
    assert (parts[:, None] + parts <= room.rates * (1 + 1e-9))[~np.eye(k, dtype=bool)].all()


def unlike_links(latency_s=0.02, bytes_per_s=2e8, regions=4) -> Problem:
    """Regions of two A100 each, of which two pairs are joined by slow links."""
    slower = np.ones((regions, regions))
    slower[[0, 1], [1, 0]], slower[[2, 3], [3, 2]] = 0.15, 0.3
    cluster = cluster_of([[("a100-40gb", 1, 2)]] * regions, latency_s=latency_s, bytes_per_s=bytes_per_s * slower)
    model = small_gpt(blocks=16, hidden_size=2048, head_dim=128, ffn_size=8192)
    return Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=512))


def everywhere(decoder: Decoder, stages: int) -> Allocation:
    """So many stages, each with as many single devices of every region."""
    workers = np.zeros((stages, len(decoder.classes)), dtype=np.int64)
    workers[:, [tp == 1 for _, tp in decoder.classes]] = 2 // stages
    return Allocation(workers=workers, micro_batch_size=1)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.02, 2e8), (0.05, 1e8), (0.005, 2e8)])
def test_stages_that_sum_over_trees_wait_for_one_another_in_the_relaxation_too(latency_s, bytes_per_s):
    """For what trees leave on each link, not for equal parts over the slowest: that was 3.5 times the step."""
    decoder = Decoder(unlike_links(latency_s, bytes_per_s))
    allocation = everywhere(decoder, 2)
    plan = decoder.decode(allocation)
    assert all(stage.trees for stage in plan.stages)
    assert decoder.value(allocation) == pytest.approx(decoder.plan_value(plan), rel=0.1)


def test_stages_that_share_links_get_trees_that_suit_all():
    """By themselves the last stage's sum, which is short, would take links that the first one's needs."""
    problem = unlike_links(0.15, 4e8, regions=6)
    decoder = Decoder(problem)
    plan = decoder.decode(everywhere(decoder, 2))
    plain = drafted(plan, decoder.tables, able_groups(plan, problem), 0.0)
    groups = able_groups(plain, problem)
    quick = with_quick_sums(plain, decoder.tables, unpaced_times(plain, decoder.tables))
    seen = [drafted(plain, decoder.tables, groups, dearness) for dearness in QUICK]
    least = min(_seen_together_s(unpaced_times(draft, decoder.tables), groups) for draft in seen)
    assert _seen_together_s(unpaced_times(quick, decoder.tables), groups) <= least * (1 + 1e-3)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_slow_pair_goes_over_the_third_region(order):
    """What leaves it is no more than what comes in: all of the gradient once each way, where parts would wait."""
    a, b, hub = order
    links = np.ones((3, 3))
    links[a, b] = links[b, a] = 100.0
    trees = quickest(links, np.zeros(3), 1.0)
    assert busy_s(trees, links, np.zeros(3)) < 1.01 < 1.9 < busy_s(equal_stars(range(3)), links, np.zeros(3)) / 30
    assert all(tree.root == hub or (tree.relays and tree.relays[0][1] == hub) for tree in trees if tree.part > 0.02)


@settings(deadline=None, max_examples=cases(15))
@given(seed=st.integers(0, 10_000))
def test_trees_only_shorten_a_step(seed):
    """And keep every rule."""
    problem, plan = drawn_plan(seed)
    tables = CostTables(problem)

    def step_s(of):
        return step_times(of, tables).step_s

    found = with_trees(plan, tables, step_s)
    assert step_s(found) <= step_s(plan)
    quick = with_quick_sums(plan, tables, step_times(plan, tables))
    sums = [step_times(of, tables).reductions[0] for of in (quick, plan)]
    assert sums[0].streamed_s + sums[0].last_s <= sums[1].streamed_s + sums[1].last_s
    for of in (found, quick):
        assert [v.kind for v in violations(problem, of, tables)] == [v.kind for v in violations(problem, plan, tables)]


def test_trees_are_lost_with_packings_that_need_whole_gradients():
    """Low-rank factors go from every region to every other."""
    problem = far_problem(3)
    plan = replicas(problem, trees=equal_stars(range(3)))
    assert legal(plan, problem) is plan
    for use in (LinkUse(source=0, target=1, weight_gradients="powersgd"),
                LinkUse(source=2, target=2, weight_gradients="int8")):  # fmt: skip
        assert legal(replace(plan, links=(use,)), problem).stages[0].trees == ()


def test_trees_that_do_not_pay_are_taken_away():
    """All over one region on equal links: equal parts are sooner, and nothing is left."""
    problem = far_problem(4)
    plan, tables = replicas(problem, trees=(SumTree(part=1.0, root=3),)), CostTables(problem)
    found = with_trees(plan, tables, lambda of: step_times(of, tables).step_s)
    assert step_times(found, tables).step_s < 0.8 * step_times(plan, tables).step_s
    assert found.stages[0].trees == ()


def test_there_are_no_trees_of_regions_that_are_not_all_linked():
    """Such a stage breaks a rule by itself; nothing is drafted for it."""
    bytes_per_s = np.full((3, 3), 1e8)
    bytes_per_s[0, 2] = 0.0
    problem = far_problem(3)
    problem = replace(problem, cluster=replace(problem.cluster, bytes_per_s=bytes_per_s))
    plan = replicas(problem)
    assert drafted(plan, CostTables(problem), [0], 1.0) is plan


@pytest.mark.parametrize(("regions", "able"), [(2, []), (3, [0]), (TREE_REGIONS, [0]), (TREE_REGIONS + 1, [])])
def test_trees_are_looked_for_between_three_regions_and_many(regions, able):
    """Of two there is nothing to choose, and of very many the search takes equal parts."""
    problem = far_problem(regions)
    assert able_groups(replicas(problem), problem) == able


def test_a_search_sums_over_trees_where_links_differ():
    """Six places, each well linked to one of them alone: shorter steps than of a program that knows no trees."""
    n = 6
    bytes_per_s = np.full((n, n), 2e7)
    bytes_per_s[0], bytes_per_s[:, 0] = 4e8, 4e8
    problem = far_problem(n)
    cluster = cluster_of([[("t4", 1, 2)]] * n, latency_s=0.01, bytes_per_s=bytes_per_s)
    problem = replace(problem, cluster=cluster, batch=Batch(global_batch=768, seq_len=512, precision="fp32"))
    plain = replace(problem, runtime=replace(problem.runtime, sum_trees=False))
    trees, without = (find_plan(of, np.random.default_rng(0), effort=EFFORTS["quick"]) for of in (problem, plain))
    assert trees.plan is not None and without.plan is not None
    assert trees.value_s < 0.98 * without.value_s
    assert any(stage.trees for stage in trees.plan.stages) and not any(stage.trees for stage in without.plan.stages)
