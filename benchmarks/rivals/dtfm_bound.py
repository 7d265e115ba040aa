"""Lower bounds and proofs of optimality for DT-FM's objective, by counting kinds instead of devices.

Fix a threshold t. A perfect matching whose longest edge is at most t exists between two stages only if both hold
equally many devices of every connected component of the graph of kinds with edges <= t. So a path of S stages with h
hops longer than t falls into h + 1 segments of stages with equal component counts u, and

    sum over segments of length * u = devices of each component.                                            (1)

Let D(k, t) be the least worst reduction time of any k stages that satisfy (1), each taken at the best placement that
has its counts. A placement whose reduction takes D then has at least h(t, D) = min {k : D(k, t) <= D} - 1 hops longer
than t, and integrating over t, from the shortest hop t_0 on,

    total >= min over D of  D + 2 ((S - 1) t_0 + integral of h(t, D) dt).

Stages that repeat (segments longer than one) may not hold kinds that have no edge <= t at all. D(k, t) is computed
exactly for k <= 3, and for more segments with components merged until their number is small, which only lowers it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.rivals.dtfm import Scenario
from polygon.jit.compilation import general

MOST_STAGES_ENUMERATED = 200_000
"""Different stages (as counts of kinds) above which only the trivial bound is computed."""
MOST_TABLE = 60_000_000
"""Steps of the table of merged components that are affordable."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound [s], and the parts it is made of."""

    total_s: float
    reduction_s: float
    path_s: float
    stages_seen: int
    """Different stages that were enumerated; 0 for the trivial bound."""


def lower_bound(scenario: Scenario) -> Bound:
    """What no placement of a scenario can beat under DT-FM's objective."""
    counts, stages = scenario.counts, scenario.stages
    hop_s = _possible_hops(scenario)
    shortest_s = float(hop_s.min())
    rows = _stage_rows(counts, scenario.width)
    if rows is None:
        return Bound(
            total_s=2 * (stages - 1) * shortest_s, reduction_s=0.0, path_s=(stages - 1) * shortest_s, stages_seen=0
        )
    reduction_s = _reductions(rows, scenario.pair_s)
    thresholds = np.unique(hop_s[np.isfinite(hop_s)])
    levels = [_level(hop_s, t) for t in thresholds]
    needed = np.full((len(levels), stages + 1), np.inf)
    for i in reversed(range(len(levels))):
        if i + 1 < len(levels):
            needed[i] = needed[i + 1]
        if i + 1 == len(levels) or not _same(levels[i], levels[i + 1]):
            needed[i] = np.maximum(
                _segment_reductions(rows, reduction_s, levels[i], counts, stages), _finite(needed[i])
            )
    return _integrate(needed, thresholds, stages, len(rows))


def _finite(values: np.ndarray) -> np.ndarray:
    """Before the first level nothing is known: 0 in place of inf."""
    return np.where(np.isinf(values).all(), 0.0, values)


def _integrate(needed: np.ndarray, thresholds: np.ndarray, stages: int, seen: int) -> Bound:
    """Minimise over D the bound of the module's docstring; `needed[i, k]` is D(k, thresholds[i])."""
    steps = np.diff(thresholds)
    best = Bound(total_s=math.inf, reduction_s=math.inf, path_s=math.inf, stages_seen=seen)
    for reduction_s in np.unique(needed[np.isfinite(needed)]):
        segments = np.array([np.argmax(row <= reduction_s) if (row <= reduction_s).any() else 0 for row in needed])
        if (segments == 0).any():
            continue
        path_s = (stages - 1) * thresholds[0] + float(((segments - 1)[: len(steps)] * steps).sum())
        total_s = float(reduction_s + 2 * path_s)
        if total_s < best.total_s:
            best = Bound(total_s=total_s, reduction_s=float(reduction_s), path_s=float(path_s), stages_seen=seen)
    return best


def _possible_hops(scenario: Scenario) -> np.ndarray:
    """Edges between kinds; inf on the diagonal of kinds with a single device."""
    hop_s = scenario.hop_s.copy()
    single = np.flatnonzero(scenario.counts < 2)
    hop_s[single, single] = np.inf
    return hop_s


def _stage_rows(counts: np.ndarray, width: int) -> np.ndarray | None:
    """Every stage as counts of kinds, shape (rows, kinds); None where there are too many."""
    ways = [1] + [0] * width
    for count in counts:
        ways = [sum(ways[w - c] for c in range(min(int(count), w) + 1)) for w in range(width + 1)]
    if ways[width] > MOST_STAGES_ENUMERATED:
        return None

    def fill(kind: int, left: int) -> Iterator[tuple[int, ...]]:
        if kind == len(counts) - 1:
            if left <= counts[kind]:
                yield (left,)
            return
        for count in range(min(int(counts[kind]), left) + 1):
            for rest in fill(kind + 1, left - count):
                yield (count, *rest)

    return np.array(list(fill(0, width)), dtype=np.int64)


