"""python -m polygon.validate: hold predictions against published measurements.

Rows that coefficients were fitted to are reported apart; the headline is what the predictor had never seen.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from polygon.accuracy.foreign_rows import NotExpressibleError
from polygon.accuracy.measured import MeasuredRun, plan_runs, published_run
from polygon.accuracy.rows import BREAKDOWNS, Accuracy, Row, broken_down, predict, rows_of
from polygon.accuracy.sailor_runs import sailor_runs
from polygon.commands import cli
from polygon.cost.estimate import host_error
from polygon.cost.link_curves import LinkCurves, link_curves
from polygon.cost.profiles import ModelProfile, model_profiles
from polygon.cost.tables import CostTables
from polygon.cost.uncertainty import beyond_host, group_of_run, quantiles
from polygon.domain.errors import InputError, located
from polygon.domain.runtime import Runtime
from polygon.formats import files
from polygon.formats.serialization import format_yaml
from polygon.messages.figures import new_figure

BEGIN, END = "<!-- validation -->", "<!-- /validation -->"


def parser() -> cli.CommandParser:
    """Options of the command."""
    made = cli.CommandParser(
        prog="polygon validate",
        description="Predict measured training runs and report the errors, in time and in memory.",
        parents=[cli.runtime_option(), cli.output_options()],
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="runs: published_runs, plan_runs or sailor_validation")
    made.add_argument("--profiles", metavar="FILE", help="measured layer times (sailor_profiles format)")
    made.add_argument("--network", metavar="FILE", help="measured links (sailor_network format)")
    made.add_argument("--dataset", action="append", metavar="NAME", help="only this data set; may be repeated")
    made.add_argument("--by", choices=tuple(BREAKDOWNS), default="dataset", help="what rows are told apart by")
    picture = "scatter plot of predicted over measured (PNG, SVG or PDF)"
    made.add_argument("--plot", type=cli.picture_file, metavar="FILE", help=picture)
    made.add_argument("--errors", type=cli.out_file, metavar="FILE", help="write the errors that intervals are made of")
    made.add_argument("--update", metavar="FILE", help=f"replace the table between {BEGIN} and {END} in this file")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = parser().parse_args(argv)
    if args.update:
        around_table(args.update)
    profiles: list[ModelProfile] = []
    curves = None
    if args.profiles:
        with located(f"{args.profiles}: "):
            profiles += model_profiles(files.read_json(args.profiles)).values()
    if args.network:
        with located(f"{args.network}: "):
            curves = link_curves(files.read_json(args.network))
    runs, skipped = read_runs(args.files, curves, args.runtime)
    if args.dataset:
        runs = [run for run in runs if run.dataset in args.dataset]
    rows, more = predicted(runs, profiles)
    skipped, doubtful = skipped + more, doubts(runs)
    if not rows:
        raise InputError(f"{', '.join(args.files)}: found no run that can be predicted ({_reasons(skipped)})")
    report = report_of(rows, skipped, args.by) | {"doubtful": doubtful}
    if args.errors:
        files.write_text(args.errors, format_yaml(measured_errors(runs, rows)))
    if args.plot:
        plot(rows, args.plot)
    if args.update:
        update(args.update, markdown(rows))
    cli.emit(report, "\n".join([text_of(rows, skipped, args.by), *listed("doubtful", doubtful)]), as_json=args.json)
    return cli.EXIT_OK


def measured_errors(runs: Sequence[MeasuredRun], rows: Sequence[Row]) -> dict[str, Any]:
    """What `errors.yaml` of the catalogue says: by rows that no coefficient has seen, and without a profile."""
    of_run = {(run.dataset, run.identifier): run for run in runs}
    scores: dict[str, list[float]] = {}
    for row in rows:
        run = of_run[row.dataset, row.identifier]
        if row.quantity == "time" and not row.calibration and row.source != "profile":
            pools = run.problem.cluster.pools
            devices = [pools[worker.pool].device for worker in run.plan.workers]
            group = f"{group_of_run(run.model, run.plan, devices)}/{run.problem.runtime.name}"
            error, tables = abs(math.log(row.measured / row.predicted)), CostTables(run.problem)
            scores.setdefault(group, []).append(beyond_host(error, host_error(run.plan, tables)))
    return quantiles(scores)


def read_runs(
    paths: Sequence[str], curves: LinkCurves | None = None, runtime: Runtime | None = None
) -> tuple[list[MeasuredRun], list[dict[str, str]]]:
    """Every run of some files (as if by `runtime`, if given), and what could not be expressed with the reason."""
    runs: list[MeasuredRun] = []
    skipped: list[dict[str, str]] = []
    for path in paths:
        data = files.read_json(path)
        if isinstance(data, Mapping) and "configurations" in data:
            for run in sailor_runs(data, curves, runtime):
                if isinstance(run, MeasuredRun):
                    runs.append(run)
                else:
                    skipped.append({"id": run[0], "reason": run[1]})
            continue
        if isinstance(data, Mapping) and data.get("format") == "polygon-plan-runs":
            with located(f"{path}: "):
                runs += plan_runs(data, runtime)
            continue
        listed = data.get("rows") if isinstance(data, Mapping) else data
        if not isinstance(listed, list):
            raise InputError(f"{path}: found neither `rows` nor `configurations`, expected one of them")
        for number, row in enumerate(listed):
            if not isinstance(row, Mapping):
                raise InputError(f"{path}: rows[{number}]: found {type(row).__name__}, expected an object")
            row = {**row, "id": row.get("id") or f"rows[{number}]"}
            try:
                runs.append(published_run(row, runtime))
            except NotExpressibleError as error:
                skipped.append({"id": str(row.get("id")), "reason": str(error)})
            except InputError as error:
                skipped.append({"id": str(row.get("id")), "reason": str(error)})
            except KeyError as error:
                skipped.append({"id": str(row.get("id")), "reason": f"{error.args[0]} is missing"})
            except (ValueError, TypeError) as error:
                skipped.append({"id": str(row.get("id")), "reason": f"{type(error).__name__}: {error}"})
    return runs, skipped


def doubts(runs: Sequence[MeasuredRun]) -> list[dict[str, str]]:
    """What may be wrong with runs that were read: names of fields that are nearly known ones, ids that come twice."""
    found = []
    times = Counter((run.dataset, run.identifier) for run in runs)
    for run in runs:
        for name, meant in run.misspelt.items():
            found.append({"id": run.identifier, "reason": f"{name} is not read: is {meant} meant?"})
    for (dataset, identifier), count in times.items():
        if count > 1:
            found.append({"id": identifier, "reason": f"{count} runs of {dataset} have this id; each counts"})
    return found


def predicted(runs: Sequence[MeasuredRun], profiles: Sequence[ModelProfile]) -> tuple[list[Row], list[dict[str, str]]]:
    """Rows of every run; a run without a measurement, or that the model refuses, is skipped with the reason."""
    rows: list[Row] = []
    skipped = []
    for run in runs:
        try:
            found = rows_of(run, *predict(run, profiles))
        except InputError as error:
            skipped.append({"id": run.identifier, "reason": str(error)})
            continue
        if not found:
            skipped.append({"id": run.identifier, "reason": "neither a time nor a memory was measured"})
        rows += found
    return rows, skipped


def report_of(rows: Sequence[Row], skipped: Sequence[Mapping[str, str]], by: str = "dataset") -> dict[str, Any]:
    """The machine-readable report: `overall` and `datasets` (or what `by` says) are test rows, `calibration` others."""

    def plain(table: dict[str, dict[str, Accuracy]]) -> dict[str, Any]:
        listed = {name: {q: asdict(a) for q, a in kinds.items()} for name, kinds in table.items()}
        return {"overall": listed.pop("overall", {}), f"{by}s": listed}

    return {
        **plain(broken_down(rows, lambda row: not row.calibration, by)),
        "calibration": plain(broken_down(rows, lambda row: row.calibration, by)),
        "rows": [
            {
                "id": row.identifier,
                "dataset": row.dataset,
                "runtime": row.runtime,
                "quantity": row.quantity,
                "split": "calibration" if row.calibration else "test",
                "unit": "s" if row.quantity == "time" else "bytes",
                "measured": row.measured,
                "predicted": row.predicted,
                "error_pct": 100 * row.error,
                "low": row.low,
                "high": row.high,
                "source": row.source,
                "largest": row.owner,
                "terms": dict(row.terms),
                "device": row.device,
                "fullness": row.fullness,
            }
            for row in rows
        ],
        "skipped": list(skipped),
    }


def _reasons(skipped: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(f"{entry['id']}: {entry['reason']}" for entry in skipped[:3]) or "no rows"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def text_of(rows: Sequence[Row], skipped: Sequence[Mapping[str, str]], by: str = "dataset") -> str:
    """The report for people: rows, then data sets, then what was skipped."""
    lines = [
        f"{'run':38s} {'':6s} {'measured':>10s} {'predicted':>10s} {'error':>7s}  interval            "
        "source, largest, runtime"
    ]
    for row in rows:
        scale, unit = (1.0, "s") if row.quantity == "time" else (1e-9, "GB")
        lines.append(
            f"{row.identifier[-38:]:38s} {row.quantity:6s} {row.measured * scale:9.4g}{unit:2s}"
            f"{row.predicted * scale:9.4g}{unit:2s}{100 * row.error:+6.1f}%  "
            f"{row.low * scale:8.4g} -{row.high * scale:8.4g}  {row.source}, {row.owner}, {row.runtime}"
            + (" (calibration)" if row.calibration else "")
        )
    for title, calibration in (("test rows (never fitted)", False), ("calibration rows", True)):
        table = broken_down(rows, lambda row, c=calibration: row.calibration == c, by)  # type: ignore[misc]
        if table:
            lines += ["", *_table(title, table)]
    return "\n".join([*lines, *listed("skipped", skipped)])


def listed(title: str, entries: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines that say of which runs there is something to say."""
    lines = [f"  {entry['id']}: {entry['reason']}" for entry in entries]
    return ["", f"{title}: {len(entries)}", *lines] if entries else []


