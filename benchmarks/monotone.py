"""How often, and by how much, the search finds a worse plan where more is offered.

A node, a region, better links, local steps that may be chosen, or twice the sequences (in twice the time at most); or
(`--large`) all of a drawn cluster of up to 32 regions and 4,096 devices beside one of its device types, or half of its
regions, the strongest.

    python benchmarks/monotone.py [--count 50] [--first 0] [--effort thorough] [--large]

The best plan never gets worse; what is counted here is what the search misses.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.seed_spread import large_problem
from polygon import Problem as Planner
from polygon.domain.plan import Problem
from polygon.planning.efforts import EFFORTS
from tests.drawn_problems import larger_problems

TIMES_SEQUENCES = 2


def step_s(problem: Problem, effort: str) -> float:
    """Step time of the plan that the command finds; an interrupted search counts for nothing."""
    found = Planner.of(problem).search(effort=EFFORTS[effort])
    if found.status == "interrupted":
        raise KeyboardInterrupt
    return math.inf if found.estimate is None else found.estimate.step_s


def compare(seed: int, effort: str, worse: dict[str, list[float]]) -> None:
    """Plan one problem and those that offer more; adds by how much each is worse."""
    problem, larger = larger_problems(seed)
    larger["local steps"] = replace(problem, constraints=replace(problem.constraints, local_steps=(1, 10, 30, 100)))
    larger["sequences"] = replace(
        problem, batch=replace(problem.batch, global_batch=TIMES_SEQUENCES * problem.batch.global_batch)
    )
    base_s = step_s(problem, effort)
    for name, other in larger.items() if math.isfinite(base_s) else ():
        allowed_s = base_s * (TIMES_SEQUENCES if name == "sequences" else 1)
        over = step_s(other, effort) / allowed_s - 1
        worse.setdefault(name, []).append(over)
        print(f"seed {seed}, more {name}: {over:+.2%}", file=sys.stderr, flush=True)


def compare_parts(seed: int, effort: str, worse: dict[str, list[float]]) -> None:
    """Plan a large problem and parts of it; adds by how much all is worse than the best of the parts of a kind."""
    drawn = large_problem(seed)
    if drawn is None:
        return
    problem = drawn[1].data
    cluster = problem.cluster
    power = dict.fromkeys((region.name for region in cluster.regions), 0.0)
    for pool in cluster.pools:
        power[cluster.regions[pool.region].name] += pool.devices * max(pool.device.flops.values())
    types = list(dict.fromkeys(pool.device.name for pool in cluster.pools))
    weaker = sorted(power, key=power.__getitem__)[: len(power) // 2]
    limits = problem.constraints
    others = [tuple(other for other in types if other != own) for own in types if len(types) > 1]
    parts = {
        "types": [replace(limits, forbidden_devices=names) for names in others],
        "regions": [replace(limits, forbidden_regions=tuple(weaker))] if weaker else [],
    }
    all_s = step_s(problem, effort)
    for name, some in parts.items():
        found = [step_s(replace(problem, constraints=of), effort) for of in some]
        if math.isfinite(part_s := min(found, default=math.inf)):
            over = all_s / part_s - 1
            worse.setdefault(name, []).append(over)
            print(f"{drawn[0]}, {all_s:.4g} s, more {name}: {over:+.2%}", file=sys.stderr, flush=True)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=50, help="problems, each with six that offer more")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--effort", choices=EFFORTS, default="thorough", help="as of `polygon search`")
    parser.add_argument("--large", action="store_true", help="all of a large cluster beside parts of it")
    args = parser.parse_args()
    worse: dict[str, list[float]] = {}
    began_s = time.process_time()
    try:
        for seed in range(args.first, args.first + args.count):
            (compare_parts if args.large else compare)(seed, args.effort, worse)
    except KeyboardInterrupt:
        print("interrupted: what was compared so far", file=sys.stderr)
    print("more        pairs  worse  by over 1 %  mean of these  worst")
    for name, over in worse.items():
        bad = [x for x in over if x > 1e-9]
        mean, worst = (statistics.mean(bad), max(bad)) if bad else (0.0, 0.0)
        print(f"{name:11} {len(over):5}  {len(bad):5}  {sum(x > 0.01 for x in bad):11}  {mean:13.2%}  {worst:5.2%}")
    print(f"{time.process_time() - began_s:.0f} CPU-seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
