"""An estimate beside what no plan can beat: the cost model knows no bound, the bound no plan."""

from __future__ import annotations

from polygon.bounds.lower_bound import LowerBound
from polygon.cost.estimate import Estimate


def gap(step_s: float, bound: LowerBound) -> float:
    """How far a step is above the bound, as a part of it: ``step_s / bound.seconds - 1``."""
    return step_s / bound.seconds - 1


def bound_data(step_s: float, bound: LowerBound) -> dict[str, object]:
    """Plain data of a bound and of how far a step is above it, as plan files, ``--json`` and the page say them.

    ``bound_cut_short`` is there where it is (`LowerBound.cut_short`).
    """
    return {
        "lower_bound_s": bound.seconds,
        "lower_bounds_s": bound.parts,
        "bound_by": bound.binding,
        "gap": gap(step_s, bound),
        **({"bound_cut_short": True} if bound.cut_short else {}),
    }


def estimate_data(estimate: Estimate, bound: LowerBound) -> dict[str, object]:
    """Plain data of an estimate and of the bound of its problem."""
    return {**estimate.to_dict(), **bound_data(estimate.step_s, bound)}
