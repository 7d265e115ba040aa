"""What the sum of a stage's gradients takes in a plan: who holds them, what is packed, who waits for whom.

The levels themselves are in `polygon.cost.reduction`, with their formulas; what ZeRO makes of those inside places is in
`polygon.cost.zero_sums`. With local steps regions meet every H steps: the levels inside regions run in every step, and
after each H-th update all three once more, for the outer gradient (`ReductionCost.with_local_steps`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from polygon.cost.kept import Kept
from polygon.cost.overlap import overlap_of, seen_parts, sums_in_step
from polygon.cost.reduction import (
    LevelsRoom,
    find_turns,
    levels_room,
    levels_s,
    passes_of_card,
    streamed_s,
    unpackings,
    ways_s,
)
from polygon.cost.sum_trees import Standing, TreeTimes, standing_of, tree_times, tree_ways_s, ways_over
from polygon.cost.transfers import LinkArrays, LinkTable, Placement, codec_s, matrix_values, packed_bytes
from polygon.cost.zero_sums import Held, with_zero
from polygon.domain.model import Batch, Model
from polygon.domain.plan import COMPRESSIONS, Plan, SumTree
from polygon.domain.runtime import Runtime

KEPT_FIXED = 4
"""Sums of a stage of which is kept what links do not change: what-ifs of a plan differ in little else."""
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
    card_s: float = 0.0
    """Seconds in which cards that sums inside regions keep busy pass what leaves these."""
    last: float = 1.0
    """Part of the gradient that comes last, beside no backward."""
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
        """Seconds of one gradient on the three levels one after another, in every step."""
        return self.node_s + self.region_s + self.across_s

    @property
    def streamed_s(self) -> float:
        """Seconds of all layers, which pass the levels one behind the other."""
        return streamed_s(self.node_s, self.region_s, self.across_s, self.latency_s, self.card_s, self.last)

    @property
    def last_s(self) -> float:
        """Seconds of what comes last: it waits for no other, and has every level before it."""
        return self.latency_s + (self.total_s - self.latency_s) * self.last

    def with_local_steps(self, steps: int) -> ReductionCost:
        """The cost where regions meet every `steps` steps instead of in each."""
        if steps == 1 or self.across_s == 0:
            return self
        return replace(
            self,
            across_s=0.0,
            latency_s=0.0,
            card_s=0.0,
            across_bytes=tuple((a, b, n / steps) for a, b, n in self.across_bytes),
            outer_s=self.streamed_s / steps,
            ways=None,
        )


class _Rooms(threading.local):
    """Rooms for `levels_s` by how many pools they are for, of each thread its own: to make one takes as long as to use
    it."""

    def __init__(self) -> None:
        self.by_pools: dict[int, LevelsRoom] = {}


_ROOMS = _Rooms()


def own_room(pools: int) -> LevelsRoom:
    """Room for a stage of so many pools, good until this thread's next sum."""
    return _ROOMS.by_pools.get(pools) or _ROOMS.by_pools.setdefault(pools, levels_room(pools, pools))


