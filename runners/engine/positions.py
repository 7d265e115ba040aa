"""Rotary positions: how fast every pair of numbers of a head turns from token to token.

Llama's convention: the halves of a head make the pairs. Stretched over longer sequences as `RotaryScaling` says.
"""

from __future__ import annotations

import math

import torch

from polygon.domain.block import RotaryScaling


def frequencies(half: int, base: float, scaling: RotaryScaling | None, device: torch.device) -> torch.Tensor:
    """Radians a token of each of `half` pairs, fp32."""
    places = torch.arange(half, device=device, dtype=torch.float32)
    plain = base ** (-places / half)
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched
    # How often a pair turns in the first training's sequences.
    turns = scaling.original_tokens * plain / (2 * math.pi)
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency, scaling.high_frequency
        left = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns > low).float()
    else:
        # YaRN's ramp is over the pairs' numbers between those that turn `fast` and `slow` times.
        first, last = (_pair_that_turns(often, half, base, scaling) for often in (scaling.fast, scaling.slow))
        if scaling.rounded:
            first, last = float(math.floor(first)), float(math.ceil(last))
        first, last = max(first, 0.0), min(last, 2.0 * half - 1)
        left = 1 - ((places - first) / (last - first if last > first else 1e-3)).clamp(0, 1)
    return stretched * (1 - left) + plain * left


def _pair_that_turns(often: float, half: int, base: float, scaling: RotaryScaling) -> float:
    """Number of the pair, between two of them as a fraction, that turns so often in the first training's sequences."""
    return half * math.log(scaling.original_tokens / (often * 2 * math.pi)) / math.log(base)


def rotate(
    x: torch.Tensor,
    base: float = 10000.0,
    positions: torch.Tensor | None = None,
    scaling: RotaryScaling | None = None,
) -> torch.Tensor:
    """Queries or keys, shape (batch, heads, tokens, head_dim), turned by where their tokens stand.

    `positions`, shape (batch, tokens): of every token, where they are not 0, 1, 2, ...
    """
    half = x.shape[-1] // 2
    frequency = frequencies(half, base, scaling, x.device)
    if positions is None:
        angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
    else:
        angle = positions[:, None, :, None].to(torch.float32) * frequency
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None and scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]], dim=-1)
