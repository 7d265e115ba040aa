"""Laws of shares and routes."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.routing import apportion, build_routes, deal, deal_regions, region_flow, spread, whole_parts
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

seconds = st.lists(st.floats(0.1, 10), min_size=1, max_size=4).map(np.array)


@given(seconds=seconds, micro_batches=st.integers(1, 9))
def test_apportion_is_the_best_of_all_shares(seconds, micro_batches):
    """No other whole shares end sooner (all are tried)."""
    shares = apportion(seconds, micro_batches)
    assert shares.sum() == micro_batches
    everything = itertools.product(range(micro_batches + 1), repeat=len(seconds))
    best = min(max(np.array(x) * seconds) for x in everything if sum(x) == micro_batches)
    assert np.isclose((shares * seconds).max(), best)


@given(shares=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(np.array))
def test_spread_gives_everyone_their_share_evenly(shares):
    """The right number of places each, and never two more or fewer than in proportion."""
    owners = spread(shares)
    assert (np.bincount(owners, minlength=len(shares)) == shares).all()
    for place in range(len(owners)):
        given_so_far = np.bincount(owners[: place + 1], minlength=len(shares))
        wanted = (place + 1) * shares / len(owners)
        assert (np.abs(given_so_far - wanted) < 2).all()


@st.composite
def transports(draw):
    n = draw(st.integers(1, 4))
    total = draw(st.integers(1, 20))
    cuts = [sorted(draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1))) for _ in range(2)]
    supply, demand = (np.diff([0, *cut, total]) for cut in cuts)
    cost = np.array([[draw(st.floats(0, 5)) for _ in range(n)] for _ in range(n)])
    return supply, demand, cost


@given(transports())
def test_region_flow_serves_all_and_lets_stay_what_can(problem):
    """Row and column sums are supply and demand; the diagonal is as large as it can be."""
    supply, demand, cost = problem
    flow = region_flow(supply, demand, cost)
    assert (flow.sum(axis=1) == supply).all()
    assert (flow.sum(axis=0) == demand).all()
    assert (np.diag(flow) == np.minimum(supply, demand)).all()


def test_region_flow_without_a_link_is_none():
    """What must leave a region without links has no flow."""
    cost = np.full((2, 2), np.inf)
    assert region_flow(np.array([2, 0]), np.array([0, 2]), cost) is None


@given(transports(), st.integers(0, 99))
def test_deal_regions_follows_the_flow(problem, seed):
    """Exactly the flow's number of micro-batches goes from region to region, and Python's result is numba's."""
    supply, demand, cost = problem
    flow = region_flow(supply, demand, cost)
    before = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(supply)), supply))
    after = deal_regions(before, flow)
    counted = np.zeros_like(flow)
    np.add.at(counted, (before, after), 1)
    assert (counted == flow).all()
    plain = np.empty_like(after)
    n = len(supply)
    deal.py_func(before, flow, flow.sum(axis=1), np.zeros((n, n)), np.zeros((3, n)), plain)
    assert (plain == after).all()


@settings(max_examples=cases(50))
@given(data=st.data())
def test_routes_hold_every_stages_shares(data):
    """Each stage's workers get what apportion gives them; equal workers in one region are dealt in turn."""
    stages = data.draw(st.integers(1, 4))
    micro_batches = data.draw(st.integers(1, 30))
    workers = [data.draw(seconds) for _ in range(stages)]
    regions = [np.array([data.draw(st.integers(0, 2)) for _ in w]) for w in workers]
    routes = build_routes(workers, regions, np.ones((3, 3)), micro_batches)
    for s, times in enumerate(workers):
        assert (np.bincount(routes[:, s], minlength=len(times)) == apportion(times, micro_batches)).all()


def test_the_quickest_links_are_used_first():
    """From region 0 (5) and 1 (1) to 2 (4) and 3 (2): 0 -> 3 is quickest, then 1 -> 2, the rest is left to 0 -> 2."""
    seconds = np.array([[0, 9, 3, 1], [9, 0, 2, 4], [9, 9, 0, 9], [9, 9, 9, 0.0]])
    flow = region_flow(np.array([5, 1, 0, 0]), np.array([0, 0, 4, 2]), seconds)
    expected = np.zeros((4, 4))
    expected[0, 3], expected[1, 2], expected[0, 2] = 2, 1, 3
    assert flow.tolist() == expected.tolist()
    seconds[0, 2] = np.inf
    assert region_flow(np.array([5, 1, 0, 0]), np.array([0, 0, 4, 2]), seconds) is None


@given(share=st.lists(st.floats(0, 10), min_size=1, max_size=6).map(np.array), total=st.integers(0, 50))
def test_whole_parts_are_less_than_one_from_their_proportion(share, total):
    """They sum to the whole, and who has more of the share has no fewer."""
    assume(share.sum() > 1e-3)
    parts = whole_parts(share, total)
    wanted = share / share.sum() * total
    assert parts.sum() == total and (parts >= 0).all()
    assert (np.abs(parts - wanted) < 1 + 1e-6).all()
    assert all(
        parts[i] >= parts[j] for i in range(len(share)) for j in range(len(share)) if wanted[i] > wanted[j] + 1e-6
    )


