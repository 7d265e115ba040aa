"""How much sooner regions sum over trees: `python benchmarks/tree_sums.py [NAMES]`.

Draws stages of some of a native problem's layers, on drawn nodes of three to eight of its regions, and prices the sum
of their gradients with equal parts, with parts by bandwidth (trees without relays) and over trees (the quickest of
`polygon.planning.sum_trees.DEARNESS`): seconds between regions, latencies included. No step is priced: sums may hide
beside backward.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.stage_reduction import ReductionCost
from polygon.cost.step_times import unpaced_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Stage, Worker
from polygon.domain.schedule import stage_spans
from polygon.formats.files import read_problem
from polygon.planning.sum_trees import DEARNESS, able_groups, drafted

NATIVE = Path(__file__).resolve().parents[1] / "instances" / "native"
NAMES = ("medium-48-ptafm-testbed", "medium-80-aws", "medium-64-irregular", "large-192-drawn", "large-1024-drawn")


def drawn_stage(tables: CostTables, rng: np.random.Generator) -> Plan:
    """One stage of a plan: drawn layers on drawn nodes of drawn regions, a micro-batch for each device."""
    problem = tables.problem
    regions, layers = len(problem.cluster.regions), problem.model.layers
    chosen = rng.choice(regions, int(rng.integers(3, min(regions, 8) + 1)), replace=False)
    workers: list[Worker] = []
    for pool in problem.cluster.pools:
        if pool.region in chosen:
            nodes = int(rng.integers(1, pool.nodes + 1))
            first = pool.first_device
            held = range(first, first + nodes * pool.devices_per_node)
            workers += [Worker(pool=pool.index, devices=(d,)) for d in held]
    begin = int(rng.integers(0, layers - 1))
    stages = (Stage(first_layer=begin, last_layer=int(rng.integers(begin + 1, layers + 1)), workers=tuple(workers)),)
    width = len(workers)
    return Plan(
        stages=stages, routes=np.arange(width)[:, None], micro_batch_size=1, spans=stage_spans(stages, (width,))
    )


def sum_of(plan: Plan, tables: CostTables) -> ReductionCost:
    """What its one sum takes."""
    return unpaced_times(plan, tables).reductions[0]


def main() -> int:
    """Print a line for each stage, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", default=NAMES, help="of instances/native")
    parser.add_argument("--count", type=int, default=12, help="stages of each")
    args = parser.parse_args()
    ratios = []
    print(f"{'problem':26} regions layers    equal  weighted    trees   times")
    for name in args.names:
        tables, rng = CostTables(read_problem(NATIVE / f"{name}.yaml")), np.random.default_rng(0)
        for _ in range(args.count):
            plan = drawn_stage(tables, rng)
            if not able_groups(plan, tables.problem):
                continue
            found = {d: sum_of(drafted(plan, tables, [0], d), tables).across_s for d in DEARNESS}
            equal_s = sum_of(plan, tables).across_s
            weighted_s, trees_s = min(equal_s, found[math.inf]), min(equal_s, *found.values())
            ratios.append((equal_s / weighted_s, equal_s / trees_s))
            regions = {tables.problem.cluster.pools[w.pool].region for w in plan.stages[0].workers}
            layers = plan.stages[0].last_layer - plan.stages[0].first_layer
            print(f"{name:26} {len(regions):7} {layers:6} {equal_s:8.2f} {weighted_s:9.2f} {trees_s:8.2f} "
                  f"{ratios[-1][1]:7.2f}")  # fmt: skip
    weighted, trees = np.array(ratios).T
    of = "times as long as"
    print(f"{len(ratios)} stages, in the median: equal parts take {np.median(weighted):.2f} {of} weighted ones, "
          f"{np.median(trees):.2f} {of} trees ({trees.min():.2f} to {trees.max():.2f})")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
