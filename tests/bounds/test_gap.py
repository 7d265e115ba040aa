"""Laws of an estimate beside its bound: same numbers wherever they are written, and the cost model knows none of it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from polygon.bounds.gap import Bounds, estimate_data
from polygon.commands import evaluate
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.formats import files
from tests.exported_plans import planned

KEYS = ("lower_bound_s", "lower_bounds_s", "bound_by", "gap", "least_usd", "least_energy_j")


def test_a_gap_is_the_part_by_which_a_step_is_above_its_bound(tmp_path, capsys):
    """lower_bound_s (1 + gap) = step_s, in the data of an estimate and in what `polygon evaluate --json` prints."""
    problem, plan = planned()
    tables = CostTables(problem)
    data = estimate_data(estimate(problem, plan, tables), Bounds.of(tables))
    assert data["lower_bound_s"] * (1 + data["gap"]) == pytest.approx(data["step_s"])
    assert data["gap"] >= -1e-9
    assert np.isclose(data["lower_bounds_s"][data["bound_by"]], data["lower_bound_s"], rtol=2e-3)
    files.write_plan(tmp_path / "plan.json", problem, plan, data)
    assert evaluate.main([str(tmp_path / "plan.json"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [printed[key] for key in KEYS] == [data[key] for key in KEYS]


def test_an_estimate_is_made_without_a_bound():
    """Who prices plans does not pay for bounds: the module is not even imported."""
    program = "import sys, polygon.cost.estimate; print([m for m in sys.modules if m.startswith('polygon.bounds')])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
