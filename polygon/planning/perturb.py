"""Iterated local search on a finished plan: changes that help only once the rest has followed.

Two groups of workers change places while the layers stay, or every group holds its layers in another number of chunks.
Links then pack their messages anew, and small changes follow (`polish`): on six devices in three labs a change of
places alone makes the step 1.8 times as long, with packings 1.04 times, and with borders moved it is 2 % shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from polygon.domain.plan import Plan
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.polish import GAIN, affordable, fitted, interleavings, polished

NEAR = 0.15
"""Part by which a plan may be worse after such a change and still be polished."""
MOST_NEAR = 12
"""Of such plans, the best that are polished before perturbations are drawn again, or none is."""
MOST_GROUPS = 8
"""Groups of workers above which only neighbours change places."""
SETTLING = 20
"""Plans that are priced, about, until links have found their packings."""


def improved(plan: Plan, decoder: Decoder, *, evaluations: int, expired: Callable[[], bool] = lambda: False) -> Plan:
    """The plan, or a better one that some perturbations lead to.

    Parameters
    ----------
    evaluations : int
        Perturbations that are settled at most, and plans that each polish of one prices; fewer where steps are large.
    expired : callable, optional
        Whether time is up.
    """
    best, value, tables = plan, decoder.plan_value(plan), decoder.tables
    left = min(evaluations, affordable(plan.micro_batches, len(plan.stages)) // SETTLING)
    while left > 0:
        found: list[tuple[float, Plan]] = []
        for draft in itertools.islice(perturbations(best), left):
            if expired():
                return best
            left -= 1
            if (fits := fitted(draft, tables)) is not None:
                settled = decoder.settled(fits)
                found.append((decoder.plan_value(settled), settled))
        # Of equals, as groups that are alike make them, one is enough.
        distinct = {other: draft for other, draft in found if other <= value + NEAR * abs(value) and other != value}
        better = None
        for _, draft in sorted(distinct.items(), key=lambda entry: entry[0])[:MOST_NEAR]:
            if expired():
                break
            change = polished(
                draft, tables, decoder.plan_value, evaluations=evaluations, by_time=decoder.by_time, expired=expired
            )
            other = decoder.plan_value(change)
            if other < value - GAIN * abs(value) and not violations(tables.problem, change, tables):
                better, value = change, other
        if better is None:
            break
        best = better
    return best


def perturbations(plan: Plan) -> Iterator[Plan]:
    """Plans that differ by who comes where, neighbours first, and by chunks; neither recomputation nor spans follow."""
    groups = plan.groups
    pairs = [(g, h) for g, h in itertools.combinations(range(groups), 2) if groups <= MOST_GROUPS or h == g + 1]
    for pair in sorted(pairs, key=lambda pair: pair[1] - pair[0]):
        yield swapped(plan, *pair)
    yield from interleavings(plan)


def swapped(plan: Plan, one: int, other: int) -> Plan:
    """The workers of two groups in each other's place, with the routes over them."""
    order = list(range(len(plan.stages)))
    for first in range(0, len(order), plan.groups):
        order[first + one], order[first + other] = first + other, first + one
    stages = tuple(
        replace(
            plan.stages[taken], first_layer=here.first_layer, last_layer=here.last_layer,
            recompute="none", recompute_blocks=None,
        )
        for taken, here in zip(order, plan.stages, strict=True)
    )  # fmt: skip
    return replace(
        plan, stages=stages, routes=plan.routes[:, order], spans=tuple(plan.spans[s] for s in order), order=None
    )
