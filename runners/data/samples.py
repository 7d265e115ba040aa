"""Training samples by their global number, the same for every plan.

Sample i of a run is a function of the data, the seed and i alone. Micro-batch m of step t is samples
t G + m b ... t G + (m + 1) b - 1 (G global batch, b micro-batch size), whichever workers compute it, so replicas see
different samples, first and last stage the same ones, and a run may go on under another plan.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch

from polygon.domain.errors import InputError, require
from runners.data.order import Order

IGNORED = -100
"""Target that counts nothing."""
HELD_OUT_SEED = 20261121
"""Of the choice of samples that are held out for validation."""
LOOKED_AT = 64
"""Items of a set whose content its digest stands for."""


class Samples(Protocol):
    """Inputs and targets by sample numbers.

    Where some targets do not count (those of -100), a method ``targets(numbers)`` says how many do. Where samples hold
    several documents that are not to see one another, a method ``positions(numbers)`` says where in its document every
    input is, shape (samples, seq_len); it may answer None for samples of one.
    """

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (what the embedding takes) and targets (what the head takes) of these samples."""


def count_targets(samples: Samples, numbers: range, per_sample: int) -> int:
    """Targets of these samples that count in the loss: what `samples.targets` says where it has that, else all."""
    count = getattr(samples, "targets", None)
    return len(numbers) * per_sample if count is None else int(count(numbers))


def positions_of(samples: Samples, numbers: range) -> torch.Tensor | None:
    """Place of every input in its document, shape (samples, seq_len); None where a sample is one document."""
    find = getattr(samples, "positions", None)
    return None if find is None else find(numbers)


def require_classes(classes: np.ndarray, known: int, where: str) -> None:
    """Require one row of whole numbers, those of a model that knows so many classes; InputError says where."""
    if classes.ndim != 1 or classes.dtype.kind not in "biu":
        raise InputError(f"{where}: found {classes.dtype} of shape {classes.shape}, expected one row of whole numbers")
    for found in (int(classes.min()), int(classes.max())) if len(classes) else ():
        require(0 <= found < known, where, found, f"0..{known - 1}, those of the model")


def digest_of(samples: Samples) -> str:
    """A short name of what is read, equal on ranks that read the same; empty for samples that have no `digest`."""
    digest: Callable[[], str] | None = getattr(samples, "digest", None)
    return "" if digest is None else digest()


@dataclass(kw_only=True)
class Shuffled(ABC):
    """Samples that are the items of a set, all of them once an epoch, in an order shuffled anew each epoch."""

    classified: ClassVar[bool] = False
    """Whether each sample has one target, its class."""
    seed: int
    chosen: range | None = None
    """Items that are used, as their places in the order of `HELD_OUT_SEED`; None: all."""

    def __post_init__(self) -> None:
        self._epoch, self._order = -1, Order(1, 0)
        self._held_out = None if self.chosen is None else Order(self.items, HELD_OUT_SEED)

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
            self._epoch, self._order = epoch, Order(len(self), self.seed, epoch)
        found = self._order[place]
        if self._held_out is None:
            return found
        assert self.chosen is not None
        return self._held_out[self.chosen[found]]

    @abstractmethod
    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Samples.batch`."""

    def digest(self) -> str:
        """A short name of the set: of its size, its order and the content of some of its first samples."""
        parts = hashlib.sha256(repr((type(self).__name__, self.items, self.chosen, self.seed)).encode())
        for part in self.batch(range(min(LOOKED_AT, len(self)))):
            parts.update(part.numpy().tobytes())
        return parts.hexdigest()[:12]

    def batch_or_fill(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`size` samples from `first` on; those beyond the first epoch are blank and their targets count nothing."""
        real = self._real(first, size)
        inputs, targets = self.batch(real or range(1))
        if len(real) == size:
            return inputs, targets
        blank = inputs.new_zeros((size, *inputs.shape[1:])), targets.new_full((size, *targets.shape[1:]), IGNORED)
        for whole, part in zip(blank, (inputs, targets), strict=True):
            whole[: len(real)] = part[: len(real)]
        return blank

    def positions_or_fill(self, first: int, size: int) -> torch.Tensor | None:
        """`positions_of` what `batch_or_fill` gives."""
        real = self._real(first, size)
        found = positions_of(self, real or range(1))
        if found is None or len(real) == size:
            return found
        blank = torch.arange(found.shape[1]).repeat(size, 1)
        blank[: len(real)] = found[: len(real)]
        return blank

    def _real(self, first: int, size: int) -> range:
        return range(first, min(first + size, len(self)))


S = TypeVar("S", bound=Shuffled)


def hold_out(samples: S, fraction: float, most: int | None = None, name: str = "validation.fraction") -> tuple[S, S]:
    """Samples without a part of the items (at most so many), and those of that part; it is the same for every seed.

    Raises
    ------
    InputError
        Nothing would be left of either; `name` is that of the option or field that says the fraction.
    """
    count = min(round(samples.items * fraction), most or samples.items)
    if not (fraction < 1 and 0 < count < samples.items):
        raise InputError(
            f"{name}: found {fraction}, expected one that leaves some of {samples.items} samples to "
            "training and to validation"
        )
    return replace(samples, chosen=range(count, samples.items)), replace(samples, chosen=range(count))


class Tokens(Protocol):
    """A sequence of token numbers: an array, mapped into memory or not, or several one after the other."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclass(kw_only=True)
class TokenSamples(Shuffled):
    """Stretches of a token sequence."""

    tokens: Tokens
    seq_len: int
    vocab_size: int | None = None
    """Tokens that the model knows; a sample with another one is an `InputError`. None: any."""
    name: str = "data"
    """Where the tokens come from, for messages."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens from a place on to another; a file is checked as it is read, not scanned before."""
        found = np.asarray(self.tokens[start:stop]).astype(np.int64)
        if self.vocab_size is not None and len(found):
            worst = found.min() if found.min() < 0 else found.max()
            allowed = f"0..{self.vocab_size - 1}, those of the model (another --token-type, or another tokenizer?)"
            place = start + int(np.argmax(found == worst))
            require(0 <= worst < self.vocab_size, f"{self.name}: token {place}", int(worst), allowed)
        return found

    @abstractmethod
    def targets(self, numbers: range) -> int:
        """Targets of these samples that count."""


@dataclass(kw_only=True)
class TextSamples(TokenSamples):
    """Windows of a token sequence, one after the other; targets are the next tokens."""

    def __post_init__(self) -> None:
        require(self.items >= 1, f"{self.name}: tokens", len(self.tokens), f"at least {self.seq_len + 1}")
        super().__post_init__()

    @property
    def items(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [self.item(number) * self.seq_len for number in numbers]
        rows = np.stack([self.read(start, start + self.seq_len + 1) for start in starts])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def targets(self, numbers: range) -> int:
        return len(numbers) * self.seq_len


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
