"""What a change of the cluster would bring: sensitivities of a plan by finite differences.

Every change is answered twice. *Same plan*: the plan as it is, on the changed cluster (devices that it does not know
stay idle). *Replanned*: a short exact search from the plan and the best simple allocations on the changed cluster,
against the same search on the cluster as it is, so that what the search alone finds is not put down to the change; or
the plan as it is, where the change brings more to that. A longer search may find more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.convergence import allowed, at_parity
from polygon.cost.money import Bill, traffic_bytes
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster
from polygon.domain.errors import require
from polygon.domain.message import Message
from polygon.domain.plan import PARITY_LEVELS, Plan, Problem
from polygon.planning.decode import Allocation, Decoder, carried_over
from polygon.planning.nearby import allocation_of, best_starts, fresh_starts, search_around
from polygon.planning.objectives import MEASURES, STEP_TIME, Objective

GBPS = 1e9 / 8
AFRESH = 2
"""Simple allocations that a short search begins with beside the plan's: a change may call for quite another plan."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """A changed cluster or tolerance."""

    text: Message
    cluster: Cluster
    parity: str | None = None
    """Level of parity in place of the problem's (`polygon.cost.convergence`)."""
    new_pool: int | None = None
    """Pool that has a node more."""
    keeps_devices: bool = True
    """Whether device numbers mean the same as before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivity:
    """What a change brings; parts are of the step time, or of what else the plan was made for, negative is better."""

    text: Message
    same_plan: float
    replanned: float
    """At least as much better as the same plan."""
    step_s: float
    """Of the best plan that is known with the change."""
    usd_per_hour: float
    """By how much an hour of training at the old speed would cost less (> 0) or more with the change, replanned."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivities:
    """All that were asked for and time allowed."""

    rows: tuple[Sensitivity, ...]
    baseline_s: float
    """Step after the short search on the cluster as it is."""
    baseline: float
    """The same plan in what was searched for: seconds, dollars or joules."""
    left_out: int
    """Changes for which there was no time."""


def faster_link(cluster: Cluster, a: int, b: int, more_bytes_per_s: float) -> Cluster:
    """The cluster with more bandwidth between two regions, both ways (and as much more shared capacity)."""
    rate, capacity = cluster.bytes_per_s.copy(), cluster.capacity_bytes_per_s.copy()
    for pair in ((a, b), (b, a)):
        rate[pair] += more_bytes_per_s
        capacity[pair] += more_bytes_per_s
    return replace(cluster, bytes_per_s=rate, capacity_bytes_per_s=capacity)


def nearer_link(cluster: Cluster, a: int, b: int, factor: float) -> Cluster:
    """The cluster with the latency between two regions times a factor, both ways."""
    latency = cluster.latency_s.copy()
    latency[a, b] *= factor
    latency[b, a] *= factor
    return replace(cluster, latency_s=latency)


def one_more_node(cluster: Cluster, pool: int) -> Cluster:
    """The cluster with one node more in a pool."""
    place = cluster.pools[pool]
    first = next(p.index for p in cluster.pools if p.region == place.region)
    region = cluster.regions[place.region]
    groups = list(region.node_groups)
    groups[pool - first] = replace(groups[pool - first], nodes=groups[pool - first].nodes + 1)
    regions = list(cluster.regions)
    regions[place.region] = replace(region, node_groups=tuple(groups))
    return replace(cluster, regions=tuple(regions))


def more_memory(cluster: Cluster, device: str, factor: float) -> Cluster:
    """The cluster whose devices of one type have `factor` times the memory."""
    changed = replace(cluster.catalogue[device], memory_bytes=cluster.catalogue[device].memory_bytes * factor)
    return replace(cluster, catalogue={**cluster.catalogue, device: changed})


def link_changes(cluster: Cluster, pairs: Iterable[Sequence[str]], more_gbps: float) -> list[Change]:
    """More bandwidth and half the latency for each pair of region names.

    Raises
    ------
    InputError
        For a region that does not exist, and for two that have no link.
    """
    changes = []
    for first, second in pairs:
        a, b = cluster.region_index(first), cluster.region_index(second)
        require(a != b, "link", first, "two different regions")
        require(
            cluster.connected(a, b),
            "link",
            Message("found.pair", a=first, b=second),
            "two regions with a link between them",
        )
        wider = Message("change.bandwidth", more_gbps=more_gbps, a=first, b=second)
        changes.append(Change(text=wider, cluster=faster_link(cluster, a, b, more_gbps * GBPS)))
        nearer = Message("change.latency", a=first, b=second)
        changes.append(Change(text=nearer, cluster=nearer_link(cluster, a, b, 0.5)))
    return changes


