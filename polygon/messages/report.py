"""What people read of groups, plans and estimates."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polygon.bounds.gap import Bounds
from polygon.cost.convergence import assumptions, packings_inside
from polygon.cost.estimate import Estimate
from polygon.cost.money import TrainingRun, unpowered
from polygon.domain.groups import Groups
from polygon.domain.message import TRAFFIC_UNITS, Message
from polygon.domain.plan import Plan, Problem, Stage
from polygon.domain.runnable import is_run
from polygon.formats.convert import runtime_data

if TYPE_CHECKING:
    from polygon.planning.assumptions import Assumption
    from polygon.planning.left_out import LeftOut


ROUNDED = 1e-9
"""Part of a step below which a term is what rounding has left of nothing."""


FREE = 1e-5
"""Dollars for a million tokens below which a plan costs nothing: the step's time tells equal ones apart."""


CUT_SHORT = "; no time for stages and regions"
"""Of a bound that a time limit cut short."""


SOURCES = {"spec": "data sheets", "calibrated": "data sheets and published runs"}
"""What times of layers are from, in words; others are measured on the devices, and called what the files are."""


def three(value: float) -> str:
    """Three digits, zeros at the end among them, as the page has them: 3.00, 13.0, 120, 7,433."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".removesuffix(".")


def written_out(value: float, digits: int = 4) -> str:
    """So many digits; a number that has more before the point is not written as a power of ten: 0.0118, 57,704."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:,.{digits}g}"


def seconds(value: float) -> str:
    """Three digits and a unit."""
    if value >= 1 or value == 0:
        return f"{three(value)} s" if value else "0 s"
    return f"{three(value * 1e3)} ms" if value >= 1e-3 else f"{three(value * 1e6)} µs"


def valued(objective: str, value: float) -> Message | str:
    """What a search has found so far, with its unit; `objective` as the command line names it."""
    from polygon.planning.objectives import OVER_LIMIT

    if value >= OVER_LIMIT:
        return Message("value.over") if math.isfinite(value) else "—"
    if objective == "money":
        return Message("value.money", usd=written_out(value))
    if objective == "energy":
        return Message("value.energy", kwh=written_out(value / 3.6e6))
    if objective == "tokens-per-usd":
        return Message("value.tokens", tokens=written_out(1e6 / value) if value > FREE else "∞")
    return seconds(value)


def size(n_bytes: float) -> str:
    """Bytes with a decimal unit."""
    for unit, scale in TRAFFIC_UNITS[:-1]:
        if n_bytes >= scale:
            return f"{three(n_bytes / scale)} {unit}"
    return f"{n_bytes:.0f} B"


