"""What every solver promises, run over every solver."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from solvers.allocation import AllocationProblem, AllocationSpace
from solvers.annealing import Annealing
from solvers.ants import Ants
from solvers.exhaustive import Exhaustive
from solvers.genetic import Genetic
from solvers.local_search import Descents, Iterated, Racing, Restarts
from solvers.population import Solver
from solvers.stop import MaxEvaluations, NoImprovement, Target

HEURISTICS: dict[str, Solver] = {
    "ants": Ants(),  # type: ignore[dict-item]  # allocation problems only
    "genetic": Genetic(),
    "restarts": Restarts(),
    "descents": Descents(most=300),
    "iterated": Iterated(first=2, kept=2, most=100),
    "racing": Racing(racers=4, lap=10),
    "racing, late acceptance": Racing(racers=4, lap=10, memory=8),
    "annealing": Annealing(cycle_evaluations=300),
}
SOLVERS = HEURISTICS | {"exhaustive": Exhaustive()}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
every_heuristic = pytest.mark.parametrize("solver", HEURISTICS.values(), ids=HEURISTICS)


class Balance(AllocationProblem):
    """Slowest group plus what it costs to have unlike classes together; one class in three may not serve group 0."""

    def __init__(
        self, seed: int, *, groups: int = 3, capacity: Sequence[int] = (3, 2, 2), ordered: bool = True
    ) -> None:
        rng = np.random.default_rng(seed)
        classes = len(capacity)
        super().__init__(AllocationSpace(groups=groups, capacity=np.array(capacity), ordered=ordered))
        self.speed = rng.uniform(1, 5, size=classes)
        self.work = rng.uniform(1, 3, size=groups) if ordered else np.ones(groups)
        self.distance = np.triu(rng.uniform(0, 0.3, size=(classes, classes)), 1)
        self.forbidden = classes % 3 == 0 and ordered
        self.calls = 0

    def evaluate(self, x: np.ndarray) -> float:
        self.calls += 1
        assert self.space.feasible(x)
        if self.forbidden and x[0, -1] > 0:
            return math.inf
        present = (x > 0).astype(float)
        apart = sum(float(row @ self.distance @ row) for row in present)
        return float((self.work / np.maximum(x @ self.speed, 1e-9)).max()) + apart

    def weight(self) -> np.ndarray:
        return self.speed


def optimum(problem: Balance) -> float:
    """By looking at every matrix of small numbers, independently of `solutions`."""
    space = problem.space
    best = math.inf
    for cells in itertools.product(range(int(space.capacity.max()) + 1), repeat=space.groups * space.classes):
        x = np.array(cells).reshape(space.groups, space.classes)
        if (x.sum(axis=0) <= space.capacity).all() and (x.sum(axis=1) > 0).all():
            best = min(best, problem.evaluate(x))
    return best


@every_solver
def test_same_seed_same_result(solver: Solver) -> None:
    """The generator is the only source of randomness."""
    a, b = (solver.solve(Balance(1), np.random.default_rng(7), MaxEvaluations(300)) for _ in range(2))
    assert np.array_equal(a.solution, b.solution)  # type: ignore[arg-type]
    assert [(h.evaluations, h.value) for h in a.history] == [(h.evaluations, h.value) for h in b.history]


@every_solver
@pytest.mark.parametrize("limit", [1, 5, 137])
def test_evaluations_are_limited_and_counted(solver: Solver, limit: int) -> None:
    """Never one evaluation more than allowed, and the count is true."""
    problem = Balance(2)
    result = solver.solve(problem, np.random.default_rng(0), MaxEvaluations(limit))
    assert result.evaluations == problem.calls == limit
    assert result.stopped_by == "evaluations"


@every_solver
def test_never_worse_than_its_start(solver: Solver) -> None:
    """The start is evaluated first, so even one evaluation returns at least it."""
    problem = Balance(3)
    good = Genetic().solve(problem, np.random.default_rng(0), MaxEvaluations(2000))
    assert good.solution is not None
    for limit in (1, 40):
        result = solver.solve(problem, np.random.default_rng(1), MaxEvaluations(limit), start=[good.solution])
        assert result.value <= good.value


@every_solver
def test_history_falls_and_ends_at_the_value(solver: Solver) -> None:
    """Improvements are strict, in order, and the last is the result."""
    result = solver.solve(Balance(4), np.random.default_rng(0), MaxEvaluations(400))
    values = [h.value for h in result.history]
    counts = [h.evaluations for h in result.history]
    seconds = [h.seconds for h in result.history]
    assert values == sorted(set(values), reverse=True) and values[-1] == result.value
    assert counts == sorted(set(counts)) and seconds == sorted(seconds)


@every_solver
def test_value_is_the_solution_s_value(solver: Solver) -> None:
    """What is returned is what was evaluated: nobody changed it afterwards."""
    problem = Balance(5)
    result = solver.solve(problem, np.random.default_rng(0), MaxEvaluations(400))
    assert result.solution is not None
    assert problem.evaluate(result.solution) == result.value


@every_solver
def test_interrupt_keeps_the_best(solver: Solver) -> None:
    """Ctrl-C in the middle of an evaluation ends the search with the best so far."""

    class Interrupted(Balance):
        def evaluate(self, x: np.ndarray) -> float:
            if self.calls == 50:
                raise KeyboardInterrupt
            return super().evaluate(x)

    result = solver.solve(Interrupted(1), np.random.default_rng(0), MaxEvaluations(10_000))
    assert result.stopped_by == "interrupt"
    assert result.solution is not None and math.isfinite(result.value)


@every_solver
def test_stops_at_the_target_and_when_stalled(solver: Solver) -> None:
    """Either of two combined rules ends the search and gives its name."""
    problem = Balance(6)
    best = Exhaustive().solve(problem, np.random.default_rng(0), MaxEvaluations(10**6)).value
    stop = Target(best * 1.5) | NoImprovement(5000)
    result = solver.solve(problem, np.random.default_rng(0), stop)
    assert result.stopped_by == "target" and result.value <= best * 1.5
    stalled = solver.solve(problem, np.random.default_rng(0), NoImprovement(20))
    assert stalled.stopped_by == "no improvement"
    assert stalled.evaluations == stalled.history[-1].evaluations + 20


@every_solver
def test_callback_sees_every_improvement(solver: Solver) -> None:
    """Each improvement is reported with its solution, at the time it is made."""
    problem = Balance(7)
    seen: list[float] = []

    def callback(progress: object, best: object) -> None:
        value = progress.value  # type: ignore[attr-defined]
        if best is not None and (not seen or value < seen[-1]):
            seen.append(value)

    result = solver.solve(problem, np.random.default_rng(0), MaxEvaluations(300), callback=callback)
    assert seen == [h.value for h in result.history]


@every_solver
def test_nothing_feasible(solver: Solver) -> None:
    """Without a feasible solution there is none, and only exhaustive search calls it proved."""

    class Impossible(Balance):
        def evaluate(self, x: np.ndarray) -> float:
            return math.inf

    result = solver.solve(Impossible(1, groups=2, capacity=(2, 1)), np.random.default_rng(0), MaxEvaluations(500))
    assert result.solution is None and result.value == math.inf
    assert result.status == ("infeasible" if isinstance(solver, Exhaustive) else "unknown")


@every_heuristic
def test_a_reached_bound_is_a_proof(solver: Solver) -> None:
    """A solution as good as the problem's lower bound ends the search as optimal."""
    best = Exhaustive().solve(Balance(8), np.random.default_rng(0), MaxEvaluations(10**6)).value

    class Bounded(Balance):
        def lower_bound(self) -> float:
            return best

    result = solver.solve(Bounded(8), np.random.default_rng(0), MaxEvaluations(20_000))
    assert (result.status, result.stopped_by, result.gap) == ("optimal", "proof", 0.0)


