"""Measured timelines, of logs and of traces, and what they say beside the predicted one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from polygon.domain.errors import Phrase, fault, require
from polygon.domain.message import Message
from polygon.domain.plan import Plan
from polygon.domain.schedule import Action
from polygon.export.chrome_trace import ROWS, Interval
from polygon.formats.run_log import line_of, rank_log

Place = tuple[int, int]
"""Stage and worker."""


class Difference(NamedTuple):
    """One thing that took another time than predicted, per step."""

    stage: int
    worker: int
    what: str
    predicted_s: float
    measured_s: float

    @property
    def excess_s(self) -> float:
        """Measured less predicted [s]."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A predicted step against the median of measured ones."""

    steps: int
    predicted_step_s: float
    measured_step_s: float
    differences: tuple[Difference, ...]
    """Every worker's forward, backward, update, reduction and waiting; the largest difference first."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured step time."""
        return self.predicted_step_s / self.measured_step_s - 1

    def to_dict(self, limit: int) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "steps": self.steps,
            "predicted_step_s": self.predicted_step_s,
            "measured_step_s": self.measured_step_s,
            "error": self.error,
            "differences": [row._asdict() | {"excess_s": row.excess_s} for row in self.differences[:limit]],
        }


def intervals_of_logs(plan: Plan, logs: Mapping[int, Iterable[Mapping[str, Any]]]) -> Iterator[Interval]:
    """The timeline of the traced steps, from the lines that ranks wrote.

    Raises
    ------
    InputError
        For a line of another form; it says which.
    """
    for rank, (group, worker, place) in plan.rank_places.items():
        # The devices of a worker do the same at the same time: its first stands for it.
        lines = list(logs.get(rank, ())) if place == 0 else []
        # The last estimate of how far a host's clock is from that of rank 0 is the best.
        offset_s = next((line.get("clock_offset_s", 0.0) for line in reversed(lines) if line["type"] == "step"), 0.0)
        for number, line in enumerate(lines, start=1):
            if line["type"] != "event":
                continue
            try:
                stage, name = placed(plan, group, line["name"])
                interval = Interval(
                    stage=stage, worker=worker, kind=line["kind"], name=name, start_s=line["start_s"] - offset_s,
                    end_s=line["end_s"] - offset_s, step=line["step"],
                )  # fmt: skip
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                found = Message("found.event_without", what=str(error)[:60])
                raise fault(line_of(rank_log(Path(), rank).name, number), found, "the runner's lines") from None
            yield interval


def placed(plan: Plan, group: int, name: str) -> tuple[int, str]:
    """Stage and name there of what a worker that holds several stages did: `recv F3.1` is `recv F3` of its second."""
    *before, last = name.split(" ")
    action = Action.named(last)
    if action is None:
        return group, name
    return group + action.chunk * plan.groups, " ".join([*before, str(action._replace(chunk=0))])


def intervals_of(trace: Mapping[str, Any], where: str) -> list[Interval]:
    """The intervals of a trace that the runner wrote; `InputError` where it is none."""
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    place = f"{where}: traceEvents"
    require(isinstance(events, list), place, None if events is None else type(events).__name__, "a list of events")
    found = []
    for event in events or []:
        try:
            if event.get("ph") != "X":
                continue
            start_s, stage = float(event["ts"]) / 1e6, int(event["pid"])
            worker, step = int(event["tid"]) // len(ROWS), int(event["args"]["step"])
            took_s = float(event["dur"]) / 1e6
            if not (math.isfinite(start_s) and 0 <= took_s < math.inf):
                raise ValueError(f"ts {event['ts']}, dur {event['dur']}")
            end_s = start_s + took_s
            found.append(Interval(stage, worker, str(event["cat"]), str(event["name"]), start_s, end_s, step))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise fault(place, Message("found.event_without", what=str(error)[:60]), "the runner's events") from None
    return found


def _spent(intervals: Iterable[Interval], start_s: float, end_s: float) -> dict[tuple[Place, str], float]:
    """Seconds of a step by worker and what: forward, backward, update, reduction, waiting (the rest)."""
    spent: dict[tuple[Place, str], float] = defaultdict(float)
    busy: dict[Place, float] = defaultdict(float)
    for interval in intervals:
        place = (interval.stage, interval.worker)
        what = {"F": "forward", "B": "backward"}.get(interval.name[:1]) if interval.kind == "compute" else interval.kind
        if what in ("forward", "backward", "update", "reduce"):
            spent[place, what] += interval.end_s - interval.start_s
        if what in ("forward", "backward", "update"):
            busy[place] += interval.end_s - interval.start_s
    for place, seconds in busy.items():
        spent[place, "waiting"] = max(0.0, end_s - start_s - seconds)
    return spent


def whole_steps(
    predicted: Iterable[Interval], measured: Iterable[Interval]
) -> tuple[dict[int, list[Interval]], dict[int, float]]:
    """Intervals of the measured steps that have the predicted forwards and backwards, each once, and their lengths [s].

    A step ends where the next one starts, if that was traced: steps of different stages overlap a little.

    Raises
    ------
    InputError
        There is none: another plan was run, or a trace given twice.
    """
    wanted = Counter((i.stage, i.worker, i.name) for i in predicted if i.kind == "compute")
    by_step: dict[int, list[Interval]] = defaultdict(list)
    for interval in measured:
        by_step[interval.step].append(interval)
    whole = {
        step: rows
        for step, rows in sorted(by_step.items())
        if Counter((i.stage, i.worker, i.name) for i in rows if i.kind == "compute") == wanted
    }
    if not whole:
        found = Phrase("no step with the plan's forwards and backwards, each once")
        raise fault("trace", found, "a trace of this plan")
    starts = {step: min(i.start_s for i in rows if i.kind == "compute") for step, rows in whole.items()}
    ends = {step: max(i.end_s for i in rows) for step, rows in whole.items()}
    return whole, {step: starts.get(step + 1, ends[step]) - starts[step] for step in whole}


def compare(predicted: Sequence[Interval], measured: Sequence[Interval]) -> Comparison:
    """Hold one predicted step against the measured ones that are whole; the first is left out where there are more.

    Raises
    ------
    InputError
        No measured step has the predicted forwards and backwards, each once: another plan was run, or a trace given
        twice.
    """
    whole, lengths_s = whole_steps(predicted, measured)
    first = min(whole)
    used = [step for step in whole if step != first or len(whole) == 1]
    lengths = [lengths_s[step] for step in used]
    spent = [_spent(whole[step], 0.0, length) for step, length in zip(used, lengths, strict=True)]
    predicted_step_s = max(i.end_s for i in predicted) - min(i.start_s for i in predicted)
    expected = _spent(predicted, 0.0, predicted_step_s)
    rows = [
        Difference(*place, what, expected.get((place, what), 0.0), median(s.get((place, what), 0.0) for s in spent))
        for place, what in sorted({key for step in [expected, *spent] for key in step})
    ]
    rows.sort(key=lambda row: -abs(row.excess_s))
    return Comparison(
        steps=len(used),
        predicted_step_s=predicted_step_s,
        measured_step_s=median(lengths),
        differences=tuple(rows),
    )
