"""What messages between workers cost: link, sharing and packing of every message of a routed plan.

A message of one worker to another takes the link between their nodes. What messages share passes them one after another
(`polygon.cost.shared_schedule`), at its rate:

- a node pair at the link's rate (`Cluster`: what one node pair gets with enough streams);
- a node's network card, which all messages that leave the node pass, at the rate of the pool's `inter_node` link;
- the capacity of a region pair and a region's egress, where such limits are given.

Workers on one node talk over the node's own link and share nothing. Where a number is needed for one message by itself
(`Messages.busy_s`), it gets its sender's part of what it shares, by the number of messages that each has to send.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from polygon.cost.convergence import codec
from polygon.cost.message_ends import MessageEnds, Thing
from polygon.cost.network import (
    CARD_EFFICIENCY,
    FABRIC_EFFICIENCY,
    FAR_MESSAGE_S,
    NEAR_MESSAGE_S,
    PCIE,
    PCIE_RING,
    fabric_of,
    socket_share,
)
from polygon.domain.cluster import Cluster
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan
from polygon.domain.runtime import Runtime
from polygon.jit.by_pointer import pointed

BYTES_RATIO = {"none": 1.0, "bf16": 2 / 4, "int8": (1 + 4 / 256) / 4, "int4": (0.5 + 4 / 64) / 4}
"""Bytes on the wire for one byte of fp32; block-wise formats carry one fp32 scale per 256 values (int8) or
64 (int4), as `polygon_comm` makes them."""

WAYS = ("activations", "activation_gradients")
"""Fields of a link with the packing of what goes down the stages, and up."""
TOPK_FRACTION = 0.05
POWERSGD_RANK = 8


def packed_bytes(
    n_values: float, element_bytes: int, mode: str, matrix_values: float | None = None, width: int | None = None
) -> float:
    """Bytes on the wire of `n_values` numbers of `element_bytes` each under a packing (`COMPRESSIONS`).

    A packing never grows a message: bf16 of a 2-byte tensor is the tensor. Top-k sends a 4-byte place and a 2-byte
    value for the largest 5 %; PowerSGD (rank 8) is priced for square matrices of `matrix_values` numbers (default: one
    matrix of all), or for one matrix of `width` columns.
    """
    plain = n_values * element_bytes
    if mode == "none":
        return plain
    if mode == "topk":
        # Of each number that is sent its 2 bytes, and 4 that say where it belongs.
        return min(plain, TOPK_FRACTION * n_values * 6)
    if mode == "powersgd" and width:
        return min(plain, POWERSGD_RANK * (n_values / width + width) * 4)
    if mode == "powersgd":
        # Both factors in fp32, of matrices as large as the model's and taken for square ones.
        side = (matrix_values or n_values) ** 0.5
        return float(min(plain, 2 * POWERSGD_RANK * n_values / max(side, 1.0) * 4))
    return min(plain, BYTES_RATIO[mode] * 4 * n_values)


def by_link(plan: Plan, field: str, regions: int, of_kind: Callable[[str], float], other: float) -> np.ndarray:
    """A number for every pair of regions by the packing that the plan's links have in a field: (regions, regions)."""
    result = np.full((regions, regions), other)
    kinds, which = plan.packings[field]
    if kinds:
        source, target = plan.link_ends
        result[source, target] = np.array([of_kind(kind) for kind in kinds])[which]
    return result


def matrix_values(model: Model) -> float:
    """Numbers in a weight matrix, for `packed_bytes`: a block of 12 h^2 has four."""
    return 3.0 * model.hidden_size**2


def codec_s(
    n_values: float, element_bytes: int, mode: str, bytes_per_s: float, *, feedback: bool = False
) -> tuple[float, float]:
    """Seconds to pack and to unpack `n_values` numbers on a device with memory of `bytes_per_s`.

    Nothing where the packed form is the tensor itself (bf16 of a 2-byte tensor). Ignores the start of kernels.
    """
    if mode == "none" or (mode == "bf16" and element_bytes == 2):
        return 0.0, 0.0
    traffic = codec(mode)
    pack = traffic.pack_with_feedback if feedback else traffic.pack
    return n_values * pack / bytes_per_s, n_values * traffic.unpack / bytes_per_s


def boundary_values(model: Model, batch: Batch, micro_batch_size: int) -> int:
    """Numbers in the activation (or its gradient) of one micro-batch between two stages."""
    return micro_batch_size * batch.seq_len * model.hidden_size