def _reductions(rows: np.ndarray, pair_s: np.ndarray) -> np.ndarray:
    """Reduction time of each stage."""
    sums = rows @ pair_s - np.diag(pair_s)
    return np.where(rows > 0, sums, 0.0).max(axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Level:
    """Components at a threshold, and which kinds have no edge at all (`lone`)."""

    component: np.ndarray
    lone: np.ndarray


def _level(hop_s: np.ndarray, threshold: float) -> _Level:
    kinds = len(hop_s)
    component = np.arange(kinds)
    for a, b in itertools.combinations(range(kinds), 2):
        if hop_s[a, b] <= threshold:
            component[component == component[b]] = component[a]
    component = np.unique(component, return_inverse=True)[1]
    single = np.bincount(component)[component] == 1
    return _Level(component=component, lone=single & (np.diag(hop_s) > threshold))


def _same(a: _Level, b: _Level) -> bool:
    return np.array_equal(a.component, b.component) and np.array_equal(a.lone, b.lone)


def _segment_reductions(
    rows: np.ndarray, reduction_s: np.ndarray, level: _Level, counts: np.ndarray, stages: int
) -> np.ndarray:
    """Lower bounds on D(k, t) for k = 0..stages (entry 0 is inf)."""
    component, lone = level.component, level.lone
    needed = np.zeros(stages + 1)
    needed[0] = np.inf
    for k, value in enumerate(_few_segments(rows, reduction_s, component, lone, counts, stages), start=1):
        needed[k] = value
    merged = [np.where(lone, 0, 1)] if lone.any() and not lone.all() else []
    for groups in (*_merged(component, counts, stages, int(rows[0].sum())), *merged):
        names = np.unique(groups, return_inverse=True)[1]
        needed[1:] = np.maximum(needed[1:], _table_segments(rows, reduction_s, names, lone, counts, stages))
    # With more segments allowed, no more is needed.
    needed[1:] = np.minimum.accumulate(needed[1:])
    return needed


def _projected(
    rows: np.ndarray, reduction_s: np.ndarray, component: np.ndarray, lone: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Component counts that stages can have, and the least reduction time with each, alone and repeated."""
    member = np.zeros((len(component), int(component.max()) + 1), dtype=np.int64)
    member[np.arange(len(component)), component] = 1
    distinct, index = np.unique(rows @ member, axis=0, return_inverse=True)
    once_s, long_s = np.full(len(distinct), np.inf), np.full(len(distinct), np.inf)
    np.minimum.at(once_s, index.ravel(), reduction_s)
    clean = ~(rows[:, lone] > 0).any(axis=1)
    np.minimum.at(long_s, index.ravel()[clean], reduction_s[clean])
    return distinct, once_s, long_s


def _few_segments(
    rows: np.ndarray,
    reduction_s: np.ndarray,
    component: np.ndarray,
    lone: np.ndarray,
    counts: np.ndarray,
    stages: int,
) -> list[float]:
    """D(k, t) for k = 1, 2 and 3, exactly."""
    distinct, once_s, long_s = _projected(rows, reduction_s, component, lone)
    total = np.bincount(component, weights=counts).astype(np.int64)
    order = np.argsort(once_s, kind="stable")
    distinct, once_s, long_s = distinct[order], once_s[order], long_s[order]
    # Stages as numbers, so that the last segment can be looked up.
    radix = np.cumprod(np.concatenate([[1], total[:-1] + 1]))
    code = distinct @ radix
    by_code = np.argsort(code)
    found = []
    for k in range(1, min(3, stages) + 1):
        best = math.inf
        for lengths in _lengths(stages, k):
            lengths_array = np.array(lengths, dtype=np.int64)
            best = _best_of(distinct, once_s, long_s, code[by_code], by_code, radix, total, lengths_array, best)
        found.append(best)
    return found


def _lengths(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Partitions of a number into ascending parts."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total // parts + 1):
        for rest in _lengths(total - first, parts - 1, first):
            yield (first, *rest)


@general
def _lookup(left: np.ndarray, length: int, codes: np.ndarray, by_code: np.ndarray, radix: np.ndarray) -> int:
    """Which stage repeated `length` times gives exactly `left`; -1 if none."""
    code = 0
    for c in range(len(left)):
        if left[c] < 0 or left[c] % length:
            return -1
        code += left[c] // length * radix[c]
    place = np.searchsorted(codes, code)
    return by_code[place] if place < len(codes) and codes[place] == code else -1


@general
def _best_of(
    distinct: np.ndarray,
    once_s: np.ndarray,
    long_s: np.ndarray,
    codes: np.ndarray,
    by_code: np.ndarray,
    radix: np.ndarray,
    total: np.ndarray,
    lengths: np.ndarray,
    best: float,
) -> float:
    """Least worst reduction of one to three segments of given lengths; stages are sorted by `once_s`."""
    k = len(lengths)
    for i in range(len(distinct) if k > 1 else 1):
        first = 0.0
        left = total.copy()
        if k > 1:
            if once_s[i] >= best:
                break
            first = once_s[i] if lengths[0] == 1 else long_s[i]
            left -= lengths[0] * distinct[i]
            if first >= best or left.min() < 0:
                continue
        for j in range(len(distinct) if k > 2 else 1):
            second = first
            rest = left
            if k > 2:
                if once_s[j] >= best:
                    break
                second = max(first, once_s[j] if lengths[1] == 1 else long_s[j])
                if second >= best:
                    continue
                fits = True
                for c in range(len(left)):
                    after = left[c] - lengths[1] * distinct[j, c]
                    if after < 0 or after % lengths[2]:
                        fits = False
                        break
                if not fits:
                    continue
                rest = left - lengths[1] * distinct[j]
            last = _lookup(rest, lengths[k - 1], codes, by_code, radix)
            if last >= 0:
                best = min(best, max(second, once_s[last] if lengths[k - 1] == 1 else long_s[last]))
    return best


def _merged(component: np.ndarray, counts: np.ndarray, stages: int, width: int) -> Iterator[np.ndarray]:
    """Ways to merge components until their table is affordable: the largest apart, the rest as one."""
    sizes = np.bincount(component, weights=counts).astype(np.int64)
    order = np.argsort(-sizes, kind="stable")
    for apart in range(len(sizes), 0, -1):
        groups = np.minimum(np.argsort(order)[component], apart - 1 if apart == len(sizes) else apart)
        totals = np.bincount(groups, weights=counts).astype(np.int64)
        states = int(np.prod((totals + 1)[:-1])) if len(totals) > 1 else 1
        if states * math.comb(width + len(totals) - 1, len(totals) - 1) * stages**3 <= MOST_TABLE * 4:
            yield groups
            return


def _table_segments(
    rows: np.ndarray,
    reduction_s: np.ndarray,
    component: np.ndarray,
    lone: np.ndarray,
    counts: np.ndarray,
    stages: int,
) -> np.ndarray:
    """D(k, t) of merged components for k = 1..stages, by dynamic programming over stages and counts used."""
    distinct, once_s, long_s = _projected(rows, reduction_s, component, lone)
    total = np.bincount(component, weights=counts).astype(np.int64)
    # The last component follows from the others, as every stage is full.
    radix = np.concatenate([np.cumprod(np.concatenate([[1], total[:-2] + 1]))[: len(total) - 1], [0]]).astype(np.int64)
    states = int(np.prod(total[:-1] + 1))
    return _table(distinct, once_s, long_s, radix, total, states, stages)


@general
def _table(
    distinct: np.ndarray,
    once_s: np.ndarray,
    long_s: np.ndarray,
    radix: np.ndarray,
    total: np.ndarray,
    states: int,
    stages: int,
) -> np.ndarray:
    """Least worst reduction by number of segments; state (stages used, counts used)."""
    kinds = len(total)
    width = distinct[0].sum()
    now = np.full((stages + 1, states), np.inf)
    now[0, 0] = 0.0
    needed = np.full(stages, np.inf)
    goal = 0
    for c in range(kinds):
        goal += radix[c] * total[c]
    used = np.zeros(kinds, np.int64)
    for k in range(stages):
        then = np.full((stages + 1, states), np.inf)
        for s in range(stages):
            for state in range(states):
                value = now[s, state]
                if value == np.inf:
                    continue
                rest = state
                used[kinds - 1] = s * width
                for c in range(kinds - 1):
                    used[c] = rest % (total[c] + 1)
                    rest //= total[c] + 1
                    used[kinds - 1] -= used[c]
                for i in range(len(distinct)):
                    for length in range(1, stages - s + 1):
                        reduction = max(value, once_s[i] if length == 1 else long_s[i])
                        if reduction == np.inf:
                            break
                        fits = True
                        to = state
                        for c in range(kinds):
                            if used[c] + length * distinct[i, c] > total[c]:
                                fits = False
                                break
                            to += length * distinct[i, c] * radix[c]
                        if not fits:
                            break
                        if reduction < then[s + length, to]:
                            then[s + length, to] = reduction
        needed[k] = then[stages, goal]
        now = then
    return needed
