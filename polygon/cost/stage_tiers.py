"""What the workers of a stage cost at least, by how they are placed: memory, reduction, messages.

A *tier* is a way to place the workers of a stage: one worker, one node, so many nodes of a region, several regions. The
more compute a stage needs, the wider its tier, and the longer its reduction (`polygon.cost.reduction`): with n bytes,
2 (p - 1) (latency + n / (p rate)) inside a node or a region, and twice a region's part between regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polygon.cost.memory import CONTEXT_BYTES, state_bytes
from polygon.cost.tables import CostTables, running_sum
from polygon.cost.transfers import packed_bytes
from polygon.domain.plan import RECOMPUTE

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Nodes at which the bound on a reduction takes a step; between two it stays at the lower."""
MOST_TIERS = 16


class WorkerClass(NamedTuple):
    """Workers that compute and store alike, wherever they are."""

    kind: int
    """Kind of device: type, node and the link inside it."""
    tp: int
    pool: int
    """One of its pools."""
    shards: int
    """Most workers of one pool."""


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
        return cls(of_pool=of_pool, classes=tuple(WorkerClass(k, tp, *known) for (k, tp), known in shards.items()))


class Tier(NamedTuple):
    """A way to place a stage's workers; its reduction takes fixed_s + s_per_byte * gradient bytes, or more."""

    capacity: float
    fixed_s: float
    s_per_byte: float


def differences(sums: np.ndarray) -> np.ndarray:
    """What layers [a, b) have, by a and b, from a running sum: shape (..., layers, layers + 1); 0 where b <= a."""
    return np.triu(sums[..., None, :] - sums[..., :-1, None], k=1)


def fitting_s(tables: CostTables, kinds: Kinds, micro_batch_size: int) -> np.ndarray:
    """Seconds of forward and backward of layers [a, b) under the quickest recomputation that fits a worker's memory.

    Returns
    -------
    ndarray, shape (2, classes, layers, layers + 1)
        With one micro-batch in flight and sharded as widely as can be: optimizer states (ZeRO-1) [0], all states
        (ZeRO-3) [1]; inf where nothing fits. The traffic of the latter is left out; decode takes it only with full
        recomputation, and only where that alone might not fit some class with every micro-batch of a step in flight.
    """
    per_weight, per_gradient, per_optimizer = state_bytes(tables.problem.batch)
    layers = tables.problem.model.layers
    least_s = np.full((2, len(kinds.classes), layers, layers + 1), np.inf)
    in_flight = min(tables.problem.batch.global_batch // micro_batch_size, tables.problem.cluster.devices + 1)
    pointless = np.ones((layers, layers + 1), dtype=bool)
    for c, (_, tp, pool, shards) in enumerate(kinds.classes):
        for recompute in RECOMPUTE:
            memory = tables.memory(tp, micro_batch_size, recompute)
            held = differences(memory.parameters)
            held[1:, layers] += memory.layers.tied_parameters
            transient = _longest(memory.layers.transient_bytes)
            need = held * (per_weight + per_gradient + per_optimizer / shards)
            other = differences(memory.activation_bytes) + transient + CONTEXT_BYTES
            times = tables.times(pool, tp, micro_batch_size, recompute)
            seconds = differences(times.forward_s + times.backward_s)
            fits = (need + other <= tables.limit_bytes[pool]) & (seconds > 0)
            least_s[0, c] = np.minimum(least_s[0, c], np.where(fits, seconds, np.inf))
            if recompute == "full":
                need = np.minimum(need, held * (per_weight + per_gradient + per_optimizer) / shards)
                fits = (need + other <= tables.limit_bytes[pool]) & (seconds > 0)
                least_s[1, c] = np.where(fits, seconds, np.inf)
                most = held * (per_weight + per_gradient + per_optimizer) + other
                pointless &= most + (in_flight - 1) * differences(memory.activation_bytes) <= tables.limit_bytes[pool]
    least_s[1, :, pointless] = np.inf
    return least_s


def _longest(values: np.ndarray) -> np.ndarray:
    """Largest of the values [a, b), by a and b, shape (n, n + 1)."""
    longest = np.zeros((len(values), len(values) + 1))
    for a in range(len(values)):
        longest[a, a + 1 :] = np.maximum.accumulate(values[a:])
    return longest


def region_tiers(tables: CostTables, kinds: Kinds, device_capacity: np.ndarray) -> list[Tier]:
    """Tiers inside one region: one node, so many nodes."""
    links, pools = tables.links, tables.problem.cluster.pools
    tiers = []
    for region in np.unique(links.region[kinds.of_pool >= 0]):
        mine = np.flatnonzero((links.region == region) & (kinds.of_pool >= 0))
        for p in mine:
            if pools[p].devices_per_node > 1:
                capacity = pools[p].devices_per_node * device_capacity[kinds.of_pool[p]]
                tiers.append(Tier(capacity, 2 * links.node_latency_s[p], 1 / links.node_bytes_per_s[p]))
        node = np.concatenate(
            [np.full(pools[p].nodes, pools[p].devices_per_node * device_capacity[kinds.of_pool[p]]) for p in mine]
        )
        total = running_sum(np.sort(node)[::-1])
        pairs = region_pairs(tables, kinds, int(region))
        if pairs:
            latency_s = min(links.latency_s[pair] for pair in pairs)
            rate = max(links.bytes_per_s[pair] for pair in pairs)
            for fewest, more in pairwise((*COUNTS, len(node) + 1)):
                if fewest <= len(node):
                    most = min(max(more, fewest + 1) - 1, len(node))
                    ring = 2 * (fewest - 1)
                    tiers.append(Tier(total[most], ring * latency_s, ring / (fewest * rate)))
    return tiers


def region_pairs(tables: CostTables, kinds: Kinds, region: int) -> list[tuple[int, int]]:
    """Pools of a region between whose nodes there is a link."""
    pools = tables.problem.cluster.pools
    mine = np.flatnonzero((tables.links.region == region) & (kinds.of_pool >= 0)).tolist()
    return [(j, k) for j in mine for k in mine if j != k or pools[j].nodes > 1]


def best_hop(tables: CostTables, kinds: Kinds) -> tuple[float, float]:
    """Least latency [s] and most bytes per second between two nodes of any one region; (inf, 0) without any."""
    links = tables.links
    pairs = [pair for r in np.unique(links.region[kinds.of_pool >= 0]) for pair in region_pairs(tables, kinds, int(r))]
    latency_s = min((links.latency_s[pair] for pair in pairs), default=np.inf)
    return float(latency_s), float(max((links.bytes_per_s[pair] for pair in pairs), default=0.0))


def best_tiers(tiers: Sequence[Tier]) -> list[Tier]:
    """Those that no other beats in everything; of too many, neighbours are taken together with the best of each."""
    kept = [
        tier
        for i, tier in enumerate(tiers)
        if not any(
            other.capacity >= tier.capacity
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
    return [Tier(row[:, 0].max(), row[:, 1].min(), row[:, 2].min()) for row in rows]


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
