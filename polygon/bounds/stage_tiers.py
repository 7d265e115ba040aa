"""What the workers of a stage cost at least, by how they are placed: memory, reduction, messages.

A *tier* is a way to place the workers of a stage: one worker, one node, so many nodes of a region, several regions. The
more compute a stage needs, the wider its tier, and the longer its reduction (`polygon.cost.reduction`): over f nodes at
least 2 (f - 1) / f of its bytes at the nodes' rate, of which ZeRO may hide a part (`least_part`), or of its packed
bytes at a card's rate (`Plan.packed_inside`); inside a node at least the part of a tensor-parallel rank; and twice a
region's part between regions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polygon.cost.memory import state_bytes
from polygon.cost.reduction import collective_s, exchange_rounds, least_part
from polygon.cost.tables import ClassMemory, CostTables, running_sum
from polygon.cost.transfers import packed_bytes
from polygon.domain.divisors import divisors
from polygon.domain.plan import RECOMPUTE

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Nodes at which the bound on a reduction takes a step; between two it stays at the lower."""
MOST_TIERS = 16
MANY_BYTES = 1e12
"""So many that latency does not matter."""
LEAST_PIECE = 1024
"""Tokens of a sequence's piece; plans that cut sequences further are not counted."""


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
        tokens = tables.problem.batch.seq_len
        classes = [
            WorkerClass(kind, tp, pool, most, cp)
            for (kind, tp), (pool, most) in shards.items()
            for cp in (2**k for k in range(int(math.log2(max(1, most))) + 1))
            if cp == 1 or (tokens % cp == 0 and tokens // cp >= LEAST_PIECE)
        ]
        return cls(of_pool=of_pool, classes=tuple(classes))


class Tier(NamedTuple):
    """A way to place a stage's workers; its reduction takes fixed_s + s_per_byte * gradient bytes, or more."""

    capacity: float
    fixed_s: float
    s_per_byte: float


def differences(sums: np.ndarray) -> np.ndarray:
    """What layers [a, b) have, by a and b, from a running sum: shape (..., layers, layers + 1); 0 where b <= a."""
    return np.triu(sums[..., None, :] - sums[..., :-1, None], k=1)


class Executions:
    """What the ways to execute a class of workers cost, each layer under the best of them: experts spread more or less,
    sequences split beside the layers or not."""

    def __init__(self, tables: CostTables, of: WorkerClass, micro_batch_size: int) -> None:
        self._tables, self._of, self._size = tables, of, micro_batch_size
        model, tokens = tables.problem.model, tables.problem.batch.seq_len
        self.spreads = [ep for ep in divisors(model.experts or 1) if ep <= of.shards]
        self._sequence = (False, True) if of.tp > 1 and tokens % (of.tp * of.cp) == 0 else (False,)

    def least_s(self, recompute: str, *, accumulates: bool, spread: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Least seconds of forward and of backward of every layer, shape (layers,) each.

        Experts of a stage are spread over so many devices, by default over as many as is best for each layer.
        Gradients need not be added up in layers where they can be sharded (ZeRO-3), unless a stage `accumulates` them.
        """
        accumulates = accumulates or self._of.shards < 2
        found = [
            self._tables.times(
                self._of.pool, self._of.tp, self._size, recompute, self._of.cp, ep, sequence, accumulates
            ).layers
            for ep in (self.spreads if spread is None else [spread])
            for sequence in self._sequence
        ]
        return np.min([of.forward_s for of in found], axis=0), np.min([of.backward_s for of in found], axis=0)

    def memory(self, recompute: str, ep: int) -> ClassMemory:
        """What layers hold at least."""
        return self._tables.memory(self._of.tp, self._size, recompute, self._of.cp, ep, self._sequence[-1])


FLIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Micro-batches in flight at which the bound takes a step; from one to the next it takes the better of both."""


def fitting_s(
    tables: CostTables, kinds: Kinds, micro_batch_size: int, rest_s: np.ndarray, *, held: float | None = None
) -> np.ndarray:
    """Seconds per micro-batch of layers [a, b) with as little recomputation as fits a worker's memory.

    Of layers that do not fit as they are, those are recomputed that give most memory for their time, the last one in
    part (the relaxation of a knapsack). A worker that holds k micro-batches at most, each of them until it has passed
    all layers behind and come back, does no more than k in that time (Little's law); the best k counts.

    Parameters
    ----------
    rest_s : ndarray, shape (layers + 1,)
        Least seconds in which a micro-batch passes layers [b, layers) and comes back.
    held : float, optional
        Micro-batches in flight, whatever a micro-batch takes: of interleaved plans.

    Returns
    -------
    ndarray, shape (2, classes, layers, layers + 1)
        Sharded as widely as can be: what is summed when a step ends [0], and what has traffic in every micro-batch
        (ZeRO-3, and ZeRO-2 where a runtime scatters gradients after each) [1], of which the scatter counts, hidden
        behind backward; inf where nothing fits.
    """
    runtime = tables.problem.runtime
    per_weight, per_gradient, per_optimizer = state_bytes(tables.problem.batch)
    layers, context_bytes = tables.problem.model.layers, tables.problem.runtime.context_bytes
    least_s = np.full((2, len(kinds.classes), layers, layers + 1), np.inf)
    for c, of in enumerate(kinds.classes):
        ways, limit = Executions(tables, of, micro_batch_size), tables.limit_bytes[of.pool]
        for ep in ways.spreads:
            memory = {recompute: ways.memory(recompute, ep).layers for recompute in RECOMPUTE}
            plain = memory["none"]
            held_values = differences(running_sum(plain.parameters))
            held_values[1:, layers] += plain.tied_parameters
            divided = plain.parameters if plain.sharded_parameters is None else plain.sharded_parameters
            shared = differences(running_sum(divided)) / of.shards
            shared[1:, layers] += plain.tied_parameters / of.shards
            transient = np.minimum.reduce([_longest(memory[r].transient_bytes) for r in RECOMPUTE])
            activations = differences(running_sum(plain.activation_bytes))
            for sharded in range(2):
                need = held_values * (per_weight + per_gradient) + shared * per_optimizer
                if sharded:
                    need = np.minimum(need, shared * (per_weight + per_gradient + per_optimizer))
                elif not runtime.zero2_by_micro_batch:
                    need = np.minimum(need, held_values * per_weight + shared * (per_gradient + per_optimizer))
                room = limit - context_bytes - need - transient
                forward, backward = ways.least_s("none", accumulates=not sharded, spread=ep)
                once = forward + backward
                # What recomputing gives and costs, at the best rate of any layer.
                gives, rate = np.zeros(layers), 0.0
                for recompute in RECOMPUTE[1:]:
                    freed = plain.activation_bytes - memory[recompute].activation_bytes
                    more_s = sum(ways.least_s(recompute, accumulates=not sharded, spread=ep)) - once
                    gives = np.maximum(gives, freed)
                    good = freed > 0
                    if good.any():
                        rate = max(rate, float((freed[good] / np.maximum(more_s[good], 1e-300)).max()))
                scatter_s = np.zeros_like(room)
                if sharded and of.shards > 1:
                    scatter_s = differences(running_sum(forward))
                    scatter_s += held_values * per_gradient * _least_scatter(tables, of)
                work = Work(
                    seconds=differences(running_sum(once)),
                    bytes=activations,
                    gives=differences(running_sum(gives)) * (1 + 1e-12),
                    rate=rate,
                    least_s=scatter_s,
                )
                found = work.held_s(room, held) if held else work.passing_s(room, rest_s)
                least_s[sharded, c] = np.minimum(least_s[sharded, c], found)
    return least_s


class Work(NamedTuple):
    """A micro-batch in layers [a, b) of a worker, shape (layers, layers + 1), without recomputation."""

    seconds: np.ndarray
    bytes: np.ndarray
    """Of its activations."""
    gives: np.ndarray
    """Bytes that recomputing frees."""
    rate: float
    """Bytes that it frees per second."""
    least_s: np.ndarray
    """What a micro-batch takes whatever is computed."""

    def held_s(self, room: np.ndarray, count: float) -> np.ndarray:
        """Seconds with as much recomputed as so many in flight ask for; inf where they do not fit into the room."""
        short = np.maximum(self.bytes - room / count, 0.0)
        fits = (short <= self.gives) & (self.seconds > 0) & (room >= 0)
        more_s = short / self.rate if self.rate > 0 else 0.0
        return np.where(fits, np.maximum(self.seconds + more_s, self.least_s), np.inf)

    def passing_s(self, room: np.ndarray, rest_s: np.ndarray) -> np.ndarray:
        """Seconds between two micro-batches with the best number in flight."""
        best = np.full_like(room, np.inf)
        for count, more in pairwise((*FLIGHTS, np.inf)):
            seconds = self.held_s(room, count)
            trip_s = (seconds + rest_s) / (more - 1) if more < np.inf else 0.0
            best = np.minimum(best, np.maximum(seconds, trip_s))
        return best


def _least_scatter(tables: CostTables, of: WorkerClass) -> float:
    """Least seconds per byte to scatter gradients over two or more devices of a class, latency left out."""
    pool, links = tables.problem.cluster.pools[of.pool], tables.links
    rate, arrays = float(links.ring_bytes_per_s[of.pool, of.pool]), links.arrays(tables.problem.runtime.bucket_bytes)
    most = max(1, pool.devices_per_node // of.tp)
    members = [2**k for k in range(1, int(math.log2(of.shards)) + 1)]
    return min(
        collective_s(MANY_BYTES, count, near, of.pool, 0.0, rate, 1, arrays) / MANY_BYTES
        for count in members
        for near in {1, min(most, count)}
    )


def _longest(values: np.ndarray) -> np.ndarray:
    """Largest of the values [a, b), by a and b, shape (n, n + 1)."""
    longest = np.zeros((len(values), len(values) + 1))
    for a in range(len(values)):
        longest[a, a + 1 :] = np.maximum.accumulate(values[a:])
    return longest


def region_tiers(tables: CostTables, kinds: Kinds, device_capacity: np.ndarray, packed: float = 1.0) -> list[Tier]:
    """Tiers inside one region: one node, so many nodes.

    `packed`: the least bytes of a packed gradient over plain ones.
    """
    links, pools = tables.links, tables.problem.cluster.pools
    part = least_part(tables.problem.runtime, tables.problem.batch)
    tiers = []
    for region in np.unique(links.region[kinds.of_pool >= 0]):
        mine = np.flatnonzero((links.region == region) & (kinds.of_pool >= 0))
        for p in mine:
            if pools[p].devices_per_node > 1:
                capacity = pools[p].devices_per_node * device_capacity[kinds.of_pool[p]]
                tiers.append(Tier(capacity, 0.0, part / (kinds.most_degree * links.node_bytes_per_s[p])))
        node = np.concatenate(
            [np.full(pools[p].nodes, pools[p].devices_per_node * device_capacity[kinds.of_pool[p]]) for p in mine]
        )
        total = running_sum(np.sort(node)[::-1])
        pairs = region_pairs(tables, kinds, int(region))
        if pairs:
            latency_s = links.factor * min(links.ring_latency_s[pair] for pair in pairs)
            rate = max(links.bytes_per_s[pair] for pair in pairs)
            card = max(links.card_bytes_per_s[p] for p in mine)
            for fewest, more in pairwise((*COUNTS, len(node) + 1)):
                if fewest <= len(node):
                    most = min(max(more, fewest + 1) - 1, len(node))
                    rounds = 2 * math.ceil(math.log2(fewest)) * part
                    s_per_byte = 2 * (fewest - 1) / fewest * part / rate
                    if packed < 1:
                        rounds = min(rounds, exchange_rounds(fewest, whole=True))
                        s_per_byte = min(s_per_byte, 2 * (fewest - 1) / fewest * packed / card)
                    tiers.append(Tier(total[most], rounds * latency_s, s_per_byte))
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
    latency_s = min((links.factor * links.ring_latency_s[pair] for pair in pairs), default=np.inf)
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
