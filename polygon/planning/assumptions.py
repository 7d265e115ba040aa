"""What a plan's step rests on that nobody gave: links taken from defaults, by how much they matter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from polygon.cost.estimate import worker_regions
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, Region
from polygon.domain.plan import Plan, Problem

LEAST = 0.02
"""Part of the step that a default has to move to be spoken of."""
MOST_PRICED = 24
"""Defaults that are looked at: those of the regions with most of the plan's devices."""
FACTOR = 4.0
"""How far from the truth a default may well be: half of the common networks are within it."""
_NODE = re.compile(r"nodes\[(\d+)\]\.(intra_node|inter_node)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A link that nobody gave, and what the step would be with another."""

    name: str
    """As in `Cluster.defaults`."""
    link: Link
    slower: float
    """Part by which the step is longer with `FACTOR` times the latency at a rate as many times lower."""
    faster: float
    """Part by which it is shorter the other way."""

    @property
    def weight(self) -> float:
        """How much depends on it."""
        return max(self.slower, self.faster)


def assumptions(problem: Problem, plan: Plan, tables: CostTables, least: float = LEAST) -> list[Assumption]:
    """The defaults that move a plan's step by more than `least`, worst first. The plan stays as it is."""
    cluster, found = problem.cluster, []
    if not cluster.defaults:
        return []
    used = worker_regions(plan, cluster)
    step_s = step_times(plan, tables).step_s
    names = [name for name in cluster.defaults if _region_of(cluster, name) in used]
    names.sort(key=lambda name: -used[_region_of(cluster, name)])

    def step_with(name: str, factor: float) -> float:
        other = replace(problem, cluster=_scaled(cluster, name, factor))
        return step_times(plan, tables.for_problem(other)).step_s

    for name in names[:MOST_PRICED]:
        slower, faster = step_with(name, 1 / FACTOR) / step_s - 1, 1 - step_with(name, FACTOR) / step_s
        if max(slower, faster) > least:
            found.append(Assumption(name=name, link=default_link(cluster, name), slower=slower, faster=faster))
    return sorted(found, key=lambda assumption: -assumption.weight)


def _region_of(cluster: Cluster, name: str) -> int:
    for r, region in enumerate(cluster.regions):
        if name.startswith(f"{region.name}."):
            return r
    return -1


def default_link(cluster: Cluster, name: str) -> Link:
    """The link that a name of `Cluster.defaults` stands for."""
    region = cluster.regions[_region_of(cluster, name)]
    at = _NODE.search(name)
    if at is None:
        return region.intra_region
    link: Link = getattr(region.node_groups[int(at[1])], at[2])
    return link


def _scaled(cluster: Cluster, name: str, factor: float) -> Cluster:
    """The cluster with one default so many times faster."""

    def scaled(link: Link) -> Link:
        return Link(latency_s=link.latency_s / factor, bytes_per_s=link.bytes_per_s * factor)

    r, at = _region_of(cluster, name), _NODE.search(name)
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
