"""Whether any step takes far longer than the others where links are long: `python -m benchmarks.lab_collapse`.

Plans that send much over 15 to 200 ms, trained in the lab again and again with emulated devices. For every plan: the
predicted step, the median and mean of all measured steps, the largest step over its run's median, how many steps took
more than 1.5 times that, and the segments that the links' queues dropped. Links are measured first; the first steps of
a run are left out. `--congestion reno` takes another congestion control than the kernel's. Prints a table; writes
out/lab_collapse.json. Best with `chrt -f 5`, so that other load does not hold ranks up.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import lab_prediction
from benchmarks.lab_prediction import (
    MODEL,
    Network,
    cluster_of,
    make_parser,
    measured_cluster,
    run_networks,
    symmetric,
    train,
)
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster
from polygon.domain.plan import Plan, Problem
from polygon.formats.convert_plan import plan_data
from polygon.planning.search_engine import Effort, find_plan
from runners.lab_net.linux import TcpSettings
from runners.lab_net.running import Lab
from runners.lab_net.topology import lab_network

BATCH = replace(lab_prediction.BATCH, global_batch=12)
plan_of = partial(lab_prediction.plan_of, global_batch=BATCH.global_batch)
STEPS, LEFT_OUT = 10, 2
COLLAPSED = 1.5
"""Times a run's median that no step should take."""

FAR = Network(
    name="four far regions",
    hosts=(("fast",), ("slow",), ("fast",), ("slow",)),
    latency_ms=symmetric(4, {(0, 1): 15, (0, 2): 60, (0, 3): 120, (1, 2): 60, (1, 3): 120, (2, 3): 200}),
    mbit_per_s=symmetric(4, {(0, 1): 300, (0, 2): 100, (0, 3): 50, (1, 2): 100, (1, 3): 50, (2, 3): 50}),
)
ASYMMETRIC = Network(
    name="asymmetric",
    hosts=(("mid", "mid"), ("mid", "mid")),
    latency_ms=((0, 40), (15, 0)),
    mbit_per_s=((0, 120), (25, 0)),
)
SNAIL = Network(
    name="one snail",
    hosts=(("fast", "fast"), ("fast", "snail"), ("mid",)),
    latency_ms=symmetric(3, {(0, 1): 30, (0, 2): 80, (1, 2): 70}),
    mbit_per_s=symmetric(3, {(0, 1): 200, (0, 2): 60, (1, 2): 60}),
)


