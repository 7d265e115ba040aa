"""A plan trains on the lab's hosts: the same losses as anywhere, over links that take their time."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from polygon.formats.files import write_plan
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.lab_launch import main as lab_launch
from tests.real_programs import ran
from tests.real_ranks import run_ranks
from tests.runners.test_training import run_rank
from tests.small_problems import routed_problem

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.skipif(os.geteuid() != 0, reason="forked ranks need root")]


def test_plan_trains_in_the_lab(tmp_path):
    """Two regions 30 ms apart: losses as without the lab, no step shorter than there and back."""
    problem, plan = routed_problem(2)
    slow = replace(problem.cluster, latency_s=np.full((2, 2), 0.03), bytes_per_s=np.full((2, 2), 1.25e7))
    problem = replace(problem, cluster=slow)
    write_plan(tmp_path / "plan.json", problem, plan)
    words = ["plan.json", "--steps", "3", "--learning-rate", "0.003", "--log-dir", "log", "--json"]
    code, out, said = ran(lab_launch, words, tmp_path)
    assert code == 0, said
    assert "2 hosts" in said
    summary = json.loads(out)
    assert summary["order_differs_on_ranks"] == []
    steps = [line for line in log_lines(tmp_path / "log", 0) if line["type"] == "step"]
    [expected, _] = run_ranks(run_rank, 2, problem, plan, Options(steps=3, learning_rate=0.003))
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-6)
    assert min(step["seconds"] for step in steps) >= 0.06
