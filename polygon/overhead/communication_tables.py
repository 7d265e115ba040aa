"""Results as text, plain data (JSON) and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polygon.cost.collectives import bus_bandwidth_factor
from polygon.cost.memory import MemoryBreakdown
from polygon.overhead.collective_algorithm import AlgorithmCost
from polygon.overhead.collective_table import Cell
from polygon.overhead.communication import TrafficAnalysis, assumed_depth
from polygon.overhead.dimensions import AxisTraffic
from polygon.overhead.quantities import bytes_text, seconds_text

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "transient", "context")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need; the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with a header; numbers in full, nothing for None."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def formula_lines(cost: AlgorithmCost) -> list[str]:
    """The formula, the same with its numbers put in, and where it comes from."""
    names = sorted(cost.numbers, key=len, reverse=True)
    pattern = r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")(?!\w)"
    filled = re.sub(pattern, lambda m: f"{cost.numbers[m[1]]:.12g}", cost.formula) if names else cost.formula
    used = [name for name in cost.numbers if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", cost.formula)]
    values = ", ".join(f"{name} = {cost.numbers[name]:.12g}" for name in used)
    lines = [f"T = {cost.formula}", f"  = {filled}", f"  = {cost.time_s:.9g} s"]
    return lines + ([f"  with {values}", f"  source: {cost.source}"] if values else [])


def where(cell: Cell) -> str:
    """The wiring in words."""
    t = cell.topology
    if t.kind == "hierarchical":
        return f"{t.nodes} nodes of {t.per_node} (hierarchical)"
    return f"a {t.kind} of {t.nx} x {t.ny}" if t.kind in ("mesh", "torus") else f"a {t.kind} of {t.ranks}"


def cell_text(cell: Cell, *, verbose: bool) -> str:
    """A cell of the table for people."""
    chosen = cell.chosen
    rows, ranked = [], sorted(cell.algorithms, key=lambda entry: entry.time_s)
    for cost in ranked:
        mark = "* " if cost is chosen else "  "
        numbers = (cost.sent_bytes, cost.transit_bytes, cost.link_bytes)
        rows.append([mark + cost.algorithm, seconds_text(cost.time_s), f"{cost.steps:,}", *map(bytes_text, numbers)])
    bound = cell.bound
    lines = [
        f"{cell.op} of {bytes_text(cell.n_bytes)} on {where(cell)}",
        table(["  algorithm", "time", "steps", "sent per rank", "passed on", "on all links"], rows),
        f"  lower bound {seconds_text(bound.time_s)} (ports {seconds_text(bound.bandwidth_s)}, messages "
        f"{seconds_text(bound.latency_s)}, cut {seconds_text(bound.bisection_s)})",
    ]
    if chosen.time_s > 0:
        rate = cell.n_bytes / chosen.time_s
        bus = rate * bus_bandwidth_factor(cell.op, cell.topology.ranks)
        lines.append(f"  algorithm bandwidth {rate / 1e9:.4g} GB/s, bus bandwidth {bus / 1e9:.4g} GB/s")
    if verbose:
        for cost in ranked:
            lines += ["", f"  {cost.algorithm}", *("    " + line for line in formula_lines(cost))]
    return "\n".join(lines)


def grid_text(cells: Sequence[Cell]) -> str:
    """Operations by topologies: the chosen algorithm's time, and how far that is above the lower bound."""
    kinds = list(dict.fromkeys(cell.topology.kind for cell in cells))
    first = cells[0]
    lines = [f"{bytes_text(first.n_bytes)}, {first.topology.ranks} ranks: time (of the lower bound), algorithm"]
    rows = []
    for op in dict.fromkeys(cell.op for cell in cells):
        row = {cell.topology.kind: cell for cell in cells if cell.op == op}
        times = []
        for cell in row.values():
            bound = f" ({cell.chosen.time_s / cell.bound.time_s:.2f}x)" if cell.bound.time_s else ""
            times.append(seconds_text(cell.chosen.time_s) + bound)
        rows += [[op, *times], ["", *(cell.chosen.algorithm for cell in row.values())]]
    return "\n".join([*lines, table(["", *kinds], rows)])


