"""First weights from a folder of Hugging Face: safetensors of the kinds of model in `runners.engine.architectures`.

A rank reads its own layers alone, of these the slices of its tensor-parallel place and its experts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from polygon.domain.errors import InputError, Phrase, require
from polygon.domain.model import Model
from polygon.formats.files import read_json, read_model
from runners.engine.architectures import Place, architecture_of, check_config

CONFIG = "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LOOKED_AT_BYTES = 1 << 16
NUMBERS = ("F64", "F32", "BF16", "F16")
"""Types of tensors, as safetensors calls them, that weights may have."""
HEAD, EMBEDDING = "head.output.weight", "embedding.tokens.weight"


class Pretrained:
    """The weights in a folder.

    Parameters
    ----------
    folder : Path
        With `config.json` and `model.safetensors`, or several files and their index.
    model : Model
        What the weights are for.

    Raises
    ------
    InputError
        No such files, another model, one that the engine's layers do not compute, or safetensors is not installed.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder, self.model = folder, model
        self.read_bytes = 0
        """Bytes of the files' tensors that were read."""
        self._open_files: dict[str, Any] = {}
        if not folder.is_dir():
            raise InputError(f"weights: found no folder {folder}, expected one of Hugging Face")
        if not (folder / CONFIG).exists():
            raise InputError(f"weights: {folder}: found no {CONFIG}")
        config = read_json(folder / CONFIG)
        require(isinstance(config, dict), str(folder / CONFIG), type(config).__name__, "an object with a model_type")
        self._names = architecture_of(model, str(config.get("model_type")))
        self._file_of = self._listed()
        check_same(read_model(folder), model, f"{folder / CONFIG}")
        check_config(config, model, f"{folder / CONFIG}")
        self._top = self._names.top
        if self._file_of and not any(name.startswith(self._top) for name in self._file_of):
            self._top = ""

    def _listed(self) -> dict[str, str]:
        """File of every tensor."""
        index = self.folder / INDEX
        if index.exists():
            try:
                files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"{index}: {error!r}, expected an index of safetensors files") from None
            for name, file in files.items():
                if file != Path(str(file)).name:  # of this folder: the index may come from a stranger
                    raise InputError(f"{index}: {name}: found {file!r}, expected the name of a file in the same folder")
            return files
        if not (self.folder / SINGLE).exists():
            raise InputError(f"weights: {self.folder}: found no {SINGLE} and no {INDEX}")
        return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def place(self, name: str) -> Place:
        """Where a parameter is, by its name in the full model."""
        tied = name == HEAD and self.model.tied_embeddings
        found = self._names.place(EMBEDDING if tied else name, self.model)
        top = self._names.top
        if self._top != top and found.name.startswith(top):
            return replace(found, name=found.name.removeprefix(top))
        return found

    def _slice(self, name: str, shape: torch.Size) -> tuple[Place, Any]:
        """A tensor of a file, not read yet; its shape must be that of a parameter."""
        place = self.place(name)
        path = self._file_of.get(place.name)
        if path is None:
            raise InputError(f"weights: {self.folder}: found no tensor {place.name}")
        try:
            found = self._file(path).get_slice(place.name)
        except _errors() as error:
            raise InputError(f"{self.folder / path}: {error}, expected {place.name} in it") from None
        expected = [place.rows or shape[0], *shape[1:]]
        expected = expected[::-1] if place.transposed else expected
        where = f"{self.folder / path}: {place.name}: shape"
        require(found.get_shape() == expected, where, tuple(found.get_shape()), str(tuple(expected)))
        # Quantised ones mean nothing without their factors, and trained they would lose what they are.
        kinds = f"one of {', '.join(NUMBERS)} (weights that are not quantised)"
        require(found.get_dtype() in NUMBERS, where.removesuffix("shape") + "type", Phrase(found.get_dtype()), kinds)
        return place, found

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Require a tensor of the right shape for every parameter of the full model, and none that has no use.

        Reads the heads of the files alone.

        Raises
        ------
        InputError
            The first that is missing, of another shape or of no use.
        """
        used = {self._slice(name, shape)[0].name for name, shape in shapes.items()}
        tied = {self._names.outside[HEAD]} if self.model.tied_embeddings else set()
        for name in sorted(set(self._file_of) - used - tied):
            if not re.fullmatch(self._names.ignored, name):
                path = self.folder / self._file_of[name]
                raise InputError(f"{path}: found a tensor {name}, which {self.model.name} has no place for")

    def tensor(
        self, name: str, shape: torch.Size, dim: int | None = None, place: int = 0, size: int = 1
    ) -> torch.Tensor:
        """A parameter or a slice of it, in fp32.

        Parameters
        ----------
        name : str
            In the full model.
        shape : torch.Size
            Of the whole parameter.
        dim, place, size : int
            Read part number `place` of `size` along this dimension; None: all.

        Raises
        ------
        InputError
            The folder has no such tensor, or it has another shape.
        """
        found, held = self._slice(name, shape)
        ranges = [(0, length) for length in shape]
        if dim is not None:
            each = shape[dim] // size
            ranges[dim] = place * each, (place + 1) * each
        ranges[0] = ranges[0][0] + found.first, ranges[0][1] + found.first
        cut = tuple(slice(*part) for part in (reversed(ranges) if found.transposed else ranges))
        tensor = held[cut]
        self.read_bytes += tensor.nbytes
        return (tensor.T if found.transposed else tensor).to(torch.float32, copy=True).contiguous()

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            self._open_files[name] = open_safetensors(self.folder / name)
        return self._open_files[name]


def weights_digest(folder: Path) -> str:
    """A short name of what a folder's files hold: of their sizes, and of some bytes at start, middle and end of each.

    Ranks that start from other weights under the same names would train apart without a word.
    """
    parts = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        parts.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - LOOKED_AT_BYTES)):
                file.seek(start)
                parts.update(file.read(LOOKED_AT_BYTES))
    return parts.hexdigest()[:12]


def _errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return OSError, SafetensorError


def open_safetensors(path: Path) -> Any:
    """A file of tensors, mapped into memory; raises `InputError` where it cannot be had."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError("weights: expected safetensors installed (pip install safetensors)") from None
    try:
        return safe_open(path, framework="pt")
    except _errors() as error:
        reason = getattr(error, "strerror", None) or str(error).partition(f": {path}")[0]
        raise InputError(f"{path}: {reason}, expected a safetensors file") from None


def check_same(found: Model, model: Model, where: str) -> None:
    """Require a model with the sizes and numbers of another; their names may differ."""
    positions = () if model.learned_positions else ("max_seq_len",)
    for one in fields(Model):
        if one.name not in ("name", "source", "notes", *positions):
            theirs, ours = getattr(found, one.name), getattr(model, one.name)
            expected = f"{ours!r}, as {model.name} has (a plan for these weights: polygon search --model FOLDER)"
            require(theirs == ours, f"{where}: {one.name}", theirs, expected)
