"""The learning rate of a step: a function of the step alone, so that any plan goes on with it. Imports no torch.

The values are those of torch's schedulers, `LinearLR` for the warm-up and then `CosineAnnealingLR` or `LinearLR`
(`SequentialLR`); torch's own hold state that depends on the steps that they have seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from polygon.domain.errors import require, require_number

SCHEDULES = ("constant", "cosine", "linear", "wsd")
DECAYING_PART = 0.1
"""Of all steps, in which `wsd` falls (MiniCPM, arXiv 2404.06395, section 4: 10 % are enough)."""
FINAL_PART = 0.1
"""Of the largest rate, at the end (Llama 2, arXiv 2307.09288, section 2.2)."""


class RateNames(NamedTuple):
    """What whoever gave a learning rate calls its fields."""

    largest: str
    schedule: str
    warmup_steps: str
    steps: str
    decay_steps: str
    final_part: str


OPTIONS = RateNames(
    "--learning-rate", "--schedule", "--warmup-steps", "--schedule-steps", "--decay-steps", "--final-rate"
)
"""Of the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A linear rise, and then one of `SCHEDULES`.

    Parameters
    ----------
    largest : float
        After the rise.
    schedule : str
        constant; cosine, linear: from the largest rate to the final one until `steps`; wsd: constant, and linear in
        the last `decay_steps` (warm-up, stable, decay).
    warmup_steps, steps : int
        Of the rise, and of all; after these the rate stays at the final one.
    decay_steps : int, optional
        Of wsd; None: `DECAYING_PART` of all.
    final_part : float
        Final rate over the largest.
    names : RateNames
        Those that errors speak of.
    """

    largest: float
    schedule: str = "constant"
    warmup_steps: int = 0
    steps: int = 1
    decay_steps: int | None = None
    final_part: float = FINAL_PART
    names: RateNames = field(default=OPTIONS, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = self.names
        require_number(self.largest, names.largest, above=0)
        require(self.schedule in SCHEDULES, names.schedule, self.schedule, " or ".join(SCHEDULES))
        require(self.warmup_steps >= 0, names.warmup_steps, self.warmup_steps, "a whole number >= 0")
        require(self.steps >= 1, names.steps, self.steps, "a whole number >= 1")
        most = self.steps - self.warmup_steps
        decays = self.schedule != "constant"
        require(not decays or most >= 1, names.warmup_steps, self.warmup_steps, f"less than all {self.steps} steps")
        found = self.decay_steps
        expected = f"none with schedule {self.schedule} (wsd has them)"
        require(found is None or self.schedule == "wsd", names.decay_steps, found, expected)
        expected = f"1 to {most}, the steps after the warm-up"
        require(found is None or 1 <= found <= most, names.decay_steps, found, expected)
        require_number(self.final_part, names.final_part, at_least=0)
        require(self.final_part <= 1, names.final_part, self.final_part, "at most 1, the largest rate")

    def at(self, step: int) -> float:
        """The rate of a step, from 0."""
        if step < self.warmup_steps:
            return self.largest * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.largest
        falling = self.steps - self.warmup_steps
        if self.schedule == "wsd":
            falling = min(falling, self.decay_steps or max(1, round(DECAYING_PART * self.steps)))
        passed = min(1.0, max(0.0, (step - (self.steps - falling)) / falling))
        left = (1 + math.cos(math.pi * passed)) / 2 if self.schedule == "cosine" else 1 - passed
        return self.largest * (self.final_part + (1 - self.final_part) * left)
