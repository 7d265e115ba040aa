"""Problems of equal nodes for tests of uniform splits, and what a split of them is predicted to cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polygon.cost.lanes import LaneEstimate, Lanes
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.domain.runtime import POLYGON, Runtime
from polygon.domain.uniform import ParallelConfig

FABRIC = Link(latency_s=2e-6, bytes_per_s=300e9)


def equal_nodes(
    model: Model,
    batch: Batch,
    device: Device,
    *,
    nodes: int,
    per_node: int = 8,
    inside: Link = FABRIC,
    between: Link,
    runtime: Runtime = POLYGON,
) -> Problem:
    """A model to train on some nodes of one kind in one region."""
    group = NodeGroup(device=device.name, nodes=nodes, devices_per_node=per_node, intra_node=inside, inter_node=between)
    none = np.zeros((1, 1))
    cluster = Cluster(
        name="equal nodes",
        regions=(Region(name="here", node_groups=(group,), intra_region=between),),
        latency_s=none,
        bytes_per_s=none,
        capacity_bytes_per_s=none + np.inf,
        catalogue={device.name: device},
    )
    return Problem(cluster=cluster, model=model, batch=batch, runtime=runtime)


def with_links(problem: Problem, *, inside: Link | None = None, between: Link | None = None) -> Problem:
    """The same problem with other links in a node, or between its nodes."""
    (region,) = problem.cluster.regions
    (group,) = region.node_groups
    group = replace(group, intra_node=inside or group.intra_node, inter_node=between or group.inter_node)
    region = replace(region, node_groups=(group,), intra_region=between or region.intra_region)
    return replace(problem, cluster=replace(problem.cluster, regions=(region,)))


def with_device(problem: Problem, device: Device) -> Problem:
    """The same problem with other figures of its device."""
    return replace(problem, cluster=replace(problem.cluster, catalogue={device.name: device}))


def lane(problem: Problem, config: ParallelConfig) -> LaneEstimate:
    """What a split is predicted to cost."""
    return Lanes(CostTables(problem)).estimate(config)


def held_bytes(problem: Problem, config: ParallelConfig) -> float:
    """Bytes on the device of a split that holds most."""
    return lane(problem, config).peak.total_bytes
