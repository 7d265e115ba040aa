"""Exact simulation of a plan's schedule where messages of several workers share links: by events in order of time.

The laws are those of `polygon.cost.simulation`, but a message may need several things that others use as well: the node
pair it travels between, the sender's network card, what regions share. Each passes messages in the order in which they
were handed over, at its own rate; a message has left when all that it needs have passed it. So nothing ever carries
more than it can, whoever sends. (Real streams share at the same time instead: the last of several ends then as it does
here, those before it later.)
"""

from __future__ import annotations

import numpy as np

from polygon.jit.compilation import general, kernel


@kernel
def push(due_s: np.ndarray, worker: np.ndarray, size: int, time_s: float, w: int) -> None:
    """Add to a heap of `size` times, least first."""
    i = size
    while i > 0 and time_s < due_s[(i - 1) >> 1]:
        parent = (i - 1) >> 1
        due_s[i], worker[i] = due_s[parent], worker[parent]
        i = parent
    due_s[i], worker[i] = time_s, w


@kernel
def drop(due_s: np.ndarray, worker: np.ndarray, size: int) -> None:
    """Take the first from a heap that has `size` times without it."""
    time_s, w = due_s[size], worker[size]
    i = 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and due_s[child + 1] < due_s[child]:
            child += 1
        if due_s[child] >= time_s:
            break
        due_s[i], worker[i] = due_s[child], worker[child]
        i = child
    due_s[i], worker[i] = time_s, w


@kernel
def left_s(now: float, link: np.ndarray, hold_s: np.ndarray, taken: np.ndarray, k: int, m: int, boundary: int) -> float:
    """When a message that is handed over now has left: each link that it needs passes one message after the other, and
    the last of them has passed it. `taken` says until when each is busy; the rest as in `shared_ends_s`."""
    leaves = now
    for j in range(link.shape[3]):
        number = link[k, m, boundary, j]
        if number >= 0:
            taken[number] = max(now, taken[number]) + hold_s[k, m, boundary, j]
            leaves = max(leaves, taken[number])
    return leaves


@general
def worker_actions(
    routes: np.ndarray, order: np.ndarray, first: np.ndarray, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Actions of every worker in its order (`polygon.domain.schedule`), and where each worker's begin.

    An action is (kind * micro_batches + micro-batch) * stages + stage, kind 0 forward and 1 backward.
    """
    micro_batches, stages = routes.shape
    begins = np.zeros(workers + 1, dtype=np.int64)
    for m in range(micro_batches):
        for s in range(stages):
            begins[routes[m, s] + 1] += 2
    for w in range(workers):
        begins[w + 1] += begins[w]
    place = begins[:-1].copy()
    actions = np.empty(2 * micro_batches * stages, dtype=np.int64)
    for key in range(first.shape[0] - 1):
        # The forward of a micro-batch, then the backwards that are let in before the next one's.
        if key < micro_batches:
            for s in range(stages):
                w = routes[key, s]
                actions[place[w]] = key * stages + s
                place[w] += 1
        for i in range(first[key], first[key + 1]):
            w = routes[order[i, 0], order[i, 1]]
            actions[place[w]] = (micro_batches + order[i, 0]) * stages + order[i, 1]
            place[w] += 1
    return actions, begins


@general
def shared_ends_s(
    routes: np.ndarray,
    actions: np.ndarray,
    at: np.ndarray,
    holder: np.ndarray,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    link: np.ndarray,
    hold_s: np.ndarray,
    latency_s: np.ndarray,
    links: int,
    free: np.ndarray,
    start_s: np.ndarray,
) -> None:
    """Simulate a routed schedule; results go to `free` (end of every worker) and `start_s` (if it is not empty).

    Parameters
    ----------
    routes, forward_s, backward_s, start_s : ndarray
        As in `polygon.cost.simulation.routed_ends_s`.
    actions, at : ndarray of int64
        Of `worker_actions`, by holder; `at` is changed.
    holder : ndarray of int64, shape (workers,)
        Who computes for each worker: several stages of an interleaved pipeline are on the same devices.
    free : ndarray, shape (holders,)
        Out: when each has ended its last action [s].
    link : ndarray of int64, shape (2, micro_batches, stages - 1, k)
        What the message of a micro-batch down [0] or up [1] needs, as numbers from 0 to links - 1; -1: nothing.
    hold_s : ndarray, same shape
        How long each of these is busy with it.
    latency_s : ndarray, shape (2, micro_batches, stages - 1)
        What a message that has left takes to arrive.
    """
    micro_batches, stages = routes.shape
    workers, half = free.shape[0], micro_batches * stages
    last = at[1:].copy()
    ready = np.full(2 * half, -1.0)  # not known yet; inf where a link is missing
    # The first stage's inputs are there from the beginning.
    ready[:half:stages] = 0.0
    taken, due_s, due = np.zeros(links), np.empty(workers), np.empty(workers, dtype=np.int64)
    # Divisions take longer than all else: the worker of an action is looked up by its number without the kind.
    units = routes.ravel()
    size, free[:] = 0, 0.0
    record = start_s.shape[0] == 2
    for w in range(workers):
        if at[w] < last[w] and ready[actions[at[w]]] >= 0:
            push(due_s, due, size, forward_s[units[actions[at[w]]]], w)
            size += 1
    while size > 0:
        now, w = due_s[0], due[0]
        size -= 1
        drop(due_s, due, size)
        action = actions[at[w]]
        at[w] += 1
        free[w] = now
        k = 0 if action < half else 1
        row = action // stages
        m, s = row - k * micro_batches, action - row * stages
        to = s + 1 if k == 0 else s - 1
        other = w
        if 0 <= to < stages:
            boundary = min(s, to)
            after = action + to - s
            ready[after] = left_s(now, link, hold_s, taken, k, m, boundary) + latency_s[k, m, boundary]
            receiver = holder[units[after - k * half]]
            if at[receiver] < last[receiver] and actions[at[receiver]] == after:
                other = receiver
        elif k == 0:
            # Behind the last stage is the loss: its backward needs nothing else.
            ready[half + action] = now
        # Two at most can begin something now: who has ended, and who has waited for the message.
        for turn in range(2):
            if turn == 1 and other == w:
                break
            v = w if turn == 0 else other
            if at[v] < last[v] and ready[actions[at[v]]] >= 0:
                action = actions[at[v]]
                start = max(free[v], ready[action])
                unit = units[action if action < half else action - half]
                if record:
                    start_s[action // half, action // stages % micro_batches, action % stages] = start
                push(due_s, due, size, start + (forward_s[unit] if action < half else backward_s[unit]), v)
                size += 1
