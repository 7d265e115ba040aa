"""Between the schema of files and requests (`polygon.schema`) and the frozen domain data.

`*_from_spec` gives domain data in SI units; `*_data` gives the plain dictionary that the same schema reads back to
equal data. Numbers in a file are chosen so that they convert back to the very same SI number wherever one exists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from polygon import catalogue
from polygon.catalogue import GB, GBPS, GIB, MS, TFLOP
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.errors import InputError, located, require
from polygon.domain.groups import Groups
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints, LinkUse, Plan, Problem, Stage, Worker
from polygon.schema import ClusterSpec, GroupsSpec, LinkSpec, NodeSpec, PlanSpec, ProblemSpec, RegionSpec, WorkerSpec

DEFAULT_INTRA_REGION = Link(latency_s=0.5 / MS, bytes_per_s=10 * GBPS)
"""Between nodes of a region where a file says nothing: 10 Gbit/s Ethernet, what most clouds give a node at least."""

_PLAN_FORMAT, _GROUPS_FORMAT, _PROBLEM_FORMAT = "polygon-plan", "polygon-groups", "polygon-problem"


class PlanFile(NamedTuple):
    """What a plan file holds."""

    problem: Problem
    plan: Plan
    estimate: Mapping[str, Any]


# Clusters


def cluster_from_spec(spec: ClusterSpec, default_name: str = "cluster") -> Cluster:
    """The cluster that a file describes.

    Raises
    ------
    InputError
        For an unknown or repeated region or device, and for matrices of a wrong shape; the message says where.
    """
    own = {}
    for name, device in spec.devices.items():
        with located(f"devices.{name}."):
            own[name] = catalogue.device_from_spec(name, device)
    names = [region.name for region in spec.regions]
    for i, name in enumerate(names):
        require(names.index(name) == i, f"regions[{i}].name", name, f"another name than regions[{names.index(name)}]")
    used: dict[str, Device] = {}
    regions = tuple(_region(region, f"regions[{i}]", spec, own, used) for i, region in enumerate(spec.regions))
    latency_s, bytes_per_s, capacity = _matrices(spec, names)
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
    )


def _region(
    spec: RegionSpec, where: str, cluster: ClusterSpec, own: Mapping[str, Device], used: dict[str, Device]
) -> Region:
    """One region; device types met are added to `used`."""
    intra_region = _link(spec.intra_region, f"{where}.intra_region", lambda: DEFAULT_INTRA_REGION)
    return Region(
        name=spec.name,
        node_groups=tuple(
            _node_group(node, f"{where}.nodes[{i}]", intra_region, cluster, own, used)
            for i, node in enumerate(spec.nodes)
        ),
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
    cluster: ClusterSpec,
    own: Mapping[str, Device],
    used: dict[str, Device],
) -> NodeGroup:
    with located(f"{where}.device: "):
        device = own[spec.device] if spec.device in own else catalogue.device(spec.device)
    used[device.name] = device

    def usual_link() -> Link:
        if device.name not in own:
            return catalogue.usual_link(device.name)
        own_link = cluster.devices[device.name].link
        return _link(own_link, f"devices.{device.name}.link", lambda: catalogue.link("pcie3-x16"))

    return NodeGroup(
        device=device.name,
        nodes=spec.count,
        devices_per_node=spec.devices_per_node,
        intra_node=_link(spec.intra_node, f"{where}.intra_node", usual_link),
        inter_node=_link(spec.inter_node, f"{where}.inter_node", lambda: intra_region),
        price_usd_per_hour=spec.price_usd_per_hour,
    )


def _link(spec: LinkSpec | None, where: str, default: Callable[[], Link]) -> Link:
    if spec is None:
        return default()
    with located(f"{where}: "):
        return catalogue.link_from_spec(spec)


def _matrices(spec: ClusterSpec, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Latency [s], bandwidth and capacity [bytes/s] between regions, from matrices and then from single links."""
    n = len(names)
    latency_ms = _matrix(spec.latency_ms, "latency_ms", n, math.nan)
    gbps = _matrix(spec.bandwidth_gbps, "bandwidth_gbps", n, 0.0)
    capacity_gbps = _matrix(spec.capacity_gbps, "capacity_gbps", n, math.inf)
    given: set[tuple[int, int]] = set()
    for k, link in enumerate(spec.links):
        ends = link.between or [str(link.from_region), str(link.to_region)]
        for name in ends:
            require(name in names, f"links[{k}]", name, f"a region: one of {', '.join(names)}")
        require(ends[0] != ends[1], f"links[{k}]", ends[0], "two different regions (see intra_region)")
        a, b = names.index(ends[0]), names.index(ends[1])
        for pair in ((a, b), (b, a)) if link.between else ((a, b),):
            require(pair not in given, f"links[{k}]", f"{ends[0]} - {ends[1]}", "a pair that no earlier link gives")
            given.add(pair)
            latency_ms[pair], gbps[pair] = link.latency_ms, link.bandwidth_gbps
            capacity_gbps[pair] = math.inf if link.capacity_gbps is None else link.capacity_gbps
    missing = np.isnan(latency_ms) & (gbps > 0) & ~np.eye(n, dtype=bool)
    if missing.any():
        a, b = np.argwhere(missing)[0]
        raise InputError(f"latency_ms[{a}][{b}]: found nothing, expected a number, as bandwidth_gbps has one there")
    latency_ms[np.isnan(latency_ms)] = 0.0
    return latency_ms / MS, gbps * GBPS, capacity_gbps * GBPS


