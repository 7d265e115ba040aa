"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983), restarted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from solvers.population import Search, Solver

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing(Solver):
    """Worse moves are taken with probability exp(-(increase) / T), T falling geometrically.

    Every cycle starts where the best solution is (or at random, in turn) and cools from a temperature at which the
    mean step uphill is taken with probability `initial_acceptance` to one where it is practically never taken.
    """

    cycle_evaluations: int = 2000
    initial_acceptance: float = 0.4
    final_ratio: float = 1e-3
    """Last temperature of a cycle, as a part of the first."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        from_best = bool(started) and math.isfinite(started[0][0])
        while True:
            if from_best and search.best is not None:
                x, value = search.best, search.value
            else:
                x = search.problem.random(search.rng)
                value = search.evaluate(x)
            self._cycle(search, x, value)
            search.round()
            from_best = not from_best

    def _cycle(self, search: Search[S], x: S, value: float) -> None:
        x, value, uphill = self._warm_up(search, x, value)
        temperature = uphill / -math.log(self.initial_acceptance)
        cooling = self.final_ratio ** (1 / self.cycle_evaluations)
        for _ in range(self.cycle_evaluations):
            y = search.problem.neighbour(x, search.rng)
            y_value = search.evaluate(y)
            if y_value <= value or search.rng.random() < math.exp(-(y_value - value) / temperature):
                x, value = y, y_value
            temperature *= cooling

    def _warm_up(self, search: Search[S], x: S, value: float) -> tuple[S, float, float]:
        """A few moves that are all taken if feasible, to learn the mean step uphill."""
        steps: list[float] = []
        for _ in range(max(10, self.cycle_evaluations // 50)):
            y = search.problem.neighbour(x, search.rng)
            y_value = search.evaluate(y)
            if not math.isfinite(value) or math.isfinite(y_value):
                if math.isfinite(value) and y_value > value:
                    steps.append(y_value - value)
                x, value = y, y_value
        scale = abs(value) if math.isfinite(value) and value else 1.0
        return x, value, float(np.mean(steps)) if steps else 0.01 * scale
