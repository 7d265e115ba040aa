"""How much the plan found depends on the seed: median, worst and best step of several, and CPU seconds of a search.

    python benchmarks/seed_spread.py [--seeds 4] [--instances ptafm-7dc,aws-regions]

GPT-3 1.3B, 1024 sequences of 2048 tokens, on clusters of `instances/`; the search runs as it does by default.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.formats.files import read_cluster
from polygon.planning.search_engine import Effort, find_plan

ROOT = Path(__file__).resolve().parents[1]
INSTANCES = "ptafm-7dc,dtfm-irregular0,dtfm-irregular1,aws-regions,sailor-5zones,two-campus,world-64"


def spread(name: str, seeds: int, sequences: int) -> tuple[list[float], float]:
    """Step time by seed [s], and CPU seconds of a search (kernels compiled before)."""
    cluster = read_cluster(ROOT / "instances" / f"{name}.yaml")
    batch = Batch(global_batch=sequences, seq_len=2048)
    problem = Problem(cluster=cluster, model=catalogue.model("gpt3-1.3b"), batch=batch)
    tables = CostTables(problem)
    short = Effort(fluid_evaluations=20, exact_evaluations=5, patience=20)
    find_plan(problem, np.random.default_rng(0), tables=tables, effort=short)
    began_s = time.process_time()
    steps = [find_plan(problem, np.random.default_rng(seed), tables=tables).value_s for seed in range(seeds)]
    return steps, (time.process_time() - began_s) / seeds


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=1024, help="of a step (default 1024)")
    parser.add_argument("--instances", default=INSTANCES, metavar="A,B", help="files of instances/ without .yaml")
    args = parser.parse_args()
    print(f"{'':18} median [s]  worst [s]  best [s]  CPU [s]")
    for name in args.instances.split(","):
        steps, cpu_s = spread(name, args.seeds, args.sequences)
        print(f"{name:18} {np.median(steps):10.3f} {max(steps):10.3f} {min(steps):9.3f} {cpu_s:8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
