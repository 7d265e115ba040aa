"""What every term of the predictor is worth: mean error on the test rows with that term taken out.

    python -m benchmarks.ablation

Nothing is refitted after a term is removed: the table says what the term carries, not what a fit could hide. A case
that changes no prediction ends the command with an error: it has lost hold of its term.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polygon.accuracy.foreign_rows import NotExpressibleError
from polygon.accuracy.measured import MeasuredRun, published_run
from polygon.accuracy.rows import Row, broken_down, predict, rows_of
from polygon.accuracy.sailor_runs import sailor_runs
from polygon.cost import blocks, compute, kernels, memory, overlap, sharding, step_times
from polygon.cost.compute import model_flops_per_step
from polygon.cost.estimate import Estimate
from polygon.cost.link_curves import LinkCurves, link_curves
from polygon.cost.profiles import ModelProfile, model_profiles
from polygon.cost.stage_reduction import ReductionCost
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Messages, price_messages

MEASURED = Path(__file__).parents[1] / "instances" / "measured"
NOTICED = 1e-4
"""Least relative change of a prediction that counts as one."""

Change = tuple[Any, str, Any]
"""Module or class, name in it, and the value to put there."""


def forget() -> None:
    """Drop everything computed with other terms."""
    kernels._of_device.cache_clear()
    kernels._silicon.cache_clear()
    kernels._seen.clear()
    kernels.gemm_s.cache_clear()
    compute._layer_times.cache_clear()
    memory._layer_memory.cache_clear()
    overlap.overlap_of.cache_clear()


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    """Put other values in place of names of modules, for a while."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    forget()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        forget()


def efficiencies(**values: Any) -> dict[str, kernels.Efficiency]:
    """Every architecture with some numbers replaced."""
    return {name: replace(e, **values) for name, e in kernels.EFFICIENCY.items()}


def nothing(*_: Any, **__: Any) -> float:
    """No seconds."""
    return 0.0


def nothing_twice(*_: Any, **__: Any) -> tuple[float, float]:
    """No seconds in forward nor in backward."""
    return 0.0, 0.0


def no_reduction(*_: Any, **__: Any) -> ReductionCost:
    """Gradients summed, and weights gathered, for nothing."""
    return ReductionCost(node_s=0.0, region_s=0.0, across_s=0.0)


def free_messages(*what: Any, **how: Any) -> Messages:
    """Messages between stages that take no time."""
    messages = price_messages(*what, **how)
    return replace(
        messages,
        busy_s=np.zeros_like(messages.busy_s),
        latency_s=np.zeros_like(messages.latency_s),
        hold_s=np.zeros_like(messages.hold_s),
        codec_s=np.zeros_like(messages.codec_s),
    )


def without(term: str) -> Callable[[Estimate], Estimate]:
    """An estimate less one of its terms."""

    def less(estimate: Estimate) -> Estimate:
        return replace(estimate, step_s=estimate.step_s - estimate.terms[term])

    return less


@dataclass(frozen=True, kw_only=True)
class Case:
    """A term that is taken out: by other values in modules, other switches of the runtime, or from the estimate."""

    title: str
    changes: tuple[Change, ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Estimate], Estimate] | None = None
    profiles: bool = True
    """Whether Sailor's runs are priced from its profiles of layers and network, else from the data sheet."""


