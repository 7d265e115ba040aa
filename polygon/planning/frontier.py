"""Plans between the fastest and the cheapest, and the best plan within a budget or before a deadline.

One series of searches (time, money, energy, then time within budgets where the gap is widest), each beginning with all
that was found before, makes a collection of exactly priced allocations; the front is what no other member of it beats.
What limits change is searched once more: without them for the fastest and the cheapest, then with them. So the
cheapest plan costs no more than the fastest, and a budget that the fastest plan keeps changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np

from polygon.cost.money import Bill, excesses
from polygon.cost.tables import CostTables, Measurements
from polygon.domain.clock import Clock
from polygon.domain.groups import Groups
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.objectives import (
    ENERGY,
    MONEY,
    OVER_LIMIT,
    STEP_TIME,
    Objective,
    is_step_time,
    objective_named,
    over_limits,
    value_of,
    without_cost_limits,
)
from polygon.planning.rounds import in_rounds
from polygon.planning.search_engine import Effort, Found, find_in_rounds, find_plan
from polygon.planning.telling import Tell, share

T = TypeVar("T")
Met = Callable[[Bill, Plan], None]
"""Hears of what a search has ended with."""

DECODING_PART = 0.1
"""Of a time limit, what is kept for the plans of allocations that no search has ended with."""
FREE_PART, CHEAPEST_PART = 0.4, 0.6
"""Parts of a time limit at whose ends the searches without limits are over, and that for the cheapest: the rest is for
what keeps the limits."""
BETWEEN = 3
"""Searches for plans between the fastest and the cheapest."""
NARROW = 0.0025
"""Logarithms of ratios of cost and of time, multiplied, from which on a gap between plans is looked into: 5 % each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FrontPoint:
    """A plan that no other known plan beats in everything."""

    plan: Plan
    bill: Bill


@dataclass(frozen=True, kw_only=True, eq=False)
class Collection:
    """Everything that a series of searches simulated exactly."""

    bills: tuple[tuple[Bill, Allocation], ...]
    plans: tuple[tuple[Bill, Plan], ...] = ()
    """What every search ended with: more than decoding the allocation again gives."""
    reason: Message | None = None
    """Why it is empty."""
    evaluations: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    def best(self, problem: Problem, objective: Objective) -> tuple[Bill, Allocation]:
        """The best member by an objective, within the limits of a problem's constraints if any keeps them."""
        return min(self.bills, key=lambda pair: value_of(problem, objective, pair[0]))


def collect(
    problem: Problem,
    seed: int,
    *,
    objectives: Sequence[Objective],
    groups: Groups | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
    tables: CostTables | None = None,
    met: Met | None = None,
    later: int = 0,
) -> Collection:
    """Search by one objective after another, each from what was found before.

    Parameters
    ----------
    seed : int
        Every search has its own generator from it.
    effort : Effort
        Of the first search; the others, which begin well, get half of it. Its time limit is for all together: once
        it is over no other search begins.
    later : int
        Searches that follow within the same time limit, and have as much of it.
    """
    effort = effort or Effort()
    clock = Clock(effort.time_limit_s)
    bills: list[tuple[Bill, Allocation]] = []
    plans: list[tuple[Bill, Plan]] = []
    evaluations, seconds = 0, 0.0
    reason: Message | None = None
    interrupted = False
    for i, objective in enumerate(objectives):
        left_s = clock.left_s()
        if i and left_s <= 0:
            break
        share_s = left_s / (len(objectives) + later - i + (i == 0))
        own = replace(effort, time_limit_s=2 * share_s) if i == 0 else _half(effort, share_s)
        known = [best[1] for best in _leaders(problem, bills, objectives)]
        try:
            found = find_plan(
                problem,
                np.random.default_rng([seed, i] if i else seed),
                groups=groups,
                effort=own,
                tell=share(tell, i / len(objectives), (i + 1) / len(objectives), partial(_of_objective, objective)),
                tables=tables,
                objective=objective,
                known=known,
            )
        except KeyboardInterrupt:
            if not plans:
                raise
            interrupted = True
            break
        bills += found.bills
        if found.plan is not None:
            plans.append((found.bills[0][0], found.plan))
            if met is not None:
                met(*plans[-1])
        evaluations, seconds = evaluations + found.evaluations, seconds + found.seconds
        reason = reason or found.reason
        interrupted = found.interrupted
        if interrupted or not bills:
            break
    return Collection(
        bills=tuple(bills),
        plans=tuple(plans),
        reason=None if bills else reason,
        evaluations=evaluations,
        seconds=seconds,
        interrupted=interrupted,
    )


