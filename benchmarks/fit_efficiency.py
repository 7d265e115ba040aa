"""Refit the coefficients of the operator model to the calibration data, and print them with their residuals.

    python benchmarks/fit_efficiency.py

Reads only what may be calibrated on: runs of up to eight devices of `instances/measured/published_runs.json`
(MosaicML) and the layer times of `instances/measured/layer_times.json`. Robust (Cauchy) least squares on the logarithm
of the time; some of the runs thrash their allocator (30 billion parameters at 8192 tokens) and must not decide.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.ablation import forget
from polygon.accuracy.foreign_rows import NotExpressibleError
from polygon.accuracy.measured import MeasuredRun, published_run
from polygon.cost import blocks, kernels, sharding
from polygon.cost.compute import layer_times
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch, Model
from polygon.domain.runtime import Runtime
from polygon.formats.catalogue import device

MEASURED = Path(__file__).parents[1] / "instances" / "measured"
NVLINK = Link(latency_s=2e-6, bytes_per_s=300e9)
GPT_22B = Model(
    name="GPT-22B",
    blocks=48,
    hidden_size=6144,
    heads=64,
    kv_heads=64,
    head_dim=96,
    ffn_size=24576,
    vocab_size=51200,
    max_seq_len=2048,
)
LLAMA_7B = Model(
    name="llama-2-7b",
    family="llama",
    blocks=32,
    hidden_size=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn_size=11008,
    vocab_size=32000,
    max_seq_len=4096,
    gated_mlp=True,
    tied_embeddings=False,
    learned_positions=False,
    rms_norm=True,
    linear_bias=False,
    qkv_bias=False,
)
START = {
    ("ampere", "gemm"): 0.8,
    ("ampere", "memory"): 0.8,
    ("ampere", "triton_forward"): 0.5,
    ("ampere", "triton_backward"): 0.3,
    ("hopper", "gemm"): 0.8,
    ("hopper", "memory"): 0.8,
    ("hopper", "triton_forward"): 0.3,
    ("hopper", "triton_backward"): 0.2,
    ("", "UNFUSED_PASSES"): 1.8,
    ("", "SHARD_COPIES"): 2.0,
}


def _place(name: str) -> Any:
    """The module that a coefficient of all architectures lives in."""
    return next(module for module in (blocks, sharding) if hasattr(module, name))


def stated() -> dict[tuple[str, str], float]:
    """The coefficients in use, as `START` names them."""
    return {
        (architecture, name): getattr(kernels.EFFICIENCY[architecture] if architecture else _place(name), name)
        for architecture, name in START
    }


def apply(values: dict[tuple[str, str], float]) -> None:
    """Put coefficients into the model and forget what was computed with others."""
    for (architecture, name), value in values.items():
        if architecture:
            changed: dict[str, Any] = {name: value}
            kernels.EFFICIENCY[architecture] = replace(kernels.EFFICIENCY[architecture], **changed)
        else:
            setattr(_place(name), name, value)
    forget()


def table_4(rows: dict[str, dict[str, float]]) -> list[tuple[str, float, float]]:
    """Korthikanti's one layer of 22B on eight A100: (name, predicted, measured) in seconds."""
    batch, out = Batch(global_batch=4, seq_len=2048, precision="fp16"), []
    how = Runtime(attention="materialised", loss="vocab-parallel", dropout=True, tp_overlap="backward")
    for name, measured in rows.items():
        recompute = next((r for r in ("full", "selective") if name.startswith(r)), "none")
        times = layer_times(
            GPT_22B,
            batch,
            device("a100-80gb"),
            NVLINK,
            tp=8,
            micro_batch_size=4,
            recompute=recompute,
            sequence_parallel="sequence" in name,
            runtime=how,
        )
        out.append((f"{name} forward", float(times.forward_s[1]), measured["forward"] / 1e3))
        out.append((f"{name} backward", float(times.backward_s[1]), measured["backward"] / 1e3))
    return out


def galvatron(times_ms: dict[str, float]) -> list[tuple[str, float, float]]:
    """Forward of one layer of Llama-2-7B on an A100, from the difference of four layers and two."""
    out = []
    for size in range(1, 13):
        measured = (times_ms[f"layernum[4]_bsz{size}_seq2048"] - times_ms[f"layernum[2]_bsz{size}_seq2048"]) / 2e3
        batch = Batch(global_batch=size, seq_len=2048)
        predicted = layer_times(LLAMA_7B, batch, device("a100-80gb"), NVLINK, micro_batch_size=size).forward_s[1]
        out.append((f"llama-2-7b, {size} sequences", float(predicted), measured))
    return out


def calibration_runs() -> list[MeasuredRun]:
    """Rows with a time that may be fitted."""
    runs = []
    for row in json.loads((MEASURED / "published_runs.json").read_text())["rows"]:
        try:
            run = published_run(row)
        except NotExpressibleError:
            continue
        if run.calibration and run.step_s:
            runs.append(run)
    return runs


def step_s(run: MeasuredRun) -> float:
    """What `polygon.cost.estimate` says of the time of a run, its other answers left out."""
    return step_times(run.plan, CostTables(run.problem)).step_s


def residuals(runs: list[MeasuredRun], layers: dict, x: np.ndarray) -> np.ndarray:
    """Logarithm of predicted over measured, runs first, then single layers."""
    apply(dict(zip(START, x, strict=True)))
    of_runs = [np.log(step_s(run) / run.step_s) for run in runs if run.step_s]
    single = table_4(layers["korthikanti_table4"]["rows_ms"])
    single += galvatron(layers["galvatron_llama2_7b"]["computation_ms"])
    return np.array(of_runs + [np.log(p / m) for _, p, m in single])


def fit(runs: list[MeasuredRun], layers: dict, start: np.ndarray) -> np.ndarray:
    """Coefficients in the order of `START`."""
    low, high = np.full(len(start), 0.05), np.array([6.0 if not name[0] else 1.0 for name in START])
    low[-2:] = (1.0, 0.0)
    found = least_squares(
        lambda x: residuals(runs, layers, x), start, bounds=(low, high), diff_step=1e-2, loss="cauchy", f_scale=0.02
    )
    return found.x


def main() -> None:
    """Fit, print; then leave out every model size in turn, which is what the stated intervals rest on."""
    layers = json.loads((MEASURED / "layer_times.json").read_text())
    runs = [run for run in calibration_runs() if run.batch.precision != "fp8"]
    now = stated()
    best = fit(runs, layers, np.array(list(START.values())))
    for ((architecture, name), in_use), value in zip(now.items(), best, strict=True):
        print(f"{architecture or 'all':8s} {name:18s} {value:.3f} (in use: {in_use:.3f})")
    errors = np.abs(np.expm1(residuals(runs, layers, best)))
    print(f"runs: mean {errors[: len(runs)].mean():.1%}, median {np.median(errors[: len(runs)]):.1%}")
    print(f"single layers: mean {errors[len(runs) :].mean():.1%}, worst {errors[len(runs) :].max():.1%}")
    left_out: list[float] = []
    for width in sorted({run.model.hidden_size for run in runs}):
        others = [run for run in runs if run.model.hidden_size != width]
        mine = [run for run in runs if run.model.hidden_size == width]
        x = fit(others, layers, best)
        left_out += list(np.abs(np.expm1(residuals(mine, layers, x)[: len(mine)])))
    print(
        f"a model size left out: mean {np.mean(left_out):.1%}, 90 % of its runs within {np.quantile(left_out, 0.9):.1%}"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
