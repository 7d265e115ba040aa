"""Exhaustive search: looks at every solution, so its best is proved optimal."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

from solvers.search import Search, Solver

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive(Solver):
    """Every solution, in batches; status `optimal` (or `infeasible`) when it gets to the end."""

    batch: int = 64

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`; draws no random numbers."""
        solutions = search.problem.solutions()
        while batch := list(itertools.islice(solutions, self.batch)):
            search.evaluate_many(batch)
            search.round()
        return True
