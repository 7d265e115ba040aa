"""Which hosts the lab has, and what every ordered pair of them is given. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError
from polygon.domain.plan import Plan

MAX_HOSTS = 120
"""One TUN device, one namespace and three file descriptors each; `select` serves 1024 descriptors."""

SUBNET = ipaddress.ip_network("10.88.0.0/16")
"""Host h of region r is 10.88.r.(h+1). Exists only inside the lab's namespaces: it clashes with nothing outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabHost:
    """One node of the cluster, played by one network namespace."""

    index: int
    name: str
    region: int
    region_name: str
    pool: int
    node: int
    address: str
    devices: tuple[int, ...]
    """Numbers in the cluster of the devices that the node holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCapacity:
    """A capacity that all flows of some ordered host pairs share."""

    name: str
    bytes_per_s: float
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class LabNetwork:
    """Hosts and what every ordered pair of them is given.

    `latency_s` and `bytes_per_s` have shape (hosts, hosts), one way [s] and per direction [bytes/s]; 0 bytes/s where
    two hosts have no link.
    """

    hosts: tuple[LabHost, ...]
    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    shared: tuple[SharedCapacity, ...] = ()

    def host(self, name: str) -> LabHost:
        """The host called `name` (or with that number)."""
        for host in self.hosts:
            if name in (host.name, str(host.index)):
                return host
        raise InputError(f"host: found {name!r}, expected one of {', '.join(host.name for host in self.hosts)}")

    def host_of_device(self, device: int) -> LabHost:
        """The host that holds a device, given the device's number in the cluster."""
        for host in self.hosts:
            if device in host.devices:
                return host
        raise InputError(f"device {device}: found on no host of the lab, expected more hosts (--hosts-per-region)")

    def representative_pairs(self) -> list[tuple[int, int]]:
        """One ordered host pair for every ordered pair of pools (and one inside every pool of two hosts or more)."""
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        for a in self.hosts:
            for b in self.hosts:
                if a.index != b.index and self.bytes_per_s[a.index, b.index] > 0:
                    seen.setdefault((a.pool, b.pool), (a.index, b.index))
        return sorted(set(seen.values()))


def host_label(name: str) -> str:
    """A region's name as a host label: lower-case letters, digits, hyphens (RFC 1123); `region` where none is left."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "region"


def _nodes(cluster: Cluster, region: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """(pool, node) of a region; with a limit dealt over its pools in turn, so that every type is present early."""
    pools = [pool for pool in cluster.pools if pool.region == region]
    every = sorted((node, pool.index) for pool in pools for node in range(pool.nodes))
    chosen = every if limit is None else every[:limit]
    yield from sorted((pool, node) for node, pool in chosen)


def _used_nodes(cluster: Cluster, plan: Plan) -> set[tuple[int, int]]:
    return {
        (worker.pool, cluster.pools[worker.pool].node_of(device))
        for stage in plan.stages
        for worker in stage.workers
        for device in worker.devices
    }


def lab_network(cluster: Cluster, *, hosts_per_region: int | None = None, plan: Plan | None = None) -> LabNetwork:
    """The network of hosts that stands for a cluster.

    Parameters
    ----------
    cluster : Cluster
    hosts_per_region : int, optional
        Take only so many nodes of each region (dealt over its node groups in turn); None: all.
    plan : Plan, optional
        Keep only nodes that hold a device of the plan.

    Raises
    ------
    InputError
        For no host, for more hosts than `MAX_HOSTS`, or where the plan uses a node that the limit leaves out.
    """
    used = _used_nodes(cluster, plan) if plan is not None else None
    hosts: list[LabHost] = []
    labels: list[str] = []
    for r, region in enumerate(cluster.regions):
        label = host_label(region.name)
        labels.append(f"{label}-r{r}" if label in labels else label)
        kept = [node for node in _nodes(cluster, r, hosts_per_region) if used is None or node in used]
        if len(hosts) + len(kept) > MAX_HOSTS:
            raise InputError(f"lab: found more than {MAX_HOSTS} nodes, expected fewer (choose with --hosts-per-region)")
        for place, (pool_index, node) in enumerate(kept):
            pool = cluster.pools[pool_index]
            first = pool.first_device + node * pool.devices_per_node
            hosts.append(
                LabHost(
                    index=len(hosts),
                    name=f"{labels[r]}-{place}",
                    region=r,
                    region_name=region.name,
                    pool=pool_index,
                    node=node,
                    address=f"10.88.{r}.{place + 1}",
                    devices=tuple(range(first, first + pool.devices_per_node)),
                )
            )
    if used is not None and len(hosts) < len(used):
        raise InputError(
            f"--hosts-per-region: found {hosts_per_region}, expected enough for the {len(used)} nodes of the plan"
        )
    if not hosts:
        raise InputError("lab: found no host, expected at least one node")
    return _connect(cluster, tuple(hosts))


def _connect(cluster: Cluster, hosts: tuple[LabHost, ...]) -> LabNetwork:
    n = len(hosts)
    latency_s, bytes_per_s = np.zeros((n, n)), np.zeros((n, n))
    for a in hosts:
        for b in hosts:
            link = cluster.node_link(a.pool, b.pool) if a.index != b.index else None
            if link is not None:
                latency_s[a.index, b.index] = link.latency_s
                bytes_per_s[a.index, b.index] = link.bytes_per_s
    return LabNetwork(
        hosts=hosts,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        shared=(*_shared(cluster, hosts), *_cards(cluster, hosts)),
    )


def _shared(cluster: Cluster, hosts: tuple[LabHost, ...]) -> tuple[SharedCapacity, ...]:
    """Capacities of region pairs and of region egress that are finite and concern at least two host pairs."""
    members: dict[tuple[str, float], list[tuple[int, int]]] = {}
    for a in hosts:
        for b in hosts:
            if a.region == b.region:
                continue
            pair_rate = float(cluster.capacity_bytes_per_s[a.region, b.region])
            egress_rate = cluster.regions[a.region].egress_bytes_per_s
            for name, rate in (
                (f"{a.region_name}->{b.region_name}", pair_rate),
                (f"egress of {a.region_name}", egress_rate),
            ):
                if np.isfinite(rate) and rate > 0:
                    members.setdefault((name, float(rate)), []).append((a.index, b.index))
    return tuple(
        SharedCapacity(name=name, bytes_per_s=rate, pairs=tuple(pairs)) for (name, rate), pairs in members.items()
    )


def _cards(cluster: Cluster, hosts: tuple[LabHost, ...]) -> Iterator[SharedCapacity]:
    """Network cards that a host's links can fill together: all that leaves a host, and all that comes in."""
    for host in hosts:
        card = cluster.pools[host.pool].inter_node.bytes_per_s
        others = [other for other in hosts if other is not host]
        for what, pairs in (
            ("out of", [(host.index, other.index) for other in others]),
            ("into", [(other.index, host.index) for other in others]),
        ):
            links = [
                cluster.node_link(*((host.pool, other.pool) if what == "out of" else (other.pool, host.pool)))
                for other in others
            ]
            if len(others) > 1 and sum(link.bytes_per_s for link in links if link is not None) > card:
                yield SharedCapacity(name=f"card {what} {host.name}", bytes_per_s=card, pairs=tuple(pairs))
