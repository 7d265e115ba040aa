"""Does the process group that emulates links agree with the lab? `python benchmarks/lab_shaped.py`.

The same plans are run on the lab's hosts and, without any privilege, by the launcher with --emulate-links; devices'
speed is emulated in both. Prints both step times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.lab_prediction import BATCH, LEFT_OUT, MODEL, NETWORKS, STEPS, cluster_of, plan_of
from polygon.domain.plan import Plan, Problem
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.lab_launch import train_in_lab
from runners.lab_net.running import Lab
from runners.lab_net.topology import lab_network
from runners.launch import run


def step_s(folder: Path) -> float:
    """Mean step of a run's first rank."""
    seconds = [line["seconds"] for line in log_lines(folder, 0) if line["type"] == "step"]
    return float(np.mean(seconds[LEFT_OUT:]))


def both(problem: Problem, plan: Plan, lab: Lab) -> tuple[float, float]:
    """Seconds of a step in the lab and with emulated links."""
    found = []
    for emulate in (False, True):
        with tempfile.TemporaryDirectory() as name:
            options = Options(steps=STEPS, log_dir=Path(name), device="cpu", emulate_devices=1.0, emulate_links=emulate)
            with contextlib.redirect_stderr(Path(os.devnull).open("w")):
                if emulate:
                    run(problem, plan, options)
                else:
                    train_in_lab(lab, problem, plan, options)
            found.append(step_s(Path(name)))
    return found[0], found[1]


def main() -> None:
    """Measure and print."""
    print(f"{'network':<28}{'plan':<20}{'lab':>10}{'emulated links':>18}{'difference':>13}")
    for network in NETWORKS[:2]:
        cluster = cluster_of(network)
        problem = Problem(cluster=cluster, model=MODEL, batch=BATCH)
        halves = [(0, MODEL.layers // 2), (MODEL.layers // 2, MODEL.layers)]
        plans = {
            "pipeline": plan_of(cluster, halves, [[0, 1], [2, 3]], size=1, compression="int8", spans=2),
            "data parallel": plan_of(cluster, [(0, MODEL.layers)], [[0, 1, 2, 3]], size=2, compression="none", spans=1),
        }
        with Lab(lab_network(cluster)) as lab:
            for name, plan in plans.items():
                there, here = both(problem, plan, lab)
                print(
                    f"{network.name:<28}{name:<20}{1e3 * there:>7.0f} ms{1e3 * here:>15.0f} ms"
                    f"{100 * (here / there - 1):>11.1f} %",
                    flush=True,
                )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
