"""How far predictions are from measurements: per row, per data set, overall."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polygon.cost.link_curves import LinkCurves
from polygon.cost.profiles import ModelProfile
from polygon.cost.staged import Place, StagedConfig, StagedEstimate, estimate_staged
from polygon.cost.uniform import UniformEstimate, estimate_uniform, stage_bounds
from polygon.domain.cluster import Link
from polygon.measured import MeasuredRun, StagedRun

FABRIC = Link(latency_s=2e-6, bytes_per_s=300e9)
NETWORK = Link(latency_s=5e-6, bytes_per_s=25e9)
"""What a staged run's devices get inside and between nodes where no curve was measured."""
MEMORY_ERROR = 0.08
"""Half of a 90 % interval over the memory of a staged run: fragmentation and what frameworks keep beside the model."""
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


def predict(
    run: MeasuredRun | StagedRun, profiles: Sequence[ModelProfile], curves: LinkCurves | None
) -> UniformEstimate | StagedEstimate:
    """Step time and memory of a measured run, from a profile of its model and devices where there is one."""
    if isinstance(run, StagedRun):
        return _staged(run.model, run, run.config, profiles, curves)
    matching = [p for p in profiles if p.fits(run.model) and any(d == run.pool.device.name for d, _ in p.points)]
    config = run.config
    plain = (config.zero, config.cp, config.ep, config.interleave) == (0, 1, 1, 1)
    if matching and plain and run.model.experts == 0 and run.config.recompute == "none" and run.profiled_precision:
        workers = (Place(device=run.pool.device, tp=config.tp, zone=""),) * config.dp
        staged = StagedConfig(
            bounds=tuple(stage_bounds(run.model, config)),
            stages=(workers,) * config.pp,
            micro_batch_size=config.micro_batch_size,
            micro_batches=run.batch.global_batch // config.micro_batch_size,
            kernels=config.kernels,
        )
        return _staged(run.model, run, staged, matching, curves)
    return estimate_uniform(run.model, run.batch, run.pool, config, context_bytes=run.context_bytes)


def _staged(
    model: Any,
    run: MeasuredRun | StagedRun,
    config: StagedConfig,
    profiles: Sequence[ModelProfile],
    curves: LinkCurves | None,
) -> StagedEstimate:
    profile = next((p for p in profiles if p.fits(model)), None)
    fabric, network = FABRIC, NETWORK
    if isinstance(run, MeasuredRun):
        fabric = run.pool.intra_node
        network = Link(latency_s=5e-6, bytes_per_s=run.pool.inter_node.bytes_per_s / run.pool.devices_per_node)
    return estimate_staged(model, run.batch, config, profile=profile, curves=curves, fabric=fabric, network=network)


def rows_of(run: MeasuredRun | StagedRun, estimate: UniformEstimate | StagedEstimate) -> list[Row]:
    """The rows (time, memory) that a run gives."""
    model = run.model
    group = (run.dataset, model.blocks, model.hidden_size, run.batch.seq_len, run.device_label, _devices(run))
    rows = []
    if run.step_s:
        seconds = {name: term.seconds for name, term in estimate.terms.items()}
        # An error of 20 % of what is measured: predicted / measured between 0.8 and 1 / 0.8.
        program = run.program_error if isinstance(run, MeasuredRun) else 0.0
        below_s, above_s = program * estimate.step_s, program / (1 - program) * estimate.step_s
        rows.append(
            Row(
                identifier=run.identifier,
                dataset=run.dataset,
                quantity="time",
                calibration=run.calibration,
                measured=run.step_s,
                predicted=estimate.step_s,
                low=max(0.0, estimate.step_s - math.hypot(estimate.step_s - estimate.low_s, below_s)),
                high=estimate.step_s + math.hypot(estimate.high_s - estimate.step_s, above_s),
                source=estimate.terms["compute"].source,
                owner=max(seconds, key=lambda name: seconds[name]),
                terms=seconds,
                group=group,
                work=run.batch.tokens,
            )
        )
    if run.memory_bytes:
        peak = estimate.peak
        factor, error = (run.memory_factor, run.memory_error) if isinstance(run, MeasuredRun) else (1.0, MEMORY_ERROR)
        total = (peak.total_bytes - peak.context) * factor + peak.context
        half = math.hypot(total * error, peak.context * CONTEXT_ERROR)
        parts = ("weights", "gradients", "optimizer", "activations", "transient", "context")
        rows.append(
            Row(
                identifier=run.identifier,
                dataset=run.dataset,
                quantity="memory",
                calibration=run.calibration,
                measured=run.memory_bytes,
                predicted=total,
                low=total - half,
                high=total + half,
                source="spec" if isinstance(estimate, UniformEstimate) else "profile",
                owner=peak.owner,
                terms={part: getattr(peak, part) for part in parts},
                group=group,
                work=run.batch.tokens,
            )
        )
    return rows


def _devices(run: MeasuredRun | StagedRun) -> int:
    if isinstance(run, MeasuredRun):
        return run.config.devices
    return sum(place.tp for stage in run.config.stages for place in stage)


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


def by_dataset(rows: Iterable[Row], keep: Callable[[Row], bool]) -> dict[str, dict[str, Accuracy]]:
    """Accuracy by data set and quantity; the key `overall` takes all data sets together."""
    kept = [row for row in rows if keep(row)]
    names = ["overall", *sorted({row.dataset for row in kept})]
    result: dict[str, dict[str, Accuracy]] = {}
    for name in names:
        for quantity in ("time", "memory"):
            chosen = [row for row in kept if row.quantity == quantity and name in ("overall", row.dataset)]
            if chosen:
                result.setdefault(name, {})[quantity] = accuracy(chosen)
    return result
