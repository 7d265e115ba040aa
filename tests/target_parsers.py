"""What Megatron-LM's and torchtitan's own parsers read in exported flags, in a process of its own.

Both are installed beside the environment (`make targets`, into `targets` of the environment's folder or
where POLYGON_TARGETS says), without what they ask for: other releases of torch, and triton, whose gigabyte nothing that
reads flags runs. Their imports name it; an empty module stands in for it. Megatron-LM's `validate_args` asks CUDA
which card it has: an H100 is said. Nothing else of them is touched.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S

FOLDER = Path(os.environ.get("POLYGON_TARGETS", Path(sys.prefix) / "targets"))

STAND_INS = """
import importlib.machinery, json, os, sys, types, typing, warnings
import typing_extensions
typing.override = typing_extensions.override  # of Python 3.12, all that Megatron-LM needs of it here
warnings.simplefilter("ignore")
class Kind(type):
    def __call__(cls, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) and not named else cls
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls
    def __getitem__(cls, key):
        return cls
class Anything(metaclass=Kind):
    pass
class Triton(types.ModuleType):
    __path__, __version__ = [], "3.0.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Triton(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.append(Finder())
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the programs say goes to standard error
"""

MEGATRON = (
    STAND_INS
    + """
import torch
torch.cuda.get_device_properties = lambda *device: types.SimpleNamespace(major=9, minor=0)
torch.cuda.get_device_capability = lambda *device: (9, 0)
from megatron.training import arguments
for words, ranks, variables in map(json.loads, sys.stdin):
    os.environ.update(variables, WORLD_SIZE=str(ranks), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    try:
        read = arguments.parse_args()
        said = dict(vars(read))
        arguments.validate_args(read)
        said["data_parallel_size"] = read.data_parallel_size
    except SystemExit:
        said = {"refused": "its parser ended"}
    except (AssertionError, ValueError, RuntimeError) as error:
        said = {"refused": repr(error)}
    finally:
        for name in variables:
            del os.environ[name]
    print(json.dumps(said, default=str), file=answers, flush=True)
"""
)

TORCHTITAN = (
    STAND_INS
    + """
import dataclasses
from torchtitan.config import ConfigManager
for words in map(json.loads, sys.stdin):
    try:
        read = ConfigManager().parse_args(["--module=llama3", "--config=llama3_8b", *words])
        said = {name: dataclasses.asdict(getattr(read, name)) for name in ("parallelism", "training")}
        said["recompute"] = type(read.activation_checkpoint).__qualname__
    except SystemExit:
        said = {"refused": "its parser ended"}
    except (AssertionError, ValueError, RuntimeError) as error:
        said = {"refused": repr(error)}
    print(json.dumps(said, default=str), file=answers, flush=True)
"""
)


def installed(module: str) -> bool:
    """Whether a target's program is there to read what is exported for it."""
    return (FOLDER / module).is_dir()


def read_by_megatron(asked: Sequence[tuple[Sequence[str], int, Mapping[str, str]]]) -> list[dict[str, Any]]:
    """Megatron-LM's arguments of every (flags, ranks, variables of the script), by `parse_args`, and accepted by
    `validate_args`; `refused` where they are not. Skips where it is not installed."""
    return _answers("megatron", MEGATRON, asked)


def read_by_torchtitan(asked: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """torchtitan's `parallelism` and `training`, and which recomputation, of every list of flags."""
    return _answers("torchtitan", TORCHTITAN, asked)


def megatron_start(files: Mapping[str, str]) -> tuple[list[str], int, dict[str, str]]:
    """Of an export's files, what the first host's script gives to Megatron-LM: flags, ranks, variables."""
    text = next(text for name, text in sorted(files.items()) if name.startswith("run-")).replace("\\\n", " ")
    flags = re.search(r"pretrain_gpt.py (.*)", text)
    ranks = re.search(r"of (\d+) ranks", text)
    assert flags and ranks, text
    variables = dict(re.findall(r"^export (CUDA_DEVICE_MAX_CONNECTIONS)=(.*)$", text, re.MULTILINE))
    return shlex.split(flags[1].replace('"$@"', "")), int(ranks[1]), variables


@cache
def _reader(module: str, program: str) -> subprocess.Popen[str]:
    """The program's process: it is imported once, reads a line a question and ends with this process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1"},
    )


def _answers(module: str, program: str, asked: Sequence[Any]) -> list[dict[str, Any]]:
    if not installed(module):
        pytest.skip(f"{module} is not installed (make targets): exports are not read by it")
    process = _reader(module, program)
    assert process.stdin is not None and process.stdout is not None
    answers = []
    for question in asked:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"{module}'s process has ended: {process.wait(PATIENCE_S)}"
        answers.append(json.loads(line))
    return answers
