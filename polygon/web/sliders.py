"""A plan with something changed, priced at once: what the toggles and sliders of the page do.

Every change goes through the same cost functions as the search. Three of them reach beyond what a plan can say:

- *algorithm* replaces the three-level reduction of every stage by a flat one over its p workers, n bytes each, over
  the worst hop (latency a, rate b): ring 2 (p-1) (a + n / (p b)); double tree; sharded server 2 (a + (p-1) n / (p b));
  central server 2 (a + (p-1) n / b).
- *chunk_mb* sends the reduction in k = ceil(n / chunk) pieces that follow each other through the levels:
  T = sum_l (a_l + b_l / k) + (k - 1) max_l (a_l + b_l / k), where level l needs a_l for nothing and a_l + b_l for all;
  where regions lead by turns (`polygon.cost.finish.led_s`), what goes from one to another takes as much longer.
- *overlap* o: of the last backward only the part o of what the runtime sums beside (`polygon.cost.overlap.summed_s`)
  is used. The plan itself has o = 1, no overlap is o = 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from pydantic import Field

from polygon.bounds.gap import Bounds
from polygon.bounds.lower_bound import link_free_bound, lower_bound
from polygon.cost.collectives import double_tree_all_reduce_s
from polygon.cost.estimate import Estimate, estimate
from polygon.cost.stage_reduction import ReductionCost, group_packing, stage_reduction
from polygon.cost.step_times import StepTimes, held_parameters, stages_on_pairs, step_times, sums_of, tied_in_stage
from polygon.cost.tables import CostTables
from polygon.cost.transfers import packed_bytes
from polygon.domain.cluster import Cluster, NodeGroup
from polygon.domain.errors import one_of, require
from polygon.domain.message import Violation
from polygon.domain.plan import LinkUse, Plan, Problem
from polygon.domain.schedule import repeated
from polygon.formats.schema import Strict
from polygon.planning.checker import broken_limits
from polygon.planning.decode import SOCKET_WINDOW_BYTES, WINDOW_USE
from polygon.planning.plan_bounds import bounds_beyond, is_beyond_bound
from polygon.planning.warmup_depths import wanted_spans

Packing = Literal["none", "bf16", "int8", "int4", "topk", "powersgd"]
ActivationPacking = Literal["none", "bf16", "int8", "int4", "topk"]
"""PowerSGD is of weight matrices."""
Algorithm = Literal["hierarchical", "ring", "tree", "sharded-server", "central-server"]
Factor = Annotated[float, Ge(0.01), Le(100)]


class LinkChange(Strict):
    """Other packings or another quality for one direction between two regions."""

    source: str
    target: str
    activations: ActivationPacking | None = None
    weight_gradients: Packing | None = None
    bandwidth_factor: Factor = 1.0
    latency_factor: Factor = 1.0


class Changes(Strict):
    """What is to be different; what is left out stays as the plan has it."""

    accumulation: Annotated[int, Ge(1), Le(64)] = 1
    """So many times the micro-batches between two updates: the global batch grows with it."""
    activations: ActivationPacking | None = None
    """Of activations and their gradients between regions, on all links."""
    weight_gradients: Packing | None = None
    prefetch: Annotated[float, Ge(0), Le(4)] | None = None
    """How much of a message's way the schedule hides by letting micro-batches pass: 0 none, 1 all of it."""
    local_steps: Annotated[int, Ge(1), Le(512)] | None = None
    algorithm: Algorithm = "hierarchical"
    chunk_mb: Annotated[float, Gt(0.0009), Le(100_000)] | None = None
    streams: Annotated[int, Ge(1), Le(64)] | None = None
    """TCP streams a link; each carries at most 0.82 of a 4 MiB window per round trip."""
    overlap: Annotated[float, Ge(0), Le(1)] = 1.0
    bandwidth_factor: Factor = 1.0
    latency_factor: Factor = 1.0
    price_factor: Factor = 1.0
    device_factors: Annotated[dict[str, Factor], Field(max_length=100, default_factory=dict)]
    """How many times as fast devices of a type compute and read their memory, by name."""
    links: Annotated[list[LinkChange], Field(max_length=400, default_factory=list)]


NO_CHANGE = Changes.model_validate({})


@cache
def _controls() -> dict[str, dict[str, Any]]:
    """Positions of the page's controls, and that in which nothing is changed, by the field that they change."""
    found: dict[str, dict[str, Any]] = json.loads(
        resources.files("polygon.web").joinpath("controls.json").read_text("utf-8")
    )
    return found


