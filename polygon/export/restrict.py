"""The best plan within what a target can express, priced by the same estimate as the plan itself.

Uniform targets know one degree of each kind of parallelism, stages of equal width and micro-batches dealt in turn
(1F1B, interleaved or not). A plan that is of this shape stays as it is. Else the devices of the plan, those of one type
or those of one region are laid in a chain, cut into pp stages of dp workers of tp x cp devices, and every such cut that
fits the memory is priced. What was lost is priced one thing after another, so that the costs add up to the difference
of the two steps.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.estimate import worker_memory
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.export.bundle import Loss
from polygon.planning.polish import interleaved

DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_PRICED = 60
"""Cuts whose exact step is computed, best compute time first."""


def _none(model: Model) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a target can express."""

    tensor: bool = True
    """Tensor parallelism, with norms on parts of the sequence where there is some."""
    context: bool = True
    experts: bool = True
    """Experts spread over devices that hold the same layers."""
    chunks: bool = True
    """Several stages on each group of workers."""
    uneven_layers: bool = True
    zero_with_pipeline: int = 1
    zero_alone: int = 3
    shard_groups: bool = True
    """ZeRO within groups of a stage's devices, copies between them."""
    gradient_packings: tuple[str, ...] = ("none",)
    """Packings of weight gradients, one for all links."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    some_blocks: tuple[str, ...] = ()
    """Kinds of recomputation that may be for a number of a stage's blocks, the same in all."""
    rotary_scalings: tuple[str, ...] = ()
    """Kinds of scaled rotary positions that the files can say."""
    said_fields: Callable[[Model], tuple[str, ...]] = _none
    """Fields of a model that make its blocks other than plain and that the files say all the same."""

    def most_zero(self, stages: int) -> int:
        """The highest stage of ZeRO in a pipeline of so many."""
        return self.zero_with_pipeline if stages > 1 else self.zero_alone

    def express(self, problem: Problem, plan: Plan) -> bool:
        """Whether the target can say a plan as it is, but for how links are packed."""
        first, model = plan.stages[0], problem.model
        worker, dp = first.workers[0], first.width
        turns = np.arange(plan.micro_batches) % dp
        alike = {
            (stage.width, stage.zero, stage.shards, stage.recompute, stage.recompute_blocks, stage.ep,
             stage.sequence_parallel, *((w.tp, w.cp) for w in stage.workers))
            for stage in plan.stages
        }  # fmt: skip
        blocks = [_blocks(model, stage) for stage in plan.stages]
        return (
            len(alike) == 1
            and len({(w.tp, w.cp) for w in first.workers}) == 1
            and plan.micro_batches % dp == 0
            and (plan.routes == turns[:, None]).all()
            and (len(plan.stages) == 1 or (plan.order is None and plan.spans == ((dp,) * dp,) * len(plan.stages)))
            and min(blocks) > 0
            and (self.uneven_layers or max(blocks) - min(blocks) <= 1)
            and (self.tensor or worker.tp == 1)
            and self._cut(problem, worker.cp)
            and (self.experts or first.ep == 1)
            and (plan.chunks == 1 or (self.chunks and (plan.micro_batches // dp) % plan.groups == 0))
            and first.zero <= self.most_zero(len(plan.stages))
            and (self.shard_groups or first.shards in (0, dp * worker.cp))
            and first.recompute in self.recompute
            and (first.recompute_blocks is None or first.recompute in self.some_blocks)
        )

    def _cut(self, problem: Problem, cp: int) -> bool:
        """Whether sequences can be cut into cp parts: uniform targets give every rank two pieces, an early, a late."""
        return cp == 1 or (self.context and problem.batch.seq_len % (2 * cp) == 0)

    def cuts(self, problem: Problem, plan: Plan) -> list[tuple[int, int]]:
        """Context- and expert-parallel degrees worth a try: none, and those that the plan has."""
        context = {1, *(w.cp for stage in plan.stages for w in stage.workers if self._cut(problem, w.cp))}
        experts = {1, *(stage.ep for stage in plan.stages if self.experts)}
        return sorted(itertools.product(context, experts))


@dataclass(frozen=True, kw_only=True, eq=False)
class Uniform:
    """A uniform plan; ranks are the chain's devices in order."""

    plan: Plan
    step_s: float

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.plan.stages[0].width

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.plan.stages[0].workers[0].tp

    @property
    def cp(self) -> int:
        """Context-parallel degree."""
        return self.plan.stages[0].workers[0].cp

    @property
    def ep(self) -> int:
        """Expert-parallel degree."""
        return self.plan.stages[0].ep

    @property
    def pp(self) -> int:
        """Groups of workers that a micro-batch passes."""
        return self.plan.groups

    @property
    def shards(self) -> int:
        """Devices over which ZeRO divides; 1 where it does not."""
        first = self.plan.stages[0]
        return (first.shards or self.dp * self.cp) if first.zero else 1

    @property
    def chain(self) -> tuple[Worker, ...]:
        """Workers in the order of ranks: stage by stage."""
        return self.plan.workers

    @property
    def gradient_accumulation(self) -> int:
        """Micro-batches that every worker takes in a step."""
        return self.plan.micro_batches // self.dp


def find_uniform(problem: Problem, plan: Plan, tables: CostTables, rules: Rules) -> Uniform | None:
    """The plan itself where the target can say it, else the fastest uniform plan on (part of) its devices; None where
    none fits."""
    packing = _gradient_packing(plan, rules)
    links = tuple(
        LinkUse(source=use.source, target=use.target, weight_gradients=packing, streams=use.streams)
        for use in plan.links
    )
    best: Uniform | None = None

    def consider(candidate: Plan) -> None:
        nonlocal best
        step_s = step_times(candidate, tables).step_s
        if math.isfinite(step_s) and (best is None or step_s < best.step_s):
            named = replace(candidate, solver=f"uniform of {plan.solver}", seed=plan.seed)
            best = Uniform(plan=named, step_s=step_s)

    if rules.express(problem, plan):
        consider(replace(_without_trees(plan), links=links, local_steps=1, reduction="all-reduce"))
        return best
    for priced, (bound_s, draft) in enumerate(sorted(_cuts(problem, plan, tables, rules), key=lambda cut: cut[0])):
        if priced >= MOST_PRICED or (best is not None and bound_s >= best.step_s):
            break
        fitted = _fit_memory(replace(draft, links=links), tables, rules)
        if fitted is not None:
            consider(fitted)
    if best is not None:
        for other in list(_variants(problem, plan, best.plan, rules)):
            if _fits(other, tables):
                consider(other)
    return best


def _variants(problem: Problem, plan: Plan, uniform: Plan, rules: Rules) -> Iterator[Plan]:
    """The uniform plan with more ZeRO, with the plan's shard groups, and with its chunks."""
    first, most = uniform.stages[0], rules.most_zero(len(uniform.stages))
    members = first.width * first.workers[0].cp
    groups = {0, *(stage.shards for stage in plan.stages if rules.shard_groups and stage.shards)}
    for zero in range(first.zero, most + 1) if members > 1 else ():
        for shards in sorted(groups if zero else {0}):
            if shards == 0 or members % shards == 0:
                stages = tuple(replace(stage, zero=zero, shards=shards) for stage in uniform.stages)
                yield replace(uniform, stages=stages)
    # Parts of a group's blocks that are recomputed differ from chunk to chunk: all or none are alike.
    if rules.chunks and plan.chunks > 1 and first.recompute_blocks is None:
        held = interleaved(uniform, plan.chunks)
        if held is not None:
            chunked = replace(
                uniform,
                stages=held,
                chunks=plan.chunks,
                routes=np.repeat(uniform.routes[:, :1], len(held), axis=1),
                spans=uniform.spans * plan.chunks,
            )
            if rules.express(problem, chunked):
                yield chunked


def _blocks(model: Model, stage: Stage) -> int:
    """Blocks of a stage: its layers less embedding and head."""
    return min(stage.last_layer, model.blocks + 1) - max(stage.first_layer, 1)


def _gradient_packing(plan: Plan, rules: Rules) -> str:
    """The plan's most used packing of weight gradients if the target has it."""
    used = [use.weight_gradients for use in plan.links]
    common = max(set(used), key=used.count, default="none")
    return common if common in rules.gradient_packings else rules.gradient_packings[-1] if common != "none" else "none"


def _chains(problem: Problem, plan: Plan, tp: int, cp: int) -> Iterator[list[Worker]]:
    """Workers of tp x cp devices: of all nodes that the plan uses, of one type, of one region; in the plan's order."""
    cluster = problem.cluster
    places: dict[tuple[int, int], None] = {}
    for stage in plan.stages:
        for worker in stage.workers:
            places.setdefault((worker.pool, cluster.pools[worker.pool].node_of(worker.devices[0])))
    used = {device for stage in plan.stages for worker in stage.workers for device in worker.devices}
    chain: list[Worker] = []
    for p, node in places:
        pool = cluster.pools[p]
        first = pool.first_device + node * pool.devices_per_node
        mine = [device for device in range(first, first + pool.devices_per_node) if device in used]
        size = tp * cp
        chain += [
            Worker(pool=p, devices=tuple(mine[i : i + size]), cp=cp) for i in range(0, len(mine) - size + 1, size)
        ]
    chains = [chain]
    pools = cluster.pools
    for name in dict.fromkeys(pools[w.pool].device.name for w in chain):
        chains.append([w for w in chain if pools[w.pool].device.name == name])
    for region in dict.fromkeys(pools[w.pool].region for w in chain):
        chains.append([w for w in chain if pools[w.pool].region == region])
    seen: set[tuple[Worker, ...]] = set()
    for part in chains:
        if part and tuple(part) not in seen:
            seen.add(tuple(part))
            yield part


def _cuts(problem: Problem, plan: Plan, tables: CostTables, rules: Rules) -> Iterator[tuple[float, Plan]]:
    """Drafts (no ZeRO, no recomputation) and the compute seconds that each needs at least."""
    model, batch = problem.model, problem.batch
    degrees = sorted({t for p in range(len(problem.cluster.pools)) for t in tables.tensor_degrees(p)})
    sizes = [b for b in tables.micro_batch_sizes if plan.micro_batch_size / 4 <= b <= plan.micro_batch_size * 4]
    for tp, (cp, ep) in itertools.product(degrees if rules.tensor else [1], rules.cuts(problem, plan)):
        for chain in _chains(problem, plan, tp, cp):
            if any(tp not in tables.tensor_degrees(p) for p in {w.pool for w in chain}):
                continue
            for pp, size in itertools.product(DEGREES, sizes):
                if pp > min(len(chain), model.blocks):
                    continue
                micro_batches = batch.global_batch // size
                dp = len(chain) // pp
                while micro_batches % dp:
                    dp -= 1
                stages = [chain[s * dp : (s + 1) * dp] for s in range(pp)]
                if any(members % ep for stage in stages for members in _members(stage).values()):
                    continue
                bounds, slowest_s = _split(stages, tables, size, ep, rules)
                draft = Plan(
                    stages=tuple(
                        Stage(
                            first_layer=bounds[s],
                            last_layer=bounds[s + 1],
                            workers=tuple(stages[s]),
                            sequence_parallel=tp > 1,
                            ep=ep,
                        )
                        for s in range(pp)
                    ),
                    routes=np.repeat((np.arange(micro_batches) % dp)[:, None], pp, axis=1),
                    micro_batch_size=size,
                    spans=((dp,) * dp,) * pp,
                )
                yield (micro_batches // dp + pp - 1) * slowest_s, draft


def _members(workers: Sequence[Worker]) -> Counter[int]:
    """By pool, the devices that hold the same slices of a stage: experts are spread over those of one pool."""
    found = Counter[int]()
    for worker in workers:
        found[worker.pool] += worker.cp
    return found


def _split(
    stages: Sequence[Sequence[Worker]], tables: CostTables, size: int, ep: int, rules: Rules
) -> tuple[list[int], float]:
    """Borders of the stages' layers and the slowest stage's seconds per micro-batch: min-max by bisection, or even."""
    layers = tables.problem.model.layers
    sums = []
    for workers in stages:
        kinds = {(w.pool, w.tp, w.cp) for w in workers}
        rows = [tables.times(pool, tp, size, "none", cp, ep, tp > 1) for pool, tp, cp in kinds]
        sums.append(np.max([row.forward_s + row.backward_s for row in rows], axis=0))
    count = len(stages)
    if not rules.uneven_layers:
        blocks = tables.problem.model.blocks
        share = [blocks // count + (s < blocks % count) for s in range(count)]
        bounds = [0, *(1 + np.cumsum(share)).tolist()]
        bounds[-1] = layers
    else:
        low, high = 0.0, float(max(row[-1] for row in sums))
        bounds = []
        for _ in range(40):
            limit = (low + high) / 2
            attempt = _greedy(sums, limit, layers)
            if attempt is None:
                low = limit
            else:
                high, bounds = limit, attempt
        bounds = bounds or _greedy(sums, high * (1 + 1e-9), layers) or []
    return bounds, max(float(row[b] - row[a]) for row, a, b in zip(sums, bounds, bounds[1:], strict=False))


def _greedy(sums: Sequence[np.ndarray], limit_s: float, layers: int) -> list[int] | None:
    """As many layers as fit under the limit, stage by stage, each with at least one block; None if some are left."""
    bounds = [0]
    for s, row in enumerate(sums):
        a = bounds[-1]
        b = int(np.searchsorted(row, row[a] + limit_s, side="right")) - 1
        left = len(sums) - 1 - s
        b = min(b, layers - 1 - left if left else layers)
        if b - a < (2 if s == 0 and len(sums) > 1 else 1):
            return None
        bounds.append(b)
    # The last stage needs a block beside the head.
    return bounds if bounds[-1] == layers and layers - bounds[-2] >= 2 else None


def _fits(plan: Plan, tables: CostTables) -> bool:
    """Whether every worker's memory holds its part."""
    place = tables.placement(plan)
    need = np.array([memory.total_bytes for memory in worker_memory(plan, tables, place)])
    return bool((need <= tables.limit_bytes[place.pool]).all())


def _fit_memory(draft: Plan, tables: CostTables, rules: Rules) -> Plan | None:
    """The draft with the least of recomputation and ZeRO that fits; None where nothing does."""
    shards = draft.stages[0].width * draft.stages[0].workers[0].cp > 1

    def with_options(recompute: str, zero: int, blocks: int | None = None) -> Plan:
        return replace(
            draft,
            stages=tuple(
                replace(stage, recompute=recompute, recompute_blocks=blocks, zero=zero) for stage in draft.stages
            ),
        )

    for recompute in rules.recompute:
        for zero in range(rules.most_zero(len(draft.stages)) + 1) if shards else [0]:
            plan = with_options(recompute, zero)
            if not _fits(plan, tables):
                continue
            if recompute in rules.some_blocks:
                # The fewest blocks of every stage that make it fit, if not those of the smallest stage.
                counts = range(1, min(_blocks(tables.problem.model, stage) for stage in draft.stages))
                least = bisect_left(
                    counts, True, key=lambda blocks: _fits(with_options(recompute, zero, blocks), tables)
                )
                if least < len(counts):
                    return with_options(recompute, zero, counts[least])
            return plan
    return None


def _without_trees(plan: Plan) -> Plan:
    """The plan with equal parts of sums for all regions."""
    return replace(plan, stages=tuple(replace(stage, trees=()) for stage in plan.stages))


def losses(problem: Problem, plan: Plan, tables: CostTables, rules: Rules, uniform: Uniform, target: str) -> list[Loss]:
    """What the target cannot express, each with what it adds to a step; the costs add up to the difference."""
    found: list[Loss] = []
    here, before_s = plan, step_times(plan, tables).step_s
    packing = _gradient_packing(plan, rules)

    def lose(what: Message, changed: Plan) -> None:
        nonlocal here, before_s
        after_s = step_times(changed, tables).step_s
        if math.isfinite(after_s):
            found.append(Loss(what=what, cost_s=after_s - before_s))
            here, before_s = changed, after_s

    kinds = sorted(
        ({use.activations for use in plan.links} | {use.activation_gradients for use in plan.links}) - {"none"}
    )
    if any(use.activations != "none" or use.activation_gradients != "none" for use in plan.links):
        links = tuple(replace(use, activations="none", activation_gradients="none") for use in here.links)
        lose(Message("lost.activations", modes=tuple(kinds)), replace(here, links=links))
    if any(use.weight_gradients != packing for use in plan.links):
        links = tuple(replace(use, weight_gradients=packing) for use in here.links)
        kept = Message("lost.weight_gradients_kept", mode=packing)
        lose(Message("lost.weight_gradients") if packing == "none" else kept, replace(here, links=links))
    if plan.local_steps > 1:
        lose(Message("lost.local_steps", steps=plan.local_steps), replace(here, local_steps=1))
    if any(stage.trees for stage in plan.stages):
        lose(Message("lost.trees"), _without_trees(here))
    if plan.reduction != "all-reduce":
        lose(Message("lost.reduction", reduction=plan.reduction), replace(here, reduction="all-reduce"))
    shares = [plan.shares(s) for s in range(len(plan.stages))]
    if any(share.min() != share.max() for share in shares):
        turns = np.stack([np.arange(plan.micro_batches) % stage.width for stage in plan.stages], axis=1)
        lose(Message("lost.shares"), replace(here, routes=turns, order=None))
    one_f_one_b = tuple((stage.width,) * stage.width for stage in plan.stages)
    if (plan.order is not None or plan.spans != one_f_one_b) and len(plan.stages) > 1:
        lose(Message("lost.schedule"), here.with_spans(one_f_one_b))
    rest = uniform.step_s - before_s
    if _shape(plan) != _shape(uniform.plan) or abs(rest) > 1e-9 * uniform.step_s:
        found.append(Loss(what=_structure(problem, plan, uniform, rules), cost_s=rest))
    said = ("family", *rules.said_fields(problem.model))
    special = tuple(name for name in problem.model.special(problem.batch.seq_len) if name not in said)
    scaling = problem.model.rope_scaling
    if scaling is not None and scaling.kind not in rules.rotary_scalings:
        special = (*special, "rope_scaling")
    if special:
        found.append(Loss(what=Message("lost.blocks", fields=special)))
    return found


def _shape(plan: Plan) -> list[tuple[int, int, int]]:
    return [(stage.first_layer, stage.last_layer, stage.width) for stage in plan.stages]


def _structure(problem: Problem, plan: Plan, uniform: Uniform, rules: Rules) -> Message:
    """The change of structure."""
    widths = ", ".join(
        f"{count} x {width}" if count > 1 else str(width)
        for width, alike in itertools.groupby(stage.width for stage in plan.stages[: plan.groups])
        for count in [len(list(alike))]
    )
    left_out = plan.world_size - uniform.plan.world_size
    degrees = {"pp": uniform.pp, "dp": uniform.dp, "tp": uniform.tp, "cp": uniform.cp, "ep": uniform.ep}
    changes = [Message("lost.widths", widths=widths, **degrees)]
    if not rules.context and any(worker.cp > 1 for worker in plan.workers):
        changes.append(Message("lost.context"))
    if not rules.experts and any(stage.ep > 1 for stage in plan.stages):
        changes.append(Message("lost.spread_experts"))
    if plan.chunks > 1 and uniform.plan.chunks == 1:
        changes.append(Message("lost.chunks", chunks=plan.chunks))
    if not rules.uneven_layers:
        changes.append(Message("lost.uneven_layers"))
    if left_out > 0:
        changes.append(Message("lost.devices", devices=left_out))
    return Message("lost.structure", changes=tuple(changes))