def _matrix(rows: list[list[float | None]] | None, where: str, n: int, missing: float) -> np.ndarray:
    """A regions x regions matrix of a file as an array, null being `missing`."""
    if rows is None:
        return np.full((n, n), missing)
    require(len(rows) == n, where, f"{len(rows)} rows", f"{n}, one a region")
    for i, row in enumerate(rows):
        require(len(row) == n, f"{where}[{i}]", f"{len(row)} entries", f"{n}, one a region")
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
    if cluster.stages is not None:
        data["stages"] = cluster.stages
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
    data = {
        "memory_gib": _inverse(device.memory_bytes, lambda x: x * GIB, 1 / GIB),
        "tflops": {name: _inverse(value, lambda x: x * TFLOP, 1 / TFLOP) for name, value in device.flops.items()},
        "memory_bandwidth_gb_per_s": _inverse(device.memory_bytes_per_s, lambda x: x * GB, 1 / GB),
        "power_w": device.power_w,
        "price_usd_per_hour": device.price_usd_per_hour,
        "architecture": device.architecture,
        "source": device.source,
    }
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


def _link_data(link: Link) -> dict[str, float]:
    return {"latency_ms": to_ms(link.latency_s), "bandwidth_gbps": to_gbps(link.bytes_per_s)}


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
    return Problem(
        cluster=cluster,
        model=catalogue.model_from_spec(spec.model),
        batch=Batch(**batch.model_dump()),
        constraints=constraints,
    )


def constraints_from_spec(spec: Any) -> Constraints:
    """The constraints that a file states."""
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.model_dump().items()}
    return Constraints(**fields)


def problem_data(problem: Problem) -> dict[str, Any]:
    """The problem as a file says it."""
    return {
        "format": _PROBLEM_FORMAT,
        "version": 1,
        "cluster": cluster_data(problem.cluster),
        "model": model_data(problem.model),
        "batch": dataclasses.asdict(problem.batch),
        "constraints": dataclasses.asdict(problem.constraints),
    }


def model_data(model: Model) -> dict[str, Any]:
    """The model as a file says it."""
    return dataclasses.asdict(model)


# Groups


def groups_from_spec(spec: GroupsSpec) -> Groups:
    """The groups that a file holds."""
    with located("problem."):
        problem = problem_from_spec(spec.problem)
    allocation = np.zeros((len(spec.stages), len(problem.cluster.pools)), dtype=np.int64)
    for s, group in enumerate(spec.stages):
        for i, member in enumerate(group.members):
            where = f"stages[{s}].members[{i}]"
            _check_pool(problem.cluster, member.pool, member.region, member.device, where)
            allocation[s, member.pool] += member.devices
    return Groups(problem=problem, allocation=allocation, objective=spec.objective, solver=spec.solver, seed=spec.seed)


def groups_data(groups: Groups) -> dict[str, Any]:
    """The groups as a file says them."""
    cluster = groups.problem.cluster
    return {
        "format": _GROUPS_FORMAT,
        "version": 1,
        "problem": problem_data(groups.problem),
        "stages": [
            {"members": [_pool_data(cluster, int(p)) | {"devices": int(row[p])} for p in np.flatnonzero(row)]}
            for row in groups.allocation
        ],
        "objective": dict(groups.objective),
        "solver": groups.solver,
        "seed": groups.seed,
    }


def _pool_data(cluster: Cluster, index: int) -> dict[str, Any]:
    pool = cluster.pools[index]
    return {"pool": index, "region": cluster.regions[pool.region].name, "device": pool.device.name}


def _check_pool(cluster: Cluster, index: int, region: str, device: str, where: str) -> None:
    """Require that a pool exists and is the one that its region and device name."""
    require(index < len(cluster.pools), f"{where}.pool", index, f"at most {len(cluster.pools) - 1}, the last pool")
    pool = _pool_data(cluster, index)
    for key, found in (("region", region), ("device", device)):
        require(found == pool[key], f"{where}.{key}", found, f"{pool[key]!r}, as pool {index} is there")


# Plans


