"""Plain 3D to 5D parallelism on equal devices: seconds per step and bytes per device of one configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from polygon.cost.compute import FUSED, Kernels, LayerTimes, layer_times, model_flops_per_step, update_s
from polygon.cost.kernels import silicon, stream_s
from polygon.cost.memory import CONTEXT_BYTES, LayerMemory, MemoryBreakdown, layer_memory, stage_memory
from polygon.cost.network import Group, all_reduce_s, gather_s, send_s
from polygon.domain.cluster import Device, Link, Pool
from polygon.domain.errors import InputError, require
from polygon.domain.model import Batch, Model

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
    recompute: str = "none"
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    overlap: str = "backward"
    """What hides data-parallel traffic: nothing; the last backward; that and the first forward (sharded gathers)."""
    gathers_per_layer: int = 1
    """Collectives in which ZeRO-3 gathers a layer: one (FSDP), or one a parameter (DeepSpeed)."""
    p2p_overlap: bool = False
    """Whether stages send while they compute."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, embedding and head included; empty: blocks dealt evenly."""
    kernels: Kernels = FUSED

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "interleave", "micro_batch_size"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        require(self.zero in (0, 1, 2, 3), "zero", self.zero, "0, 1, 2 or 3")
        require(self.schedule in SCHEDULES, "schedule", self.schedule, " or ".join(SCHEDULES))
        require(self.overlap in OVERLAPS, "overlap", self.overlap, ", ".join(OVERLAPS))
        require(self.interleave == 1 or self.pp > 1, "interleave", self.interleave, "1 where pp is 1")
        require((self.dp * self.cp) % self.ep == 0, "ep", self.ep, f"a divisor of dp x cp = {self.dp * self.cp}")

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of the step's time, where it comes from, and how sure it is."""

    seconds: float
    source: str
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class UniformEstimate:
    """What a configuration is predicted to cost."""

    step_s: float
    low_s: float
    high_s: float
    """Ends of the 90 % interval."""
    terms: Mapping[str, Term]
    """compute, tensor-parallel (with context and expert traffic), bubble, p2p, data-parallel, optimizer: they add
    up to step_s."""
    memory: tuple[MemoryBreakdown, ...]
    """Per stage."""
    flops: float = 0.0
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> MemoryBreakdown:
        """Of the stage that needs most."""
        return max(self.memory, key=lambda stage: stage.total_bytes)


def stage_bounds(model: Model, config: ParallelConfig) -> list[int]:
    """First layer of every stage and, last, the number of layers."""
    if config.stage_layers:
        require(
            len(config.stage_layers) == config.pp and sum(config.stage_layers) == model.layers,
            "stage_layers",
            config.stage_layers,
            f"{config.pp} numbers with the sum {model.layers}",
        )
        return [0, *np.cumsum(config.stage_layers).tolist()]
    cuts = [1 + round(model.blocks * s / config.pp) for s in range(config.pp + 1)]
    cuts[0], cuts[-1] = 0, model.layers
    return cuts


