"""What a plan is predicted to cost: step time by term, memory by worker, traffic by link, money and energy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from polygon.cost.compute import LayerTimes, model_flops_per_step
from polygon.cost.memory import (
    MemoryBreakdown,
    breakdown,
    divided_less,
    gradient_copies,
    passing_bytes,
    posted_bytes,
    stage_rows,
    under_way_bytes,
)
from polygon.cost.money import bill_of, traffic_bytes
from polygon.cost.shared_links import pairs_at_work
from polygon.cost.stage_reduction import NO_SUMS, SumsRoom, room_of_sums
from polygon.cost.step_times import StepTimes, alike, numbered, step_times, tied_parameters
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Placement, boundary_values
from polygon.cost.uncertainty import Known, group_of_run, interval, program_error
from polygon.domain.cluster import Cluster
from polygon.domain.plan import Plan, Problem, Stage
from polygon.domain.schedule import in_flight, interleaved_in_flight, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEstimate:
    """One worker in one step."""

    stage: int
    worker: int
    region: str
    device: str
    tp: int
    micro_batches: int
    busy_s: float
    peak_bytes: float
    limit_bytes: float
    memory_owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """Traffic of one step from one region to another."""

    source: str
    target: str
    activation_bytes: float
    gradient_bytes: float
    busy_fraction: float
    """Share of the step in which the link is taken: by messages, of the busiest sender's channel to the target, and by
    gradients, which pairs of nodes exchange at once, each at the link's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Prediction for one optimizer step. Terms add up to `step_s`, as the worker that ends last sees it."""

    step_s: float
    low_s: float
    high_s: float
    """90 % interval."""
    terms: dict[str, float]
    """Seconds: compute, pipeline (waiting even if links were free), transfer (waiting for links), reduction, update."""
    sources: dict[str, str]
    tokens_per_s: float
    mfu: float
    cross_region_bytes: float
    cost_usd: float
    energy_j: float
    """Upper estimate: every used device draws its rated power all the step."""
    workers: tuple[WorkerEstimate, ...]
    links: tuple[LinkEstimate, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


MEASURED = frozenset(("bench", "profile", "calibrated run"))
"""Sources of compute that say how sure they are."""


def worker_regions(plan: Plan, cluster: Cluster) -> Counter[int]:
    """Devices that a plan uses in every region, by its number."""
    found: Counter[int] = Counter()
    for worker in plan.workers:
        found[cluster.pools[worker.pool].region] += len(worker.devices)
    return found


def worker_memory(plan: Plan, tables: CostTables, place: Placement) -> list[MemoryBreakdown]:
    """Peak bytes of one device of every worker, stage by stage."""
    kept = tables.plan_memory.get(plan)
    if kept is not None:
        return kept
    # Of its links only how gradients are packed takes memory.
    objects = plan.stages, plan.routes, plan.spans, plan.order
    packed = tuple((use.source, use.target, use.weight_gradients) for use in plan.links)
    values = plan.micro_batch_size, plan.reduction, plan.local_steps, plan.chunks, packed
    result = tables.like_memory.get(objects, *values)
    if result is None:
        result = tables.like_memory.put(_worker_memory(plan, tables, place), objects, *values)
    tables.plan_memory[plan] = result
    return result


def _worker_memory(plan: Plan, tables: CostTables, place: Placement) -> list[MemoryBreakdown]:
    result: list[MemoryBreakdown] = []
    for s, held in enumerate(_held(plan, tables)):
        # Workers that are cut alike and hold as many micro-batches peak alike: thousands of them are a few kinds.
        which, different = numbered(room_of_sums(plan, place, s, tables.links, tables.problem.runtime))
        kinds, kind = alike(place.tp[place.members(s)], (held * plan.chunks).astype(np.int64), place.shards[s], which)
        of_kind = [
            group_memory(plan, tables, s, tp=tp, in_flight=units / plan.chunks, shards=shards, sums=different[k])
            for tp, units, shards, k in kinds
        ]
        result += [of_kind[k] for k in kind]
    # A worker's chunks are on the same devices: each of its stages has the peak of all.
    result *= plan.chunks
    return result


def _held(plan: Plan, tables: CostTables) -> list[np.ndarray]:
    """Most micro-batches (of chunks: units of one) that each worker of every group holds at one time."""
    if plan.chunks > 1:
        return [interleaved_in_flight(plan, s) for s in range(plan.groups)]
    of = plan.routes, plan.spans, plan.order
    known = tables.held.get(of)
    if known is None:
        window = windows(plan)
        known = tables.held.put([in_flight(plan, s, window) for s in range(plan.groups)], of)
    return known


def group_memory(
    plan: Plan,
    tables: CostTables,
    group: int,
    *,
    tp: int,
    in_flight: float,
    shards: int,
    sums: SumsRoom = NO_SUMS,
) -> MemoryBreakdown:
    """Peak bytes of one device of a worker that holds all stages of a group, so many micro-batches in flight."""
    rows, zero = group_rows(plan, tables, group, tp), plan.stages[group].zero
    peak = memory_of(rows, zero, tables, in_flight=in_flight, shards=shards, steps=plan.local_steps)
    if any(sums):
        each, tied = tables.problem.batch.gradient_bytes, tied_parameters(plan, tables, group) / tp
        owed = (float(rows[0]) - tied) * sums.owed + tied * sums.tied
        under_way = under_way_bytes(sums.heard, float(rows[0]) * each, float(rows[1]) * each)
        peak = replace(peak, gradients=peak.gradients + owed * each, transient=peak.transient + under_way)
    less = _tied_end(plan, tables, group, shards)
    if less == (zero, shards):
        return peak
    batch, tied = tables.problem.batch, tables.problem.model.head_weight_parameters() / tp
    runtime = tables.problem.runtime
    copies = gradient_copies(batch, runtime, zero)
    return divided_less(
        *(peak, tied, batch, (zero, shards), less, copies),
        scattered=runtime.zero2_by_micro_batch,
        outer=plan.local_steps > 1,
    )


def _tied_end(plan: Plan, tables: CostTables, group: int, shards: int) -> tuple[int, int]:
    """ZeRO stage of the embedding, or of the head's copy of it in another group, and devices over which it divides.

    Ranks add up such a weight whole where workers are cut differently, else divide it by the lesser stage of both ends
    (`runners.engine.rank_layout`; where both are in a region by the workers of both, which is left out here). A runtime
    that sums a stage's gradients as one divides it as it does all others.
    """
    model, stages = tables.problem.model, plan.stages
    own = stages[group].zero, shards
    if not model.tied_embeddings or model.family == "vit" or plan.groups == 1 or group not in (0, plan.groups - 1):
        return own
    ends = stages[0], stages[-1]
    if not tables.problem.runtime.by_layer or not own[0]:
        return own
    zero = min(stage.zero for stage in ends) if plan.ends_alike and plan.reduction == "all-reduce" else 0
    return zero, min([shards, *(stage.shards for stage in ends if stage.shards)])


def group_rows(plan: Plan, tables: CostTables, group: int, tp: int) -> tuple[float, ...]:
    """What `stage_rows` says of all stages of a group, as of one; kept for the next plan that has the same ones."""
    stages = plan.stages[group :: plan.groups]
    known = tables.stage_rows.get(stages, plan.micro_batch_size, tp)
    return known or tables.stage_rows.put(_group_rows(plan, tables, stages, tp), stages, plan.micro_batch_size, tp)


def _group_rows(plan: Plan, tables: CostTables, stages: Sequence[Stage], tp: int) -> tuple[float, ...]:
    batch, runtime, model = tables.problem.batch, tables.problem.runtime, tables.problem.model
    cp = stages[0].workers[0].cp
    rows = np.array(
        [
            stage_rows(tables.layers_of(part, tp=tp, micro_batch_size=plan.micro_batch_size), *part.layers)
            for part in stages
        ]
    )
    # Autograd keeps what a stage has sent until backward, where the runtime does not let go of it; the last sends none.
    sent = boundary_values(model, batch, plan.micro_batch_size) / cp * batch.element_bytes
    if runtime.keeps_outputs:
        rows[:, 2] += [sent * (part.last_layer < model.layers) for part in stages]
    if len(plan.stages) > 1:
        rows[:, 3] += posted_bytes(runtime, sent)
    return _together(rows)


def memory_of(
    rows: Sequence[Any], zero: int, tables: CostTables, *, in_flight: Any, shards: int, steps: int = 1
) -> MemoryBreakdown:
    """Peak bytes from what `group_rows` says: of one group, or of many where rows and in_flight are arrays."""
    batch, runtime = tables.problem.batch, tables.problem.runtime
    return breakdown(
        *rows,
        in_flight=in_flight,
        zero=zero,
        shards=shards,
        batch=batch,
        context_bytes=runtime.context_bytes,
        gradient_copies=gradient_copies(batch, runtime, zero),
        passing=passing_bytes(batch, runtime, zero),
        scattered=runtime.zero2_by_micro_batch,
        outer=steps > 1,
    )


def _together(rows: np.ndarray) -> tuple[float, ...]:
    """What `stage_rows` says of several stages on the same devices, as of one."""
    # One layer computes at a time, whichever chunk it is of: what passes is the most of any, the rest adds up.
    held, _, activations, _, sharded, outside = rows.sum(axis=0).tolist()
    return held, float(rows[:, 1].max()), activations, float(rows[:, 3].max()), sharded, outside


def estimate(
    problem: Problem,
    plan: Plan,
    tables: CostTables | None = None,
    times: StepTimes | None = None,
) -> Estimate:
    """Predict what one step of a plan costs.

    Parameters
    ----------
    tables : CostTables, optional
        Of the same problem, if they exist already.
    times : StepTimes, optional
        Of the plan, if they are known already.

    Returns
    -------
    Estimate
        ``step_s`` is inf where the plan uses a link that does not exist.
    """
    tables = tables or CostTables(problem)
    times = times or step_times(plan, tables)
    done = times.done_s
    step_s = float(done.max())
    last = int(done.argmax())
    if times.ways is not None:
        # Regions that lead by turns end a step together, but for rounding: the one that computes longest tells why.
        last = int(np.where(done >= (1 - 1e-9) * step_s, times.ends_s, -np.inf).argmax())
    terms = _terms(times, last)
    cluster, batch = problem.cluster, problem.batch
    moved, reduced = traffic_bytes(problem, plan, times)
    links = _link_estimates(problem, times, step_s, moved, reduced)
    # MFU is of the devices that the plan uses, by their data sheets.
    pool_flops = np.array([pool.device.peak_flops(batch.precision) for pool in cluster.pools])
    peak = float(sum(pool_flops[worker.pool] * len(worker.devices) for worker in plan.workers))
    bill = bill_of(problem, plan, step_s, moved + reduced)
    workers = _worker_estimates(plan, problem, times, worker_memory(plan, tables, times.place))
    layers = _layers_used(plan, tables)
    sources, measured = _sources(layers)
    low_s, high_s = interval(step_s, known_of(tables, plan, terms, step_s, measured, host=_host_error(layers)))
    return Estimate(
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        terms=terms,
        sources=sources,
        tokens_per_s=batch.tokens / step_s,
        mfu=model_flops_per_step(problem.model, batch) / (step_s * peak),
        cross_region_bytes=sum(use.activation_bytes + use.gradient_bytes for use in links),
        cost_usd=bill.usd,
        energy_j=bill.energy_j,
        workers=workers,
        links=links,
    )


def _terms(times: StepTimes, last: int) -> dict[str, float]:
    """Split the step, as the worker that ends last sees it or who it waits for, into terms that add up."""
    schedule = times.schedule
    stage = _awaited(times, int(times.place.stage[last]))
    # The reduction waits for the slowest of those that sum together, not for who ends last: it is that one's pipeline
    # that is split. Where regions lead by turns nobody waits beyond its own.
    peers = times.place.stage == stage
    if times.ways is not None:
        peers &= times.place.region == times.place.region[last]
    slowest = int(np.flatnonzero(peers)[times.ends_s[peers].argmax()])
    counts = np.bincount(schedule.routes.ravel(), minlength=len(schedule.forward_s))
    same = schedule.holder == schedule.holder[slowest]
    compute = float((counts * (schedule.forward_s + schedule.backward_s))[same].sum())
    messages, nothing = times.messages, np.zeros_like(schedule.latency_s)
    # What would be waited for with free links is the pipeline's; what is waited beyond that, the links'.
    free = replace(
        schedule,
        latency_s=nothing,
        hold_s=nothing[..., None],
        link=messages.channel[..., None],
        links=messages.channels,
        shared=False,
    )
    ideal, _ = free.simulate()
    end, step_s, update = float(times.ends_s[slowest]), times.step_s, float(times.update_s[last])
    return {
        "compute": compute,
        "pipeline": float(ideal[slowest]) - compute,
        "transfer": end - float(ideal[slowest]),
        "reduction": step_s - update - end,
        "update": update,
    }


def _awaited(times: StepTimes, stage: int) -> int:
    """The stage whose sums a stage waits for before it updates (`polygon.cost.finish.done_s`): else its wait for that
    one's pipeline would be called a reduction."""
    reduced_s = times.reduced_s.copy()
    ends = [0, len(reduced_s) - 1]
    if times.tied_s > 0:
        later = ends[int(reduced_s[ends].argmax())]
        reduced_s[later] += times.tied_s
        stage = later if stage in ends else stage
    return int(reduced_s.argmax()) if times.norm_s > 0 else stage


def _worker_estimates(
    plan: Plan, problem: Problem, times: StepTimes, memory: list[MemoryBreakdown]
) -> tuple[WorkerEstimate, ...]:
    """Work and memory of every worker, stage by stage."""
    place, cluster = times.place, problem.cluster
    shares = np.bincount(times.schedule.routes.ravel(), minlength=len(place.stage))
    busy_s = shares * (times.schedule.forward_s + times.schedule.backward_s)
    within = np.arange(len(place.stage)) - place.offset[place.stage]
    columns = (place.stage, within, place.region, place.pool, place.tp, shares, busy_s)
    # Links change nothing of it: what-ifs of a plan have the same ones.
    known: tuple[Any, ...] | None = place.derived.get("estimates")
    same = known is not None and known[0] is memory and known[1] is cluster.pools
    if known is not None and same and np.array_equal(known[2], shares) and np.array_equal(known[3], busy_s):
        return tuple(known[4])
    # Those that peak alike have the same breakdown.
    peaks = {id(held): (held.total_bytes, held.owner) for held in memory}
    names = [region.name for region in cluster.regions]
    devices = [(pool.device.name, pool.device.memory_bytes) for pool in cluster.pools]
    made = tuple(
        WorkerEstimate(
            stage=stage,
            worker=worker,
            region=names[region],
            device=devices[pool][0],
            tp=tp,
            micro_batches=share,
            busy_s=busy,
            peak_bytes=peaks[id(held)][0],
            limit_bytes=devices[pool][1],
            memory_owner=peaks[id(held)][1],
        )
        for stage, worker, region, pool, tp, share, busy, held in zip(
            *(column.tolist() for column in columns), memory, strict=True
        )
    )
    place.derived["estimates"] = memory, cluster.pools, shares, busy_s, made
    return made


def _link_estimates(
    problem: Problem, times: StepTimes, step_s: float, moved: np.ndarray, reduced: np.ndarray
) -> tuple[LinkEstimate, ...]:
    """Traffic between regions (`traffic_bytes`), activations and their gradients apart from weight gradients."""
    names = [region.name for region in problem.cluster.regions]
    n = len(names)
    place, messages = times.place, times.messages
    # What messages pass (a node pair, a card, a capacity) is busy with all that pass it; a link of two regions as much
    # as the busiest thing that one of its messages passes.
    passes = messages.link >= 0
    used_s = np.bincount(messages.link[passes], weights=messages.hold_s[passes], minlength=messages.links)
    busiest = np.zeros((n, n))
    held_s = np.where(passes, used_s[messages.link], 0.0).max(axis=-1, initial=0.0)
    np.maximum.at(busiest, (place.region[messages.sender], place.region[messages.receiver]), held_s)
    cluster, pairs = problem.cluster, pairs_at_work(place, n, problem.runtime.sum_turns)
    rate = np.minimum(pairs * cluster.bytes_per_s, cluster.capacity_bytes_per_s)
    summed_s = np.divide(reduced, rate, out=np.zeros((n, n)), where=rate > 0)
    busy = np.minimum(1.0, (busiest + summed_s) / step_s)
    moved_list, reduced_list, busy_list = moved.tolist(), reduced.tolist(), busy.tolist()
    return tuple(
        LinkEstimate(
            source=names[a],
            target=names[b],
            activation_bytes=moved_list[a][b],
            gradient_bytes=reduced_list[a][b],
            busy_fraction=busy_list[a][b],
        )
        for a, b in np.argwhere(moved + reduced > 0).tolist()
    )


def _layers_used(plan: Plan, tables: CostTables) -> list[LayerTimes]:
    """Layer times of every kind of worker of a plan."""
    return [
        tables.times(pool, tp, plan.micro_batch_size, s.recompute, cp, s.ep, s.sequence_parallel).layers
        for s in plan.stages
        for pool, tp, cp in {(w.pool, w.tp, w.cp) for w in s.workers}
    ]


def _sources(used: list[LayerTimes]) -> tuple[dict[str, str], float | None]:
    """Where the numbers are from, and the error of compute if all of it was measured on such devices."""
    seen = {name for times in used for name in times.source.split("+")}
    sources = {"compute": "+".join(sorted(seen)), "transfer": "cluster file", "reduction": "cluster file"}
    # One stage that is not measured leaves all of it as sure as data sheets are.
    return sources, max(times.relative_error for times in used) if seen <= MEASURED else None


def host_error(plan: Plan, tables: CostTables) -> float:
    """Half of a 90 % interval over the logarithm of a plan's compute, of what the host needs to launch kernels."""
    return _host_error(_layers_used(plan, tables))


def _host_error(used: list[LayerTimes]) -> float:
    return math.log1p(max(times.host_error for times in used))


def known_of(
    tables: CostTables,
    plan: Plan,
    terms: dict[str, float],
    step_s: float,
    measured: float | None = None,
    host: float | None = None,
) -> Known:
    """What the prediction of a plan rests on; `host` is its `host_error`, if that is known already."""
    problem = tables.problem
    pools = problem.cluster.pools
    devices = {pools[worker.pool].device.name: pools[worker.pool].device for worker in plan.workers}
    links = (terms["transfer"] + terms["reduction"]) / step_s if 0 < step_s < np.inf else 0.0
    # Links of a plan over regions are taken for far ones all together: those inside take little of its step.
    apart = len(plan.regions(problem.cluster)) > 1
    return Known(
        group=group_of_run(problem.model, plan, devices.values()),
        runtime=problem.runtime.name,
        measured=measured,
        near=0.0 if apart else links,
        far=links if apart else 0.0,
        program=program_error(problem.runtime),
        host=host_error(plan, tables) if host is None else host,
    )
