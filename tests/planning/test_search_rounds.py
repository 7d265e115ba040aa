"""Searches side by side in processes: what one after another finds, whatever becomes of the processes."""

import math
import multiprocessing
import os
import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from polygon import Batch, Calibration, Cluster, InputError, Problem
from polygon.domain import plan as domain_plan
from polygon.domain.message import Message
from polygon.planning import rounds
from polygon.planning.frontier import _FrontRound, _Round
from polygon.planning.objectives import MONEY
from polygon.planning.rounds import FOUND, _Helper, _Rounds, in_rounds
from polygon.planning.search_engine import Effort
from tests.linked_regions import cluster_of, small_gpt

PHASE = Message("phase.starts")
FIVE = Effort(rounds=5)
SHORT = Effort(fluid_evaluations=60, exact_evaluations=6, patience=30, polish_evaluations=6)


@dataclass(frozen=True)
class Made:
    index: int
    interrupted: bool = False


GO = set()
"""Numbers of the rounds that may end in this process."""


def here():
    return multiprocessing.parent_process() is None


def number(index, effort, tell):
    """Every round finds its number; here not before it may."""
    tell(PHASE, 0.5, 10.0 - index)
    while here() and index not in GO:
        tell(PHASE, 0.5, 10.0 - index)
    return Made(index)


def ends_elsewhere(index, effort, tell):
    """The process is lost, unless it is the one that asked."""
    if not here():
        os._exit(7)
    return number(index, effort, tell)


def fails_elsewhere(index, effort, tell):
    """Raises, unless in the process that asked."""
    if not here():
        raise ArithmeticError(f"round {index}")
    return number(index, effort, tell)


def goes_on_elsewhere(index, effort, tell):
    """Ends when it is told to, unless in the process that asked; there also when it may."""
    try:
        while not here():
            tell(PHASE, 0.5, 10.0 - index)
        return number(index, effort, tell)
    except KeyboardInterrupt:
        return Made(index, interrupted=True)


@pytest.fixture(autouse=True)
def nothing_may_end_yet(monkeypatch):
    """And every search takes long enough for help; who interrupts waits for what others have."""
    GO.clear()
    monkeypatch.setattr(rounds, "WORTH_S", 0.0)
    monkeypatch.setattr(rounds, "OTHERS_S", math.inf)


def never(made):
    return False


@pytest.mark.parametrize("jobs", [1, 3])
def test_all_rounds_are_made_and_come_in_order(jobs):
    """However many make them; what is told grows to the whole."""
    told = []

    def tell(phase, part, best):
        told.append((phase, part))
        if jobs == 1 or best == 6.0:  # else all rounds but the first are made elsewhere
            GO.update(range(5))

    made, interrupted = in_rounds(number, FIVE, tell, never, jobs)
    assert [of.index for of in made] == [0, 1, 2, 3, 4] and not interrupted
    parts = [part for _, part in told]
    assert parts == sorted(parts) and parts[0] > 0 and parts[-1] <= 1
    assert told[0][0] == Message("phase.round", round=1, phase=PHASE)


def test_a_round_is_not_lost_with_its_process(caplog):
    """It is made here, and the end is said."""

    def tell(phase, part, best):
        if caplog.records:
            GO.update(range(5))

    made, interrupted = in_rounds(ends_elsewhere, FIVE, tell, never, 2)
    assert [of.index for of in made] == [0, 1, 2, 3, 4] and not interrupted
    assert "has ended by itself (7)" in caplog.text


def test_a_process_is_lost_once(monkeypatch):
    """One is to be told to end by what another has found, and has ended by itself."""

    class Line:
        def __init__(self, *says):
            self.says = list(says)

        def recv(self):
            if not self.says:
                raise EOFError
            return self.says.pop(0)

        def send(self, asked):
            raise BrokenPipeError

        def close(self):
            self.says.clear()

    process = SimpleNamespace(join=lambda: None, terminate=lambda: None, exitcode=-9)
    made = _Rounds(number, FIVE, None, lambda made: True)
    made._left = [3, 4]
    made._helpers = [_Helper(process, Line((FOUND, Made(1))), index=1), _Helper(process, Line(), index=2)]
    monkeypatch.setattr("multiprocessing.connection.wait", lambda lines, seconds: lines)
    made._answer(0.0)
    assert made._found == {1: Made(1)} and made._left == [2, 3, 4]
    assert [helper.index for helper in made._helpers] == [None] and made._begun() is None


