"""What the page shows of a plan, computed: stages, traffic, formulas with their numbers, advice, alternatives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import lru_cache
from itertools import permutations
from typing import Any, TypeVar

import numpy as np

from polygon.bounds.gap import bound_data
from polygon.cost.convergence import assumptions, packings_inside
from polygon.cost.estimate import Estimate
from polygon.cost.money import unpowered, unpriced
from polygon.cost.step_times import StepTimes
from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.domain.runnable import is_run
from polygon.export.launch_hosts import used_nodes
from polygon.formats.default_links import Place, km_between, place_of
from polygon.messages.report import ROUNDED, layer_span, size
from polygon.web.sliders import NO_CHANGE, Changes, PricedChange, price, timed

Shown = TypeVar("Shown")

SHOWN = tuple(field.name for field in fields(Estimate) if field.name not in ("workers", "links"))


UNBOUND: dict[str, object] = {
    "lower_bound_s": None, "lower_bounds_s": {}, "bound_by": "", "gap": None, "least_usd": None, "least_energy_j": None,
}  # fmt: skip
"""What stands for the bound where it is not asked for."""


def view(priced: PricedChange, *, bound: bool = True) -> dict[str, Any]:
    """Everything that changes when a toggle changes; without the `bound`, which takes ten times as long as all else of
    a new plan, nothing stands for it."""
    problem, plan, times, result = priced.problem, priced.plan, priced.times, priced.estimate
    moved = traffic(priced)
    return {
        "model": problem.model.name,
        "runtime": {"name": problem.runtime.name, "version": problem.runtime.version},
        "run": is_run(problem, plan),
        "batch": {"global_batch": problem.batch.global_batch, "seq_len": problem.batch.seq_len},
        "estimate": {name: getattr(result, name) for name in SHOWN}
        | (bound_data(result, priced.bounds) if bound else UNBOUND),
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "local_steps": plan.local_steps,
        "chunks": plan.chunks,
        "assumptions": assumptions(problem, plan),
        "packings_inside": packings_inside(problem, plan),
        "unpriced": _of_workers(priced, unpriced),
        "unpowered": _of_workers(priced, unpowered),
        "devices": {"used": plan.world_size, "all": problem.cluster.devices},
        "hosts": _of_workers(priced, _hosts),
        "regions": _of_workers(priced, _regions),
        "stages": _stages(priced),
        "links": _links(priced),
        "traffic": moved,
        "formulas": formulas(priced, moved, bound=bound),
        "over_memory": priced.over_memory_bytes,
        "broken": priced.broken,
        "bubble": float(result.terms["pipeline"] / result.step_s),
        "routes": _routes(plan, times),
    }


def _of_workers(priced: PricedChange, work: Callable[[Problem, Plan], Shown]) -> Shown:
    """What follows from a plan's workers alone, the same however it is changed."""
    known = priced.times.place.derived
    if work not in known:
        known[work] = work(priced.problem, priced.plan)
    found: Shown = known[work]
    return found


def _hosts(problem: Problem, plan: Plan) -> list[dict[str, Any]]:
    """Nodes that the plan uses, pool by pool in the order in which their hosts are asked for."""
    counts = Counter(pool for pool, _ in used_nodes(plan, problem.cluster))
    pools, regions = problem.cluster.pools, problem.cluster.regions
    return [
        {"region": regions[pools[p].region].name, "device": pools[p].device.name, "nodes": count}
        for p, count in sorted(counts.items())
    ]


def _regions(problem: Problem, plan: Plan) -> list[dict[str, Any]]:
    cluster = problem.cluster
    used = [0] * len(cluster.regions)
    for pool, count in plan.devices_of_pools.items():
        used[cluster.pools[pool].region] += count
    rows = []
    for r, region in enumerate(cluster.regions):
        devices: dict[str, int] = {}
        for group in region.node_groups:
            devices[group.device] = devices.get(group.device, 0) + group.devices
        rows.append(
            {"name": region.name, "latitude": region.latitude, "longitude": region.longitude, "devices": devices,
             "used": used[r], "stages": sorted({s for s, stage in enumerate(plan.stages) for w in stage.workers
                                                if cluster.pools[w.pool].region == r})}
        )  # fmt: skip
    return rows


