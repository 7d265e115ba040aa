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

from runners.engine import float8
from runners.engine.float8 import BACKWARD, FORWARD, EightBits, fits, narrowed

TOKENS = 1
"""Dimension of the tokens in (batch, tokens, width)."""


class Linear(nn.Linear):
    """A linear layer whose products may have 8 bits."""

    eight_bits: EightBits | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.eight_bits is None:
            return super().forward(x)
        return _of_layers([self], as_autocast(x), None)[0]


class _Products(torch.autograd.Function):
    """Linear layers on one input: on the tokens of a group, gathered and not kept, whose gradients are summed and
    split; without a group on those that are here. Products of layers with `EightBits` have 8 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: TensorGroup | None,
        ways: Sequence[EightBits | None],
        *parameters: torch.Tensor | None,
    ) -> Any:
        x = as_autocast(x)
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group, ctx.ways = group, ways
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        whole = x if group is None else group.gather(x, TOKENS)
        rows = narrowed(whole.flatten(0, -2), FORWARD) if any(ways) else None
        found = []
        for weight, bias, way in zip(weights, biases, ways, strict=True):
            assert weight is not None
            added = None if bias is None else bias.to(x.dtype)
            if way is None or rows is None:
                found.append(functional.linear(whole, weight.to(x.dtype), added))
                continue
            out = float8.forward(rows, weight, way, x.dtype).view(*whole.shape[:-1], len(weight))
            found.append(out if added is None else out.add_(added))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        whole = x if ctx.group is None else ctx.group.gather(x, TOKENS)
        rows = whole.flatten(0, -2)
        narrow_rows = narrowed(rows, FORWARD) if any(ctx.ways) else None
        total, found = None, []
        for number, (gradient, weight, bias_dtype, way) in enumerate(
            zip(gradients, weights, ctx.bias_dtypes, ctx.ways, strict=True)
        ):
            flat = gradient.flatten(0, -2)
            wanted = ctx.needs_input_grad[3 + 2 * number]
            if way is None or narrow_rows is None:
                found.append((flat.T @ rows).to(weight.dtype) if wanted else None)
                back = gradient @ weight.to(gradient.dtype)
            else:
                narrow = narrowed(flat, BACKWARD)
                made = float8.weight_gradient(narrow, narrow_rows, x.dtype).to(weight.dtype) if wanted else None
                found.append(made)
                back = float8.backward(narrow, weight, way, x.dtype).view_as(whole)
            found.append(None if bias_dtype is None else flat.sum(0).to(bias_dtype))
            total = back if total is None else total.add_(back)
        here = total if ctx.group is None else ctx.group.total_part(total, TOKENS)
        return here, None, None, *found


def _of_layers(layers: Sequence[Linear | Rows], x: torch.Tensor, group: TensorGroup | None) -> list[torch.Tensor]:
    """`_Products` of layers; `group`: ranks that split the tokens between them."""
    parameters = (tensor for layer in layers for tensor in (layer.weight, layer.bias))
    return list(_Products.apply(x, group, [layer.eight_bits for layer in layers], *parameters))


def join(x: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
    """All tokens of what a group has split; the tensor itself where there is none."""
    return x if group is None else group.join(x, TOKENS)


def split(x: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
    """This rank's tokens; the tensor itself where no group splits them."""
    return x if group is None else group.split(x, TOKENS)


def sum_over(x: torch.Tensor, tp: TensorGroup, *, by_tokens: bool) -> torch.Tensor:
    """The sum of products over a group: whole on every rank, or this rank's tokens of it."""
    return tp.sum_part(x, TOKENS) if by_tokens else tp.sum(x)


