"""An order of all actions by list scheduling: who is free begins what can be, first what another schedule begins first.

Spans (`polygon.domain.schedule`) order the micro-batches of a worker by their numbers, whatever arrives first. Where
workers of a stage differ, or the links to them do, micro-batches overtake one another, and a worker that takes what is
there waits less (list scheduling: Graham, SIAM J. Appl. Math. 17, 1969; memory is a limit beside his).

Lists are gone through in both directions of time in turn, each with the times that the last has found (forward-backward
improvement: Li and Willis, Eur. J. Oper. Res. 56, 1992). Backwards in time the first stage's last backward begins, and
a backward is to its forward what forwards in time a forward is to its backward.
"""

from __future__ import annotations

import numpy as np

from polygon.cost.shared_schedule import drop, left_s, push
from polygon.cost.simulation import ScheduleTimes
from polygon.jit.compilation import general


@general
def listed_starts_s(
    routes: np.ndarray,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    room: np.ndarray,
    link: np.ndarray,
    hold_s: np.ndarray,
    latency_s: np.ndarray,
    links: int,
    keys: np.ndarray,
) -> np.ndarray:
    """Start [s] of every forward [0] and backward [1], shape (2, micro_batches, stages).

    Parameters
    ----------
    routes, forward_s, backward_s, link, hold_s, latency_s, links
        As in `polygon.cost.shared_schedule.shared_ends_s`, every worker on devices of its own.
    room : ndarray of int64, shape (workers,)
        Micro-batches whose forward has begun and whose backward has not ended, at most; 1 at least.
    keys : ndarray, shape (2, micro_batches, stages)
        Of what a worker can begin, it takes what has the least.
    """
    micro_batches, stages = routes.shape
    workers, half = forward_s.shape[0], micro_batches * stages
    units = routes.ravel()
    starts = np.zeros((2, micro_batches, stages))
    flat = starts.ravel()
    # Of every worker the micro-batches that wait for their forward [0] and backward [1], least numbers first.
    begins = np.zeros(workers + 1, dtype=np.int64)
    for unit in units:
        begins[unit + 1] += 1
    for w in range(workers):
        begins[w + 1] += begins[w]
    waiting_key, waiting = np.empty((2, half)), np.empty((2, half), dtype=np.int64)
    count = np.zeros((2, workers), dtype=np.int64)
    held, busy, taken = np.zeros(workers, dtype=np.int64), np.zeros(workers, dtype=np.bool_), np.zeros(links)
    # What happens: an action begins to wait (its number), or ends (its number and 2 half).
    due_s, due, size = np.empty(4 * half + 1), np.empty(4 * half + 1, dtype=np.int64), 0
    for m in range(micro_batches):
        w = units[m * stages]
        if busy[w]:
            push(waiting_key[0, begins[w] :], waiting[0, begins[w] :], count[0, w], keys[0, m, 0], m)
            count[0, w] += 1
        else:
            push(due_s, due, size, 0.0, m * stages)
            size += 1
            busy[w] = True
    busy[:] = False
    while size > 0:
        now, what = due_s[0], due[0]
        size -= 1
        drop(due_s, due, size)
        ends = what >= 2 * half
        action = what - 2 * half if ends else what
        k = 0 if action < half else 1
        unit = action - k * half
        m, s, w = unit // stages, unit % stages, units[unit]
        if ends:
            busy[w] = False
            held[w] -= k
            to = s + 1 if k == 0 else s - 1
            if 0 <= to < stages:
                boundary = min(s, to)
                there_s = left_s(now, link, hold_s, taken, k, m, boundary) + latency_s[k, m, boundary]
                push(due_s, due, size, there_s, action + to - s)
                size += 1
            elif k == 0:  # behind the last stage is the loss
                push(waiting_key[1, begins[w] :], waiting[1, begins[w] :], count[1, w], keys[1, m, s], m)
                count[1, w] += 1
        else:
            push(waiting_key[k, begins[w] :], waiting[k, begins[w] :], count[k, w], keys[k, m, s], m)
            count[k, w] += 1
        if busy[w]:
            continue
        a, forward, backward = begins[w], count[0, w] > 0 and held[w] < room[w], count[1, w] > 0
        if forward or backward:
            kind = 1 if backward and not (forward and waiting_key[0, a] < waiting_key[1, a]) else 0
            first = waiting[kind, a]
            count[kind, w] -= 1
            drop(waiting_key[kind, a:], waiting[kind, a:], count[kind, w])
            number = kind * half + first * stages + s
            flat[number] = now
            busy[w] = True
            held[w] += 1 - kind
            push(due_s, due, size, now + (backward_s[w] if kind else forward_s[w]), 2 * half + number)
            size += 1
    return starts


def listed_starts(times: ScheduleTimes, room: np.ndarray, starts_s: np.ndarray, *, from_end: bool) -> np.ndarray:
    """Start [s] of every action, before or after 0, when actions are listed by when they start in another schedule.

    Parameters
    ----------
    room
        As in `listed_starts_s`.
    starts_s : ndarray, shape (2, micro_batches, stages)
        Of the other schedule.
    from_end : bool
        Whether the schedule is made backwards in time.
    """
    link, hold_s, latency_s = times.link, times.hold_s, times.latency_s
    if not from_end:
        workers = times.routes, times.forward_s, times.backward_s, room
        return listed_starts_s(*workers, link, hold_s, latency_s, times.links, starts_s)
    took_s = np.stack([times.forward_s, times.backward_s])[:, times.routes]
    workers = np.ascontiguousarray(times.routes[::-1]), times.backward_s, times.forward_s, room
    messages = _turned(link), _turned(hold_s), _turned(latency_s)
    found: np.ndarray = -_turned(listed_starts_s(*workers, *messages, times.links, -_turned(starts_s + took_s)))
    found -= took_s
    return found


def _turned(values: np.ndarray) -> np.ndarray:
    """Forwards for backwards, and the last micro-batch first."""
    return np.ascontiguousarray(values[::-1, ::-1])


def ranks_by(keys: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """The place of every action among those of its worker, by keys of shape (2, micro_batches, stages)."""
    who = np.broadcast_to(routes, keys.shape).ravel()
    order = np.lexsort((keys.ravel(), who))
    begins = np.cumsum(np.bincount(who)) - np.bincount(who)
    ranks = np.empty(len(who), dtype=np.int64)
    ranks[order] = np.arange(len(who)) - begins[who[order]]
    return ranks.reshape(keys.shape)
