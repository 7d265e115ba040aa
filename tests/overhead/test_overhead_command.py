"""The overhead command as people call it."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polygon.commands import cli
from polygon.overhead import predefined
from polygon.overhead.__main__ import main
from polygon.overhead.quantities import BYTES, BYTES_PER_S, COUNT, SECONDS, quantity
from polygon.overhead.topologies import KINDS, OPERATIONS

MEASURED = Path(__file__).resolve().parents[2] / "instances" / "measured" / "allreduce_lut_fit.json"
QUANTITIES = {"16MB": 16e6, "256MB": 256e6, "1GB": 1e9}

EARLIER_TOOL = """\
list-cmds
collective --topology ring --N 8 --M 140e9
collective --topology tree --N 8 --M 140e9
collective --topology hierarchical --N 8 --gpus-per-node 4 --M 140e9
analysis --topology ring --num-gpus 8 --dp 8 --params 70e9
analysis --topology hierarchical --num-gpus 8 --dp 8 --gpus-per-node 4 --params 70e9
analysis --topology ring --num-gpus 1 --dp 1 --tp 1 --cp 1 --params 70e9
analysis --topology ring --num-gpus 8 --dp 4 --tp 2 --params 70e9 --seq-length 1024 --hidden-size 4096
analysis --topology ring --num-gpus 8 --dp 2 --cp 4 --params 70e9 --seq-length 1024 --hidden-size 4096
analysis --topology ring --num-gpus 8 --dp 2 --tp 2 --cp 2 --params 70e9 --seq-length 1024 --hidden-size 4096 \
--num-layers 32
run-all
collective --topology hierarchical --N 8 --gpus-per-node 4 --M 140e9 --verbose
analysis --topology hierarchical --num-gpus 8 --dp 8 --gpus-per-node 4 --params 70e9 --verbose
collective --topology switch --N 8 --M 140e9
collective --topology mesh --N 8 --mesh-nx 4 --mesh-ny 2 --M 140e9
collective --topology torus --N 8 --mesh-nx 4 --mesh-ny 2 --M 140e9
analysis --topology ring --num-gpus 8 --dp 4 --pp 2 --params 70e9 --seq-length 1024 --hidden-size 4096 --batch-size 2
collective --topology ring --N 8 --M 140e9 --tree-algo
""".splitlines()
"""Every example of the earlier tool's description, with the topologies and PP that it had planned."""


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    try:
        code = cli.run(main, shlex.split(command))
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", EARLIER_TOOL)
def test_examples_of_the_earlier_tool_run_as_written(capsys, command):
    """Exit 0 and output, nothing on stderr."""
    code, out, err = run(capsys, command)
    assert (code, err) == (0, "")
    assert out.strip()


def test_suggested_commands_run(capsys):
    """What list-cmds prints can be copied: it runs (3 where a configuration does not fit)."""
    for line in predefined.commands():
        program, _, command = line.partition("polygon.overhead ")
        assert program == "python -m "
        code, out, err = run(capsys, command)
        assert code == 0 or (code == 3 and err.startswith("does not fit")), line
        assert out


