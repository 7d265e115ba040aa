"""Attention over sequences that are cut into parts, by heads or by gathered keys.

Between the blocks a rank of a worker's `cp` ranks holds tokens [p s / cp, (p + 1) s / cp). By heads, an exchange before
attention gives it all tokens of 1/cp of the heads, after it another one brings its own tokens back; each rank sends
:math:`(cp - 1) / cp` of what it holds. Grouped key and value heads that are fewer than the ranks go to several. Where
the heads cannot be shared out like that, keys and values of all tokens are gathered instead; the last rank's queries
then see most of them.

References
----------
Jacobs et al., arXiv:2309.14509 (DeepSpeed-Ulysses); Grattafiori et al., arXiv:2407.21783, section 3.3.2 (gathered).
"""

from __future__ import annotations

import torch
from polygon_comm.exchange import ExchangeGroup


def part_of(whole: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
    """This rank's tokens of (batch, tokens, ...)."""
    return whole.chunk(group.size, 1)[group.place]


def gathered(
    key: torch.Tensor, value: torch.Tensor, group: ExchangeGroup, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that this rank's queries see, of all tokens or, causal, up to its last, from those of its own.

    Parameters
    ----------
    key, value : tensor, shape (batch, heads, tokens / cp, head_dim)

    Returns
    -------
    key, value : tensor, shape (batch, heads, tokens or (place + 1) tokens / cp, head_dim)
        In backward each rank sums what the others' queries make of its keys.
    """
    own = torch.stack([key, value])
    seen = group.place + 1 if causal else group.size
    every = group.swap(own.expand(group.size, *own.shape))[:seen]
    k, v = every.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
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
    whole = group.swap(blocks).permute(2, 1, 0, 3, 4).flatten(2, 3)
    q, k, v = whole.split(counts, dim=1)
    return q, k, v


def to_tokens(mixed: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
    """Back from (batch, this rank's heads, all tokens, head_dim) to all heads of this rank's tokens."""
    blocks = mixed.unflatten(2, (group.size, -1)).permute(2, 1, 0, 3, 4)
    return group.swap(blocks).flatten(0, 1).transpose(0, 1)
