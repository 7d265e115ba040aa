"""Allocations that memory holds where no start is one."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.commands.generate import generate
from polygon.domain.clock import Clock
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.formats import catalogue
from polygon.planning import search_engine as engine
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder, most_stages
from polygon.planning.fitted_starts import Fitted, fitted, in_setting
from polygon.planning.fluid import NO_MEMORY
from polygon.planning.initial_solutions import simple_starts
from polygon.planning.search_engine import Effort, find_groups, find_plan
from solvers.stop import MaxEvaluations
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

FAST = Effort(fluid_evaluations=300, exact_evaluations=12, patience=150)
LONGER = Effort(fluid_evaluations=2_000, exact_evaluations=40, patience=500)
FULL = 54
"""Blocks of the deepest model that `four_regions` hold; 56 have no room there."""


def four_regions(blocks):
    """T4s and A100s of which pipelines have to use nearly all memory."""
    groups = [
        [("t4", 1, 1), ("a100-40gb", 1, 1)],
        [("t4", 1, 2)],
        [("a100-40gb", 1, 1), ("t4", 1, 1)],
        [("t4", 1, 1), ("a100-40gb", 1, 2)],
    ]
    model = small_gpt(blocks=blocks, hidden_size=4096, ffn_size=16384, head_dim=256)
    return Problem(cluster=cluster_of(groups), model=model, batch=Batch(global_batch=32, seq_len=1024))


def starts_of(decoder):
    rows = most_stages(decoder.problem)
    return [Allocation(workers=x, micro_batch_size=1) for x in simple_starts(decoder, rows, 1)]


@settings(max_examples=cases(10), deadline=None)
@given(blocks=st.integers(40, 60), seed=st.integers(0, 99))
def test_nothing_is_left_over_of_what_fits_and_something_of_what_does_not(blocks, seed):
    """Random allocations and steps from them: the count agrees with whether there is a step time."""
    decoder, rng = Decoder(four_regions(blocks)), np.random.default_rng(seed)
    candidates = Candidates(decoder, most_stages(decoder.problem))
    x = candidates.random(rng)
    for _ in range(20):
        (value, why), left = decoder.fluid_s(x), decoder.left_over(x)
        assert (left == 0) == math.isfinite(value)
        assert (0 < left < math.inf) == (why == NO_MEMORY)
        x = candidates.neighbour(x, rng)


def test_a_model_that_barely_fits_is_planned():
    """No start holds it, a walk to fewer layers left over does; the plan breaks no rule. A stage for each of seven
    pools holds all that there is room for, and is more than may be."""
    problem = four_regions(52)
    problem = replace(problem, constraints=replace(problem.constraints, most_stages=6))
    decoder = Decoder(problem)
    assert min(decoder.left_over(x) for x in starts_of(decoder)) > 0
    found = find_plan(problem, np.random.default_rng(0), effort=FAST)
    assert isinstance(found.plan, Plan) and violations(problem, found.plan) == []


def test_a_model_that_does_not_fit_lacks_room_for_so_many_layers():
    """The reason says how far off the nearest arrangement is, of search and groups alike."""
    problem = four_regions(FULL + 4)
    found = find_plan(problem, np.random.default_rng(0), effort=FAST)
    groups, reason = find_groups(problem, np.random.default_rng(0), effort=FAST)
    assert found.plan is groups is None
    for said in (found.reason, reason):
        assert said.kind == "reason.left_over" and said["layers"] == problem.model.layers
        assert 0 < said["left"] <= 8 and said["ways"] >= 6_000


def test_groups_of_a_model_that_barely_fits_are_those_that_memory_holds():
    """Twelve devices in six regions, where nothing that ants try holds the model: what is handed over is searched."""
    cluster = generate(6, 2, 12, np.random.default_rng(21))
    problem = Problem(cluster=cluster, model=catalogue.model("llama2-13b"), batch=Batch(global_batch=128, seq_len=4096))
    groups, reason = find_groups(problem, np.random.default_rng(0), effort=FAST)
    assert reason.kind == "reason.barely_fits" and groups.solver == "walks"
    assert math.isfinite(groups.objective["step_s"])
    found = find_plan(problem, np.random.default_rng(0), groups=groups, effort=FAST)
    assert violations(problem, found.plan) == []


def test_larger_micro_batches_are_looked_for_where_no_start_holds_any():
    """Twice the micro-batch in the same stages has no room; in others it has, and the search knows of some."""
    decoder = Decoder(four_regions(FULL - 1))
    a_stage_each = len(decoder.problem.cluster.pools)
    starts = [x for x in starts_of(decoder) if len(x.stages) != a_stage_each and math.isfinite(decoder.value(x))]
    assert starts and min(decoder.left_over(x) for x in in_setting(starts, 2, (1, 1))) > 0
    candidates = Candidates(decoder, most_stages(decoder.problem))
    for x in starts:
        candidates.evaluate(x)
    made, nearest = engine._fit(candidates, [], np.random.default_rng(0), LONGER, Clock(math.inf))
    assert made > 0 and nearest is None
    assert {x.micro_batch_size for x in candidates.different} >= {1, 2}
    assert math.isfinite(decoder.value(next(x for x in candidates.different if x.micro_batch_size == 2)))


def test_an_interrupt_is_passed_on():
    """Whoever looks for something that fits can be stopped, too."""

    class Interrupting(MaxEvaluations):
        def reason(self, progress):
            if progress.evaluations > 20:
                raise KeyboardInterrupt
            return super().reason(progress)

    decoder = Decoder(four_regions(FULL + 4))
    with pytest.raises(KeyboardInterrupt):
        fitted(decoder, 8, starts_of(decoder), np.random.default_rng(0), Interrupting(1_000))


def test_every_degree_is_looked_at_where_the_first_holds_nothing(monkeypatch):
    """Experts spread over devices take less memory of each: what nothing holds otherwise is looked for with them."""
    asked = []

    def fails(decoder, stages, starts, rng, stop):
        asked.append((starts[0].cp, starts[0].ep))
        return Fitted(starts[0], 3.0, 10)

    monkeypatch.setattr(engine, "fitted", fails)
    decoder = Decoder(four_regions(FULL + 4))
    candidates = Candidates(decoder, most_stages(decoder.problem))
    candidates.degrees = ((1, 1), (2, 1), (1, 2))
    made, nearest = engine._fit(candidates, starts_of(decoder), np.random.default_rng(0), LONGER, Clock(math.inf))
    assert asked == [(1, 1), (2, 1), (1, 2)] and made == 30
    assert nearest.left_over == 3
