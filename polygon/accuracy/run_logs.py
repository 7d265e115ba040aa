"""Factors of the cost model from the logs of real runs.

A log directory is what dist_runner and launch write: ``rank-N.jsonl`` and the plan. The factors are few: compute and
optimizer by device type (median of measured over predicted), and one for all communication (so that the predicted steps
are nearest to the measured ones). Every third step is left out of the fit and judges it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from polygon.cost.calibration import Calibration
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError, located, require, require_number
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.formats import files
from polygon.formats.run_log import LogFollower, rank_log

LEFT_OUT = 3
"""Every third step judges the fit."""
FACTORS = np.geomspace(1e-3, 1e4, 43)
"""Of communication, that are tried; the best is looked for between its neighbours."""
UNTOLD = 0.01
"""Part of a step by which another factor than 1 must bring predictions nearer; less tells nothing of links."""
AS_GOOD = 1e-3
"""Part of a step by which two factors may differ and still explain the runs alike."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The steps of one run, without the first (which opens connections)."""

    name: str
    problem: Problem
    plan: Plan
    step_s: np.ndarray
    """Shape (steps,)."""
    compute_s: np.ndarray
    """Shape (steps, workers): forward and backward."""
    update_s: np.ndarray
    """Shape (steps, workers)."""
    devices: tuple[str, ...]
    """Device type of every worker."""

    @property
    def fitted(self) -> np.ndarray:
        """Steps that the fit may see."""
        found: np.ndarray = np.arange(len(self.step_s)) % LEFT_OUT != LEFT_OUT - 1
        return found


def read_run(directory: Path, plan_path: Path | None) -> Run:
    """Read a log directory.

    Raises
    ------
    InputError
        Where a rank's log is missing, or the run is too short to fit and judge.
    """
    path = plan_path or directory / "plan.json"
    problem, plan, _ = files.read_plan(path)
    places = sorted((s, w, rank) for rank, (s, w, t) in plan.rank_places.items() if t == 0)
    paths = [rank_log(directory, rank) for _, _, rank in places]
    if missing := next((log for log in paths if not log.is_file()), None):
        raise InputError(f"{missing}: found no such file, expected the logs of the {plan.world_size} ranks of {path}")
    logs = [_steps(log) for log in paths]
    shared = sorted(set.intersection(*(set(log) for log in logs)))[1:]
    if len(shared) < 2 * LEFT_OUT:
        raise InputError(f"{directory}: found {len(shared)} steps after the first, expected at least {2 * LEFT_OUT}")
    pools = problem.cluster.pools
    kinds = [[[log[step]["seconds_by_kind"].get(kind, 0.0) for log in logs] for step in shared] for kind in KINDS]
    return Run(
        name=str(directory),
        problem=problem,
        plan=plan,
        step_s=np.array([max(log[step]["seconds"] for log in logs) for step in shared]),
        compute_s=np.array(kinds[0]),
        update_s=np.array(kinds[1]),
        devices=tuple(pools[plan.stages[s].workers[w].pool].device.name for s, w, _ in places),
    )


KINDS = ("compute", "update")
"""Kinds of interval in the logs that factors are fitted to."""


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    """Step lines of a rank's log, by step."""
    steps = {}
    log = LogFollower(path, events=False)
    for entry in log.new():
        if entry["type"] == "step":
            where = f"{path}: line {log.line}"
            if not {"step", "seconds", "seconds_by_kind"} <= set(entry):
                raise InputError(f"{where}: found a step of {sorted(entry)}, expected step, seconds, seconds_by_kind")
            with located(f"{where}: step {entry['step']}: "):
                require_number(entry["seconds"], "seconds", above=0)
                for kind in KINDS:
                    require_number(entry["seconds_by_kind"].get(kind, 0.0), f"seconds_by_kind.{kind}", at_least=0)
            steps[int(entry["step"])] = entry
    if not steps:
        raise InputError(f"{path}: found no step, expected lines of type step")
    return steps


def predict_s(run: Run, calibration: Calibration | None) -> tuple[float, np.ndarray, np.ndarray]:
    """Predicted step, and compute and update of every worker [s]."""
    tables = CostTables(run.problem, calibration=calibration)
    times = step_times(run.plan, tables)
    shares = np.concatenate([run.plan.shares(s) for s in range(len(run.plan.stages))])
    compute = shares * (times.schedule.forward_s + times.schedule.backward_s)
    return times.step_s, compute, times.update_s


