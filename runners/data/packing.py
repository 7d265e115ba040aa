"""Packing: samples of whole documents, as many as fit, none of which sees another one.

No target lies behind the end of a document, attention stays inside it, and its positions begin at 0: a packed sample
trains as its documents would each by itself (Krell et al., arXiv:2107.02027).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from runners.data.samples import IGNORED, TokenSamples


def packed_spans(documents: np.ndarray, most: int) -> np.ndarray:
    """First token and past-last token of every sample: as many whole documents in turn as have room.

    A document that is longer than a sample is cut in stretches that overlap by one token, so that every one of its
    tokens but the first is a target once.

    Parameters
    ----------
    documents : ndarray of int, shape (documents + 1,)
        First token of every document, and the end of the last.
    most : int
        Tokens that a sample has room for: inputs and the last target.

    Returns
    -------
    ndarray of int, shape (samples, 2)
    """
    firsts, lasts = documents[:-1], documents[1:]
    there = lasts > firsts
    firsts, lasts = firsts[there], lasts[there]
    stride = most - 1
    pieces = np.maximum(1, -(-(lasts - firsts - 1) // stride))
    nth = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(firsts, pieces) + nth * stride
    stops = np.minimum(starts + most, np.repeat(lasts, pieces))
    following = np.searchsorted(stops, starts + most, side="right")
    chosen, piece = [], 0
    while piece < len(starts):
        chosen.append(piece)
        piece = int(following[piece])
    first = np.array(chosen, dtype=np.int64)
    last = np.append(first[1:], len(starts)) - 1
    return np.stack([starts[first], stops[last[: len(first)]]], axis=1)


@dataclass(kw_only=True)
class PackedSamples(TokenSamples):
    """Whole documents, as many as fit, filled up with zeros that are no targets."""

    documents: np.ndarray
    """First token of every document, and the end of the last."""
    spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """See `packed_spans`; found where none are given."""

    def __post_init__(self) -> None:
        if not len(self.spans):
            found = packed_spans(self.documents, self.seq_len + 1)
            # A sample of one token has nothing to learn.
            self.spans = found[found[:, 1] - found[:, 0] > 1]
        super().__post_init__()

    @property
    def items(self) -> int:
        return len(self.spans)

    def _ends(self, start: int, stop: int) -> np.ndarray:
        """Places in a sample whose next token is another document's first."""
        borders = slice(np.searchsorted(self.documents, start, "right"), np.searchsorted(self.documents, stop, "left"))
        return np.unique(self.documents[borders]) - start - 1

    def positions(self, numbers: range) -> torch.Tensor:
        """Place of every input in its document, shape (samples, seq_len); what fills up counts as a document.

        No token is read: a rank that holds no embedding knows borders of documents as those do that have one.
        """
        places = np.arange(self.seq_len)
        begins = np.zeros((len(numbers), self.seq_len), dtype=np.int64)
        for row, number in enumerate(numbers):
            start, stop = (int(place) for place in self.spans[self.item(number)])
            first = np.append(self._ends(start, stop) + 1, stop - start - 1)
            first = first[first < self.seq_len]
            begins[row, first] = first
        return torch.from_numpy(places - np.maximum.accumulate(begins, axis=1))

    def targets(self, numbers: range) -> int:
        """Tokens of these samples that are to be learned."""
        spans = [self.spans[self.item(number)] for number in numbers]
        return sum(int(stop - start) - 1 - len(self._ends(start, stop)) for start, stop in spans)

    def batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples, shape (samples, seq_len) each."""
        inputs = np.zeros((len(numbers), self.seq_len), dtype=np.int64)
        targets = np.full((len(numbers), self.seq_len), IGNORED, dtype=np.int64)
        for row, number in enumerate(numbers):
            start, stop = (int(place) for place in self.spans[self.item(number)])
            here = self.read(start, stop)
            inputs[row, : len(here) - 1], targets[row, : len(here) - 1] = here[:-1], here[1:]
            targets[row, self._ends(start, stop)] = IGNORED
        return torch.from_numpy(inputs), torch.from_numpy(targets)
