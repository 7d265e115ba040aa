"""Devices that are not there: computations that take at least as long as the planner says they do on the plan's device.

Unequal devices then behave unequally in a rehearsal, and ranks that mostly wait do not fight for the cores of one
machine. The numbers stay real: everything is computed, the rest of the time is slept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from polygon_comm.shaped import Clock, RealClock

from polygon.cost.step_times import held_parameters
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.schedule import Action


def kind_of(name: str) -> str:
    """What of one kind takes the same time: F and B of a worker's first stage, F.1 and B.1 of its second, u: update."""
    action = Action.named(name)
    return name[:1] if action is None or not action.chunk else f"{action.kind}.{action.chunk}"


def least_seconds(problem: Problem, plan: Plan, rank: int, factor: float) -> dict[str, float]:
    """Seconds that a rank's forwards, backwards and update are to take, by kind: `factor` times the predicted ones."""
    tables = CostTables(problem)
    group, number, _ = plan.rank_places[rank]
    worker, seconds, held = plan.stages[group].workers[number], {}, 0.0
    for s in range(group, len(plan.stages), plan.groups):
        passed = _passing_s(tables, plan, plan.stages[s], worker)
        chunk = s // plan.groups
        held += float(held_parameters(plan, tables, s, worker.tp))
        for kind, passed_s in zip("FB", passed, strict=True):
            seconds[kind_of(str(Action(kind, 0, chunk)))] = passed_s
    seconds["u"] = float(tables.update_s(worker.pool, held))
    return {key: factor * value for key, value in seconds.items()}


def _passing_s(tables: CostTables, plan: Plan, stage: Stage, worker: Worker) -> tuple[float, float]:
    """Seconds of a worker's forward and backward of a micro-batch in a stage."""
    return tables.passing_s(
        stage, pool=worker.pool, tp=worker.tp, cp=worker.cp, micro_batch_size=plan.micro_batch_size
    )[:2]


def backward_shares(problem: Problem, plan: Plan, rank: int, chunk: int = 0) -> list[float]:
    """Part of a rank's backward in a stage that has passed when each layer, the last one first, has its gradient."""
    group, number, _ = plan.rank_places[rank]
    stage = plan.stages[group + chunk * plan.groups]
    tables, worker = CostTables(problem), stage.workers[number]
    each_s = [_passing_s(tables, plan, stage.only(layer), worker)[1] for layer in range(*stage.layers)]
    passed = np.cumsum(each_s[::-1])
    return [float(part) for part in passed / passed[-1]]


class Pace:
    """Stretches intervals of work to a given length.

    Most of the sleep comes before the work, so that what it makes comes as late as on the slower device. Gradients are
    summed as soon as they are there: with shares, backward sleeps before it hands over each layer's.

    Parameters
    ----------
    least_s : mapping
        Seconds by kind (`kind_of`).
    shares : mapping
        By kind of backward `backward_shares`.
    clock : Clock, optional
        By which work is timed and waits end; the machine's.
    """

    def __init__(
        self,
        least_s: Mapping[str, float],
        shares: Mapping[str, Sequence[float]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._least_s, self._shares = dict(least_s), dict(shares or {})
        self._clock: Clock = clock if clock is not None else RealClock()
        self._work_s: dict[str, float] = {}
        self._backward: tuple[str, float] | None = None
        """Kind of the backward that is under way, and when it began."""

    def reach(self, place: int) -> None:
        """Wait until backward has come to a layer, by its place counted from the last one."""
        if self._backward is None:
            return
        kind, begun_s = self._backward
        if place < len(self._shares[kind]):
            self._clock.wait_until(begun_s + self._shares[kind][place] * self._least_s.get(kind, 0.0))

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Make the work inside last as long as its kind is to last."""
        kind = kind_of(name)
        begun_s = self._clock.now_s()
        end_s = begun_s + self._least_s.get(kind, 0.0)
        if kind in self._shares:
            self._backward = kind, begun_s
        else:
            self._clock.wait_until(end_s - 1.1 * self._work_s.get(kind, float("inf")))
        start_s = self._clock.now_s()
        try:
            yield
        finally:
            self._backward = None
            self._work_s[kind] = self._clock.now_s() - start_s
            self._clock.wait_until(end_s)
