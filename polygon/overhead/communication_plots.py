"""Pictures of run-all: time against message size by topology, memory by ZeRO stage; drawn into figures handed in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polygon.cost.memory import MemoryBreakdown
from polygon.overhead.collective_table import collective_cell
from polygon.overhead.topologies import OPERATIONS, Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def time_by_size(figure: Figure, path: Path, topology: Topology) -> None:
    """Time of every operation against the message size on one topology, bounds dashed."""
    sizes = np.logspace(3, 10, 36)
    axes = figure.add_subplot()
    for number, op in enumerate(OPERATIONS):
        cells = [collective_cell(op, topology, float(size)) for size in sizes]
        axes.loglog(sizes, [cell.chosen.time_s for cell in cells], label=op, color=f"C{number}")
        axes.loglog(sizes, [cell.bound.time_s for cell in cells], "--", color=f"C{number}", linewidth=0.8)
    axes.set(xlabel="message M [bytes]", ylabel="time [s]", title=f"{topology.kind}, {topology.ranks} ranks")
    axes.grid(alpha=0.3)
    axes.legend(title="dashed: lower bound", fontsize="small")
    figure.savefig(path, dpi=110)


def memory_by_zero(figure: Figure, path: Path, memory: Mapping[int, MemoryBreakdown], title: str) -> None:
    """Bytes per GPU under ZeRO 0-3, stacked by owner."""
    axes = figure.add_subplot()
    names = [f"ZeRO-{zero}" for zero in memory]
    base = np.zeros(len(names))
    for part in ("weights", "gradients", "optimizer", "activations", "transient", "context"):
        height = np.array([getattr(breakdown, part) for breakdown in memory.values()]) / 1e9
        axes.bar(names, height, bottom=base, label=part)
        base += height
    axes.set(ylabel="memory per GPU [GB]", title=title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
