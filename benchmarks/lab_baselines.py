"""What a user would do otherwise, on the same lab and model: `python benchmarks/lab_baselines.py`.

Two regions of two hosts, 30 ms one way, 50 Mbit/s. Step times are measured in the lab. Losses do not depend on the
network, so the loss curves (English text, the same samples in the same order for all) are run without it; the time to a
loss is the number of steps times the measured step time. Writes out/lab_baselines.json and, with matplotlib,
docs/lab_baselines.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.lab_prediction import BATCH, MODEL, Network, cluster_of, plan_of, symmetric
from benchmarks.lab_ranks import run_on_hosts
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.planning.engine import Effort, find_plan
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.lab_launch import train_in_lab
from runners.lab_net.running import Lab
from runners.lab_net.topology import lab_network

NETWORK = Network(
    name="two regions",
    hosts=(("cpu-core", "cpu-core"), ("cpu-core", "cpu-core")),
    latency_ms=symmetric(2, {(0, 1): 30}),
    mbit_per_s=symmetric(2, {(0, 1): 50}),
)
LEARNING_RATE = 3e-3
LOCAL_STEPS = 20
LEFT_OUT = 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: a plan, or torch's DDP with a hook."""

    name: str
    plan: Plan | None = None
    hook: str = ""


def ddp_rank(
    rank: int, world_size: int, address: str, port: int, problem: Problem, steps: int, hook: str
) -> tuple[list[float], list[float]]:
    """torch's DistributedDataParallel, AdamW and clipping as the runner has them; losses and seconds of every step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    from runners.engine.data import samples_for
    from runners.engine.layers import build_layers

    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size)
    model, batch = problem.model, problem.batch
    layers = build_layers(model, range(model.layers), 0)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            for layer in list(self.layers.values())[:-1]:
                x = layer(x)
            return self.layers[str(model.layers - 1)](x, targets)

    # With several buckets torch's PowerSGD hook mixes up their exchanges on gloo (they end in callbacks, in any order).
    whole = torch.nn.parallel.DistributedDataParallel(Whole(), bucket_cap_mb=100 if hook else None)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        whole.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    parameters = list(whole.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE, betas=(0.9, 0.95),
    )  # fmt: skip
    samples = samples_for(model, batch.seq_len, 0)
    share = batch.global_batch // world_size
    losses, seconds = [], []
    for step in range(steps):
        start_s = time.time()
        first = step * batch.global_batch + rank * share
        loss = whole(*samples.batch(range(first, first + share))) / (share * batch.seq_len)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.time() - start_s)
    dist.barrier()
    dist.destroy_process_group()
    return losses, seconds


def ways(problem: Problem) -> list[Way]:
    """What is compared."""
    cluster = problem.cluster
    everyone, halves = [0, 1, 2, 3], [[0, 1], [2, 3]]
    middle = MODEL.layers // 2
    quarter = [round(MODEL.layers * i / 4) for i in range(5)]
    chain = [(quarter[i], quarter[i + 1]) for i in range(4)]
    found = find_plan(
        problem, np.random.default_rng(0), effort=Effort(time_limit_s=8.0), tables=CostTables(problem)
    ).plan
    whole = plan_of(cluster, [(0, MODEL.layers)], [everyone], size=2, compression="int8", spans=1)
    fixed = [(0, middle), (middle, MODEL.layers)]
    return [
        Way(name="torch DDP"),
        Way(name="torch DDP + PowerSGD (rank 8)", hook="powersgd"),
        Way(
            name="plain pipeline of four",
            plan=plan_of(cluster, chain, [[d] for d in everyone], size=2, compression="none", spans=1),
        ),
        Way(
            name="two fixed pipelines (DT-FM-like)",
            plan=plan_of(cluster, fixed, [[0, 1], [2, 3]], size=2, compression="none", spans=1),
        ),
        Way(
            name="pipeline over regions, int8",
            plan=plan_of(cluster, fixed, halves, size=1, compression="int8", spans=2),
        ),
        *([Way(name="polygon's plan", plan=found)] if found is not None else []),
        Way(name=f"polygon, local updates (H = {LOCAL_STEPS}), int8", plan=replace(whole, local_steps=LOCAL_STEPS)),
    ]


def quiet() -> contextlib.redirect_stderr:
    """Leave the ranks' talk out."""
    return contextlib.redirect_stderr(Path(os.devnull).open("w"))


