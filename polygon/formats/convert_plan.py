"""Groups and plans: between the schema of files and requests and the frozen domain data.

Both kinds of file hold the whole problem, so that they mean the same elsewhere and after the catalogue changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polygon.domain.block import require_size
from polygon.domain.cluster import Cluster
from polygon.domain.errors import Phrase, fault, located, require
from polygon.domain.groups import Groups
from polygon.domain.message import Message
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, SumTree, Worker
from polygon.domain.schedule import BACKWARD, FORWARD, Action, orders_end
from polygon.formats.convert import problem_data, problem_from_spec
from polygon.formats.schema import GroupsSpec, PlanSpec, SumTreeSpec, WorkerSpec

KINDS = "FB"
MOST_SHOWN = 60
"""Letters of a worker's actions that an error shows."""


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
            require(
                member.devices <= most,
                f"{where}.devices",
                member.devices,
                Message("expected.at_most_of_pool", most=most),
            )
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
    require(
        index < len(cluster.pools), f"{where}.pool", index, Message("expected.last_pool", last=len(cluster.pools) - 1)
    )
    pool = _pool_data(cluster, index)
    for key, found in (("region", region), ("device", device)):
        require(found == pool[key], f"{where}.{key}", found, Message("expected.as_pool", value=pool[key], pool=index))


# Plans

MOST_STREAMS = 256
"""Of one link: every one is a connection of every two ranks that use it. 16 are the most that the planner takes."""
MOST_SPAN = 2**20
"""More micro-batches than any step has. Lists of actions are as long as windows, the sums of spans."""


def plan_from_spec(spec: PlanSpec) -> PlanFile:
    """The plan that a file holds, with its problem and estimate.

    Checks what the plan refers to (pools, devices, routes, regions); whether it is a *good* or even a possible plan
    is another question (memory, cover of the layers).
    """
    with located("problem."):
        problem = problem_from_spec(spec.problem)
    cluster = problem.cluster
    first = np.array([pool.first_device for pool in cluster.pools])
    chunks: int = spec.chunks
    divides = chunks >= 1 and len(spec.stages) % chunks == 0
    require(divides, "chunks", chunks, Message("expected.divisor_of_stages", stages=len(spec.stages)))
    groups = len(spec.stages) // chunks
    taken = np.zeros(cluster.devices, dtype=bool)
    stages: list[Stage] = []
    for s, given in enumerate(spec.stages):
        again = stages[s % groups].workers if s >= groups else None
        stages.append(_stage(given, f"stages[{s}]", problem, first, taken, again))
    names = {region.name: i for i, region in enumerate(cluster.regions)}
    links = []
    for k, link in enumerate(spec.links):
        for key, name in (("from", link.from_region), ("to", link.to_region)):
            require(name in names, f"links[{k}].{key}", name, Message("expected.region", names=tuple(names)))
        most = Message("expected.at_most", most=MOST_STREAMS)
        require(link.streams <= MOST_STREAMS, f"links[{k}].streams", link.streams, most)
        fields = link.model_dump(exclude={"from_region", "to_region"})
        links.append(LinkUse(source=names[link.from_region], target=names[link.to_region], **fields))
    simple: Any = spec.model_dump(
        exclude={"format", "version", "problem", "stages", "routes", "links", "order", "estimate"}
    )
    spans = simple.pop("spans")
    _require_one_a_worker("spans", spans, stages)
    for s, row in enumerate(spans):
        for w, span in enumerate(row):
            require_size(span, f"spans[{s}][{w}]", at_most=MOST_SPAN)
    plan = Plan(
        stages=tuple(stages),
        routes=_routes(spec.routes, stages),
        spans=tuple(map(tuple, spans)),
        links=tuple(links),
        **simple,
    )
    if spec.order is not None:
        require(chunks == 1, "order", Phrase("an order of workers with several stages"), "none")
        plan = dataclasses.replace(plan, order=_ranks(spec.order, plan))
        require(
            orders_end(plan),
            "order",
            Phrase("workers that wait for one another"),
            "an order in which every action's turn comes",
        )
    return PlanFile(problem, plan, spec.estimate)


