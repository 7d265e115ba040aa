"""Recipes beside one another: loss against a single process, speed, peak memory predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polygon.domain.errors import PolygonError
from runners.recipes.backends import Job
from runners.recipes.recipe_schema import MetricsPart, ParallelPart, Recipe, ZeroPlusPart

MEMORY_STEPS = 2
"""Steps of the further run that follows every tensor: the second one has optimizer state."""
HEADER = (
    "recipe", "ranks", "degrees", "steps", "loss", "one process", "largest difference", "tokens/s",
    "predicted MB", "measured MB",
)  # fmt: skip
SIGNALLED = 128
"""Exit codes above it say which signal ended a program."""
Run = Callable[[Job], tuple[int, dict[str, Any]]]


class RecipeFailedError(PolygonError):
    """A recipe of the table did not run to its end.

    Parameters
    ----------
    code : int
        Its exit code.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        how = f"interrupted by signal {code - SIGNALLED}" if code > SIGNALLED else f"ended with exit code {code}"
        super().__init__(how)


def rows(jobs: Sequence[Job], run: Run) -> Iterator[dict[str, Any]]:
    """Run every recipe, the same on one process, and again for its memory; recipes alike but for their degrees share
    the run on one process.

    One that cannot run has its name, degrees and the reason as `failed`, and the others follow, unless a signal ended
    it. What ranks said is on stderr.
    """
    alone: dict[str, list[float]] = {}
    for job in jobs:
        named = {"recipe": job.recipe.name, "degrees": degrees(job.recipe)}
        try:
            yield named | _figures(job, run, alone)
        except RecipeFailedError as error:
            yield named | {"failed": str(error)}
            if error.code > SIGNALLED:
                return
        except PolygonError as error:
            yield named | {"failed": str(error)}


def _figures(job: Job, run: Run, alone: dict[str, list[float]]) -> dict[str, Any]:
    """A recipe's row; `alone` keeps the losses on one process by recipe."""
    summary, losses = _losses(job, run)
    single = on_one_process(job.recipe)
    key = single.model_copy(update={"name": ""}).model_dump_json()
    if key not in alone:
        _, alone[key] = _losses(replace(job, recipe=single, out=job.out / "one"), run)
    metrics = MetricsPart(tensor_bytes=True)
    short = job.recipe.model_copy(update={"metrics": metrics, "steps": MEMORY_STEPS})
    memory, _ = _losses(replace(job, recipe=short, out=job.out / "memory"), run)
    return {
        "ranks": summary["ranks"],
        "steps": len(losses),
        "loss": losses[-1],
        "loss_on_one_process": alone[key][-1],
        "largest_difference": max(abs(a - b) / b for a, b in zip(losses, alone[key], strict=True)),
        "tokens_per_s": summary["tokens_per_s"],
        "predicted_peak_bytes": memory.get("predicted_peak_bytes"),
        "measured_peak_bytes": memory["measured_peak_bytes"],
    }


def on_one_process(recipe: Recipe) -> Recipe:
    """The same training without any parallelism."""
    backend = {"plan": "engine", "deepspeed": "ddp"}.get(recipe.backend, recipe.backend)
    alone = {"parallel": ParallelPart(), "backend": backend, "plan": None, "zero_plus": ZeroPlusPart()}
    return recipe.model_copy(update=alone)


def degrees(recipe: Recipe) -> str:
    """The degrees above 1 in words."""
    if recipe.plan is not None:
        return "plan"
    named = ((name, getattr(recipe.parallel, name)) for name in ("dp", "tp", "pp", "cp", "ep"))
    words = [f"{name} {value}" for name, value in named if value > 1]
    words += ["sequence"] if recipe.parallel.sequence else []
    return ", ".join(words + ([f"ZeRO-{recipe.parallel.zero}"] if recipe.parallel.zero else [])) or "none"


def _losses(job: Job, run: Run) -> tuple[dict[str, Any], list[float]]:
    code, summary = run(job)
    if code:
        raise RecipeFailedError(code)
    lines = Path(summary["log"]).read_text(encoding="utf-8").splitlines()
    return summary, [json.loads(line)["loss"] for line in lines]


def format_rows(found: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown."""

    def megabytes(n_bytes: float | None) -> str:
        return "-" if n_bytes is None else f"{n_bytes / 1e6:.2f}"

    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in found:
        if "failed" in row:
            reason = row["failed"].replace("|", "\\|")
            cells = (row["recipe"], "-", row["degrees"], f"cannot run: {reason}", *("-",) * (len(HEADER) - 4))
            lines.append("| " + " | ".join(cells) + " |")
            continue
        cells = (
            row["recipe"], row["ranks"], row["degrees"], row["steps"], f"{row['loss']:.4f}",
            f"{row['loss_on_one_process']:.4f}", f"{row['largest_difference']:.1e}", f"{row['tokens_per_s']:,.0f}",
            megabytes(row["predicted_peak_bytes"]), megabytes(row["measured_peak_bytes"]),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