ATTENTION = {f"{kernel}_{way}": 0.78 for kernel in ("flash", "flash2", "triton") for way in ("forward", "backward")}
NO_LAUNCH: tuple[Change, ...] = ((kernels, "EFFICIENCY", efficiencies(launch_s=0.0)),)
NO_HOST: tuple[Change, ...] = ((kernels, "EFFICIENCY", efficiencies(host_forward_s=0.0, host_backward_s=0.0)),)
EVERYTHING = Case(title="everything")
FROM_DATA_SHEETS = Case(title="no profiles: Sailor's runs from the data sheet", profiles=False)
CASES = (
    Case(
        title="no waves and tiles in products",
        changes=((kernels, "_tile_fill", lambda rows, columns, multiprocessors, tile: tile[2]),),
    ),
    Case(title="no operand traffic in products", changes=((kernels, "EFFICIENCY", efficiencies(operands=math.inf)),)),
    Case(title="no element-wise traffic", changes=((compute, "stream_s", nothing), (blocks, "stream_s", nothing))),
    Case(
        title="one GEMM efficiency for attention too",
        changes=((kernels, "EFFICIENCY", efficiencies(**ATTENTION)),),
    ),
    Case(
        title="no passes over materialised scores",
        changes=((blocks, "SCORE_PASSES", dict.fromkeys(blocks.SCORE_PASSES, (0, 0))),),
    ),
    Case(
        title="no dropout and determinism in fused attention",
        changes=((blocks, "DROPOUT_SLOWS", (1.0, 1.0)), (blocks, "DETERMINISTIC_SLOWS", 1.0)),
    ),
    Case(
        title="no passes of the loss over the logits",
        changes=((compute, "LOSS_BYTES", dict.fromkeys(compute.LOSS_BYTES, (0, 0))),),
    ),
    Case(title="no eager factor", changes=((blocks, "UNFUSED_PASSES", 1.0),)),
    Case(title="no pass that adds up gradients", switches={"fused_accumulation": True}),
    Case(title="no launch cost", changes=NO_LAUNCH),
    Case(
        title="no casts in 8-bit training",
        changes=(
            (blocks, "CAST_BYTES", dict.fromkeys(blocks.CAST_BYTES, (0, 0, 0))),
            (blocks, "EXPERT_CASTS", (0, 0)),
        ),
    ),
    Case(title="products in 8 bits as good as in 16", changes=((kernels, "EIGHT_BIT_GEMM", 1.0),)),
    Case(
        title="no communication inside layers",
        changes=(
            (compute, "all_reduce_s", nothing),
            (blocks, "all_reduce_s", nothing),
            (blocks, "_ring_attention_s", nothing_twice),
            (blocks, "_expert_exchange_s", nothing),
        ),
    ),
    Case(title="no hiding of tensor-parallel traffic", changes=((blocks, "HIDING", 0.0),)),
    Case(title="no pipeline bubble", finish=without("pipeline")),
    Case(title="no sends between stages", changes=((step_times, "price_messages", free_messages),)),
    Case(title="no exchange of tied embeddings", changes=((step_times, "tied_embedding", no_reduction),)),
    Case(
        title="no data-parallel traffic",
        changes=((step_times, "stage_reduction", no_reduction), (sharding, "collective_s", nothing)),
    ),
    Case(title="no hiding of data-parallel traffic", switches={"dp_overlap": "none"}),
    Case(
        title="no hiding of gathers in a micro-batch",
        changes=((overlap, "HIDING", dict.fromkeys(overlap.HIDING, 0.0)),),
    ),
    Case(title="no last bucket after backward", switches={"last_bucket": 0.0}),
    Case(title="no slower compute beside collectives", switches={"contention": 0.0}),
    Case(title="no buckets: one message a reduction", switches={"bucket_bytes": 1e18}),
    Case(title="no copies in sharded training", changes=((sharding, "SHARD_COPIES", 0.0),)),
    Case(title="no optimizer", changes=((CostTables, "update_s", nothing),)),
)
DATA_SHEET_CASES = (
    Case(title="no profiles and no host floor", changes=NO_HOST, profiles=False),
    Case(title="no profiles and no launch cost", changes=NO_LAUNCH, profiles=False),
)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Runs, and what the layers and the network of Sailor's were measured to take."""

    runs: Sequence[MeasuredRun]
    data_sheet_runs: Sequence[MeasuredRun]
    """The same on the usual links."""
    profiles: Sequence[ModelProfile]

    @classmethod
    def read(cls) -> Measurements:
        """Of the published runs and of Sailor's."""
        files = ("published_runs", "sailor_validation", "sailor_profiles", "sailor_network")
        published, sailor, profiles, network = (json.loads((MEASURED / f"{name}.json").read_text()) for name in files)
        runs = []
        for row in published["rows"]:
            try:
                runs.append(published_run(row))
            except NotExpressibleError:
                continue

        def of_sailor(curves: LinkCurves | None) -> list[MeasuredRun]:
            return [run for run in sailor_runs(sailor, curves) if isinstance(run, MeasuredRun)]

        return cls(
            runs=[*runs, *of_sailor(link_curves(network))],
            data_sheet_runs=[*runs, *of_sailor(None)],
            profiles=list(model_profiles(profiles).values()),
        )

    def rows(self, case: Case) -> list[Row]:
        """Measured and predicted times with a term taken out."""
        found = []
        with changed(*case.changes):
            for measured in self.runs if case.profiles else self.data_sheet_runs:
                runtime = replace(measured.problem.runtime, **case.switches)
                run = replace(measured, problem=replace(measured.problem, runtime=runtime))
                estimate, peak = predict(run, self.profiles if case.profiles else ())
                found += rows_of(run, case.finish(estimate) if case.finish else estimate, peak)
        return [row for row in found if row.quantity == "time"]

    def rule_of_thumb(self) -> list[Row]:
        """What one efficiency for everything (40 % of the peak), with the bubble of the pipeline, says."""
        found = []
        for run in self.runs:
            estimate, peak = predict(run, self.profiles)
            found += rows_of(run, replace(estimate, step_s=constant_share_s(run)), peak)
        return [row for row in found if row.quantity == "time"]