def _require_one_a_worker(name: str, rows: Sequence[Sequence[Any]], stages: Sequence[Stage]) -> None:
    """Require a row of every stage, with an entry of each of its workers."""
    found, expected = Message("found.entries", entries=len(rows)), Message("expected.one_a_stage", stages=len(stages))
    require(len(rows) == len(stages), name, found, expected)
    for s, (row, stage) in enumerate(zip(rows, stages, strict=True)):
        expected = Message("expected.one_a_worker", workers=stage.width)
        require(len(row) == stage.width, f"{name}[{s}]", Message("found.entries", entries=len(row)), expected)


def _stage(
    spec: Any, where: str, problem: Problem, first: np.ndarray, taken: np.ndarray, again: tuple[Worker, ...] | None
) -> Stage:
    """One stage; its devices are marked in `taken`, unless it is a further chunk on the workers `again`."""
    begin, end = spec.layers
    layers = problem.model.layers
    require(begin < end <= layers, f"{where}.layers", spec.layers, Message("expected.within_layers", layers=layers))
    blocks = _blocks(begin, end, layers)
    most = Message("expected.at_most_that_it_has", most=blocks)
    require((spec.recompute_blocks or 0) <= blocks, f"{where}.recompute_blocks", spec.recompute_blocks, most)
    held = taken if again is None else np.zeros_like(taken)
    workers = tuple(
        _worker(worker, f"{where}.workers[{i}]", problem.cluster, first, held) for i, worker in enumerate(spec.workers)
    )
    if again is not None:
        require(
            workers == again,
            f"{where}.workers",
            Phrase("other workers"),
            "those of the first chunk's stage on the same workers",
        )
    fields = spec.model_dump(exclude={"layers", "workers", "trees"})
    trees = _trees(spec.trees, f"{where}.trees", problem.cluster)
    return Stage(first_layer=begin, last_layer=end, workers=workers, trees=trees, **fields)


def _blocks(begin: int, end: int, layers: int) -> int:
    """Of layers [begin, end): the model's first and last one are none."""
    return max(0, min(end, layers - 1) - max(begin, 1))


def _trees(specs: Sequence[SumTreeSpec], where: str, cluster: Cluster) -> tuple[SumTree, ...]:
    """The trees of a stage; whether these are trees of its regions is the checker's question."""
    names = {region.name: i for i, region in enumerate(cluster.regions)}
    found = []
    for i, spec in enumerate(specs):
        for key, name in (("root", spec.root), *(("relays", name) for pair in spec.relays.items() for name in pair)):
            require(name in names, f"{where}[{i}].{key}", name, Message("expected.region", names=tuple(names)))
        relays = sorted((names[region], names[parent]) for region, parent in spec.relays.items())
        found.append(SumTree(part=spec.part, root=names[spec.root], relays=tuple(relays)))
    return tuple(found)


def _trees_data(trees: Sequence[SumTree], names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"part": tree.part, "root": names[tree.root], "relays": {names[r]: names[parent] for r, parent in tree.relays}}
        for tree in trees
    ]


def _worker(spec: WorkerSpec, where: str, cluster: Cluster, first: np.ndarray, taken: np.ndarray) -> Worker:
    _check_pool(cluster, spec.pool, spec.region, spec.device, where)
    pool = cluster.pools[spec.pool]
    end = pool.first_device + pool.devices
    devices: list[int] = []
    for k, (begin, count) in enumerate(spec.devices):
        run = f"{where}.devices[{k}]"
        require(count >= 1, run, [begin, count], "a run [first, count] with count >= 1")
        inside = pool.first_device <= begin and begin + count <= end
        require(inside, run, [begin, count], Message("expected.run_within", first=pool.first_device, last=end - 1))
        require(not taken[begin : begin + count].any(), run, [begin, count], "devices that no other worker holds")
        taken[begin : begin + count] = True
        devices.extend(range(begin, begin + count))
    expected = Message("expected.divisor_of_devices", devices=len(devices))
    require(len(devices) % spec.cp == 0, f"{where}.cp", spec.cp, expected)
    return Worker(pool=spec.pool, devices=tuple(devices), cp=spec.cp)


