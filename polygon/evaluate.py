"""Say what a plan costs and whether it can be run.

    python -m polygon.evaluate plan.json [--trace trace.json] [--json]

Exit code 0 for a plan that can be run, 3 for one that breaks a rule (each is listed).
"""

from __future__ import annotations

import sys

from polygon import cli


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.Parser(
        prog="polygon evaluate",
        description="Estimate, breakdown, lower bound and violations of a plan.",
        parents=[cli.profile_options(), cli.output_options()],
    )
    parser.add_argument("plan", help="plan.json")
    parser.add_argument(
        "--trace",
        type=cli.out_file,
        metavar="FILE",
        help="write the predicted timeline (Chrome trace, opens in Perfetto)",
    )
    parser.add_argument("--tokens", type=cli.number(above=0), metavar="N", help="also: what so many tokens take")
    args = parser.parse_args(argv)

    from dataclasses import asdict

    from polygon import files
    from polygon.cost.bill import step_bill, whole_run
    from polygon.cost.estimate import estimate
    from polygon.cost.step_times import step_times
    from polygon.parity import assumptions
    from polygon.planning.violations import violations
    from polygon.report import describe_plan, describe_run

    problem, plan, _ = files.read_plan(args.plan)
    tables = cli.read_tables(problem, args)
    broken = violations(problem, plan, tables)
    structural = [text for text in broken if "GiB over" not in text and not text.startswith("limit:")]
    if structural:
        cli.emit({"violations": broken}, "\n".join(f"violation: {text}" for text in broken), as_json=args.json)
        return cli.EXIT_INFEASIBLE
    result = estimate(problem, plan, tables)
    talk = cli.Talk(quiet=args.quiet)
    if args.trace:
        from polygon.export.predicted import predicted_trace

        files.write_json(args.trace, predicted_trace(problem, plan, tables))
        talk.say(f"predicted timeline in {args.trace} (open it in https://ui.perfetto.dev)")
    text = describe_plan(problem, plan, result)
    data = {**result.to_dict(), "loss": assumptions(problem, plan), "violations": broken}
    if args.tokens:
        run = whole_run(step_bill(problem, plan, step_times(plan, tables)), args.tokens)
        data["run"] = asdict(run)
        text += "\n" + describe_run(run)
    text += "".join(f"\nviolation: {line}" for line in broken) or "\nviolations    none"
    cli.emit(data, text, as_json=args.json)
    return cli.EXIT_INFEASIBLE if broken else cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