class Places(NamedTuple):
    """Where a stage's gradients are added up before what is packed goes from place to place."""

    regions: np.ndarray
    """Those that the stage is in, ascending."""
    apart: np.ndarray
    """Whether the nodes of every region of the cluster are places by themselves, shape (regions of the cluster,)."""
    counts: np.ndarray
    """Places in each of `regions`."""
    nodes: np.ndarray
    """Of every place in each of `regions`: they send at the same time."""

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
    return Places(regions=regions, apart=apart, counts=counts, nodes=held // counts)


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
    part: float,
    spread_values: float = 0.0,
) -> ReductionCost:
    """Cost of one reduction of a stage's gradients, and of gathering the weights that ZeRO has divided.

    Parameters
    ----------
    n_values : float
        Weight gradients that one worker holds (all its tensor-parallel ranks together).
    pair_share : ndarray, shape (regions, regions)
        How many stages reduce over each pair of regions (they share its capacity).
    part : float
        Of the gradient, what a runtime that sums layer by layer has last (`seen_parts`).
    spread_values : float
        Of `n_values` the experts, where the stage spreads them: workers that hold others sum them apart, and all of
        them go from place to place.
    """
    if (plan.stages[stage].width == 1 and place.cp[stage] == 1) or n_values <= 0:
        return ReductionCost(node_s=0.0, region_s=0.0, across_s=0.0)
    known = place.derived.get(("standing", stage))
    (pools, nodes, members), places = known or place.derived.setdefault(
        ("standing", stage), _standing(place, stage, links)
    )
    spread = plan.stages[stage].ep
    held = Held(pools, nodes, members, place.degrees[stage], n_values, spread_values, spread)
    all_values = n_values + (spread - 1) * spread_values
    mode, layers = group_packing(plan, places.regions), len(range(*plan.stages[stage].layers))
    trees = trees_in_use(plan, stage, places, mode)

    def fixed() -> Fixed:
        tp, (_, last) = place.tp[place.members(stage)], seen_parts(layers, part, overlap_of(runtime, batch))
        crossing = _crossing(mode, places, all_values, batch, matrix_values(model))
        return Fixed.of(crossing, last, held, tp, places, batch, links, trees)

    objects, values = (batch, runtime, model, links.cluster.pools), (mode, n_values, all_values, part, layers, trees)
    own = _kept(place, stage, fixed, objects, *values)
    crossing, last = own.crossing, own.last
    arrays, share = links.arrays(runtime), pair_share.astype(float)
    sums = sums_in_step(float(layers), n_values * batch.gradient_bytes, arrays.bucket_bytes, overlap_of(runtime, batch))
    room = own_room(len(pools))
    node_s, region_s, across_s, latency_s, card_s = levels_s(
        float(n_values * batch.gradient_bytes),
        float(spread_values * batch.gradient_bytes),
        spread,
        len(pools),
        pools,
        held.nodes,
        held.members,
        held.degrees,
        crossing.wire_bytes,
        share,
        places.apart,
        arrays,
        crossing.whole,
        last,
        sums,
        room,
    )
    over = None
    if trees:
        at = region_standing(place, stage, links, share, runtime)
        several = room.nodes[: len(places.regions)] > 1
        over = tree_times(
            ways_over(trees, tuple(places.regions.tolist())), at, crossing.wire_bytes, last, sums * arrays.message_s,
            several=several,
        )  # fmt: skip
        across_s, latency_s = float((over.latency_s + over.way_s).max()), float(over.latency_s.max())
        card_s = over.card_s
    summed_s = node_s + region_s
    node_s, region_s, gather_s = with_zero(
        plan, stage, held, places.apart, node_s, region_s, batch, runtime, arrays, model, place
    )
    if plan.reduction == "central-server" and len(places.regions) == 1 and own.workers > 1 and own.nccl:
        # Whole gradients go along NCCL's ring to the server and as much comes back: n each, for (k - 1) / k of n.
        region_s *= own.workers / (own.workers - 1)
    ways = None
    if plan.gradient_everywhere and 1 < len(places.regions) <= MOST_LEADING:
        # What ZeRO leaves for the step's end of the sums inside regions.
        seen = (node_s + region_s) / summed_s if summed_s else 1.0
        on_card = n_values + (min(spread, int(members.max())) - 1) * spread_values
        n_bytes = seen * on_card * batch.gradient_bytes
        cards_s = _cards_s(places, n_bytes, crossing, pools, room, arrays, trees, nccl=own.nccl)
        ways = _ways(places, crossing, pools, share, arrays, room, own.codec_s, seen, cards_s, last, over)
    return ReductionCost(
        node_s=node_s,
        region_s=region_s,
        across_s=across_s + own.codec_s,
        latency_s=latency_s,
        card_s=card_s,
        last=last,
        gather_s=gather_s,
        across_bytes=own.across_bytes,
        wire_bytes=crossing.wire_bytes,
        ways=ways,
    )


def region_standing(
    place: Placement, stage: int, links: LinkTable, pair_share: np.ndarray, runtime: Runtime
) -> Standing:
    """The regions of a stage, each with all its nodes, and what joins them."""
    known = place.derived.get(("standing", stage))
    (pools, *_), places = known or place.derived.setdefault(("standing", stage), _standing(place, stage, links))
    arrays, leaders = links.arrays(runtime), places.nodes
    turns = np.ones(len(leaders), dtype=np.int64)
    find_turns(leaders, arrays.sum_turns, turns)
    first = np.unique(links.region[pools], return_index=True)[1]
    return standing_of(pools[first], leaders, turns, pair_share, arrays)


