"""What limits a plan: every resource made 10 % better in turn and the step priced again by the one estimate.

Links are relaxed in rate and in latency, each by itself: inside nodes, between nodes of a group, between groups of a
region, between regions (both ways; by itself the capacity that flows share, where there is one) and out of a region;
devices in speed and in memory. The plan stays as it is, except for more memory, which only another decoding of the
same allocation can use. A resource whose improvement saves nothing is not named. A search fills what it finds, so
that a good plan often has several limits at once, and more of one alone saves next to nothing: then those that limit
it together are named, the ones that are missed where everything else is relaxed. A sum over many regions waits for
all links between them, and one alone saves nothing: these are one resource, then. For the rates and latencies that
save most, the best value for money is looked for: the smallest of a ladder of usual rates that brings most of what
the largest would.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from polygon.cost.estimate import worker_regions
from polygon.cost.money import traffic_bytes
from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, NodeGroup, link_between
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.planning.assumptions import Assumption, assumptions
from polygon.planning.decode import Decoder
from polygon.planning.nearby import allocation_of
from polygon.planning.what_ifs import Change as WhatIf
from polygon.planning.what_ifs import more_memory, sensitivities

RELAXED = 1.1
"""How many times as good a resource is made."""
LEAST = 0.0005
"""Part of the step that relaxing has to save to be named."""
WORTH = 0.01
"""Part of the step that a suggestion has to save."""
MOST = 0.9
"""Part of the ladder's largest saving that the suggested rate must reach."""
MANY = 40
"""Resources; of more, sorts that save nothing together are left out."""
MOST_PAIRS = 24
"""Pairs of regions that are looked at: those that carry most."""
FEW_PAIRS = 3
"""That are named one by one where they limit the step together; more are all links between regions."""
NAMED, WORST = 3, 2
"""Of what limits a step together, and of single limits: how many are said."""
SUGGESTED = 4
"""Limits, worst first, for which a better value is looked for."""
ALONE = 0.5
"""Part of what everything relaxed saves that the worst limit must save to be the answer alone."""
ENOUGH = 0.8
"""The same that limits named together save at least."""
LADDER_GBPS = (1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400, 800, 1600, 3200, 7200, 14400)
"""Rates that networks are built for: Ethernet and InfiniBand by generation, NVLink by the node."""
GBPS = 1e9 / 8
BOLD = {"rate": 10.0, "latency": 10.0, "capacity": 10.0, "": 2.0}
"""How many times as good a resource is made to plan anew where no value is worth naming for the plan as it is."""

Kind = Literal[
    "compute", "memory", "intra_node", "inter_node", "intra_region", "pair", "egress", "between_rate", "between_latency"
]
"""The last two: all links between regions."""
FAR: tuple[Kind, ...] = ("pair", "egress", "between_rate", "between_latency")
Quality = Literal["rate", "latency", "capacity", ""]
Change = Callable[[Cluster, float], Cluster]


