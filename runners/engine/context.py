"""Attention over sequences that are cut into parts, by heads or by gathered keys.

Between the blocks a rank of a worker's `cp` ranks holds two of 2 cp pieces of a sequence, the p-th from the front and
the p-th from the back: all ranks then do as much of causal attention. Where a rank's tokens cannot be halved it has the
tokens [p s / cp, (p + 1) s / cp). By heads, an exchange before attention gives it all tokens of 1/cp of the heads, and
after it another one brings its own tokens back; each rank sends :math:`(cp - 1) / cp` of what it holds. Grouped key and
value heads that are fewer than the ranks go to several. Where the heads cannot be shared out like that, the keys and
values of all tokens are gathered instead.

References
----------
Jacobs et al., arXiv:2309.14509 (DeepSpeed-Ulysses); Grattafiori et al., arXiv:2407.21783, section 3.3.2 (gathered,
pieces from both ends).
"""

from __future__ import annotations

import torch
from polygon_comm.exchange import ExchangeGroup


def spans_of(tokens: int, group: ExchangeGroup) -> list[tuple[int, int]]:
    """Which tokens of a sequence this rank holds, as begins and ends, in the order in which it holds them."""
    size, place = group.size, group.place
    if tokens % (2 * size):
        return [(place * tokens // size, (place + 1) * tokens // size)]
    piece = tokens // (2 * size)
    return [(i * piece, (i + 1) * piece) for i in (place, 2 * size - 1 - place)]


def part_of(whole: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
    """This rank's tokens of (batch, tokens, ...)."""
    return torch.cat([whole[:, begin:end] for begin, end in spans_of(whole.shape[1], group)], 1)


def in_order(parts: torch.Tensor, axis: int) -> torch.Tensor:
    """From (..., ranks, tokens of each, ...) to all tokens of a sequence in their order, at one axis."""
    if parts.shape[axis + 1] % 2:
        return parts.flatten(axis, axis + 1)
    front, back = parts.chunk(2, axis + 1)
    return torch.cat([x.flatten(axis, axis + 1) for x in (front, back.flip(axis))], axis)


def dealt(whole: torch.Tensor, size: int, axis: int) -> torch.Tensor:
    """Back from all tokens in their order to (..., ranks, tokens of each, ...)."""
    if whole.shape[axis] % (2 * size):
        return whole.unflatten(axis, (size, -1))
    front, back = (x.unflatten(axis, (size, -1)) for x in whole.chunk(2, axis))
    return torch.cat([front, back.flip(axis)], axis + 1)


def gathered(key: torch.Tensor, value: torch.Tensor, group: ExchangeGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all tokens, in their order, from those of this rank's.

    Parameters
    ----------
    key, value : tensor, shape (batch, heads, tokens / cp, head_dim)

    Returns
    -------
    key, value : tensor, shape (batch, heads, tokens, head_dim)
        In backward each rank sums what the others' queries make of its keys.
    """
    own = torch.stack([key, value])
    every = group.swap(own.expand(group.size, *own.shape))
    k, v = in_order(every.permute(1, 2, 3, 0, 4, 5), 3)
    return k, v


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
    whole = in_order(group.swap(blocks).permute(2, 1, 0, 3, 4), 2)
    q, k, v = whole.split(counts, dim=1)
    return q, k, v


def to_tokens(mixed: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
    """Back from (batch, this rank's heads, all tokens, head_dim) to all heads of this rank's tokens."""
    blocks = dealt(mixed, group.size, 2).permute(2, 1, 0, 3, 4)
    return group.swap(blocks).flatten(0, 1).transpose(0, 1)
