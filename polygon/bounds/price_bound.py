"""What no plan can do cheaper: bounds on money and energy of a step.

A used device is paid for, and draws its rated power, from the beginning of a step to its end (`polygon.cost.money`). So

- every (layer, micro-batch) costs at least what the devices that compute it cost in that time, on the kind of device
  and at the degrees where that is least: what a plan without any waiting would cost;
- weights, gradients and optimizer states are held once or more, so a plan has devices of as much memory, all through a
  step that is no shorter than `polygon.bounds.lower_bound` says.

The larger of the two, for the best micro-batch size. Egress is left out: a plan in one region has none.
"""

from __future__ import annotations

import numpy as np

from polygon.bounds.lower_bound import LowerBound, lower_bound
from polygon.bounds.size_work import size_work
from polygon.bounds.stage_tiers import Kinds
from polygon.cost.memory import state_bytes
from polygon.cost.tables import CostTables


def least_usd(tables: CostTables, bound: LowerBound | None = None) -> float:
    """Dollars per step that no plan for a problem can beat; inf where no device may be used.

    `bound` is one on the step's time, by default that of `polygon.bounds.lower_bound`.
    """
    return _least(tables, bound, np.array([pool.price_usd_per_hour / 3600 for pool in tables.problem.cluster.pools]))


def least_energy_j(tables: CostTables, bound: LowerBound | None = None) -> float:
    """Joules per step that no plan for a problem can beat, in the upper estimate of `polygon.cost.money`."""
    return _least(tables, bound, np.array([pool.device.power_w for pool in tables.problem.cluster.pools]))


def _least(tables: CostTables, bound: LowerBound | None, rate: np.ndarray) -> float:
    """Least of what devices cost that cost `rate` per second, shape (pools,)."""
    kinds = Kinds.of(tables)
    used = np.flatnonzero(kinds.of_pool >= 0)
    if not kinds.classes:
        return np.inf
    of_kind = np.full(int(kinds.of_pool.max()) + 1, np.inf)
    np.minimum.at(of_kind, kinds.of_pool[used], rate[used])
    sizes = [size_work(tables, kinds, size) for size in tables.micro_batch_sizes]
    computing = min(float((size.count * (size.device_s * of_kind).min(axis=1)).sum()) for size in sizes)
    memory = tables.memory(1, tables.micro_batch_sizes[0], "none")
    needed = float(memory.parameters[-1]) * sum(state_bytes(tables.problem.batch))
    room = tables.limit_bytes[used] - tables.problem.runtime.context_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        per_byte = float(np.where(room > 0, rate[used] / room, np.inf).min())
    return max(computing, (bound or lower_bound(tables)).seconds * per_byte * needed)
