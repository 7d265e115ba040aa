"""Other ways to train on the same cluster, to hold a plan against: naive, plain 3D, one region, runner-up (the
fastest of the same plan with fewer devices of one kind).

Axes of the radar, each from 0 (bad) to 1 (as good as can be), all computed from the estimate:

- computation: part of the step in which the worker that ends last computes;
- communication: 1 - exposed transfer and reduction / step;
- memory: 1 - mean over workers of peak / limit;
- scalability: lower bound / step;
- across regions: 1 - bytes between regions / most of any compared plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from polygon.bounds.lower_bound import lower_bound
from polygon.cost.estimate import Estimate, estimate
from polygon.cost.money import unpowered, unpriced
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.domain.runnable import RUNNABLE
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.initial_solutions import simple_starts
from polygon.planning.nearby import allocation_of
from polygon.planning.uniform_plans import find_uniform
from polygon.web.views import front

MOST_POINTS = 16
MOST_DECODED = 3


def compare(problem: Problem, plan: Plan, tables: CostTables) -> dict[str, Any]:
    """Radar and scatter data of a plan and its alternatives."""
    named: dict[str, tuple[Plan, Estimate]] = {"plan": (plan, estimate(problem, plan, tables))}
    points = []
    decoder = Decoder(problem, tables=tables)
    best: dict[str, tuple[float, Plan]] = {}
    for kind, other in _simple(problem, decoder, plan.micro_batch_size):
        step_s = decoder.step_times(other).step_s
        if np.isfinite(step_s) and (kind not in best or step_s < best[kind][0]):
            best[kind] = (step_s, other)
    for kind, (_, other) in best.items():
        named[kind] = (other, estimate(problem, other, tables))
    uniform = find_uniform(problem, plan, tables, RUNNABLE["uniform"])
    if uniform is not None:
        named["uniform"] = (uniform.plan, estimate(problem, uniform.plan, tables))
    nearby = [(other, estimate(problem, other, tables)) for other in _fewer(problem, decoder, plan)]
    nearby = sorted((pair for pair in nearby if np.isfinite(pair[1].step_s)), key=lambda pair: pair[1].step_s)
    if nearby:
        named["runner_up"] = nearby[0]
    most = max(max((e.cross_region_bytes for _, e in named.values())), 1.0)
    rows = []
    for kind, (other, result) in named.items():
        takes = _takes(problem, other, result)
        rows.append({"key": kind, **takes,
                     "tokens_per_s": result.tokens_per_s, "devices": other.world_size, "stages": len(other.stages),
                     "axes": _axes(result, lower_bound(tables).seconds, most)})  # fmt: skip
        points.append({"key": kind, **takes})
    points += [{"key": "other", **_takes(problem, other, result)} for other, result in nearby[1:]]
    return {"alternatives": rows, "points": front(points)}


def _takes(problem: Problem, plan: Plan, result: Estimate) -> dict[str, Any]:
    """What a step of a plan takes, and the devices that cost or draw nothing because nobody said what they do."""
    return {"step_s": result.step_s, "usd_per_step": result.cost_usd, "energy_j": result.energy_j,
            "unpriced": unpriced(problem, plan), "unpowered": unpowered(problem, plan)}  # fmt: skip


def _axes(result: Estimate, bound_s: float, most_bytes: float) -> dict[str, float]:
    exposed = result.terms["transfer"] + result.terms["reduction"]
    return {
        "computation": result.terms["compute"] / result.step_s,
        "communication": max(0.0, 1 - exposed / result.step_s),
        "memory": 1 - float(np.mean([w.peak_bytes / w.limit_bytes for w in result.workers])),
        "scalability": min(1.0, bound_s / result.step_s),
        "across": round(1 - result.cross_region_bytes / most_bytes, 9),
    }


def _simple(problem: Problem, decoder: Decoder, size: int) -> list[tuple[str, Plan]]:
    """What a careful person would try first: all devices as one stage or an even pipeline, or one region alone.

    Of each sort the few that the fluid step time ranks first become plans.
    """
    region = np.array([problem.cluster.pools[pool].region for pool, _ in decoder.classes])
    ranked: dict[str, list[tuple[float, int, Allocation]]] = {"naive": [], "one_region": []}
    for i, x in enumerate(simple_starts(decoder, min(8, problem.model.layers), size)):
        allocation = Allocation(workers=x, micro_batch_size=size)
        alone = len(np.unique(region[x.any(axis=0)])) == 1 and len(problem.cluster.regions) > 1
        fluid_s = decoder.fluid_s(allocation)[0]
        if np.isfinite(fluid_s):
            ranked["one_region" if alone else "naive"].append((fluid_s, i, allocation))
    found: list[tuple[str, Plan]] = []
    for kind, rows in ranked.items():
        for _, _, allocation in sorted(rows, key=lambda row: row[:2])[:MOST_DECODED]:
            plan = decoder.decode(allocation, relax=False)
            if isinstance(plan, Plan):
                found.append((kind, plan))
    return found


def _fewer(problem: Problem, decoder: Decoder, plan: Plan) -> list[Plan]:
    """The plan's allocation with workers of each class left out, for the trade of time against money."""
    allocation = allocation_of(decoder, plan)
    x = allocation.workers
    plans = []
    for c in np.flatnonzero(x.any(axis=0))[:MOST_POINTS]:
        for keep in (0.5, 0.0):
            fewer = x.copy()
            fewer[:, c] = np.floor(fewer[:, c] * keep)
            if fewer.any():
                other = decoder.decode(replace(allocation, workers=fewer), relax=False)
                if isinstance(other, Plan):
                    plans.append(other)
    return plans[:MOST_POINTS]
