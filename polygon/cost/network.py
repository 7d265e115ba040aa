"""What links deliver in practice: NCCL's regimes inside a node, network cards shared by groups between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.kernels import architecture_of
from polygon.domain.cluster import Device, Link, Pool
from polygon.jit.compilation import kernel

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
SWITCH, MESH, PCIE = 0, 1, 2
"""How the devices of a node are joined."""
PCIE_MOST_BYTES_PER_S = 64e9
"""Rate of PCIe 5 x16: what is no faster is taken for it."""
PCIE_RING, PCIE_STAGING = 0.53, 0.457
"""An all-reduce of n bytes among k boards without peer-to-peer copies takes 2 (k - 1) / k n / (0.53 R) + n / (0.457 R)
at rate R of PCIe. Tensor-parallel sums in Sailor's profiles of RTX 2080 and Titan RTX (a block on k devices less a k-th
of the block on one), 64 of them among 2, 4 and 8 members, 8 to 537 MB, have a bus bandwidth of 0.24, 0.29 and 0.31 R,
on both boards alike. nccl-tests alone on a machine show 0.43 to 0.57 (V100-PCIe, RTX 4090 and 5090; NVIDIA/nccl and
NVIDIA/nccl-tests issues, 2019 to 2025); behind one shared uplink it is a quarter and less (RTX 3090 in the profiles:
0.15 among 4, 0.05 among 8)."""
PCIE_LONG_RING = 1 / (1 / PCIE_RING + 0.5 / PCIE_STAGING)
"""The same of many members, of which some are on other nodes."""
PCIE_MEMBER_S = 5e-6
"""Latency of a small all-reduce per member (the same tables: 9-12 us for two, 18-21 for four, 38-44 for eight)."""

RING_STEP_S = 6.3e-6
"""Latency of one ring step between nodes: SimAI's measured efficiencies for 16 to 1024 ranks agree on 6.0-6.7 µs."""
FABRIC_EFFICIENCY = 0.75
"""What large messages reach of NVLink and NVSwitch: 193-227 of 300 GB/s on A100."""
CARD_EFFICIENCY = 0.93
"""What large messages reach of a network card (SimAI: 0.92-0.96)."""


def socket_share(bytes_per_s: np.ndarray) -> np.ndarray:
    """What NCCL reaches of a link through TCP sockets: 0.9 (10 Gbit/s over the rate)^0.3, 0.9 below.

    About 0.9 of 10 Gbit/s, 0.46 to 0.7 of 32 with eight devices a node, 0.54 of 25 with four, 0.32 to 0.48 of 100
    (nccl-tests in NVIDIA/nccl issues 209, 398 and 450, nccl-tests issue 83, google/nccl-fastsocket issue 2); nothing
    was found for 40 and 50, nor for more than four nodes.
    """
    found: np.ndarray = 0.9 * np.minimum(1.0, (10e9 / 8 / np.maximum(bytes_per_s, 1.0)) ** 0.3)
    return found


NEAR_MESSAGE_S, FAR_MESSAGE_S = 10e-6, 15e-6
"""Seconds that a message between two devices takes beside the link's: on one node, and on two."""


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
    fabric: int = SWITCH
    """How the devices of a node are joined."""

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.members / self.per_node)

    @property
    def numbers(self) -> tuple[int, int, int, float, float, float, float, int]:
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
            self.fabric,
        )


def one_node(members: int, link: Link, *, fabric: int = SWITCH) -> Group:
    """A group of devices of one node."""
    return Group(
        members=members, per_node=members, devices_per_node=members, intra_node=link, inter_node=link, fabric=fabric
    )


def fabric_of(device: Device, devices_per_node: int, link: Link) -> int:
    """How the devices of a node are joined: through PCIe, as a mesh or by a switch.

    V100 are joined pair by pair up to eight (DGX-1); sixteen of them (DGX-2), and all later ones, have a switch.
    """
    if link.bytes_per_s <= PCIE_MOST_BYTES_PER_S:
        return PCIE
    return MESH if architecture_of(device) == "volta" and devices_per_node <= 8 else SWITCH


def shared_link(pool: Pool, tp: int, members: int) -> Link:
    """What one device gets inside a group of `members` that lie `tp` apart: the fabric, or its part of the cards."""
    if tp * members <= pool.devices_per_node:
        return pool.intra_node
    rate = pool.inter_node.bytes_per_s / pool.devices_per_node
    return replace(pool.inter_node, bytes_per_s=rate)


def group_of(pool: Pool, members: int, per_node: int) -> Group:
    """A group of devices of the pool, at most `per_node` of them on a node."""
    return Group(
        members=members,
        per_node=max(1, min(members, per_node, pool.devices_per_node)),
        devices_per_node=pool.devices_per_node,
        intra_node=pool.intra_node,
        inter_node=pool.inter_node,
        fabric=fabric_of(pool.device, pool.devices_per_node, pool.intra_node),
    )


