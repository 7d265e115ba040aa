"""A problem's costs as plain arrays, for the kernels of the search.

A *worker class* is a pool used at one tensor-parallel degree. All arrays are for one setting: micro-batch size, context
and expert parallelism.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from polygon.cost.convergence import Allowed
from polygon.cost.memory import breakdown, gradient_copies, outside_bytes, passing_bytes, posted_bytes
from polygon.cost.overlap import Overlap, overlap_of
from polygon.cost.sharding import copies_s
from polygon.cost.tables import CostTables, running_sum
from polygon.cost.transfers import LinkArrays, boundary_values, codec_s, matrix_values, packed_bytes
from polygon.domain.plan import RECOMPUTE, Problem
from polygon.domain.runnable import runnable
from polygon.jit.by_pointer import gives_pointed
from polygon.planning.link_compression import activation_modes, gradient_mode, link_seconds, pays_inside

RECOMPUTED, ZERO, BLOCKS = 0, 1, 2
"""Rows of the memory options of stages: recomputation (its place in `RECOMPUTE`), ZeRO, and blocks recomputed."""


Classes = tuple[tuple[int, int], ...]
"""Pool and tensor-parallel degree of each class of workers."""


class Setting(NamedTuple):
    """How the workers of an allocation work, whatever their stage."""

    micro_batch_size: int
    cp: int = 1
    """Context-parallel degree of every worker."""
    ep: int = 1
    """Most devices over which a stage spreads its experts."""

    @property
    def unit(self) -> int:
        """Groups of a class that a stage takes together: whole workers, as many as divide the experts among them."""
        return math.lcm(self.cp, self.ep)


class Bank(NamedTuple):
    """Arrays of one problem under one setting.

    Shapes: c classes, r recomputations, n layers, p pools, d regions.
    """

    pool: np.ndarray
    region: np.ndarray
    tp: np.ndarray
    cp: int
    ep: int
    nodes: np.ndarray
    devices_per_node: np.ndarray
    first_node: np.ndarray
    """(c,) ints but for cp and ep; the last three of the pool, whose nodes are numbered over the whole cluster."""
    kind: np.ndarray
    """(c,) first class that computes and stores alike (same device, node links and degree, whatever the pool)."""
    forward_s: np.ndarray
    backward_s: np.ndarray
    """(c, r, n + 1) running sums of seconds per micro-batch."""
    accumulation_s: np.ndarray
    """(c, n + 1) running sums of what adding up gradients in the layers takes of backward; none is, fully sharded."""
    parameters: np.ndarray
    divided: np.ndarray
    """(c, n + 1) running sums per device: of parameters, and of what ZeRO divides by the shards."""
    passing_bytes: np.ndarray
    """(4, c, n) that each ZeRO stage has of a layer while it is computed, beside what every device keeps."""
    posted_bytes: float
    """Room for messages between stages."""
    kept_output_bytes: float
    """Per micro-batch in flight, of what a stage has sent."""
    tied: np.ndarray
    """(c,) parameters of a tied head's own copy, per device."""
    activation_bytes: np.ndarray
    """(c, r, n + 1) running sum, per micro-batch in flight."""
    transient_bytes: np.ndarray
    """(c, r, n)."""
    limit_bytes: np.ndarray
    """(c,) memory that a plan may use."""
    modes: np.ndarray
    """Recomputations that save memory, their places in `RECOMPUTE`."""
    held_bytes: np.ndarray
    divided_bytes: np.ndarray
    """(4,) bytes of weights, gradients and optimizer per parameter held, and per parameter divided, by ZeRO stage."""
    outside_bytes: float
    """More per parameter outside of blocks, divided from ZeRO-1 on."""
    context_bytes: float
    update_s_per_parameter: np.ndarray
    """(c,)."""
    element_bytes: float
    gradient_bytes: float
    activation_wire: np.ndarray
    """(d, d) bytes of one message between stages."""
    activation_codec_s: np.ndarray
    """(d, d) seconds to pack and unpack it on the slowest devices there."""
    gradient_ratio: np.ndarray
    """(d, d) packed over plain gradient bytes."""
    packed_ratio: float
    """The same of any link over which they are packed."""
    gradient_codec_s: np.ndarray
    """(2, c) seconds per value to pack (with error feedback) and to unpack them on a device."""
    owed_bytes: float
    """Per gradient that a leader packs, of what packing has dropped of it (`room_of_sums`); 0: none is packed."""
    on_host: np.ndarray
    """(c,) whether buffers of sums lie in the memory of the devices: that of processors."""
    packs_inside: np.ndarray
    """(d,) whether nodes of a region may send one another packed gradients (`link_compression.pays_inside`)."""
    local_steps: int
    """Most steps between two meetings of regions that hold a whole pipeline each; 1: they meet in every step."""
    stands: np.ndarray
    """(d,) any pool of each region: links between regions are the same for all of them."""
    links: LinkArrays
    overlap: Overlap
    copies_s: np.ndarray
    """(c,) seconds per parameter on a device that fully sharded training takes for copies, in every micro-batch."""
    micro_batches: int
    tied_values: float
    """Parameters of tied embeddings; 0 if they are not."""
    tied_once: bool
    """As in `Runtime`."""


