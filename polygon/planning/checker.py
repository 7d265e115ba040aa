"""An independent check of a plan against its problem, sharing no code with the search."""

from __future__ import annotations

from collections import Counter

import numpy as np

from polygon.cost.convergence import TRAFFIC, Allowed, allowed, level_needed
from polygon.cost.estimate import worker_memory
from polygon.cost.money import excesses, step_bill
from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.message import Message, Violation
from polygon.domain.plan import (
    COMPRESSIONS,
    PARITY_LEVELS,
    RECOMPUTE,
    REDUCTIONS,
    Plan,
    Problem,
    Stage,
    SumTree,
    Worker,
    sums_over_trees,
)
from polygon.domain.schedule import orders_end

PRICEABLE = frozenset(
    f"plan.{kind}"
    for kind in (
        "memory", "limit", "compression_not_allowed", "packing_not_allowed", "local_steps_not_allowed",
        "forbidden_region", "forbidden_device", "most_stages", "only_regions", "never_regions",
    )
)  # fmt: skip
"""Kinds of violations under which a plan is whole and can be priced: it is too large, too dear, or nothing that the
constraints allow."""

TRAIN_ALL_THE_SAME = frozenset(
    f"plan.{kind}"
    for kind in (
        "zero_degrees", "shards", "chunk_routes", "chunk_widths", "several_nodes", "recompute_blocks",
        "heads", "cp_tokens", "ep", "ep_apart", "ep_shares", "no_experts",
    )
)  # fmt: skip
"""Faults of structure under which ranks still train the model on the whole batch, and those that whoever runs a plan
looks at by itself."""

PARTS_ERROR = 1e-6
"""By which the parts of a stage's trees may miss 1."""


def violations(problem: Problem, plan: Plan, tables: CostTables | None = None) -> list[Violation]:
    """Everything that is wrong with a plan; empty for a plan that can be run.

    Checks layers, workers, devices, routes, spans, links, constraints and memory. Kinds and their words are in
    `polygon/domain/words.json`, from `plan.layers` on.
    """
    found = faults_of_structure(problem, plan)
    if found:
        return found
    found += _links(problem, plan)
    found += _local_steps(problem, plan)
    found += broken_rules(problem, plan)
    tables = tables or CostTables(problem)
    if problem.constraints.limits_cost:
        found += _dear(problem, plan, step_times(plan, tables))
    place = tables.placement(plan)
    for i, memory in enumerate(worker_memory(plan, tables, place)):
        pool = problem.cluster.pools[place.pool[i]]
        allowed = pool.device.memory_bytes * (1 - problem.constraints.memory_headroom)
        if memory.total_bytes > allowed:
            s = int(place.stage[i])
            found.append(
                Violation(
                    "plan.memory",
                    stage=s,
                    worker=i - int(place.offset[s]),
                    device=pool.device.name,
                    need_bytes=memory.total_bytes,
                    over_bytes=memory.total_bytes - allowed,
                    owner=Message(f"memory.{memory.owner}"),
                )
            )
    return found


def broken_limits(problem: Problem, plan: Plan, times: StepTimes) -> list[Violation]:
    """What a plan that is whole breaks of what is allowed, memory apart: each packing once, however many links have it.

    For who changes a plan step by step: of links that are packed alike one is looked at.
    """
    may = allowed(problem)
    packed = {(field, getattr(use, field), use.source == use.target) for use in plan.links for field in TRAFFIC}
    modes = sorted(
        {(field, mode) for field, mode, inside in packed if _may_not(problem, may, field, mode, inside=inside)}
    )
    found = [
        Violation(
            "plan.packing_not_allowed",
            what=Message(f"loss.{field}", mode=mode),
            why=_not_allowed(problem, field, mode),
        )
        for field, mode in modes
    ]
    found += _local_steps(problem, plan)
    found += broken_rules(problem, plan)
    return found + (_dear(problem, plan, times) if problem.constraints.limits_cost else [])


def _dear(problem: Problem, plan: Plan, times: StepTimes) -> list[Violation]:
    """Limits on time, money and what leaves a region that a plan exceeds."""
    bill = step_bill(problem, plan, times)
    return [Violation("plan.limit", excess=excess) for _, excess in excesses(problem, bill)]


