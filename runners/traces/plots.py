"""Pictures of an analysis. Colours keep apart in print and for colour-blind readers (Okabe and Ito)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from polygon.messages.figures import new_figure
from runners.traces.breakdown import Bubble, Kind, Temporal
from runners.traces.intervals import common, merged, without
from runners.traces.kineto import RankTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"compute": "#0072B2", "exposed": "#D55E00", "hidden": "#E69F00", "copies": "#009E73", "idle": "#D9D9D9"}
LABELS = {
    "compute": "computing", "exposed": "communicating, not hidden", "hidden": "communicating, hidden",
    "copies": "copying", "idle": "idle",
}  # fmt: skip
MOST_LANES = 64
"""Ranks drawn in the timeline; of more, evenly chosen ones."""


def _figure(width: float, height: float) -> Figure:
    return new_figure(width, height, "-o")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def temporal_png(rows: Sequence[Temporal]) -> bytes:
    """A bar a rank: shares of its time."""
    figure = _figure(9, 1.3 + 0.34 * len(rows))
    axes = figure.add_subplot()
    names = [f"rank {row.rank}" for row in rows]
    left = np.zeros(len(rows))
    for part in ("compute", "exposed", "copies", "idle"):
        shares = np.array([100 * getattr(row, f"{part}_s") / row.window_s for row in rows])
        if not shares.any():
            continue
        bars = axes.barh(names, shares, left=left, color=COLOURS[part], label=LABELS[part])
        dark = part in ("compute", "exposed", "copies")
        texts = [f"{share:.0f}" if share >= 4 else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", color="white" if dark else "black", fontsize=9)
        left += shares
    axes.set(xlabel="share of the recorded time [%]", xlim=(0, 100))
    axes.invert_yaxis()
    _plain(axes)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return _png(figure)


def kinds_png(rows: Sequence[Kind]) -> bytes:
    """A bar a kind of communication: hidden and exposed time."""
    figure = _figure(9, 1.3 + 0.4 * len(rows))
    axes = figure.add_subplot()
    names = [row.kind for row in rows]
    exposed = np.array([row.exposed_s for row in rows]) * 1e3
    hidden = np.array([row.seconds for row in rows]) * 1e3 - exposed
    axes.barh(names, exposed, color=COLOURS["exposed"], label=LABELS["exposed"])
    axes.barh(names, hidden, left=exposed, color=COLOURS["hidden"], label=LABELS["hidden"])
    axes.set(xlabel="time per rank [ms]")
    axes.invert_yaxis()
    _plain(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return _png(figure)


def bubbles_png(rows: Sequence[Bubble]) -> bytes:
    """Two bars a worker: measured and predicted bubble."""
    figure = _figure(9, 1.3 + 0.5 * len(rows))
    axes = figure.add_subplot()
    places = np.arange(len(rows))
    predicted = [100 * row.predicted if row.predicted is not None else 0.0 for row in rows]
    measured = axes.barh(places - 0.2, [100 * row.measured for row in rows], 0.38, color="#0072B2", label="measured")
    expected = axes.barh(places + 0.2, predicted, 0.38, color="#56B4E9", label="predicted")
    for bars in (measured, expected):
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
    axes.set_yticks(places, [f"stage {row.stage}, worker {row.worker}" for row in rows])
    axes.set(xlabel="bubble: part of the pipeline's time without forward or backward [%]")
    axes.margins(x=0.1)
    axes.invert_yaxis()
    _plain(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return _png(figure)


def timeline_png(traces: Sequence[RankTrace]) -> bytes:
    """One step of every rank: a lane of computing above one of communication."""
    places = np.unique(np.linspace(0, len(traces) - 1, min(len(traces), MOST_LANES)).astype(int))
    shown = [traces[place] for place in places]
    steps = shown[0].steps
    start, end = steps[len(steps) // 2] if len(steps) else shown[0].window
    window = np.array([[start, end]])
    figure = _figure(9, 1.3 + 0.42 * len(shown))
    axes = figure.add_subplot()
    for lane, trace in enumerate(shown):
        computing, sending = common(trace.compute, window), common(trace.communication, window)
        exposed = without(sending, computing)
        for part, spans, low in (
            ("compute", computing, lane - 0.4), ("hidden", common(sending, computing), lane), ("exposed", exposed, lane)
        ):  # fmt: skip
            spans = merged(spans)
            bars = [((from_s - start) * 1e3, (to_s - from_s) * 1e3) for from_s, to_s in spans.tolist()]
            axes.broken_barh(bars, (low, 0.4), color=COLOURS[part], label=LABELS[part] if not lane else None)
    axes.set_yticks(range(len(shown)), [f"rank {trace.rank}" for trace in shown])
    axes.set(xlabel="time in one step [ms]", xlim=(0, (end - start) * 1e3))
    axes.invert_yaxis()
    _plain(axes)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return _png(figure)