def in_flight(config: ParallelConfig, stage: int, micro_batches: int) -> float:
    """Most micro-batches whose activations a stage holds, in units of all of its layers."""
    p, v = config.pp, config.interleave
    if config.schedule == "gpipe":
        return float(micro_batches)
    if v == 1:
        return float(min(micro_batches, p - stage))
    return min(micro_batches * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v


def _shared_link(pool: Pool, tp: int, members: int) -> Link:
    """What one device gets inside a group of `members` that lie `tp` apart: the fabric, or its part of the cards."""
    if tp * members <= pool.devices_per_node:
        return pool.intra_node
    rate = pool.inter_node.bytes_per_s / pool.devices_per_node
    return Link(latency_s=pool.inter_node.latency_s, bytes_per_s=rate)


def _group(pool: Pool, members: int, per_node: int) -> Group:
    return Group(
        members=members,
        per_node=max(1, min(members, per_node, pool.devices_per_node)),
        devices_per_node=pool.devices_per_node,
        intra_node=pool.intra_node,
        inter_node=pool.inter_node,
    )


def data_parallel_group(pool: Pool, config: ParallelConfig) -> Group:
    """The devices that hold the same weights: a stride of tp apart, as Megatron and torch deal ranks."""
    return _group(pool, config.dp * config.cp, pool.devices_per_node // config.tp)


def estimate_uniform(
    model: Model,
    batch: Batch,
    pool: Pool,
    config: ParallelConfig,
    *,
    times: LayerTimes | None = None,
    memory: LayerMemory | None = None,
    context_bytes: float = CONTEXT_BYTES,
) -> UniformEstimate:
    """Step time and memory of one configuration on equal devices.

    .. math:: T = \\sum_s t_s + (m - 1) \\max_s t_s + T_{dp} + T_{optimizer}

    with the first sum divided by the interleaving. Ignores stragglers and data loading.

    Parameters
    ----------
    times, memory : optional
        Measured ones in place of the model's (see `polygon.cost.profiles`).
    """
    share, rest = divmod(batch.global_batch, config.dp * config.micro_batch_size)
    if rest or share == 0:
        raise InputError(
            f"global_batch: found {batch.global_batch}, expected a multiple of dp x micro_batch_size = "
            f"{config.dp * config.micro_batch_size}"
        )
    micro_batches = share
    if times is None:
        times = layer_times(
            model,
            batch,
            pool.device,
            pool.intra_node,
            tp=config.tp,
            tp_group=_group(pool, config.tp, config.tp),
            micro_batch_size=config.micro_batch_size,
            recompute=config.recompute,
            sequence_parallel=config.sequence_parallel,
            cp=config.cp,
            cp_link=_shared_link(pool, config.tp, config.cp),
            ep=config.ep,
            ep_link=_shared_link(pool, config.tp, config.ep),
            kernels=config.kernels,
        )
    if memory is None:
        memory = layer_memory(
            model,
            batch,
            tp=config.tp,
            micro_batch_size=config.micro_batch_size,
            recompute=config.recompute,
            sequence_parallel=config.sequence_parallel,
            flash_attention=config.kernels.attention != "materialised",
            fused=config.kernels.fused,
            dropout=config.kernels.dropout,
            cp=config.cp,
            ep=config.ep,
            keep_operators=config.kernels.selective == "operators",
        )
    bounds = stage_bounds(model, config)
    forward = np.add.reduceat(times.forward_s, bounds[:-1])
    backward = np.add.reduceat(times.backward_s, bounds[:-1])
    stage = forward + backward

    per_device = pool.devices_per_node
    stride = config.devices // config.pp
    boundary = Group(
        members=2,
        per_node=2 if stride < per_device else 1,
        devices_per_node=per_device,
        intra_node=pool.intra_node,
        inter_node=pool.inter_node,
    )
    message = config.micro_batch_size * batch.seq_len / config.cp * model.hidden_size * batch.element_bytes / config.tp
    send = send_s(message, boundary) if config.pp > 1 else 0.0
    slowest = int(stage.argmax())
    busiest = float(stage[slowest])
    communication_s = micro_batches * float(np.add.reduceat(times.communication_s, bounds[:-1])[slowest])
    compute_s = micro_batches * busiest - communication_s
    bubble_s = (float(stage.sum()) - busiest) / config.interleave
    p2p_s = send * exposed_sends(config, micro_batches)

    group = data_parallel_group(pool, config)
    parameters = max(
        float(memory.parameters[a:b].sum()) + (memory.tied_parameters if a > 0 and b == model.layers else 0.0)
        for a, b in itertools.pairwise(bounds)
    )
    dp_s = _data_parallel_s(
        batch, config, group, memory, times, parameters, micro_batches, float(backward.max()), pool.device
    )
    shards = group.members if config.zero >= 1 else 1
    optimizer_s = update_s(parameters / shards, pool.device, batch, fused=config.kernels.fused)
    step = compute_s + communication_s + bubble_s + p2p_s + dp_s + optimizer_s
    terms = {
        "compute": Term(seconds=compute_s, source=times.source, relative_error=times.relative_error),
        "tensor-parallel": Term(seconds=communication_s, source=times.source, relative_error=times.relative_error),
        "bubble": Term(seconds=bubble_s, source=times.source, relative_error=times.relative_error),
        "p2p": Term(seconds=p2p_s, source="spec", relative_error=0.5),
        "data-parallel": Term(seconds=dp_s, source="spec", relative_error=0.5),
        "optimizer": Term(seconds=optimizer_s, source="spec", relative_error=0.3),
    }
    error = interval_s(terms)
    stages = tuple(
        stage_memory(
            memory,
            a,
            b,
            in_flight=in_flight(config, s, micro_batches),
            zero=config.zero,
            shards=group.members,
            batch=batch,
            context_bytes=context_bytes,
        )
        for s, (a, b) in enumerate(itertools.pairwise(bounds))
    )
    return UniformEstimate(
        step_s=step,
        low_s=max(0.0, step - error),
        high_s=step + error,
        terms=terms,
        memory=stages,
        flops=model_flops_per_step(model, batch),
    )


def interval_s(terms: Mapping[str, Term]) -> float:
    """Half of the 90 % interval: terms of one source and error are wrong together, the others by themselves."""
    together: dict[tuple[str, float], float] = {}
    for term in terms.values():
        key = (term.source, term.relative_error)
        together[key] = together.get(key, 0.0) + term.seconds * term.relative_error
    return math.sqrt(sum(part**2 for part in together.values()))


def exposed_sends(config: ParallelConfig, micro_batches: int) -> int:
    """Messages between stages that a step waits for."""
    if config.pp == 1:
        return 0
    return 2 * config.interleave * micro_batches * (0 if config.p2p_overlap else 1) + 2 * (config.pp - 1)


def _data_parallel_s(
    batch: Batch,
    config: ParallelConfig,
    group: Group,
    memory: LayerMemory,
    times: LayerTimes,
    parameters: float,
    micro_batches: int,
    backward_s: float,
    device: Device,
) -> float:
    """Exposed seconds of gradient reduction and weight gathering."""
    if group.members < 2:
        return 0.0
    if config.zero == 3:
        weights = memory.parameters * max(batch.element_bytes, 2)
        pieces, hidden = config.gathers_per_layer, ZERO3_HIDING[config.overlap]
        gather = np.array([pieces * gather_s(float(w) / pieces, group) for w in weights])
        scatter = np.array(
            [pieces * gather_s(float(w) / pieces, group) for w in memory.parameters * batch.gradient_bytes]
        )
        forward = _visible_s(gather, hidden * times.forward_s)
        backward = _visible_s(gather + scatter, hidden * times.backward_s)
        copied = SHARD_COPIES * float(memory.parameters.sum()) * (max(batch.element_bytes, 2) + batch.gradient_bytes)
        copies_s = stream_s(silicon(device, batch.precision), copied)
        first_s = float(gather[0] + gather[1] + scatter[0])
        return micro_batches * (float(forward.sum() + backward.sum()) + copies_s) + first_s
    gradient = parameters * batch.gradient_bytes
    if config.zero == 0:
        reduce, gather_weights = all_reduce_s(gradient, group), 0.0
    else:
        reduce = gather_s(gradient, group)
        gather_weights = gather_s(parameters * max(batch.element_bytes, 2), group)
    return exposed_data_parallel_s(reduce, gather_weights, backward_s, config.overlap)


def exposed_data_parallel_s(reduce_s: float, gather_s: float, backward_s: float, overlap: str) -> float:
    """What is seen of a gradient reduction and a gathering of weights beside the last backward (and first forward)."""
    if overlap == "none":
        return reduce_s + gather_s
    exposed = float(_visible_s(np.array(reduce_s), np.array(0.9 * backward_s))) + LAST_BUCKET * reduce_s
    if overlap == "full":
        gather_s = float(_visible_s(np.array(gather_s), np.array(0.4 * backward_s)))
    return exposed + gather_s


def _visible_s(communication_s: np.ndarray, compute_s: np.ndarray) -> np.ndarray:
    """What overlapped communication adds to compute: the longer part, and the compute that it slows."""
    return np.maximum(communication_s - compute_s, 0.0) + CONTENTION * np.minimum(communication_s, compute_s)


CONTENTION = 0.126
"""How much slower compute is while a collective runs beside it (Galvatron's measured overlap coefficient)."""
LAST_BUCKET = 0.05
"""Part of the gradients whose reduction starts when backward has ended."""
ZERO3_HIDING = {"none": 0.0, "backward": 0.5, "full": 1.0}
"""Part of a layer's compute that may hide the gathering of the next."""
SHARD_COPIES = 3.7
"""Passes over gathered weights and gradients that fully sharded training adds to every micro-batch."""