def layer_span(problem: Problem, first: int, last: int) -> Message:
    """Layers [first, last): embedding, blocks, head."""
    blocks = problem.model.blocks
    parts = [Message("layers.embedding")] if first == 0 else []
    low, high = max(first, 1), min(last - 1, blocks)
    if low <= high:
        parts.append(
            Message("layers.blocks", first=low, last=high) if high > low else Message("layers.block", block=low)
        )
    if last == problem.model.layers:
        parts.append(Message("layers.head"))
    return Message("layers.span", parts=tuple(parts))


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as they must be; numbers stand as they are given."""
    widths = [max(columns(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: two for a sign of East Asia, none for what is put over one before it."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def describe_groups(groups: Groups) -> str:
    """Which devices form which stage."""
    cluster = groups.problem.cluster
    rows = []
    for s, row in enumerate(groups.allocation):
        members = [
            f"{count} {cluster.pools[p].device.name} ({cluster.regions[cluster.pools[p].region].name})"
            for p, count in enumerate(row.tolist())
            if count
        ]
        rows.append([str(s), str(int(row.sum())), ", ".join(members)])
    idle = cluster.devices - int(groups.allocation.sum())
    text = table(["stage", "devices", "from"], rows)
    text += f"\n{idle} of {cluster.devices} devices are left out" if idle else ""
    return f"{text}\n{describe_runtime(runtime_data(groups.problem.runtime))}"


def describe_left_out(rows: Sequence[LeftOut]) -> str:
    """Idle devices and why they are idle, pool by pool."""
    cells = [[f"{row.devices} x {row.device}", row.region, str(row.reason)] for row in rows]
    return table(["left out", "region", "because"], cells)


def describe_plan(problem: Problem, plan: Plan, estimate: Estimate, bounds: Bounds, limited_by: Message) -> str:
    """Stages, speed, memory, traffic, bounds and what limits the plan."""
    head = _headline(problem, plan, estimate, bounds, limited_by)
    parts = [table(STAGE_COLUMNS, stage_rows(problem, plan, estimate)), "", head]
    if plan.local_steps > 1:
        parts.append(f"local steps   regions meet every {plan.local_steps} steps; times and bytes are means per step")
    for name, lines in (("packing", packings_inside(problem, plan)), ("loss", assumptions(problem, plan))):
        parts += [f"{name if i == 0 else '':<14}{line}" for i, line in enumerate(lines)]
    if estimate.links:
        rows = [
            [
                f"{use.source} -> {use.target}",
                size(use.activation_bytes),
                size(use.gradient_bytes),
                f"{use.busy_fraction:.0%}",
                _packing(problem, plan, use.source, use.target),
            ]
            for use in sorted(estimate.links, key=lambda use: -(use.activation_bytes + use.gradient_bytes))[:12]
        ]
        parts += [
            "",
            table(["between regions, per step", "activations", "gradients", "busiest sender", "packing"], rows),
        ]
        if len(estimate.links) > 12:
            parts.append(f"... and {len(estimate.links) - 12} more")
    return "\n".join(parts)


def duration(value_s: float) -> str:
    """Long times in days or hours."""
    if value_s >= 2 * 86400:
        return f"{value_s / 86400:.3g} days"
    return f"{value_s / 3600:.3g} h" if value_s >= 2 * 3600 else seconds(value_s)


def describe_run(run: TrainingRun) -> str:
    """Time, money and energy of a whole run."""
    return (
        f"whole run     {run.tokens:.4g} tokens: {run.steps:,} steps, {duration(run.seconds)}, "
        f"{written_out(run.usd)} USD, at most {written_out(run.energy_j / 3.6e6)} kWh"
    )


STAGE_COLUMNS = ["stage", "layers", "region", "workers", "share", "busy", "memory", ""]


def stage_rows(problem: Problem, plan: Plan, estimate: Estimate) -> list[list[str]]:
    """Cells of `STAGE_COLUMNS`, a row for all equal workers of a stage; names of a stage stand in its first row."""
    rows = []
    for s, stage in enumerate(plan.stages):
        workers = [w for w in estimate.workers if w.stage == s]
        kind = {w.worker: (w.region, w.device, w.tp, stage.workers[w.worker].cp) for w in workers}
        for i, (of, count) in enumerate(sorted(Counter(kind.values()).items())):
            region, device, tp, cp = of
            mine = [w for w in workers if kind[w.worker] == of]
            shares = sorted({w.micro_batches for w in mine})
            fullest = max(mine, key=lambda w: w.peak_bytes / w.limit_bytes)
            extras = [f"tp {tp} x cp {cp}"] if cp > 1 else []
            if i == 0:
                extras += [f"experts over {apart}"] if (apart := problem.experts_apart(stage)) > 1 else []
                extras += [words] if (words := _recompute_words(stage)) else []
                extras += [f"ZeRO-{stage.zero}"] if stage.zero else []
                extras += [f"{len(stage.trees)} trees for sums"] if stage.trees else []
            rows.append(
                [
                    str(s) if i == 0 else "",
                    str(layer_span(problem, stage.first_layer, stage.last_layer)) if i == 0 else "",
                    region,
                    f"{count} x {device}" if tp * cp == 1 else f"{count} x {tp * cp} {device}",
                    f"{shares[0]}" if len(shares) == 1 else f"{shares[0]}-{shares[-1]}",
                    f"{max(w.busy_s for w in mine) / estimate.step_s:.0%}",
                    f"{fullest.peak_bytes / 2**30:.1f} of {fullest.limit_bytes / 2**30:.1f} GiB",
                    ", ".join(extras),
                ]
            )
    return rows


def _recompute_words(stage: Stage) -> str:
    if stage.recompute == "none":
        return ""
    some = "" if stage.recompute_blocks is None else f" of {stage.recompute_blocks}"
    return f"recompute {stage.recompute}{some}"


def describe_assumptions(assumed: Sequence[Assumption], *, cut_short: bool = False) -> str:
    """Links that nobody gave and that matter, as lines behind a report; empty without any, where not `cut_short`
    by a time limit."""
    lines: list[str] = []
    for assumption in assumed:
        link = assumption.link
        moves = f"{_moved(assumption.slower)} if it were 4 times slower, {_moved(-assumption.faster)} if faster"
        if assumption.anew and assumption.anew > assumption.faster:
            again = _moved(-assumption.anew)
            moves += f", at least {again} with another plan" if again != _moved(-assumption.faster) else ""
        lines.append(
            f"{'assumed' if not lines else '':13s} {assumption.name}: {link.latency_s * 1e3:g} ms, "
            f"{link.bytes_per_s * 8 / 1e9:g} Gbit/s, as nobody said; {moves}"
        )
    if lines and not cut_short and all(assumption.anew is None for assumption in assumed):
        lines.append(f"{'':13s} (with this plan: what another would make of faster links was not tried)")
    if cut_short and lines:
        lines.append(f"{'':13s} (there was no time for more links, or for other plans)")
    elif cut_short:
        lines.append(f"{'assumed':13s} links that nobody gave were not looked at for lack of time")
    return "\n\n" + "\n".join(lines) if lines else ""


def _moved(part: float) -> str:
    """A change of the step in per cent; what rounds to none has no sign."""
    text = f"{part:+.0%}"
    return "0%" if text in ("+0%", "-0%") else text


def describe_runtime(runtime: str | Mapping[str, Any]) -> str:
    """The program that the numbers are for, as a file says it: with the switches that differ from the catalogue's."""
    said = {"name": runtime} if isinstance(runtime, str) else runtime
    changed = [f", {name} {value}" for name, value in said.items() if name != "name"]
    return f"runtime       {said['name']}{''.join(changed)}"