def splits_sequence(problem: Problem, tp: int, cp: int = 1) -> bool:
    """Whether a worker splits the sequence beside its layers: it never takes longer, and holds less."""
    return tp > 1 and problem.batch.seq_len % (tp * cp) == 0


def worker_classes(tables: CostTables, limit: int | None = None) -> Classes:
    """Every (pool, tensor-parallel degree) that a plan may use: allowed ones, degrees up to `limit`."""
    problem = tables.problem
    if (runs := runnable(problem)) is not None and not runs.tensor:
        limit = 1
    classes = []
    for pool in problem.cluster.pools:
        if not problem.may_use(pool):
            continue
        for tp in tables.tensor_degrees(pool.index):
            if limit is None or tp <= limit:
                classes.append((pool.index, tp))
    return tuple(classes)


def _kinds(tables: CostTables, classes: Classes) -> np.ndarray:
    pools = tables.problem.cluster.pools
    first: dict[object, int] = {}
    kinds = []
    for c, (p, t) in enumerate(classes):
        pool = pools[p]
        node = (pool.device.name, pool.intra_node, pool.inter_node, pool.devices_per_node)
        kinds.append(first.setdefault((*node, t), c))
    return np.array(kinds, dtype=np.int64)


def state_bytes_per_parameter(tables: CostTables) -> np.ndarray:
    """Bytes of weights, gradients and optimizer per parameter, by ZeRO stage: of those held and of those divided.

    Returns
    -------
    ndarray, shape (2, 4)
    """
    batch, runtime = tables.problem.batch, tables.problem.runtime
    table = np.zeros((2, 4))
    for zero in range(4):
        copies = gradient_copies(batch, runtime, zero)
        for divided, row in enumerate(table):
            rows = (0.0, 0.0, 0.0, 0.0, 1.0) if divided else (1.0, 0.0, 0.0, 0.0, 0.0)
            parts = breakdown(
                *rows, in_flight=0, zero=zero, shards=1, batch=batch, context_bytes=0.0, gradient_copies=copies,
                scattered=runtime.zero2_by_micro_batch,
            )  # fmt: skip
            row[zero] = parts.total_bytes
    return table


def _wires(tables: CostTables, micro_batch_size: int, may: Allowed) -> tuple[np.ndarray, np.ndarray]:
    """Of every pair of regions: bytes of an activation as it is sent, and the seconds that packing it takes."""
    batch = tables.problem.batch
    values = boundary_values(tables.problem.model, batch, micro_batch_size)
    chosen = activation_modes(tables, micro_batch_size, may.activations)
    wire = np.full(chosen.shape, values * float(batch.element_bytes))
    packing_s = np.zeros(chosen.shape)
    plain_s = link_seconds(tables, values, batch.element_bytes, "none")
    for mode in set(chosen.ravel().tolist()):
        here = (chosen == mode) & np.isfinite(plain_s)
        wire[here] = packed_bytes(values, batch.element_bytes, mode)
        seconds = link_seconds(tables, values, batch.element_bytes, mode)
        sent_s = plain_s[here] * wire[here] / (values * batch.element_bytes)
        packing_s[here] = np.maximum(0.0, seconds[here] - sent_s)
    return wire, packing_s


