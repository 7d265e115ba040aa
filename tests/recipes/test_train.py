"""Recipes as people start them: alone, under torchrun, with fields set on the command line, with mistakes."""

import json
import subprocess
import sys

import pytest

from runners.train import main

TINY = "instances/recipes/llm-1d-tiny.yaml"


def train(*arguments, launcher=("-m",)):
    """The finished command."""
    return subprocess.run(
        [sys.executable, *launcher, "runners.train", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_alone_and_under_torchrun_the_same_loss(tmp_path):
    """The program starts its ranks itself, or is one of torchrun's; the losses are the same."""
    alone = train(TINY, "--steps", 2, "-o", tmp_path / "a", "--json")
    assert alone.returncode == 0, alone.stderr
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    under = train(TINY, "--set", "steps=2", "-o", tmp_path / "b", "--json", launcher=torchrun)
    assert under.returncode == 0, under.stderr
    first, second = (json.loads(done.stdout) for done in (alone, under))
    assert first["steps"] == 2 and first["order_differs_on_ranks"] == []
    assert second["last_loss"] == pytest.approx(first["last_loss"], rel=1e-6)


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
    ],
)
def test_mistakes_are_one_line(setting, message, capsys):
    """A mistake ends with exit code 2 and one line that names the place."""
    assert main([TINY, "--set", setting]) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.strip().splitlines()) == 1 and out == ""
