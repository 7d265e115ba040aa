"""What traces add up to: computing, communicating, copying and idling, what hides behind what, and the bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from polygon.domain.plan import Plan
from polygon.export.chrome_trace import Interval
from runners.traces.intervals import common, length, without
from runners.traces.kineto import RankTrace


@dataclass(frozen=True, kw_only=True)
class Temporal:
    """Where the time of one rank went. ``window = compute + exposed + copies + idle``."""

    rank: int
    window_s: float
    compute_s: float
    exposed_s: float
    """Communication while nothing is computed."""
    copies_s: float
    """Copies between host and device while nothing is computed or communicated."""
    idle_s: float
    communication_s: float
    hidden_s: float
    """Communication while something is computed."""

    @property
    def overlap(self) -> float:
        """Part of the communication that hides behind computing; 1 if there is none to hide."""
        return self.hidden_s / self.communication_s if self.communication_s else 1.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Communication of one kind, over all ranks."""

    kind: str
    calls: int
    seconds: float
    """Mean over the ranks."""
    exposed_s: float
    """Mean over the ranks."""
    n_bytes: float | None
    """Sum over the ranks; None where a trace does not tell."""


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Part of the pipeline's time, first forward to last backward of a step, in which a worker runs neither."""

    stage: int
    worker: int
    measured: float
    predicted: float | None = None


def temporal(trace: RankTrace) -> Temporal:
    """Time of a rank by what it did."""
    start, end = trace.window
    window = np.array([[start, end]])
    compute, communication = common(trace.compute, window), common(trace.communication, window)
    exposed = without(communication, compute)
    copies = without(without(common(trace.copies, window), compute), communication)
    parts = {"compute_s": length(compute), "exposed_s": length(exposed), "copies_s": length(copies)}
    return Temporal(
        rank=trace.rank,
        window_s=end - start,
        idle_s=max(0.0, end - start - sum(parts.values())),
        communication_s=length(communication),
        hidden_s=length(common(communication, compute)),
        **parts,
    )


def by_kind(traces: Sequence[RankTrace]) -> list[Kind]:
    """Communication by kind, the longest first."""
    rows = []
    for name in sorted({name for trace in traces for name in trace.traffic}):
        seconds = exposed = n_bytes = 0.0
        known, calls = True, 0
        for trace in traces:
            if (traffic := trace.traffic.get(name)) is None:
                continue
            spans = common(traffic.spans, np.array([trace.window]))
            seconds += length(spans)
            exposed += length(without(spans, trace.compute))
            known = known and traffic.n_bytes is not None
            n_bytes += traffic.n_bytes or 0.0
            calls += traffic.calls
        rows.append(
            Kind(
                kind=name,
                calls=calls,
                seconds=seconds / len(traces),
                exposed_s=exposed / len(traces),
                n_bytes=n_bytes if known else None,
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def bubbles(intervals: Iterable[Interval]) -> dict[tuple[int, int], float]:
    r"""Bubble of every worker, the median over the steps.

    .. math:: 1 - t_{FB} / (t_{end} - t_{start})

    with the time in forwards and backwards over that from the first forward's start to the last backward's end on any
    worker. Reduction and update come after the last backward and do not count.
    """
    by_step: dict[int, list[Interval]] = defaultdict(list)
    for interval in intervals:
        if interval.kind == "compute":
            by_step[interval.step].append(interval)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for rows in by_step.values():
        phase_s = max(row.end_s for row in rows) - min(row.start_s for row in rows)
        busy: dict[tuple[int, int], float] = defaultdict(float)
        for row in rows:
            busy[row.stage, row.worker] += row.end_s - row.start_s
        for place, seconds in busy.items():
            found[place].append(1 - seconds / phase_s if phase_s > 0 else 0.0)
    return {place: median(values) for place, values in sorted(found.items())}


def actions(traces: Iterable[RankTrace], plan: Plan) -> list[Interval]:
    """Forwards and backwards that the traces hold, on the workers that the plan puts the ranks on."""
    intervals = []
    for trace in traces:
        stage, worker, place = plan.rank_places[trace.rank]
        if place:
            continue
        for name, start_s, end_s in trace.actions:
            # Steps are counted from the first recorded one; what lies between two steps belongs to the earlier.
            step = int(np.searchsorted(trace.steps[:, 0], (start_s + end_s) / 2, side="right")) - 1
            intervals.append(Interval(stage, worker, "compute", name, start_s, end_s, step))
    return intervals


def compare_bubbles(traces: Sequence[RankTrace], plan: Plan, predicted: Iterable[Interval]) -> list[Bubble]:
    """Measured beside predicted bubbles; empty where the traces name no forwards and backwards.

    A worker that holds several stages has one bubble, under the first of them.
    """
    measured = bubbles(actions(traces, plan))
    expected = bubbles(interval._replace(stage=interval.stage % plan.groups) for interval in predicted)
    return [
        Bubble(stage=stage, worker=worker, measured=value, predicted=expected.get((stage, worker)))
        for (stage, worker), value in measured.items()
    ]


def plain(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows for JSON, with the share of communication that is hidden."""
    return [asdict(row) | ({"overlap": row.overlap} if isinstance(row, Temporal) else {}) for row in rows]
