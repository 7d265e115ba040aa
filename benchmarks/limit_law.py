"""Whether the limit that the page names is the one: on drawn plans every resource is relaxed and priced anew.

    python benchmarks/limit_law.py [--plans 50] [--seed 0]

For every plan the saving of the named limit beside the best of any resource, each relaxed by itself and priced from new
tables that share nothing with those of the page; memory by decoding the same allocation anew. Exit 1 if any plan has a
resource that saves more than the one that is named.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.planning.decode import Decoder
from polygon.planning.limits import LEAST, RELAXED, Resource, limits, resources
from polygon.planning.nearby import allocation_of
from tests.exported_plans import drawn


def saving(problem: Problem, plan: Plan, resource: Resource, step_s: float) -> float:
    """Part of the step that a resource saves, from tables of its own."""
    other = replace(problem, cluster=resource.better(problem.cluster, RELAXED))
    if resource.kind != "memory":
        return 1 - float(step_times(plan, CostTables(other)).step_s) / step_s
    times = []
    for each in (problem, other):
        decoder = Decoder(each)
        decoded = decoder.decode(allocation_of(decoder, plan))
        times.append(float(decoder.step_times(decoded).step_s) if isinstance(decoded, Plan) else step_s)
    return (min(step_s, times[0]) - times[1]) / step_s


def main() -> int:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    named: collections.Counter[str] = collections.Counter()
    wrong, worst, asked, begin_s = 0, 0.0, 0, time.process_time()
    for problem, plan, tables in drawn(args.plans, args.seed)[: args.plans]:
        said = limits(problem, plan, tables).limits
        times = step_times(plan, tables)
        best = max(
            (saving(problem, plan, resource, float(times.step_s)), f"{resource.kind} {resource.quality}".strip())
            for resource in resources(problem, plan, times)
        )
        asked += 1
        first = said[0].saves if said else LEAST
        named[f"{said[0].resource.kind} {said[0].resource.quality}".strip() if said else "nothing"] += 1
        worst = max(worst, best[0] - first)
        if best[0] > first + 1e-9:
            wrong += 1
            print(f"{problem.cluster.name}, {problem.model.name}: {best[1]} saves {best[0]:.4%}, named {first:.4%}")
    print(f"{asked} plans, {wrong} with a resource that saves more than the named one (largest excess {worst:.2e}); "
          f"named: {dict(named.most_common())}; {time.process_time() - begin_s:.0f} s of CPU")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
