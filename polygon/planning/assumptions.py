"""What a plan's step rests on that nobody gave: links taken from defaults, by how much they matter.

A default is judged in two ways. For the plan as it is: the step with the link so many times slower and faster. And by
planning anew: a plan made for a slow default avoids it and would gain nothing from a faster one, while another plan
might. Every default, in regions that the plan uses or not, is made faster in turn; where the fluid step time of simple
allocations gains most, short exact searches say by how much at least (`polygon.planning.what_ifs`), on small clusters
a whole search for the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.estimate import worker_regions
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, Region
from polygon.domain.errors import OutOfTimeError
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.planning.alternatives import SHORT
from polygon.planning.decode import Decoder, carried_over
from polygon.planning.nearby import allocation_of, best_starts, fresh_starts
from polygon.planning.search_engine import find_plan
from polygon.planning.what_ifs import Change, sensitivities

LEAST = 0.02
"""Part of the step that a default has to move to be spoken of."""
MOST_PRICED = 24
"""Defaults that are looked at: those of the regions with most of the plan's devices."""
MOST_SEARCHED = 256
"""Devices up to which the most promising default has a short search of its own."""
FACTOR = 4.0
"""How far from the truth a default may well be: half of the common networks are within it."""
MOST_ANEW = 2
"""Defaults for which plans are made anew: those from which simple allocations gain most."""
MOST_DEVICES = 2_000
"""Of a cluster for which plans are made anew: of more, each price takes too long."""
MOST_PROMISING = 100
"""Simple allocations by which one default alone is judged: the best with all of them faster."""
EVALUATIONS = 4
"""Exact evaluations of each short search, beside its starts."""
_NODE = re.compile(r"nodes\[(\d+)\]\.(intra_node|inter_node)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A link that nobody gave, and what the step would be with another."""

    name: str
    """As in `Cluster.defaults`."""
    region: str
    """Where it is; of a link between two regions the first."""
    device: str
    """Of the nodes inside which or between which it is; empty for the network of the region."""
    other: str = ""
    """The second region of a link between two."""
    link: Link
    slower: float
    """Part by which the step is longer with `FACTOR` times the latency at a rate as many times lower."""
    faster: float
    """Part by which it is shorter the other way."""
    anew: float | None = None
    """Part by which it is shorter the other way with another plan, at least; None where that was not tried."""

    @property
    def gain(self) -> float:
        """Part of the step that a faster link is known to save, with this plan or another."""
        return max(self.faster, self.anew or 0.0)


def assumptions(
    problem: Problem,
    plan: Plan,
    tables: CostTables,
    least: float = LEAST,
    *,
    anew: bool = False,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> list[Assumption]:
    """The defaults that move a step by more than `least`: those that hide most first, then those that it rests on most.

    Parameters
    ----------
    anew : bool
        Whether to plan anew as well, which takes short searches (not on more than `MOST_DEVICES`); else the plan stays
        as it is.
    seconds_left : callable
        Once this falls to 0 no more defaults are looked at; before planning anew has ended, the plan stays as it is.
    """
    cluster, found = problem.cluster, []
    if not cluster.defaults:
        return []
    anew = anew and cluster.devices <= MOST_DEVICES
    used = worker_regions(plan, cluster)
    step_s = step_times(plan, tables).step_s
    names = [name for name in cluster.defaults if set(_regions_of(cluster, name)) <= used.keys()]
    names.sort(key=lambda name: -min(used[r] for r in _regions_of(cluster, name)))

    def step_with(name: str, factor: float) -> float:
        other = replace(problem, cluster=_scaled(cluster, name, factor))
        return step_times(plan, tables.for_problem(other)).step_s

    longer: dict[str, float] = {}
    for name in names[:MOST_PRICED]:
        if seconds_left() <= 0:
            break
        longer[name] = step_with(name, 1 / FACTOR) / step_s - 1
    again: dict[str, float] = {}
    if anew:
        try:
            again = _planned_anew(problem, plan, tables, least, longer, seconds_left)
        except OutOfTimeError:
            anew = False
    for name in dict.fromkeys((*again, *longer)):
        if seconds_left() <= 0:
            break
        slower = longer[name] if name in longer else step_with(name, 1 / FACTOR) / step_s - 1
        faster = 1 - step_with(name, FACTOR) / step_s
        gained = again.get(name, 0.0) if anew else None
        if max(slower, faster, gained or 0.0) > least:
            (region, *other), at = [cluster.regions[r] for r in _regions_of(cluster, name)], _NODE.search(name)
            found.append(
                Assumption(
                    name=name, region=region.name, other=other[0].name if other else "",
                    device=region.node_groups[int(at[1])].device if at and not other else "",
                    link=default_link(cluster, name), slower=slower, faster=faster, anew=gained,
                )
            )  # fmt: skip
    return sorted(found, key=lambda it: (-it.gain if it.gain > least else 0.0, -it.slower))


def _planned_anew(
    problem: Problem,
    plan: Plan,
    tables: CostTables,
    least: float,
    slower: Mapping[str, float],
    seconds_left: Callable[[], float],
) -> dict[str, float]:
    """What another plan would save with a default so many times faster, for those that promise most.

    First all defaults are made faster at once: one alone gains from no allocation that does not gain then. Where no
    simple allocation gains, the default on which the plan rests most (the highest of `slower`) still has a search.

    Raises
    ------
    OutOfTimeError
        `seconds_left` fell to 0 before all that was done.
    """

    def go_on() -> None:
        if seconds_left() <= 0:
            raise OutOfTimeError

    def searched(of: Problem, tables: CostTables) -> float:
        found = find_plan(
            of, np.random.default_rng(0), effort=replace(SHORT, time_limit_s=seconds_left()), tables=tables
        )
        go_on()
        return found.value_s

    def decoder_with(*names: str) -> Decoder:
        cluster = problem.cluster
        for name in names:
            cluster = _scaled(cluster, name, FACTOR)
        other = replace(problem, cluster=cluster)
        return Decoder(other, tables=tables.for_problem(other))

    go_on()
    now = Decoder(problem, tables=tables)
    if not now.classes:
        return {}
    # Without the plan's own allocation, which a search has fitted to the defaults: any that gains may lead to a plan.
    starts = fresh_starts(now, carried_over(allocation_of(now, plan), now, now))[1:]
    enough_s = (1 - least) * min((now.fluid_s(x)[0] for x in starts), default=0.0)
    with_all = decoder_with(*problem.cluster.defaults)
    starts = [x for x in best_starts(with_all, starts, MOST_PROMISING) if with_all.fluid_s(x)[0] < enough_s]
    promising = []
    for name in problem.cluster.defaults if starts else ():
        go_on()
        other = decoder_with(name)
        step_s = min(other.fluid_s(x)[0] for x in starts)
        if step_s < enough_s:
            promising.append((step_s, name, other.problem.cluster))
    promising.sort(key=lambda entry: entry[0])
    changes = [
        Change(text=Message("change.assumed", name=name, factor=FACTOR), cluster=cluster)
        for _, name, cluster in promising[:MOST_ANEW]
    ]
    resting = max(slower, key=lambda name: slower[name], default="")
    if not changes and slower.get(resting, 0.0) > least and problem.cluster.devices <= MOST_SEARCHED:
        promising.append((math.inf, resting, _scaled(problem.cluster, resting, FACTOR)))
    if not promising:
        return {}
    go_on()
    answers = sensitivities(
        problem, plan, tables=tables, changes=changes, evaluations=EVALUATIONS, seconds_left=seconds_left
    )
    go_on()
    base_s = answers.baseline_s
    if base_s < step_times(plan, tables).step_s * (1 - least):
        # A plan for least money, say: what another saves on the cluster as it is, is not the link's.
        base_s = min(base_s, searched(problem, tables))
    gains = {row.text["name"]: 1 - row.step_s / base_s for row in answers.rows}
    if problem.cluster.devices <= MOST_SEARCHED:
        # What simple starts lead to may be no better than a plan that a search has found.
        _, name, cluster = promising[0]
        richer = replace(problem, cluster=cluster)
        gains[name] = max(gains.get(name, 0.0), 1 - searched(richer, tables.for_problem(richer)) / base_s)
    return {name: gain for name, gain in gains.items() if gain > least}


def _regions_of(cluster: Cluster, name: str) -> tuple[int, ...]:
    """The region that a default is of, or the two that it joins; of a name that says nothing here, none that is."""
    if name in cluster.default_pairs:
        return cluster.default_pairs[name]
    for r, region in enumerate(cluster.regions):
        if name.startswith(f"{region.name}."):
            return (r,)
    return (-1,)


def default_link(cluster: Cluster, name: str) -> Link:
    """The link that a name of `Cluster.defaults` stands for."""
    if name in cluster.default_pairs:
        pair = cluster.default_pairs[name]
        return Link(latency_s=float(cluster.latency_s[pair]), bytes_per_s=float(cluster.bytes_per_s[pair]))
    [r], at = _regions_of(cluster, name), _NODE.search(name)
    region = cluster.regions[r]
    if at is None:
        return region.intra_region
    link: Link = getattr(region.node_groups[int(at[1])], at[2])
    return link


def _scaled(cluster: Cluster, name: str, factor: float) -> Cluster:
    """The cluster with one default so many times faster."""

    def scaled(link: Link) -> Link:
        return replace(link, latency_s=link.latency_s / factor, bytes_per_s=link.bytes_per_s * factor)

    if name in cluster.default_pairs:
        latency_s, bytes_per_s = cluster.latency_s.copy(), cluster.bytes_per_s.copy()
        a, b = cluster.default_pairs[name]
        for pair in ((a, b), (b, a)):
            latency_s[pair], bytes_per_s[pair] = latency_s[pair] / factor, bytes_per_s[pair] * factor
        return replace(cluster, latency_s=latency_s, bytes_per_s=bytes_per_s)
    [r], at = _regions_of(cluster, name), _NODE.search(name)
    old = cluster.regions[r]
    if at is None:
        groups = tuple(
            replace(group, inter_node=scaled(group.inter_node)) if group.inter_node == old.intra_region else group
            for group in old.node_groups
        )
        region = replace(old, intra_region=scaled(old.intra_region), node_groups=groups)
    else:
        region = _with_node_link(old, int(at[1]), at[2], scaled)
    return replace(cluster, regions=(*cluster.regions[:r], region, *cluster.regions[r + 1 :]))


def _with_node_link(region: Region, index: int, field: str, scaled: Callable[[Link], Link]) -> Region:
    group = region.node_groups[index]
    link = scaled(getattr(group, field))
    changed = replace(group, intra_node=link) if field == "intra_node" else replace(group, inter_node=link)
    return replace(region, node_groups=(*region.node_groups[:index], changed, *region.node_groups[index + 1 :]))