def _not_run(problem: Problem, plan: Plan) -> list[str]:
    """Where the program does not run a plan as it is, a line that says so."""
    if is_run(problem, plan):
        return []
    return [f"              which does not run this plan as it is (it runs plans of the kind {problem.runtime.plans})"]


def _headline(problem: Problem, plan: Plan, estimate: Estimate, bounds: Bounds, limited_by: Message) -> str:
    used, all_devices = plan.world_size, problem.cluster.devices
    least_s = ROUNDED * estimate.step_s
    terms = ", ".join(f"{name} {seconds(value)}" for name, value in estimate.terms.items() if value > least_s)
    bound = bounds.step
    relaxed = ", ".join(f"{name} {seconds(value)}" for name, value in bound.parts.items())
    lines = [
        describe_runtime(runtime_data(problem.runtime)),
        *_not_run(problem, plan),
        f"step          {seconds(estimate.step_s)} (90 %: {seconds(estimate.low_s)} to {seconds(estimate.high_s)})",
        f"              {terms}",
        f"compute from  {_sources(estimate.sources['compute'].split('+'))}",
        f"speed         {estimate.tokens_per_s:,.0f} tokens/s, MFU {estimate.mfu:.1%}",
        f"bound         no plan is faster than {seconds(bound.seconds)} ({relaxed}{CUT_SHORT * bound.cut_short}); "
        f"gap {bounds.gap(estimate):.0%}",
        *_least(estimate, bounds),
        f"limited by    {limited_by}",
        f"batch         {plan.micro_batches} micro-batches of {plan.micro_batch_size}",
        f"devices       {used} of {all_devices}" + (f" ({all_devices - used} left out)" if used < all_devices else ""),
        *_interleaved(plan),
        f"across        {size(estimate.cross_region_bytes)} between regions per step",
        f"cost          {written_out(estimate.cost_usd, 3)} USD and at most "
        f"{written_out(estimate.energy_j / 3.6e6, 3)} kWh per step{_free(problem, plan)}",
    ]
    return "\n".join(lines)


def _least(estimate: Estimate, bounds: Bounds) -> list[str]:
    """What no plan can beat in money and energy, and how far this one is above; nothing is above what is free."""
    said = [
        f"{does} less than {written_out(least, 3)} {unit} (gap {bounds.gap(estimate, objective):.0%})"
        for does, least, unit, objective in (
            ("costs", bounds.usd, "USD", "money"), ("draws", bounds.energy_j / 3.6e6, "kWh", "energy")
        ) if least > 0
    ]  # fmt: skip
    return [f"{'':13s} none {', or '.join(said)}"] if said else []


def _interleaved(plan: Plan) -> list[str]:
    """That several stages are on the same devices, where they are."""
    apart = len(plan.stages) // plan.chunks
    return [f"interleaved   {plan.chunks} stages on the same devices, every {apart} apart"] if plan.chunks > 1 else []


def _sources(names: list[str]) -> str:
    """What times of layers are from; where some devices have what others have too, that is said once."""
    both = {"spec", "calibrated"} <= set(names)
    said = ["data sheets and, of some devices, published runs"] if both else []
    return ", ".join(said + [SOURCES.get(name, name) for name in names if not (both and name in SOURCES)])


def counted_as_nothing(problem: Problem, plan: Plan) -> tuple[list[str], list[str]]:
    """Device types that the plan uses and that count as free, because they are or because nobody said their price, and
    those that count as drawing nothing, because their maker does not say what they draw."""
    pools = [problem.cluster.pools[worker.pool] for worker in plan.workers]
    free = {pool.device.name for pool in pools if not pool.price_usd_per_hour}
    return sorted(free), unpowered(problem, plan)


def describe_nothing(free: Sequence[str], idle: Sequence[str]) -> str:
    """The two lists of `counted_as_nothing` in words; empty where both are."""
    of = ((free, "0 USD an hour"), (idle, "0 W"))
    return "; ".join(f"{', '.join(names)} at {what}" for names, what in of if names)


def _free(problem: Problem, plan: Plan) -> str:
    said = describe_nothing(*counted_as_nothing(problem, plan))
    return f"; {said}" if said else ""


def _packing(problem: Problem, plan: Plan, source: str, target: str) -> str:
    cluster = problem.cluster
    use = plan.link_use(cluster.region_index(source), cluster.region_index(target))
    kinds = {use.activations, use.activation_gradients, use.weight_gradients}
    text = (
        use.activations if len(kinds) == 1 else f"{use.activations}/{use.activation_gradients}/{use.weight_gradients}"
    )
    return f"{text}, {use.streams} streams" if use.streams > 1 else text