def _table(title: str, table: Mapping[str, Mapping[str, Accuracy]]) -> list[str]:
    head = f"{title:28s} {'':6s} {'rows':>4s} {'mean':>6s} {'median':>6s} {'p90':>6s} {'worst':>6s} {'bias':>6s}"
    lines = [head + f" {'rank':>6s} {'in 90%':>7s} {'regret':>6s} {'refused':>7s}   (percent)"]
    for name, kinds in table.items():
        for quantity, a in kinds.items():
            lines.append(
                f"{name:28s} {quantity:6s} {a.rows:4d} {a.mean_abs_pct:6.1f} {a.median_abs_pct:6.1f}"
                f" {a.p90_abs_pct:6.1f} {a.worst_abs_pct:6.1f} {a.bias_pct:+6.1f} {_optional(a.spearman, '6.3f'):>6s}"
                f" {a.interval_coverage_pct:6.0f}% {_optional(a.regret_pct, '6.1f'):>6s} {a.refused_pct:6.0f}%"
            )
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The table that the README shows."""
    lines = [
        "| runs never fitted | quantity | rows | mean error | median | worst | rank correlation | in 90 % interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table = broken_down(rows, lambda row: not row.calibration)
    for name in [*(n for n in table if n != "overall"), "overall"]:
        for quantity, a in table.get(name, {}).items():
            label = f"**{name}**" if name == "overall" else name
            lines.append(
                f"| {label} | {quantity} | {a.rows} | {a.mean_abs_pct:.1f} % | {a.median_abs_pct:.1f} % | "
                f"{a.worst_abs_pct:.1f} % | {_optional(a.spearman, '.3f')} | {a.interval_coverage_pct:.0f} % |"
            )
    return "\n".join(lines)


def around_table(path: str) -> tuple[str, str]:
    """A file's text before and after its markers; InputError where it has none."""
    before, begun, rest = files.read_text(path).partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise InputError(f"{path}: found no {BEGIN} ... {END}, expected both markers")
    return before, after


def update(path: str, table: str) -> None:
    """Replace what stands between the markers of a file."""
    before, after = around_table(path)
    files.write_text(path, f"{before}{BEGIN}\n{table}\n{END}{after}")


def plot(rows: Sequence[Row], path: str) -> None:
    """Scatter plot of predicted over measured, one panel a quantity."""
    quantities = [q for q in ("time", "memory") if any(row.quantity == q for row in rows)]
    figure = new_figure(6 * len(quantities), 5.5, "--plot")
    panels = figure.subplots(1, len(quantities), squeeze=False)
    for panel, quantity in zip(panels[0], quantities, strict=True):
        scale, unit = (1.0, "s") if quantity == "time" else (1e-9, "GB")
        kept = [row for row in rows if row.quantity == quantity]
        for name in sorted({row.dataset for row in kept}):
            chosen = [row for row in kept if row.dataset == name]
            panel.scatter(
                [row.measured * scale for row in chosen], [row.predicted * scale for row in chosen], s=14, label=name
            )
        ends = [min(row.measured for row in kept) * scale, max(row.measured for row in kept) * scale]
        panel.plot(ends, ends, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel=f"measured {quantity} [{unit}]", ylabel=f"predicted [{unit}]")
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(cli.run(main))
