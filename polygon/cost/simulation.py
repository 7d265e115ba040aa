"""Exact simulation of a plan's schedule: start and end of every action (longest path).

The order of actions is that of `polygon.domain.schedule`: for key k = 0, 1, ... first the forward of micro-batch k
through all stages, then, last stage first, the backwards whose micro-batch m has m + W - 1 = k on the worker of its
route. Walking the keys is therefore a topological order; only the backwards have to be sorted, by counting.

Resources: a worker does one action at a time; the messages of one worker to one other worker in one direction
(activations down, gradients up) follow one another on one channel. A message occupies its channel for bytes / rate and
arrives after a further latency; computing goes on meanwhile. Where several channels share a link, messages have to be
looked at in order of time: `polygon.cost.shared_schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polygon.cost.shared_schedule import shared_ends_s, worker_actions
from polygon.domain.schedule import BACKWARD, FORWARD, interleaved_actions, ranked_actions
from polygon.jit.compilation import general


@general
def plain_step_s(
    forward_s: np.ndarray, backward_s: np.ndarray, transfer_s: np.ndarray, windows: np.ndarray, micro_batches: int
) -> float:
    """Makespan [s] of a pipeline with one worker per stage, messages that never queue.

    Parameters
    ----------
    forward_s, backward_s : ndarray, shape (stages,)
        Seconds per micro-batch.
    transfer_s : ndarray, shape (stages,)
        Seconds from the end of an action on stage s (forward) or s + 1 (backward) to its arrival on the other side;
        the last entry is not used.
    windows : ndarray of int64, shape (stages,)
        See `polygon.domain.schedule`; never grow from stage to stage.
    """
    stages = forward_s.shape[0]
    free = np.zeros(stages)
    forward_and_send = forward_s + transfer_s
    send_back = np.zeros(stages)
    # arrived[m * width + s]: when the gradient of micro-batch m is there for the backward of stage s.
    width = stages + 1
    arrived = np.empty(micro_batches * width)
    for m in range(micro_batches):
        arrived[m * width + stages] = 0.0
    # Place of the backward that stage s does at key 0, were there one.
    place = np.empty(stages, dtype=np.int64)
    for s in range(stages):
        place[s] = (1 - windows[s]) * width + s
        if s > 0:
            send_back[s] = transfer_s[s - 1]
    for key in range(micro_batches + windows[0] - 1):
        if key < micro_batches:
            arrival = 0.0
            for s in range(stages):
                start = arrival if arrival > free[s] else free[s]
                free[s] = start + forward_s[s]
                arrival = start + forward_and_send[s]
        for s in range(stages - 1, -1, -1):
            m = key - windows[s] + 1
            if m >= 0 and m < micro_batches:
                i = key * width + place[s]
                ready, idle = arrived[i + 1], free[s]
                end = (ready if ready > idle else idle) + backward_s[s]
                free[s] = end
                arrived[i] = end + send_back[s]
    makespan = 0.0
    for s in range(stages):
        makespan = max(makespan, free[s])
    return makespan


@general
def backward_order(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Backwards by key, those of later stages first.

    Parameters
    ----------
    windows : ndarray of int64, shape (micro_batches, stages)
        Of the worker that each micro-batch meets in each stage.

    Returns
    -------
    order : ndarray of int64, shape (micro_batches * stages, 2)
        Micro-batch and stage.
    first : ndarray of int64, shape (keys + 1,)
        Where each key's backwards begin.
    """
    micro_batches, stages = windows.shape
    keys = micro_batches
    for m in range(micro_batches):
        for s in range(stages):
            keys = max(keys, m + windows[m, s])
    first = np.zeros(keys + 1, dtype=np.int64)
    for m in range(micro_batches):
        for s in range(stages):
            first[m + windows[m, s]] += 1
    for key in range(keys):
        first[key + 1] += first[key]
    place = first.copy()
    order = np.empty((micro_batches * stages, 2), dtype=np.int64)
    for s in range(stages - 1, -1, -1):
        for m in range(micro_batches):
            key = m + windows[m, s] - 1
            order[place[key], 0] = m
            order[place[key], 1] = s
            place[key] += 1
    return order, first


