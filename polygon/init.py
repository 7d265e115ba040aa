"""Group devices into pipeline stages by an ant colony.

    python -m polygon.init CLUSTER --model gpt3-1.3b --global-batch 1024 --seq-len 2048 -o groups.json

Data centers are grouped by compute, latency and bandwidth; large ones are split over several stages, small ones are
merged, and the stages are ordered.
"""

from __future__ import annotations

import sys

from polygon.commands import cli
from polygon.commands.objective_options import limited, objective_options


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(
        prog="polygon init",
        description="Group devices into pipeline stages by an ant colony.",
        parents=[
            cli.problem_options(),
            cli.profile_options(),
            cli.search_options(),
            objective_options(tokens=False),
            cli.output_options(out="where the groups go (JSON)"),
        ],
    )
    parser.add_argument("cluster", help="cluster YAML, PTAFM's text file, or a problem file")
    parser.add_argument(
        "--stages",
        type=cli.whole(1),
        metavar="N",
        help="pipeline stages (default: the file's, else the best of 1 to 8)",
    )
    args = parser.parse_args(argv)
    problem = limited(cli.read_problem(args.cluster, args), args)

    import numpy as np

    from polygon.domain.errors import require
    from polygon.formats import files
    from polygon.formats.convert import runtime_data
    from polygon.messages.report import describe_groups, seconds
    from polygon.planning.decode import most_stages
    from polygon.planning.objectives import objective_named
    from polygon.planning.search_engine import Effort, find_groups

    stages = args.stages or getattr(problem.cluster, "stages", None)
    if stages:
        require(stages <= most_stages(problem), "stages", stages, f"at most {most_stages(problem)} for this problem")
    talk = cli.Talk(quiet=args.quiet)
    effort = Effort(time_limit_s=args.time_limit or float("inf"))
    with talk.progress("grouping", 1.0) as show, cli.interrupted_by_signals() as asked:
        groups, reason = find_groups(
            problem,
            np.random.default_rng(args.seed),
            stages=stages,
            effort=effort,
            tell=lambda phase, part, best: show(part, f"{phase}: {args.objective} {best:.4g}"),
            tables=cli.read_tables(problem, args),
            objective=objective_named(args.objective),
        )
    if groups is None:
        assert reason is not None  # promised by `find_groups`
        return cli.infeasible(reason)
    if reason:
        talk.say(str(reason))
    from dataclasses import replace

    groups = replace(groups, seed=args.seed)
    if args.out:
        files.write_groups(args.out, groups)
        talk.say(f"groups in {args.out}")
    cli.emit(
        {
            "runtime": runtime_data(problem.runtime),
            "stages": groups.allocation.tolist(),
            "objective": dict(groups.objective),
        },
        describe_groups(groups)
        + f"\nabout {seconds(groups.objective['step_s'])} a step by an estimate that leaves waiting out",
        as_json=args.json,
    )
    interrupted = reason is not None and reason.kind == "reason.interrupted"
    return asked.exit_code if interrupted else cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
