"""What a search minimises: step time, money or energy, within the limits of the constraints.

An objective is a function of a step's bill (`polygon.cost.money`). The search asks it for allocations, whose bill
follows from the fluid step time, the devices used and the flow between regions; and for plans, whose bill is exact.
What exceeds a limit is valued above everything that keeps it, and the more so the further it is over, so that a search
finds its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.money import Bill, excesses, priced
from polygon.domain.errors import one_of, require
from polygon.domain.message import Message
from polygon.domain.plan import Problem
from polygon.planning.problem_arrays import RECOMPUTED, Bank

OVER_LIMIT = 1e15
"""Values from here on belong to what exceeds a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Something to minimise.

    Parameters
    ----------
    value : callable
        Of a bill, lower is better.
    unit : str
        Of the value.
    said : Message, optional
        What people read of it; of those that the command line knows, `name` does.
    """

    name: str
    value: Callable[[Bill], float]
    unit: str
    said: Message | None = None


STEP_TIME = Objective(name="time", value=lambda bill: bill.step_s, unit="s")
MONEY = Objective(name="money", value=lambda bill: bill.usd, unit="USD")
ENERGY = Objective(name="energy", value=lambda bill: bill.energy_j, unit="J")
TOKENS_PER_USD = Objective(
    name="tokens-per-usd", value=lambda bill: 1e6 * bill.usd / bill.tokens, unit="USD per million tokens"
)

OBJECTIVES = {objective.name: objective for objective in (STEP_TIME, MONEY, ENERGY, TOKENS_PER_USD)}
"""By the names that the command line knows."""
MEASURES = OBJECTIVES | {TOKENS_PER_USD.name: MONEY}
"""By the same names: what plans are held against one another by, in parts of it."""


def objective_named(name: str) -> Objective:
    """The objective of a name, as on the command line."""
    require(name in OBJECTIVES, "objective", name, one_of(name, OBJECTIVES))
    return OBJECTIVES[name]


def value_of(problem: Problem, objective: Objective, bill: Bill) -> float:
    """Value of a bill within the limits of a problem's constraints; at least `OVER_LIMIT` outside.

    Equal values are told apart by step time (a part in 1e9).
    """
    if not math.isfinite(bill.step_s):
        return math.inf
    if problem.constraints.limits_cost:
        over = sum(part for part, _ in excesses(problem, bill))
        if over > 0:
            return OVER_LIMIT * (1 + min(over, 1e12))
    value = objective.value(bill)
    return value if objective.name == "time" else value + 1e-9 * bill.step_s


def is_step_time(problem: Problem, objective: Objective) -> bool:
    """Whether `value_of` is the step's time and nothing else."""
    return objective is STEP_TIME and not problem.constraints.limits_cost


def over_limits(problem: Problem, bill: Bill) -> tuple[Message, ...]:
    """What a bill exceeds of the limits of a problem's constraints."""
    return tuple(excess for _, excess in excesses(problem, bill))


def without_cost_limits(problem: Problem) -> Problem:
    """The problem without budgets, deadline and egress caps."""
    free = replace(
        problem.constraints, egress_bytes_per_step={}, most_usd_per_step=None, most_usd_per_hour=None, most_step_s=None
    )
    return replace(problem, constraints=free)


class FluidBills:
    """Bills of allocations: prices and powers of a problem's worker classes as arrays."""

    def __init__(self, problem: Problem, classes: tuple[tuple[int, int], ...]) -> None:
        pools = problem.cluster.pools
        self.problem = problem
        self._usd_per_hour = np.array([pools[p].price_usd_per_hour * t for p, t in classes])
        self._power_w = np.array([pools[p].device.power_w * t for p, t in classes])
        prices = [region.egress_usd_per_gb for region in problem.cluster.regions]
        self._needs_egress = any(prices) or bool(problem.constraints.egress_bytes_per_step)

    def bill(
        self, bank: Bank, workers: np.ndarray, bounds: np.ndarray, options: np.ndarray, out: np.ndarray, step_s: float
    ) -> Bill:
        """Bill of an allocation whose fluid step takes `step_s`; the last arrays are what `fluid_step_s` hands back."""
        used = (workers // bank.cp * bank.cp).sum(axis=0)
        if self._needs_egress:
            egress = fluid_egress_bytes(bank, workers, bounds, options, int(out[0]), int(out[2]))
        else:
            egress = np.zeros(len(self.problem.cluster.regions))
        return priced(self.problem, step_s, float(used @ self._usd_per_hour), float(used @ self._power_w), egress)


def fluid_egress_bytes(
    bank: Bank, workers: np.ndarray, bounds: np.ndarray, options: np.ndarray, stages: int, local_steps: int
) -> np.ndarray:
    """Bytes that leave each region in a step of an allocation, shape (regions,).

    With sigma_s(r) the part of the micro-batches M that region r takes in stage s, and w bytes a message:

    - activations and their gradients: M w |sigma_s(r) - sigma_{s+1}(r)|, as what can stay in its region stays;
    - gradients of a stage in R regions: 2 (R - 1) / R of the packed gradient from each (by ring or direct exchange),
      once in `local_steps` steps;
    - a tied embedding's gradient: of one more stage, where the first and the last are (`Runtime.tied_once`), or both
      ways, where these lie in different regions.
    """
    regions = bank.activation_wire.shape[0]
    rows = workers[workers.any(axis=1)][:stages]
    egress = np.zeros(regions)
    if regions == 1 or not len(rows):
        return egress
    first, last = bounds[:stages], bounds[1 : stages + 1]
    recompute = options[RECOMPUTED, :stages]
    both_s = bank.forward_s + bank.backward_s
    part = np.zeros((stages, regions))
    for s in range(stages):
        classes = np.flatnonzero(rows[s])
        seconds = both_s[classes, recompute[s], last[s]] - both_s[classes, recompute[s], first[s]]
        np.add.at(part[s], bank.region[classes], rows[s, classes] / seconds)
        part[s] /= part[s].sum()
    wire = float(bank.activation_wire[~np.eye(regions, dtype=bool)].max())
    egress += bank.micro_batches * wire * np.abs(np.diff(part, axis=0)).sum(axis=0)
    ratio = float(bank.gradient_ratio[0, 1]) / local_steps
    for s in range(stages):
        here = np.flatnonzero(part[s])
        if len(here) > 1:
            classes = np.flatnonzero(rows[s])
            held = bank.parameters[classes, last[s]] - bank.parameters[classes, first[s]]
            held = held * bank.tp[classes]
            if stages > 1 and s in (0, stages - 1):
                # One copy is among the first stage's parameters, the other not among the last's.
                held += bank.tied_values * ((s > 0) - bank.tied_once)
            egress[here] += 2 * (len(here) - 1) / len(here) * float(held.max()) * bank.gradient_bytes * ratio
    if bank.tied_values and stages > 1:
        here = np.flatnonzero(part[0] + part[-1])
        if not bank.tied_once:
            here = np.unique([int(bank.region[np.flatnonzero(rows[s])[0]]) for s in (0, -1)])
        egress[here] += 2 * (len(here) - 1) / len(here) * bank.tied_values * bank.gradient_bytes * ratio
    return egress
