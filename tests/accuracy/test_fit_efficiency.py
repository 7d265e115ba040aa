"""The fit of the operator model's coefficients moves what it says it fits."""

import pytest

from benchmarks.fit_efficiency import START, apply, calibration_runs, stated, step_s


@pytest.mark.parametrize("coefficient", START)
def test_a_coefficient_of_the_fit_moves_a_run_that_it_is_fitted_to(coefficient):
    """A constant that went to another module would be left out in silence."""
    runs = sorted((run for run in calibration_runs() if run.batch.precision != "fp8"), key=lambda run: run.step_s)
    some, in_use = runs[::8], stated()
    before = [step_s(run) for run in some]
    try:
        apply({coefficient: 0.8 * in_use[coefficient]})
        after = [step_s(run) for run in some]
    finally:
        apply(in_use)
    assert max(abs(b / a - 1) for a, b in zip(before, after, strict=True)) > 1e-3
    assert [step_s(run) for run in some] == before
