"""Peak memory of a recipe's ranks: as the cost model predicts it, and as they measured it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polygon.cost.autograd_memory import Way, autograd_memory, beside_stage
from polygon.cost.kernels import silicon
from polygon.cost.memory import LayerMemory, MemoryBreakdown, breakdown, divided_less, stage_rows
from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values
from polygon.domain.model import Model
from polygon.domain.plan import Plan, Problem, Worker
from polygon.domain.schedule import Action, worker_order
from runners.engine.options import Options
from runners.engine.rank_layout import AHEAD_BYTES, FEWEST_AHEAD, Layout

MEASURED = "tensor-bytes-{}.json"


def predicted_peaks(problem: Problem, plan: Plan, steps: int | None = None) -> dict[int, MemoryBreakdown]:
    """Peak bytes of tensors on every rank, by `polygon.cost.memory`, without the context that only GPUs have.

    Parameters
    ----------
    steps : int, optional
        Of a run that is shorter than what receives are posted ahead; the peak is that of its second step, the first
        one with optimizer state.
    """
    place, layout = CostTables(problem).placement(plan), Layout(problem, plan)
    found: dict[int, MemoryBreakdown] = {}
    for g, group in enumerate(plan.stages[: plan.groups]):
        for w, worker in enumerate(group.workers):
            stages = range(g, len(plan.stages), plan.groups)
            parts = [_stage_memory(layout, s, worker, int(place.shards[s][w])) for s in stages]
            sums = {name: sum(getattr(part, name) for part in parts) for name in ("weights", "gradients", "optimizer")}
            actions = worker_order(plan, g, w)
            arrives = [_arrives(plan, stages[action.chunk], action) for action in actions]
            n_bytes = _message_bytes(problem, plan, worker)
            later = math.inf if steps is None else steps - 2
            for device in worker.devices:
                talks = device in worker.devices[:: worker.tp]
                most = min(Options().lookahead, max(FEWEST_AHEAD, AHEAD_BYTES // n_bytes)) if talks else 1
                activations, transient = _most(actions, parts, _posted_bytes(arrives, later, most, n_bytes))
                found[plan.device_ranks[device]] = MemoryBreakdown(
                    **sums, activations=activations, transient=transient, context=0.0
                )
    return found


def _arrives(plan: Plan, stage: int, action: Action) -> bool:
    """Whether an action waits for a message."""
    return stage > 0 if action.kind == "F" else stage + 1 < len(plan.stages)


def _posted_bytes(arrives: Sequence[bool], later: float, most: float, n_bytes: float) -> list[float]:
    """Bytes of messages while each action is computed: its own, and those that are posted ahead, `most` in all.

    `later`: steps that follow.
    """
    left = np.cumsum(arrives[::-1])[::-1] + (later * sum(arrives) if any(arrives) else 0)
    return [n_bytes * min(most, count) for count in left.tolist()]


def _most(
    actions: Sequence[Action], parts: Sequence[MemoryBreakdown], messages: Sequence[float]
) -> tuple[float, float]:
    """Activations, and what is needed beside them, when both are most: in some backward."""
    held, found = 0.0, (0.0, 0.0)
    for action, posted in zip(actions, messages, strict=True):
        part = parts[action.chunk]
        if action.kind == "F":
            held += part.activations
        else:
            found = max(found, (held, part.transient + posted), key=sum)
            held -= part.activations
    return found


def _stage_memory(layout: Layout, s: int, worker: Worker, shards: int) -> MemoryBreakdown:
    """Of one stage of a worker, with the activations of one micro-batch."""
    problem, plan = layout.problem, layout.plan
    stage, batch, device = plan.stages[s], problem.batch, problem.cluster.pools[worker.pool].device
    way = Way(
        micro_batch=plan.micro_batch_size,
        recompute=stage.recompute,
        tp=worker.tp,
        cp=worker.cp,
        ep=stage.ep,
        sequence=stage.sequence_parallel,
        ring=problem.runtime.context == "ring",
        whole_experts=layout.whole_experts(s),
        compiled=problem.runtime.fused,
        grouped_experts=problem.runtime.grouped_experts and silicon(device, batch.precision).grouped,
        fused_norms=not device.name.startswith("cpu"),
    )
    layers = autograd_memory(problem.model, batch, way)
    if stage.first_layer < stage.recomputed_until < stage.last_layer:
        kept, later = autograd_memory(problem.model, batch, replace(way, recompute="none")), stage.recomputed_until
        layers = replace(
            layers,
            activation_bytes=np.concatenate([layers.activation_bytes[:later], kept.activation_bytes[later:]]),
            transient_bytes=np.concatenate([layers.transient_bytes[:later], kept.transient_bytes[later:]]),
        )
    layers = beside_stage(layers, stage.first_layer, stage.last_layer)
    tied, tied_zero, tied_shards = _tied(layout, s, worker)
    if stage.zero >= 2 and shards > 1:
        passing = _passing(problem, layers, stage.zero, worker.tp, shards, whole=0.0 if tied_zero >= 2 else tied)
        layers = replace(layers, transient_bytes=layers.transient_bytes + passing)
    held, _, *rest = stage_rows(layers, stage.first_layer, stage.last_layer)
    own, less = (stage.zero, shards), (tied_zero, tied_shards)

    peak = breakdown(
        *(held, 0.0, *rest), in_flight=1.0, zero=stage.zero, shards=shards, batch=batch, context_bytes=0.0,
        outer=plan.local_steps > 1,
    )  # fmt: skip
    peak = divided_less(peak, tied, batch, own, less, outer=plan.local_steps > 1)
    # What is sent to the next stage stays until its gradient comes.
    sent = _message_bytes(problem, plan, worker) / (way.tp if way.sequence else 1)
    return replace(peak, activations=peak.activations + (sent if s + 1 < len(plan.stages) else 0.0))


def _tied(layout: Layout, s: int, worker: Worker) -> tuple[float, int, int]:
    """Parameters of a tied weight whose copies two stages hold, on one of their devices; its ZeRO stage, and between
    how many ZeRO divides it: it can do no more than both stages do."""
    last = len(layout.plan.stages) - 1
    if not layout.tied_apart or s not in (0, last):
        return 0.0, 0, 1
    both, rank = [0, last], layout.plan.device_ranks[worker.devices[0]]
    zero = layout.zero_of(both)
    owners = layout.shard_group(rank, layout.group_of(rank, "tied", both)) if zero else (rank,)
    return layout.problem.model.head_weight_parameters() / worker.tp, zero, len(owners)


def _passing(problem: Problem, layers: LayerMemory, zero: int, tp: int, shards: int, *, whole: float) -> np.ndarray:
    """Bytes that ZeRO-2 and 3 have of each layer, and of those before and after it, while its backward is computed.

    Its whole gradient, and that of the layer after, which leaves; under ZeRO-3 its weights too, those of the layer
    before, which arrive, and the gradient of one weight before it is added (of the head `polygon.cost.autograd_memory`
    has it). `whole`: parameters of the first and the last layer that are not divided.
    """
    model, batch = problem.model, problem.batch
    parameters = layers.parameters.copy()
    if model.tied_embeddings and model.family != "vit":
        parameters[-1] += layers.tied_parameters
    parameters[[0, -1]] -= whole
    before, after = np.roll(parameters, 1), np.roll(parameters, -1)
    before[0] = after[-1] = 0.0
    if zero == 2:
        return batch.gradient_bytes * (parameters + after)
    width = batch.element_bytes
    largest = np.array([_largest_weight(model, layer) / tp for layer in range(model.layers)])
    return width * (2 * parameters + largest + (1 - 1 / shards) * before) + batch.gradient_bytes * after


def _largest_weight(model: Model, layer: int) -> float:
    """Numbers in the largest matrix of a layer, but for the head."""
    kind = model.layer_kind(layer)
    if kind == "embedding":
        return float(model.layer_parameters(layer))
    if kind == "head":
        return 0.0
    width = model.expert_ffn_size if model.is_sparse(layer) else model.ffn_size
    return float(model.hidden_size * max(model.heads * model.head_dim, width))


def _message_bytes(problem: Problem, plan: Plan, worker: Worker) -> float:
    """Of a worker's part of a micro-batch's activations between two stages."""
    values = boundary_values(problem.model, problem.batch, plan.micro_batch_size)
    return values / worker.cp * problem.batch.element_bytes


def write_measured(out: Path, rank: int, peak_bytes: int) -> None:
    """Keep what a rank measured."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MEASURED.format(rank)).write_text(json.dumps({"peak_bytes": peak_bytes}), encoding="utf-8")


def measured_peaks(out: Path, world_size: int) -> dict[int, int]:
    """Peak bytes of tensors of the ranks that measured them."""
    paths = {rank: out / MEASURED.format(rank) for rank in range(world_size)}
    texts = {rank: path.read_text(encoding="utf-8") for rank, path in paths.items() if path.exists()}
    return {rank: json.loads(text)["peak_bytes"] for rank, text in texts.items()}
