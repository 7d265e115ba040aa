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


class Turns:
    """Cosines and sines by which queries and keys are turned, of the last positions asked for.

    One object for all layers of a rank: its blocks ask for the same ones, and a GPU's host needs a third of a block's
    time to launch what they are made of.
    """

    def __init__(self, base: float = 10000.0, scaling: RotaryScaling | None = None) -> None:
        self._base, self._scaling = base, scaling
        self._key: tuple[object, ...] = ()
        self._positions: torch.Tensor | None = None
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """For queries or keys, shape (batch, heads, tokens, head_dim): each of shape (..., tokens, head_dim / 2).

        `positions`, shape (batch, tokens): of every token, where they are not 0, 1, 2, ...
        """
        if torch.compiler.is_compiling():
            # The compiler joins all this with what it is for.
            return self._made(x, positions)
        key = (x.shape[-2], x.shape[-1], x.dtype, x.device)
        if self._found is None or key != self._key or positions is not self._positions:
            self._found, self._key, self._positions = self._made(x, positions), key, positions
        return self._found

    def _made(self, x: torch.Tensor, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = frequencies(x.shape[-1] // 2, self._base, self._scaling, x.device)
        if positions is None:
            angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
        else:
            angle = positions[:, None, :, None].to(torch.float32) * frequency
        cos, sin = angle.cos(), angle.sin()
        if self._scaling is not None and self._scaling.attention_factor != 1:
            cos, sin = cos * self._scaling.attention_factor, sin * self._scaling.attention_factor
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys, shape (batch, heads, tokens, head_dim), turned by where their tokens stand (`Turns.of`)."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]], dim=-1)
