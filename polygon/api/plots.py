"""Pictures of clusters, plans and fronts: matplotlib figures to be shown, changed and saved by who asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polygon.cost.estimate import Estimate, WorkerEstimate
from polygon.domain.cluster import Cluster
from polygon.domain.plan import Plan
from polygon.export.chrome_trace import Interval
from polygon.messages.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"F": "#4c78a8", "B": "#f58518", "send": "#b279a2", "reduce": "#54a24b", "update": "#e45756"}
"""Of forward, backward and the other kinds of intervals."""


def region_places(cluster: Cluster) -> tuple[NDArray[np.float64], bool]:
    """Where to draw every region.

    Parameters
    ----------
    cluster : Cluster

    Returns
    -------
    places : ndarray, shape (regions, 2)
        Longitude and latitude [degrees] where every region has them, else as far apart as the latencies say: classical
        multidimensional scaling of their mean both ways [ms].
    on_earth : bool
        Whether they are degrees.

    References
    ----------
    Torgerson, Psychometrika 17, 1952.
    """
    known = [
        (region.longitude, region.latitude)
        for region in cluster.regions
        if region.longitude is not None and region.latitude is not None
    ]
    if len(known) == len(cluster.regions):
        return np.array(known, dtype=np.float64), True
    apart_ms = 1e3 * (cluster.latency_s + cluster.latency_s.T) / 2
    np.fill_diagonal(apart_ms, 0.0)
    centred = np.eye(len(apart_ms)) - 1 / len(apart_ms)
    values, vectors = np.linalg.eigh(-0.5 * centred @ apart_ms**2 @ centred)
    places = np.zeros((len(apart_ms), 2))
    wide = min(2, len(values))
    places[:, :wide] = vectors[:, ::-1][:, :wide] * np.sqrt(np.maximum(values[::-1][:wide], 0.0))
    return places, False


def plot_map(cluster: Cluster, priced: Estimate | None = None) -> Figure:
    """Regions as discs by their devices; of a plan, what it uses in colour and its traffic as lines by their bytes."""
    figure = new_figure(7.2, 4.4, "plot_map")
    axes = figure.add_subplot()
    places, on_earth = region_places(cluster)
    number = {region.name: i for i, region in enumerate(cluster.regions)}
    devices = np.zeros(len(number), dtype=np.int64)
    for pool in cluster.pools:
        devices[pool.region] += pool.nodes * pool.devices_per_node
    used = {worker.region for worker in priced.workers} if priced is not None else set(number)
    traffic = {} if priced is None else _traffic(priced)
    most = max(traffic.values(), default=1.0)
    for (a, b), n_bytes in traffic.items():
        ends = places[[number[a], number[b]]]
        axes.plot(ends[:, 0], ends[:, 1], color="#b279a2", alpha=0.6, linewidth=0.5 + 4 * n_bytes / most, zorder=1)
    colours = ["#4c78a8" if region.name in used else "#bbbbbb" for region in cluster.regions]
    axes.scatter(places[:, 0], places[:, 1], s=60 + 12 * devices, c=colours, zorder=2, edgecolors="white")
    for region, (x, y), count in zip(cluster.regions, places, devices, strict=True):
        axes.annotate(f"{region.name}: {count}", (x, y), xytext=(6, 6), textcoords="offset points", fontsize=8)
    axes.set(
        title=f"{cluster.name}: devices in {len(number)} regions",
        xlabel="longitude [degrees]" if on_earth else "as far apart as the latency says [ms]",
        ylabel="latitude [degrees]" if on_earth else "",
    )
    axes.margins(0.2)
    axes.grid(alpha=0.3)
    return figure


def _traffic(priced: Estimate) -> dict[tuple[str, str], float]:
    """Bytes of a step between two regions, both ways together."""
    total: dict[tuple[str, str], float] = {}
    for link in priced.links:
        pair = (min(link.source, link.target), max(link.source, link.target))
        total[pair] = total.get(pair, 0.0) + link.activation_bytes + link.gradient_bytes
    return total


def plot_stages(plan: Plan, priced: Estimate, title: str) -> Figure:
    """For all equal workers of a stage: the part of the step that they compute, and of their memory that is full."""
    groups: dict[tuple[int, str, str], list[WorkerEstimate]] = {}
    for worker in priced.workers:
        devices = len(plan.stages[worker.stage].workers[worker.worker].devices)
        device = worker.device if devices == 1 else f"{devices} {worker.device}"
        groups.setdefault((worker.stage, worker.region, device), []).append(worker)
    labels = [f"stage {s}: {len(found)} x {device}, {region}" for (s, region, device), found in groups.items()]
    figure = new_figure(8.4, 1.2 + 0.32 * len(groups), "plot_stages")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(groups))
    colours = [f"C{s % 10}" for s, _, _ in groups]
    left.barh(rows, [max(w.busy_s for w in found) / priced.step_s for found in groups.values()], color=colours)
    right.barh(rows, [max(w.peak_bytes / w.limit_bytes for w in found) for found in groups.values()], color=colours)
    left.set(yticks=rows, yticklabels=labels, xlim=(0, 1), xlabel="part of the step that it computes")
    right.set(xlim=(0, 1), xlabel="part of its memory")
    left.invert_yaxis()
    figure.suptitle(title)
    return figure


def plot_timeline(intervals: Sequence[Interval], title: str) -> Figure:
    """Rows of workers: forward, backward, reduction and update; messages as thin lines below."""
    rows = {place: i for i, place in enumerate(sorted({(i.stage, i.worker) for i in intervals}))}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for interval in intervals:
        kind = interval.name[0] if interval.kind == "compute" else interval.kind
        span = (interval.start_s, interval.end_s - interval.start_s)
        bars.setdefault((rows[interval.stage, interval.worker], kind), []).append(span)
    figure = new_figure(9.0, 1.2 + 0.24 * len(rows), "plot_timeline")
    axes = figure.add_subplot()
    for (row, kind), spans in bars.items():
        low, height = (row + 0.3, 0.12) if kind == "send" else (row - 0.4, 0.7)
        axes.broken_barh(spans, (low, height), facecolors=COLOURS.get(kind, "#888888"))
    for kind, name in zip(COLOURS, ("forward", "backward", "message", "reduction", "update"), strict=True):
        axes.barh(0, 0, color=COLOURS[kind], label=name)
    axes.set(
        title=title,
        xlabel="time in the step [s]",
        yticks=list(rows.values()),
        yticklabels=[f"stage {stage}, worker {worker}" for stage, worker in rows],
        xlim=(0, None),
    )
    axes.invert_yaxis()
    axes.margins(y=0.02)
    figure.legend(ncols=5, fontsize=8, loc="outside lower center")  # inside it would hide the last workers
    return figure


def plot_front(usd: Sequence[float], step_s: Sequence[float], title: str, energy_j: Sequence[float] = ()) -> Figure:
    """Time against money as steps; with energy [J] as the colour of points where it is given."""
    figure = new_figure(6.4, 4.4, "plot")
    axes = figure.add_subplot()
    if len(energy_j):
        shown = axes.scatter(usd, step_s, c=[value / 3.6e6 for value in energy_j])
        figure.colorbar(shown, label="energy per step, at most [kWh]")
    else:
        order = np.argsort(usd)
        axes.step(np.asarray(usd)[order], np.asarray(step_s)[order], where="post", marker="o")
    axes.set(xlabel="money per step [USD]", ylabel="step time [s]", title=title)
    axes.grid(alpha=0.3)
    return figure
