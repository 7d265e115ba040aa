"""Exhaustive search: looks at every solution, so its best is proved optimal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from solvers.problem import Problem
from solvers.result import Result
from solvers.search import Callback, Search, run
from solvers.stop import Stop

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive:
    """Every solution, in batches; status `optimal` (or `infeasible`) when it gets to the end."""

    batch: int = 64

    def solve(
        self,
        problem: Problem[S],
        rng: np.random.Generator,
        stop: Stop,
        *,
        start: Iterable[S] = (),
        callback: Callback | None = None,
    ) -> Result[S]:
        """See `solvers.search.Solver.solve`; draws no random numbers."""

        def body(search: Search[S], started: list[tuple[float, S]]) -> bool:
            solutions = problem.solutions()
            while batch := list(itertools.islice(solutions, self.batch)):
                search.evaluate_many(batch)
                search.round()
            return True

        return run(body, problem, rng, stop, start, callback)
