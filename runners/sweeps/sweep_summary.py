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
    "stopped_by", "used_evaluations", "seconds",
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
    for (instance, _), runs in groups.items():
        values = [run["value"] for run in runs if run["value"] is not None]
        known = [run["best_known"] for run in runs if run["best_known"] is not None]
        best[instance] = min([best.get(instance, math.inf), *values, *known])
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
