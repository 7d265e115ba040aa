"""When to stop: rules that hold limits and no state.

A rule looks at a `Progress` and says why to stop, or None to go on. Rules combine with ``|``: the first that speaks
ends the search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search has come."""

    evaluations: int
    """Solutions evaluated so far."""
    seconds: float
    """Wall time since the search began [s]."""
    value: float
    """Best value so far; inf while nothing feasible was found."""
    bound: float
    """No solution is better than this; -inf where nothing is known."""
    evaluations_since_improvement: int


class Stop(Protocol):
    """A stop rule."""

    def reason(self, progress: Progress) -> str | None:
        """Why the search must end now; None to go on."""
        ...

    def evaluations_left(self, progress: Progress) -> float:
        """Evaluations that may still be made at once (inf where the rule does not count them)."""
        ...


class _Rule:
    """What all rules share: combination, and no limit on evaluations."""

    __slots__ = ()

    def evaluations_left(self, progress: Progress) -> float:
        """Evaluations that may still be made at once."""
        return math.inf

    def __or__(self, other: Stop) -> AnyOf:
        return AnyOf((self, other))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class MaxEvaluations(_Rule):
    """Stop after a number of evaluations."""

    limit: int

    def reason(self, progress: Progress) -> str | None:
        """Speaks when the evaluations are used up."""
        return "evaluations" if progress.evaluations >= self.limit else None

    def evaluations_left(self, progress: Progress) -> float:
        """What is left of the limit."""
        return self.limit - progress.evaluations


@dataclass(frozen=True, slots=True)
class TimeLimit(_Rule):
    """Stop after a wall time [s]."""

    limit_s: float

    def reason(self, progress: Progress) -> str | None:
        """Speaks when the time is up."""
        return "time" if progress.seconds >= self.limit_s else None


@dataclass(frozen=True, slots=True)
class Target(_Rule):
    """Stop at a value that is good enough."""

    value: float

    def reason(self, progress: Progress) -> str | None:
        """Speaks when the best value is at most the target."""
        return "target" if progress.value <= self.value else None


@dataclass(frozen=True, slots=True)
class NoImprovement(_Rule):
    """Stop after so many evaluations without a better solution (counted once something feasible is known)."""

    evaluations: int

    def reason(self, progress: Progress) -> str | None:
        """Speaks when the search has stood still for too long."""
        stalled = math.isfinite(progress.value) and progress.evaluations_since_improvement >= self.evaluations
        return "no improvement" if stalled else None


@dataclass(frozen=True, slots=True)
class AnyOf(_Rule):
    """Stop as soon as one of several rules says so."""

    rules: tuple[Stop, ...]

    def reason(self, progress: Progress) -> str | None:
        """The first reason given."""
        return next((reason for rule in self.rules if (reason := rule.reason(progress))), None)

    def evaluations_left(self, progress: Progress) -> float:
        """The tightest of the rules."""
        return min((rule.evaluations_left(progress) for rule in self.rules), default=math.inf)
