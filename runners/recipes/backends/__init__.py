"""Who trains a recipe: by name, a module of this folder with six functions.

- ``check(job)``: raises `InputError` where the recipe can be run on no machine; looks at no data.
- ``needs(job)``: parameters and predicted peak of every stage, a row each (see `runners.recipes.needs`).
- ``world_size(job)``: ranks that the recipe needs; raises `InputError` where it cannot be run here.
- ``needed_bytes(job)``: predicted peak of all ranks together, where they are on CPUs.
- ``run_rank(job, place)``: all that one rank does; its exit code.
- ``summary(job)``: figures of a run that has ended, from what the ranks wrote to `job.out` (keys as
  `runners.engine.summary.summarise`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from runners.recipes.recipe_schema import BACKENDS, Recipe


@dataclass(frozen=True)
class Job:
    """A recipe to be run."""

    recipe: Recipe
    folder: Path
    """Where the recipe lies: its paths are seen from there."""
    out: Path
    """Where everything is written."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Place:
    """Where a rank is and meets the others."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    listen_fd: int | None = None
    """Socket that listens at the port already (rank 0, where this program started the ranks)."""


def backend_of(job: Job) -> ModuleType:
    """The module that trains a recipe."""
    return import_module(f"{__name__}.{BACKENDS[job.recipe.backend]}")
