"""What links deliver in practice: NCCL's regimes inside a node, network cards shared by groups between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from polygon.domain.cluster import Link

REFERENCE_BYTES_PER_S = 300e9
"""Link rate of the device that the tables below were measured on (A100, NVLink 3, NVSwitch)."""

ALL_REDUCE_SIZES = (1e6, 16e6, 64e6, 256e6, 1e9)
ALL_REDUCE_NVSWITCH = {
    2: (23.25, 129.65, 166.1, 184.57, 196.89),
    3: (22.02, 147.95, 179.32, 200.36, 211.74),
    4: (29.82, 141.56, 186.2, 208.88, 221.37),
    5: (27.0, 136.82, 189.61, 210.94, 224.66),
    6: (23.72, 140.56, 199.62, 211.35, 226.89),
    7: (23.12, 126.2, 192.53, 210.14, 226.68),
    8: (19.91, 127.08, 202.61, 217.68, 229.25),
}
"""Bus bandwidth [GB/s] of NCCL's all-reduce by members and buffer size, 8 A100 on NVSwitch (vTrain's nccl-tests
look-up tables, VIA-Research/vTrain@f8dda847)."""

RING_STEP_S = 6.3e-6
"""Latency of one ring step between nodes: SimAI's measured efficiencies for 16 to 1024 ranks agree on 6.0-6.7 µs."""
FABRIC_EFFICIENCY = 0.75
"""What large messages reach of NVLink and NVSwitch: 193-227 of 300 GB/s on A100."""
CARD_EFFICIENCY = 0.93
"""What large messages reach of a network card (SimAI: 0.92-0.96)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that communicate: `members` of them, `per_node` on each node they touch.

    Every device of a node is taken to do the same in a group of its own, so a group's part of the node's network is
    ``per_node / devices_per_node``.
    """

    members: int
    per_node: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.members / self.per_node)


def one_node(members: int, link: Link) -> Group:
    """A group of devices of one node."""
    return Group(members=members, per_node=members, devices_per_node=members, intra_node=link, inter_node=link)


@lru_cache(maxsize=65536)
def intra_node_all_reduce_s(n_bytes: float, members: int, link: Link) -> float:
    """Seconds of an all-reduce of `n_bytes` among devices of one node; 0 for one member.

    Interpolates the measured table in the logarithm of the size; a link of another rate is taken to move a
    proportionally larger buffer in the same time.
    """
    if members < 2 or n_bytes <= 0:
        return 0.0
    rates = ALL_REDUCE_NVSWITCH[min(members, 8)]
    scaled = n_bytes * REFERENCE_BYTES_PER_S / link.bytes_per_s
    factor = 2 * (members - 1) / members
    if scaled <= ALL_REDUCE_SIZES[0]:
        floor_s = factor * ALL_REDUCE_SIZES[0] / (rates[0] * 1e9)
        return floor_s * (0.6 + 0.4 * scaled / ALL_REDUCE_SIZES[0]) + max(0.0, link.latency_s - 3e-6) * members
    x = math.log(scaled)
    rate = rates[-1]
    for (low, low_rate), (high, high_rate) in zip(
        zip(ALL_REDUCE_SIZES, rates, strict=True), zip(ALL_REDUCE_SIZES[1:], rates[1:], strict=False), strict=False
    ):
        if scaled < high:
            weight = (x - math.log(low)) / (math.log(high) - math.log(low))
            # Interpolate the time, not the rate: it is what must grow with the size.
            low_s, high_s = low / low_rate, high / high_rate
            rate = scaled / math.exp(math.log(low_s) * (1 - weight) + math.log(high_s) * weight)
            break
    return factor * scaled / (rate * 1e9) + max(0.0, link.latency_s - 3e-6) * members


def _wire_s(n_bytes: float, group: Group, passes: int) -> float:
    """Ring of `passes` times (members - 1) steps; bandwidth of the narrower of fabric and shared cards."""
    n, nodes = group.members, group.nodes
    card = group.inter_node.bytes_per_s * group.per_node / group.devices_per_node * CARD_EFFICIENCY
    rate = min(card, FABRIC_EFFICIENCY * group.intra_node.bytes_per_s) if group.per_node > 1 else card
    latency_s = passes * ((n - nodes) * RING_STEP_S + (nodes - 1) * (RING_STEP_S + group.inter_node.latency_s))
    if passes == 2:
        tree_s = (
            2 * math.ceil(math.log2(nodes)) * (RING_STEP_S * 3 + group.inter_node.latency_s)
            + 2 * (group.per_node - 1) * RING_STEP_S
        )
        latency_s = min(latency_s, tree_s + 0.1 * n_bytes / rate)
    return passes * (n - 1) / n * n_bytes / rate + latency_s


def all_reduce_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-reduce of a buffer of `n_bytes` on every member."""
    if group.members < 2 or n_bytes <= 0:
        return 0.0
    if group.nodes == 1:
        return intra_node_all_reduce_s(n_bytes, group.members, group.intra_node)
    return _wire_s(n_bytes, group, 2)


def gather_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-gather to (or reduce-scatter from) `n_bytes` on every member: half an all-reduce."""
    if group.members < 2 or n_bytes <= 0:
        return 0.0
    if group.nodes == 1:
        return 0.5 * intra_node_all_reduce_s(n_bytes, group.members, group.intra_node)
    return _wire_s(n_bytes, group, 1)


def all_to_all_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-to-all in which every member sends `n_bytes` in all (its own part included)."""
    n = group.members
    if n < 2 or n_bytes <= 0:
        return 0.0
    inside = (
        (group.per_node - 1) / n * n_bytes / (FABRIC_EFFICIENCY * group.intra_node.bytes_per_s) + (n - 1) * 2e-6 + 20e-6
    )
    if group.nodes == 1:
        return inside
    card = group.inter_node.bytes_per_s / group.devices_per_node * CARD_EFFICIENCY
    outside = (n - group.per_node) / n * n_bytes / card + (group.nodes - 1) * (RING_STEP_S + group.inter_node.latency_s)
    return max(inside, outside)


def send_s(n_bytes: float, group: Group) -> float:
    """Seconds of a message of `n_bytes` to a device of the next group, while its neighbours send as well."""
    if group.nodes == 1:
        return 10e-6 + group.intra_node.latency_s + n_bytes / (FABRIC_EFFICIENCY * group.intra_node.bytes_per_s)
    card = group.inter_node.bytes_per_s / group.devices_per_node * CARD_EFFICIENCY
    return 15e-6 + group.inter_node.latency_s + n_bytes / card
