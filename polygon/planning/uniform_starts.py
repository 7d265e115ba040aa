"""Where the search begins on equal devices: the best uniform splits.

On equal nodes a plain split is hard to beat, and some of what it says (chunks, sequences cut into short pieces) no
allocation does. First every split, number of chunks, few micro-batch sizes and expert degrees under few memory options;
then, of the best splits, all memory options and the next micro-batch sizes, again and again while that helps, and all
numbers of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from polygon.cost.lanes import Lanes
from polygon.domain.divisors import divisors
from polygon.domain.errors import InputError
from polygon.domain.plan import RECOMPUTE, Plan
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.grid3d.splits import EVERYTHING, all_splits, configurations, interleave_fits, split_fault
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder

MEMORY = ((1, "none"), (1, "full"), (3, "none"), (3, "full"))
"""ZeRO stage and recomputation of the first round."""
MOST_SIZES, MOST_EXPERT_DEGREES = 8, 4
"""Micro-batch sizes and expert degrees of a split in the first round, spread over all that divide."""
KEPT = 40
"""Splits that go into the second round; of these a quarter is looked at again where micro-batch sizes still move."""
ROUNDS = 4
"""Times that the next micro-batch sizes are looked at."""
SIMULATED = 6
"""Plans that are simulated exactly."""


def uniform_starts(
    decoder: Decoder, rows: int, *, most_rows: int, seconds_left: Callable[[], float]
) -> list[tuple[float, Plan, Allocation]]:
    """The best uniform plans of a problem whose devices are one pool, fastest first: value, plan and allocation.

    Parameters
    ----------
    rows : int
        Of an allocation: the most stages.
    most_rows : int
        Configurations that are priced in a round; of more in the first a part is drawn, always the same.
    seconds_left : callable
        Pricing ends when this falls to 0.
    """
    problem, tables = decoder.problem, decoder.tables
    if len(problem.cluster.pools) != 1 or not decoder.classes:
        return []
    usable, lanes = float(tables.limit_bytes[0]), Lanes(tables)

    def priced(configs: Iterable[ParallelConfig]) -> list[tuple[float, ParallelConfig]]:
        found = []
        for config in configs:
            if seconds_left() <= 0:
                break
            estimate = lanes.estimate(config)
            if estimate.peak_bytes <= usable and math.isfinite(estimate.step_s):
                found.append((estimate.step_s, config))
        return sorted(found, key=lambda entry: entry[0])

    first = list(_first_round(decoder))
    if len(first) > most_rows:
        first = [first[i] for i in np.sort(np.random.default_rng(0).permutation(len(first))[:most_rows])]
    best, seen = priced(first), set(first)
    for again in range(ROUNDS):
        kept = _different(best, KEPT if not again else KEPT // 4)
        more = [c for config in kept for c in _options(decoder, config) if c not in seen]
        if not more:
            break
        more = more[:most_rows]
        seen |= set(more)
        best = sorted([*best, *priced(more)], key=lambda entry: entry[0])
    result = []
    for _, config in best[: 4 * SIMULATED]:
        try:
            plan = uniform_plan(problem, config)
        except InputError:  # more workers than the nodes have room for
            continue
        column = next((c for c, (_, tp) in enumerate(decoder.classes) if tp == config.tp), None)
        if column is None or config.pp > rows or violations(problem, plan, tables):
            continue
        workers = np.zeros((rows, len(decoder.classes)), dtype=np.int64)
        workers[: config.pp, column] = config.dp * config.cp
        x = Allocation(workers=workers, micro_batch_size=config.micro_batch_size, cp=config.cp, ep=config.ep)
        result.append((decoder.plan_value(plan), plan, x))
        if len(result) == SIMULATED:
            break
    return sorted(result, key=lambda entry: entry[0])


def _first_round(decoder: Decoder) -> Iterator[ParallelConfig]:
    """Every split with few micro-batch sizes and memory options."""
    problem = decoder.problem
    pool = problem.cluster.pools[0]
    for split in all_splits(pool.devices, None):
        if split_fault(split, problem.model, problem.batch, pool.devices_per_node):
            continue
        degrees = [ep for ep in divisors(split.dp * split.cp) if ep == 1 or not (problem.model.experts or 1) % ep]
        options = replace(
            EVERYTHING,
            ep=_spread(degrees, MOST_EXPERT_DEGREES),
            micro_batch_size=_spread(divisors(problem.batch.global_batch // split.dp), MOST_SIZES),
            zero=(1,),
            recompute=("none",),
            schedule=("1f1b",),
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


def _different(priced: list[tuple[float, ParallelConfig]], most: int) -> list[ParallelConfig]:
    """The best few that differ in more than micro-batch size and memory options."""
    kept: dict[ParallelConfig, ParallelConfig] = {}
    for _, config in priced:
        split = replace(config, micro_batch_size=1, zero=0, recompute="none", sequence_parallel=False)
        kept.setdefault(split, config)
        if len(kept) == most:
            break
    return list(kept.values())


def _options(decoder: Decoder, config: ParallelConfig) -> Iterator[ParallelConfig]:
    """A configuration under every memory option, in its micro-batch size and the next ones; or in other chunks."""
    model = decoder.problem.model
    sizes = divisors(decoder.problem.batch.global_batch // config.dp)
    at = sizes.index(config.micro_batch_size)
    pipelined = config.pp > 1 and config.schedule == "1f1b"
    for chunks in divisors(model.blocks // config.pp) if pipelined else ():
        if interleave_fits(config.pp, model, chunks, sizes[-1] // config.micro_batch_size):
            yield replace(config, chunks=chunks)
    for size in sizes[max(0, at - 1) : at + 2]:
        for zero in (0, 1, 2, 3):
            for recompute in RECOMPUTE:
                for sequence in (False, True) if config.tp > 1 else (False,):
                    yield replace(
                        config, micro_batch_size=size, zero=zero, recompute=recompute, sequence_parallel=sequence
                    )
