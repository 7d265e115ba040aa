"""What a sweep's record says: CSV, a table of gaps and times, convergence plots."""

from __future__ import annotations

import csv
import io
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from polygon.domain.errors import InputError
from polygon.messages.figures import new_figure

Row = dict[str, Any]
COLUMNS = (
    "suite", "instance", "method", "seed", "evaluations", "time_limit_s", "value", "bound", "best_known", "status",
    "stopped_by", "used_evaluations", "seconds", "cpu_s", "commit",
)  # fmt: skip


def csv_text(rows: list[Row]) -> str:
    """One line per run, without the histories."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def summary(rows: list[Row], tolerance: float) -> list[Row]:
    """One entry per instance and method.

    The gap is to the best value known or found in this sweep; a run reached it when it came within `tolerance`. Times
    and evaluations to the target are medians over the runs that reached it.
    """
    bounds: dict[str, float] = {}
    for row in rows:
        if row["bound"] is not None and (row["status"] in ("bound", "optimal")):
            bounds[row["instance"]] = max(bounds.get(row["instance"], -math.inf), row["bound"])
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] != "bound":
            groups.setdefault((row["instance"], row["method"]), []).append(row)
    best: dict[str, float] = {}
    for row in rows:
        values = [row[key] for key in ("value", "best_known") if row[key] is not None]
        best[row["instance"]] = min([best.get(row["instance"], math.inf), *values])
    return [
        _entry(instance, method, runs, best[instance], bounds.get(instance), tolerance)
        for (instance, method), runs in sorted(groups.items())
    ]


def _entry(instance: str, method: str, runs: list[Row], best: float, bound: float | None, tolerance: float) -> Row:
    values = [math.inf if run["value"] is None else run["value"] for run in runs]
    target = best + tolerance * abs(best)
    hits = [step for run in runs if (step := next((h for h in run["history"] if h[2] <= target), None))]
    middle = statistics.median(values)
    return {
        "instance": instance,
        "method": method,
        "runs": len(runs),
        "best_known": _finite(best),
        "bound": bound,
        "proved": bound is not None and best <= bound * (1 + 1e-6),
        "best": _finite(min(values)),
        "median": _finite(middle),
        "worst": _finite(max(values)),
        "median_gap": _finite((middle - best) / abs(best)) if best else None,
        "reached": len(hits),
        "median_s_to_target": statistics.median(h[1] for h in hits) if hits else None,
        "max_s_to_target": max((h[1] for h in hits), default=None),
        "median_evaluations_to_target": statistics.median(h[0] for h in hits) if hits else None,
    }


def standings(rows: list[Row], entries: list[Row]) -> list[Row]:
    """One entry per method over all instances that it ran, in the order in which they were asked for.

    Gaps are of the median over seeds to the best known; a run without a solution has none and is counted beside. The
    spread is the median over instances of (worst - best) / best over seeds. `p` is of Wilcoxon's signed-rank test
    (two-sided, paired by instance, logarithms of medians; an instance without a solution is worse than any) against the
    first method, on the instances that both ran; None where fewer than five of them differ.
    """
    order = list(dict.fromkeys(row["method"] for row in rows if row["status"] != "bound"))
    of_method = {method: [e for e in entries if e["method"] == method] for method in order}
    first = {e["instance"]: _log(e["median"]) for e in of_method[order[0]]} if order else {}
    found = []
    for method, mine in of_method.items():
        gaps = [e["median_gap"] for e in mine if e["median_gap"] is not None]
        spreads = [(e["worst"] - e["best"]) / e["best"] for e in mine if e["worst"] is not None and e["runs"] > 1]
        pairs = [(_log(e["median"]), first[e["instance"]]) for e in mine if e["instance"] in first]
        runs = [row for row in rows if row["method"] == method]
        found.append(
            {
                "method": method,
                "instances": len(mine),
                "no_solution": sum(e["median"] is None for e in mine),
                "median_gap": statistics.median(gaps) if gaps else None,
                "mean_gap": statistics.fmean(gaps) if gaps else None,
                "worst_gap": max(gaps, default=None),
                "spread": statistics.median(spreads) if spreads else None,
                "reached": sum(e["reached"] > 0 for e in mine),
                "wins": sum(a < b - 1e-9 for a, b in pairs),
                "losses": sum(a > b + 1e-9 for a, b in pairs),
                "p": _signed_rank([a - b for a, b in pairs]),
                "cpu_s": sum(row.get("cpu_s") or 0.0 for row in runs) / max(1, len(runs)),
            }
        )
    return found


LEAST_GAP = 1e-4
"""Smaller gaps are drawn as this, on a logarithmic axis."""
NO_SOLUTION = 1e3
"""Logarithm of a value that is worse than any."""


def _log(value: float | None) -> float:
    return NO_SOLUTION if value is None else math.log(value)


def _signed_rank(differences: list[float]) -> float | None:
    """Two-sided p of Wilcoxon's test; None for fewer than five that are not zero."""
    from scipy.stats import wilcoxon

    apart = [difference for difference in differences if abs(difference) > 1e-9]
    return float(wilcoxon(apart).pvalue) if len(apart) >= 5 else None