def _joined(one: Collection, other: Collection) -> Collection:
    """What either met."""
    return replace(
        one,
        bills=one.bills + other.bills,
        plans=one.plans + other.plans,
        reason=None if one.bills or other.bills else one.reason or other.reason,
        evaluations=one.evaluations + other.evaluations,
        seconds=one.seconds + other.seconds,
        interrupted=one.interrupted or other.interrupted,
    )


def _leaders(
    problem: Problem, bills: list[tuple[Bill, Allocation]], objectives: Sequence[Objective]
) -> list[tuple[Bill, Allocation]]:
    """The best so far by each objective."""
    best = [min(bills, key=lambda pair: value_of(problem, o, pair[0])) for o in objectives] if bills else []
    return list({id(pair): pair for pair in best}.values())


def _half(effort: Effort, time_limit_s: float) -> Effort:
    return replace(
        effort,
        fluid_evaluations=math.ceil(effort.fluid_evaluations / 2),
        exact_evaluations=math.ceil(effort.exact_evaluations / 2),
        patience=math.ceil(effort.patience / 2),
        time_limit_s=time_limit_s,
    )


def _of_budget(usd: float | None, phase: Message) -> Message:
    within = STEP_TIME.name if usd is None else Message("objective.within", usd=usd)
    return Message("phase.of_objective", objective=within, phase=phase)


def _of_objective(objective: Objective, phase: Message) -> Message:
    return Message("phase.of_objective", objective=objective.said or objective.name, phase=phase)


def find_front(
    problem: Problem,
    seed: int,
    *,
    with_energy: bool = False,
    groups: Groups | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
    tables: CostTables | None = None,
    met: Callable[[list[FrontPoint]], None] | None = None,
    jobs: int = 1,
) -> tuple[list[FrontPoint], Collection]:
    """Plans of which none is beaten by another in time and money (and energy), fastest first.

    Plans that exceed a limit of the constraints are not among them.

    Parameters
    ----------
    met : callable
        Hears of the best of every search of this process as soon as it has ended, in place of all that these met.
    jobs : int
        Processes that make rounds, of which each is one series of searches.
    """
    tables, effort = tables or CostTables(problem), effort or Effort()
    clock = Clock(effort.time_limit_s)
    ended: list[tuple[Bill, Plan]] = []

    def hear(bill: Bill, plan: Plan) -> None:
        ended.append((bill, plan))
        if met is not None:
            met(_front(problem, ended, with_energy))

    search = _FrontRound(problem, seed, with_energy, groups, tables, hear)
    within = replace(effort, time_limit_s=(1 - DECODING_PART) * effort.time_limit_s)
    rounds, interrupted = in_rounds(search, within, tell, lambda _: False, jobs)
    collection = replace(reduce(_joined, rounds), seconds=clock.spent_s, interrupted=interrupted)
    kept = [pair for pair in collection.bills if not excesses(problem, pair[0])]
    decoder = Decoder(problem, tables=tables, objective=MONEY)
    points = list(collection.plans)
    for _, allocation in _non_dominated(kept, with_energy):
        if clock.left_s() <= 0 and points:
            break
        plan = decoder.decode(allocation)
        if isinstance(plan, Plan):
            points.append((decoder.bill(plan), plan))
    return _front(problem, points, with_energy), collection


