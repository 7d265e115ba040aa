"""What more than the first version of polygon could say brings: its own plans and ours, priced by today's estimate.

    python -m benchmarks.first_version [--runtime polygon-compiled megatron-core ...] [--seeds 4] [--only NAME]

Checks the first version (commit 1a6cd53) out beside this repository's history for as long as it runs, and lets its own
search plan three problems, by several seeds and by its grid of uniform splits. Every plan is read and priced as it
stands, whether or not today's memory model holds it; on equal devices of one region every uniform split that it could
say, and that memory holds, is priced as well (`benchmarks.plan_dimensions`). The best of all stands beside our search.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.plan_dimensions import best_rows
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.formats import catalogue, files
from polygon.messages.report import table
from polygon.planning.checker import violations
from polygon.planning.search_engine import find_plan

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "1a6cd53"
SITE = """
  - name: site-{name}
    intra_region: infiniband-ndr-x8
    nodes: [{{device: h100-sxm, count: {nodes}, devices_per_node: 8, inter_node: infiniband-ndr-x8}}]"""
BETWEEN = """
links:
  - {between: [site-a, site-b], latency_ms: 10, bandwidth_gbps: 20}"""


@dataclass(frozen=True)
class Task:
    """What both versions plan: nodes of eight H100 at every site."""

    model: str
    nodes: tuple[int, ...]
    global_batch: int
    seq_len: int

    @property
    def cluster(self) -> str:
        """The cluster file, in words that both versions read."""
        sites = "".join(SITE.format(name=name, nodes=n) for name, n in zip("ab", self.nodes, strict=False))
        return "format: polygon-cluster\nversion: 1\nname: sites\nregions:" + sites + BETWEEN * (len(self.nodes) > 1)


TASKS = (
    Task("llama3-70b", (8,), 128, 8192),
    Task("qwen3-30b-a3b", (4, 4), 512, 4096),
    Task("llama3.2-1b", (1,), 4, 131_072),
)


@contextmanager
def first_version() -> Iterator[Path]:
    """A checkout of the first version."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "polygon"
        git = ("git", "-C", str(ROOT), "worktree")
        done = subprocess.run(
            [*git, "add", "-q", "--detach", str(place), COMMIT], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"commit {COMMIT}: found {done.stderr.strip()}, expected a clone with its whole history")
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def plans_then(checkout: Path, task: Task, seeds: int) -> Iterator[tuple[str, Plan]]:
    """What the first version's own search finds: by each seed, and by its grid."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'comm'}"}
    with tempfile.TemporaryDirectory() as folder:
        cluster, out = Path(folder) / "cluster.yaml", Path(folder) / "plan.json"
        cluster.write_text(task.cluster)
        command = [sys.executable, "-m", "polygon.search", "--cluster", str(cluster), "--model", task.model]
        command += ["--global-batch", str(task.global_batch), "--seq-len", str(task.seq_len), "-o", str(out)]
        ways = {f"seed {seed}": ["--seed", str(seed)] for seed in range(seeds)} | {"grid": ["--method", "grid3d"]}
        for name, more in ways.items():
            done = subprocess.run(
                [*command, *more], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                yield name, files.read_plan(out).plan
            else:
                print(f"{task.model}: the first version's {name}: {done.stderr.strip()[-200:]}", file=sys.stderr)


def best_then(problem: Problem, plans: list[tuple[str, Plan]]) -> tuple[float, str]:
    """The quickest under today's estimate of what the first version says: seconds and words."""
    tables = CostTables(problem)
    found = []
    for name, plan in plans:
        held = ", more than today's memory holds" if violations(problem, plan, tables) else ""
        found.append((estimate(problem, plan, tables).step_s, f"its search, {name}{held}"))
    if len(problem.cluster.regions) == 1:
        step_s, words = best_rows(problem)[0]
        found.append((step_s, words))
    return min(found, default=(math.inf, "nothing"))


def main() -> int:
    """Print a row for every problem and runtime."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--runtime", nargs="+", default=["polygon-compiled", "polygon", "megatron-core", "nemo"])
    parser.add_argument("--seeds", type=int, default=4, help="of the first version's search")
    parser.add_argument("--only", default="", help="problems whose model's name has this")
    args = parser.parse_args()
    rows = []
    with first_version() as checkout, tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            if args.only not in task.model:
                continue
            plans = list(plans_then(checkout, task, args.seeds))
            path = Path(folder) / "cluster.yaml"
            path.write_text(task.cluster)
            for runtime in args.runtime:
                problem = Problem(
                    cluster=files.read_cluster(path),
                    model=catalogue.model(task.model),
                    batch=Batch(global_batch=task.global_batch, seq_len=task.seq_len),
                    runtime=catalogue.runtime(runtime),
                )
                then_s, words = best_then(problem, plans)
                now_s = find_plan(problem, np.random.default_rng(0)).value_s
                rows.append([task.model, runtime, f"{then_s:.3f}", f"{now_s:.3f}", f"{now_s / then_s - 1:+.1%}", words])
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(table(["model", "runtime", "then s", "now s", "change", "the best that the first version could say"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
