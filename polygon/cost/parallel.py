"""A uniform way to spread a model over equal devices, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polygon.cost.compute import FUSED, Kernels
from polygon.cost.uniform_kernel import exposed_kernel, in_flight_kernel
from polygon.domain.errors import require
from polygon.domain.model import Model

SCHEDULES = ("1f1b", "gpipe")
OVERLAPS = ("none", "backward", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """A uniform way to spread a model: dp x cp x tp x pp devices."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    interleave: int = 1
    """Chunks of layers per device (virtual pipeline stages)."""
    micro_batch_size: int = 1
    zero: int = 0
    shards: int = 0
    """Data-parallel ranks over which ZeRO divides, the others holding copies; 0: all of them."""
    recompute: str = "none"
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    overlap: str = "backward"
    """What hides data-parallel traffic: nothing; the last backward; that and the first forward (sharded gathers)."""
    gathers_per_layer: int = 1
    """Collectives in which ZeRO-3 gathers a layer: one (FSDP), or one a parameter (DeepSpeed)."""
    gathers_again: bool = False
    """Whether ZeRO-3 lets go of a recomputed layer before its backward, and gathers it once more."""
    owned_matrices: int = 0
    """Weight matrices that ZeRO-1 or 2 deals out whole: gradients are then summed on every rank, and each owner
    broadcasts its matrices (InternEvo). 0: every weight is divided."""
    p2p_overlap: bool = False
    """Whether stages send while they compute."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, embedding and head included; empty: see `stage_bounds`."""
    kernels: Kernels = FUSED

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "interleave", "micro_batch_size"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        require(self.zero in (0, 1, 2, 3), "zero", self.zero, "0, 1, 2 or 3")
        require(self.owned_matrices >= 0, "owned_matrices", self.owned_matrices, "a whole number >= 0")
        require(self.schedule in SCHEDULES, "schedule", self.schedule, " or ".join(SCHEDULES))
        require(self.overlap in OVERLAPS, "overlap", self.overlap, ", ".join(OVERLAPS))
        require(self.interleave == 1 or self.pp > 1, "interleave", self.interleave, "1 where pp is 1")
        require(
            self.shards >= 0 and (self.dp * self.cp) % max(self.shards, 1) == 0,
            "shards",
            self.shards,
            f"a divisor of dp x cp = {self.dp * self.cp}",
        )
        require((self.dp * self.cp) % self.ep == 0, "ep", self.ep, f"a divisor of dp x cp = {self.dp * self.cp}")

    @property
    def shard_width(self) -> int:
        """Ranks over which ZeRO divides."""
        return self.shards or self.dp * self.cp

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.dp * self.tp * self.pp * self.cp


def stage_bounds(model: Model, config: ParallelConfig) -> list[int]:
    """First layer of every stage and, last, the number of layers.

    Blocks are dealt evenly; where only all layers, embedding and head included, can be, they are.
    """
    if config.stage_layers:
        require(
            len(config.stage_layers) == config.pp and sum(config.stage_layers) == model.layers,
            "stage_layers",
            config.stage_layers,
            f"{config.pp} numbers with the sum {model.layers}",
        )
        return [0, *np.cumsum(config.stage_layers).tolist()]
    if model.blocks % config.pp and model.layers % config.pp == 0:
        return list(range(0, model.layers + 1, model.layers // config.pp))
    cuts = [1 + round(model.blocks * s / config.pp) for s in range(config.pp + 1)]
    cuts[0], cuts[-1] = 0, model.layers
    return cuts


def in_flight(config: ParallelConfig, stage: int, micro_batches: int) -> float:
    """Most micro-batches whose activations a stage holds, in units of all of its layers."""
    return in_flight_kernel(config.schedule == "gpipe", config.pp, config.interleave, stage, micro_batches)


def exposed_sends(config: ParallelConfig, micro_batches: int) -> int:
    """Messages between stages that a step waits for."""
    if config.pp == 1:
        return 0
    return 2 * config.interleave * micro_batches * (0 if config.p2p_overlap else 1) + 2 * (config.pp - 1)


def exposed_data_parallel_s(
    reduce_s: float, gather_s: float, forward_s: float, backward_s: float, overlap: str
) -> float:
    """What is seen of a gradient reduction beside the last backward, and of a gathering of weights beside the first
    forward."""
    return exposed_kernel(reduce_s, gather_s, forward_s, backward_s, OVERLAPS.index(overlap))
