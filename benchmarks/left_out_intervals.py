"""How often 90 % intervals hold runs of a collection that they were not calibrated on.

    python benchmarks/left_out_intervals.py [FILES]

The table of `polygon validate` says how often the catalogue's intervals hold the runs that the catalogue's errors are
quantiles of. Here those of every collection are made from all others (`polygon.cost.uncertainty.quantiles`), by group
and runtime as they are, by group alone, and with no less than its group's error for a runtime of which one collection
tells, whose runs have one bias in common. Beside the part of the runs inside: how likely as few, or as many, of so
many runs are where each is inside with 90 %. A collection of seven can have 86 % or 100 %, and 48 % of those have all.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.accuracy.rows import predict
from polygon.commands.validate import read_runs
from polygon.cost.estimate import known_of
from polygon.cost.tables import CostTables
from polygon.cost.uncertainty import COVERAGE, Known, beyond_host, errors, log_half_width, quantiles
from polygon.domain.errors import InputError

MEASURED = Path(__file__).resolve().parents[1] / "instances/measured"
UNLIKELY = 0.05


class Held(NamedTuple):
    """A measured run."""

    collection: str
    known: Known
    error: float
    """ln(measured / predicted)."""


def runs_of(paths: Sequence[str]) -> list[Held]:
    """All runs with a measured step that no coefficient was fitted to."""
    found = []
    for run in read_runs(paths)[0]:
        if not run.step_s or run.calibration:
            continue
        try:
            made = predict(run)[0]
        except InputError:
            continue
        known = known_of(CostTables(run.problem), run.plan, made.terms, made.step_s)
        found.append(Held(run.dataset, known, math.log(run.step_s / made.step_s)))
    return found


def table_of(runs: Sequence[Held], *, by_runtime: bool, least: bool = False) -> dict[str, Any]:
    """The errors of groups that these runs give; `least`: of a runtime in one collection no less than its group's."""
    scores = defaultdict(list)
    for run in runs:
        name = f"{run.known.group}/{run.known.runtime}" if by_runtime else run.known.group
        scores[name].append(beyond_host(abs(run.error), run.known.host))
    table, collections = quantiles(scores), defaultdict(set)
    for run in runs:
        collections[f"{run.known.group}/{run.known.runtime}"].add(run.collection)
    for name, entry in table["groups"].items() if least else ():
        if len(collections[name]) == 1:
            entry["error"] = max(entry["error"], table["groups"][name.split("/")[0]]["error"])
    return table


def show(name: str, runs: Sequence[Held], table_without: Callable[[str], Mapping[str, Any]], *, each: bool) -> None:
    """Print how often intervals by the table for every collection hold its runs."""
    inside, widths = defaultdict(list), []
    for collection in sorted({run.collection for run in runs}):
        table = table_without(collection)
        for run in runs:
            if run.collection == collection:
                widths.append(log_half_width(run.known, table))
                inside[collection].append(abs(run.error) <= widths[-1])
    parts, seldom, often = [], 0, 0
    for collection, found in inside.items():
        held, count = sum(found), len(found)
        few, many = binom.cdf(held, count, COVERAGE), binom.sf(held - 1, count, COVERAGE)
        parts.append(held / count)
        seldom, often = seldom + (few < UNLIKELY), often + (many < UNLIKELY)
        if each:
            chances = f"as few {few:.2f}, as many {many:.2f}"
            print(f"{collection:28} {count:4} runs, {100 * parts[-1]:3.0f} % inside, {chances}")
    of_all, mean = sum(map(sum, inside.values())) / len(runs), statistics.mean(parts)
    off = statistics.mean(abs(part - COVERAGE) for part in parts)
    print(
        f"{name}: {100 * of_all:.1f} % of {len(runs)} runs inside; {100 * mean:.1f} % in the mean of {len(parts)} "
        f"collections, {100 * off:.1f} points from {100 * COVERAGE:.0f}; {seldom} too seldom, {often} too often "
        f"(p < {UNLIKELY}); half width of the logarithm {statistics.median(widths):.3f} in the median"
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", nargs="*", help="runs, as `polygon validate` reads them; by default all shipped")
    args = parser.parse_args()
    shipped = [*sorted(MEASURED.glob("*_runs.json")), MEASURED / "sailor_validation.json"]
    runs = runs_of(args.files or list(map(str, shipped)))
    show("the catalogue's", runs, lambda _: errors(), each=False)
    for name, how in (
        ("of the others, by group", {"by_runtime": False}),
        ("of the others, one collection no less than its group", {"by_runtime": True, "least": True}),
        ("of the others, by group and runtime", {"by_runtime": True}),
    ):

        def without(collection: str, how: Mapping[str, bool] = how) -> dict[str, Any]:
            return table_of([run for run in runs if run.collection != collection], **how)

        show(name, runs, without, each=how == {"by_runtime": True})
    everyone = table_of(runs, by_runtime=True, least=True)
    show("the catalogue's, one collection no less than its group", runs, lambda _: everyone, each=False)


if __name__ == "__main__":
    main()
