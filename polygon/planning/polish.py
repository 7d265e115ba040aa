"""The last word on a plan: small changes of what no allocation says, each priced exactly, kept while they help.

An allocation says who serves which stage; decode takes layer borders and memory options by the fluid step time. Here
the finished plan is looked at again: borders moved by a block or a few, recomputation, ZeRO, shard groups, expert and
sequence parallelism of one stage or of all, chunks (interleaving); and before and after all of these, spans. A change
that memory does not hold is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from polygon.cost.estimate import worker_memory
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.divisors import divisors
from polygon.domain.plan import Plan, Stage
from polygon.domain.runnable import in_turn, runnable
from polygon.planning.checker import violations
from polygon.planning.sum_trees import with_trees
from polygon.planning.warmup_depths import Pacing

CHUNKS = (2, 3, 4, 6, 8)
MOVES = (-1, 1, -2, 2, -4, 4, -8, 8)
"""Blocks by which a border, or a number of recomputed blocks, is moved."""
FEWEST, MOST_ACTIONS = 20, 2_000_000
"""Changes that are priced however large the step, and micro-batches times stages that are priced in all."""
DEARER = 1.1
"""Times the step that a plan which is better otherwise may take."""
GAIN = 1e-4
"""Part by which a change has to shorten the step to be kept."""

Changed = Callable[[Stage], Stage | None]


def polished(
    plan: Plan,
    tables: CostTables,
    value_of: Callable[[Plan], float],
    *,
    evaluations: int,
    to_the_end: bool = False,
    by_time: bool = False,
    expired: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan after small changes, each of which lowers `value_of` by more than `GAIN`.

    Parameters
    ----------
    value_of : callable
        What is minimised, exactly.
    evaluations : int
        Plans that are priced at most.
    to_the_end : bool, optional
        Whether to go on until no change helps, though that takes more: a pipeline of 16 stages has some 200 changes.
    by_time : bool, optional
        Whether `value_of` is the time of the step: then changes that can only make it longer are not simulated.
    expired : callable, optional
        Whether time is up; without it, evaluations alone are counted.
    """
    best, value, runs = plan, value_of(plan), runnable(tables.problem)

    def change_spans() -> None:
        """Take other spans where they help: as many are simulated as changes may be priced."""
        nonlocal best, value
        if best.chunks == 1 and len(best.stages) > 1 and most > 0 and runs is None and not expired():
            paced = Pacing(best, tables).best(tries=most)
            found = math.inf if paced is None else value_of(paced[0])
            if paced is not None and found < value - GAIN * abs(value):
                best, value = paced[0], found

    def sum_over_trees() -> None:
        nonlocal best, value
        found = best if expired() else with_trees(best, tables, value_of)
        if found is not best:
            best, value = found, value_of(found)

    def longest_s(plan: Plan) -> float:
        """How long the step of a plan that is worth a look may be, once this one is known."""
        return (1.0 if by_time else DEARER) * step_times(plan, tables).step_s

    # A large step takes long to price: of it fewer changes are.
    in_all = affordable(plan.micro_batches, len(plan.stages))
    most = min(evaluations, in_all)
    sum_over_trees()
    change_spans()
    known_s = longest_s(best)
    drafts, failures, at = list(changes(best, tables)), 0, 0
    for _ in range(max(FEWEST, in_all if to_the_end else most)):
        if failures >= len(drafts) or expired():
            break
        candidate = fitted(drafts[at % len(drafts)], tables, known_s)
        found = value_of(candidate) if candidate is not None else math.inf
        # What helped once is tried again first: changes keep their places in the list. A change that helps may still
        # be one that the rules forbid, as ZeRO-3 with local steps.
        helps = candidate is not None and found < value - GAIN * abs(value)
        if candidate is not None and helps and not violations(tables.problem, candidate, tables):
            best, value, failures = candidate, found, 0
            known_s = longest_s(best)
            drafts = list(changes(best, tables))
        else:
            at, failures = at + 1, failures + 1
    if best is not plan:
        sum_over_trees()
        change_spans()
    return best


def affordable(micro_batches: int, stages: int, actions: int = MOST_ACTIONS) -> int:
    """Steps of so many micro-batches and stages that are priced at most, if all together have so many actions."""
    return actions // max(1, micro_batches * stages)