@given(transports(), st.integers(0, 99))
def test_targets_are_served_evenly_all_the_way(problem, seed):
    """At any time a source has sent each target its part of what it has sent, and a target has got its part, nearly."""
    supply, demand, cost = problem
    n = len(supply)
    flow = region_flow(supply, demand, cost)
    before = np.random.default_rng(seed).permutation(np.repeat(np.arange(n), supply))
    after = deal_regions(before, flow)
    for m in range(1, len(before) + 1):
        served = np.bincount(after[:m], minlength=n)
        assert (np.abs(served - m * flow.sum(axis=0) / len(before)) < n + 1).all()


def test_two_targets_take_turns():
    """Eight micro-batches from one region to two, three to one: every fourth to the second."""
    after = deal_regions(np.zeros(8, dtype=np.int64), np.array([[6, 2], [0, 0]]))
    assert after.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_routes_keep_the_parts_that_regions_are_given():
    """Three quarters in region 0 in both stages: nothing crosses more than it must, workers of a region take turns."""
    workers, regions = [np.array([1.0, 1.0, 1.0])] * 2, [np.array([0, 0, 1])] * 2
    share = np.array([[0.75, 0.25], [0.5, 0.5]])
    routes = build_routes(workers, regions, np.ones((2, 2)), 8, share)
    assert np.bincount(routes[:, 0]).tolist() == [3, 3, 2]
    assert np.bincount(routes[:, 1]).tolist() == [2, 2, 4]
    crossing = (routes[:, 0] == 2) != (routes[:, 1] == 2)
    assert crossing.sum() == 2
    nowhere = np.array([[0, np.inf], [np.inf, 0]])
    assert build_routes(workers, regions, nowhere, 8, share) is None
    assert build_routes(workers, regions, nowhere, 8, share[[0, 0]]) is not None


def test_shares_follow_what_sharded_weights_cost():
    """T4 that gather their weights over a slow network take few of the micro-batches, A100 the others."""
    large = small_gpt(blocks=40, hidden_size=2048, head_dim=128, ffn_size=8192, tied_embeddings=False)
    cluster = cluster_of([[("t4", 8, 1), ("a100-40gb", 1, 4)]], node_bytes_per_s=1e10)
    problem = Problem(cluster=cluster, model=large, batch=Batch(global_batch=64, seq_len=512))
    decoder = Decoder(problem)
    counts = {(0, 1): 8, (1, 1): 4}
    workers = np.array([[counts.get(each, 0) for each in decoder.classes]])
    plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1))
    assert plan.stages[0].zero >= 2
    times = decoder.step_times(plan)
    busy_s = plan.shares(0) * (times.schedule.forward_s + times.schedule.backward_s)
    slowest_s = (times.schedule.forward_s + times.schedule.backward_s).max()
    assert busy_s.max() <= busy_s.mean() + slowest_s
    pools = np.array([worker.pool for worker in plan.stages[0].workers])
    assert plan.shares(0)[pools == 1].min() > 3 * plan.shares(0)[pools == 0].max(initial=0)


@pytest.mark.parametrize("micro_batches", [64, 57])
def test_all_pairs_of_nodes_pass_as_much_between_regions(micro_batches):
    """Two nodes of four workers each in two regions: the order in which workers stand pairs each node with one of the
    other region alone, and half of the connections would be idle."""
    seconds, regions = [np.ones(8)] * 2, [np.zeros(8, dtype=np.int64), np.ones(8, dtype=np.int64)]
    nodes = [np.repeat([0, 1], 4), np.repeat([2, 3], 4)]
    routes = build_routes(seconds, regions, np.ones((2, 2)), micro_batches, worker_nodes=nodes)
    pairs = Counter(zip(nodes[0][routes[:, 0]].tolist(), nodes[1][routes[:, 1]].tolist(), strict=True))
    assert len(pairs) == 4 and max(pairs.values()) - min(pairs.values()) <= 1
    for s in range(2):
        shares = np.bincount(routes[:, s], minlength=8)
        assert shares.max() - shares.min() <= 1
    if micro_batches % 8 == 0:  # all the same each worker has its turn
        turns = np.sort(routes[:, 1].reshape(-1, 8), axis=1)
        assert (turns == np.arange(8)).all()


def test_within_a_region_micro_batches_stay_where_the_order_has_them():
    """The same workers in one region: node 0 sends to node 0."""
    seconds, regions = [np.ones(8)] * 2, [np.zeros(8, dtype=np.int64)] * 2
    nodes = [np.repeat([0, 1], 4)] * 2
    routes = build_routes(seconds, regions, np.ones((1, 1)), 64, worker_nodes=nodes)
    assert (routes[:, 0] == routes[:, 1]).all()
