"""How much sooner regions sum over trees: `python benchmarks/tree_sums.py [NAMES]`.

Draws stages of some of a native problem's layers, on drawn nodes of three to eight of its regions, and prices the sum
of their gradients with equal parts, with parts by bandwidth (trees without relays) and over trees (the quickest of
`polygon.planning.sum_trees.DEARNESS`): seconds between regions, latencies included. No step is priced: sums may hide
beside backward. Also printed: what the relaxation takes the sum for, latencies and messages beside those of equal
parts, and the time that finding all four kinds of trees takes.
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

from polygon.cost.stage_reduction import ReductionCost, own_room, region_standing
from polygon.cost.step_times import unpaced_times
from polygon.cost.sum_trees import messages_in_sum, ways_over
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Stage, SumTree, Worker
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


def relaxed_s(plan: Plan, tables: CostTables) -> float:
    """Seconds between regions as the relaxation takes them: over trees where that seems sooner."""
    anew = replace(plan, stages=tuple(replace(stage) for stage in plan.stages))  # no price of it is kept
    room = own_room(len(np.unique(tables.placement(plan).pool)))
    room.trees[0] = True
    found = sum_of(anew, tables).across_s
    room.trees[0] = False
    return found


def messages_of(plan: Plan, tables: CostTables) -> float:
    """Messages of the busiest leader in a sum."""
    place, links = tables.placement(plan), tables.links
    regions = tuple(np.unique(place.region).tolist())
    together = np.ones((len(links.cluster.regions),) * 2)
    at = region_standing(place, 0, links, together, tables.problem.runtime)
    equal = tuple(SumTree(part=1 / len(regions), root=root) for root in regions)
    ways = ways_over(plan.stages[0].trees or equal, regions)
    return float(messages_in_sum(ways, at.leaders, at.turns).max())


def main() -> int:
    """Print a line for each stage, and what they say together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", default=NAMES, help="of instances/native")
    parser.add_argument("--count", type=int, default=12, help="stages of each")
    args = parser.parse_args()
    rows, spent_s = [], 0.0
    print(f"{'problem':26} regions layers    equal  weighted    trees   times  relaxed")
    for name in args.names:
        tables, rng = CostTables(read_problem(NATIVE / f"{name}.yaml")), np.random.default_rng(0)
        for _ in range(args.count):
            plan = drawn_stage(tables, rng)
            if not able_groups(plan, tables.problem):
                continue
            began_s = time.process_time()
            drafts = {d: drafted(plan, tables, [0], d) for d in DEARNESS}
            spent_s += time.process_time() - began_s
            equal, relaxed = sum_of(plan, tables), relaxed_s(plan, tables)
            found = {d: sum_of(draft, tables) for d, draft in drafts.items()}
            best = min((*found, None), key=lambda d: (found[d] if d is not None else equal).across_s)
            weighted_s = min(equal.across_s, found[math.inf].across_s)
            over = equal if best is None else found[best]
            chosen = plan if best is None else drafts[best]
            messages = messages_of(chosen, tables) / messages_of(plan, tables)
            rows.append((equal.across_s / weighted_s, equal.across_s / over.across_s, relaxed / over.across_s,
                         over.latency_s / equal.latency_s, messages))  # fmt: skip
            regions = {tables.problem.cluster.pools[w.pool].region for w in plan.stages[0].workers}
            layers = plan.stages[0].last_layer - plan.stages[0].first_layer
            print(f"{name:26} {len(regions):7} {layers:6} {equal.across_s:8.2f} {weighted_s:9.2f} {over.across_s:8.2f} "
                  f"{rows[-1][1]:7.2f} {relaxed:8.2f}")  # fmt: skip
    names = ("equal parts over weighted ones", "equal parts over trees", "relaxed over trees",
             "latency of trees over that of equal parts", "messages of trees over those of equal parts")  # fmt: skip
    print(f"{len(rows)} stages                                      median  mean  least  most")
    for what, of in zip(names, np.array(rows).T, strict=True):
        print(f"{what:46} {np.median(of):6.2f} {of.mean():5.2f} {of.min():6.2f} {of.max():5.2f}")
    print(f"{1e3 * spent_s / len(rows):.0f} CPU-ms to find the trees of one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
