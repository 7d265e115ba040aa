"""Recipes as people start them: alone, under torchrun, with fields set on the command line, with mistakes."""

import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from importlib.util import find_spec
from pathlib import Path

import pytest

from runners.analyze import main as analyze
from runners.recipes.predicted_memory import write_measured
from runners.train import main
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.real_programs import ran

TINY = "instances/recipes/llm-1d-tiny.yaml"


WORDS = (TINY, "--steps", "2", "--json", "-o")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and figures of a run whose ranks the program starts itself."""
    out = tmp_path_factory.mktemp("alone")
    code, figures, said = ran(main, [*WORDS, out], Path.cwd())
    assert code == 0, said
    return out, json.loads(figures)


def test_the_program_starts_its_ranks(alone):
    """Two ranks train, in the order that the plan says."""
    _, figures = alone
    assert (figures["ranks"], figures["steps"], figures["order_differs_on_ranks"]) == (2, 2, [])


def test_peaks_of_an_earlier_run_are_not_this_ones(tmp_path):
    """Measured is what this run measured, whatever its folder holds."""
    write_measured(tmp_path, 0, 1)
    code, figures, said = ran(main, [*WORDS, tmp_path], Path.cwd())
    assert code == 0, said
    assert "measured_peak_bytes" not in json.loads(figures)
    followed = ["--set", "metrics.tensor_bytes=true"]
    code, figures, said = ran(main, [*WORDS, tmp_path, *followed], Path.cwd())
    assert code == 0 and json.loads(figures)["measured_peak_bytes"] > 1e6, said


TWO_RANKS = urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "--master-port={port}", "-m", "runners.train"),
    # What `deepspeed --num_gpus 2 runners/train.py` starts on each host; it adds --local_rank to the command.
    "deepspeed": (
        "deepspeed.launcher.launch", f"--world_info={TWO_RANKS}", "--master_port={port}", "runners/train.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHERS)
def test_under_launchers_the_same_loss(alone, name, tmp_path):
    """As ranks of torchrun, or by path under DeepSpeed's launcher, the recipe has the losses of a run alone."""
    if name == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: its launcher is not tried")
    port = str(free_port())
    command = [sys.executable, "-m", *(word.replace("{port}", port) for word in LAUNCHERS[name]), *WORDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    # DeepSpeed's launcher says things of its own on standard output.
    under = json.loads("{\n" + done.stdout.partition("{\n")[2].partition("\n}")[0] + "}")
    assert (under["steps"], under["ranks"]) == (2, 2)
    assert under["last_loss"] == pytest.approx(alone[1]["last_loss"], rel=1e-6)


def test_scaling_shows_the_mfu_of_runs(alone, capsys):
    """`analyze --scaling` reads MFU from the logs: that of the run's summary, but for its first step."""
    out, figures = alone
    assert analyze(["--scaling", str(out), str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["base"]["mfu"] == pytest.approx(figures["mfu"]) and figures["mfu"] > 0
    assert analyze(["--scaling", str(out), str(out)]) == 0
    assert f"{figures['mfu']:.1%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("parallel.dq=2", "parallel.dq: found unknown key 'dq', expected 'dp' (nearest)"),
        ("backend=engin", "backend: found 'engin', expected 'engine' (nearest)"),
        ("model.change.block=2", "found unknown field 'block', expected 'blocks' (nearest)"),
        ("batch.global_batch=7", "batch.global_batch: found 7, expected a multiple of dp x micro_batch = 4"),
        ("data.kind=engels", "data.kind: found 'engels', expected 'english' (nearest)"),
        ("plan=p.json", "plan: found 'p.json', expected a plan file with backend plan"),
        ("steps", "--set: found 'steps', expected KEY=VALUE"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: found nan, expected a number > 0"),
        ("validation={every: 2, path: y.json}", "recipe/y.json, expected a file or folder (or a data set of the hub"),
        ("batch.seq_len=100000000", "2 ranks need (shorter sequences, smaller micro-batches, or more machines"),
        ("optimizer.decay_steps=500", "recipe.yaml: optimizer.decay_steps: found 500, expected none with schedule"),
        ("optimizer.rate_schedule=step", "recipe.yaml: optimizer.rate_schedule: found 'step', expected constant or"),
        ("optimizer={rate_schedule: linear, final_rate: 2}", "optimizer.final_rate: found 2.0, expected at most 1"),
        ("optimizer={rate_schedule: cosine, warmup_steps: 99}", "optimizer.warmup_steps: found 99, expected less than"),
        ("data.path=cut.parquet", "expected a readable file of examples"),
        ("data.cache=/proc/x", "data.cache: /proc/x: cannot be made: No such file or directory"),
        ("data.kind=digits", "found 'digits', expected english"),
        ("data.part=test", "data.part: found 'test' with 'instructions', expected a set of images"),
        ("validation={every: 2, part: test}", "validation.part: found 'test' with 'instructions'"),
        ("validation={every: 2, fraction: 1.5}", "validation.fraction: found 1.5"),
        ("validation={every: 2, path: x.json}", "data.tokenizer: found none, expected one for both"),
        ("checkpoint={folder: /proc/x}", "checkpoint.folder: /proc/x: cannot be made: No such file or directory"),
        ("lora={dropout: 1.5}", "lora.dropout: found 1.5, expected a number >= 0 and < 1"),
        ("lora={dropout: 1}", "lora.dropout: found 1, expected a number >= 0 and < 1"),
        ("lora={dropout: 0.5}", "lora.dropout: found 0.5, expected 0 (what it drops would depend on the plan)"),
    ],
)
def test_mistakes_are_one_line(setting, message, tmp_path, capsys):
    """A mistake ends with exit code 2 and one line that names the place, before any rank starts."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "cut.parquet").write_bytes(b"PAR1")
    (folder / "x.json").write_text("[]")
    recipe = folder / "recipe.yaml"
    recipe.write_text(Path(TINY).read_text())
    assert main([str(recipe), "--set", setting, "-o", str(tmp_path / "out"), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.strip().splitlines()) == 1 and out == ""


@pytest.mark.parametrize("checked", [[], ["--check"]])
@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        (
            TINY,
            "data.path=nowhere.json",
            "data.path: found no instances/recipes/nowhere.json, expected a file or folder",
        ),
        (TINY, "data.path=no/where.jsonl", "data.path: found no instances/recipes/no/where.jsonl, expected a file"),
        (TINY, "data={kind: english, path: no.txt}", "data.path: found no instances/recipes/no.txt, expected a file"),
        (TINY, "data.tokenizer=nowhere", "data.tokenizer: found no instances/recipes/nowhere, expected a file"),
        (TINY, "model.weights=nowhere", "model.weights: found no instances/recipes/nowhere, expected a file or folder"),
        ("instances/recipes/vit-tiny-ddp.yaml", "data.path=nowhere", "data.path: found no instances/recipes/nowhere"),
    ],
)
def test_a_file_that_is_not_there_is_found_before_a_run_and_by_its_check(recipe, setting, message, checked, capsys):
    """Where the recipe is looked at, by the key that names it; a data set of the hub is not looked for."""
    assert main([recipe, "--set", setting, *checked]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert main([TINY, "--set", "data.path=meta-math/MetaMathQA", "--check"]) == 0


@pytest.mark.parametrize("checked", [[], ["--check"]])
@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("vit-tiny-ddp", "batch.global_batch=33", "found 33, expected a multiple of dp x micro_batch"),
        ("vit-tiny-ddp", "parallel.tp=2", "parallel.tp: found 2, expected 1 (else backend engine)"),
        ("vit-tiny-ddp", "parallel.zero=1", "parallel.zero: found 1, expected 0 (else backend deepspeed or engine)"),
        ("vit-tiny-ddp", "lora={targets: [query, foo]}", "lora.targets: found 'foo', expected names of linear layers"),
        ("llm-1d-tiny", "validation={every: 2, fraction: 1}", "fraction: found 1, expected a number > 0 and < 1"),
    ],
)
def test_what_no_run_takes_no_check_passes(recipe, setting, message, checked, capsys):
    """`--check` finds the mistakes that a run would find before its ranks start, save those in the data."""
    words = [f"instances/recipes/{recipe}.yaml", "--set", setting, "--device", "cpu", *checked]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("recipe", ["vit-huge-zero3", "vit-huge-zeropp"])
def test_a_recipe_for_gpus_is_checked_without_any(recipe):
    """What needs a GPU, and DeepSpeed, is asked for where it runs."""
    assert main([f"instances/recipes/{recipe}.yaml", "--check", "--device", "cpu"]) == 0


def test_wandb_online_without_an_account_is_found_before_a_rank_starts(tmp_path):
    """In one line, without asking the network."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB") and key != "NETRC"}
    words = ["-m", "runners.train", TINY, "--set", "metrics.wandb=online", "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *words], env=kept | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("train: --track: found wandb online without an account, expected WANDB_API_KEY")
    assert done.stderr.count("\n") == 1


def test_a_table_is_not_a_check(capsys):
    """Asked for both, nothing runs and nothing is passed over: one line says so."""
    with pytest.raises(SystemExit, match="2"):
        main([TINY, "--table", "--check"])
    out, err = capsys.readouterr()
    assert err == "train: argument --check: not allowed with argument --table\n" and out == ""


def test_a_plan_takes_no_adapter(tmp_path, capsys):
    """Neither the engine nor a plan start from peft's files: it is said, not left out."""
    words = ["--set", "lora={adapter: somewhere}", "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert main([TINY, *words]) == 2
    assert "lora.adapter: found with backend engine, expected backend ddp or deepspeed" in capsys.readouterr().err
    assert main([TINY, *words, "--set", "backend=plan", "--set", "plan=none.json"]) == 2
    assert "lora.adapter: found with backend plan, expected backend ddp or deepspeed" in capsys.readouterr().err
