"""Why this plan and not another: other plans, rejected ideas and what they cost, what a better cluster would bring.

    python -m polygon.explain plan.json
    python -m polygon.explain plan.json --link frankfurt tokyo --more-gbps 10 --tokens 300e9

Everything is worked out with short searches from the plan; a longer search may find more. Where one of them finds a
faster plan, that is said, and `--better FILE` keeps it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from polygon import cli

FASTER = 0.995
"""An alternative below this part of the plan's step is called faster."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.Parser(
        prog="polygon explain",
        description="Other plans, rejected ideas and what they cost, what more bandwidth or devices would bring.",
        parents=[
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
    kept = "where the fastest plan goes if it beats the one given"
    parser.add_argument("--better", type=cli.out_file, metavar="FILE", help=kept)
    args = parser.parse_args(argv)

    from polygon import files
    from polygon.planning.violations import violations

    problem, plan, _ = files.read_plan(args.plan)
    tables = cli.read_tables(problem, args)
    broken = violations(problem, plan, tables)
    if broken:
        return cli.infeasible(f"{args.plan}: the plan cannot be run: {broken[0]}")
    talk = cli.Talk(quiet=args.quiet)
    answers = _answers(args, problem, plan, tables, talk)
    data = explanation_data(plan, answers, args.tokens)
    if args.out:
        files.write_json(args.out, data)
        talk.say(f"answers in {args.out}")
    better = _faster(answers)
    if better is not None and args.better:
        from polygon.cost.estimate import estimate

        files.write_plan(args.better, problem, better.plan, estimate(problem, better.plan, tables).to_dict())
        talk.say(f"a faster plan in {args.better}")
    cli.emit(data, _text(problem, plan, answers, args.tokens), as_json=args.json)
    return cli.EXIT_OK


def _answers(args: Any, problem: Any, plan: Any, tables: Any, talk: cli.Talk) -> Any:
    """Alternatives and sensitivities; with a time limit, ideas get half of it and changes the rest."""
    from types import SimpleNamespace

    from polygon.planning.explain import Explainer
    from polygon.planning.whatif import link_changes, sensitivities

    began = time.perf_counter()
    limit_s = args.time_limit or math.inf

    changes = link_changes(problem.cluster, args.link, args.more_gbps) if args.link else None
    explainer = Explainer(problem, plan, tables, seed=args.seed)
    with talk.progress("explaining", 1.0) as show, cli.interruptible() as interrupted:

        def left(part: float) -> Callable[[], float]:
            return lambda: 0.0 if interrupted() else part * limit_s - (time.perf_counter() - began)

        why = explainer.explain(count=args.count, seconds_left=left(0.5), tell=lambda text, part: show(part / 2, text))
        what = sensitivities(
            problem,
            plan,
            tables=tables,
            changes=changes,
            more_gbps=args.more_gbps,
            seed=args.seed,
            seconds_left=left(1.0),
            tell=lambda text, part: show(0.5 + part / 2, text),
        )
    left_out = len(why.left_out) + what.left_out
    if left_out:
        talk.say(f"{'interrupted: ' if interrupted() else ''}no time for {left_out} questions")
    return SimpleNamespace(bill=explainer.bill, why=why, what=what)


def _faster(answers: Any) -> Any:
    """The fastest alternative if it is faster than the plan, else None."""
    possible = [a for a in (*answers.why.alternatives, *answers.why.different) if a.bill is not None]
    best = min(possible, key=lambda a: a.bill.step_s, default=None)
    return best if best is not None and best.bill.step_s < FASTER * answers.bill.step_s else None


def explanation_data(plan: Any, answers: Any, tokens: float | None = None) -> dict[str, Any]:
    """Everything as plain data: `answers` has the plan's `bill`, `why` and `what`."""
    from dataclasses import asdict

    from polygon.cost.bill import whole_run

    def row(alternative: Any) -> dict[str, Any]:
        bill = alternative.bill
        costs = {} if bill is None else {"step_s": bill.step_s, "usd": bill.usd, "energy_j": bill.energy_j}
        part = None if bill is None else bill.step_s / answers.bill.step_s - 1
        result = {"idea": alternative.idea, "naive": alternative.naive, "possible": bill is not None}
        return {**result, **costs, "slower_by": part, "reason": alternative.reason}

    data = {
        "step_s": answers.bill.step_s,
        "usd": answers.bill.usd,
        "energy_j": answers.bill.energy_j,
        "usd_per_hour": answers.bill.usd_per_hour,
        "devices": plan.world_size,
        "alternatives": [row(a) for a in answers.why.alternatives],
        "different_plans": [row(a) for a in answers.why.different],
        "sensitivities": [asdict(s) for s in answers.what.rows],
        "searched_step_s": answers.what.baseline_s,
        "left_out": [*answers.why.left_out],
        "changes_left_out": answers.what.left_out,
    }
    if tokens:
        data["run"] = asdict(whole_run(answers.bill, tokens))
    return data


def _text(problem: Any, plan: Any, answers: Any, tokens: float | None) -> str:
    """Everything in words."""
    from polygon.cost.bill import whole_run
    from polygon.report import describe_run, seconds, table

    base = answers.bill
    lines = [
        f"plan          {seconds(base.step_s)} and {base.usd:.3g} USD per step, {base.usd_per_hour:.4g} USD per hour, "
        f"{plan.world_size} of {problem.cluster.devices} devices, {len(plan.stages)} stages"
    ]
    if tokens:
        lines.append(describe_run(whole_run(base, tokens)))

    def cells(alternative: Any) -> list[str]:
        bill = alternative.bill
        if bill is None:
            return [alternative.idea, "no", "", alternative.reason]
        return [alternative.idea, f"{bill.step_s / base.step_s - 1:+.1%}", f"{bill.usd:.3g}", ""]

    header = ["step", "USD", "why not"]
    for title, naive in (("naive plans", True), ("rejected ideas", False)):
        rows = [cells(a) for a in answers.why.alternatives if a.naive == naive]
        if rows:
            lines += ["", table([title, *header], rows)]
    if answers.why.different:
        rows = [cells(a)[:3] for a in answers.why.different]
        lines += ["", table(["clearly different plans", *header[:2]], rows)]
    if answers.what.rows:
        lines += ["", *_what_if(answers)]
    better = _faster(answers)
    if better is not None:
        part = 1 - better.bill.step_s / base.step_s
        lines += [
            "",
            f"A faster plan was met on the way ({better.idea}: {part:.1%} less): search longer, or use --better.",
        ]
    return "\n".join(lines)


def _what_if(answers: Any) -> list[str]:
    """Sensitivities, the largest first; what changes nothing in one line."""
    from polygon.report import seconds, table

    best_first = sorted(answers.what.rows, key=lambda s: (s.replanned, s.same_plan))
    felt = [s for s in best_first if min(s.replanned, s.same_plan) < -0.0005 or s.same_plan > 0.0005]
    rows = [[s.text, f"{s.same_plan:+.1%}", f"{s.replanned:+.1%}", f"{s.usd_per_hour:+.3g}"] for s in felt]
    lines = [table(["what if", "same plan", "replanned", "worth USD per hour"], rows)] if rows else []
    without = [s.text for s in best_first if s not in felt]
    if without:
        lines.append(f"No change by: {', '.join(without)}.")
    searched_s = answers.what.baseline_s
    if searched_s < FASTER * answers.bill.step_s:
        lines.append(f"Replanned is held against {seconds(searched_s)}, what the same search finds without any change.")
    return lines


if __name__ == "__main__":
    sys.exit(cli.run(main))
