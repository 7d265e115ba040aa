"""Which devices of a pool serve which stage: the workers of a stage on as few nodes as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Group = tuple[int, int, int]
"""Devices of a worker, stage, workers."""
Place = tuple[int, int]
"""First device of a worker, counted from the pool's first, and how many it has."""


def deal_devices(counts: np.ndarray, degrees: Sequence[int], devices: int, per_node: int) -> list[list[Place]]:
    """Deal out the devices of one pool.

    Larger degrees go first, so that no worker straddles two nodes. Of one degree stages come in their order, which puts
    neighbours on one node; or the widest first, if otherwise a stage that one node could hold would be on two.

    Parameters
    ----------
    counts : ndarray of int, shape (stages, classes)
        Workers of each of the pool's classes in each stage.
    degrees : sequence of int, shape (classes,)
        Devices of a worker of each class, falling.
    devices, per_node : int
        Of the pool.

    Returns
    -------
    list of list of tuple of int
        For every stage its workers, class by class.
    """
    groups = [(tp, s, int(counts[s, c])) for c, tp in enumerate(degrees) for s in np.flatnonzero(counts[:, c]).tolist()]
    in_order = _first_fit(groups, len(counts), devices, per_node)
    if in_order is None:  # nodes that are no multiple of the degrees: a worker has to straddle two
        return _first_fit(groups, len(counts), devices, devices) or []
    if _cuts(in_order, per_node) == 0:
        return in_order
    widest = _first_fit(sorted(groups, key=lambda g: (-g[0], -g[2], g[1])), len(counts), devices, per_node)
    return widest if widest is not None and _cuts(widest, per_node) < _cuts(in_order, per_node) else in_order


def _first_fit(groups: Sequence[Group], stages: int, devices: int, per_node: int) -> list[list[Place]] | None:
    """Every group on the first node that holds all of it, else on the emptiest nodes; None if a worker fits nowhere."""
    first = np.arange(0, devices, per_node)
    free = np.minimum(per_node, devices - first)
    result: list[list[Place]] = [[] for _ in range(stages)]
    for tp, s, count in groups:
        left = count
        while left:
            holding = np.flatnonzero(free >= left * tp)
            node = int(holding[0]) if len(holding) else int(free.argmax())
            taken = min(left, int(free[node]) // tp)
            if taken == 0:
                return None
            result[s] += [(int(first[node]) + k * tp, tp) for k in range(taken)]
            first[node] += taken * tp
            free[node] -= taken * tp
            left -= taken
    return result


def _cuts(dealt: Sequence[Sequence[Place]], per_node: int) -> int:
    """Nodes that stages are on beyond the fewest that could hold each."""
    return sum(
        len({first // per_node for first, _ in workers}) - -(-sum(tp for _, tp in workers) // per_node)
        for workers in dealt
    )