class LinkArrays(NamedTuple):
    """A `LinkTable` for kernels."""

    region: np.ndarray
    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    node_latency_s: np.ndarray
    node_bytes_per_s: np.ndarray
    card_bytes_per_s: np.ndarray
    capacity_bytes_per_s: np.ndarray
    egress_bytes_per_s: np.ndarray
    ring_latency_s: np.ndarray
    ring_bytes_per_s: np.ndarray
    collective: np.ndarray
    bucket_bytes: float
    sum_turns: int
    sum_trees: bool
    message_s: float
    """As in `Runtime`."""


CHANGED = "latency_s", "bytes_per_s", "ring_latency_s", "ring_bytes_per_s"
"""Fields of both that other links between regions change."""


class LinkTable:
    """Latency and rate between pools as matrices: the only place from which prices take links.

    A message of an accelerator reaches part of what its link has, and waits for NCCL (`polygon.cost.network`); links
    between regions, and those of processors, have what the cluster says. What goes through sockets to several others at
    once, as in a sum, reaches part of a card, whoever computes.

    Attributes
    ----------
    latency_s, bytes_per_s : ndarray, shape (pools, pools)
        Of a message between two different nodes; rate 0 where regions have no link.
    node_latency_s, node_bytes_per_s : ndarray, shape (pools,)
        Of a message between two devices of one node.
    card_bytes_per_s : ndarray, shape (pools,)
        What a node can send in all.
    region : ndarray of int, shape (pools,)
    collective : ndarray, shape (pools, 6)
        What `collective_s` takes of a pool: devices per node, fabric rate and latency, how devices are joined, whether
        NCCL drives it, factor of the calibration.
    rdma : ndarray of bool, shape (pools, pools)
        Whether nodes of a region reach one another without sockets; between regions never.
    ring_latency_s, ring_bytes_per_s : ndarray, shape (pools, pools)
        Of the link between two nodes, as the cluster has it: for collectives, which know what they reach of it.
    factor : float
        Measured over predicted seconds (`polygon.cost.calibration`), in all of the above.
    """

    def __init__(self, cluster: Cluster, factor: float = 1.0) -> None:
        pools = cluster.pools
        self.cluster = cluster
        self.region = np.array([pool.region for pool in pools], dtype=np.int64)
        self.latency_s = cluster.latency_s[np.ix_(self.region, self.region)].astype(float)
        self.bytes_per_s = cluster.bytes_per_s[np.ix_(self.region, self.region)].astype(float)
        self.rdma = np.zeros(self.latency_s.shape, dtype=bool)
        for a, b in np.argwhere(self.region[:, None] == self.region[None, :]).tolist():
            # Pools of a region are joined by its own network; that between equal nodes may be a better one.
            link = cluster.link_inside(a, b)
            self.latency_s[a, b], self.bytes_per_s[a, b] = link.latency_s, link.bytes_per_s
            self.rdma[a, b] = link.rdma
        self.ring_latency_s, self.ring_bytes_per_s = self.latency_s.copy(), self.bytes_per_s.copy()
        nccl = np.array([not pool.device.is_cpu for pool in pools])
        inside = self.region[:, None] == self.region[None, :]
        near = inside & nccl[:, None] & nccl[None, :]
        # What is not RDMA reaches less; `collective_s` takes CARD_EFFICIENCY off itself.
        sockets = inside & ~self.rdma
        self.ring_bytes_per_s *= np.where(sockets, socket_share(self.bytes_per_s), 1.0)
        self.ring_bytes_per_s /= np.where(sockets & near, CARD_EFFICIENCY, 1.0)
        self.latency_s += np.where(near, FAR_MESSAGE_S, 0.0)
        self.bytes_per_s = np.where(near, CARD_EFFICIENCY * self.ring_bytes_per_s, self.bytes_per_s)
        self.node_latency_s = np.array([pool.intra_node.latency_s for pool in pools]) + NEAR_MESSAGE_S * nccl
        fabric = np.array([pool.intra_node.bytes_per_s for pool in pools])
        joined = [fabric_of(pool.device, pool.devices_per_node, pool.intra_node) for pool in pools]
        reached = np.where(np.array(joined) == PCIE, PCIE_RING, FABRIC_EFFICIENCY)
        self.node_bytes_per_s = fabric * np.where(nccl, reached, 1.0)
        # All that leaves a node, to whatever place, passes its cards.
        cards = np.array([pool.inter_node.bytes_per_s for pool in pools])
        self.card_bytes_per_s = cards * np.where(nccl, CARD_EFFICIENCY, 1.0)
        rdma = np.array([pool.inter_node.rdma for pool in pools])
        self.card_bytes_per_s = np.where(rdma, self.card_bytes_per_s, cards * socket_share(cards))
        self.collective = np.array(
            [
                (
                    pool.devices_per_node,
                    pool.intra_node.bytes_per_s,
                    pool.intra_node.latency_s,
                    joined[i],
                    not pool.device.is_cpu,
                    factor,
                )
                for i, pool in enumerate(pools)
            ],
            dtype=float,
        )
        # Of a pair of regions no more than one of them lets out: egress bounds every row.
        self.capacity_bytes_per_s = np.minimum(
            cluster.capacity_bytes_per_s, np.array([region.egress_bytes_per_s for region in cluster.regions])[:, None]
        ).astype(float)
        self.egress_bytes_per_s = np.array([region.egress_bytes_per_s for region in cluster.regions], dtype=float)
        self.first_node = np.concatenate([[0], np.cumsum([pool.nodes for pool in pools])])[:-1].astype(np.int64)
        self.factor = factor
        if factor != 1.0:
            for name in ("latency_s", "node_latency_s"):
                setattr(self, name, getattr(self, name) * factor)
            rates = ("bytes_per_s", "node_bytes_per_s", "card_bytes_per_s")
            for name in (*rates, "capacity_bytes_per_s", "egress_bytes_per_s"):
                setattr(self, name, getattr(self, name) / factor)
        self._arrays: dict[tuple[float, int, bool, float], LinkArrays] = {}
        self._pairs = np.ix_(self.region, self.region), ~inside

    def with_other_links(self, cluster: Cluster) -> LinkTable:
        """The table of a cluster whose links between regions are others."""
        old = self.cluster
        if cluster.pools is not old.pools or cluster.capacity_bytes_per_s is not old.capacity_bytes_per_s:
            return LinkTable(cluster, self.factor)
        pools, far = self._pairs
        latency_s, rate = cluster.latency_s[pools], cluster.bytes_per_s[pools]
        other = copy(self)
        other.cluster = cluster
        other.ring_latency_s = np.where(far, latency_s, self.ring_latency_s)
        other.ring_bytes_per_s = np.where(far, rate, self.ring_bytes_per_s)
        other.latency_s = np.where(far, latency_s * self.factor, self.latency_s)
        other.bytes_per_s = np.where(far, rate / self.factor, self.bytes_per_s)
        changed = {name: getattr(other, name) for name in CHANGED}
        other._arrays = {how: arrays._replace(**changed) for how, arrays in self._arrays.items()}
        return other

    def arrays(self, runtime: Runtime) -> LinkArrays:
        """The table for kernels, with how a runtime adds up gradients."""
        how = float(runtime.bucket_bytes), runtime.sum_turns, runtime.sum_trees, float(runtime.message_s)
        if how not in self._arrays:
            own = {name: getattr(self, name) for name in LinkArrays._fields if hasattr(self, name)}
            self._arrays[how] = pointed(
                LinkArrays(**own, bucket_bytes=how[0], sum_turns=how[1], sum_trees=how[2], message_s=how[3])
            )
        return self._arrays[how]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where the workers of a plan are, as arrays over all workers, stage by stage."""

    stage: np.ndarray
    pool: np.ndarray
    region: np.ndarray
    node: np.ndarray
    """Node number over the whole cluster."""
    tp: np.ndarray
    offset: np.ndarray
    """First worker of every stage, shape (stages,)."""
    cp: np.ndarray
    """Context-parallel degree of every stage's workers, shape (stages,)."""
    zero_shards: tuple[int, ...]
    """Devices over which each stage's ZeRO divides at most; 0: all that hold the same."""
    packed_inside: frozenset[int] = frozenset()
    """As in `Plan`."""

    def members(self, stage: int) -> slice:
        """Where the workers of a stage are."""
        ends = [*self.offset[1:].tolist(), len(self.stage)]
        return slice(int(self.offset[stage]), ends[stage])

    @cached_property
    def nodes(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
        """Of every stage: pools of its workers, nodes used in each, most workers on one node; shape (pools used,)."""
        rows = []
        for stage in range(len(self.offset)):
            mine = self.members(stage)
            # Once by node (how many workers are on each), then by pool (how many nodes, and the fullest).
            _, first, per_node = np.unique(self.node[mine], return_index=True, return_counts=True)
            pools, inverse, nodes = np.unique(self.pool[mine][first], return_inverse=True, return_counts=True)
            most = np.zeros(len(pools), dtype=np.int64)
            np.maximum.at(most, inverse, per_node)
            rows.append((pools, nodes.astype(np.int64), most))
        return tuple(rows)

    @cached_property
    def hosts(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
        """Of every stage: its nodes in the order of its workers, with region and pool; shape (nodes used,)."""
        rows = []
        for stage in range(len(self.offset)):
            mine = self.members(stage)
            first = np.sort(np.unique(self.node[mine], return_index=True)[1])
            rows.append((self.node[mine][first], self.region[mine][first], self.pool[mine][first]))
        return tuple(rows)

    @cached_property
    def several(self) -> np.ndarray:
        """Whether each node has workers of several stages, shape (last node + 1,)."""
        found: np.ndarray = np.bincount(np.concatenate([nodes for nodes, _, _ in self.hosts])) > 1
        return found

    @cached_property
    def degrees(self) -> tuple[np.ndarray, ...]:
        """Of every stage: least tensor-parallel degree in each of its pools (as in `nodes`), shape (pools used,)."""
        rows = []
        for stage, (pools, _, _) in enumerate(self.nodes):
            mine = self.members(stage)
            least = np.full(int(pools.max()) + 1, np.iinfo(np.int64).max)
            np.minimum.at(least, self.pool[mine], self.tp[mine])
            rows.append(least[pools])
        return tuple(rows)

    @cached_property
    def alike(self) -> tuple[np.ndarray, ...]:
        """Devices that ZeRO may divide by, for each worker of a stage, shape (width,): those of its pool and degree, or
        of its node where nodes send one another packed gradients."""
        rows = []
        for stage in range(len(self.offset)):
            mine = self.members(stage)
            # One number for pool and degree (64 devices to a worker at most); nodes that are places by themselves get
            # negative ones, which no pool has.
            alike = self.pool[mine] * 64 + self.tp[mine]
            if self.packed_inside:
                apart = np.isin(self.region[mine], list(self.packed_inside))
                alike = np.where(apart, -1 - (self.node[mine] * 64 + self.tp[mine]), alike)
            _, inverse, counts = np.unique(alike, return_inverse=True, return_counts=True)
            rows.append(counts[inverse] * self.cp[stage])
        return tuple(rows)

    @cached_property
    def shards(self) -> tuple[np.ndarray, ...]:
        """Over how many devices each worker of a stage shards under ZeRO, shape (width,)."""
        return tuple(
            np.minimum(held, most) if most else held for held, most in zip(self.alike, self.zero_shards, strict=True)
        )

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What others work out of the workers alone, for the next plan that has the same ones."""
        return {}

    @cached_property
    def ends(self) -> dict[int, MessageEnds]:
        """By `Plan.chunks`: both ends of the messages of the latest plan that had these workers."""
        return {}

    def dividing(self, zero_shards: tuple[int, ...]) -> Placement:
        """The same workers under other shard groups."""
        other = replace(self, zero_shards=zero_shards)
        for name in ("nodes", "hosts", "several", "degrees", "ends", "alike", "derived"):  # of the workers alone
            vars(other)[name] = getattr(self, name)
        return other

    def packing(self, packed_inside: frozenset[int]) -> Placement:
        """The same workers where nodes of other regions send one another packed gradients."""
        other = replace(self, packed_inside=packed_inside)
        for name in ("nodes", "hosts", "several", "degrees", "ends"):
            vars(other)[name] = getattr(self, name)
        return other

    @classmethod
    def of(cls, plan: Plan, links: LinkTable) -> Placement:
        """Read the places of a plan's workers."""
        pools = links.cluster.pools
        stage = np.repeat(np.arange(len(plan.stages)), [stage_.width for stage_ in plan.stages])
        workers = [worker for stage_ in plan.stages for worker in stage_.workers]
        pool = np.array([worker.pool for worker in workers], dtype=np.int64)
        tp = np.array([worker.tp for worker in workers], dtype=np.int64)
        first_device = np.array([p.first_device for p in pools], dtype=np.int64)
        per_node = np.array([p.devices_per_node for p in pools], dtype=np.int64)
        device = np.array([worker.devices[0] for worker in workers], dtype=np.int64)
        node = links.first_node[pool] + (device - first_device[pool]) // per_node[pool]
        widths = [stage_.width for stage_ in plan.stages]
        return cls(
            stage=stage,
            pool=pool,
            region=links.region[pool],
            node=node,
            tp=tp,
            offset=np.concatenate([[0], np.cumsum(widths)[:-1]]).astype(np.int64),
            cp=np.array([stage_.workers[0].cp for stage_ in plan.stages], dtype=np.int64),
            zero_shards=tuple(stage_.shards for stage_ in plan.stages),
            packed_inside=plan.packed_inside,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Messages:
    """All messages between stages of one step; down (activations) first, then up (gradients).

    Every array has shape (2, micro_batches, stages - 1); entry [1, m, s] goes from stage s + 1 to s.
    """

    sender: np.ndarray
    receiver: np.ndarray
    n_bytes: np.ndarray
    """On one link: inside a node each of a worker's devices has one of its own."""
    busy_s: np.ndarray
    """Seconds on its way where all that share it send all the time."""
    latency_s: np.ndarray
    link: np.ndarray
    hold_s: np.ndarray
    """Shape (2, micro_batches, stages - 1, k): what a message passes, by number, and how long it keeps that busy."""
    links: int
    shared: bool
    """Whether several channels pass some of it; else every number is that of a channel, and k = 1."""
    channel: np.ndarray
    """Channel of each message (one per sender, receiver and direction)."""
    channels: int
    connected: bool
    codec_s: np.ndarray
    """Seconds that each worker packs and unpacks, per micro-batch: of forward and of backward, shape (2, workers)."""
    total_bytes: float
    """That all of them carry, over all links that a worker's devices have."""


def price_messages(
    plan: Plan,
    model: Model,
    batch: Batch,
    links: LinkTable,
    place: Placement,
    runtime: Runtime,
    *,
    in_step: bool = False,
) -> Messages:
    """Time and size of every activation and gradient message of a plan (sharing as in the module's docstring).

    Parameters
    ----------
    in_step : bool
        Whether all that share something send at the same time, each with its part of it, instead of in turn.
    """
    ends = _ends(plan, links, place)
    same_node, far, pool_s, pool_r = ends.same_node, ends.far, ends.pool_s, ends.pool_r
    of, size = (plan.links, model, batch, runtime, links.cluster.pools), plan.micro_batch_size
    n_bytes, total_bytes, codecs = ends.packed.get(of, size) or ends.packed.put(
        _packed(plan, model, batch, links, place, runtime, ends), of, size
    )
    rate = np.where(same_node, links.node_bytes_per_s[pool_s], links.bytes_per_s[pool_s, pool_r])
    latency = np.where(same_node, links.node_latency_s[pool_s], links.latency_s[pool_s, pool_r])
    alone = np.minimum(rate, np.where(same_node, np.inf, links.card_bytes_per_s[pool_s]))
    things = [(ends.cards, links.card_bytes_per_s[pool_s])]
    capacity = links.capacity_bytes_per_s[ends.region_s, ends.region_r]
    if np.isfinite(capacity[far]).any():
        things.append((ends.capacities, np.where(far, capacity, np.inf)))
    egress = links.egress_bytes_per_s[ends.region_s]
    if np.isfinite(egress[far]).any():
        things.append((ends.egress, np.where(far, egress, np.inf)))
    rate = rate * ends.pair_part
    for shared, limit in things:
        rate = np.minimum(rate, np.where(same_node, np.inf, limit * shared.part))
    with np.errstate(divide="ignore"):
        busy = n_bytes / rate
    channel, channels = ends.channels
    if in_step:
        passed: dict[str, Any] = {
            "link": channel[..., None],
            "hold_s": busy[..., None],
            "links": channels,
            "shared": False,
        }
    else:
        passed = _passed(n_bytes, ends, alone, things)
    return Messages(
        sender=ends.sender,
        receiver=ends.receiver,
        n_bytes=n_bytes,
        busy_s=busy,
        latency_s=latency,
        channel=channel,
        channels=channels,
        connected=bool((rate > 0).all()),
        codec_s=codecs,
        total_bytes=total_bytes,
        **passed,
    )


def _ends(plan: Plan, links: LinkTable, place: Placement) -> MessageEnds:
    """Both ends of a plan's messages, kept for the next one with the same workers and routes."""
    routes = plan.routes + place.offset[None, :]
    known = place.ends.get(plan.chunks)
    if known is not None and np.array_equal(known.routes, routes):
        return known
    made = MessageEnds.of(
        routes,
        (place.pool, place.node, place.region),
        chunks=plan.chunks,
        nodes=int(links.first_node[-1] + links.cluster.pools[-1].nodes),
        regions=len(links.cluster.regions),
    )
    place.ends[plan.chunks] = made
    return made


def _passed(
    n_bytes: np.ndarray, ends: MessageEnds, rate: np.ndarray, things: Sequence[tuple[Thing, np.ndarray]]
) -> dict[str, Any]:
    """What messages pass, as fields of `Messages`.

    Parameters
    ----------
    rate : ndarray, shape of n_bytes
        Bytes/s of a message that has everything for itself.
    things : sequence of pairs
        What several node pairs may share, and its bytes/s, shape of n_bytes. Left out where it has enough for all of
        its node pairs at once.
    """
    numbers, links, first = ends.pairs
    channel, channels = ends.channels
    columns, rates = [numbers], [rate]
    for thing, limit in things:
        which, different = thing.number, thing.different
        of_pairs = which[first]
        used = of_pairs >= 0
        wanted = np.bincount(of_pairs[used], weights=rate.ravel()[first][used], minlength=different)
        most = np.full(different + 1, np.inf)
        most[which] = limit.ravel()
        scarce = np.append(wanted > most[:-1] * (1 + 1e-9), False)
        if scarce.any():
            columns.append(np.where(scarce[which], links + which, -1))
            rates.append(limit)
            links += different
    shared = len(columns) > 1 or links < channels
    if not shared:
        columns, links = [channel.ravel()], channels
    with np.errstate(divide="ignore"):
        hold_s = np.stack([n_bytes / each for each in rates], axis=-1)
    link = np.stack([column.reshape(n_bytes.shape) for column in columns], axis=-1)
    return {"link": link, "hold_s": hold_s, "links": links, "shared": shared}


def _packed(
    plan: Plan, model: Model, batch: Batch, links: LinkTable, place: Placement, runtime: Runtime, ends: MessageEnds
) -> tuple[np.ndarray, float, np.ndarray]:
    """Bytes of every message and of all (`Messages`), and `_codec_s`."""
    values, element_bytes = boundary_values(model, batch, plan.micro_batch_size), batch.element_bytes
    plain, regions = float(values * element_bytes), len(links.cluster.regions)
    of_kind = partial(packed_bytes, values, element_bytes, width=model.hidden_size)
    size = np.stack([by_link(plan, field, regions, of_kind, plain) for field in WAYS])
    n_bytes = size[np.arange(2)[:, None, None], ends.region_s, ends.region_r]
    # Inside a node every device of a worker has a link of its own; each sends its part, or all of it.
    devices = (place.tp * place.cp[place.stage])[ends.sender]
    whole = np.where(ends.same_node, n_bytes, n_bytes * devices)
    ways = runtime.scattered_sends, runtime.scattered_sends and runtime.scattered_gradients
    n_bytes = np.where(np.array(ways)[:, None, None], whole / devices, whole)
    total_bytes = float((n_bytes * np.where(ends.same_node, devices, 1)).sum())
    return n_bytes, total_bytes, _codec_s(plan, values, element_bytes, links, place, ends)


def _codec_s(
    plan: Plan,
    values: int,
    element_bytes: int,
    links: LinkTable,
    place: Placement,
    ends: MessageEnds,
) -> np.ndarray:
    """Seconds of packing and unpacking per micro-batch of each worker, the mean over its micro-batches: (2, workers).

    The runner packs and unpacks on the device that computes, between two micro-batches. Forward unpacks and packs
    activations, backward their gradients.
    """
    workers, regions = len(place.stage), len(links.cluster.regions)
    seconds = np.zeros((2, workers))
    if ends.sender.size == 0 or all(kind == "none" for field in WAYS for kind in plan.packings[field][0]):
        return seconds
    rate = np.array([pool.device.memory_bytes_per_s for pool in links.cluster.pools])[place.pool]
    share = np.maximum(np.bincount(ends.routes.ravel(), minlength=workers), 1)
    source, target = ends.region_s, ends.region_r

    def part_s(part: int, kind: str) -> float:
        return codec_s(values, element_bytes, kind, 1.0)[part]

    for way, field in enumerate(WAYS):
        for part, doer in enumerate((ends.sender, ends.receiver)):  # who packs, who unpacks
            costs = by_link(plan, field, regions, partial(part_s, part), 0.0)
            each = costs[source[way], target[way]].ravel()
            seconds[way] += np.bincount(doer[way].ravel(), weights=each, minlength=workers)
    found: np.ndarray = seconds / share / rate
    return found
