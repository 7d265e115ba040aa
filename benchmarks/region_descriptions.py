"""The same machines described as one region and as three: what the search makes of each, and what one plan costs.

    python -m benchmarks.region_descriptions [--count 8] [--first 0] [--parity safe] [--effort thorough]

Draws machines: three groups of equal nodes, every two nodes joined by the same link. Once they are one region with that
link between its nodes, once three regions with that link inside and between. Prints the steps that `search` finds, and
of the plan for one region the step under either description.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, NodeGroup, Region
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, LinkUse, Plan, Problem, Worker
from polygon.formats import catalogue
from polygon.planning.efforts import EFFORTS
from polygon.planning.search_engine import find_in_rounds, find_plan

LINKS = (
    "ethernet-10g",
    "infiniband-hdr",
    Link(latency_s=1e-3, bytes_per_s=1.25e9),
    Link(latency_s=2e-2, bytes_per_s=1.25e8),
)
LIMIT = 0.03


def drawn(seed: int, parity: str) -> tuple[Problem, Problem, str]:
    """The problem in one region, the same in three, and words for it."""
    rng = np.random.default_rng(seed)
    device, nodes, per_node = str(rng.choice(["a100-80gb", "h100-sxm", "a10g"])), int(rng.choice([1, 2])), 4
    chosen = LINKS[int(rng.integers(len(LINKS)))]
    link = catalogue.link(chosen) if isinstance(chosen, str) else chosen
    model = catalogue.model(str(rng.choice(["gpt3-1.3b", "llama3.2-1b", "llama3-8b"])))
    batch = Batch(global_batch=int(rng.choice([48, 96, 192])), seq_len=2048)

    def problem(regions: int) -> Problem:
        group = NodeGroup(
            device=device,
            nodes=3 * nodes // regions,
            devices_per_node=per_node,
            intra_node=catalogue.usual_link(device),
            inter_node=link,
        )
        apart = ~np.eye(regions, dtype=bool)
        cluster = Cluster(
            name=f"{regions} regions",
            regions=tuple(Region(name=f"r{r}", node_groups=(group,), intra_region=link) for r in range(regions)),
            latency_s=apart * link.latency_s,
            bytes_per_s=apart * link.bytes_per_s,
            capacity_bytes_per_s=np.full((regions, regions), np.inf),
            catalogue={device: catalogue.device(device)},
        )
        return Problem(cluster=cluster, model=model, batch=batch, constraints=Constraints(parity=parity))

    gbps, ms = link.bytes_per_s * 8e-9, link.latency_s * 1e3
    words = (
        f"{3 * nodes} x {per_node} {device}, {model.name}, batch {batch.global_batch}, {gbps:.4g} Gbit/s, {ms:.3g} ms"
    )
    return problem(1), problem(3), words


def searched(problem: Problem, effort: str) -> Plan | None:
    """The plan that the search finds, as the command searches."""
    return find_in_rounds(
        lambda place, own, tell: find_plan(problem, np.random.default_rng([0, place]), effort=own),
        EFFORTS[effort],
        None,
    ).plan


def in_regions(plan: Plan, one: Problem, three: Problem) -> Plan:
    """The plan for one region said of three: the same devices, what is packed inside packed between as well."""
    pools = three.cluster.pools

    def worker(old: Worker) -> Worker:
        pool = next(pool for pool in pools if 0 <= old.devices[0] - pool.first_device < pool.devices)
        return replace(old, pool=pool.index)

    stages = tuple(replace(stage, workers=tuple(map(worker, stage.workers))) for stage in plan.stages)
    regions = range(len(three.cluster.regions))
    links = tuple(
        replace(use, source=a, target=b)
        for use in plan.links or (LinkUse(source=0, target=0),)
        for a in regions
        for b in regions
    )
    return replace(plan, stages=stages, links=links)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=8, help="problems")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--parity", default="safe", help="level of parity")
    parser.add_argument("--effort", choices=EFFORTS, default="thorough", help="of each search")
    args = parser.parse_args()
    apart = []
    for seed in range(args.first, args.first + args.count):
        one, three, words = drawn(seed, args.parity)
        plans = [searched(problem, args.effort) for problem in (one, three)]
        if plans[0] is None or plans[1] is None:
            print(f"{seed} {words}: no plan in {'one' if plans[0] is None else 'three'}")
            continue
        found = [step_times(plan, CostTables(p)).step_s for plan, p in zip(plans, (one, three), strict=True) if plan]
        same = step_times(in_regions(plans[0], one, three), CostTables(three)).step_s
        apart.append(found[1] / found[0] - 1)
        print(
            f"{seed} {words}: one {found[0]:.4f} s, three {found[1]:.4f} s ({apart[-1]:+.1%}); the plan for one, in "
            f"three: {same:.4f} s ({same / found[0] - 1:+.1%})",
            flush=True,
        )
    beyond = sum(abs(part) > LIMIT for part in apart)
    print(
        f"{len(apart)} problems: {beyond} further apart than {LIMIT:.0%}, at most {max(map(abs, apart), default=0):.1%}"
    )
    return int(beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