def _alike(problem: Problem, plan: Plan) -> list[list[tuple[str, str, int, list[int]]]]:
    """Of every stage region, device and tensor-parallel degree of workers that have the same, and their numbers."""
    pools, regions, rows, first = problem.cluster.pools, problem.cluster.regions, [], 0
    for stage in plan.stages:
        alike: dict[tuple[str, str, int], list[int]] = {}
        for w, worker in enumerate(stage.workers, start=first):
            pool = pools[worker.pool]
            alike.setdefault((regions[pool.region].name, pool.device.name, worker.tp), []).append(w)
        rows.append([(*kind, same) for kind, same in sorted(alike.items())])
        first += stage.width
    return rows


def _stages(priced: PricedChange) -> list[dict[str, Any]]:
    problem, plan, result = priced.problem, priced.plan, priced.estimate
    rows = []
    # Of the devices, as memory is: where they hold several stages, the work of all of these.
    holder = priced.times.schedule.holder
    busy_s = np.bincount(holder, [worker.busy_s for worker in result.workers])[holder].tolist()
    for stage, kinds in zip(plan.stages, _of_workers(priced, _alike), strict=True):
        groups = []
        for region, device, tp, same in kinds:
            workers = [result.workers[w] for w in same]
            shares = [w.micro_batches for w in workers]
            full = max(workers, key=lambda w: w.peak_bytes / w.limit_bytes)
            groups.append(
                {"region": region, "device": device, "tp": tp, "workers": len(same), "share_low": min(shares),
                 "share_high": max(shares), "busy": max(busy_s[w] for w in same) / result.step_s,
                 "peak_bytes": full.peak_bytes, "limit_bytes": full.limit_bytes,
                 "memory_owner": Message(f"memory.{full.memory_owner}")}
            )  # fmt: skip
        layers = layer_span(problem, stage.first_layer, stage.last_layer)
        rows.append(
            {"layers": layers, "first_layer": stage.first_layer, "last_layer": stage.last_layer, "width": stage.width,
             "zero": stage.zero, "recompute": stage.recompute, "trees": len(stage.trees), "workers": groups}
        )  # fmt: skip
    return rows


def _links(priced: PricedChange) -> list[dict[str, Any]]:
    cluster = priced.problem.cluster
    used = {(use.source, use.target): use for use in priced.estimate.links}
    latency_ms, gbps = (cluster.latency_s * 1e3).tolist(), (cluster.bytes_per_s * 8 / 1e9).tolist()
    rows = []
    for (a, b), pair, unused in _pairs(priced):
        if gbps[a][b] > 0:
            row = unused.copy()  # and no new one: of ten regions there are ninety
            row["latency_ms"], row["bandwidth_gbps"] = latency_ms[a][b], gbps[a][b]
            if pair in used:
                here = used[pair]
                row["activation_bytes"], row["gradient_bytes"] = here.activation_bytes, here.gradient_bytes
                row["busy"] = here.busy_fraction
            rows.append(row)
    return rows


Pairs = list[tuple[tuple[int, int], tuple[str, str], dict[str, Any]]]


def _pairs(priced: PricedChange) -> Pairs:
    """Of every two regions that the plan uses their numbers, their names, and what is shown of their link where nothing
    goes over it: of two hundred regions there would be forty thousand."""
    cluster, plan = priced.problem.cluster, priced.plan
    links, known = priced.times.place.derived.get("pairs", (None, []))
    if links is plan.links:
        return list(known)
    km = _distances(tuple(place_of(region) for region in cluster.regions))
    names, found = [region.name for region in cluster.regions], Pairs()
    for a, b in permutations(sorted({cluster.pools[p].region for p in plan.devices_of_pools}), 2):
        use, pair = plan.link_use(a, b), (names[a], names[b])
        shown = {"source": names[a], "target": names[b], "distance_km": km[a][b], "activations": use.activations,
                 "activation_gradients": use.activation_gradients,
                 "weight_gradients": use.weight_gradients, "streams": use.streams, "latency_ms": 0.0,
                 "bandwidth_gbps": 0.0, "activation_bytes": 0.0, "gradient_bytes": 0.0, "busy": 0.0}  # fmt: skip
        found.append(((a, b), pair, shown))
    priced.times.place.derived["pairs"] = plan.links, found
    return found


