"""A replica by DeepSpeed: optimizer state, gradients and weights split over the ranks (ZeRO-1, 2, 3, ZeRO++)."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from polygon.domain.errors import InputError, require
from polygon.domain.model import Batch
from polygon.export.deepspeed import ZeroOptions, batch_config
from runners.recipes.recipe_schema import Recipe
from runners.recipes.replicas.ddp import optimizer_of
from runners.recipes.replicas.saving import EngineFiles, Home
from runners.recipes.replicas.state import Counted, StateBytes

BUCKET_ELEMENTS = 50_000_000
"""Most gradients that DeepSpeed collects before it reduces them (its own default of 5e8 takes 2 GB of buffers)."""


QUIET_S = 5.0
COMPILES = (
    "DeepSpeed is still starting: the first time on a machine it compiles its operations, for some minutes "
    "(kept in ~/.cache/torch_extensions)"
)


def zero_options(recipe: Recipe) -> ZeroOptions:
    """What a recipe asks DeepSpeed to split."""
    plus = recipe.zero_plus
    return ZeroOptions(
        stage=recipe.parallel.zero,
        hierarchical=plus.hierarchical,
        quantized_weights=plus.quantized_weights,
        quantized_gradients=plus.quantized_gradients,
        offload=recipe.memory.offload,
    )


def config_of(recipe: Recipe, batch: Batch, *, on_gpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration of a recipe: the exporter's, with the recipe's optimizer."""
    accumulation = batch.global_batch // (recipe.parallel.dp * recipe.batch.micro_batch)
    config = batch_config(batch, recipe.batch.micro_batch, accumulation, zero_options(recipe))
    rate = recipe.optimizer
    optimizer = config["optimizer"]["params"]
    optimizer.update(lr=rate.learning_rate, weight_decay=rate.weight_decay)
    config["gradient_clipping"] = rate.clip_norm
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = BUCKET_ELEMENTS
    if zero["stage"] == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET_ELEMENTS, "stage3_param_persistence_threshold": 0}
    if not on_gpu and rate.name == "adamw":
        optimizer["torch_adam"] = True  # DeepSpeed's own Adam is compiled for a GPU
    return config


def check_degrees(recipe: Recipe) -> None:
    """Refuse what DeepSpeed can do nowhere, with the field of the recipe."""
    require(recipe.parallel.zero > 0, "parallel.zero", 0, "1, 2 or 3 (nothing split: backend ddp)")
    found, ranks = recipe.zero_plus.hierarchical, recipe.parallel.dp
    require(ranks % found == 0, "zero_plus.hierarchical", found, f"a divisor of {ranks} ranks")


def check_zero(recipe: Recipe, *, on_gpu: bool) -> None:
    """Refuse what DeepSpeed, or DeepSpeed without a GPU, cannot do.

    Raises
    ------
    InputError
        With the field of the recipe and why.
    """
    if find_spec("deepspeed") is None:
        raise InputError(
            "backend: found deepspeed, expected it installed (DS_BUILD_OPS=0 pip install deepspeed==0.19.8)"
        )
    check_degrees(recipe)
    if on_gpu:
        return
    for name in ("quantized_weights", "quantized_gradients"):
        require(
            not getattr(recipe.zero_plus, name),
            f"zero_plus.{name}",
            True,
            "false on CPUs (DeepSpeed quantises by CUDA kernels only)",
        )
    require(
        recipe.memory.precision != "fp16", "memory.precision", "fp16", "fp32 or bf16 (DeepSpeed has no fp16 on CPUs)"
    )
    require(
        recipe.memory.offload == "none", "memory.offload", recipe.memory.offload, "none on CPUs (all is in host memory)"
    )


@contextmanager
def said_if_slow(text: str, after_s: float) -> Iterator[None]:
    """Say something on stderr if what is inside takes longer than some seconds."""
    timer = threading.Timer(after_s, lambda: print(text, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ZeroReplica:
    """Computes a rank's micro-batches under DeepSpeed's engine; same calls as `DdpReplica`."""

    def __init__(self, whole: nn.Module, batch: Batch, recipe: Recipe, device: torch.device) -> None:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # no launcher may have set it
        with warnings.catch_warnings(), said_if_slow(COMPILES, QUIET_S):
            warnings.simplefilter("ignore")  # deepspeed 0.19 uses what torch 2.13 calls deprecated
            import deepspeed

            if device.type == "cpu":  # its sums in shared memory would be compiled first, for minutes; gloo is there
                deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            deepspeed.utils.logger.setLevel("WARNING")
            deepspeed.init_distributed()
            groups = [
                {"params": group["params"], "weight_decay": group["weight_decay"]}
                for group in optimizer_of(whole, recipe.optimizer).param_groups
            ]
            config = config_of(recipe, batch, on_gpu=device.type == "cuda")
            self.engine, self._optimizer, *_ = deepspeed.initialize(model=whole, model_parameters=groups, config=config)
        self._gradient_bytes, self._stage = 0, recipe.parallel.zero
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(batch.precision, torch.float32)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Summed loss of a micro-batch; DeepSpeed itself counts which one is the last of a step."""
        return self.engine(inputs.to(self._dtype) if inputs.is_floating_point() else inputs, targets)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Add a micro-batch's gradients: those of loss times share, averaged (by DeepSpeed) as `DdpReplica` does."""
        self.engine.backward(loss * share)
        # ZeRO-1 holds all gradients until the last micro-batch, and then its part only.
        self._gradient_bytes = max(self._gradient_bytes, Counted().bytes_of(self._gradients()))
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def update(self, rate: float) -> tuple[float, StateBytes]:
        """Clip and update; norm of the whole gradient before clipping, and what memory held then."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # The second copies of ZeRO++ end with the update, the optimizer's state begins with it.
        weights, gradients = Counted().bytes_of(self._weights()), self._gradient_bytes
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        held = StateBytes(weights=weights, gradients=gradients, optimizer=Counted().bytes_of(self._optimizer_state()))
        self._gradient_bytes = 0
        return float(norm if norm is not None else 0.0), held

    @contextmanager
    def validating(self) -> Iterator[None]:
        """See `runners.recipes.replicas.loop.Replica`."""
        self.engine.eval()
        try:
            yield
        finally:
            self.engine.train()

    def gathered(self) -> AbstractContextManager[object]:
        """See `runners.recipes.replicas.loop.Replica`."""
        if self._stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([p for p in self.engine.module.parameters() if p.requires_grad])

    def saved(self, home: Home) -> EngineFiles:
        """DeepSpeed's own checkpoints."""
        return EngineFiles(home, self.engine, self._stage)

    def _weights(self) -> Iterator[torch.Tensor | None]:
        for parameter in self.engine.module.parameters():
            yield getattr(parameter, "ds_tensor", parameter.data)
            yield getattr(parameter, "ds_secondary_tensor", None)

    def _gradients(self) -> Iterator[torch.Tensor | None]:
        """Wherever DeepSpeed keeps them, by stage."""
        for parameter in self.engine.module.parameters():
            yield parameter.grad
            yield getattr(parameter, "grad_accum", None)
        yield getattr(self._optimizer, "grad_partitions_flat_buffer", None)
        for kept in ("averaged_gradients", "all_grad_tensors"):
            for tensors in getattr(self._optimizer, kept, {}).values():
                yield from tensors if isinstance(tensors, list | tuple) else [tensors]

    def _optimizer_state(self) -> Iterator[torch.Tensor | None]:
        for kept in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            yield from getattr(self._optimizer, kept, [])
        for state in self._optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 1)
