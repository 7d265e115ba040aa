"""Find the plan: which worker computes which layers of which micro-batch.

    python -m polygon.search groups.json -o plan.json
    python -m polygon.search --cluster FILE --model M --global-batch B --seq-len L -o plan.json

A genetic algorithm with local search over who serves which stage; layers, shares, routes, memory options, schedule and
packing of links follow by decoding. The same seed gives the same plan, unless --time-limit cuts the search short.

    python -m polygon.search --method grid3d --cluster FILE --model M --global-batch B --seq-len L -o plan.json

prices every uniform (data, tensor, pipeline) split of all devices instead, writes them all to output.json, and
simulates the best (see `polygon grid3d` for more dimensions, other machines and cost models).

    python -m polygon.search --method exhaustive --cluster FILE --model M --global-batch B --seq-len L -o plan.json

proves the best plan of a small problem: every allocation of devices to stages and every micro-batch size is decoded, or
excluded by a time that it cannot beat.
"""

from __future__ import annotations

import sys
from typing import Any

from polygon import cli
from polygon.limits import limited, planning_parser

METHODS = ("memetic", "grid3d", "exhaustive")


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = planning_parser(
        "polygon search",
        "Find the plan with the least step time, or the best by another objective, within limits.",
        "where the plan goes (JSON)",
    )
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help="how to search (default %(default)s)")
    parser.add_argument(
        "--configurations",
        type=cli.out_file,
        metavar="FILE",
        help="grid3d: where every configuration goes (default output.json)",
    )
    args = parser.parse_args(argv)
    problem, groups = cli.read_task(args, "search")
    problem = limited(problem, args)

    from dataclasses import asdict, replace

    from polygon import files
    from polygon.cost.bill import step_bill, whole_run
    from polygon.cost.estimate import estimate
    from polygon.cost.step_times import step_times
    from polygon.parity import assumptions
    from polygon.planning.engine import Effort
    from polygon.planning.frontier import find_within_limits
    from polygon.planning.left_out import left_out
    from polygon.planning.objectives import objective_named
    from polygon.planning.violations import violations
    from polygon.report import describe_left_out, describe_plan, describe_run, seconds

    talk = cli.Talk(quiet=args.quiet)
    tables = cli.read_tables(problem, args)
    with talk.progress("searching", 1.0) as show:

        def tell(phase: str, part: float, best: float) -> None:
            show(part, f"{phase}: {seconds(best) if args.objective == 'time' else f'{best:.4g}'}")

        if args.method == "grid3d":
            found = _grid(args, problem, tables, tell)
        elif args.method == "exhaustive":
            found = _proved(args, problem, tables, tell)
        else:
            effort = Effort(time_limit_s=args.time_limit or float("inf"))
            found = find_within_limits(
                problem,
                args.seed,
                objective=objective_named(args.objective),
                groups=groups,
                effort=effort,
                tell=tell,
                tables=tables,
            )
    if found.interrupted and found.plan is None:
        raise KeyboardInterrupt
    if found.interrupted:
        talk.say("interrupted: this is the best so far")
    if found.plan is None:
        return cli.infeasible(found.reason)
    plan = replace(found.plan, seed=args.seed)
    assert not violations(problem, plan, tables), "the search made a plan that breaks a rule"
    result = estimate(problem, plan, tables)
    priced = {**result.to_dict(), "loss": assumptions(problem, plan)}
    if args.out:
        files.write_plan(args.out, problem, plan, priced)
        talk.say(f"plan in {args.out}")
    talk.say(f"{found.evaluations} candidates in {seconds(found.seconds)}")
    if found.proved:
        talk.say("proved: no allocation of devices to stages has a better plan")
    search = {"evaluations": found.evaluations, "seconds": found.seconds, "proved": found.proved}
    data = {"search": search, **priced}
    idle = left_out(problem, plan, tables, objective_named(args.objective))
    data["left_out"] = [asdict(row) for row in idle]
    text = describe_plan(problem, plan, result)
    if idle:
        text += "\n\n" + describe_left_out(idle)
    if args.tokens:
        run = whole_run(step_bill(problem, plan, step_times(plan, tables)), args.tokens)
        data["run"] = asdict(run)
        text += "\n" + describe_run(run)
    cli.emit(data, text, as_json=args.json)
    return cli.EXIT_OK


def _proved(args: Any, problem: Any, tables: Any, tell: Any) -> Any:
    """The best of all allocations."""
    import numpy as np

    from polygon.domain.errors import require
    from polygon.planning.engine import Effort
    from polygon.planning.exact import find_optimum

    require(args.objective == "time", "objective", args.objective, "time with --method exhaustive")
    effort = Effort(time_limit_s=args.time_limit or float("inf"))
    return find_optimum(problem, np.random.default_rng(args.seed), effort=effort, tell=tell, tables=tables)


def _grid(args: Any, problem: Any, tables: Any, tell: Any) -> Any:
    """The best uniform split; every configuration goes to a file."""
    from polygon.grid3d.plans import find_grid_plan
    from polygon.planning.objectives import objective_named

    head = {"cluster": problem.cluster.name, "model": problem.model.name, "cost_model": "polygon"}
    head |= {"batch": {"global_batch": problem.batch.global_batch, "seq_len": problem.batch.seq_len}}
    head["devices"] = problem.cluster.devices
    return find_grid_plan(
        problem,
        tables=tables,
        objective=objective_named(args.objective),
        tell=tell,
        keep=lambda result: result.write(args.configurations or "output.json", head),
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
