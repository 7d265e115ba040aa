"""The best uniform plans that a program runs (`polygon.domain.runnable`), priced by the same estimate as any other.

Devices are laid in a chain, cut into pp stages of dp workers of tp x cp devices each, and every such cut that fits the
memory is priced. A plan that the program runs stays as it is; of others the chains are its devices, those of one type,
or those of one region.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from polygon.cost.estimate import memory_of, worker_memory
from polygon.cost.memory import LayerMemory, stage_rows
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Placement
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.runnable import Runnable, blocks_of, in_turn
from polygon.planning.checker import broken_rules
from polygon.planning.polish import interleaved
from polygon.planning.problem_arrays import splits_sequence

DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_PRICED = 60
"""Cuts whose exact step is computed, best compute time first."""


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


def find_uniform(problem: Problem, plan: Plan, tables: CostTables, runnable: Runnable) -> Uniform | None:
    """The plan itself where the target can say it, else the fastest uniform plan on (part of) its devices; None where
    none fits."""
    packing = gradient_packing(plan, runnable)
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

    if runnable.runs(problem, plan):
        consider(replace(without_trees(plan), links=links, local_steps=1, reduction="all-reduce"))
        return best
    for priced, (bound_s, draft) in enumerate(sorted(_cuts(problem, plan, tables, runnable), key=lambda cut: cut[0])):
        if priced >= MOST_PRICED or (best is not None and bound_s >= best.step_s):
            break
        if broken_rules(problem, draft):
            continue
        for fitted in fitting(replace(draft, links=links), tables, runnable):
            consider(fitted)
    if best is not None:
        for other in list(variants(problem, plan, best.plan, tables, runnable)):
            if not broken_rules(problem, other):
                consider(other)
    return best


def variants(problem: Problem, plan: Plan, uniform: Plan, tables: CostTables, runnable: Runnable) -> Iterator[Plan]:
    """The uniform plan with more ZeRO, with the plan's shard groups, and with its chunks, as memory holds them."""
    first, most = uniform.stages[0], runnable.most_zero(len(uniform.stages))
    members = first.width * first.workers[0].cp
    groups = {0, *(stage.shards for stage in plan.stages if runnable.shard_groups and stage.shards)}
    for zero in range(first.zero, most + 1) if members > 1 else ():
        for shards in sorted(groups if zero else {0}):
            if shards == 0 or members % shards == 0:
                stages = tuple(replace(stage, zero=zero, shards=shards) for stage in uniform.stages)
                if _fits(replace(uniform, stages=stages), tables):
                    yield replace(uniform, stages=stages)
    # Parts of a group's blocks that are recomputed differ from chunk to chunk: all or none are alike.
    if runnable.chunks and plan.chunks > 1 and uniform.groups > 1 and first.recompute_blocks is None:
        held = interleaved(uniform, plan.chunks)
        if held is not None:
            chunked = replace(
                uniform,
                stages=held,
                chunks=plan.chunks,
                routes=np.repeat(uniform.routes[:, :1], len(held), axis=1),
                spans=uniform.spans * plan.chunks,
            )
            if runnable.runs(problem, chunked) and _fits(chunked, tables):
                yield chunked


def gradient_packing(plan: Plan, runnable: Runnable) -> str:
    """The plan's most used packing of weight gradients if the target has it."""
    used = [use.weight_gradients for use in plan.links]
    common = max(set(used), key=used.count, default="none")
    if common in runnable.gradient_packings or common == "none":
        return common
    return runnable.gradient_packings[-1]


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


def _cuts(problem: Problem, plan: Plan, tables: CostTables, runnable: Runnable) -> Iterator[tuple[float, Plan]]:
    """Drafts (no ZeRO, no recomputation) and the compute seconds that each needs at least."""
    model, batch = problem.model, problem.batch
    degrees = sorted({t for p in range(len(problem.cluster.pools)) for t in tables.tensor_degrees(p)})
    sizes = [b for b in tables.micro_batch_sizes if plan.micro_batch_size / 4 <= b <= plan.micro_batch_size * 4]
    for tp, (cp, ep) in itertools.product(degrees if runnable.tensor else [1], runnable.degrees(problem, plan)):
        for chain in _chains(problem, plan, tp, cp):
            if any(tp not in tables.tensor_degrees(p) for p in {w.pool for w in chain}):
                continue
            for pp, size in itertools.product(DEGREES, sizes):
                if pp > min(len(chain), model.blocks if runnable.pipeline else 1):
                    continue
                micro_batches = batch.global_batch // size
                dp = len(chain) // pp
                while micro_batches % dp:
                    dp -= 1
                stages = [chain[s * dp : (s + 1) * dp] for s in range(pp)]
                if any(members % ep for stage in stages for members in _members(stage).values()):
                    continue
                if (draft := _drafted(stages, size, ep, tables, runnable)) is not None:
                    yield draft


