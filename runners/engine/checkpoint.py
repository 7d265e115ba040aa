"""Checkpoints that any plan can resume from: one file per layer, under the layer's name in the full model.

``DIR/step-00000120/blocks.3.layer`` holds the weights and optimizer state of one layer with a checksum; which stage or
worker wrote it does not matter. The copies of a tied weight are one file of their own, and so is every expert. A
stage's workers share the writing, in a thread, from a copy taken between two steps; a file appears whole or not at all.
A step counts as usable for a rank when all files of its layers are there and whole; all ranks resume from the newest
step usable for all, so a damaged or unfinished one falls back to the one before. The number of samples consumed is part
of it: the order of the data goes on where it stopped, whatever plan continues.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch.distributed import Store

from polygon.domain.block import RotaryScaling
from polygon.domain.errors import InputError, PolygonError, require
from polygon.domain.model import Model
from polygon.formats.files import make_folder
from runners.engine.experts import EXPERT
from runners.engine.layers import TIED_COPY, TIED_WEIGHT

MAGIC = b"polygon1"
SUFFIX = ".layer"
OWED = "rank-{}.owed"
"""File of what one rank's packing has dropped from messages and owes to the next ones; of use under the same plan."""
TIED_FILE = "tied"


class DamagedError(Exception):
    """A file is not what was written."""


class DivergedError(PolygonError):
    """The loss or the gradient is no number any more; the message says since when, and which checkpoint is whole."""


class UnsavedError(PolygonError):
    """A checkpoint could not be written; the message says on which rank, why, and which one is the last whole one."""


@dataclass(frozen=True)
class SavedProgress:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed: the number of the next one."""
    seed: int = 0
    data: str = ""
    """Digest of what was read."""
    loss_scale: float = 0.0
    """By which losses are multiplied in fp16; 0: they are not, or it is not known."""
    good_steps: int = 0
    """Steps without overflow since the scale was last halved."""


def canonical(model: Model, name: str) -> str:
    """Name of a parameter in checkpoints: a tied head's copy is the embedding's weight."""
    return TIED_WEIGHT if name == TIED_COPY and _tied(model) else name


def file_of(model: Model, name: str) -> str:
    """Stem of the file that holds a parameter."""
    name = canonical(model, name)
    if name == TIED_WEIGHT and _tied(model):
        return TIED_FILE
    parts = name.split(".")
    if EXPERT in name:
        return ".".join((*parts[:2], "expert", parts[4]))
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def region_file(model: Model, name: str, region: str) -> str:
    """Stem of the file with what one region has of its own of a parameter, while regions train by themselves."""
    return f"{file_of(model, name)}@{quote(region, safe='')}"


def _tied(model: Model) -> bool:
    return model.tied_embeddings and model.family != "vit"


def _shape_of(model: Model) -> dict[str, Any]:
    return {key: value for key, value in asdict(model).items() if key not in ("name", "source")}


def saved_model(content: Mapping[str, Any], where: Path) -> Model:
    """The model that a file is of; what a program knew nothing of when it wrote is as by default."""
    try:
        fields = dict(content["model"])
        if fields.get("rope_scaling") is not None:
            fields["rope_scaling"] = RotaryScaling(**fields["rope_scaling"])
        return Model(name=where.stem, **fields)
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: model: {error}, expected a checkpoint of this program") from None


def write_file(path: Path, content: Any) -> None:
    """Write a file with its checksum, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    body = buffer.getbuffer()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(MAGIC + hashlib.sha256(body).digest())
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path) -> Any:
    """Content of a file; `DamagedError` where it is missing, cut or changed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    head = len(MAGIC) + hashlib.sha256().digest_size
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[head:]).digest() != data[len(MAGIC) : head]:
        raise DamagedError(f"{path}: checksum differs")
    try:
        return torch.load(io.BytesIO(data[head:]), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        # torch's message goes on with how to load it all the same, which would run whatever the file says.
        reason = str(error).splitlines()[-1].strip() if str(error) else type(error).__name__
        raise DamagedError(f"{path}: holds more than tensors and plain values ({reason})") from error


def step_directory(directory: Path, step: int) -> Path:
    """Where the files of a step are."""
    return directory / f"step-{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Steps that have a directory, oldest first; folders of other names (`step-old`) are the user's own."""
    named = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in directory.glob("step-*"))
    return sorted(int(name[1]) for name, path in named if name is not None and path.is_dir())


