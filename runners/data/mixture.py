"""Samples of several sets, by weights: the set that a sample is of is computed by its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polygon.domain.errors import InputError
from runners.data.order import Order
from runners.data.samples import Shuffled, TokenSamples, positions_of

BLOCK = 10_000
"""Samples in which every set has its exact part; weights are rounded to one of so many."""


def parts_of_block(weights: Sequence[float]) -> np.ndarray:
    """Samples of every set among `BLOCK`: their sum is `BLOCK`, each is less than 1 from its weight's share.

    Raises
    ------
    InputError
        A weight is not above 0, or so small that no sample is left for its set.
    """
    for weight in weights:
        if not (np.isfinite(weight) and weight > 0):
            raise InputError(f"--data-weights: found {weight:g}, expected numbers > 0")
    exact = np.asarray(weights) / sum(weights) * BLOCK
    counts = np.floor(exact).astype(np.int64)
    for k in np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]:
        counts[k] += 1
    for weight, count in zip(weights, counts, strict=True):
        if count == 0:
            raise InputError(f"--data-weights: found {weight:g}, expected at least 1/{BLOCK} of their sum")
    return counts


class Mixture:
    """Samples of several sets for training, without end: each set begins anew, shuffled anew, when it was seen whole.

    Parameters
    ----------
    parts : sequence of TokenSamples
    weights : sequence of float
        Of samples, not of epochs.
    seed : int
        Of the order inside a block.
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float], seed: int) -> None:
        self._parts, self._weights, self._seed = parts, weights, seed
        self._counts = parts_of_block(weights)
        self._ends = np.cumsum(self._counts)
        self._block, self._order = -1, Order(1, 0)

    def place(self, number: int) -> tuple[int, int]:
        """The set that a sample is of, and its number there."""
        block, slot = divmod(number, BLOCK)
        if block != self._block:
            self._block, self._order = block, Order(BLOCK, self._seed, block)
        slot = self._order[slot]
        part = int(np.searchsorted(self._ends, slot, side="right"))
        return part, int(block * self._counts[part] + slot - (self._ends[part] - self._counts[part]))

    def _ones(self, numbers: range) -> list[tuple[TokenSamples, range]]:
        places = [self.place(number) for number in numbers]
        return [(self._parts[part], range(number, number + 1)) for part, number in places]

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Samples.batch`."""
        return _stacked(self._ones(numbers))

    def positions(self, numbers: range) -> torch.Tensor | None:
        """As `positions_of`."""
        return _positions(self._ones(numbers))

    def targets(self, numbers: range) -> int:
        """Targets of these samples that count."""
        return sum(part.targets(one) for part, one in self._ones(numbers))

    def digest(self) -> str:
        """A short name of sets and weights."""
        return "+".join(f"{part.digest()}:{weight:g}" for part, weight in zip(self._parts, self._weights, strict=True))


def _positions(ones: Sequence[tuple[TokenSamples, range]]) -> torch.Tensor | None:
    found = [positions_of(part, one) for part, one in ones]
    if all(positions is None for positions in found):
        return None
    whole = [torch.arange(part.seq_len)[None] for part, _ in ones]
    return torch.cat([one if one is not None else other for one, other in zip(found, whole, strict=True)])


def _stacked(ones: Sequence[tuple[TokenSamples, range]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(part.batch(one) for part, one in ones), strict=True)
    return torch.cat(inputs), torch.cat(targets)


@dataclass(kw_only=True)
class Together(Shuffled):
    """All samples of several sets, each once an epoch (to validate on)."""

    parts: Sequence[TokenSamples]

    @property
    def items(self) -> int:
        return sum(map(len, self.parts))

    def _ones(self, numbers: range) -> list[tuple[TokenSamples, range]]:
        ends = np.cumsum([len(part) for part in self.parts])
        items = np.array([self.item(number) for number in numbers])
        owners = np.searchsorted(ends, items, side="right")
        firsts = items - (ends - [len(part) for part in self.parts])[owners]
        return [(self.parts[k], range(i, i + 1)) for k, i in zip(owners.tolist(), firsts.tolist(), strict=True)]

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        return _stacked(self._ones(numbers))

    def positions(self, numbers: range) -> torch.Tensor | None:
        """As `positions_of`."""
        return _positions(self._ones(numbers))

    def targets(self, numbers: range) -> int:
        """Targets of these samples that count."""
        return sum(part.targets(one) for part, one in self._ones(numbers))
