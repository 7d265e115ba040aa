"""From a uniform configuration to a plan on the real devices, and the best such plan by exact simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import permutations

import numpy as np

from polygon.cost.bill import excesses, step_bill
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.uniform import ParallelConfig, stage_bounds
from polygon.domain.errors import InputError
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from polygon.grid3d.evaluate import case_of
from polygon.grid3d.grid import Result, evaluate_all, parallel_config
from polygon.grid3d.splits import Options, all_splits
from polygon.planning.decode import useful_streams
from polygon.planning.engine import Found
from polygon.planning.objectives import OVER_LIMIT, STEP_TIME, Objective, value_of, without_cost_limits
from polygon.planning.violations import violations

PLANNABLE = Options(micro_batch_size=None, zero=(0, 1, 2, 3), recompute=("none", "selective", "full"))
"""What a plan can express: data, tensor and pipeline parallelism, every memory option."""


def plan_of(problem: Problem, config: ParallelConfig) -> Plan:
    """The plan of a uniform configuration: ranks dealt as Megatron does, tensor first, then data, then pipeline.

    Raises
    ------
    InputError
        For what a plan cannot express (context, expert, interleaved, sequence parallelism), or a tensor degree that
        does not divide the devices of every node.
    """
    for name, usual in (("cp", 1), ("ep", 1), ("interleave", 1), ("sequence_parallel", False)):
        if getattr(config, name) != usual:
            raise InputError(f"{name}: found {getattr(config, name)}, expected {usual} in a plan")
    cluster = problem.cluster
    workers = []
    for pool in cluster.pools:
        if pool.devices_per_node % config.tp:
            raise InputError(
                f"tp: found {config.tp}, expected a divisor of the {pool.devices_per_node} devices of a node"
            )
        starts = range(pool.first_device, pool.first_device + pool.devices, config.tp)
        workers += [Worker(pool=pool.index, devices=tuple(range(first, first + config.tp))) for first in starts]
    if len(workers) != config.dp * config.pp:
        raise InputError(
            f"dp x pp: found {config.dp * config.pp}, expected {len(workers)} workers of {config.tp} devices"
        )
    bounds = stage_bounds(problem.model, config)
    stages = tuple(
        Stage(
            first_layer=bounds[s],
            last_layer=bounds[s + 1],
            workers=tuple(workers[s * config.dp : (s + 1) * config.dp]),
            zero=config.zero,
            recompute=config.recompute,
        )
        for s in range(config.pp)
    )
    micro_batches = problem.batch.global_batch // config.micro_batch_size
    span = micro_batches if config.schedule == "gpipe" else config.dp
    return Plan(
        stages=stages,
        routes=np.repeat((np.arange(micro_batches) % config.dp)[:, None], config.pp, axis=1),
        micro_batch_size=config.micro_batch_size,
        spans=stage_spans(stages, [span] * config.pp),
        links=_links(problem, workers),
        solver="grid3d",
    )


def _links(problem: Problem, workers: list[Worker]) -> tuple[LinkUse, ...]:
    """Unpacked, with as many streams as a link between two regions is good for."""
    cluster = problem.cluster
    regions = sorted({cluster.pools[worker.pool].region for worker in workers})
    return tuple(
        LinkUse(
            source=a,
            target=b,
            streams=useful_streams(float(cluster.latency_s[a, b]), float(cluster.bytes_per_s[a, b])),
        )
        for a, b in permutations(regions, 2)
        if cluster.connected(a, b)
    )


def find_grid_plan(
    problem: Problem,
    *,
    options: Options = PLANNABLE,
    tables: CostTables | None = None,
    objective: Objective = STEP_TIME,
    tries: int = 16,
    jobs: int = -1,
    backend: str = "loky",
    tell: Callable[[str, float, float], None] | None = None,
    keep: Callable[[Result], None] | None = None,
) -> Found:
    """The best plan of uniform parallelism: all configurations by formula, the best of them by exact simulation.

    Parameters
    ----------
    objective : Objective
        By which the best of those simulated is taken, within the limits of the constraints. All use all devices.
    tries : int
        Configurations that are simulated: the fastest by formula that the real devices hold.
    tell : callable
        Phase, part of it done, best step so far [s].
    keep : callable
        Given all configurations, priced, before any is simulated.
    """
    start = time.perf_counter()
    case, _ = case_of(problem, options)
    splits = list(all_splits(problem.cluster.devices, options.cp))
    told = tell or (lambda phase, part, best: None)
    result = evaluate_all(
        case,
        splits,
        jobs=jobs,
        backend=backend,
        progress=lambda done: told("every configuration", done / len(splits), math.inf),
    )
    if keep is not None:
        keep(result)
    tables = tables or CostTables(problem)
    best: tuple[float, Plan] | None = None
    reasons: list[str] = []
    tried = 0
    free = without_cost_limits(problem)
    for values in result.top(result.accepted):
        if tried == tries:
            break
        plan = plan_of(problem, parallel_config(values))
        found = violations(free, plan, tables)
        if found:
            reasons.append(found[0])
            continue
        tried += 1
        bill = step_bill(problem, plan, step_times(plan, tables))
        value = value_of(problem, objective, bill)
        if value >= OVER_LIMIT:
            reasons.append("; ".join(text for _, text in excesses(problem, bill)))
        elif best is None or value < best[0]:
            best = value, plan
        told("exact simulation", tried / tries, best[0] if best else math.inf)
    seconds = time.perf_counter() - start
    if best is None:
        devices = problem.cluster.devices
        reason = f"no uniform plan of {devices} devices fits; {reasons[0]}" if reasons else result.why_none(devices)
        return Found(plan=None, value_s=math.inf, reason=reason, evaluations=len(result.rows), seconds=seconds)
    return Found(
        plan=best[1],
        value_s=best[0],
        evaluations=len(result.rows) + tried,
        seconds=seconds,
        interrupted=result.interrupted,
    )
