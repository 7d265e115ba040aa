"""Laws of holding a predicted timeline against measured ones."""

import json

import pytest

from polygon.commands.compare import main
from polygon.cost.calibration import Calibration
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.export.chrome_trace import chrome_trace
from polygon.export.measured import compare, intervals_of
from polygon.export.predicted import predicted_intervals
from polygon.formats.files import write_json, write_plan
from tests.small_problems import routed_problem


@pytest.fixture(scope="module")
def predicted():
    """One predicted step of a plan of eight ranks."""
    problem, plan = routed_problem(8)
    return predicted_intervals(step_times(plan, CostTables(problem)))


def stretched(intervals, factor, steps):
    """The same timeline, slower, several times one after the other."""
    end_s = max(i.end_s for i in intervals) * factor
    return [
        i._replace(
            start_s=100 + step * end_s + factor * i.start_s, end_s=100 + step * end_s + factor * i.end_s, step=step
        )
        for step in range(steps)
        for i in intervals
    ]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_stretched_timeline_differs_by_the_factor(predicted, factor):
    """Everything takes `factor` times as long; unstretched, nothing differs. Holds after writing and reading too."""
    trace = json.loads(json.dumps(chrome_trace(stretched(predicted, factor, 3), {}, {})))
    result = compare(predicted, intervals_of(trace, "trace"))
    assert result.steps == 2
    assert result.measured_step_s == pytest.approx(factor * result.predicted_step_s, rel=1e-5)
    assert result.error == pytest.approx(1 / factor - 1, abs=1e-5)
    for row in result.differences:
        assert row.measured_s == pytest.approx(factor * row.predicted_s, rel=1e-4, abs=1e-7)


def test_the_largest_difference_comes_first(predicted):
    """One slow worker is found."""
    slow = [
        i._replace(end_s=i.end_s + 1.0) if (i.stage, i.worker, i.name) == (1, 2, "B2") else i
        for i in stretched(predicted, 1.0, 1)
    ]
    top = next(row for row in compare(predicted, slow).differences if row.what != "waiting")
    assert (top.stage, top.worker, top.what) == (1, 2, "backward")
    assert top.excess_s == pytest.approx(1.0)


def test_a_trace_of_another_plan_is_refused(predicted):
    """The message says what is expected."""
    other = [i for i in predicted if i.name != "B3"]
    with pytest.raises(InputError, match="expected a trace of this plan"):
        compare(predicted, other)
    with pytest.raises(InputError, match="traceEvents"):
        intervals_of({"traceEvents": 3}, "x.json")


def test_a_trace_given_twice_is_refused(predicted):
    """It would be said that everything took twice as long."""
    measured = stretched(predicted, 1.0, 2)
    with pytest.raises(InputError, match="each once"):
        compare(predicted, [*measured, *measured])


@pytest.mark.parametrize(("key", "value"), [("dur", float("nan")), ("dur", -1.0), ("ts", float("inf")), ("dur", 1e999)])
def test_times_that_are_none_are_refused(predicted, key, value):
    """A trace with them is not the runner's."""
    trace = chrome_trace(stretched(predicted, 1.0, 1), {}, {})
    next(event for event in trace["traceEvents"] if event["ph"] == "X")[key] = value
    with pytest.raises(InputError, match=f"trace: traceEvents: .*{key} {value}"):
        intervals_of(trace, "trace")


def test_command_prints_both_and_writes_them_side_by_side(predicted, tmp_path, capsys):
    """Predicted stages have even process numbers, measured ones odd."""
    problem, plan = routed_problem(8)
    write_plan(tmp_path / "plan.json", problem, plan)
    (tmp_path / "trace.json").write_text(json.dumps(chrome_trace(stretched(predicted, 2.0, 2), {}, {0: "stage 0"})))
    arguments = [str(tmp_path / "plan.json"), str(tmp_path / "trace.json"), "-o", str(tmp_path / "both.json")]
    assert main([*arguments, "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == pytest.approx(-0.5, abs=1e-4)
    assert len(found["differences"]) == 3
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["ph"] == "X"} == set(range(6))


def test_a_calibration_is_heeded(predicted, tmp_path, capsys):
    """With compute, optimizer and communication twice as slow, a run twice as slow is nearly as predicted."""
    problem, plan = routed_problem(8)
    write_plan(tmp_path / "plan.json", problem, plan)
    (tmp_path / "trace.json").write_text(json.dumps(chrome_trace(stretched(predicted, 2.0, 2), {}, {0: "stage 0"})))
    devices = {pool.device.name: 2.0 for pool in problem.cluster.pools}
    twice = Calibration(compute=devices, update=devices, communication=2.0)
    write_json(tmp_path / "factors.json", twice.to_dict())
    arguments = [str(tmp_path / "plan.json"), str(tmp_path / "trace.json"), "--json"]
    assert main([*arguments, "--calibration", str(tmp_path / "factors.json")]) == 0
    assert json.loads(capsys.readouterr().out)["error"] == pytest.approx(0, abs=0.1)