@pytest.mark.parametrize("ordered", [True, False])
def test_exhaustive_search_proves_the_optimum(ordered: bool) -> None:
    """It finds what brute force over every matrix finds, with and without interchangeable groups."""
    for seed in range(3):
        problem = Balance(seed, groups=3, capacity=(2, 2), ordered=ordered)
        result = Exhaustive().solve(problem, np.random.default_rng(0), MaxEvaluations(10**6))
        assert result.status == "optimal" and result.gap == 0
        assert result.value == pytest.approx(optimum(problem), rel=1e-12)


@every_heuristic
def test_small_instances_are_solved_to_optimality(solver: Solver) -> None:
    """At least 19 of 20 small instances, each proved by exhaustive search, within 1 % in 3000 evaluations."""
    solved = 0
    for seed in range(20):
        problem = Balance(seed, groups=2 + seed % 2, capacity=(3, 2, 2), ordered=seed % 4 < 2)
        best = Exhaustive().solve(problem, np.random.default_rng(0), MaxEvaluations(10**6)).value
        stop = Target(best * 1.01) | MaxEvaluations(3000)
        solved += solver.solve(problem, np.random.default_rng(seed), stop).value <= best * 1.01
    assert solved >= 19


def test_exhaustive_search_leaves_out_what_floors_exclude() -> None:
    """With a floor for every solution the optimum is the same, and proved by fewer evaluations."""

    class Floored(Balance):
        def solutions_by_floor(self):
            floored = [(0.9 * self.evaluate(x), x) for x in self.solutions()]
            return iter(sorted(floored, key=lambda pair: pair[0]))

    plain = Exhaustive().solve(Balance(8), np.random.default_rng(0), MaxEvaluations(10**6))
    floored = Exhaustive(batch=4).solve(Floored(8), np.random.default_rng(0), MaxEvaluations(10**6))
    assert (floored.value, floored.status) == (plain.value, "optimal")
    assert floored.evaluations < plain.evaluations / 2
