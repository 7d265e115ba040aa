"""The stages of an allocation as lists of worker classes, for the kernels of the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import inner
from polygon.planning.problem_arrays import Bank


class Stages(NamedTuple):
    """Stages of an allocation by worker class, and by kind of class where the place does not matter.

    Arrays of shape (rows, classes) of an allocation, of which the first stages count; `members` and `kind_members`,
    shape (rows,), say how many entries of a row do.
    """

    members: np.ndarray
    classes: np.ndarray
    counts: np.ndarray
    seconds: np.ndarray
    """Per micro-batch, forward and backward."""
    kind_members: np.ndarray
    kinds: np.ndarray
    kind_counts: np.ndarray
    kind_shards: np.ndarray
    """Over how many devices the smallest class of a kind can shard."""
    kind_spread: np.ndarray
    """(rows, classes, 2): over how many the largest does, whose traffic takes longest, and of these the most on one
    node, of the class that has fewest there."""
    kind_seconds: np.ndarray
    held: np.ndarray
    """Micro-batches in flight on a worker of a kind."""
    owed_bytes: np.ndarray
    """Per parameter held by a kind, of what packing owes (`polygon.cost.stage_reduction.room_of_sums`)."""
    outer_bytes: np.ndarray
    """(1,) per parameter held, of the outer optimizer of regions that take local steps."""
    unlike: np.ndarray
    """(rows,) whether workers of a stage are cut unlike: then they hold whole weights and gradients, and ZeRO none."""
    tied_owed_bytes: np.ndarray
    """(rows, classes) per parameter of a weight that the first and the last stage sum apart, what packing owes."""
    near: np.ndarray
    heard: np.ndarray
    """(rows,) buffers of sums as `SumsRoom.heard` has them: inside regions, and between them if nothing is packed."""
    plain: np.ndarray
    """(1,) whether no gradient is packed, as memory does not hold what that owes."""
    whole_ties: np.ndarray
    """(1,) whether ZeRO divides no weight that the first and the last stage both have."""
    turn: np.ndarray
    turns: np.ndarray
    """(rows,) numbers that no stage had before, whatever it was made of and held; (1,) how many there were."""
    met: np.ndarray
    met_s: np.ndarray
    """(MEMORY,) turns and layers (`key_of`) of which the makespan is known, and it."""


MEMORY = 4096
"""Makespans that are kept, in places by their keys; the cuts of an allocation's layers look at some hundred."""


@gives_pointed
def stages_for(rows: int, classes: int) -> Stages:
    """Room for the stages of allocations of a shape."""
    shape = (rows, classes)
    return Stages(
        members=np.zeros(rows, dtype=np.int64),
        classes=np.zeros(shape, dtype=np.int64),
        counts=np.zeros(shape, dtype=np.int64),
        seconds=np.zeros(shape),
        kind_members=np.zeros(rows, dtype=np.int64),
        kinds=np.zeros(shape, dtype=np.int64),
        kind_counts=np.zeros(shape, dtype=np.int64),
        kind_shards=np.zeros(shape, dtype=np.int64),
        kind_spread=np.zeros((*shape, 2), dtype=np.int64),
        kind_seconds=np.zeros(shape),
        held=np.zeros(shape),
        owed_bytes=np.zeros(shape),
        outer_bytes=np.zeros(1),
        unlike=np.zeros(rows, dtype=np.bool_),
        tied_owed_bytes=np.zeros(shape),
        near=np.zeros(rows),
        heard=np.zeros(rows),
        plain=np.zeros(1, dtype=np.bool_),
        whole_ties=np.zeros(1, dtype=np.bool_),
        turn=np.zeros(rows, dtype=np.int64),
        turns=np.zeros(1, dtype=np.int64),
        met=np.zeros(MEMORY, dtype=np.int64),
        met_s=np.zeros(MEMORY),
    )


@inner
def take_turn(stages: Stages, s: int) -> None:
    """Forget the makespans of stage s: it is another, or holds more or fewer micro-batches."""
    stages.turns[0] += 1
    stages.turn[s] = stages.turns[0]


@inner
def key_of(bank: Bank, stages: Stages, s: int, first: int, last: int) -> tuple[int, int]:
    """What tells layers [first, last) of stage s from all others, and a place for it."""
    turn, ends = stages.turn[s], bank.parameters.shape[1]
    return (turn * ends + first) * ends + last, (97 * turn + 61 * first + last) % MEMORY


@inner
def gather_stages(x: np.ndarray, stages: Stages, cp: int) -> int:
    """Drop empty rows of an allocation; fills the lists of classes and counts; returns the number of stages.

    A worker takes `cp` of the allocation's tensor-parallel groups.
    """
    n = 0
    for s in range(x.shape[0]):
        k = 0
        for c in range(x.shape[1]):
            if x[s, c] >= cp:
                stages.classes[n, k] = c
                stages.counts[n, k] = x[s, c] // cp
                k += 1
        if k:
            stages.members[n] = k
            n += 1
    return n


@inner
def merge_kinds(bank: Bank, stages: Stages, n: int, on_node: np.ndarray) -> None:
    """Fill the lists by kind of the first n stages from those by class.

    Parameters
    ----------
    on_node : ndarray of int64, shape (rows, classes)
        The most workers of a stage's class that are on one node.
    """
    for s in range(n):
        take_turn(stages, s)
        k, stages.unlike[s] = 0, False
        for i in range(stages.members[s]):
            c, count = stages.classes[s, i], stages.counts[s, i]
            kind = bank.kind[c]
            stages.unlike[s] = stages.unlike[s] or bank.tp[c] != bank.tp[stages.classes[s, 0]]
            # Parts of a sequence may need several nodes.
            shards, near = count * bank.cp, min(on_node[s, i] * bank.cp, max(1, bank.devices_per_node[c] // bank.tp[c]))
            at = 0
            while at < k and stages.kinds[s, at] != kind:
                at += 1
            if at == k:
                stages.kinds[s, k], stages.kind_counts[s, k] = kind, count
                stages.kind_shards[s, k] = shards
                stages.kind_spread[s, k, 0], stages.kind_spread[s, k, 1] = shards, near
                k += 1
            else:
                stages.kind_counts[s, at] += count
                stages.kind_shards[s, at] = min(stages.kind_shards[s, at], shards)
                stages.kind_spread[s, at, 0] = max(stages.kind_spread[s, at, 0], shards)
                stages.kind_spread[s, at, 1] = min(stages.kind_spread[s, at, 1], near)
        stages.kind_members[s] = k
    stages.whole_ties[0] = _ties_are_whole(bank, stages, n)


@inner
def _ties_are_whole(bank: Bank, stages: Stages, n: int) -> bool:
    """Whether the ends are cut unlike, or one of them has a single device (`polygon.cost.estimate.group_memory`)."""
    if n == 1 or not bank.overlap.by_layer:
        return False
    degree = bank.tp[stages.kinds[0, 0]]
    for s in (0, n - 1):
        devices = 0
        for i in range(stages.kind_members[s]):
            if bank.tp[stages.kinds[s, i]] != degree:
                return True
            devices += stages.kind_counts[s, i] * bank.cp
        if devices == 1:
            return True
    return False


@inner
def width(stages: Stages, s: int) -> int:
    """Workers of stage s."""
    width = 0
    for i in range(stages.kind_members[s]):
        width += stages.kind_counts[s, i]
    return width


@inner
def kind_at(bank: Bank, stages: Stages, s: int, c: int) -> int:
    """The place of a class's kind in the list of stage s."""
    at = 0
    while stages.kinds[s, at] != bank.kind[c]:
        at += 1
    return at