def standings_table(entries: list[Row]) -> str:
    """The standings as a table for people."""

    def part(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    head = (
        "method", "instances", "no solution", "median gap", "mean gap", "worst gap", "spread", "best known reached",
        "better / worse than the first", "p", "CPU-s a run",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for e in entries:
        cells = (
            e["method"], str(e["instances"]), str(e["no_solution"]), part(e["median_gap"]), part(e["mean_gap"]),
            part(e["worst_gap"]), part(e["spread"]), str(e["reached"]), f"{e['wins']} / {e['losses']}",
            "" if e["p"] is None else f"{e['p']:.2g}", f"{e['cpu_s']:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def markdown(entries: list[Row], about: str, unit: str) -> str:
    """The summary as a table for people."""
    head = (
        "instance", "best known", "lower bound", "method", "best", "median", "worst", "median gap", "reached",
        "median s to it", "slowest s to it", "median evaluations",
    )  # fmt: skip
    lines = [f"{about}" + (f" [{unit}]" if unit else ""), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for e in entries:
        bound = "" if e["bound"] is None else "= best (proved)" if e["proved"] else _number(e["bound"])
        cells = (
            e["instance"], _number(e["best_known"]), bound, e["method"], _number(e["best"]), _number(e["median"]),
            _number(e["worst"]), "" if e["median_gap"] is None else f"{100 * e['median_gap']:.2f} %",
            f"{e['reached']}/{e['runs']}", _number(e["median_s_to_target"], 3), _number(e["max_s_to_target"], 3),
            _number(e["median_evaluations_to_target"], 0),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int = 6) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(rows: list[Row], path: Path) -> bool:
    """Median best-so-far against evaluations, a panel per instance; False where matplotlib is missing."""
    runs = [row for row in rows if row["history"]]
    if not runs:
        return True
    instances = list(dict.fromkeys(row["instance"] for row in runs))
    columns = min(3, len(instances))
    shape = (math.ceil(len(instances) / columns), columns)
    try:
        figure = new_figure(5 * shape[1], 3.5 * shape[0], "convergence.png")
    except InputError:
        return False
    axes = figure.subplots(*shape, squeeze=False)
    for axis in axes.flat[len(instances) :]:
        axis.set_visible(False)
    for axis, instance in zip(axes.flat, instances, strict=False):
        for method in dict.fromkeys(row["method"] for row in runs if row["instance"] == instance):
            chosen = [row for row in runs if (row["instance"], row["method"]) == (instance, method)]
            at, values = _median_curve(chosen)
            axis.step(at, values, where="post", label=method)
        axis.set(title=instance, xscale="log", xlabel="evaluations", ylabel="best so far (median)")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def plot_profile(rows: list[Row], entries: list[Row], path: Path) -> bool:
    """Part of a method's runs within a gap of the best known (Dolan and Moré, Math. Program. 91, 2002).

    False where matplotlib is missing.
    """
    best = {e["instance"]: e["best_known"] for e in entries}
    runs = [row for row in rows if row["status"] != "bound" and best[row["instance"]]]
    if not runs:
        return True
    try:
        figure = new_figure(7, 4.5, "profile.png")
    except InputError:
        return False
    axis = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in runs):
        mine = [row for row in runs if row["method"] == method]
        solved = [row for row in mine if row["value"] is not None]
        ratios = np.sort([row["value"] / best[row["instance"]] for row in solved])
        reached = np.arange(1, len(ratios) + 1) / len(mine)
        axis.step(np.maximum(ratios - 1, LEAST_GAP), reached, where="post", label=method)
    axis.set(xscale="log", xlabel="gap to the best known", ylabel="part of the runs", ylim=(0, 1.02))
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _median_curve(runs: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Median over runs of the best value after so many evaluations, where every run has one."""
    first = max(run["history"][0][0] for run in runs)
    last = max(max(run["used_evaluations"] for run in runs), first)
    at = np.unique(np.round(np.geomspace(first, last, 200)).astype(np.int64))
    curves = []
    for run in runs:
        history = np.array(run["history"])
        curves.append(history[np.searchsorted(history[:, 0], at, side="right") - 1, 2])
    return at, np.median(curves, axis=0)
