"""The search beside every uniform split, both priced by the one estimate.

    python benchmarks/search_against_grid.py [--count 40] [--first 0] [--mixed | --wide | --rearranged]

Draws problems on equal devices: 1 to 64 nodes, dense and of experts, short and very long sequences, fast and slow
networks, several runtimes. The best rows of `grid3d --all` become plans and are priced exactly; the best of these that
can be run stands beside the plan of the search. `--mixed` draws clusters of several device types and regions, and
splits the devices of each pool alone; `--wide` draws any cards and models that the catalogue has, and beside those
splits stand quick searches of each device type and of each region alone. `--rearranged` draws what `--mixed` does for
programs that run uniform plans alone (`polygon.domain.runnable`), in turn Megatron-LM's, DeepSpeed's and torchtitan's:
beside the search for what the program runs stands the plan of a search for any, rearranged to what it runs as an export
does it.
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

from benchmarks.seed_spread import drawn_problem, wide_problem
from polygon.cost.tables import CostTables
from polygon.domain.plan import Problem
from polygon.domain.runnable import runnable
from polygon.formats import catalogue
from polygon.grid3d.splits import EVERYTHING
from polygon.planning.efforts import EFFORTS
from polygon.planning.frontier import find_within_limits
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.search_engine import find_plan
from polygon.planning.uniform_plans import find_uniform
from tests.drawn_problems import equal_devices


def mixed_devices(seed: int) -> Problem | None:
    """A problem on devices that differ; None where its numbers do not go together."""
    drawn = drawn_problem(seed)
    return drawn and drawn[1].data


def wide_devices(seed: int) -> Problem | None:
    """A problem of whatever the catalogue has; None where its numbers do not go together."""
    drawn = wide_problem(seed)
    return drawn and drawn[1].data


def parts_alone(problem: Problem) -> list[Problem]:
    """The problem on each of several device types alone, and in each of several regions."""
    limits = problem.constraints
    types = dict.fromkeys(pool.device.name for pool in problem.cluster.pools)
    regions = [region.name for region in problem.cluster.regions]
    devices = [tuple(other for other in types if other != own) for own in types]
    elsewhere = [tuple(other for other in regions if other != own) for own in regions]
    some = [replace(limits, forbidden_devices=others) for others in devices if others]
    some += [replace(limits, forbidden_regions=others) for others in elsewhere if others]
    return [replace(problem, constraints=of) for of in some]


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


PROGRAMS = ("megatron-core", "deepspeed", "torchtitan")


def rearranged(problem: Problem) -> float:
    """The step of a plan that was searched as if its program ran any, on its devices as the program runs it."""
    anything = replace(problem, runtime=replace(problem.runtime, plans="any"))
    found, runs = find_plan(anything, np.random.default_rng(0)), runnable(problem)
    if found.interrupted:
        raise KeyboardInterrupt
    if found.plan is None or runs is None:
        return math.inf
    uniform = find_uniform(problem, found.plan, CostTables(problem), runs)
    return math.inf if uniform is None else uniform.step_s


def compare(problem: Problem, *, other: str = "grid") -> tuple[str, float, float, float, float]:
    """Words for a problem, the step of the search and of the best uniform split (`parts`: or quick search of a part; or
    `rearranged`), CPU-s of both."""
    tables = CostTables(problem)
    began_s = time.process_time()
    found = find_plan(problem, np.random.default_rng(0), tables=tables)
    search_cpu_s = time.process_time() - began_s
    if found.interrupted:
        raise KeyboardInterrupt
    pools = problem.cluster.pools
    if other == "rearranged":
        uniform_s = rearranged(problem)
    else:
        alone = [problem] if len(pools) == 1 else pools_alone(problem)
        found_s = (find_grid_plan(own, options=EVERYTHING, tries=8, jobs=1).value_s for own in alone)
        uniform_s = min(found_s, default=math.inf)
        for part in parts_alone(problem) if other == "parts" else ():
            uniform_s = min(uniform_s, find_within_limits(part, 0, effort=EFFORTS["quick"]).value_s)
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
    parser.add_argument("--wide", action="store_true", help="any cards and models, and each type and region alone")
    parser.add_argument("--rearranged", action="store_true", help="plans for any program, as another one runs them")
    args = parser.parse_args()
    ratios, cpu = [], []
    print(
        "seed devices              model            batch            runtime        search s    other s   over   CPU-s"
    )
    try:
        for seed in range(args.first, args.first + args.count):
            mixed = wide_devices if args.wide else mixed_devices
            problem = mixed(seed) if args.mixed or args.wide or args.rearranged else equal_devices(seed)
            if problem is None:
                continue
            if args.rearranged:
                problem = replace(problem, runtime=catalogue.runtime(PROGRAMS[seed % len(PROGRAMS)]))
            other = "rearranged" if args.rearranged else "parts" if args.wide else "grid"
            words, search_s, grid_s, search_cpu_s, grid_cpu_s = compare(problem, other=other)
            over = search_s / grid_s - 1 if math.isfinite(grid_s) else -1.0 if math.isfinite(search_s) else 0.0
            ratios.append(over)
            cpu.append(search_cpu_s)
            cpu_s = f"{search_cpu_s:4.1f} {grid_cpu_s:5.1f}"
            print(f"{seed:4} {words} {search_s:9.4f} {grid_s:9.4f} {over:+7.2%} {cpu_s}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was compared so far", file=sys.stderr)
    if ratios:
        worse = sum(over > 1e-6 for over in ratios)
        faster = sum(over < -0.01 for over in ratios)
        print(
            f"{len(ratios)} problems: the search is slower in {worse}, at most {max(0.0, *ratios):.2%}; 1 % faster or "
            f"more in {faster}; median {np.median(ratios):+.2%}; median CPU-s of a search {np.median(cpu):.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
