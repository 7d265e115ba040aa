"""What a recipe needs, without running it: the layers are built without memory (torch's meta device) and counted."""

from __future__ import annotations

from typing import Any

from polygon.cost.memory import CONTEXT_BYTES
from polygon.domain.model import Model
from polygon.domain.plan import Plan, Problem
from runners.engine.experts import EXPERT
from runners.engine.layers import TIED_COPY, empty_layer, layer_name, shard_dim
from runners.recipes.predicted_memory import predicted_peaks


def stage_parameters(model: Model, first_layer: int, last_layer: int, *, tp: int = 1, ep: int = 1) -> int:
    """Parameters of layers [first, last) on one rank, by the shapes of the layers that the engine would build."""
    total = 0
    for layer in range(first_layer, last_layer):
        for part, parameter in empty_layer(model, layer).named_parameters():
            name = f"{layer_name(model, layer)}.{part}"
            if name == TIED_COPY and model.tied_embeddings and first_layer == 0 and model.family != "vit":
                continue  # the embedding's own weight serves
            cut = tp if shard_dim(model, name, tp) is not None else 1
            total += parameter.numel() // cut // (ep if EXPERT in name else 1)
    return total


def needs(problem: Problem, plan: Plan) -> list[dict[str, Any]]:
    """Of every stage: layers, ranks, parameters of one rank, its predicted peak and its device's memory [bytes]."""
    pools = problem.cluster.pools
    peaks = predicted_peaks(problem, plan)
    rows = []
    for s, stage in enumerate(plan.stages):
        ranks = [plan.device_ranks[device] for worker in stage.workers for device in worker.devices]
        worst = max(peaks[rank].total_bytes for rank in ranks)
        devices = [pools[worker.pool].device for worker in stage.workers]
        # What a GPU's context takes beside tensors; a CPU has none.
        context = 0.0 if all(device.name.startswith("cpu") for device in devices) else CONTEXT_BYTES
        worker = stage.workers[0]
        rows.append(
            {
                "stage": s,
                "layers": [stage.first_layer, stage.last_layer],
                "ranks": len(ranks),
                "parameters": stage_parameters(
                    problem.model, stage.first_layer, stage.last_layer, tp=worker.tp, ep=stage.ep
                ),
                "peak_bytes": worst + context,
                "memory_bytes": min(device.memory_bytes for device in devices),
            }
        )
    return rows


def format_needs(rows: list[dict[str, Any]]) -> str:
    """The stages for people."""
    return "".join(
        f"stage {row['stage']}: layers {row['layers'][0]}..{row['layers'][1] - 1}, {row['ranks']} ranks of "
        f"{row['parameters'] / 1e6:,.2f} M parameters, predicted peak {row['peak_bytes'] / 1e9:,.3f} of "
        f"{row['memory_bytes'] / 1e9:,.1f} GB\n"
        for row in rows
    )
