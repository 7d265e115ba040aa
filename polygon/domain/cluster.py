"""Devices, links, regions and the cluster they form.

Three words to keep apart: a *node group* is what the user writes (8 nodes of 4 A100), a *pool* is the same
thing with its place in the cluster (its region and the numbers of its devices), a *device* is one accelerator.
Devices are numbered pool by pool, node by node, so that the devices of one node have consecutive numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.errors import Phrase, fault, one_of, require, require_number
from polygon.domain.message import Message

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
OTHERWISE = {"fp16": ("fp16", "bf16"), "bf16": ("bf16", "fp16"), "fp8": ("fp8", "bf16", "fp16")}
"""Precisions whose peak stands for one that a device is not said to have, in the order of preference; else fp32's."""
CPU_ARCHITECTURES = ("x86", "arm", "cpu")
EVERY_REGION = "*"
"""In constraints by region: every one that is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One type of accelerator, as its data sheet describes it."""

    name: str
    memory_bytes: float
    flops: Mapping[str, float]
    """Dense peak [FLOP/s] by precision; matrix units where the device has them."""
    memory_bytes_per_s: float
    power_w: float
    price_usd_per_hour: float = 0.0
    architecture: str = ""
    source: str = ""
    efficiency: MeasuredEfficiency | None = None
    """What it reaches of the above; None: what its architecture does."""
    link: Link | None = None
    """What joins two devices of one node where the node does not say; None: nobody said."""
    clock: float = 1.0
    """Of its multiprocessors, beside that which their architecture's rates are of: the peaks are at this clock."""

    def __post_init__(self) -> None:
        require(bool(self.name), "device.name", self.name, "a name")
        require_number(self.memory_bytes, "memory_bytes", above=0)
        require_number(self.memory_bytes_per_s, "memory_bytes_per_s", above=0)
        require_number(self.power_w, "power_w", at_least=0)
        require_number(self.price_usd_per_hour, "price_usd_per_hour", at_least=0)
        require_number(self.clock, "clock", above=0)
        require("fp32" in self.flops, "flops", sorted(self.flops), "at least the key fp32")
        for precision, value in self.flops.items():
            require(precision in PRECISIONS, "flops", precision, " or ".join(PRECISIONS))
            require_number(value, f"flops.{precision}", above=0)

    @property
    def is_cpu(self) -> bool:
        """Whether it is a processor: it needs no host to launch its kernels, and communicates without NCCL."""
        return self.architecture in CPU_ARCHITECTURES

    def at_clock(self, factor: float) -> Device:
        """The same chip at another clock: its peaks change, how many multiprocessors it has does not."""
        flops = {precision: value * factor for precision, value in self.flops.items()}
        return replace(self, flops=flops, clock=self.clock * factor)

    def at_speed(self, factor: float) -> Device:
        """Another clock, and memory that keeps up with it."""
        return replace(self.at_clock(factor), memory_bytes_per_s=self.memory_bytes_per_s * factor)

    def peak_flops(self, precision: str) -> float:
        """Dense peak [FLOP/s]; fp8 that a device does not have is what the runtime uses there, and the 16-bit format
        that nobody gives is as fast as the other."""
        for candidate in OTHERWISE.get(precision, (precision,)):
            if candidate in self.flops:
                return self.flops[candidate]
        return self.flops["fp32"]


