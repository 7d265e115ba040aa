"""The best uniform splits as starts: what the grid finds, and what no search returns worse than."""

import math
from dataclasses import replace

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


def starts_of(problem, most_rows=10_000, seconds_left=lambda: math.inf, known=math.inf):
    decoder, stages = Decoder(problem), most_stages(problem)
    return uniform_starts(decoder, stages, most_rows=most_rows, seconds_left=seconds_left, known=known)


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


def wide(*groups):
    """Few sequences of a deep model, so that a pipeline is short of work."""
    model = small_gpt(blocks=24, hidden_size=4096, ffn_size=16384, head_dim=256)
    return Problem(cluster=cluster_of((list(groups),)), model=model, batch=Batch(global_batch=4, seq_len=512))


def test_where_devices_differ_a_pool_alone_in_chunks_is_a_start():
    """The search is no slower than the grid of the fastest devices, though no allocation says it is interleaved."""
    mixed, fast = wide(("t4", 1, 4), ("a100-40gb", 1, 4)), wide(("a100-40gb", 1, 4))
    grid = find_grid_plan(fast, options=EVERYTHING, tries=4, jobs=1)
    starts = starts_of(mixed)
    assert starts[0][1].chunks > 1
    for value, plan, x in starts:
        assert violations(mixed, plan) == []
        assert value == pytest.approx(Decoder(mixed).plan_value(plan))
        assert {pool for pool, _ in np.array(Decoder(mixed).classes)[x.workers.any(axis=0)]} == {1}
    found = find_plan(mixed, np.random.default_rng(0), effort=FAST)
    assert found.value_s <= grid.value_s * (1 + 1e-6)
    assert found.plan is not None and found.plan.chunks > 1


def test_what_cannot_be_the_best_is_not_looked_at():
    """Pools whose devices are too slow, whatever their split, and of the others what does not come near the known."""
    mixed = wide(("t4", 1, 4), ("a100-40gb", 1, 4))
    best = starts_of(mixed)[0][0]
    assert [value for value, *_ in starts_of(mixed, known=best)][:1] == [best]
    assert starts_of(mixed, known=best / 10) == []


def test_what_may_not_be_is_no_start():
    """Constraints hold; no time, no starts."""
    assert all(len(plan.stages) <= 2 for _, plan, _ in starts_of(equal(most_stages=2)))
    assert starts_of(equal(), seconds_left=lambda: 0.0) == []
    mixed = wide(("t4", 1, 4), ("a100-40gb", 1, 4))
    assert starts_of(replace(mixed, constraints=Constraints(forbidden_devices=("a100-40gb",)))) == []


def test_few_rows_are_the_likely_ones():
    """Those that compute the shortest come first."""
    some, all_of_them = starts_of(equal(), most_rows=60), starts_of(equal())
    assert all_of_them[0][0] <= some[0][0] <= 1.1 * all_of_them[0][0]
