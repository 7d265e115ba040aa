"""Clusters and problems: between the schema of files and requests and the frozen domain data.

`*_from_spec` gives domain data in SI units; `*_data` gives the plain dictionary that the same schema reads back to
equal data. Numbers in a file are chosen so that they convert back to the very same SI number wherever one exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region, link_between
from polygon.domain.errors import InputError, fault, located, require
from polygon.domain.message import Message
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints, Problem, StageRule
from polygon.domain.runtime import Runtime
from polygon.formats import catalogue, default_links
from polygon.formats.catalogue import GB, GBPS, GIB, MS, TFLOP
from polygon.formats.schema import LEAST_GBPS, MOST_GBPS, ClusterSpec, LinkSpec, NodeSpec, ProblemSpec, RegionSpec

DEFAULT_INTRA_REGION = Link(latency_s=0.5 / MS, bytes_per_s=10 * GBPS)
"""Between nodes of a region where a file says nothing: 10 Gbit/s Ethernet, what most clouds give a node at least."""

MOST_DEVICES, MOST_REGIONS = 10**7, 1000
"""More are taken for a slip of the pen."""

# Clusters


def cluster_from_spec(spec: ClusterSpec, default_name: str = "cluster") -> Cluster:
    """The cluster that a file describes; what it does not say of links has defaults (`Cluster.defaults`).

    Raises
    ------
    InputError
        For an unknown or repeated region or device, and for matrices of a wrong shape; the message says where.
    """
    require(
        len(spec.regions) <= MOST_REGIONS, "regions", len(spec.regions), Message("expected.at_most", most=MOST_REGIONS)
    )
    own = {}
    for name, device in spec.devices.items():
        with located(f"devices.{name}."):
            own[name] = catalogue.completed(catalogue.device_from_spec(name, device))
    names = [region.name for region in spec.regions]
    for i, name in enumerate(names):
        require(
            names.index(name) == i,
            f"regions[{i}].name",
            name,
            Message("expected.another_name", region=names.index(name)),
        )
    used: dict[str, Device] = {}
    assumed: list[str] = []
    regions = tuple(_region(region, f"regions[{i}]", own, used, assumed) for i, region in enumerate(spec.regions))
    latency_s, bytes_per_s, capacity, said = _matrices(spec, names)
    given = _given(regions, used, latency_s, bytes_per_s) if spec.defaults else set()
    told = [name for name in spec.defaults if name not in given]
    filled = default_links.fill(regions, latency_s, bytes_per_s, said)
    assumed += [link_between(names[a], names[b]) for a, b in filled]
    _check_connected(names, bytes_per_s)
    devices = sum(group.devices for region in regions for group in region.node_groups)
    require(
        devices <= MOST_DEVICES,
        "regions",
        Message("found.devices", devices=devices),
        Message("expected.at_most", most=MOST_DEVICES),
    )
    for r, region in enumerate(regions):
        latency_s[r, r] = region.intra_region.latency_s
        bytes_per_s[r, r] = region.intra_region.bytes_per_s
        capacity[r, r] = math.inf
    return Cluster(
        name=spec.name or default_name,
        regions=regions,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        capacity_bytes_per_s=capacity,
        catalogue=used,
        stages=spec.stages,
        description=spec.description,
        source=spec.source,
        defaults=tuple(dict.fromkeys([*told, *assumed])),
    )


def _given(
    regions: tuple[Region, ...], devices: Mapping[str, Device], latency_s: np.ndarray, bytes_per_s: np.ndarray
) -> set[str]:
    """Links, as `Cluster.defaults` calls them, that are not what would be assumed: somebody has given them."""
    given = set()
    for region in regions:
        if region.intra_region != DEFAULT_INTRA_REGION:
            given.add(f"{region.name}.intra_region")
        for i, group in enumerate(region.node_groups):
            device = devices[group.device]
            if catalogue.has_own_link(device) or group.intra_node != _usual_link(device):
                given.add(f"{region.name}.nodes[{i}].intra_node")
            if group.inter_node != region.intra_region:
                given.add(f"{region.name}.nodes[{i}].inter_node")
    for (a, here), (b, there) in combinations(enumerate(regions), 2):
        link = default_links.between(here, there)
        ways = [(latency_s[pair], bytes_per_s[pair]) for pair in ((a, b), (b, a))]
        if link is None or any(way != (link.latency_s, link.bytes_per_s) for way in ways):
            given.add(link_between(here.name, there.name))
    return given


def _region(
    spec: RegionSpec,
    where: str,
    own: Mapping[str, Device],
    used: dict[str, Device],
    assumed: list[str],
) -> Region:
    """One region; device types met are added to `used`, links that nobody gave to `assumed`."""
    intra_region = _link(spec.intra_region, f"{where}.intra_region", lambda: DEFAULT_INTRA_REGION)
    if spec.intra_region is None:
        assumed.append(f"{spec.name}.intra_region")
    groups = tuple(
        _node_group(node, f"{where}.nodes[{i}]", intra_region, own, used) for i, node in enumerate(spec.nodes)
    )
    for i, (node, group) in enumerate(zip(spec.nodes, groups, strict=True)):
        if node.intra_node is None and node.devices_per_node > 1 and not catalogue.has_own_link(used[group.device]):
            assumed.append(f"{spec.name}.nodes[{i}].intra_node")
    return Region(
        name=spec.name,
        node_groups=groups,
        intra_region=intra_region,
        latitude=spec.latitude,
        longitude=spec.longitude,
        egress_usd_per_gb=spec.egress_usd_per_gb,
        egress_bytes_per_s=math.inf if spec.egress_gbps is None else spec.egress_gbps * GBPS,
    )


def _node_group(
    spec: NodeSpec,
    where: str,
    intra_region: Link,
    own: Mapping[str, Device],
    used: dict[str, Device],
) -> NodeGroup:
    with located(f"{where}.device: "):
        device = own[spec.device] if spec.device in own else _known_device(spec.device, own)
    used[device.name] = device
    return NodeGroup(
        device=device.name,
        nodes=spec.count,
        devices_per_node=spec.devices_per_node,
        intra_node=_link(spec.intra_node, f"{where}.intra_node", lambda: _usual_link(device)),
        inter_node=_link(spec.inter_node, f"{where}.inter_node", lambda: intra_region),
        price_usd_per_hour=spec.price_usd_per_hour,
    )


def _usual_link(device: Device) -> Link:
    """Between two devices of a node that does not say."""
    return device.link or catalogue.link("pcie3-x16")


def _known_device(name: str, own: Mapping[str, Device]) -> Device:
    """A device type of the catalogue; where it has none of the name, one of the file's own may have been meant."""
    try:
        return catalogue.device(name)
    except InputError:
        near = difflib.get_close_matches(name.lower(), {known.lower() for known in own}, n=1)
        if not near:
            raise
        meant = next(known for known in own if known.lower() == near[0])
        expected = Message("expected.nearest", nearest=meant, words=tuple(sorted({*own, *catalogue.devices()})))
        raise fault("", Message("found.named", kind="device", name=name), expected) from None


