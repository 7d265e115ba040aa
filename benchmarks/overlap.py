"""How much of a step ranks compute, and how much communication stays exposed: `python benchmarks/overlap.py`.

Plans of several kinds are run on the lab's hosts (devices' speed emulated), once as usual and once without any
communication while ranks compute (`--lookahead 0`). Beside what the runs' own `run.jsonl` says stands the ideal run of
the same plan (`runners.engine.ideal`): the same computations, as long as they were measured, and the links as they were
asked for, nothing else. No run of the plan has a shorter step; its bubble and exposed communication, parted by the same
rule, are what the plan and its links leave over at best. Prints a table; writes out/overlap.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")


from benchmarks.lab_prediction import BATCH, MODEL, NETWORKS, Network, cluster_of, plans_for
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from runners.engine.emulation import backward_shares
from runners.engine.ideal import IdealRun, Speed
from runners.engine.metrics import StepFigures
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.lab_launch import train_in_lab
from runners.lab_net.running import Lab
from runners.lab_net.topology import lab_network

MOST_EXPOSED = 0.10
LEFT_OUT = 3
LOCAL_STEPS = 10
TALK = Path("out/overlap.log")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A plan and how it is run."""

    name: str
    plan: Plan
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the runner's options."""


def ways(problem: Problem) -> list[Way]:
    """The plans of `lab_prediction`, data parallel with packed gradients, and local updates."""
    plans = plans_for(problem, CostTables(problem))
    plain = plans["data parallel"]
    data_parallel = replace(plain, links=tuple(replace(use, weight_gradients="int8") for use in plain.links))
    local = replace(data_parallel, local_steps=LOCAL_STEPS)
    first = {"synchronous_steps": LEFT_OUT}
    return [
        *(Way(name=name, plan=plan) for name, plan in plans.items()),
        Way(name="data parallel, int8", plan=data_parallel),
        Way(name=f"local updates, H = {LOCAL_STEPS}, int8", plan=local, changes=first),
        Way(
            name=f"local updates, H = {LOCAL_STEPS}, int8, 2 fragments, overlap 1",
            plan=local,
            changes=first | {"outer_fragments": 2, "outer_overlap": 1},
        ),
    ]


def speeds(problem: Problem, plan: Plan, folder: Path) -> dict[int, Speed]:
    """How long every rank computed, median of the steps that count."""
    found = {}
    for rank in plan.rank_places:
        by_kind: dict[str, list[float]] = {"F": [], "B": [], "u": []}
        for line in log_lines(folder, rank):
            if line["type"] == "event" and line["kind"] in ("compute", "update") and line["step"] >= LEFT_OUT:
                by_kind[line["name"][0]].append(line["end_s"] - line["start_s"])
        forward_s, backward_s, update_s = (median(by_kind[kind]) if by_kind[kind] else 0.0 for kind in "FBu")
        shares = backward_shares(problem, plan, rank)
        found[rank] = Speed(seconds=(forward_s, backward_s), update_s=update_s, shares=shares)
    return found


def ideal(problem: Problem, plan: Plan, of: dict[int, Speed], options: Options, counted: int) -> dict[str, float]:
    """Mean step and exposed communication of the ideal run, over the same steps as are counted of the real one."""
    run, figures = IdealRun(problem, plan, of, options), StepFigures(problem, plan)
    steps = [run.step() for _ in range(LEFT_OUT + counted)][LEFT_OUT:]
    step_s = fmean(lines[0]["seconds"] for lines in steps)
    waits = [wait for lines in steps for wait in figures.waits(lines)]
    return {
        "step_s": step_s,
        "bubble": fmean(wait.bubble_s for wait in waits) / step_s,
        "exposed": fmean(wait.exposed_s for wait in waits) / step_s,
    }