def plans_of(network: Network, cluster: Cluster) -> dict[str, Plan]:
    """What is trained on a network, beside polygon's own plan."""

    def data_parallel(devices: list[int], compression: str, shares: list[int] | None = None, size: int = 3) -> Plan:
        whole = [(0, MODEL.layers)]
        plan = plan_of(cluster, whole, [devices], size=size, compression=compression, spans=1)
        return plan if shares is None else replace(plan, routes=np.array(shares)[:, None])

    if network is FAR:
        four = [0, 1, 2, 3]
        cut, halves = [(0, 2), (2, 4), (4, 5), (5, 8)], [(0, 5), (5, 8)]
        return {
            "data parallel": data_parallel(four, "none"),
            "data parallel int8": data_parallel(four, "int8"),
            "data parallel int8, shares 2:1": data_parallel(four, "int8", [0, 2, 1, 0, 2, 3], size=2),
            "pipeline of four, 3-0-1-2": plan_of(
                cluster, cut, [[3], [0], [1], [2]], size=2, compression="none", spans=2
            ),
            "two wide stages int8": plan_of(
                cluster, [(0, 5), (5, 8)], [[0, 2], [1, 3]], size=1, compression="int8", spans=3
            ),
            "two near regions int8, shares 2:1": data_parallel([0, 1], "int8", [0, 1, 0, 0, 1, 0], size=2),
        }
    if network is ASYMMETRIC:
        halves = [(0, 4), (4, 8)]
        return {
            "data parallel": data_parallel([0, 1, 2, 3], "none"),
            "data parallel int8": data_parallel([0, 1, 2, 3], "int8"),
            "pipeline along the wide way": plan_of(
                cluster, halves, [[0, 1], [2, 3]], size=1, compression="none", spans=3
            ),
            "pipeline against it": plan_of(cluster, halves, [[2, 3], [0, 1]], size=1, compression="none", spans=3),
            "pipeline along, int4": plan_of(cluster, halves, [[0, 1], [2, 3]], size=1, compression="int4", spans=3),
        }
    thirds, quarters = [(0, 4), (4, 6), (6, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]
    return {
        "data parallel": data_parallel([0, 1, 2, 3], "none"),
        "data parallel of three int8": data_parallel([0, 1, 2], "int8", size=2),
        "pipeline of regions": plan_of(cluster, thirds, [[0, 1], [2, 3], [4]], size=1, compression="none", spans=3),
        "pipeline of devices int8": plan_of(
            cluster, quarters, [[0], [2], [3], [4]], size=1, compression="int8", spans=4
        ),
    }


def timed(lab: Lab, problem: Problem, plan: Plan, steps: int) -> tuple[list[float], int]:
    """Seconds of the steps that count, and how many segments the links dropped meanwhile."""
    dropped = sum(count[2] for count in lab.counters().values())
    lines = train(lab, problem, plan, steps + LEFT_OUT)
    dropped = sum(count[2] for count in lab.counters().values()) - dropped
    return [line["seconds"] for line in lines[LEFT_OUT:]], dropped


def run_network(network: Network, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every plan on one network, all of them in turn, so that what changes meanwhile falls on all."""
    cluster = cluster_of(network)
    with Lab(lab_network(cluster), tcp=TcpSettings(congestion=args.congestion), backend="relay") as lab:
        problem = Problem(cluster=measured_cluster(cluster, lab), model=MODEL, batch=BATCH)
        tables = CostTables(problem, [])
        plans = plans_of(network, problem.cluster)
        found = find_plan(problem, np.random.default_rng(0), effort=Effort(time_limit_s=8.0), tables=tables).plan
        if found is not None:
            plans["polygon"] = found
        plans = {name: plan for name, plan in plans.items() if args.plan in name}
        runs: dict[str, list[tuple[list[float], int]]] = {name: [] for name in plans}
        for _ in range(args.runs):
            for name, plan in plans.items():
                steps_s, dropped = timed(lab, problem, plan, args.steps)
                runs[name].append((steps_s, dropped))
                if args.verbose:
                    shown = " ".join(f"{1e3 * s:.0f}" for s in steps_s)
                    print(f"  {network.name}, {name}: {shown}; {dropped} dropped", flush=True)
    rows: list[dict[str, Any]] = []
    for name, found_runs in runs.items():
        predicted_s = estimate(problem, plans[name], tables).step_s
        ratios = [s / np.median(steps_s) for steps_s, _ in found_runs for s in steps_s]
        every_s = [s for steps_s, _ in found_runs for s in steps_s]
        row: dict[str, Any] = {
            "network": network.name, "plan": name, "runs": len(found_runs), "steps": len(every_s),
            "predicted_s": predicted_s, "median_s": float(np.median(every_s)), "mean_s": float(np.mean(every_s)),
            "error": predicted_s / float(np.mean(every_s)) - 1, "longest_over_median": float(max(ratios)),
            "collapsed_steps": int(sum(ratio > COLLAPSED for ratio in ratios)),
            "dropped_segments": sum(dropped for _, dropped in found_runs), "plan_file": plan_data(problem, plans[name]),
        }  # fmt: skip
        rows.append(row)
        times = "".join(f"{1e3 * float(row[key]):>7.0f}" for key in ("predicted_s", "median_s", "mean_s"))
        print(
            f"{network.name:<18}{name:<35}{len(found_runs):>4} runs{times} ms{100 * float(row['error']):>7.1f} %"
            f"{row['longest_over_median']:>7.2f}x{row['collapsed_steps']:>4}{row['dropped_segments']:>7}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = make_parser(__doc__ or "", STEPS)
    parser.add_argument("--plan", default="", help="plans whose name contains this")
    parser.add_argument("--runs", type=int, default=10, help="of every plan (default: 10)")
    parser.add_argument("--congestion", default="", help="TCP congestion control (default: the kernel's)")
    parser.add_argument("--verbose", action="store_true", help="every run's steps too")
    header = (
        f"{'network':<18}{'plan':<35}{'':>9}{'pred.':>7}{'median':>7}{'mean':>7}{'error':>12}{'worst':>8} >1.5 dropped"
    )
    rows = run_networks(
        (FAR, ASYMMETRIC, SNAIL), run_network, parser.parse_args(), header, Path("out/lab_collapse.json")
    )
    print(f"longest step {max(float(row['longest_over_median']) for row in rows):.2f} x its run's median")


if __name__ == "__main__":
    main()
