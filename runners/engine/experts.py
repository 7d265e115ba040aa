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
from torch.nn import functional

from polygon.domain.model import Model
from runners.engine.sequence import Linear, as_autocast, join, split

EXPERT = ".mlp.experts."
"""In the names of the routed experts' parameters, before the expert's number."""
ALIGNED_BYTES = 16
"""What torch's kernel for products of several weights wants rows to be a multiple of."""


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


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies rows with the weights of several experts in one kernel, which knows on the device alone
    how many each gets: in bf16 on Hopper and the Blackwell of data centers. Elsewhere `grouped_mm` is a loop that waits
    for the device before every product."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(functional, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


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
        self.stacked: dict[str, torch.Tensor] = {}
        """Weights of all experts here by their layer, shape (experts, out, in), where one kernel takes them
        (`NarrowWeights`)."""
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
        # `bincount` would wait for the device.
        counts = torch.zeros(self.count, dtype=chosen.dtype, device=chosen.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        sent = rows[order // self.per_token]
        mixed = self._run(sent, counts) if self.group is None else self._run_apart(sent, counts, self.group)
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

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert through the experts that are here, of which each gets so many.

        Every expert enters the graph, also without tokens, so that each parameter gets a gradient.
        """
        if self.stacked and len(rows):
            return self._mixed_at_once(as_autocast(rows), counts)
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])

    def may_run_at_once(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether one kernel makes the products of all experts: whole, plain layers, where there is one."""
        one = next(iter(self.experts.values()))  # all are alike
        return (
            has_kernel(device, dtype)
            and one.tp is None
            and all(
                type(layer) is Linear
                and layer.bias is None
                and layer.eight_bits is None
                and not any(size * dtype.itemsize % ALIGNED_BYTES for size in layer.weight.shape)
                for layer in one.children()
            )
        )

    def weights_by_layer(self) -> dict[str, list[nn.Parameter]]:
        """Those of the experts here, in their order."""
        experts = list(self.experts.values())
        names = [name for name, _ in experts[0].named_children()]
        return {name: [expert.get_parameter(f"{name}.weight") for expert in experts] for name in names}

    def _mixed_at_once(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The same as one expert after another, in as many kernels as an expert has, for which the host waits for
        nothing."""
        one: Any = next(iter(self.experts.values()))
        ends = counts.cumsum(0).to(torch.int32)

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            return functional.grouped_mm(x, self.stacked[name].transpose(1, 2), offs=ends)

        first = ("up",) if one.gate is None else ("up", "gate")
        return product("down", one.activate(*(product(name, rows) for name in first)))

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
        mixed = self._run(arrived[order], arriving.sum(0))
        return group.exchange(mixed[order.argsort()], received, sent)
