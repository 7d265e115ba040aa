"""Where the search begins on equal devices: the best uniform splits.

On equal nodes a plain split is hard to beat, and some of what it says (chunks, sequences cut into short pieces) no
allocation does. First every split, number of chunks, few micro-batch sizes and expert degrees under few memory options;
then, of the best splits, all memory options and the next micro-batch sizes, again and again while that helps, and all
numbers of chunks. Where devices differ, those of one pool may still be the best, in chunks: other splits of a pool
the relaxation knows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from polygon.cost.compute import model_flops_per_step
from polygon.cost.estimate import memory_of
from polygon.cost.lanes import Lanes
from polygon.cost.memory import stage_rows
from polygon.cost.tables import CostTables, uniform_context_degrees
from polygon.domain.cluster import Pool
from polygon.domain.divisors import divisors
from polygon.domain.errors import InputError
from polygon.domain.plan import RECOMPUTE, Plan, Problem
from polygon.domain.runnable import runnable
from polygon.domain.schedule import interleaved_units
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.grid3d.splits import EVERYTHING, all_splits, chunk_counts, configurations, interleave_fits, split_fault
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.initial_solutions import block_rates, speed_and_power

MEMORY = ((1, "none"), (1, "full"), (3, "none"), (3, "full"))
"""ZeRO stage and recomputation of the first round."""
MOST_SIZES, MOST_EXPERT_DEGREES, MOST_CHUNKS = 8, 4, 3
"""Micro-batch sizes, expert degrees and numbers of chunks of a split at first, spread over all that divide."""
KEPT = 40
"""Splits that go into the second round; of these a quarter is looked at again where micro-batch sizes still move."""
ROUNDS = 4
"""Times that the next micro-batch sizes are looked at."""
SIMULATED = 6
"""Plans that are simulated exactly."""
WORTH = 1.02
"""Times the best so far that a split computes at most: in other sizes and memory options it may be better."""
MOST_BY_SHEET, MOST_POOLS, FEWER_ROWS = 12, 3, 4
"""Of several pools those that are fast by their data sheets, those of which, one at a time, splits are looked at, and
the part of the rows, one in so many, that each gets: a hundred led to the same plans as all."""


def uniform_starts(
    decoder: Decoder, rows: int, *, most_rows: int, seconds_left: Callable[[], float], known: float = math.inf
) -> list[tuple[float, Plan, Allocation]]:
    """The best uniform plans of a problem on one pool each, fastest first: value, plan and allocation.

    Of several pools those that compute most are looked at, for splits with chunks alone.

    Parameters
    ----------
    rows : int
        Of an allocation: the most stages.
    most_rows : int
        Configurations that are priced in a round, of more those that compute the shortest; fewer of a pool of several.
    seconds_left : callable
        Pricing ends when this falls to 0.
    known : float
        Value of what is known; what cannot come near it is left out.
    """
    found = []
    for pool in _pools(decoder, known):
        found += _of_pool(decoder, pool, rows, most_rows, seconds_left, known)
    return sorted(found, key=lambda entry: entry[0])[:SIMULATED]


def _pools(decoder: Decoder, known: float) -> list[Pool]:
    """The one pool there is; of several the fastest ones, unless the step would take longer than what is known."""
    problem, batch = decoder.problem, decoder.problem.batch
    pools = [problem.cluster.pools[p] for p in decoder.columns]
    if len(problem.cluster.pools) == 1:
        return pools
    most_s, flops = known if decoder.by_time else math.inf, model_flops_per_step(problem.model, batch)
    # First by data sheets alone: of hundreds of pools few may be left, if any, and rates take long to work out.
    least_s = [flops / (pool.devices * pool.device.peak_flops(batch.precision)) for pool in pools]
    order = sorted(zip(least_s, range(len(pools)), strict=True))
    likely = [pools[i] for s, i in order if s < most_s and pools[i].devices > 1][:MOST_BY_SHEET]
    sizes = decoder.tables.micro_batch_sizes if likely else ()
    speeds = [(size, speed_and_power(decoder, block_rates(decoder, size))[0]) for size in sizes]
    # Sequences a second through one block.
    sequences = {p.index: max(size * speed[p.index] for size, speed in speeds) * p.devices for p in likely}
    fastest = sorted(likely, key=lambda pool: -sequences[pool.index])[:MOST_POOLS]
    return [p for p in fastest if batch.global_batch * problem.model.blocks < most_s * sequences[p.index]]


def _of_pool(
    decoder: Decoder, pool: Pool, rows: int, most_rows: int, seconds_left: Callable[[], float], known: float
) -> list[tuple[float, Plan, Allocation]]:
    """The best few uniform plans of a pool's devices."""
    problem, tables = decoder.problem, decoder.tables
    alone = len(problem.cluster.pools) == 1
    splits = _Splits(
        tables,
        pool,
        most_rows if alone else most_rows // FEWER_ROWS,
        seconds_left,
        known if decoder.by_time else math.inf,
    )
    splits.price(_first_round(problem, pool, chunked=not alone))
    for again in range(ROUNDS):
        kept = _different(splits.best(), KEPT if not again else KEPT // 4)
        if not splits.price(other for config in kept for other in _options(problem, config)):
            break
    result = []
    for config in splits.best()[: 4 * SIMULATED]:
        try:
            plan = uniform_plan(problem, config, pool)
        except InputError:  # more workers than the nodes have room for
            continue
        column = next((c for c, found in enumerate(decoder.classes) if found == (pool.index, config.tp)), None)
        if column is None or config.pp > rows or not decoder.is_run(plan) or violations(problem, plan, tables):
            continue
        workers = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
        workers[: config.pp, column] = config.dp * config.cp
        x = Allocation(workers=workers, micro_batch_size=config.micro_batch_size, cp=config.cp, ep=config.ep)
        result.append((decoder.plan_value(plan), plan, x))
        if len(result) == SIMULATED:
            break
    return result


class _Splits:
    """Uniform splits of a pool and what they take; only what may be among the best is priced."""

    def __init__(
        self, tables: CostTables, pool: Pool, most_rows: int, seconds_left: Callable[[], float], known_s: float
    ) -> None:
        self.tables, self.pool, self.most_rows, self.seconds_left = tables, pool, most_rows, seconds_left
        self.runs = runnable(tables.problem)
        self.lanes, self.usable = Lanes(tables, pool), float(tables.limit_bytes[pool.index])
        self.step_s: dict[ParallelConfig, float] = {}
        """Of those looked at; inf where they do not fit."""
        self.best_s = known_s

    def best(self) -> list[ParallelConfig]:
        """Those that fit, the fastest first."""
        return sorted((c for c, s in self.step_s.items() if math.isfinite(s)), key=self.step_s.__getitem__)

    def price(self, configs: Iterable[ParallelConfig]) -> bool:
        """Price those that may be among the best, no more than so many; whether any was."""
        families: dict[ParallelConfig, list[tuple[float, ParallelConfig]]] = {}
        for config in itertools.takewhile(lambda _: self.seconds_left() > 0, configs):
            if self.runs is not None and not self.runs.says(self.tables.problem, config):
                continue
            least_s = self._least_s(config)
            if least_s <= WORTH * self.best_s and config not in self.step_s:
                families.setdefault(_without_memory_options(config), []).append((least_s, config))
        # Those that differ in memory options alone have much in common; first those whose fastest is.
        for members in families.values():
            members.sort(key=lambda entry: entry[0])
        priced = 0
        for least_s, config in itertools.chain(*sorted(families.values(), key=lambda members: members[0][0])):
            if self.seconds_left() <= 0 or priced == self.most_rows:
                break
            if least_s > WORTH * self.best_s:
                continue
            self.step_s[config] = math.inf
            if self._least_bytes(config) <= self.usable:
                estimate, priced = self.lanes.estimate(config), priced + 1
                if estimate.peak_bytes <= self.usable:
                    self.step_s[config] = estimate.step_s
                    self.best_s = min(self.best_s, estimate.step_s)
        return priced > 0

    def _least_s(self, config: ParallelConfig) -> float:
        """Seconds that its devices compute, and wait while the first micro-batch comes and the last one goes."""
        tables, how = self.tables, (config.recompute, config.cp, config.ep, config.sequence_parallel)
        times = tables.times(self.pool.index, config.tp, config.micro_batch_size, *how, accumulates=False)
        whole_s = float(times.forward_s[-1] + times.backward_s[-1])
        return whole_s / config.pp * (self._count(config) + (config.pp - 1) / config.chunks)

    def _least_bytes(self, config: ParallelConfig) -> float:
        """What a device of the first stage needs for its part of the blocks."""
        tables, how = self.tables, (config.recompute, config.cp, config.ep, config.sequence_parallel)
        layers = tables.memory(config.tp, config.micro_batch_size, *how).layers
        rows = stage_rows(layers, 0, 1 + tables.problem.model.blocks // config.pp)
        units = min(self._count(config) * config.chunks, interleaved_units(config.pp, config.chunks, 0))
        held = units / config.chunks
        return memory_of(rows, config.zero, tables, in_flight=held, shards=config.shard_width).total_bytes

    def _count(self, config: ParallelConfig) -> int:
        """Micro-batches of a replica."""
        return self.tables.problem.batch.global_batch // (config.dp * config.micro_batch_size)


def _first_round(problem: Problem, pool: Pool, *, chunked: bool) -> Iterator[ParallelConfig]:
    """Every split of a pool with few numbers of chunks, more than one where it has to be `chunked`, few micro-batch
    sizes and memory options."""
    for split in all_splits(pool.devices, tuple(uniform_context_degrees(problem))):
        if split_fault(split, problem.model, problem.batch, pool.devices_per_node):
            continue
        chunks = chunk_counts(split.pp, problem.model)[1:] if split.pp > 1 else []
        if chunked and not chunks:
            continue
        degrees = [ep for ep in divisors(split.dp * split.cp) if ep == 1 or not (problem.model.experts or 1) % ep]
        options = replace(
            EVERYTHING,
            ep=_spread(degrees, MOST_EXPERT_DEGREES),
            micro_batch_size=_spread(divisors(problem.batch.global_batch // split.dp), MOST_SIZES),
            zero=(1,),
            recompute=("none",),
            schedule=("1f1b",),
            interleave=_spread(chunks, MOST_CHUNKS) if chunked else EVERYTHING.interleave,
            sequence_parallel=(True,),
        )
        for config, fault in configurations(split, problem.model, problem.batch, options):
            if fault is None and isinstance(config, ParallelConfig):
                for zero, recompute in MEMORY:
                    yield replace(config, zero=zero, recompute=recompute)


def _spread(values: list[int], most: int) -> tuple[int, ...]:
    """So many of the values, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return tuple(sorted({values[i] for i in places}))


def _different(best: list[ParallelConfig], most: int) -> list[ParallelConfig]:
    """The first few that differ in more than micro-batch size and memory options."""
    kept: dict[ParallelConfig, ParallelConfig] = {}
    for config in best:
        kept.setdefault(replace(_without_memory_options(config), micro_batch_size=1), config)
        if len(kept) == most:
            break
    return list(kept.values())


def _without_memory_options(config: ParallelConfig) -> ParallelConfig:
    """Of several configurations the one that they differ from in memory options alone."""
    return replace(config, zero=0, recompute="none", sequence_parallel=False)


def _options(problem: Problem, config: ParallelConfig) -> Iterator[ParallelConfig]:
    """A configuration under every memory option, in its micro-batch size and the next ones; or in other chunks."""
    model = problem.model
    sizes = divisors(problem.batch.global_batch // config.dp)
    at = sizes.index(config.micro_batch_size)
    pipelined = config.pp > 1 and config.schedule == "1f1b"
    for chunks in chunk_counts(config.pp, model) if pipelined else ():
        if interleave_fits(config.pp, model, chunks, sizes[-1] // config.micro_batch_size):
            yield replace(config, chunks=chunks)
    for size in sizes[max(0, at - 1) : at + 2]:
        for zero in (0, 1, 2, 3):
            for recompute in RECOMPUTE:
                for sequence in (False, True) if config.tp > 1 else (False,):
                    yield replace(
                        config, micro_batch_size=size, zero=zero, recompute=recompute, sequence_parallel=sequence
                    )