def require_whole(problem: Problem, plan: Plan) -> None:
    """Refuse a plan by which the model would not be trained, or not on the whole batch."""
    for fault in faults_of_structure(problem, plan):
        if fault.kind not in TRAIN_ALL_THE_SAME:
            raise InputError(f"plan: {fault}")


def faults_of_structure(problem: Problem, plan: Plan) -> list[Violation]:
    """What makes a plan none for its model and batch, whatever it costs and whatever is allowed."""
    found = []
    cluster, model = problem.cluster, problem.model
    next_layer = 0
    for s, stage in enumerate(plan.stages):
        if stage.first_layer != next_layer or stage.last_layer <= stage.first_layer:
            found.append(
                Violation("plan.layers", stage=s, first=stage.first_layer, last=stage.last_layer, follows=next_layer)
            )
        next_layer = stage.last_layer
        if not stage.workers:
            found.append(Violation("plan.no_workers", stage=s))
        if stage.zero not in (0, 1, 2, 3):
            found.append(Violation("plan.zero", stage=s, zero=stage.zero))
        if stage.recompute not in RECOMPUTE:
            found.append(Violation("plan.recompute", stage=s, recompute=stage.recompute))
        if stage.recompute_blocks is not None and (stage.recompute == "none" or stage.recompute_blocks < 1):
            blocks, how = stage.recompute_blocks, stage.recompute
            found.append(Violation("plan.recompute_blocks", stage=s, blocks=blocks, recompute=how))
        for w, worker in enumerate(stage.workers):
            if not 0 <= worker.pool < len(cluster.pools):
                found.append(Violation("plan.pool", stage=s, worker=w, pool=worker.pool))
                continue
            pool = cluster.pools[worker.pool]
            if not worker.devices:
                found.append(Violation("plan.no_devices", stage=s, worker=w))
            elif not all(pool.first_device <= d < pool.first_device + pool.devices for d in worker.devices):
                found.append(Violation("plan.other_pool", stage=s, worker=w, devices=worker.devices, pool=worker.pool))
            elif any(len({pool.node_of(d) for d in group}) > 1 for group in _tensor_groups(worker)):
                found.append(Violation("plan.several_nodes", stage=s, worker=w, devices=worker.devices))
            if worker.cp >= 1 and worker.tp and model.heads % worker.tp:
                found.append(Violation("plan.heads", stage=s, worker=w, heads=model.heads, tp=worker.tp))
            found += _context(problem, worker, s, w)
        found += _shared_out(problem, stage, s)
    if next_layer != model.layers:
        found.append(Violation("plan.last_layer", last=next_layer, layers=model.layers))
    found += _chunks(plan)
    found += _trees(problem, plan)
    if plan.routes.ndim != 2 or plan.routes.shape[1] != len(plan.stages) or not plan.micro_batches:
        return [*found, Violation("plan.routes_shape", shape=plan.routes.shape, stages=len(plan.stages))]
    if plan.micro_batches * plan.micro_batch_size != problem.batch.global_batch:
        found.append(
            Violation(
                "plan.global_batch",
                micro_batches=plan.micro_batches,
                micro_batch_size=plan.micro_batch_size,
                global_batch=problem.batch.global_batch,
            )
        )
    for s, stage in enumerate(plan.stages):
        column = plan.routes[:, s]
        if column.min() < 0 or column.max() >= stage.width:
            least, most = int(column.min()), int(column.max())
            found.append(Violation("plan.route", stage=s, least=least, most=most, width=stage.width))
        elif stage.ep > 1 and len(set(plan.shares(s).tolist())) > 1:
            shares = plan.shares(s)
            found.append(Violation("plan.ep_shares", stage=s, least=int(shares.min()), most=int(shares.max())))
    if [len(row) for row in plan.spans] != [stage.width for stage in plan.stages]:
        found.append(Violation("plan.spans_shape"))
    elif any(span < 1 for row in plan.spans for span in row):
        found.append(Violation("plan.spans"))
    if plan.order is not None and not _orders_all(plan):
        found.append(Violation("plan.order"))
    if plan.reduction not in REDUCTIONS:
        found.append(Violation("plan.reduction", reduction=plan.reduction))
    if plan.local_steps < 1:
        found.append(Violation("plan.local_steps_least", local_steps=plan.local_steps))
    return found


