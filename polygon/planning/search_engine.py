"""The search: simple starts, a memetic search on the fluid objective, and exact simulation of the best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from polygon.cost.convergence import at_parity
from polygon.cost.money import Bill
from polygon.cost.tables import CostTables
from polygon.domain.clock import Clock
from polygon.domain.groups import Groups
from polygon.domain.message import Message
from polygon.domain.plan import PARITY_LEVELS, Constraints, Plan, Problem
from polygon.planning.candidates import (
    MOST_LISTED,
    RUNNER_UP,
    Candidates,
    ExactCandidates,
    GroupCandidates,
    NothingNew,
    leaves_out,
    used_of,
)
from polygon.planning.decode import Allocation, Decoder, Infeasible, carried_over, most_stages
from polygon.planning.fitted_starts import Fitted, fitted, in_setting
from polygon.planning.fluid import CUTS
from polygon.planning.initial_solutions import (
    FARTHEST,
    closed_starts,
    grown_starts,
    kind_sequences,
    narrow_starts,
    region_sequences,
    relays,
    replicated_starts,
    simple_starts,
    window_starts,
)
from polygon.planning.objectives import OVER_LIMIT, STEP_TIME, Objective, over_limits, value_of
from polygon.planning.perturb import improved
from polygon.planning.polish import in_chunks, polished
from polygon.planning.problem_arrays import Setting
from polygon.planning.rounds import in_rounds
from polygon.planning.telling import EXACT, IN_PARTS, MEMETIC, POLISH, STARTS, Tell, phase_of, share
from polygon.planning.uniform_starts import uniform_starts
from solvers.ants import Ants
from solvers.genetic import Genetic
from solvers.local_search import Descents, Iterated, Racing, Restarts
from solvers.population import Solver
from solvers.stop import AnyOf, MaxEvaluations, NoImprovement, Progress, Stop, TimeLimit

FEWEST_STARTS = 100
"""Simple starts that are looked at however short the time limit, so that something feasible is met."""
MOST_OF_LENGTH = 1_000
"""Sequences of device types of one length, above which only the plainest of them are looked at."""
MOST_SEQUENCES = 3_000
"""Sequences of device types that are looked at, shortest first."""

TOLD = 50
"""Starts, one in so many of which is told."""
MOST_IN_ALL = 1_000
"""Starts that are valued in all context- and expert-parallel degrees."""
MOST_IN_VAIN = 100
"""Starts much slower than the best (`FARTHEST`), one after another, after which no more are looked at."""
MOST_CLOSED = 200
"""Of the starts, the best of which the closed ones are looked at."""

MOST_LAPS, LAP, SHORTEST_LAP = 4, 60, 12
"""Halvings of a race, and moves of every racer in its first lap: fewer where there are fewer evaluations."""
RACERS = 2**MOST_LAPS
"""Starts of a race and of the genetic search, if there are evaluations enough."""
RACE = 0.3
"""Part of the evaluations that the race before the genetic search takes at most."""
CYCLE = 8_000
"""Evaluations after which the races and the genetic search begin again, from the best of all structures met by then:
three times so many ended 1.8 % above the best of all that was tried (six problems, four seeds), one go three times as
long 2.9 %, once so many 5.3 %."""
MANY_CYCLES = 3
"""Of more such cycles all but the last begin by themselves, as what comes of one varies more than what one more adds;
after so many, or more, some sets of regions are searched by themselves."""
NARROWED, NARROW = 2, 3_000
"""Sets of regions, and of device types, that are searched by themselves after so many cycles (of types always), and
evaluations in each: of all moves few concern what is in use where there is much."""
FEWER = 6
"""Part, one in so many, of a cycle's evaluations that a set of types gets after fewer cycles."""
USUAL_CLASSES, MOST_MORE = 20, 2.5
"""Classes of workers above which whole searches evaluate more, in proportion, and how many times as much at most."""
MOST_CELLS = 3_000_000
"""Relaxed evaluations of a search times classes of workers, at most."""
DESCENTS, DESCENDING = 8, 0.2
"""Structures from whose best such a cycle ends with descents through all neighbours, and the part of its evaluations
that these take at most."""
LATE = 30
"""Moves for which walks of the second race may be worse."""

MOST_TRIED, MOST_FITTING, FITS = 400, 6_000, 6
"""Where memory holds no start: starts from which one that it holds is looked for, allocations that are looked at for it
in every setting, and how many are enough."""
FEWEST_S = 0.5
"""Seconds that the first such look takes however short the time limit."""
LARGER = 0.25, 1_000
"""Part of all evaluations, and of them at most, in which something is looked for that memory holds in larger
micro-batches than any start."""
SETTLING, MOST_SETTLING = 200, 800
"""Moves without gain, and moves, by which such a one is improved before it is held against those in smaller ones."""

