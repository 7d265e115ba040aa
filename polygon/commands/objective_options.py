"""Options of commands that plan: how long to search, and how to weigh time against money and loss."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, get_args

from polygon.api.choices import OBJECTIVES, EffortName
from polygon.commands import cli
from polygon.domain.plan import PARITY_LEVELS


def objective_options(*, objective: bool = True, tokens: bool = True) -> argparse.ArgumentParser:
    """What to minimise, within which limits, and for how many tokens (a parent for argparse)."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("time and money")
    if objective:
        group.add_argument(
            "--objective",
            choices=OBJECTIVES,
            default=OBJECTIVES[0],
            help="what is best: least step time, money or energy per step, or most tokens per dollar "
            "(default %(default)s)",
        )
    usd, above = "USD", cli.number(above=0)
    group.add_argument("--budget", type=above, metavar=usd, help="most that a step may cost, devices and egress")
    group.add_argument("--budget-per-hour", type=above, metavar=usd, help="most that an hour may cost")
    group.add_argument(
        "--parity",
        choices=PARITY_LEVELS,
        help="how sure it must be that packings and local steps keep the loss: exact (nothing is packed), safe (the "
        "default), known (shown by others for models of this size), any; the rows: polygon show parity",
    )
    group.add_argument("--deadline", type=above, metavar="SECONDS", help="longest that a step may take")
    if tokens:
        group.add_argument(
            "--tokens", type=above, metavar="N", help="also say what training on so many tokens takes (such as 300e9)"
        )
    return parent


def effort_options() -> argparse.ArgumentParser:
    """How long to search, and on how many cores (a parent for argparse)."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("search")
    group.add_argument(
        "--effort",
        type=_effort,
        default="thorough",
        metavar="N",
        help=f"best of N searches, never worse than fewer; or one of {', '.join(get_args(EffortName))} "
        "(default %(default)s, the same as 1)",
    )
    group.add_argument(
        "--jobs",
        type=cli.whole(1),
        default=-1,
        metavar="N",
        help="processes that search at the same time, one a search of the effort at most (default: one a core)",
    )
    return parent


def _effort(text: str) -> str | int:
    """An effort by name, or a number of searches."""
    if text in get_args(EffortName):
        return text
    try:
        return cli.whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a whole number >= 1 or one of {', '.join(get_args(EffortName))}"
        ) from None


def planning_parser(prog: str, description: str, out: str, *, objective: bool = True) -> cli.CommandParser:
    """Parser of a command that plans from groups or from a cluster (`cli.read_task` reads them)."""
    parser = cli.CommandParser(
        prog=prog,
        description=description,
        parents=[
            cli.problem_options(),
            cli.profile_options(),
            cli.search_options(),
            effort_options(),
            objective_options(objective=objective),
            cli.output_options(out=out),
        ],
    )
    parser.add_argument("groups", nargs="?", help="groups from polygon init")
    parser.add_argument("--cluster", help="plan for a cluster (or a problem file) directly, without groups")
    return parser


def limited(problem: Any, args: argparse.Namespace) -> Any:
    """The problem with the limits of `objective_options` in place of its own where they are given."""
    given = {
        "most_usd_per_step": args.budget,
        "most_usd_per_hour": args.budget_per_hour,
        "most_step_s": args.deadline,
        "parity": args.parity,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(problem, constraints=replace(problem.constraints, **changes)) if changes else problem
