"""What local updates would bring to plans that meet in every step."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.errors import OutOfTimeError
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.local_updates import LEAST_GAIN, TRIES, local_updates
from polygon.planning.search_engine import Effort, find_plan
from tests.linked_regions import cluster_of, small_gpt

FAST = Effort(fluid_evaluations=300, exact_evaluations=12, patience=150, polish_evaluations=20)


def problem_of(bytes_per_s, latency_s=0.02, **limits):
    """Four A100 in each of two regions."""
    groups, inside = [[("a100-40gb", 1, 4)]] * 2, Link(latency_s=5e-6, bytes_per_s=3e11)
    card = Link(latency_s=5e-5, bytes_per_s=max(1e9, bytes_per_s))
    cluster = cluster_of(groups, latency_s=latency_s, bytes_per_s=bytes_per_s, between=card, inside=inside)
    batch = Batch(global_batch=64, seq_len=512)
    return Problem(cluster=cluster, model=small_gpt(), batch=batch, constraints=Constraints(**limits))


def found_in(problem):
    """The plan of a short search."""
    return find_plan(problem, np.random.default_rng(0), effort=FAST).plan


def test_slow_links_name_what_local_steps_bring_and_the_evidence():
    """Over 100 MB/s two regions do more apart; a plan found with these steps does about what was said."""
    problem = problem_of(1e8)
    plan = found_in(problem)
    gain = local_updates(problem, plan, CostTables(problem))
    assert gain is not None and gain.times > LEAST_GAIN and gain.local_steps > 1
    assert "local steps" in str(gain.evidence) and "arXiv" in str(gain.evidence)
    allowed = replace(problem, constraints=Constraints(local_steps=(1, gain.local_steps)))
    found = find_plan(allowed, np.random.default_rng(0), effort=FAST)
    assert violations(allowed, found.plan) == []
    assert found.value_s <= gain.step_s * 1.25


def test_nothing_is_said_where_links_are_fast_or_local_steps_were_asked_about():
    """Over 1 TB/s next door they bring little; a list of local steps, with or without any, is the user's word."""
    fast = problem_of(1e12, 1e-5)
    assert local_updates(fast, found_in(fast), CostTables(fast)) is None
    for steps in ((1,), (1, 30)):
        listed = problem_of(1e8, local_steps=steps)
        assert local_updates(listed, found_in(listed), CostTables(listed)) is None


def test_few_plans_are_priced_whatever_the_cluster(monkeypatch):
    """Of all starts the best few are decoded, each once: a search has found the plan, this says what else there is."""
    problem, decoded = problem_of(1e8), []
    plan, tables = found_in(problem), CostTables(problem)
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, x, **how: decoded.append(x) or decode(self, x, **how))
    valued = []
    fluid_s = Decoder.fluid_s
    monkeypatch.setattr(Decoder, "fluid_s", lambda self, x: valued.append(x) or fluid_s(self, x))
    assert local_updates(problem, plan, tables) is not None
    assert len(decoded) == TRIES < len(valued)


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_where_time_ends_before_it_is_known_that_is_an_error_of_its_own(looks):
    """Not None, which says that they bring nothing; where they cannot be asked about no time is needed."""
    problem, left = problem_of(1e8), iter([1.0] * looks)
    plan = found_in(problem)
    with pytest.raises(OutOfTimeError):
        local_updates(problem, plan, CostTables(problem), lambda: next(left, 0.0))
    listed = problem_of(1e8, local_steps=(1,))
    assert local_updates(listed, plan, CostTables(listed), lambda: 0.0) is None
