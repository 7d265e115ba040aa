"""From a plan back to its allocation, into another problem, and a short exact search around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.money import Bill
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.planning.candidates import ExactCandidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder, Infeasible, most_stages
from polygon.planning.initial_solutions import even_parts, simple_starts
from polygon.planning.objectives import STEP_TIME, Objective
from polygon.planning.polish import polished
from solvers.local_search import Restarts
from solvers.stop import MaxEvaluations

POLISH_EVALUATIONS = 60
"""Small changes that are priced of a plan that is only compared with another."""
MOST_STARTS = 600
"""Allocations by which a problem is looked at afresh; of more, so many evenly spaced ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A plan that can be run and what it costs, or why there is none."""

    plan: Plan | None = None
    bill: Bill | None = None
    reason: Message | None = None
    allocation: Allocation | None = None


def allocation_of(decoder: Decoder, plan: Plan) -> Allocation:
    """The allocation of a plan; workers of classes that the decoder does not know are left out."""
    column = {key: c for c, key in enumerate(decoder.classes)}
    workers = np.zeros((max(most_stages(decoder.problem), len(plan.stages)), len(decoder.classes)), dtype=np.int64)
    stages = plan.stages[: plan.groups]
    for s, stage in enumerate(stages):
        for worker in stage.workers:
            if (worker.pool, worker.tp) in column:
                workers[s, column[worker.pool, worker.tp]] += worker.cp
    cp, ep = max(worker.cp for worker in plan.workers), max(stage.ep for stage in stages)
    return Allocation(workers=workers, micro_batch_size=plan.micro_batch_size, cp=cp, ep=ep)


def with_idle(decoder: Decoder, allocation: Allocation, pool: int, idle: int) -> Iterator[Allocation]:
    """The allocation with all idle devices of a pool in one stage, or spread over all, at every degree.

    Whole workers are added, of as many parts of a sequence as the allocation's have, and as many as share experts.
    """
    stages = np.flatnonzero(allocation.workers.any(axis=1))
    for c, (p, tp) in enumerate(decoder.classes):
        size = tp * allocation.unit
        if p != pool or idle < size:
            continue
        for chosen in (*([s] for s in stages), list(stages)):
            workers = allocation.workers.copy()
            workers[chosen, c] += allocation.unit * even_parts(idle // size, len(chosen))
            yield replace(allocation, workers=workers)


def fresh_starts(decoder: Decoder, own: Allocation) -> list[Allocation]:
    """An allocation and those that a careful person would try first, in its micro-batch size, half and twice of it."""
    rows, size = most_stages(decoder.problem), own.micro_batch_size
    met = {}
    for other in (m for m in decoder.tables.micro_batch_sizes if m in (size / 2, size, 2 * size)):
        for workers in simple_starts(decoder, rows, other):
            x = replace(own, workers=workers, micro_batch_size=other)
            met[other, workers.tobytes()] = decoder.legal(x)
    found = list(met.values())
    if len(found) > MOST_STARTS:
        found = [found[i] for i in np.linspace(0, len(found) - 1, MOST_STARTS).astype(np.int64)]
    return [own, *found]


def best_starts(decoder: Decoder, starts: Sequence[Allocation], count: int) -> list[Allocation]:
    """So many of some allocations, the best by the fluid step time first; those that cannot be decoded are left out."""
    values = np.array([decoder.fluid_s(x)[0] for x in starts])
    return [starts[i] for i in np.argsort(values, kind="stable")[:count] if np.isfinite(values[i])]


def checked(problem: Problem, plan: Plan | Infeasible, tables: CostTables, decoder: Decoder) -> Outcome:
    """A plan with its bill if it can be run, else what is wrong with it."""
    if isinstance(plan, Infeasible):
        return Outcome(reason=plan.reason)
    wrong = violations(problem, plan, tables)
    if wrong:
        return Outcome(reason=wrong[0])
    if not decoder.is_run(plan):
        return Outcome(reason=Message("reason.not_run", runtime=problem.runtime.name))
    return Outcome(plan=plan, bill=decoder.bill(plan))


def better_of(a: Outcome, b: Outcome, measure: Objective = STEP_TIME) -> Outcome:
    """The outcome with less of a measure; one that can be run before one that cannot."""
    if b.bill is None:
        return a
    return b if a.bill is None or measure.value(b.bill) < measure.value(a.bill) else a


def best_of(
    decoder: Decoder,
    allocations: Sequence[Allocation],
    *,
    tries: int = 3,
    relax: bool = True,
    measure: Objective = STEP_TIME,
    wanted: Callable[[Plan, Allocation], bool] = lambda plan, x: True,
) -> Outcome:
    """The best of several allocations: the best few by the fluid step time are simulated exactly.

    With `relax` as `Decoder.decode` has it, and the best is then polished; without, this takes a third of the time.
    `measure` is what is least of the best, of the exact bills and of the fluid ones. Plans are left out that are not
    `wanted`: who gets no micro-batch is not in the plan of an allocation.
    """
    if not allocations:
        return Outcome(reason=Message("reason.no_such_plan"))
    fluid_s = [decoder.fluid_s(x)[0] for x in allocations]
    values = fluid_s if measure is STEP_TIME else [measure.value(decoder.fluid_bill(x)) for x in allocations]
    best, reason = Outcome(), None
    for i in np.argsort(values, kind="stable")[:tries]:
        x = allocations[i]
        outcome = checked(decoder.problem, decoder.decode(x, relax=relax), decoder.tables, decoder)
        if outcome.plan is None or outcome.bill is None:
            reason = reason or outcome.reason
        elif not wanted(outcome.plan, x):
            reason = reason or Message("reason.nothing_to_do")
        elif best.bill is None or measure.value(outcome.bill) < measure.value(best.bill):
            best = Outcome(plan=outcome.plan, bill=outcome.bill, allocation=x)
    if best.bill is None or best.allocation is None:
        return Outcome(reason=reason)
    ended = polished_outcome(decoder, best) if relax else best
    return ended if ended.plan is not None and wanted(ended.plan, best.allocation) else best


def polished_outcome(decoder: Decoder, outcome: Outcome) -> Outcome:
    """The outcome with its plan polished a little, as that of a search is."""
    if outcome.plan is None:
        return outcome
    plan = polished(
        outcome.plan, decoder.tables, decoder.plan_value, evaluations=POLISH_EVALUATIONS, by_time=decoder.by_time
    )
    return replace(outcome, plan=plan, bill=decoder.bill(plan))


def search_around(decoder: Decoder, starts: Sequence[Allocation], *, evaluations: int, seed: int) -> Outcome:
    """A short exact search that begins with some allocations; never worse than the best of them.

    The bill is of the plan with the strongest allowed packing on all links.
    """
    exact = ExactCandidates(decoder, most_stages(decoder.problem))
    result = Restarts(patience=evaluations + 1).solve(
        exact, np.random.default_rng(seed), MaxEvaluations(len(starts) + evaluations), start=starts
    )
    if result.solution is None:
        outcome = decoder.decode(starts[0])
        return Outcome(reason=outcome.reason if isinstance(outcome, Infeasible) else Message("reason.none_near"))
    plan = decoder.decode(result.solution, relax=False)
    found = checked(decoder.problem, plan, decoder.tables, decoder)
    return polished_outcome(decoder, replace(found, allocation=result.solution))
