"""How long the workers of a stage need to combine their weight gradients.

Three levels, as the runner does it: inside every node, between the nodes of a region, between regions. On each level
the group first reduce-scatters, the next level works on the scattered parts, and all-gathers on the way back
(BlueConnect, Cho et al. 2019). Between regions the parts of k node pairs travel side by side, k being the least number
of nodes that a region lends to the stage.

With n bytes per worker, g workers in a node, N nodes in a region, R regions:

    T = 2 (g-1) (a1 + n / (g B1))  +  2 (N-1) (a2 + n / (N B2))  +  across(n)

A node's workers share its network card, so the second level moves the node's whole n. `across` is what the runner
does: two regions send one another their whole gradients (one latency), more of them exchange parts and then the sums of
the parts, every pair of regions at once (two latencies); packing and unpacking of what crosses are added to it.

With local steps regions meet every H steps: the first two levels run in every step, and after each H-th update all
three once more, for the outer gradient (`with_local_steps`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from polygon.cost.collectives import ring_pass_s
from polygon.cost.transfers import LinkTable, Placement, by_link, codec_s, packed_bytes
from polygon.domain.model import Batch
from polygon.domain.plan import COMPRESSIONS, Plan
from polygon.kernel_options import kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCost:
    """Seconds of one gradient reduction by level, and the bytes it sends from region to region."""

    node_s: float
    region_s: float
    across_s: float
    latency_s: float = 0.0
    """Part of `across_s` that is latency: however little is reduced, it takes no less."""
    across_bytes: tuple[tuple[int, int, float], ...] = ()
    """Rows (source region, target region, bytes), per step."""
    outer_s: float = 0.0
    """Seconds after the update, the mean per step, in which regions that take local steps meet."""

    @property
    def total_s(self) -> float:
        """Seconds of the three levels one after another, in every step."""
        return self.node_s + self.region_s + self.across_s

    def with_local_steps(self, steps: int) -> ReductionCost:
        """The cost where regions meet every `steps` steps instead of in each."""
        if steps == 1 or self.across_s == 0:
            return self
        return replace(
            self,
            across_s=0.0,
            latency_s=0.0,
            across_bytes=tuple((a, b, n / steps) for a, b, n in self.across_bytes),
            outer_s=self.total_s / steps,
        )


@kernel
def ring_s(n_bytes: float, members: int, latency_s: float, bytes_per_s: float) -> float:
    """Ring all-reduce of `n_bytes` among equals: 2 (p-1) (a + n / (p b)); 0 for one (Patarasuk and Yuan 2009)."""
    if members <= 1:
        return 0.0
    if bytes_per_s <= 0:
        return np.inf
    return 2 * ring_pass_s(n_bytes, members, latency_s, bytes_per_s)


class LevelsRoom(NamedTuple):
    """Room in which `levels_s` works."""

    first: np.ndarray
    nodes: np.ndarray
    """(regions,) first pool of each region in the list of pools, and its nodes."""


def levels_room(pools: int, regions: int) -> LevelsRoom:
    """Room for stages of so many pools in so many regions."""
    most = min(pools, regions)
    return LevelsRoom(first=np.zeros(most, dtype=np.int64), nodes=np.zeros(most, dtype=np.int64))


@kernel
def exchange_rounds(regions: int, whole: bool) -> int:
    """Rounds of messages in which regions sum: one where they send whole gradients (two regions, or `whole`)."""
    return 1 if regions == 2 or whole else 2


@kernel
def levels_s(
    n_bytes: float,
    count: int,
    pools: np.ndarray,
    nodes: np.ndarray,
    members: np.ndarray,
    wire_bytes: np.ndarray,
    pair_share: np.ndarray,
    pool_region: np.ndarray,
    latency_s: np.ndarray,
    bytes_per_s: np.ndarray,
    node_latency_s: np.ndarray,
    node_bytes_per_s: np.ndarray,
    capacity_bytes_per_s: np.ndarray,
    whole: bool,
    room: LevelsRoom,
) -> tuple[float, float, float, float]:
    """Seconds inside nodes, inside regions and across regions, and the part of the last that is latency.

    Parameters
    ----------
    n_bytes : float
        Gradient bytes that a worker holds.
    count : int
        How many of the pools.
    pools, nodes, members : ndarray, shape (at least count,)
        The pools that hold workers of the stage (those of a region side by side), how many of their nodes do, and how
        many workers per node.
    wire_bytes : ndarray, shape (regions, regions)
        Bytes of the gradient once packed for the way from region to region.
    pair_share : ndarray, shape (regions, regions)
        How many stages reduce over each pair of regions at the same time.
    whole : bool
        Whether regions send each other whole gradients in one round (`exchange_rounds`).
    """
    node_s = 0.0
    for i in range(count):
        p = pools[i]
        node_s = max(node_s, ring_s(n_bytes, members[i], node_latency_s[p], node_bytes_per_s[p]))
    found = 0
    region_s = 0.0
    i = 0
    while i < count:
        r = pool_region[pools[i]]
        end = i
        while end < count and pool_region[pools[end]] == r:
            end += 1
        total, latency, rate = 0, 0.0, np.inf
        for j in range(i, end):
            total += nodes[j]
            for k in range(i, end):
                if k != j or nodes[j] > 1:
                    latency = max(latency, latency_s[pools[j], pools[k]])
                    rate = min(rate, bytes_per_s[pools[j], pools[k]])
        region_s = max(region_s, ring_s(n_bytes, total, latency, rate))
        room.first[found], room.nodes[found] = i, total
        found += 1
        i = end
    if found == 1:
        return node_s, region_s, 0.0, 0.0
    parallel = room.nodes[0]
    for a in range(found):
        parallel = min(parallel, room.nodes[a])
    rounds = exchange_rounds(found, whole)
    across_s, far_s = 0.0, 0.0
    for a in range(found):
        for b in range(found):
            if a != b:
                # Which pool stands for a region does not matter: links between regions are the same for all its pools.
                pa, pb = pools[room.first[a]], pools[room.first[b]]
                ra, rb = pool_region[pa], pool_region[pb]
                rate = min(bytes_per_s[pa, pb] * parallel, capacity_bytes_per_s[ra, rb] / max(1.0, pair_share[ra, rb]))
                far_s = max(far_s, rounds * latency_s[pa, pb])
                n = 2 * wire_bytes[ra, rb] / found
                across_s = max(across_s, rounds * latency_s[pa, pb] + n / rate if rate > 0 else np.inf)
    return node_s, region_s, across_s, far_s


def gradient_wire_bytes(
    plan: Plan, n_values: float, batch: Batch, regions: int, matrix_values: float | None = None
) -> np.ndarray:
    """Bytes of a gradient of `n_values` once packed, by source and target region; `matrix_values`: `packed_bytes`."""
    of_kind = partial(packed_bytes, n_values, batch.gradient_bytes, matrix_values=matrix_values)
    return by_link(plan, "weight_gradients", regions, of_kind, n_values * float(batch.gradient_bytes))


def stage_reduction(
    plan: Plan,
    stage: int,
    n_values: float,
    batch: Batch,
    links: LinkTable,
    place: Placement,
    pair_share: np.ndarray,
    matrix_values: float | None = None,
) -> ReductionCost:
    """Cost of one reduction of a stage's gradients.

    Parameters
    ----------
    n_values : float
        Weight gradients that one worker holds (all its tensor-parallel ranks together).
    pair_share : ndarray, shape (regions, regions)
        How many stages reduce over each pair of regions (they share its capacity).
    matrix_values : float, optional
        See `packed_bytes`.
    """
    pools, nodes, members = place.nodes[stage]
    if int(nodes.sum()) == 1 and int(members[0]) == 1:
        return ReductionCost(node_s=0.0, region_s=0.0, across_s=0.0)
    wire = gradient_wire_bytes(plan, n_values, batch, len(links.cluster.regions), matrix_values)
    regions = np.unique(links.region[pools])
    mode = group_packing(plan, regions)
    lanes = min(int(nodes[links.region[pools] == r].sum()) for r in regions)
    sent, part = wire, n_values / lanes
    if mode == "powersgd":
        # Factors of whole matrices: one node of each region sends them whole to every other region.
        wire, part = wire * len(regions) / 2, n_values
        sent = wire * lanes
    node_s, region_s, across_s, latency_s = levels_s(
        float(n_values * batch.gradient_bytes),
        len(pools),
        pools,
        nodes,
        members,
        sent,
        pair_share.astype(float),
        links.region,
        links.latency_s,
        links.bytes_per_s,
        links.node_latency_s,
        links.node_bytes_per_s,
        links.capacity_bytes_per_s,
        mode == "powersgd",
        levels_room(len(pools), len(pools)),
    )
    return ReductionCost(
        node_s=node_s,
        region_s=region_s,
        across_s=across_s + (packing_s(part, batch, mode, pools, links) if len(regions) > 1 else 0.0),
        latency_s=latency_s,
        across_bytes=_across_bytes(regions, wire),
    )


def group_packing(plan: Plan, regions: np.ndarray) -> str:
    """Packing of gradients that several regions add up: all use the strongest that the plan names for any pair."""
    names = [plan.link_use(int(a), int(b)).weight_gradients for a in regions for b in regions if a != b]
    return max(names, key=COMPRESSIONS.index, default="none")


def packing_s(n_values: float, batch: Batch, mode: str, pools: np.ndarray, links: LinkTable) -> float:
    """Seconds in which a leader packs (with error feedback) and unpacks its part, once on each of two passes."""
    slowest = min(links.cluster.pools[p].device.memory_bytes_per_s for p in pools)
    return 2 * sum(codec_s(n_values, batch.gradient_bytes, mode, slowest, feedback=True))


def _across_bytes(regions: np.ndarray, wire: np.ndarray) -> tuple[tuple[int, int, float], ...]:
    """Who sends how much to whom across regions."""
    n = len(regions)
    return tuple((int(a), int(b), 2 * float(wire[a, b]) / n) for a in regions for b in regions if a != b)
