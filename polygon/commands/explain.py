"""Why this plan and not another: other plans, rejected ideas and what they cost, what a better cluster would bring.

    python -m polygon.explain plan.json
    python -m polygon.explain plan.json --link frankfurt tokyo --more-gbps 10 --tokens 300e9

Everything is worked out with short searches from the plan; a longer search may find more. Where one of them finds a
better plan, that is said, and `--better FILE` keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from polygon.api.choices import OBJECTIVES
from polygon.commands import cli
from polygon.domain.clock import Clock


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(
        prog="polygon explain",
        description="Other plans, rejected ideas and what they cost, what more bandwidth or devices would bring.",
        parents=[
            cli.runtime_option(),
            cli.profile_options(),
            cli.search_options(),
            cli.output_options(out="where the answers go (JSON)"),
        ],
    )
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--count", type=cli.whole(0), default=4, metavar="N", help="different plans (default 4)")
    parser.add_argument(
        "--link",
        nargs=2,
        action="append",
        default=[],
        metavar=("REGION", "REGION"),
        help="ask about this link only (may be repeated; default: those that carry most)",
    )
    parser.add_argument(
        "--more-gbps", type=cli.number(above=0), default=1.0, metavar="X", help="how much more to ask for (default 1)"
    )
    parser.add_argument("--tokens", type=cli.number(above=0), metavar="N", help="also: the whole run of so many tokens")
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="what the plan was made for, in which it is held against others (default %(default)s)",
    )
    kept = "where the best plan goes if it beats the one given"
    parser.add_argument("--better", type=cli.out_file, metavar="FILE", help=kept)
    args = parser.parse_args(argv)
    clock = Clock(args.time_limit)

    from polygon.formats import files
    from polygon.formats.convert import runtime_data
    from polygon.messages.explanation import better, describe_explanation, explanation_data
    from polygon.messages.report import describe_assumptions

    given = cli.read_plan(args.plan, args)
    broken = given.violations()
    if broken:
        return cli.infeasible(f"{args.plan}: the plan cannot be run: {broken[0]}")
    problem, plan, tables = given.problem.data, given.data, given.problem.tables
    talk = cli.Talk(quiet=args.quiet)
    answers = _answers(args, problem, plan, tables, talk, clock)
    assumed = given.assumptions(anew=not answers.what.left_out, time_limit_s=clock.left_s())
    data = {"runtime": runtime_data(problem.runtime), **explanation_data(problem, plan, answers, args.tokens)}
    data["assumed"] = [asdict(assumption) for assumption in assumed]
    if args.out:
        files.write_json(args.out, data)
        talk.say(f"answers in {args.out}")
    found = better(problem, answers)
    if found is not None and args.better:
        replace(given, data=found.plan).save(args.better)
        talk.say(f"a better plan in {args.better}")
    text = describe_explanation(problem, plan, answers, args.tokens) + describe_assumptions(assumed)
    cli.emit(data, text, as_json=args.json)
    exit_code: int = answers.exit_code
    return exit_code


def _answers(args: Any, problem: Any, plan: Any, tables: Any, talk: cli.Talk, clock: Clock) -> Any:
    """Alternatives and sensitivities; with a time limit, ideas get half of it and changes the rest."""
    from types import SimpleNamespace

    from polygon.planning.alternatives import Explainer
    from polygon.planning.objectives import objective_named
    from polygon.planning.what_ifs import link_changes, sensitivities

    changes = link_changes(problem.cluster, args.link, args.more_gbps) if args.link else None
    objective = objective_named(args.objective)
    explainer = Explainer(problem, plan, tables, objective=objective, seed=args.seed)
    with talk.progress("explaining", 1.0) as show, cli.interruptible() as asked:

        def left(part: float) -> Callable[[], float]:
            return lambda: 0.0 if asked() else clock.left_s(part)

        why = explainer.explain(
            count=args.count, seconds_left=left(0.5), tell=lambda idea, part: show(part / 2, str(idea))
        )
        what = sensitivities(
            problem,
            plan,
            tables=tables,
            changes=changes,
            objective=objective,
            more_gbps=args.more_gbps,
            seed=args.seed,
            seconds_left=left(1.0),
            tell=lambda change, part: show(0.5 + part / 2, str(change)),
        )
    left_out = len(why.left_out) + what.left_out
    if left_out:
        talk.say(f"{'interrupted: ' if asked() else ''}no time for {left_out} questions")
    exit_code = asked.exit_code if asked() and left_out else cli.EXIT_OK
    return SimpleNamespace(bill=explainer.bill, measure=explainer.measure, why=why, what=what, exit_code=exit_code)


if __name__ == "__main__":
    sys.exit(cli.run(main))
