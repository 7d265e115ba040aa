"""Solvers as suites use them, and what a search of polygon's allocations can begin with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from solvers.allocation import AllocationProblem
from solvers.annealing import Annealing
from solvers.ants import Ants
from solvers.genetic import Genetic
from solvers.local_search import Racing, Restarts
from solvers.problem import SearchProblem
from solvers.result import Improvement, SearchResult
from solvers.stop import AnyOf, MaxEvaluations, Stop


class Method:
    """A solver as a suite uses it."""

    seeded = True
    """Whether the generator decides anything."""

    def __init__(self, solver: Any) -> None:
        self.solver = solver

    @property
    def picky(self) -> bool:
        """Whether it cannot take every problem."""
        return isinstance(self.solver, Ants)

    def applies(self, problem: SearchProblem[Any]) -> bool:
        """Whether the solver can take the problem; ants need an allocation space."""
        return isinstance(problem, AllocationProblem) or not isinstance(self.solver, Ants)

    def solve(self, problem: Any, rng: np.random.Generator, stop: Stop, evaluations: int) -> SearchResult[Any]:
        """Run on a problem until the stop rule speaks; at most `evaluations`."""
        return self.solver.solve(problem, rng, stop)

    def warm_up(self, problem: Any) -> None:
        """Compile the kernels."""
        self.solve(problem, np.random.default_rng(0), MaxEvaluations(30), 30)


Starts = Callable[[Any, np.random.Generator, int], tuple[list[Any], int]]
"""From problem, generator and a budget: solutions to begin with, and the evaluations that finding them took."""


class Seeded(Method):
    """A solver that begins with what other means offer; half of the evaluations at most are spent on that."""

    def __init__(self, solver: Any, starts: Starts) -> None:
        super().__init__(solver)
        self.starts = starts

    def solve(self, problem: Any, rng: np.random.Generator, stop: Stop, evaluations: int) -> SearchResult[Any]:
        """Starts first, then the solver on what is left; both are counted."""
        began = time.perf_counter()
        starts, used = self.starts(problem, rng, evaluations // 2)
        spent_s = time.perf_counter() - began
        limit = AnyOf((stop, MaxEvaluations(max(1, evaluations - used))))
        result = self.solver.solve(problem, rng, limit, start=starts)
        history = tuple(Improvement(h.evaluations + used, h.seconds + spent_s, h.value) for h in result.history)
        return replace(
            result, evaluations=result.evaluations + used, seconds=result.seconds + spent_s, history=history
        )  # fmt: skip


# Starts: what finding them takes is counted


def simple(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """All devices in walks along the links, cut evenly, in every micro-batch size; a sample where they are many."""
    from polygon.planning.decode import Allocation
    from polygon.planning.initial_solutions import simple_starts

    starts = [
        Allocation(workers=x, micro_batch_size=size)
        for size in candidates.sizes
        for x in simple_starts(candidates.decoder, candidates.space.groups, size)
    ]
    if len(starts) > budget:
        starts = [starts[i] for i in rng.choice(len(starts), size=max(1, budget), replace=False)]
    return starts, 0


def grown(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """One pipeline replicated in more and more regions."""
    from polygon.planning.initial_solutions import grown_starts

    value_of = _Counted(candidates)
    decoder, rows = candidates.decoder, candidates.space.groups
    starts = grown_starts(decoder, rows, value_of, lambda: float(budget - value_of.used))
    return starts, value_of.used


def replicated(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """The same pipeline in every region that has the workers for it."""
    from polygon.planning.initial_solutions import replicated_starts

    value_of = _Counted(candidates)
    decoder, rows, sizes = candidates.decoder, candidates.space.groups, candidates.sizes
    starts = replicated_starts(decoder, rows, sizes, value_of, lambda: float(budget - value_of.used))
    return starts, value_of.used


class _Counted:
    """Values of allocations, counted."""

    def __init__(self, candidates: Any) -> None:
        self.candidates = candidates
        self.used = 0

    def __call__(self, x: Any) -> float:
        self.used += 1
        return float(self.candidates.evaluate(x))


def ant_groups(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """What ants make of the budget, dealt over numbers of stages."""
    from polygon.planning.candidates import GroupCandidates
    from polygon.planning.decode import Allocation

    rows, sizes = candidates.space.groups, candidates.sizes
    counts = [count for count in (1, 2, 3, 4, 6, 8) if count <= rows]
    found, used = [], 0
    for count in counts:
        groups = GroupCandidates(candidates.decoder, count, int(sizes[rng.integers(len(sizes))]))
        result = Ants().solve(groups, rng, MaxEvaluations(max(1, budget // len(counts))))
        used += result.evaluations
        if result.solution is not None:
            x = np.zeros((rows, candidates.space.classes), dtype=np.int64)
            x[:count] = result.solution
            found += [Allocation(workers=x, micro_batch_size=size) for size in sizes]
    return found, used


def kind_sequences(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """The best dozen of all sequences of worker kinds, as far as the budget goes."""
    from polygon.planning import initial_solutions

    sequences = initial_solutions.kind_sequences(candidates.decoder, candidates.space.groups, candidates.sizes)
    tried = [(candidates.evaluate(x), i, x) for i, x in enumerate(itertools.islice(sequences, budget))]
    return [x for _, _, x in sorted(tried, key=lambda entry: entry[:2])[:12]], len(tried)


def several(*starts: Starts) -> Starts:
    """The budget shared evenly by several."""

    def all_of(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        used = 0
        for i, one in enumerate(starts):
            more, spent = one(candidates, rng, (budget - used) // (len(starts) - i))
            found, used = [*found, *more], used + spent
        return found, used

    return all_of


def planning_methods() -> dict[str, Method]:
    """Solvers of allocations, alone and with starts."""
    return {
        "memetic": Method(Genetic()),
        "annealing": Method(Annealing()),
        "restarts": Method(Restarts()),
        "ants+memetic": Seeded(Genetic(), ant_groups),
        "simple+memetic": Seeded(Genetic(), simple),
        "grown+memetic": Seeded(Genetic(), grown),
        "replicated+memetic": Seeded(Genetic(), replicated),
        "grown+genetic": Seeded(Genetic(patience=0), grown),
        "grown+annealing": Seeded(Annealing(), grown),
        "grown+restarts": Seeded(Restarts(), grown),
        "grown+racing": Seeded(Racing(), grown),
        "grown+random": Seeded(Restarts(patience=0), grown),
        "sequences+memetic": Seeded(Genetic(), kind_sequences),
    }
