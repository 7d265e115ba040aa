"""Why devices stay idle under a plan: what forbids them, or what using them would cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.planning.decode import Decoder
from polygon.planning.fluid import FITS, NEVER_ENDS, REASONS
from polygon.planning.nearby import allocation_of, best_of, with_idle
from polygon.planning.objectives import MEASURES, STEP_TIME, Objective

MOST_POOLS = 8
"""Pools that are looked at, those with most idle compute first."""

NEAR = 0.1
"""Part of a step within which what devices would add is simulated as thoroughly as the plan's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Idle devices of one pool."""

    region: str
    device: str
    devices: int
    reason: Message


def left_out(
    problem: Problem,
    plan: Plan,
    tables: CostTables,
    objective: Objective = STEP_TIME,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> list[LeftOut]:
    """Pools with devices that a plan does not use, most idle compute first, and why.

    All idle devices of a pool are added to each stage of the plan, and spread over all, at every tensor-parallel
    degree; the least that this would add to the step (in seconds, or what else the plan was made for) is the
    reason: the exact step, of those that are best by the fluid one. Plans of quite another structure are not looked at
    (`polygon explain` does). Once `seconds_left` falls to 0 no further pool is looked at.
    """
    used = plan.devices_of_pools
    counted = [(pool, pool.devices - used[pool.index]) for pool in problem.cluster.pools]
    idle = [(pool, count) for pool, count in counted if count > 0]
    idle.sort(key=lambda entry: -entry[0].device.peak_flops(problem.batch.precision) * entry[1])
    if not idle:
        return []
    measure = MEASURES[objective.name]
    decoder = Decoder(problem, tables=tables, objective=measure)
    rows = []
    for place, (pool, count) in enumerate(idle):
        if not problem.may_use(pool):
            reason = Message("idle.forbidden")
        elif not any(
            pool.region == r or problem.cluster.connected(pool.region, r) for r in plan.regions(problem.cluster)
        ):
            reason = Message("idle.no_link")
        elif place >= MOST_POOLS:
            reason = Message("idle.not_looked_at")
        elif seconds_left() <= 0:
            reason = Message("idle.no_time")
        else:
            reason = _cost(decoder, plan, pool.index, count, measure)
        region = problem.cluster.regions[pool.region].name
        rows.append(LeftOut(region=region, device=pool.device.name, devices=count, reason=reason))
    return rows


def _cost(decoder: Decoder, plan: Plan, pool: int, count: int, measure: Objective) -> Message:
    """What adding the idle devices of a pool would do to the step."""
    allocation = allocation_of(decoder, plan)
    options = list(with_idle(decoder, allocation, pool, count))
    if not options:
        return Message("idle.too_few")
    found = [decoder.fluid_s(option) for option in options]
    fitting = [option for option, (step_s, _) in zip(options, found, strict=True) if math.isfinite(step_s)]
    if not fitting:
        return next((REASONS[why] for _, why in found if why != FITS), NEVER_ENDS)
    own = measure.value(decoder.bill(plan))
    outcome = best_of(decoder, fitting, relax=False, measure=measure)
    if outcome.bill is not None and _part_more(measure.value(outcome.bill), own) <= NEAR:
        outcome = best_of(decoder, fitting, measure=measure)
    if outcome.bill is None:
        return outcome.reason or NEVER_ENDS
    more = _part_more(measure.value(outcome.bill), own)
    if more < -0.001:
        return Message(f"idle.less_{measure.name}", part=-more)
    if math.isinf(more):
        return Message(f"idle.free_{measure.name}")
    if more >= 1:
        return Message(f"idle.times_{measure.name}", times=1 + more)
    return Message(f"idle.more_{measure.name}", part=more) if more > 0.001 else Message(f"idle.same_{measure.name}")


def _part_more(value: float, base: float) -> float:
    """How much more a value is than its base, as a part of the base; inf of 0, where devices have no price."""
    return value / base - 1 if base > 0 else math.inf if value > 0 else 0.0
