"""The order of every worker's actions: data, simulated by the planner and executed by the runner.

A *window* W_s per stage decides the order: on a worker of stage s, forward of micro-batch m' comes before backward of
micro-batch m exactly when m' < m + W_s. Give every action the key

    forward m -> (m, 0, s)          backward m -> (m + W_s - 1, 1, -s)

and sort: a worker's order is its actions by key. Every dependency (forward s -> s+1, backward s+1 -> s, forward ->
backward on the last stage) goes to a larger key as long as W_s >= 1 and W_s never grows with s, so the order can never
deadlock, whatever the routes, and one sort gives a topological order of the whole step. Special cases: W_s =
micro-batches is GPipe; W_s = width * (stages - s) with micro-batches dealt in turn is 1F1B (Narayanan et al., SC'21);
a larger window hides a longer link at the price of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.domain.plan import Plan

FORWARD, BACKWARD = 0, 1


class Action(NamedTuple):
    """Forward or backward of one micro-batch on one stage."""

    kind: str
    """F or B."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def topological_order(micro_batches: int, windows: tuple[int, ...]) -> np.ndarray:
    """All actions of a step in an order that respects every dependency.

    Returns
    -------
    ndarray of int64, shape (2 * micro_batches * stages, 3)
        Rows (kind, micro-batch, stage) with kind 0 forward, 1 backward.
    """
    stages = len(windows)
    m, s = (grid.ravel() for grid in np.meshgrid(np.arange(micro_batches), np.arange(stages), indexing="ij"))
    window = np.asarray(windows, dtype=np.int64)[s]
    kind = np.repeat(np.array([FORWARD, BACKWARD]), len(m))
    key = np.concatenate([m, m + window - 1])
    tie = np.concatenate([s, -s])
    order = np.lexsort((tie, kind, key))
    return np.stack([kind, np.tile(m, 2), np.tile(s, 2)], axis=1)[order]


def worker_order(plan: Plan, stage: int, worker: int) -> list[Action]:
    """Actions of one worker in the order in which it executes them."""
    mine = np.flatnonzero(plan.routes[:, stage] == worker)
    window = plan.windows[stage]
    keyed = [((int(m), 0, 0), Action("F", int(m))) for m in mine]
    keyed += [((int(m) + window - 1, 1, int(m)), Action("B", int(m))) for m in mine]
    return [action for _, action in sorted(keyed)]


def in_flight(plan: Plan, stage: int) -> np.ndarray:
    """Most micro-batches each worker of a stage holds activations of at one time, shape (width,)."""
    held = np.zeros(plan.stages[stage].width, dtype=np.int64)
    for worker in range(len(held)):
        mine = np.flatnonzero(plan.routes[:, stage] == worker)
        # Forward of mine[i] comes before backward of mine[j] exactly when mine[i] < mine[j] + window.
        ends = np.searchsorted(mine, mine + plan.windows[stage], side="left")
        held[worker] = int((ends - np.arange(len(mine))).max(initial=0))
    return held
