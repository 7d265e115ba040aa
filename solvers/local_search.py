"""Descent by random moves: the local search that other solvers build on, and plain restarts of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from solvers.population import Search, Solver

S = TypeVar("S")


def descend(search: Search[S], x: S, value: float, patience: int) -> tuple[S, float]:
    """Take every random move that is not worse, until `patience` moves in a row bring nothing.

    Moves to equal values are taken: plateaus are crossed, not sat on.
    """
    failures = 0
    while failures < patience:
        y = search.problem.neighbour(x, search.rng)
        y_value = search.evaluate(y)
        failures = 0 if y_value < value else failures + 1
        if y_value <= value:
            x, value = y, y_value
    return x, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts(Solver):
    """Descent from one random solution after another."""

    patience: int = 200
    """Moves without improvement after which a descent ends."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        for value, x in started:
            if math.isfinite(value):
                descend(search, x, value, self.patience)
                search.round()
        while True:
            x = search.problem.random(search.rng)
            descend(search, x, search.evaluate(x), self.patience)
            search.round()
