"""The search beside every uniform split, both priced by the one estimate.

    python benchmarks/search_against_grid.py [--count 40] [--first 0] [--mixed]

Draws problems on equal devices: 1 to 64 nodes, dense and of experts, short and very long sequences, fast and slow
networks, several runtimes. The best rows of `grid3d --all` become plans and are priced exactly; the best of these that
can be run stands beside the plan of the search. `--mixed` draws clusters of several device types and regions, and
splits the devices of each pool alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.seed_spread import drawn_problem
from polygon.cost.tables import CostTables
from polygon.domain.plan import Problem
from polygon.grid3d.splits import EVERYTHING
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.search_engine import find_plan
from tests.drawn_problems import equal_devices


def mixed_devices(seed: int) -> Problem | None:
    """A problem on devices that differ; None where its numbers do not go together."""
    drawn = drawn_problem(seed)
    return drawn and drawn[1].data


def pools_alone(problem: Problem) -> list[Problem]:
    """The problem on each of the pools as if there were no other devices, those of one device left out."""
    cluster, none = problem.cluster, np.zeros((1, 1))
    found = []
    for region in cluster.regions:
        for group in region.node_groups:
            own = replace(
                cluster,
                regions=(replace(region, node_groups=(group,)),),
                latency_s=none,
                bytes_per_s=none,
                capacity_bytes_per_s=none,
            )
            found += [replace(problem, cluster=own)] if group.devices > 1 else []
    return found


def compare(problem: Problem) -> tuple[str, float, float, float, float]:
    """Words for a problem, the step of the search and of the best uniform split, and CPU seconds of both."""
    tables = CostTables(problem)
    began_s = time.process_time()
    found = find_plan(problem, np.random.default_rng(0), tables=tables)
    search_cpu_s = time.process_time() - began_s
    if found.interrupted:
        raise KeyboardInterrupt
    pools = problem.cluster.pools
    alone = [problem] if len(pools) == 1 else pools_alone(problem)
    uniform_s = min(
        (find_grid_plan(own, options=EVERYTHING, tries=8, jobs=1).value_s for own in alone), default=math.inf
    )
    grid_cpu_s = time.process_time() - began_s - search_cpu_s
    words = (
        f"{problem.cluster.devices:4} {pools[0].device.name if len(pools) == 1 else 'several':10} "
        f"{problem.model.name:16} {problem.batch.global_batch:5} x "
        f"{problem.batch.seq_len:6} {problem.runtime.name:14}"
    )
    return words, found.value_s, uniform_s, search_cpu_s, grid_cpu_s


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=40, help="problems")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--mixed", action="store_true", help="devices that differ, and uniform splits of each pool")
    args = parser.parse_args()
    ratios, cpu = [], []
    print(
        "seed devices              model            batch            runtime        search s     grid s   over   CPU-s"
    )
    try:
        for seed in range(args.first, args.first + args.count):
            problem = mixed_devices(seed) if args.mixed else equal_devices(seed)
            if problem is None:
                continue
            words, search_s, grid_s, search_cpu_s, grid_cpu_s = compare(problem)
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