TCP_LATENCY_S = 20e-6
"""What has at least this latency is taken for Ethernet without RDMA where nothing says what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed connection, as one flow with enough streams sees it."""

    latency_s: float
    """One way [s]."""
    bytes_per_s: float
    """Of one direction [bytes/s]."""
    rdma: bool = None  # type: ignore[assignment]
    """Whether network cards write into the memory of devices themselves (InfiniBand, RoCE, EFA), or all goes through
    TCP sockets; where it is not given the latency tells (`TCP_LATENCY_S`)."""

    def __post_init__(self) -> None:
        require_number(self.latency_s, "latency_s", at_least=0)
        require_number(self.bytes_per_s, "bytes_per_s", above=0)
        if self.rdma is None:
            object.__setattr__(self, "rdma", self.rdma_by_latency)

    @property
    def rdma_by_latency(self) -> bool:
        """What is taken of a link of this latency if nothing says what it is."""
        return self.latency_s < TCP_LATENCY_S

    def transfer_s(self, n_bytes: float) -> float:
        """Seconds for a message of `n_bytes`: latency + bytes / bandwidth."""
        return self.latency_s + n_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Identical nodes of one region: `nodes` hosts with `devices_per_node` devices each."""

    device: str
    nodes: int
    devices_per_node: int
    intra_node: Link
    """Between two devices of one node."""
    inter_node: Link
    """Between two nodes of this group (what one node pair gets, shared by the devices of the node)."""
    price_usd_per_hour: float | None = None
    """Per device; None: the catalogue's price."""

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("devices_per_node", self.devices_per_node)):
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        if self.price_usd_per_hour is not None:
            require_number(self.price_usd_per_hour, "price_usd_per_hour", at_least=0)

    @property
    def devices(self) -> int:
        """Devices in the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A data center."""

    name: str
    node_groups: tuple[NodeGroup, ...]
    intra_region: Link
    """Between two nodes of different groups of the region."""
    latitude: float | None = None
    longitude: float | None = None
    egress_usd_per_gb: float = 0.0
    """Price of 1e9 bytes that leave the region."""
    egress_bytes_per_s: float = math.inf
    """What all flows that leave the region share."""

    def __post_init__(self) -> None:
        require(bool(self.name), "region.name", self.name, "a name")
        require(len(self.node_groups) > 0, f"region {self.name}: nodes", Phrase("none"), "at least one node group")
        require_number(self.egress_usd_per_gb, "egress_usd_per_gb", at_least=0)
        require(self.egress_bytes_per_s > 0, "egress_bytes_per_s", self.egress_bytes_per_s, "a number > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A node group at its place in the cluster: interchangeable devices."""

    index: int
    region: int
    device: Device
    nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    first_device: int
    price_usd_per_hour: float

    @property
    def devices(self) -> int:
        """Devices in the pool."""
        return self.nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """Node (counted within the pool) that holds a device, given its number in the cluster."""
        return (device - self.first_device) // self.devices_per_node


def link_between(a: str, b: str) -> str:
    """What `Cluster.defaults` calls the links between two regions, of which the first stands first in the cluster."""
    return f"{a} - {b}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Regions and the links between them.

    Parameters
    ----------
    regions : tuple of Region
    latency_s : ndarray, shape (regions, regions)
        One-way latency [s] between nodes of two regions; the diagonal is not used.
    bytes_per_s : ndarray, shape (regions, regions)
        What one node pair gets in one direction with enough streams [bytes/s]; 0 where no link exists.
    capacity_bytes_per_s : ndarray, shape (regions, regions)
        What all flows of one direction share [bytes/s]; inf where nothing is known.
    catalogue : mapping of name to Device
        Every device type that the regions use.
    stages : int or None
        Pipeline stages that the owner of the cluster asks for; None leaves the choice to the planner.
    description, source : str
        What the owner of the cluster says of it, and where its numbers are from.
    defaults : tuple of str
        Links that the owner did not give, as ``REGION.intra_region``, ``REGION.nodes[I].intra_node``,
        ``REGION.nodes[I].inter_node`` or ``REGION - REGION`` (both ways, see `link_between`): what stands there is
        assumed.
    """

    name: str
    regions: tuple[Region, ...]
    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    capacity_bytes_per_s: np.ndarray
    catalogue: Mapping[str, Device] = field(default_factory=dict)
    stages: int | None = None
    description: str = ""
    source: str = ""
    defaults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.regions)
        require(n > 0, "regions", Phrase("none"), "at least one region")
        names = [region.name for region in self.regions]
        if len(set(names)) < n:
            twice = next(name for name in names if names.count(name) > 1)
            raise fault("regions", twice, "names that differ")
        for label in ("latency_s", "bytes_per_s", "capacity_bytes_per_s"):
            matrix = getattr(self, label)
            require(matrix.shape == (n, n), label, matrix.shape, Message("expected.square", regions=n))
            require(
                not np.isnan(matrix).any() and bool((matrix >= 0).all()),
                label,
                Phrase("a negative or NaN entry"),
                ">= 0",
            )
        for region in self.regions:
            for group in region.node_groups:
                if group.device not in self.catalogue:
                    found = Message("found.named", kind="device", name=group.device)
                    raise fault(f"region {region.name}", found, one_of(group.device, self.catalogue))

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Every node group with its place, region by region."""
        pools: list[Pool] = []
        first = 0
        for r, region in enumerate(self.regions):
            for group in region.node_groups:
                device = self.catalogue[group.device]
                price = device.price_usd_per_hour if group.price_usd_per_hour is None else group.price_usd_per_hour
                pools.append(
                    Pool(
                        index=len(pools),
                        region=r,
                        device=device,
                        nodes=group.nodes,
                        devices_per_node=group.devices_per_node,
                        intra_node=group.intra_node,
                        inter_node=group.inter_node,
                        first_device=first,
                        price_usd_per_hour=price,
                    )
                )
                first += group.devices
        return tuple(pools)

    def with_links(
        self, latency_s: np.ndarray, bytes_per_s: np.ndarray, capacity_bytes_per_s: np.ndarray | None = None
    ) -> Cluster:
        """The cluster with other links between its regions (with the capacities that flows share, if these are given);
        its pools are the same ones."""
        capacity = self.capacity_bytes_per_s if capacity_bytes_per_s is None else capacity_bytes_per_s
        other = replace(self, latency_s=latency_s, bytes_per_s=bytes_per_s, capacity_bytes_per_s=capacity)
        vars(other)["pools"] = self.pools
        return other

    @cached_property
    def default_pairs(self) -> dict[str, tuple[int, int]]:
        """Regions, by number, of the links between them that nobody gave, by what `defaults` calls these."""
        names, said = [region.name for region in self.regions], set(self.defaults)
        pairs = combinations(range(len(names)), 2) if any(" - " in name for name in said) else ()
        return {name: (a, b) for a, b in pairs if (name := link_between(names[a], names[b])) in said}

    @cached_property
    def devices(self) -> int:
        """Devices in the cluster."""
        return sum(pool.devices for pool in self.pools)

    def connected(self, a: int, b: int) -> bool:
        """Whether regions a and b have a link in both directions (a region is connected to itself)."""
        return a == b or bool(self.bytes_per_s[a, b] > 0 and self.bytes_per_s[b, a] > 0)

    def link_inside(self, a: int, b: int) -> Link:
        """Link from a node of pool `a` to another node of pool `b` of the same region.

        Unlike nodes get of the region's network what the narrower of their cards (`inter_node`) passes.
        """
        pool_a, pool_b = self.pools[a], self.pools[b]
        if a == b:
            return pool_a.inter_node
        link = self.regions[pool_a.region].intra_region
        card = min(pool_a.inter_node.bytes_per_s, pool_b.inter_node.bytes_per_s)
        return link if link.bytes_per_s <= card else replace(link, bytes_per_s=card)

    def node_link(self, a: int, b: int) -> Link | None:
        """Link from a node of pool `a` to another node of pool `b`; None where the regions have no link."""
        pool_a, pool_b = self.pools[a], self.pools[b]
        if pool_a.region == pool_b.region:
            return self.link_inside(a, b)
        rate = float(self.bytes_per_s[pool_a.region, pool_b.region])
        if rate <= 0:
            return None
        return Link(latency_s=float(self.latency_s[pool_a.region, pool_b.region]), bytes_per_s=rate)

    def region_index(self, name: str) -> int:
        """Number of the region called `name`."""
        for index, region in enumerate(self.regions):
            if region.name == name:
                return index
        raise fault("region", name, one_of(name, [region.name for region in self.regions]))
