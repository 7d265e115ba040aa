"""Plans between the fastest and the cheapest: none is beaten by another in time and money (and energy).

python -m polygon.pareto --cluster FILE --model M --global-batch B --seq-len L -o front.json --plot front.png
python -m polygon.pareto groups.json --energy --tokens 300e9 --plans front/
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from polygon.commands import cli
from polygon.commands.figures import new_figure
from polygon.commands.objective_options import limited, planning_parser
from polygon.domain.errors import InputError


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
    parser.add_argument("--plot", type=cli.out_file, metavar="FILE", help=picture)
    parser.add_argument("--plans", metavar="FOLDER", help="write every plan of the front there")
    args = parser.parse_args(argv)

    from polygon.formats import files

    problem, groups = cli.read_task(args, "pareto")
    problem = limited(problem, args)
    figure = new_figure(6.4, 4.4, "--plot") if args.plot else None
    if args.plans:
        files.make_folder(args.plans)

    from polygon.api.planner import Plan
    from polygon.domain.message import Message
    from polygon.formats.convert import runtime_data
    from polygon.messages.report import describe_runtime, table
    from polygon.planning.frontier import find_front
    from polygon.planning.objectives import over_limits
    from polygon.planning.search_engine import Effort

    talk = cli.Talk(quiet=args.quiet)
    asked = cli.posed(problem, args)
    with talk.progress("searching", 1.0) as show:
        front, collection = find_front(
            problem,
            args.seed,
            with_energy=args.energy,
            groups=groups,
            effort=Effort(time_limit_s=args.time_limit or float("inf")),
            tell=lambda phase, part, best: show(part, f"{phase}: {best:.4g}"),
            tables=asked.tables,
        )
    if collection.interrupted:
        talk.say("interrupted: this is the front so far")
    if not front:
        over = tuple(excess for bill, _ in collection.bills[:1] for excess in over_limits(problem, bill))
        return cli.infeasible(collection.reason or Message("reason.none_found_within_limits", over=over))
    rows = [_point(problem, point, args.tokens) for point in front]
    data: dict[str, Any] = {"runtime": runtime_data(problem.runtime)}
    data |= {"objectives": ["step_s", "usd", *(["energy_j"] if args.energy else [])], "points": rows}
    if args.plans:
        for i, point in enumerate(front):
            rows[i]["plan"] = str(Path(args.plans) / f"plan-{i}.json")
            Plan(asked, point.plan).save(rows[i]["plan"])
    if args.out:
        files.write_json(args.out, data)
        talk.say(f"front in {args.out}")
    if figure is not None:
        _plot(figure, args.plot, problem, rows, energy=args.energy)
        talk.say(f"picture in {args.plot}")
    talk.say(f"{collection.evaluations} candidates in {collection.seconds:.3g} s")
    text = f"{describe_runtime(data['runtime'])}\n{table(*_columns(rows, energy=args.energy))}"
    cli.emit(data, text, as_json=args.json)
    return cli.EXIT_OK


def _point(problem: Any, point: Any, tokens: float | None) -> dict[str, Any]:
    """One plan of the front in numbers and words."""
    from dataclasses import asdict

    from polygon.cost.money import whole_run

    bill, cluster = point.bill, problem.cluster
    used: Counter[str] = Counter()
    for stage in point.plan.stages:
        for worker in stage.workers:
            pool = cluster.pools[worker.pool]
            used[f"{pool.device.name} ({cluster.regions[pool.region].name})"] += worker.tp
    row: dict[str, Any] = {
        "step_s": bill.step_s,
        "usd": bill.usd,
        "energy_j": bill.energy_j,
        "usd_per_hour": bill.usd_per_hour,
        "tokens_per_usd": bill.tokens_per_usd if bill.usd > 0 else None,
        "egress_bytes": float(bill.egress_bytes.sum()),
        "devices": dict(used),
        "stages": len(point.plan.stages),
    }
    if tokens:
        row["run"] = asdict(whole_run(bill, tokens))
    return row


def _columns(rows: list[dict[str, Any]], *, energy: bool) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the front as people read it."""
    from polygon.messages.report import duration, seconds

    runs = "run" in rows[0]
    header = ["step", "USD per step", *(["kWh per step"] if energy else []), "USD per hour"]
    header += [*(["run takes", "run costs [USD]"] if runs else []), "stages", "devices"]
    cells = []
    for row in rows:
        cell = [seconds(row["step_s"]), f"{row['usd']:.4g}"]
        cell += [f"{row['energy_j'] / 3.6e6:.3g}"] if energy else []
        cell.append(f"{row['usd_per_hour']:.4g}")
        cell += [duration(row["run"]["seconds"]), f"{row['run']['usd']:,.4g}"] if runs else []
        cell += [str(row["stages"]), ", ".join(f"{count} {name}" for name, count in row["devices"].items())]
        cells.append(cell)
    return header, cells


def _plot(figure: Any, path: str, problem: Any, rows: list[dict[str, Any]], *, energy: bool) -> None:
    """The front as steps; energy as the colour of the points."""
    axes = figure.add_subplot()
    x, y = [row["usd"] for row in rows], [row["step_s"] for row in rows]
    if energy:
        shown = axes.scatter(x, y, c=[row["energy_j"] / 3.6e6 for row in rows])
        figure.colorbar(shown, label="energy per step, at most [kWh]")
    else:
        order = sorted(range(len(x)), key=x.__getitem__)
        axes.step([x[i] for i in order], [y[i] for i in order], where="post", marker="o")
    axes.set(
        xlabel="money per step [USD]", ylabel="step time [s]", title=f"{problem.model.name} on {problem.cluster.name}"
    )
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(cli.run(main))
