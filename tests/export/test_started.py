"""A generated script, started as it is, trains: two ranks on CPUs."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.export.targets import export
from polygon.formats import catalogue, files
from polygon.formats.recognition import cluster_from_text
from polygon.planning.decode import Allocation, Decoder
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_two_ranks_started_from_the_exported_script_train(tmp_path):
    """torchrun by the host's script; the loss of the last step is below the first one's."""
    text = "regions: [{name: here, nodes: [{device: t4, count: 1, devices_per_node: 2}]}]"
    cluster = cluster_from_text(text, "pair")
    problem = Problem(cluster=cluster, model=catalogue.model("opt-350m"), batch=Batch(global_batch=8, seq_len=512))
    decoder = Decoder(problem, tensor_limit=1)
    plan = decoder.decode(Allocation(workers=np.array([[1], [1]]), micro_batch_size=1))
    assert isinstance(plan, Plan) and plan.world_size == 2
    files.write_folder(tmp_path, export(problem, plan, "torchrun").files)
    (script,) = tmp_path.glob("run-*.sh")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "POLYGON_ROOT": str(ROOT),
        "POLYGON_MASTER": "127.0.0.1", "POLYGON_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    arguments = ["--rehearse", "--steps", "12", "--device", "cpu", "--log-dir", str(tmp_path / "log")]
    run = subprocess.run([str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"loss[ =:\"]+([\d.]+)", run.stdout + run.stderr)]
    assert len(losses) >= 2 and losses[-1] < losses[0]