PARTS = 3
"""Sets of regions in each of which a short search is made."""
MANY_REGIONS = 12
"""Regions above which such a search has no starts of its own; nor has it after many cycles."""
NEARLY = 0.15
"""Part by which the best plan in such a set is worse than the best of all, at most."""
SHORT = 0.25
"""Evaluations of such a search, of those of a whole one."""
MOST_RUNNERS_UP = 4
TRIALS = 4
"""Part of a polish, one in so many, that every draft gets before the best of them gets all of it."""
FEW_SPLITS = 2
"""Of the best uniform splits as many as are starts where the program runs other plans too; else all are."""
FEWEST_FOR_SEVERAL = 100
"""Exact evaluations of an effort below which the best allocation alone is polished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to search; counts make a search repeatable, the time limit may cut it short."""

    fluid_evaluations: int = 12_000
    exact_evaluations: int = 250
    polish_evaluations: int = 300
    """Small changes of the finished plan that are priced (`polygon.planning.polish`)."""
    patience: int = 6_000
    """Fluid evaluations without improvement after which the first phase ends."""
    rounds: int = 1
    """Searches of which the best is taken, with a generator each (`find_in_rounds`); the other counts are of one."""
    begins_with: Effort | None = None
    """A lesser effort whose searches go before, so that this one finds nothing worse."""
    enough: float = -math.inf
    """Of the objective: no other round begins once it is reached."""
    time_limit_s: float = math.inf
    """Of all rounds together."""

    def searches(self) -> list[Effort]:
        """The effort of every single search, in the order in which they are made."""
        before = self.begins_with.searches() if self.begins_with else []
        return before + [replace(self, rounds=1, begins_with=None)] * self.rounds


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Outcome of a search."""

    plan: Plan | None
    value_s: float
    """Of the objective: the step time, unless another was asked for."""
    reason: Message | None = None
    """Why there is no plan."""
    evaluations: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    bills: tuple[tuple[Bill, Allocation], ...] = ()
    """What every allocation costs that was simulated exactly; the chosen one first."""
    proved: bool = False
    """Whether no allocation of devices to stages decodes to a better plan (`polygon.planning.exact`)."""
    cut_short: Message | None = None
    """How much of the uniform splits a time limit allowed for; None for all, and for other searches."""


def find_groups(
    problem: Problem,
    rng: np.random.Generator,
    *,
    stages: int | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
    tables: CostTables | None = None,
    objective: Objective = STEP_TIME,
) -> tuple[Groups | None, Message | None]:
    """Group devices into pipeline stages by an ant colony.

    Parameters
    ----------
    stages : int, optional
        Number of stages; by default the best of 1 .. 8 (as many as layers and devices allow).
    objective : Objective
        What is minimised, within the limits of the constraints, by the fluid step time.

    Returns
    -------
    groups : Groups or None
    reason : Message or None
        Why there are none, or why better ones may have been missed.

    Raises
    ------
    KeyboardInterrupt
        If it came before any grouping was found; later it keeps the best so far.
    """
    effort = effort or Effort()
    decoder = Decoder(problem, tables=tables, objective=objective)
    if not decoder.classes:
        return None, Message("reason.regions_forbidden")
    decoder.warm_up()
    limit = most_stages(problem)
    counts = [stages] if stages else [s for s in (1, 2, 3, 4, 5, 6, 8) if s <= limit]
    best: tuple[float, np.ndarray, int] | None = None
    budget = max(400, effort.fluid_evaluations // (2 * len(counts)))
    last_reason: Message | None = None
    said: Message | None = None
    try:
        for i, count in enumerate(counts):
            size = _likely_size(decoder, count)
            candidates = GroupCandidates(decoder, count, size)
            starts = [x for x in simple_starts(decoder, count, size) if x.any(axis=1).all()]
            values = [candidates.evaluate(x) for x in starts]
            order = np.argsort(values, kind="stable")[:3]
            stop = _limit(budget, budget // 2, effort.time_limit_s / len(counts))
            result = Ants().solve(candidates, rng, stop, start=[starts[k] for k in order])
            if result.solution is not None and (best is None or result.value < best[0]):
                best = (result.value, result.solution, size)
            elif result.solution is None and starts:
                last_reason = _why_not(decoder, [Allocation(workers=x, micro_batch_size=size) for x in starts[:8]])
            if tell:
                tell(Message("phase.ants", stages=count), (i + 1) / len(counts), best[0] if best else math.inf)
            if result.stopped_by == "interrupt":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if best is None:
            raise
        said = Message("reason.interrupted")
    solver = "ants"
    if best is None and last_reason is not None:
        grouping, last_reason = _any_grouping(decoder, stages, rng, effort, last_reason)
        if grouping is not None:
            solver, said = "walks", Message("reason.barely_fits")
            best = decoder.value(grouping), grouping.workers, grouping.micro_batch_size
    if best is None:
        return None, last_reason or Message("reason.no_grouping")
    value, x, size = best
    bill = decoder.fluid_bill(Allocation(workers=x, micro_batch_size=size))
    if value >= OVER_LIMIT:
        return None, Message("reason.no_grouping_within_limits", over=over_limits(problem, bill))
    x = decoder.rules.legal(x)
    x = x[x.any(axis=1)]
    allocation = np.zeros((x.shape[0], len(problem.cluster.pools)), dtype=np.int64)
    for c, (pool, tp) in enumerate(decoder.classes):
        allocation[:, pool] += x[:, c] * tp
    return Groups(
        problem=problem,
        allocation=allocation,
        objective={
            "name": objective.name,
            "value": value,
            "step_s": bill.step_s,
            "micro_batch_size": size,
            "model": "fluid",
        },
        solver=solver,
    ), said


def _any_grouping(
    decoder: Decoder, stages: int | None, rng: np.random.Generator, effort: Effort, reason: Message
) -> tuple[Allocation | None, Message]:
    """Groups that memory holds where it holds nothing that ants judge, of so many `stages` if that is given; None, and
    why, if no walk comes to any (the `reason` given, unless more is known)."""
    size, most = decoder.tables.micro_batch_sizes[0], stages or most_stages(decoder.problem)
    starts = [Allocation(workers=x, micro_batch_size=size) for x in simple_starts(decoder, most, size)]
    if not starts or memory_missing(decoder) > 0:
        return None, reason
    found = fitted(decoder, most, starts, rng, _limit(MOST_FITTING, MOST_FITTING, effort.time_limit_s))
    if found.allocation is None or found.left_over > 0:
        return None, _why_not(decoder, [], found)
    return found.allocation if stages in (None, len(found.allocation.stages)) else None, reason


def _likely_size(decoder: Decoder, stages: int) -> int:
    """Micro-batch size under which the simple starts do best."""
    best, chosen = math.inf, decoder.tables.micro_batch_sizes[0]
    for size in decoder.tables.micro_batch_sizes:
        for x in simple_starts(decoder, stages, size):
            value = decoder.value(Allocation(workers=x, micro_batch_size=size))
            if value < best:
                best, chosen = value, size
    return chosen


def _limit(evaluations: int, patience: int, seconds: float) -> Stop:
    rules: list[Stop] = [MaxEvaluations(evaluations), NoImprovement(patience)]
    if math.isfinite(seconds):
        rules.append(TimeLimit(seconds))
    return AnyOf(tuple(rules))


def find_plan(
    problem: Problem,
    rng: np.random.Generator,
    *,
    groups: Groups | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
    tables: CostTables | None = None,
    objective: Objective = STEP_TIME,
    known: Sequence[Allocation] = (),
) -> Found:
    """One search for the plan with the least step time, or the best by another objective.

    First a memetic search on the fluid objective from simple starts (and the groups, if given), then exact simulation
    of the best candidates and a short exact search around the winner. An interrupt keeps the best so far.

    Parameters
    ----------
    known : sequence of Allocation
        Solutions found before; the result is no worse than the best of them.

    Notes
    -----
    Above the default level of parity the next gentler one is searched first, and where local steps may be taken what
    goes without them. Its plan is kept unless a better one is found, so that more that is allowed is never slower: the
    fluid objective knows nothing of the time that packing takes and may lead to worse ones.
    """
    effort = effort or Effort()
    gentle: list[Allocation] = []
    kept: list[Plan] = []
    clock = Clock(effort.time_limit_s)
    if gentler := _gentler(problem):
        half = replace(effort, time_limit_s=effort.time_limit_s / 2)
        before = find_plan(
            gentler, rng, groups=groups, effort=half, tell=share(tell, 0.0, 0.5), objective=objective, known=known,
            tables=tables and tables.with_other_links(gentler),
        )  # fmt: skip
        if before.interrupted:
            return before
        gentle, effort = [x for _, x in before.bills[:1]], replace(effort, time_limit_s=clock.left_s())
        kept = [before.plan] if before.plan is not None else []
        known, tell = [*known, *gentle], share(tell, 0.5, 1.0)
    return _found(
        problem, rng, effort, tables, objective, groups=groups, tell=tell, known=known, gentle=gentle, kept=kept
    )


def _found(
    problem: Problem,
    rng: np.random.Generator,
    effort: Effort,
    tables: CostTables | None,
    objective: Objective,
    *,
    groups: Groups | None = None,
    tell: Tell | None = None,
    known: Sequence[Allocation] = (),
    gentle: Sequence[Allocation] = (),
    kept: Sequence[Plan] = (),
    in_parts: bool = True,
    begins_with: Sequence[Allocation] = (),
) -> Found:
    """`find_plan` at one level of parity, after allocations and plans of gentler ones; whether also `in_parts`, and
    what it `begins_with` in place of the simple starts."""
    clock = Clock(effort.time_limit_s)
    decoder = Decoder(problem, tables=tables, objective=objective)
    if not decoder.classes:
        return Found(plan=None, value_s=math.inf, reason=Message("reason.all_forbidden"))
    decoder.warm_up()
    begun, candidates = _begin_once(decoder, groups, known, effort, clock, tell, begins_with, uniform=in_parts)
    # Of many classes there are more moves; a large cluster takes long to evaluate, so that fewer allocations are.
    classes, most = candidates.space.classes, effort.fluid_evaluations
    if most >= CYCLE:
        most = int(most * min(max(1.0, classes / USUAL_CLASSES), MOST_MORE))
    effort = replace(effort, fluid_evaluations=min(most, MOST_CELLS // classes))
    simple = candidates.elite

    met, interrupted, nearest = _explore(candidates, rng, effort, begun, clock, tell)
    evaluations = met + begun.looked_at

    def ended(
        plan: Plan | None, value: float, bills: Sequence[tuple[Bill, Allocation]], reason: Message | None = None
    ) -> Found:
        return Found(
            plan=plan, value_s=value, reason=reason, evaluations=evaluations, seconds=clock.spent_s,
            interrupted=interrupted, bills=tuple(bills),
        )  # fmt: skip

    if not candidates.elite and not begun.uniform:
        return ended(None, math.inf, (), reason=_why_not(decoder, begun.tried, nearest))
    count = 6 if interrupted else effort.exact_evaluations
    told = phase_of(None if interrupted else tell, EXACT)

    def met_exactly(values: Mapping[Hashable, float]) -> None:
        if (best := min(values.values(), default=math.inf)) < math.inf:  # who interrupts gets a plan
            told(len(values) / count, best)

    exact = ExactCandidates(decoder, candidates.space.groups, met=met_exactly)
    by = lambda x: len(x.stages), candidates.regions_of, lambda x: used_of(x, candidates.type_of_class)
    kinds = (candidates.best_of(kind) for kind in by)
    # Fluid values of pipelines over many regions are the least sure: the best over fewer, over one first, are known.
    fewer = candidates.best_of(lambda x: len(candidates.regions_of(x)))
    fewer.sort(key=lambda x: len(candidates.regions_of(x)))
    likely = _in_turn(candidates.elite, simple, *kinds, fewer)[: max(1, count // 3)]
    result = Restarts(patience=max(20, count // 4)).solve(
        exact,
        rng,
        _limit(count, count, max(0.2, clock.left_s())),
        start=[*known, *(x for _, _, x in begun.uniform), *likely],
    )
    evaluations += result.evaluations
    solutions = [*([] if result.solution is None else [result.solution]), *gentle]
    draft = _draft(decoder, solutions, begun.uniform, relax=clock.left_s() > 0)
    if draft is None:
        return ended(None, math.inf, (), reason=_why_not(decoder, candidates.elite[:8]))
    interrupted = interrupted or result.stopped_by == "interrupt"
    if not interrupted and in_parts:
        found, interrupted = _in_parts(decoder, candidates, exact, draft[0], rng, effort, clock, tell)
        evaluations += sum(part.evaluations for part, _ in found)
        draft = min([draft, *(new for _, new in found if new)], key=lambda entry: entry[0])
    if not interrupted and clock.left_s() > 0:
        draft, interrupted = _polish(decoder, exact, draft, begun.uniform, effort, clock, tell)
    # What is allowed with less may be all that is found with more, and was polished there.
    drafts = [draft, *((decoder.plan_value(plan), plan, gentle[0]) for plan in kept)]
    draft = min(drafts, key=lambda entry: entry[0])
    value, plan, chosen = draft
    others = sorted(exact.bills, key=lambda pair: value_of(problem, objective, pair[0]))
    bills = [(decoder.bill(plan), chosen), *((bill, x) for bill, x in others if x is not chosen)]
    if value >= OVER_LIMIT:
        over = over_limits(problem, bills[0][0])
        return ended(None, math.inf, bills, reason=Message("reason.no_plan_within_limits", over=over))
    return ended(replace(plan, solver="memetic"), value, bills)


def _explore(
    candidates: Candidates,
    rng: np.random.Generator,
    effort: Effort,
    begun: _Begun,
    clock: Clock,
    tell: Tell | None,
) -> tuple[int, bool, Fitted | None]:
    """Search on the fluid objective from the starts: `candidates` keeps what is good; evaluations, whether broken, and
    what is nearest to a plan where memory holds none.

    The best of different structures race, and the genetic search goes on from what has come of them: which of the
    starts lead on shows after some moves, not before them. The other half of the evaluations go to descents through
    all neighbours, again and again, or of very many classes to a race of walks that accept late. Many evaluations are
    several such `CYCLE`s, each of which ends with descents through all neighbours. All but the last of more than
    `MANY_CYCLES` begin from the starts, in turn from the best of them and from such as are unlike each other; then
    follow short ones in the regions, and on the device types, of the best.
    """
    if begun.interrupted:
        return 0, True, None
    candidates.old_in_a_row = 0  # of the starts many were alike
    try:
        made, nearest = _fit(candidates, begun.tried, rng, effort, clock)
    except KeyboardInterrupt:
        return 0, True, None
    cycles = max(1, effort.fluid_evaluations // CYCLE)
    each = effort.fluid_evaluations // cycles
    if effort.fluid_evaluations == MOST_CELLS // candidates.space.classes:  # what follows is counted, too
        each -= each * NARROWED // (FEWER + NARROWED)
    many = _has_many_cycles(effort)
    total = effort.fluid_evaluations + NARROWED * (2 * NARROW if many else each // FEWER)
    told = phase_of(tell, MEMETIC)

    def cycle(own: Candidates, evaluations: int, spread: bool) -> bool:
        """Whether it was let go on."""
        nonlocal made

        def callback(progress: Progress, _: object) -> None:
            told((made + progress.evaluations) / total, progress.value)

        descents = int(DESCENDING * evaluations) if evaluations >= CYCLE else 0
        late = (evaluations - descents) // 2
        walks: Solver = Iterated()
        if own.space.classes > MOST_LISTED:
            walks, fewest, _ = _race(late, LATE)
            late = late if fewest else 0
        memetic = _memetic(evaluations - descents - late, effort.patience)
        for solver, count, patience in (*memetic, (walks, late, late), (Descents(), descents, descents)):
            if count == 0:
                continue
            stop = AnyOf((_limit(count, patience, max(0.0, clock.left_s(0.65))), NothingNew(own)))
            if isinstance(solver, Descents):
                starts = own.different[:DESCENTS]
            else:
                starts = own.unlike(RACERS) if spread else own.different[:RACERS]
            result = solver.solve(own, rng, stop, start=starts, callback=callback)
            made += result.evaluations
            if result.stopped_by == "interrupt":
                return False
        return True

    def legs() -> Iterator[tuple[Candidates, int, bool]]:
        """What each goes on from and with how many evaluations, and whether it begins from unlike ones."""
        first = candidates.copy()
        for i in range(cycles):
            # What is far from the best is met only by searches that do not begin from it; they need some to follow.
            if cycles > MANY_CYCLES and i < cycles - 1:
                yield first.copy(), each, i % 2 == 1
            else:
                yield candidates, each, False
        for part in candidates.parts(candidates.region_of_class)[:NARROWED] if many else ():
            yield candidates.within(part, candidates.region_of_class), NARROW, False
        # To leave out one of few types is much; the best of one alone is what others are held against.
        sets = candidates.parts(candidates.type_of_class, 1.0)
        alone = [part for part in sets if len(part) == 1]
        for part in list(dict.fromkeys([*sets[: NARROWED - 1], *alone[:1], *sets]))[:NARROWED]:
            yield candidates.within(part, candidates.type_of_class), NARROW if many else each // FEWER, False

    for own, evaluations, spread in legs():
        went_on = cycle(own, evaluations, spread)
        if own is not candidates:
            candidates.join(own)
        if not went_on:
            return made, True, nearest
    try:
        if candidates.space.classes > MOST_LISTED:
            made += _settle(candidates, MOST_CELLS // candidates.space.classes, clock)
    except KeyboardInterrupt:
        return made, True, nearest
    return made, False, nearest


def _settle(candidates: Candidates, most: int, clock: Clock) -> int:
    """Take the best structures to other degrees and micro-batch sizes while that helps, and the best of all to other
    pools; how many were valued, so many at most.

    It is for clusters of very many classes, of which no search looks at all neighbours of an allocation.
    """
    valued = 0

    def descend(x: Allocation, ways: Callable[[Allocation], Iterator[Allocation]]) -> Allocation:
        """Where steps end that are the best of all."""
        nonlocal valued
        best, at = candidates.evaluate(x), None
        while x is not at and clock.left_s(0.65) > 0:
            at = x
            for y in itertools.islice(ways(at), most - valued):
                value = candidates.evaluate(y)
                valued += 1
                if value < best:
                    best, x = value, y
        return x

    for x in candidates.different[:DESCENTS]:
        descend(x, candidates.scaled)
    for x in candidates.elite[:1]:
        descend(descend(x, candidates.exchanged), candidates.scaled)
    return valued


def _has_many_cycles(effort: Effort) -> bool:
    """Whether short ones in the best sets of regions follow."""
    return effort.fluid_evaluations >= MANY_CYCLES * CYCLE


def _fit(
    candidates: Candidates, tried: Sequence[Allocation], rng: np.random.Generator, effort: Effort, clock: Clock
) -> tuple[int, Fitted | None]:
    """Value allocations that memory holds where no start is one: in the smallest micro-batches if none of those `tried`
    is a plan, then in larger ones than any start's while these are better.

    How many were looked at, and the nearest to a plan where there is none. An interrupt is raised.
    """
    decoder, made = candidates.decoder, 0

    def looked(starts: list[Allocation], most: int) -> Fitted:
        nonlocal made
        # However short the time, something is met if anything is.
        left_s = clock.left_s(0.5) if candidates.elite else max(FEWEST_S, clock.left_s(0.9))
        stop = _limit(most, most, max(0.0, left_s))
        found = fitted(decoder, candidates.space.groups, starts, rng, stop)
        made += found.looked_at
        if found.allocation is not None and found.left_over == 0:
            candidates.evaluate(found.allocation)
        return found

    nearest: list[Fitted] = []
    some = tried[:: -(-len(tried) // MOST_TRIED)] if tried and memory_missing(decoder) <= 0 else []
    for degree in candidates.degrees if some else ():
        until = made + MOST_FITTING
        for _ in range(FITS if not candidates.elite else 0):
            nearest.append(looked(in_setting(some, candidates.sizes[0], degree), until - made))
            if nearest[-1].left_over > 0 or made >= until or clock.left_s(0.5) <= 0:
                break
    while candidates.elite:
        best, largest = candidates.elite[0], max(x.micro_batch_size for x in candidates.different)
        larger = [size for size in candidates.sizes if size > largest]
        if best.micro_batch_size < largest or not larger:
            break
        alike = [x for x in candidates.different if x.micro_batch_size == largest and x.setting == best.setting]
        starts = in_setting(alike[:RACERS], larger[0], (best.cp, best.ep))
        found = looked(starts, min(int(LARGER[0] * effort.fluid_evaluations), LARGER[1]))
        if found.allocation is None or found.left_over > 0:
            break
        stop = _limit(MOST_SETTLING, SETTLING, max(0.0, clock.left_s(0.5)))
        settled = Restarts(patience=SETTLING).solve(candidates, rng, stop, start=[found.allocation])
        made += settled.evaluations
        if settled.stopped_by == "interrupt":
            raise KeyboardInterrupt
        if candidates.elite[0].micro_batch_size == largest:
            break
    return made, min(nearest, key=lambda found: found.left_over, default=None)


_Phase = tuple[Solver, int, int]
"""A solver, the evaluations that it gets, and its patience."""


def _memetic(evaluations: int, patience: int) -> tuple[_Phase, _Phase]:
    """A race, which has a part of the evaluations, and the genetic search."""
    race = _race(int(RACE * evaluations), 0)
    return race, (Genetic(), evaluations - race[1], patience)


def _race(most: int, memory: int) -> _Phase:
    """A race of as many as can take `SHORTEST_LAP` moves with so many evaluations; none of one racer."""

    def taken(racers: int, lap: int) -> int:
        """The starts, and laps that all take as long."""
        return racers * (1 + lap * (1 + int(math.log2(racers))))

    sizes = [2**k for k in range(1, MOST_LAPS + 1) if taken(2**k, SHORTEST_LAP) <= most]
    racers = max(sizes, default=0)
    if not racers:
        return Racing(), 0, 0
    lap = max(n for n in range(SHORTEST_LAP, LAP + 1) if taken(racers, n) <= most)
    return Racing(racers=racers, lap=lap, memory=memory), taken(racers, lap), most


_Draft = tuple[float, Plan, Allocation]
"""A value, the plan that has it, and the allocation that it is a plan of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """Where a search begins: how many starts there were, all if none is a plan, and the best uniform splits."""

    looked_at: int
    tried: list[Allocation]
    value_s: float
    """The best, by the fluid objective."""
    interrupted: bool
    uniform: Sequence[_Draft] = ()


