"""A problem's costs as plain arrays, for the kernels of the search.

A *worker class* is a pool used at one tensor-parallel degree. All arrays are for one micro-batch size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.memory import stage_memory
from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values, matrix_values, packed_bytes
from polygon.domain.plan import RECOMPUTE
from polygon.parity import Allowed
from polygon.planning.packing import activation_modes, gradient_mode, link_seconds

OPTIONS = (("none", 0), ("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 3))
"""Recomputation and ZeRO of a stage, fastest first; decode takes the first that fits."""


class Bank(NamedTuple):
    """Arrays of one problem at one micro-batch size.

    Shapes: c classes, r recomputations, n layers, p pools, d regions.
    """

    pool: np.ndarray
    region: np.ndarray
    tp: np.ndarray
    nodes: np.ndarray
    devices_per_node: np.ndarray
    first_node: np.ndarray
    """(c,) ints; the last three of the class's pool, whose nodes are numbered over the whole cluster."""
    kind: np.ndarray
    """(c,) first class that computes and stores alike (same device, node links and degree, whatever the pool)."""
    forward_s: np.ndarray
    backward_s: np.ndarray
    """(c, r, n + 1) running sums of seconds per micro-batch."""
    parameters: np.ndarray
    """(c, n + 1) running sum per device."""
    tied: np.ndarray
    """(c,) parameters of a tied head's own copy, per device."""
    activation_bytes: np.ndarray
    """(c, r, n + 1) running sum, per micro-batch in flight."""
    transient_bytes: np.ndarray
    """(c, r, n)."""
    limit_bytes: np.ndarray
    """(c,) memory that a plan may use."""
    state_bytes: np.ndarray
    """(4, shards + 1) bytes of weights, gradients and optimizer per parameter, by ZeRO stage and shards."""
    context_bytes: float
    update_s_per_parameter: np.ndarray
    """(c,)."""
    option_recompute: np.ndarray
    option_zero: np.ndarray
    """(options,) see `OPTIONS`."""
    element_bytes: float
    gradient_bytes: float
    activation_wire: np.ndarray
    """(d, d) bytes of one message between stages."""
    activation_codec_s: np.ndarray
    """(d, d) seconds to pack and unpack it on the slowest devices there."""
    gradient_ratio: np.ndarray
    """(d, d) packed over plain gradient bytes."""
    local_steps: int
    """Most steps between two meetings of regions that hold a whole pipeline each; 1: they meet in every step."""
    stands: np.ndarray
    """(d,) any pool of each region: links between regions are the same for all of them."""
    pool_region: np.ndarray
    """(p,) and the links as in `LinkTable`."""
    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    node_latency_s: np.ndarray
    node_bytes_per_s: np.ndarray
    card_bytes_per_s: np.ndarray
    capacity_bytes_per_s: np.ndarray
    micro_batches: int
    tied_values: float
    """Parameters of tied embeddings; 0 if they are not."""


def worker_classes(tables: CostTables, limit: int | None = None) -> tuple[tuple[int, int], ...]:
    """Every (pool, tensor-parallel degree) that a plan may use: allowed ones, degrees up to `limit`."""
    problem = tables.problem
    classes = []
    for pool in problem.cluster.pools:
        if not problem.may_use(pool):
            continue
        for tp in tables.tensor_degrees(pool.index):
            if limit is None or tp <= limit:
                classes.append((pool.index, tp))
    return tuple(classes)


def _kinds(tables: CostTables, classes: tuple[tuple[int, int], ...]) -> np.ndarray:
    pools = tables.problem.cluster.pools
    first: dict[object, int] = {}
    kinds = []
    for c, (p, t) in enumerate(classes):
        pool = pools[p]
        kinds.append(first.setdefault((pool.device.name, pool.intra_node, pool.devices_per_node, t), c))
    return np.array(kinds, dtype=np.int64)


def state_bytes_per_parameter(tables: CostTables, shards: int) -> np.ndarray:
    """Bytes of weights, gradients and optimizer per parameter, shape (4, shards + 1) by ZeRO stage and shards."""
    layers = tables.memory(1, tables.micro_batch_sizes[0], "none").layers
    held = float(layers.parameters[1])
    table = np.zeros((4, shards + 1))
    for zero in range(4):
        for k in range(1, shards + 1):
            parts = stage_memory(layers, 1, 2, in_flight=0, zero=zero, shards=k, batch=tables.problem.batch)
            table[zero, k] = (parts.weights + parts.gradients + parts.optimizer) / held
    return table


