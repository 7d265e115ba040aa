"""What a solver returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Improvement(NamedTuple):
    """A new best, and when it was found."""

    evaluations: int
    seconds: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Generic[S]):
    """Best solution of a search, with what is known about how good it is."""

    solution: S | None
    """None when nothing feasible was found."""
    value: float
    """Of the solution; inf when nothing feasible was found."""
    bound: float
    """No solution is better than this; -inf where nothing is known."""
    status: str
    """`optimal` (proved), `infeasible` (proved), `feasible`, `unknown` (nothing found, nothing proved)."""
    stopped_by: str
    """`proof`, `exhausted`, `interrupt`, or the reason that the stop rule gave."""
    evaluations: int
    seconds: float
    history: tuple[Improvement, ...]
    """Every improvement, oldest first."""

    @property
    def gap(self) -> float:
        """(value - bound) / value; inf where either is unknown, 0 when proved optimal."""
        if self.status == "optimal":
            return 0.0
        if not (math.isfinite(self.value) and math.isfinite(self.bound)) or self.value == 0:
            return math.inf
        return max(0.0, (self.value - self.bound) / abs(self.value))
