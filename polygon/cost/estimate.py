"""What a plan is predicted to cost: step time by term, memory by worker, traffic by link, money and energy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from polygon.cost.bill import step_bill, traffic_bytes
from polygon.cost.bounds import LowerBound, lower_bound
from polygon.cost.compute import model_flops_per_step
from polygon.cost.memory import MemoryBreakdown, stage_memory
from polygon.cost.step_times import StepTimes, alike, step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Placement
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import in_flight, windows


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
    """Share of the step in which the busiest sender's channel to the target is taken."""


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
    lower_bound_s: float
    lower_bounds_s: dict[str, float]
    """What compute, path, stages and regions prove, each joined with those before (`polygon.cost.bounds`)."""
    bound_by: str
    """The simplest of these that gives the bound."""
    gap: float
    """step_s / lower_bound_s - 1."""
    cross_region_bytes: float
    cost_usd: float
    energy_j: float
    """Upper estimate: every used device draws its rated power all the step."""
    workers: tuple[WorkerEstimate, ...]
    links: tuple[LinkEstimate, ...]
    limited_by: str

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def worker_memory(plan: Plan, tables: CostTables, place: Placement) -> list[MemoryBreakdown]:
    """Peak bytes of one device of every worker, stage by stage."""
    kept = tables.plan_memory.get(plan)
    if kept is not None:
        return kept
    result: list[MemoryBreakdown] = []
    window = windows(plan)
    for s, stage in enumerate(plan.stages):
        kinds, kind = alike(place.tp[place.members(s)], in_flight(plan, s, window), place.shards[s])
        of_kind = [
            stage_memory(
                tables.memory(tp, plan.micro_batch_size, stage.recompute).layers,
                stage.first_layer,
                stage.last_layer,
                in_flight=float(held),
                zero=stage.zero,
                shards=shards,
                batch=tables.problem.batch,
                outer=plan.local_steps > 1,
            )
            for tp, held, shards in kinds
        ]
        result += [of_kind[k] for k in kind]
    tables.plan_memory[plan] = result
    return result