def test_a_search_that_is_soon_over_gets_no_help(monkeypatch):
    """What a process takes to begin would be lost; also where there is no time for more."""
    GO.update(range(5))
    monkeypatch.setattr(rounds, "_started", lambda search: pytest.fail("a process was started"))
    monkeypatch.setattr(rounds, "WORTH_S", 1e9)
    assert len(in_rounds(number, FIVE, None, never, 3)[0]) == 5
    monkeypatch.setattr(rounds, "WORTH_S", 10.0)
    assert len(in_rounds(number, replace(FIVE, time_limit_s=9.0), None, never, 3)[0]) == 5


def test_a_process_that_may_start_none_searches_alone(monkeypatch):
    """One of a pool's."""
    GO.update(range(5))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    made, interrupted = in_rounds(number, FIVE, lambda *of: None, never, 3)
    assert [of.index for of in made] == [0, 1, 2, 3, 4] and not interrupted


@pytest.mark.parametrize(("jobs", "cores", "started"), [(-1, 4, 3), (-1, 1, 0), (-1, 64, 4), (2, 64, 1)])
def test_one_process_a_core_unless_it_is_said(monkeypatch, jobs, cores, started):
    """And none for a round that another makes; a process that is lost is not started again."""
    lines = []

    def start(search):
        lines.append(Mock())
        return _Helper(Mock(exitcode=1), lines[-1])

    monkeypatch.setattr(rounds, "_started", start)
    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    monkeypatch.setattr("multiprocessing.connection.wait", lambda lines, seconds: [])
    of = _Rounds(number, FIVE, None, never, jobs)
    of._begun()
    with of:
        of._hear(0, PHASE, 0.5, 1.0)
        assert len(lines) == started
        for helper in [*of._helpers]:
            of._lose(helper)
        of._get_help()
        assert len(lines) == started


def test_what_goes_wrong_elsewhere_is_raised_here():
    """As it would be without other processes."""
    with pytest.raises(ArithmeticError, match="round 1"):
        in_rounds(fails_elsewhere, FIVE, lambda *of: None, never, 2)


def test_rounds_after_one_that_is_enough_are_left():
    """Those that have begun elsewhere are ended, and do not count."""

    def tell(phase, part, best):
        if best == 9.0:  # the second is under way
            GO.add(0)

    made, interrupted = in_rounds(goes_on_elsewhere, FIVE, tell, lambda made: made.index == 0, 2)
    assert made == [Made(0)] and not interrupted


def test_a_round_here_is_ended_where_one_before_it_is_enough():
    """It does not wait for its own end."""

    def tell(phase, part, best):
        if best == 9.0:
            GO.add(0)

    made, interrupted = in_rounds(number, FIVE, tell, lambda made: made.index == 1, 2)
    assert made == [Made(0), Made(1)] and not interrupted


def test_an_interrupt_ends_all_rounds_with_what_they_have():
    """Also those elsewhere, and no other begins."""

    def tell(phase, part, best):
        if best == 9.0:
            raise KeyboardInterrupt

    made, interrupted = in_rounds(goes_on_elsewhere, FIVE, tell, never, 2)
    assert interrupted and made == [Made(0, interrupted=True), Made(1, interrupted=True)]


def test_who_interrupts_does_not_wait_for_ever(monkeypatch):
    """For another process that is in the middle of something, where there is a plan already."""
    monkeypatch.setattr(rounds, "OTHERS_S", 0.0)

    def tell(phase, part, best):
        if best == 9.0:  # the second is under way
            raise KeyboardInterrupt

    made, interrupted = in_rounds(goes_on_elsewhere, FIVE, tell, never, 2)
    assert interrupted and made == [Made(0, interrupted=True)]


