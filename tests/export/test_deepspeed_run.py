"""DeepSpeed, started from the exported scripts, trains: two ranks on CPUs, whose sums go over gloo."""

import json
import os
import shutil
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

NODE = "nodes: [{device: t4, count: 1, devices_per_node: %d}]"
ONE_HOST = "regions: [{name: here, " + NODE % 2 + "}]"
TWO_HOSTS = (
    "regions: [{name: a, " + NODE % 1 + "}, {name: b, " + NODE % 1 + "}]\n"
    "links: [{between: [a, b], latency_ms: 5, bandwidth_gbps: 0.1}]"
)
NO_SHARED_MEMORY = """
import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


@pytest.mark.parametrize(
    ("text", "model", "workers"),
    [(ONE_HOST, "opt-350m", [[2]]), (TWO_HOSTS, "gpt3-760m", [[1, 0], [0, 1]])],
)
def test_two_ranks_of_deepspeed_train(tmp_path, text, model, workers):
    """Two replicas on one host, and a pipeline over two with a slow link, as one holds not the model; the loss falls.

    The optimizer is torch's: DeepSpeed's own, which it would compile for a minute, is another one on GPUs. Nor are its
    sums in shared memory compiled (90 CPU-seconds), which GPUs do not use: gloo's, as on other systems than Linux.
    """
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (pip install -e .[deepspeed]): its run is not tested")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed, with which DeepSpeed compiles its helpers: its run is not tested")
    problem = Problem(
        cluster=cluster_from_text(text, "pair"),
        model=catalogue.model(model),
        batch=Batch(global_batch=8, seq_len=512),
    )
    plan = Decoder(problem, tensor_limit=1).decode(Allocation(workers=np.array(workers), micro_batch_size=1))
    assert isinstance(plan, Plan)
    files.write_folder(tmp_path, export(problem, plan, "deepspeed").files)
    config = json.loads((tmp_path / "ds_config.json").read_text())
    config["optimizer"]["params"]["torch_adam"] = True
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    program = tmp_path / "train.py"
    program.write_text(NO_SHARED_MEMORY + program.read_text())
    assert json.loads((tmp_path / "model.json").read_text())["stages"] == len(workers)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "POLYGON_MASTER": "127.0.0.1",
        "POLYGON_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    scripts = sorted(tmp_path.glob("run-*.sh"))
    assert len(scripts) == len(workers)
    hosts = [
        subprocess.Popen(
            [str(script), "--small", "--steps", "8"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for script in scripts
    ]
    try:
        said = [host.communicate(timeout=PATIENCE_S) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0] * len(hosts), said[0][1][-3000:]
    rows = [json.loads(line) for out, _ in said for line in out.splitlines() if line.startswith('{"step"')]
    assert [row["step"] for row in rows] == list(range(8))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
