"""The bound that a plan is held against: the problem's own, or a weaker one where it breaks what that rests on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polygon.bounds.gap import Bounds
from polygon.bounds.lower_bound import link_free_bound
from polygon.cost.tables import CostTables
from polygon.domain.message import Violation

BOUND_KNOWS = ("plan.memory", "plan.packing", "plan.compression", "plan.local_steps", "plan.forbidden")
"""How kinds of faults begin that plans have of which `polygon.bounds.lower_bound.lower_bound` is not."""


def is_beyond_bound(faults: Iterable[Violation]) -> bool:
    """Whether a plan with these faults breaks a limit that the problem's bound takes for granted: memory, what may be
    used, packings and local steps, dollars an hour. Of other limits, as a deadline, it knows nothing, and holds for
    whoever breaks them."""
    return any(
        fault["excess"].kind == "limit.usd_per_hour"
        if fault.kind == "plan.limit"
        else fault.kind.startswith(BOUND_KNOWS)
        for fault in faults
    )


def bounds_beyond(tables: CostTables) -> Bounds:
    """What a plan beyond the problem's bound cannot beat either: compute and path alone, of all devices, those among
    them that the limits leave out."""
    limits = tables.problem.constraints
    free = replace(limits, forbidden_regions=(), forbidden_devices=(), most_usd_per_hour=None)
    if free != limits:
        tables = tables.with_other_speeds(replace(tables.problem, constraints=free))
    return Bounds.of(tables, link_free_bound(tables))
