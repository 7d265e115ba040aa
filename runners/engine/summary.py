"""What a run's logs add up to: losses, speed, traffic, order, trace file. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import worker_order
from polygon.export.chrome_trace import chrome_trace
from polygon.export.measured import intervals_of_logs
from polygon.formats.files import write_json
from polygon.formats.run_log import log_lines, usual_step_s
from polygon.formats.serialization import format_json
from runners.engine.metrics import VALIDATION, StepFigures

TRACE_FILE = "trace.json"
RUN_FILE = "run.jsonl"


def write_trace(problem: Problem, plan: Plan, directory: Path) -> Path:
    """Write the measured timeline as a Chrome trace; where it is."""
    pools, regions = problem.cluster.pools, problem.cluster.regions
    names = {
        (s, w): f"rank {plan.device_ranks[worker.devices[0]]} · {pools[worker.pool].device.name} · "
        f"{regions[pools[worker.pool].region].name}"
        for s, stage in enumerate(plan.stages)
        for w, worker in enumerate(stage.workers)
    }
    stages = {
        s: f"stage {s} · layers {stage.first_layer}..{stage.last_layer - 1}" for s, stage in enumerate(plan.stages)
    }
    path = directory / TRACE_FILE
    logs = {rank: log_lines(directory, rank) for rank in plan.rank_places}
    write_json(path, chrome_trace(intervals_of_logs(plan, logs), names, stages, "measured"))
    return path


def orders_differ(plan: Plan, directory: Path) -> list[int]:
    """Ranks that did not execute, in some step, exactly the schedule's actions in the schedule's order."""
    wrong = []
    for rank, (stage, worker, _) in plan.rank_places.items():
        expected = " ".join(map(str, worker_order(plan, stage, worker)))
        orders = [line["actions"] for line in log_lines(directory, rank) if line["type"] == "order"]
        if not orders or any(order != expected for order in orders):
            wrong.append(rank)
    return wrong


def write_steps(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Write one line a step; a figure that is no number (a loss that diverged) is null, as JSON has no NaN.

    Where it cannot be written (a full disk) a line says so: what was trained is none the worse.
    """
    plain = (json.loads(json.dumps(step), parse_constant=lambda _: None) for step in steps)
    try:
        path.write_text("".join(json.dumps(step) + "\n" for step in plain), encoding="utf-8")
    except OSError as error:
        print(f"{path}: cannot be written: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201


def summarise(problem: Problem, plan: Plan, directory: Path) -> dict[str, Any]:
    """Figures of a run that has ended; also writes one line a step, over all ranks, to `run.jsonl`.

    Only `steps` and `log` where no step was left to train, as its checkpoint had them all.
    """
    by_rank = [
        {line["step"]: line for line in log_lines(directory, rank) if line["type"] == "step"}
        for rank in range(plan.world_size)
    ]
    run = next((line for line in log_lines(directory, 0) if line["type"] == "run"), {})
    figures = StepFigures(problem, plan, run.get("step_flops"))
    steps = [
        figures.merge([lines[step] for lines in by_rank])
        for step in by_rank[0]
        if all(step in lines for lines in by_rank)
    ]
    path = directory / RUN_FILE
    write_steps(path, steps)
    if not steps:
        return {"steps": 0, "log": str(path)}
    step_s = usual_step_s([step["seconds"] for step in steps])
    steady, last = steps[1:] or steps, steps[-5:]
    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": sum(step["loss"] for step in last) / len(last),
        "median_step_s": step_s,
        "tokens_per_s": problem.batch.tokens / step_s,
        "mfu": figures.mfu(step_s),
        "bubble": median(step["bubble"] for step in steady),
        "exposed_communication": median(step["exposed_communication"] for step in steady),
        "memory_bytes": max(step["memory_bytes"] for step in steps),
        # Regions that take local steps meet every few of them.
        "cross_region_bytes_per_step": mean(step["cross_region_bytes"] for step in steps),
        "order_differs_on_ranks": orders_differ(plan, directory),
        "log": str(path),
        "trace": str(directory / TRACE_FILE),
    } | validated(steps)


def print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """The figures on standard output, for people or machines."""
    sys.stdout.write(format_json(summary) if as_json else format_summary(summary) + "\n")


def format_validation(figures: Mapping[str, Any]) -> str:
    """What validation found, where there was one."""
    if "validation_loss" not in figures:
        return ""
    accuracy, perplexity = figures.get("validation_accuracy"), figures.get("validation_perplexity")
    text = f"  validation {figures['validation_loss']:.4f}"
    text += "" if perplexity is None else f" (perplexity {perplexity:,.2f})"
    return text + ("" if accuracy is None else f" ({accuracy:.1%} right)")


def validated(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of the last validation among a run's steps."""
    found: Mapping[str, Any] = next((step for step in reversed(steps) if "validation_loss" in step), {})
    return {name: found[name] for name in VALIDATION if name in found}


def format_summary(summary: dict[str, Any]) -> str:
    """The figures for people; runs of whole replicas have no schedule, and no bubble, but count samples and state."""
    if not summary["steps"]:
        return f"no step was left to train: the checkpoint has them all\nlog             {summary['log']}"
    step = f"{summary['median_step_s'] * 1e3:,.1f} ms (median), {summary['tokens_per_s']:,.0f} tokens/s"
    lines = [
        f"loss            {summary['first_loss']:.4f} -> {summary['last_loss']:.4f} (mean of the last steps) "
        f"in {summary['steps']} steps",
        f"step            {step}"
        + (f", {summary['samples_per_s']:,.1f} samples/s" if "samples_per_s" in summary else ""),
    ]
    if "validation_loss" in summary:
        lines.append(f"validation      {format_validation(summary).split(maxsplit=1)[1]}")
    if "bubble" in summary:
        lines.append(
            f"waiting         {summary['bubble']:.1%} of a step for other ranks' computations (bubble), "
            f"{summary['exposed_communication']:.1%} for messages (exposed communication)"
        )
    lines.append(f"MFU             {summary['mfu']:.2%} of the plan's devices")
    if "state_bytes" in summary:
        held, expected = summary["state_bytes"], summary["predicted_state_bytes"]
        lines.append(
            f"state           {held['total'] / 1e6:,.3f} MB a rank (predicted {expected['total'] / 1e6:,.3f}): weights "
            f"{held['weights'] / 1e6:,.3f}, gradients {held['gradients'] / 1e6:,.3f}, "
            f"optimizer {held['optimizer'] / 1e6:,.3f}"
        )
    if "order_differs_on_ranks" in summary:
        wrong = summary["order_differs_on_ranks"]
        order = f"differs from the plan's on ranks {wrong}" if wrong else "the plan's on every rank"
        lines += [
            f"across regions  {summary['cross_region_bytes_per_step'] / 1e6:,.3f} MB a step",
            f"executed order  {order}",
        ]
    lines += [f"wall time       {summary['wall_s']:.1f} s", f"log             {summary['log']}"]
    if "trace" in summary:
        lines.append(f"trace           {summary['trace']} (ui.perfetto.dev)")
    return "\n".join(lines)