@dataclass(frozen=True)
class _FrontRound:
    """What makes rounds of `find_front`, here or in another process, which works out its own tables."""

    problem: Problem
    seed: int
    with_energy: bool
    groups: Groups | None
    tables: CostTables
    met: Met | None = None

    def __call__(self, index: int, effort: Effort, tell: Tell | None) -> Collection:
        """Search for the ends, then for what is between them."""
        clock, seed = Clock(effort.time_limit_s), _seed_of(self.seed, index)
        free, ends = without_cost_limits(self.problem), [STEP_TIME, MONEY, *([ENERGY] if self.with_energy else [])]
        in_all = len(ends) + BETWEEN
        collection = collect(
            free,
            seed,
            objectives=ends,
            groups=self.groups,
            effort=effort,
            tell=share(tell, 0.0, len(ends) / in_all),
            tables=self.tables.for_problem(free),
            met=self.met,
            later=BETWEEN,
        )
        tried: list[tuple[float, float]] = []
        for i in range(len(ends), in_all):
            limits = _between(self.problem, collection, tried) if collection.bills else None
            if collection.interrupted or limits is None or clock.left_s() <= 0:
                break
            left_s = clock.left_s() / (in_all - i)
            own = replace(effort, time_limit_s=left_s) if limits is self.problem else _half(effort, left_s)
            told = share(tell, i / in_all, (i + 1) / in_all, partial(_of_budget, limits.constraints.most_usd_per_step))
            found = self._within(limits, [seed, i], collection, own, told)
            if found is None:
                return replace(collection, interrupted=True)
            collection = _joined(collection, found)
            steps_s = [bill.step_s for bill, _ in found.bills if not excesses(limits, bill)]
            tried.append((limits.constraints.most_usd_per_step or math.inf, min(steps_s, default=math.inf)))
        return collection

    def _within(
        self, limits: Problem, seed: list[int], collection: Collection, effort: Effort, tell: Tell | None
    ) -> Collection | None:
        """What a search for the fastest within some limits meets; None if it was interrupted before anything."""
        try:
            found = find_plan(
                limits,
                np.random.default_rng(seed),
                groups=self.groups,
                effort=effort,
                tell=tell,
                tables=self.tables.with_other_links(limits),
                known=[collection.best(limits, STEP_TIME)[1]],
            )
        except KeyboardInterrupt:
            return None
        plans = () if found.plan is None else ((found.bills[0][0], found.plan),)
        if self.met is not None and plans:
            self.met(*plans[0])
        return Collection(
            bills=found.bills, plans=plans, evaluations=found.evaluations, seconds=found.seconds,
            interrupted=found.interrupted,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return _front_round_anew, (self.problem, self.seed, self.with_energy, self.groups, self.tables.measurements)


def _between(problem: Problem, collection: Collection, tried: Sequence[tuple[float, float]]) -> Problem | None:
    """The problem under the limits that are looked at next: its own, where they leave no plan that was looked for; then
    a budget in the middle of the widest gap between plans that keep them. None where there is no gap.

    Parameters
    ----------
    tried : sequence of (float, float)
        Every budget so far, and what the fastest found takes: no faster one is sought between its cost and the budget.
    """
    within = [(bill.usd, bill.step_s) for bill, _ in collection.bills if not excesses(problem, bill)]
    fastest = min((bill for bill, _ in collection.bills), key=lambda bill: bill.step_s)
    if not tried and excesses(problem, fastest):
        return problem
    known: list[tuple[float, float]] = []
    for usd, step_s in sorted([*within, *tried]):
        if usd > 0 and math.isfinite(usd + step_s) and (not known or step_s <= known[-1][1]):
            known.append((usd, step_s))
    gaps = [(math.log(u / usd) * math.log(step_s / s), usd * u) for (usd, step_s), (u, s) in itertools.pairwise(known)]
    wide, square = max(gaps, default=(0.0, 0.0))
    if wide < NARROW:
        return None
    return replace(problem, constraints=replace(problem.constraints, most_usd_per_step=math.sqrt(square)))


def _front_round_anew(
    problem: Problem, seed: int, with_energy: bool, groups: Groups | None, measurements: Measurements
) -> _FrontRound:
    return _FrontRound(problem, seed, with_energy, groups, CostTables(problem, *measurements))


def _front(problem: Problem, pairs: Sequence[tuple[Bill, Plan]], with_energy: bool) -> list[FrontPoint]:
    """Those within all limits that no other beats, fastest first."""
    within = [pair for pair in pairs if not excesses(problem, pair[0])]
    points = [FrontPoint(plan=plan, bill=bill) for bill, plan in _non_dominated(within, with_energy)]
    return sorted(points, key=lambda point: (point.bill.step_s, point.bill.usd))


def _non_dominated(pairs: Sequence[tuple[Bill, T]], with_energy: bool) -> list[tuple[Bill, T]]:
    """Those that no other equals or beats in everything, one of each equal."""

    def costs(bill: Bill) -> tuple[float, ...]:
        return (bill.step_s, bill.usd, bill.energy_j) if with_energy else (bill.step_s, bill.usd)

    kept: list[tuple[Bill, T]] = []
    for bill, thing in sorted(pairs, key=lambda pair: costs(pair[0])):
        if not any(all(a <= b for a, b in zip(costs(other), costs(bill), strict=True)) for other, _ in kept):
            kept.append((bill, thing))
    return kept


def find_within_limits(
    problem: Problem,
    seed: int,
    *,
    objective: Objective = STEP_TIME,
    groups: Groups | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
    tables: CostTables | None = None,
    jobs: int = 1,
) -> Found:
    """The best plan by an objective that keeps budgets, deadline and egress caps; of all rounds of an effort.

    Where nothing is limited and time is minimised a round is `find_plan`. Limits that the best plan keeps without them
    change nothing. Else what a search that knows all limits finds: it begins with the best of those without limits that
    keeps them, if only the cheapest does.

    Parameters
    ----------
    objective : Objective
        One of `OBJECTIVES`, for more than one job.
    jobs : int
        Processes that make rounds.
    """
    search = _Round(problem, seed, objective, groups, tables or CostTables(problem))
    return find_in_rounds(search, effort or Effort(), tell, jobs)


@dataclass(frozen=True)
class _Round:
    """What makes rounds of `find_within_limits`, here or in another process, which works out its own tables."""

    problem: Problem
    seed: int
    objective: Objective
    groups: Groups | None
    tables: CostTables

    def __call__(self, index: int, effort: Effort, tell: Tell | None) -> Found:
        seed = _seed_of(self.seed, index)
        return _within_limits(self.problem, seed, self.objective, self.groups, effort, tell, self.tables)

    def __reduce__(self) -> tuple[Any, ...]:
        return _round_anew, (self.problem, self.seed, self.objective.name, self.groups, self.tables.measurements)


def _round_anew(
    problem: Problem, seed: int, objective: str, groups: Groups | None, measurements: Measurements
) -> _Round:
    return _Round(problem, seed, objective_named(objective), groups, CostTables(problem, *measurements))


def _seed_of(seed: int, index: int) -> int:
    """Seed of a round; the first one's is the seed itself."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) if index else seed


def _within_limits(
    problem: Problem,
    seed: int,
    objective: Objective,
    groups: Groups | None,
    effort: Effort,
    tell: Tell | None,
    tables: CostTables,
) -> Found:
    """One round of `find_within_limits`."""
    if is_step_time(problem, objective):
        rng = np.random.default_rng(seed)
        return find_plan(problem, rng, groups=groups, effort=effort, tell=tell, tables=tables)
    free = without_cost_limits(problem)
    own, clock = tables.for_problem(free), Clock(effort.time_limit_s)

    def search(first_seed: int, objectives: Sequence[Objective], part: float) -> Collection:
        limited = replace(effort, time_limit_s=clock.left_s(part))
        return collect(free, first_seed, objectives=objectives, groups=groups, effort=limited, tell=tell, tables=own)

    ends = [STEP_TIME] if objective is STEP_TIME else [STEP_TIME, objective]
    collection = search(seed, ends, FREE_PART if problem.constraints.limits_cost else 1.0)
    if not collection.bills:
        return Found(plan=None, value_s=math.inf, reason=collection.reason)
    found = _decoded(free, collection, objective, own)
    if found.plan is not None and not excesses(problem, Decoder(problem, tables=tables).bill(found.plan)):
        return found
    if not collection.interrupted and MONEY not in ends:
        collection = _joined(collection, search(seed + 1, [MONEY], CHEAPEST_PART))
    found = _decoded(problem, collection, objective, tables)
    if collection.interrupted or clock.left_s() <= 0:
        return found
    # Those that know no limit meet little between the ends.
    within = find_plan(
        problem,
        np.random.default_rng([seed, len(ends)]),
        groups=groups,
        effort=replace(effort, time_limit_s=clock.left_s()),
        tell=tell,
        tables=tables,
        objective=objective,
        known=[collection.best(problem, objective)[1]],
    )
    best = within if within.value_s < found.value_s else found
    return replace(
        best,
        evaluations=found.evaluations + within.evaluations,
        seconds=found.seconds + within.seconds,
        interrupted=within.interrupted,
        bills=(*best.bills, *(found if best is within else within).bills),
    )


def _decoded(problem: Problem, collection: Collection, objective: Objective, tables: CostTables) -> Found:
    """The best member as a plan, or why none keeps the limits."""
    bill, allocation = collection.best(problem, objective)
    decoder = Decoder(problem, tables=tables, objective=objective)
    options = [plan for _, plan in collection.plans if not violations(problem, plan, tables)]
    decoded = decoder.decode(allocation)
    options += [decoded] if isinstance(decoded, Plan) else []
    plan = min(options, key=decoder.plan_value, default=None)
    value = math.inf if plan is None else decoder.plan_value(plan)
    if plan is None or value >= OVER_LIMIT:
        return Found(
            plan=None,
            value_s=math.inf,
            reason=Message("reason.none_found_within_limits", over=over_limits(problem, bill)),
            evaluations=collection.evaluations,
            seconds=collection.seconds,
        )
    return Found(
        plan=replace(plan, solver="memetic"),
        value_s=value,
        bills=tuple(sorted(collection.bills, key=lambda pair: value_of(problem, objective, pair[0]))),
        interrupted=collection.interrupted,
        evaluations=collection.evaluations,
        seconds=collection.seconds,
    )
