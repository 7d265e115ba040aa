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

Where workers hold several stages (`Plan.chunks`), spans say nothing: their order is interleaved 1F1B, see
`interleaved_actions`. Nor do they where a plan says the order itself (`Plan.order`): the place of every action among
its worker's, which may let micro-batches overtake one another (`polygon.planning.list_schedule`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from polygon.domain.plan import Plan, Stage

FORWARD, BACKWARD = 0, 1


class Action(NamedTuple):
    """Forward or backward of one micro-batch on one stage."""

    kind: str
    """F or B."""
    micro_batch: int
    chunk: int = 0
    """Which of the stages that the worker holds."""

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def named(cls, name: str) -> Action | None:
        """The action of that name (as `str` gives it); None where it is not an action's."""
        found = re.fullmatch(r"([FBV])(\d+)(?:\.(\d+))?", name)
        return None if found is None else cls(found[1], int(found[2]), int(found[3] or 0))


def stage_spans(stages: Sequence[Stage], spans: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The same span for all workers of a stage."""
    return tuple((int(span),) * stage.width for stage, span in zip(stages, spans, strict=True))


def windows(plan: Plan) -> np.ndarray:
    """Window of every micro-batch in every stage, shape (micro_batches, stages)."""
    spans = np.array([span for row in plan.spans for span in row], dtype=np.int64)
    first = [0, *accumulate(len(row) for row in plan.spans[:-1])]
    return np.ascontiguousarray(spans[plan.routes + first][:, ::-1].cumsum(axis=1)[:, ::-1])


def topological_order(plan: Plan) -> np.ndarray:
    """All actions of a step in an order that respects every dependency.

    Returns
    -------
    ndarray of int64, shape (2 * micro_batches * stages, 3)
        Rows (kind, micro-batch, stage) with kind 0 forward, 1 backward.
    """
    micro_batches, stages = plan.routes.shape
    if plan.order is not None:
        return _ranked_topologically(plan)
    m, s = (grid.ravel() for grid in np.meshgrid(np.arange(micro_batches), np.arange(stages), indexing="ij"))
    kind = np.repeat(np.array([FORWARD, BACKWARD]), len(m))
    key = np.concatenate([m, m + windows(plan).ravel() - 1])
    tie = np.concatenate([s, -s])
    order = np.lexsort((np.tile(m, 2), tie, kind, key))
    return np.stack([kind, np.tile(m, 2), np.tile(s, 2)], axis=1)[order]


def repeated(plan: Plan, times: int) -> Plan:
    """The plan with so many times the micro-batches, on the same routes; an order of its own is gone through again."""
    if times == 1:
        return plan
    order = plan.order
    if order is not None:
        columns = list(plan.routes.T)
        each = np.stack([2 * np.bincount(column)[column] for column in columns], axis=1)
        order = np.concatenate([order + turn * each for turn in range(times)], axis=1)
    return replace(plan, routes=np.tile(plan.routes, (times, 1)), order=order)


def orders_end(plan: Plan) -> bool:
    """Whether every action of a plan with an order of its own has its turn: no worker waits for another for ever."""
    return len(_ranked_topologically(plan)) == 2 * plan.routes.size


def _ranked_topologically(plan: Plan) -> np.ndarray:
    """`topological_order` of a plan with an order of its own: whoever can do an action does its next one.

    Without those that never have their turn, where workers wait for one another.
    """
    assert plan.order is not None
    micro_batches, stages = plan.routes.shape
    half = micro_batches * stages
    offset = np.cumsum([0, *(stage.width for stage in plan.stages)])
    units = (plan.routes + offset[:-1]).ravel().tolist()
    actions, begins = ranked_actions(plan.routes + offset[:-1], plan.order, int(offset[-1]))
    queues = [actions[a:b].tolist()[::-1] for a, b in pairwise(begins)]
    there = [action < half and action % stages == 0 for action in range(2 * half)]
    found, ready = [], list(range(len(queues)))
    while ready:
        queue = queues[ready.pop()]
        while queue and there[queue[-1]]:
            action = queue.pop()
            found.append(action)
            s = action % stages
            if action < half:
                after = action + 1 if s + 1 < stages else action + half
            else:
                after = action - 1 if s > 0 else action
            there[after] = True
            ready.append(units[after % half])
    return np.stack(np.unravel_index(np.array(found, dtype=np.int64), (2, micro_batches, stages)), axis=1)


def worker_order(plan: Plan, stage: int, worker: int) -> list[Action]:
    """Actions of one worker in the order in which it executes them; of all its stages, `stage` being the first."""
    if plan.chunks > 1:
        return _interleaved_order(plan, stage, worker)
    if plan.order is not None:
        mine = np.flatnonzero(plan.routes[:, stage] == worker)
        ranked = [(int(plan.order[k, m, stage]), Action("FB"[k], int(m))) for m in mine for k in (FORWARD, BACKWARD)]
        return [action for _, action in sorted(ranked)]
    mine = np.flatnonzero(plan.routes[:, stage] == worker)
    due = mine + windows(plan)[mine, stage] - 1
    keyed = [((int(m), 0, int(m)), Action("F", int(m))) for m in mine]
    keyed += [((int(key), 1, int(m)), Action("B", int(m))) for m, key in zip(mine, due, strict=True)]
    return [action for _, action in sorted(keyed)]


def _interleaved_order(plan: Plan, group: int, worker: int) -> list[Action]:
    """`worker_order` of a worker that holds several stages."""
    offset = np.cumsum([0, *(stage.width for stage in plan.stages)])
    actions, begins, _ = interleaved_actions(plan.routes + offset[:-1], int(offset[-1]), plan.chunks)
    mine = actions[begins[offset[group] + worker] : begins[offset[group] + worker + 1]]
    micro_batches, stages = plan.routes.shape
    kind, m, s = np.unravel_index(mine, (2, micro_batches, stages))
    return [Action("FB"[k], int(i), int(chunk)) for k, i, chunk in zip(kind, m, s // plan.groups, strict=True)]


def interleaved_actions(routes: np.ndarray, workers: int, chunks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Actions of every holder of several stages in the order of interleaved 1F1B, and where each holder's begin.

    With p groups of workers and v chunks, the i-th forward of a group is that of micro-batch i // (p v) p + i % p in
    chunk i // p % v (the last round may be short), its backwards go through the chunks from the last; group g begins
    with w = 2 (p - g - 1) + (v - 1) p forwards, then every forward is followed by a backward (Narayanan et al., SC'21,
    as Megatron-LM's `forward_backward_pipelining_with_interleaving` has it).

    It never deadlocks, whatever the routes: a forward's key plus g grows by one from stage to stage, and so does a
    backward's, less w and plus p - 1 - g; every worker's order is the one by these numbers.

    Parameters
    ----------
    routes : ndarray of int, shape (micro_batches, stages)
        Worker numbers, counted over all stages.
    workers : int
        Of all stages: who holds several is counted once for each.
    chunks : int

    Returns
    -------
    actions, begins : ndarray of int64
        As of `polygon.cost.shared_schedule.worker_actions`: kind, micro-batch and stage in one number, by holder.
    holder : ndarray of int64, shape (workers,)
        Who computes for each worker.
    """
    micro_batches, stages = routes.shape
    groups, holders = stages // chunks, workers // chunks
    lane = np.zeros(micro_batches, dtype=np.int64)
    for w in np.unique(routes[:, 0]):
        mine = np.flatnonzero(routes[:, 0] == w)
        lane[mine] = np.arange(len(mine))
    m, s = (grid.ravel() for grid in np.meshgrid(np.arange(micro_batches), np.arange(stages), indexing="ij"))
    group, chunk = s % groups, s // groups
    turn, within = lane[m] // groups, lane[m] % groups
    ahead = 2 * (groups - group - 1) + (chunks - 1) * groups
    forward_key = turn * groups * chunks + chunk * groups + within
    backward_key = turn * groups * chunks + (chunks - 1 - chunk) * groups + within + ahead
    unit = routes[m, s]
    holder = np.arange(workers) % holders
    half = micro_batches * stages
    number = np.arange(half)
    key = np.concatenate([2 * forward_key, 2 * backward_key + 1])
    who = np.tile(holder[unit], 2)
    order = np.lexsort((key, who))
    begins = np.concatenate([[0], np.cumsum(np.bincount(who, minlength=holders))])
    return np.concatenate([number, half + number])[order], begins.astype(np.int64), holder


def interleaved_in_flight(plan: Plan, group: int) -> np.ndarray:
    """Most micro-batches each worker of a group holds activations of, in units of all of its layers, shape (width,)."""
    units = interleaved_units(plan.groups, plan.chunks, group)
    found: np.ndarray = np.minimum(plan.shares(group) * plan.chunks, units) / plan.chunks
    return found


def interleaved_units(groups: int, chunks: int, group: int) -> int:
    """Forwards of one chunk that a group does before its first backward ends.

    p - g of 1F1B; with v chunks 2 (p - g - 1) + (v - 1) p and one more (Narayanan et al., SC'21).
    """
    return groups - group if chunks == 1 else 2 * (groups - group - 1) + (chunks - 1) * groups + 1


def ranked_actions(routes: np.ndarray, ranks: np.ndarray, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Actions of every worker in a plan's order, and where each worker's begin, as `interleaved_actions` has them.

    `routes` number workers over all stages, `ranks` are of `Plan.order`.
    """
    who = np.broadcast_to(routes, ranks.shape).ravel()
    begins = np.concatenate([[0], np.cumsum(np.bincount(who, minlength=workers))]).astype(np.int64)
    actions = np.empty(len(who), dtype=np.int64)
    actions[begins[who] + ranks.ravel()] = np.arange(len(who))
    return actions, begins


def ranked_in_flight(ranks: np.ndarray, column: np.ndarray, width: int) -> np.ndarray:
    """`in_flight` of a stage in a plan's order: `ranks` of its actions, shape (2, micro_batches), and who does them."""
    who = np.tile(column, 2)
    in_order = np.lexsort((ranks.ravel(), who))
    # Whoever has begun a micro-batch ends it: every worker's sum begins with 0.
    now = np.where(in_order < len(column), 1, -1).cumsum()
    held = np.zeros(width, dtype=np.int64)
    np.maximum.at(held, who[in_order], now)
    return held


def in_flight(plan: Plan, stage: int, window: np.ndarray | None = None) -> np.ndarray:
    """Most micro-batches each worker of a stage holds activations of at one time, shape (width,).

    `window` are the plan's windows, where they are known already.
    """
    column = plan.routes[:, stage]
    if plan.order is not None:
        return ranked_in_flight(plan.order[:, :, stage], column, plan.stages[stage].width)
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