def tied_reduction(
    plan: Plan, batch: Batch, links: LinkTable, place: Placement, runtime: Runtime, model: Model
) -> ReductionCost:
    """Cost of summing the gradient of a weight that first and last stage both hold, once over the workers of both.

    One vector: no part of it is under way while another one comes. What ZeRO scatters of it before the update and
    gathers after it counts as the sum that both make together.
    """
    n_values, ends = float(model.tied_values), (0, len(plan.stages) - 1)
    known = place.derived.get("tied")
    (pools, nodes, members, degrees, tp), places = known or place.derived.setdefault(
        "tied", _standing_together(place, ends, links)
    )
    mode = group_packing(plan, places.regions)

    def fixed() -> Fixed:
        held = Held(pools, nodes, members, degrees, n_values, 0.0, 1)
        crossing = _crossing(mode, places, n_values, batch, width=model.hidden_size)
        return Fixed.of(crossing, 1.0, held, tp, places, batch, links)

    own = _kept(place, "tied", fixed, (batch, links.cluster.pools), mode, n_values)
    crossing = own.crossing
    node_s, region_s, across_s, latency_s, _ = levels_s(
        n_values * batch.gradient_bytes,
        0.0,
        1,
        len(pools),
        pools,
        nodes,
        members,
        degrees,
        crossing.wire_bytes,
        np.zeros((len(places.apart), len(places.apart))),  # when it crosses, other sums have
        places.apart,
        links.arrays(runtime),
        crossing.whole,
        1.0,
        1.0,
        own_room(len(pools)),
    )
    return ReductionCost(
        node_s=node_s,
        region_s=region_s,
        across_s=across_s + own.codec_s,
        latency_s=latency_s,
        across_bytes=own.across_bytes,
        wire_bytes=crossing.wire_bytes,
    )


