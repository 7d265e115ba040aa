"""Sailor's score of an allocation, for the search: the layer split that scores best, in plain arrays.

An allocation says how many workers of each class (zone, type and tensor-parallel degree) serve each stage. Sailor's
score takes the number of micro-batches from the first stage alone, as if the others were as wide: a plan whose later
stages are narrower would score well and run slowly. So all stages are made equally wide here, of the workers that are
fastest. On plans of that shape the value is `sailor_score.score_s` to rounding, and inf where `memory_fits` objects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.rivals.sailor_score import BUCKET_BYTES, RING_TENSOR_PARALLEL, STATE_BYTES, Measured, reserved_bytes
from polygon.jit.compilation import general

Place = tuple[str, str]
"""Zone and Sailor's name of the type."""
WorkerClass = tuple[str, str, int]
"""Zone, Sailor's name of the type, and tensor-parallel degree."""
ProfileKey = tuple[str, int, int]
"""Sailor's name of the type, micro-batch size, and tensor-parallel degree."""


class ScoreBank(NamedTuple):
    """What the score looks at, at one micro-batch size: c classes, n layers, k sizes of message, p places.

    Classes stand in the order in which a stage lists its workers.
    """

    column: np.ndarray
    """(c,) where the class stands in an allocation."""
    place: np.ndarray
    tp: np.ndarray
    """(c,) ints."""
    seconds: np.ndarray
    """(c, n + 1) running sums of forward and backward; inf where the size was not measured."""
    update_s: np.ndarray
    """(c, n) of one layer."""
    state_bytes: np.ndarray
    held_bytes: np.ndarray
    """(c, n + 1) running sums: of parameters with all that belongs to them; of one micro-batch's activations."""
    room_bytes: np.ndarray
    """(c,) what is left of the memory for both."""
    weight_bytes: np.ndarray
    """(n + 1,) running sum over the whole layers."""
    message: np.ndarray
    """(n,) which size of message a layer sends."""
    message_s: np.ndarray
    """(k, c, c) seconds of a message; inf where no link was measured."""
    curve: np.ndarray
    """(p, p, 3) coefficients between single devices; nan where none was measured."""
    rounds: float
    """Micro-batches per step, over all workers."""


def score_bank(
    measured: Measured, classes: Sequence[WorkerClass], places: Sequence[Place], size: int, global_batch: int
) -> ScoreBank:
    """Collect the arrays for a micro-batch size.

    Parameters
    ----------
    classes : sequence of (zone, type, degree)
        In the order of an allocation's columns.
    places : sequence of (zone, type)
        The order in which stages list their workers (`walk_order`); classes elsewhere are left out.
    """
    rank = {place: i for i, place in enumerate(places)}
    here = [c for c in range(len(classes)) if classes[c][:2] in rank]
    order = sorted(here, key=lambda c: (rank[classes[c][:2]], -classes[c][2], c))
    chosen = [classes[c] for c in order]
    keys = [(gpu, size, tp) for _, gpu, tp in chosen]
    known = [key in measured.forward_s and key[2] in measured.parameters for key in keys]
    sizes = sorted(set(measured.activation_bytes.tolist()))

    def rows(row_of: Callable[[ProfileKey], np.ndarray]) -> np.ndarray:
        never = np.full(measured.layers, np.inf)
        return np.array([row_of(key) if ok else never for key, ok in zip(keys, known, strict=True)])

    def sums(table: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((len(table), 1)), np.cumsum(table, axis=1)], axis=1)

    def message_s(a: WorkerClass, b: WorkerClass, n_bytes: float) -> float:
        return measured.message_s(n_bytes * size, (*a, *b)) if (*a, *b) in measured.link else math.inf

    curve = np.full((len(places), len(places), 3), math.nan)
    for (i, a), (j, b) in itertools.product(enumerate(places), repeat=2):
        curve[i, j] = measured.link.get((*a, 1, *b, 1), (math.nan,) * 3)
    return ScoreBank(
        column=np.array(order, dtype=np.int64),
        place=np.array([rank[c[:2]] for c in chosen], dtype=np.int64),
        tp=np.array([tp for *_, tp in chosen], dtype=np.int64),
        seconds=sums(rows(lambda key: measured.forward_s[key] + measured.backward_s[key])),
        update_s=rows(lambda key: measured.update_s[key]),
        state_bytes=sums(rows(lambda key: STATE_BYTES * measured.parameters[key[2]])),
        held_bytes=sums(rows(lambda key: size * measured.held_bytes[key[2]])),
        room_bytes=np.array([measured.memory_bytes.get(gpu, 0.0) - reserved_bytes(tp) for _, gpu, tp in chosen]),
        weight_bytes=np.concatenate([[0.0], np.cumsum(4.0 * measured.parameters[1])]),
        message=np.array([sizes.index(n) for n in measured.activation_bytes.tolist()], dtype=np.int64),
        message_s=np.array([[[message_s(a, b, n) for b in chosen] for a in chosen] for n in sizes]),
        curve=curve,
        rounds=global_batch / size,
    )


