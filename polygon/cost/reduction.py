"""How long the workers of a stage need to combine their weight gradients.

Inside a region accelerators sum as NCCL does (`polygon.cost.network`): inside a node by its measured table, over
several nodes in a ring at the rate of the narrower of fabric and shared cards, or in a tree. Processors reduce-scatter
and gather in two levels, as gloo does under the runner: in every node, then between the nodes, where fewer leaders than
members pass more than a ring (`passes_of_card`). Between regions the
parts of k node pairs travel side by side (BlueConnect, Cho et al. 2019), k being the least number of nodes that a
region lends to the stage.

What adds up so are *places*: regions, and the nodes of a region inside which weight gradients are packed
(`Plan.packed_inside`), each by itself. NCCL and gloo add up plain numbers: whatever is packed goes from place to place.

With n bytes per worker of a processor, g workers in a node, N nodes in a region, R regions:

    T = 2 (g-1) (a1 + n / (g B1))  +  2 (N-1) (a2 + n / (N B2))  +  across(n)

A node's workers share its network card, so the second level moves the node's whole n. `across` is what the runner
does: two places send one another their whole gradients (one latency), more of them exchange parts and then the sums of
the parts, every pair of places at once (two latencies); packing and unpacking of what crosses are added to it.

Where every device finds the gradient's norm in what it has, a region begins the next step as soon as it has all sums,
and may lead: `ways_s` has what each region's gradients take to reach each other one (`polygon.cost.finish.led_s`).

With local steps regions meet every H steps: the first two levels run in every step, and after each H-th update all
three once more, for the outer gradient (`with_local_steps`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from polygon.cost.collectives import ring_pass_s
from polygon.cost.memory import state_bytes
from polygon.cost.network import ring_kernel
from polygon.cost.overlap import overlap_of, seen_parts
from polygon.cost.transfers import LinkArrays, LinkTable, Placement, codec_s, matrix_values, packed_bytes
from polygon.domain.model import Batch, Model
from polygon.domain.plan import COMPRESSIONS, Plan
from polygon.domain.runtime import Runtime
from polygon.jit.compilation import general, kernel

MOST_LEADING = 64
"""Regions up to which it is looked at whether they lead by turns; more of them wait for the longest way."""


class Ways(NamedTuple):
    """What gradients take from region to region, over whoever adds them up.

    Attributes
    ----------
    regions : ndarray of int, shape (regions,)
        Their numbers in the cluster, ascending.
    whole_s, last_s : ndarray, shape (regions, regions)
        [target, source] seconds of all gradients, and of those that backward does not hide.
    busy_s : float
        Seconds that a step keeps the busiest link busy.
    """

    regions: np.ndarray
    whole_s: np.ndarray
    last_s: np.ndarray
    busy_s: float


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
    wire_bytes: float = 0.0
    """Of the gradient once packed for the way between places."""
    gather_s: float = 0.0
    """Seconds after the update in which the weights that ZeRO has divided are gathered."""
    outer_s: float = 0.0
    """Seconds after the update, the mean per step, in which regions that take local steps meet."""
    ways: Ways | None = None
    """Where regions may lead by turns, what their gradients take to one another."""

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
            ways=None,
        )


@kernel
def ring_s(n_bytes: float, members: int, latency_s: float, bytes_per_s: float) -> float:
    """Ring all-reduce of `n_bytes` among equals: 2 (p-1) (a + n / (p b)); 0 for one (Patarasuk and Yuan 2009)."""
    if members <= 1:
        return 0.0
    if bytes_per_s <= 0:
        return np.inf
    return float(2 * ring_pass_s(n_bytes, members, latency_s, bytes_per_s))


@kernel
def passes_of_card(members: int, leaders: int) -> float:
    """How many times a gradient passes a leader's card, in and out of a region, where so many add it up for the others.

    Where at most one member does not lead, parts go straight to who adds them up, and come back so: (P + L - 2) / L for
    L leaders of P, which for L = P is the 2 (P - 1) / P of a ring. More add up a piece each for the leaders, and pass
    it on later: (P - 1) / P (2 + 1 / L); a single leader lets the others do so, and has 2
    (`polygon_comm.reduction.SumGroup`).
    """
    if members <= 1:
        return 0.0
    if members <= leaders + 1:
        return (members + leaders - 2) / leaders
    if leaders == 1:
        return 2.0
    return (members - 1) / members * (2 + 1 / leaders)


@kernel
def lent_s(n_bytes: float, members: int, latency_s: float, bytes_per_s: float, passes: float) -> float:
    """A ring's latencies (`ring_s`) and so many passes of a card."""
    if members <= 1:
        return 0.0
    return 2 * (members - 1) * latency_s + passes * n_bytes / bytes_per_s if bytes_per_s > 0 else np.inf


