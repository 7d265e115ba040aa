"""What every memory switch of a recipe does to peak memory and time, beside the prediction.

    python benchmarks/memory_switches.py [instances/recipes/vit-tiny-ddp.yaml] [--steps 5] [--json]

Peak memory is that of the tensors alive on rank 0 (followed operation by operation, which a GPU's allocator would count
too), predicted by `polygon.cost.memory`. Time is rank 0's own CPU seconds a step, without following tensors:
wall time says little on a machine that does other things too. Offloading needs a device of its own: it is left out on
CPUs, and said so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from polygon.domain.errors import PolygonError
from polygon.messages.report import table
from runners.recipes.backends import Job
from runners.recipes.recipe_schema import read_recipe
from runners.train import run_here

SWITCHES: dict[str, list[str]] = {
    "as it is": [],
    "half the micro-batch, twice the accumulation": ["batch.micro_batch={half}"],
    "attention computed again": ["memory.recompute=selective"],
    "blocks computed again": ["memory.recompute=full"],
    "bf16": ["memory.precision=bf16"],
    "bf16, blocks computed again": ["memory.precision=bf16", "memory.recompute=full"],
    "LoRA": ["lora={rank: 8}"],
    "LoRA, blocks computed again": ["lora={rank: 8}", "memory.recompute=full"],
}
OFFLOAD = {
    "optimizer in host memory (ZeRO-2)": ["backend=deepspeed", "parallel.zero=2", "memory.offload=optimizer"],
    "weights too (ZeRO-3)": ["backend=deepspeed", "parallel.zero=3", "memory.offload=parameters"],
}


def measure(path: Path, settings: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Peak bytes, predicted and measured, and CPU seconds of a step of rank 0."""

    def run(name: str, *more: str) -> dict[str, float]:
        recipe = read_recipe(path, [*settings, *more])
        code, summary = run_here(Job(recipe, path.parent, folder / name, "auto"))
        if code:
            raise SystemExit(f"{settings}: exit code {code}")
        return summary

    followed, timed = run("memory", "steps=2", "metrics.tensor_bytes=true"), run("time", f"steps={steps}")
    return {key: followed[key] for key in ("predicted_peak_bytes", "measured_peak_bytes")} | {
        "cpu_s_per_step": timed["median_cpu_s"]
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("instances/recipes/vit-tiny-ddp.yaml"))
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed (default %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    half = max(1, read_recipe(args.recipe).batch.micro_batch // 2)
    switches = SWITCHES | (OFFLOAD if torch.cuda.is_available() else {})
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, settings) in enumerate(switches.items()):
            filled = [setting.replace("{half}", str(half)) for setting in settings]
            found[name] = measure(args.recipe, filled, args.steps, Path(folder) / str(number))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    rows = [
        [
            name, f"{row['predicted_peak_bytes'] / 1e6:.2f}", f"{row['measured_peak_bytes'] / 1e6:.2f}",
            f"{row['cpu_s_per_step']:.3f}",
        ]
        for name, row in found.items()
    ]  # fmt: skip
    print(table(["switch", "predicted MB", "measured MB", "CPU s a step"], rows))
    if not torch.cuda.is_available():
        print("offloading to host memory: not measured, everything is in host memory here")


if __name__ == "__main__":
    try:
        main()
    except PolygonError as error:
        raise SystemExit(str(error)) from None
