"""How long the search takes, and how much memory, by devices, regions and device types of drawn clusters.

    python benchmarks/search_time.py [--most 102400] [--plot docs/search_time.png]

One quantity grows at a time, around 4 regions, 3 types and 256 devices; every case is a process of its own, and the
kernels are compiled before the clock starts.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.bounds.lower_bound import lower_bound_s
from polygon.commands.generate import generate
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.messages.figures import new_figure
from polygon.planning.search_engine import Effort, find_plan

SERIES = {
    "devices": [(4, 3, n) for n in (16, 64, 256, 1024, 4096)],
    "regions": [(n, 3, 256) for n in (1, 2, 4, 8, 16, 32)],
    "types": [(4, n, 256) for n in (1, 2, 4, 8)],
    "all": [(10, 3, 192), (64, 8, 10_240), (64, 8, 102_400)],
}


def measure(case: tuple[int, int, int], model: str) -> dict[str, Any]:
    """Search one drawn cluster; what it took and what it found."""
    regions, types, devices = case

    def problem(regions: int, types: int, devices: int) -> Problem:
        cluster = generate(regions, types, devices, np.random.default_rng(0))
        return Problem(cluster=cluster, model=catalogue.model(model), batch=Batch(global_batch=4096, seq_len=2048))

    short = Effort(fluid_evaluations=20, exact_evaluations=5, patience=20)
    find_plan(problem(2, 2, 16), np.random.default_rng(0), effort=short)
    asked = problem(regions, types, devices)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    tables = CostTables(asked)
    found = find_plan(asked, np.random.default_rng(0), tables=tables)
    bound_s = lower_bound_s(tables)
    return {
        "regions": regions,
        "types": types,
        "devices": devices,
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_s": found.value_s,
        "bound_s": bound_s,
        "evaluations": found.evaluations,
    }


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """CPU time against each quantity, one panel each."""
    grown = [name for name in results if name != "all"]
    figure = new_figure(4 * len(grown), 3, "--plot")
    axes = figure.subplots(1, len(grown), sharey=True, squeeze=False)[0]
    for axis, name in zip(axes, grown, strict=True):
        counts = [r[name] for r in results[name]]
        axis.plot(counts, [r["cpu_s"] for r in results[name]], marker="o")
        axis.set_xscale("log")
        axis.set_xticks(counts, [f"{count:,}" for count in counts])
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="search [CPU s]", ylim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="gpt3-6.7b", help="what to train (default gpt3-6.7b)")
    parser.add_argument("--most", type=int, default=10_240, metavar="DEVICES", help="leave larger clusters out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="curves as PNG")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    print("grows    regions types devices  CPU s  wall s  memory GB  step s  bound s  gap    evaluations")
    for name, cases in SERIES.items():
        for case in cases:
            if case[2] > args.most:
                continue
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
                row = pool.submit(measure, case, args.model).result()
            results.setdefault(name, []).append(row)
            print(
                f"{name:8} {row['regions']:7} {row['types']:5} {row['devices']:7} {row['cpu_s']:6.1f}"
                f" {row['wall_s']:7.1f} {row['memory_bytes'] / 1e9:10.2f} {row['step_s']:7.3f} {row['bound_s']:8.3f}"
                f" {row['step_s'] / row['bound_s'] - 1:6.0%} {row['evaluations']:11}",
                flush=True,
            )
    if args.plot is not None:
        plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
