"""Peak memory of a recipe's ranks: as the cost model predicts it, and as they measured it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polygon.cost.memory import LayerMemory, MemoryBreakdown, breakdown, stage_rows
from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values
from polygon.domain.plan import Plan, Problem, Worker
from polygon.domain.schedule import Action, worker_order
from runners.engine.options import Options
from runners.engine.rank_layout import AHEAD_BYTES, FEWEST_AHEAD
from runners.recipes.activations import Way, own_layer_memory

MEASURED = "tensor-bytes-{}.json"


def predicted_peaks(problem: Problem, plan: Plan) -> dict[int, MemoryBreakdown]:
    """Peak bytes of tensors on every rank, by `polygon.cost.memory`, without the context that only GPUs have."""
    place = CostTables(problem).placement(plan)
    found: dict[int, MemoryBreakdown] = {}
    for g, group in enumerate(plan.stages[: plan.groups]):
        for w, worker in enumerate(group.workers):
            stages = range(g, len(plan.stages), plan.groups)
            parts = [_stage_memory(problem, plan, s, worker, int(place.shards[s][w])) for s in stages]
            activations, transient = _most(worker_order(plan, g, w), parts)
            sums = {name: sum(getattr(part, name) for part in parts) for name in ("weights", "gradients", "optimizer")}
            peak = MemoryBreakdown(
                **sums,
                activations=activations,
                transient=transient,
                context=0.0,
            )
            first = worker.devices[:: worker.tp]
            messages = _posted_bytes(problem, plan, g, worker)
            for device in worker.devices:
                more = messages if device in first else 0.0
                found[plan.device_ranks[device]] = replace(peak, transient=peak.transient + more)
    return found


def _most(actions: Sequence[Action], parts: Sequence[MemoryBreakdown]) -> tuple[float, float]:
    """Activations, and what is needed beside them, when both are most: in some backward."""
    held, found = 0.0, (0.0, 0.0)
    for action in actions:
        part = parts[action.chunk]
        if action.kind == "F":
            held += part.activations
        else:
            found = max(found, (held, part.transient), key=sum)
            held -= part.activations
    return found


def _stage_memory(problem: Problem, plan: Plan, s: int, worker: Worker, shards: int) -> MemoryBreakdown:
    """Of one stage of a worker, with the activations of one micro-batch."""
    stage, batch = plan.stages[s], problem.batch
    way = Way(
        micro_batch=plan.micro_batch_size,
        recompute=stage.recompute,
        tp=worker.tp,
        cp=worker.cp,
        ep=stage.ep,
        sequence=stage.sequence_parallel,
        fused_norms=not problem.cluster.pools[worker.pool].device.name.startswith("cpu"),
    )
    layers = own_layer_memory(problem.model, batch, way, stage.first_layer, stage.last_layer)
    if stage.zero == 3 and shards > 1:
        layers = replace(layers, transient_bytes=layers.transient_bytes + _fetched(problem, layers, shards))
    held, _, *rest = stage_rows(layers, stage.first_layer, stage.last_layer)
    peak = breakdown(*(held, 0.0, *rest), in_flight=1.0, zero=stage.zero, shards=shards, batch=batch, context_bytes=0.0)
    # What is sent to the next stage stays until its gradient comes.
    sent = _message_bytes(problem, plan, worker) / (way.tp if way.sequence else 1)
    return replace(peak, activations=peak.activations + (sent if s + 1 < len(plan.stages) else 0.0))


def _fetched(problem: Problem, layers: LayerMemory, shards: int) -> np.ndarray:
    """Bytes that ZeRO-3 has of each layer, and of those before and after it, while its backward is computed.

    Its weights, its gradient, and that of a weight before it is added; the weights of the layer before that arrive; the
    gradient of the layer after that leaves.
    """
    model, batch = problem.model, problem.batch
    parameters = layers.parameters.copy()
    if model.tied_embeddings and model.family != "vit":
        parameters[-1] += layers.tied_parameters
    before, after = np.roll(parameters, 1), np.roll(parameters, -1)
    before[0] = after[-1] = 0.0
    width = max(batch.element_bytes, 2)
    return 3 * width * parameters + width * (1 - 1 / shards) * before + batch.gradient_bytes * after


def _message_bytes(problem: Problem, plan: Plan, worker: Worker) -> float:
    """Of a worker's part of a micro-batch's activations between two stages."""
    values = boundary_values(problem.model, problem.batch, plan.micro_batch_size)
    return values / worker.cp * max(problem.batch.element_bytes, 2)


def _posted_bytes(problem: Problem, plan: Plan, group: int, worker: Worker) -> float:
    """Of the messages that a worker's first ranks expect: receives are posted ahead."""
    ways = 2 * plan.chunks - (group == 0) - (group == plan.groups - 1)
    n_bytes = _message_bytes(problem, plan, worker)
    return n_bytes * min(Options().lookahead, max(FEWEST_AHEAD, AHEAD_BYTES // n_bytes)) if ways else 0.0


def write_measured(out: Path, rank: int, peak_bytes: int) -> None:
    """Keep what a rank measured."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MEASURED.format(rank)).write_text(json.dumps({"peak_bytes": peak_bytes}), encoding="utf-8")


def measured_peaks(out: Path, world_size: int) -> dict[int, int]:
    """Peak bytes of tensors of the ranks that measured them."""
    paths = {rank: out / MEASURED.format(rank) for rank in range(world_size)}
    texts = {rank: path.read_text(encoding="utf-8") for rank, path in paths.items() if path.exists()}
    return {rank: json.loads(text)["peak_bytes"] for rank, text in texts.items()}
