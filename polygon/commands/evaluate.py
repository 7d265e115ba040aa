"""Say what a plan costs and whether it can be run.

    python -m polygon.evaluate plan.json [--trace trace.json] [--json]

Exit code 0 for a plan that can be run, 3 for one that breaks a rule (each is listed).
"""

from __future__ import annotations

import sys

from polygon.commands import cli


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(
        prog="polygon evaluate",
        description="Estimate, breakdown, lower bound and violations of a plan.",
        parents=[cli.runtime_option(), cli.profile_options(), cli.output_options()],
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

    from polygon.messages.report import describe_run
    from polygon.planning.checker import PRICEABLE

    plan = cli.read_plan(args.plan, args)
    broken = plan.violations()
    if any(violation.kind not in PRICEABLE for violation in broken):
        cli.emit(
            {"violations": broken}, "\n".join(f"violation: {violation}" for violation in broken), as_json=args.json
        )
        return cli.EXIT_INFEASIBLE
    talk = cli.Talk(quiet=args.quiet)
    if args.trace:
        from polygon.export.predicted import predicted_trace
        from polygon.formats import files

        files.write_json(args.trace, predicted_trace(plan.problem.data, plan.data, plan.problem.tables))
        talk.say(f"predicted timeline in {args.trace} (open it in https://ui.perfetto.dev)")
    text = plan.describe()
    data = {**plan.to_dict(), "violations": broken}
    if args.tokens:
        run = plan.whole_run(args.tokens)
        data["run"] = asdict(run)
        text += "\n" + describe_run(run)
    text += "".join(f"\nviolation: {violation}" for violation in broken) or "\nviolations    none"
    cli.emit(data, text, as_json=args.json)
    return cli.EXIT_INFEASIBLE if broken else cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