def _begin_once(
    decoder: Decoder,
    groups: Groups | None,
    known: Sequence[Allocation],
    effort: Effort,
    clock: Clock,
    tell: Tell | None,
    begins_with: Sequence[Allocation] = (),
    *,
    uniform: bool = True,
) -> tuple[_Begun, Candidates]:
    """`_begin`, and the best of so many uniform splits exactly, in half of the time: once for all searches of a problem
    that begin alike, as there is no chance in it, unless time ends it."""
    of, lasting = (decoder.problem, decoder.objective, groups, *known), math.isinf(effort.time_limit_s)
    found: tuple[_Begun, Candidates, dict[int, list[_Draft]]] | None
    found = None if begins_with else decoder.tables.begun.get(of)
    if found is None:
        candidates = Candidates(decoder, most_stages(decoder.problem))
        found = _begin(decoder, candidates, groups, known, clock, tell, begins_with), candidates, {}
        if not begins_with and not found[0].interrupted and lasting:
            decoder.tables.begun.put(found, of)
    begun, candidates, splits = found
    most_rows = min(effort.fluid_evaluations, CYCLE) // 3
    if uniform and most_rows and not begun.interrupted:
        begun = replace(begun, uniform=splits.get(most_rows, ()))
        if most_rows not in splits:
            rows, left_s = candidates.space.groups, partial(clock.left_s, 0.5)
            try:
                best = uniform_starts(decoder, rows, most_rows=most_rows, seconds_left=left_s, known=begun.value_s)
                best = best if decoder.runs is not None else best[:FEW_SPLITS]
                begun = replace(begun, uniform=best)
                if lasting:
                    splits[most_rows] = best
            except KeyboardInterrupt:
                begun = replace(begun, interrupted=True)
    return begun, candidates.copy()