def cell_rows(cell: Cell) -> list[dict[str, Any]]:
    """A row for every algorithm of a cell."""
    t = cell.topology
    return [
        {
            "op": cell.op,
            "topology": t.kind,
            "ranks": t.ranks,
            "gpus_per_node": t.per_node if t.kind == "hierarchical" else None,
            "nx": t.nx if t.kind in ("mesh", "torus") else None,
            "ny": t.ny if t.kind in ("mesh", "torus") else None,
            "size_bytes": cell.n_bytes,
            "algorithm": cost.algorithm,
            "chosen": cost is cell.chosen,
            "time_s": cost.time_s,
            "lower_bound_s": cell.bound.time_s,
            "steps": cost.steps,
            "sent_bytes": cost.sent_bytes,
            "transit_bytes": cost.transit_bytes,
            "link_bytes": cost.link_bytes,
            "formula": cost.formula,
            "source": cost.source,
        }
        for cost in cell.algorithms
    ]


def cell_data(cell: Cell) -> dict[str, Any]:
    """A cell as plain data."""
    first, *_ = rows = cell_rows(cell)
    shared = ("op", "topology", "ranks", "gpus_per_node", "nx", "ny", "size_bytes", "lower_bound_s")
    numbers = [dict(cost.numbers) for cost in cell.algorithms]
    return {
        **{key: first[key] for key in shared},
        "lower_bound_terms_s": cell.bound._asdict(),
        "chosen": cell.chosen.algorithm,
        "time_s": cell.chosen.time_s,
        "algorithms": [
            {**{key: value for key, value in row.items() if key not in shared}, "numbers": values}
            for row, values in zip(rows, numbers, strict=True)
        ],
    }


def traffic_rows(analysis: TrafficAnalysis) -> list[dict[str, Any]]:
    """A row for every kind of message."""
    total = sum(t.time_s for t in analysis.traffic)

    def row(t: AxisTraffic) -> dict[str, Any]:
        return {
            "dimension": t.dimension,
            "what": t.what,
            "op": t.cell.op,
            "ranks": t.cell.topology.ranks,
            "algorithm": t.cell.chosen.algorithm,
            "message_bytes": t.cell.n_bytes,
            "count": t.count,
            "time_each_s": t.cell.chosen.time_s,
            "time_s": t.time_s,
            "sent_bytes": t.sent_bytes,
            "share": t.time_s / total if total else 0.0,
        }

    return [row(t) for t in analysis.traffic]


def memory_row(part: MemoryBreakdown) -> dict[str, float]:
    """Bytes by owner, and their sum."""
    return {f"{name}_bytes": getattr(part, name) for name in MEMORY_PARTS} | {"total_bytes": part.total_bytes}


def analysis_data(analysis: TrafficAnalysis) -> dict[str, Any]:
    """An analysis as plain data."""
    c = analysis.configuration
    d = c.degrees
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "recompute", "sequence_parallel", "interleave", "cp_mode")
    scheduled, assumed = analysis.scheduled_s, assumed_depth(c)
    return {
        "devices": d.devices,
        "topology": c.whole.kind,
        **{name: getattr(d, name) for name in names},
        "parameters": c.shape.parameters,
        "micro_batches": c.shape.micro_batches,
        "traffic": traffic_rows(analysis),
        "communication_upper_bound_s": analysis.upper_bound_s,
        "communication_scheduled_s": None if scheduled is None else sum(scheduled.values()),
        "scheduled_by_dimension_s": scheduled,
        "compute_s": analysis.compute_s,
        "memory_by_zero": {str(zero): memory_row(part) for zero, part in analysis.memory.items()},
        "device": c.device.name if c.device else None,
        "device_memory_bytes": c.device.memory_bytes if c.device else None,
        "usable_bytes": analysis.usable_bytes,
        "fits": analysis.fits,
        "assumed_layers": None if assumed is None else assumed.blocks,
    }


