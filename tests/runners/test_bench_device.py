"""Measuring this machine's processor for real, and planning with what was measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from polygon.__main__ import main
from polygon.commands import cli
from polygon.domain.bench import BlockRow, DeviceBench
from polygon.formats import files
from tests.real_programs import Program

CLUSTER = """
name: two-cores
regions:
  - name: here
    nodes: [{device: cpu-core, count: 4, devices_per_node: 2}]
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A short measurement in fp32, made by the command."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    options = ["--seconds", "3", "--device", "cpu", "--dtype", "fp32", "--date", "today", "-o", str(path), "--quiet"]
    assert main(["bench-device", *options]) == 0
    return path


def test_every_operator_is_measured(bench):
    """All shapes of products, attention, element-wise kernels and launches, with what they were measured on."""
    found = files.read_bench(bench)
    assert (found.device, found.date, found.threads) == ("cpu-core", "today", 1)
    assert found.measured_on
    assert found.versions[0].startswith("torch ")
    assert found.precisions == ("fp32",)
    assert len(found.products) == len({(r.rows, r.columns, r.inner) for r in found.products}) > 20
    assert any(row.columns % 8 for row in found.products)
    assert len({row.seq_len for row in found.attention}) == 3
    assert {row.operation for row in found.streams} == {"copy", "add", "gelu", "layer-norm", "softmax"}
    assert found.launch_s < 1e-3
    largest = max(found.products, key=lambda row: row.rows * row.columns * row.inner)
    smallest = min(found.products, key=lambda row: row.rows * row.columns * row.inner)
    assert largest.seconds > smallest.seconds


def test_the_measurement_reaches_the_estimate(bench, tmp_path, capsys):
    """search --bench plans with it, and the plan keeps it for whoever reads it later."""
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "plan.json"
    cluster.write_text(CLUSTER)
    task = ["--cluster", str(cluster), "--model", "gpt2", "--global-batch", "8", "--seq-len", "128"]
    task += ["--precision", "fp32", "--quiet"]
    assert main(["search", *task, "--bench", str(bench), "-o", str(plan), "--time-limit", "1"]) == 0
    capsys.readouterr()
    efficiency = files.read_plan(plan).problem.cluster.catalogue["cpu-core"].efficiency
    assert efficiency.basis == "bench"
    assert main(["evaluate", str(plan), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(plan), "--json", "--bench", str(bench)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_s"] == pytest.approx(kept["step_s"])
    assert "bench" in json.dumps(kept)


def test_a_collective_of_two_processes_takes_time():
    """Two ranks of gloo on this machine."""
    torch = pytest.importorskip("torch")
    from runners.bench_device import collective_row

    row = collective_row(torch.device("cpu"), 0.2)
    assert (row.backend, row.members) == ("gloo", 2)
    assert row.n_bytes / row.seconds < 1e12


def measure(words):
    """The measuring program."""
    from runners.bench_device import main as bench_device

    return cli.run(bench_device, words)


def test_an_interrupted_measurement_keeps_what_it_has(tmp_path):
    """Ctrl-C after a pass: a file that says it is not complete, and the exit code of what was interrupted."""
    path = tmp_path / "bench.json"
    words = ["--seconds", "20", "--dtype", "fp32", "--device", "cpu", "-o", path]
    with Program(measure, words, tmp_path) as program:
        assert program.stderr.readline().startswith("every operator measured once after ")
        program.send_signal(signal.SIGINT)
        talk = program.said()
    assert program.returncode == 130, talk
    assert "not everything was measured" in talk
    assert not files.read_bench(path).complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "argument --dtype: found 'int8', expected fp32, tf32, bf16, fp16"),
        (["--seconds", "0"], "argument --seconds: found '0', expected a number > 0"),
        (["--device", "cpu", "--dtype", "tf32"], "--dtype: found tf32, expected fp32, bf16 or fp16 on a CPU"),
        (["-o", "/nowhere/bench.json"], "/nowhere/bench.json: found no folder /nowhere"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    """Exit 2 before anything is measured."""
    command = [sys.executable, "-m", "polygon", "bench-device", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["bench-device", "launch", "dist-runner", "train", "profile-layers"])
def test_without_torch_commands_of_the_runtime_say_what_to_install(command, monkeypatch, capsys):
    """One line, exit 2."""
    from polygon.__main__ import program

    monkeypatch.setattr("polygon.commands.cli.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["polygon", command])
    assert program() == 2
    message = f"{command}: found no torch, expected it installed: pip install 'polygon-train[train]'\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(("kind", "sequences"), [("cuda", 8), ("cpu", 1)])
def test_blocks_of_a_gpu_are_so_large_that_it_does_not_wait_for_the_host(kind, sequences):
    """Products of a forward take at least twice the launches' time; a CPU launches nothing."""
    torch = pytest.importorskip("torch")
    from runners.bench_device import Session

    host = BlockRow(
        precision="bf16", hidden_size=64, heads=1, seq_len=16, micro_batch_size=1, forward_s=1e-3, backward_s=2e-3
    )
    session = Session(DeviceBench(device="h200", blocks=(host,)), torch.device(kind), 1.0, lambda: False)
    session._flops["bf16"] = 700e12
    assert session._least_sequences(2048, 2048, "bf16") == sequences
    if kind == "cuda":
        assert 24 * sequences * 2048 * 2048**2 / 700e12 >= 2e-3