class Addition(NamedTuple):
    """What peft computes beside a linear layer (LoRA): `up(down(x))` times a factor, without dropout."""

    down: nn.Linear
    up: nn.Linear
    factor: float

    def of(self, narrow: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The addition to some of the layer's outputs, of what `down` makes of its input."""
        return functional.linear(narrow, self.up.weight[rows]) * self.factor


def parted(layer: nn.Module) -> tuple[Linear, Addition | None]:
    """A linear layer by itself, and what peft puts beside it."""
    if isinstance(layer, Linear):
        return layer, None
    held: Any = layer
    [name] = held.lora_A
    return held.base_layer, Addition(held.lora_A[name], held.lora_B[name], held.scaling[name])


class Rows(NamedTuple):
    """Some outputs of a linear layer."""

    layer: Linear
    rows: slice

    @property
    def eight_bits(self) -> EightBits | None:
        """Made anew for every product: it is a part of a weight."""
        return None if self.layer.eight_bits is None or not fits(self.weight) else EightBits(keeps=False)

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
    layers: Sequence[nn.Module | Rows], x: torch.Tensor, tp: TensorGroup | None, *, by_tokens: bool
) -> list[torch.Tensor]:
    """Linear layers with one input, whose outputs are spread over a group."""
    if tp is not None and not all(isinstance(layer, Linear) for layer in map(_held, layers)):
        return _with_additions(layers, x, tp, by_tokens=by_tokens)
    ours = [layer for layer in layers if isinstance(layer, Linear | Rows)]  # additions stand around others
    if tp is not None and by_tokens:
        return _of_layers(ours, x, tp)
    whole = as_autocast(x if tp is None else tp.copy(x))
    if len(ours) == len(layers) and any(layer.eight_bits for layer in ours):
        return _of_layers(ours, whole, None)
    return [layer(whole) for layer in layers]


def _held(layer: nn.Module | Rows) -> nn.Module:
    return layer.layer if isinstance(layer, Rows) else layer


def _with_additions(
    layers: Sequence[nn.Module | Rows], x: torch.Tensor, tp: TensorGroup, *, by_tokens: bool
) -> list[torch.Tensor]:
    """`column_products` of layers of which some have additions.

    Whoever has which tokens makes them narrow, by `down`, which is whole on every rank; what is narrow travels.
    """
    rows = [layer.rows if isinstance(layer, Rows) else slice(None) for layer in layers]
    held = [parted(_held(layer)) for layer in layers]
    bare = [Rows(base, part) if part != slice(None) else base for (base, _), part in zip(held, rows, strict=True)]
    products = column_products(bare, x, tp, by_tokens=by_tokens)
    for number, (_, addition) in enumerate(held):
        if addition is not None:
            narrow = addition.down(as_autocast(x))
            narrow = tp.spread(narrow, TOKENS) if by_tokens else tp.copy(narrow)
            products[number] = products[number] + addition.of(narrow, rows[number])
    return products


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast would make it for a product; by itself it makes, and keeps, a copy for each of several."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def row_product(layer: nn.Module, x: torch.Tensor, tp: TensorGroup | None, *, by_tokens: bool) -> torch.Tensor:
    """A linear layer whose inputs are spread over a group: the products are summed, the bias is added once."""
    if tp is None:
        return layer(x)
    layer, addition = parted(layer)
    if layer.eight_bits is None:
        own = functional.linear(x, layer.weight)
    else:
        [own] = _Products.apply(as_autocast(x), None, [layer.eight_bits], layer.weight, None)
    if addition is not None:
        own = own + addition.of(addition.down(as_autocast(x)))
    total = sum_over(own, tp, by_tokens=by_tokens)
    return total if layer.bias is None else total + layer.bias.to(total.dtype)


def sum_over_group(parameter: torch.Tensor, group: TensorGroup) -> None:
    """Let a parameter's gradient be summed over a group before it is added to what is there, and know that it is."""
    held: Any = parameter
    held.summed_over = (*summed_over(parameter), group)
    parameter.register_hook(group.total)


def summed_over(parameter: torch.Tensor) -> tuple[TensorGroup, ...]:
    """The groups over which a parameter's gradient is summed so."""
    return getattr(parameter, "summed_over", ())


def sum_gradients(module: nn.Module, group: TensorGroup) -> None:
    """Let the gradients of parameters that each rank applies to its own tokens alone be summed over the group."""
    for name, parameter in module.named_parameters():
        norm = name.rpartition(".")[0].endswith("norm")
        if norm or name in ("attention.output.bias", "mlp.down.bias"):
            sum_over_group(parameter, group)
