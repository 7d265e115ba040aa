"""Devices that are not there: computations that take at least as long as the planner says they do on the plan's device.

Unequal devices then behave unequally in a rehearsal, and ranks that mostly wait do not fight for the cores of one
machine. The numbers stay real: everything is computed, the rest of the time is slept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from polygon.cost.step_times import held_parameters
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem


def least_seconds(problem: Problem, plan: Plan, rank: int, factor: float) -> dict[str, float]:
    """Seconds that a rank's forward (F), backward (B) and update are to take: `factor` times the predicted ones."""
    tables = CostTables(problem)
    stage_number, worker_number, _ = plan.rank_places[rank]
    stage = plan.stages[stage_number]
    worker = stage.workers[worker_number]
    times = tables.times(worker.pool, worker.tp, plan.micro_batch_size, stage.recompute)
    held = held_parameters(plan, tables, stage_number, worker.tp)
    seconds = {
        "F": times.forward_s[stage.last_layer] - times.forward_s[stage.first_layer],
        "B": times.backward_s[stage.last_layer] - times.backward_s[stage.first_layer],
        "u": tables.update_s(worker.pool, held),
    }
    return {key: factor * float(value) for key, value in seconds.items()}


def backward_shares(problem: Problem, plan: Plan, rank: int) -> list[float]:
    """Part of a rank's backward that has passed when each of its layers, the last one first, has its gradient."""
    stage_number, worker_number, _ = plan.rank_places[rank]
    stage = plan.stages[stage_number]
    worker = stage.workers[worker_number]
    times = CostTables(problem).times(worker.pool, worker.tp, plan.micro_batch_size, stage.recompute)
    passed = times.backward_s[stage.last_layer] - times.backward_s[stage.first_layer : stage.last_layer][::-1]
    return [float(part) for part in passed / passed[-1]]


class Pace:
    """Stretches intervals of work to a given length.

    Most of the sleep comes before the work, so that what it makes comes as late as on the slower device. Gradients are
    summed as soon as they are there: with shares, backward sleeps before it hands over each layer's.

    Parameters
    ----------
    least_s : mapping
        Seconds by kind, an interval's first letter.
    shares : sequence of float
        `backward_shares`.
    """

    def __init__(self, least_s: Mapping[str, float], shares: Sequence[float] = ()) -> None:
        self._least_s, self._shares = dict(least_s), list(shares)
        self._work_s: dict[str, float] = {}
        self._backward_s: float | None = None
        """When the backward began that is under way."""

    def reach(self, place: int) -> None:
        """Wait until backward has come to a layer, by its place counted from the last one."""
        if self._backward_s is not None and place < len(self._shares):
            due_s = self._backward_s + self._shares[place] * self._least_s.get("B", 0.0)
            time.sleep(max(0.0, due_s - time.monotonic()))

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Make the work inside last as long as its kind (the name's first letter) is to last."""
        kind = name[:1]
        end_s = time.monotonic() + self._least_s.get(kind, 0.0)
        if kind == "B" and self._shares:
            self._backward_s = time.monotonic()
        else:
            time.sleep(max(0.0, self._least_s.get(kind, 0.0) - 1.1 * self._work_s.get(kind, float("inf"))))
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._backward_s = None
            self._work_s[kind] = time.monotonic() - start_s
            time.sleep(max(0.0, end_s - time.monotonic()))
