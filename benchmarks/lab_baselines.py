"""What a user would do otherwise, on the same lab and model: `python benchmarks/lab_baselines.py`.

Two regions of two hosts, 30 ms one way, 50 Mbit/s. Step times are measured in the lab. Losses do not depend on the
network, so the loss curves (English text, the same samples in the same order for all) are run without it; the time to a
loss is the number of steps times the measured step time. Ways that send plain fp32 in every step have one loss curve.
Writes out/lab_baselines.json (what is measured already is kept there and not measured again) and, with matplotlib and
--plot, the picture.
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
from dataclasses import dataclass, field, replace
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
from polygon.messages.figures import new_figure
from polygon.planning.search_engine import Effort, find_plan
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
LEARNING_RATE = 1e-3
"""Of 6e-4, 1e-3, 1.5e-3 and 3e-3 the one with which the synchronous loss is least after 500 steps."""
LOCAL_STEPS = 20
SYNCHRONOUS = 0.2
"""Part of a run before local steps begin."""
STEPS = 500
LEFT_OUT = 3
RECORD = Path("out/lab_baselines.json")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: a plan, or torch's DDP with a hook."""

    name: str
    plan: Plan | None = None
    hook: str = ""
    curve: str = ""
    """Ways with the same word here have the same losses; empty: its own."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the runner's options."""

    @property
    def ranks(self) -> int:
        """How many train."""
        return 4 if self.plan is None else self.plan.world_size


def ddp_rank(
    rank: int, world_size: int, address: str, port: int, problem: Problem, steps: int, hook: str
) -> tuple[list[float], list[float]]:
    """torch's DistributedDataParallel, AdamW and clipping as the runner has them; losses and seconds of every step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    from runners.data.sources import samples_for
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
    fixed = [(0, middle), (middle, MODEL.layers)]
    # Receives posted when they are needed, as in a pipeline that thinks of nothing.
    plain = {"lookahead": 1}

    def data_parallel(compression: str) -> Plan:
        return plan_of(cluster, [(0, MODEL.layers)], [everyone], size=2, compression=compression, spans=1)

    local = replace(data_parallel("int8"), local_steps=LOCAL_STEPS)
    return [
        Way(name="torch DDP", curve="plain"),
        Way(name="torch DDP + PowerSGD (rank 8)", hook="powersgd"),
        Way(
            name="plain pipeline of four",
            plan=plan_of(cluster, chain, [[d] for d in everyone], size=2, compression="none", spans=1),
            curve="plain",
            changes=plain,
        ),
        Way(
            name="two fixed pipelines (DT-FM-like)",
            plan=plan_of(cluster, fixed, [[0, 1], [2, 3]], size=2, compression="none", spans=1),
            curve="plain",
            changes=plain,
        ),
        Way(
            name="pipeline over regions, int8",
            plan=plan_of(cluster, fixed, halves, size=1, compression="int8", spans=2),
        ),
        Way(name="data parallel, int8", plan=data_parallel("int8")),
        Way(name="data parallel, int4", plan=data_parallel("int4")),
        *([Way(name="polygon's plan", plan=found, curve="plain")] if found is not None else []),
        Way(name=f"local updates (H = {LOCAL_STEPS}), int8", plan=local),
        Way(
            name=f"local updates (H = {LOCAL_STEPS}), int8, in two fragments",
            plan=local,
            changes={"outer_fragments": 2, "outer_overlap": 1},
        ),
    ]


def quiet() -> contextlib.redirect_stderr:
    """Leave the ranks' talk out."""
    return contextlib.redirect_stderr(Path(os.devnull).open("w"))


def options_of(way: Way, steps: int, folder: str, **changes: Any) -> Options:
    """How the runner trains."""
    return Options(
        steps=steps, log_dir=Path(folder), device="cpu", learning_rate=LEARNING_RATE, **(way.changes | changes)
    )


def lab_seconds(lab: Lab, problem: Problem, way: Way, steps: int, port: int) -> tuple[float, float]:
    """Mean seconds of a step in which all regions sum, and of a local one (else the same), the first ones left out."""
    first = LEFT_OUT + steps
    if way.plan is None:
        hosts = lab.network.hosts
        results = run_on_hosts(lab, hosts, ddp_rank, len(hosts), hosts[0].address, port, problem, first, way.hook)
        mean_s = float(np.mean(results[0][1][LEFT_OUT:]))
        return mean_s, mean_s
    local = 2 * way.plan.local_steps if way.plan.local_steps > 1 else 0
    with tempfile.TemporaryDirectory() as folder, quiet():
        # One step more: in the last one all fragments meet.
        options = options_of(way, first + local + (local > 0), folder, synchronous_steps=first)
        train_in_lab(lab, problem, way.plan, options)
        seconds = [line["seconds"] for line in log_lines(Path(folder), 0) if line["type"] == "step"]
    mean_s = float(np.mean(seconds[LEFT_OUT:first]))
    return mean_s, float(np.mean(seconds[first : first + local])) if local else mean_s


