"""Training samples by their global number, the same for every plan.

Sample i of a run is a function of the data, the seed and i alone. Micro-batch m of step t is samples
t G + m b ... t G + (m + 1) b - 1 (G global batch, b micro-batch size), whichever workers compute it, so replicas see
different samples, first and last stage the same ones, and a run may go on under another plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model

BYTE_VOCABULARY = 256


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


@dataclass
class TextSamples:
    """Windows of a token sequence, in an order shuffled anew each epoch; targets are the next tokens."""

    tokens: np.ndarray
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        self.windows = (len(self.tokens) - 1) // self.seq_len
        require(self.windows >= 1, "data: tokens", len(self.tokens), f"at least {self.seq_len + 1}")
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        return int(self._order[place]) * self.seq_len

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [self._start(number) for number in numbers]
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


@dataclass
class ImageSamples:
    """Images with a class each, in an order shuffled anew each epoch."""

    images: np.ndarray
    """float32, shape (images, channels, side, side)."""
    classes: np.ndarray
    seed: int

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(self.images)
        chosen = [int(np.random.default_rng([self.seed, i // n]).permutation(n)[i % n]) for i in numbers]
        return torch.from_numpy(self.images[chosen]), torch.from_numpy(self.classes[chosen].astype(np.int64))


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
        tokens = np.load(path, mmap_mode="r")
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
    with np.load(path) as file:
        for key in ("images", "classes"):
            require(key in file, str(path), sorted(file), "the arrays images and classes")
        images, classes = file["images"].astype(np.float32), file["classes"]
    shape = (model.channels, model.image_size, model.image_size)
    require(images.shape[1:] == shape, f"{path}: images", images.shape[1:], f"shape {shape}")
    require(len(images) == len(classes) > 0, f"{path}: classes", len(classes), f"{len(images)}, one for each image")
    require(int(classes.max()) < model.vocab_size, f"{path}: classes", int(classes.max()), f"< {model.vocab_size}")
    return ImageSamples(images=images, classes=classes, seed=seed)
