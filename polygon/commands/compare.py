"""Hold a plan's predicted timeline against measured ones.

    python -m polygon.compare plan.json trace.json [trace.json ...] [-o both.json] [--json]

The traces are those that the runner writes (several of one run are taken together). Printed: step time, what every
stage spends its time on, and the largest differences. `-o` writes both timelines into one trace, stage beside stage.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from polygon.commands import cli
from polygon.export.measured import Comparison, compare, intervals_of


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
    parser.add_argument("--top", type=cli.whole(0), default=12, help="differences listed (default %(default)s)")
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