def test_it_is_a_program():
    """One real process, as written in the description."""
    command = [sys.executable, "-m", "polygon.overhead", *EARLIER_TOOL[1].split(), "--json"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    data = json.loads(done.stdout)
    assert data["chosen"] == "ring-both-ways"
    assert data["time_s"] >= data["lower_bound_s"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_no_empty_cell(capsys, kind):
    """Six operations on every topology, as CSV and as JSON."""
    wiring = {"hierarchical": "--gpus-per-node 4", "mesh": "--mesh-nx 4", "torus": "--mesh-nx 4"}.get(kind, "")
    command = f"collective --topology {kind} --N 12 --M 1e9 --op all {wiring}"
    code, out, _ = run(capsys, command + " --csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and {row["op"] for row in rows} == set(OPERATIONS)
    assert all(float(row["time_s"]) >= float(row["lower_bound_s"]) > 0 for row in rows)
    code, out, _ = run(capsys, command + " --json")
    assert [cell["op"] for cell in json.loads(out)] == list(OPERATIONS)


def test_six_by_six(capsys):
    """--topology all --op all: 36 times with their algorithms, none missing, in one table."""
    code, out, _ = run(capsys, "collective --topology all --N 16 --M 1e9 --op all")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 2 + 2 * len(OPERATIONS)
    assert lines[1].split() == list(KINDS)
    assert all(line.count("x)") == len(KINDS) for line in lines[2::2])
    assert all(len(line.split()) == len(KINDS) for line in lines[3::2])
    code, out, _ = run(capsys, "collective --topology all --N 16 --M 1e9 --op all --json")
    assert len(json.loads(out)) == 36


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("140e9", BYTES, 140e9),
        ("1gb", BYTES, 1e9),
        ("1 GiB", BYTES, 2**30),
        ("64KB", BYTES, 64e3),
        ("25GB/s", BYTES_PER_S, 25e9),
        ("200Gbit/s", BYTES_PER_S, 25e9),
        ("200gbps", BYTES_PER_S, 25e9),
        ("200Gb/s", BYTES_PER_S, 25e9),
        ("5us", SECONDS, 5e-6),
        ("7b", COUNT, 7e9),
        ("125M", COUNT, 125e6),
    ],
)
def test_units_as_people_write_them(text, units, value):
    """A bit is never taken for a byte: in rates and sizes the case of b decides."""
    assert quantity(units)(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("collective --topology mesh --N 8 --mesh-nx 3 --mesh-ny 3 --M 1e9", "1x8, 2x4, 4x2, 8x1"),
        ("collective --topology torus --N 8 --mesh-nx 3 --M 1e9", "a divisor of 8: 1, 2, 4, 8"),
        ("collective --N 8 --M -5", "expected a number >= 0"),
        ("collective --N 8 --M 5parsecs", "expected a number >= 0 (units: B, kB"),
        ("collective --N 8 --M 1Gb", "found '1Gb', expected a number >= 0 (units: B, kB"),
        ("collective --N 8 --M 1 --bandwidth 25gb/s", "found '25gb/s', expected a number > 0 (units: B/s"),
        ("collective --N 8 --M 1 --bandwidth 25GBps", "found '25GBps', expected a number > 0 (units: B/s"),
        ("analysis --num-gpus 8 --model gpt2 --gpu t5", "--gpu: found device 't5', expected 't4' (nearest)"),
        ("analysis --num-gpus 8 --pp 8 --params 1e9", "--seq-length: found nothing, expected it"),
        ("collective --N 0 --M 5", "expected a whole number >= 1"),
        ("collective --topology hierarchical --N 8 --M 1e9", "a divisor of 8: [1, 2, 4, 8]"),
        ("collective --topology hierarchical --N 8 --gpus-per-node 3 --M 1e9", "1 or 2 or 4 or 8"),
        ("collective --topology hierarchical --gpus-per-node 4 --N 8 --M 1e9 --tree-algo", "ring or tree or switch"),
        ("collective --N 8 --M 1e9 --algorithm magic", "expected ring or ring-both-ways or binomial-tree"),
        ("collective --topology star --N 8 --M 1", "choose from"),
        ("collective --N 8 --M 1 --inter-latency 5us", "expected --topology hierarchical"),
        ("collective --N 8 --M 1 --mesh-nx 2", "expected --topology mesh or torus"),
        ("collective --topology hierarchical --N 8 --gpus-per-node 4 --M 1 --op p2p --shards 8", "at most the 4 GPUs"),
        ("analysis --num-gpus 8 --dp 4 --params 70e9", "with the others, --dp 8"),
        ("analysis --num-gpus 8 --tp 3 --params 70e9", "each a divisor: [1, 2, 4, 8]"),
        ("analysis --num-gpus 8 --tp 2 --params 70e9", "--seq-length: found"),
        ("analysis --num-gpus 8 --ep 3 --params 1e9", "a divisor of dp x cp = 8: [1, 2, 4, 8]"),
        ("analysis --num-gpus 8 --ep 8 --params 1e9 --seq-length 8 --hidden-size 8", "a --model with experts"),
        ("analysis --num-gpus 64 --pp 64 --model llama2-7b", "at most the 32 blocks"),
        ("analysis --num-gpus 8", "--params: found"),
        ("analysis --num-gpus 8 --dp 8 --params 1e9 --global-batch 12", "a multiple of dp x batch size = 8"),
    ],
)
def test_bad_flags_get_one_line_that_names_legal_values(capsys, command, words):
    """Exit 2, one line on stderr, nothing on stdout."""
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and words in err


def test_run_all_writes_tables_and_plots(tmp_path, capsys):
    """CSV of everything, a plot per topology, one of memory."""
    folder = tmp_path / "tables"
    code, out, _ = run(capsys, f"run-all -o {folder} --json")
    assert code == 0
    names = json.loads(out)["written"]
    assert {f"time-{kind}.png" for kind in KINDS} | {"memory-zero.png"} <= set(names)
    for name in names:
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG") if name.endswith(".png") else data.count(b"\n") > 50
    with (folder / "collectives.csv").open(encoding="utf-8") as file:
        cells = {(row["op"], row["topology"]) for row in csv.DictReader(file)}
    assert len(cells) == 36


@pytest.mark.parametrize("parameters", ["124e6", "7e9", "70e9", "600e9"])
@pytest.mark.parametrize("given", ["", "--num-layers 24"])
def test_more_sharding_never_takes_more_memory(capsys, parameters, given):
    """A layer at a time is gathered, not the whole model; layers not given are assumed."""
    assert main([*f"analysis --num-gpus 8 --dp 8 --params {parameters} --json {given}".split()]) == 0
    found = json.loads(capsys.readouterr().out)
    totals = [found["memory_by_zero"][str(zero)]["total_bytes"] for zero in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert (found["assumed_layers"] is None) == bool(given)


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("size", ["16MB", "256MB", "1GB"])
def test_a_named_gpu_takes_what_nccl_was_measured_to_take(capsys, gpus, size):
    """A node of A100: the all-reduce of nccl-tests, not what the data sheet promises; scatter and gather half of it."""
    parameters = QUANTITIES[size] / 2
    command = f"analysis --topology switch --num-gpus {gpus} --dp {gpus} --params {parameters} --json --gpu a100-80gb"
    assert main(command.split()) == 0
    (found,) = json.loads(capsys.readouterr().out)["traffic"]
    measured = json.loads(MEASURED.read_text())[f"a100_{gpus}"][f"busbw_{size}"] * 1e9
    assert found["time_s"] == pytest.approx(2 * (gpus - 1) / gpus * QUANTITIES[size] / measured, rel=1e-6)
    assert main([*command.split(), "--zero", "1"]) == 0
    halves = json.loads(capsys.readouterr().out)["traffic"]
    assert sum(half["time_s"] for half in halves) == pytest.approx(found["time_s"])


def test_does_not_fit_is_a_result_with_its_reason(capsys):
    """The report is printed, stderr says why, exit 3."""
    code, out, err = run(capsys, "analysis --num-gpus 8 --dp 8 --model llama2-7b --gpu a100-80gb")
    assert code == 3 and "memory per GPU" in out
    assert err.startswith("does not fit: ") and "ZeRO-" in err
    code, out, err = run(capsys, "analysis --num-gpus 8 --zero 3 --model llama2-7b --gpu a100-80gb --json")
    assert code == 0 and json.loads(out)["fits"] is True and not err
