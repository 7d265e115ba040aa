"""Low-rank additions to linear layers (LoRA), trained in place of the weights.

Hu et al., arXiv:2106.09685. peft computes them; each layer draws its first ones from a generator of its own, so that
they are the same wherever the layer runs.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from polygon_comm.tensor_group import TensorGroup
from torch import nn

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from runners.engine.layers import empty_layer, layer_name, shard_dim
from runners.engine.sequence import sum_over_group


class Additions(Protocol):
    """What additions are like."""

    @property
    def rank(self) -> int: ...

    @property
    def alpha(self) -> float: ...

    @property
    def dropout(self) -> float: ...

    @property
    def targets(self) -> tuple[str, ...]: ...


def lora_layers(model: Model, part: Additions) -> dict[str, nn.Linear]:
    """Linear layers of blocks that get an addition (without memory): `layers.3.attention.query` is of layer 3.

    Raises
    ------
    InputError
        peft is not installed, or no linear layer has such a name.
    """
    if find_spec("peft") is None:
        raise InputError("lora: found no peft, expected it (pip install peft)")
    known = {
        f"layers.{layer}.{name}": module
        for layer in range(1, model.layers - 1)
        for name, module in empty_layer(model, layer).named_modules()
        if isinstance(module, nn.Linear)
    }
    names = {name.rpartition(".")[2] for name in known}
    for target in part.targets:
        if target not in names:
            raise InputError(
                f"lora.targets: found {target!r}, expected names of linear layers: {', '.join(sorted(names))}"
            )
    return {name: module for name, module in known.items() if name.rpartition(".")[2] in part.targets}


def lora_shapes(model: Model, part: Additions) -> dict[str, torch.Size]:
    """Shape of every addition, by its name in the full model (`blocks.2.attention.query.lora_A.default.weight`)."""
    found = {}
    for name, linear in lora_layers(model, part).items():
        _, layer, inside = name.split(".", maxsplit=2)
        prefix = f"{layer_name(model, int(layer))}.{inside}"
        found[f"{prefix}.lora_A.default.weight"] = torch.Size((part.rank, linear.in_features))
        found[f"{prefix}.lora_B.default.weight"] = torch.Size((linear.out_features, part.rank))
    return found


def add_lora(
    layers: nn.ModuleDict, model: Model, part: Additions, seed: int, tp: TensorGroup | None = None
) -> list[str]:
    """Freeze layers and put low-rank additions beside their linear layers; a head for classes stays trained.

    Parameters
    ----------
    layers : ModuleDict
        By their numbers; some or all of the model.
    tp : TensorGroup, optional
        The devices that hold slices of them.

    Returns
    -------
    list of str
        Names (as those of `lora_layers`) of the layers that got an addition.
    """
    here = [name for name in sorted(lora_layers(model, part)) if name.split(".")[1] in layers]
    for parameter in layers.parameters():
        parameter.requires_grad_(False)
    if here:
        from peft import LoraConfig, inject_adapter_in_model

        # peft's annotation of alpha says int, its arithmetic takes any number.
        settings: dict[str, Any] = {"r": part.rank, "lora_alpha": part.alpha, "lora_dropout": part.dropout}
        holder = nn.Module()
        holder.layers = layers
        inject_adapter_in_model(LoraConfig(**settings, target_modules=here, bias="none"), holder)
    for number, layer in layers.items():
        generator = torch.Generator().manual_seed((seed * 1_000_003 + int(number)) % 2**63)
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(True)
            if "lora_A" in name:  # peft's own way; its B are zeros
                drawn = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
                parameter.data.copy_(drawn)
    if tp is not None:
        _cut(layers, model, here, tp)
    head = str(model.layers - 1)
    if model.family == "vit" and head in layers:
        for parameter in layers[head].output.parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(True)
    return here


def _cut(layers: nn.ModuleDict, model: Model, names: list[str], tp: TensorGroup) -> None:
    """Keep this rank's slices of additions, and sum the gradients of what is whole where each rank has a part of them.

    `down` of a layer whose outputs are cut gets its gradient whole, but for tokens that others have.
    """
    for name in names:
        _, layer, inside = name.split(".", maxsplit=2)
        owner, _, linear = inside.rpartition(".")
        block: Any = layers[layer].get_submodule(owner)
        prefix = f"{layer_name(model, int(layer))}.{inside}"
        down, up = (
            parameter
            for factor in (block.get_submodule(linear).lora_A, block.get_submodule(linear).lora_B)
            for parameter in factor.parameters()
        )
        dims = [shard_dim(model, f"{prefix}.lora_{which}.default.weight", tp.size) for which in "AB"]
        for parameter, dim in zip((down, up), dims, strict=True):
            if dim is not None:
                parameter.data = tp.part(parameter.data, dim).clone()
        if dims[1] is None:
            sum_over_group(up, tp)
        if dims[0] is None and block.by_tokens:
            sum_over_group(down, tp)


def check_lora(model: Model, part: Additions) -> None:
    """Require additions that plans train: none to routed experts."""
    for name in lora_layers(model, part):
        require(".experts." not in name, "lora.targets", name.rpartition(".")[2], "none that routed experts have")