def _routes(rows: list[Any], stages: Sequence[Stage]) -> np.ndarray:
    """Routes as an array, every entry a worker of its stage."""
    expected = Message("expected.route_rows", stages=len(stages))
    try:
        routes = np.array(rows)
    except ValueError:
        raise fault("routes", Phrase("rows of different length"), expected) from None
    shape_fits = routes.ndim == 2 and routes.shape[0] > 0 and routes.shape[1] == len(stages)
    require(
        shape_fits and routes.dtype.kind == "i",
        "routes",
        Message("found.shape_of", shape=routes.shape, dtype=str(routes.dtype)),
        expected,
    )
    widths = np.array([stage.width for stage in stages])
    wrong = np.argwhere((routes < 0) | (routes >= widths))
    if len(wrong):
        m, s = wrong[0]
        expected = Message("expected.worker_of", last=int(widths[s]) - 1, stage=int(s))
        raise fault(f"routes[{m}][{s}]", int(routes[m, s]), expected)
    return routes.astype(np.int64)


def _ranks(rows: list[list[str]], plan: Plan) -> np.ndarray:
    """The places of all actions among their workers' (`Plan.order`), each worker's named in a text of its own."""
    ranks = np.zeros((2, *plan.routes.shape), dtype=np.int64)
    _require_one_a_worker("order", rows, plan.stages)
    for s, row in enumerate(rows):
        for w, text in enumerate(row):
            mine = np.flatnonzero(plan.routes[:, s] == w)
            actions = [Action.named(name) for name in text.split()]
            known = [action for action in actions if action is not None and action.kind in KINDS and not action.chunk]
            begun = np.array([(KINDS.index(action.kind), action.micro_batch) for action in known], dtype=np.int64)
            begun = begun.reshape(-1, 2)
            whole = len(known) == len(actions) == 2 * len(mine) and all(
                np.array_equal(np.sort(begun[begun[:, 0] == k, 1]), mine) for k in (FORWARD, BACKWARD)
            )
            expected = "F and B of each of its micro-batches once"
            require(whole, f"order[{s}][{w}]", Phrase(_shortened(text)), expected)
            ranks[begun[:, 0], begun[:, 1], s] = np.arange(len(begun))
            late = mine[ranks[FORWARD, mine, s] > ranks[BACKWARD, mine, s]]
            require(not len(late), f"order[{s}][{w}]", Phrase(f"B{late[0]}" if len(late) else ""), "F before B")
    return ranks


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + " ..."


def _order_data(plan: Plan) -> list[list[str]] | None:
    """The order of every worker's actions as a file says it."""
    if plan.order is None:
        return None
    found = []
    for s, stage in enumerate(plan.stages):
        ranks, column = plan.order[:, :, s], plan.routes[:, s]
        names = [[f"{kind}{m}" for m in range(plan.micro_batches)] for kind in KINDS]
        texts = []
        for w in range(stage.width):
            kinds, mine = np.nonzero(np.broadcast_to(column == w, ranks.shape))
            in_order = np.argsort(ranks[kinds, mine])
            texts.append(" ".join(names[k][m] for k, m in zip(kinds[in_order], mine[in_order], strict=True)))
        found.append(texts)
    return found


def plan_data(problem: Problem, plan: Plan, estimate: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plan as a file says it; `estimate` is free in form."""
    cluster = problem.cluster
    names, layers = [region.name for region in cluster.regions], problem.model.layers
    # Uniform splits recompute so many blocks at most, of shorter stages all.
    most = [_blocks(stage.first_layer, stage.last_layer, layers) for stage in plan.stages]
    pools = [_pool_data(cluster, p) for p in range(len(cluster.pools))]
    return {
        "format": "polygon-plan",
        "version": 1,
        "problem": problem_data(problem),
        "stages": [
            {
                "layers": [stage.first_layer, stage.last_layer],
                **_simple_fields(stage, without=("first_layer", "last_layer", "workers", "trees", "recompute_blocks")),
                "recompute_blocks": None
                if stage.recompute_blocks is None
                else min(stage.recompute_blocks, blocks) or None,
                **({"trees": _trees_data(stage.trees, names)} if stage.trees else {}),
                "workers": [
                    pools[worker.pool]
                    | {"devices": _runs(worker.devices)}
                    | ({"cp": worker.cp} if worker.cp > 1 else {})
                    for worker in stage.workers
                ],
            }
            for stage, blocks in zip(plan.stages, most, strict=True)
        ],
        "routes": plan.routes,
        "links": [
            {"from": names[use.source], "to": names[use.target], **_simple_fields(use, without=("source", "target"))}
            for use in sorted(plan.links, key=lambda use: (use.source, use.target))
        ],
        **_simple_fields(plan, without=("stages", "routes", "links", "order")),
        **({} if plan.order is None else {"order": _order_data(plan)}),
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