def plan_from_spec(spec: PlanSpec) -> PlanFile:
    """The plan that a file holds, with its problem and estimate.

    Checks what the plan refers to (pools, devices, routes, regions); whether it is a *good* or even a possible plan
    is another question (memory, cover of the layers).
    """
    with located("problem."):
        problem = problem_from_spec(spec.problem)
    cluster = problem.cluster
    first = np.array([pool.first_device for pool in cluster.pools])
    taken = np.zeros(cluster.devices, dtype=bool)
    stages = tuple(_stage(stage, f"stages[{s}]", problem, first, taken) for s, stage in enumerate(spec.stages))
    names = {region.name: i for i, region in enumerate(cluster.regions)}
    links = []
    for k, link in enumerate(spec.links):
        for key, name in (("from", link.from_region), ("to", link.to_region)):
            require(name in names, f"links[{k}].{key}", name, f"a region: one of {', '.join(names)}")
        fields = link.model_dump(exclude={"from_region", "to_region"})
        links.append(LinkUse(source=names[link.from_region], target=names[link.to_region], **fields))
    simple: Any = spec.model_dump(exclude={"format", "version", "problem", "stages", "routes", "links", "estimate"})
    windows = simple.pop("windows")
    require(len(windows) == len(stages), "windows", f"{len(windows)} entries", f"{len(stages)}, one a stage")
    for s, window in enumerate(windows):
        require(window >= 1, f"windows[{s}]", window, "a whole number >= 1")
    plan = Plan(
        stages=stages, routes=_routes(spec.routes, stages), windows=tuple(windows), links=tuple(links), **simple
    )
    return PlanFile(problem, plan, spec.estimate)


def _stage(spec: Any, where: str, problem: Problem, first: np.ndarray, taken: np.ndarray) -> Stage:
    """One stage; its devices are marked in `taken`."""
    begin, end = spec.layers
    layers = problem.model.layers
    require(begin < end <= layers, f"{where}.layers", spec.layers, f"[first, last) within the model's {layers} layers")
    workers = tuple(
        _worker(worker, f"{where}.workers[{i}]", problem.cluster, first, taken) for i, worker in enumerate(spec.workers)
    )
    fields = spec.model_dump(exclude={"layers", "workers"})
    return Stage(first_layer=begin, last_layer=end, workers=workers, **fields)


def _worker(spec: WorkerSpec, where: str, cluster: Cluster, first: np.ndarray, taken: np.ndarray) -> Worker:
    _check_pool(cluster, spec.pool, spec.region, spec.device, where)
    pool = cluster.pools[spec.pool]
    end = pool.first_device + pool.devices
    devices: list[int] = []
    for k, (begin, count) in enumerate(spec.devices):
        run = f"{where}.devices[{k}]"
        require(count >= 1, run, [begin, count], "a run [first, count] with count >= 1")
        inside = pool.first_device <= begin and begin + count <= end
        require(inside, run, [begin, count], f"a run within the pool's devices {pool.first_device}..{end - 1}")
        require(not taken[begin : begin + count].any(), run, [begin, count], "devices that no other worker holds")
        taken[begin : begin + count] = True
        devices.extend(range(begin, begin + count))
    return Worker(pool=spec.pool, devices=tuple(devices))


def _routes(rows: list[Any], stages: tuple[Stage, ...]) -> np.ndarray:
    """Routes as an array, every entry a worker of its stage."""
    expected = f"one row a micro-batch, each with {len(stages)} whole numbers"
    try:
        routes = np.array(rows)
    except ValueError:
        raise InputError(f"routes: found rows of different length, expected {expected}") from None
    shape_fits = routes.ndim == 2 and routes.shape[0] > 0 and routes.shape[1] == len(stages)
    require(shape_fits and routes.dtype.kind == "i", "routes", f"shape {routes.shape} of {routes.dtype}", expected)
    widths = np.array([stage.width for stage in stages])
    wrong = np.argwhere((routes < 0) | (routes >= widths))
    if len(wrong):
        m, s = wrong[0]
        raise InputError(
            f"routes[{m}][{s}]: found {routes[m, s]}, expected 0..{widths[s] - 1}, the workers of stage {s}"
        )
    return routes.astype(np.int64)


def plan_data(problem: Problem, plan: Plan, estimate: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plan as a file says it; `estimate` is free in form."""
    cluster = problem.cluster
    names = [region.name for region in cluster.regions]
    pools = [_pool_data(cluster, p) for p in range(len(cluster.pools))]
    return {
        "format": _PLAN_FORMAT,
        "version": 1,
        "problem": problem_data(problem),
        "stages": [
            {
                "layers": [stage.first_layer, stage.last_layer],
                **_simple_fields(stage, without=("first_layer", "last_layer", "workers")),
                "workers": [pools[worker.pool] | {"devices": _runs(worker.devices)} for worker in stage.workers],
            }
            for stage in plan.stages
        ],
        "routes": plan.routes,
        "links": [
            {"from": names[use.source], "to": names[use.target], **_simple_fields(use, without=("source", "target"))}
            for use in sorted(plan.links, key=lambda use: (use.source, use.target))
        ],
        **_simple_fields(plan, without=("stages", "routes", "links")),
        "estimate": dict(estimate or {}),
    }


def _simple_fields(value: Any, *, without: tuple[str, ...]) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in without}


def _runs(devices: Iterable[int]) -> list[list[int]]:
    """Device numbers as runs [first, count] of consecutive ones, in their order."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([int(device), 1])
    return runs