def fitted(draft: Plan, tables: CostTables, known_s: float = math.inf) -> Plan | None:
    """The draft with spans, or where it is interleaved with recomputed blocks, that its memory holds; None if none.

    None also where no spans and no order give a step of less than `known_s`, and where the program does not run it.
    """
    runs = runnable(tables.problem)
    if runs is not None:
        draft = draft.with_spans(in_turn(draft.stages[0].width, len(draft.stages)))
        if not runs.runs(tables.problem, draft):
            return None
    elif draft.chunks == 1 and len(draft.stages) > 1:
        pacing = Pacing(draft, tables)
        paced = pacing.best(known_s) if pacing.floor_s < known_s else None
        return None if paced is None else paced[0]
    while True:
        place = tables.placement(draft)
        need = np.array([memory.total_bytes for memory in worker_memory(draft, tables, place)])
        short = set(place.stage[need > tables.limit_bytes[place.pool]].tolist())
        if not short:
            return draft
        more = [_recomputing(stage, 1) if s in short else stage for s, stage in enumerate(draft.stages)]
        if draft.chunks == 1 or any(more[s] is None for s in short) or runs is not None:
            return None
        draft = replace(draft, stages=tuple(stage for stage in more if stage is not None))


def changes(plan: Plan, tables: CostTables) -> Iterator[Plan]:
    """Plans that differ from a plan by one change."""
    for change in _stage_changes(plan, tables):
        together = [change(stage) for stage in plan.stages]
        if any(stage is not None for stage in together):
            yield _with(plan, [new or old for new, old in zip(together, plan.stages, strict=True)])
        # What all chunks of a group have in common changes together; what is computed again is each one's own.
        if len(plan.stages) > 1:
            for s, stage in enumerate(together):
                if stage is not None and (plan.chunks == 1 or _recomputes_alone(stage, plan.stages[s])):
                    yield _with(plan, [*plan.stages[:s], stage, *plan.stages[s + 1 :]])
    yield from interleavings(plan)
    if plan.chunks == 1:
        yield from _borders(plan, tables.problem.model.layers)


def _recomputes_alone(new: Stage, old: Stage) -> bool:
    """Whether stages differ in what they recompute and in nothing else."""
    return replace(new, recompute=old.recompute, recompute_blocks=old.recompute_blocks) == old


def _with(plan: Plan, stages: list[Stage]) -> Plan:
    """The plan with other stages, and spans for `fitted` to begin with."""
    return replace(plan, stages=tuple(stages))


def with_wide_spans(plan: Plan) -> Plan:
    """The plan with spans that let everything pass, for `fitted` to find those that memory holds."""
    if plan.chunks > 1:
        return plan
    return plan.with_spans(tuple((plan.micro_batches,) * stage.width for stage in plan.stages))


def _stage_changes(plan: Plan, tables: CostTables) -> Iterator[Changed]:
    """Changes of a stage; a change gives None where it changes nothing."""
    model, tokens = tables.problem.model, tables.problem.batch.seq_len
    for mode in ("none", "selective", "full"):
        yield partial(_changed, recompute=mode, recompute_blocks=None)
    for step in MOVES:
        yield partial(_recomputing, more=step)
    for zero in (1, 0, 2, 3):
        yield partial(_dividing, zero=zero)
    yield partial(_with_sequence, tokens=tokens)
    if model.experts:
        for factor in (2, 0.5):
            yield partial(_spread, factor=factor, experts=model.experts)
    if any(stage.zero for stage in plan.stages):
        for shards in sorted({n for stage in plan.stages for n in divisors(stage.members)[1:-1]}):
            yield partial(_sharded, shards=shards)


def _dividing(stage: Stage, zero: int) -> Stage | None:
    """Another ZeRO stage, over all that hold the same; None where there is nothing to divide by."""
    return _changed(stage, zero=zero, shards=0) if stage.members > 1 else None


def _with_sequence(stage: Stage, tokens: int) -> Stage | None:
    """The sequence split beside the layers, or not; None where it cannot be."""
    fits = all(worker.tp > 1 and tokens % len(worker.devices) == 0 for worker in stage.workers)
    return replace(stage, sequence_parallel=not stage.sequence_parallel) if fits else None


def _changed(stage: Stage, **fields: object) -> Stage | None:
    if all(getattr(stage, name) == value for name, value in fields.items()):
        return None
    return replace(stage, **fields)  # type: ignore[arg-type]


def _recomputing(stage: Stage, more: int) -> Stage | None:
    """So many more (or fewer) blocks recomputed; None where there are no such."""
    blocks = stage.last_layer - max(stage.first_layer, 1)
    mode = "full" if stage.recompute == "none" else stage.recompute
    now = stage.recomputed_until - max(stage.first_layer, 1) if stage.recompute != "none" else 0
    wanted = min(max(now + more, 0), blocks)
    if wanted == now:
        return None
    if wanted == 0:
        return replace(stage, recompute="none", recompute_blocks=None)
    return replace(stage, recompute=mode, recompute_blocks=None if wanted == blocks else wanted)


