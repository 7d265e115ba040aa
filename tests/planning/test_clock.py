"""One clock for one answer: who comes later gets what is left, and begins nothing once that is nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from polygon.domain import clock as clocks
from polygon.domain.clock import Clock
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning import exact, frontier, search_engine
from polygon.planning.exact import find_optimum
from polygon.planning.frontier import find_front
from polygon.planning.search_engine import Effort, find_in_rounds, find_plan
from tests.linked_regions import cluster_of, small_gpt

SMALL = Effort(fluid_evaluations=40, exact_evaluations=4, patience=20, polish_evaluations=4)


class Hands:
    """A clock that a test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def hands(monkeypatch):
    moved = Hands()
    monkeypatch.setattr(clocks, "perf_counter", moved)
    return moved


@pytest.fixture
def problem():
    """Two regions; small enough for every allocation."""
    cluster = cluster_of([[("a100-40gb", 1, 2)], [("t4", 1, 2)]])
    return Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=8, seq_len=128))


def test_a_part_is_kept_for_what_follows_but_no_more_than_it_may_take(hands):
    """A tenth of 20 s is 2 s; of an hour it is the most; once time is up nothing is left, and without limit all is."""
    short, long, endless = Clock(20.0), Clock(3600.0), Clock()
    hands.now_s += 5
    assert [short.spent_s, short.left_s(), short.left_s(0.5)] == [5, 15, 5]
    assert [short.before_s(0.1, 15), long.before_s(0.1, 15)] == [13, 3580]
    hands.now_s += 14
    assert short.before_s(0.1, 15) == 0 < short.left_s()
    assert endless.left_s() == endless.left_s(0.2) == endless.before_s(0.1, 15) == math.inf


def noting(monkeypatch, hands, takes_s, module=frontier):
    """The limits of all searches from now on, each of which takes so long."""
    limits, find = [], module.find_plan

    def search(*args, effort, **more):
        limits.append(effort.time_limit_s)
        hands.now_s += takes_s
        return find(*args, effort=replace(effort, time_limit_s=math.inf), **more)

    monkeypatch.setattr(module, "find_plan", search)
    return limits


def test_searches_along_a_front_end_when_the_limit_of_all_is_over(problem, hands, monkeypatch):
    """Each that takes longer than its share leaves less for the others; the first makes a plan whatever it takes."""
    limits = noting(monkeypatch, hands, 7.0)
    points, _ = find_front(problem, 0, effort=replace(SMALL, time_limit_s=10.0))
    assert points and len(limits) == 2 and limits[1] < 2.0 < limits[0]
    limits.clear()
    points, _ = find_front(problem, 0, effort=replace(SMALL, time_limit_s=1.0))
    assert points and len(limits) == 1


def test_a_front_without_time_for_more_has_the_plans_that_searches_ended_with(problem, hands, monkeypatch):
    """What none ended with would have to be decoded first."""
    noting(monkeypatch, hands, 50.0)

    class Waiting(frontier.Decoder):
        def decode(self, *args, **more):
            pytest.fail("decoded after the time was up")

    monkeypatch.setattr(frontier, "Decoder", Waiting)
    points, met = find_front(problem, 0, effort=replace(SMALL, time_limit_s=1.0))
    assert len(points) == 1 == len(met.plans)


def test_a_proof_gets_what_the_search_before_it_left(problem, hands, monkeypatch):
    """Not the whole limit once more: of 10 s the search took 8; where it took all, nothing is proved."""
    noting(monkeypatch, hands, 8.0, module=exact)
    given, limit = [], exact.TimeLimit
    monkeypatch.setattr(exact, "TimeLimit", lambda limit_s: given.append(limit_s) or limit(math.inf))
    found = find_optimum(problem, np.random.default_rng(0), effort=replace(SMALL, time_limit_s=10.0))
    assert found.plan is not None and given == [2.0]


def test_nothing_is_polished_once_time_is_up(problem, hands, monkeypatch):
    """A plan is made however late; what only betters it is left."""

    class Late(search_engine.ExactCandidates):
        def evaluate(self, x):
            hands.now_s += 100
            return super().evaluate(x)

    monkeypatch.setattr(search_engine, "ExactCandidates", Late)
    monkeypatch.setattr(search_engine, "_polish", lambda *args: pytest.fail("polished after the time was up"))
    found = find_plan(problem, np.random.default_rng(0), effort=replace(SMALL, time_limit_s=10.0))
    assert found.plan is not None and found.seconds >= 100


def test_rounds_share_one_limit(hands):
    """A round begins while something is left, with that."""
    limits = []

    def search(index, effort, tell):
        limits.append(effort.time_limit_s)
        hands.now_s += 4
        return search_engine.Found(plan=None, value_s=math.inf, seconds=4.0)

    find_in_rounds(search, replace(SMALL, rounds=5, time_limit_s=10.0), None)
    assert limits == [10, 6, 2]


def test_the_gentler_search_leaves_the_other_what_is_left(problem, hands, monkeypatch):
    """Local steps may be taken: the search without them has half of the limit, and what it does not use is not lost."""
    may = replace(problem, constraints=replace(problem.constraints, local_steps=(1, 8)))
    limits, found = [], search_engine._found

    def noted(of, rng, effort, *args, **more):
        if more.get("in_parts", True):
            limits.append(effort.time_limit_s)
            hands.now_s += 1
        return found(of, rng, replace(effort, time_limit_s=math.inf), *args, **more)

    monkeypatch.setattr(search_engine, "_found", noted)
    assert find_plan(may, np.random.default_rng(0), effort=replace(SMALL, time_limit_s=10.0)).plan is not None
    assert limits == [5.0, 9.0]
