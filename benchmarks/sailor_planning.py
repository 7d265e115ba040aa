"""Sailor's planning problems: every rival's plan and polygon's through the same two estimates.

    python benchmarks/sailor_planning.py [FILE...]               # default: instances/sailor/planner_bench.json
    python benchmarks/sailor_planning.py --variations 24         # other counts, batches, zones, types and models
    python benchmarks/sailor_planning.py FILE -o DIR             # also writes polygon's plans in Sailor's `plan` form

`score` is the step time under Sailor's simulator (`benchmarks.rivals.sailor_score`), `mem` whether its memory check
passes; `estimate` is polygon's, from the same profiles and links. Three plans are polygon's own:

- polygon: the best score;
- balanced: the least product of score and estimate, of the best plans met by the same search;
- free: the best estimate, with unequal shares, schedule and recomputation, which Sailor's form cannot say; it is
  scored without them, and only polygon's memory model was asked.

Search seconds are one core's, without import and compilation.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.sailor import Setup, plan_form, setups_from_document, type_names
from benchmarks.rivals.sailor_score import memory_fits, score_s
from benchmarks.rivals.sailor_search import FoundForm, ScoreDecoder, find_form
from benchmarks.rivals.sailor_variations import rival_forms, variations
from polygon.commands import cli
from polygon.cost.step_times import step_times
from polygon.domain.errors import InputError
from polygon.formats import files
from polygon.formats.serialization import format_json
from polygon.planning.decode import Decoder, most_stages
from polygon.planning.initial_solutions import kind_sequences
from polygon.planning.search_engine import Effort, Found, find_plan

INSTANCES = Path(__file__).parents[1] / "instances"
FREE = Effort(fluid_evaluations=1_500, exact_evaluations=40, patience=600)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan."""

    setup: str
    planner: str
    score_s: float
    """inf where Sailor's measurements lack something that the plan uses."""
    fits: bool
    estimate_s: float
    """inf where polygon cannot express the plan, or its memory model objects."""
    search_s: float | None
    search_cpu_s: float | None
    note: str
    plan: Mapping[str, Any]


def row_of(decoder: ScoreDecoder, planner: str, form: Mapping[str, Any], **known: Any) -> Row:
    """A plan in Sailor's form through both estimates."""
    note = ""
    try:
        score = score_s(form, decoder.measured, decoder.global_batch)
        fits = not memory_fits(form, decoder.measured)
    except InputError as error:
        score, fits, note = math.inf, False, str(error)
    try:
        estimate = decoder.estimate_s(form)
    except InputError as error:
        estimate, note = math.inf, note or str(error)
    values = {"search_s": None, "search_cpu_s": None, "estimate_s": estimate} | known
    return Row(
        setup=decoder.problem.cluster.name, planner=planner, score_s=score, fits=fits, note=note, plan=form, **values
    )


def rows_of(setup: Setup, decoder: ScoreDecoder, seed: int, talk: cli.Talk) -> list[Row]:
    """The rivals' plans that name their workers, and polygon's three; says why where polygon has none."""
    rows = []
    for planner, result in setup.results.items():
        form = result.get("plan") or {}
        if form.get("stages") or form.get("independent_pipelines"):
            cpu_s = result.get("cpu_time_of_search_and_scoring_s")
            rows.append(row_of(decoder, planner, form, search_s=result.get("search_time_s"), search_cpu_s=cpu_s))
    found = find_form(decoder, np.random.default_rng(seed))
    if isinstance(found, FoundForm):
        spent = {"search_s": found.seconds, "search_cpu_s": found.cpu_s}
        rows.append(row_of(decoder, "polygon", found.best.form, **spent))
        rows.append(row_of(decoder, "balanced", found.balanced.form, **spent))
    else:
        talk.say(f"{setup.name}: {found.reason}")
    cpu_began = time.process_time()
    free = find_free(decoder, seed)
    cpu_s = time.process_time() - cpu_began
    if free.plan is not None:
        form = plan_form(free.plan, decoder.problem.cluster, type_names(setup), decoder.measured.layers)
        estimate = step_times(free.plan, decoder.tables).step_s
        rows.append(row_of(decoder, "free", form, estimate_s=estimate, search_s=free.seconds, search_cpu_s=cpu_s))
    return rows


