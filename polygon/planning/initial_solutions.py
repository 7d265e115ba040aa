"""Where the search begins: allocations that a careful person would try first."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from polygon.planning.decode import Allocation, Decoder
from polygon.planning.problem_arrays import Setting

STAGE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LENGTHS, NARROW, MOST_BESIDE = (*range(2, 13), *STAGE_COUNTS[7:]), (1, 2, 4), 512
"""Stages of pipelines that leave devices out, workers of each, and devices of clusters above which none is tried: there
they would leave nearly all out."""
WINDOWS = (2, 3, 4, 6, 8)
"""Regions near each other that share a pipeline."""
MOST_CENTRES, FIRST_WINDOWS, MOST_LIKELY = 12, 4, 24
"""Regions around which windows are opened, windows in which everything is tried, and the best that are kept."""
MOST_TRIMMED, MOST_CHANGES = 6, 300
"""Of the best of them, how many are trimmed, and changes of each after which that ends."""
FAR = 2.0
"""Times the best start so far from which on devices with little memory are left out."""
FARTHEST = 8.0
"""Times the best start from which on other widths of a pipeline in every region, other micro-batch sizes of any start,
and the same with fewer regions are left out."""
MOST_WALKED = 150
"""Regions of all walks together, but for two walks in any case."""
FIRST_ALONE, MOST_ALONE = 4, 60
"""Regions in which everything is tried alone, and the best of these by which the others are tried."""
MANY_ALONE, FEW_ALONE = 12, 12
"""Regions tried so, and the best by which those after them are: of the weakest of many regions few ways matter."""
IN_VAIN = 8
"""Regions by which a start does not grow, one after another, before it grows no more."""


def block_rates(decoder: Decoder, micro_batch_size: int) -> np.ndarray:
    """Micro-batches per second that one worker of each class computes in a block, shape (classes,)."""
    bank = decoder.bank(Setting(micro_batch_size))
    found: np.ndarray = 1 / (
        bank.forward_s[:, 0, 2] - bank.forward_s[:, 0, 1] + bank.backward_s[:, 0, 2] - bank.backward_s[:, 0, 1]
    )
    return found


def far_apart(decoder: Decoder) -> np.ndarray:
    """Seconds of a message of 1 MB between every two regions, the longer of both ways: (regions, regions)."""
    cluster = decoder.problem.cluster
    with np.errstate(divide="ignore"):
        cost = cluster.latency_s + 1e6 / cluster.bytes_per_s
    return np.maximum(cost, cost.T)


def region_walks(decoder: Decoder) -> list[list[int]]:
    """Orders of the regions in which neighbours are close: nearest-neighbour walks, one from every region of few."""
    cost = far_apart(decoder)
    n = len(cost)
    walks = []
    for first in range(min(n, max(2, MOST_WALKED // n))):
        walk, left = [first], set(range(n)) - {first}
        while left:
            here = walk[-1]
            walk.append(min(sorted(left), key=lambda r: cost[here, r]))
            left.remove(walk[-1])
        walks.append(walk)
    return walks


def simple_starts(decoder: Decoder, stages: int, micro_batch_size: int) -> Iterator[np.ndarray]:
    """Allocations that a careful person would try first, shape (stages, classes) each.

    For every tensor-parallel degree: all pools along a walk through close regions, a stage each or cut into stages of
    equal compute; each region alone; each device type alone; all devices as one stage.
    """
    pools = decoder.problem.cluster.pools
    rates = block_rates(decoder, micro_batch_size)
    for tp in sorted({t for _, t in decoder.classes}):
        column: dict[int, int] = {}
        for c, (p, t) in enumerate(decoder.classes):
            if t <= tp and (p not in column or t > decoder.classes[column[p]][1]):
                column[p] = c
        walks = region_walks(decoder)
        regions = sorted({pools[p].region for p in column})
        types = sorted({pools[p].device.name for p in column})
        chains = [_along(walk, column, decoder) for walk in walks]
        chains += [[p for p in column if pools[p].region == r] for r in regions[:16]]
        chains += [[p for p in chains[0] if pools[p].device.name == name] for name in types]
        for chain in chains:
            if len(chain) <= stages:
                yield _a_stage_each(chain, column, decoder, stages)
            yield from _cut_evenly(chain, column, decoder, rates, stages)


def _a_stage_each(chain: list[int], column: dict[int, int], decoder: Decoder, stages: int) -> np.ndarray:
    """The pools of a chain, a stage each."""
    x = np.zeros((stages, len(decoder.classes)), dtype=np.int64)
    for s, p in enumerate(chain):
        x[s, column[p]] = decoder.problem.cluster.pools[p].devices // decoder.classes[column[p]][1]
    return x


def stage_counts(decoder: Decoder, most: int) -> list[int]:
    """Numbers of stages that starts have, so many at most: the user's own limit is one of them."""
    limit = decoder.problem.constraints.most_stages
    return sorted({count for count in (*STAGE_COUNTS, limit or 1) if count <= most})