def _link(spec: LinkSpec | None, where: str, default: Callable[[], Link]) -> Link:
    if spec is None:
        return default()
    with located(f"{where}: "):
        return catalogue.link_from_spec(spec)


def _matrices(spec: ClusterSpec, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Latency [s], bandwidth and capacity [bytes/s] between regions, from matrices and then from single links; and of
    which directions the file says something."""
    n = len(names)
    latency_ms = _matrix(spec.latency_ms, "latency_ms", n, math.nan)
    gbps = _matrix(spec.bandwidth_gbps, "bandwidth_gbps", n, 0.0)
    capacity_gbps = _matrix(spec.capacity_gbps, "capacity_gbps", n, math.inf)
    said = ~np.isnan(_matrix(spec.bandwidth_gbps, "bandwidth_gbps", n, math.nan))
    given: set[tuple[int, int]] = set()
    number = {name: i for i, name in enumerate(names)}
    for k, link in enumerate(spec.links):
        ends = link.between or [str(link.from_region), str(link.to_region)]
        for name in ends:
            require(name in number, f"links[{k}]", name, Message("expected.region", names=tuple(names)))
        require(ends[0] != ends[1], f"links[{k}]", ends[0], "two different regions (see intra_region)")
        a, b = number[ends[0]], number[ends[1]]
        for pair in ((a, b), (b, a)) if link.between else ((a, b),):
            require(
                pair not in given,
                f"links[{k}]",
                Message("found.pair", a=ends[0], b=ends[1]),
                "a pair that no earlier link gives",
            )
            given.add(pair)
            said[pair] = True
            latency_ms[pair], gbps[pair] = link.latency_ms, link.bandwidth_gbps
            capacity_gbps[pair] = math.inf if link.capacity_gbps is None else link.capacity_gbps
    missing = np.isnan(latency_ms) & (gbps > 0) & ~np.eye(n, dtype=bool)
    if missing.any():
        a, b = np.argwhere(missing)[0]
        raise fault(f"latency_ms[{a}][{b}]", None, "a number, as bandwidth_gbps has one there")
    latency_ms[np.isnan(latency_ms)] = 0.0
    below = Message("expected.number_below", limit=MOST_GBPS)
    require(bool((gbps < MOST_GBPS).all()), "bandwidth_gbps", float(gbps.max()), below)
    slowest = float(gbps.min(where=gbps > 0, initial=math.inf))
    above = Message("expected.number_above", limit=LEAST_GBPS)
    require(slowest > LEAST_GBPS, "bandwidth_gbps", slowest, above)  # 0 is no link
    return latency_ms / MS, gbps * GBPS, capacity_gbps * GBPS, said


def _check_connected(names: list[str], bytes_per_s: np.ndarray) -> None:
    """Require a way between any two regions over links that exist in both directions."""
    for name, part in zip(names, default_links.parts(bytes_per_s).tolist(), strict=True):
        require(part == 0, "links", Message("found.no_links", a=names[0], b=name), Message("expected.connected"))


def _matrix(rows: list[list[float | None]] | None, where: str, n: int, missing: float) -> np.ndarray:
    """A regions x regions matrix of a file as an array, null being `missing`."""
    if rows is None:
        return np.full((n, n), missing)
    require(len(rows) == n, where, Message("found.rows", rows=len(rows)), Message("expected.one_a_region", regions=n))
    for i, row in enumerate(rows):
        require(
            len(row) == n,
            f"{where}[{i}]",
            Message("found.entries", entries=len(row)),
            Message("expected.one_a_region", regions=n),
        )
    return np.array([[missing if value is None else value for value in row] for row in rows], dtype=float)


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """The cluster as a file says it, with every device type that it uses spelt out."""
    n = len(cluster.regions)
    pairs = [[a != b and cluster.bytes_per_s[a, b] > 0 for b in range(n)] for a in range(n)]

    def matrix(values: np.ndarray, unit: Callable[[float], float]) -> list[list[float | None]]:
        return [
            [unit(float(values[a, b])) if pairs[a][b] and math.isfinite(values[a, b]) else None for b in range(n)]
            for a in range(n)
        ]

    data: dict[str, Any] = {"format": "polygon-cluster", "version": 1, "name": cluster.name}
    data |= {key: text for key in ("description", "source") if (text := getattr(cluster, key))}
    if cluster.stages is not None:
        data["stages"] = cluster.stages
    if cluster.defaults:
        data["defaults"] = list(cluster.defaults)
    data["devices"] = {name: _device_data(cluster.catalogue[name]) for name in sorted(cluster.catalogue)}
    data["regions"] = [_region_data(region) for region in cluster.regions]
    if n > 1:
        data["latency_ms"] = matrix(cluster.latency_s, to_ms)
        data["bandwidth_gbps"] = matrix(cluster.bytes_per_s, to_gbps)
        capacity = matrix(cluster.capacity_bytes_per_s, to_gbps)
        if any(value is not None for row in capacity for value in row):
            data["capacity_gbps"] = capacity
    return data


def _device_data(device: Device) -> dict[str, Any]:
    data: dict[str, Any] = {
        "memory_gib": _inverse(device.memory_bytes, lambda x: x * GIB, 1 / GIB),
        "tflops": {name: _inverse(value, lambda x: x * TFLOP, 1 / TFLOP) for name, value in device.flops.items()},
        "memory_bandwidth_gb_per_s": _inverse(device.memory_bytes_per_s, lambda x: x * GB, 1 / GB),
        "power_w": device.power_w,
        "price_usd_per_hour": device.price_usd_per_hour,
        "architecture": device.architecture,
        "source": device.source,
    }
    if device.clock != 1.0:
        data["clock"] = device.clock
    if device.link is not None and catalogue.has_own_link(device):
        data["link"] = _link_data(device.link)
    if device.efficiency is not None:
        data["efficiency"] = {k: v for k, v in dataclasses.asdict(device.efficiency).items() if v not in (None, "")}
    return {key: value for key, value in data.items() if value != ""}


def _region_data(region: Region) -> dict[str, Any]:
    data: dict[str, Any] = {"name": region.name}
    for key in ("latitude", "longitude"):
        if getattr(region, key) is not None:
            data[key] = getattr(region, key)
    data["egress_usd_per_gb"] = region.egress_usd_per_gb
    if math.isfinite(region.egress_bytes_per_s):
        data["egress_gbps"] = to_gbps(region.egress_bytes_per_s)
    data["intra_region"] = _link_data(region.intra_region)
    data["nodes"] = [_node_data(group) for group in region.node_groups]
    return data


def _node_data(group: NodeGroup) -> dict[str, Any]:
    data: dict[str, Any] = {
        "device": group.device,
        "count": group.nodes,
        "devices_per_node": group.devices_per_node,
        "intra_node": _link_data(group.intra_node),
        "inter_node": _link_data(group.inter_node),
    }
    if group.price_usd_per_hour is not None:
        data["price_usd_per_hour"] = group.price_usd_per_hour
    return data


def _link_data(link: Link) -> dict[str, Any]:
    data: dict[str, Any] = {"latency_ms": to_ms(link.latency_s), "bandwidth_gbps": to_gbps(link.bytes_per_s)}
    return data if link.rdma == link.rdma_by_latency else data | {"rdma": link.rdma}


def to_ms(seconds: float) -> float:
    """Milliseconds that a file says for these seconds."""
    return _inverse(seconds, lambda x: x / MS, MS)


def to_gbps(bytes_per_s: float) -> float:
    """Gbit/s that a file says for these bytes/s."""
    return _inverse(bytes_per_s, lambda x: x * GBPS, 1 / GBPS)


def _inverse(value: float, convert: Callable[[float], float], factor: float) -> float:
    """The number, short if possible, that `convert` turns into exactly `value`; the nearest one if there is none."""
    guess = value * factor
    for candidate in (
        *(float(f"{guess:.{digits}g}") for digits in (6, 12, 15)),
        guess,
        math.nextafter(guess, math.inf),
        math.nextafter(guess, -math.inf),
    ):
        if convert(candidate) == value:
            return int(candidate) if candidate.is_integer() and abs(candidate) < 1e15 else candidate
    return guess


# Problems


def problem_from_spec(spec: ProblemSpec, default_name: str = "cluster") -> Problem:
    """The problem that a file poses."""
    with located("cluster."):
        cluster = cluster_from_spec(spec.cluster, default_name)
    with located("constraints."):
        constraints = constraints_from_spec(spec.constraints)
    batch: Any = spec.batch
    runtime = catalogue.runtime_from_spec(spec.runtime)
    model = catalogue.model_from_spec(spec.model)
    problem = Problem(cluster=cluster, model=model, batch=Batch(**batch.model_dump()), runtime=runtime)
    with located("constraints."):  # regions and device types that the cluster does not have
        return dataclasses.replace(problem, constraints=constraints)


def constraints_from_spec(spec: Any) -> Constraints:
    """The constraints that a file states."""

    def as_tuples(data: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}

    fields = as_tuples(spec.model_dump())
    fields["stage_rules"] = tuple(StageRule(**as_tuples(rule)) for rule in fields["stage_rules"])
    return Constraints(**fields)


def problem_data(problem: Problem) -> dict[str, Any]:
    """The problem as a file says it."""
    return {
        "format": "polygon-problem",
        "version": 1,
        "cluster": cluster_data(problem.cluster),
        "model": model_data(problem.model),
        "batch": dataclasses.asdict(problem.batch),
        "constraints": dataclasses.asdict(problem.constraints),
        "runtime": runtime_data(problem.runtime),
    }


def runtime_data(runtime: Runtime) -> str | dict[str, Any]:
    """The runtime as a file says it: its name, with the switches beside it that differ from the catalogue's."""
    known = catalogue.runtime(runtime.name)
    changed = {
        field.name: getattr(runtime, field.name)
        for field in dataclasses.fields(Runtime)
        if field.compare and getattr(runtime, field.name) != getattr(known, field.name)
    }
    return {"name": runtime.name, **changed} if changed else runtime.name


def model_data(model: Model) -> dict[str, Any]:
    """The model as a file says it."""

    def as_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

    return dataclasses.asdict(model, dict_factory=as_lists)
