"""A plan trains on the lab's hosts: the same losses as anywhere, over links that take their time."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polygon.formats.files import write_plan
from runners.engine.options import Options
from runners.engine.summary import log_lines
from tests.patience import PATIENCE_S
from tests.real_ranks import run_ranks
from tests.runners.test_training import run_rank
from tests.small_problems import routed_problem

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.skipif(os.geteuid() != 0, reason="forked ranks need root")]
ROOT = Path(__file__).resolve().parents[2]


def test_plan_trains_in_the_lab(tmp_path):
    """Two regions 30 ms apart: losses as without the lab, no step shorter than there and back."""
    problem, plan = routed_problem(2)
    slow = replace(problem.cluster, latency_s=np.full((2, 2), 0.03), bytes_per_s=np.full((2, 2), 1.25e7))
    problem = replace(problem, cluster=slow)
    write_plan(tmp_path / "plan.json", problem, plan)
    done = subprocess.run(
        [sys.executable, "-m", "runners.lab_launch", tmp_path / "plan.json", "--steps", "3", "--learning-rate", "0.003",
         "--log-dir", tmp_path / "log", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 hosts" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["order_differs_on_ranks"] == []
    steps = [line for line in log_lines(tmp_path / "log", 0) if line["type"] == "step"]
    [expected, _] = run_ranks(run_rank, 2, problem, plan, Options(steps=3, learning_rate=0.003))
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-6)
    assert min(step["seconds"] for step in steps) >= 0.06
