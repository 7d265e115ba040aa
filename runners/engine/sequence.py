"""Products that a tensor-parallel group cuts, and what lies between them: whole on every rank, or split by tokens.

Split (Megatron-LM's sequence parallelism), rank p of t holds tokens [p s / t, (p + 1) s / t) between the products, so
norms and residual sums take 1/t of the memory. All tokens are gathered for a product, in backward once more instead of
being kept; its sums are handed out by tokens. The same bytes travel as for whole tokens, and half as many again for
gathering twice.

References
----------
Korthikanti et al., MLSys 2023 (arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from polygon_comm.tensor_group import TensorGroup
from torch import nn
from torch.nn import functional

TOKENS = 1
"""Dimension of the tokens in (batch, tokens, width)."""


class _Products(torch.autograd.Function):
    """Linear layers on the gathered tokens, which are not kept; gradients of the tokens are summed and split."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, *parameters: torch.Tensor | None) -> Any:
        x = _narrow(x)
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        whole = group.gather(x, TOKENS)
        return tuple(
            functional.linear(whole, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))  # type: ignore[union-attr]
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows = ctx.group.gather(x, TOKENS).flatten(0, 1)
        total, found = None, []
        for gradient, weight, bias_dtype in zip(gradients, weights, ctx.bias_dtypes, strict=True):
            flat = gradient.flatten(0, 1)
            found.append((flat.T @ rows).to(weight.dtype))
            found.append(None if bias_dtype is None else flat.sum(0).to(bias_dtype))
            back = gradient @ weight.to(gradient.dtype)
            total = back if total is None else total.add_(back)
        return ctx.group.total_part(total, TOKENS), None, *found


def join(x: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
    """All tokens of what a group has split; the tensor itself where there is none."""
    return x if group is None else group.join(x, TOKENS)


def split(x: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
    """This rank's tokens; the tensor itself where no group splits them."""
    return x if group is None else group.split(x, TOKENS)


def sum_over(x: torch.Tensor, tp: TensorGroup, *, by_tokens: bool) -> torch.Tensor:
    """The sum of products over a group: whole on every rank, or this rank's tokens of it."""
    return tp.sum_part(x, TOKENS) if by_tokens else tp.sum(x)


class Rows(NamedTuple):
    """Some outputs of a linear layer."""

    layer: nn.Linear
    rows: slice

    @property
    def weight(self) -> torch.Tensor:
        """Their part of the layer's."""
        return self.layer.weight[self.rows]

    @property
    def bias(self) -> torch.Tensor | None:
        """Their part of the layer's."""
        return None if self.layer.bias is None else self.layer.bias[self.rows]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def column_products(
    layers: Sequence[nn.Linear | Rows], x: torch.Tensor, tp: TensorGroup | None, *, by_tokens: bool
) -> list[torch.Tensor]:
    """Linear layers with one input, whose outputs are spread over a group."""
    if tp is not None and by_tokens:
        return list(_Products.apply(x, tp, *(tensor for layer in layers for tensor in (layer.weight, layer.bias))))
    whole = _narrow(x if tp is None else tp.copy(x))
    return [layer(whole) for layer in layers]


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast would make it for a product; by itself it makes, and keeps, a copy for each of several."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def row_product(layer: nn.Linear, x: torch.Tensor, tp: TensorGroup | None, *, by_tokens: bool) -> torch.Tensor:
    """A linear layer whose inputs are spread over a group: the products are summed, the bias is added once."""
    if tp is None:
        return layer(x)
    total = sum_over(functional.linear(x, layer.weight), tp, by_tokens=by_tokens)
    return total if layer.bias is None else total + layer.bias.to(total.dtype)


def sum_gradients(module: nn.Module, group: TensorGroup) -> None:
    """Let the gradients of parameters that each rank applies to its own tokens alone be summed over the group."""
    for name, parameter in module.named_parameters():
        norm = name.rpartition(".")[0].endswith("norm")
        if norm or name in ("attention.output.bias", "mlp.down.bias"):
            parameter.register_hook(group.total)
