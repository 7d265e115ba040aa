"""The whole model as one module, made of the execution engine's layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polygon.domain.model import Model
from runners.engine.layers import Attention, Head, build_layers
from runners.engine.pretrained import Pretrained


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
