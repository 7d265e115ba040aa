"""Why devices stay idle under a plan: what forbids them, or what using them would cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.planning.decode import Decoder
from polygon.planning.fluid import FITS, REASONS
from polygon.planning.nearby import allocation_of, best_of, with_idle
from polygon.planning.objectives import ENERGY, MONEY, STEP_TIME, TOKENS_PER_USD, Objective

MOST_POOLS = 8
"""Pools that are looked at, those with most idle compute first."""

LONGER = ("be {:.1%} longer", "be {:.1%} shorter", "be no shorter")
DEARER = ("cost {:.1%} more", "cost {:.1%} less", "cost no less")
HUNGRIER = ("take {:.1%} more energy", "take {:.1%} less energy", "take no less energy")
MEASURES = {
    STEP_TIME.name: (STEP_TIME, LONGER),
    MONEY.name: (MONEY, DEARER),
    TOKENS_PER_USD.name: (MONEY, DEARER),
    ENERGY.name: (ENERGY, HUNGRIER),
}
"""By objective: what a step is measured by, and what it would do with more, with less and with as much of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Idle devices of one pool."""

    region: str
    device: str
    devices: int
    reason: str


def left_out(problem: Problem, plan: Plan, tables: CostTables, objective: Objective = STEP_TIME) -> list[LeftOut]:
    """Pools with devices that a plan does not use, most idle compute first, and why.

    All idle devices of a pool are added to each stage of the plan, and spread over all, at every tensor-parallel
    degree; the least that this would add to the step (in seconds, or what else the plan was made for) is the
    reason. It is the fluid step time that says so, and where that sees no harm the exact one. Plans of quite another
    structure are not looked at (`polygon explain` does).
    """
    pools = problem.cluster.pools
    used = [0] * len(pools)
    for stage in plan.stages:
        for worker in stage.workers:
            used[worker.pool] += worker.tp
    idle = [(pool, pool.devices - used[pool.index]) for pool in pools if pool.devices > used[pool.index]]
    idle.sort(key=lambda entry: -entry[0].device.peak_flops(problem.batch.precision) * entry[1])
    if not idle:
        return []
    decoder = Decoder(problem, tables=tables)
    rows = []
    for place, (pool, count) in enumerate(idle):
        if not problem.may_use(pool):
            reason = "the constraints forbid them"
        elif not any(
            pool.region == r or problem.cluster.connected(pool.region, r) for r in plan.regions(problem.cluster)
        ):
            reason = "no link to the regions in use"
        elif place >= MOST_POOLS:
            reason = "not looked at"
        else:
            reason = _cost(decoder, plan, pool.index, count, *MEASURES[objective.name])
        region = problem.cluster.regions[pool.region].name
        rows.append(LeftOut(region=region, device=pool.device.name, devices=count, reason=reason))
    return rows


def _cost(decoder: Decoder, plan: Plan, pool: int, count: int, measure: Objective, words: tuple[str, str, str]) -> str:
    """What adding the idle devices of a pool would do to the step, in words."""
    allocation = allocation_of(decoder, plan)
    options = list(with_idle(decoder, allocation, pool, count))
    if not options:
        return "too few for a worker"
    found = [decoder.fluid_s(option) for option in options]
    fitting = [option for option, (step_s, _) in zip(options, found, strict=True) if math.isfinite(step_s)]
    if not fitting:
        return next((REASONS[why] for _, why in found if why != FITS), "the step would never end")
    best = min(measure.value(decoder.fluid_bill(option)) for option in fitting)
    more = _part_more(best, measure.value(decoder.fluid_bill(allocation)))
    if more <= 0.001:
        outcome = best_of(decoder, options)
        if outcome.bill is None:
            return outcome.reason
        more = _part_more(measure.value(outcome.bill), measure.value(decoder.bill(plan)))
    if more < -0.001:
        return f"the step would {words[1].format(-more)} with them: search longer"
    return f"the step would {words[0].format(more) if more > 0.001 else words[2]} with them"


def _part_more(value: float, base: float) -> float:
    """How much more a value is than its base, as a part of the base (which is 0 where devices have no price)."""
    return value / base - 1 if base > 0 else value