def find_free(decoder: ScoreDecoder, seed: int) -> Found:
    """Polygon's own search under its own estimate, from the best short sequences of worker kinds."""
    began = time.perf_counter()
    own = Decoder(decoder.problem, tables=decoder.tables)
    rows = most_stages(decoder.problem)
    starts = [x for x in kind_sequences(own, rows, decoder.sizes) if x.workers[3:].sum() == 0]
    order = np.argsort([own.value(x) for x in starts], kind="stable")[:6]
    spent_s = time.perf_counter() - began
    found = find_plan(
        decoder.problem,
        np.random.default_rng(seed),
        effort=FREE,
        tables=decoder.tables,
        known=[starts[i] for i in order],
    )
    return replace(found, seconds=found.seconds + spent_s)


def summary(setup: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Best rival and polygon's ratio to it under each estimate (below 1: polygon is faster)."""
    rivals = [row for row in rows if row.planner not in ("polygon", "balanced", "free")]
    own = {row.planner: row for row in rows if row not in rivals}
    fitting = [row for row in rivals if row.fits and math.isfinite(row.score_s)]
    by_score = min(fitting, key=lambda row: row.score_s, default=None)
    by_estimate = min(rivals, key=lambda row: row.estimate_s, default=None)
    table: dict[str, Any] = {"setup": setup}
    if by_score is not None:
        table["best_rival_by_score"] = by_score.planner
        scored = [own[name] for name in ("polygon", "balanced") if name in own]
        table |= {f"{row.planner}_score_ratio": row.score_s / by_score.score_s for row in scored}
    if by_estimate is not None and math.isfinite(by_estimate.estimate_s):
        table["best_rival_by_estimate"] = by_estimate.planner
        table |= {f"{name}_estimate_ratio": row.estimate_s / by_estimate.estimate_s for name, row in own.items()}
    if "polygon" in own:
        table |= {"search_s": own["polygon"].search_s, "search_cpu_s": own["polygon"].search_cpu_s}
    return table


def shape(form: Mapping[str, Any]) -> str:
    """A plan's micro-batch size and stages: layers on workers of each type, degree and zone."""
    if not form.get("stages"):
        return f"micro-batches of {form['micro_batch_size_sequences']}; pipelines with stages of their own"
    stages = []
    for stage in form["stages"]:
        kinds: dict[tuple[str, str, int], int] = {}
        for worker in stage["workers"]:
            kind = (worker["zone"], worker["gpu_type"], int(worker["tp"]))
            kinds[kind] = kinds.get(kind, 0) + 1
        zones = {zone for zone, _, _ in kinds}
        parts = [f"{n}x{gpu}:{tp}{f'@{zone}' if len(zones) > 1 else ''}" for (zone, gpu, tp), n in kinds.items()]
        stages.append(f"{len(stage['layers'])} on {'+'.join(parts)}")
    return f"micro-batches of {form['micro_batch_size_sequences']}; {' | '.join(stages)}"


def text_of(rows: Sequence[Row], of_setup: Mapping[str, Any]) -> str:
    """The table of a setup."""

    def number(value: float | None, form: str) -> str:
        return format(value, form) if value is not None and math.isfinite(value) else "-"

    lines = [
        f"{of_setup['setup']}",
        f"  {'planner':10s} {'score':>9s} {'mem':>4s} {'estimate':>9s} {'search':>8s} {'CPU':>8s}  plan",
    ]
    for row in sorted(rows, key=lambda row: row.score_s):
        lines.append(
            f"  {row.planner:10s} {number(row.score_s, '8.4f'):>8s}s {'ok' if row.fits else 'over':>4s} "
            f"{number(row.estimate_s, '8.4f'):>8s}s {number(row.search_s, '7.2f'):>7s}s "
            f"{number(row.search_cpu_s, '7.2f'):>7s}s  {shape(row.plan)[:110]}"
        )
    for name in ("score", "estimate"):
        if f"best_rival_by_{name}" in of_setup:
            keys = {own: f"{own}_{name}_ratio" for own in ("polygon", "balanced", "free")}
            ratios = [f"{own} {of_setup[key]:.4f}" for own, key in keys.items() if key in of_setup]
            lines.append(f"  {name} over the best rival's ({of_setup[f'best_rival_by_{name}']}): {', '.join(ratios)}")
    return "\n".join(lines)


def varied(
    setups: Sequence[Setup], profiles: Mapping[str, Any], network: Mapping[str, Any], count: int, seed: int
) -> dict[str, Any]:
    """Polygon against the best that rivals' plans become when their setups change (`sailor_variations`)."""
    rng = np.random.default_rng(seed)
    lines, table = [], []
    for setup in variations(setups, profiles, count, rng):
        decoder = ScoreDecoder(setup, profiles, network)
        rivals: dict[str, float] = {}
        for name, form in rival_forms(setup, setups, decoder.measured):
            try:
                if not memory_fits(form, decoder.measured):
                    rivals[name] = min(rivals.get(name, math.inf), score_s(form, decoder.measured, setup.global_batch))
            except InputError:  # a link or a degree that was not measured
                continue
        planner = min(rivals, key=lambda name: rivals[name], default="none")
        entry: dict[str, Any] = {"setup": setup.name, "best_rival": planner, "rival_s": rivals.get(planner, math.inf)}
        found = find_form(decoder, np.random.default_rng(seed))
        if isinstance(found, FoundForm):
            fits = not memory_fits(found.best.form, decoder.measured)
            entry |= {"polygon_s": found.best.score_s if fits else math.inf, "search_cpu_s": found.cpu_s}
        else:
            entry |= {"polygon_s": math.inf, "search_cpu_s": math.nan}
        table.append(entry)
        ratio = entry["polygon_s"] / entry["rival_s"]
        lines.append(
            f"{setup.name:64s} {entry['polygon_s']:9.4f}s {entry['rival_s']:9.4f}s {planner:10s} {ratio:7.4f} "
            f"{entry['search_cpu_s']:6.2f}s"
        )
    head = f"{'setup':64s} {'polygon':>10s} {'rival':>10s} {'':10s} {'ratio':>7s} {'CPU':>7s}   (inf: no plan fits)"
    ratios = np.array([entry["polygon_s"] / entry["rival_s"] for entry in table if math.isfinite(entry["rival_s"])])
    last = f"{len(ratios)} with a rival's plan"
    if len(ratios):
        last += f": worst ratio {ratios.max():.4f}, median {np.median(ratios):.4f}"
    return {"rows": table, "text": "\n".join([head, *lines, last])}


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = cli.CommandParser(
        prog="sailor_planning", description=(__doc__ or "").splitlines()[0], parents=[cli.output_options()]
    )
    parser.add_argument("files", nargs="*", metavar="FILE", default=[str(INSTANCES / "sailor" / "planner_bench.json")])
    parser.add_argument("--profile", default=str(INSTANCES / "measured" / "sailor_profiles.json"), metavar="FILE")
    parser.add_argument("--network", default=str(INSTANCES / "measured" / "sailor_network.json"), metavar="FILE")
    parser.add_argument("--variations", type=cli.whole(1), metavar="N", help="vary the setups of the files N times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", metavar="DIR", help="folder for polygon's plans, SETUP.json each")
    args = parser.parse_args(argv)
    talk = cli.Talk(quiet=args.quiet)
    profiles, network = files.read_json(args.profile), files.read_json(args.network)
    setups = [setup for path in args.files for setup in setups_from_document(files.read_json(path))]
    if args.variations:
        result = varied(setups, profiles, network, args.variations, args.seed)
        cli.emit(result["rows"], result["text"], as_json=args.json)
        return cli.EXIT_OK
    data: list[dict[str, Any]] = []
    texts: list[str] = []
    plans: dict[str, str] = {}
    for setup in setups:
        rows = rows_of(setup, ScoreDecoder(setup, profiles, network), args.seed, talk)
        of_setup = summary(setup.name, rows)
        data.append({**of_setup, "rows": [asdict(row) for row in rows]})
        texts.append(text_of(rows, of_setup))
        plans |= {f"{setup.name}.json": format_json(row.plan) for row in rows if row.planner == "polygon"}
    if args.out:
        files.write_folder(args.out, plans)
        talk.say(f"plans in {args.out}: {', '.join(plans)}")
    cli.emit(data, "\n\n".join(texts), as_json=args.json)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
