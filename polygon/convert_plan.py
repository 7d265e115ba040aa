"""Groups and plans: between the schema of files and requests and the frozen domain data.

Both kinds of file hold the whole problem, so that they mean the same elsewhere and after the catalogue changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from polygon.convert import problem_data, problem_from_spec
from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError, Phrase, located, require
from polygon.domain.groups import Groups
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.schema import GroupsSpec, PlanSpec, WorkerSpec


class PlanFile(NamedTuple):
    """What a plan file holds."""

    problem: Problem
    plan: Plan
    estimate: Mapping[str, Any]


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
            most = problem.cluster.pools[member.pool].devices
            require(member.devices <= most, f"{where}.devices", member.devices, f"at most the {most} of the pool")
            allocation[s, member.pool] += member.devices
    return Groups(problem=problem, allocation=allocation, objective=spec.objective, solver=spec.solver, seed=spec.seed)


def groups_data(groups: Groups) -> dict[str, Any]:
    """The groups as a file says them."""
    cluster = groups.problem.cluster
    return {
        "format": "polygon-groups",
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
    spans = simple.pop("spans")
    require(len(spans) == len(stages), "spans", Phrase(f"{len(spans)} entries"), f"{len(stages)}, one a stage")
    for s, (row, stage) in enumerate(zip(spans, stages, strict=True)):
        require(len(row) == stage.width, f"spans[{s}]", Phrase(f"{len(row)} entries"), f"{stage.width}, one a worker")
        for w, span in enumerate(row):
            require(span >= 1, f"spans[{s}][{w}]", span, "a whole number >= 1")
    plan = Plan(
        stages=stages, routes=_routes(spec.routes, stages), spans=tuple(map(tuple, spans)), links=tuple(links), **simple
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
    require(
        shape_fits and routes.dtype.kind == "i", "routes", Phrase(f"shape {routes.shape} of {routes.dtype}"), expected
    )
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
        "format": "polygon-plan",
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