def _begin(
    decoder: Decoder,
    candidates: Candidates,
    groups: Groups | None,
    known: Sequence[Allocation],
    clock: Clock,
    tell: Tell | None = None,
    begins_with: Sequence[Allocation] = (),
) -> _Begun:
    """Value the simple starts, or what it `begins_with`, by the fluid objective."""
    interrupted = False
    ranked: list[tuple[float, int]] = []
    starts = [*known, *begins_with]
    rows = candidates.space.groups
    degrees, valued, best = candidates.degrees, 0, math.inf
    told = phase_of(tell, STARTS)

    def value_of_start(x: Allocation) -> float:
        """In the best of all degrees, and once so many are valued in those of the best so far."""
        nonlocal degrees
        if valued == MOST_IN_ALL and len(degrees) > 1:
            degrees = tuple(dict.fromkeys((y.cp, y.ep) for y in likely())) or degrees
        return value_in(x, degrees)[0]

    def value_in(x: Allocation, degrees: Sequence[tuple[int, int]]) -> tuple[float, Allocation]:
        """In the best of some degrees, and tell of it."""
        nonlocal valued, best
        found = candidates.evaluate_degrees(x, degrees)
        valued, best = valued + 1, min(best, found[0])
        if valued % TOLD == 0:
            told(valued / (valued + MOST_IN_ALL), best)  # nobody knows how many there will be
        return found

    def likely() -> list[Allocation]:
        """The best so far."""
        return candidates.elite[:12]

    def likely_sizes() -> tuple[int, ...]:
        """Micro-batch sizes of the best so far, ascending; all while there is none."""
        return tuple(sorted({x.micro_batch_size for x in likely()})) or candidates.sizes

    def left_s(part: float) -> float:
        """Of the time, but enough until the fewest starts are valued: the very first may be many times slower."""
        return clock.left_s(part) if valued >= FEWEST_STARTS else math.inf

    def simple() -> Iterator[Allocation]:
        """All that are made for the problem."""
        yield from grown_starts(decoder, rows, value_of_start, lambda: left_s(0.3))
        sizes = likely_sizes()
        yield from replicated_starts(decoder, rows, sizes, value_of_start, lambda: clock.left_s(0.35), best)
        yield from window_starts(decoder, rows, sizes, value_of_start, lambda: clock.left_s(0.38))
        yield from narrow_starts(decoder, rows, sizes, value_of_start, lambda: clock.left_s(0.39))
        for i, x in enumerate(_starts(decoder, candidates, groups, likely_sizes())):
            if i > FEWEST_STARTS and clock.left_s(0.4) <= 0:
                break
            yield x

    try:
        starts += [] if begins_with else simple()
        if decoder.rules:
            starts += [replace(x, workers=y) for x in starts for y in decoder.rules.starts(x.workers)]

        far: set[bytes] = set()

        def rank(first: int) -> None:
            in_vain = 0
            for i, x in enumerate(starts[first:], first):
                workers = x.workers.tobytes()
                if workers in far:
                    continue  # in micro-batches of another size it was much slower than others
                if in_vain >= MOST_IN_VAIN:
                    break
                own = candidates.degrees if i < len(known) else degrees
                value, starts[i] = value_in(x, own)
                ranked.append((value, i))
                if value <= FARTHEST * best:
                    in_vain = 0
                elif math.isfinite(value):
                    far.add(workers)
                    in_vain += 1
                if clock.left_s(0.4) <= 0 and math.isfinite(min(ranked)[0]):
                    break

        rank(0)
        plain = len(starts)
        starts += closed_starts(
            decoder, [starts[i] for value, i in sorted(ranked)[:MOST_CLOSED] if math.isfinite(value)]
        )
        rank(plain)
    except KeyboardInterrupt:
        interrupted = True
    # A large cluster's are gigabytes: they are needed to say why none of them is a plan.
    tried = [] if candidates.elite else starts
    return _Begun(looked_at=len(ranked), tried=tried, value_s=best, interrupted=interrupted)


