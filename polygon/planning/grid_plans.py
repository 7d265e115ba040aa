"""From a uniform configuration to a plan on the real devices, and the best such plan by exact simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

from polygon.cost.money import step_bill
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import require
from polygon.domain.message import Message
from polygon.domain.plan import LinkUse, Plan, Problem, Worker
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.grid3d.grid import GridResult, evaluate_all, parallel_config
from polygon.grid3d.grid_rows import case_of
from polygon.grid3d.splits import GridOptions, all_splits
from polygon.planning.checker import violations
from polygon.planning.decode import useful_streams
from polygon.planning.objectives import OVER_LIMIT, STEP_TIME, Objective, over_limits, value_of, without_cost_limits
from polygon.planning.search_engine import Found
from polygon.planning.telling import EXACT, Tell

PLANNABLE = GridOptions(micro_batch_size=None, zero=(0, 1, 2, 3), recompute=("none", "selective", "full"))
"""What a plan can express: data, tensor and pipeline parallelism, every memory option."""


SIMULATED_PART = 0.5
"""Of a time limit, what is kept for the simulations."""


def plan_of(problem: Problem, config: ParallelConfig) -> Plan:
    """The plan of a uniform configuration on all devices: `uniform_plan`, with streams for links between regions.

    Raises
    ------
    InputError
        For degrees that do not take all devices, or whose workers do not fit the nodes.
    """
    require(
        config.devices == problem.cluster.devices,
        "dp x tp x pp x cp",
        config.devices,
        Message("expected.all_devices", devices=problem.cluster.devices),
    )
    plan = uniform_plan(problem, config)
    return replace(plan, links=_links(problem, list(plan.workers)), solver="grid3d")


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
    options: GridOptions = PLANNABLE,
    tables: CostTables | None = None,
    objective: Objective = STEP_TIME,
    tries: int = 16,
    jobs: int = -1,
    backend: str = "processes",
    tell: Tell | None = None,
    keep: Callable[[GridResult], None] | None = None,
    seconds_left: Callable[[], float] = lambda: math.inf,
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
    seconds_left : callable
        Once it says 0 or less, nothing further is tried if there is a plan; the simulations keep a part of it.
    """
    start, whole_s = time.perf_counter(), seconds_left()
    kept_s = SIMULATED_PART * whole_s if math.isfinite(whole_s) else 0.0
    case, _ = case_of(problem, options)
    splits = list(all_splits(problem.cluster.devices, options.cp))
    told: Tell = tell or (lambda phase, part, best: None)
    result = evaluate_all(
        case,
        splits,
        jobs=jobs,
        backend=backend,
        progress=lambda done: told(Message("phase.every_configuration"), 0.5 * done / len(splits), math.inf),
        seconds_left=lambda: seconds_left() - kept_s,
    )
    if keep is not None:
        keep(result)
    tables = tables or CostTables(problem)
    best: tuple[float, Plan] | None = None
    reasons: list[Message] = []
    tried = 0
    free = without_cost_limits(problem)
    cut_short = None if result.complete or result.interrupted else result.part()
    for looked_at, values in enumerate(result.top(result.accepted)):
        if tried == tries:
            break
        if seconds_left() <= 0 and (best is not None or looked_at >= tries):
            cut_short = Message("grid.part_simulated", part=result.part(), simulated=tried)
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
            reasons.append(Message("reason.over_limits", over=over_limits(problem, bill)))
        elif best is None or value < best[0]:
            best = value, plan
        told(EXACT, 0.5 + 0.5 * tried / tries, best[0] if best else math.inf)
    seconds = time.perf_counter() - start
    if best is None:
        devices = problem.cluster.devices
        reason = result.why_none(devices)
        if reasons:
            reason = Message("reason.no_uniform_plan", devices=devices, why=reasons[0])
        return Found(plan=None, value_s=math.inf, reason=reason, evaluations=len(result.rows), seconds=seconds)
    return Found(
        plan=best[1],
        value_s=best[0],
        evaluations=len(result.rows) + tried,
        seconds=seconds,
        interrupted=result.interrupted,
        cut_short=cut_short,
    )
