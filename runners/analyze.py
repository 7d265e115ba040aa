"""Break down PyTorch Profiler traces of a run: computing, communication, what hides behind what, idle, bubble.

    python -m runners.analyze out/run/profile -o report             # text, report/report.html, PNG, analysis.json
    python -m runners.analyze out/run/profile --plan out/run/plan.json --json
    python -m runners.analyze --scaling out/run-2-ranks out/run-8-ranks

One trace a rank, as `--profiled-steps` of the runners or any other program records them (*.json, *.json.gz). Traces
with GPU kernels are broken down by HolisticTraceAnalysis where it is installed, traces of CPUs by our own spans.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polygon.commands import cli
from polygon.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runners.traces.breakdown import Bubble
    from runners.traces.kineto import RankTrace


def _bubbles(traces: Sequence[RankTrace], plan_path: Path) -> tuple[list[Bubble], list[str]]:
    """Measured beside predicted bubbles of a plan's workers, and what is to be said about them."""
    from polygon.cost.step_times import step_times
    from polygon.cost.tables import CostTables
    from polygon.export.predicted import predicted_intervals
    from polygon.formats import files
    from runners.traces.breakdown import compare_bubbles

    problem, plan, _ = files.read_plan(plan_path)
    ranks = [trace.rank for trace in traces]
    if max(ranks) >= plan.world_size:
        raise InputError(f"{plan_path}: found {plan.world_size} ranks, expected more than {max(ranks)}, a trace's rank")
    found = compare_bubbles(traces, plan, predicted_intervals(step_times(plan, CostTables(problem))))
    notes = []
    if not found:
        notes.append(
            "the traces name no forwards and backwards (F0, B0, ... as the runners write them): no bubble measured"
        )
    elif len(ranks) < plan.world_size:
        notes.append(f"{len(ranks)} traces of a plan of {plan.world_size} ranks: bubbles may be too small")
    return found, notes


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(prog="analyze", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="folder for the report; made if missing")
    parser.add_argument("--plan", type=Path, help="plan.json that was run: predicted beside measured bubble")
    parser.add_argument(
        "--scaling", nargs=2, type=Path, metavar="RUN", help="log directories of two runs: scaling efficiency"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable result on standard output")
    args = parser.parse_args(argv)
    if bool(args.traces) == bool(args.scaling):
        raise InputError("traces: found none or also --scaling, expected traces or --scaling")
    if args.scaling:
        from runners.traces.scaling import describe as describe_scaling
        from runners.traces.scaling import scaling

        result = scaling(*args.scaling)
        cli.emit(result.to_dict(), describe_scaling(result), as_json=args.json)
        return cli.EXIT_OK
    from runners.traces.analysis import analyse, describe, write_report
    from runners.traces.kineto import read_traces

    traces = read_traces(args.traces)
    bubbles, notes = _bubbles(traces, args.plan) if args.plan else ([], [])
    analysis = analyse(traces, bubbles, notes)
    if args.out is not None:
        page = write_report(analysis, args.out, f"Traces of {', '.join(map(str, args.traces))}")
        print(f"report: {page}", file=sys.stderr)  # noqa: T201
    cli.emit(analysis.to_dict(), describe(analysis), as_json=args.json)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
