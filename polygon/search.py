"""Find the plan: which worker computes which layers of which micro-batch.

    python -m polygon.search groups.json -o plan.json
    python -m polygon.search --cluster FILE --model M --global-batch B --seq-len L -o plan.json

A genetic algorithm with local search over who serves which stage; layers, shares, routes, memory options, schedule and
packing of links follow by decoding. The same seed gives the same plan, unless --time-limit cuts the search short.
"""

from __future__ import annotations

import sys
from typing import Any

from polygon import cli
from polygon.domain.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.Parser(
        prog="polygon search",
        description="Find the plan with the least step time.",
        parents=[
            cli.problem_options(required=False),
            cli.profile_options(),
            cli.search_options(),
            cli.output_options(out="where the plan goes (JSON)"),
        ],
    )
    parser.add_argument("groups", nargs="?", help="groups from polygon init")
    parser.add_argument("--cluster", help="plan for a cluster (or a problem file) directly, without groups")
    args = parser.parse_args(argv)
    problem, groups = _read(args)

    from dataclasses import replace

    import numpy as np

    from polygon import files
    from polygon.cost.estimate import estimate
    from polygon.cost.tables import CostTables
    from polygon.planning.engine import Effort, find_plan
    from polygon.planning.violations import violations
    from polygon.report import describe_plan, seconds

    talk = cli.Talk(quiet=args.quiet)
    tables = CostTables(problem, cli.read_profiles(args), cli.read_calibration(args))
    effort = Effort(time_limit_s=args.time_limit or float("inf"))
    with talk.progress("searching", 1.0) as show:
        found = find_plan(
            problem,
            np.random.default_rng(args.seed),
            groups=groups,
            effort=effort,
            tell=lambda phase, part, best: show(part, f"{phase}: {seconds(best)}"),
            tables=tables,
        )
    if found.interrupted:
        talk.say("interrupted: this is the best so far")
    if found.plan is None:
        return cli.infeasible(found.reason)
    plan = replace(found.plan, seed=args.seed)
    assert not violations(problem, plan, tables), "the search made a plan that breaks a rule"
    result = estimate(problem, plan, tables)
    if args.out:
        files.write_plan(args.out, problem, plan, result.to_dict())
        talk.say(f"plan in {args.out}")
    talk.say(f"{found.evaluations} candidates in {seconds(found.seconds)}")
    cli.emit(
        {"search": {"evaluations": found.evaluations, "seconds": found.seconds}, **result.to_dict()},
        describe_plan(problem, plan, result),
        as_json=args.json,
    )
    return cli.EXIT_OK


def _read(args: Any) -> tuple[Any, Any]:
    """The problem, and the groups where a groups file is given."""
    from polygon import files

    if (args.groups is None) == (args.cluster is None):
        raise InputError("search: expected either a groups file or --cluster FILE with --model and --global-batch")
    if args.cluster is not None:
        return cli.read_problem(args.cluster, args), None
    groups = files.read_groups(args.groups)
    return groups.problem, groups


if __name__ == "__main__":
    sys.exit(cli.run(main))