def _draft(
    decoder: Decoder, found: Sequence[Allocation], uniform: Sequence[_Draft], *, relax: bool = True
) -> _Draft | None:
    """The best plan of some allocations and uniform splits.

    Exact candidates have the packings that suit a message alone; only here are others tried as well. What a uniform
    split says beside its allocation (chunks, say) may be what makes it the best. Once time is up, no packing is tried
    beside (`relax`, as `Decoder.decode` has it).
    """
    plans = [(decoder.decode(x, relax=relax), x) for x in found]
    drafts = [(decoder.plan_value(plan), plan, x) for plan, x in plans if isinstance(plan, Plan)]
    drafts = [draft for draft in drafts if draft[0] < math.inf]
    best = min(drafts, key=lambda draft: draft[0], default=None)
    if uniform and (best is None or uniform[0][0] < best[0]):
        return uniform[0]
    return best


def _in_parts(
    decoder: Decoder,
    candidates: Candidates,
    exact: ExactCandidates,
    value: float,
    rng: np.random.Generator,
    effort: Effort,
    clock: Clock,
    tell: Tell | None,
) -> tuple[list[tuple[Found, _Draft | None]], bool]:
    """Short searches in sets of regions whose plans were nearly as good; what they found, and whether interrupted.

    All regions together have many more pipelines, of which the fluid value misjudges more: what it says against those
    that leave some regions out is less sure than what it says among these. In parts of many regions they begin with the
    best met there so far, as all starts of such a cluster were valued before.
    """
    met: list[tuple[Found, _Draft | None]] = []
    short = replace(
        effort,
        fluid_evaluations=int(SHORT * min(effort.fluid_evaluations, CYCLE)),
        exact_evaluations=int(SHORT * effort.exact_evaluations),
        polish_evaluations=0,
    )
    parts = _likely_parts(exact, value)
    many = len(decoder.problem.cluster.regions) > MANY_REGIONS or _has_many_cycles(effort)
    try:
        for i, part in enumerate(parts):
            phase_of(tell, IN_PARTS)(i / len(parts), min([value, *(found.value_s for found, _ in met)]))
            left_s = clock.left_s(0.85)
            if left_s <= 0:
                break
            tables = _tables_of_part(decoder, part)
            limited, inner = replace(short, time_limit_s=left_s), Decoder(tables.problem, tables=tables)
            here = [x for x in candidates.elite if set(candidates.regions_of(x)) <= set(part)] if many else []
            found = _found(
                tables.problem, rng, limited, tables, decoder.objective, in_parts=False,
                begins_with=[carried_over(x, decoder, inner) for x in here],
            )  # fmt: skip
            bills = [(bill, carried_over(x, inner, decoder)) for bill, x in found.bills]
            exact.bills += bills
            met.append((found, (found.value_s, found.plan, bills[0][1]) if found.plan is not None else None))
            if found.interrupted:
                return met, True
    except KeyboardInterrupt:
        return met, True
    return met, False


