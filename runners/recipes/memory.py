"""Peak memory of a recipe's ranks: as the cost model predicts it, and as they measured it."""

from __future__ import annotations

import json
from pathlib import Path

from polygon.cost.memory import MemoryBreakdown, layer_memory, stage_memory
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import in_flight
from runners.recipes.schema import ParallelPart

MEASURED = "tensor-bytes-{}.json"


def predicted_peaks(problem: Problem, plan: Plan, parallel: ParallelPart | None = None) -> dict[int, MemoryBreakdown]:
    """Peak bytes of tensors on every rank, by `polygon.cost.memory`, without the context that only GPUs have.

    Parameters
    ----------
    problem, plan
    parallel : ParallelPart, optional
        How sequences and experts are split, which the plan does not say; None: not at all.
    """
    parallel = parallel or ParallelPart()
    cp = parallel.cp
    found: dict[int, MemoryBreakdown] = {}
    for s, stage in enumerate(plan.stages):
        held = in_flight(plan, s)
        for w, worker in enumerate(stage.workers):
            layers = layer_memory(
                problem.model,
                problem.batch,
                tp=worker.tp // cp,
                micro_batch_size=plan.micro_batch_size,
                recompute=stage.recompute,
                sequence_parallel=parallel.sequence,
                cp=cp,
                ep=parallel.ep,
                fused=False,  # the engine's layers are torch's, operation by operation
            )
            peak = stage_memory(
                layers,
                stage.first_layer,
                stage.last_layer,
                in_flight=float(held[w]),
                zero=stage.zero,
                shards=stage.width * cp,
                batch=problem.batch,
                context_bytes=0.0,
            )
            found |= {plan.device_ranks[device]: peak for device in worker.devices}
    return found


def write_measured(out: Path, rank: int, peak_bytes: int) -> None:
    """Keep what a rank measured."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MEASURED.format(rank)).write_text(json.dumps({"peak_bytes": peak_bytes}), encoding="utf-8")


def measured_peaks(out: Path, world_size: int) -> dict[int, int]:
    """Peak bytes of tensors of the ranks that measured them."""
    paths = {rank: out / MEASURED.format(rank) for rank in range(world_size)}
    texts = {rank: path.read_text(encoding="utf-8") for rank, path in paths.items() if path.exists()}
    return {rank: json.loads(text)["peak_bytes"] for rank, text in texts.items()}
