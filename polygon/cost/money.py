"""What a step costs beside time: device-hours, egress and energy; and what a whole run of many steps costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polygon.cost.step_times import StepTimes
from polygon.domain.cluster import EVERY_REGION
from polygon.domain.message import Message
from polygon.domain.plan import Constraints, Plan, Problem

GB = 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class Bill:
    """Time, money, energy and egress of one step.

    Money is sum over used devices of price * step time, plus price of egress * bytes that leave each region. Energy is
    an upper estimate: every used device draws its rated power all the step. Devices that a plan leaves out cost
    nothing; parts of a node are priced by the device.
    """

    step_s: float
    usd: float
    energy_j: float
    egress_bytes: np.ndarray
    """Shape (regions,): what leaves each region."""
    tokens: int
    """Of one step."""

    @cached_property
    def usd_per_hour(self) -> float:
        """Dollars per hour of training; 0 for a step that never ends."""
        return self.usd / self.step_s * 3600 if math.isfinite(self.step_s) else 0.0

    @property
    def tokens_per_usd(self) -> float:
        """Tokens trained per dollar; inf where nothing costs money."""
        return self.tokens / self.usd if self.usd > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A whole training run: as many steps as a number of tokens takes."""

    tokens: float
    steps: int
    seconds: float
    usd: float
    energy_j: float


def bill_of(problem: Problem, plan: Plan, step_s: float, traffic_bytes: np.ndarray) -> Bill:
    """The bill of a step of a plan.

    Parameters
    ----------
    traffic_bytes : ndarray, shape (regions, regions)
        What the plan sends from region to region per step.
    """
    pools, used = problem.cluster.pools, plan.devices_of_pools.items()
    usd_per_hour = sum(pools[p].price_usd_per_hour * count for p, count in used)
    power_w = sum(pools[p].device.power_w * count for p, count in used)
    return priced(problem, step_s, usd_per_hour, power_w, traffic_bytes.sum(axis=1))


def priced(problem: Problem, step_s: float, usd_per_hour: float, power_w: float, egress_bytes: np.ndarray) -> Bill:
    """The bill of devices that cost `usd_per_hour` and draw `power_w` together."""
    egress_usd = float(egress_bytes @ egress_prices(problem)) / GB
    return Bill(
        step_s=step_s,
        # What costs nothing costs nothing for ever, too: 0 times an endless step is no number.
        usd=(usd_per_hour * step_s / 3600 if usd_per_hour else 0.0) + egress_usd,
        energy_j=power_w * step_s if power_w else 0.0,
        egress_bytes=egress_bytes,
        tokens=problem.batch.tokens,
    )


def unpriced(problem: Problem, plan: Plan) -> list[str]:
    """Types of devices that the plan uses and of which neither the cluster nor the catalogue says a price."""
    groups = [group for region in problem.cluster.regions for group in region.node_groups]
    pools = [problem.cluster.pools[p] for p in plan.devices_of_pools if groups[p].price_usd_per_hour is None]
    return sorted({pool.device.name for pool in pools if pool.price_usd_per_hour == 0})


def unpowered(problem: Problem, plan: Plan) -> list[str]:
    """Types of devices that the plan uses and of which nobody says what they draw."""
    pools = [problem.cluster.pools[p] for p in plan.devices_of_pools]
    return sorted({pool.device.name for pool in pools if not pool.device.power_w})


def egress_prices(problem: Problem) -> np.ndarray:
    """USD per 1e9 bytes that leave each region, shape (regions,)."""
    return np.array([region.egress_usd_per_gb for region in problem.cluster.regions])


def whole_run(bill: Bill, tokens: float) -> TrainingRun:
    """What training on so many tokens takes; the last step is a whole one."""
    steps = math.ceil(tokens / bill.tokens)
    return TrainingRun(
        tokens=tokens, steps=steps, seconds=steps * bill.step_s, usd=steps * bill.usd, energy_j=steps * bill.energy_j
    )


def excesses(problem: Problem, bill: Bill) -> list[tuple[float, Message]]:
    """Limits of the constraints that a bill exceeds: by which part of the limit, and what to say of it.

    A limit of 0 bytes is exceeded by every byte (taken as 1 byte). Rounding (1e-9) is forgiven.
    """
    limits: Constraints = problem.constraints
    found = []

    def compare(value: float, limit: float | None, kind: str) -> None:
        if limit is not None and value > limit * (1 + 1e-9):
            found.append((value / max(limit, 1e-9) - 1, Message(kind, value=value, limit=limit)))

    compare(bill.step_s, limits.most_step_s, "limit.step_s")
    compare(bill.usd, limits.most_usd_per_step, "limit.usd_per_step")
    compare(bill.usd_per_hour, limits.most_usd_per_hour, "limit.usd_per_hour")
    if limits.egress_bytes_per_step:
        for region, n_bytes in zip(problem.cluster.regions, bill.egress_bytes.tolist(), strict=True):
            limit = limits.egress_bytes_per_step.get(region.name, limits.egress_bytes_per_step.get(EVERY_REGION))
            if limit is not None and n_bytes > limit * (1 + 1e-9):
                over = Message("limit.egress_bytes", region=region.name, value=n_bytes, limit=limit)
                found.append((n_bytes / max(limit, 1.0) - 1, over))
    return found


def step_bill(problem: Problem, plan: Plan, times: StepTimes) -> Bill:
    """Time, money, energy and egress of one step of a plan."""
    moved, reduced = traffic_bytes(problem, plan, times)
    return bill_of(problem, plan, times.step_s, moved + reduced)


def traffic_bytes(problem: Problem, plan: Plan, times: StepTimes) -> tuple[np.ndarray, np.ndarray]:
    """Bytes from region to region per step: activations and their gradients, and weight gradients.

    Returns
    -------
    tuple of ndarray, shape (regions, regions) each
    """
    n = len(problem.cluster.regions)
    place, messages = times.place, times.messages
    pair = (place.region[messages.sender] * n + place.region[messages.receiver]).ravel()
    moved = np.bincount(pair, weights=messages.n_bytes.ravel(), minlength=n * n).reshape(n, n)
    # What stays in its region crosses no border, and nobody charges for it.
    np.fill_diagonal(moved, 0.0)
    reduced = np.zeros((n, n))
    for reduction in (*times.reductions, times.tied):
        for a, b, n_bytes in reduction.across_bytes:
            reduced[a, b] += n_bytes
    return moved, reduced
