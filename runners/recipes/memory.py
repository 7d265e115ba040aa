"""Peak memory of a recipe's ranks: as the cost model predicts it, and as they measured it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from polygon.cost.memory import MemoryBreakdown, stage_memory
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import in_flight
from runners.recipes.activations import Way, own_layer_memory
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
    found: dict[int, MemoryBreakdown] = {}
    for s, stage in enumerate(plan.stages):
        held = in_flight(plan, s)
        for w, worker in enumerate(stage.workers):
            way = Way(
                micro_batch=plan.micro_batch_size,
                recompute=stage.recompute,
                tp=worker.tp // parallel.cp,
                cp=parallel.cp,
                ep=parallel.ep,
                sequence=parallel.sequence,
                fused_norms=not problem.cluster.pools[worker.pool].device.name.startswith("cpu"),
            )
            layers = own_layer_memory(problem.model, problem.batch, way)
            peak = stage_memory(
                layers,
                stage.first_layer,
                stage.last_layer,
                in_flight=float(held[w]),
                zero=stage.zero,
                shards=stage.width * parallel.cp,
                batch=problem.batch,
                context_bytes=0.0,
            )
            if s + 1 < len(plan.stages):
                # What is sent to the next stage stays until its gradient comes.
                tokens = plan.micro_batch_size * problem.batch.seq_len / parallel.cp
                sent = tokens * problem.model.hidden_size * max(problem.batch.element_bytes, 2)
                sent /= way.tp if way.sequence else 1
                peak = replace(peak, activations=peak.activations + held[w] * sent)
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
