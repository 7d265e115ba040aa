"""The best uniform splits as starts: what the grid finds, and what no search returns worse than."""

import math

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Plan, Problem
from polygon.grid3d.splits import EVERYTHING
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder, most_stages
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.search_engine import Effort, find_plan
from polygon.planning.uniform_starts import uniform_starts
from tests.linked_regions import cluster_of, small_gpt

FAST = Effort(fluid_evaluations=1_500, exact_evaluations=8, patience=100)


def equal(batch=24, seq_len=512, **constraints):
    """Two nodes of four, and a batch of many divisors."""
    cluster = cluster_of(([("a100-40gb", 2, 4)],))
    limits = Constraints(**constraints)
    return Problem(
        cluster=cluster, model=small_gpt(), batch=Batch(global_batch=batch, seq_len=seq_len), constraints=limits
    )


def starts_of(problem, most_rows=10_000, seconds_left=lambda: math.inf):
    return uniform_starts(Decoder(problem), most_stages(problem), most_rows=most_rows, seconds_left=seconds_left)


@pytest.mark.parametrize("problem", [equal(), equal(batch=4, seq_len=1024)], ids=["many sequences", "few sequences"])
def test_the_best_of_the_grid_is_found_and_the_search_is_no_slower(problem):
    """Two rounds find what all rows of the grid do; starts say what their plans do; the search takes the best."""
    starts = starts_of(problem)
    grid = find_grid_plan(problem, options=EVERYTHING, tries=4, jobs=1)
    assert starts[0][0] <= grid.value_s * (1 + 1e-6)
    assert [value for value, *_ in starts] == sorted(value for value, *_ in starts)
    for value, plan, x in starts:
        assert violations(problem, plan) == []
        assert value == pytest.approx(Decoder(problem).plan_value(plan))
        assert x.workers.sum() == sum(len(worker.devices) // worker.tp for worker in plan.workers)
        assert isinstance(Decoder(problem).decode(x), Plan)
    found = find_plan(problem, np.random.default_rng(0), effort=FAST)
    assert found.value_s <= grid.value_s * (1 + 1e-6)


def test_what_may_not_be_is_no_start():
    """Constraints hold; devices of several types have no uniform split; no time, no starts."""
    assert all(len(plan.stages) <= 2 for _, plan, _ in starts_of(equal(most_stages=2)))
    mixed = cluster_of(([("a100-40gb", 1, 4), ("t4", 1, 4)],))
    assert starts_of(Problem(cluster=mixed, model=small_gpt(), batch=Batch(global_batch=24, seq_len=512))) == []
    assert starts_of(equal(), seconds_left=lambda: 0.0) == []


def test_few_rows_are_always_the_same_ones():
    """A part of the configurations is drawn, but not anew."""
    some, again = ([value for value, *_ in starts_of(equal(), most_rows=60)] for _ in range(2))
    assert some == again and some
    assert some[0] >= starts_of(equal())[0][0] * (1 - 1e-12)
