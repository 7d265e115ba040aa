"""The predicted step for the page: every moment of a worker named, in as much detail as a window of time can show.

A row is a worker; of a stage that is not opened only the worker that ends last is shown. Where a row has few bars in
the window they are given one by one. Where it has more than a screen can draw, neighbouring moments are summed into
bands: what part of the band goes to each kind. So an answer grows with the screen, not with the micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polygon.cost.simulation import ScheduleTimes
from polygon.cost.step_times import StepTimes
from polygon.domain.plan import Plan, Problem
from polygon.export.chrome_trace import Interval
from polygon.web.sliders import PricedChange

KINDS = ("F", "B", "exposed", "update", "other", "reduce", "send")
"""Of bars; what none of the first five covers is bubble. `other`: the turn of another stage on the same devices. The
last two lie beside a worker's own work."""
KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
TILES = 5
MOST_ROWS = 96
MOST_BARS = 8000
"""Of all rows together."""
MOST_BARS_A_ROW = 160
"""More are a pattern of stripes, in which nothing can be seen."""
BANDS = 240
"""Of a row at most, before equal neighbours become one."""
BARS_A_BAND = 6
ALIKE = 0.08
"""Part by which the kinds of a band may differ from its neighbour's to be one with it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Forwards and backwards of a step, worker by worker in the order of time, with the wait before each.

    Waiting for an input is bubble from `idle_s`, the end of the action before on the same devices, until the input has
    left the worker that makes it (`left_s`), and exposed communication from then until the action starts.
    """

    worker: NDArray[np.int64]
    backward: NDArray[np.bool_]
    micro_batch: NDArray[np.int64]
    idle_s: NDArray[np.float64]
    left_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    """End of the last on the devices of each worker, shape (workers,)."""