def walk_order(measured: Measured, places: Sequence[Place], n_bytes: float = 2e7) -> list[Place]:
    """An order of places in which the slowest steps from one to the next are quick: reductions go along it.

    A step is a message of `n_bytes` between single devices. Up to five places the best of all orders; of more, the best
    of the walks that begin anywhere and take the quickest next place, improved by moving single places.
    """
    step_s = {
        (a, b): measured.message_s(n_bytes, (*a, 1, *b, 1)) if (*a, 1, *b, 1) in measured.link else math.inf
        for a, b in itertools.permutations(places, 2)
    }

    def slowest_first(walk: Iterable[Place]) -> list[float]:
        return sorted((step_s[step] for step in itertools.pairwise(walk)), reverse=True)

    if len(places) <= 5:
        return list(min(itertools.permutations(places), key=slowest_first))
    walks = []
    for first in places:
        walk = [first]
        while len(walk) < len(places):
            walk.append(min((p for p in places if p not in walk), key=lambda p: step_s[walk[-1], p]))
        walks.append(walk)
    best = min(walks, key=slowest_first)
    improved = True
    while improved:
        improved = False
        for i, j in itertools.permutations(range(len(best)), 2):
            rest = [p for k, p in enumerate(best) if k != i]
            moved = [*rest[:j], best[i], *rest[j:]]
            if slowest_first(moved) < slowest_first(best):
                best, improved = moved, True
    return best


@general
def trim(bank: ScoreBank, x: np.ndarray, kept: np.ndarray) -> tuple[int, int, int]:
    """Make all stages equally wide: no more workers than the narrowest stage needs, the fastest of each.

    Parameters
    ----------
    x : ndarray of int64, shape (rows, classes)
        Rows without a worker that can be used are no stages.
    kept : ndarray of int64, shape (rows, classes)
        Out: workers of each stage, classes in the bank's order.

    Returns
    -------
    tuple of int
        Stages, their width, and micro-batches of a worker; width is 0 where nothing can be used.
    """
    classes = bank.column.shape[0]
    layers = bank.seconds.shape[1] - 1
    stages, width = 0, 0
    for row in range(x.shape[0]):
        total = 0
        for c in range(classes):
            count = x[row, bank.column[c]] if np.isfinite(bank.seconds[c, layers]) else 0
            kept[stages, c] = count
            total += count
        if total > 0:
            width = total if stages == 0 else min(width, total)
            stages += 1
    if width == 0:
        return 0, 0, 0
    rounds = int(np.ceil(bank.rounds / width))
    width = int(np.ceil(bank.rounds / rounds))
    for s in range(stages):
        over = kept[s].sum() - width
        while over > 0:
            slowest = -1
            for c in range(classes):
                if kept[s, c] > 0 and (slowest < 0 or bank.seconds[c, layers] > bank.seconds[slowest, layers]):
                    slowest = c
            dropped = min(over, kept[s, slowest])
            kept[s, slowest] -= dropped
            over -= dropped
    return stages, width, rounds


@general
def slowest_message_s(bank: ScoreBank, size: int, here: np.ndarray, there: np.ndarray) -> float:
    """Seconds of the slowest message when worker j of one stage sends to worker j of another of the same width."""
    i, j, slowest = 0, 0, 0.0
    left_i, left_j = here[0], there[0]
    while True:
        while left_i == 0:
            i += 1
            if i == here.shape[0]:
                return slowest
            left_i = here[i]
        while left_j == 0:
            j += 1
            left_j = there[j]
        slowest = max(slowest, bank.message_s[size, i, j])
        both = min(left_i, left_j)
        left_i -= both
        left_j -= both


@general
def ring_s(bank: ScoreBank, a: int, b: int, n_bytes: float, members: int) -> float:
    """Flat ring in buckets, all of whose steps take as long as those from place a to place b; inf without a link."""
    c0, c1, c2 = bank.curve[a, b]
    if np.isnan(c0):
        return np.inf
    seconds = 0.0
    while n_bytes > 0:
        part = min(n_bytes, BUCKET_BYTES) / members
        log_size = np.log2(part / 1e6)
        seconds += 2 * (members - 1) * part / (1e9 * max(c0 * log_size**2 + c1 * log_size + c2, 1e-3))
        n_bytes -= BUCKET_BYTES
    return seconds


@general
def reduce_s(bank: ScoreBank, workers: np.ndarray, first: int, last: int, width: int) -> float:
    """All-reduce of layers [first, last) over a stage's workers, listed in the bank's order."""
    if width < 2:
        return 0.0
    degree = RING_TENSOR_PARALLEL
    for c in range(workers.shape[0]):
        if workers[c] > 0:
            degree = min(degree, bank.tp[c])
    n_bytes = (bank.weight_bytes[last] - bank.weight_bytes[first]) / degree
    seconds, before, inside = 0.0, -1, -1
    for c in range(workers.shape[0]):
        if workers[c] == 0:
            continue
        p = bank.place[c]
        if before >= 0 and (before != p or inside != p):
            seconds = max(seconds, ring_s(bank, before, p, n_bytes, width))
            inside = p if before == p else inside
        if workers[c] > 1 and inside != p:
            seconds = max(seconds, ring_s(bank, p, p, n_bytes, width))
            inside = p
        before = p
    return seconds


