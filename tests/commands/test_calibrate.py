"""Factors refitted to the logs of a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_problems import routed_problem, small_cluster

from polygon import calibrate as api_calibrate
from polygon import search
from polygon.accuracy import run_logs
from polygon.commands import calibrate, cli
from polygon.cost.calibration import Calibration, calibration
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.errors import InputError
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import files

TRUTH = Calibration(compute={"cpu": 1.4}, update={"cpu": 3.0}, communication=2.5)
QUICKER = replace(TRUTH, compute={"cpu": 1.1})


def write_logs(folder: Path, problem, plan, truth: Calibration, *, beside: float = 1.0) -> None:
    """Logs of a run that obeys `truth`, with 1 % of noise and a slow first step, its steps `beside` times as long."""
    files.write_plan(folder / "plan.json", problem, plan)
    run = run_logs.Run(
        name="truth",
        problem=problem,
        plan=plan,
        step_s=np.ones(1),
        compute_s=np.ones((1, 1)),
        update_s=np.ones((1, 1)),
        devices=(),
    )
    step_s, compute_s, update_s = run_logs.predict_s(run, truth)
    rng = np.random.default_rng(1)
    places = sorted((s, w, rank) for rank, (s, w, t) in plan.rank_places.items() if t == 0)
    for i, (_, _, rank) in enumerate(places):
        lines = [{"type": "run", "rank": rank}]
        for step in range(16):
            noise = rng.normal(1, 0.01, 3)
            kinds = {"compute": compute_s[i] * noise[0], "update": update_s[i] * noise[1], "wait": 0.1}
            seconds = beside * step_s * noise[2] * (10 if step == 0 else 1)
            lines.append({"type": "step", "step": step, "seconds": seconds, "seconds_by_kind": kinds})
        text = "\n".join(json.dumps(line) for line in lines) + '\n{"type": "st'
        (folder / f"rank-{rank}.jsonl").write_text(text)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """Logs of a run that obeys `TRUTH`."""
    write_logs(tmp_path, *routed_problem(4), TRUTH)
    return tmp_path


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """Logs of a run on one, quicker processor; its steps take a little less than compute and update together."""
    problem = replace(routed_problem(4)[0], cluster=small_cluster(1))
    (tmp_path / "alone").mkdir()
    write_logs(tmp_path / "alone", problem, uniform_plan(problem, ParallelConfig()), QUICKER, beside=0.98)
    return tmp_path / "alone"


def test_factors_are_found_again(logged, capsys):
    """Compute and optimizer by device, communication for all; the error on left-out steps falls to the noise."""
    out = logged / "calibration.json"
    assert cli.run(calibrate.main, [str(logged), "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = calibration(files.read_json(out))
    for device in found.compute:
        assert found.compute[device] == pytest.approx(TRUTH.compute[device], rel=0.02)
        assert found.update[device] == pytest.approx(TRUTH.update[device], rel=0.02)
    assert found.communication == pytest.approx(TRUTH.communication, rel=0.1)
    (run,) = report["runs"]
    assert run["steps_left_out"] == 5 and run["steps_fitted"] == 10
    assert run["error_after_pct"] < 3 < run["error_before_pct"]
    assert 0 < found.relative_error < 0.05


def test_a_run_without_messages_tells_nothing_of_links(alone):
    """However far its steps are from what its device takes: links are not a thousand times as fast."""
    found = api_calibrate(alone)
    assert found.communication == 1.0
    assert found.compute["cpu"] == pytest.approx(QUICKER.compute["cpu"], rel=0.02)


def test_a_run_without_messages_leaves_the_links_of_another_alone(logged, alone):
    """What the compute of both misses is not made up by communication."""
    assert api_calibrate(logged, alone).communication == pytest.approx(TRUTH.communication, rel=0.1)


def test_another_plan_is_not_as_sure_as_the_steps_of_the_run(alone):
    """Steps of one run differ by a per cent; what its factors say of other runs by more than a tenth."""
    found = api_calibrate(alone)
    assert found.relative_error < 0.05
    problem = replace(routed_problem(4)[0], cluster=small_cluster(1))
    plan = uniform_plan(problem, ParallelConfig(micro_batch_size=4))
    prediction = estimate(problem, plan, CostTables(problem, calibration=found))
    assert math.log(prediction.high_s / prediction.step_s) > 0.1


def test_a_short_run_or_a_missing_log_is_refused(logged, tmp_path, capsys):
    """One line that says what is missing, exit 2."""
    rank_0 = logged / "rank-0.jsonl"
    rank_0.write_text("\n".join(rank_0.read_text().splitlines()[:5]) + "\n")
    assert cli.run(calibrate.main, [str(logged)]) == 2
    assert "expected at least 6" in capsys.readouterr().err
    rank_0.unlink()
    assert cli.run(calibrate.main, [str(logged)]) == 2
    assert "rank-0.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": float("nan")}, "seconds: found nan, expected a number > 0"),
        ({"seconds": -1.0}, "seconds: found -1.0, expected a number > 0"),
        ({"seconds_by_kind": {"compute": "long"}}, "seconds_by_kind.compute: found 'long', expected a number >= 0"),
    ],
)
def test_a_log_with_what_is_no_number_is_named(change, message, logged, capsys):
    """Not the factor that it would have made."""
    log = logged / "rank-0.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()[:-1]]
    log.write_text("".join(json.dumps(line | change if line.get("step") == 7 else line) + "\n" for line in lines))
    at = next(i for i, line in enumerate(lines, start=1) if line["type"] == "step" and line["step"] == 7)
    assert cli.run(calibrate.main, [str(logged)]) == 2
    assert capsys.readouterr().err == f"{log}: line {at}: step 7: {message}\n"


def test_a_line_that_is_none_of_a_log_is_named_by_its_number(logged, capsys):
    """Also behind lines that nobody wants."""
    log = logged / "rank-0.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:4], '{"type": "event"', "half a line", *lines[4:]]) + "\n")
    assert cli.run(calibrate.main, [str(logged)]) == 2
    assert capsys.readouterr().err == "rank-0.jsonl: line 6: found 'half a line', expected lines of a run's log\n"


def test_a_plan_of_more_ranks_than_the_log_is_told_so(logged, capsys):
    """The file that is not there is named, not one of no steps."""
    (logged / "rank-1.jsonl").unlink()
    assert cli.run(calibrate.main, [str(logged)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{logged / 'rank-1.jsonl'}: found no such file, expected the logs of the ")


def test_factors_of_devices_that_are_not_there_are_refused(logged, capsys):
    """As profiles and benches are: those of links would be taken from quite other machines."""
    (logged / "factors.json").write_text(json.dumps(TRUTH.to_dict()), "utf-8")
    (logged / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 1}]}]", "utf-8")
    words = ["--cluster", str(logged / "lab.yaml"), "--model", "gpt-tiny", "--global-batch", "2", "--seq-len", "64"]
    assert cli.run(search.main, [*words, "--calibration", str(logged / "factors.json")]) == 2
    assert capsys.readouterr().err == "--calibration: found factors of cpu, expected one of t4\n"


def test_factors_over_one_prediction_do_not_multiply_another(logged, capsys):
    """Fitted over data sheets they would count twice what a bench of the device has measured."""
    problem, plan, _ = files.read_plan(logged / "plan.json")
    cpu = problem.cluster.catalogue["cpu"]
    measured = replace(cpu, efficiency=MeasuredEfficiency(vector_gemm=0.5, basis="bench"))
    benched = replace(problem, cluster=replace(problem.cluster, catalogue={"cpu": measured}))
    plain = api_calibrate(logged)
    assert plain.over == {"cpu": "spec"}
    assert plain.to_dict() == calibration(plain.to_dict()).to_dict()
    with pytest.raises(InputError, match=r"^calibration of cpu: found factors over spec, .* over bench,"):
        CostTables(benched, calibration=plain)
    again = logged / "again"
    again.mkdir()
    write_logs(again, benched, plan, TRUTH)
    over_bench = api_calibrate(again)
    assert over_bench.over == {"cpu": "bench"}
    assert over_bench.compute["cpu"] == pytest.approx(TRUTH.compute["cpu"], rel=0.02)
    with pytest.raises(InputError, match=r"found factors over bench, expected .* over spec,"):
        CostTables(problem, calibration=over_bench)
    assert cli.run(calibrate.main, [str(logged), str(again)]) == 2
    assert capsys.readouterr().err.startswith(f"{again}: cpu: found factors over bench, expected factors over spec")


def test_a_calibration_of_nothing_changes_nothing(logged):
    """Factors of one leave the prediction as it is."""
    run = run_logs.read_run(logged, None)
    assert run_logs.predict_s(run, Calibration())[0] == run_logs.predict_s(run, None)[0]


def test_another_file_is_refused():
    """The format is named."""
    with pytest.raises(InputError, match="polygon-calibration"):
        calibration({"format": "polygon-plan"})
    with pytest.raises(InputError, match=r"compute\.t4"):
        calibration({"format": "polygon-calibration", "compute": {"t4": -1}})
    with pytest.raises(InputError, match=r"^compute: found nothing, expected a mapping$"):
        calibration({"format": "polygon-calibration", "compute": None})
    with pytest.raises(InputError, match=r"^communication: found 'x', expected a number > 0$"):
        calibration({"format": "polygon-calibration", "communication": "x"})
    with pytest.raises(InputError, match=r"^computer: found unknown key 'computer', expected 'compute' \(nearest\)"):
        calibration({"format": "polygon-calibration", "computer": {"t4": 2}})