def work(times: StepTimes) -> Work:
    """Forwards and backwards of one step."""
    schedule = times.schedule
    _, start_s = schedule.simulate(record=True)
    end_s = start_s + np.stack([schedule.forward_s, schedule.backward_s])[:, schedule.routes]
    made_s = start_s.copy()
    made_s[0, :, 1:] = end_s[0, :, :-1]
    made_s[1, :, :-1] = end_s[1, :, 1:]
    worker = np.broadcast_to(schedule.routes, start_s.shape).ravel()
    order = np.lexsort((start_s.ravel(), schedule.holder[worker]))
    worker, begin_s, ready_s = worker[order], start_s.ravel()[order], made_s.ravel()[order]
    done_s = end_s.ravel()[order]
    idle_s = np.concatenate(([0.0], done_s[:-1]))
    holder = schedule.holder[worker]
    idle_s[np.flatnonzero(np.diff(holder, prepend=-1))] = 0.0
    last_s = np.zeros(len(schedule.holder))
    np.maximum.at(last_s, holder, done_s)
    kind, micro_batch, _ = np.unravel_index(order, start_s.shape)
    return Work(
        worker=worker, backward=kind == 1, micro_batch=micro_batch, idle_s=idle_s,
        left_s=np.clip(ready_s, idle_s, begin_s), start_s=begin_s, end_s=done_s, last_s=last_s[schedule.holder],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bars:
    """What workers do, one row of all arrays each."""

    worker: NDArray[np.int64]
    kind: NDArray[np.int64]
    """Number in `KINDS`."""
    micro_batch: NDArray[np.int64]
    """-1 for what belongs to none."""
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def of(self, worker: int, begin_s: float, end_s: float) -> Bars:
        """Those of a worker that a window shows, in the order of time."""
        mine = np.flatnonzero((self.worker == worker) & (self.end_s > begin_s) & (self.start_s < end_s))
        mine = mine[np.argsort(self.start_s[mine], kind="stable")]
        return Bars(
            worker=self.worker[mine], kind=self.kind[mine], micro_batch=self.micro_batch[mine],
            start_s=self.start_s[mine], end_s=self.end_s[mine],
        )  # fmt: skip


def bars(times: StepTimes, done: Work, *, messages: bool = False) -> Bars:
    """All bars of a step: work, exposed communication before it and after the last, update; reduction and messages."""
    workers = np.arange(len(times.place.stage))
    update_s = times.done_s - times.update_s
    begins_s = np.array([times.reduction_span_s(s)[0] for s in range(len(times.reductions))])
    # Of one worker, and of what is summed within the computing, there is none to be shown.
    reducing = np.where(times.whole_reductions_s > 0, begins_s, np.inf)[times.place.stage]
    none = np.full(len(workers), -1)
    parts: list[tuple[NDArray[Any], ...]] = [
        (done.worker, done.backward.astype(np.int64), done.micro_batch, done.start_s, done.end_s),
        (done.worker, np.full(len(done.worker), 2), done.micro_batch, done.left_s, done.start_s),
        (workers, np.full(len(workers), 2), none, done.last_s, update_s),
        (workers, np.full(len(workers), 3), none, update_s, times.done_s),
        (workers, np.full(len(workers), KIND_OF["reduce"]), none, reducing, np.minimum(update_s, done.last_s)),
        _turns_of_others(done.worker, done.idle_s, done.end_s, times.schedule),
    ]
    if messages:
        parts.append(_messages(times))
    worker, kind, micro_batch, start_s, end_s = (np.concatenate(column) for column in zip(*parts, strict=True))
    there = end_s > start_s
    return Bars(
        worker=worker[there], kind=kind[there], micro_batch=micro_batch[there], start_s=start_s[there],
        end_s=end_s[there],
    )  # fmt: skip


def _turns_of_others(
    worker: NDArray[np.int64], start_s: NDArray[np.float64], end_s: NDArray[np.float64], schedule: ScheduleTimes
) -> tuple[NDArray[Any], ...]:
    """When the devices of a worker are another stage's: for each turn of one, a bar of all others on its devices."""
    holders = len(schedule.holder) // schedule.chunks
    moved = [(worker + k * holders) % len(schedule.holder) for k in range(1, schedule.chunks)]
    there = np.concatenate([*moved, np.empty(0, dtype=np.int64)])
    kind, none = np.full(len(there), KIND_OF["other"]), np.full(len(there), -1)
    return there, kind, none, np.tile(start_s, len(moved)), np.tile(end_s, len(moved))


def _messages(times: StepTimes) -> tuple[NDArray[Any], ...]:
    """Messages between stages, at their senders."""
    schedule, messages = times.schedule, times.messages
    _, start_s = schedule.simulate(record=True)
    end_s = start_s + np.stack([schedule.forward_s, schedule.backward_s])[:, schedule.routes]
    leave_s = np.stack([end_s[0, :, :-1], end_s[1, :, 1:]]) if end_s.shape[2] > 1 else np.empty((2, end_s.shape[1], 0))
    micro_batch = np.broadcast_to(np.arange(end_s.shape[1])[None, :, None], leave_s.shape)
    arrive_s = leave_s + messages.busy_s + messages.latency_s
    sender = messages.sender.reshape(leave_s.shape)
    kind = np.full(leave_s.size, KINDS.index("send"))
    return sender.ravel(), kind, micro_batch.ravel(), leave_s.ravel(), arrive_s.ravel()


def timeline(
    priced: PricedChange,
    *,
    opened: frozenset[int] = frozenset(),
    from_s: float = 0.0,
    to_s: float | None = None,
    messages: bool = False,
) -> dict[str, Any]:
    """Rows of one step, or of a window of it.

    Parameters
    ----------
    opened : frozenset of int
        Stages of which every worker has a row, as far as `MOST_ROWS` allows.
    from_s, to_s : float
        The window [s]; by default the whole step.
    messages : bool
        Whether messages between stages are wanted, too.

    Returns
    -------
    dict
        A row has `bars` [kind, micro-batch, start, end] or `bands` [start, end, parts of the first `TILES` kinds]. The
        shares of bubble and exposed communication are those of all devices over the whole step.
    """
    times, step_s = priced.times, priced.estimate.step_s
    place, done = times.place, work(times)
    end_s = step_s if to_s is None else min(to_s, step_s)
    begin_s = min(max(0.0, from_s), end_s)
    holder, chunks = times.schedule.holder, times.schedule.chunks
    # Of devices, not of stages: where some hold several they are done with the last of them.
    done_s = times.done_s.reshape(chunks, -1).max(axis=0)
    bubble_s = np.bincount(holder[done.worker], done.left_s - done.idle_s, len(done_s)) + step_s - done_s
    waited_s = np.bincount(holder[done.worker], done.start_s - done.left_s, len(done_s))
    exposed_s = waited_s + done_s - (times.update_s + done.last_s)[: len(done_s)]
    everything = bars(times, done, messages=messages)
    shown = _shown(times, opened)
    most = min(MOST_BARS_A_ROW, MOST_BARS // max(1, len(shown)))
    number = np.arange(len(place.stage)) - place.offset[place.stage]
    rows = []
    for w in shown:
        estimate = priced.estimate.workers[w]
        rows.append(
            {"stage": int(place.stage[w]), "worker": int(number[w]), "region": estimate.region,
             "device": estimate.device, "tp": estimate.tp, "width": int(np.sum(place.stage == place.stage[w])),
             "busy_s": estimate.busy_s, **_row(everything.of(w, begin_s, end_s), begin_s, end_s, most)}
        )  # fmt: skip
    return {
        "kinds": list(KINDS), "rows": rows, "step_s": step_s, "from_s": begin_s, "to_s": end_s,
        "workers": len(place.stage), "bubble_share": float(bubble_s.mean()) / step_s,
        "exposed_share": float(exposed_s.mean()) / step_s,
    }  # fmt: skip


def measured_timeline(
    problem: Problem,
    plan: Plan,
    times: StepTimes,
    intervals: Sequence[Interval],
    step_s: float,
    *,
    opened: frozenset[int] = frozenset(),
    from_s: float = 0.0,
    to_s: float | None = None,
) -> dict[str, Any]:
    """Rows of a measured step: those that `timeline` shows of the predicted one.

    Parameters
    ----------
    times : StepTimes
        The predicted step, by which the worker of a stage is chosen that stands for it.
    intervals : sequence of Interval
        Of one step, from its start [s].
    step_s : float
        Its length [s].

    Returns
    -------
    dict
        As `timeline`; waiting of any kind is bubble, and the shares are None.
    """
    end_s = step_s if to_s is None else min(to_s, step_s)
    begin_s = min(max(0.0, from_s), end_s)
    place, shown = times.place, _shown(times, opened)
    widths = [stage.width for stage in plan.stages]
    columns = [
        (place.offset[i.stage] + i.worker, KIND_OF[name], _micro_batch(i.name), i.start_s, i.end_s)
        for i in intervals
        if (name := i.name[:1] if i.kind == "compute" else i.kind) in KIND_OF
        and 0 <= i.stage < len(widths)
        and 0 <= i.worker < widths[i.stage]
    ]
    worker, kind, micro_batch, start_s, till_s = (np.array(column) for column in zip(*columns, strict=True))
    active = kind < 2
    busy_s = np.bincount(worker[active], (till_s - start_s)[active], len(place.stage))
    others = _turns_of_others(worker[active], start_s[active], till_s[active], times.schedule)
    parts = zip((worker, kind, micro_batch, start_s, till_s), others, strict=True)
    worker, kind, micro_batch, start_s, till_s = (np.concatenate(pair) for pair in parts)
    everything = Bars(worker=worker, kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=till_s)
    most = min(MOST_BARS_A_ROW, MOST_BARS // max(1, len(shown)))
    rows = []
    for w in shown:
        stage = int(place.stage[w])
        own = plan.stages[stage].workers[w - int(place.offset[stage])]
        pool = problem.cluster.pools[own.pool]
        rows.append(
            {"stage": stage, "worker": w - int(place.offset[stage]), "tp": own.tp, "device": pool.device.name,
             "region": problem.cluster.regions[pool.region].name, "width": plan.stages[stage].width,
             "busy_s": float(busy_s[w]), **_row(everything.of(w, begin_s, end_s), begin_s, end_s, most)}
        )  # fmt: skip
    return {
        "kinds": list(KINDS), "rows": rows, "step_s": step_s, "from_s": begin_s, "to_s": end_s,
        "workers": len(place.stage), "bubble_share": None, "exposed_share": None,
    }  # fmt: skip


def _micro_batch(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else -1


def _shown(times: StepTimes, opened: frozenset[int]) -> list[int]:
    """The workers that have a row: of every stage the one that ends last, of opened ones all."""
    stage, shown = times.place.stage, []
    for s in range(int(stage.max()) + 1):
        mine = np.flatnonzero(stage == s)
        last = int(mine[times.done_s[mine].argmax()])
        shown += mine.tolist()[:MOST_ROWS] if s in opened else [last]
    return shown[: max(MOST_ROWS, int(stage.max()) + 1)]


def _row(mine: Bars, begin_s: float, end_s: float, most: int) -> dict[str, Any]:
    """Bars of a row, or bands where there are too many."""
    if len(mine.kind) <= most:
        columns = (mine.kind, mine.micro_batch, mine.start_s, mine.end_s)
        given = zip(*(column.tolist() for column in columns), strict=True)
        return {"bars": [[kind, m, _short(a), _short(b)] for kind, m, a, b in given], "bands": []}
    count = max(1, min(BANDS, len(mine.kind) // BARS_A_BAND))
    edges = np.linspace(begin_s, end_s, count + 1)
    width = (end_s - begin_s) / count
    parts = np.stack([_covered(mine, kind, edges) for kind in range(TILES)], axis=1) / width
    bands: list[list[Any]] = []
    first = 0
    for i in range(1, count + 1):
        mean = parts[first:i].mean(axis=0)
        if i == count or np.abs(parts[i] - mean).max() > ALIKE:
            bands.append([_short(edges[first]), _short(edges[i]), [round(float(part), 3) for part in mean]])
            first = i
    beside = np.flatnonzero(mine.kind == KINDS.index("reduce"))
    hidden = [[KIND_OF["reduce"], -1, _short(mine.start_s[i]), _short(mine.end_s[i])] for i in beside]
    return {"bars": hidden, "bands": bands}


def _covered(mine: Bars, kind: int, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of a kind between neighbouring edges: differences of the running sum of its bars."""
    own = np.flatnonzero(mine.kind == kind)
    if len(own) == 0:
        return np.zeros(len(edges) - 1)
    points = np.stack([mine.start_s[own], mine.end_s[own]], axis=1).ravel()
    sums = np.cumsum(np.stack([np.zeros(len(own)), mine.end_s[own] - mine.start_s[own]], axis=1).ravel())
    return np.diff(np.interp(edges, points, sums))


def _short(seconds: float) -> float:
    """Seven digits are more than a screen shows."""
    return float(f"{seconds:.7g}")
