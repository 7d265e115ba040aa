"""What local updates would bring to a plan that meets in every step, and what is known of the loss under them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from polygon.cost.convergence import allowed, assumptions, rows
from polygon.cost.tables import CostTables
from polygon.domain.errors import OutOfTimeError
from polygon.domain.message import Message
from polygon.domain.plan import PARITY_LEVELS, Plan, Problem
from polygon.domain.runnable import runnable
from polygon.planning.decode import Decoder, most_stages
from polygon.planning.initial_solutions import replicated_starts
from polygon.planning.nearby import allocation_of, best_of

LEAST_GAIN = 1.05
"""Times the tokens per second, below which local updates are not worth a word."""
TRIES = 4
"""Plans that are priced exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdates:
    """A plan whose regions train by themselves for some steps, beside one whose regions meet in every step."""

    times: float
    """Tokens per second over those of the plan."""
    local_steps: int
    step_s: float
    devices: int
    evidence: Message


def local_updates(
    problem: Problem, plan: Plan, tables: CostTables, seconds_left: Callable[[], float] = lambda: math.inf
) -> LocalUpdates | None:
    """What the same problem could do with local steps.

    Their numbers are those for which the parity ledger has rows of models of this size, else all that it has. The plan
    itself, and the same pipeline in every region (or in the regions where it helps), are looked at; a search may find
    more.

    Returns
    -------
    LocalUpdates or None
        None where the plan has them, where local steps may be chosen already or were ruled out by a list, where the
        program runs none, in fp16 (they have no loss scaling), within one region, and where they bring less than
        `LEAST_GAIN`.

    Raises
    ------
    OutOfTimeError
        `seconds_left` fell to 0 before that was known.
    """
    limits, cluster = problem.constraints, problem.cluster
    if plan.local_steps > 1 or runnable(problem) is not None:
        return None
    regions = {pool.region for pool in cluster.pools if problem.may_use(pool)}
    if len(regions) < 2 or limits.local_steps or max(allowed(problem).local_steps) > 1:
        return None
    if problem.batch.precision == "fp16":
        return None
    if seconds_left() <= 0:
        raise OutOfTimeError
    ledger = rows("local_steps")
    shown = [steps for steps, row in ledger.items() if row.level_for(problem.model) != PARITY_LEVELS[-1]]
    steps = tuple(shown) if max(shown) > 1 else tuple(ledger)
    other = replace(problem, constraints=replace(limits, local_steps=steps))
    decoder = Decoder(other, tables=tables.with_other_links(other))
    own = allocation_of(decoder, plan)
    step_s, own_s = decoder.step_times(plan).step_s, decoder.fluid_s(own)[0]
    replicated = replicated_starts(
        decoder,
        most_stages(other),
        tuple(dict.fromkeys((own.micro_batch_size, *decoder.tables.micro_batch_sizes[:2]))),
        lambda x: decoder.fluid_s(x)[0],
        seconds_left,
        own_s if math.isfinite(own_s) else step_s,
    )
    if seconds_left() <= 0:
        raise OutOfTimeError
    found = best_of(decoder, [own, *replicated], tries=TRIES, relax=False)
    if found.plan is None or found.bill is None or found.plan.local_steps == 1:
        return None
    times = step_s / found.bill.step_s
    if times < LEAST_GAIN:
        return None
    return LocalUpdates(
        times=times,
        local_steps=found.plan.local_steps,
        step_s=found.bill.step_s,
        devices=found.plan.world_size,
        evidence=assumptions(other, found.plan)[-1],
    )