def measured(plan: Plan, folder: Path, counted: int) -> dict[str, float]:
    """Mean figures of the steps that count."""
    chosen = slice(LEFT_OUT, LEFT_OUT + counted)
    run = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()][chosen]
    step_s = fmean(line["seconds"] for line in run)
    busy = []
    for rank in range(plan.world_size):
        lines = [line for line in log_lines(folder, rank) if line["type"] == "step"][chosen]
        kinds = [line["seconds_by_kind"] for line in lines]
        busy.append(fmean(kind.get("compute", 0.0) + kind.get("update", 0.0) for kind in kinds) / step_s)
    return {
        "step_s": step_s, "busiest": max(busy), "busy": fmean(busy),
        "bubble": fmean(line["bubble"] * line["seconds"] for line in run) / step_s,
        "exposed": fmean(line["exposed_communication"] * line["seconds"] for line in run) / step_s,
    }  # fmt: skip


def run_way(lab: Lab, problem: Problem, way: Way, steps: int) -> dict[str, Any]:
    """Figures of a plan with overlap, without, and at best."""
    counted = 2 * LOCAL_STEPS if way.plan.local_steps > 1 else steps
    row: dict[str, Any] = {"plan": way.name, "ranks": way.plan.world_size}
    for name, lookahead in (("on", Options().lookahead), ("off", 0)):
        with tempfile.TemporaryDirectory() as folder:
            # One step more: in the last one of local updates all regions meet.
            options = Options(
                steps=LEFT_OUT + counted + 1, log_dir=Path(folder), device="cpu", emulate_devices=1.0,
                traced_steps=LEFT_OUT + counted, lookahead=lookahead, **way.changes,
            )  # fmt: skip
            with TALK.open("a") as talk, contextlib.redirect_stderr(talk):
                train_in_lab(lab, problem, way.plan, options)
            row[name] = measured(way.plan, Path(folder), counted)
            if name == "on":
                row["ideal"] = ideal(problem, way.plan, speeds(problem, way.plan, Path(folder)), options, counted)
    return row


def cells(network: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    on, off, best = row["on"], row["off"], row["ideal"]
    allows = best["exposed"] <= MOST_EXPOSED
    reached = "yes" if on["exposed"] <= MOST_EXPOSED else "no"
    shown = [
        network, row["plan"], str(row["ranks"]), f"{1e3 * on['step_s']:.0f} ({1e3 * best['step_s']:.0f})",
        f"{on['busiest']:.0%}, {on['busy']:.0%}", f"{on['bubble']:.1%} ({best['bubble']:.1%})",
        f"{on['exposed']:.1%} ({best['exposed']:.1%})", reached if allows else "the bound is above",
        f"{1e3 * off['step_s']:.0f}", f"{off['exposed']:.1%}",
    ]  # fmt: skip
    return f"| {' | '.join(shown)} |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", default="", help="those whose name contains this")
    parser.add_argument("--only", default="", help="plans whose name contains this")
    parser.add_argument("--steps", type=int, default=8, help="counted of each run")
    args = parser.parse_args()
    TALK.parent.mkdir(exist_ok=True)
    TALK.write_text("")
    print("| network | plan | ranks | step ms (at best) | computing: busiest, mean | bubble | exposed | <= 10 % |"
          " without overlap: step ms | exposed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for network in NETWORKS[:3]:
        if args.network in network.name:
            rows += run_network(network, args.only, args.steps)
    allowed = [row for row in rows if row["ideal"]["exposed"] <= MOST_EXPOSED]
    reached = [row for row in allowed if row["on"]["exposed"] <= MOST_EXPOSED]
    print(f"{len(rows)} runs; the bound allows <= 10 % in {len(allowed)}, reached in {len(reached)}")
    Path("out/overlap.json").write_text(json.dumps(rows, indent=1))


def run_network(network: Network, only: str, steps: int) -> list[dict[str, Any]]:
    """All plans on one network."""
    cluster = cluster_of(network)
    problem = Problem(cluster=cluster, model=MODEL, batch=BATCH)
    rows = []
    with Lab(lab_network(cluster)) as lab:
        for way in ways(problem):
            if only in way.name:
                rows.append({"network": network.name} | run_way(lab, problem, way, steps))
                print(cells(network.name.removesuffix(", emulated"), rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
