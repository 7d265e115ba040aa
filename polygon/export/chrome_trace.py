"""Timelines in Chrome's trace format: predicted and measured ones in the same shape, to be opened side by side.

A process is a stage, a thread a worker; names are F<m>, B<m> (compute), recv, send, reduce, update. Times are in
microseconds from the earliest interval. Opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """Something that a worker, or its link, did for a while."""

    stage: int
    worker: int
    kind: str
    """compute, wait, send, reduce, exposed or update; what is not compute gets a row of its own below the worker."""
    name: str
    start_s: float
    end_s: float
    step: int = 0


ROWS = ("compute", "wait", "send", "reduce")
"""Rows of a worker; update and exposed waiting happen where compute does."""


def chrome_trace(
    intervals: Iterable[Interval],
    worker_names: Mapping[tuple[int, int], str],
    stage_names: Mapping[int, str],
    title: str = "",
) -> dict[str, Any]:
    """A trace of what workers did, with arrows from every forward and backward to the one it lets start.

    Parameters
    ----------
    intervals : iterable of Interval
    worker_names : mapping of (stage, worker) to str
        For people, say the device and its region.
    stage_names : mapping of stage to str
    title : str
        Prefix of the stages' names, say `predicted` or `measured`.

    Returns
    -------
    dict
        To be written as JSON.
    """
    intervals = sorted(intervals, key=lambda interval: interval.start_s)
    origin_s = intervals[0].start_s if intervals else 0.0
    events: list[dict[str, Any]] = []
    for stage, name in sorted(stage_names.items()):
        label = f"{title} {name}".strip()
        events.append({"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": {"name": label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}})
    rows = sorted({(interval.stage, interval.worker, _row(interval.kind)) for interval in intervals})
    for stage, worker, row in rows:
        name = worker_names.get((stage, worker), f"worker {worker}") + ("" if row == 0 else f" · {ROWS[row]}")
        tid = worker * len(ROWS) + row
        events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": tid, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": stage, "tid": tid, "args": {"sort_index": tid}})
    for interval in intervals:
        events.append(
            {
                "ph": "X",
                "name": interval.name,
                "cat": interval.kind,
                "pid": interval.stage,
                "tid": interval.worker * len(ROWS) + _row(interval.kind),
                "ts": (interval.start_s - origin_s) * 1e6,
                "dur": (interval.end_s - interval.start_s) * 1e6,
                "args": {"step": interval.step},
            }
        )
    events += _arrows([interval for interval in intervals if interval.kind == "compute"], origin_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _row(kind: str) -> int:
    return ROWS.index(kind) if kind in ROWS else 0


def _arrows(compute: list[Interval], origin_s: float) -> list[dict[str, Any]]:
    """Flow events from F<m> of a stage to F<m> of the next, from B<m> to that of the stage before."""
    places = {(interval.step, interval.stage, interval.name): interval for interval in compute}
    arrows = []
    for (step, stage, name), source in places.items():
        target = places.get((step, stage + (1 if name.startswith("F") else -1), name))
        if target is None:
            continue
        common = {"name": name, "cat": "message", "id": f"{step}/{stage}/{name}"}
        start = {"ph": "s", "pid": stage, "tid": source.worker * len(ROWS), "ts": (source.end_s - origin_s) * 1e6}
        end = {"ph": "f", "bp": "e", "pid": target.stage, "tid": target.worker * len(ROWS)}
        arrows += [common | start, common | end | {"ts": (target.start_s - origin_s) * 1e6}]
    return arrows
