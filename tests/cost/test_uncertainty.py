"""How wide the interval of a step is: every term by its share of the step, taken as independent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from polygon.cost.uncertainty import Known, compute_error, errors, group_of_run, interval, log_half_width, quantiles
from polygon.formats import catalogue
from tests.small_problems import routed_problem

KNOWN = Known(group="nobody's", runtime="unheard of", measured=0.2, near=0.0, far=0.0, program=0.0)


def test_a_measured_device_errs_by_the_share_that_it_computes():
    """A quarter of the step computes (0.2), a quarter sums inside regions (0.35), half sends between them (0.12)."""
    assert log_half_width(KNOWN) == pytest.approx(0.2)
    spread = replace(KNOWN, near=0.25, far=0.5)
    assert log_half_width(spread) == pytest.approx(math.sqrt(0.05**2 + 0.0875**2 + 0.06**2))
    assert log_half_width(replace(spread, program=0.3)) == pytest.approx(math.hypot(0.05, 0.0875, 0.06, 0.3))
    assert log_half_width(replace(KNOWN, near=0.4, far=0.8)) == pytest.approx(math.hypot(0.14, 0.096))


def test_an_unmeasured_device_errs_by_its_group():
    """Whole runs were measured, links inside regions included: only what goes between regions has an error by itself.
    A group without runs has the worst error of all."""
    unmeasured, worst = replace(KNOWN, measured=None), errors()["unknown"]
    assert compute_error("nobody's") == worst
    assert log_half_width(replace(unmeasured, near=0.25)) == pytest.approx(worst)
    both = replace(unmeasured, near=0.25, far=0.5, program=0.1, host=0.05)
    assert log_half_width(both) == pytest.approx(math.hypot(0.5 * worst, 0.06, 0.1, 0.05))


def test_devices_err_as_the_least_known_of_their_architectures():
    """Of A100 and RTX 4090 as the latter; one of no known architecture as others do."""
    problem, plan = routed_problem(2)
    device = catalogue.device
    assert compute_error("ada") > compute_error("ampere")
    for names, group in ((["a100-40gb"], "ampere"), (["a100-40gb", "rtx-4090"], "ada")):
        assert group_of_run(problem.model, plan, map(device, names)) == group
    unknown = replace(device("a100-40gb"), name="mine", architecture="")
    assert group_of_run(problem.model, plan, [unknown]) == "other"


def test_a_program_that_was_measured_on_the_device_is_known():
    """Its runs say how far it is off: not knowing it adds nothing, as it does to runs of another on the same device."""
    measured = next(name for name in errors()["groups"] if "/" in name)
    group, runtime = measured.split("/")
    own = Known(group=group, runtime=runtime, measured=None, near=0.0, far=0.0, program=0.5)
    assert log_half_width(own) == pytest.approx(compute_error(group, runtime))
    other = log_half_width(replace(own, runtime="unheard of"))
    assert other == pytest.approx(math.hypot(compute_error(group), 0.5))


def test_the_interval_is_as_wide_both_ways():
    """In the logarithm: a tenth of it below the step, a tenth of it above."""
    low_s, high_s = interval(3.0, replace(KNOWN, measured=0.1))
    assert (math.log(3.0 / low_s), math.log(high_s / 3.0)) == pytest.approx((0.1, 0.1))


def test_the_run_that_sets_a_quantile_stays_inside():
    """The last of few scores is their quantile, and no rounding puts it out."""
    scores = [0.01] * 11 + [0.70731]
    found = quantiles({"ada/mine": scores})["groups"]["ada/mine"]["error"]
    assert 0.70731 <= found < 0.7085
