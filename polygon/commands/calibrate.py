"""python -m polygon.calibrate: refit the factors of the cost model to the logs of real runs.

    polygon calibrate LOG_DIR... [--plan plan.json] [-o calibration.json]

What is fitted, and how it is judged: `polygon.accuracy.run_logs`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from polygon.commands import cli

if __name__ == "polygon.calibrate":  # `polygon.calibrate` is a function of the API; a module would take its place
    raise ImportError("polygon.calibrate is a function; the command's module is polygon.commands.calibrate")


def text_of(found: dict[str, Any]) -> str:
    """The report for people."""
    factors = found["calibration"]
    lines = [f"compute        {device}: x {factor:.3g}" for device, factor in factors["compute"].items()]
    lines += [f"optimizer      {device}: x {factor:.3g}" for device, factor in factors["update"].items()]
    lines.append(f"communication  x {factors['communication']:.3g}")
    for run in found["runs"]:
        lines.append(
            f"{run['run']}: step {run['measured_step_s']:.4g} s measured, predicted {run['predicted_before_s']:.4g} s "
            f"before and {run['predicted_after_s']:.4g} s after; error on {run['steps_left_out']} steps left out "
            f"{run['error_before_pct']:.1f} % -> {run['error_after_pct']:.1f} %"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = cli.CommandParser(
        prog="polygon calibrate",
        description="Refit a handful of factors of the cost model to the logs of runs.",
        parents=[cli.output_options(out="the factors, for --calibration of search and evaluate")],
    )
    parser.add_argument("logs", nargs="+", metavar="RUN_LOG", help="log directory of dist_runner or launch")
    parser.add_argument("--plan", metavar="FILE", help="the plan that ran (default: plan.json in the log directory)")
    args = parser.parse_args(argv)

    from polygon.accuracy.run_logs import fit, read_run, report
    from polygon.formats import files

    runs = [read_run(Path(log), Path(args.plan) if args.plan else None) for log in args.logs]
    fitted = fit(runs)
    found = report(runs, fitted)
    if args.out and args.out != "-":
        files.write_json(args.out, fitted.to_dict())
        cli.Talk(quiet=args.quiet).say(f"factors in {args.out}")
    cli.emit(found, text_of(found), as_json=args.json)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