@dataclass(frozen=True, kw_only=True)
class Resource:
    """Something of a cluster that could be better."""

    kind: Kind
    quality: Quality
    region: str = ""
    """Where; the first of a pair."""
    other: str = ""
    """The second region of a pair."""
    device: str = ""
    group: int = 0
    """Node group of the region."""
    now: float
    """Gbit/s, ms, GiB, or 1 for the speed of a device."""
    default: bool = False
    """Whether nobody gave the value."""
    better: Change
    """The cluster with so many times as much of it."""

    @property
    def name(self) -> Message:
        """What it is, in words."""
        places = {"region": self.region, "other": self.other, "device": self.device}
        what = Message(f"resource.{self.kind}", **places)
        if self.kind == "pair" and self.quality == "capacity":
            return Message("resource.capacity", what=what)
        return Message("resource.latency", what=what) if self.quality == "latency" else what

    @property
    def of_links(self) -> Quality:
        """What it is of all links between regions, which are faster with their capacities."""
        return "rate" if self.quality == "capacity" else self.quality

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the function."""
        return {key: value for key, value in asdict(replace(self, better=_same)).items() if key != "better"}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A resource and what more of it saves, as parts of the step."""

    resource: Resource
    saves: float
    """With 10 % more."""
    suggested: float | None = None
    """The value that brings most of what there is to gain."""
    would_save: float = 0.0

    @property
    def said(self) -> Message:
        """It and what more of it saves, in words."""
        what = self.resource
        if self.suggested is None:
            return Message("limits.one", what=what.name, saves=self.saves)
        return Message(
            "limits.latency" if what.quality == "latency" else "limits.rate",
            what=what.name,
            saves=self.saves,
            now=what.now,
            value=self.suggested,
            would_save=self.would_save,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = {"saves": self.saves, "suggested": self.suggested, "would_save": self.would_save}
        return self.resource.to_dict() | found


def _same(cluster: Cluster, _: float) -> Cluster:
    return cluster


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What limits a step, worst first."""

    step_s: float
    limits: tuple[Limit, ...]
    together: tuple[Resource, ...] = ()
    """What limits the step together, where more of one resource alone saves little."""
    together_saves: float = 0.0
    """With 10 % more of all of these, as a part of the step."""
    whole: bool = False
    """Whether all resources have been looked at."""

    @property
    def said(self) -> Message:
        """In words: what limits the step together, or the worst limit and the next."""
        if self.together:
            names: list[Message] = [resource.name for resource in self.together[:NAMED]]
            if len(self.together) > NAMED:
                names.append(Message("limits.more", n=len(self.together) - NAMED))
            alone = max((limit.saves for limit in self.limits), default=0.0)
            return Message("limits.together", what=tuple(names), saves=self.together_saves, alone=alone)
        if self.limits:
            worst = tuple(limit.said for limit in self.limits[:WORST])
            return Message("limits.each" if self.whole else "limits.so_far", limits=worst)
        return Message("limits.none" if self.whole else "limits.no_time")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        limits, together = [it.to_dict() for it in self.limits], [it.to_dict() for it in self.together]
        return {"step_s": self.step_s, "limits": limits, "together": together, "together_saves": self.together_saves,
                "whole": self.whole}  # fmt: skip


def limits(
    problem: Problem, plan: Plan, tables: CostTables, seconds_left: Callable[[], float] = lambda: math.inf
) -> Limits:
    """What limits the step, worst first; those found before no seconds are left."""
    last = deque(limits_as_found(problem, plan, tables, seconds_left), maxlen=1)
    return last[0] if last else Limits(step_s=step_times(plan, tables).step_s, limits=())


def limits_as_found(
    problem: Problem, plan: Plan, tables: CostTables, seconds_left: Callable[[], float] = lambda: math.inf
) -> Iterator[Limits]:
    """The same, whenever one more is found; the last has all, and the values suggested for the worst."""
    times = step_times(plan, tables)
    found: list[Limit] = []
    asked: list[Limit] = []
    for limit in _relaxed(problem, plan, tables, times):
        if seconds_left() <= 0:
            return
        asked.append(limit)
        if limit.saves > LEAST:
            insort(found, limit, key=lambda limit: -limit.saves)
            yield Limits(step_s=times.step_s, limits=tuple(found))
    for i, limit in enumerate(found[:SUGGESTED]):
        found[i] = _suggestion(problem, plan, tables, times.step_s, limit)
    joint, saves = _together(problem, plan, tables, times.step_s, asked)
    yield Limits(step_s=times.step_s, limits=tuple(found), together=joint, together_saves=saves, whole=True)


def assumed(problem: Problem, plan: Plan, tables: CostTables) -> list[dict[str, Any]]:
    """The links that nobody gave: first those with which another plan would be faster, then those it rests on."""
    return [_assumed(assumption) for assumption in assumptions(problem, plan, tables, anew=True)]


def replanned(problem: Problem, plan: Plan, tables: CostTables, limit: Limit) -> dict[str, Any]:
    """What a limit would bring if the cluster with more of it were planned anew.

    A short search from the plan on the changed cluster, held against the same search on the cluster as it is, or the
    plan as it is where that gains more. The value tried is the suggested one, else `BOLD` times as good. Beside it what
    it brings to the plan as it is.
    """
    resource = limit.resource
    lower = resource.quality == "latency"
    bold = BOLD[resource.quality]
    value = limit.suggested or (resource.now / bold if lower else resource.now * bold)
    factor = resource.now / value if lower else value / resource.now
    text = Message("change.latency", a=resource.region, b=resource.other)
    change = WhatIf(text=text, cluster=resource.better(problem.cluster, factor))
    answer = sensitivities(problem, plan, tables=tables, changes=[change])
    [row] = answer.rows
    return resource.to_dict() | {"value": value, "same_plan": -row.same_plan, "would_save": -row.replanned}


def _assumed(assumption: Assumption) -> dict[str, Any]:
    link = assumption.link
    return {"name": assumption.name, "region": assumption.region, "other": assumption.other,
            "device": assumption.device, "slower": assumption.slower, "faster": assumption.faster,
            "anew": assumption.anew, "latency_ms": link.latency_s * 1e3, "bandwidth_gbps": link.bytes_per_s / GBPS,
    }  # fmt: skip


def _relaxed(problem: Problem, plan: Plan, tables: CostTables, times: StepTimes) -> Iterator[Limit]:
    """Every resource relaxed, after the pairs of regions all of them where one alone saves little; memory last, which
    takes another decoding."""
    best: dict[str, float] = {}
    every = list(resources(problem, plan, times))
    order = [it for it in _worth_asking(problem, plan, tables, times, every) if it.kind != "memory"]
    for resource in (*order, *_all_between(every), *(it for it in every if it.kind == "memory")):
        if resource.kind == "memory":
            saves = _with_memory(problem, plan, tables, times.step_s, resource)
        else:
            saves = 1 - _step_s(problem, plan, tables, resource, RELAXED) / times.step_s
        if resource.kind == "pair":
            best[resource.of_links] = max(saves, best.get(resource.of_links, 0.0))
        if resource.kind in BETWEEN and best.get(BETWEEN[resource.kind], 0.0) >= ALONE * saves:
            continue
        yield Limit(resource=resource, saves=saves)


def _together(
    problem: Problem, plan: Plan, tables: CostTables, step_s: float, asked: list[Limit]
) -> tuple[tuple[Resource, ...], float]:
    """What limits a step together and what 10 % more of all of it saves; nothing where the worst limit does alone.

    All are relaxed, and one after another is taken back, those first that save least alone, as long as `ENOUGH` of the
    gain is left. What stays is missed by all that was taken back; that it is the smallest such set is not proved.
    """
    ranked = [limit.resource for limit in sorted(asked, key=lambda limit: limit.saves)]
    at_once = {BETWEEN[resource.kind] for resource in ranked if resource.kind in BETWEEN}
    kept = [it for it in ranked if it.kind != "memory" and not (it.kind == "pair" and it.of_links in at_once)]
    alone = max((limit.saves for limit in asked), default=0.0)

    def saved(relaxed: list[Resource]) -> float:
        cluster = problem.cluster
        for resource in relaxed:
            cluster = resource.better(cluster, RELAXED)
        return float(1 - step_times(plan, tables.for_problem(replace(problem, cluster=cluster))).step_s / step_s)

    every = saved(kept) if len(kept) > 1 else 0.0
    if every < WORTH or alone >= ALONE * every:
        return (), 0.0
    for resource in tuple(kept):
        fewer = [it for it in kept if it is not resource]
        if saved(fewer) >= ENOUGH * every:
            kept = fewer
    return tuple(reversed(kept)), saved(kept)


def _worth_asking(
    problem: Problem, plan: Plan, tables: CostTables, times: StepTimes, every: list[Resource]
) -> Iterator[Resource]:
    """All resources; of many those whose sort saves something if all of it is relaxed at once: one alone saves no
    more."""
    sorts: dict[tuple[str, str], list[Resource]] = {}
    for resource in every:
        sorts.setdefault((resource.kind, resource.quality), []).append(resource)
    for (kind, _), members in sorts.items():
        if len(every) > MANY and len(members) > 1 and kind != "memory":
            cluster = problem.cluster
            for member in members:
                cluster = member.better(cluster, RELAXED)
            other = tables.for_problem(replace(problem, cluster=cluster))
            if 1 - step_times(plan, other).step_s / times.step_s <= LEAST:
                continue
        yield from members


def _step_s(problem: Problem, plan: Plan, tables: CostTables, resource: Resource, factor: float) -> float:
    """Step of the plan with so many times as much of a resource."""
    other = replace(problem, cluster=resource.better(problem.cluster, factor))
    far = resource.kind in FAR
    return float(step_times(plan, tables.with_other_links(other) if far else tables.for_problem(other)).step_s)


def _with_memory(problem: Problem, plan: Plan, tables: CostTables, step_s: float, resource: Resource) -> float:
    """What the same allocation saves with more memory, against itself decoded anew with what there is."""
    other = replace(problem, cluster=resource.better(problem.cluster, RELAXED))

    def decoded_s(problem: Problem, tables: CostTables) -> float:
        decoder = Decoder(problem, tables=tables)
        decoded = decoder.decode(allocation_of(decoder, plan))
        return float(decoder.step_times(decoded).step_s) if isinstance(decoded, Plan) else step_s

    with_more_s = decoded_s(other, tables.for_problem(other))
    if 1 - with_more_s / step_s <= LEAST:  # not named, however slow what there is would be decoded
        return 1 - with_more_s / step_s
    return (min(step_s, decoded_s(problem, tables)) - with_more_s) / step_s


def _suggestion(problem: Problem, plan: Plan, tables: CostTables, step_s: float, limit: Limit) -> Limit:
    """The limit with the smallest usual rate, or the least shortened latency, that brings most of the gain."""
    resource = limit.resource
    if resource.quality in ("rate", "capacity"):
        values = [rate for rate in LADDER_GBPS if rate >= RELAXED * resource.now]
        factors = [rate / resource.now for rate in values]
    elif resource.quality == "latency":
        factors = [2.0, 4.0]
        values = [resource.now / factor for factor in factors]
    else:
        return limit

    @cache
    def saved(i: int) -> float:
        return 1 - _step_s(problem, plan, tables, resource, factors[i]) / step_s

    if not values or saved(len(values) - 1) < WORTH:
        return limit
    at = bisect_left(range(len(values)), MOST * saved(len(values) - 1), key=saved)
    return replace(limit, suggested=values[at], would_save=saved(at))


# What there is to relax


def resources(problem: Problem, plan: Plan, times: StepTimes) -> Iterator[Resource]:
    """Everything that the plan uses."""
    cluster = problem.cluster
    used = worker_regions(plan, cluster)
    pools = {cluster.pools[worker.pool].index for stage in plan.stages for worker in stage.workers}
    for device in sorted({cluster.pools[p].device.name for p in pools}):
        yield Resource(kind="compute", quality="", device=device, now=1.0, better=_faster(device))
        gib = cluster.catalogue[device].memory_bytes / 2**30
        yield Resource(kind="memory", quality="", device=device, now=gib, better=_roomier(device))
    for r in sorted(used):
        yield from _inside(cluster, r, pools)
    sent, summed = traffic_bytes(problem, plan, times)
    yield from _between(cluster, sent + summed)


BETWEEN: dict[str, Quality] = {"between_rate": "rate", "between_latency": "latency"}
"""What is better of all links between regions."""


def _all_between(every: list[Resource]) -> Iterator[Resource]:
    """All links between regions as one resource, where the plan uses more than a few."""
    if sum(it.kind == "pair" and it.quality == "rate" for it in every) > FEW_PAIRS:
        for kind in ("between_rate", "between_latency"):
            yield Resource(kind=kind, quality="", now=1.0, better=_between_regions(BETWEEN[kind]))


def _between_regions(quality: Quality) -> Change:
    def change(cluster: Cluster, factor: float) -> Cluster:
        apart = ~np.eye(len(cluster.regions), dtype=bool)
        if quality == "latency":
            return replace(cluster, latency_s=np.where(apart, cluster.latency_s / factor, cluster.latency_s))
        rate, capacity = cluster.bytes_per_s, cluster.capacity_bytes_per_s
        return replace(cluster, bytes_per_s=np.where(apart, rate * factor, rate),
                       capacity_bytes_per_s=np.where(apart, capacity * factor, capacity))  # fmt: skip

    return change


def _faster(device: str) -> Change:
    def change(cluster: Cluster, factor: float) -> Cluster:
        return replace(cluster, catalogue={**cluster.catalogue, device: cluster.catalogue[device].at_speed(factor)})

    return change


def _roomier(device: str) -> Change:
    return lambda cluster, factor: more_memory(cluster, device, factor)


def _better_link(link: Link, quality: Quality, factor: float) -> Link:
    if quality == "rate":
        return replace(link, bytes_per_s=link.bytes_per_s * factor)
    return replace(link, latency_s=link.latency_s / factor)


def _inside(cluster: Cluster, r: int, pools: set[int]) -> Iterator[Resource]:
    """Links of a region: of its nodes, and between them."""
    region = cluster.regions[r]
    first = next(pool.index for pool in cluster.pools if pool.region == r)
    several = sum(group.nodes for group in region.node_groups) > 1
    for quality in ("rate", "latency"):
        for i, group in enumerate(region.node_groups):
            if first + i not in pools:
                continue
            fields = [("intra_node", group.devices_per_node > 1), ("inter_node", group.nodes > 1)]
            for field, there in fields:
                if not there or (field == "inter_node" and group.inter_node == region.intra_region):
                    continue  # the region's own network joins the nodes
                yield _resource(
                    cluster, r, field, quality, getattr(group, field), _node_link(r, i, field, quality), group=i
                )
        if several:
            link = region.intra_region
            yield _resource(cluster, r, "intra_region", quality, link, _region_link(r, quality))


def _resource(
    cluster: Cluster, r: int, kind: Any, quality: Any, link: Link, better: Change, *, group: int = 0
) -> Resource:
    """A link inside a region."""
    region = cluster.regions[r]
    name = f"{region.name}.intra_region" if kind == "intra_region" else f"{region.name}.nodes[{group}].{kind}"
    return Resource(
        kind=kind, quality=quality, region=region.name, group=group, better=better, default=name in cluster.defaults,
        device="" if kind == "intra_region" else region.node_groups[group].device,
        now=link.bytes_per_s / GBPS if quality == "rate" else link.latency_s * 1e3,
    )  # fmt: skip


def _with_groups(cluster: Cluster, r: int, change: Callable[[int, NodeGroup], NodeGroup], **more: Any) -> Cluster:
    region = cluster.regions[r]
    groups = tuple(change(i, group) for i, group in enumerate(region.node_groups))
    regions = list(cluster.regions)
    regions[r] = replace(region, node_groups=groups, **more)
    return replace(cluster, regions=tuple(regions))


def _node_link(r: int, index: int, field: str, quality: Quality) -> Change:
    def change(cluster: Cluster, factor: float) -> Cluster:
        def better(i: int, group: NodeGroup) -> NodeGroup:
            if i != index:
                return group
            link = _better_link(getattr(group, field), quality, factor)
            return replace(group, intra_node=link) if field == "intra_node" else replace(group, inter_node=link)

        return _with_groups(cluster, r, better)

    return change


def _region_link(r: int, quality: Quality) -> Change:
    def change(cluster: Cluster, factor: float) -> Cluster:
        old = cluster.regions[r].intra_region
        new = _better_link(old, quality, factor)

        def better(_: int, group: NodeGroup) -> NodeGroup:
            return replace(group, inter_node=new) if group.inter_node == old else group

        latency, rate = cluster.latency_s.copy(), cluster.bytes_per_s.copy()
        latency[r, r], rate[r, r] = new.latency_s, new.bytes_per_s
        return replace(_with_groups(cluster, r, better, intra_region=new), latency_s=latency, bytes_per_s=rate)

    return change


def _between(cluster: Cluster, traffic: np.ndarray) -> Iterator[Resource]:
    """Links between regions that carry something, those with most of it first, and what leaves a region."""
    names = [region.name for region in cluster.regions]
    both = np.triu(traffic + traffic.T, 1)
    pairs = [tuple(map(int, pair)) for pair in np.argwhere(both > 0)]
    for a, b in sorted(pairs, key=lambda pair: -both[pair])[:MOST_PAIRS]:
        where: dict[str, Any] = {"kind": "pair", "region": names[a], "other": names[b],
                                 "default": link_between(names[a], names[b]) in cluster.defaults}  # fmt: skip
        rate = min(cluster.bytes_per_s[a, b], cluster.bytes_per_s[b, a]) / GBPS
        yield Resource(**where, quality="rate", now=float(rate), better=_pair(a, b, "rate"))
        capacity = min(cluster.capacity_bytes_per_s[a, b], cluster.capacity_bytes_per_s[b, a]) / GBPS
        if np.isfinite(capacity):
            yield Resource(**where, quality="capacity", now=float(capacity), better=_pair(a, b, "capacity"))
        latency_ms = max(cluster.latency_s[a, b], cluster.latency_s[b, a]) * 1e3
        yield Resource(**where, quality="latency", now=float(latency_ms), better=_pair(a, b, "latency"))
    for r, region in enumerate(cluster.regions):
        if np.isfinite(region.egress_bytes_per_s) and traffic[r].sum() > 0:
            yield Resource(
                kind="egress", quality="capacity", region=region.name, now=region.egress_bytes_per_s / GBPS,
                better=_egress(r),
            )  # fmt: skip


def _pair(a: int, b: int, quality: Quality) -> Change:
    def change(cluster: Cluster, factor: float) -> Cluster:
        rate, latency = cluster.bytes_per_s.copy(), cluster.latency_s.copy()
        capacity = cluster.capacity_bytes_per_s.copy()
        for pair in ((a, b), (b, a)):
            if quality == "rate":
                rate[pair] *= factor
            elif quality == "capacity":
                capacity[pair] *= factor
            else:
                latency[pair] /= factor
        return replace(cluster, bytes_per_s=rate, latency_s=latency, capacity_bytes_per_s=capacity)

    return change


def _egress(r: int) -> Change:
    def change(cluster: Cluster, factor: float) -> Cluster:
        rate = cluster.regions[r].egress_bytes_per_s * factor
        return _with_groups(cluster, r, lambda _, group: group, egress_bytes_per_s=rate)

    return change