@lru_cache(maxsize=100)
def _distances(places: tuple[Place | None, ...]) -> list[list[float | None]]:
    """Of every two regions [km]; None where one has no place."""
    return [[None if a is None or b is None else km_between(a, b) for b in places] for a in places]


def _tensor_traffic(priced: PricedChange) -> float:
    """Bytes that tensor-parallel groups exchange in a step: four all-reduces of 2 (t-1)/t of an activation a block."""
    problem, plan = priced.problem, priced.plan
    values = boundary_values(problem.model, problem.batch, plan.micro_batch_size) * problem.batch.element_bytes
    total = 0.0
    for s, stage in enumerate(plan.stages):
        blocks = min(stage.last_layer, problem.model.blocks + 1) - max(stage.first_layer, 1)
        for worker, share in zip(stage.workers, plan.shares(s), strict=True):
            total += 4 * 2 * (worker.tp - 1) * values * blocks * float(share)
    return total


def traffic(priced: PricedChange) -> dict[str, Any]:
    """Bytes and seconds by dimension, how much of the communication is hidden, and the ratio that calls for advice."""
    problem, plan, times, result = priced.problem, priced.plan, priced.times, priced.estimate
    messages = times.messages
    passed = messages.link >= 0
    transfer_s = float(np.bincount(messages.link[passed], weights=messages.hold_s[passed]).max(initial=0.0))
    reduction_s = max(priced.reductions_s, default=0.0) + times.tied_s + times.norm_s + weights_s(times)
    groups, each, every = priced.tied
    values = 2 * groups * (each - 1) * problem.model.tied_values / every
    for stage, n in zip(plan.stages, priced.gradients, strict=True):
        values += 2 * (stage.width - 1) * n / plan.local_steps
    gradient_bytes = values * problem.batch.gradient_bytes
    exposed_s = result.terms["transfer"] + result.terms["reduction"]
    # What is waited for may be more: peers, and sums that the runtime spreads over its computing.
    total_s = max(transfer_s + reduction_s, exposed_s)
    compute_s = result.terms["compute"]
    ratio = total_s / compute_s if compute_s else math.inf
    hidden = 1 - exposed_s / total_s if total_s > 0 else 1.0
    case = "balanced" if 0.5 <= ratio <= 2 else "computation" if ratio < 0.5 else "communication"
    return {
        "dp_within": _sums_within(priced),
        "dp_bytes": gradient_bytes, "pp_bytes": messages.total_bytes, "tp_bytes": _tensor_traffic(priced),
        "cross_region_bytes": result.cross_region_bytes, "dp_s": reduction_s, "pp_s": transfer_s, "total_s": total_s,
        "exposed_s": exposed_s, "hidden": hidden if hidden > ROUNDED else 0.0, "compute_s": compute_s,
        "ratio": ratio, "case": case, "efficiency": compute_s / result.step_s,
        "communication_share": exposed_s / result.step_s,
    }  # fmt: skip


def weights_s(times: StepTimes) -> float:
    """Seconds of gathering updated weights, hidden part included, and of ZeRO's first layers, which nothing hides."""
    return float(times.sums[2].max()) + times.first_s


def _sums_within(priced: PricedChange) -> bool:
    """Whether a stage sums its gradients micro-batch by micro-batch, as ZeRO-2 and 3 do: that time is in its
    computing."""
    stages = zip(priced.plan.stages, priced.reductions_s, strict=True)
    return any(stage.width > 1 and stage.zero >= 2 and whole_s == 0 for stage, whole_s in stages)


