"""Checkpoints of replicas: torch's in the files of the execution engine, DeepSpeed's in its own.

What torch's replicas save, the engine resumes from under any degrees, and the other way round. DeepSpeed's files fit
the ranks that wrote them; they count once a file beside them says that all ranks have written theirs.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import Store

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from polygon.formats.files import write_json
from runners.engine.checkpoint import (
    Checkpoints,
    SavedProgress,
    UnsavedError,
    canonical,
    file_of,
    prepare_folder,
)
from runners.engine.layers import layer_name
from runners.engine.optimizers import STATE_KEYS
from runners.engine.update import GROWTH_STEPS
from runners.recipes.recipe_schema import CheckpointPart, LoraPart
from runners.recipes.replicas.whole import WholeModel

WHOLE = "whole.json"
"""Written last into a checkpoint of DeepSpeed: how far the run had come, and for which ranks its files are."""


@dataclass(frozen=True)
class Home:
    """Where a rank's checkpoints are."""

    folder: Path
    part: CheckpointPart
    model: Model
    seed: int
    rank: int
    ranks: int
    store: Store
    lora: LoraPart | None = None


class Saved(Protocol):
    """One rank's part of the checkpoints."""

    def resume(self) -> SavedProgress | None:
        """Load the newest whole checkpoint; None: there is none."""

    def save(self, progress: SavedProgress) -> None:
        """Keep the state as it is now."""

    def close(self) -> None:
        """Wait until everything is written."""


class LayerFiles:
    """What is trained, and its optimizer's state, layer by layer in the engine's files; ranks share the writing."""

    def __init__(
        self, home: Home, whole: WholeModel, optimizer: torch.optim.Optimizer, name: str, scaler: torch.amp.GradScaler
    ) -> None:
        self._home, self._optimizer, self._scaler, self._keys = home, optimizer, scaler, STATE_KEYS[name]
        self._trained = {_in_full_model(home.model, n): p for n, p in whole.named_parameters() if p.requires_grad}
        lora = None if home.lora is None else home.lora.additions
        prepare_folder(home.folder, resume=home.part.resume, model=home.model, seed=home.seed, lora=lora)
        store = home.store.clone()  # type: ignore[attr-defined]
        self._files = Checkpoints(home.folder, home.model, home.part.keep, home.rank, home.ranks, store, lora)

    def resume(self) -> SavedProgress | None:
        model = self._home.model
        step, _ = self._files.agree(file_of(model, name) for name in self._trained)
        if step is None:
            return None
        progress, states = self._files.load(step, self._trained, self._home.seed)
        for name, parameter in self._trained.items():
            state = states[name]
            with torch.no_grad():
                parameter.copy_(state["value"])
            if state["updates"]:
                missing = [key for key in self._keys if key not in state]
                require(not missing, "checkpoint: optimizer state", sorted(state), f"{self._keys}")
                kept = {key: state[key].to(parameter.device) for key in self._keys}
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(state["updates"]), device=parameter.device)
                } | kept
        if self._scaler.is_enabled() and progress.loss_scale:
            known = {"scale": progress.loss_scale, "_growth_tracker": progress.good_steps % GROWTH_STEPS}
            self._scaler.load_state_dict(self._scaler.state_dict() | known)
        return progress

    def save(self, progress: SavedProgress) -> None:
        try:
            self._files.wait()
        except UnsavedError as error:  # of an earlier step; that of the last one ends the run
            print(f"rank {self._home.rank}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        files: dict[str, dict[str, Mapping[str, Any]]] = {}
        for name, parameter in self._trained.items():
            held = self._optimizer.state[parameter]
            kept = {key: held[key] for key in self._keys if key in held}
            state = {"value": parameter.detach()} | kept | {"updates": int(held.get("step", progress.step))}
            files.setdefault(file_of(self._home.model, name), {})[canonical(self._home.model, name)] = state
        if self._scaler.is_enabled():
            scaling = self._scaler.state_dict()
            progress = replace(progress, loss_scale=scaling["scale"], good_steps=scaling["_growth_tracker"])
        mine = sorted(files)[self._home.rank :: self._home.ranks]
        self._files.save(progress, {stem: files[stem] for stem in mine}, {})

    def close(self) -> None:
        self._files.close()


def _in_full_model(model: Model, name: str) -> str:
    """`layers.3.attention.query.weight` as checkpoints have it: `blocks.2.attention.query.weight`."""
    _, layer, part = name.split(".", maxsplit=2)
    return f"{layer_name(model, int(layer))}.{part}"


class EngineFiles:
    """DeepSpeed's own checkpoints, one folder a step."""

    def __init__(self, home: Home, engine: Any, zero: int) -> None:
        self._home, self._engine, self._zero = home, engine, zero
        newest = self._whole()[-1:]
        expected = "checkpoint.resume to go on from there, or a folder without checkpoints"
        require(home.part.resume or not newest, "checkpoint.folder", str(*(one.parent for one in newest)), expected)

    def _whole(self) -> list[Path]:
        return sorted(self._home.folder.glob(f"deepspeed-*/{WHOLE}"))

    def resume(self) -> SavedProgress | None:
        found = self._whole()
        if not found:
            return None
        said = json.loads(found[-1].read_text(encoding="utf-8"))
        place = found[-1].parent
        expected = {"ranks": self._home.ranks, "zero": self._zero, "seed": self._home.seed}
        for key, value in expected.items():
            require(said[key] == value, f"{place}: {key}", said[key], f"{value} (DeepSpeed's files fit their ranks)")
        try:
            self._engine.load_checkpoint(str(self._home.folder), tag=place.name)
        except Exception as error:
            raise InputError(f"{place}: {str(error).splitlines()[0]}, expected a checkpoint of this recipe") from error
        return SavedProgress(said["step"], said["samples"], said["seed"])

    def save(self, progress: SavedProgress) -> None:
        home, tag = self._home, f"deepspeed-{progress.step:08d}"
        self._engine.save_checkpoint(str(home.folder), tag=tag)
        distributed.barrier()
        if home.rank == 0:
            write_json(home.folder / tag / WHOLE, asdict(progress) | {"ranks": home.ranks, "zero": self._zero})
            for old in self._whole()[: -home.part.keep]:
                shutil.rmtree(old.parent)

    def close(self) -> None:
        distributed.barrier()
