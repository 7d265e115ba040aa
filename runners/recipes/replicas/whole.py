"""The whole model as one module, made of the execution engine's layers; low-rank additions to it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polygon.domain.errors import InputError
from polygon.domain.model import Model
from runners.engine.layers import Attention, Head, build_layers, empty_layer
from runners.engine.pretrained import Pretrained
from runners.recipes.schema import LoraPart


class WholeModel(nn.Module):
    """All layers in order, with the first weights that the engine's stages have. Returns the summed loss.

    Parameters
    ----------
    model : Model
    seed : int
    recompute : str
        none; selective: attention between its projections; full: whole blocks.
    reentrant : bool
        Which of torch's two ways of recomputation (DeepSpeed's ZeRO-3 needs the re-entrant one).
    device : torch.device, optional
    pretrained : Pretrained, optional
        First weights of a language model; none: drawn from the seed.
    """

    def __init__(
        self,
        model: Model,
        seed: int,
        recompute: str = "none",
        *,
        reentrant: bool = False,
        device: torch.device | None = None,
        pretrained: Pretrained | None = None,
    ) -> None:
        super().__init__()
        self.model, self.recompute, self.reentrant = model, recompute == "full", reentrant
        self.layers = build_layers(model, range(model.layers), seed, device, pretrained=pretrained)
        for module in self.modules():
            if isinstance(module, Attention):
                module.recompute_core = recompute == "selective"

    @property
    def head(self) -> Head:
        """The last layer."""
        head = self.layers[str(self.model.layers - 1)]
        assert isinstance(head, Head)
        return head

    def body(self, inputs: torch.Tensor) -> torch.Tensor:
        """Everything before the head."""
        x = self.layers["0"](inputs)
        for layer in range(1, self.model.blocks + 1):
            block = self.layers[str(layer)]
            if self.recompute and torch.is_grad_enabled():
                if self.reentrant and not x.requires_grad:
                    x.requires_grad_()  # where the layers before are frozen
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over the targets."""
        return self.head(self.body(inputs), targets)


def lora_layers(model: Model, part: LoraPart) -> dict[str, nn.Linear]:
    """Linear layers of blocks that get an addition (without memory), by their names in `WholeModel`.

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


def add_lora(whole: WholeModel, part: LoraPart, seed: int) -> list[str]:
    """Freeze the model and put low-rank additions beside its linear layers; a head for classes stays trained.

    Returns
    -------
    list of str
        Names of the layers that got an addition.
    """
    linear = lora_layers(whole.model, part)
    from peft import LoraConfig, inject_adapter_in_model

    # peft's annotation of alpha says int, its arithmetic takes any number.
    settings: dict[str, Any] = {"r": part.rank, "lora_alpha": part.alpha, "lora_dropout": part.dropout}
    config = LoraConfig(**settings, target_modules=sorted(linear), bias="none")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)  # the same first additions on every rank
    inject_adapter_in_model(config, whole)
    torch.random.set_rng_state(state)
    head = f"layers.{whole.model.layers - 1}.output." if whole.model.family == "vit" else None
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_("lora_" in name or (head is not None and name.startswith(head)))
    return sorted(linear)
