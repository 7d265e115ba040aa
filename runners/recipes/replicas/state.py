"""Bytes of weights, gradients and optimizer state that a rank holds, measured and predicted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polygon.cost.memory import layer_memory, stage_memory
from polygon.domain.model import Batch, Model

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Most of each in a step: gradients after a backward, the rest around the update."""

    weights: float
    gradients: float
    optimizer: float
    """State, and the 32-bit weights that the optimizer keeps beside 16-bit ones."""

    @property
    def total(self) -> float:
        """Everything together."""
        return self.weights + self.gradients + self.optimizer

    def to_dict(self) -> dict[str, float]:
        """Plain data for JSON."""
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer, "total": self.total}


class Counted:
    """Counts bytes of tensors, each stretch of memory once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def bytes_of(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Bytes of the memory behind the tensors that was not counted before."""
        total = 0
        for tensor in tensors:
            if tensor is None or not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def predicted_state(
    model: Model,
    batch: Batch,
    *,
    zero: int = 0,
    shards: int = 1,
    trained: int | None = None,
    added: int = 0,
    hierarchical: int = 1,
) -> StateBytes:
    """What `polygon.cost.memory` says that a rank of a data-parallel group holds.

    ZeRO 0 is torch's DDP, whose weights and gradients stay in 32 bits beside a 16-bit computation. DeepSpeed (ZeRO 1,
    2, 3) keeps 32-bit copies of the weights for its optimizer even where the weights are in 32 bits.

    Parameters
    ----------
    zero, shards : int
        ZeRO stage, and over how many ranks it splits.
    trained : int, optional
        Parameters that are trained, if not all; the others have neither gradients nor optimizer state.
    added : int
        Parameters beside the model's (low-rank additions).
    hierarchical : int
        ZeRO++: ranks that share out a second copy of the weights; 1: none.
    """
    if zero == 0:
        batch = replace(batch, precision="fp32", gradient_precision="fp32")
    layers = layer_memory(model, batch)
    parts = stage_memory(layers, 0, model.layers, in_flight=0, zero=zero, shards=shards, batch=batch, context_bytes=0)
    optimizer = parts.optimizer
    if zero and batch.element_bytes == 4:
        optimizer += 4 * model.parameters / shards
    weights = parts.weights * (1 + added / model.parameters)
    if hierarchical > 1:
        weights += model.parameters * batch.element_bytes / hierarchical
    share = 1.0 if trained is None else trained / model.parameters
    return StateBytes(weights=weights, gradients=parts.gradients * share, optimizer=optimizer * share)


def predicted_activations(
    model: Model,
    batch: Batch,
    micro_batch_size: int,
    recompute: str,
    *,
    autocast: bool = False,
    targets: Collection[str] | None = None,
) -> float:
    """Most bytes of activations and of what only one layer's computation needs, for one micro-batch in flight.

    torch keeps of a plain block's operations what fused ones keep; gates, rotary positions and repeated heads add
    copies. Autocast (ZeRO 0 alone) keeps its 16-bit copies of trained weights until the step ends.

    Parameters
    ----------
    targets : collection of str, optional
        Linear layers of a block beside which low-rank additions are trained, by the last part of their names; None:
        all weights are trained.
    """
    plain = model.learned_positions and not model.gated_mlp
    layers = layer_memory(model, batch, micro_batch_size=micro_batch_size, recompute=recompute, fused=plain)
    parts = stage_memory(layers, 0, model.layers, in_flight=1, zero=0, shards=1, batch=batch, context_bytes=0)
    if targets is None:
        copies = 2 * model.parameters if autocast and batch.element_bytes < 4 else 0
        return parts.activations + parts.transient + copies
    share = _kept_share(model, targets)
    # Of a recomputed block the input is kept all the same.
    return parts.activations * (1.0 if recompute == "full" else share) + parts.transient * share


def _kept_share(model: Model, targets: Collection[str]) -> float:
    """Part of a block's activations that is kept where its weights are frozen.

    A frozen product needs its weights for the gradient of its input, not the input itself. Norms, attention and the
    activation function need theirs all the same.
    """
    h, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    per_width = 3 if model.gated_mlp else 2
    inputs = h * (not {"query", "key", "value"} & set(targets)) + h * (not {"up", "gate"} & set(targets))
    inputs += model.ffn_size * ("down" not in targets)
    whole = 4 * h + 2 * q + 2 * kv + per_width * model.ffn_size
    return (whole - inputs) / whole
