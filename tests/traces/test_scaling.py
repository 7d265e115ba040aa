"""Scaling efficiency from the logs of two runs, by hand."""

import json

import pytest

from polygon.domain.errors import InputError
from polygon.formats.files import write_plan
from runners.analyze import main
from runners.engine.log import RunLog
from runners.traces.scaling import scaling
from tests.small_problems import routed_problem, small_model


def write_run(folder, ranks, step_s, samples, model="tiny"):
    """Logs of rank 0: a slow first step, then even ones."""
    log = RunLog(folder / "rank-0.jsonl")
    log.write("run", world_size=ranks, model=model)
    for step, seconds in enumerate((10.0, step_s, step_s, step_s)):
        log.write("step", step=step, seconds=seconds, tokens=samples * 10, samples=samples, tokens_per_s=0.0)
    log.close()
    return folder


def test_strong_and_weak_scaling_by_hand(tmp_path, capsys):
    """Four times the ranks: one batch in a third of the time is 75 %, four times the batch in the same time 100 %."""
    base = write_run(tmp_path / "a", 2, 3.0, 12)
    strong = scaling(base, write_run(tmp_path / "b", 8, 1.0, 12))
    assert (strong.kind, strong.speedup) == ("strong", pytest.approx(3)) and strong.efficiency == pytest.approx(0.75)
    weak = scaling(base, write_run(tmp_path / "c", 8, 3.0, 48))
    assert (weak.kind, weak.speedup) == ("weak", pytest.approx(4)) and weak.efficiency == pytest.approx(1)
    assert main(["--scaling", str(base), str(tmp_path / "b"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["efficiency"] == pytest.approx(0.75) and said["other"]["samples_per_s"] == pytest.approx(12)


def test_runs_of_different_models_are_not_compared(tmp_path):
    """Nor is a folder without a run."""
    base = write_run(tmp_path / "a", 2, 3.0, 12)
    with pytest.raises(InputError, match="expected tiny"):
        scaling(base, write_run(tmp_path / "b", 2, 3.0, 12, model="other"))
    with pytest.raises(InputError, match="log directory of a run"):
        scaling(base, tmp_path / "nowhere")


def test_models_of_one_name_and_other_sizes_are_not_compared(tmp_path):
    """The plans beside the logs say what the name does not."""
    folders = [write_run(tmp_path / name, 2, 3.0, 12) for name in "ab"]
    for folder, size in zip(folders, (64, 96), strict=True):
        write_plan(folder / "plan.json", *routed_problem(2, model=small_model(ffn_size=size)))
    with pytest.raises(InputError, match=r"model\.ffn_size: found 96, expected 64, as in"):
        scaling(*folders)
    write_plan(folders[1] / "plan.json", *routed_problem(2, model=small_model()))
    assert scaling(*folders).speedup == 1