def loss_curve(lab: Lab, problem: Problem, way: Way, steps: int) -> list[float]:
    """Losses of a training of so many steps, without the lab's links (all ranks on one host)."""
    if way.plan is None:
        host = lab.network.hosts[0]
        where = (4, host.address, 29900, problem, steps, way.hook)
        results = run_on_hosts(lab, [host] * 4, ddp_rank, *where, timeout_s=3600)
        return np.mean([losses for losses, _ in results], axis=0).tolist()
    from runners.launch import run

    with tempfile.TemporaryDirectory() as folder, quiet():
        code, _ = run(problem, way.plan, options_of(way, steps, folder))
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


def cumulative_s(row: dict[str, Any], steps: int) -> np.ndarray:
    """Seconds from the start of a run to the end of each step."""
    first = round(SYNCHRONOUS * steps)
    return np.cumsum([row["together_s"]] * first + [row["local_s"]] * (steps - first))


def report(rows: list[dict[str, Any]], steps: int) -> str:
    """The table, as Markdown."""
    reference = rows[0]
    lines = [
        "| way | ranks | step | against DDP | last loss | against DDP | time to DDP's loss (within 1 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    ddp_s = cumulative_s(reference, steps)[-1]
    target = float(smooth(reference["losses"])[-1]) if reference["losses"] else float("nan")
    for row in rows:
        total_s = cumulative_s(row, steps)
        cells = [row["name"], str(row["ranks"]), f"{1e3 * total_s[-1] / steps:.0f} ms", f"{ddp_s / total_s[-1]:.1f}x"]
        if row["losses"]:
            curve = smooth(row["losses"])
            there = np.flatnonzero(curve <= target * 1.01)
            reached = f"{total_s[there[0]]:.0f} s" if len(there) else "not reached"
            cells += [f"{curve[-1]:.4f}", f"{100 * (curve[-1] / target - 1):+.2f} %", reached]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss over time."""
    figure = new_figure(9, 5, "--plot")
    axes = figure.add_subplot()
    for row in rows:
        curve = smooth(row["losses"])
        axes.plot(cumulative_s(row, len(curve)), curve, label=f"{row['name']}, {row['ranks']} ranks", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("seconds (steps times step time measured in the lab)")
    axes.set_ylabel("loss (mean of 25 steps)")
    axes.set_title("Two regions of two hosts, 30 ms one way, 50 Mbit/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def keep(rows: dict[str, dict[str, Any]]) -> None:
    """Write what is measured so far."""
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(rows))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each way in the lab")
    parser.add_argument("--loss-steps", type=int, default=STEPS, help="of each loss curve; 0: none")
    parser.add_argument("--only", default="", help="ways whose name fits this regular expression")
    parser.add_argument("--plot", help="where the plot goes")
    args = parser.parse_args()
    cluster = cluster_of(NETWORK)
    problem = Problem(cluster=cluster, model=MODEL, batch=BATCH)
    rows: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    chosen = [way for way in ways(problem) if re.search(args.only, way.name)]
    with Lab(lab_network(cluster)) as lab:
        for place, way in enumerate(chosen):
            if way.name not in rows:
                together_s, local_s = lab_seconds(lab, problem, way, args.steps, 29700 + place)
                rows[way.name] = {"ranks": way.ranks, "together_s": together_s, "local_s": local_s, "losses": []}
                keep(rows)
                load = os.getloadavg()[0]
                talk = f"{way.name}: {1e3 * together_s:.0f} ms, local {1e3 * local_s:.0f} ms (load {load:.1f})\n"
                sys.stderr.write(talk)
        for way in chosen if args.loss_steps else ():
            same = [other.name for other in chosen if other is way or (way.curve and other.curve == way.curve)]
            if not rows[way.name]["losses"]:
                found: list[float] = next((rows[name]["losses"] for name in same if rows[name]["losses"]), [])
                rows[way.name]["losses"] = found or loss_curve(lab, problem, way, args.loss_steps)
                keep(rows)
    curves: dict[str, Any] = {} if args.loss_steps else {"losses": []}
    shown = [{"name": way.name} | rows[way.name] | curves for way in chosen]
    print(report(shown, args.loss_steps or STEPS))
    if args.plot and args.loss_steps:
        draw(shown, Path(args.plot))


if __name__ == "__main__":
    main()
