"""What a solver must know of a problem.

`SearchProblem` is all a solver asks for; solutions are opaque to it. `polygon` and the tests derive from
`AllocationProblem` (`solvers.allocation`), which supplies everything but the objective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

S = TypeVar("S")

NEAR = 200
"""Random steps in place of all there are."""


class SearchProblem(ABC, Generic[S]):
    """A minimisation problem."""

    @abstractmethod
    def evaluate(self, x: S) -> float:
        """Value of a solution: lower is better, inf is infeasible, never NaN."""

    @abstractmethod
    def random(self, rng: np.random.Generator) -> S:
        """A random solution."""

    @abstractmethod
    def neighbour(self, x: S, rng: np.random.Generator) -> S:
        """A solution a small random step away; `x` is left as it is."""

    def neighbours(self, x: S, rng: np.random.Generator) -> Iterator[S]:
        """All solutions a small step away, in random order; without a list of them, as many random ones as `NEAR`."""
        return (self.neighbour(x, rng) for _ in range(NEAR))

    def crossover(self, a: S, b: S, rng: np.random.Generator) -> S:
        """A mixture of two solutions; without a better idea, a neighbour of one of them."""
        return self.neighbour(a if rng.random() < 0.5 else b, rng)

    def evaluate_many(self, xs: Sequence[S]) -> Iterable[float]:
        """Values of several solutions; override where a batch is cheaper than a loop."""
        return (self.evaluate(x) for x in xs)

    def key(self, x: S) -> Hashable:
        """Equal for solutions that are the same but for names; the search keeps only one of them."""
        return id(x)

    def lower_bound(self) -> float:
        """No solution is better than this."""
        return -math.inf

    def solutions(self) -> Iterator[S]:
        """Every solution once (up to symmetry), in a fixed order; for exhaustive search."""
        raise NotImplementedError(f"{type(self).__name__} cannot be enumerated")

    def solutions_by_floor(self) -> Iterator[tuple[float, S]]:
        """Every solution once with a value that it cannot beat, lowest first; without an idea of it, -inf for all."""
        return ((-math.inf, x) for x in self.solutions())