def prepare_folder(
    directory: Path,
    *,
    resume: bool,
    model: Model | None = None,
    seed: int | None = None,
    lora: Mapping[str, Any] | None = None,
) -> None:
    """Make a folder for checkpoints where there is none.

    Parameters
    ----------
    directory : Path
    resume : bool
        Whether a run goes on from what is there.
    model, seed : optional
        What is trained, where it is known, and the seed of the data's order.
    lora : mapping, optional
        What the additions are like, where these are trained in place of the weights.

    Raises
    ------
    InputError
        It cannot be made or written to, or holds those of another run, which then would pass for the newest of this
        one, or of another model or other additions, which this one would write over.
    """
    make_folder(directory)
    if not os.access(directory, os.W_OK):
        raise InputError(f"--checkpoint-dir {directory}: found a folder that may not be written to")
    steps = steps_in(directory)
    if steps and not resume:
        raise InputError(
            f"--checkpoint-dir {directory}: found {step_directory(directory, steps[-1]).name} in it, expected "
            "--resume (of a recipe checkpoint.resume) to go on from there, or a folder without checkpoints"
        )
    content = _newest_content(directory)
    if content is None:
        return
    if model is not None:
        require_same_model(content, directory, model)
    require_same_additions(content, directory, lora)
    if seed is not None:
        require_same_seed(content["progress"]["seed"], directory, seed)


def _newest_content(directory: Path) -> dict[str, Any] | None:
    """Of the smallest whole file of a layer in the newest step that has one; None: there is none."""
    for step in reversed(steps_in(directory)):
        files = step_directory(directory, step).glob(f"*{SUFFIX}")
        for path in sorted(files, key=lambda path: path.stat().st_size):
            try:
                return dict(read_file(path))
            except DamagedError:
                continue
    return None


def require_same_model(content: Mapping[str, Any], directory: Path, model: Model) -> None:
    """Require a file of the model that is trained; `InputError` names the first field that differs."""
    found, expected = _shape_of(saved_model(content, directory)), _shape_of(model)
    for key in expected:
        if key != "notes" and found[key] != expected[key]:
            raise InputError(f"{directory}: model.{key}: found {found[key]!r}, expected {expected[key]!r}")


def require_same_additions(content: Mapping[str, Any], directory: Path, lora: Mapping[str, Any] | None) -> None:
    """Require what LoRA trains to be the same: a run of weights finds no file of most layers among additions."""
    found = content.get("lora")
    if found is None and lora is None:
        return
    if found is None or lora is None:
        words = ["none (all weights)" if one is None else f"rank {one['rank']}" for one in (found, lora)]
        raise InputError(f"{directory}: lora: found {words[0]}, expected {words[1]}, as this run trains")
    for key in ("rank", "alpha", "targets"):
        one, other = (sorted(value) if key == "targets" else value for value in (found[key], lora[key]))
        require(one == other, f"{directory}: lora.{key}", one, f"{other}, as this run trains")


def require_same_seed(found: int, directory: Path, seed: int) -> None:
    """Require the order of the data that the saved run had."""
    require(found == seed, f"{directory}: seed of the data order", found, f"{seed} (--seed)")


def _owned(directory: Path) -> int | None:
    """A file descriptor that keeps a folder for this process while it is open; None on file systems without locks.

    Raises
    ------
    InputError
        Another run writes there: a step would have layers of both, and pass for whole.
    """
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise InputError(f"--checkpoint-dir {directory}: found another run that writes there, expected none") from None
    return held


