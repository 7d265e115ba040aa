"""Laws of shares and routes."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.planning.routing import apportion, build_routes, deal, deal_regions, region_flow, spread

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


@settings(max_examples=50)
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
