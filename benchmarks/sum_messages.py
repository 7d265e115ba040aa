"""What messages of sums between regions cost their hosts, and how many the best known plans send.

    python benchmarks/sum_messages.py [--sums 20] [--elements 16384]

First nine local ranks, three in each of three regions, sum one vector in one turn and more: the rest of a sum being the
same, the slope is what a message takes (packed, sent or received, unpacked) of its rank's processor. Then, for plans of
the native suite: messages of the busiest leader in a step (`Runtime.message_s` is what they are priced at).
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))

from polygon.domain.plan import Plan, Problem
from polygon.domain.runtime import turns_of_region
from polygon.formats.files import read_problem
from runners.sweeps.best_known import best_known, unpacked

ROOT = Path(__file__).resolve().parents[1]
REGIONS, NODES = 3, 3
PLANS = ("medium-96-ptafm", "medium-80-aws", "medium-64-world", "large-512-regional", "huge-10240-drawn")


def sums_on_rank(rank: int, port: int, turns: int, elements: int, sums: int) -> tuple[float, int]:
    """Processor seconds of one sum on this rank, and the messages that it sends and receives for it."""
    import torch
    from polygon_comm.accelerator import Accelerator
    from polygon_comm.members import members_of
    from polygon_comm.reduction import SumGroup
    from polygon_comm.shares import cut_for
    from polygon_comm.transport import Wires
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    ranks = range(REGIONS * NODES)
    store = TCPStore("127.0.0.1", port, len(ranks), rank == 0, wait_for_workers=False)
    regions = {r: r // NODES for r in ranks}
    members = members_of("sums", ranks, regions, {r: r for r in ranks}, "int8", turns=lambda leaders, region: turns)
    wires = Wires(
        store, rank, dict.fromkeys(members.leader_peers(rank), 1), address="127.0.0.1", timeout_s=120,
        accelerator=Accelerator(),
    )  # fmt: skip
    group, vector = SumGroup(members, wires), torch.zeros(elements)
    for i in range(2 * sums):
        if i == sums:
            began_s = time.process_time()
        group.expect(elements, vector.dtype, "gradient")
        group.sum_(vector, "gradient")
    took_s = (time.process_time() - began_s) / sums
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in ranks])
    share = cut_for(members, rank, elements).share
    return took_s, 0 if share is None else share.messages


def busiest(problem: Problem, plan: Plan) -> tuple[int, int, int, int]:
    """Of the stage whose busiest leader has most messages in a step: these, its regions, nodes and pieces."""
    from polygon_comm.members import members_of
    from polygon_comm.shares import cut_for

    pools, found = problem.cluster.pools, (0, 0, 0, 0)
    for stage in plan.stages[: plan.groups]:
        node: dict[int, int] = {}
        for worker in stage.workers:
            first, per_node = pools[worker.pool].first_device, pools[worker.pool].devices_per_node
            node |= {device: first + (device - first) // per_node for device in worker.devices}
        region = {device: pools[worker.pool].region for worker in stage.workers for device in worker.devices}
        turns = partial(turns_of_region, most=problem.runtime.sum_turns)
        members = members_of("sums", list(node), region, node, "int8", turns=turns)
        if len(members.regions) > 1:
            layers, elements = stage.last_layer - stage.first_layer, 1 << 30
            shares = [cut_for(members, leader, elements).share for of in members.leaders for leader in of]
            most = max(share.messages for share in shares if share is not None) * layers
            found = max(found, (most, len(members.regions), len(shares), len(members.pieces(elements))))
    return found


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sums", type=int, default=20, help="that are measured, after as many others")
    parser.add_argument("--elements", type=int, default=16_384)
    args = parser.parse_args()
    from tests.real_ranks import run_ranks

    print("turns  messages of a rank  CPU-ms a sum")
    messages, took = [], []
    for turns in range(1, NODES + 1):
        results = run_ranks(sums_on_rank, REGIONS * NODES, turns, args.elements, args.sums)
        took.append(1e3 * float(np.median([seconds for seconds, _ in results])))
        messages.append(float(np.mean([count for _, count in results])))
        print(f"{turns:5}  {messages[-1]:18.0f}  {took[-1]:12.2f}", flush=True)
    each_ms = float(np.polyfit(messages, took, 1)[0])
    print(f"{each_ms:.3f} CPU-ms a message\n")
    print("plan                  step   messages of the busiest leader  regions  nodes  pieces  CPU-s")
    known = best_known("native")
    for name in PLANS:
        problem = read_problem(ROOT / "instances" / "native" / f"{name}.yaml")
        most, regions, nodes, pieces = busiest(problem, unpacked(problem, known[name]["plan"]))
        step_s = known[name]["value"]
        print(f"{name:20}  {step_s:5.2f}  {most:30}  {regions:7}  {nodes:5}  {pieces:6}  {each_ms * most / 1e3:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