def _standing_together(
    place: Placement, stages: Sequence[int], links: LinkTable
) -> tuple[tuple[np.ndarray, ...], Places]:
    """As `_standing`, of the workers of several stages; degrees as in `Placement.degrees`, and of every worker."""
    mine = np.concatenate([np.arange(len(place.stage))[place.members(s)] for s in stages])
    _, first, where = np.unique(place.node[mine], return_index=True, return_inverse=True)
    on_node = np.bincount(where, weights=place.cp[place.stage[mine]]).astype(np.int64)
    pools, of, nodes = np.unique(place.pool[mine][first], return_inverse=True, return_counts=True)
    most, degrees = np.zeros(len(pools), dtype=np.int64), np.full(len(pools), np.iinfo(np.int64).max)
    np.maximum.at(most, of, on_node)
    np.minimum.at(degrees, of[where], place.tp[mine])
    near = np.minimum(most, np.maximum(1, links.collective[pools, 0].astype(np.int64) // degrees))
    places = places_of(place.packed_inside, links.region[pools], nodes, len(links.cluster.regions))
    return (pools, nodes * most // near, near, degrees, place.tp[mine]), places


def _standing(
    place: Placement, stage: int, links: LinkTable
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], Places]:
    """A stage's `stage_devices`, and where it adds up."""
    pools, nodes, near = stage_devices(place, stage, links)
    return (pools, nodes, near), places_of(place.packed_inside, links.region[pools], nodes, len(links.cluster.regions))


class Crossing(NamedTuple):
    """What of a stage's gradients goes from place to place."""

    mode: str
    """How it is packed."""
    wire_bytes: float
    """Of all of it, packed."""
    values: float
    """Numbers that a sending node packs, of the place with the fewest."""

    @property
    def whole(self) -> bool:
        """Whether places send one another all they have in one round, not parts and then sums of parts."""
        return self.mode == "powersgd"


def _crossing(
    mode: str, places: Places, n_values: float, batch: Batch, matrix: float | None = None, width: int | None = None
) -> Crossing:
    wire = packed_bytes(n_values, batch.gradient_bytes, mode, matrix, width)
    if mode != "powersgd":
        return Crossing(mode, wire, n_values / int(places.nodes.min()))
    # Factors of whole matrices: one node of each place sends them whole to every other place.
    return Crossing(mode, wire * places.total / 2, n_values)


class Fixed(NamedTuple):
    """What of a sum does not follow from the links between regions.

    Attributes
    ----------
    last : float
        Of `seen_parts`.
    codec_s : float
        Of `packing_s`.
    across_bytes
        As in `ReductionCost`.
    workers : int
        Places of the ring inside a region.
    nccl : bool
        Whether NCCL drives all of them.
    """

    crossing: Crossing
    last: float
    codec_s: float
    across_bytes: tuple[tuple[int, int, float], ...]
    workers: int
    nccl: bool

    @classmethod
    def of(
        cls,
        crossing: Crossing,
        last: float,
        held: Held,
        tp: np.ndarray,
        places: Places,
        batch: Batch,
        links: LinkTable,
        trees: tuple[SumTree, ...] = (),
    ) -> Fixed:
        """Work it out; `tp` is the tensor-parallel degree of every worker."""
        unpacked = float(_heard(places, trees).max()) if not crossing.whole else unpackings(places.total, True)
        return cls(
            crossing=crossing,
            last=last,
            codec_s=packing_s(crossing.values, batch, crossing.mode, held.pools, tp, unpacked, links),
            across_bytes=_across_bytes(places, crossing.wire_bytes, trees),
            workers=int((held.nodes * held.members).sum()),
            nccl=bool((links.collective[held.pools, 4] > 0).all()),
        )


def _kept(
    place: Placement, name: Hashable, make: Callable[[], Fixed], objects: tuple[object, ...], *values: Hashable
) -> Fixed:
    """What was made of these for the same workers, kept for the next links."""
    known: Kept[Fixed] = place.derived.get(("fixed", name)) or place.derived.setdefault(
        ("fixed", name), Kept(KEPT_FIXED)
    )
    return known.get(objects, *values) or known.put(make(), objects, *values)


def _ways(
    places: Places,
    crossing: Crossing,
    pools: np.ndarray,
    share: np.ndarray,
    links: LinkArrays,
    room: LevelsRoom,
    codec_s: float,
    seen: float,
    cards_s: np.ndarray,
    last: float,
    over: TreeTimes | None,
) -> Ways:
    """What gradients take from region to region; `seen` is the part of the sums inside regions that the step's end
    waits for, the others are parameters of `ways_s`, after `levels_s` has filled `room`."""
    count = len(places.regions)
    near_s = seen * room.near_s[:count]
    if over is not None:
        found = tree_ways_s(over, count, codec_s, near_s, cards_s, last)
    else:
        found = ways_s(
            count, pools, crossing.wire_bytes, share, links, crossing.whole, codec_s, near_s, cards_s, last, room
        )
    return Ways(links.region[pools][room.first[:count]], *found)


def _cards_s(
    places: Places,
    n_bytes: float,
    crossing: Crossing,
    pools: np.ndarray,
    room: LevelsRoom,
    links: LinkArrays,
    trees: tuple[SumTree, ...],
    *,
    nccl: bool,
) -> np.ndarray:
    """Seconds in which the cards of each region's leaders pass what their region adds up and what they send to others,
    none of it before the region has gradients; shape (regions,)."""
    found, sent = np.zeros(len(places.regions)), _heard(places, trees)
    for a, count in enumerate(places.counts):
        total = int(room.nodes[a])
        near = 0.0
        if count == 1:
            near = passes_of_card(total, crossing.whole and not nccl)
        leaders = 1 if crossing.whole else int(places.nodes[a])
        # The parts that other places add up go out, and the sums of these come back.
        far = sent[a] * crossing.wire_bytes / leaders
        found[a] = (near * n_bytes + far) / links.card_bytes_per_s[pools[room.first[a]]]
    return found


def group_packing(plan: Plan, regions: np.ndarray) -> str:
    """Packing of gradients that several places add up: all use the strongest that the plan names for any pair."""
    inside = frozenset(regions.tolist())
    known = plan.strongest.get(inside)
    if known is None:
        names = {use.weight_gradients for use in plan.links if use.source in inside and use.target in inside}
        known = plan.strongest[inside] = max(names, key=COMPRESSIONS.index, default="none")
    return known


class SumsRoom(NamedTuple):
    """Memory of a device for sums of what it has gradients of, as numbers per parameter of these."""

    owed: float
    """Of what packing has dropped, which who leads keeps until the next step (error feedback), of its stage's own."""
    tied: float
    """The same of a weight that first and last stage sum apart from all others."""
    heard: float
    """Bytes of buffers per byte of gradient that is under way, where the device's memory is that in which they lie."""


NO_SUMS = SumsRoom(0.0, 0.0, 0.0)


def room_of_sums(plan: Plan, place: Placement, stage: int, links: LinkTable, runtime: Runtime) -> list[SumsRoom]:
    """What each worker of a stage needs for its sums; the first worker of each node leads, and all are taken for it.

    A leader packs as much of the gradient as falls to it where the nodes of a place share it out (of low-rank factors
    one node leads all). While the sum of a layer is under way it holds what it sends and hears of its part: whole
    versions of all places, or of three parts each but its own (`polygon_comm.reduction.SumGroup.buffer_bytes`); and
    where others are in its region, a version of theirs; and its own in the order of who leads what of it, where several
    nodes of some place do.
    """
    mine, own = place.members(stage), place.derived.get(("standing", stage))
    _, places = own or place.derived.setdefault(("standing", stage), _standing(place, stage, links))
    region, held = place.region[mine], np.zeros((3, len(place.region[mine])))
    held[0], mode = _owed(plan, places, region, place.tp[mine], place.tp[mine])
    ends = 0, len(plan.stages) - 1
    if runtime.tied_once and ends[1] > 0 and stage in (0, ends[1] % plan.groups):
        known = place.derived.get("tied")
        standing, tied = known or place.derived.setdefault("tied", _standing_together(place, ends, links))
        held[1], _ = _owed(plan, tied, region, place.tp[mine], standing[-1])
    if runtime.by_layer and any(links.cluster.pools[p].device.is_cpu for p in np.unique(place.pool[mine]).tolist()):
        count = places.total
        heard = _heard(places, trees_in_use(plan, stage, places, mode))[np.searchsorted(places.regions, region)]
        heard = np.full(len(region), count) if count == 2 or mode == "powersgd" else 1 + heard
        ratio = packed_bytes(1e6, 4, mode) / 4e6
        leaders = places.nodes[np.searchsorted(places.regions, region)] if mode != "powersgd" else 1
        near = np.bincount(region)[region] * place.cp[stage] > 1
        arranged = float(count > 1 and mode != "powersgd" and places.nodes.max() > 1)
        on_host = np.array([pool.device.is_cpu for pool in links.cluster.pools])[place.pool[mine]]
        held[2] = on_host * (near + arranged + (heard * ratio / leaders if count > 1 else 0.0))
    return [SumsRoom(*row) for row in held.T.tolist()]


def _owed(
    plan: Plan, places: Places, region: np.ndarray, tp: np.ndarray, degrees: np.ndarray
) -> tuple[np.ndarray, str]:
    """Numbers that a leader in each of the regions packs, per parameter on a device of a worker of `tp` of them, and
    how: whole tensors where the degrees of all who sum differ."""
    mode = group_packing(plan, places.regions) if places.total > 1 and plan.reduction == "all-reduce" else "none"
    if mode == "none":
        return np.zeros(len(region)), mode
    nodes = np.ones(len(region)) if mode == "powersgd" else places.nodes[np.searchsorted(places.regions, region)]
    return (tp if len(np.unique(degrees)) > 1 else 1) / nodes, mode


def trees_in_use(plan: Plan, stage: int, places: Places, mode: str) -> tuple[SumTree, ...]:
    """The trees of a stage; none where what-ifs have made the plan one whose sums cannot go over any."""
    whole = mode == "powersgd" or places.total > len(places.regions)
    return () if whole or plan.reduction != "all-reduce" else plan.stages[stage].trees


def _heard(places: Places, trees: tuple[SumTree, ...]) -> np.ndarray:
    """Gradients that every region hears, and sends, in a sum by parts: of parts that all but one's own are added up by
    others, and the sums of these; over trees what its neighbours there have, shape (regions,)."""
    if trees:
        return ways_over(trees, tuple(places.regions.tolist())).sent
    return np.full(len(places.regions), unpackings(places.total, False))


def packing_s(
    n_values: float,
    batch: Batch,
    mode: str,
    pools: np.ndarray,
    tp: np.ndarray,
    unpacked: float,
    links: LinkTable,
) -> float:
    """Seconds in which the leaders of a place pack (with error feedback) and unpack their part of so many values.

    Every number is packed once: for the place that adds it up, or there as a sum. It is unpacked as often as `unpacked`
    says, from every other place of whole gradients (low-rank factors), else before and after the sum. Each slice of a
    tensor-parallel worker has a leader of its own, where all workers are cut alike.
    """
    if unpacked == 0:
        return 0.0
    slowest = min(links.cluster.pools[p].device.memory_bytes_per_s for p in pools)
    pack_s, unpack_s = codec_s(n_values, batch.gradient_bytes, mode, slowest, feedback=True)
    slices = int(tp[0]) if (tp == tp[0]).all() else 1
    return (pack_s + unpacked * unpack_s) / slices


def _across_bytes(places: Places, wire_bytes: float, trees: tuple[SumTree, ...]) -> tuple[tuple[int, int, float], ...]:
    """Who sends how much to whom across regions: every place to every other, or over the links of trees."""
    if trees:
        regions = places.regions.tolist()
        parts = ways_over(trees, tuple(regions)).parts
        return tuple(
            (regions[a], regions[b], wire_bytes * float(parts[a, b])) for a, b in np.argwhere(parts > 0).tolist()
        )
    held = list(zip(places.regions.tolist(), places.counts.tolist(), strict=True))
    n = places.total
    return tuple((a, b, 2 * wire_bytes * i * k / n) for a, i in held for b, k in held if a != b)
