"""The predicted step for the page: every moment of a worker named, of as many workers as a page can draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polygon.cost.step_times import StepTimes
from polygon.export.chrome_trace import Interval
from polygon.export.predicted import predicted_intervals
from polygon.web.whatif import Priced

MOST_INTERVALS = 24_000
"""Bars that a page draws in about a second."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Forwards and backwards of a step, worker by worker in the order of time, with the wait before each.

    Waiting for an input is bubble from `idle_s`, the end of the action before, until the input has left the worker
    that makes it (`left_s`), and exposed communication from then until the action starts.
    """

    worker: NDArray[np.int64]
    name: NDArray[np.str_]
    idle_s: NDArray[np.float64]
    left_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    """End of the last of each worker, shape (workers,)."""


def work(times: StepTimes) -> Work:
    """Forwards and backwards of one step."""
    schedule, workers = times.schedule, len(times.place.stage)
    _, start_s = schedule.simulate(record=True)
    end_s = start_s + np.stack([schedule.forward_s, schedule.backward_s])[:, schedule.routes]
    made_s = start_s.copy()
    made_s[0, :, 1:] = end_s[0, :, :-1]
    made_s[1, :, :-1] = end_s[1, :, 1:]
    worker = np.broadcast_to(schedule.routes, start_s.shape).ravel()
    order = np.lexsort((start_s.ravel(), worker))
    worker, begin_s, ready_s = worker[order], start_s.ravel()[order], made_s.ravel()[order]
    done_s = end_s.ravel()[order]
    idle_s = np.concatenate(([0.0], done_s[:-1]))
    idle_s[np.flatnonzero(np.diff(worker, prepend=-1))] = 0.0
    last_s = np.zeros(workers)
    np.maximum.at(last_s, worker, done_s)
    kind, micro_batch, _ = np.unravel_index(order, start_s.shape)
    return Work(
        worker=worker, name=np.char.add(np.array(["F", "B"])[kind], micro_batch.astype(str)), idle_s=idle_s,
        left_s=np.clip(ready_s, idle_s, begin_s), start_s=begin_s, last_s=last_s,
    )  # fmt: skip


def timeline(priced: Priced, *, messages: bool = False) -> dict[str, Any]:
    """Intervals of one step, with the messages if asked for.

    A worker's compute, bubble, exposed communication and update fill the step without a gap: after the last backward
    it is exposed communication until the update, bubble thereafter. The hidden part of a reduction (`reduce`) and
    messages (`send`) lie beside them. Where there are more workers than can be drawn, the first of every stage come
    before the second of any (one of every stage in any case); the shares of bubble and exposed communication are
    those of all.
    """
    times, step_s = priced.times, priced.estimate.step_s
    place = times.place
    done = work(times)
    update_s = times.done_s - times.update_s
    bubble_s = np.bincount(done.worker, done.left_s - done.idle_s, len(place.stage)) + step_s - times.done_s
    exposed_s = np.bincount(done.worker, done.start_s - done.left_s, len(place.stage)) + update_s - done.last_s
    number = np.arange(len(place.stage)) - place.offset[place.stage]
    drawn = _drawn(place.stage, number, done)
    rows = [(w.stage, w.worker) for w in priced.estimate.workers]
    intervals = [i for i in predicted_intervals(times, drawn) if messages or i.kind != "send"]
    last_s = {row: float(done.last_s[w]) for w, row in enumerate(rows)}
    intervals = [i._replace(end_s=min(i.end_s, last_s[i[:2]])) if i.kind == "reduce" else i for i in intervals]
    for w in np.flatnonzero(drawn):
        stage, worker = rows[w]
        intervals.append(Interval(stage, worker, "exposed", "", float(done.last_s[w]), float(update_s[w])))
        intervals.append(Interval(stage, worker, "bubble", "", float(times.done_s[w]), step_s))
    for i in np.flatnonzero(drawn[done.worker]):
        (stage, worker), name, left_s = rows[done.worker[i]], str(done.name[i]), float(done.left_s[i])
        intervals.append(Interval(stage, worker, "bubble", name, float(done.idle_s[i]), left_s))
        intervals.append(Interval(stage, worker, "exposed", name, left_s, float(done.start_s[i])))
    workers = [
        {"stage": w.stage, "worker": w.worker, "region": w.region, "drawn": here, "busy_s": w.busy_s,
         "device": w.device + (f"\u00d7{w.tp}" if w.tp > 1 else "")}
        for w, here in zip(priced.estimate.workers, drawn.tolist(), strict=True)
    ]  # fmt: skip
    return {
        "workers": workers, "step_s": step_s, "left_out": int(np.sum(~drawn)),
        "intervals": [i[:6] for i in intervals if i.end_s > i.start_s],
        "bubble_share": float(bubble_s.mean()) / step_s, "exposed_share": float(exposed_s.mean()) / step_s,
    }  # fmt: skip


def _drawn(stage: NDArray[np.int64], number: NDArray[np.int64], done: Work) -> NDArray[np.bool_]:
    """Which workers are drawn: the first of every stage, then the second, while their bars are not too many."""
    waits = (done.left_s > done.idle_s).astype(np.int64) + (done.start_s > done.left_s)
    bars = np.bincount(done.worker, 1 + waits, len(stage))
    order = np.lexsort((stage, number))
    drawn = number == 0
    drawn[order] |= np.cumsum(bars[order]) <= MOST_INTERVALS
    return drawn