def constant_share_s(run: MeasuredRun) -> float:
    """Seconds of a step at 40 % of the peak of all devices, stages and workers taken for equal."""
    plan, pools = run.plan, run.problem.cluster.pools
    peak = sum(pools[w.pool].device.peak_flops(run.batch.precision) * len(w.devices) for w in plan.workers)
    extra = 4 / 3 if plan.stages[0].recompute == "full" else 1.0
    bubble = 1 + (plan.groups - 1) / (plan.chunks * plan.micro_batches / plan.stages[0].width)
    return model_flops_per_step(run.model, run.batch) * extra * bubble / (0.4 * peak)


def main() -> None:
    """Print the table."""
    measurements = Measurements.read()
    print("| term taken out | test rows | worst data set | calibration rows | rows that change |")
    print("|---|---|---|---|---|")
    whole, from_data_sheets = measurements.rows(EVERYTHING), measurements.rows(FROM_DATA_SHEETS)
    print(line(EVERYTHING.title, whole, whole))
    stale = []
    for case in CASES:
        rows = measurements.rows(case)
        print(line(case.title, rows, whole), flush=True)
        stale += [case.title] if changes(rows, whole) == 0 else []
    print(line("rule of thumb: 40 % of the peak and the bubble", measurements.rule_of_thumb(), whole))
    print(line(FROM_DATA_SHEETS.title, from_data_sheets, whole))
    for case in DATA_SHEET_CASES:
        rows = measurements.rows(case)
        print(line(case.title, rows, from_data_sheets))
        stale += [case.title] if changes(rows, from_data_sheets) == 0 else []
    if stale:
        raise SystemExit(f"changes nothing: {', '.join(stale)}")


def changes(rows: Sequence[Row], before: Sequence[Row]) -> int:
    """How many predictions differ from those of the same runs before."""
    known = {(row.dataset, row.identifier): row.predicted for row in before}
    pairs = [(row.predicted, known.get((row.dataset, row.identifier))) for row in rows]
    return sum(old is not None and abs(new / old - 1) > NOTICED for new, old in pairs)


def line(title: str, rows: Sequence[Row], before: Sequence[Row]) -> str:
    """One row of the table; `before`: with the term in its place."""
    test, fitted = broken_down(rows, lambda row: not row.calibration), broken_down(rows, lambda row: row.calibration)
    worst = max((name for name in test if name != "overall"), key=lambda name: test[name]["time"].mean_abs_pct)
    mean, most = test["overall"]["time"].mean_abs_pct, test[worst]["time"].mean_abs_pct
    known = fitted["overall"]["time"].mean_abs_pct
    return f"| {title} | {mean:.1f} % | {most:.1f} % ({worst}) | {known:.1f} % | {changes(rows, before)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
