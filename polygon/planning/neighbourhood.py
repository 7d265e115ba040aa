"""Every allocation that differs from another in one thing, in random order: what a descent goes through until nothing
is better (`solvers.local_search.Descents`).

Random steps (`polygon.planning.candidates`) meet most of these seldom: a pipeline of four stages on nine pools has some
six hundred, and a step that helps is often one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from polygon.planning.decode import Allocation
from polygon.planning.initial_solutions import even_parts
from solvers.allocation import AllocationSpace

MOST_CLASSES = 48
"""Classes of which idle devices are looked at, drawn anew for each allocation where there are more."""
PARTS = (1.0, 0.7, 1.4)
"""Times as quick as those whose place they take are workers of another class."""

SpaceOf = Callable[[int, int], AllocationSpace]
Settings = list[tuple[int, int, int]]
"""Micro-batch sizes, context- and expert-parallel degrees."""


def near(
    x: Allocation,
    space_of: SpaceOf,
    settings: Settings,
    rates: np.ndarray,
    rng: np.random.Generator,
) -> Iterator[Allocation]:
    """Allocations of one change each.

    Parameters
    ----------
    space_of : callable
        The space of so many rows, in units of so many groups (`Allocation.unit`).
    settings : list of (int, int, int)
        That may take the place of the allocation's own.
    rates : ndarray, shape (classes,)
        Micro-batches per second of one worker in a block.
    """
    unit = x.unit
    space, whole = space_of(len(x.workers), unit), x.workers // unit
    rows = whole[whole.any(axis=1)]
    idle = space.free(whole)[space.pool] // space.units
    joining = rng.permutation(np.flatnonzero(idle > 0))[:MOST_CLASSES].tolist()
    edits: list[Callable[[np.ndarray], np.ndarray]] = _of_stages(len(rows), len(rows) < space.groups)
    for c in joining:
        for s in range(len(rows) + 1):
            if s < len(rows):
                edits += [partial(_with_more, s=s, c=c, count=n) for n in {1, int(idle[c])}]
            if len(rows) < space.groups:
                edits += [partial(_with_stage, s=s, c=c, count=n) for n in {int(idle[c]), _half(int(idle[c]))}]
    for s, c in np.argwhere(rows).tolist():
        here, own = int(rows[s, c]), int(space.free(whole)[space.pool[c]])
        edits += [partial(_with_more, s=s, c=c, count=-n) for n in {1, here}]
        for t in range(len(rows)):
            counts = {1, here, _half(here)} if t != s else ()
            edits += [partial(_shifted, s=s, t=t, c=c, count=n) for n in counts]
        for d in np.flatnonzero((space.pool == space.pool[c]) & (np.arange(space.classes) != c)).tolist():
            devices = here * int(space.units[c])
            counts = {n // int(space.units[d]) for n in (devices, devices + own)}
            edits += [partial(_replaced, s=s, c=c, d=d, count=n) for n in counts if n]
        for d in joining:
            if space.pool[d] != space.pool[c]:
                as_quick = here * rates[c] / rates[d]
                counts = {min(max(1, round(part * as_quick)), int(idle[d])) for part in PARTS}
                edits += [partial(_replaced, s=s, c=c, d=d, count=n) for n in counts]
    used = sorted(set(space.pool[rows.any(axis=0)].tolist()))
    degrees = [
        partial(at_degree, space=space, pools=pools, degree=degree)
        for pools in [used, *([p] for p in used if len(used) > 1)]
        for degree in sorted(set(space.units[np.isin(space.pool, pools)].tolist()))
    ]
    for i in rng.permutation(len(edits) + len(degrees) + len(settings)).tolist():
        if i < len(edits) + len(degrees):
            changed = edits[i](rows) if i < len(edits) else degrees[i - len(edits)](rows)
            changed = changed[changed.any(axis=1)]
            if not 0 < len(changed) <= space.groups:
                continue
            workers = np.zeros((space.groups, space.classes), dtype=np.int64)
            workers[: len(changed)] = changed * unit
            other = x.with_workers(workers)
        else:
            size, cp, ep = settings[i - len(edits) - len(degrees)]
            other = replace(x, micro_batch_size=size, cp=cp, ep=ep)
        yield other
        if i >= len(edits) and other.micro_batch_size == x.micro_batch_size:
            yield other.with_workers(with_idle(other, space_of, rng))


def with_idle(
    x: Allocation, space_of: SpaceOf, rng: np.random.Generator, classes: Sequence[int] | None = None
) -> np.ndarray:
    """The workers of an allocation, and idle devices of some classes (None: all) beside others of their class, as
    evenly as may be: one degree leaves over what another can use, so that no change of it alone may help."""
    space, workers = space_of(len(x.workers), x.unit), x.workers // x.unit
    used = np.flatnonzero(workers.any(axis=0))
    for c in rng.permutation(used if classes is None else np.intersect1d(used, classes)).tolist():
        (stages,) = workers[:, c].nonzero()
        free = int(space.free(workers)[space.pool[c]]) // int(space.units[c])
        workers[stages, c] += even_parts(free, len(stages), int(rng.integers(len(stages))))
    return workers * x.unit


def _of_stages(count: int, room: bool) -> list[Callable[[np.ndarray], np.ndarray]]:
    """Stages at another place, left out, joined with the next one, or cut in two halves where there is `room`."""
    places = [(s, t) for s in range(count) for t in range(count) if t not in (s, s - 1)]
    edits: list[Callable[[np.ndarray], np.ndarray]] = [partial(_moved, s=s, t=t) for s, t in places]
    edits += [partial(np.delete, obj=s, axis=0) for s in range(count) if count > 1]
    edits += [partial(_joined, s=s) for s in range(count - 1)]
    return edits + [partial(_cut, s=s) for s in range(count) if room]


def _half(count: int) -> int:
    """The larger half."""
    return (count + 1) // 2


def _with_more(rows: np.ndarray, s: int, c: int, count: int) -> np.ndarray:
    rows = rows.copy()
    rows[s, c] += count
    return rows


def _with_stage(rows: np.ndarray, s: int, c: int, count: int) -> np.ndarray:
    rows = np.insert(rows, s, 0, axis=0)
    rows[s, c] = count
    return rows


def _shifted(rows: np.ndarray, s: int, t: int, c: int, count: int) -> np.ndarray:
    rows = rows.copy()
    rows[[s, t], c] += (-count, count)
    return rows


def _replaced(rows: np.ndarray, s: int, c: int, d: int, count: int) -> np.ndarray:
    rows = rows.copy()
    rows[s, c] = 0
    rows[s, d] += count
    return rows


def at_degree(rows: np.ndarray, space: AllocationSpace, pools: list[int], degree: int) -> np.ndarray:
    """The same devices of some pools in the same stages at a tensor-parallel degree, where they can have it."""
    rows = rows.copy()
    for p in pools:
        (same,) = np.nonzero(space.pool == p)
        target = same[space.units[same] == degree]
        if len(target):
            devices = rows[:, same] @ space.units[same]
            rows[:, same] = 0
            rows[:, target[0]] = devices // degree
    return rows


def _moved(rows: np.ndarray, s: int, t: int) -> np.ndarray:
    return np.insert(np.delete(rows, s, axis=0), t, rows[s], axis=0)


def _joined(rows: np.ndarray, s: int) -> np.ndarray:
    rows = rows.copy()
    rows[s] += rows[s + 1]
    return np.delete(rows, s + 1, axis=0)


def _cut(rows: np.ndarray, s: int) -> np.ndarray:
    half = rows[s] // 2
    rows = np.insert(rows, s, half, axis=0)
    rows[s + 1] -= half
    return rows
