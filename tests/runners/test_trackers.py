"""TensorBoard and W&B get the numbers they are given, into files that their own readers open."""

import json
import os
import pty
import subprocess
import sys

import pytest

from polygon.domain.errors import InputError
from runners.engine.trackers import open_trackers
from tests.patience import PATIENCE_S

STEPS = {0: {"loss": 5.5, "mfu": None}, 3: {"loss": 4.25, "mfu": 0.5}}


def test_tensorboard_shows_what_was_tracked(tmp_path):
    """Every number under its name and step; what is None is not there."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_trackers(["tensorboard"], tmp_path, "a run", {"plan": "p.json"}) as trackers:
        for step, values in STEPS.items():
            trackers.scalars(step, values)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(0, 5.5), (3, 4.25)]
    assert [(event.step, event.value) for event in found.Scalars("mfu")] == [(3, 0.5)]


def records(path):
    """Payloads of a W&B file: seven bytes of header, then LevelDB's log (blocks of 32 KiB, records in pieces)."""
    data, place, payload = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while place < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, piece = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        payload += data[place + 7 : place + 7 + length]
        place += 7 + length
        if piece in (1, 4):
            yield payload
            payload = b""


def test_wandb_keeps_an_offline_run(tmp_path, monkeypatch):
    """An offline run holds the settings and every number under its step."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_trackers(["wandb"], tmp_path, "a run", {"plan": "p.json"}) as trackers:
        for step, values in STEPS.items():
            trackers.scalars(step, values)
    wandb.teardown()  # ends its service process, whose address would stay in the environment
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, settings = {}, {}
    for payload in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        for config in (record.run.config, record.config):
            settings |= {item.key: json.loads(item.value_json) for item in config.update}
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if "loss" in row:
            found[record.history.step.num] = {name: row[name] for name in ("loss", "mfu") if name in row}
    assert settings["plan"] == "p.json"
    assert found == {0: {"loss": 5.5}, 3: {"loss": 4.25, "mfu": 0.5}}


@pytest.mark.parametrize(("mode", "said"), [(None, "wandb: no account here"), ("online", "without an account")])
def test_wandb_without_an_account_never_asks(mode, said, tmp_path):
    """At a terminal, too, a run without a key goes offline; one that must be online is refused with one line."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    code = f"""
from pathlib import Path
from polygon.domain.errors import InputError
from runners.engine.trackers import open_trackers
try:
    with open_trackers(["wandb"], Path({str(tmp_path)!r}), "a run", {{}}) as trackers:
        trackers.scalars(0, {{"loss": 1.0}})
except InputError as error:
    print(error)
"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB") and key != "NETRC"}
    environment = kept | {"HOME": str(tmp_path)} | ({} if mode is None else {"WANDB_MODE": mode})
    terminal, inside = pty.openpty()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code], stdin=inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
    finally:
        os.close(inside)
        os.close(terminal)
    assert said in ran.stdout and "Traceback" not in ran.stdout
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == (mode is None)


def test_unknown_and_missing_trackers_are_refused(tmp_path, monkeypatch):
    """The line says what is allowed, or what to install."""
    with (
        pytest.raises(InputError, match="--track: found 'mlflow', expected tensorboard or wandb"),
        open_trackers(["mlflow"], tmp_path, "a run", {}),
    ):
        pass
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(InputError, match=r"found wandb, expected it to be installed \(pip install wandb\)"),
        open_trackers(["wandb"], tmp_path, "a run", {}),
    ):
        pass
