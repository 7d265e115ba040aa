"""Figures of replicas: speed, MFU and memory of a run that has ended, beside the prediction; needs of one not begun."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from polygon.cost.compute import model_flops_per_step
from polygon.cost.memory import CONTEXT_BYTES
from polygon.domain.model import Batch, Model
from polygon.formats.catalogue import device as device_by_name
from polygon.formats.run_log import log_lines, usual_step_s
from runners.engine.metrics import VALIDATION
from runners.engine.summary import RUN_FILE, validated, write_steps
from runners.recipes.backends import Job
from runners.recipes.models import batch_of, model_of
from runners.recipes.recipe_schema import Recipe
from runners.recipes.replicas.state import predicted_activations, predicted_state

LORA_FLOP_SHARE = 2 / 3
"""Frozen weights need no gradients: of a step's forward and two backward products two are left."""
KEPT = ("step", "loss", "gradient_norm", "seconds", "samples_per_s", "tokens_per_s", "mfu", "seconds_by_kind")


def mfu(recipe: Recipe, model: Model, batch: Batch, step_s: float) -> float:
    """The model's FLOP per second over the dense peak of the recipe's devices (see `StepFigures.mfu`)."""
    peak = recipe.parallel.dp * device_by_name(recipe.hardware.device).peak_flops(batch.precision)
    return model_flops_per_step(model, batch) * (LORA_FLOP_SHARE if recipe.lora else 1.0) / (step_s * peak)


def _activations(recipe: Recipe, model: Model, batch: Batch) -> float:
    targets = None if recipe.lora is None else recipe.lora.targets
    return predicted_activations(
        *(model, batch, recipe.batch.micro_batch, recipe.memory.recompute),
        autocast=recipe.backend == "ddp",
        on_gpu=not recipe.hardware.device.startswith("cpu"),
        targets=targets,
    )


def summary(job: Job) -> dict[str, Any]:
    """Figures of the run; also writes one line a step to `run.jsonl`."""
    recipe = job.recipe
    model = model_of(recipe.model, job.folder)
    batch = batch_of(recipe, model)
    ranks = recipe.parallel.dp
    by_rank = [[line for line in log_lines(job.out, rank) if line["type"] == "step"] for rank in range(ranks)]
    run = next(line for line in log_lines(job.out, 0) if line["type"] == "run")
    steps = [
        {key: lines[0][key] for key in (*KEPT, *VALIDATION) if key in lines[0]}
        | {"memory_bytes": max(line["memory_bytes"] for line in lines)}
        for lines in zip(*by_rank, strict=True)
    ]
    path = job.out / RUN_FILE
    write_steps(path, steps)
    if not steps:  # its checkpoint had them all
        return {"steps": 0, "log": str(path)}
    last = steps[-5:]
    step_s = usual_step_s([step["seconds"] for step in steps])
    held = {
        part: max(lines[-1]["state_bytes"][part] for lines in by_rank)
        for part in ("weights", "gradients", "optimizer", "total")
    }
    expected = predicted_state(
        model, batch, zero=recipe.parallel.zero, shards=ranks, hierarchical=recipe.zero_plus.hierarchical,
        trained=run["trained"] if recipe.lora else None, added=run["parameters"] - model.parameters,
    )  # fmt: skip
    activations = _activations(recipe, model, batch)
    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": sum(step["loss"] for step in last) / len(last),
        "median_step_s": step_s,
        "median_cpu_s": median(lines[0]["cpu_s"] for lines in zip(*by_rank, strict=True)),
        "tokens_per_s": batch.tokens / step_s,
        "samples_per_s": batch.global_batch / step_s,
        "mfu": mfu(recipe, model, batch, step_s),
        "memory_bytes": max(step["memory_bytes"] for step in steps),
        "state_bytes": held,
        "predicted_state_bytes": expected.to_dict(),
        "predicted_peak_bytes": expected.total + activations,
        "parameters": run["parameters"],
        "trained_parameters": run["trained"],
        "log": str(path),
    } | validated(steps)


def needs(job: Job) -> list[dict[str, Any]]:
    """Parameters of the model and predicted peak of a rank, as `runners.recipes.needs.needs` says of stages."""
    recipe = job.recipe
    model = model_of(recipe.model, job.folder)
    batch = batch_of(recipe, model)
    added = 0
    if recipe.lora is not None:
        from runners.engine.additions import lora_layers

        linear = lora_layers(model, recipe.lora).values()
        added = recipe.lora.rank * sum(layer.in_features + layer.out_features for layer in linear)
    head = (model.hidden_size + 1) * model.vocab_size if model.family == "vit" else 0
    state = predicted_state(
        model, batch, zero=recipe.parallel.zero, shards=recipe.parallel.dp, hierarchical=recipe.zero_plus.hierarchical,
        trained=added + head if recipe.lora else None, added=added,
    )  # fmt: skip
    on_host = {"none": 0.0, "optimizer": state.optimizer, "parameters": state.optimizer + state.weights}
    activations = _activations(recipe, model, batch)
    device = device_by_name(recipe.hardware.device)
    return [
        {
            "stage": 0,
            "layers": [0, model.layers],
            "ranks": recipe.parallel.dp,
            "parameters": model.parameters + added,
            "peak_bytes": state.total - on_host[recipe.memory.offload] + activations
            + (0.0 if device.name.startswith("cpu") else CONTEXT_BYTES),
            "memory_bytes": device.memory_bytes,
        }
    ]  # fmt: skip


def needed_bytes(job: Job) -> float:
    """Predicted peak of all ranks together, where they are on CPUs."""
    hardware = job.recipe.hardware.model_copy(update={"device": "cpu-core"})
    recipe = job.recipe.model_copy(update={"hardware": hardware})
    return sum(row["ranks"] * row["peak_bytes"] for row in needs(replace(job, recipe=recipe)))
