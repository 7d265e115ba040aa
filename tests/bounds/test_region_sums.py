"""What sets of regions need at least for their sums: below the price of every one of them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from polygon.bounds.region_sums import NODES, Hop, Links, _neighbourhoods, groups_by_capacity, led_sets, summing_sets
from polygon.cost.network import CARD_EFFICIENCY
from polygon.cost.reduction import levels_room, levels_s
from polygon.cost.sum_trees import Standing, tree_times, tree_ways_s, ways_over
from polygon.cost.transfers import LinkArrays
from polygon.domain.plan import SumTree
from tests.nightly import cases
from tests.sum_trees import drawn_trees

HOP = Hop(5e-5, 1e9, 1.0, 1.2e9)


def drawn_links(n, seed, trees=False, missing=0.1):
    """Regions of a few or many nodes, some pairs without a link, some with little capacity."""
    rng = np.random.default_rng(seed)
    rate = 1e7 * 10 ** rng.uniform(0, 3, (n, n))
    rate[rng.random((n, n)) < missing] = 0.0
    np.fill_diagonal(rate, 0.0)
    with np.errstate(divide="ignore"):
        return Links(
            latency_s=rng.uniform(0, 0.3, (n, n)) * (1 - np.eye(n)),
            slowness=1 / rate,
            shared=1 / np.where(rng.random((n, n)) < 0.3, 2e7, np.inf),
            nodes=rng.integers(0, 30, n),
            egress=1 / np.where(np.random.default_rng([seed, 1]).random(n) < 0.3, 4e7, np.inf),
            hop=HOP,
            trees=trees,
        )


def price_s(links, members, used, n_bytes, wire, whole, nccl, apart, last):
    """What `polygon.cost.reduction` says of a stage with so many nodes of one device used in each of some regions."""
    n = len(links.nodes)
    with np.errstate(divide="ignore"):
        latency_s, rate = links.latency_s.copy(), 1 / links.slowness
        np.fill_diagonal(latency_s, HOP.latency_s)
        np.fill_diagonal(rate, HOP.bytes_per_s)
        ring = rate.copy()
        np.fill_diagonal(ring, HOP.bytes_per_s / (CARD_EFFICIENCY if nccl else 1.0))
        arrays = LinkArrays(
            region=np.arange(n), latency_s=latency_s, bytes_per_s=rate, node_latency_s=np.zeros(n),
            node_bytes_per_s=np.ones(n), card_bytes_per_s=np.full(n, HOP.card_bytes_per_s),
            capacity_bytes_per_s=1 / links.shared, egress_bytes_per_s=1 / links.egress,
            ring_latency_s=latency_s, ring_bytes_per_s=ring,
            collective=np.tile([1.0, 1e12, 0.0, 0.0, float(nccl), 1.0], (n, 1)), bucket_bytes=1e18,
            sum_turns=7, sum_trees=True, message_s=1e-4,
        )  # fmt: skip
        one = np.ones(len(members), dtype=np.int64)
        *parts, far_s, _ = levels_s(
            n_bytes, 0.0, 1, len(members), np.array(members), np.array(used), one, one,
            wire, np.ones((n, n)), apart, arrays, whole, last, 12.0, levels_room(n, n),
        )  # fmt: skip
    return sum(parts), far_s


@settings(deadline=None, max_examples=cases(40))
@given(
    n=st.integers(2, 5),
    seed=st.integers(0, 9999),
    n_bytes=st.floats(1e3, 1e10),
    whole=st.booleans(),
    nccl=st.booleans(),
    packs=st.booleans(),
    trees=st.booleans(),
)
def test_no_set_of_regions_is_priced_below_its_bound(n, seed, n_bytes, whole, nccl, packs, trees):
    """Enumerated each set has its own bound; by neighbourhoods there is one with as much compute that is no higher."""
    links, rng = drawn_links(n, seed, trees), np.random.default_rng(seed)
    wire, worth = 0.3 * n_bytes, np.where(links.nodes > 0, rng.uniform(1, 5, n), 0.0)
    sets, coarse = summing_sets(links, whole=whole), _neighbourhoods(links, np.flatnonzero(links.nodes))

    def seconds(of, nodes):
        """Least seconds by the steps of nodes that so many belong to."""
        fewest = max(step for step in NODES if step <= nodes)
        most = min([step - 1 for step in NODES if step > nodes], default=10**6)
        return of.seconds(np.array([n_bytes]), np.array([wire]), HOP, fewest, most)[0, :, 0]

    row = {tuple(np.flatnonzero(members[0]).tolist()): i for i, members in enumerate(sets.members)}
    for members in itertools.chain(*(itertools.combinations(np.flatnonzero(links.nodes), k) for k in range(2, n + 1))):
        used = [int(rng.integers(1, links.nodes[r] + 1)) for r in members]
        apart = rng.random(n) < (0.5 if packs else 0.0)
        whole_s, far_s = price_s(links, members, used, n_bytes, wire, whole, nccl, apart, rng.uniform())
        if tuple(members) not in row:
            assert whole_s == np.inf
            continue
        i = row[tuple(int(r) for r in members)]
        found_s, coarse_s = (seconds(of, max(used)) for of in (sets, coarse))
        assert found_s[i] <= whole_s * (1 + 1e-9)
        assert sets.latency_s[i] <= far_s * (1 + 1e-9)  # nodes by themselves may need another round
        assert packs or trees or sets.latency_s[i] == pytest.approx(far_s)
        assert sets.capacity(worth)[i] == pytest.approx(worth[list(members)].sum())
        room = coarse.capacity(worth) >= worth[list(members)].sum() * (1 - 1e-9)
        assert (room & (coarse_s <= whole_s * (1 + 1e-9)) & (coarse.latency_s <= far_s + 1e-12)).any()


def test_one_region_sums_with_nobody():
    """Without two regions there is no set, and no group of sets."""
    for trees in (False, True):
        sets = summing_sets(drawn_links(1, 0, trees), whole=False)
        assert sets.seconds(np.array([1.0]), np.array([1.0]), HOP, 1, 1).shape == (2, 0, 1)
        assert list(groups_by_capacity(sets.capacity(np.ones(1)), 8)) == []


def trees_of(members):
    """All trees over some regions."""
    for root in members:
        others = [r for r in members if r != root]
        for count in range(1, len(others) + 1):
            for relays in itertools.combinations(others, count):
                below = [r for r in others if r not in relays]
                for over in itertools.product(relays, repeat=len(below)):
                    yield SumTree(part=1.0, root=root, relays=tuple(zip(below, over, strict=True)))


def standing(links, members, nodes):
    """Some regions with so many nodes each, of which all pairs send as much."""
    pairs, some = np.ix_(members, members), list(members)
    with np.errstate(divide="ignore"):
        rate = 1 / links.slowness[pairs]
        np.fill_diagonal(rate, np.inf)
        return Standing(
            links.latency_s[pairs],
            rate,
            1 / np.outer(nodes, nodes),
            1 / links.shared[pairs],
            1 / links.egress[some],
            nodes * links.hop.card_bytes_per_s,
            nodes,
            np.ones_like(nodes),
        )


def best_trees(at, members):
    """Trees and parts that let as much pass as any: what links, capacity, egress and cards carry is linear in them."""
    every = list(trees_of(members))
    parts = np.array([ways_over((tree,), members).parts for tree in every])
    pair = np.maximum(at.pair / at.bytes_per_s, 1 / at.capacity)
    np.fill_diagonal(pair, 0.0)
    out = np.maximum(1 / at.egress, 1 / at.cards)
    table = np.concatenate([(parts * pair).reshape(len(every), -1), parts.sum(axis=2) * out], axis=1).T
    scale = 1 / table.max()
    found = linprog(-np.ones(len(every)), A_ub=table * scale, b_ub=np.ones(len(table)), method="highs").x
    kept = found > 1e-9 * found.sum()
    total = found[kept].sum()
    return tuple(replace(every[i], part=float(found[i] / total)) for i in np.flatnonzero(kept))


def over_trees(at, members, trees, wire, last=0.0):
    """What links need for a sum over trees (`polygon.cost.sum_trees`)."""
    none = np.zeros(len(members), dtype=bool)
    return tree_times(ways_over(trees, members), at, wire, last, 0.0, several=none)


@settings(deadline=None, max_examples=cases(30))
@given(n=st.integers(3, 6), seed=st.integers(0, 9999), wire=st.floats(1e3, 1e10), whole=st.booleans())
def test_no_trees_are_quicker_than_the_bound(n, seed, wire, whole):
    """Neither drawn ones nor those that a linear program finds, over drawn links; nor do regions that begin a step as
    they have all sums wait for less than `led_sets` says."""
    rng = np.random.default_rng(seed)
    links = drawn_links(n, seed, trees=True, missing=0.0)
    links = replace(links, nodes=np.maximum(links.nodes, 1))
    members = tuple(sorted(rng.choice(n, rng.integers(3, n + 1), replace=False).tolist()))
    nodes = np.array([rng.integers(1, links.nodes[r] + 1) for r in members])
    at, some = standing(links, members, nodes), list(members)
    sets, coarse = summing_sets(links, whole=whole), _neighbourhoods(links, np.arange(n))
    i = next(i for i, of in enumerate(sets.members[:, 0]) if np.flatnonzero(of).tolist() == some)
    sizes = np.array([wire]), np.array([wire])
    found_s = sets.seconds(*sizes, links.hop, 1, max(nodes))[1, i, 0]
    coarse_s = coarse.seconds(*sizes, links.hop, 1, max(nodes))[1, :, 0]
    room = coarse.capacity(links.nodes.astype(float)) >= links.nodes[some].sum()
    hidden_s, last, worth = rng.choice([0.0, 0.3]) * found_s, rng.choice([0.0, 0.1]), rng.uniform(1, 5, n)
    led = led_sets(links, sets, lambda most: worth, wire, wire, hidden_s=hidden_s, last=last)
    for trees in (drawn_trees(rng, some), best_trees(at, members)):
        times = over_trees(at, members, trees, wire, last)
        whole_s, far_s = (times.latency_s + times.way_s).max(), times.latency_s.max()
        assert found_s <= whole_s * (1 + 1e-9)
        assert sets.latency_s[i] <= far_s * (1 + 1e-9)
        assert (room & (coarse_s <= whole_s * (1 + 1e-9)) & (coarse.latency_s <= far_s + 1e-12)).any()
        none = np.zeros(len(members))
        all_s, end_s, busy_s = tree_ways_s(times, len(members), 0.0, none, none, last)
        waits_s = np.maximum(end_s, all_s - hidden_s).diagonal()
        assert led.away[i] <= (worth[some] * waits_s).sum() * (1 + 1e-9)
        assert led.busy_s[i] <= busy_s * (1 + 1e-9)


def test_a_slow_link_is_not_waited_for():
    """Three regions that all send 1 byte a second to one another, but for 0.01 between two: trees over the third carry
    nearly all. Every tree has two links, and there are 2.01 bytes a second of them."""
    rate = np.array([[np.inf, 1.0, 1.0], [1.0, np.inf, 0.01], [1.0, 0.01, np.inf]])
    none, one = np.zeros((3, 3)), np.ones(3, dtype=np.int64)
    hop = Hop(0.0, 1.0, 1.0)
    links = Links(latency_s=none, slowness=1 / rate, shared=none, egress=np.zeros(3), nodes=one, hop=hop, trees=True)
    sizes = np.array([1.0]), np.array([1.0])
    both = [summing_sets(replace(links, trees=trees), whole=False) for trees in (False, True)]
    straight_s, trees_s, tied_s = (
        sets.seconds(*sizes, hop, 1, 1, trees=trees)[0, -1, 0]
        for sets, trees in ((both[0], True), (both[1], True), (both[1], False))
    )
    assert straight_s == tied_s == pytest.approx(2 / 3 / 0.01)
    assert trees_s == pytest.approx(2 / 2.01)
    at = standing(links, (0, 1, 2), one)
    assert over_trees(at, (0, 1, 2), best_trees(at, (0, 1, 2)), 1.0).busy_s.max() == pytest.approx(trees_s)


@pytest.mark.parametrize(
    ("latency_s", "slow", "worth", "wire"),
    [
        (np.zeros((3, 3)), 1e9, [10.0, 1.0, 1.0], 6.0),
        (np.kron(9 * (1 - np.eye(2)), np.ones((2, 2))) + (1 - np.eye(4)), 1.0, [1.0, 1.0, 1.0, 1.0], 0.0),
    ],
)
def test_regions_that_lead_wait_for_what_the_best_trees_take(latency_s, slow, worth, wire):
    """Of three regions without latencies the largest adds up all, and the others, between which the link is slow, wait
    for 6 bytes at 1 a second; of two pairs of regions far apart that have nothing but latencies all send to one."""
    n, slowness = len(latency_s), 1 - np.eye(len(latency_s))
    slowness[1, 2] = slowness[2, 1] = slow
    none, one, hop = np.zeros((n, n)), np.ones(n, dtype=np.int64), Hop(0.0, 1.0, 1.0)
    links = Links(
        latency_s=latency_s, slowness=slowness, shared=none, egress=np.zeros(n), nodes=one, hop=hop, trees=True
    )
    sets = summing_sets(links, whole=False)
    led = led_sets(links, sets, lambda most: np.array(worth), wire, wire, hidden_s=0.0, last=0.0)
    at, members = standing(links, tuple(range(n)), one), tuple(range(n))
    times = over_trees(at, members, (SumTree(part=1.0, root=0),), wire)
    all_s, *_ = tree_ways_s(times, n, 0.0, np.zeros(n), np.zeros(n), 0.0)
    assert led.away[-1] == pytest.approx(12.0 if wire else 42.0)
    assert all_s.diagonal() @ worth == pytest.approx(led.away[-1])
