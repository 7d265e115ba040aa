"""Routed experts, all on every rank or shared out over a group, and the loss that keeps them equally busy.

Every token goes to its best few experts, none is dropped. With a group, rank p of ep holds experts
[p E / ep, (p + 1) E / ep): one exchange takes each row to its expert, another brings the result back. Ranks between
which tensor parallelism cuts the rest of the layer may be in the group: each routes its part of the tokens then, and
experts are whole. Gradients need no scaling: the loss is a sum over tokens, so an expert's gradient is the sum over the
tokens it saw, of whichever ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from polygon_comm.exchange import ExchangeGroup
from polygon_comm.tensor_group import TensorGroup
from torch import nn

from polygon.domain.model import Model
from runners.engine.sequence import join, split

EXPERT = ".mlp.experts."
"""In the names of the routed experts' parameters, before the expert's number."""


@dataclass
class BalanceLoss:
    """How the balance of experts enters the gradients; one object for all layers of a rank."""

    weight: float = 0.0
    """Of the balance loss beside the mean loss of a token; 0: none."""
    scale: float = 1.0
    """Factor on the loss that is summed over tokens, when its gradient is taken."""


class _WithLoss(torch.autograd.Function):
    """The tensor itself; in backward a further loss gets a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, balance: BalanceLoss) -> torch.Tensor:
        ctx.balance = balance
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        factor = ctx.balance.weight * ctx.balance.scale
        return gradients[0], torch.full((), factor, device=gradients[0].device), None


def balance_loss(
    scores: torch.Tensor, chosen: torch.Tensor, groups: Sequence[ExchangeGroup | TensorGroup] = ()
) -> torch.Tensor:
    r"""How unequally sequences load the experts, summed over tokens.

    .. math:: T \sum_{sequences} \sum_e f_e P_e, \quad f_e = E / (k T) \cdot |\{t: e \in chosen_t\}|,
              \quad P_e = 1/T \sum_t softmax(scores_t)_e

    1 per token where all experts are equally busy. Counted sequence by sequence, so that no split of the batch changes
    it; of ranks that hold parts of the sequences each adds its tokens' part.

    Parameters
    ----------
    scores : tensor, shape (batch, tokens, experts)
    chosen : tensor of int, shape (batch, tokens, k)
    groups : sequence of ExchangeGroup or TensorGroup
        Ranks that hold the other tokens of the sequences: of this rank's tokens with others, of theirs together.

    References
    ----------
    DeepSeek-AI, arXiv:2412.19437, equations 17 to 20.
    """
    experts, per_token = scores.shape[-1], chosen.shape[-1]
    tokens = scores.shape[1] * math.prod(group.size for group in groups)
    counts = torch.zeros(len(scores), experts, device=scores.device)
    counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen.flatten(1), dtype=counts.dtype))
    for group in groups:
        counts = group.total(counts)
    busy = counts * (experts / (per_token * tokens))
    return (busy * scores.float().softmax(-1).sum(1)).sum()


class Experts(nn.Module):
    """Routed experts: each token goes to its best few, weighted by a softmax over those; shared ones see all."""

    def __init__(self, model: Model, make: Any) -> None:
        super().__init__()
        self.per_token, self.count = model.experts_per_token, model.experts
        self.group: ExchangeGroup | None = None
        """Ranks that share out the experts; None: all are here."""
        self.context: ExchangeGroup | None = None
        """Ranks that hold the other parts of the sequences."""
        self.split_over: TensorGroup | None = None
        """Ranks that split tokens between them outside of here."""
        self.beside: TensorGroup | None = None
        """Ranks that split tokens between them here too, each with whole experts."""
        self.balance = BalanceLoss()
        self.router = nn.Linear(model.hidden_size, model.experts, bias=False)
        self.experts = nn.ModuleDict({str(e): make(model, model.expert_ffn_size) for e in range(model.experts)})
        self.shared = nn.ModuleList(make(model, model.expert_ffn_size) for _ in range(model.shared_experts))

    def share_out(self, group: ExchangeGroup) -> None:
        """Keep this rank's experts alone."""
        self.group = group
        each = self.count // group.size
        kept = range(group.place * each, (group.place + 1) * each)
        self.experts = nn.ModuleDict({str(e): self.experts[str(e)] for e in kept})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = join(x, self.split_over)
        scores = self.router(x)
        best, chosen = scores.topk(self.per_token, dim=-1)
        if self.balance.weight and torch.is_grad_enabled():
            others = [group for group in (self.beside, self.context) if group is not None]
            x = _WithLoss.apply(x, balance_loss(scores, chosen, others), self.balance)
        rows = x.flatten(0, 1)
        weights = best.float().softmax(-1).to(x.dtype).view(-1, self.per_token, 1)
        # Choices sorted by expert: `order` says which choice, so which row, comes when.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.count)
        sent = rows[order // self.per_token]
        mixed = self._run(sent, counts.tolist()) if self.group is None else self._run_apart(sent, counts, self.group)
        # Back to the order of the tokens; `index_add` would keep what it adds for backward.
        mixed = mixed.index_select(0, order.argsort()).view(-1, self.per_token, rows.shape[-1])
        out = (mixed * weights).to(rows.dtype).sum(1).view_as(x)
        for expert in self.shared:
            out = out + expert(x)
        return split(out, self.split_over)

    def own_parameters(self) -> Iterator[torch.Tensor]:
        """Parameters that a rank applies to its own tokens alone where tokens are split here too."""
        yield self.router.weight
        for name, parameter in self.shared.named_parameters():
            if name.endswith("down.bias"):
                yield parameter

    def _run(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows sorted by expert through the experts that are here.

        Every expert enters the graph, also without tokens, so that each parameter gets a gradient.
        """
        parts = rows.split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])

    def _run_apart(self, rows: torch.Tensor, counts: torch.Tensor, group: ExchangeGroup) -> torch.Tensor:
        """Rows sorted by expert through the experts of all ranks."""
        each = len(self.experts)
        per_rank = counts.view(group.size, each)
        arriving = group.move(per_rank, [1] * group.size, [1] * group.size)
        sent, received = per_rank.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = group.exchange(rows, sent, received)
        # From "by source, then by expert" to "by expert".
        which = torch.arange(each, device=rows.device).repeat(group.size).repeat_interleave(arriving.flatten())
        order = which.argsort(stable=True)
        mixed = self._run(arrived[order], arriving.sum(0).tolist())
        return group.exchange(mixed[order.argsort()], received, sent)
