"""PTAFM's objectives against their definitions, and its instance against its optima."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals.ptafm import AntProblem, Centers, GeneticProblem, centers_from_document
from polygon.domain.errors import InputError
from solvers.annealing import Annealing
from solvers.ants import Ants
from solvers.exhaustive import Exhaustive
from solvers.genetic import Genetic
from solvers.local_search import Restarts
from solvers.stop import MaxEvaluations, Target

DOCUMENT = json.loads((Path(__file__).parents[2] / "instances" / "ptafm" / "7dc.json").read_text())
ENOUGH = MaxEvaluations(10**6)


@pytest.fixture(scope="module")
def centers() -> Centers:
    """The seven data centers."""
    return centers_from_document(DOCUMENT)


def test_the_large_center_is_split_as_ptafm_splits_it(centers: Centers) -> None:
    """Center 1 (4 A100, 20 T4) gives a stage of 4 A100 and 6 T4, and 14 T4 are left to be grouped."""
    assert centers.mean_power == DOCUMENT["mean_stage_power"]
    assert [(p.center, p.power, p.full) for p in centers.parts[:2]] == [(0, 34, True), (0, 14, False)]
    assert [p.power for p in centers.parts[2:]] == [18, 28, 18, 20, 16, 20]


def test_ant_cost_is_the_formula(centers: Centers) -> None:
    """A hand-written sum over groups and members gives the same."""
    problem = AntProblem(centers)
    latency, gbit = (np.array(DOCUMENT["aco_network"][k]) for k in ("latency_ms", "bandwidth_gbit_per_s"))
    power = {1: 14, 2: 18, 3: 28, 4: 18, 5: 20, 6: 16, 7: 20}
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = problem.random(rng)
        communication, squares = 0.0, 0.0
        for group in problem.groups(x):
            communication += max(
                sum(latency[j - 1, k - 1] + 1000 / (gbit[j - 1, k - 1] * 125) for k in group if k != j) for j in group
            )
            squares += (sum(power[j] for j in group) - 33.6) ** 2
        assert problem.evaluate(x) == pytest.approx(communication + 2 * math.sqrt(squares / 5), rel=1e-12)


def test_ant_optimum_is_proved(centers: Centers) -> None:
    """All 350 partitions: 295.87664."""
    problem = AntProblem(centers)
    result = Exhaustive().solve(problem, np.random.default_rng(0), ENOUGH)
    assert (result.status, result.evaluations) == ("optimal", 350)
    assert result.value == pytest.approx(295.87664, abs=5e-6)
    assert result.solution is not None
    assert sorted(problem.groups(result.solution)) == [[1, 4], [2, 5], [3], [6, 7]]


def test_consistent_units_change_the_winner(centers: Centers) -> None:
    """With seconds throughout other groups win, with 1.82 times less communication inside stages."""
    consistent = AntProblem(centers, consistent_units=True)
    old = Exhaustive().solve(AntProblem(centers), np.random.default_rng(0), ENOUGH).solution
    new = Exhaustive().solve(consistent, np.random.default_rng(0), ENOUGH).solution
    assert old is not None and new is not None
    assert sorted(consistent.groups(new)) != sorted(consistent.groups(old))
    assert consistent.communication(old) / consistent.communication(new) == pytest.approx(1.82, abs=0.005)


def test_genetic_optimum_is_proved(centers: Centers) -> None:
    """All ordered solutions with 0.6 of the mean power in every stage: 880.04236, the best that PTAFM reports."""
    result = Exhaustive().solve(GeneticProblem(centers), np.random.default_rng(0), ENOUGH)
    assert result.status == "optimal"
    assert result.value == pytest.approx(880.04236, abs=5e-6)


def test_genetic_walk_by_hand(centers: Centers) -> None:
    """Stages (2, 6) and (5, 7): powers 18+16 and 20+20; the walk meets 2-5, 6-5, 6-7, so the longest of these."""
    problem = GeneticProblem(centers)
    part = {part.center + 1: i for i, part in enumerate(centers.parts) if not part.full}
    latency, bandwidth = (np.array(DOCUMENT["ga_network"][k]) for k in ("latency", "bandwidth"))
    link = [latency[a - 1, b - 1] + 1000 / bandwidth[a - 1, b - 1] for a, b in ((2, 5), (6, 5), (6, 7))]
    walked = problem._walk((part[2], part[6]), (part[5], part[7]))
    assert walked == pytest.approx(max(link), rel=1e-12)


@pytest.mark.parametrize("solver", [Ants(), Genetic(), Annealing(cycle_evaluations=500), Restarts()], ids=repr)
def test_every_seed_finds_the_ant_optimum(centers: Centers, solver: Genetic) -> None:
    """Ten seeds, 3000 evaluations."""
    for seed in range(10):
        stop = Target(295.87665) | MaxEvaluations(3000)
        assert solver.solve(AntProblem(centers), np.random.default_rng(seed), stop).stopped_by == "target"


@pytest.mark.parametrize("solver", [Genetic(), Annealing(cycle_evaluations=500), Restarts()], ids=repr)
def test_every_seed_finds_the_genetic_optimum(centers: Centers, solver: Genetic) -> None:
    """Ten seeds, 20,000 evaluations."""
    for seed in range(10):
        stop = Target(880.04237) | MaxEvaluations(20_000)
        assert solver.solve(GeneticProblem(centers), np.random.default_rng(seed), stop).stopped_by == "target"


def test_genetic_moves_keep_every_part(centers: Centers) -> None:
    """Every part is in exactly one stage, and full parts stay alone."""
    problem = GeneticProblem(centers)
    rng = np.random.default_rng(0)
    x = problem.random(rng)
    for _ in range(300):
        x = problem.neighbour(x, rng)
        assert sorted(itertools.chain(*x)) == list(range(len(centers.parts)))
        assert all((i,) in x for i in centers.full) and all(x)


def test_bad_documents_are_refused() -> None:
    """The message names the field."""
    with pytest.raises(InputError, match="ga_network"):
        centers_from_document({k: v for k, v in DOCUMENT.items() if k != "ga_network"})
    with pytest.raises(InputError, match="latency_ms"):
        centers_from_document(DOCUMENT | {"aco_network": DOCUMENT["aco_network"] | {"latency_ms": [[0.0]]}})
