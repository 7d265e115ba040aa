"""Clusters of a few linked regions and a small model, for tests of the planner."""

from __future__ import annotations

import numpy as np

from polygon.domain.cluster import Cluster, Link, NodeGroup, Region
from polygon.domain.model import Model
from polygon.formats import catalogue

TYPES = ("a100-40gb", "t4", "v100-16gb")


def small_gpt(**changes) -> Model:
    """A GPT of 6 blocks, 1024 wide."""
    fields = {
        "name": "small", "blocks": 6, "hidden_size": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64,
        "ffn_size": 4096, "vocab_size": 32000, "max_seq_len": 1024,
    }  # fmt: skip
    return Model(**(fields | changes))


def cluster_of(
    groups,
    *,
    latency_s=0.02,
    bytes_per_s=1e8,
    capacity=np.inf,
    node_bytes_per_s=1e10,
    inside=None,
    between=None,
    egress_usd_per_gb=0.0,
) -> Cluster:
    """Regions r0, r1, ... given as lists of (type, nodes, devices per node).

    `latency_s` and `bytes_per_s` of the links between regions are numbers or matrices, `inside` and `between` links in
    a node and between a region's nodes (by default `node_bytes_per_s` and a tenth of it).
    """
    inside = inside or Link(latency_s=5e-6, bytes_per_s=node_bytes_per_s)
    between = between or Link(latency_s=5e-5, bytes_per_s=node_bytes_per_s / 10)
    regions = tuple(
        Region(
            name=f"r{r}",
            intra_region=between,
            egress_usd_per_gb=egress_usd_per_gb,
            node_groups=tuple(
                NodeGroup(device=name, nodes=n, devices_per_node=d, intra_node=inside, inter_node=between)
                for name, n, d in members
            ),
        )
        for r, members in enumerate(groups)
    )
    n = len(regions)
    return Cluster(
        name="test",
        regions=regions,
        latency_s=np.array(np.broadcast_to(latency_s, (n, n)), dtype=float),
        bytes_per_s=np.array(np.broadcast_to(bytes_per_s, (n, n)), dtype=float),
        capacity_bytes_per_s=np.full((n, n), capacity),
        catalogue={name: catalogue.device(name) for name in {*TYPES, *(of[0] for members in groups for of in members)}},
    )
