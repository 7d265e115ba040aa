"""What every term of the predictor is worth: mean error on the test rows with that term taken out.

    python benchmarks/ablation.py

Nothing is refitted after a term is removed: the table says what the term carries, not what a fit could hide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from polygon.accuracy import by_dataset, predict, rows_of
from polygon.cost import compute, kernels, layout, memory
from polygon.cost.link_curves import link_curves
from polygon.cost.profiles import model_profiles
from polygon.cost.staged import StagedEstimate
from polygon.measured import MeasuredRun, published_run, staged_runs

MEASURED = Path(__file__).parents[1] / "instances" / "measured"


def forget() -> None:
    """Drop everything computed with other terms."""
    kernels._silicon.cache_clear()
    kernels._seen.clear()
    kernels.gemm_s.cache_clear()
    compute._layer_times.cache_clear()
    memory._layer_memory.cache_clear()
    layout._layouts.clear()


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
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


def bulk_only(chip: kernels.Silicon, rows: float, columns: float, inner: float) -> float:
    """A product without operand traffic and launch."""
    fill = max(kernels._tile_fill(rows, columns, chip.multiprocessors, tile) for tile in kernels.TILES)
    return 2.0 * rows * columns * inner / (chip.peak_flops * chip.gemm * fill)


def no_stream(chip: kernels.Silicon, n_bytes: float, kernels: float = 1.0) -> float:
    """Element-wise work for nothing."""
    return 0.0


def without(*terms: str) -> Callable[[Any], Any]:
    """An estimate less some of its terms."""

    def less(estimate: Any) -> Any:
        gone = sum(estimate.terms[name].seconds for name in terms if name in estimate.terms)
        return replace(estimate, step_s=max(estimate.step_s - gone, 1e-9))

    return less


def same(estimate: Any) -> Any:
    """An estimate as it is."""
    return estimate


def constant_share(run: Any, estimate: Any) -> Any:
    """One efficiency for everything (40 % of the peak), pipeline bubble included: what a rule of thumb says."""
    if isinstance(estimate, StagedEstimate) or not isinstance(run, MeasuredRun):
        return estimate
    extra = 4 / 3 if run.config.recompute == "full" else 1.0
    share = run.batch.global_batch / (run.config.dp * run.config.micro_batch_size)
    bubble = 1 + (run.config.pp - 1) / (run.config.interleave * share)
    peak = run.pool.device.peak_flops(run.batch.precision) * run.config.devices
    return replace(estimate, step_s=estimate.flops * extra * bubble / (0.4 * peak))


NO_LOSS = dict.fromkeys(compute.LOSS_BYTES, (0, 0))
CASES: list[tuple[str, tuple[tuple[Any, str, Any], ...], Callable[[Any], Any]]] = [
    ("everything", (), same),
    ("no waves and tiles in products", ((kernels, "_tile_fill", lambda r, c, m, tile: tile[2]),), same),
    ("no operand traffic in products", ((compute, "gemm_s", bulk_only),), same),
    ("no element-wise traffic", ((compute, "stream_s", no_stream),), same),
    (
        "one GEMM efficiency for attention too",
        (
            (
                kernels,
                "EFFICIENCY",
                efficiencies(
                    flash_forward=0.78,
                    flash_backward=0.78,
                    flash2_forward=0.78,
                    flash2_backward=0.78,
                    triton_forward=0.78,
                    triton_backward=0.78,
                ),
            ),
        ),
        same,
    ),
    ("no passes over materialised scores", ((compute, "SCORE_PASSES", {True: (0, 0), False: (0, 0)}),), same),
    (
        "no dropout and determinism in fused attention",
        ((compute, "DROPOUT_SLOWS", (1.0, 1.0)), (compute, "DETERMINISTIC_SLOWS", 1.0)),
        same,
    ),
    (
        "no passes of the loss over the logits",
        ((compute, "LOSS_BYTES", dict.fromkeys(compute.LOSS_BYTES, (0, 0))),),
        same,
    ),
    ("no eager factor", ((compute, "UNFUSED_PASSES", 1.0),), same),
    ("no launch cost", ((kernels, "LAUNCH_S", 0.0), (compute, "LAUNCH_S", 0.0)), same),
    ("no host floor", ((compute, "HOST_S", {True: (0.0, 0.0), False: (0.0, 0.0)}),), same),
    ("no casts in 8-bit training", ((compute, "CAST_BYTES", 0),), same),
    ("no communication inside layers", (), without("tensor-parallel")),
    ("no hiding of tensor-parallel traffic", ((compute, "HIDING", 0.0),), same),
    ("no pipeline bubble", (), without("bubble")),
    ("no sends between stages", (), without("p2p")),
    ("no data-parallel traffic", (), without("data-parallel")),
    ("no copies in sharded training", ((layout, "SHARD_COPIES", 0.0),), same),
    ("no optimizer", (), without("optimizer")),
]


def main() -> None:
    """Print the table."""
    runs: list[Any] = [published_run(r) for r in json.loads((MEASURED / "published_runs.json").read_text())["rows"]]
    runs += staged_runs(json.loads((MEASURED / "sailor_validation.json").read_text()))
    profiles = list(model_profiles(json.loads((MEASURED / "sailor_profiles.json").read_text())).values())
    curves = link_curves(json.loads((MEASURED / "sailor_network.json").read_text()))
    print("| term taken out | test rows | worst data set | calibration rows |")
    print("|---|---|---|---|")
    for title, changes, finish in CASES:
        with changed(*changes):
            print(line(title, [(run, finish(predict(run, profiles, curves))) for run in runs]))
    guesses = [(run, constant_share(run, predict(run, [], curves))) for run in runs]
    print(line("rule of thumb: 40 % of the peak and the bubble", guesses))
    print(line("no profiles: Sailor's runs from the data sheet", [(run, predict(run, [], None)) for run in runs]))
    with changed((compute, "HOST_S", {True: (0.0, 0.0), False: (0.0, 0.0)})):
        print(line("no profiles and no host floor", [(run, predict(run, [], None)) for run in runs]))
    with changed((kernels, "LAUNCH_S", 0.0), (compute, "LAUNCH_S", 0.0)):
        print(line("no profiles and no launch cost", [(run, predict(run, [], None)) for run in runs]))


def line(title: str, estimates: list[tuple[Any, Any]]) -> str:
    """One row of the table."""
    rows = [row for run, estimate in estimates for row in rows_of(run, estimate) if row.quantity == "time"]
    test, fitted = by_dataset(rows, lambda row: not row.calibration), by_dataset(rows, lambda row: row.calibration)
    worst = max((name for name in test if name != "overall"), key=lambda name: test[name]["time"].mean_abs_pct)
    mean, most = test["overall"]["time"].mean_abs_pct, test[worst]["time"].mean_abs_pct
    return f"| {title} | {mean:.1f} % | {most:.1f} % ({worst}) | {fitted['overall']['time'].mean_abs_pct:.1f} % |"


if __name__ == "__main__":
    main()
