"""How far predictions are from measurements: per row, per data set, overall."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polygon.accuracy.measured import MeasuredRun
from polygon.cost.estimate import Estimate, estimate, worker_memory
from polygon.cost.memory import MemoryBreakdown
from polygon.cost.profiles import ModelProfile
from polygon.cost.tables import CostTables

CONTEXT_ERROR = 0.2
"""The same over context, communication buffers and workspaces: figures for one cluster are no better on another (a
judgement)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prediction beside its measurement."""

    identifier: str
    dataset: str
    quantity: str
    """time or memory."""
    calibration: bool
    measured: float
    predicted: float
    low: float
    high: float
    source: str
    owner: str
    """Of the time, the largest term; of the memory, the part that takes most."""
    terms: Mapping[str, float]
    group: tuple[Any, ...]
    """Runs that do the same work on the same devices: one may be chosen over another."""
    work: float
    """Tokens per step."""
    runtime: str
    device: str
    fullness: float
    """Predicted bytes of the fullest device over those that it has; as the run ran, above one is wrong."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors of some rows of one quantity, in percent of the measurement."""

    rows: int
    mean_abs_pct: float
    median_abs_pct: float
    p90_abs_pct: float
    worst_abs_pct: float
    bias_pct: float
    spearman: float | None
    """Rank correlation; None for fewer than three rows."""
    interval_coverage_pct: float
    """Rows whose measurement lies in the 90 % interval."""
    regret_pct: float | None
    """What is lost on average by running the configuration predicted to be fastest; None where there is no choice."""
    refused_pct: float
    """Rows of runs that ran and are said not to fit."""


def predict(run: MeasuredRun, profiles: Sequence[ModelProfile] = ()) -> tuple[Estimate, MemoryBreakdown]:
    """What the planner says of a measured run, and the memory of the worker that needs most.

    A profile of its model takes the device model's place where it was measured in the run's precision and sequence
    length.
    """
    alike = [p for p in profiles if run.profiled and p.fits(run.model) and p.seq_len in (None, run.batch.seq_len)]
    fitting = [p for p in alike if p.devices & run.devices]
    tables = CostTables(run.problem, fitting)
    memory = worker_memory(run.plan, tables, tables.placement(run.plan))
    return estimate(run.problem, run.plan, tables), max(memory, key=lambda held: held.total_bytes)


def rows_of(run: MeasuredRun, estimated: Estimate, peak: MemoryBreakdown) -> list[Row]:
    """The rows (time, memory) that a run gives."""
    model, devices = run.model, run.problem.cluster.catalogue
    same: dict[str, Any] = {
        "identifier": run.identifier,
        "dataset": run.dataset,
        "calibration": run.calibration,
        "group": (
            run.dataset,
            model.blocks,
            model.hidden_size,
            run.batch.seq_len,
            run.device_label,
            run.plan.world_size,
        ),
        "work": run.batch.tokens,
        "runtime": run.problem.runtime.name,
        "device": "+".join(sorted(run.devices)),
        "source": estimated.sources["compute"],
        "fullness": max(one.peak_bytes / devices[one.device].memory_bytes for one in estimated.workers),
    }
    rows = []
    if run.step_s:
        terms = estimated.terms
        rows.append(
            Row(
                **same,
                quantity="time",
                measured=run.step_s,
                predicted=estimated.step_s,
                low=estimated.low_s,
                high=estimated.high_s,
                owner=max(terms, key=lambda name: terms[name]),
                terms=terms,
            )
        )
    if run.memory_bytes:
        total = (peak.total_bytes - peak.context) * run.memory_factor + run.context_bytes
        half = math.hypot(total * run.memory_error, run.context_bytes * CONTEXT_ERROR)
        parts = ("weights", "gradients", "optimizer", "activations", "transient", "context")
        rows.append(
            Row(
                **same,
                quantity="memory",
                measured=run.memory_bytes,
                predicted=total,
                low=total - half,
                high=total + half,
                owner=peak.owner,
                terms={part: getattr(peak, part) for part in parts},
            )
        )
    return rows


def accuracy(rows: Sequence[Row]) -> Accuracy:
    """Statistics of rows of one quantity; at least one."""
    errors = 100 * np.array([row.error for row in rows])
    size = np.abs(errors)
    inside = np.array([row.low <= row.measured <= row.high for row in rows])
    return Accuracy(
        rows=len(rows),
        mean_abs_pct=float(size.mean()),
        median_abs_pct=float(np.median(size)),
        p90_abs_pct=float(np.percentile(size, 90)),
        worst_abs_pct=float(size.max()),
        bias_pct=float(errors.mean()),
        spearman=_rank_correlation(rows),
        interval_coverage_pct=100 * float(inside.mean()),
        regret_pct=_regret_pct(rows),
        refused_pct=100 * float(np.mean([row.fullness > 1 for row in rows])),
    )


def _rank_correlation(rows: Sequence[Row]) -> float | None:
    if len(rows) < 3:
        return None
    predicted, measured = (_ranks(np.array(v)) for v in zip(*((r.predicted, r.measured) for r in rows), strict=True))
    if predicted.std() == 0 or measured.std() == 0:
        return None
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts + 1) / 2
    return mean_rank[inverse]


def _regret_pct(rows: Sequence[Row]) -> float | None:
    """Mean loss of picking by prediction, over the groups that offer a choice; by seconds per token."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.quantity == "time":
            groups.setdefault(row.group, []).append(row)
    losses = []
    for members in groups.values():
        if len(members) > 1:
            pick = min(members, key=lambda row: row.predicted / row.work)
            best = min(row.measured / row.work for row in members)
            losses.append(100 * (pick.measured / pick.work / best - 1))
    return float(np.mean(losses)) if losses else None


BREAKDOWNS: Mapping[str, Callable[[Row], str]] = {
    "dataset": lambda row: row.dataset,
    "runtime": lambda row: row.runtime,
    "device": lambda row: row.device,
    "bound": lambda row: row.owner,
}
"""What the rows may be told apart by."""


def broken_down(
    rows: Iterable[Row], keep: Callable[[Row], bool], by: str = "dataset"
) -> dict[str, dict[str, Accuracy]]:
    """Accuracy by data set (or another of `BREAKDOWNS`) and quantity; the key `overall` takes all together."""
    kept, key = [row for row in rows if keep(row)], BREAKDOWNS[by]
    names = ["overall", *sorted({key(row) for row in kept})]
    result: dict[str, dict[str, Accuracy]] = {}
    for name in names:
        for quantity in ("time", "memory"):
            chosen = [row for row in kept if row.quantity == quantity and name in ("overall", key(row))]
            if chosen:
                result.setdefault(name, {})[quantity] = accuracy(chosen)
    return result
