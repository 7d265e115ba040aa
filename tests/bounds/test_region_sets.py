"""What regions apart wait: every pair of sets is in the list, or something no worse, by enumeration or without."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.region_sets import Ways, _enumerated, _neighbourhoods, region_sets
from tests.nightly import cases

LEAST_S = 0.5


def drawn_ways(n, seed):
    """Regions on a line or anywhere, some pairs without a link."""
    rng = np.random.default_rng(seed)
    latency_s = rng.integers(0, 6, (n, n)) / 10
    linked = rng.random((n, n)) < 0.8
    if rng.random() < 0.5:
        place = np.sort(rng.random(n))
        latency_s, linked = np.abs(place[:, None] - place[None, :]), np.ones((n, n), dtype=bool)
    more_s = np.where(linked, latency_s + rng.random((n, n)) / 10, np.inf)
    whole, trees = rng.random(2) < (0.3, 0.5)
    return Ways(
        latency_s=latency_s, linked=linked, down_s=more_s, up_s=more_s.T + 0.01, whole=bool(whole), trees=bool(trees)
    ).of(np.arange(n))


def over_root_s(seconds, regions, root):
    """The longest way to a root and from there, over one region at most."""
    others = [r for r in regions if r != root]
    ways = {a: [(a, root), *((a, k, root) for k in others if k != a)] for a in others}
    comes_s = max(min(path_s(seconds, way) for way in ways[a]) for a in others)
    return comes_s + max(min(path_s(seconds, way[::-1]) for way in ways[a]) for a in others)


def path_s(seconds, path):
    return sum(seconds[a, b] for a, b in itertools.pairwise(path))


@settings(max_examples=cases(60), deadline=None)
@given(n=st.integers(1, 5), seed=st.integers(0, 9999), time_s=st.floats(LEAST_S, 5.0))
def test_no_pair_of_sets_has_more_than_the_list_says(n, seed, time_s):
    """Regions of the first stage A and of all S: the list has as much compute in a time, waiting no longer.

    What each region waits is worked out by looking at every way from a region of A to it and back.
    """
    ways = drawn_ways(n, seed)
    capacity = np.random.default_rng(seed).integers(1, 5, n).astype(float)
    lists = [_enumerated(capacity, ways), _neighbourhoods(capacity, ways, LEAST_S)]
    regions = range(n)
    walks = [w for k in range(1, n + 1) for w in itertools.permutations(regions, k)]
    for count in range(1, n + 1):
        for first in itertools.combinations(regions, count):
            pairs = list(itertools.permutations(first, 2))
            if not all(ways.linked[pair] for pair in pairs):
                continue
            longest_s = max((ways.latency_s[pair] for pair in pairs), default=0.0)
            longest_s *= 1 if count == 2 or ways.whole else 2
            if ways.trees and count > 2:
                longest_s = min(longest_s, *(over_root_s(ways.latency_s, first, root) for root in first))
            away_s = np.array(
                [
                    0.0
                    if r in first
                    else min(path_s(ways.down_s, w) for w in walks if w[0] in first and w[-1] == r)
                    + min(path_s(ways.up_s, w) for w in walks if w[0] == r and w[-1] in first)
                    for r in regions
                ]
            )
            for others in itertools.chain.from_iterable(
                itertools.combinations([r for r in regions if r not in first], k) for k in range(n - count + 1)
            ):
                members = [*first, *others]
                if not np.isfinite(away_s[members]).all():
                    continue
                spread_s = max(
                    (ways.latency_s[p] for p in itertools.permutations(members, 2) if ways.linked[p]), default=0.0
                )
                has = (capacity[members] * (1 - away_s[members] / time_s)).sum()
                for sets in lists:
                    fits = (sets.agree_s <= spread_s + 1e-12) & (sets.first_s <= longest_s + 1e-12)
                    fits &= sets.same | bool(others)
                    assert fits.any()
                    assert sets.some(fits).most(time_s) >= has - 1e-9


def test_relays_spare_latencies_of_the_first_stage():
    """Five regions in a row, neighbours 0.1 s apart, all others 1: to the middle it is 0.2 s over a relay, and back."""
    n = 5
    latency_s = np.where(np.abs(np.subtract.outer(np.arange(n), np.arange(n))) == 1, 0.1, 1.0)
    for trees in (False, True):
        ways = Ways(
            latency_s=latency_s,
            linked=np.ones((n, n), dtype=bool),
            down_s=latency_s,
            up_s=latency_s,
            whole=False,
            trees=trees,
        ).of(np.arange(n))
        for sets in (_enumerated(np.ones(n), ways), _neighbourhoods(np.ones(n), ways, LEAST_S)):
            least_s = sets.first_s[(sets.capacity == n) & (sets.away == 0) & sets.same].min()
            assert abs(least_s - (0.4 if trees else 2.0)) < 1e-12


def test_parts_lose_nothing():
    """Every pair is in one part, however often it is halved, and sets whose first stage is one region have no other."""
    ways = drawn_ways(5, 3)
    sets = region_sets(np.ones(5), ways, least_s=LEAST_S)
    parts = sets.by_first(1)
    assert all((some.first_s == 0).all() or (some.first_s > 0).all() for some in parts)
    leaves = []
    while parts:
        some = parts.pop()
        halves = some.halves(1e-3)
        parts += halves
        leaves += [] if halves else [some]
        assert halves or np.ptp(some.waits_s) <= 1e-3
    assert len(leaves) > 2
    for name in ("agree_s", "first_s", "capacity", "away"):
        joined = np.concatenate([getattr(some, name) for some in leaves])
        assert np.array_equal(np.sort(joined), np.sort(getattr(sets, name)))
