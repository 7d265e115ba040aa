"""Products of linear layers in 8 bits: inputs and weights as e4m3, gradients as e5m2, each with one factor a tensor.

The factor brings the largest number of a tensor to the largest of its format, found anew each time (no history of
earlier steps). Sums inside a product have 32 bits, what comes out has 16. A layer whose width is no multiple of 16
computes in 16 bits, as does everything but the products. On a GPU torch's compiler makes one kernel each of finding the
largest, of casting and of transposing, where it has what it needs.

`torch.nn.functional.scaled_mm` does the products. torchao's `Float8Linear` is a module for whole layers, not meant to
be called from outside; products that a tensor-parallel group cuts, and of gathered tokens, have no such module.

References
----------
Micikevicius et al., arXiv:2209.05433 (formats). NVIDIA, Transformer Engine's per-tensor current scaling (recipe).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from runners.engine.compilation import has_compiler

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Of the inner and the outer width of a product, so that the device's units take it."""
LEAST = 1e-12
"""Stands for the largest of numbers that are all zero."""
TENSORWISE = functional.ScalingType.TensorWise


class Narrowed(NamedTuple):
    """A matrix in 8 bits."""

    values: torch.Tensor
    factor: torch.Tensor
    """What they are to be multiplied by, fp32."""


@cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, dynamic=True)


def _on(device: torch.device, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors as the device has it fastest."""
    return _compiled(kernel) if device.type == "cuda" and find_spec("triton") and has_compiler() else kernel


def _cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # The largest becomes the largest of the format but for rounding, which stays below what would overflow.
    largest = torch.finfo(dtype).max
    top = torch.linalg.vector_norm(x, math.inf).float().clamp(min=LEAST)
    return (x * (largest / top)).to(dtype), top / largest


def _turn(bits: torch.Tensor) -> torch.Tensor:
    missing = -bits.shape[0] % MULTIPLE
    return functional.pad(bits.T, (0, missing)).contiguous()


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> Narrowed:
    """A matrix in 8 bits; one without rows keeps the factor 1."""
    if not x.numel():
        return Narrowed(x.to(dtype), torch.ones((), device=x.device))
    return Narrowed(*_on(x.device, _cast)(x, dtype))


def turned(matrix: Narrowed) -> Narrowed:
    """The transposed matrix, row after row, with zeros behind its rows up to a multiple of 16."""
    bits = _on(matrix.values.device, _turn)(matrix.values.view(torch.uint8))
    return Narrowed(bits.view(matrix.values.dtype), matrix.factor)


def product(left: Narrowed, right: Narrowed, dtype: torch.dtype) -> torch.Tensor:
    """`left @ right.T` for matrices that are there row after row, in 16 bits."""
    return functional.scaled_mm(
        left.values, right.values.T, left.factor, TENSORWISE, right.factor, TENSORWISE, output_dtype=dtype
    )


def has_products(device: torch.device) -> bool:
    """Whether torch has such products on a device; tried out on a small one."""
    try:
        one = narrowed(torch.ones(MULTIPLE, MULTIPLE, device=device), FORWARD)
        product(one, one, torch.bfloat16)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


class EightBits:
    """The weight of a linear layer in 8 bits.

    Parameters
    ----------
    keeps : bool
        Whether it is made once a step; else for every product (where weights are there for a while only: ZeRO-3).
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: tuple[Narrowed, Narrowed] | None = None

    def forget(self) -> None:
        """The weight may have changed."""
        self._kept = None

    def of(self, weight: torch.Tensor) -> tuple[Narrowed, Narrowed]:
        """The weight and, transposed, what gradients of inputs are made with."""
        if self._kept is not None:
            return self._kept
        rows = narrowed(weight.detach(), FORWARD)
        both = rows, turned(rows)
        if self._keeps:
            self._kept = both
        return both


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight's products can have 8 bits."""
    return all(size % MULTIPLE == 0 for size in weight.shape)


def forward(rows: Narrowed, weight: torch.Tensor, eight_bits: EightBits, dtype: torch.dtype) -> torch.Tensor:
    """Outputs, shape (rows, out), of a weight of shape (out, in)."""
    return product(rows, eight_bits.of(weight)[0], dtype)


def backward(gradient: Narrowed, weight: torch.Tensor, eight_bits: EightBits, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of the inputs, shape (rows, in)."""
    return product(gradient, eight_bits.of(weight)[1], dtype)


def weight_gradient(gradient: Narrowed, rows: Narrowed, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of the weight, shape (out, in)."""
    return product(turned(gradient), turned(rows), dtype)


def forget(layers: Iterable[torch.nn.Module]) -> None:
    """Let no layer take its weight for what it was."""
    for module in (part for layer in layers for part in layer.modules()):
        eight_bits: Any = getattr(module, "eight_bits", None)
        if isinstance(eight_bits, EightBits):
            eight_bits.forget()
