"""Descent by random moves: the local search that other solvers build on, restarts of it, and races."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing(Solver):
    """Descents side by side, by successive halving: the better half goes on for twice as long, until one is left.

    Then a race of the next solutions given, or of random ones, begins. K. Jamieson and A. Talwalkar, Non-stochastic
    best arm identification and hyperparameter optimization, AISTATS 2016.
    """

    racers: int = 16
    lap: int = 60
    """Moves of every racer before the first halving."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        waiting = [(value, x) for value, x in started if math.isfinite(value)]
        while True:
            racing, waiting = waiting[: self.racers], waiting[self.racers :]
            while len(racing) < self.racers:
                x = search.problem.random(search.rng)
                racing.append((search.evaluate(x), x))
            moves = self.lap
            while len(racing) > 1:
                racing = [_moved(search, x, value, moves) for value, x in racing]
                racing.sort(key=lambda racer: racer[0])
                racing, moves = racing[: len(racing) // 2], 2 * moves
                search.round()


def _moved(search: Search[S], x: S, value: float, moves: int) -> tuple[float, S]:
    """What so many random moves lead to, if those are taken that are not worse."""
    for _ in range(moves):
        y = search.problem.neighbour(x, search.rng)
        y_value = search.evaluate(y)
        if y_value <= value:
            x, value = y, y_value
    return value, x
