"""Training samples by their global number, the same for every plan.

Sample i of a run is a function of the data, the seed and i alone. Micro-batch m of step t is samples
t G + m b ... t G + (m + 1) b - 1 (G global batch, b micro-batch size), whichever workers compute it, so replicas see
different samples, first and last stage the same ones, and a run may go on under another plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model

BYTE_VOCABULARY = 256
IGNORED = -100
"""Target that counts nothing."""
HELD_OUT_SEED = 20261121
"""Of the choice of samples that are held out for validation."""


class Samples(Protocol):
    """Inputs and targets by sample numbers.

    Where some targets do not count (those of -100), a method ``targets(numbers)`` says how many do.
    """

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (what the embedding takes) and targets (what the head takes) of these samples."""


def count_targets(samples: Samples, numbers: range, per_sample: int) -> int:
    """Targets of these samples that count in the loss: what `samples.targets` says where it has that, else all."""
    count = getattr(samples, "targets", None)
    return len(numbers) * per_sample if count is None else int(count(numbers))


@dataclass(kw_only=True)
class Shuffled(ABC):
    """Samples that are the items of a set, all of them once an epoch, in an order shuffled anew each epoch."""

    classified: ClassVar[bool] = False
    """Whether each sample has one target, its class."""
    seed: int
    chosen: np.ndarray | None = None
    """Numbers of the items that are used; None: all."""

    def __post_init__(self) -> None:
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    @property
    @abstractmethod
    def items(self) -> int:
        """Items of the whole set."""

    def __len__(self) -> int:
        return self.items if self.chosen is None else len(self.chosen)

    def item(self, number: int) -> int:
        """The item that a sample is."""
        epoch, place = divmod(number, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
        found = self._order[place]
        return int(found if self.chosen is None else self.chosen[found])

    @abstractmethod
    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Samples.batch`."""

    def batch_or_fill(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`size` samples from `first` on; those beyond the first epoch are blank and their targets count nothing."""
        real = range(first, min(first + size, len(self)))
        inputs, targets = self.batch(real or range(1))
        if len(real) == size:
            return inputs, targets
        blank = inputs.new_zeros((size, *inputs.shape[1:])), targets.new_full((size, *targets.shape[1:]), IGNORED)
        for whole, part in zip(blank, (inputs, targets), strict=True):
            whole[: len(real)] = part[: len(real)]
        return blank


S = TypeVar("S", bound=Shuffled)


def hold_out(samples: S, fraction: float, most: int | None = None) -> tuple[S, S]:
    """Samples without a part of the items (at most so many), and those of that part; it is the same for every seed.

    Raises
    ------
    InputError
        Nothing would be left of either.
    """
    count = min(round(samples.items * fraction), most or samples.items)
    if not (fraction < 1 and 0 < count < samples.items):
        raise InputError(
            f"validation.fraction: found {fraction}, expected one that leaves some of {samples.items} samples to "
            "training and to validation"
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(samples.items)
    return replace(samples, chosen=np.sort(order[count:])), replace(samples, chosen=np.sort(order[:count]))


@dataclass(kw_only=True)
class TextSamples(Shuffled):
    """Windows of a token sequence; targets are the next tokens."""

    tokens: np.ndarray
    seq_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.items >= 1, "data: tokens", len(self.tokens), f"at least {self.seq_len + 1}")

    @property
    def items(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [self.item(number) * self.seq_len for number in numbers]
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


@dataclass(kw_only=True)
class ImageSamples(Shuffled):
    """Images with a class each."""

    classified: ClassVar[bool] = True
    images: np.ndarray
    """Shape (images, channels, side, side): floats, or bytes that become -1..1."""
    classes: np.ndarray

    @property
    def items(self) -> int:
        return len(self.classes)

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [self.item(number) for number in numbers]
        images = self.images[chosen].astype(np.float32)
        if self.images.dtype == np.uint8:
            images = images / 127.5 - 1
        return torch.from_numpy(images), torch.from_numpy(self.classes[chosen].astype(np.int64))


def english_text() -> bytes:
    """English prose that every Python brings along: the reference topics of its `help` (about 700 kB)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics)).encode()


def samples_for(model: Model, seq_len: int, seed: int, path: Path | None = None) -> Samples:
    """Samples for a model: text as bytes or a `.npy` of token numbers; images from a `.npz` (images, classes).

    Without a file, a language model reads `english_text`, an image model of the right size scikit-learn's digits.
    Raises `InputError` where the data does not fit the model.
    """
    if model.family == "vit":
        return _digits(model, seed) if path is None else _image_samples(model, seed, path)
    if path is not None and path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: found {error}, expected a .npy of token numbers") from error
        require(tokens.ndim == 1 and tokens.dtype.kind in "iu", str(path), tokens.dtype, "one row of whole numbers")
        largest = int(tokens.max(initial=0))
        require(largest < model.vocab_size, f"{path}: largest token", largest, f"less than {model.vocab_size}")
    else:
        try:
            raw = english_text() if path is None else path.read_bytes()
        except OSError as error:
            raise InputError(f"--data {path}: {error.strerror}, expected a readable file") from error
        tokens = np.frombuffer(raw, dtype=np.uint8)
        require(
            model.vocab_size >= BYTE_VOCABULARY,
            "model.vocab_size",
            model.vocab_size,
            f"at least {BYTE_VOCABULARY} (text is read byte by byte)",
        )
    return TextSamples(tokens=tokens, seq_len=seq_len, seed=seed)


def _digits(model: Model, seed: int) -> ImageSamples:
    """Handwritten digits (1797 of 8 x 8 pixels) that scikit-learn brings along."""
    shape = (model.channels, model.image_size, model.image_size)
    if shape != (1, 8, 8) or model.vocab_size < 10 or find_spec("sklearn") is None:
        raise InputError(
            "--data: found none, expected an .npz with images and classes (without it, scikit-learn's digits serve "
            f"models of 1 x 8 x 8 pixels; this one takes {' x '.join(map(str, shape))})"
        )
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None].astype(np.float32) - 8) / 8
    return ImageSamples(images=images, classes=digits.target, seed=seed)


def _image_samples(model: Model, seed: int, path: Path) -> ImageSamples:
    try:
        with np.load(path) as file:
            for key in ("images", "classes"):
                require(key in file, str(path), sorted(file), "the arrays images and classes")
            images, classes = file["images"].astype(np.float32), file["classes"]
    except (OSError, ValueError, BadZipFile, AttributeError) as error:
        raise InputError(f"{path}: found {error}, expected an .npz with images and classes") from error
    shape = (model.channels, model.image_size, model.image_size)
    require(images.shape[1:] == shape, f"{path}: images", images.shape[1:], f"shape {shape}")
    require(len(images) == len(classes) > 0, f"{path}: classes", len(classes), f"{len(images)}, one for each image")
    require(int(classes.max()) < model.vocab_size, f"{path}: classes", int(classes.max()), f"< {model.vocab_size}")
    return ImageSamples(images=images, classes=classes, seed=seed)