def lab_step_s(lab: Lab, problem: Problem, way: Way, steps: int, port: int) -> float:
    """Mean seconds of a step in the lab, the first ones left out."""
    if way.plan is None:
        hosts = lab.network.hosts
        results = run_on_hosts(
            lab, hosts, ddp_rank, len(hosts), hosts[0].address, port, problem, steps + LEFT_OUT, way.hook
        )
        seconds = results[0][1]
    else:
        steps = max(steps, 2 * LOCAL_STEPS) if way.plan.local_steps > 1 else steps
        with tempfile.TemporaryDirectory() as folder, quiet():
            train_in_lab(lab, problem, way.plan, Options(steps=steps + LEFT_OUT, log_dir=Path(folder), device="cpu"))
            seconds = [line["seconds"] for line in log_lines(Path(folder), 0) if line["type"] == "step"]
    return float(np.mean(seconds[LEFT_OUT:]))


def loss_curve(problem: Problem, way: Way, steps: int, lab: Lab) -> list[float]:
    """Losses of a training of so many steps, without the lab's links (all ranks on one host)."""
    if way.plan is None:
        host = lab.network.hosts[0]
        results = run_on_hosts(lab, [host] * 4, ddp_rank, 4, host.address, 29900, problem, steps, way.hook)
        return np.mean([losses for losses, _ in results], axis=0).tolist()
    from runners.launch import run

    with tempfile.TemporaryDirectory() as folder, quiet():
        options = Options(steps=steps, log_dir=Path(folder), device="cpu", learning_rate=LEARNING_RATE)
        code, _ = run(problem, way.plan, options)
        assert code == 0
        by_step: dict[int, list[float]] = {}
        for rank in range(way.plan.world_size):
            for line in log_lines(Path(folder), rank):
                if line["type"] == "step" and np.isfinite(line["loss"]):
                    by_step.setdefault(line["step"], []).append(line["loss"])
    # With local updates every region shows its own loss.
    return [float(np.mean(sorted(set(by_step[step])))) for step in sorted(by_step)]


def smooth(losses: list[float], width: int = 25) -> np.ndarray:
    """Running mean over the last `width` steps."""
    total = np.cumsum(np.concatenate([[0.0], losses]))
    place = np.arange(1, len(losses) + 1)
    first = np.maximum(0, place - width)
    return (total[place] - total[first]) / (place - first)


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    reference = rows[0]
    target = float(smooth(reference["losses"])[-1]) if reference["losses"] else float("nan")
    lines = [f"{'':<50}{'step':>9}{'against DDP':>13}{'last loss':>11}{'against DDP':>13}{'time to DDP loss':>18}"]
    for row in rows:
        line = f"{row['name']:<50}{1e3 * row['step_s']:>6.0f} ms{reference['step_s'] / row['step_s']:>12.1f}x"
        if row["losses"]:
            curve = smooth(row["losses"])
            there = np.flatnonzero(curve <= target * 1.01)
            reached = f"{(there[0] + 1) * row['step_s']:>16.0f} s" if len(there) else f"{'not reached':>18}"
            line += f"{curve[-1]:>11.4f}{100 * (curve[-1] / target - 1):>11.2f} %{reached}"
        lines.append(line)
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for row in rows:
        curve = smooth(row["losses"])
        axes.plot(row["step_s"] * np.arange(1, len(curve) + 1), curve, label=row["name"])
    axes.set_xscale("log")
    axes.set_xlabel("seconds (steps times step time measured in the lab)")
    axes.set_ylabel("loss (mean of 25 steps)")
    axes.set_title("Two regions of two hosts, 30 ms one way, 50 Mbit/s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each way in the lab")
    parser.add_argument("--loss-steps", type=int, default=500, help="of each loss curve; 0: none")
    parser.add_argument("--only", default="", help="ways whose name fits this regular expression")
    parser.add_argument("--plot", help="where the plot goes")
    args = parser.parse_args()
    cluster = cluster_of(NETWORK)
    problem = Problem(cluster=cluster, model=MODEL, batch=BATCH)
    rows: list[dict[str, Any]] = []
    with Lab(lab_network(cluster)) as lab:
        for place, way in enumerate(way for way in ways(problem) if re.search(args.only, way.name)):
            step_s = lab_step_s(lab, problem, way, args.steps, 29700 + place)
            losses = loss_curve(problem, way, args.loss_steps, lab) if args.loss_steps else []
            ranks = 4 if way.plan is None else way.plan.world_size
            rows.append({"name": f"{way.name}, {ranks} ranks", "step_s": step_s, "losses": losses})
            sys.stderr.write(f"{way.name}: {1e3 * step_s:.0f} ms\n")
    print(report(rows))
    Path("out").mkdir(exist_ok=True)
    Path("out/lab_baselines.json").write_text(json.dumps(rows))
    if args.plot and args.loss_steps:
        draw(rows, Path(args.plot))


if __name__ == "__main__":
    main()