def uniform_drafts(
    rows: Sequence[Sequence[Worker]], size: int, ep: int, most_stages: int, tables: CostTables, runnable: Runnable
) -> Iterator[tuple[float, Plan]]:
    """As `_cuts`, of workers in the order of stages: as many stages as these, of the workers of each, or as many as
    make all as wide as one of these, of all workers in a row."""
    micro_batches, blocks = tables.problem.batch.global_batch // size, tables.problem.model.blocks
    chain = [worker for row in rows for worker in row]
    widths = {len(row) for row in rows}
    met = set[tuple[tuple[Worker, ...], ...]]()
    for pp in sorted({len(rows), *(len(chain) // width for width in widths)}):
        if not 0 < pp <= min(most_stages, blocks):
            continue
        for width in {min(widths), len(chain) // pp} if pp == len(rows) else {len(chain) // pp}:
            dp = next(n for n in range(width, 0, -1) if micro_batches % n == 0)
            own = pp == len(rows) and width == min(widths)
            stages = tuple(tuple(rows[s][:dp] if own else chain[s * width : s * width + dp]) for s in range(pp))
            if stages not in met:
                met.add(stages)
                spread = math.gcd(ep, *(n for stage in stages for n in _members(stage).values())) if ep > 1 else 1
                if (draft := _drafted(stages, size, spread, tables, runnable)) is not None:
                    yield draft


def _drafted(
    stages: Sequence[Sequence[Worker]], size: int, ep: int, tables: CostTables, runnable: Runnable
) -> tuple[float, Plan] | None:
    """Compute seconds that a pipeline of such stages needs at least, and the plan, without ZeRO or recomputation; None
    where they are more than blocks."""
    micro_batches, pp, dp = tables.problem.batch.global_batch // size, len(stages), len(stages[0])
    sequence = all(splits_sequence(tables.problem, worker.tp, worker.cp) for worker in stages[0])
    draft = Plan(
        stages=tuple(
            Stage(first_layer=s, last_layer=s + 1, workers=tuple(workers), sequence_parallel=sequence, ep=ep)
            for s, workers in enumerate(stages)
        ),
        routes=_turns(micro_batches, dp, pp),
        micro_batch_size=size,
        spans=in_turn(dp, pp),
    )  # fmt: skip
    split = _split(draft, tables, runnable)
    return None if split is None else ((micro_batches // dp + pp - 1) * split[0], split[1])


@lru_cache(maxsize=16)
def _turns(micro_batches: int, dp: int, pp: int) -> np.ndarray:
    """Micro-batches dealt in turn: one object, by which what follows from it is kept."""
    routes = np.repeat((np.arange(micro_batches) % dp)[:, None], pp, axis=1)
    routes.flags.writeable = False
    return routes


def _members(workers: Sequence[Worker]) -> Counter[int]:
    """By pool, the devices that hold the same slices of a stage: experts are spread over those of one pool."""
    found = Counter[int]()
    for worker in workers:
        found[worker.pool] += worker.cp
    return found


def _split(
    draft: Plan, tables: CostTables, runnable: Runnable, held: Sequence[int] | None = None
) -> tuple[float, Plan] | None:
    """The draft's slowest stage's seconds per micro-batch, and the draft with layers for which these are least, or with
    as many blocks in all stages, or nearly; with no more blocks than can be `held`. None if some layers are left."""
    layers, blocks, count, sums = tables.problem.model.layers, tables.problem.model.blocks, len(draft.stages), []
    most = [blocks] * count if held is None else held
    for stage in draft.stages:
        kinds = {(w.pool, w.tp, w.cp) for w in stage.workers}
        how = stage.ep, stage.sequence_parallel
        rows = [tables.times(pool, tp, draft.micro_batch_size, "none", cp, *how) for pool, tp, cp in kinds]
        sums.append(np.max([row.forward_s + row.backward_s for row in rows], axis=0))
    if runnable.blocks_apart is not None:
        if blocks % count and not runnable.blocks_apart:
            return None
        share = [blocks // count + (s < blocks % count) for s in range(count)]
        bounds = [0, *(1 + np.cumsum(share)).tolist()]
        bounds[-1] = layers
    else:
        low, high = 0.0, float(max(row[-1] for row in sums)) * (1 + 1e-9)
        bounds = _greedy(sums, high, layers, most) or []
        for _ in range(40 if bounds else 0):
            limit = (low + high) / 2
            attempt = _greedy(sums, limit, layers, most)
            if attempt is None:
                low = limit
            else:
                high, bounds = limit, attempt
    if not bounds:
        return None
    pairs = list(itertools.pairwise(bounds))
    stages = tuple(
        replace(stage, first_layer=a, last_layer=b) for stage, (a, b) in zip(draft.stages, pairs, strict=True)
    )
    slowest_s = max(float(row[b] - row[a]) for row, (a, b) in zip(sums, pairs, strict=True))
    return slowest_s, replace(draft, stages=stages)


def _greedy(sums: Sequence[np.ndarray], limit_s: float, layers: int, most: Sequence[int]) -> list[int] | None:
    """As many layers as fit under the limit, stage by stage, each with at least one block and so many at `most`; None
    if some are left."""
    bounds = [0]
    for s, row in enumerate(sums):
        a = bounds[-1]
        b = int(np.searchsorted(row, row[a] + limit_s, side="right")) - 1
        left = len(sums) - 1 - s
        b = min(b, max(a, 1) + most[s] + (not left), layers - 1 - left if left else layers)
        if b - a < (2 if s == 0 and len(sums) > 1 else 1):
            return None
        bounds.append(b)
    # The last stage needs a block beside the head.
    return bounds if bounds[-1] == layers and layers - bounds[-2] >= 2 else None


def _fits(plan: Plan, tables: CostTables, place: Placement | None = None) -> bool:
    """Whether every worker's memory holds its part."""
    place = tables.placement(plan) if place is None else place
    need = np.array([memory.total_bytes for memory in worker_memory(plan, tables, place)])
    return bool((need <= tables.limit_bytes[place.pool]).all())


def fitting(
    draft: Plan, tables: CostTables, runnable: Runnable, most_s: Callable[[], float] = lambda: math.inf
) -> Iterator[Plan]:
    """The draft under each kind of recomputation with the least of ZeRO, and of recomputed blocks, that fits; where
    none does, with as many layers in its stages as memory has room for. Those that compute for `most_s` or more are
    left out."""
    found = False
    for plan in _under_options(draft, tables, runnable):
        found = True
        if compute_s(plan, tables) < most_s():
            yield plan
    if not found and runnable.blocks_apart is None and len(draft.stages) > 1:
        split = _split(draft, tables, runnable, _held_blocks(draft, tables, runnable))
        if split is not None:
            others = _under_options(split[1], tables, runnable)
            yield from (plan for plan in others if compute_s(plan, tables) < most_s())


def compute_s(plan: Plan, tables: CostTables) -> float:
    """Seconds that a pipeline computes at least: of blocks recomputed in part none."""
    slowest_s = 0.0
    for stage in plan.stages:
        mode = stage.recompute if stage.recompute_blocks is None else "none"
        for pool, tp, cp in {(w.pool, w.tp, w.cp) for w in stage.workers}:
            row = tables.times(pool, tp, plan.micro_batch_size, mode, cp, stage.ep, stage.sequence_parallel)
            sums = row.forward_s + row.backward_s
            slowest_s = max(slowest_s, float(sums[stage.last_layer] - sums[stage.first_layer]))
    return (plan.micro_batches // plan.stages[0].width + len(plan.stages) - 1) * slowest_s


def _held_blocks(draft: Plan, tables: CostTables, runnable: Runnable) -> list[int]:
    """Of every stage, about as many blocks as its devices have room for when they keep as little as can be."""
    model, pp = tables.problem.model, len(draft.stages)
    recompute, zero, held = runnable.recompute[-1], runnable.most_zero(pp), []
    for s, stage in enumerate(draft.stages):
        worker, members = stage.workers[0], stage.width * stage.workers[0].cp
        how = (recompute, worker.cp, stage.ep, stage.sequence_parallel)
        layers = tables.memory(worker.tp, draft.micro_batch_size, *how).layers
        limit = min(float(tables.limit_bytes[w.pool]) for w in stage.workers)
        in_flight = min(pp - s, draft.micro_batches // stage.width)

        def least_bytes(
            blocks: int, s: int = s, layers: LayerMemory = layers, n: int = in_flight, m: int = members
        ) -> float:
            first = 0 if s == 0 else model.layers - 1 - blocks if s == pp - 1 else 1
            rows = stage_rows(layers, first, first + blocks + (s in (0, pp - 1)))
            return memory_of(rows, zero if m > 1 else 0, tables, in_flight=n, shards=m).total_bytes

        held.append(bisect_right(range(1, model.blocks + 1), limit, key=least_bytes))
    return held


def _under_options(draft: Plan, tables: CostTables, runnable: Runnable) -> Iterator[Plan]:
    """See `fitting`; the layers are as in the draft."""
    shards, place = draft.stages[0].width * draft.stages[0].workers[0].cp > 1, tables.placement(draft)
    fewest = min(blocks_of(tables.problem.model, stage) for stage in draft.stages)

    def with_options(recompute: str, zero: int, blocks: int | None = None) -> Plan:
        return replace(
            draft,
            stages=tuple(
                replace(stage, recompute=recompute, recompute_blocks=blocks, zero=zero) for stage in draft.stages
            ),
        )

    for recompute in runnable.recompute:
        for zero in range(runnable.most_zero(len(draft.stages)) + 1) if shards else [0]:
            plan = with_options(recompute, zero)
            if not _fits(plan, tables, place):
                continue
            if recompute in runnable.some_blocks:
                # The fewest blocks of every stage that make it fit, if not those of the smallest stage.
                counts = range(1, fewest)
                least = bisect_left(
                    counts, True, key=lambda blocks: _fits(with_options(recompute, zero, blocks), tables, place)
                )
                plan = with_options(recompute, zero, counts[least]) if least < len(counts) else plan
            yield plan
            break


def without_trees(plan: Plan) -> Plan:
    """The plan with equal parts of sums for all regions."""
    return replace(plan, stages=tuple(replace(stage, trees=()) for stage in plan.stages))
