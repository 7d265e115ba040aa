"""A run over a lab's link that is cut: both sides say so, each naming the other, and a restart resumes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polygon.formats.files import write_plan
from runners.lab_net.running import Lab
from runners.lab_net.topology import lab_network
from tests.patience import PATIENCE_S
from tests.small_problems import routed_problem

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
ROOT = Path(__file__).resolve().parents[2]


def start(lab, rank, plan, port, folder, *more):
    """A rank on its host, its talk in a pipe."""
    words = ["--plan", plan, "--dist-url", f"tcp://{lab.network.hosts[0].address}:{port}", "--world-size", "2"]
    words += ["--rank", rank, "--device", "cpu", "--log-dir", folder / "log", "--dead-after", "10"]
    words += ["--checkpoint-dir", folder / "saved", "--checkpoint-every", "1", *more]
    command = [sys.executable, ROOT / "runners" / "dist_runner.py", *words]
    environment = {"OMP_NUM_THREADS": "1"}
    return lab.popen(lab.network.hosts[rank], list(map(str, command)), environment, stderr=subprocess.PIPE, text=True)


def test_a_cut_link_is_noticed_on_both_sides_and_training_resumes(tmp_path):
    """Each names the rank and the region that it no longer hears; after the link is mended the run goes on."""
    problem, plan = routed_problem(2)
    write_plan(tmp_path / "plan.json", problem, plan)
    with Lab(lab_network(problem.cluster, plan=plan)) as lab:
        ranks = [start(lab, rank, tmp_path / "plan.json", 29510, tmp_path, "--steps", "100000") for rank in range(2)]
        assert any(line.startswith("step     3") for line in ranks[0].stderr)
        lab.cut(lab.network.hosts[:1])
        texts = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1], texts
        for other, text in ((1, texts[0]), (0, texts[1])):
            assert f"lost rank {other} (stage {other}, worker 0, region region-{other}): no sign of life for" in text
            assert "; its last action was " in text
        lab.cut(lab.network.hosts[:1], connected=True)
        words = ["--steps", "100000", "--resume"]
        ranks = [start(lab, rank, tmp_path / "plan.json", 29511, tmp_path, *words) for rank in range(2)]
        resumed = next(line for line in ranks[0].stderr if line.startswith("resumed from step "))
        step = int(resumed.split()[-1])
        assert step >= 3 and any(line.startswith(f"step {step + 1:5d} ") for line in ranks[0].stderr)
        lab.stop(ranks)
        for rank in ranks:
            rank.communicate()
