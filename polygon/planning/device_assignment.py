"""Which devices of a pool serve which stage: the workers of a stage on as few nodes as can be.

Larger degrees go first, so that no worker straddles two nodes. Of one degree stages come in their order, which puts
neighbours on one node; or the widest first, if otherwise a group that one node could hold would be on two. Where first
and last stage exchange the gradient of tied embeddings the last comes right after the first (`dealt_as`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import kernel

Place = tuple[int, int]
"""First device of a worker, counted from the pool's first, and how many it has."""


class Dealing(NamedTuple):
    """Room to deal out one pool: groups of equal workers of one stage go in, their places come out."""

    tp: np.ndarray
    stage: np.ndarray
    width: np.ndarray
    """(groups,) devices of a worker, stage and workers of every group."""
    order: np.ndarray
    """(groups,) in which groups are dealt."""
    begun: np.ndarray
    free: np.ndarray
    """(nodes,) devices dealt and left, of every node."""
    group: np.ndarray
    first: np.ndarray
    workers: np.ndarray
    """(places,) group, first device and how many workers side by side from there."""


@gives_pointed
def dealing_for(groups: int, nodes: int, degrees: int) -> Dealing:
    """Room for so many groups on so many nodes: a place ends its group, or leaves no room for another of its degree."""
    places = groups + nodes * degrees
    return Dealing(*(np.zeros(n, dtype=np.int64) for n in (*[groups] * 4, *[nodes] * 2, *[places] * 3)))


def deal_devices(counts: np.ndarray, degrees: Sequence[int], devices: int, per_node: int) -> list[list[Place]]:
    """Deal out the devices of one pool.

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
    column, stage = np.nonzero(counts.T)
    room = dealing_for(len(stage), -(-devices // per_node), len(degrees))
    room.tp[:], room.stage[:], room.width[:] = np.asarray(degrees)[column], stage, counts[stage, column]
    result: list[list[Place]] = [[] for _ in counts]
    for k in range(deal(room, len(stage), devices, per_node)):
        g = room.group[k]
        tp, first = int(room.tp[g]), int(room.first[k])
        result[room.stage[g]] += [(first + i * tp, tp) for i in range(room.workers[k])]
    return result


@kernel
def dealt_as(place: int, stages: int, tied: bool) -> int:
    """The stage that is dealt in a place, of so many stages."""
    if not tied or place == 0:
        return place
    return stages - 1 if place == 1 else place - 1


@kernel
def deal(room: Dealing, groups: int, devices: int, per_node: int) -> int:
    """Deal out a pool to groups given by falling degree, and of one degree by stage; returns the number of places."""
    fewest = 0
    for g in range(groups):
        room.order[g] = g
        fewest += (room.width[g] * room.tp[g] + per_node - 1) // per_node
    in_order = first_fit(room, groups, devices, per_node)
    if in_order <= fewest:
        # No group is on more nodes than it needs; or (-1) nodes are no multiple of the degrees: workers straddle two.
        return in_order if in_order >= 0 else first_fit(room, groups, devices, devices)
    for i in range(1, groups):
        j = i
        while j > 0 and room.tp[j - 1] == room.tp[i] and room.width[room.order[j - 1]] < room.width[i]:
            room.order[j] = room.order[j - 1]
            j -= 1
        room.order[j] = i
    widest = first_fit(room, groups, devices, per_node)
    if 0 <= widest < in_order:
        return widest
    for g in range(groups):
        room.order[g] = g
    return first_fit(room, groups, devices, per_node)


@kernel
def first_fit(room: Dealing, groups: int, devices: int, per_node: int) -> int:
    """Every group on the first node that holds all of it, else on the emptiest nodes; places, -1 if a worker has none.

    A group has one place on every node that it is on.
    """
    nodes = (devices + per_node - 1) // per_node
    for node in range(nodes):
        room.begun[node] = node * per_node
        room.free[node] = min(per_node, devices - node * per_node)
    fresh, places = 0, 0
    for k in range(groups):
        g = room.order[k]
        tp, left = room.tp[g], room.width[g]
        while left > 0:
            chosen = -1
            if left * tp <= per_node:
                for node in range(min(fresh + 1, nodes)):
                    if room.free[node] >= left * tp:
                        chosen = node
                        break
            if chosen < 0:
                # No node begun is as empty as a fresh one, but the last may be smaller.
                chosen = min(fresh, nodes - 1)
                for node in range(nodes if fresh >= nodes - 1 else 0):
                    if room.free[node] > room.free[chosen] or (room.free[node] == room.free[chosen] and node < chosen):
                        chosen = node
            taken = min(left, room.free[chosen] // tp)
            if taken == 0:
                return -1
            room.group[places], room.first[places], room.workers[places] = g, room.begun[chosen], taken
            room.begun[chosen] += taken * tp
            room.free[chosen] -= taken * tp
            fresh = max(fresh, chosen + 1)
            places += 1
            left -= taken
    return places
