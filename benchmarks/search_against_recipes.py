"""Whether the search finds what people trained with: measured runs' own splits against a default search's plan.

    python benchmarks/search_against_recipes.py [--count 40] [--seed 3] [--most-devices 600]

Draws runs of `instances/measured` (uniform splits on one kind of device), prices their split with the run's program,
lets a default search plan the same problem, and prints both. Left out are runs that by the model need more memory than
a plan may take (8 % of a device stay free). Exit status 1 where a search is slower.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.accuracy.foreign_rows import NotExpressibleError
from polygon.accuracy.measured import MeasuredRun, published_run
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.planning.search_engine import find_plan

MEASURED = Path(__file__).resolve().parents[1] / "instances" / "measured"
FILES = ("published", "collected", "recipe", "bridge", "megatron")


def drawn(seed: int, most_devices: int) -> Iterator[tuple[MeasuredRun, float]]:
    """Runs that fit, in the order of a seed, with the predicted seconds of their own split."""
    rows = [row for name in FILES for row in json.loads((MEASURED / f"{name}_runs.json").read_text("utf-8"))["rows"]]
    random.Random(seed).shuffle(rows)
    for row in rows:
        try:
            run = published_run(row)
        except NotExpressibleError:
            continue
        if 8 <= run.plan.world_size <= most_devices:
            tables = CostTables(run.problem)
            own = estimate(run.problem, run.plan, tables)
            if max(worker.peak_bytes for worker in own.workers) <= tables.limit_bytes.min():
                yield run, own.step_s


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=40, help="runs")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--most-devices", type=int, default=600)
    args = parser.parse_args()
    over: list[float] = []
    cpu_s: list[float] = []
    for (run, own_s), _ in zip(drawn(args.seed, args.most_devices), range(args.count), strict=False):
        begin_s = time.process_time()
        found = find_plan(run.problem, np.random.default_rng(0))
        cpu_s.append(time.process_time() - begin_s)
        over.append(found.value_s / own_s - 1)
        print(
            f"{run.identifier:26} {run.plan.world_size:4} devices, {run.problem.runtime.name:28} its own split "
            f"{own_s:8.3f} s, the search's {found.value_s:8.3f} s ({over[-1]:+.1%}), {cpu_s[-1]:4.1f} CPU-s",
            flush=True,
        )
    slower = sum(one > 1e-9 for one in over)
    print(
        f"{len(over)} runs: {slower} searches slower, {statistics.median(over):+.1%} in the median, "
        f"{sum(abs(one) <= 1e-9 for one in over)} the same; median {statistics.median(cpu_s):.1f} CPU-s"
    )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
