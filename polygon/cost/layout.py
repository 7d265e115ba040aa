"""What a uniform configuration costs by stage, whatever its width: the part that is worth keeping between estimates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from polygon.cost.compute import LOGIT_BYTES, LayerTimes, layer_times
from polygon.cost.kernels import silicon, stream_s
from polygon.cost.memory import LayerMemory, layer_memory, stage_rows, state_bytes
from polygon.cost.network import Group, joined_in_a_mesh, send_s
from polygon.cost.parallel import ParallelConfig, stage_bounds
from polygon.domain.cluster import Link, Pool
from polygon.domain.model import Batch, Model


def shared_link(pool: Pool, tp: int, members: int) -> Link:
    """What one device gets inside a group of `members` that lie `tp` apart: the fabric, or its part of the cards."""
    if tp * members <= pool.devices_per_node:
        return pool.intra_node
    rate = pool.inter_node.bytes_per_s / pool.devices_per_node
    return Link(latency_s=pool.inter_node.latency_s, bytes_per_s=rate)


def group_of(pool: Pool, members: int, per_node: int) -> Group:
    """A group of devices of the pool, at most `per_node` of them on a node."""
    return Group(
        members=members,
        per_node=max(1, min(members, per_node, pool.devices_per_node)),
        devices_per_node=pool.devices_per_node,
        intra_node=pool.intra_node,
        inter_node=pool.inter_node,
        mesh=joined_in_a_mesh(pool.device, pool.devices_per_node),
    )


def data_parallel_group(pool: Pool, config: ParallelConfig) -> Group:
    """The devices that hold the same weights: a stride of tp apart, as Megatron and torch deal ranks."""
    return group_of(pool, config.dp * config.cp, pool.devices_per_node // config.tp)


def network_of(pool: Pool) -> np.ndarray:
    """What the kernels take of a pool's network, shape (6,)."""
    return np.array(
        [
            pool.devices_per_node,
            pool.intra_node.bytes_per_s,
            pool.intra_node.latency_s,
            pool.inter_node.bytes_per_s,
            pool.inter_node.latency_s,
            joined_in_a_mesh(pool.device, pool.devices_per_node),
        ],
        dtype=float,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a configuration costs by stage, whatever its width: the part that is worth keeping."""

    bounds: tuple[int, ...]
    stages: np.ndarray
    """Shape (stages, 7): seconds of forward and backward, exposed communication in them, parameters, most parameters
    of a layer, bytes of activations per micro-batch in flight, transient bytes, parameters that ZeRO divides."""
    kinds: np.ndarray
    """Shape (kinds, 4): most layers of a kind on a stage, their forward and backward [s], their parameters."""
    backward_s: float
    parameters: float
    send_s: float
    copies_s: float
    source: str
    relative_error: float


SHARD_COPIES = 3.7
"""Passes over gathered weights and gradients that fully sharded training adds to every micro-batch (fitted)."""
_layouts: dict[tuple[object, ...], Layout] = {}


def layout_of(model: Model, batch: Batch, pool: Pool, config: ParallelConfig) -> Layout:
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
        times, memory = config_times(model, batch, pool, config), config_memory(model, batch, config)
        known = _layouts[key] = lay_out(model, batch, pool, config, times, memory)
    return known


def config_times(model: Model, batch: Batch, pool: Pool, config: ParallelConfig) -> LayerTimes:
    """Layer times of a configuration."""
    return layer_times(
        model,
        batch,
        pool.device,
        pool.intra_node,
        tp=config.tp,
        tp_group=group_of(pool, config.tp, config.tp),
        micro_batch_size=config.micro_batch_size,
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel,
        cp=config.cp,
        cp_link=shared_link(pool, config.tp, config.cp),
        ep=config.ep,
        ep_group=group_of(pool, config.ep, pool.devices_per_node // config.tp),
        kernels=config.kernels,
    )


def config_memory(model: Model, batch: Batch, config: ParallelConfig) -> LayerMemory:
    """Layer memory of a configuration."""
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
        keep_gathered=config.kernels.keeps_gathered,
        logit_bytes=LOGIT_BYTES[config.kernels.loss],
    )


def lay_out(
    model: Model, batch: Batch, pool: Pool, config: ParallelConfig, times: LayerTimes, memory: LayerMemory
) -> Layout:
    """The layout of a configuration from given times and memory."""
    bounds = stage_bounds(model, config)
    starts = bounds[:-1]
    backward = np.add.reduceat(times.backward_s, starts)
    rows = np.array([stage_rows(memory, a, b) for a, b in itertools.pairwise(bounds)])
    if config.kernels.keeps_outputs:
        sent = config.micro_batch_size * batch.seq_len / config.cp * model.hidden_size
        rows[:-1, 2] += sent * max(batch.element_bytes, 2)
    stages = np.column_stack(
        [
            np.add.reduceat(times.forward_s, starts) + backward,
            np.add.reduceat(times.communication_s, starts),
            rows,
        ]
    )
    names = [model.layer_kind(layer) for layer in range(model.layers)]
    by_kind = {
        name: max(names[a:b].count(name) for a, b in itertools.pairwise(bounds)) for name in dict.fromkeys(names)
    }
    first = [names.index(name) for name in by_kind]
    kinds = np.array(
        [
            [count, times.forward_s[i], times.backward_s[i], memory.parameters[i]]
            for count, i in zip(by_kind.values(), first, strict=True)
        ]
    )
    per_weight, per_gradient, _ = state_bytes(batch)
    copied = SHARD_COPIES * float(rows[:, 0].max()) * (per_weight + per_gradient)
    stride = config.devices // config.pp
    boundary = group_of(pool, 2, 2 if stride < pool.devices_per_node else 1)
    message = (
        config.micro_batch_size
        * batch.seq_len
        / config.cp
        * model.hidden_size
        * max(batch.element_bytes, 2)
        / config.tp
    )
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
