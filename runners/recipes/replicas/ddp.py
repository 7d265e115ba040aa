"""A replica by torch alone: the whole model on one rank, gradients averaged by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from polygon.domain.model import Batch
from runners.engine.optimizers import make_optimizer
from runners.engine.worker import COMPUTE_DTYPE
from runners.recipes.recipe_schema import OptimizerPart
from runners.recipes.replicas.saving import Home, LayerFiles
from runners.recipes.replicas.state import Counted, StateBytes
from runners.recipes.replicas.whole import WholeModel


def optimizer_of(module: nn.Module, part: OptimizerPart) -> torch.optim.Optimizer:
    """As the execution engine's: decay on matrices only."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    found = make_optimizer(part.name, matrices, others, rate=part.learning_rate, weight_decay=part.weight_decay)
    assert found is not None
    return found


class DdpReplica:
    """Computes a rank's micro-batches and updates its copy of the model.

    Parameters
    ----------
    whole : nn.Module
        Takes inputs and targets, returns the summed loss.
    batch : Batch
    part : OptimizerPart
    device : torch.device
    accumulation : int
        Micro-batches of this rank in a step.
    """

    def __init__(
        self,
        whole: WholeModel,
        batch: Batch,
        part: OptimizerPart,
        device: torch.device,
        *,
        accumulation: int,
    ) -> None:
        self.whole, self._part, self._device = whole, part, device
        self.module: nn.Module = whole
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            self.module = DistributedDataParallel(whole, gradient_as_bucket_view=True)
        self._optimizer = optimizer_of(whole, part)
        self._dtype = COMPUTE_DTYPE[batch.precision]
        self._scaler = torch.amp.GradScaler(device.type, enabled=batch.precision == "fp16")
        self._accumulation = accumulation

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Summed loss of a micro-batch; after the last one of a step gradients are averaged over the ranks."""
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = last
        narrow = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._dtype) if narrow else nullcontext():
            return self.module(inputs, targets)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add a micro-batch's gradients: those of loss times share, averaged over micro-batches and ranks."""
        self._scaler.scale(loss * (share / self._accumulation)).backward()

    def update(self, rate: float) -> tuple[float, StateBytes]:
        """Clip and update; norm of the whole gradient before clipping, and what memory held then."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        trained = [p for p in self.whole.parameters() if p.requires_grad]
        limit = self._part.clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(trained, limit))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        held = self._state_bytes()
        self._optimizer.zero_grad(set_to_none=False)
        return norm, held

    @contextmanager
    def validating(self) -> Iterator[None]:
        """See `runners.recipes.replicas.loop.Replica`: DDP's wrapper is not needed, LoRA drops nothing."""
        wrapped, self.module = self.module, self.whole.eval()
        try:
            yield
        finally:
            self.module = wrapped.train()

    def gathered(self) -> nullcontext[None]:
        """See `runners.recipes.replicas.loop.Replica`: nothing is split."""
        return nullcontext()

    def saved(self, home: Home) -> LayerFiles:
        """Checkpoints that the engine reads too."""
        return LayerFiles(home, self.whole, self._optimizer, self._part.name, self._scaler)

    def _state_bytes(self) -> StateBytes:
        counted = Counted()
        return StateBytes(
            weights=counted.bytes_of(self.whole.parameters()),
            gradients=counted.bytes_of(p.grad for p in self.whole.parameters()),
            optimizer=counted.bytes_of(
                value
                for state in self._optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            ),
        )
