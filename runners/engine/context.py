"""Attention over sequences that are cut into parts: for the attention alone every rank gets some heads of all tokens.

Between the blocks a rank of a worker's `cp` ranks holds tokens [p s / cp, (p + 1) s / cp). Before attention one
exchange gives it all tokens of 1/cp of the heads, after it another one brings its own tokens back; each rank sends
:math:`(cp - 1) / cp` of what it holds. Grouped key and value heads that are fewer than the ranks go to several.

References
----------
Jacobs et al., arXiv:2309.14509 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

import torch
from polygon_comm.exchange import ExchangeGroup


def part_of(whole: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
    """This rank's tokens of (batch, tokens, ...)."""
    return whole.chunk(group.size, 1)[group.place]


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: ExchangeGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From all heads of this rank's tokens to this rank's heads of all tokens.

    Parameters
    ----------
    query, key, value : tensor, shape (batch, heads, tokens / cp, head_dim)
        The number of query heads is a multiple of cp, that of key heads a multiple or a divisor.
    """
    size = group.size
    if key.shape[1] % size:
        copies = size // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    counts = [x.shape[1] // size for x in (query, key, value)]
    # (batch, heads, tokens, dim) -> (target, its heads of query, key and value, batch, tokens, dim)
    blocks = torch.cat([x.unflatten(1, (size, -1)).permute(1, 2, 0, 3, 4) for x in (query, key, value)], dim=1)
    # (source, heads, batch, tokens, dim) -> (batch, heads, all tokens, dim)
    whole = group.swap(blocks).permute(2, 1, 0, 3, 4).flatten(2, 3)
    q, k, v = whole.split(counts, dim=1)
    return q, k, v


def to_tokens(mixed: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
    """Back from (batch, this rank's heads, all tokens, head_dim) to all heads of this rank's tokens."""
    blocks = mixed.unflatten(2, (group.size, -1)).permute(2, 1, 0, 3, 4)
    return group.swap(blocks).flatten(0, 1).transpose(0, 1)
