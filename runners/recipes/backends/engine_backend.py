"""Training by polygon's own engine: the recipe becomes a plan on equal devices, or brings a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError, located
from polygon.domain.plan import Plan, Problem
from polygon.domain.uniform import ParallelConfig
from polygon.formats.files import read_plan, write_plan
from polygon.formats.recognition import cluster_from_data
from polygon.planning.grid_plans import plan_of
from runners.engine.layers import check_weights
from runners.engine.options import Lora, Options
from runners.engine.runnable import check_runnable
from runners.engine.summary import summarise, write_trace
from runners.recipes.backends import Job, Place
from runners.recipes.data import training_and_validation
from runners.recipes.models import batch_of, beside, model_of
from runners.recipes.needs import needs as needs_of
from runners.recipes.predicted_memory import predicted_peaks
from runners.recipes.recipe_schema import MetricsPart, Recipe


def _checked(job: Job) -> tuple[Problem, Plan]:
    problem, plan = problem_and_plan(job)
    if job.recipe.model.weights is not None:
        check_weights(beside(job.folder, job.recipe.model.weights), problem.model)
    return problem, plan


def check(job: Job) -> None:
    """Refuse what the engine cannot run, and weights that do not fit."""
    _checked(job)


def needs(job: Job) -> list[dict[str, Any]]:
    """Parameters and predicted peak of every stage."""
    return needs_of(*problem_and_plan(job))


def world_size(job: Job) -> int:
    """Ranks of the plan."""
    return _checked(job)[1].world_size


def problem_and_plan(job: Job) -> tuple[Problem, Plan]:
    """What the engine is to run.

    Raises
    ------
    InputError
        Degrees that do not fit the model, the batch or the devices of a node.
    """
    recipe = job.recipe
    model = model_of(recipe.model, job.folder)
    batch = batch_of(recipe, model)
    if recipe.lora is not None and recipe.lora.adapter is not None:
        raise InputError(f"lora.adapter: found with backend {recipe.backend}, expected backend ddp or deepspeed")
    _additions_of(recipe)
    if recipe.plan is not None:
        problem, plan, _ = read_plan(beside(job.folder, recipe.plan))
        problem = Problem(cluster=problem.cluster, model=model, batch=batch)
        if plan.stages[-1].last_layer != model.layers:
            raise InputError(f"plan: found one of {plan.stages[-1].last_layer} layers, expected {model.layers}")
        if plan.micro_batches * plan.micro_batch_size != batch.global_batch:
            found = plan.micro_batches * plan.micro_batch_size
            raise InputError(f"plan: found a global batch of {found}, expected {batch.global_batch}")
        return problem, plan
    parallel = recipe.parallel
    if batch.global_batch % (parallel.dp * recipe.batch.micro_batch):
        raise InputError(
            f"batch.global_batch: found {batch.global_batch}, expected a multiple of dp x micro_batch = "
            f"{parallel.dp * recipe.batch.micro_batch}"
        )
    if parallel.sequence and parallel.tp == 1:
        raise InputError("parallel.sequence: found true with tp 1, expected a tensor-parallel degree > 1")
    if parallel.pp > model.blocks:
        raise InputError(f"parallel.pp: found {parallel.pp}, expected at most the {model.blocks} blocks")
    problem = Problem(cluster=equal_devices(recipe), model=model, batch=batch)
    config = ParallelConfig(
        dp=parallel.dp,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        micro_batch_size=recipe.batch.micro_batch,
        zero=parallel.zero,
        recompute=recipe.memory.recompute,
        sequence_parallel=parallel.sequence,
        schedule=parallel.schedule,
    )
    plan = plan_of(problem, config)
    check_runnable(problem, plan)
    return problem, plan


def equal_devices(recipe: Recipe) -> Cluster:
    """One place with just the devices that the recipe's degrees need, on full nodes."""
    ranks, per_node = recipe.parallel.world_size, recipe.hardware.devices_per_node
    per_node = min(ranks, per_node)
    if ranks % per_node:
        raise InputError(f"hardware.devices_per_node: found {per_node}, expected a divisor of the {ranks} ranks")
    node = {"device": recipe.hardware.device, "count": ranks // per_node, "devices_per_node": per_node}
    with located("hardware: "):
        return cluster_from_data({"name": recipe.name, "regions": [{"name": "here", "nodes": [node]}]}, recipe.name)


def _additions_of(recipe: Recipe) -> Lora | None:
    return None if recipe.lora is None else Lora(**recipe.lora.additions)


def options_of(job: Job, log_dir: Path | None = None) -> Options:
    """The engine's options."""
    recipe, rate = job.recipe, job.recipe.optimizer
    saved = recipe.checkpoint
    return Options(
        steps=recipe.steps,
        learning_rate=rate.learning_rate,
        warmup_steps=rate.warmup_steps,
        schedule=rate.rate_schedule,
        decay_steps=rate.decay_steps,
        final_rate=rate.final_rate,
        weight_decay=rate.weight_decay,
        clip_norm=rate.clip_norm or None,
        balance=rate.balance,
        weights=None if recipe.model.weights is None else beside(job.folder, recipe.model.weights),
        lora=_additions_of(recipe),
        offload_optimizer=recipe.memory.offload != "none",
        seed=recipe.seed,
        checkpoint_dir=None if saved is None else beside(job.folder, saved.folder),
        checkpoint_every=0 if saved is None else saved.every,
        checkpoints_kept=3 if saved is None else saved.keep,
        resume=saved is not None and saved.resume,
        validate_every=0 if recipe.validation is None else recipe.validation.every,
        device=job.device,
        log_dir=log_dir,
        **_observed(recipe.metrics, log_dir),
    )


def _observed(metrics: MetricsPart, log_dir: Path | None) -> dict[str, Any]:
    """Options for what is written beside the log, where there is one."""
    if log_dir is None:
        return {}
    return {"track": metrics.trackers, "profiled_steps": metrics.profile_steps}


def needed_bytes(job: Job) -> float:
    """Predicted peak of all ranks."""
    return sum(peak.total_bytes for peak in predicted_peaks(*problem_and_plan(job)).values())


def run_rank(job: Job, place: Place) -> int:
    """Train as `runners.dist_runner` does."""
    from runners.dist_runner import run_rank
    from runners.launch import say
    from runners.recipes.tensor_bytes import restart_peak

    problem, plan = problem_and_plan(job)
    samples, validation = training_and_validation(
        *(job.recipe, problem.model, problem.batch.seq_len, job.folder), say if place.rank == 0 else None
    )
    if place.rank == 0:
        job.out.mkdir(parents=True, exist_ok=True)
        write_plan(job.out / "plan.json", problem, plan)
    options = options_of(job, job.out)
    return run_rank(
        *(problem, plan, place.rank, place.host, place.port, options, place.listen_fd, samples),
        before_steps=restart_peak,
        validation=validation,
    )


def summary(job: Job) -> dict[str, Any]:
    """Figures of the run; also writes its timeline and one line a step over all ranks."""
    problem, plan = problem_and_plan(job)
    write_trace(problem, plan, job.out)
    predicted = predicted_peaks(problem, plan)
    return summarise(problem, plan, job.out) | {
        "predicted_peak_bytes": max(peak.total_bytes for peak in predicted.values())
    }
