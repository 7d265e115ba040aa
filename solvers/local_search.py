"""Descent by random moves: the local search that other solvers build on, restarts of it, and races; and descent through
all moves there are, once or again and again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

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


def descend_through_all(search: Search[S], x: S, value: float, most: int) -> tuple[float, S]:
    """Take the first neighbour that is better until none is, or so many are evaluated; the value and where it ends."""
    left, better = most, True
    while better:
        better = False
        for y in search.problem.neighbours(x, search.rng):
            if left <= 0:
                break
            left -= 1
            if (y_value := search.evaluate(y)) < value:
                x, value, better = y, y_value, True
                break
    return value, x


def _from_each(search: Search[S], started: list[tuple[float, S]], descent: Callable[[S, float], object]) -> None:
    """Descend from all that are given and feasible, a round each."""
    for value, x in started:
        if math.isfinite(value):
            descent(x, value)
            search.round()


def _from_random(search: Search[S], descent: Callable[[S, float], object]) -> NoReturn:
    """Descend from one random solution after another, until the search ends it."""
    while True:
        x = search.problem.random(search.rng)
        descent(x, search.evaluate(x))
        search.round()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts(Solver):
    """Descent from one random solution after another."""

    patience: int = 200
    """Moves without improvement after which a descent ends."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        _from_each(search, started, lambda x, value: descend(search, x, value, self.patience))
        return _from_random(search, lambda x, value: descend(search, x, value, self.patience))


@dataclass(frozen=True, slots=True, kw_only=True)
class Descents(Solver):
    """Descent from one solution given after another, or from random ones, until no neighbour is better."""

    most: int = 1500
    """Evaluations of one descent."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        if not started:
            return _from_random(search, lambda x, value: descend_through_all(search, x, value, self.most))
        _from_each(search, started, lambda x, value: descend_through_all(search, x, value, self.most))
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterated(Solver):
    """Descents through all neighbours from the best few that such led to, some random moves off, again and again: what
    is no worse takes the place of what it came from.

    H. R. Lourenço, O. C. Martin and T. Stützle, Iterated local search, Handbook of Metaheuristics, 2003.
    """

    first: int = 6
    """Solutions given that are descended from at the beginning."""
    kept: int = 3
    """Of what these descents led to."""
    fewest_moves: int = 2
    most_moves: int = 4
    most: int = 3000
    """Evaluations of one descent."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        ends: list[tuple[float, S]] = []

        def ended(x: S, value: float) -> None:
            ends.append(descend_through_all(search, x, value, self.most))

        _from_each(search, started[: self.first], ended)
        while not ends:
            x = search.problem.random(search.rng)
            _from_each(search, [(search.evaluate(x), x)], ended)
        ends = sorted(ends, key=lambda entry: entry[0])[: self.kept]
        while True:
            at = int(search.rng.integers(len(ends)))
            value, x = ends[at]
            for _ in range(int(search.rng.integers(self.fewest_moves, self.most_moves + 1))):
                x = search.problem.neighbour(x, search.rng)
            moved = search.evaluate(x)
            if math.isfinite(moved):
                found = descend_through_all(search, x, moved, self.most)
                if found[0] <= value:
                    ends[at] = found
            search.round()


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing(Solver):
    """Walks side by side, by successive halving: the better half goes on for twice as long, the last one by itself.

    Then a race of the next solutions given, or of random ones, begins. K. Jamieson and A. Talwalkar, Non-stochastic
    best arm identification and hyperparameter optimization, AISTATS 2016.
    """

    racers: int = 16
    lap: int = 60
    """Moves of every racer before the first halving."""
    memory: int = 0
    """Late acceptance: a move may also be worse, if it is no worse than where the walk was so many moves ago (E. K.
    Burke and Y. Bykov, The late acceptance hill-climbing heuristic, EJOR 258, 2017); 0: it may not."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        waiting = [(value, x) for value, x in started if math.isfinite(value)]
        while True:
            chosen, waiting = waiting[: self.racers], waiting[self.racers :]
            while len(chosen) < self.racers:
                x = search.problem.random(search.rng)
                chosen.append((search.evaluate(x), x))
            racing, moves = [_Walk(x, value, self.memory) for value, x in chosen], self.lap
            while racing:
                for walk in racing:
                    walk.go_on(search, moves)
                racing.sort(key=lambda walk: walk.best)
                racing, moves = racing[: len(racing) // 2], 2 * moves
                search.round()


class _Walk(Generic[S]):
    """Random moves from a solution on; `best` is the least value met."""

    def __init__(self, x: S, value: float, memory: int) -> None:
        self.best, self._x, self._value = value, x, value
        self._late, self._moves = [value] * memory, 0

    def go_on(self, search: Search[S], moves: int) -> None:
        """Make so many moves, and take those that are not worse, or late ones (`Racing.memory`)."""
        for _ in range(moves):
            y = search.problem.neighbour(self._x, search.rng)
            value = search.evaluate(y)
            at = self._moves % max(1, len(self._late))
            if value <= self._value or (self._late and value <= self._late[at]):
                self._x, self._value = y, value
            if self._late:
                self._late[at] = min(self._late[at], self._value)
            self._moves, self.best = self._moves + 1, min(self.best, value)
