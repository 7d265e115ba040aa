"""DeepSpeed's ZeRO-1, 2, 3 and ZeRO++, by itself, under torchrun or under the `deepspeed` launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runners.recipes.backends import Job, Place

if TYPE_CHECKING:
    from typing import Any

    from runners.recipes.replicas.loop import Replica


def check(job: Job) -> None:
    """Refuse what replicas do not have, and DeepSpeed can do nowhere."""
    from runners.recipes.replicas.loop import check_replicated
    from runners.recipes.replicas.zero import check_degrees

    check_replicated(job)
    check_degrees(job.recipe)


def needs(job: Job) -> list[dict[str, Any]]:
    """Parameters and predicted peak of a rank."""
    from runners.recipes.replicas.throughput import needs

    return needs(job)


def world_size(job: Job) -> int:
    """As many as replicas.

    Raises
    ------
    InputError
        What replicas do not have, or DeepSpeed (without a GPU) cannot do.
    """
    import torch

    from runners.recipes.replicas.loop import check_replicated
    from runners.recipes.replicas.zero import check_zero

    check_replicated(job)
    check_zero(job.recipe, on_gpu=job.device != "cpu" and torch.cuda.device_count() > 0)
    return job.recipe.parallel.dp


def needed_bytes(job: Job) -> float:
    """Predicted peak of all ranks."""
    from runners.recipes.replicas.throughput import needed_bytes

    return needed_bytes(job)


def run_rank(job: Job, place: Place) -> int:
    """Train; see `runners.recipes.replicas.loop`."""
    from runners.recipes.replicas.loop import train
    from runners.recipes.replicas.zero import ZeroReplica

    def make(whole: Any, batch: Any, recipe: Any, device: Any) -> Replica:
        return ZeroReplica(whole, batch, recipe, device)

    return train(job, place, make, reentrant=job.recipe.parallel.zero == 3)


def summary(job: Job) -> dict[str, Any]:
    """Figures of the run."""
    from runners.recipes.replicas.throughput import summary

    return summary(job)
