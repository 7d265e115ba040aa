"""How far the plans found lie from the best that any seed or effort found, and CPU seconds of a search.

    python benchmarks/seed_spread.py [--seeds 2] [--efforts quick,thorough] [--instances ptafm-7dc,aws-regions] \
        [--tasks gpt3-13b:128:2048]

Every cluster of `instances/` with every task: model, sequences of a step, tokens of a sequence. Kernels are compiled
before.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon import Batch, Cluster, Problem
from polygon.domain.message import say
from polygon.planning.efforts import EFFORTS
from polygon.planning.search_engine import Effort

ROOT = Path(__file__).resolve().parents[1]
INSTANCES = (
    "aws-regions,dtfm-two-universities,ptafm-7dc,regional-64,dtfm-worldwide,dtfm-spot,sailor-5zones,ptafm-testbed"
)
TASKS = "gpt3-6.7b:64:1024,gpt3-13b:128:2048,gpt3-1.3b:512:2048"


def problem_of(instance: str, task: str) -> Problem:
    """A cluster of `instances/` with a task."""
    model, sequences, tokens = task.split(":")
    cluster = Cluster.from_yaml(ROOT / "instances" / f"{instance}.yaml")
    return Problem(cluster, model, Batch(global_batch=int(sequences), seq_len=int(tokens)))


def steps_of(problem: Problem, effort: str, seeds: int) -> tuple[list[float], float]:
    """Step time by seed [s], and CPU seconds of a search."""
    began_s = time.process_time()
    found = [problem.search(effort=EFFORTS[effort], seed=seed).estimate for seed in range(seeds)]
    steps = [np.inf if estimate is None else estimate.step_s for estimate in found]
    return steps, (time.process_time() - began_s) / seeds


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--efforts", default="quick,thorough", metavar="A,B", help="of quick, thorough and long")
    parser.add_argument("--instances", default=INSTANCES, metavar="A,B", help="files of instances/ without .yaml")
    parser.add_argument("--tasks", default=TASKS, metavar="MODEL:SEQUENCES:TOKENS,...")
    args = parser.parse_args()
    efforts = args.efforts.split(",")
    over: dict[str, list[float]] = {effort: [] for effort in efforts}
    cpu_s: dict[str, list[float]] = {effort: [] for effort in efforts}
    for instance in args.instances.split(","):
        for task in args.tasks.split(","):
            problem = problem_of(instance, task)
            short = problem.search(effort=Effort(fluid_evaluations=20, exact_evaluations=5, patience=20))
            if short.reason is not None:
                print(f"{instance} {task}: {say(short.reason)}", flush=True)
                continue
            found = {effort: steps_of(problem, effort, args.seeds) for effort in efforts}
            best = min(min(steps) for steps, _ in found.values())
            for effort, (steps, seconds) in found.items():
                over[effort] += [100 * (step / best - 1) for step in steps]
                cpu_s[effort].append(seconds)
            said = "; ".join(
                f"{effort} {' '.join(f'{step:.3f}' for step in steps)} s, {seconds:.1f} CPU-s"
                for effort, (steps, seconds) in found.items()
            )
            print(f"{instance} {task}: {said}", flush=True)
    for effort in efforts:
        values = np.array(over[effort])
        print(
            f"{effort}: over the best seen {values.mean():.1f} % in the mean, {values.max():.1f} % at most, "
            f"more than 5 % in {np.sum(values > 5)} of {len(values)}; {np.mean(cpu_s[effort]):.1f} CPU-s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