def _cut_evenly(
    chain: list[int], column: dict[int, int], decoder: Decoder, rates: np.ndarray, stages: int
) -> Iterator[np.ndarray]:
    """The workers of a chain of pools, cut into 1, 2, 3, 4, 6, 8, ... consecutive stages of equal compute."""
    pools = decoder.problem.cluster.pools
    counts = np.array([pools[p].devices // decoder.classes[column[p]][1] for p in chain])
    columns = np.array([column[p] for p in chain])
    if counts.sum() == 0:
        return
    worker_column = np.repeat(columns, counts)
    done = np.cumsum(rates[worker_column])
    for count in stage_counts(decoder, min(stages, len(worker_column))):
        stage = np.minimum((done - rates[worker_column] / 2) / done[-1] * count, count - 1e-9).astype(np.int64)
        x = np.zeros((stages, len(decoder.classes)), dtype=np.int64)
        np.add.at(x, (stage, worker_column), 1)
        yield x


def kind_sequences(decoder: Decoder, rows: int, sizes: Sequence[int], limit: int = 6_000) -> Iterator[Allocation]:
    """Stages of one device type and tensor-parallel degree each, in every sequence of these.

    The devices of a type, in whatever region, are shared out so that its stages are equally wide. Sequences of 1, 2,
    3, ... stages are given as long as there are no more than `limit` of a length, counting micro-batch sizes; of longer
    ones those that change the kind once at most, after a quarter, a half or three quarters of the stages.

    Parameters
    ----------
    rows : int
        Of an allocation: the most stages.
    sizes : sequence of int
        Micro-batch sizes.
    """
    pools = decoder.problem.cluster.pools
    devices = np.array([pools[p].devices for p, _ in decoder.classes])
    columns: dict[tuple[str, int], list[int]] = {}
    for c, (p, tp) in enumerate(decoder.classes):
        columns.setdefault((pools[p].device.name, tp), []).append(c)
    for sequence in _sequences(list(columns), rows, len(sizes), limit):
        x = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
        per_width = Counter[str]()
        for name, tp in sequence:
            per_width[name] += tp
        for s, kind in enumerate(sequence):
            x[s, columns[kind]] = devices[columns[kind]] // per_width[kind[0]]
        if x[: len(sequence)].any(axis=1).all():
            for size in sizes:
                yield Allocation(workers=x, micro_batch_size=size)


def _sequences(kinds: list[tuple[str, int]], rows: int, sizes: int, limit: int) -> Iterator[Sequence[tuple[str, int]]]:
    """See `kind_sequences`."""
    for stages in range(1, rows + 1):
        if stages == 1 or len(kinds) ** stages * sizes <= limit:
            yield from itertools.product(kinds, repeat=stages)
        else:
            yield from ([kind] * stages for kind in kinds)
            for a, b in itertools.permutations(kinds, 2) if stages % 4 == 0 else ():
                yield from ([a] * cut + [b] * (stages - cut) for cut in (stages // 4, stages // 2, 3 * stages // 4))


def region_sequences(decoder: Decoder, rows: int, sizes: Sequence[int], limit: int = 6_000) -> Iterator[Allocation]:
    """Whole regions as stages, in every sequence of two, three, ... of them, read from one end: as where weak devices
    between two strong regions have more ways to either than these have to one another.

    Every pool at a degree or the largest below it. Longer sequences end where there are more than `limit` of a length,
    counting degrees and micro-batch sizes.
    """
    region = decoder.tables.links.region
    degrees = sorted({tp for _, tp in decoder.classes})
    regions = sorted({int(region[p]) for p, _ in decoder.classes})
    whole = {degree: _whole(decoder, degree) for degree in degrees}
    for stages in range(2, min(rows, len(regions)) + 1):
        if math.perm(len(regions), stages) // 2 * len(degrees) * len(sizes) > limit:
            return
        for sequence in itertools.permutations(regions, stages):
            for of in whole.values() if sequence[0] < sequence[-1] else ():
                x = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
                x[:stages] = of[list(sequence)]
                for size in sizes:
                    yield Allocation(workers=x, micro_batch_size=size)


def relays(decoder: Decoder, rows: int, sizes: Sequence[int], limit: int = 6_000) -> Iterator[Allocation]:
    """Two whole regions as first and last stage, and between them every device of one type that is elsewhere: weak
    devices that are spread have many links to either, and pass on what the one between these would take long for.

    The ends, and those between, every pool at a degree or the largest below it. The ends are of the strongest regions,
    of so many that there are no more than `limit` of all, but of two in any case.

    Parameters
    ----------
    rows, sizes, limit
        As for `region_sequences`.
    """
    pools, region = decoder.problem.cluster.pools, decoder.tables.links.region
    if rows < 3:
        return
    names = np.array([pools[p].device.name for p, _ in decoder.classes])
    places = region[[p for p, _ in decoder.classes]]
    whole = {degree: _whole(decoder, degree) for degree in sorted({tp for _, tp in decoder.classes})}
    _, power = speed_and_power(decoder, block_rates(decoder, decoder.tables.micro_batch_sizes[0]))
    strongest = [r for r in np.argsort(-power, kind="stable").tolist() if power[r] > 0]
    of_two = len(set(names)) * len(whole) ** 2 * len(sizes)
    count = max(2, int((1 + math.sqrt(1 + 8 * limit / max(1, of_two))) / 2))
    for ends in itertools.combinations(strongest[:count], 2):
        for name, outer, inner in itertools.product(sorted(set(names)), whole, whole):
            x = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
            x[[0, 2]] = whole[outer][list(ends)]
            x[1] = whole[inner].sum(axis=0) * ((names == name) & ~np.isin(places, ends))
            for size in sizes if x[:3].any(axis=1).all() else ():
                yield Allocation(workers=x, micro_batch_size=size)


def _whole(decoder: Decoder, degree: int) -> np.ndarray:
    """All workers of every region at a degree, or the largest below it: (regions, classes)."""
    pools, region = decoder.problem.cluster.pools, decoder.tables.links.region
    x = np.zeros((len(decoder.problem.cluster.regions), len(decoder.classes)), dtype=np.int64)
    for c, (p, tp) in enumerate(decoder.classes):
        others = {other for of, other in decoder.classes if of == p}
        if tp == max((other for other in others if other <= degree), default=0):
            x[region[p], c] = pools[p].devices // tp
    return x


def _along(walk: list[int], column: dict[int, int], decoder: Decoder) -> list[int]:
    """Pools in the order of a walk through their regions."""
    pools = decoder.problem.cluster.pools
    place = {region: i for i, region in enumerate(walk)}
    return sorted(column, key=lambda p: (place[pools[p].region], p))


def even_parts(total: int, parts: int, first: int = 0) -> np.ndarray:
    """A whole number cut into parts that differ by at most one; the larger ones begin at place `first`."""
    places = (np.arange(parts) - first) % parts
    return total // parts + (places < total % parts)


def spread_region(
    decoder: Decoder,
    pools: list[int],
    stages: int,
    tp: int,
    rows: int,
    width: int | None = None,
) -> np.ndarray | None:
    """Every pool spread evenly over all stages, at the given degree or the largest below it that its nodes allow.

    `width` takes no more than so many workers of each pool for each stage.
    """
    x = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
    first = 0
    for p in pools:
        fitting = decoder.widest_class(p, tp)
        if fitting is None:
            continue
        c, t = fitting
        count = decoder.problem.cluster.pools[p].devices // t
        if width is not None:
            count = min(count, width * stages)
        x[:stages, c] = even_parts(count, stages, first)
        first = (first + count) % stages
    return x if x[:stages].any(axis=1).all() else None


def grown_starts(
    decoder: Decoder, rows: int, value_of: Callable[[Allocation], float], seconds_left: Callable[[], float]
) -> list[Allocation]:
    """Plans that replicate one pipeline in more and more regions.

    Every region (and every pool of it) alone is tried with all numbers of stages, degrees and micro-batch sizes; the
    best of these grow by whole regions, the fastest first, as long as that helps. Activations then stay in their
    region, only gradients travel.

    Parameters
    ----------
    value_of : callable
        Seconds per step of an allocation.
    seconds_left : callable
        Growing ends when this falls to 0.
    """
    pools = decoder.problem.cluster.pools
    regions: dict[int, list[int]] = {}
    for p, _ in decoder.classes:
        if p not in regions.setdefault(pools[p].region, []):
            regions[pools[p].region].append(p)
    alone = _regions_alone(decoder, regions, rows, value_of, seconds_left)
    alone.sort(key=lambda entry: entry.value)
    speed: dict[int, float] = {}
    for entry in alone:
        speed.setdefault(entry.region, entry.value)
    order = sorted(speed, key=lambda r: speed[r])
    result = [entry.allocation(decoder, rows) for entry in alone[:24]]
    grown: set[tuple[int, int, int]] = set()
    for entry in alone:
        if entry.how in grown or len(grown) >= 10 or seconds_left() <= 0:
            continue
        grown.add(entry.how)
        value, x, region, stages = entry.value, entry.allocation(decoder, rows), entry.region, entry.how[0]
        in_vain = 0
        for other in order:
            if other == region or in_vain == IN_VAIN or seconds_left() <= 0:
                continue
            additions = [
                x.workers + more
                for members in [regions[other], *([p] for p in regions[other] if len(regions[other]) > 1)]
                for degree in sorted({t for p, t in decoder.classes if p in members})
                if (more := spread_region(decoder, members, stages, degree, rows)) is not None
            ]
            options = [replace(x, workers=w) for w in additions]
            values = [value_of(option) for option in options]
            in_vain += 1
            if values and min(values) < value:
                value, x, in_vain = min(values), options[int(np.argmin(values))], 0
        result.append(x)
    return result


def replicated_starts(
    decoder: Decoder,
    rows: int,
    sizes: Sequence[int],
    value_of: Callable[[Allocation], float],
    seconds_left: Callable[[], float],
    known: float = math.inf,
) -> list[Allocation]:
    """The same pipeline in every region whose pools have the workers for it, less the regions that only hold it up.

    All numbers of stages, degrees and few widths are valued, of all devices, and where these cannot hold the stages, or
    are far from the best, of those with more memory alone. From the best of each of three numbers of stages regions are
    left out, one after another, where that does not make the step longer, unless others are much better.

    Parameters
    ----------
    sizes : sequence of int
        Micro-batch sizes.
    value_of, seconds_left : callable
        As for `grown_starts`.
    known : float
        The least value of other starts.
    """
    region_of = decoder.tables.links.region[[p for p, _ in decoder.classes]]
    levels = sorted({float(decoder.tables.limit_bytes[p]) for p in decoder.columns})
    of_degree = {tp: _widest_columns(decoder, tp) for tp in sorted({t for _, t in decoder.classes})}
    best: dict[int, tuple[float, Allocation]] = {}
    for stages, (columns, memory, most) in itertools.product(stage_counts(decoder, rows), of_degree.values()):
        for least in levels:
            before, own = None, math.inf
            for width in (1, 2, 4, 8):
                # Workers that would make one stage wider than another are idle.
                each = np.where(memory >= least, np.minimum(most // stages, width), 0)
                if not each.any() or (before is not None and (each == before).all()) or seconds_left() <= 0:
                    break
                if FARTHEST * known < own < math.inf:
                    break
                before, workers = each, np.zeros((rows, len(decoder.classes)), dtype=np.int64)
                workers[:stages, columns] = each
                for size in sizes:
                    x = Allocation(workers=workers, micro_batch_size=size)
                    value = value_of(x)
                    own = min(own, value)
                    if value < best.get(stages, (math.inf, x))[0]:
                        best[stages] = value, x
                    if FARTHEST * known < value < math.inf:
                        break
            if own <= FAR * min((value for value, _ in best.values()), default=0.0):
                break
    result = []
    for value, x in sorted(best.values(), key=lambda entry: entry[0])[:3]:
        for region in sorted(set(region_of.tolist())) if value <= FARTHEST * known else ():
            fewer = replace(x, workers=np.where(region_of == region, 0, x.workers))
            if fewer.workers.any() and fewer.workers.sum() < x.workers.sum() and seconds_left() > 0:
                less = value_of(fewer)
                if less <= value:
                    value, x = less, fewer
        result.append(x)
    return result


def _widest_columns(decoder: Decoder, tp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every pool that has workers of the degree, or of the largest below it that its nodes allow: their class, the
    memory of a device [bytes], and how many there are."""
    pools, limit_bytes = decoder.problem.cluster.pools, decoder.tables.limit_bytes
    found = [
        (widest[0], float(limit_bytes[p]), pools[p].devices // widest[1])
        for p in decoder.columns
        if (widest := decoder.widest_class(p, tp)) is not None
    ]
    columns, memory, most = zip(*found, strict=True)
    return np.array(columns), np.array(memory), np.array(most)


def closed_starts(decoder: Decoder, starts: Iterable[Allocation]) -> Iterator[Allocation]:
    """Of pipelines that end elsewhere than they begin, those that come back: an end is halved, and holds both.

    First and last stage of a model with tied embeddings exchange the gradient of these; over links between regions that
    may take longer than everything else. Nothing for other models.
    """
    model = decoder.problem.model
    if not model.tied_embeddings or model.family == "vit":
        return
    region_of = decoder.tables.links.region[[p for p, _ in decoder.classes]]
    for x in starts:
        rows = x.workers[x.workers.any(axis=1)]
        if 2 <= len(rows) < len(x.workers) and not set(region_of[rows[0] > 0]) & set(region_of[rows[-1] > 0]):
            for end, others in ((rows[0], rows[1:]), (rows[-1], rows[:-1])):
                # Of classes with odd numbers every second one gets the larger part.
                part = (end + np.cumsum(end % 2) % 2) // 2
                if part.any() and (end - part).any():
                    closed = np.zeros_like(x.workers)
                    closed[: len(rows) + 1] = np.vstack([part, others, end - part])
                    yield replace(x, workers=closed)


def window_starts(
    decoder: Decoder,
    rows: int,
    sizes: Sequence[int],
    value_of: Callable[[Allocation], float],
    seconds_left: Callable[[], float],
) -> list[Allocation]:
    """One pipeline over some regions that are near each other, each of which has stages of its own; or where one has a
    stage of its own and the others share the next one, or the one before.

    Parameters
    ----------
    sizes : sequence of int
        Micro-batch sizes.
    value_of, seconds_left : callable
        As for `grown_starts`.
    """
    rates = block_rates(decoder, decoder.tables.micro_batch_sizes[0])

    def ways(chain: list[int], column: dict[int, int]) -> Iterator[np.ndarray]:
        yield from _whole_regions(chain, column, decoder, rates, rows)
        yield from _one_and_others(chain, column, decoder, rows)

    found = _along_chains(decoder, _windows(decoder, rates), ways, sizes, value_of, seconds_left)
    several = [x for x in found if np.count_nonzero(x.workers.any(axis=1)) > 1][:MOST_TRIMMED]
    return sorted([*found, *(trimmed(decoder, x, value_of, seconds_left) for x in several)], key=value_of)


def trimmed(
    decoder: Decoder, x: Allocation, value_of: Callable[[Allocation], float], seconds_left: Callable[[], float]
) -> Allocation:
    """The allocation after the change, again and again, that makes its value least: of the workers that a class has in
    a stage all or half leave it, or work at another degree.

    Parameters
    ----------
    value_of, seconds_left : callable
        As for `grown_starts`.
    """

    def changed(s: int, c: int, left: int, other: int, more: int) -> Allocation:
        workers = x.workers.copy()
        workers[s, c] = left
        workers[s, other] += more
        return replace(x, workers=workers)

    def changes() -> Iterator[Allocation]:
        for s, c in np.argwhere(x.workers).tolist():
            count, (pool, tp) = int(x.workers[s, c]), decoder.classes[c]
            yield from (changed(s, c, left, c, 0) for left in {0, count // 2})
            yield from (
                changed(s, c, 0, other, count * tp // degree) for other, degree in decoder.columns[pool] if other != c
            )

    value, tried = value_of(x), 0
    while tried < MOST_CHANGES and seconds_left() > 0:
        options = [option for option in changes() if option.workers.any()]
        values = [value_of(option) for option in options]
        tried += len(values)
        if not values or min(values) >= value:
            break
        value, x = min(values), options[int(np.argmin(values))]
    return x


def narrow_starts(
    decoder: Decoder,
    rows: int,
    sizes: Sequence[int],
    value_of: Callable[[Allocation], float],
    seconds_left: Callable[[], float],
) -> list[Allocation]:
    """One pipeline of few workers a stage, all of one pool: along a region's pools or those of regions near each other,
    as long as they last. What is not needed is left out.

    Parameters
    ----------
    sizes, value_of, seconds_left
        As for `window_starts`.
    """
    if sum(decoder.problem.cluster.pools[p].devices for p in decoder.columns) > MOST_BESIDE:
        return []
    rates = block_rates(decoder, decoder.tables.micro_batch_sizes[0])
    speed, power = speed_and_power(decoder, rates)
    region = decoder.tables.links.region
    alone = [
        sorted((p for p in speed if region[p] == r), key=lambda p: -speed[p])
        for r in np.argsort(-power, kind="stable")[:MOST_CENTRES]
        if power[r] > 0
    ]

    def ways(chain: list[int], column: dict[int, int]) -> Iterator[np.ndarray]:
        pools = decoder.problem.cluster.pools
        for width, order in itertools.product(NARROW, (chain, chain[::-1])):
            each = [pools[p].devices // decoder.classes[column[p]][1] // width if p in column else 0 for p in order]
            stages = [column[p] for p, count in zip(order, each, strict=True) for _ in range(count)]
            for count in LENGTHS:
                if count <= min(rows, len(stages)):
                    x = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
                    x[np.arange(count), stages[:count]] = width
                    yield x

    return _along_chains(decoder, [*alone, *_windows(decoder, rates)], ways, sizes, value_of, seconds_left)


def _along_chains(
    decoder: Decoder,
    chains: Iterable[list[int]],
    ways: Callable[[list[int], dict[int, int]], Iterator[np.ndarray]],
    sizes: Sequence[int],
    value_of: Callable[[Allocation], float],
    seconds_left: Callable[[], float],
) -> list[Allocation]:
    """The best of some ways to make stages of chains of pools, of which the column at every degree is given.

    Of the first chains everything is tried, after that only the numbers of stages, degrees and micro-batch sizes that
    were among the best.
    """
    found: list[tuple[float, Allocation, tuple[int, int, int]]] = []
    seen = set[bytes]()
    for number, chain in enumerate(chains):
        found.sort(key=lambda entry: entry[0])
        likely = {how for _, _, how in found[:MOST_LIKELY]} if number >= FIRST_WINDOWS else None
        for tp in sorted({t for _, t in decoder.classes}):
            column = {p: widest[0] for p in chain if (widest := decoder.widest_class(p, tp))}
            for x in ways(chain, column):
                if (key := x.tobytes()) in seen:
                    continue
                seen.add(key)
                stages = int(x.any(axis=1).sum())
                for size in sizes:
                    how = stages, tp, size
                    if seconds_left() <= 0 or (likely is not None and how not in likely):
                        continue
                    allocation = Allocation(workers=x, micro_batch_size=size)
                    value = value_of(allocation)
                    if not math.isfinite(value):
                        break  # as in `_regions_alone`
                    found.append((value, allocation, how))
    found.sort(key=lambda entry: entry[0])
    return [allocation for _, allocation, _ in found[:MOST_LIKELY]]


def _whole_regions(
    chain: list[int], column: dict[int, int], decoder: Decoder, rates: np.ndarray, stages: int
) -> Iterator[np.ndarray]:
    """The workers of a chain of pools, a region's evenly in 1, 2, 3, ... stages by its part of the compute; regions too
    weak for one are left out."""
    region = decoder.tables.links.region
    devices = {p: decoder.problem.cluster.pools[p].devices // decoder.classes[column[p]][1] for p in chain}
    members = [list(pools) for _, pools in itertools.groupby(chain, key=lambda p: int(region[p]))]
    power = np.array([sum(devices[p] * rates[column[p]] for p in pools) for pools in members])
    before: tuple[int, ...] = ()
    for count in stage_counts(decoder, stages) if power.any() else ():
        counts = np.floor(count * power / power.sum() + 0.5).astype(np.int64)
        if not counts.any() or counts.sum() > stages or tuple(counts.tolist()) == before:
            continue
        before = tuple(counts.tolist())
        x, first = np.zeros((stages, len(decoder.classes)), dtype=np.int64), 0
        for pools, own in zip(members, before, strict=True):
            for p in pools if own else ():
                x[first : first + own, column[p]] += even_parts(devices[p], own)
            first += own
        if x[:first].any(axis=1).all():
            yield x


def _one_and_others(chain: list[int], column: dict[int, int], decoder: Decoder, stages: int) -> Iterator[np.ndarray]:
    """The workers of the first region of a chain of pools in one stage, and those of all others in another one, behind
    it or before it."""
    if stages < 2:
        return
    region = decoder.tables.links.region
    x = np.zeros((stages, len(decoder.classes)), dtype=np.int64)
    for p in column:
        tp = decoder.classes[column[p]][1]
        x[int(region[p] != region[chain[0]]), column[p]] = decoder.problem.cluster.pools[p].devices // tp
    if x[:2].any(axis=1).all():
        yield x
        yield np.concatenate([x[1::-1], x[2:]])


def _windows(decoder: Decoder, rates: np.ndarray) -> Iterator[list[int]]:
    """Pools of a strong region and of those next to it, and of these the ones at least half as fast as the fastest."""
    region = decoder.tables.links.region
    speed, power = speed_and_power(decoder, rates)
    apart, seen = far_apart(decoder), set[frozenset[int]]()
    for centre, width in itertools.product(np.argsort(-power, kind="stable")[:MOST_CENTRES].tolist(), WINDOWS):
        away = np.where(power > 0, apart[centre], np.inf)
        away[centre] = -1.0
        window = [r for r in np.argsort(away, kind="stable")[:width].tolist() if np.isfinite(away[r])]
        chain = sorted((p for p in speed if region[p] in window), key=lambda p: (window.index(int(region[p])), p))
        fastest = max((speed[p] for p in chain), default=0.0)
        for members in (chain, [p for p in chain if 2 * speed[p] >= fastest]):
            if len(set(region[members].tolist())) > 1 and frozenset(members) not in seen:
                seen.add(frozenset(members))
                yield members


def speed_and_power(decoder: Decoder, rates: np.ndarray) -> tuple[dict[int, float], np.ndarray]:
    """Micro-batches per second of a device of each pool at its best degree, and of all of each region."""
    pools, region = decoder.problem.cluster.pools, decoder.tables.links.region
    speed: dict[int, float] = {}
    for c, (p, tp) in enumerate(decoder.classes):
        speed[p] = max(speed.get(p, 0.0), float(rates[c]) / tp)
    power = np.zeros(len(decoder.problem.cluster.regions))
    for p, rate in speed.items():
        power[region[p]] += rate * pools[p].devices
    return speed, power


class _Alone(NamedTuple):
    """A region alone: a large cluster has so many ways that their allocations would be gigabytes."""

    value: float
    region: int
    members: list[int]
    width: int | None
    how: tuple[int, int, int]
    """Stages, degree and micro-batch size."""

    def allocation(self, decoder: Decoder, rows: int) -> Allocation:
        """As it was valued."""
        stages, tp, size = self.how
        workers = spread_region(decoder, self.members, stages, tp, rows, self.width)
        assert workers is not None
        return Allocation(workers=workers, micro_batch_size=size)


def _regions_alone(
    decoder: Decoder,
    regions: dict[int, list[int]],
    rows: int,
    value_of: Callable[[Allocation], float],
    seconds_left: Callable[[], float],
) -> list[_Alone]:
    """Every region alone, those with most compute first, in all ways that fit."""
    pools = decoder.problem.cluster.pools
    sizes = decoder.tables.micro_batch_sizes
    rates = block_rates(decoder, sizes[0])
    rate_of = {p: rates[c] for c, (p, t) in enumerate(decoder.classes) if t == 1}
    power = {r: sum(rate_of.get(p, 0.0) * pools[p].devices for p in members) for r, members in regions.items()}
    found: list[_Alone] = []

    def likely(most: int) -> set[tuple[int, int, int]]:
        """Stages, degrees and micro-batch sizes of the best so far."""
        return {entry.how for entry in sorted(found, key=lambda entry: entry.value)[:most]}

    for i, r in enumerate(sorted(regions, key=lambda r: -power[r])):
        subsets = [regions[r], *([p] for p in regions[r])]
        # After the first few regions, and of few workers for each stage, only what was among the best is tried.
        most = MOST_ALONE if i < MANY_ALONE else FEW_ALONE
        tried = None if i < FIRST_ALONE else likely(most)
        for width in (None, 1, 2, 4, 8, 16, 32):
            tried = likely(most) if tried is None and width is not None else tried
            counts = stage_counts(decoder, rows)
            for members, stages in itertools.product(subsets[0 if width is None else 1 :], counts):
                for tp in sorted({t for p in members for _, t in decoder.columns[p]}):
                    if width is not None and width * stages * tp >= pools[members[0]].devices:
                        continue
                    how = [size for size in sizes if tried is None or (stages, tp, size) in tried]
                    x = spread_region(decoder, members, stages, tp, rows, width) if how else None
                    if x is None or seconds_left() <= 0:
                        continue
                    for size in how:
                        value = value_of(Allocation(workers=x, micro_batch_size=size))
                        if not math.isfinite(value):
                            break  # larger micro-batches are fewer and hold more: they do not fit either
                        found.append(_Alone(value, r, members, width, (stages, tp, size)))
    return found
