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
from tests.small_problems import small_cluster, small_model, small_plan

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
    "llama",
    [
        {"gated_mlp": True, "rms_norm": True, "learned_positions": False, "linear_bias": False, "qkv_bias": False,
         "kv_heads": 2, "rope_theta": 300.0, "norm_eps": 0.1},
        {"norm_eps": 0.1},
    ],
)  # fmt: skip
def test_exported_blocks_compute_what_the_models_do(llama):
    """With the same weights a block gives what the engine's gives: base of the positions, norms and all."""
    torch = pytest.importorskip("torch")
    from runners.engine.layers import build_layer

    model = small_model(**llama)
    problem = Problem(cluster=small_cluster(1), model=model, batch=Batch(global_batch=2, seq_len=16, precision="fp32"))
    plan = small_plan(problem.cluster, [(0, model.layers)], [[0]], [[0]])
    exported = export(problem, plan, "deepspeed").files
    program = {"__file__": "train.py", "__name__": "program"}
    exec(exported["train.py"].replace("import deepspeed\n", ""), program)
    block, ours = program["Block"](json.loads(exported["model.json"])), build_layer(model, 1, seed=0)
    drawn = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():  # large enough for everything to be seen beside what passes the block by
        parameter.data.normal_(std=0.3, generator=drawn)
    held = ours.state_dict()
    for kind in ("weight", "bias"):
        if f"attention.query.{kind}" in held:
            parts = [held[f"attention.{name}.{kind}"] for name in ("query", "key", "value")]
            getattr(block.into, kind).data = torch.cat(parts)
        names = {"out": "attention.output", "down": "mlp.down", "first": "attention_norm", "second": "mlp_norm"}
        for theirs, name in names.items():
            if f"{name}.{kind}" in held:
                getattr(getattr(block, theirs), kind).data = held[f"{name}.{kind}"]
        up = [held[f"mlp.{name}.{kind}"] for name in ("gate", "up") if f"mlp.{name}.{kind}" in held]
        if up:
            getattr(block.up, kind).data = torch.cat(up)
    assert sum(p.numel() for p in block.parameters()) == sum(p.numel() for p in ours.parameters())
    x = 0.3 * torch.randn(2, 16, model.hidden_size, generator=drawn)
    torch.testing.assert_close(block(x), ours(x), rtol=1e-4, atol=1e-5)


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
