"""The predicted timeline of a plan, in the shape in which the runner writes the measured one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.export.chrome_trace import Interval, chrome_trace


def predicted_intervals(times: StepTimes, drawn: NDArray[np.bool_] | None = None) -> list[Interval]:
    """Every forward, backward, message, reduction and update of one step; of some workers only, if told which."""
    schedule, place, messages = times.schedule, times.place, times.messages
    _, start_s = schedule.simulate(record=True)
    micro_batches, stages = schedule.routes.shape
    number = np.arange(len(place.stage)) - place.offset[place.stage]
    intervals = []
    for m in range(micro_batches):
        for s in range(stages):
            w = int(schedule.routes[m, s])
            if drawn is not None and not drawn[w]:
                continue
            for kind, letter, duration_s in ((0, "F", schedule.forward_s[w]), (1, "B", schedule.backward_s[w])):
                begin_s = float(start_s[kind, m, s])
                end_s = begin_s + float(duration_s)
                intervals.append(Interval(s, int(number[w]), "compute", f"{letter}{m}", begin_s, end_s))
                to = s + 1 if kind == 0 else s - 1
                if 0 <= to < stages:
                    boundary = min(s, to)
                    arrive_s = end_s + float(messages.busy_s[kind, m, boundary] + messages.latency_s[kind, m, boundary])
                    name = f"send {letter}{m} to stage {to}"
                    intervals.append(Interval(s, int(number[w]), "send", name, end_s, arrive_s))
    for s, reduction in enumerate(times.reductions):
        mine = np.flatnonzero(place.stage == s)
        begin_s = times.reduction_span_s(s)[0]
        for w in mine.tolist():
            if drawn is not None and not drawn[w]:
                continue
            done_s = float(times.done_s[w])
            update_s = float(times.update_s[w])
            if reduction.total_s > 0:
                intervals.append(Interval(s, int(number[w]), "reduce", "reduce", begin_s, done_s - update_s))
            intervals.append(Interval(s, int(number[w]), "update", "update", done_s - update_s, done_s))
    return intervals


def predicted_trace(problem: Problem, plan: Plan, tables: CostTables | None = None) -> dict[str, Any]:
    """Chrome trace of one predicted step of a plan."""
    times = step_times(plan, tables or CostTables(problem))
    pools = problem.cluster.pools
    regions = problem.cluster.regions
    names = {
        (s, w): f"{w}: {pools[worker.pool].device.name} in {regions[pools[worker.pool].region].name}"
        for s, stage in enumerate(plan.stages)
        for w, worker in enumerate(stage.workers)
    }
    stage_names = {
        s: f"stage {s}: layers {stage.first_layer}-{stage.last_layer - 1}" for s, stage in enumerate(plan.stages)
    }
    return chrome_trace(predicted_intervals(times), names, stage_names, title="predicted")