def formulas(priced: PricedChange, shown: dict[str, Any], *, bound: bool) -> list[dict[str, Message | str]]:
    """Every shown number's formula, with its numbers; `shown` is the `traffic`."""
    problem, plan, times, result = priced.problem, priced.plan, priced.times, priced.estimate
    batch = problem.batch
    # Stages that reduce alike stand once, with their number.
    alike = Counter((stage.width - 1, n) for stage, n in zip(plan.stages, priced.gradients, strict=True))
    reduced = " + ".join(f"{n} × 2 × {w} × {p:,.0f}" for (w, p), n in alike.items() if w)
    groups, each, every = priced.tied
    tied = f" + {groups} × 2 × {each - 1} × {problem.model.tied_values:,} / {every}" if groups else ""
    values = boundary_values(problem.model, batch, plan.micro_batch_size)
    # What is left of a difference of sums is no time.
    terms = {name: s if s > ROUNDED * result.step_s else 0.0 for name, s in result.terms.items()}
    rows: list[tuple[str, Message | str, Message | str]] = [
        ("step", Message("formula.step"), Message("numbers.step", **terms, step_s=result.step_s)),
        ("tokens", "B L / T",
         f"{batch.global_batch:,} × {batch.seq_len:,} / {result.step_s:.4g} = {result.tokens_per_s:,.0f}/s"),
        ("pp_bytes", Message("formula.pp_bytes"), Message(
            "numbers.pp_bytes",
            product=f"2 × {plan.micro_batches:,} × {len(plan.stages) - 1} × {values:,} × {batch.element_bytes} B",
            unpacked=size(2 * plan.micro_batches * (len(plan.stages) - 1) * values * batch.element_bytes),
            packed=size(times.messages.total_bytes))),
        ("dp_bytes", Message("formula.dp_bytes"),
         f"(({reduced or 0}) / {plan.local_steps}{tied}) × {batch.gradient_bytes} B = {size(shown['dp_bytes'])}"),
        ("tp_bytes", Message("formula.tp_bytes"), size(shown["tp_bytes"])),
        ("dp_s", Message("formula.dp_s"), Message(
            "numbers.dp_s_within" if shown["dp_within"] else "numbers.dp_s",
            reduction_s=max(priced.reductions_s, default=0.0), tied_s=times.tied_s,
            norm_s=times.norm_s, weights_s=weights_s(times), total_s=shown["dp_s"])),
        ("pp_s", Message("formula.pp_s"), f"{shown['pp_s']:.4g} s"),
        ("hidden", Message("formula.hidden"),
         f"1 - {shown['exposed_s']:.4g} / {shown['total_s']:.4g} = {shown['hidden'] * 100:.1f} %"),
        ("ratio", Message("formula.ratio"),
         f"{shown['total_s']:.4g} / {shown['compute_s']:.4g} = {shown['ratio']:.3g}"),
    ]  # fmt: skip
    if bound:
        over = 100 * priced.bounds.gap(result)
        numbers = Message("numbers.bound", bound_s=priced.bounds.step.seconds, gap_percent=over)
        rows.append(("bound", Message("formula.bound"), numbers))
    return [{"key": key, "formula": formula, "numbers": numbers} for key, formula, numbers in rows]


def _routes(plan: Plan, times: StepTimes) -> list[list[int]]:
    """Regions that the first micro-batches visit, stage by stage (for the animated route)."""
    found: list[list[int]] = times.place.region[plan.routes[:8] + times.place.offset[None, :]].tolist()
    return found