def _orders_all(plan: Plan) -> bool:
    """Whether the plan's own order names every action of every worker once and ends: workers that share experts go
    forward and backward together."""
    if plan.order is None or plan.chunks > 1 or plan.order.shape != (2, *plan.routes.shape):
        return False
    for s, stage in enumerate(plan.stages):
        turns = set()
        for w in range(stage.width):
            ranks = plan.order[:, plan.routes[:, s] == w, s]
            in_order = np.argsort(ranks, axis=None)
            if not np.array_equal(ranks.ravel()[in_order], np.arange(ranks.size)):
                return False
            turns.add((in_order < ranks.shape[1]).tobytes())
        if stage.ep > 1 and len(turns) > 1:
            return False
    return orders_end(plan)


def _tensor_groups(worker: Worker) -> list[tuple[int, ...]]:
    """The devices of a worker that split the same layers: all, or those of each part of the sequence."""
    tp = max(1, len(worker.devices) // max(1, worker.cp))
    return [worker.devices[a : a + tp] for a in range(0, len(worker.devices), tp)]


def _context(problem: Problem, worker: Worker, s: int, w: int) -> list[Violation]:
    """What keeps worker w of stage s from cutting sequences into its cp parts."""
    cp, devices, tokens = worker.cp, len(worker.devices), problem.batch.seq_len
    if cp < 1 or devices % cp:
        return [Violation("plan.cp_devices", stage=s, worker=w, devices=devices, cp=cp)]
    return [Violation("plan.cp_tokens", stage=s, worker=w, tokens=tokens, cp=cp)] if tokens % cp else []


def _shared_out(problem: Problem, stage: Stage, s: int) -> list[Violation]:
    """What keeps the devices of stage s from sharing out its experts and its ZeRO shards.

    Those that hold the same slices of the layers are as many as the parts (cp) of all workers together.
    """
    members, found = stage.members, []
    experts = problem.model.experts
    if stage.ep < 1 or members % stage.ep or (stage.ep > 1 and problem.model.experts % stage.ep):
        found.append(Violation("plan.ep", stage=s, ep=stage.ep, experts=experts, members=members))
    alike = Counter[tuple[int, int]]()
    for worker in stage.workers:
        alike[worker.pool, len(worker.devices) // max(1, worker.cp)] += worker.cp
    if not members % max(1, stage.ep) and any(devices % max(1, stage.ep) for devices in alike.values()):
        found.append(Violation("plan.ep_apart", stage=s, ep=stage.ep))
    if stage.ep > 1 and not experts:
        found.append(Violation("plan.no_experts", stage=s, ep=stage.ep))
    if stage.zero and len({tp for _, tp in alike}) > 1:
        found.append(Violation("plan.zero_degrees", stage=s, zero=stage.zero, degrees=sorted({tp for _, tp in alike})))
    if stage.shards < 0 or (stage.shards and members % stage.shards):
        found.append(Violation("plan.shards", stage=s, shards=stage.shards, members=members))
    return found


def _trees(problem: Problem, plan: Plan) -> list[Violation]:
    """Trees of a stage that do not sum all of its gradients over its regions, or where sums cannot go over trees."""
    found, pools = [], problem.cluster.pools
    for s, stage in enumerate(plan.stages):
        if not stage.trees:
            continue
        regions = {pools[worker.pool].region for worker in stage.workers}
        if not sums_over_trees(problem, plan, s):
            found.append(Violation("plan.no_trees", stage=s, regions=len(regions)))
        elif abs(sum(tree.part for tree in stage.trees) - 1) > PARTS_ERROR or min(t.part for t in stage.trees) <= 0:
            found.append(Violation("plan.tree_parts", stage=s, parts=round(sum(t.part for t in stage.trees), 9)))
        else:
            found += [
                Violation("plan.tree", stage=s, tree=i) for i, t in enumerate(stage.trees) if not _spans(t, regions)
            ]
    return found


def _spans(tree: SumTree, regions: set[int]) -> bool:
    """Whether every region sends to the root, or to one that does."""
    relays = dict(tree.relays)
    over, under = set(relays.values()), set(relays)
    return tree.root in regions - under and over <= regions - under - {tree.root} and under < regions


def _chunks(plan: Plan) -> list[Violation]:
    """Devices used twice, other than by the chunks of an interleaved plan: stage s + n / chunks on those of s."""
    stages = plan.stages
    if plan.chunks < 1 or len(stages) % plan.chunks:
        return [Violation("plan.chunks", chunks=plan.chunks, stages=len(stages))]
    groups = len(stages) // plan.chunks
    found = []
    if plan.chunks > 1 and groups == 1:
        found.append(Violation("plan.chunks_of_one_group", chunks=plan.chunks))
    if plan.chunks > 1 and plan.routes.ndim == 2 and (plan.routes != plan.routes[:, :1]).any():
        found.append(Violation("plan.chunk_routes", chunks=plan.chunks))
    if plan.chunks > 1 and len({stage.width for stage in stages}) > 1:
        found.append(Violation("plan.chunk_widths", chunks=plan.chunks))
    found += [
        Violation("plan.chunk_workers", stage=s, first=s % groups, chunks=plan.chunks)
        for s, stage in enumerate(stages)
        if stage.workers != stages[s % groups].workers
    ]
    found += [
        Violation("plan.chunk_trees", stage=s, first=s % groups)
        for s, stage in enumerate(stages)
        if stage.trees != stages[s % groups].trees
    ]
    uses = Counter(d for stage in stages[:groups] for worker in stage.workers for d in worker.devices)
    return found + [Violation("plan.device_twice", device=d, times=count) for d, count in uses.items() if count > 1]


def _links(problem: Problem, plan: Plan) -> list[Violation]:
    found = []
    cluster = problem.cluster
    region = [[cluster.pools[w.pool].region for w in stage.workers] for stage in plan.stages]
    for s in range(len(plan.stages) - 1):
        pairs = {(region[s][a], region[s + 1][b]) for a, b in plan.routes[:, s : s + 2]}
        found += [
            Violation(
                "plan.no_link", stage=s, next=s + 1, source=cluster.regions[a].name, target=cluster.regions[b].name
            )
            for a, b in sorted(pairs)
            if not cluster.connected(a, b)
        ]
    for s, members in enumerate(region):
        found += [
            Violation("plan.no_gradient_link", stage=s, a=cluster.regions[a].name, b=cluster.regions[b].name)
            for a in sorted(set(members))
            for b in sorted(set(members))
            if a < b and not cluster.connected(a, b)
        ]
    if plan.reduction != "all-reduce" or plan.local_steps > 1:
        found += [
            Violation("plan.packed_inside", region=cluster.regions[r].name)
            for r in sorted(plan.packed_inside)
            if 0 <= r < len(cluster.regions)
        ]
    may = allowed(problem)
    seen = Counter((use.source, use.target) for use in plan.links)
    names = dict(enumerate(region.name for region in cluster.regions))
    found += [
        Violation("plan.link_twice", source=names.get(a, a), target=names.get(b, b), times=n)
        for (a, b), n in seen.items()
        if n > 1
    ]
    for use in plan.links:
        ends = {"source": names.get(use.source, use.source), "target": names.get(use.target, use.target)}
        for field in TRAFFIC:
            mode = getattr(use, field)
            if mode not in COMPRESSIONS:
                found.append(Violation("plan.compression", **ends, traffic=field, mode=mode))
            elif _may_not(problem, may, field, mode, inside=use.source == use.target):
                why = _not_allowed(problem, field, mode)
                found.append(Violation("plan.compression_not_allowed", **ends, traffic=field, mode=mode, why=why))
        if use.streams < 1:
            found.append(Violation("plan.streams", **ends, streams=use.streams))
    return found


def _may_not(problem: Problem, may: Allowed, traffic: str, mode: str, *, inside: bool) -> bool:
    """Whether the constraints keep messages of a class from being packed so, between regions or inside one."""
    if mode == "none" and inside:
        return False  # a list says how to pack where it is packed; inside a region nothing need be
    return mode not in getattr(may, traffic) and not _unseen(problem, traffic, mode)


def _unseen(problem: Problem, traffic: str, mode: str) -> bool:
    """Whether the search does not take a packing because nobody has shown what it does, though it would be allowed."""
    limits = problem.constraints
    by_level = PARITY_LEVELS.index(level_needed(problem, traffic, mode)) <= PARITY_LEVELS.index(limits.parity)
    return mode in limits.compressions if limits.compressions else by_level


def _not_allowed(problem: Problem, traffic: str, kind: str | int) -> Message:
    """Why the search may not choose a kind: the constraints' own list, or the level of parity that it needs."""
    limits = problem.constraints
    if limits.local_steps if traffic == "local_steps" else limits.compressions:
        return Message("why.not_listed")
    return Message("why.parity", parity=limits.parity, needed=level_needed(problem, traffic, kind))


def _local_steps(problem: Problem, plan: Plan) -> list[Violation]:
    """What keeps regions from training by themselves for some steps, if the plan has them do so."""
    if plan.local_steps == 1:
        return []
    found = []
    limits, steps = problem.constraints, plan.local_steps
    by_level = PARITY_LEVELS.index(level_needed(problem, "local_steps", steps)) <= PARITY_LEVELS.index(limits.parity)
    if not (steps in limits.local_steps if limits.local_steps else by_level):
        why = _not_allowed(problem, "local_steps", steps)
        found.append(Violation("plan.local_steps_not_allowed", local_steps=steps, why=why))
    if plan.reduction != "all-reduce":
        found.append(Violation("plan.local_steps_reduction", local_steps=steps, reduction=plan.reduction))
    if problem.batch.precision == "fp16":
        found.append(Violation("plan.local_steps_fp16", local_steps=steps))
    if any(len({worker.tp for worker in stage.workers}) > 1 for stage in plan.stages):
        found.append(Violation("plan.local_steps_tp", local_steps=steps))
    elif plan.cuts_tied_unlike(problem.model):
        found.append(Violation("plan.local_steps_tied", local_steps=steps))
    if any(stage.zero == 3 for stage in plan.stages):
        found.append(Violation("plan.local_steps_zero", local_steps=steps))
    if not plan.stays_in_regions(problem.cluster):
        found.append(Violation("plan.local_steps_regions", local_steps=steps))
    return found


def broken_rules(problem: Problem, plan: Plan) -> list[Violation]:
    """What a plan breaks of the constraints' rules on where stages lie and how many there may be."""
    cluster, limits = problem.cluster, problem.constraints
    names = [[cluster.regions[cluster.pools[w.pool].region].name for w in stage.workers] for stage in plan.stages]
    found = [
        Violation("plan.forbidden_region", stage=s, region=name)
        for s, members in enumerate(names)
        for name in sorted(set(members) & set(limits.forbidden_regions))
    ]
    found += [
        Violation("plan.forbidden_device", stage=s, device=name)
        for s, stage in enumerate(plan.stages)
        for name in sorted({cluster.pools[w.pool].device.name for w in stage.workers} & set(limits.forbidden_devices))
    ]
    if limits.most_stages is not None and len(plan.stages) > limits.most_stages:
        found.append(Violation("plan.most_stages", stages=len(plan.stages), most=limits.most_stages))
    for rule in limits.rules:
        s = rule.stage if rule.stage >= 0 else len(names) + rule.stage
        if not 0 <= s < len(names):
            continue
        if rule.only_regions:
            found += [
                Violation("plan.only_regions", stage=s, region=name, regions=rule.only_regions)
                for name in sorted(set(names[s]) - set(rule.only_regions))
            ]
        found += [
            Violation("plan.never_regions", stage=s, region=name, regions=rule.never_regions)
            for name in sorted(set(names[s]) & set(rule.never_regions))
        ]
    return found
