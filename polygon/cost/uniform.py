"""Plain 3D to 5D parallelism on equal devices: seconds per step and bytes per device of one configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polygon.cost.compute import FUSED, Kernels, LayerTimes, layer_times, model_flops_per_step, update_s
from polygon.cost.kernels import silicon, stream_s
from polygon.cost.memory import (
    CONTEXT_BYTES,
    LayerMemory,
    MemoryBreakdown,
    breakdown,
    layer_memory,
    stage_rows,
    state_bytes,
)
from polygon.cost.network import Group, send_s
from polygon.cost.uniform_kernel import exposed_kernel, in_flight_kernel, many_kernel, terms_kernel
from polygon.domain.cluster import Link, Pool
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
    """Layers of each stage, embedding and head included; empty: see `stage_bounds`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a configuration costs by stage, whatever its width: the part that is worth keeping."""

    bounds: tuple[int, ...]
    stages: np.ndarray
    """Shape (stages, 7): seconds of forward and backward, exposed communication in them, parameters, most parameters
    of a layer, bytes of activations per micro-batch in flight, transient bytes, parameters that ZeRO divides."""
    kinds: np.ndarray
    """Shape (kinds, 4): layers of a kind, their forward and backward [s], their parameters."""
    backward_s: float
    parameters: float
    send_s: float
    copies_s: float
    source: str
    relative_error: float


SHARD_COPIES = 3.7
"""Passes over gathered weights and gradients that fully sharded training adds to every micro-batch (fitted)."""
_layouts: dict[tuple[object, ...], Layout] = {}


def _layout(model: Model, batch: Batch, pool: Pool, config: ParallelConfig) -> Layout:
    """The layout of a configuration, kept between calls."""
    key = (
        model,
        silicon(pool.device, batch.precision),
        pool.intra_node,
        pool.inter_node,
        pool.devices_per_node,
        batch.seq_len,
        batch.gradient_precision,
        config.tp,
        config.pp,
        config.cp,
        config.ep,
        config.interleave,
        config.micro_batch_size,
        config.recompute,
        config.sequence_parallel,
        config.stage_layers,
        config.kernels,
        config.dp * config.tp * config.cp < pool.devices_per_node,
    )
    known = _layouts.get(key)
    if known is None:
        if len(_layouts) > 20000:
            _layouts.clear()
        times, memory = _times(model, batch, pool, config), _memory(model, batch, config)
        known = _layouts[key] = _lay_out(model, batch, pool, config, times, memory)
    return known


def _times(model: Model, batch: Batch, pool: Pool, config: ParallelConfig) -> LayerTimes:
    return layer_times(
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


def _memory(model: Model, batch: Batch, config: ParallelConfig) -> LayerMemory:
    return layer_memory(
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


def _lay_out(
    model: Model, batch: Batch, pool: Pool, config: ParallelConfig, times: LayerTimes, memory: LayerMemory
) -> Layout:
    bounds = stage_bounds(model, config)
    starts = bounds[:-1]
    backward = np.add.reduceat(times.backward_s, starts)
    rows = np.array([stage_rows(memory, a, b) for a, b in itertools.pairwise(bounds)])
    stages = np.column_stack(
        [
            np.add.reduceat(times.forward_s, starts) + backward,
            np.add.reduceat(times.communication_s, starts),
            rows,
        ]
    )
    by_kind: dict[str, int] = {}
    names = [model.layer_kind(layer) for layer in range(model.layers)]
    for name in names:
        by_kind[name] = by_kind.get(name, 0) + 1
    first = [names.index(name) for name in by_kind]
    kinds = np.array(
        [
            [count, times.forward_s[i], times.backward_s[i], memory.parameters[i]]
            for count, i in zip(by_kind.values(), first, strict=True)
        ]
    )
    per_weight, per_gradient, _ = state_bytes(batch)
    copied = SHARD_COPIES * float(memory.parameters.sum()) * (per_weight + per_gradient)
    stride = config.devices // config.pp
    boundary = _group(pool, 2, 2 if stride < pool.devices_per_node else 1)
    message = config.micro_batch_size * batch.seq_len / config.cp * model.hidden_size * batch.element_bytes / config.tp
    return Layout(
        bounds=tuple(bounds),
        stages=stages,
        kinds=kinds,
        backward_s=float(backward.max()),
        parameters=float(rows[:, 0].max()),
        send_s=send_s(message, boundary) if config.pp > 1 else 0.0,
        copies_s=stream_s(silicon(pool.device, batch.precision), copied),
        source=times.source,
        relative_error=times.relative_error,
    )


def _micro_batches(batch: Batch, config: ParallelConfig) -> int:
    share, rest = divmod(batch.global_batch, config.dp * config.micro_batch_size)
    if rest or share == 0:
        raise InputError(
            f"global_batch: found {batch.global_batch}, expected a multiple of dp x micro_batch_size = "
            f"{config.dp * config.micro_batch_size}"
        )
    return share


def _gradient_copies(batch: Batch, config: ParallelConfig) -> float:
    """Low-precision gradients that live beside the wider ones they are added to, in units of those."""
    if config.kernels.fused_accumulation or config.zero == 3 or batch.gradient_bytes <= batch.element_bytes:
        return 0.0
    return batch.element_bytes / batch.gradient_bytes


def _update_line(batch: Batch, pool: Pool, config: ParallelConfig) -> tuple[float, float]:
    """Seconds of the optimizer: what it costs at least, and per parameter."""
    base = update_s(0.0, pool.device, batch, fused=config.kernels.fused)
    return base, (update_s(1e9, pool.device, batch, fused=config.kernels.fused) - base) / 1e9


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
    r"""Step time and memory of one configuration on equal devices.

    .. math:: T = \sum_s t_s / v + (m - 1) \max_s t_s + T_{dp} + T_{optimizer}

    with v chunks of layers per device (the slowest stage's own share of the first sum is not divided). Ignores
    stragglers and data loading.

    Parameters
    ----------
    times, memory : optional
        Measured ones in place of the model's (see `polygon.cost.profiles`).
    """
    micro_batches = _micro_batches(batch, config)
    if times is None and memory is None:
        layout = _layout(model, batch, pool, config)
    else:
        layout = _lay_out(
            model,
            batch,
            pool,
            config,
            times or _times(model, batch, pool, config),
            memory or _memory(model, batch, config),
        )
    group = data_parallel_group(pool, config)
    per_weight, per_gradient, _ = state_bytes(batch)
    seconds = np.empty(6)
    step = terms_kernel(
        layout.stages[:, 0],
        layout.stages[:, 1],
        layout.backward_s,
        layout.parameters,
        layout.kinds,
        micro_batches,
        config.interleave,
        exposed_sends(config, micro_batches),
        layout.send_s,
        *group.numbers,
        config.zero,
        OVERLAPS.index(config.overlap),
        config.gathers_per_layer,
        float(per_weight),
        float(per_gradient),
        layout.copies_s,
        *_update_line(batch, pool, config),
        seconds,
    )
    terms = {
        name: Term(seconds=float(value), source=source or layout.source, relative_error=error or layout.relative_error)
        for (name, source, error), value in zip(TERMS, seconds, strict=True)
    }
    half = interval_s(terms)
    return UniformEstimate(
        step_s=step,
        low_s=max(0.0, step - half),
        high_s=step + half,
        terms=terms,
        memory=tuple(
            breakdown(
                *row,
                in_flight=in_flight(config, s, micro_batches),
                zero=config.zero,
                shards=group.members,
                batch=batch,
                context_bytes=context_bytes,
                gradient_copies=_gradient_copies(batch, config),
            )
            for s, row in enumerate(layout.stages[:, 2:].tolist())
        ),
        flops=model_flops_per_step(model, batch),
    )


TERMS = (
    ("compute", "", 0.0),
    ("tensor-parallel", "", 0.0),
    ("bubble", "", 0.0),
    ("p2p", "spec", 0.5),
    ("data-parallel", "spec", 0.5),
    ("optimizer", "spec", 0.3),
)
"""Name, source and error of every term, in the kernel's order; empty: the layer times'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformEstimates:
    """Many configurations: what `estimate_uniform` says of each, without the words."""

    step_s: np.ndarray
    """Shape (n,)."""
    terms_s: np.ndarray
    """Shape (n, 6), in the order of `TERMS`."""
    peak_bytes: np.ndarray
    """Shape (n,): of the stage that needs most, context included."""


def estimate_many(
    model: Model, batch: Batch, pool: Pool, configs: Sequence[ParallelConfig], *, context_bytes: float = CONTEXT_BYTES
) -> UniformEstimates:
    """Step time and peak memory of many configurations at once; the kernels on the first one count for all."""
    if not configs:
        return UniformEstimates(step_s=np.zeros(0), terms_s=np.zeros((0, 6)), peak_bytes=np.zeros(0))
    number: dict[int, int] = {}
    layouts: list[Layout] = []
    interleaves: list[int] = []
    integers = np.empty((len(configs), 9), dtype=np.int64)
    per_node = pool.devices_per_node
    for i, config in enumerate(configs):
        micro_batches = _micro_batches(batch, config)
        layout = _layout(model, batch, pool, config)
        place = number.get(id(layout))
        if place is None:
            place = number[id(layout)] = len(layouts)
            layouts.append(layout)
            interleaves.append(config.interleave)
        members = config.dp * config.cp
        integers[i] = (
            place,
            micro_batches,
            members,
            max(1, min(members, per_node // config.tp)),
            config.zero,
            OVERLAPS.index(config.overlap),
            config.gathers_per_layer,
            exposed_sends(config, micro_batches),
            config.schedule == "gpipe",
        )
    per_weight, per_gradient, per_optimizer = state_bytes(batch)
    intra, inter = pool.intra_node, pool.inter_node
    machine = np.array(
        [
            per_node,
            intra.bytes_per_s,
            intra.latency_s,
            inter.bytes_per_s,
            inter.latency_s,
            per_weight,
            per_gradient,
            per_optimizer,
            *_update_line(batch, pool, configs[0]),
            per_gradient * (1 + _gradient_copies(batch, configs[0])),
        ]
    )
    terms, peaks = np.empty((len(configs), 6)), np.empty(len(configs))
    many_kernel(
        integers,
        np.cumsum([0, *(len(layout.stages) for layout in layouts)]),
        np.concatenate([layout.stages for layout in layouts]),
        np.cumsum([0, *(len(layout.kinds) for layout in layouts)]),
        np.concatenate([layout.kinds for layout in layouts]),
        np.array(
            [
                (layout.backward_s, layout.parameters, layout.send_s, layout.copies_s, float(v))
                for layout, v in zip(layouts, interleaves, strict=True)
            ]
        ),
        machine,
        terms,
        peaks,
    )
    return UniformEstimates(step_s=terms.sum(axis=1), terms_s=terms, peak_bytes=peaks + context_bytes)


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


def exposed_data_parallel_s(reduce_s: float, gather_s: float, backward_s: float, overlap: str) -> float:
    """What is seen of a gradient reduction and a gathering of weights beside the last backward (and first forward)."""
    return exposed_kernel(reduce_s, gather_s, backward_s, OVERLAPS.index(overlap))
