"""Which regions a plan uses: how much compute a set of regions can have, given how far apart they are.

Sets of equal spread are represented by the one with most compute. Up to `ENUMERATED` regions every set is looked at;
of more, a set whose members are at most so far apart lies within that distance of each member, so the largest such
neighbourhood has no less.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

ENUMERATED = 12
MOST_SETS = 48
"""Of more than these, neighbours are taken together: the spread of the nearest, the compute of the widest."""


class RegionSet(NamedTuple):
    """What sets of regions have at most."""

    spread_s: float
    """Longest latency between two linked regions of such a set [s], at least."""
    capacity: float
    """Compute of such a set, at most."""


def region_sets(capacity: np.ndarray, latency_s: np.ndarray, linked: np.ndarray) -> list[RegionSet]:
    """Sets of regions, none of which has less compute and more spread than another.

    Parameters
    ----------
    capacity : ndarray, shape (regions,)
        Compute of each region; 0 for one that must not be used.
    latency_s, linked : ndarray, shape (regions, regions)
        One way; pairs without a link do not count towards the spread, but a set lies in one connected component.

    Returns
    -------
    list of RegionSet
        By spread, both numbers rising; empty if there is no such set.
    """
    used = np.flatnonzero(capacity > 0)
    capacity, linked = capacity[used], linked[np.ix_(used, used)] & ~np.eye(len(used), dtype=bool)
    far_s = np.where(linked, latency_s[np.ix_(used, used)], 0.0)
    far_s = np.maximum(far_s, far_s.T)
    component = _components(linked)
    find = _enumerated if len(used) <= ENUMERATED else _neighbourhoods
    spread_s, most = find(capacity, far_s, component)
    order = np.lexsort((-most, spread_s))
    front: list[RegionSet] = []
    for i in order.tolist():
        if not front or most[i] > front[-1].capacity * (1 + 1e-9):
            front.append(RegionSet(float(spread_s[i]), float(most[i])))
    return _thinned(front)


def _components(linked: np.ndarray) -> np.ndarray:
    """Number of each region's connected component (its first region), links taken both ways."""
    component = np.arange(len(linked))
    while True:
        joined = np.where(linked | linked.T, component[None, :], len(linked)).min(axis=1, initial=len(linked))
        least = np.minimum(component, joined)
        if (least == component).all():
            return component
        component = least


def _enumerated(capacity: np.ndarray, far_s: np.ndarray, component: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n = len(capacity)
    member = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1 == 1
    spread_s = np.zeros(len(member))
    allowed = member.any(axis=1)
    for a, b in itertools.combinations(range(n), 2):
        both = member[:, a] & member[:, b]
        spread_s[both] = np.maximum(spread_s[both], far_s[a, b])
        if component[a] != component[b]:
            allowed &= ~both
    return spread_s[allowed], (member @ capacity)[allowed]


def _neighbourhoods(capacity: np.ndarray, far_s: np.ndarray, component: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    spreads, most = [], []
    for a in range(len(capacity)):
        order = np.argsort(np.where(component == component[a], far_s[a], np.inf), kind="stable")
        order = order[component[order] == component[a]]
        order = np.concatenate([[a], order[order != a]])
        spreads.append(far_s[a][order])
        most.append(np.cumsum(capacity[order]))
    return np.concatenate(spreads), np.concatenate(most)


def _thinned(front: list[RegionSet]) -> list[RegionSet]:
    """At most `MOST_SETS`, each with the spread of its first and the compute of its last."""
    if len(front) <= MOST_SETS:
        return front
    parts = np.array_split(np.arange(len(front)), MOST_SETS)
    return [RegionSet(front[part[0]].spread_s, front[part[-1]].capacity) for part in parts]
