"""A memetic algorithm: genetic search whose children are improved by descent.

Steady state: two parents by tournament, crossover, mutation, a short descent, and the child takes the place of the
worst, unless an equal solution is already there. A population that stands still is renewed around its best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from solvers.local_search import descend
from solvers.population import Search, Solver
from solvers.problem import SearchProblem

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Genetic(Solver):
    """Genetic algorithm with local search."""

    population: int = 24
    tournament: int = 3
    mutation: float = 0.5
    """Probability of each further random move of a child (the first is always made if parents are equal)."""
    patience: int = 30
    """Moves without improvement after which the descent of a child ends; 0: no local search."""
    stall: int = 60
    """Children in a row that bring no better best, after which the population is renewed."""

    def explore(self, search: Search[S], started: list[tuple[float, S]]) -> bool:
        """See `Solver.explore`."""
        people = self._populate(search, started)
        stalled = 0
        while True:
            before = search.value
            child = self._child(search, people)
            self._insert(search.problem, people, *child)
            stalled = stalled + 1 if search.value >= before else 0
            if stalled >= self.stall:
                people = self._populate(search, people[:1])
                stalled = 0
            search.round()

    def _populate(self, search: Search[S], known: list[tuple[float, S]]) -> list[tuple[float, S]]:
        """The known solutions (each improved) and random ones beside them, best first."""
        people = known[: self.population]
        randoms = [search.problem.random(search.rng) for _ in range(self.population - len(people))]
        people = people + list(zip(search.evaluate_many(randoms), randoms, strict=True))
        people.sort(key=lambda person: person[0])
        if self.patience and math.isfinite(people[0][0]):
            x, value = descend(search, people[0][1], people[0][0], self.patience)
            people[0] = (value, x)
        return people

    def _child(self, search: Search[S], people: list[tuple[float, S]]) -> tuple[float, S]:
        problem, rng = search.problem, search.rng
        mother, father = self._pick(people, rng), self._pick(people, rng)
        x = problem.crossover(mother, father, rng) if mother is not father else problem.neighbour(mother, rng)
        while rng.random() < self.mutation:
            x = problem.neighbour(x, rng)
        value = search.evaluate(x)
        if self.patience:
            x, value = descend(search, x, value, self.patience)
        return value, x

    def _pick(self, people: list[tuple[float, S]], rng: np.random.Generator) -> S:
        """The best of a few drawn at random (people are sorted)."""
        return people[int(rng.integers(len(people), size=self.tournament).min())][1]

    @staticmethod
    def _insert(problem: SearchProblem[S], people: list[tuple[float, S]], value: float, x: S) -> None:
        """The child replaces the worst if it is better and new."""
        if value >= people[-1][0]:
            return
        key = problem.key(x)
        if any(other_value == value and problem.key(other) == key for other_value, other in people):
            return
        people[-1] = (value, x)
        people.sort(key=lambda person: person[0])
