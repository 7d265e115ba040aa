"""What a search found: how it ended, the plan, how good that is and how it came about."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from polygon.api.choices import Objective, Status
from polygon.api.html import html_table
from polygon.api.plans import Plan
from polygon.bounds.lower_bound import LowerBound
from polygon.cost.estimate import Estimate
from polygon.cost.money import Bill
from polygon.domain.clock import Clock
from polygon.domain.message import Message
from polygon.messages.report import seconds
from polygon.planning.decode import Allocation
from polygon.planning.local_updates import LocalUpdates, local_updates
from polygon.planning.objectives import objective_named
from polygon.planning.robust import simpler


class Milestone(NamedTuple):
    """A new best within a phase of a search."""

    phase: Message
    """Phases may value a plan differently: the fluid objective leaves some waiting out."""
    seconds: float
    """Since the search began."""
    value: float
    """Of the objective; the step time [s] unless another was asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Outcome of a search."""

    status: Status
    """`feasible`; `proved`, no allocation of devices to stages has a better plan; `infeasible`, nothing fits;
    `interrupted`, the best so far (no plan if there was none)."""
    plan: Plan | None = field(default=None, repr=False)
    estimate: Estimate | None = field(default=None, repr=False)
    reason: Message | None = None
    """Why there is no plan; `str` puts it into words."""
    objective: Objective = "time"
    """What was to be least."""
    met: tuple[tuple[Bill, Allocation], ...] = field(default=(), repr=False)
    """What every allocation costs that was simulated exactly."""
    history: tuple[Milestone, ...] = field(default=(), repr=False)
    """Every improvement, oldest first."""
    seconds: float = 0.0
    """That the search took."""
    evaluations: int = 0
    cut_short: Message | None = None
    """How much of the uniform splits a time limit allowed for (method grid3d); None for all."""

    @property
    def bound(self) -> LowerBound | None:
        """Least step time of any plan, whatever the objective (`Plan.bound`). None without a plan."""
        return None if self.plan is None else self.plan.bound

    def simpler(self, *, time_limit_s: float = math.inf) -> Plan | None:
        """A plan with fewer regions, stages or links whose step is within 1 % of the plan's, if the search met one.

        Where money or energy was to be least, it takes no more than 1 % more of that.

        Parameters
        ----------
        time_limit_s : float
            After which no more of those that were met are priced.
        """
        if self.plan is None:
            return None
        problem = self.plan.problem
        other = simpler(
            problem.data,
            self.plan.data,
            self.met,
            problem.tables,
            objective_named(self.objective),
            Clock(time_limit_s).left_s,
        )
        if other is None:
            return None
        return Plan(problem, replace(other.plan, seed=self.plan.data.seed), self.plan.bound_in_time)

    def local_updates(self) -> LocalUpdates | None:
        """What the plan's regions would gain by training by themselves for some steps; None if they do, or little."""
        if self.plan is None:
            return None
        return local_updates(self.plan.problem.data, self.plan.data, self.plan.problem.tables)

    def _repr_html_(self) -> str:
        rows = [["status", self.status]]
        if self.plan is None:
            return html_table("Result", ["", ""], [*rows, ["reason", str(self.reason)]])
        step_s, least_s = self.plan.evaluate().step_s, self.plan.bound.seconds
        rows += [["step", seconds(step_s)], ["no plan is faster than", seconds(least_s)]]
        if self.gap is not None and not math.isnan(self.gap):
            rows += [[f"above what no plan can beat in {self.objective}", f"{self.gap:.1%}"]]
        return html_table("Result", ["", ""], rows) + self.plan._repr_html_()

    @property
    def gap(self) -> float | None:
        """How far what was to be least (time, money or energy) is above what no plan can beat, as a part of that.

        nan where money was to be least and devices are free. None without a plan.
        """
        return None if self.plan is None else self.plan.bounds.gap(self.plan.evaluate(), self.objective)
