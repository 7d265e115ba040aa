"""Attention in which a query sees the last `window` tokens alone, its own among them (Mistral 7B, arXiv:2310.06825).

torch's `scaled_dot_product_attention` knows no window. Queries therefore go in blocks of as many as the window has
(`polygon.domain.block.WINDOW_BLOCK` at least), each with the keys that its first and its last one see between them:
work and memory follow the window and not the sequence, at twice the keys of a window. flex_attention leaves those out,
but is slow unless it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from polygon.domain.block import WINDOW_BLOCK


class Piece(NamedTuple):
    """Queries that are looked at together, tokens [begin, end), and the first of the keys that they see."""

    begin: int
    end: int
    first: int = 0


def pieces_of(spans: Iterable[tuple[int, int]], window: int) -> Iterator[Piece]:
    """The queries of some spans of tokens in pieces; of any length where there is no window (0)."""
    for begin, end in spans:
        if not window:
            yield Piece(begin, end)
            continue
        step = max(window, WINDOW_BLOCK)
        for start in range(begin, end, step):
            yield Piece(start, min(start + step, end), max(0, start - window + 1))


@lru_cache(maxsize=8)
def window_mask(
    queries: int, before: int, window: int, dtype: torch.dtype | None, device: torch.device
) -> torch.Tensor:
    """What queries see of as many keys as there are queries and those before: 0, else minus infinity.

    Kept, as all pieces in the middle of a sequence have the same, in all blocks. Of truth values without `dtype`.
    """
    places = torch.arange(before + queries, device=device)
    apart = places[before:, None] - places[None, :]
    seen = (apart >= 0) & (apart < window)
    if dtype is None:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
