"""Scaling efficiency between runs: what more ranks bring, from the logs that every run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from polygon.domain.errors import InputError, require
from polygon.formats.files import read_plan
from polygon.formats.run_log import log_lines, usual_step_s
from polygon.messages.report import seconds, table


@dataclass(frozen=True, kw_only=True)
class RunSpeed:
    """How fast a run was, its first step left out where there are more."""

    run: str
    ranks: int
    steps: int
    step_s: float
    """As `polygon.formats.run_log.usual_step_s` has it, on rank 0."""
    tokens: int
    """Tokens of a step."""
    samples: int | None
    """Sequences or images of a step; None where the run does not say."""
    model: str
    mfu: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Speed of all ranks together."""
        return self.tokens / self.step_s

    @property
    def samples_per_s(self) -> float | None:
        """Speed of all ranks together."""
        return None if self.samples is None else self.samples / self.step_s


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A run held against a smaller one."""

    base: RunSpeed
    other: RunSpeed

    @property
    def kind(self) -> str:
        """strong: the same batch on more ranks; weak: a larger batch."""
        return "strong" if self.base.tokens == self.other.tokens else "weak"

    @property
    def speedup(self) -> float:
        """Tokens per second, relative to the base."""
        return self.other.tokens_per_s / self.base.tokens_per_s

    @property
    def efficiency(self) -> float:
        r"""Speed-up over the ratio of ranks: :math:`(v_2 / v_1) / (n_2 / n_1)`."""
        return self.speedup * self.base.ranks / self.other.ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [
            asdict(run) | {"tokens_per_s": run.tokens_per_s, "samples_per_s": run.samples_per_s}
            for run in (self.base, self.other)
        ]
        return {
            "base": rows[0], "other": rows[1], "kind": self.kind, "speedup": self.speedup,
            "efficiency": self.efficiency,
        }  # fmt: skip


def run_speed(folder: Path) -> RunSpeed:
    """Speed of a run from the logs in its folder.

    Raises
    ------
    InputError
        No log of rank 0 there, or no step in it.
    """
    lines = list(log_lines(folder, 0))
    run = next((line for line in lines if line["type"] == "run"), None)
    steps = [line for line in lines if line["type"] == "step"]
    if run is None or not steps:
        raise InputError(f"{folder}: found no log with steps of rank 0, expected the log directory of a run")
    steady = steps[1:] or steps
    samples = steps[0].get("samples")
    if samples is None and (folder / "plan.json").exists():
        samples = read_plan(folder / "plan.json").problem.batch.global_batch
    rates = [line["mfu"] for line in steady if line.get("mfu") is not None]
    return RunSpeed(
        run=str(folder),
        ranks=run["world_size"],
        steps=len(steps),
        step_s=usual_step_s([line["seconds"] for line in steps]),
        tokens=steps[0]["tokens"],
        samples=samples,
        model=run["model"],
        mfu=median(rates) if rates else None,
    )


def scaling(base: Path, other: Path) -> Scaling:
    """Hold the second run against the first; raises `InputError` where they train different models."""
    result = Scaling(base=run_speed(base), other=run_speed(other))
    one, two = result.base.model, result.other.model
    require(one == two, f"{other}: model", two, f"{one}, as in {base}")
    plans = [folder / "plan.json" for folder in (base, other)]
    if all(plan.exists() for plan in plans):  # where a name says too little, as of own models
        shape, theirs = (asdict(read_plan(plan).problem.model) for plan in plans)
        for field, value in shape.items():
            require(theirs[field] == value, f"{other}: model.{field}", theirs[field], f"{value}, as in {base}")
    return result


def describe(result: Scaling) -> str:
    """The comparison for people."""

    def row(run: RunSpeed) -> Sequence[str]:
        rate = "-" if run.samples_per_s is None else f"{run.samples_per_s:,.1f}"
        mfu = "-" if run.mfu is None else f"{run.mfu:.1%}"
        return [run.run, str(run.ranks), seconds(run.step_s), rate, f"{run.tokens_per_s:,.0f}", mfu]

    header = ["run", "ranks", "step (median)", "samples/s", "tokens/s", "MFU"]
    text = table(header, [list(row(run)) for run in (result.base, result.other)])
    return (
        f"{text}\n\n{result.kind} scaling: {result.speedup:.2f} times the speed on "
        f"{result.other.ranks / result.base.ranks:.2g} times the ranks, efficiency {result.efficiency:.1%}"
    )