ADVICE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "balanced": [("prefetch", {"prefetch": 1.0}),
                 ("pack_gradients", {"weight_gradients": "int8"}), ("accumulate", {"accumulation": 2}),
                 ("local_steps", {"local_steps": 8})],
    "computation": [("unpack", {"activations": "none", "weight_gradients": "none"}),
                    ("prefetch", {"prefetch": 1.0}), ("accumulate", {"accumulation": 2})],
    "communication": [("local_steps", {"local_steps": 8}), ("pack_activations", {"activations": "int4"}),
                      ("pack_gradients", {"weight_gradients": "int4"}), ("accumulate", {"accumulation": 4}),
                      ("streams", {"streams": 16}), ("prefetch", {"prefetch": 1.0})],
}  # fmt: skip
"""What helps when computation and communication are balanced, or one of them limits."""


def advice(problem: Problem, plan: Plan, changes: Changes, tables: CostTables) -> dict[str, Any]:
    """For each of the three cases its measures, each with what it does to this very plan; one that makes the global
    batch so many times as large (`batch_factor`) has a longer step for more tokens."""
    before = price(problem, plan, changes, tables)
    here = traffic(before)
    cases = {
        case: [_effect(problem, plan, changes, tables, before, key, change) for key, change in measures]
        for case, measures in ADVICE.items()
    }
    return {"case": here["case"], "ratio": here["ratio"], "hidden": here["hidden"], "cases": cases}


def _effect(
    problem: Problem,
    plan: Plan,
    changes: Changes,
    tables: CostTables,
    before: PricedChange,
    key: str,
    change: dict[str, Any],
) -> dict[str, Any]:
    after = price(problem, plan, changes.model_copy(update=change), tables)
    is_lost = is_run(before.problem, before.plan) and not is_run(after.problem, after.plan)
    not_run = [Message("reason.not_run", runtime=problem.runtime.name)] if is_lost else []
    return {
        "key": key, "change": change, "step_s": after.estimate.step_s, "hidden": traffic(after)["hidden"],
        "batch_factor": after.problem.batch.global_batch / before.problem.batch.global_batch,
        "speedup": after.estimate.tokens_per_s / before.estimate.tokens_per_s - 1,
        "over_memory": after.over_memory_bytes, "broken": [*after.broken, *not_run],
    }  # fmt: skip


def sensitivities(problem: Problem, plan: Plan, changes: Changes, tables: CostTables) -> list[dict[str, Any]]:
    """What twice the bandwidth or half the latency of each busy pair of regions would save, most first."""
    before = price(problem, plan, changes, tables).estimate
    pairs: dict[tuple[str, str], float] = {}
    for use in before.links:
        low, high = sorted((use.source, use.target))
        pairs[low, high] = pairs.get((low, high), 0.0) + use.activation_bytes + use.gradient_bytes
    rows = []
    for a, b in sorted(pairs, key=lambda pair: -pairs[pair])[:12]:
        for what, factor in (("bandwidth_factor", 2.0), ("latency_factor", 0.5)):
            both = [{"source": x, "target": y, what: factor} for x, y in ((a, b), (b, a))]
            better = Changes.model_validate(changes.model_dump() | {"links": [*changes.model_dump()["links"], *both]})
            saved = before.step_s - timed(problem, plan, better, tables)[3].step_s
            rows.append({"source": a, "target": b, "what": what, "saved_s": saved})
    return sorted(rows, key=lambda row: -row["saved_s"])


def warm_up(problem: Problem, plan: Plan) -> None:
    """Load the compiled kernels that views need."""
    priced = price(problem, plan, NO_CHANGE)
    view(priced)
    priced.times.schedule.simulate(record=True)


def front(points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points with a mark on those that no other beats in both step time and money (`best`), or energy
    (`best_in_energy`): not in what is nothing because nobody said it."""
    rows = list(points)
    for mark, of in (("best", "usd_per_step"), ("best_in_energy", "energy_j")):
        known = [row for row in rows if row[of] or (of == "usd_per_step" and not row["unpriced"])]
        for row in rows:
            row[mark] = row in known and not any(
                (o["step_s"] <= row["step_s"] and o[of] < row[of]) or (o["step_s"] < row["step_s"] and o[of] <= row[of])
                for o in known
            )
    return rows
