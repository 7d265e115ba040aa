"""Bytes of weights, gradients and optimizer state that a rank holds, measured and predicted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polygon.cost.autograd_memory import Way, autograd_memory, beside_stage
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
    on_gpu: bool = False,
    targets: Collection[str] | None = None,
) -> float:
    """Most bytes of activations and of what only one layer's computation needs, for one micro-batch in flight.

    Autocast (ZeRO 0 alone) keeps its 16-bit copies of weights for backward: all, or where blocks are computed again
    those of one. It holds those of trained weights until forward ends.

    Parameters
    ----------
    targets : collection of str, optional
        Linear layers of a block beside which low-rank additions are trained, by the last part of their names; None:
        all weights are trained.
    """
    narrow = batch.element_bytes < 4
    way = Way(
        micro_batch=micro_batch_size,
        recompute=recompute,
        norms_in_32_bits=autocast or not narrow,
        sums_in_32_bits=autocast or not narrow,
        fused_norms=on_gpu,
        trained=targets,
    )
    layers = beside_stage(autograd_memory(model, batch, way), 0, model.layers)
    parts = stage_memory(layers, 0, model.layers, in_flight=1, zero=0, shards=1, batch=batch, context_bytes=0)
    copies = 2.0 * model.parameters if autocast and narrow else 0.0
    if recompute != "full":
        return parts.activations + parts.transient + copies
    block = copies * layers.parameters[1:-1].max() / model.parameters
    return parts.activations + max(parts.transient + block, copies if targets is None else 0.0)
