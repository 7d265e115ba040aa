"""Why devices stay idle under a plan: what forbids them, or what using them would cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.planning.decode import Decoder
from polygon.planning.fluid import FITS, REASONS
from polygon.planning.nearby import allocation_of, best_of, with_idle

MOST_POOLS = 8
"""Pools that are looked at, those with most idle compute first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Idle devices of one pool."""

    region: str
    device: str
    devices: int
    reason: str


def left_out(problem: Problem, plan: Plan, tables: CostTables) -> list[LeftOut]:
    """Pools with devices that a plan does not use, most idle compute first, and why.

    All idle devices of a pool are added to each stage of the plan, and spread over all, at every tensor-parallel
    degree; the least that this would add to the step is the reason. It is the fluid step time that says so, and where
    that sees no harm the exact one. Plans of quite another structure are not looked at (`polygon explain` does).
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
            reason = _cost(decoder, plan, pool.index, count)
        region = problem.cluster.regions[pool.region].name
        rows.append(LeftOut(region=region, device=pool.device.name, devices=count, reason=reason))
    return rows


def _cost(decoder: Decoder, plan: Plan, pool: int, count: int) -> str:
    """What adding the idle devices of a pool would do to the step, in words."""
    allocation = allocation_of(decoder, plan)
    options = list(with_idle(decoder, allocation, pool, count))
    if not options:
        return "too few for a worker"
    base, _ = decoder.fluid_s(allocation)
    found = [decoder.fluid_s(option) for option in options]
    best = min(value for value, _ in found)
    if not math.isfinite(best):
        return next((REASONS[why] for _, why in found if why != FITS), "the step would never end")
    more = best / base - 1
    if more <= 0.001:
        outcome = best_of(decoder, options)
        if outcome.bill is None:
            return outcome.reason
        more = outcome.bill.step_s / decoder.bill(plan).step_s - 1
    if more < -0.001:
        return f"the step would be {-more:.1%} shorter with them: search longer"
    return (
        f"the step would be {more:.1%} longer with them" if more > 0.001 else "the step would be no shorter with them"
    )
