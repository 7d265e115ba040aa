"""Hold a plan's predicted timeline against measured ones.

    python -m polygon.compare plan.json trace.json [trace.json ...] [-o both.json] [--json]

The traces are those that the runner writes (several of one run are taken together). Printed: step time, what every
stage spends its time on, and the largest differences. `-o` writes both timelines into one trace, stage beside stage.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from polygon.commands import cli
from polygon.domain.errors import InputError, require
from polygon.export.chrome_trace import ROWS, Interval

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


def intervals_of(trace: Mapping[str, Any], where: str) -> list[Interval]:
    """The intervals of a trace that the runner wrote; `InputError` where it is none."""
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    require(
        isinstance(events, list),
        f"{where}: traceEvents",
        None if events is None else type(events).__name__,
        "a list of events",
    )
    found = []
    for event in events or []:
        if event.get("ph") != "X":
            continue
        try:
            start_s = event["ts"] / 1e6
            worker, step = event["tid"] // len(ROWS), event["args"]["step"]
            found.append(
                Interval(event["pid"], worker, event["cat"], event["name"], start_s, start_s + event["dur"] / 1e6, step)
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"{where}: traceEvents: found an event without {error}, expected the runner's") from None
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


def compare(predicted: Sequence[Interval], measured: Sequence[Interval]) -> Comparison:
    """Hold one predicted step against the measured ones that are whole; the first is left out where there are more.

    Raises
    ------
    InputError
        No measured step has exactly the predicted forwards and backwards: another plan was run.
    """
    wanted = {(i.stage, i.worker, i.name) for i in predicted if i.kind == "compute"}
    by_step: dict[int, list[Interval]] = defaultdict(list)
    for interval in measured:
        by_step[interval.step].append(interval)
    whole = {
        step: rows
        for step, rows in sorted(by_step.items())
        if {(i.stage, i.worker, i.name) for i in rows if i.kind == "compute"} == wanted
    }
    if not whole:
        raise InputError("trace: found no step with the plan's forwards and backwards, expected a trace of this plan")
    starts = {step: min(i.start_s for i in rows if i.kind == "compute") for step, rows in whole.items()}
    ends = {step: max(i.end_s for i in rows) for step, rows in whole.items()}
    first = min(whole)
    used = [step for step in whole if step != first or len(whole) == 1]
    # A step ends where the next one starts, if that was traced: steps of different stages overlap a little.
    lengths = [starts.get(step + 1, ends[step]) - starts[step] for step in used]
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


def side_by_side(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Both traces in one: each stage's predicted rows, then its measured ones."""
    events = []
    for number, trace in enumerate((predicted, measured)):
        for event in trace["traceEvents"]:
            moved = dict(event) | {"pid": 2 * event["pid"] + number}
            if event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": moved["pid"]}
            if "id" in event:
                moved["id"] = f"{number}/{event['id']}"
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def describe(result: Comparison, limit: int) -> str:
    """The comparison for people."""
    lines = [
        f"step  predicted {result.predicted_step_s * 1e3:,.1f} ms, measured {result.measured_step_s * 1e3:,.1f} ms "
        f"(median of {result.steps}): {result.error:+.1%}",
        "",
        f"{'stage':>5} {'worker':>6}  {'what':10} {'predicted':>12} {'measured':>12} {'difference':>12}",
    ]
    for row in result.differences[:limit]:
        values = " ".join(f"{value * 1e3:>9,.1f} ms" for value in (row.predicted_s, row.measured_s, row.excess_s))
        lines.append(f"{row.stage:>5} {row.worker:>6}  {row.what:10} {values}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(
        prog="polygon compare",
        description="Hold a plan's predicted timeline against measured ones.",
        parents=[cli.profile_options(), cli.output_options(out="both timelines as one Chrome trace")],
    )
    parser.add_argument("plan", help="plan.json, as it was run (the launcher puts the rehearsed one beside its trace)")
    parser.add_argument("traces", nargs="+", metavar="trace", help="traces of one run")
    parser.add_argument("--top", type=int, default=12, help="differences listed (default %(default)s)")
    args = parser.parse_args(argv)

    from polygon.cost.step_times import step_times
    from polygon.export.predicted import predicted_intervals, predicted_trace
    from polygon.formats import files

    read = cli.read_plan(args.plan, args)
    problem, plan, tables = read.problem.data, read.data, read.problem.tables
    traces = [(path, files.read_json(path)) for path in args.traces]
    measured = [interval for path, trace in traces for interval in intervals_of(trace, path)]
    result = compare(predicted_intervals(step_times(plan, tables)), measured)
    if args.out:
        whole = {"traceEvents": [event for _, trace in traces for event in trace["traceEvents"]]}
        files.write_json(args.out, side_by_side(predicted_trace(problem, plan, tables), whole))
    cli.emit(result.to_dict(args.top), describe(result, args.top), as_json=args.json)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