def test_an_interrupt_before_anything_is_found_is_one():
    """There is nothing to keep."""

    def tell(*of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_rounds(number, FIVE, tell, never, 1)


def small_problem(**measured):
    """Two types of devices in a region."""
    nodes = [{"device": "a100-40gb", "count": 1, "devices_per_node": 2}, {"device": "t4", "count": 1}]
    cluster = Cluster.from_dict({"regions": [{"name": "here", "nodes": nodes}]})
    return Problem(cluster, "opt-350m", Batch(global_batch=8, seq_len=512), **measured)


def figures(bills):
    """What bills say."""
    return [(bill.step_s, bill.usd, bill.energy_j) for bill in bills]


def same(one, other):
    """Whether two plans are the same."""
    return one.stages == other.stages and np.array_equal(one.routes, other.routes) and one.spans == other.spans


def test_a_search_finds_the_same_wherever_it_travels():
    """Also with what the problem was measured with, and by another objective than time."""
    twice = small_problem(calibration=Calibration(compute={"a100-40gb": 2.0, "t4": 2.0}))
    search = _Round(twice.data, 3, MONEY, None, twice.tables)
    here, there = (of(1, SHORT, None) for of in (search, pickle.loads(pickle.dumps(search))))
    assert same(here.plan, there.plan) and here.value_s == there.value_s and here.evaluations == there.evaluations
    plain = small_problem()
    assert _Round(plain.data, 3, MONEY, None, plain.tables)(1, SHORT, None).value_s < here.value_s


def test_more_jobs_find_the_plan_that_one_finds():
    """As the search is asked for."""
    one, two = (small_problem().search(effort=replace(SHORT, rounds=3), jobs=jobs) for jobs in (1, 2))
    assert one.plan is not None and one.evaluations == two.evaluations > 0
    assert same(one.plan.data, two.plan.data) and two.estimate.step_s == one.estimate.step_s


def test_searches_along_a_front_find_the_same_wherever_they_travel():
    """All plans and what they cost, those within budgets too; also with what the problem was measured with."""
    four = domain_plan.Problem(
        cluster=cluster_of([[("a100-40gb", 4, 1)]]), model=small_gpt(), batch=Batch(global_batch=64, seq_len=512)
    )
    twice = Problem.of(four, calibration=Calibration(compute={"a100-40gb": 2.0, "t4": 2.0}))
    met = []
    search = _FrontRound(twice.data, 3, True, None, twice.tables, lambda bill, plan: met.append(bill))
    here, there = (of(1, SHORT, None) for of in (search, pickle.loads(pickle.dumps(search))))
    ended = [figures(bill for bill, _ in of.plans) for of in (here, there)]
    assert ended[0] == ended[1] == figures(met) and 3 < len(met) <= 6
    assert all(same(one[1], other[1]) for one, other in zip(here.plans, there.plans, strict=True))
    assert figures(bill for bill, _ in here.bills) == figures(bill for bill, _ in there.bills)


def test_more_jobs_find_the_front_that_one_finds():
    """As it is asked for."""
    one, two = (small_problem().front(effort=replace(SHORT, rounds=2), jobs=jobs) for jobs in (1, 2))
    assert one.plans and figures(one.bills) == figures(two.bills) and one.evaluations == two.evaluations
    assert all(same(a.data, b.data) for a, b in zip(one.plans, two.plans, strict=True))
    with pytest.raises(InputError, match=r"^jobs: found 0, expected"):
        small_problem().front(jobs=0)


@pytest.mark.parametrize("wrong", [{"jobs": 0}, {"jobs": 1.5}, {"jobs": 2, "method": "grid3d"}])
def test_what_is_no_number_of_processes_is_refused(wrong):
    """In one line, before anything is searched."""
    with pytest.raises(InputError, match=r"^jobs: found .*expected"):
        small_problem().search(**wrong)
