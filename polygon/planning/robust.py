"""Among the plans that a search met: the one whose step is surest, and one that is simpler at nearly the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polygon.cost.estimate import Estimate, estimate
from polygon.cost.money import Bill, excesses, step_bill
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.planning.decode import Allocation, Decoder, Infeasible
from polygon.planning.objectives import MEASURES, STEP_TIME, Objective

NEARLY = 0.01
"""Part by which a step may be longer and still count as the same."""
MOST_PRICED = 24
"""Plans that are decoded and priced for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A plan with its estimate, and how many parts it has that must be understood, and may fail."""

    plan: Plan
    estimate: Estimate

    @property
    def parts(self) -> tuple[int, int, int]:
        """Regions, stages, and ways from region to region that carry traffic."""
        return len({worker.region for worker in self.estimate.workers}), len(self.plan.stages), len(self.estimate.links)


def options(
    problem: Problem,
    bills: Sequence[tuple[Bill, Allocation]],
    tables: CostTables,
    *,
    most: float,
    measure: Objective = STEP_TIME,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> list[Option]:
    """The plans of allocations whose steps take no more than that of what is measured (time [s], money [USD] or energy
    [J]) and that keep all limits, those with least first: as many as time allows."""
    decoder, found = Decoder(problem, tables=tables, objective=measure), []

    def may(bill: Bill) -> bool:
        return measure.value(bill) <= most and not excesses(problem, bill)

    # What a search met may cost more than is allowed: under limits it also looks where there are none.
    near = sorted((pair for pair in bills if may(pair[0])), key=lambda pair: measure.value(pair[0]))
    for _, allocation in near[:MOST_PRICED]:
        if seconds_left() <= 0:
            break
        plan = decoder.decode(allocation)
        if not isinstance(plan, Infeasible) and may(decoder.bill(plan)):  # it may be another than the search's
            found.append(Option(plan=plan, estimate=estimate(problem, plan, tables)))
    return found


def surest(
    problem: Problem,
    plan: Plan,
    bills: Sequence[tuple[Bill, Allocation]],
    tables: CostTables,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> Option:
    """The plan whose 90 % interval ends first: of those met, and of `plan` itself.

    None whose step is longer than the interval of `plan` can be it. Of those whose intervals end within `NEARLY` of the
    first, the one with fewest parts is taken.
    """
    own = Option(plan=plan, estimate=estimate(problem, plan, tables))
    every = [own, *options(problem, bills, tables, most=own.estimate.high_s, seconds_left=seconds_left)]
    first_s = min(option.estimate.high_s for option in every)
    near = [option for option in every if option.estimate.high_s <= first_s * (1 + NEARLY)]
    return min(near, key=lambda option: (option.parts, option.estimate.high_s))


def simpler(
    problem: Problem,
    plan: Plan,
    bills: Sequence[tuple[Bill, Allocation]],
    tables: CostTables,
    objective: Objective = STEP_TIME,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> Option | None:
    """A plan with fewer parts (`Option.parts`) whose step takes within `NEARLY` of the plan's time, or of what else
    the plan was made for; None if none was met."""
    own = Option(plan=plan, estimate=estimate(problem, plan, tables))
    measure = MEASURES[objective.name]
    most = (1 + NEARLY) * measure.value(step_bill(problem, plan, step_times(plan, tables)))
    near = options(problem, bills, tables, most=most, measure=measure, seconds_left=seconds_left)
    best = min([own, *near], key=lambda option: option.parts)
    return None if best.parts == own.parts else best
