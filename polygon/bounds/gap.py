"""An estimate beside what no plan can beat: the cost model knows no bound, the bound no plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from polygon.bounds.lower_bound import LowerBound, lower_bound
from polygon.bounds.price_bound import least_energy_j, least_usd
from polygon.cost.estimate import Estimate
from polygon.cost.tables import CostTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no plan for a problem can beat: the time of a step, and what it costs and draws."""

    step: LowerBound
    usd: float
    energy_j: float

    @classmethod
    def of(cls, tables: CostTables, step: LowerBound | None = None) -> Self:
        """Of a problem; with what is known of the time of its steps."""
        step = step or lower_bound(tables)
        return cls(step=step, usd=least_usd(tables, step), energy_j=least_energy_j(tables, step))

    def gap(self, estimate: Estimate, objective: str = "time") -> float:
        """How far a plan is above what was to be least (`polygon.planning.objectives`), as a part of the bound.

        ``step_s / step.seconds - 1`` for time; nan where devices are free.
        """
        value, least = {
            "time": (estimate.step_s, self.step.seconds), "energy": (estimate.energy_j, self.energy_j)
        }.get(objective, (estimate.cost_usd, self.usd))  # fmt: skip
        return value / least - 1 if least > 0 else math.nan


def bound_data(estimate: Estimate, bounds: Bounds) -> dict[str, object]:
    """Plain data of the bounds and of how far a step is above its own, as plan files, ``--json`` and the page say them.

    ``bound_cut_short`` is there where it is (`LowerBound.cut_short`).
    """
    bound = bounds.step
    return {
        "lower_bound_s": bound.seconds,
        "lower_bounds_s": bound.parts,
        "bound_by": bound.binding,
        "gap": bounds.gap(estimate),
        "least_usd": bounds.usd,
        "least_energy_j": bounds.energy_j,
        **({"bound_cut_short": True} if bound.cut_short else {}),
    }


def estimate_data(estimate: Estimate, bounds: Bounds) -> dict[str, object]:
    """Plain data of an estimate and of the bounds of its problem."""
    return {**estimate.to_dict(), **bound_data(estimate, bounds)}