def fit(runs: Sequence[Run]) -> Calibration:
    """Factors for what the runs used.

    Compute and update first (they are measured by themselves), then communication.
    """
    compute, update = {}, {}
    predictions = [predict_s(run, None) for run in runs]
    for device in sorted({device for run in runs for device in run.devices}):
        ratios: list[list[float]] = [[], []]
        for run, (_, compute_s, update_s) in zip(runs, predictions, strict=True):
            mine = np.array([name == device for name in run.devices])
            for found, measured, predicted in ((0, run.compute_s, compute_s), (1, run.update_s, update_s)):
                part = measured[run.fitted][:, mine] / np.maximum(predicted[mine], 1e-12)
                ratios[found] += part[part > 0].ravel().tolist()
        if ratios[0]:
            compute[device] = float(np.median(ratios[0]))
        if ratios[1]:
            update[device] = float(np.median(ratios[1]))

    communication = _communication(runs, compute, update)
    fitted = Calibration(compute=compute, update=update, communication=communication, over=_over(runs))
    errors = np.concatenate([_errors(run, fitted) for run in runs])
    return replace(fitted, relative_error=float(min(np.quantile(errors, 0.9), 1.0)))


def _over(runs: Sequence[Run]) -> dict[str, str]:
    """What predicted the times of each device type, the same in all runs."""
    over: dict[str, str] = {}
    for run in runs:
        tables = CostTables(run.problem)
        for device in sorted(set(run.devices)):
            now = tables.basis(device)
            other = Message("expected.factors_over", basis=over.setdefault(device, now))
            require(over[device] == now, f"{run.name}: {device}", Message("found.factors_over", basis=now), other)
    return over


def _communication(runs: Sequence[Run], compute: Mapping[str, float], update: Mapping[str, float]) -> float:
    """The factor of communication under which the squares of the steps' errors are least.

    Runs of one device tell nothing of links, and those whose messages hide behind compute little: of factors that
    explain the runs alike the one nearest to 1 counts, and 1 where no other explains them noticeably better.
    """

    def error(run: Run, log_factor: float) -> float:
        tried = Calibration(compute=compute, update=update, communication=math.exp(log_factor))
        return math.log(predict_s(run, tried)[0] / np.median(run.step_s[run.fitted]))

    tried = np.log(FACTORS)
    telling = [run for run in runs if error(run, tried[-1]) - error(run, tried[0]) > UNTOLD]
    if not telling:
        return 1.0

    def miss(log_factor: float) -> float:
        return math.hypot(*(error(run, log_factor) for run in telling)) / math.sqrt(len(telling))

    misses = np.array([miss(x) for x in tried])
    best = int(misses.argmin())
    around = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    found = minimize_scalar(miss, bounds=around, method="bounded", options={"xatol": 1e-4})
    tried, misses = np.append(tried, found.x), np.append(misses, found.fun)
    if miss(0.0) <= misses.min() + UNTOLD:
        return 1.0
    alike = tried[misses <= misses.min() + AS_GOOD]
    return math.exp(alike[np.abs(alike).argmin()])


def _errors(run: Run, calibration: Calibration | None) -> np.ndarray:
    """Absolute relative errors of the predicted step on the steps that were left out."""
    step = predict_s(run, calibration)[0]
    found: np.ndarray = np.abs(step / run.step_s[~run.fitted] - 1)
    return found


def report(runs: Sequence[Run], fitted: Calibration) -> dict[str, Any]:
    """What the fit found, and the error before and after on steps that it did not see."""

    def lines() -> Iterator[dict[str, Any]]:
        for run in runs:
            before, after = _errors(run, None), _errors(run, fitted)
            yield {
                "run": run.name,
                "steps_fitted": int(run.fitted.sum()),
                "steps_left_out": int((~run.fitted).sum()),
                "measured_step_s": float(np.median(run.step_s[~run.fitted])),
                "predicted_before_s": predict_s(run, None)[0],
                "predicted_after_s": predict_s(run, fitted)[0],
                "error_before_pct": 100 * float(before.mean()),
                "error_after_pct": 100 * float(after.mean()),
            }

    return {"calibration": fitted.to_dict(), "runs": list(lines())}
