"""What sets of regions need at least for their sums: below the price of every one of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.region_sums import NODES, Hop, Links, _neighbourhoods, groups_by_capacity, summing_sets
from polygon.cost.network import CARD_EFFICIENCY
from polygon.cost.reduction import levels_room, levels_s
from polygon.cost.transfers import LinkArrays
from tests.nightly import cases

HOP = Hop(5e-5, 1e9, 1.0, 1.2e9)


def drawn_links(n, seed):
    """Regions of a few or many nodes, some pairs without a link, some with little capacity."""
    rng = np.random.default_rng(seed)
    rate = 1e7 * 10 ** rng.uniform(0, 3, (n, n))
    rate[rng.random((n, n)) < 0.1] = 0.0
    np.fill_diagonal(rate, 0.0)
    with np.errstate(divide="ignore"):
        return Links(
            latency_s=rng.uniform(0, 0.3, (n, n)) * (1 - np.eye(n)),
            slowness=1 / rate,
            shared=1 / np.where(rng.random((n, n)) < 0.3, 2e7, np.inf),
            nodes=rng.integers(0, 30, n),
            egress=1 / np.where(np.random.default_rng([seed, 1]).random(n) < 0.3, 4e7, np.inf),
            hop=HOP,
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
)
def test_no_set_of_regions_is_priced_below_its_bound(n, seed, n_bytes, whole, nccl, packs):
    """Enumerated each set has its own bound; by neighbourhoods there is one with as much compute that is no higher."""
    links, rng = drawn_links(n, seed), np.random.default_rng(seed)
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
        assert packs or sets.latency_s[i] == pytest.approx(far_s)
        assert sets.capacity(worth)[i] == pytest.approx(worth[list(members)].sum())
        room = coarse.capacity(worth) >= worth[list(members)].sum() * (1 - 1e-9)
        assert (room & (coarse_s <= whole_s * (1 + 1e-9)) & (coarse.latency_s <= far_s + 1e-12)).any()


def test_one_region_sums_with_nobody():
    """Without two regions there is no set, and no group of sets."""
    sets = summing_sets(drawn_links(1, 0), whole=False)
    assert sets.seconds(np.array([1.0]), np.array([1.0]), HOP, 1, 1).shape == (2, 0, 1)
    assert list(groups_by_capacity(sets.capacity(np.ones(1)), 8)) == []
