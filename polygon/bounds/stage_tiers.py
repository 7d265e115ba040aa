"""What the workers of a stage cost at least, by how they are placed: reduction, messages.

A *tier* is a way to place the workers of a stage: one worker, one node, so many nodes of a region, several regions. The
more compute a stage needs, the wider its tier, and the longer its reduction (`polygon.cost.reduction`): over f nodes at
least 2 (f - 1) / f of its bytes at the nodes' rate, of which ZeRO may hide a part (`least_part`), or of its packed
bytes at a card's rate (`Plan.packed_inside`); inside a node at least the part of a tensor-parallel rank; and twice a
region's part between regions. Where micro-batches scatter gradients over nodes nothing is left to sum but what nodes
have scattered inside (`Tier.free`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polygon.cost.reduction import exchange_rounds, least_part
from polygon.cost.tables import CostTables, powers_of_two, uniform_context_degrees, widest_pool
from polygon.cost.transfers import packed_bytes

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Nodes at which the bound on a reduction takes a step; between two it stays at the lower."""
MOST_TIERS = 16
MANY_NODES = 1 << 40
"""More than any region has."""


class WorkerClass(NamedTuple):
    """Workers that compute and store alike, wherever they are."""

    kind: int
    """Kind of device: type, node and the link inside it."""
    tp: int
    pool: int
    """One of its pools."""
    shards: int
    """Most devices of one pool that hold the same layers."""
    cp: int = 1
    """Context-parallel degree."""
    stage_devices: tuple[int, int] = (1, 1 << 40)
    """Fewest and most devices of its stage."""

    @property
    def devices(self) -> int:
        """Of a worker."""
        return self.tp * self.cp


