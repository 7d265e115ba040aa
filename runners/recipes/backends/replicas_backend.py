"""The whole model on every rank, by torch's DistributedDataParallel (or alone); with or without LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polygon.domain.errors import require
from runners.recipes.backends import Job, Place

if TYPE_CHECKING:
    from typing import Any

    from runners.recipes.replicas.loop import Replica


def check(job: Job) -> None:
    """Refuse what replicas do not have."""
    from runners.recipes.replicas.loop import check_replicated

    recipe = job.recipe
    check_replicated(job)
    require(recipe.parallel.zero == 0, "parallel.zero", recipe.parallel.zero, "0 (else backend deepspeed or engine)")
    require(recipe.memory.offload == "none", "memory.offload", recipe.memory.offload, "none (else deepspeed or engine)")


def needs(job: Job) -> list[dict[str, Any]]:
    """Parameters and predicted peak of a rank."""
    from runners.recipes.replicas.throughput import needs

    return needs(job)


def world_size(job: Job) -> int:
    """As many as replicas."""
    check(job)
    return job.recipe.parallel.dp


def needed_bytes(job: Job) -> float:
    """Predicted peak of all ranks."""
    from runners.recipes.replicas.throughput import needed_bytes

    return needed_bytes(job)


def run_rank(job: Job, place: Place) -> int:
    """Train; see `runners.recipes.replicas.loop`."""
    from runners.recipes.replicas.ddp import DdpReplica
    from runners.recipes.replicas.loop import train

    def make(whole: Any, batch: Any, recipe: Any, device: Any) -> Replica:
        accumulation = batch.global_batch // (recipe.parallel.dp * recipe.batch.micro_batch)
        return DdpReplica(whole, batch, recipe.optimizer, device, accumulation=accumulation)

    return train(job, place, make)


def summary(job: Job) -> dict[str, Any]:
    """Figures of the run."""
    from runners.recipes.replicas.throughput import summary

    return summary(job)