def _spread(stage: Stage, factor: float, experts: int) -> Stage | None:
    """Experts over `factor` times as many devices of one pool and degree; None where these are no multiple of that."""
    ep = int(stage.ep * factor)
    alike = Counter[tuple[int, int]]()
    for worker in stage.workers:
        alike[worker.pool, worker.tp] += worker.cp
    if ep < 1 or ep == stage.ep or experts % ep or any(devices % ep for devices in alike.values()):
        return None
    return replace(stage, ep=ep)


def _sharded(stage: Stage, shards: int) -> Stage | None:
    """ZeRO over groups of so many devices, copies across them; None where that changes nothing."""
    if not stage.zero or stage.members % shards or shards >= stage.members or shards == stage.shards:
        return None
    return replace(stage, shards=shards)


def _borders(plan: Plan, layers: int) -> Iterator[Plan]:
    """A border between two stages moved by some blocks."""
    for s in range(len(plan.stages) - 1):
        before, after = plan.stages[s : s + 2]
        for step in MOVES:
            border = before.last_layer + step
            if max(before.first_layer, 0) < border < min(after.last_layer, layers):
                pair = replace(before, last_layer=border), replace(after, first_layer=border)
                yield _with(plan, [*plan.stages[:s], *map(_tidy, pair), *plan.stages[s + 2 :]])


def _tidy(stage: Stage) -> Stage:
    """All blocks recomputed is said as None."""
    if stage.recompute_blocks is not None and stage.recomputed_until == stage.last_layer:
        return replace(stage, recompute_blocks=None)
    return stage


def interleavings(plan: Plan) -> Iterator[Plan]:
    """The plan with another number of chunks, where every micro-batch can stay in one lane."""
    if plan.groups == 1 or len({stage.width for stage in plan.stages}) > 1:
        return
    if len({tuple(np.bincount(of, minlength=plan.stages[0].width)) for of in plan.routes.T}) > 1:
        return
    for chunks in sorted({*CHUNKS, *divisors(min(_blocks(plan)))}):
        if chunks != plan.chunks and (stages := interleaved(plan, chunks)) is not None:
            yield replace(
                plan,
                stages=stages,
                chunks=chunks,
                routes=np.repeat(plan.routes[:, :1], len(stages), axis=1),
                spans=tuple((stage.width,) * stage.width for stage in stages),
                order=None,
            )


def in_chunks(plan: Plan, tables: CostTables, value_of: Callable[[Plan], float]) -> Plan | None:
    """The plan with the best other number of chunks, None if it can have no other: borders that suit the one number
    best are not those that suit another, so that small changes of one do not lead there. Chunks are stages, of which
    limits and rules may say how many there may be, and where each lies."""
    fitting = (split for draft in interleavings(plan) if (split := fitted(draft, tables)) is not None)
    allowed = [split for split in fitting if not violations(tables.problem, split, tables)]
    return min(allowed, key=value_of, default=None)


def _blocks(plan: Plan) -> list[int]:
    """Of every group of workers: the embedding is with the first one, the head with the last."""
    counts = [sum(s.last_layer - s.first_layer for s in plan.stages[g :: plan.groups]) for g in range(plan.groups)]
    return [count - (g == 0) - (g == plan.groups - 1) for g, count in enumerate(counts)]


def interleaved(plan: Plan, chunks: int) -> tuple[Stage, ...] | None:
    """The stages if every group of workers held its layers in so many parts; None where some part would be empty.

    Each group keeps as many layers as it has, and the part of them that is recomputed.
    """
    groups = plan.groups
    held = [plan.stages[g::groups] for g in range(groups)]
    again = [sum(max(0, stage.recomputed_until - max(stage.first_layer, 1)) for stage in mine) for mine in held]
    # The embedding goes with the first part of the first group, the head with the last of the last: dealt apart.
    blocks = _blocks(plan)
    if min(blocks) < chunks:
        return None
    stages, at = [], 0
    for c in range(chunks):
        for g in range(groups):
            part = _part(blocks[g], chunks, c)
            last = at + part + int(c == 0 and g == 0) + int(c == chunks - 1 and g == groups - 1)
            recomputed = min(_part(again[g], chunks, c), part)
            mode = next((stage.recompute for stage in held[g] if stage.recompute != "none"), "none")
            stages.append(
                _tidy(
                    replace(
                        held[g][0],
                        first_layer=at,
                        last_layer=last,
                        recompute=mode if recomputed else "none",
                        recompute_blocks=recomputed if recomputed and recomputed < part else None,
                    )
                )
            )
            at = last
    return tuple(stages)


def _part(total: int, parts: int, at: int) -> int:
    """The at-th of parts that differ by at most one, the larger first."""
    return total // parts + (at < total % parts)