_SIZES = np.array(ALL_REDUCE_SIZES)
_RATES = np.array([ALL_REDUCE_NVSWITCH[max(n, 2)] for n in range(9)])
_MESH = np.array([ALL_REDUCE_MESH[max(n, 2)] for n in range(9)])
_LOG_SIZES, _LOG_S, _LOG_MESH_S = np.log(_SIZES), np.log(_SIZES / _RATES), np.log(_SIZES / _MESH)


@kernel
def intra_kernel(n_bytes: float, members: int, bytes_per_s: float, latency_s: float, fabric: int) -> float:
    """See `intra_node_all_reduce_s`."""
    if members < 2 or n_bytes <= 0:
        return 0.0
    if fabric == PCIE:
        # Without peer-to-peer copies all goes through the host's memory: around the ring, and once to be staged there.
        passes = 2 * (members - 1) / members / PCIE_RING + 1 / PCIE_STAGING
        return passes * n_bytes / bytes_per_s + members * (PCIE_MEMBER_S + latency_s)
    rates, log_s, reference = _RATES[min(members, 8)], _LOG_S[min(members, 8)], REFERENCE_BYTES_PER_S
    if fabric == MESH:
        rates, log_s, reference = _MESH[min(members, 8)], _LOG_MESH_S[min(members, 8)], MESH_BYTES_PER_S
    scaled = n_bytes * reference / bytes_per_s
    # From bus bandwidth to time: every link of a ring carries so much of the buffer (nccl-tests, PERFORMANCE.md).
    factor = 2 * (members - 1) / members
    # NVLink's own 3 us are in the tables: what a link takes beyond them, it takes for every member.
    slow_link_s = max(0.0, latency_s - 3e-6) * members
    # Up to 1 MB latency rules: 0.6 of what that takes is left however little is sent.
    if scaled <= _SIZES[0]:
        return float(factor * _SIZES[0] / (rates[0] * 1e9) * (0.6 + 0.4 * scaled / _SIZES[0]) + slow_link_s)
    rate = rates[-1]
    for i in range(len(_SIZES) - 1):
        if scaled < _SIZES[i + 1]:
            weight = (math.log(scaled) - _LOG_SIZES[i]) / (_LOG_SIZES[i + 1] - _LOG_SIZES[i])
            # Interpolate the time, not the rate: it is what must grow with the size.
            rate = scaled / math.exp(log_s[i] * (1 - weight) + log_s[i + 1] * weight)
            break
    return float(factor * scaled / (rate * 1e9) + slow_link_s)


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
    fabric: int,
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
        # To gather, or to scatter, is one of an all-reduce's two passes.
        return passes / 2 * intra_kernel(n_bytes, members, fabric_bytes_per_s, fabric_latency_s, fabric)
    # Groups side by side on a node share its cards by their devices.
    rate = node_bytes_per_s * per_node / devices_per_node * CARD_EFFICIENCY
    if per_node > 1:
        rate = min(rate, (PCIE_LONG_RING if fabric == PCIE else FABRIC_EFFICIENCY) * fabric_bytes_per_s)
    # A pass takes k - 1 steps, of which those from node to node wait for the network, too.
    latency_s = passes * ((members - nodes) * RING_STEP_S + (nodes - 1) * (RING_STEP_S + node_latency_s))
    if passes == 2:
        # A tree over the nodes, up and down, and a chain inside them; it moves large buffers a tenth slower.
        tree_s = 2 * math.ceil(math.log2(nodes)) * (RING_STEP_S * 3 + node_latency_s)
        tree_s += 2 * (per_node - 1) * RING_STEP_S
        latency_s = min(latency_s, tree_s + 0.1 * n_bytes / rate)
    return passes * (members - 1) / members * n_bytes / rate + latency_s


def intra_node_all_reduce_s(n_bytes: float, members: int, link: Link, *, fabric: int = SWITCH) -> float:
    """Seconds of an all-reduce of `n_bytes` among devices of one node; 0 for one member.

    Interpolates the measured table in the logarithm of the size; a link of another rate is taken to move a
    proportionally larger buffer in the same time.
    """
    return intra_kernel(n_bytes, members, link.bytes_per_s, link.latency_s, fabric)


def all_reduce_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-reduce of a buffer of `n_bytes` on every member."""
    return ring_kernel(n_bytes, *group.numbers, 2)


def gather_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-gather to (or reduce-scatter from) `n_bytes` on every member: half an all-reduce."""
    return ring_kernel(n_bytes, *group.numbers, 1)