def _ways(problem: Problem, classes: Classes, setting: Setting) -> list[tuple[int, int, bool]]:
    """How each class cuts sequences and spreads experts, and whether its devices split tokens between products too."""
    _, cp, ep = setting
    return [(cp, ep, splits_sequence(problem, t, cp)) for _, t in classes]


class _Layers(NamedTuple):
    """Fields of `Bank` that say what layers take and need, whatever is packed."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    accumulation_s: np.ndarray
    activation_bytes: np.ndarray
    transient_bytes: np.ndarray
    parameters: np.ndarray
    divided: np.ndarray
    tied: np.ndarray
    held: np.ndarray
    """(c, n) parameters of each layer, per device."""


def _layers(tables: CostTables, classes: Classes, setting: Setting, kind: np.ndarray) -> _Layers:
    """Of all classes; those of a `kind` compute and store alike, and ten regions often have few kinds. Kept for other
    levels of parity."""
    firsts, row_of = np.unique(kind, return_inverse=True)
    alike = tuple(classes[c] for c in firsts.tolist())
    known = tables.class_layers.get((alike, setting))
    if known is None:
        known = tables.class_layers[alike, setting] = _layers_of(tables, alike, setting)
    return _Layers(*(rows[row_of] for rows in known))


def _layers_of(tables: CostTables, classes: Classes, setting: Setting) -> _Layers:
    size, seconds, memory, adding = setting.micro_batch_size, [], [], []
    for (p, t), options in zip(classes, _ways(tables.problem, classes, setting), strict=True):
        seconds.append([tables.times(p, t, size, recompute, *options) for recompute in RECOMPUTE])
        memory.append([tables.memory(t, size, recompute, *options) for recompute in RECOMPUTE])
        apart = tables.times(p, t, size, "none", *options, accumulates=False)
        adding.append(seconds[-1][0].backward_s - apart.backward_s)
    plain = [of[0].layers for of in memory]
    divided = [of.parameters if of.sharded_parameters is None else of.sharded_parameters for of in plain]
    return _Layers(
        forward_s=np.array([[of.forward_s for of in row] for row in seconds]),
        backward_s=np.array([[of.backward_s for of in row] for row in seconds]),
        accumulation_s=np.array(adding),
        activation_bytes=np.array([[of.activation_bytes for of in row] for row in memory]),
        transient_bytes=np.array([[of.layers.transient_bytes for of in row] for row in memory]),
        parameters=np.array([of[0].parameters for of in memory]),
        divided=np.array([running_sum(values) for values in divided]),
        tied=np.array([of.tied_parameters for of in plain]),
        held=np.array([of.parameters for of in plain]),
    )


class _Gradients(NamedTuple):
    """How gradients may be packed."""

    packed_ratio: float
    """Bytes of what is packed over bytes of what is not."""
    ratio: np.ndarray
    """(regions, regions) the same, where it is done; 1 elsewhere."""
    codec_s: np.ndarray
    """(2, classes) seconds per value to pack and to unpack it."""
    inside: np.ndarray
    """(regions,) whether the nodes of a region gain by it."""
    packs: bool
    """Whether they are at all."""


def _gradients(tables: CostTables, classes: Classes, may: Allowed) -> _Gradients:
    """The packing that is quickest for gradients between regions, which all of them use."""
    problem, batch = tables.problem, tables.problem.batch
    mode = gradient_mode(tables, may.weight_gradients)
    # Of a block's matrices: packings add to every message what its size decides (scales of rows, indices).
    block = 4 * matrix_values(problem.model)
    packed = packed_bytes(block, batch.gradient_bytes, mode, matrix_values(problem.model))
    ratio = packed / (block * batch.gradient_bytes)
    inside = pays_inside(tables, mode)
    far = ~np.eye(len(problem.cluster.regions), dtype=bool)
    rates = [problem.cluster.pools[p].device.memory_bytes_per_s for p, _ in classes]
    return _Gradients(
        packed_ratio=float(ratio),
        ratio=np.where(far | np.diag(inside), ratio, 1.0),
        codec_s=np.array([codec_s(1.0, batch.gradient_bytes, mode, rate, feedback=True) for rate in rates]).T.copy(),
        inside=inside,
        packs=mode != "none",
    )


@gives_pointed
def build_bank(tables: CostTables, classes: Classes, setting: Setting, may: Allowed) -> Bank:
    """Collect the arrays of a problem.

    Parameters
    ----------
    setting : Setting
    may : Allowed
        Packings and local steps that may be chosen; every link gets what is quickest for a message alone.
    """
    problem = tables.problem
    cluster, batch, links = problem.cluster, problem.batch, tables.links
    micro_batch_size, cp, ep = setting
    pools = [cluster.pools[p] for p, _ in classes]
    kind = _kinds(tables, classes)
    of = _layers(tables, classes, setting, kind)
    kept = of.activation_bytes[..., -1]
    message_bytes = boundary_values(problem.model, batch, micro_batch_size) / cp * batch.element_bytes
    held_bytes, divided_bytes = state_bytes_per_parameter(tables)
    regions = len(cluster.regions)
    wire, packing_s = _wires(tables, micro_batch_size, may)
    gradients = _gradients(tables, classes, may)
    stands = np.zeros(regions, dtype=np.int64)
    stands[links.region] = np.arange(len(links.region))
    million = 1_000_000
    return Bank(
        pool=np.array([p for p, _ in classes], dtype=np.int64),
        region=np.array([pool.region for pool in pools], dtype=np.int64),
        tp=np.array([t for _, t in classes], dtype=np.int64),
        cp=cp,
        ep=ep,
        nodes=np.array([pool.nodes for pool in pools], dtype=np.int64),
        devices_per_node=np.array([pool.devices_per_node for pool in pools], dtype=np.int64),
        first_node=links.first_node[[p for p, _ in classes]],
        kind=kind,
        forward_s=of.forward_s,
        backward_s=of.backward_s,
        accumulation_s=of.accumulation_s,
        parameters=of.parameters,
        divided=of.divided,
        passing_bytes=np.array([of.held * passing_bytes(batch, problem.runtime, zero) for zero in range(4)]),
        posted_bytes=posted_bytes(problem.runtime, message_bytes),
        kept_output_bytes=message_bytes if problem.runtime.keeps_outputs else 0.0,
        tied=of.tied,
        activation_bytes=of.activation_bytes,
        transient_bytes=of.transient_bytes,
        limit_bytes=tables.limit_bytes[[p for p, _ in classes]],
        modes=np.array([r for r in (1, 2) if (kept[:, r] < kept[:, 0]).any()], dtype=np.int64),
        held_bytes=held_bytes,
        divided_bytes=divided_bytes,
        outside_bytes=float(outside_bytes(batch)),
        context_bytes=float(problem.runtime.context_bytes),
        update_s_per_parameter=np.array([tables.update_s(p, million) / million for p, _ in classes]),
        element_bytes=float(batch.element_bytes),
        gradient_bytes=float(batch.gradient_bytes),
        activation_wire=wire,
        activation_codec_s=packing_s,
        gradient_ratio=gradients.ratio,
        packed_ratio=gradients.packed_ratio,
        gradient_codec_s=gradients.codec_s,
        owed_bytes=float(batch.gradient_bytes) if gradients.packs else 0.0,
        on_host=np.array([pool.device.is_cpu and problem.runtime.by_layer for pool in pools]),
        packs_inside=gradients.inside,
        local_steps=1 if batch.precision == "fp16" else max(may.local_steps),
        stands=stands,
        links=links.arrays(problem.runtime),
        overlap=overlap_of(problem.runtime, batch),
        copies_s=np.array([copies_s(1.0, tables, p) for p, _ in classes]),
        micro_batches=batch.global_batch // micro_batch_size,
        tied_values=float(problem.model.tied_values),
        tied_once=bool(problem.runtime.tied_once),
    )
