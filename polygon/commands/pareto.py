"""Plans between the fastest and the cheapest: none is beaten by another in time and money (and energy).

python -m polygon.pareto --cluster FILE --model M --global-batch B --seq-len L -o front.json --plot front.png
python -m polygon.pareto groups.json --energy --tokens 300e9 --plans front/
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polygon.commands import cli
from polygon.commands.objective_options import limited, planning_parser
from polygon.domain.clock import Clock
from polygon.domain.errors import InputError

if TYPE_CHECKING:
    from polygon.api.plans import Plan
    from polygon.cost.money import Bill
    from polygon.domain.plan import Problem


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = planning_parser(
        "polygon pareto",
        "Plans between the fastest and the cheapest.",
        "where the front goes (JSON)",
        objective=False,
    )
    parser.add_argument("--energy", action="store_true", help="energy as the third thing to weigh")
    picture = "picture of the front (PNG, SVG or PDF; needs matplotlib)"
    parser.add_argument("--plot", type=cli.picture_file, metavar="FILE", help=picture)
    parser.add_argument("--plans", metavar="FOLDER", help="write every plan of the front there")
    args = parser.parse_args(argv)
    clock = Clock(args.time_limit)

    from polygon.formats import files

    problem, groups = cli.read_task(args, "pareto")
    problem = limited(problem, args)
    if args.plans:
        files.make_folder(args.plans)

    from polygon.domain.message import Message
    from polygon.formats.convert import runtime_data
    from polygon.messages.report import describe_nothing, describe_runtime, table

    talk = cli.Talk(quiet=args.quiet)
    with talk.progress("searching", 1.0) as show, cli.interruptible() as asked:

        def tell(phase: Message, part: float, best: float) -> None:
            show(part, f"{phase}: {best:.4g}")
            asked.heed()

        front = cli.posed(problem, args).front(
            seed=args.seed,
            with_energy=args.energy,
            groups=groups,
            effort=args.effort,
            jobs=args.jobs,
            time_limit_s=None if args.time_limit is None else max(0.0, clock.left_s()),
            progress=tell,
        )
    if front.interrupted and not front.plans:
        return cli.interrupted(asked)
    if front.interrupted:
        talk.say("interrupted: this is the front so far")
    if not front.plans:
        return cli.infeasible(front.reason or Message("reason.none_found_within_limits", over=()))
    rows = [_point(problem, plan, bill, args) for plan, bill in zip(front.plans, front.bills, strict=True)]
    data: dict[str, Any] = {"runtime": runtime_data(problem.runtime)}
    data |= {"objectives": ["step_s", "usd", *(["energy_j"] if args.energy else [])], "points": rows}
    if args.plans:
        for i, plan in enumerate(front.plans):
            rows[i]["plan"] = str(Path(args.plans) / f"plan-{i}.json")
            plan.save(rows[i]["plan"])
    if args.out:
        files.write_json(args.out, data)
        talk.say(f"front in {args.out}")
    if args.plot:
        try:
            front.plot().savefig(args.plot, dpi=120)
        except (OSError, ValueError) as error:
            raise InputError(f"{args.plot}: cannot be written: {error}") from None
        talk.say(f"picture in {args.plot}")
    talk.say(f"{front.evaluations} candidates in {front.seconds:.3g} s")
    text = f"{describe_runtime(data['runtime'])}\n{table(*_columns(rows, energy=args.energy))}"
    nothing = [sorted({name for row in rows for name in row.get(key, ())}) for key in ("free", "without_power")]
    if any(nothing):
        text += f"\ncounted       {describe_nothing(*nothing)}"
    cli.emit(data, text, as_json=args.json)
    return asked.exit_code if front.interrupted else cli.EXIT_OK


def _point(problem: Problem, plan: Plan, bill: Bill, args: argparse.Namespace) -> dict[str, Any]:
    """One plan of the front in numbers and words."""
    from dataclasses import asdict

    from polygon.cost.money import whole_run
    from polygon.messages.report import counted_as_nothing

    cluster = problem.cluster
    used: Counter[str] = Counter()
    for number, count in plan.data.devices_of_pools.items():
        pool = cluster.pools[number]
        used[f"{pool.device.name} ({cluster.regions[pool.region].name})"] += count
    row: dict[str, Any] = {
        "step_s": bill.step_s,
        "usd": bill.usd,
        "energy_j": bill.energy_j,
        "usd_per_hour": bill.usd_per_hour,
        "tokens_per_usd": bill.tokens_per_usd if bill.usd > 0 else None,
        "egress_bytes": float(bill.egress_bytes.sum()),
        "devices": dict(used),
        "stages": plan.stages,
    }
    free, idle = counted_as_nothing(problem, plan.data)
    row |= {"free": free} if free else {}
    row |= {"without_power": idle} if idle and args.energy else {}
    if args.tokens:
        row["run"] = asdict(whole_run(bill, args.tokens))
    return row


def _columns(rows: list[dict[str, Any]], *, energy: bool) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the front as people read it."""
    from polygon.messages.report import duration, seconds, written_out

    runs = "run" in rows[0]
    header = ["step", "USD per step", *(["kWh per step"] if energy else []), "USD per hour"]
    header += [*(["run takes", "run costs [USD]"] if runs else []), "stages", "devices"]
    cells = []
    for row in rows:
        cell = [seconds(row["step_s"]), written_out(row["usd"])]
        cell += [written_out(row["energy_j"] / 3.6e6, 3)] if energy else []
        cell.append(written_out(row["usd_per_hour"]))
        cell += [duration(row["run"]["seconds"]), written_out(row["run"]["usd"])] if runs else []
        cell += [str(row["stages"]), ", ".join(f"{count} {name}" for name, count in row["devices"].items())]
        cells.append(cell)
    return header, cells


if __name__ == "__main__":
    sys.exit(cli.run(main))
