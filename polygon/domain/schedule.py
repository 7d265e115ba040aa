"""The order of every worker's actions: data, simulated by the planner and executed by the runner.

Every worker has a *span*: how many micro-batches are let pass while it is busy with one and its message is under way.
The *window* of a micro-batch m in stage s is the sum of the spans from there to the end of its route,

    W(m, s) = sum over s' >= s of span[s'][route[m, s']]

and on a worker of stage s, forward of m' comes before backward of m exactly when m' < m + W(m, s). Give every action
the key

    forward m -> (m, 0, s)          backward m -> (m + W(m, s) - 1, 1, -s)

and sort: a worker's order is its actions by key. With spans of at least 1, every dependency (forward s -> s + 1,
backward s + 1 -> s, forward -> backward on the last stage) goes to a larger key. So the order never deadlocks, whatever
the routes and spans, and one sort gives a topological order of the whole step. Special cases: spans equal to the
number of micro-batches are GPipe; spans equal to the width, with micro-batches dealt in turn, are 1F1B (Narayanan et
al., SC'21). A worker that is slower than its neighbours has a longer span, so that the others do not wait for it; a
longer span also hides a longer link. Both cost memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polygon.domain.plan import Plan, Stage

FORWARD, BACKWARD = 0, 1


class Action(NamedTuple):
    """Forward or backward of one micro-batch on one stage."""

    kind: str
    """F or B."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def stage_spans(stages: Sequence[Stage], spans: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The same span for all workers of a stage."""
    return tuple((int(span),) * stage.width for stage, span in zip(stages, spans, strict=True))


def windows(plan: Plan) -> np.ndarray:
    """Window of every micro-batch in every stage, shape (micro_batches, stages)."""
    columns = [np.asarray(row, dtype=np.int64)[plan.routes[:, s]] for s, row in enumerate(plan.spans)]
    return np.ascontiguousarray(np.cumsum(np.stack(columns, axis=1)[:, ::-1], axis=1)[:, ::-1])


def topological_order(plan: Plan) -> np.ndarray:
    """All actions of a step in an order that respects every dependency.

    Returns
    -------
    ndarray of int64, shape (2 * micro_batches * stages, 3)
        Rows (kind, micro-batch, stage) with kind 0 forward, 1 backward.
    """
    micro_batches, stages = plan.routes.shape
    m, s = (grid.ravel() for grid in np.meshgrid(np.arange(micro_batches), np.arange(stages), indexing="ij"))
    kind = np.repeat(np.array([FORWARD, BACKWARD]), len(m))
    key = np.concatenate([m, m + windows(plan).ravel() - 1])
    tie = np.concatenate([s, -s])
    order = np.lexsort((np.tile(m, 2), tie, kind, key))
    return np.stack([kind, np.tile(m, 2), np.tile(s, 2)], axis=1)[order]


def worker_order(plan: Plan, stage: int, worker: int) -> list[Action]:
    """Actions of one worker in the order in which it executes them."""
    mine = np.flatnonzero(plan.routes[:, stage] == worker)
    due = mine + windows(plan)[mine, stage] - 1
    keyed = [((int(m), 0, int(m)), Action("F", int(m))) for m in mine]
    keyed += [((int(key), 1, int(m)), Action("B", int(m))) for m, key in zip(mine, due, strict=True)]
    return [action for _, action in sorted(keyed)]


def in_flight(plan: Plan, stage: int, window: np.ndarray | None = None) -> np.ndarray:
    """Most micro-batches each worker of a stage holds activations of at one time, shape (width,).

    `window` are the plan's windows, where they are known already.
    """
    column = plan.routes[:, stage]
    held = np.zeros(plan.stages[stage].width, dtype=np.int64)
    due = np.arange(len(column)) + (windows(plan) if window is None else window)[:, stage] - 1
    order = np.argsort(column, kind="stable")
    ends = np.cumsum(np.bincount(column, minlength=len(held)))
    for worker in range(len(held)):
        mine = order[ends[worker - 1] if worker else 0 : ends[worker]]
        # When the j-th backward begins, all forwards with m' <= its key are done, and j backwards.
        forwards = np.searchsorted(mine, np.sort(due[mine]), side="right")
        held[worker] = int((forwards - np.arange(len(mine))).max(initial=0))
    return held
