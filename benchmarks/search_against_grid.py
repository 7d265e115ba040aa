"""The search beside every uniform split, both priced by the one estimate.

    python benchmarks/search_against_grid.py [--count 40] [--first 0]

Draws problems on equal devices: 1 to 64 nodes, dense and of experts, short and very long sequences, fast and slow
networks, several runtimes. The best rows of `grid3d --all` become plans and are priced exactly; the best of these that
can be run stands beside the plan of the search.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.tables import CostTables
from polygon.domain.plan import Problem
from polygon.grid3d.splits import EVERYTHING
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.search_engine import find_plan
from tests.drawn_problems import equal_devices


def compare(seed: int) -> tuple[str, float, float, float, float]:
    """Words for a drawn problem, the step of the search and of the best uniform split, and CPU seconds of both."""
    problem: Problem = equal_devices(seed)
    tables = CostTables(problem)
    began_s = time.process_time()
    found = find_plan(problem, np.random.default_rng(0), tables=tables)
    search_cpu_s = time.process_time() - began_s
    if found.interrupted:
        raise KeyboardInterrupt
    uniform = find_grid_plan(problem, options=EVERYTHING, tables=tables, tries=8, jobs=1)
    grid_cpu_s = time.process_time() - began_s - search_cpu_s
    pools = problem.cluster.pools
    words = (
        f"{problem.cluster.devices:4} {pools[0].device.name:10} {problem.model.name:16} "
        f"{problem.batch.global_batch:5} x "
        f"{problem.batch.seq_len:6} {problem.runtime.name:14}"
    )
    return words, found.value_s, uniform.value_s, search_cpu_s, grid_cpu_s


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=40, help="problems")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    args = parser.parse_args()
    ratios, cpu = [], []
    print(
        "seed devices              model            batch            runtime        search s     grid s   over   CPU-s"
    )
    try:
        for seed in range(args.first, args.first + args.count):
            words, search_s, grid_s, search_cpu_s, grid_cpu_s = compare(seed)
            over = search_s / grid_s - 1 if math.isfinite(grid_s) else -1.0 if math.isfinite(search_s) else 0.0
            ratios.append(over)
            cpu.append(search_cpu_s)
            cpu_s = f"{search_cpu_s:4.1f} {grid_cpu_s:5.1f}"
            print(f"{seed:4} {words} {search_s:9.4f} {grid_s:9.4f} {over:+7.2%} {cpu_s}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was compared so far", file=sys.stderr)
    if ratios:
        worse = sum(over > 1e-6 for over in ratios)
        print(
            f"{len(ratios)} problems: the search is slower in {worse}, at most {max(0.0, *ratios):.2%}; median "
            f"{np.median(ratios):+.2%}; {np.median(cpu):.1f} CPU-s a search (median)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
