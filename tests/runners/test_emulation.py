"""Emulated devices: work lasts as long as the plan's device needs, and computes the same."""

import time

import pytest
from polygon_comm.shaped import VirtualClock

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from runners.engine.emulation import Pace, backward_shares, least_seconds
from runners.engine.options import Options
from tests.real_ranks import run_ranks
from tests.runners.test_training import run_rank
from tests.small_problems import routed_problem


def paced(least_s, shares=None):
    """A pace, and the clock that it goes by: only work and waits move it."""
    clock = VirtualClock()
    return Pace(least_s, shares, clock), clock


def hold(pace, clock, name, work_s):
    """When work of so many seconds begins and ends, from when it is asked for."""
    asked_s = clock.now_s()
    with pace.hold(name):
        began_s = clock.now_s()
        clock.advance(work_s)
    return pytest.approx(began_s - asked_s), pytest.approx(clock.now_s() - asked_s)


def test_work_lasts_as_long_as_its_kind():
    """Two pieces of work of 40 ms each, however little is done; what takes longer does, other names are not held up."""
    pace, clock = paced({"F": 0.04, "u": 0.01})
    assert hold(pace, clock, "F3", 0.0)[1] == 0.04
    assert hold(pace, clock, "F3", 0.0)[1] == 0.04
    assert hold(pace, clock, "u", 0.03) == (0.0, 0.03)
    assert hold(pace, clock, "B3", 0.01) == (0.0, 0.01)


def test_work_comes_late_in_its_time():
    """From the second time on the wait is before the work, by 1.1 times what that took the last time."""
    pace, clock = paced({"B": 0.05})
    assert hold(pace, clock, "B0", 0.01) == (0.0, 0.05)
    assert hold(pace, clock, "B0", 0.02) == (0.05 - 1.1 * 0.01, 0.05 - 1.1 * 0.01 + 0.02)
    assert hold(pace, clock, "B0", 0.0) == (0.05 - 1.1 * 0.02, 0.05)


def test_gradients_come_as_backward_reaches_their_layers():
    """A backward of 60 ms whose layers take a third and two thirds of it hands them over after 20 and 60 ms."""
    pace, clock = paced({"B": 0.06}, {"B": [1 / 3, 1.0]})
    for _ in range(2):
        began_s = clock.now_s()
        pace.reach(0)  # outside of backward nothing is waited for
        assert clock.now_s() == began_s
        with pace.hold("B0"):
            assert clock.now_s() == began_s
            pace.reach(0)
            assert clock.now_s() - began_s == pytest.approx(0.02)
            pace.reach(1)
            assert clock.now_s() - began_s == pytest.approx(0.06)
            pace.reach(2)  # beyond the stage's layers
        assert clock.now_s() - began_s == pytest.approx(0.06)


def test_a_pace_without_a_clock_goes_by_the_machine_s():
    """Which is never early."""
    began_s = time.monotonic()
    with Pace({"F": 0.01}).hold("F0"):
        pass
    assert time.monotonic() - began_s >= 0.01


def test_shares_follow_the_layers_of_the_stage():
    """Ascending to 1, one for each layer of the rank's stage."""
    problem, plan = routed_problem(4)
    for rank, (stage, _, _) in plan.rank_places.items():
        shares = backward_shares(problem, plan, rank)
        assert len(shares) == plan.stages[stage].last_layer - plan.stages[stage].first_layer
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] == 1.0


def test_lengths_are_the_estimate_s():
    """Every rank's forward and backward last what the estimate says, times the factor."""
    problem, plan = routed_problem(4)
    times = step_times(plan, CostTables(problem))
    for rank, (stage, worker, _) in plan.rank_places.items():
        place = int(times.place.offset[stage]) + worker
        seconds = least_seconds(problem, plan, rank, 3.0)
        assert seconds["F"] == pytest.approx(3 * times.schedule.forward_s[place])
        assert seconds["B"] == pytest.approx(3 * times.schedule.backward_s[place])
        assert seconds["u"] == pytest.approx(3 * times.update_s[place])


def test_losses_stay():
    """The same losses, bit by bit."""
    problem, plan = routed_problem(2)
    plain, slow = (run_ranks(run_rank, 2, problem, plan, Options(steps=2, emulate_devices=f)) for f in (0.0, 5.0))
    assert plain == slow