@general
def stage_s(bank: ScoreBank, workers: np.ndarray, first: int, last: int, in_flight: int) -> float:
    """Forward and backward of layers [first, last) on the slowest worker; inf where the memory of one is too small."""
    seconds = 0.0
    for c in range(workers.shape[0]):
        if workers[c] > 0:
            state = bank.state_bytes[c, last] - bank.state_bytes[c, first]
            held = (bank.held_bytes[c, last] - bank.held_bytes[c, first]) * in_flight
            if state + held > bank.room_bytes[c]:
                return np.inf
            seconds = max(seconds, bank.seconds[c, last] - bank.seconds[c, first])
    return seconds


@general
def step_s(bank: ScoreBank, kept: np.ndarray, stages: int, width: int, rounds: int, bounds: np.ndarray) -> float:
    """Sailor's score of equally wide stages with layers [bounds[s], bounds[s + 1])."""
    slowest, passing, update, reduction, onward_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for s in range(stages):
        first, last = bounds[s], bounds[s + 1]
        seconds = stage_s(bank, kept[s], first, last, stages - s)
        if not np.isfinite(seconds):
            return np.inf
        if s > 0:
            back_s = slowest_message_s(bank, bank.message[first], kept[s], kept[s - 1])
            seconds += 2 * back_s if s == stages - 1 else back_s
        if s < stages - 1:
            onward_s = slowest_message_s(bank, bank.message[last - 1], kept[s], kept[s + 1])
            seconds += 2 * onward_s if s == 0 and stages > 3 else onward_s
        slowest = max(slowest, seconds)
        passing += seconds
        for c in range(kept.shape[1]):
            if kept[s, c] > 0:
                update = max(update, bank.update_s[c, first])
        reduction = max(reduction, reduce_s(bank, kept[s], first, last, width))
    return (rounds - 1) * slowest + passing + update + reduction


@general
def even_split(bank: ScoreBank, kept: np.ndarray, stages: int, bounds: np.ndarray) -> bool:
    """Cut the layers so that the slowest stage computes least (goal bisected); False if no cut fits the memory."""
    layers = bank.seconds.shape[1] - 1
    trial = np.zeros(stages + 1, dtype=np.int64)
    low, high = 0.0, np.inf
    for _ in range(24):
        goal = 0.5 * (low + high) if np.isfinite(high) else np.inf
        worst, at = 0.0, 0
        for s in range(stages):
            trial[s] = at
            taken = 0.0
            while at < layers - (stages - 1 - s):
                more = stage_s(bank, kept[s], trial[s], at + 1, stages - s)
                if more > goal or more == np.inf:
                    break
                taken = more
                at += 1
            if at == trial[s]:
                break
            worst = max(worst, taken)
        trial[stages] = at
        if at == layers and trial[stages - 1] < at:
            bounds[: stages + 1] = trial
            high = worst
        elif not np.isfinite(high):
            return False
        else:
            low = goal
        if high - low <= 1e-3 * high:
            break
    return True


@general
def score_allocation_s(bank: ScoreBank, x: np.ndarray, kept: np.ndarray, bounds: np.ndarray) -> float:
    """Sailor's score of an allocation with the best layer split found; inf where it has none.

    From the split whose slowest stage computes least, one to three neighbouring boundaries are moved by a layer as long
    as the whole score gets better: messages, update and reduction depend on the split as well.

    Parameters
    ----------
    x, kept : ndarray of int64, shape (rows, classes)
        The allocation, and (out) the workers that serve (see `trim`).
    bounds : ndarray of int64, shape (rows + 1,)
        Out: first layer of every stage, and the end; zeros behind.
    """
    kept[:, :] = 0
    bounds[:] = 0
    stages, width, rounds = trim(bank, x, kept)
    if width == 0 or stages > bank.seconds.shape[1] - 1 or not even_split(bank, kept, stages, bounds):
        return np.inf
    best = step_s(bank, kept, stages, width, rounds, bounds)
    improved = True
    while improved:
        improved = False
        for first in range(1, stages):
            for last in range(first, min(first + 3, stages)):
                for move in (-1, 1):
                    if bounds[first - 1] >= bounds[first] + move or bounds[last] + move >= bounds[last + 1]:
                        continue
                    bounds[first : last + 1] += move
                    value = step_s(bank, kept, stages, width, rounds, bounds)
                    if value < best * (1 - 1e-9):
                        best, improved = value, True
                    else:
                        bounds[first : last + 1] -= move
    return best
