"""Find the plan: which worker computes which layers of which micro-batch.

    python -m polygon.search groups.json -o plan.json
    python -m polygon.search --cluster FILE --model M --global-batch B --seq-len L -o plan.json

A genetic algorithm with local search over who serves which stage; layers, shares, routes, memory options, schedule and
packing of links follow by decoding. The same seed gives the same plan, unless --time-limit cuts the search short.
--effort N takes the best of N such searches, --until-gap X searches again until the plan is near enough to the bound.

    python -m polygon.search --method grid3d --cluster FILE --model M --global-batch B --seq-len L -o plan.json

prices every uniform (data, tensor, pipeline) split of all devices instead, writes them all to output.json, and
simulates the best (see `polygon grid3d` for more dimensions, other machines and cost models).

    python -m polygon.search --method exhaustive --cluster FILE --model M --global-batch B --seq-len L -o plan.json

proves the best plan of a small problem: every allocation of devices to stages and every micro-batch size is decoded, or
excluded by a time that it cannot beat.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from polygon.api.choices import METHODS
from polygon.commands import cli
from polygon.commands.objective_options import limited, planning_parser
from polygon.domain.clock import Clock
from polygon.domain.errors import OutOfTimeError
from polygon.domain.message import Message

if TYPE_CHECKING:
    from polygon.api.plans import Plan
    from polygon.api.results import Result
    from polygon.domain.groups import Groups
    from polygon.domain.plan import Problem

ADVICE_PART, MOST_ADVICE_S = 0.1, 15.0
"""Of a time limit, what is kept for what is said beside a plan, and the most: of 10,000 devices it takes so long."""
AFTER_INTERRUPT_S = 2.0
"""For what is said beside a plan where the search was interrupted: who did that does not want to wait."""
MOST_DEVICES_TO_SIMPLIFY = 2_000
"""Clusters with more are not asked for a simpler plan: pricing those that were met takes longer than it is worth."""


def parser() -> cli.CommandParser:
    """Options of the command."""
    made = planning_parser(
        "polygon search",
        "Find the plan with the least step time, or the best by another objective, within limits.",
        "where the plan goes (JSON)",
    )
    made.add_argument("--method", choices=METHODS, default=METHODS[0], help="how to search (default %(default)s)")
    made.add_argument(
        "--configurations",
        type=cli.out_file,
        metavar="FILE",
        help="grid3d: where every configuration goes (default output.json)",
    )
    made.add_argument("--robust", action="store_true", help="least upper end of the interval, then fewest parts")
    made.add_argument(
        "--until-gap",
        type=cli.number(at_least=0),
        metavar="X",
        help="search again until the step is at most this part above the bound (0.25: a quarter), N times at most",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    args = parser().parse_args(argv)
    clock = Clock(args.time_limit)
    problem, groups = cli.read_task(args, "search")
    problem = limited(problem, args)

    from polygon.messages.report import seconds

    talk = cli.Talk(quiet=args.quiet)
    with cli.interruptible() as asked:
        result = _searched(args, problem, groups, talk, asked, clock)
    plan = result.plan
    interrupted = result.status == "interrupted"
    if plan is None and interrupted:
        return cli.interrupted(asked)
    if plan is None:
        assert result.reason is not None
        return cli.infeasible(result.reason)
    if interrupted:
        talk.say("interrupted: this is the best so far")
        clock = Clock(min(clock.left_s(), AFTER_INTERRUPT_S))
    # First: the plan's file and the report say what is found here, and price no link more.
    plan.limits(time_limit_s=clock.left_s())
    plan.assumptions(time_limit_s=clock.left_s())
    if args.out:
        plan.save(args.out)
        talk.say(f"plan in {args.out}")
    talk.say(f"{result.evaluations} candidates in {seconds(result.seconds)}")
    if result.cut_short is not None:
        talk.say(str(result.cut_short))
    if result.status == "proved":
        talk.say("proved: no allocation of devices to stages has a better plan")
    data, text = _told(args, problem, result, plan, clock)
    cli.emit(data, text, as_json=args.json)
    return asked.exit_code if interrupted else cli.EXIT_OK


def _searched(
    args: argparse.Namespace, problem: Problem, groups: Groups | None, talk: cli.Talk, asked: cli.Asked, clock: Clock
) -> Result:
    """The search that the options ask for, with its progress."""
    from polygon.messages.report import valued

    with talk.progress("searching", 1.0) as show:

        def tell(phase: Message, part: float, best: float) -> None:
            show(part, f"{phase}: {valued(args.objective, best)}")
            asked.heed()

        found: Result = cli.posed(problem, args).search(
            objective=args.objective,
            method=args.method,
            effort=args.effort,
            until_gap=args.until_gap,
            seed=args.seed,
            time_limit_s=None if args.time_limit is None else clock.before_s(ADVICE_PART, MOST_ADVICE_S),
            groups=groups,
            robust=args.robust,
            progress=tell,
            jobs=args.jobs,
            configurations=args.configurations or ("output.json" if args.method == "grid3d" else None),
        )
    return found


def _told(
    args: argparse.Namespace, problem: Problem, result: Result, plan: Plan, clock: Clock
) -> tuple[dict[str, Any], str]:
    """What the result says of the plan, for machines and for people: what it leaves out, and what else was met.

    All of it gets what is left of the time limit, and says where that was not enough.
    """
    from dataclasses import asdict

    from polygon.messages.report import describe_left_out, describe_run
    from polygon.planning.left_out import left_out
    from polygon.planning.local_updates import local_updates
    from polygon.planning.objectives import objective_named

    tables = plan.problem.tables
    if result.status != "interrupted" and clock.left_s() > 0:
        plan.assumptions(anew=True, time_limit_s=clock.left_s())
    search: dict[str, Any] = {"evaluations": result.evaluations, "seconds": result.seconds}
    search["proved"] = result.status == "proved"
    if result.cut_short is not None:
        search["cut_short"] = str(result.cut_short)
    idle = left_out(problem, plan.data, tables, objective_named(args.objective), clock.left_s)
    data = {"search": search, **plan.to_dict(), "left_out": [asdict(row) for row in idle]}
    parts = [plan.describe()]
    simplify = problem.cluster.devices <= MOST_DEVICES_TO_SIMPLIFY
    other = result.simpler(time_limit_s=clock.left_s()) if simplify else None
    if other is not None:
        data["simpler"], simpler = _simpler(problem, plan, other, args.objective)
        parts.append(simpler)
    try:
        gain = local_updates(problem, plan.data, tables, clock.left_s)
    except OutOfTimeError:
        data["local_updates"] = {"text": str(Message("plan.local_updates_no_time"))}
        parts.append(f"local steps   {Message('plan.local_updates_no_time')}")
    else:
        if gain is not None:
            words = Message("plan.local_updates", times=gain.times, steps=gain.local_steps, evidence=gain.evidence)
            data["local_updates"] = {**asdict(gain), "text": str(words)}
            parts.append(f"local steps   {words}")
    if idle:
        parts.append(describe_left_out(idle))
    text = "\n\n".join(parts)
    if args.tokens:
        run = plan.whole_run(args.tokens)
        data["run"] = asdict(run)
        text += "\n" + describe_run(run)
    return data, text


def _simpler(problem: Problem, plan: Plan, other: Plan, objective: str) -> tuple[dict[str, Any], str]:
    """What is said of a simpler plan: how much longer its step is, and what more it takes of what was to be least."""
    from polygon.planning.decode import Decoder
    from polygon.planning.objectives import MEASURES

    measure, decoder = MEASURES[objective], Decoder(problem, tables=plan.problem.tables)
    least, value = (measure.value(decoder.bill(p.data)) for p in (plan, other))
    more = value / least - 1 if value != least else 0.0  # of devices that are free both cost nothing
    longer = other.evaluate().step_s / plan.evaluate().step_s - 1
    data = {"longer_by": longer, "more_by": more, "stages": other.stages, "devices": other.devices}
    of = "(--robust weighs both)" if objective == "time" else measure.name
    shown = f"{Message('variant.stages', stages=other.stages)} on {other.devices} devices, {more:+.1%} {of}"
    return data, f"simpler       {shown}"


if __name__ == "__main__":
    sys.exit(cli.run(main))
