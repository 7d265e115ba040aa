"""Descent by random moves: the local search that other solvers build on, and plain restarts of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from solvers.problem import Problem
from solvers.result import Result
from solvers.search import Callback, Search, run
from solvers.stop import Stop

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
class Restarts:
    """Descent from one random solution after another."""

    patience: int = 200
    """Moves without improvement after which a descent ends."""

    def solve(
        self,
        problem: Problem[S],
        rng: np.random.Generator,
        stop: Stop,
        *,
        start: Iterable[S] = (),
        callback: Callback | None = None,
    ) -> Result[S]:
        """See `solvers.search.Solver.solve`."""

        def body(search: Search[S], started: list[tuple[float, S]]) -> bool:
            for value, x in started:
                if math.isfinite(value):
                    descend(search, x, value, self.patience)
                    search.round()
            while True:
                x = problem.random(rng)
                descend(search, x, search.evaluate(x), self.patience)
                search.round()

        return run(body, problem, rng, stop, start, callback)