@general
def routed_ends_s(
    routes: np.ndarray,
    order: np.ndarray,
    first: np.ndarray,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    down_busy_s: np.ndarray,
    down_latency_s: np.ndarray,
    up_busy_s: np.ndarray,
    up_latency_s: np.ndarray,
    down_channel: np.ndarray,
    up_channel: np.ndarray,
    channels: int,
    free: np.ndarray,
    start_s: np.ndarray,
) -> None:
    """Simulate a routed schedule; results go to `free` (end of every worker) and `start_s` (if it is not empty).

    Parameters
    ----------
    routes : ndarray of int64, shape (micro_batches, stages)
        Worker numbers, counted over all stages.
    order, first : ndarray of int64
        Of `backward_order`.
    forward_s, backward_s : ndarray, shape (workers,)
        Seconds per micro-batch.
    down_busy_s, down_latency_s, up_busy_s, up_latency_s : ndarray, shape (micro_batches, stages - 1)
        How long the message of micro-batch m from stage s to s + 1 (down) or back (up) holds its channel, and what
        it takes longer to arrive.
    down_channel, up_channel : ndarray of int64, shape (micro_batches, stages - 1)
        Channel of every message, 0 .. channels - 1; a channel has one sender, so its order is the sender's.
    free : ndarray, shape (workers,)
        Out: when each worker has ended its last action [s].
    start_s : ndarray, shape (2, micro_batches, stages) or (0, 0, 0)
        Out: start of every forward [0] and backward [1].
    """
    micro_batches, stages = routes.shape
    free[:] = 0.0
    channel = np.zeros(channels)
    arrived = np.zeros((micro_batches, stages))
    record = start_s.shape[0] == 2
    # In the order of keys every action comes after all that it waits for: the forwards of micro-batch k, then those
    # backwards that free a place for the next forward. One pass over them suffices, and nothing is sorted.
    for key in range(first.shape[0] - 1):
        if key < micro_batches:
            arrival = 0.0
            for s in range(stages):
                w = routes[key, s]
                start = arrival if arrival > free[w] else free[w]
                end = start + forward_s[w]
                if record:
                    start_s[0, key, s] = start
                if s + 1 < stages:
                    c = down_channel[key, s]
                    # Bytes hold the channel, latency does not: the next message may follow at once.
                    leaves = (end if end > channel[c] else channel[c]) + down_busy_s[key, s]
                    channel[c] = leaves
                    arrival = leaves + down_latency_s[key, s]
                free[w] = end
        for i in range(first[key], first[key + 1]):
            m, s = order[i, 0], order[i, 1]
            w = routes[m, s]
            start = arrived[m, s] if arrived[m, s] > free[w] else free[w]
            end = start + backward_s[w]
            if record:
                start_s[1, m, s] = start
            if s > 0:
                c = up_channel[m, s - 1]
                leaves = (end if end > channel[c] else channel[c]) + up_busy_s[m, s - 1]
                channel[c] = leaves
                arrived[m, s - 1] = leaves + up_latency_s[m, s - 1]
            free[w] = end


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleTimes:
    """What the simulation needs to know of a plan; shapes as in `routed_ends_s` and `shared_ends_s`."""

    routes: np.ndarray
    order: np.ndarray
    first: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    link: np.ndarray
    hold_s: np.ndarray
    """Shape (2, micro_batches, stages - 1, k): down [0] and up [1]."""
    latency_s: np.ndarray
    links: int
    shared: bool
    """Whether several channels use some link; else every link is a channel, and k = 1."""
    chunks: int = 1
    """Stages on the devices of each worker (`Plan.chunks`)."""
    ranks: np.ndarray | None = None
    """Of the plan (`Plan.order`); `order` and `first` then say nothing."""

    @cached_property
    def holder(self) -> np.ndarray:
        """Number of the devices that compute for each worker, shape (workers,): several stages may be on the same."""
        workers = len(self.forward_s)
        return np.arange(workers) % (workers // self.chunks)

    def simulate(self, *, record: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """End of every worker [s], shape (workers,), and start of every action, shape (2, micro_batches, stages).

        The starts are an empty array unless `record` is set.
        """
        ends_s = np.empty(len(self.forward_s))
        start_s = np.zeros((2, *self.routes.shape)) if record else np.zeros((0, 0, 0))
        fixed = self.routes, self.order, self.first, self.forward_s, self.backward_s
        if self.shared or self.chunks > 1 or self.ranks is not None:
            workers = len(ends_s)
            holder = np.arange(workers)
            if self.ranks is not None:
                actions, at = ranked_actions(self.routes, self.ranks, workers)
            elif self.chunks > 1:
                actions, at, holder = interleaved_actions(self.routes, workers, self.chunks)
            else:
                actions, at = worker_actions(self.routes, self.order, self.first, workers)
            free = np.empty(len(at) - 1)
            passing = self.forward_s, self.backward_s, self.link, self.hold_s, self.latency_s
            shared_ends_s(self.routes, actions, at, holder, *passing, self.links, free, start_s)
            ends_s = free[holder]
        else:
            hold_s, channel = (values.reshape(self.latency_s.shape) for values in (self.hold_s, self.link))
            messages = hold_s[0], self.latency_s[0], hold_s[1], self.latency_s[1]
            routed_ends_s(*fixed, *messages, channel[0], channel[1], self.links, ends_s, start_s)
        return ends_s, start_s

    def duration_s(self, kind: int, micro_batch: int, stage: int) -> float:
        """Seconds of one action (kind `FORWARD` or `BACKWARD`)."""
        worker = self.routes[micro_batch, stage]
        return float((self.forward_s, self.backward_s)[kind][worker])


__all__ = ["BACKWARD", "FORWARD", "ScheduleTimes", "plain_step_s", "routed_ends_s"]