def verdict(analysis: TrafficAnalysis) -> str:
    """Whether the configuration fits its device, and by how much."""
    device, usable = analysis.configuration.device, analysis.usable_bytes
    if device is None or usable is None:
        return "no device named (--gpu): whether it fits is not said"
    need = analysis.chosen_memory
    room = f"{bytes_text(usable)} usable of {bytes_text(device.memory_bytes)} on {device.name}"
    if analysis.fits:
        return f"fits: {bytes_text(need.total_bytes)} of {room}"
    better = [zero for zero, part in analysis.memory.items() if part.total_bytes <= usable]
    hint = f"; ZeRO-{min(better)} would fit" if better else f"; largest part: {need.owner}"
    return f"does not fit: {bytes_text(need.total_bytes)}, {room}{hint}"


def analysis_text(analysis: TrafficAnalysis, *, verbose: bool) -> str:
    """An analysis for people."""
    c = analysis.configuration
    d = c.degrees
    name = c.model.name if c.model else f"{c.shape.parameters:.4g} parameters"
    spread = f"dp {d.dp} x tp {d.tp} x pp {d.pp} x cp {d.cp}" + (f", ep {d.ep}" if d.ep > 1 else "")
    steps = f"{c.shape.micro_batches} micro-batch(es) of {c.shape.micro_batch_size}"
    lines = [f"{name} on {d.devices} GPUs ({c.whole.kind}): {spread}, ZeRO-{d.zero}, recompute {d.recompute}, {steps}"]
    rows = [
        [
            f"  {row['dimension']}  {row['what']}",
            f"{row['op']} ({row['algorithm']})",
            str(row["ranks"]),
            bytes_text(row["message_bytes"]),
            f"{row['count']:g}",
            seconds_text(row["time_each_s"]),
            seconds_text(row["time_s"]),
            bytes_text(row["sent_bytes"]),
            f"{100 * row['share']:.1f} %",
        ]
        for row in traffic_rows(analysis)
    ]
    if rows:
        header = ["  communication", "operation", "ranks", "message", "count", "each", "per step", "sent", "share"]
        lines.append(table(header, rows))
        if c.shape.blocks is None and (d.tp > 1 or d.cp > 1):
            lines.append("  (TP and CP for ONE layer: --num-layers or --model gives the step)")
    else:
        lines.append("  no parallel dimension above 1: no communication")
    lines.append(f"  communication per step, upper bound (nothing hidden): {seconds_text(analysis.upper_bound_s)}")
    if analysis.scheduled_s is not None and analysis.compute_s is not None:
        parts = ", ".join(f"{dim} {seconds_text(value)}" for dim, value in analysis.scheduled_s.items())
        total = seconds_text(sum(analysis.scheduled_s.values()))
        lines.append(
            f"  as the schedule overlaps it ({c.schedule}, overlap {c.overlap}): {total}" + f" ({parts})" * bool(parts)
        )
        lines.append(f"  compute per step on the busiest GPU, TP included: {seconds_text(analysis.compute_s)}")
    memory = []
    for zero, part in analysis.memory.items():
        mark = "* " if zero == d.zero else "  "
        values = [getattr(part, name) for name in MEMORY_PARTS] + [part.total_bytes]
        memory.append([f"{mark}ZeRO-{zero}", *map(bytes_text, values)])
    lines += ["", table(["  memory per GPU", *MEMORY_PARTS, "total"], memory), f"  {verdict(analysis)}"]
    assumed = assumed_depth(c)
    if assumed is not None:
        depth = f"{assumed.blocks} layers assumed, as {assumed.name} has (--num-layers)"
        lines.append(f"  {depth}; no activations: sizes are not known")
    if verbose:
        for t in analysis.traffic:
            lines += ["", f"  {t.dimension} {t.what}: {t.cell.op} of {bytes_text(t.cell.n_bytes)} on {where(t.cell)}"]
            lines += ["    " + line for line in formula_lines(t.cell.chosen)]
            lines.append(f"    {t.count:g} times per step = {seconds_text(t.time_s)}")
    return "\n".join(lines)