def usual_changes(problem: Problem, traffic: np.ndarray, *, more_gbps: float = 1.0, links: int = 6) -> list[Change]:
    """Changes worth asking about: links (those that carry most first), a node more of each kind, twice the memory.

    Parameters
    ----------
    traffic : ndarray, shape (regions, regions)
        Bytes per step of the plan from region to region.
    links : int
        Most pairs of regions; at least one of them is unused if there is one.
    """
    cluster = problem.cluster
    names = [region.name for region in cluster.regions]
    n = len(names)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if cluster.connected(a, b)]
    both = traffic + traffic.T
    pairs.sort(key=lambda pair: -both[pair])
    used = [pair for pair in pairs if both[pair] > 0]
    unused = [pair for pair in pairs if both[pair] == 0]
    chosen = used[: links - min(1, len(unused))] + unused[:1]
    changes = link_changes(cluster, [(names[a], names[b]) for a, b in chosen], more_gbps)
    kinds: dict[tuple[str, int], int] = {}
    for pool in cluster.pools:
        if problem.may_use(pool):
            kinds.setdefault((pool.device.name, pool.region), pool.index)
    for (device, region), pool_index in list(kinds.items())[:8]:
        count = cluster.pools[pool_index].devices_per_node
        text = Message("change.device", device=device, region=names[region])
        if count > 1:
            text = Message("change.node", count=count, device=device, region=names[region])
        grown = one_more_node(cluster, pool_index)
        changes.append(Change(text=text, cluster=grown, new_pool=pool_index, keeps_devices=False))
    for device in sorted({device for device, _ in kinds}):
        changes.append(Change(text=Message("change.memory", device=device), cluster=more_memory(cluster, device, 2.0)))
    for level in PARITY_LEVELS[PARITY_LEVELS.index(problem.constraints.parity) + 1 :]:
        if n > 1 and allowed(problem, level) != allowed(problem):
            changes.append(Change(text=Message("change.parity", level=level), cluster=cluster, parity=level))
    return changes


def sensitivities(
    problem: Problem,
    plan: Plan,
    *,
    tables: CostTables | None = None,
    changes: list[Change] | None = None,
    objective: Objective = STEP_TIME,
    more_gbps: float = 1.0,
    evaluations: int = 10,
    seed: int = 0,
    seconds_left: Callable[[], float] = lambda: math.inf,
    tell: Callable[[Message, float], None] = lambda change, part: None,
) -> Sensitivities:
    """What each change brings to a plan.

    Parameters
    ----------
    changes : list of Change, optional
        By default `usual_changes` with `more_gbps`.
    objective : Objective, optional
        What the plan was made for: what is searched for, and of which the parts are.
    evaluations : int
        Exact evaluations of each short search.
    """
    tables = tables or CostTables(problem)
    measure = MEASURES[objective.name]
    if changes is None:
        moved, reduced = traffic_bytes(problem, plan, step_times(plan, tables))
        changes = usual_changes(problem, moved + reduced, more_gbps=more_gbps)
    decoder = Decoder(problem, tables=tables, objective=measure)
    own = allocation_of(decoder, plan)
    plain = carried_over(own, decoder, decoder)
    afresh = best_starts(decoder, fresh_starts(decoder, plain), AFRESH)
    base = search_around(decoder, [plain, *afresh], evaluations=evaluations, seed=seed)
    start = base.allocation or own
    known = [plan, *([base.plan] if base.plan else [])]
    known_bills = [decoder.bill(x) for x in known]
    base_bill = _best(known_bills, measure)
    rows: list[Sensitivity] = []
    for i, change in enumerate(changes):
        if seconds_left() <= 0:
            break
        tell(change.text, i / len(changes))
        changed = replace(problem, cluster=change.cluster)
        if change.parity is not None:
            changed = at_parity(changed, change.parity)
        other = Decoder(changed, tables=tables.for_problem(changed), objective=measure)
        kept = [other.bill(x) for x in known] if change.keeps_devices else []
        same = _part(kept[0], known_bills[0], measure) if kept else 0.0
        starts = [carried_over(x, decoder, other) for x in {id(x): x for x in (start, own)}.values()]
        starts += _employed(other, starts[0], change)
        starts += best_starts(other, fresh_starts(other, starts[0]), AFRESH)
        found = search_around(other, starts, evaluations=evaluations, seed=seed)
        bill = _best([base_bill, *kept, *([found.bill] if found.bill else [])], measure)
        before, after = base_bill, bill
        if kept and same < _part(bill, base_bill, measure):
            before, after = known_bills[0], kept[0]
        rows.append(
            Sensitivity(
                text=change.text,
                same_plan=same,
                replanned=_part(after, before, measure),
                step_s=bill.step_s,
                usd_per_hour=_saved(before, after),
            )
        )
    return Sensitivities(
        rows=tuple(rows),
        baseline_s=base_bill.step_s,
        baseline=measure.value(base_bill),
        left_out=len(changes) - len(rows),
    )


def _best(bills: Sequence[Bill], measure: Objective) -> Bill:
    return min(bills, key=measure.value)


def _part(after: Bill, before: Bill, measure: Objective) -> float:
    """How much more of a measure the one has, as a part of the other; 0 where that has none."""
    return measure.value(after) / measure.value(before) - 1 if measure.value(before) else 0.0


def _saved(before: Bill, after: Bill) -> float:
    """Dollars per hour of the old speed that the same work costs less."""
    return (before.usd - after.usd) / before.step_s * 3600


def _employed(decoder: Decoder, allocation: Allocation, change: Change) -> Iterator[Allocation]:
    """The allocation with the new node's workers in each of the stages, the best three by the fluid step time."""
    if change.new_pool is None:
        return
    grown = []
    for c, (pool, tp) in enumerate(decoder.classes):
        if pool == change.new_pool:
            for s in np.flatnonzero(allocation.workers.any(axis=1)):
                workers = allocation.workers.copy()
                workers[s, c] += decoder.problem.cluster.pools[pool].devices_per_node // tp
                grown.append(replace(allocation, workers=workers))
    yield from sorted(grown, key=lambda x: decoder.fluid_s(x)[0])[:3]
