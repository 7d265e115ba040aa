"""Emulated devices: work lasts as long as the plan's device needs, and computes the same."""

import time

import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from runners.engine.emulation import Pace, backward_shares, least_seconds
from runners.engine.options import Options
from tests.patience import at_times
from tests.real_ranks import run_ranks
from tests.runners.test_training import run_rank
from tests.small_problems import routed_problem


def seconds_of(pace, name):
    """Time from asking until nothing begins, and until it ends."""
    start_s = time.monotonic()
    with pace.hold(name):
        began_s = time.monotonic()
    return began_s - start_s, time.monotonic() - start_s


def test_work_lasts_as_long_as_its_kind():
    """Two pieces of work of 40 ms each, however little is done; other names are not held up."""
    pace = Pace({"F": 0.04})
    start_s = time.monotonic()
    for _ in range(2):
        with pace.hold("F3"):
            pass
    assert time.monotonic() - start_s >= 0.08
    assert at_times(lambda: seconds_of(pace, "B3")[1] < 0.04)


def test_work_comes_late_in_its_time():
    """From the second time on the sleep is before the work, so what the work sets off comes as on a slow device."""
    pace = Pace({"B": 0.05})
    seconds_of(pace, "B0")
    assert at_times(lambda: seconds_of(pace, "B0")[0] > 0.025)


def test_gradients_come_as_backward_reaches_their_layers():
    """A backward of 60 ms whose layers take a third and two thirds of it hands them over after 20 and 60 ms."""
    pace = Pace({"B": 0.06}, [1 / 3, 1.0])
    pace.reach(0)  # outside of backward nothing is waited for
    start_s = time.monotonic()
    with pace.hold("B0"):
        pace.reach(0)
        assert time.monotonic() - start_s >= 0.02
        pace.reach(1)
        assert time.monotonic() - start_s >= 0.06
    assert at_times(lambda: seconds_of(pace, "B0")[0] < 0.06)


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
