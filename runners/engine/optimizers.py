"""torch's optimizers as every program here sets them up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

STATE_KEYS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    "adafactor": ("row_var", "col_var", "variance"),
}
"""What they keep: for every weight, Adafactor for every row and column of a matrix (and every weight of a vector).

Muon has the first for matrices of blocks, the others, which are AdamW's, for all else.
"""
MUON_MOMENTUM = 0.95
"""torch's and its author's (https://kellerjordan.github.io/posts/muon)."""


def make_optimizer(
    name: str, decayed: Iterable[torch.Tensor], plain: Iterable[torch.Tensor], *, rate: float, weight_decay: float
) -> torch.optim.Optimizer | None:
    """AdamW or SGD with momentum; None where there is nothing to train.

    Fused: one pass over weights, gradients and state on CPUs and GPUs alike (AdamW over 5 million weights on one core:
    5 ms instead of 37).

    Parameters
    ----------
    name : str
        adamw or sgd; muon: the AdamW that goes with it.
    decayed, plain : iterable of parameters
        With weight decay and without.
    """
    given = (list(decayed), weight_decay), (list(plain), 0.0)
    groups: list[dict[str, Any]] = [{"params": some, "weight_decay": decay} for some, decay in given if some]
    if not groups:
        return None
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, fused=True)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def orthogonal_step(direction: torch.Tensor, rate: float) -> torch.Tensor:
    """What Muon adds to a matrix: its direction with all singular values near one, times the rate.

    Scaled as `match_rms_adamw`: the root mean square of a step is AdamW's, so both go by one rate (Liu et al.,
    arXiv:2502.16982, equation 4). torch's own Muon does it, without momentum: that was taken before.

    Parameters
    ----------
    direction : tensor, shape (rows, columns)
        Gradient and momentum together.
    """
    step = torch.nn.Parameter(torch.zeros_like(direction, dtype=torch.float32))
    step.grad = direction.to(torch.float32)
    torch.optim.Muon(
        [step], lr=rate, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    ).step()
    return step.detach()