def estimate(
    problem: Problem,
    plan: Plan,
    tables: CostTables | None = None,
    times: StepTimes | None = None,
    *,
    bound: LowerBound | None = None,
) -> Estimate:
    """Predict what one step of a plan costs.

    Parameters
    ----------
    tables : CostTables, optional
        Of the same problem, if they exist already.
    times : StepTimes, optional
        Of the plan, if they are known already.
    bound : LowerBound, optional
        In place of `lower_bound`, which takes longer than all the rest.

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
    terms = _terms(times, last)
    cluster, batch = problem.cluster, problem.batch
    links = _link_estimates(plan, problem, times, step_s)
    pool_flops = np.array([pool.device.peak_flops(batch.precision) for pool in cluster.pools])
    peak = float(pool_flops[times.place.pool] @ times.place.tp)
    bill = step_bill(problem, plan, times)
    workers = _worker_estimates(plan, problem, times, worker_memory(plan, tables, times.place))
    sources, relative_error = _sources(plan, tables)
    bound = bound or lower_bound(tables)
    return Estimate(
        step_s=step_s,
        low_s=step_s * max(0.0, 1 - relative_error),
        high_s=step_s * (1 + relative_error),
        terms=terms,
        sources=sources,
        tokens_per_s=batch.tokens / step_s,
        mfu=model_flops_per_step(problem.model, batch) / (step_s * peak),
        lower_bound_s=bound.seconds,
        lower_bounds_s=bound.parts,
        bound_by=bound.binding,
        gap=step_s / bound.seconds - 1,
        cross_region_bytes=sum(use.activation_bytes + use.gradient_bytes for use in links),
        cost_usd=bill.usd,
        energy_j=bill.energy_j,
        workers=workers,
        links=links,
        limited_by=_limit(terms, times, problem),
    )


def _terms(times: StepTimes, last: int) -> dict[str, float]:
    """Split the step, as the worker that ends last sees it, into terms that add up."""
    schedule = times.schedule
    stage = int(times.place.stage[last])
    slowest = int(np.flatnonzero(times.place.stage == stage)[times.ends_s[times.place.stage == stage].argmax()])
    count = int((schedule.routes[:, stage] == slowest).sum())
    compute = count * float(schedule.forward_s[slowest] + schedule.backward_s[slowest])
    messages, nothing = times.messages, np.zeros_like(schedule.latency_s)
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


def _worker_estimates(
    plan: Plan, problem: Problem, times: StepTimes, memory: list[MemoryBreakdown]
) -> tuple[WorkerEstimate, ...]:
    """Work and memory of every worker, stage by stage."""
    place, cluster = times.place, problem.cluster
    shares = np.concatenate([plan.shares(s) for s in range(len(plan.stages))])
    busy_s = shares * (times.schedule.forward_s + times.schedule.backward_s)
    within = np.arange(len(place.stage)) - place.offset[place.stage]
    columns = (place.stage, within, place.region, place.pool, place.tp, shares, busy_s)
    return tuple(
        WorkerEstimate(
            stage=stage,
            worker=worker,
            region=cluster.regions[region].name,
            device=cluster.pools[pool].device.name,
            tp=tp,
            micro_batches=share,
            busy_s=busy,
            peak_bytes=held.total_bytes,
            limit_bytes=cluster.pools[pool].device.memory_bytes,
            memory_owner=held.owner,
        )
        for stage, worker, region, pool, tp, share, busy, held in zip(
            *(column.tolist() for column in columns), memory, strict=True
        )
    )


def _link_estimates(plan: Plan, problem: Problem, times: StepTimes, step_s: float) -> tuple[LinkEstimate, ...]:
    """Traffic between regions, activations and their gradients apart from weight gradients."""
    names = [region.name for region in problem.cluster.regions]
    n = len(names)
    place, messages = times.place, times.messages
    moved, reduced = traffic_bytes(problem, plan, times)
    workers = len(place.stage)
    channel = (messages.sender * n + place.region[messages.receiver]).ravel()
    busy = np.bincount(channel, weights=messages.busy_s.ravel(), minlength=workers * n).reshape(workers, n)
    busiest = np.zeros((n, n))
    np.maximum.at(busiest, place.region, busy)
    moved_list, reduced_list, busy_list = moved.tolist(), reduced.tolist(), (busiest / step_s).tolist()
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


def _sources(plan: Plan, tables: CostTables) -> tuple[dict[str, str], float]:
    seen, error = set(), 0.0
    for stage in plan.stages:
        for pool, tp in {(w.pool, w.tp) for w in stage.workers}:
            times = tables.times(pool, tp, plan.micro_batch_size, stage.recompute)
            seen.add(times.source)
            error = max(error, times.relative_error)
    return {"compute": "+".join(sorted(seen)), "transfer": "cluster file", "reduction": "cluster file"}, error


def _limit(terms: dict[str, float], times: StepTimes, problem: Problem) -> str:
    """What would have to be better for the step to be faster, in words."""
    largest = max(terms, key=lambda name: terms[name])
    place, messages = times.place, times.messages
    if largest == "compute":
        work = times.schedule.forward_s + times.schedule.backward_s
        busy = np.bincount(times.schedule.routes.ravel(), minlength=len(work)) * work
        i = int(busy.argmax())
        return f"compute of stage {place.stage[i]} ({problem.cluster.pools[place.pool[i]].device.name})"
    if largest == "transfer" and messages.busy_s.size:
        slowest = int((messages.busy_s + messages.latency_s).argmax())
        ends = messages.sender.ravel()[slowest], messages.receiver.ravel()[slowest]
        names = [problem.cluster.regions[place.region[w]].name for w in ends]
        return f"transfer from {names[0]} to {names[1]}"
    if largest == "reduction":
        s = int(np.argmax(times.whole_reductions_s))
        return f"gradient reduction of stage {s}"
    return {"pipeline": "pipeline filling and imbalance of stages", "update": "optimizer update"}.get(largest, largest)
