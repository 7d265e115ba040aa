"""The frame that every solver runs in: counting, the best so far, stop rule, callback, interrupt.

What a solver does, `Solver.explore`, is a function of a `Search`: it asks for evaluations until the search ends it. It
never handles limits, clocks or interrupts itself, so it stays as short as its idea.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from solvers.problem import SearchProblem
from solvers.result import Improvement, SearchResult
from solvers.stop import Progress, Stop

S = TypeVar("S")

Callback = Callable[[Progress, object], None]
"""Called with the progress and the best solution at every improvement and at every round of a solver."""


class _HaltError(Exception):
    """The stop rule has spoken, or the best is proved optimal."""


class Search(Generic[S]):
    """One run of a solver on a problem."""

    def __init__(
        self, problem: SearchProblem[S], rng: np.random.Generator, stop: Stop, callback: Callback | None
    ) -> None:
        self.problem = problem
        self.rng = rng
        self.stop = stop
        self.callback = callback
        self.bound = problem.lower_bound()
        self.best: S | None = None
        self.value = math.inf
        self.evaluations = 0
        self.history: list[Improvement] = []
        self.stopped_by = ""
        self._began = time.perf_counter()
        self._improved_at = 0

    def progress(self) -> Progress:
        """Where the search stands."""
        seconds = time.perf_counter() - self._began
        return Progress(self.evaluations, seconds, self.value, self.bound, self.evaluations - self._improved_at)

    def evaluate(self, x: S) -> float:
        """Value of a solution; ends the search when the stop rule says so."""
        self.check()
        value = float(self.problem.evaluate(x))
        self.record(x, value)
        return value

    def evaluate_many(self, xs: Sequence[S]) -> list[float]:
        """Values of several solutions, as one batch; ends the search where the stop rule says so."""
        values: list[float] = []
        while len(values) < len(xs):
            progress = self.check()
            count = int(min(len(xs) - len(values), self.stop.evaluations_left(progress)))
            batch = xs[len(values) : len(values) + count]
            for x, value in zip(batch, self.problem.evaluate_many(batch), strict=True):
                self.record(x, float(value))
                values.append(float(value))
                if len(values) < len(xs):
                    self.check()
        return values

    def check(self) -> Progress:
        """End the search if it is time to."""
        progress = self.progress()
        if self.value <= self.bound + 1e-12 * abs(self.bound) and math.isfinite(self.value):
            self.stopped_by = "proof"
            raise _HaltError
        reason = self.stop.reason(progress)
        if reason:
            self.stopped_by = reason
            raise _HaltError
        return progress

    def round(self) -> None:
        """Tell the callback that a round of the solver is over."""
        if self.callback:
            self.callback(self.progress(), self.best)

    def record(self, x: S, value: float, *, evaluations: int = 1) -> None:
        """Count evaluations made elsewhere (in a kernel), of which `x` was the best; keep it if it is the best ever."""
        self.evaluations += evaluations
        if math.isnan(value):
            raise ValueError(f"evaluate returned NaN for {x!r}")
        if value < self.value:
            self.best, self.value, self._improved_at = x, value, self.evaluations
            progress = self.progress()
            self.history.append(Improvement(self.evaluations, progress.seconds, value))
            if self.callback:
                self.callback(progress, x)

    def result(self, *, exhausted: bool = False) -> SearchResult[S]:
        """What was found."""
        found = self.best is not None
        proved = exhausted or self.stopped_by == "proof"
        status = ("optimal" if found else "infeasible") if proved else ("feasible" if found else "unknown")
        return SearchResult(
            solution=self.best,
            value=self.value,
            bound=self.value if proved else self.bound,
            status=status,
            stopped_by=self.stopped_by or "exhausted",
            evaluations=self.evaluations,
            seconds=time.perf_counter() - self._began,
            history=tuple(self.history),
        )


class Solver(ABC):
    """A solver: parameters in its fields, and what it does within a search."""

    __slots__ = ()

    def solve(
        self,
        problem: SearchProblem[S],
        rng: np.random.Generator,
        stop: Stop,
        *,
        start: Iterable[S] = (),
        callback: Callback | None = None,
    ) -> SearchResult[S]:
        """Search until the stop rule speaks, the best is proved optimal, or the user interrupts.

        Parameters
        ----------
        problem : Problem
        rng : numpy.random.Generator
            The only source of randomness.
        stop : Stop
        start : iterable of solutions
            Evaluated first; the result is never worse than the best of them.
        callback : callable, optional
            Called with (progress, best solution) at improvements and rounds.

        Returns
        -------
        Result
        """
        search: Search[S] = Search(problem, rng, stop, callback)
        exhausted = False
        try:
            started = list(start)
            values = search.evaluate_many(started)
            order = sorted(range(len(started)), key=values.__getitem__)
            exhausted = self.explore(search, [(values[i], started[i]) for i in order])
        except _HaltError:
            pass
        except KeyboardInterrupt:
            search.stopped_by = "interrupt"
        return search.result(exhausted=exhausted)

    @abstractmethod
    def explore(self, search: Search[Any], started: list[tuple[float, Any]]) -> bool:
        """Ask the search for evaluations until it ends by itself.

        `started` holds the start solutions as (value, solution), best first. Returns whether every solution there is
        has been seen.
        """
