"""Exhaustive search: no solution is left out unless it cannot be better, so the best is proved optimal."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

from solvers.population import Search, Solver

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive(Solver):
    """Every solution by rising floor, in batches, until none can be better; status `optimal` (or `infeasible`) then."""

    batch: int = 64

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`; draws no random numbers."""
        solutions = search.problem.solutions_by_floor()
        while batch := list(itertools.islice(solutions, self.batch)):
            hopeful = [x for floor, x in batch if floor < search.value]
            search.evaluate_many(hopeful)
            search.round()
            if len(hopeful) < len(batch):
                break
        return True
