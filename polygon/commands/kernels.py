"""Compile the planner's kernels: `python -m polygon kernels`, once for all commands to come.

Whatever needs a kernel first compiles it otherwise. `--ship FOLDER` compiles them for the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from polygon.bounds.lower_bound import lower_bound
from polygon.commands import cli
from polygon.cost.estimate import estimate
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats.recognition import cluster_from_data
from polygon.jit import shipped
from polygon.planning.exact import find_optimum
from polygon.planning.frontier import find_within_limits
from polygon.planning.list_schedule import listed_starts
from polygon.planning.objectives import MONEY, STEP_TIME
from polygon.planning.search_engine import Effort

FEW = Effort(fluid_evaluations=40, exact_evaluations=4, patience=20)
REGIONS = ["a", "b"]


def two_regions(nodes: tuple[int, int], **link: float) -> dict[str, Any]:
    """Data of a cluster: so many nodes of two A100 in one region, of two T4 in the other."""
    devices = ("a100-40gb", "t4")
    groups = [{"device": device, "count": n, "devices_per_node": 2} for device, n in zip(devices, nodes, strict=True)]
    regions = [{"name": name, "nodes": [group]} for name, group in zip(REGIONS, groups, strict=True)]
    between = {"between": REGIONS, "latency_ms": 20, "bandwidth_gbps": 0.8, **link}
    return {"name": "kernels", "regions": regions, "links": [between]}


def compile_kernels() -> None:
    """Short searches by time and by money, also where nodes share what joins regions; all allocations; a bound."""
    model = Model(
        name="small", blocks=4, hidden_size=1024, heads=16, kv_heads=16, head_dim=64, ffn_size=4096, vocab_size=32000,
        max_seq_len=1024,
    )  # fmt: skip
    limits = Constraints(compressions=("none", "int8"), local_steps=(1, 8), most_stages=2)
    problem, shared = (
        Problem(
            cluster=cluster_from_data(data, "kernels"),
            model=model,
            batch=Batch(global_batch=8, seq_len=512),
            constraints=limits,
        )
        for data in (two_regions((1, 1)), two_regions((2, 3), capacity_gbps=1.6))
    )
    for known, objective in ((problem, STEP_TIME), (problem, MONEY), (shared, STEP_TIME)):
        find_within_limits(known, 0, objective=objective, effort=FEW)
    find_optimum(problem, np.random.default_rng(0), effort=FEW)
    for known in (problem, shared):
        # Of the second also that of interleaved plans, which may have more than two stages.
        lower_bound(CostTables(known))
        for dp, pp in ((1, 4), (2, 2), (4, 1)):
            estimate(known, uniform_plan(known, ParallelConfig(dp=dp, pp=pp, micro_batch_size=1)))
    # No search of so small a problem lists: spans leave nothing to gain.
    plan = uniform_plan(problem, ParallelConfig(dp=1, pp=4, micro_batch_size=1))
    schedule = step_times(plan, CostTables(problem)).schedule
    listed_starts(
        schedule, np.ones(len(plan.workers), dtype=np.int64), schedule.simulate(record=True)[1], from_end=True
    )


def ship(folder: Path) -> int:
    """Compile for a common processor into a folder, by another process; the number of files."""
    with tempfile.TemporaryDirectory() as kept:
        environment = {**os.environ, **shipped.environment(Path(kept))}
        subprocess.run([sys.executable, "-m", "polygon.commands.kernels"], env=environment, check=True)
        return shipped.collect(Path(kept), folder)


def main(argv: list[str] | None = None) -> int:
    """Compile for this machine, or for the wheel."""
    parser = cli.CommandParser(prog="polygon kernels", description=__doc__.splitlines()[0].split(":")[0] + ".")
    parser.add_argument(
        "--ship", type=Path, metavar="FOLDER", help=f"for any {shipped.CPU} processor, into a folder (of a wheel)"
    )
    args = parser.parse_args(argv)
    if args.ship is None:
        compile_kernels()
    else:
        free = not args.ship.exists() or (args.ship.is_dir() and not any(args.ship.iterdir()))
        require(free, "--ship", str(args.ship), "a new or an empty folder")
        cli.Talk(quiet=False).say(f"{args.ship}: {ship(args.ship)} files")
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
