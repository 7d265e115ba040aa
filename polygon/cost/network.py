"""What links deliver in practice: NCCL's regimes inside a node, network cards shared by groups between nodes."""

from __future__ import annotations

from polygon.domain.cluster import Link

INTRA_NODE_EFFICIENCY = 0.75
"""Bus bandwidth that an all-reduce over NVSwitch reaches of the link's: 193-227 of 300 GB/s on A100."""
INTRA_NODE_BASE_S, INTRA_NODE_STEP_S = 30e-6, 3e-6
"""Seconds of a small all-reduce: base, and more for every further member (45-77 µs for 2-8 A100)."""


def intra_node_all_reduce_s(n_bytes: float, members: int, link: Link) -> float:
    """Seconds of an all-reduce of `n_bytes` among devices of one node; 0 for one member."""
    if members < 2:
        return 0.0
    wire = 2 * (members - 1) / members * n_bytes / (link.bytes_per_s * INTRA_NODE_EFFICIENCY)
    return INTRA_NODE_BASE_S + members * max(INTRA_NODE_STEP_S, link.latency_s) + wire
