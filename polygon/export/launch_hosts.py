"""Host names for the nodes of a cluster: given by the user or made up, and fit to stand in a shell script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from polygon.domain.cluster import Cluster
from polygon.domain.errors import located, require
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Worker
from polygon.export.tc import check_address, check_host_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node of the cluster under its network name."""

    name: str
    pool: int
    node: int
    """Within the pool."""
    address: str = ""
    """IPv4; empty where nothing is known."""


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes that stand for any text; `x` where none are left."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "x"


def default_hosts(cluster: Cluster) -> list[Host]:
    """A made-up name for every node, pool by pool, that tells its region and device type."""
    hosts: list[Host] = []
    seen: set[str] = set()
    for pool in cluster.pools:
        stem = f"{slug(cluster.regions[pool.region].name)}-{slug(pool.device.name)}"
        while f"{stem}-0" in seen:
            stem += f"-p{pool.index}"
        for node in range(pool.nodes):
            seen.add(f"{stem}-{node}")
            hosts.append(Host(name=f"{stem}-{node}", pool=pool.index, node=node))
    return hosts


def used_nodes(plan: Plan, cluster: Cluster) -> list[tuple[int, int]]:
    """Pool and number of the nodes on which a plan has devices, in the cluster's order."""
    workers = (worker for stage in plan.stages for worker in stage.workers)
    return sorted({(w.pool, int(cluster.pools[w.pool].node_of(device))) for w in workers for device in w.devices})


def read_hosts(text: str, cluster: Cluster, plan: Plan) -> list[Host]:
    """Hosts from text: a line a node in the cluster's order, `name` or `name address`; `#` begins a comment.

    The nodes are those that the plan uses, or all of the cluster.

    Raises
    ------
    InputError
        For a name that is none (nothing that a shell would read otherwise), a name or address that comes twice, or too
        few lines.
    """
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    rows = [(number, words) for number, words in enumerate(lines, start=1) if words]
    used = used_nodes(plan, cluster)
    everything = [(pool.index, node) for pool in cluster.pools for node in range(pool.nodes)]
    places = everything if len(rows) == len(everything) else used
    require(
        len(rows) == len(places),
        "hosts",
        Message("found.lines", lines=len(rows)),
        Message("expected.one_a_used_node", nodes=len(used)),
    )
    hosts: list[Host] = []
    for (number, words), (pool_index, node) in zip(rows, places, strict=True):
        line = Message("input.line_of", file="hosts", line=number)
        require(len(words) <= 2, line, " ".join(words), "a name, or a name and an IPv4 address")
        with located(Message("input.before", where=line)):
            check_host_name(words[0])
        require(words[0] not in {host.name for host in hosts}, line, words[0], "names that differ")
        address = words[1] if len(words) == 2 else ""
        if address:
            check_address(address, line)
            require(address not in {host.address for host in hosts}, line, address, "addresses that differ")
        hosts.append(Host(name=words[0], pool=pool_index, node=node, address=address))
    return hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A host and those of its devices (by their number on the host) that take part, in the order of their ranks."""

    host: Host
    devices: tuple[int, ...]


def seats(cluster: Cluster, workers: Sequence[Worker], hosts: Sequence[Host]) -> list[Seat]:
    """Hosts in the order in which the workers' devices first touch them, with the devices that they use there."""
    by_place = {(host.pool, host.node): host for host in hosts}
    order: dict[tuple[int, int], list[int]] = {}
    for worker in workers:
        pool = cluster.pools[worker.pool]
        for device in worker.devices:
            place = (worker.pool, pool.node_of(device))
            order.setdefault(place, []).append((device - pool.first_device) % pool.devices_per_node)
    return [Seat(host=by_place[place], devices=tuple(devices)) for place, devices in order.items()]


def hosts_text(rows: Sequence[Seat]) -> str:
    """`hosts.txt`: a line a host in the order of ranks."""
    return "".join(
        f"{seat.host.name}{' ' + seat.host.address if seat.host.address else ''}  # {len(seat.devices)} devices\n"
        for seat in rows
    )