def positions(devices: Iterable[str], local_steps: int) -> dict[str, list[dict[str, Any]]]:
    """What each of the page's controls asks for at its positions, by its name.

    Parameters
    ----------
    devices : iterable of str
        Types that the cluster has; the page's slider of speeds moves all of them.
    local_steps : int
        Of the plan, which that control does not change.
    """
    every = {name: [v for v in own["values"] if v != own.get("unchanged")] for name, own in _controls().items()}
    every["device_factors"] = [dict.fromkeys(sorted(devices), factor) for factor in every["device_factors"]]
    every["local_steps"] = [steps for steps in every["local_steps"] if steps != local_steps]
    return {name: [{name: value} for value in values] for name, values in every.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedChange:
    """A changed plan, its times and estimate, and what no plan can beat."""

    problem: Problem
    plan: Plan
    tables: CostTables
    times: StepTimes
    estimate: Estimate
    changes: Changes
    base: CostTables
    """Of the problem as it was."""
    reductions_s: tuple[float, ...]
    """Whole reduction of every stage, hidden part included."""

    @cached_property
    def bounds(self) -> Bounds:
        """What no plan can beat; worked out when it is asked for, as a timeline never does.

        The problem's own bound where the plan is one of those that it is of, be it changed, kept as a variant or opened
        from a file; else compute and path alone, with all devices where it uses some that the limits leave out.
        """
        if self.over_memory_bytes > 0 or is_beyond_bound(self.broken):
            return bounds_beyond(self.tables)
        return Bounds.of(self.tables, lower_bound(self.base) if self._keeps_bound else link_free_bound(self.tables))

    @property
    def _keeps_bound(self) -> bool:
        changes = self.changes
        affords_more = changes.price_factor < 1 and self.problem.constraints.most_usd_per_hour is not None
        return keeps_bound(changes.model_dump(exclude_defaults=True)) and not affords_more

    @cached_property
    def broken(self) -> list[Violation]:
        """What the plan breaks of what is allowed, memory apart."""
        return broken_limits(self.problem, self.plan, self.times)

    @cached_property
    def over_memory_bytes(self) -> float:
        """By how much the fullest device is over what the constraints leave it; 0 where all fit."""
        need = np.array([worker.peak_bytes for worker in self.estimate.workers])
        return float(max(0.0, (need - self.tables.limit_bytes[self.times.place.pool]).max()))

    @cached_property
    def gradients(self) -> list[float]:
        """Weight gradients that a worker of each stage holds (all its tensor-parallel ranks together) and sums with the
        others of its stage."""
        return [summed_values(self.plan, self.tables, s) for s in range(len(self.plan.stages))]

    @property
    def tied(self) -> tuple[int, int, int]:
        """Groups in which workers of first and last stage sum the gradient of a weight that both hold (all at once, or
        pairs after their stages have), workers of each, and the steps after which they do."""
        first, last = (self.plan.stages[s].width for s in (0, -1))
        if not self.problem.model.tied_values or len(self.plan.stages) == 1:
            return 0, 1, 1
        every = self.plan.local_steps if self.times.tied.outer_s else 1
        return (1, first + last, every) if self.problem.runtime.tied_once else (min(first, last), 2, every)


def price(problem: Problem, plan: Plan, changes: Changes, tables: CostTables | None = None) -> PricedChange:
    """Apply changes to a plan and predict its step.

    The lower bound of a changed plan is that of compute and path alone, which holds for any links, packings and steps;
    or the problem's own (`keeps_bound`), where the changed plan is one of those that it is of. A plan as it was kept is
    held to the same rule.

    Raises
    ------
    InputError
        For a link between regions that do not exist, and for an unknown device.
    """
    base = CostTables(problem) if tables is None else tables
    changed, other, tables, times = timed(problem, plan, changes, base)
    return PricedChange(
        problem=changed, plan=other, tables=tables, times=times, changes=changes, base=base,
        estimate=estimate(changed, other, tables, times), reductions_s=tuple(times.whole_reductions_s.tolist()),
    )  # fmt: skip


def keeps_bound(changes: Mapping[str, Any]) -> bool:
    """Whether the problem's own bound holds for a plan so changed that keeps the problem's limits: what is different is
    in the plan, or makes every plan slower or dearer. Of what `Changes` says, defaults left out."""
    links = (changes, *changes.get("links", ()))
    return not changes.keys() & {"algorithm", "chunk_mb", "accumulation", "device_factors"} and all(
        link.get("bandwidth_factor", 1) <= 1 <= link.get("latency_factor", 1) for link in links
    )


def timed(
    problem: Problem, plan: Plan, changes: Changes, tables: CostTables | None = None
) -> tuple[Problem, Plan, CostTables, StepTimes]:
    """The changed problem and plan, their tables and times: what `price` does, without the estimate around it."""
    changed = _changed_problem(problem, changes)
    if tables is None:
        tables = CostTables(changed)
    elif changed is not problem:
        if changes.device_factors:
            tables = tables.with_other_speeds(changed)
        elif changed.batch is problem.batch and changed.cluster.bytes_per_s is problem.cluster.bytes_per_s:
            tables = tables.with_other_prices(changed)
        else:
            tables = tables.with_other_links(changed)
    plan = _changed_plan(changed, plan, changes, tables)
    times = step_times(plan, tables)
    whole = _reductions(changed, plan, tables, times, changes)
    if whole is not times.reductions:
        times = replace(times, reductions=whole, sums=sums_of(whole))
    if changes.overlap < 1:
        times = replace(times, window=changes.overlap)
    return changed, plan, tables, times


def _changed_problem(problem: Problem, changes: Changes) -> Problem:
    """The problem with other links, prices or global batch; the same object where nothing of it changes."""
    cluster = problem.cluster
    latency_s, rate = cluster.latency_s.copy(), cluster.bytes_per_s.copy()
    capacity = cluster.capacity_bytes_per_s.copy()
    far = ~np.eye(len(cluster.regions), dtype=bool)
    latency_s[far] *= changes.latency_factor
    for bandwidth in (rate, capacity):
        bandwidth[far] *= changes.bandwidth_factor
    for link in changes.links:
        a, b = cluster.region_index(link.source), cluster.region_index(link.target)
        latency_s[a, b] *= link.latency_factor
        for bandwidth in (rate, capacity):
            bandwidth[a, b] *= link.bandwidth_factor
    if changes.streams is not None:
        with np.errstate(divide="ignore"):
            most = changes.streams * WINDOW_USE * SOCKET_WINDOW_BYTES / (latency_s + latency_s.T)
        rate = np.where(far, np.minimum(rate, most), rate)
    batch = problem.batch
    if changes.accumulation > 1:
        batch = replace(batch, global_batch=batch.global_batch * changes.accumulation)
    if np.array_equal(capacity, cluster.capacity_bytes_per_s):
        capacity = cluster.capacity_bytes_per_s  # the same object: by that tables know what they can keep
    same = np.array_equal(latency_s, cluster.latency_s) and np.array_equal(rate, cluster.bytes_per_s)
    if same:
        latency_s, rate, capacity = cluster.latency_s, cluster.bytes_per_s, cluster.capacity_bytes_per_s
    if same and changes.accumulation == 1 and changes.price_factor == 1 and not changes.device_factors:
        return problem
    if changes.price_factor == 1 and not changes.device_factors:
        return replace(problem, batch=batch, cluster=cluster.with_links(latency_s, rate, capacity))
    devices = dict(cluster.catalogue)
    for name, factor in changes.device_factors.items():
        require(name in devices, "device_factors", name, one_of(name, devices))
        devices[name] = devices[name].at_speed(factor)
    dearer = tuple(
        replace(
            region,
            egress_usd_per_gb=region.egress_usd_per_gb * changes.price_factor,
            node_groups=tuple(
                replace(group, price_usd_per_hour=_usd(cluster, group, changes.price_factor))
                for group in region.node_groups
            ),
        )
        for region in cluster.regions
        if changes.price_factor != 1
    )
    return replace(
        problem,
        batch=batch,
        cluster=replace(
            cluster,
            catalogue=devices,
            regions=dearer or cluster.regions,
            latency_s=latency_s,
            bytes_per_s=rate,
            capacity_bytes_per_s=capacity,
        ),
    )


def _usd(cluster: Cluster, group: NodeGroup, factor: float) -> float | None:
    """So many times the price of a group's devices; None where nobody says one, as of those that are not free."""
    own = group.price_usd_per_hour
    if own is None and cluster.catalogue[group.device].price_usd_per_hour == 0:
        return None
    return factor * (cluster.catalogue[group.device].price_usd_per_hour if own is None else own)


def _changed_plan(problem: Problem, plan: Plan, changes: Changes, tables: CostTables) -> Plan:
    """The plan with other packings, routes for more micro-batches, spans and local steps."""
    cluster = problem.cluster
    own = {(cluster.region_index(c.source), cluster.region_index(c.target)): c for c in changes.links}
    links = []
    packs = own or changes.activations or changes.weight_gradients or changes.streams
    for use in plan.links if packs else ():
        single = own.get((use.source, use.target))
        activations = (single and single.activations) or changes.activations
        gradients = (single and single.weight_gradients) or changes.weight_gradients
        if not (activations or gradients or changes.streams):
            links.append(use)
            continue
        links.append(
            LinkUse(
                source=use.source,
                target=use.target,
                activations=activations or use.activations,
                activation_gradients=activations or use.activation_gradients,
                weight_gradients=gradients or use.weight_gradients,
                streams=changes.streams or use.streams,
            )
        )
    local_steps = changes.local_steps or plan.local_steps
    changed = plan
    if (packs and tuple(links) != plan.links) or changes.accumulation > 1 or local_steps != plan.local_steps:
        changed = replace(
            repeated(plan, changes.accumulation), links=tuple(links) if packs else plan.links, local_steps=local_steps
        )
    if changes.prefetch is None:
        return changed
    times = step_times(changed, tables)
    least, wanted = wanted_spans(times, messages=False), wanted_spans(times, messages=True)
    spans = np.clip(np.ceil(least + changes.prefetch * (wanted - least) - 1e-6), 1, changed.micro_batches)
    ends = np.cumsum([stage.width for stage in plan.stages])[:-1]
    return changed.with_spans(tuple(tuple(int(v) for v in part) for part in np.split(spans, ends)))


def _reductions(
    problem: Problem, plan: Plan, tables: CostTables, times: StepTimes, changes: Changes
) -> tuple[ReductionCost, ...]:
    """Reduction of every stage by the asked algorithm and chunks."""
    if changes.algorithm == "hierarchical" and changes.chunk_mb is None:
        return times.reductions
    return tuple(_reduction(problem, plan, tables, times, s, changes) for s in range(len(plan.stages)))


def _reduction(
    problem: Problem, plan: Plan, tables: CostTables, times: StepTimes, s: int, changes: Changes
) -> ReductionCost:
    plain = times.reductions[s]
    n_values = summed_values(plan, tables, s)
    n_bytes = n_values * problem.batch.gradient_bytes
    if plan.stages[s].width == 1:
        return plain
    if changes.algorithm != "hierarchical":
        total_s = flat_s(problem, plan, tables, times, s, changes.algorithm) / plan.local_steps
        # Nobody leads: each waits for all in every round.
        return replace(
            plain, node_s=0.0, region_s=0.0, across_s=total_s, latency_s=0.0, card_s=0.0, outer_s=0.0, ways=None
        )
    assert changes.chunk_mb is not None
    place = times.place
    shared = stages_on_pairs(plan, place, len(problem.cluster.regions))
    fixed_cost = stage_reduction(
        plan, s, 1.0, problem.batch, tables.links, place, shared, problem.runtime, problem.model, plain.last
    )
    empty = fixed_cost.with_local_steps(plan.local_steps)
    # What comes last is one message by itself, and all others are as large.
    pieces = max(1, math.ceil(n_bytes * plain.last / (changes.chunk_mb * 1e6)))
    names = ("node_s", "region_s", "across_s")
    fixed = [getattr(empty, name) for name in names]
    each = [a + max(0.0, getattr(plain, name) - a) / pieces for name, a in zip(names, fixed, strict=True)]
    longer = pieces * sum(each) / (plain.total_s or 1.0)
    ways = plain.ways
    if ways is not None:  # the bytes, and so what keeps links busy, are the same
        ways = ways._replace(whole_s=ways.whole_s * longer, last_s=ways.last_s * longer)
    return replace(
        plain,
        **{name: pieces * seconds for name, seconds in zip(names, each, strict=True)},
        last=plain.last / pieces,
        ways=ways,
    )


def summed_values(plan: Plan, tables: CostTables, s: int) -> float:
    """Gradients that a worker of stage s sums with the others."""
    degrees = {worker.tp for worker in plan.stages[s].workers}
    return max(held_parameters(plan, tables, s, tp) * tp for tp in degrees) - tied_in_stage(plan, tables, s)


def flat_s(problem: Problem, plan: Plan, tables: CostTables, times: StepTimes, s: int, algorithm: str) -> float:
    """Seconds of a flat reduction of stage s over all its workers, at the worst hop among them."""
    place, links = times.place, tables.links
    mine = np.flatnonzero(place.stage == s)
    p = len(mine)
    if p == 1:
        return 0.0
    n_values = summed_values(plan, tables, s)
    mode = group_packing(plan, np.unique(place.region[mine]))
    wire = packed_bytes(n_values, problem.batch.gradient_bytes, mode)
    plain = n_values * problem.batch.gradient_bytes
    latency_s, worst = 0.0, 0.0
    for a in mine:
        for b in mine:
            if a == b:
                continue
            pa, pb = place.pool[a], place.pool[b]
            if place.node[a] == place.node[b]:
                hop_s, rate, n = links.node_latency_s[pa], links.node_bytes_per_s[pa], plain
            else:
                hop_s, rate = links.latency_s[pa, pb], links.bytes_per_s[pa, pb]
                far = place.region[a] != place.region[b] or place.region[a] in plan.packed_inside
                n = wire if far else plain
            latency_s = max(latency_s, float(hop_s))
            worst = max(worst, float(n / rate) if rate > 0 else math.inf)
    if algorithm == "ring":
        return 2 * (p - 1) * (latency_s + worst / p)
    if algorithm == "tree":
        return float(double_tree_all_reduce_s(worst, p, latency_s, 1.0))
    if algorithm == "sharded-server":
        return 2 * (latency_s + (p - 1) / p * worst)
    return 2 * (latency_s + (p - 1) * worst)
