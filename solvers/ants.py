"""Ant colony over allocations: a MAX-MIN ant system (Stützle and Hoos, Future Gener. Comput. Syst. 16, 2000).

An ant fills the groups one after the other. It picks a class with probability proportional to

    pheromone[group, class]**a * desirability**b

where desirability is the affinity of the class to what the group and the group before it already hold, and takes as
many units as the group still needs to reach its share of the total weight: a class that is too large for one group is
split over several, small ones are merged. Shares are even at first and, like the pheromone, drift towards those of good
solutions. Pheromone evaporates, and the best ant (of the round, or ever) lays new along its allocation; bounds keep
every choice possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from solvers.allocation import AllocationProblem
from solvers.local_search import descend
from solvers.population import Search, Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Ants(Solver):
    """Ant colony; works on allocation problems only."""

    ants: int = 12
    evaporation: float = 0.15
    pheromone_power: float = 1.0
    desirability_power: float = 2.0
    patience: int = 20
    """Moves without improvement after which the descent of a round's best ant ends; 0: no local search."""
    stall: int = 10
    """Rounds without a better best after which a new colony begins, with level pheromone and a random total share."""

    def explore(self, search: Search[np.ndarray], started: list[tuple[float, np.ndarray]]) -> bool:
        """See `Solver.explore`."""
        problem = cast(AllocationProblem, search.problem)
        space = problem.space
        colony = _Colony(problem, self)
        if started and math.isfinite(started[0][0]):
            colony.learn(space.canonical(started[0][1]), started[0][0])
        while True:
            xs = [colony.build(search.rng) for _ in range(self.ants)]
            values = search.evaluate_many(xs)
            i = int(np.argmin(values))
            x, value = xs[i], values[i]
            if self.patience and math.isfinite(value):
                x, value = descend(search, x, value, self.patience)
            colony.learn(space.canonical(x), value)
            if colony.stalled >= self.stall:
                colony.forget(search.rng.uniform(0.3, 1.0))
            search.round()


class _Colony:
    """What the ants of a colony go by, and what they have learned together."""

    def __init__(self, problem: AllocationProblem, settings: Ants) -> None:
        self.space = problem.space
        self.weight = problem.weight()
        self.affinity = problem.affinity() ** settings.desirability_power
        self.next_affinity = problem.next_affinity() ** settings.desirability_power
        self.settings = settings
        # The best a pool can weigh: through the class that makes the most of a unit of it.
        per_unit = np.zeros(len(self.space.capacity))
        np.maximum.at(per_unit, self.space.pool, self.weight / self.space.units)
        self.total_weight = float(per_unit @ self.space.capacity)
        self.forget(1.0)

    def forget(self, total_share: float) -> None:
        """Level the pheromone, and deal a part of the total weight evenly."""
        self.pheromone = np.ones((self.space.groups, self.space.classes))
        self.share = np.full(self.space.groups, total_share / self.space.groups)
        self.best: np.ndarray | None = None
        self.value = math.inf
        self.stalled = 0
        self.rounds = 0

    def learn(self, x: np.ndarray, value: float) -> None:
        """Lay pheromone along the best of a round, every third time along the colony's best."""
        self.rounds += 1
        self.stalled += 1
        if value < self.value:
            self.best, self.value, self.stalled = x, value, 0
        if self.best is not None:
            self._lay(self.best if self.rounds % 3 == 0 or math.isinf(value) else x)

    def _lay(self, x: np.ndarray) -> None:
        """Evaporate, and strengthen the cells of an allocation by their part of the class, and its groups' shares."""
        rate = self.settings.evaporation
        self.pheromone *= 1 - rate
        self.pheromone += rate * x.shape[0] * x / np.maximum(x.sum(axis=0), 1)
        np.clip(self.pheromone, 0.05, x.shape[0], out=self.pheromone)
        if self.total_weight > 0:
            self.share += rate * (x @ self.weight / self.total_weight - self.share)

    def build(self, rng: np.random.Generator) -> np.ndarray:
        """One ant's allocation."""
        space = self.space
        x = np.zeros((space.groups, space.classes), dtype=np.int64)
        trail = self.pheromone**self.settings.pheromone_power
        left = space.capacity.copy()
        # Uneven on purpose, so that the colony learns which groups should be larger and what should stay idle.
        targets = self.share * rng.uniform(0.75, 1.2, size=space.groups) * self.total_weight
        for s, target in enumerate(targets):
            self._fill_group(x, s, trail[s], left, float(target), rng)
        return space.repair(x, rng)

    def _fill_group(
        self, x: np.ndarray, s: int, trail: np.ndarray, left: np.ndarray, target: float, rng: np.random.Generator
    ) -> None:
        """Fill row s up to a weight, as far as its half-units go."""
        space, filled = self.space, 0.0
        desire = trail.copy()
        if s:
            desire *= _mean_rows(self.next_affinity, x[s - 1] * self.weight)
        while filled < target:
            # A class may join while half of one unit still fits (or while the group is empty).
            fits = (left[space.pool] >= space.units) & ((filled == 0) | (self.weight <= 2 * (target - filled)))
            if not fits.any():
                break
            chance = desire * fits
            if filled:
                chance = chance * _mean_rows(self.affinity, x[s] * self.weight)
            total = np.cumsum(chance)
            c = min(int(np.searchsorted(total, rng.random() * total[-1], side="right")), space.classes - 1)
            unit = int(space.units[c])
            need = math.ceil((target - filled) / max(self.weight[c], 1e-300) - 0.5)
            count = max(1, min(need, int(left[space.pool[c]]) // unit))
            x[s, c] += count
            left[space.pool[c]] -= count * unit
            filled += count * self.weight[c]


def _mean_rows(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean of the rows of a matrix, weighted; ones where there is no weight."""
    total = weights.sum()
    return weights @ matrix / total if total > 0 else np.ones(matrix.shape[1])