@dataclass(frozen=True, kw_only=True, eq=False)
class Kinds:
    """The devices that a plan may use, those that cost alike taken together.

    Attributes
    ----------
    of_pool : ndarray of int, shape (pools,)
        Kind of each pool's devices; -1 for a pool that must not be used.
    classes : tuple of WorkerClass
    """

    of_pool: np.ndarray
    classes: tuple[WorkerClass, ...]

    @property
    def most_degree(self) -> int:
        """Most devices of a worker."""
        return max((kind.devices for kind in self.classes), default=1)

    @classmethod
    def of(cls, tables: CostTables) -> Kinds:
        """Kinds of device and worker classes of a problem."""
        number: dict[object, int] = {}
        shards: dict[tuple[int, int], list[int]] = {}
        of_pool = np.full(len(tables.problem.cluster.pools), -1)
        for p, pool in enumerate(tables.problem.cluster.pools):
            if tables.problem.may_use(pool):
                key = (pool.device.name, pool.intra_node, pool.devices_per_node)
                of_pool[p] = number.setdefault(key, len(number))
                for tp in tables.tensor_degrees(p):
                    known = shards.setdefault((int(of_pool[p]), tp), [p, 0])
                    known[1] = max(known[1], pool.devices // tp)
        tokens, usual = tables.problem.batch.seq_len, uniform_context_degrees(tables.problem)
        # A profile is of whole sequences: where it has devices slower than the model that prices parts, short ones pay.
        short = [cp for cp in powers_of_two(widest_pool(tables.problem)) if tokens % cp == 0]
        cuts = [
            short if tables.basis(pool.device.name) == "profile" else usual for pool in tables.problem.cluster.pools
        ]
        classes = [
            WorkerClass(kind, tp, pool, most, cp)
            for (kind, tp), (pool, most) in shards.items()
            for cp in cuts[pool]
            if cp <= most
        ]
        return cls(of_pool=of_pool, classes=tuple(classes))


class Tier(NamedTuple):
    """A way to place a stage's workers; its reduction takes fixed_s + s_per_byte * gradient bytes, or more."""

    capacity: float
    fixed_s: float
    s_per_byte: float
    free: float = np.inf
    """Most compute of workers that do not scatter over nodes, where micro-batches scatter gradients."""


def differences(sums: np.ndarray) -> np.ndarray:
    """What layers [a, b) have, by a and b, from a running sum: shape (..., layers, layers + 1); 0 where b <= a."""
    return np.triu(sums[..., None, :] - sums[..., :-1, None], k=1)


class NodeCapacity:
    """Most compute of so many nodes of every region.

    Parameters
    ----------
    device_capacity : ndarray, shape (device kinds,)
    """

    def __init__(self, tables: CostTables, kinds: Kinds, device_capacity: np.ndarray) -> None:
        cluster = tables.problem.cluster
        self._regions, self._pools = len(cluster.regions), cluster.pools
        self._used = np.flatnonzero(kinds.of_pool >= 0).tolist()
        self._node = {p: self._pools[p].devices_per_node * float(device_capacity[kinds.of_pool[p]]) for p in self._used}

    def within_regions(self, most: int) -> np.ndarray:
        """Of the best nodes of each region, so many at most, shape (regions,)."""
        total, left = np.zeros(self._regions), np.full(self._regions, most)
        for p in sorted(self._used, key=lambda p: -self._node[p]):
            region = self._pools[p].region
            count = min(self._pools[p].nodes, int(left[region]))
            total[region] += count * self._node[p]
            left[region] -= count
        return total

    def within_pools(self, most: int) -> np.ndarray:
        """Of so many nodes of every pool, by region, shape (regions,)."""
        total = np.zeros(self._regions)
        for p in self._used:
            total[self._pools[p].region] += min(self._pools[p].nodes, most) * self._node[p]
        return total


def node_steps(nodes: int) -> list[tuple[int, int]]:
    """Fewest and most nodes of every step up to so many."""
    return [
        (fewest, max(fewest, min(more - 1, nodes)))
        for fewest, more in pairwise((*COUNTS, nodes + 1))
        if fewest <= nodes
    ]


def region_tiers(
    tables: CostTables, kinds: Kinds, device_capacity: np.ndarray, packed: float = 1.0
) -> tuple[list[Tier], list[Tier]]:
    """Tiers inside one region, by nodes: where gradients are summed as a step ends, and where micro-batches scatter
    them, over nodes or inside these. Of the latter the nodes of a pool have to sum them still.

    `packed`: the least bytes of a packed gradient over plain ones.
    """
    links, pools = tables.links, tables.problem.cluster.pools
    part = least_part(tables.problem.runtime, tables.problem.batch)
    nodes = NodeCapacity(tables, kinds, device_capacity)
    ends, scattered = [], []
    for region in np.unique(links.region[kinds.of_pool >= 0]):
        mine = np.flatnonzero((links.region == region) & (kinds.of_pool >= 0))
        for p in mine:
            if pools[p].devices_per_node > 1:
                capacity = pools[p].devices_per_node * device_capacity[kinds.of_pool[p]]
                ends.append(Tier(capacity, 0.0, part / (kinds.most_degree * links.node_bytes_per_s[p])))
        held = float(nodes.within_pools(MANY_NODES)[region])
        scattered.append(Tier(held, 0.0, 0.0, free=float(nodes.within_pools(1)[region])))
        pairs = region_pairs(tables, kinds, int(region))
        if not pairs:
            continue
        latency_s = links.factor * min(links.ring_latency_s[pair] for pair in pairs)
        rate = max(links.bytes_per_s[pair] for pair in pairs)
        card = max(links.card_bytes_per_s[p] for p in mine)
        for fewest, most in node_steps(sum(pools[p].nodes for p in mine)):
            passes = 2 * (fewest - 1) / fewest
            rounds = 2 * math.ceil(math.log2(fewest)) * part
            s_per_byte, whole = passes * part / rate, passes / rate
            if packed < 1:
                rounds = min(rounds, exchange_rounds(fewest, whole=True))
                s_per_byte, whole = (min(each, passes * packed / card) for each in (s_per_byte, whole))
            ends.append(Tier(float(nodes.within_regions(most)[region]), rounds * latency_s, s_per_byte))
            scattered.append(Tier(held, 0.0, whole, free=float(nodes.within_pools(most)[region])))
    return ends, scattered


def region_pairs(tables: CostTables, kinds: Kinds, region: int) -> list[tuple[int, int]]:
    """Pools of a region between whose nodes there is a link."""
    pools = tables.problem.cluster.pools
    mine = np.flatnonzero((tables.links.region == region) & (kinds.of_pool >= 0)).tolist()
    return [(j, k) for j in mine for k in mine if j != k or pools[j].nodes > 1]


def best_hop(tables: CostTables, kinds: Kinds) -> tuple[float, float]:
    """Least latency [s] and most bytes per second between two nodes of any one region; (inf, 0) without any."""
    links = tables.links
    pairs = [pair for r in np.unique(links.region[kinds.of_pool >= 0]) for pair in region_pairs(tables, kinds, int(r))]
    latency_s = min((links.factor * links.ring_latency_s[pair] for pair in pairs), default=np.inf)
    return float(latency_s), float(max((links.bytes_per_s[pair] for pair in pairs), default=0.0))


def best_tiers(tiers: Sequence[Tier]) -> list[Tier]:
    """Those that no other beats in everything; of too many, neighbours are taken together with the best of each."""
    kept = [
        tier
        for i, tier in enumerate(tiers)
        if not any(
            other.capacity >= tier.capacity
            and other.free >= tier.free
            and other.fixed_s <= tier.fixed_s
            and other.s_per_byte <= tier.s_per_byte
            and (other != tier or j < i)
            for j, other in enumerate(tiers)
        )
    ]
    kept.sort()
    if len(kept) <= MOST_TIERS:
        return kept
    rows = [np.array(kept[part[0] : part[-1] + 1]) for part in np.array_split(np.arange(len(kept)), MOST_TIERS)]
    return [Tier(row[:, 0].max(), row[:, 1].min(), row[:, 2].min(), row[:, 3].max()) for row in rows]


def least_wire_bytes(
    modes: Iterable[str], n_values: np.ndarray, element_bytes: int, matrix_values: float | None = None
) -> np.ndarray:
    """Bytes of numbers between regions under the packing that sends least (`transfers.packed_bytes`)."""
    different, inverse = np.unique(n_values, return_inverse=True)
    least = [min(packed_bytes(float(n), element_bytes, mode, matrix_values) for mode in modes) for n in different]
    return np.array(least)[inverse].reshape(n_values.shape)


class Distances:
    """Links between regions that a plan may use, at their best."""

    def __init__(self, tables: CostTables, kinds: Kinds) -> None:
        links = tables.links
        used = kinds.of_pool >= 0
        joined = (links.region[:, None] != links.region[None, :]) & (links.bytes_per_s > 0)
        joined &= used[:, None] & used[None, :]
        self.linked = bool(joined.any())
        self.latency_s = float(links.latency_s[joined].min()) if self.linked else np.inf
        self.bytes_per_s = float(links.bytes_per_s[joined].max()) if self.linked else 0.0
        self.capacity_bytes_per_s = float(links.capacity_bytes_per_s.max())

    def message_s(self, n_bytes: float) -> float:
        """Least seconds of a message from one region to another."""
        rate = min(self.bytes_per_s, self.capacity_bytes_per_s)
        return self.latency_s + n_bytes / rate if self.linked else np.inf