def build_bank(
    tables: CostTables, classes: tuple[tuple[int, int], ...], micro_batch_size: int, may: Allowed, max_width: int
) -> Bank:
    """Collect the arrays of a problem.

    Parameters
    ----------
    may : Allowed
        Packings and local steps that may be chosen; every link gets what is quickest for a message alone.
    """
    problem = tables.problem
    cluster, batch, links = problem.cluster, problem.batch, tables.links
    pools = [cluster.pools[p] for p, _ in classes]
    forward = np.array([[tables.times(p, t, micro_batch_size, r).forward_s for r in RECOMPUTE] for p, t in classes])
    backward = np.array([[tables.times(p, t, micro_batch_size, r).backward_s for r in RECOMPUTE] for p, t in classes])
    memory = [[tables.memory(t, micro_batch_size, r) for r in RECOMPUTE] for _, t in classes]
    empty = stage_memory(memory[0][0].layers, 1, 1, in_flight=0, zero=0, shards=1, batch=batch)
    regions = len(cluster.regions)
    values = boundary_values(problem.model, batch, micro_batch_size)
    far = ~np.eye(regions, dtype=bool)
    chosen = activation_modes(tables, micro_batch_size, may.activations)
    wire = np.full((regions, regions), values * float(batch.element_bytes))
    packing_s = np.zeros((regions, regions))
    for mode in set(chosen[far].tolist()):
        here = far & (chosen == mode) & (cluster.bytes_per_s > 0)
        wire[here] = packed_bytes(values, batch.element_bytes, mode)
        seconds = link_seconds(tables, values, batch.element_bytes, mode)
        rate = np.minimum(cluster.bytes_per_s, links.capacity_bytes_per_s)
        packing_s[here] = np.maximum(0.0, seconds[here] - wire[here] / rate[here])
    block = 4 * matrix_values(problem.model)
    gradients = gradient_mode(tables, may.weight_gradients)
    ratio = packed_bytes(block, batch.gradient_bytes, gradients, matrix_values(problem.model))
    ratio /= block * batch.gradient_bytes
    stands = np.zeros(regions, dtype=np.int64)
    stands[links.region] = np.arange(len(links.region))
    million = 1_000_000
    return Bank(
        pool=np.array([p for p, _ in classes], dtype=np.int64),
        region=np.array([pool.region for pool in pools], dtype=np.int64),
        tp=np.array([t for _, t in classes], dtype=np.int64),
        nodes=np.array([pool.nodes for pool in pools], dtype=np.int64),
        devices_per_node=np.array([pool.devices_per_node for pool in pools], dtype=np.int64),
        first_node=links.first_node[[p for p, _ in classes]],
        kind=_kinds(tables, classes),
        forward_s=forward,
        backward_s=backward,
        parameters=np.array([m[0].parameters for m in memory]),
        tied=np.array([m[0].layers.tied_parameters for m in memory]),
        activation_bytes=np.array([[r.activation_bytes for r in m] for m in memory]),
        transient_bytes=np.array([[r.layers.transient_bytes for r in m] for m in memory]),
        limit_bytes=tables.limit_bytes[[p for p, _ in classes]],
        state_bytes=state_bytes_per_parameter(tables, max_width),
        context_bytes=float(empty.total_bytes),
        update_s_per_parameter=np.array([tables.update_s(p, million) / million for p, _ in classes]),
        option_recompute=np.array([RECOMPUTE.index(r) for r, _ in OPTIONS], dtype=np.int64),
        option_zero=np.array([z for _, z in OPTIONS], dtype=np.int64),
        element_bytes=float(batch.element_bytes),
        gradient_bytes=float(batch.gradient_bytes),
        activation_wire=wire,
        activation_codec_s=packing_s,
        gradient_ratio=np.where(far, ratio, 1.0),
        local_steps=1 if batch.precision == "fp16" else max(may.local_steps),
        stands=stands,
        pool_region=links.region,
        latency_s=links.latency_s,
        bytes_per_s=links.bytes_per_s,
        node_latency_s=links.node_latency_s,
        node_bytes_per_s=links.node_bytes_per_s,
        card_bytes_per_s=links.card_bytes_per_s,
        capacity_bytes_per_s=links.capacity_bytes_per_s,
        micro_batches=batch.global_batch // micro_batch_size,
        tied_values=float(
            problem.model.head_weight_parameters()
            if problem.model.tied_embeddings and problem.model.family != "vit"
            else 0
        ),
    )
