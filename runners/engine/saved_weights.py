"""Weights of a checkpoint without its ranks: those of the newest step that is whole, under any plan's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polygon.domain.errors import InputError
from polygon.domain.model import Model
from runners.engine.additions import lora_shapes
from runners.engine.checkpoint import (
    SUFFIX,
    DamagedError,
    SavedProgress,
    canonical,
    file_of,
    read_file,
    saved_model,
    step_directory,
    steps_in,
)
from runners.engine.layers import parameter_shapes
from runners.engine.options import Lora
from runners.engine.pretrained import Pretrained
from runners.engine.update import AVERAGE


class SavedWeights:
    """The weights of one step.

    Parameters
    ----------
    folder : Path
        Of the step (`DIR/step-00000120`).
    average : bool
        Take the moving average of the weights, which a run with --average keeps.

    Raises
    ------
    DamagedError
        Some file of it is missing (it may still be written), cut or changed; `tensor` raises it too.
    """

    def __init__(self, folder: Path, *, average: bool = False) -> None:
        self.folder, self._key = folder, AVERAGE if average else "value"
        first = next(iter(sorted(folder.glob(f"*{SUFFIX}"))), None)
        if first is None:
            raise DamagedError(f"{folder}: found no *{SUFFIX}")
        self._stem, self._content = first.stem, read_file(first)
        self.model: Model = saved_model(self._content, folder)
        self.progress = SavedProgress(**self._content["progress"])
        said = self._content.get("lora")
        self.lora: Lora | None = None if said is None else Lora(**(said | {"dropout": 0.0}))
        """What was trained in place of the weights."""
        self.shapes: Mapping[str, torch.Size]
        """Of what was trained, by name."""
        self.shapes = parameter_shapes(self.model) if self.lora is None else lora_shapes(self.model, self.lora)
        for stem in sorted({file_of(self.model, name) for name in self.shapes}):
            if not (folder / f"{stem}{SUFFIX}").is_file():
                raise DamagedError(f"{folder}: found no {stem}{SUFFIX}")

    def tensor(self, name: str) -> torch.Tensor:
        """A whole parameter by its name in the full model. Those of a layer are best asked for one after the other."""
        found = self._state(name)
        if self._key not in found:
            raise InputError(f"{self.folder}: found no average of {name}, expected a run with --average")
        return found[self._key]

    def _state(self, name: str) -> Mapping[str, Any]:
        stem = file_of(self.model, name)
        if stem != self._stem:
            self._stem, self._content = stem, read_file(self.folder / f"{stem}{SUFFIX}")
        found = self._content["parameters"].get(canonical(self.model, name))
        if found is None or found["value"].shape != self.shapes[name]:
            raise InputError(f"{self.folder}: found no {name} of shape {tuple(self.shapes[name])}, expected a model "
                             "of the engine's own layers (not of --model-file)")  # fmt: skip
        return found


class MergedWeights:
    """Weights of a folder of Hugging Face with trained additions added to them; raises as its parts do.

    Parameters
    ----------
    saved : SavedWeights
        With additions.
    base : Path
        The folder that the run began with.
    """

    def __init__(self, saved: SavedWeights, base: Path) -> None:
        self.model, self.progress, self._saved = saved.model, saved.progress, saved
        self.shapes = parameter_shapes(saved.model)
        self._base = Pretrained(base, saved.model)

    def tensor(self, name: str) -> torch.Tensor:
        """A whole parameter by its name in the full model."""
        found, lora = self._base.tensor(name, self.shapes[name]), self._saved.lora
        part = name.removesuffix(".weight")
        if lora is None or f"{part}.lora_A.default.weight" not in self._saved.shapes:
            return found
        a, b = (self._saved.tensor(f"{part}.lora_{which}.default.weight") for which in "AB")
        return found + (lora.alpha / lora.rank) * (b @ a)


def candidates(path: Path, step: int | None) -> list[Path]:
    """Folders of steps in a checkpoint's folder, newest first; a step's own folder is the only one.

    Raises
    ------
    InputError
        There is none, or not the one that is asked for.
    """
    if any(path.glob(f"*{SUFFIX}")):
        return [path]
    steps = steps_in(path)
    if step is not None and step not in steps:
        raise InputError(f"--step: found {step}, expected one of {steps or 'none'} in {path}")
    if not steps:
        raise InputError(f"{path}: found no checkpoint, expected a folder of --checkpoint-dir")
    return [step_directory(path, found) for found in reversed(steps) if step in (None, found)]
