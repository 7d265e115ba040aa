"""What each dimension of a plan brings: the best uniform split with it and without, and what the search finds.

    python -m benchmarks.plan_dimensions [--model llama3-70b] [--runtime megatron-core nemo] [--nodes 8]
        [--global-batch 128] [--seq-len 8192]

Nodes of eight H100 joined by NDR InfiniBand. Every split of all devices is priced that memory holds: first those with
data, tensor and pipeline parallelism under the six pairs of recomputation and ZeRO that the first version of polygon
(commit 1a6cd53) knew, then those with every pair, sequence parallelism, chunks, context and expert parallelism, some
blocks recomputed; each row has what the rows above it have. A minute a runtime.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from polygon.cost.lanes import Lanes
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, NodeGroup, Region
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.uniform import ParallelConfig
from polygon.formats import catalogue
from polygon.grid3d.splits import EVERYTHING, all_splits, configurations, split_fault
from polygon.messages.report import table
from polygon.planning.search_engine import find_plan

FIRST_PAIRS = {("none", 0), ("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 3)}
CHUNKS = (1, 2, 4, 5, 8, 10, 20)
BLOCKS = (1, 2, 4, 8, 12, 16, 20, 30, 40)
MOST_SEQUENCES, MOST_PARTS = 4, 8
"""In a micro-batch; of a sequence."""
DEVICE = "h100-sxm"
ROWS = (
    "data, tensor, pipeline; six pairs",
    "every recomputation x ZeRO",
    "sequence parallelism",
    "chunks",
    "context, expert parallelism",
    "some blocks recomputed",
)


def problem_of(args: argparse.Namespace, runtime: str) -> Problem:
    """Equal nodes in one region."""
    link = catalogue.link("infiniband-ndr-x8")
    group = NodeGroup(
        device=DEVICE, nodes=args.nodes, devices_per_node=8, intra_node=catalogue.usual_link(DEVICE), inter_node=link
    )
    cluster = Cluster(
        name="nodes",
        regions=(Region(name="here", node_groups=(group,), intra_region=link),),
        latency_s=np.zeros((1, 1)),
        bytes_per_s=np.zeros((1, 1)),
        capacity_bytes_per_s=np.full((1, 1), np.inf),
        catalogue={DEVICE: catalogue.device(DEVICE)},
    )
    return Problem(
        cluster=cluster,
        model=catalogue.model(args.model),
        batch=Batch(global_batch=args.global_batch, seq_len=args.seq_len),
        runtime=catalogue.runtime(runtime),
    )


def row_of(config: ParallelConfig) -> int:
    """The first of `ROWS` that has what a split says."""
    if config.recompute_blocks is not None:
        return 5
    if config.cp > 1 or config.ep > 1:
        return 4
    if config.chunks > 1:
        return 3
    if config.sequence_parallel:
        return 2
    # Of one replica ZeRO splits nothing: every pair is one of the six.
    return int(config.dp > 1 and (config.recompute, config.zero) not in FIRST_PAIRS)


def splits_of(problem: Problem) -> Iterator[ParallelConfig]:
    """Every split with every option."""
    model, batch = problem.model, problem.batch
    options = replace(EVERYTHING, interleave=CHUNKS, schedule=("1f1b",))
    for split in all_splits(problem.cluster.devices, None):
        if split.cp > MOST_PARTS or split_fault(split, model, batch, 8):
            continue
        for config, fault in configurations(split, model, batch, options):
            if fault or isinstance(config, int) or config.micro_batch_size > MOST_SEQUENCES:
                continue
            yield config
            if config.recompute != "none":
                held = model.blocks // (config.pp * config.chunks)
                yield from (replace(config, recompute_blocks=n) for n in BLOCKS if n < held)


def in_words(config: ParallelConfig) -> str:
    """A split."""
    words = [f"dp {config.dp} tp {config.tp} pp {config.pp}", f"ZeRO-{config.zero}", f"recompute {config.recompute}"]
    words += [f"of {config.recompute_blocks} blocks"] if config.recompute_blocks else []
    words += ["sequence parallel"] if config.sequence_parallel else []
    words += [f"{n} {v}" for n, v in (("chunks", config.chunks), ("cp", config.cp), ("ep", config.ep)) if v > 1]
    return ", ".join([*words, f"micro-batches of {config.micro_batch_size}"])


def best_rows(problem: Problem) -> list[tuple[float, str]]:
    """Of every row its best split: seconds and words."""
    tables = CostTables(problem)
    lanes, usable = Lanes(tables), float(tables.limit_bytes[0])
    best = [(math.inf, "nothing fits")] * len(ROWS)
    for config in splits_of(problem):
        row = row_of(config)
        estimate = lanes.estimate(config)
        if estimate.peak_bytes <= usable and estimate.step_s < best[row][0]:
            best[row] = estimate.step_s, in_words(config)
    return [min(best[: row + 1]) for row in range(len(ROWS))]


def main() -> int:
    """Print a table for every runtime."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--runtime", nargs="+", default=["megatron-core", "nemo"])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=8192)
    args = parser.parse_args()
    for runtime in args.runtime:
        problem = problem_of(args, runtime)
        rows = [*zip(ROWS, best_rows(problem), strict=True)]
        found = find_plan(problem, np.random.default_rng(0))
        rows.append(("the search", (found.value_s, "")))
        first_s = rows[0][1][0]
        print(runtime)
        cells = [[name, f"{step_s:.3f}", f"{step_s / first_s - 1:+.1%}", words] for name, (step_s, words) in rows]
        print(table(["with", "step s", "against the first", "best split"], cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