class LevelsRoom(NamedTuple):
    """Room in which `levels_s` works."""

    first: np.ndarray
    nodes: np.ndarray
    """(regions,) first pool of each region in the list of pools, and its nodes."""
    places: np.ndarray
    """(regions,) places in each."""
    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    """(regions,) of a message between two nodes of each."""
    near_s: np.ndarray
    """(regions,) seconds of the sums inside each."""


def levels_room(pools: int, regions: int) -> LevelsRoom:
    """Room for stages of so many pools in so many regions."""
    most = min(pools, regions)
    first, nodes, places = np.zeros((3, most), dtype=np.int64)
    return LevelsRoom(first, nodes, places, np.zeros(most), np.zeros(most), np.zeros(most))


@kernel
def exchange_rounds(places: int, whole: bool) -> int:
    """Rounds of messages in which places sum: one where they send whole gradients (two places, or `whole`)."""
    return 1 if places == 2 or whole else 2


@kernel
def collective_s(
    n_bytes: float,
    members: int,
    per_node: int,
    pool: int,
    latency_s: float,
    bytes_per_s: float,
    passes: int,
    links: LinkArrays,
) -> float:
    """Seconds of NCCL's all-reduce (2 passes), gather or scatter (1 pass) of what each device of a group has.

    Gradients go in buckets, each of which waits for the latency of its ring.

    Parameters
    ----------
    n_bytes : float
        Of one device.
    members, per_node : int
        Devices of the group, and how many of them are on a node; every device of a node does so in a group of its own.
    pool : int
        Of the devices.
    latency_s, bytes_per_s : float
        Of the link between two nodes.
    """
    if members < 2 or n_bytes <= 0:
        return 0.0
    nodes = -(-members // per_node)
    if nodes > 1 and bytes_per_s <= 0:
        return np.inf
    of = links.collective[pool]
    buckets = max(1.0, np.ceil(n_bytes / links.bucket_bytes))
    one_s = ring_kernel(
        n_bytes / buckets, members, per_node, int(of[0]), of[1], of[2], bytes_per_s, latency_s, int(of[3]), passes
    )
    return float(of[5] * buckets * one_s)


@kernel
def levels_s(
    n_bytes: float,
    count: int,
    pools: np.ndarray,
    nodes: np.ndarray,
    members: np.ndarray,
    degrees: np.ndarray,
    wire_bytes: float,
    pair_share: np.ndarray,
    apart: np.ndarray,
    links: LinkArrays,
    whole: bool,
    room: LevelsRoom,
) -> tuple[float, float, float, float]:
    """Seconds inside nodes, inside regions and between places, and the part of the last that is latency.

    Parameters
    ----------
    n_bytes : float
        Gradient bytes that a worker holds.
    count : int
        How many of the pools.
    pools, nodes, members, degrees : ndarray, shape (at least count,)
        The pools that hold workers of the stage (those of a region side by side), how many of their nodes do, how many
        workers per node, and the least tensor-parallel degree of these.
    wire_bytes : float
        Bytes of the gradient once packed for the way between places.
    pair_share : ndarray, shape (regions, regions)
        How many stages reduce over each pair of regions at the same time.
    apart : ndarray of bool, shape (regions,)
        Whether the nodes of a region are places by themselves.
    whole : bool
        Whether places send each other whole gradients in one round (`exchange_rounds`).
    """
    found, i = 0, 0
    while i < count:
        r = links.region[pools[i]]
        end, total = i, 0
        while end < count and links.region[pools[end]] == r:
            total += nodes[end]
            end += 1
        room.first[found], room.nodes[found], room.places[found] = i, total, total if apart[r] else 1
        found += 1
        i = end
    places, parallel = side_by_side(found, room)
    node_s, region_s = 0.0, 0.0
    for a in range(found):
        i, end = room.first[a], room.first[a + 1] if a + 1 < found else count
        r, total = links.region[pools[i]], room.nodes[a]
        workers, latency, rate, nccl = 0, 0.0, np.inf, True
        room.latency_s[a], room.bytes_per_s[a] = 0.0, np.inf
        for j in range(i, end):
            workers += nodes[j] * members[j]
            nccl = nccl and links.collective[pools[j], 4] > 0
            for k in range(i, end):
                if k != j or nodes[j] > 1:
                    latency = max(latency, links.ring_latency_s[pools[j], pools[k]])
                    rate = min(rate, links.ring_bytes_per_s[pools[j], pools[k]])
                    room.latency_s[a] = max(room.latency_s[a], links.latency_s[pools[j], pools[k]])
                    room.bytes_per_s[a] = min(room.bytes_per_s[a], links.bytes_per_s[pools[j], pools[k]])
        own_s, own_node_s = 0.0, 0.0
        for j in range(i, end):
            p = pools[j]
            if nccl:
                near = members[j] if apart[r] else workers
                own_s = max(own_s, collective_s(n_bytes / degrees[j], near, members[j], p, latency, rate, 2, links))
            else:
                each = ring_s(n_bytes, members[j], links.node_latency_s[p], links.node_bytes_per_s[p])
                own_node_s = max(own_node_s, each)
        if not nccl and not apart[r]:
            passes = passes_of_card(total, parallel if places > 1 else total)
            own_s = links.collective[pools[i], 5] * lent_s(n_bytes, total, latency, rate, passes)
        node_s, region_s = max(node_s, own_node_s), max(region_s, own_s)
        room.near_s[a] = own_node_s + own_s
    if places == 1:
        return node_s, region_s, 0.0, 0.0
    rounds = exchange_rounds(places, whole)
    across_s, far_s = 0.0, 0.0
    for a in range(found):
        for b in range(found):
            latency, rate = between(a, b, pools, pair_share, links, places, parallel, room)
            if rate >= 0:
                far_s = max(far_s, rounds * latency)
                n = 2 * wire_bytes / places
                across_s = max(across_s, rounds * latency + n / rate if rate > 0 else np.inf)
    return node_s, region_s, across_s, far_s


@kernel
def side_by_side(found: int, room: LevelsRoom) -> tuple[int, int]:
    """Places in so many regions, and nodes of every place that send at the same time."""
    places, parallel = 0, room.nodes[0] // room.places[0]
    for a in range(found):
        places += room.places[a]
        parallel = min(parallel, room.nodes[a] // room.places[a])
    return places, parallel


@kernel
def between(
    a: int,
    b: int,
    pools: np.ndarray,
    pair_share: np.ndarray,
    links: LinkArrays,
    places: int,
    parallel: int,
    room: LevelsRoom,
) -> tuple[float, float]:
    """Latency and bytes/s of what a place in one region sends to a place in another, or to another in the same.

    The rate is 0 without a link, and -1 where there is nobody to send to.
    """
    # Which pool stands for a region does not matter: links between regions are the same for all its pools.
    pa, pb = pools[room.first[a]], pools[room.first[b]]
    ra, rb = links.region[pa], links.region[pb]
    # A card sends to all the other places at once.
    card = links.card_bytes_per_s[pa] * parallel / (places - 1)
    if a == b:
        return (room.latency_s[a], min(room.bytes_per_s[a], card)) if room.places[a] > 1 else (0.0, -1.0)
    stages = max(1.0, pair_share[ra, rb]) * room.places[a]
    # What leaves a region goes to all places elsewhere at once.
    capacity = links.capacity_bytes_per_s[ra, rb] / room.places[b]
    capacity = min(capacity, links.egress_bytes_per_s[ra] / (places - room.places[a])) / stages
    return links.latency_s[pa, pb], min(links.bytes_per_s[pa, pb] * parallel, card, capacity)


@general
def ways_s(
    found: int,
    pools: np.ndarray,
    wire_bytes: float,
    pair_share: np.ndarray,
    links: LinkArrays,
    whole: bool,
    packing_s: float,
    near_s: np.ndarray,
    cards_s: np.ndarray,
    last: float,
    room: LevelsRoom,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds from region to region of all gradients and of the part that no backward hides, [target, source] each,
    and `Ways.busy_s`.

    In one round every place sends to every other. In two, the place that adds up a part sends the sum on: of a way over
    a third region each link carries its half, of one that ends or begins there the link carries both rounds.

    Parameters
    ----------
    found : int
        Regions, as `levels_s` left them in `room`; the parameters named alike are its.
    packing_s : float
        Of packing and unpacking.
    near_s : ndarray, shape (found,)
        Of the sums inside each region: half before the way, half after it.
    cards_s : ndarray, shape (found,)
        In which the cards of each region's leaders send what its sums need.
    last : float
        Part of all that is not latency which no backward hides.
    """
    places, parallel = side_by_side(found, room)
    far_s, half_s = np.full((found, found), -1.0), np.zeros((found, found))
    for a in range(found):
        for b in range(found):
            latency, rate = between(a, b, pools, pair_share, links, places, parallel, room)
            if rate >= 0:
                far_s[a, b], half_s[a, b] = latency, wire_bytes / places / rate if rate > 0 else np.inf
    all_s, end_s = np.full((found, found), -np.inf), np.full((found, found), -np.inf)
    rounds = exchange_rounds(places, whole)
    for a in range(found):
        # Nobody ends before the sums of the own region, and what its leaders send for them.
        own_s = max(near_s[a], cards_s[a])
        all_s[a, a], end_s[a, a] = own_s, last * own_s
        for b in range(found):
            ends_s = packing_s + 0.5 * (near_s[a] + near_s[b])
            if far_s[a, b] >= 0:
                latency, n = far_s[a, b], ends_s + 2 * half_s[a, b]
                all_s[b, a], end_s[b, a] = max(all_s[b, a], latency + n), max(end_s[b, a], latency + last * n)
            for k in range(found if rounds == 2 else 0):
                if far_s[a, k] >= 0 and far_s[k, b] >= 0:
                    latency, n = far_s[a, k] + far_s[k, b], ends_s + half_s[a, k] + half_s[k, b]
                    all_s[b, a], end_s[b, a] = max(all_s[b, a], latency + n), max(end_s[b, a], latency + last * n)
    return all_s, end_s, 2 * half_s.max()


@kernel
def copies_s(
    n_bytes: float,
    count: int,
    pools: np.ndarray,
    nodes: np.ndarray,
    degrees: np.ndarray,
    apart: np.ndarray,
    links: LinkArrays,
) -> float:
    """Seconds to sum between the shard groups of a stage, inside places, what ZeRO has scattered in each.

    A group lies in one pool. Every node of the smallest sends its part of the gradient, all at the same time.
    Parameters are those of `levels_s`.
    """
    longest, i = 0.0, 0
    while i < count:
        if apart[links.region[pools[i]]]:
            i += 1
            continue
        end, least = i, nodes[i]
        while end < count and links.region[pools[end]] == links.region[pools[i]]:
            least = min(least, nodes[end])
            end += 1
        latency, rate, nccl = 0.0, np.inf, True
        for j in range(i, end):
            nccl = nccl and links.collective[pools[j], 4] > 0
            for k in range(i, end):
                if k != j:
                    latency = max(latency, links.ring_latency_s[pools[j], pools[k]])
                    rate = min(rate, links.ring_bytes_per_s[pools[j], pools[k]])
        part = n_bytes / max(1, least)
        for j in range(i, end if end - i > 1 else i):
            if nccl:
                each = collective_s(part / degrees[j], end - i, 1, pools[j], latency, rate, 2, links)
            else:
                each = links.collective[pools[j], 5] * ring_s(part, end - i, latency, rate)
            longest = max(longest, each)
        i = end
    return longest


@kernel
def least_sum_s(n_bytes: float, nodes: int, pool: int, links: LinkArrays) -> float:
    """What the sum of a worker's gradients over so many nodes of a pool takes at least; 0 inside a node.

    Each node's part passes its card in a ring; a tree sends as much, and has fewer latencies.
    """
    if nodes < 2:
        return 0.0
    latency_s = links.ring_latency_s[pool, pool] * links.collective[pool, 5]
    part = (nodes - 1) / nodes
    return float(2 * np.ceil(np.log2(nodes)) * latency_s + 2 * part * n_bytes / links.bytes_per_s[pool, pool])


def least_part(runtime: Runtime, batch: Batch) -> float:
    """Least part of an all-reduce that a step sees of it: ZeRO scatters gradients, and gathers weights, which a
    runtime may hide."""
    weight_bytes, gradient_bytes, _ = state_bytes(batch)
    gathered = 0.0 if runtime.dp_overlap == "full" else min(1.0, weight_bytes / gradient_bytes)
    return 0.5 + 0.5 * gathered


def summed_part(zero: int, runtime: Runtime) -> float:
    """Part of an all-reduce inside a region that a step waits for at its end before it updates: ZeRO gathers updated
    weights instead of gradients, and has scattered these before where it does so after every micro-batch."""
    if not zero or runtime.owned_weights:
        return 1.0
    return 0.0 if zero == 3 or (zero == 2 and runtime.zero2_by_micro_batch) else 0.5


class Places(NamedTuple):
    """Where a stage's gradients are added up before what is packed goes from place to place."""

    regions: np.ndarray
    """Those that the stage is in, ascending."""
    apart: np.ndarray
    """Whether the nodes of every region of the cluster are places by themselves, shape (regions of the cluster,)."""
    counts: np.ndarray
    """Places in each of `regions`."""
    lanes: int
    """Nodes of every place that send at the same time."""

    @property
    def total(self) -> int:
        """All places."""
        return int(self.counts.sum())


def places_of(packed_inside: Iterable[int], region: np.ndarray, nodes: np.ndarray, all_regions: int) -> Places:
    """The places of a stage.

    Parameters
    ----------
    packed_inside : iterable of int
        As in `Plan`.
    region, nodes : ndarray of int, shape (n,)
        A region that the stage is in, and how many nodes there (of a pool).
    all_regions : int
        Of the cluster.
    """
    apart = np.zeros(all_regions, dtype=bool)
    apart[list(packed_inside)] = True
    regions, where = np.unique(region, return_inverse=True)
    held = np.bincount(where, weights=nodes).astype(np.int64)
    counts = np.where(apart[regions], held, 1)
    return Places(regions=regions, apart=apart, counts=counts, lanes=int((held // counts).min()))


def stage_devices(place: Placement, stage: int, links: LinkTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pools of a stage, nodes used in each, and how many devices of one of these hold the same part of the layers.

    As `Placement.nodes`, but the parts of a sequence count, and a worker may need several nodes for them.
    """
    pools, nodes, workers = place.nodes[stage]
    held = workers * place.cp[stage]
    near = np.minimum(held, np.maximum(1, links.collective[pools, 0].astype(np.int64) // place.degrees[stage]))
    return pools, nodes * held // near, near


def stage_reduction(
    plan: Plan,
    stage: int,
    n_values: float,
    batch: Batch,
    links: LinkTable,
    place: Placement,
    pair_share: np.ndarray,
    runtime: Runtime,
    model: Model,
) -> ReductionCost:
    """Cost of one reduction of a stage's gradients, and of gathering the weights that ZeRO has divided.

    ZeRO divides inside shard groups, which lie in one pool: gradients are scattered there, what a shard has is summed
    between the copies of it, and the updated weights are gathered.

    Parameters
    ----------
    n_values : float
        Weight gradients that one worker holds (all its tensor-parallel ranks together).
    pair_share : ndarray, shape (regions, regions)
        How many stages reduce over each pair of regions (they share its capacity).
    """
    if plan.stages[stage].width == 1 and place.cp[stage] == 1:
        return ReductionCost(node_s=0.0, region_s=0.0, across_s=0.0)
    pools, nodes, members = stage_devices(place, stage, links)
    degrees = place.degrees[stage]
    places = places_of(plan.packed_inside, links.region[pools], nodes, len(links.cluster.regions))
    regions, lanes = places.regions, places.lanes
    mode = group_packing(plan, regions)
    wire = packed_bytes(n_values, batch.gradient_bytes, mode, matrix_values(model))
    sent, part = wire, n_values / lanes
    if mode == "powersgd":
        # Factors of whole matrices: one node of each place sends them whole to every other place.
        wire, part = wire * places.total / 2, n_values
        sent = wire * lanes
    arrays = links.arrays(runtime.bucket_bytes)
    room = levels_room(len(pools), len(pools))
    node_s, region_s, across_s, latency_s = levels_s(
        float(n_values * batch.gradient_bytes),
        len(pools),
        pools,
        nodes,
        members,
        degrees,
        sent,
        pair_share.astype(float),
        places.apart,
        arrays,
        mode == "powersgd",
        room,
    )
    summed_s = node_s + region_s
    held = Held(pools, nodes, members, degrees, n_values)
    node_s, region_s, gather_s = _with_zero(
        plan, stage, held, places, node_s, region_s, batch, runtime, arrays, model, place
    )
    workers = int((nodes * members).sum())
    nccl = bool((arrays.collective[pools, 4] > 0).all())
    if plan.reduction == "central-server" and len(regions) == 1 and workers > 1 and nccl:
        # Whole gradients go along NCCL's ring to the server and as much comes back: n each, for (k - 1) / k of n.
        region_s *= workers / (workers - 1)
    codec_s = packing_s(part, batch, mode, pools, degrees, places.total, links)
    ways = None
    if plan.gradient_everywhere and 1 < len(regions) <= MOST_LEADING:
        _, last = seen_parts(len(range(*plan.stages[stage].layers)), overlap_of(runtime, batch))
        seen = (node_s + region_s) / summed_s if summed_s else 1.0
        near_s = seen * room.near_s[: len(regions)]
        cards_s = _cards_s(places, seen * n_values * batch.gradient_bytes, sent, pools, room, arrays, nccl=nccl)
        share = pair_share.astype(float)
        found = ways_s(
            len(regions), pools, sent, share, arrays, mode == "powersgd", codec_s, near_s, cards_s, last, room
        )
        ways = Ways(links.region[pools][room.first[: len(regions)]], *found)
    return ReductionCost(
        node_s=node_s,
        region_s=region_s,
        across_s=across_s + codec_s,
        latency_s=latency_s,
        gather_s=gather_s,
        across_bytes=_across_bytes(places, wire),
        wire_bytes=wire,
        ways=ways,
    )


def _cards_s(
    places: Places,
    n_bytes: float,
    wire_bytes: float,
    pools: np.ndarray,
    room: LevelsRoom,
    links: LinkArrays,
    *,
    nccl: bool,
) -> np.ndarray:
    """Seconds in which the cards of each region's leaders pass what their region adds up and what they send to others,
    none of it before the region has gradients; shape (regions,)."""
    found = np.zeros(len(places.regions))
    for a, count in enumerate(places.counts):
        total = int(room.nodes[a])
        near = 0.0
        if count == 1:
            near = 2 * (total - 1) / total if nccl else passes_of_card(total, places.lanes)
        far = 2 * wire_bytes * (places.total - 1) / places.total / places.lanes
        found[a] = (near * n_bytes + far) / links.card_bytes_per_s[pools[room.first[a]]]
    return found


class Held(NamedTuple):
    """Who holds the layers of a stage.

    Attributes
    ----------
    pools, nodes, members, degrees : ndarray, shape (pools used,)
        As of `levels_s`.
    values : float
        Weight gradients of one worker.
    """

    pools: np.ndarray
    nodes: np.ndarray
    members: np.ndarray
    degrees: np.ndarray
    values: float


def _with_zero(
    plan: Plan,
    stage: int,
    held: Held,
    places: Places,
    node_s: float,
    region_s: float,
    batch: Batch,
    runtime: Runtime,
    links: LinkArrays,
    model: Model,
    place: Placement,
) -> tuple[float, float, float]:
    """Seconds of the sums inside nodes and regions as the stage's ZeRO makes them, and of gathering weights after the
    update; `node_s` and `region_s` are of summing whole gradients everywhere."""
    zero, pools, nodes = plan.stages[stage].zero, held.pools, held.nodes
    if not zero:
        return node_s, region_s, 0.0
    inside_s = node_s + region_s
    if len(pools) == 1:
        per_node = int(held.members[0])
        near = per_node if places.apart[places.regions[0]] else int(nodes[0]) * per_node
        group = Shards(
            values=held.values / int(held.degrees[0]),
            members=near,
            per_node=per_node,
            shards=min(plan.stages[stage].shards or near, int(place.shards[stage].min())),
            pool=int(pools[0]),
        )
        return 0.0, *zero_sums_s(group, zero, batch, runtime, links, whole_s=inside_s, model=model)
    if runtime.owned_weights:
        return node_s, region_s, 0.0
    gather_s = 0.0 if zero == 3 else 0.5 * inside_s * state_bytes(batch)[0] / batch.gradient_bytes
    part = summed_part(zero, runtime)
    n_bytes = float(held.values * batch.gradient_bytes)
    between_s = copies_s(n_bytes, len(pools), pools, nodes, held.degrees, places.apart, links)
    return part * node_s, part * region_s + between_s, gather_s


class Shards(NamedTuple):
    """Devices of one pool that hold the same layers, and over how many of them ZeRO divides."""

    values: float
    """Parameters on one device."""
    members: int
    per_node: int
    shards: int
    pool: int


def zero_sums_s(
    group: Shards, zero: int, batch: Batch, runtime: Runtime, links: LinkArrays, *, whole_s: float, model: Model
) -> tuple[float, float]:
    """Seconds to sum gradients under ZeRO when the last backward ends, and to gather weights after the update.

    Parameters
    ----------
    whole_s : float
        Seconds of summing them whole on every device.
    """
    p, shards = group.pool, group.shards
    latency_s, rate = float(links.ring_latency_s[p, p]), float(links.ring_bytes_per_s[p, p])
    gradient, weight = group.values * batch.gradient_bytes, group.values * state_bytes(batch)[0]
    near = min(group.per_node, shards)
    if runtime.owned_weights and zero < 3:
        # All ranks sum; then one broadcast an owner, which passes every rank of the ring like a gathering does.
        owners = min(shards, weight_matrices(model))
        return whole_s, owners * collective_s(weight / owners, shards, near, p, latency_s, rate, 1, links)
    scattered = zero == 3 or (zero == 2 and runtime.zero2_by_micro_batch)
    sum_s = 0.0 if scattered else collective_s(gradient, shards, near, p, latency_s, rate, 1, links)
    copies = group.members // shards
    apart = max(1, group.per_node // shards)
    sum_s += collective_s(gradient / shards, copies, min(apart, copies), p, latency_s, rate, 2, links)
    return sum_s, 0.0 if zero == 3 else collective_s(weight, shards, near, p, latency_s, rate, 1, links)


def weight_matrices(model: Model) -> int:
    """Weight matrices of a model: what InternEvo deals out to the ranks of ZeRO, each whole to one of them.

    Its HybridZeroOptimizer sums gradients on all data-parallel ranks (no destination rank), gives every parameter to
    one rank and broadcasts rank by rank (internlm/solver/optimizer/hybrid_zero_optim.py `_partition_param_list`,
    `broadcast_params`); biases and norms go with the matrix before them (internlm/core/communication/utils.py
    `ParamAsyncBcastHandler`).
    """
    return model.blocks * (2 + (3 if model.gated_mlp else 2)) + 2


def group_packing(plan: Plan, regions: np.ndarray) -> str:
    """Packing of gradients that several places add up: all use the strongest that the plan names for any pair."""
    names = [plan.link_use(int(a), int(b)).weight_gradients for a in regions for b in regions]
    return max(names, key=COMPRESSIONS.index, default="none")


def packing_s(
    n_values: float,
    batch: Batch,
    mode: str,
    pools: np.ndarray,
    degrees: np.ndarray,
    places: int,
    links: LinkTable,
) -> float:
    """Seconds in which the leaders of a place pack (with error feedback) and unpack their part of so many values.

    Every number is packed once: for the place that adds it up, or there as a sum. It is unpacked from every other
    place, of whole gradients (low-rank factors) whole, else twice one of as many parts as places: before and after the
    sum. Each slice of a tensor-parallel worker has a leader of its own, where all workers are cut alike.
    """
    if places == 1:
        return 0.0
    slowest = min(links.cluster.pools[p].device.memory_bytes_per_s for p in pools)
    pack_s, unpack_s = codec_s(n_values, batch.gradient_bytes, mode, slowest, feedback=True)
    slices = int(degrees[0]) if (degrees == degrees[0]).all() else 1
    return (pack_s + unpackings(places, mode == "powersgd") * unpack_s) / slices


@kernel
def unpackings(places: int, whole: bool) -> float:
    """How often a leader unpacks as much as its part of a gradient, where so many places add up."""
    return places - 1.0 if whole else 2 * (places - 1) / places


def _across_bytes(places: Places, wire_bytes: float) -> tuple[tuple[int, int, float], ...]:
    """Who sends how much to whom across regions: every place to every other."""
    held = list(zip(places.regions.tolist(), places.counts.tolist(), strict=True))
    n = places.total
    return tuple((a, b, 2 * wire_bytes * i * k / n) for a, i in held for b, k in held if a != b)