class Checkpoints:
    """Writes and reads one rank's part of the checkpoints in a directory.

    Parameters
    ----------
    directory : Path
        Shared by all ranks, or one on each host (then a host must have the files of the layers it is to hold).
    model : Model
    keep : int
        Newest steps that are kept.
    rank, world_size : int
    store : Store
        A connection of its own: it is waited on in the writing thread.
    lora : mapping, optional
        What the additions are like, where these are trained in place of the weights.
    """

    def __init__(
        self,
        directory: Path,
        model: Model,
        keep: int,
        rank: int,
        world_size: int,
        store: Store,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        self._lora = {} if lora is None else {"lora": dict(lora)}
        self.directory, self.model, self.keep = directory, model, keep
        self._rank, self._world_size, self._store = rank, world_size, store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._whole: int | None = None
        """Newest step that all ranks are known to have saved."""
        self._own = _owned(directory) if rank == 0 else None

    def save(
        self, progress: SavedProgress, files: Mapping[str, Mapping[str, Mapping[str, Any]]], owed: Mapping[str, Any]
    ) -> None:
        """Copy the tensors and write them in the background.

        Parameters
        ----------
        progress : Progress
        files : mapping of file stem to mapping of parameter name to its tensors
            This rank's part.
        owed : mapping
            What this rank's packing owes (see `OWED`); empty: nothing.
        """
        self.wait()
        self._writing = self._thread.submit(self._write, progress, _copy(files), _copy(owed))

    def _write(
        self, progress: SavedProgress, files: Mapping[str, Mapping[str, Mapping[str, Any]]], owed: Mapping[str, Any]
    ) -> None:
        place = step_directory(self.directory, progress.step)
        head = {"progress": asdict(progress), "model": _shape_of(self.model), **self._lora}
        outcome = "ok"
        try:
            for stem, parameters in files.items():
                write_file(place / f"{stem}{SUFFIX}", head | {"parameters": parameters})
            if owed:
                write_file(place / OWED.format(self._rank), dict(owed))
        except OSError as error:
            outcome = f"{place}: {error.strerror}"
        key = f"saved/{progress.step}"
        self._store.set(f"{key}/{self._rank}", outcome)
        outcomes = [self._store.get(f"{key}/{rank}").decode() for rank in range(self._world_size)]
        failed = [(rank, text) for rank, text in enumerate(outcomes) if text != "ok"]
        if failed:
            shutil.rmtree(place, ignore_errors=True)
            rank, why = failed[0]
            raise UnsavedError(f"checkpoint of step {progress.step} not written on rank {rank}: {why}; {self.last}")
        self._whole = progress.step
        for step in [s for s in steps_in(self.directory) if s <= progress.step][: -self.keep]:
            shutil.rmtree(step_directory(self.directory, step), ignore_errors=True)

    def wait(self) -> None:
        """Return when the last save is done on all ranks; `UnsavedError` if it could not be written somewhere."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    @property
    def last(self) -> str:
        """Where the last whole checkpoint is, in words."""
        if self._whole is None:
            return "this run has saved none"
        return f"the last whole one is {step_directory(self.directory, self._whole)}"

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._writing is not None and not self._writing.done()

    def close(self) -> None:
        """Wait for the last save and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._own is not None:
                os.close(self._own)
                self._own = None

    def usable(self, stems: Iterable[str]) -> tuple[list[int], list[str]]:
        """Steps whose files of these layers are whole, oldest first, and what is wrong with the others."""
        wanted, good, faults = sorted(set(stems)), [], []
        for step in steps_in(self.directory):
            try:
                for stem in wanted:
                    read_file(step_directory(self.directory, step) / f"{stem}{SUFFIX}")
                good.append(step)
            except DamagedError as fault:
                faults.append(str(fault))
        return good, faults

    def agree(self, stems: Iterable[str]) -> tuple[int | None, list[str]]:
        """The newest step that every rank can load (None: there is none), and what this rank found damaged."""
        wanted = list(stems)
        steps, faults = self.usable(wanted)
        # A rank that trains nothing goes along with the others, and needs no file.
        self._store.set(f"usable/{self._rank}", json.dumps(steps if wanted else None))
        if self._rank == 0:
            told = [json.loads(self._store.get(f"usable/{rank}")) for rank in range(self._world_size)]
            common = set.intersection(*(set(known) for known in told if known is not None))
            self._store.set("resume", json.dumps(max(common, default=None)))
        self._whole = json.loads(self._store.get("resume"))
        return self._whole, faults

    def load(self, step: int, names: Iterable[str], seed: int) -> tuple[SavedProgress, dict[str, dict[str, Any]]]:
        """Progress and the state of the named parameters at a step.

        Raises
        ------
        InputError
            The checkpoint is of another model or data order.
        """
        states: dict[str, dict[str, Any]] = {}
        progress = SavedProgress()
        by_file: dict[str, Any] = {}
        for name in names:
            stem = file_of(self.model, name)
            if stem not in by_file:
                by_file[stem] = read_file(step_directory(self.directory, step) / f"{stem}{SUFFIX}")
            content = by_file[stem]
            require_same_model(content, self.directory, self.model)
            require_same_additions(content, self.directory, self._lora.get("lora"))
            progress = SavedProgress(**content["progress"])
            if canonical(self.model, name) not in content["parameters"]:
                raise InputError(f"{self.directory}: found no {name}, expected a checkpoint of what is trained here")
            states[name] = content["parameters"][canonical(self.model, name)]
        if states:
            self._store.set("progress", json.dumps(asdict(progress)))
        else:
            progress = SavedProgress(**json.loads(self._store.get("progress")))
        require_same_seed(progress.seed, self.directory, seed)
        return progress, states

    def load_region(self, step: int, names: Iterable[str], region: str) -> dict[str, dict[str, Any]] | None:
        """Optimizer state that a region had of its own; None where one of the files is not there or damaged."""
        states: dict[str, dict[str, Any]] = {}
        try:
            for name in names:
                content = read_file(
                    step_directory(self.directory, step) / f"{region_file(self.model, name, region)}{SUFFIX}"
                )
                states[name] = content["parameters"][canonical(self.model, name)]
        except DamagedError:
            return None
        return states

    def load_owed(self, step: int) -> dict[str, Any] | None:
        """What this rank's packing owed at a step; None where it is not there or damaged."""
        try:
            return read_file(step_directory(self.directory, step) / OWED.format(self._rank))
        except DamagedError:
            return None


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