def _likely_parts(exact: ExactCandidates, value: float) -> list[tuple[int, ...]]:
    """The sets of regions, not nearly all, whose best plan met is little worse; the best first."""
    best: dict[tuple[int, ...], float] = {}
    for x, other in exact.met():
        regions = exact.regions_of(x)
        best[regions] = min(other, best.get(regions, math.inf))
    near = [
        part for part in best if leaves_out(part, exact.region_of_class) and best[part] <= value + NEARLY * abs(value)
    ]
    return sorted(near, key=best.__getitem__)[:PARTS]


def _tables_of_part(decoder: Decoder, part: tuple[int, ...]) -> CostTables:
    """Tables of the problem in some regions alone; kept, as other rounds may search there."""
    problem = decoder.problem
    kept = decoder.tables.parts.get((problem,), part)
    if kept is None:
        names = {region.name for i, region in enumerate(problem.cluster.regions) if i not in part}
        forbidden = tuple(sorted(names.union(problem.constraints.forbidden_regions)))
        inner = replace(problem, constraints=replace(problem.constraints, forbidden_regions=forbidden))
        kept = decoder.tables.parts.put(decoder.tables.with_other_links(inner), (problem,), part)
    return kept


def _polish(
    decoder: Decoder,
    exact: ExactCandidates,
    draft: _Draft,
    uniform: Sequence[_Draft],
    effort: Effort,
    clock: Clock,
    tell: Tell | None,
) -> tuple[_Draft, bool]:
    """Small changes of the best plan and of those that are nearly as good: they can turn the order of allocations, and
    of the two cuts of an allocation's layers. The best, and whether it was interrupted before all were tried."""
    best, done, total, told = draft, 0, TRIALS, phase_of(tell, POLISH)

    def expired() -> bool:
        told(done / total, best[0])
        return clock.left_s() <= 0

    def take(what: str, entry: _Draft, evaluations: int) -> None:
        """Have the best be what small changes, or perturbations, make of an entry: the same in every round."""
        nonlocal best
        (value, plan, x), of = entry, (decoder.problem, decoder.objective)
        known: _Draft | None = decoder.tables.polished.get(of, what, value, evaluations)
        if known is None:
            found = change[what](plan, evaluations=evaluations, expired=expired)
            known = decoder.plan_value(found), found, x
            if clock.left_s() > 0:
                decoder.tables.polished.put(known, of, what, value, evaluations)
        best = min(best, known, key=lambda entry: entry[0])

    small = partial(polished, tables=decoder.tables, value_of=decoder.plan_value, by_time=decoder.by_time)
    change: dict[str, Callable[..., Plan]] = {
        "small": small,
        "whole": partial(small, to_the_end=True),
        "perturbed": partial(improved, decoder=decoder),
    }
    try:
        # The cuts are often the same.
        distinct = {}
        for plan, x in _drafts(decoder, exact, draft, uniform, effort):
            distinct[decoder.plan_value(plan)] = plan, x
            if expired():
                break
        total += len(distinct)
        for done, (value, (plan, x)) in enumerate(distinct.items(), 1):  # noqa: B007 (`expired` tells of it)
            take("small", (value, plan, x), effort.polish_evaluations // TRIALS)
        take("whole", best, effort.polish_evaluations)
        if effort.exact_evaluations >= FEWEST_FOR_SEVERAL:
            before = best
            take("perturbed", best, effort.polish_evaluations)
            if best is not before:
                take("whole", best, effort.polish_evaluations)
    except KeyboardInterrupt:
        return best, True
    return best, False


def _drafts(
    decoder: Decoder, exact: ExactCandidates, draft: _Draft, uniform: Sequence[_Draft], effort: Effort
) -> Iterator[tuple[Plan, Allocation]]:
    """What is polished: the best plan, and of efforts that simulate many also those that are nearly as good; each cut
    in all ways."""
    value, plan, chosen = draft
    several = effort.exact_evaluations >= FEWEST_FOR_SEVERAL
    yield plan, chosen
    if several:
        near = [entry for entry in uniform if entry[0] <= (1 + RUNNER_UP) * value]
        yield from ((split, x) for _, split, x in near if x is not chosen)
    for x in (chosen, *(_runners_up(exact, chosen, value) if several else ())):
        for cut in CUTS:
            found = decoder.decode(x, cuts=(cut,))
            if isinstance(found, Plan):
                yield found, x
                if several and x is chosen:
                    split = in_chunks(found, decoder.tables, decoder.plan_value)
                    yield from [(split, x)] if split is not None else []


def find_in_rounds(
    search: Callable[[int, Effort, Tell | None], Found], effort: Effort, tell: Tell | None, jobs: int = 1
) -> Found:
    """The best of several searches: more rounds are never worse than fewer, as they begin with the same ones.

    Parameters
    ----------
    search : callable
        Of the number of the round, its effort, and whom to tell. Rounds know nothing of one another.
    effort : Effort
        Each round gets what is left of its time.
    jobs : int
        Processes that make rounds (`polygon.planning.rounds`); what is found does not depend on it.

    Returns
    -------
    Found
        The best, with the evaluations and bills of all, and the seconds that they took.
    """
    clock = Clock()
    met, interrupted = in_rounds(search, effort, tell, lambda found: found.value_s <= effort.enough, jobs)
    best = min(met, key=lambda found: found.value_s)
    return replace(
        best,
        evaluations=sum(found.evaluations for found in met),
        seconds=clock.spent_s,
        interrupted=interrupted,
        bills=(*best.bills, *(pair for found in met if found is not best for pair in found.bills)),
    )


def _in_turn(*lists: list[Allocation]) -> list[Allocation]:
    """One of each list after the other: of what the fluid search has found, of the simple starts, and so on.

    The longer the fluid objective is searched, the more of the best are what it misjudges, unlike others.
    """
    rows = itertools.zip_longest(*lists)
    return list({id(x): x for row in rows for x in row if x is not None}.values())


def _runners_up(exact: ExactCandidates, chosen: Allocation, value: float) -> list[Allocation]:
    """The best few allocations that differ from the chosen one in stages or setting and are nearly as good."""
    found: dict[tuple[int, object], tuple[float, Allocation]] = {}
    for x, other in exact.met():
        if abs(other - value) <= RUNNER_UP * abs(value):
            kind = (int(x.workers.any(axis=1).sum()), x.setting)
            if kind not in found or other < found[kind][0]:
                found[kind] = other, x
    found.pop((int(chosen.workers.any(axis=1).sum()), chosen.setting), None)
    return [x for _, x in sorted(found.values(), key=lambda pair: pair[0])[:MOST_RUNNERS_UP]]


def _gentler(problem: Problem) -> Problem | None:
    """What is searched first: without local steps where they are listed, else the next gentler level of parity.

    None at the default level or below it, and where packings alone are listed.
    """
    limits, level = problem.constraints, PARITY_LEVELS.index(problem.constraints.parity)
    if max(limits.local_steps, default=1) > 1 and 1 in limits.local_steps:
        return replace(problem, constraints=replace(limits, local_steps=(1,)))
    if limits.compressions or limits.local_steps or level <= PARITY_LEVELS.index(Constraints().parity):
        return None
    return at_parity(problem, PARITY_LEVELS[level - 1])


def _starts(
    decoder: Decoder, candidates: Candidates, groups: Groups | None, sizes: tuple[int, ...]
) -> Iterator[Allocation]:
    """The groups at every tensor-parallel degree, and simple starts, in the given micro-batch sizes."""
    rows = candidates.space.groups
    if groups is not None:
        for limit in sorted({t for _, t in decoder.classes}):
            x = np.zeros((rows, candidates.space.classes), dtype=np.int64)
            for s, row in enumerate(groups.allocation[:rows]):
                left = row.copy()
                for c in sorted(range(len(decoder.classes)), key=lambda c: -decoder.classes[c][1]):
                    pool, tp = decoder.classes[c]
                    if tp <= limit:
                        x[s, c] = left[pool] // tp
                        left[pool] -= x[s, c] * tp
            for size in candidates.sizes:
                yield Allocation(workers=x, micro_batch_size=size)
    for size in sizes:
        for x in simple_starts(decoder, rows, size):
            yield Allocation(workers=x, micro_batch_size=size)
    for sequences in (kind_sequences, region_sequences, relays):
        yield from itertools.islice(sequences(decoder, rows, sizes, MOST_OF_LENGTH), MOST_SEQUENCES)


def _why_not(decoder: Decoder, tried: list[Allocation], nearest: Fitted | None = None) -> Message:
    """The least of what stands in the way of a plan."""
    missing, layers = memory_missing(decoder), decoder.problem.model.layers
    if missing > 0:
        return Message("reason.too_large", model=decoder.problem.model.name, lacking_bytes=missing)
    if nearest is not None and 0 < nearest.left_over <= layers:
        return Message("reason.left_over", left=int(nearest.left_over), layers=layers, ways=nearest.looked_at)
    outcomes = [decoder.decode(x) for x in tried]
    reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Infeasible)]
    lacking = [reason for reason in reasons if reason.kind == "reason.lacks_memory"]
    if lacking:
        return min(lacking, key=lambda reason: float(reason["lacking_bytes"]))
    return reasons[0] if reasons else Message("reason.no_allocation")


def memory_missing(decoder: Decoder) -> float:
    """Bytes by which all allowed devices together fall short of the model's sharded states (0 or less: enough)."""
    tables = decoder.tables
    bank = decoder.bank(Setting(tables.micro_batch_sizes[0]))
    least = float((bank.held_bytes + bank.divided_bytes).min()) * tables.problem.model.parameters
    pools = {p for p, _ in decoder.classes}
    room = sum(
        max(0.0, float(tables.limit_bytes[p]) - bank.context_bytes) * tables.problem.cluster.pools[p].devices
        for p in pools
    )
    return least - room
