"""What links deliver in practice: NCCL's regimes inside a node, network cards shared by groups between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from polygon.cost.kernels import architecture_of
from polygon.domain.cluster import Device, Link
from polygon.kernel_options import kernel

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
ALL_REDUCE_MESH = {
    2: (15.01, 21.97, 22.38, 22.54, 22.55),
    3: (19.05, 43.16, 44.63, 45.07, 45.13),
    4: (23.91, 77.39, 83.76, 85.29, 85.34),
    5: (18.11, 35.36, 36.41, 36.88, 37.19),
    6: (17.78, 43.95, 45.26, 45.62, 45.75),
    7: (22.14, 78.44, 84.57, 86.13, 86.96),
    8: (23.34, 107.26, 128.74, 133.11, 134.38),
}
"""The same for up to eight V100 in the hybrid mesh of a DGX-1: not monotone in the members, topology decides."""
MESH_BYTES_PER_S = 150e9
"""Rate of the NVLink of that generation."""

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
    mesh: bool = False
    """Whether the devices of a node are joined pair by pair (V100 in a DGX-1) and not by a switch."""

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.members / self.per_node)

    @property
    def numbers(self) -> tuple[int, int, int, float, float, float, float, bool]:
        """What `ring_kernel` takes of the group."""
        intra, inter = self.intra_node, self.inter_node
        return (
            self.members,
            self.per_node,
            self.devices_per_node,
            intra.bytes_per_s,
            intra.latency_s,
            inter.bytes_per_s,
            inter.latency_s,
            self.mesh,
        )


def one_node(members: int, link: Link, *, mesh: bool = False) -> Group:
    """A group of devices of one node."""
    return Group(
        members=members, per_node=members, devices_per_node=members, intra_node=link, inter_node=link, mesh=mesh
    )


def joined_in_a_mesh(device: Device, devices_per_node: int) -> bool:
    """Whether a node of such devices is a mesh: V100 up to eight; sixteen of them (DGX-2), and all later ones, have a
    switch."""
    return architecture_of(device) == "volta" and devices_per_node <= 8


_SIZES = np.array(ALL_REDUCE_SIZES)
_RATES = np.array([ALL_REDUCE_NVSWITCH[max(n, 2)] for n in range(9)])
_MESH = np.array([ALL_REDUCE_MESH[max(n, 2)] for n in range(9)])


@kernel
def intra_kernel(n_bytes: float, members: int, bytes_per_s: float, latency_s: float, mesh: bool) -> float:
    """See `intra_node_all_reduce_s`."""
    if members < 2 or n_bytes <= 0:
        return 0.0
    rates, reference = _RATES[min(members, 8)], REFERENCE_BYTES_PER_S
    if mesh:
        rates, reference = _MESH[min(members, 8)], MESH_BYTES_PER_S
    scaled = n_bytes * reference / bytes_per_s
    factor = 2 * (members - 1) / members
    slow_link_s = max(0.0, latency_s - 3e-6) * members
    if scaled <= _SIZES[0]:
        return factor * _SIZES[0] / (rates[0] * 1e9) * (0.6 + 0.4 * scaled / _SIZES[0]) + slow_link_s
    rate = rates[-1]
    for i in range(len(_SIZES) - 1):
        if scaled < _SIZES[i + 1]:
            weight = math.log(scaled / _SIZES[i]) / math.log(_SIZES[i + 1] / _SIZES[i])
            # Interpolate the time, not the rate: it is what must grow with the size.
            low_s, high_s = _SIZES[i] / rates[i], _SIZES[i + 1] / rates[i + 1]
            rate = scaled / math.exp(math.log(low_s) * (1 - weight) + math.log(high_s) * weight)
            break
    return factor * scaled / (rate * 1e9) + slow_link_s


@kernel
def ring_kernel(
    n_bytes: float,
    members: int,
    per_node: int,
    devices_per_node: int,
    fabric_bytes_per_s: float,
    fabric_latency_s: float,
    node_bytes_per_s: float,
    node_latency_s: float,
    mesh: bool,
    passes: int,
) -> float:
    """All-reduce (2 passes), all-gather or reduce-scatter (1 pass) inside a node or over several.

    Over several nodes: a ring at the rate of the narrower of fabric and shared cards; an all-reduce whose latency a
    tree would shorten takes the tree.
    """
    if members < 2 or n_bytes <= 0:
        return 0.0
    nodes = -(-members // per_node)
    if nodes == 1:
        return passes / 2 * intra_kernel(n_bytes, members, fabric_bytes_per_s, fabric_latency_s, mesh)
    rate = node_bytes_per_s * per_node / devices_per_node * CARD_EFFICIENCY
    if per_node > 1:
        rate = min(rate, FABRIC_EFFICIENCY * fabric_bytes_per_s)
    latency_s = passes * ((members - nodes) * RING_STEP_S + (nodes - 1) * (RING_STEP_S + node_latency_s))
    if passes == 2:
        tree_s = 2 * math.ceil(math.log2(nodes)) * (RING_STEP_S * 3 + node_latency_s)
        tree_s += 2 * (per_node - 1) * RING_STEP_S
        latency_s = min(latency_s, tree_s + 0.1 * n_bytes / rate)
    return passes * (members - 1) / members * n_bytes / rate + latency_s


def intra_node_all_reduce_s(n_bytes: float, members: int, link: Link, *, mesh: bool = False) -> float:
    """Seconds of an all-reduce of `n_bytes` among devices of one node; 0 for one member.

    Interpolates the measured table in the logarithm of the size; a link of another rate is taken to move a
    proportionally larger buffer in the same time.
    """
    return intra_kernel(n_bytes, members, link.bytes_per_s, link.latency_s, mesh)


def all_reduce_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-reduce of a buffer of `n_bytes` on every member."""
    return ring_kernel(n_bytes, *group.numbers, 2)


def gather_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-gather to (or reduce-scatter from) `n_bytes` on every member: half an all-reduce."""
    return ring_kernel(n_bytes, *group.numbers, 1)


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
