"""What a plan is predicted to cost: step time by term, memory by worker, traffic by link, money and energy."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from polygon.cost.bill import Bill, bill_of
from polygon.cost.bounds import LowerBound, lower_bound
from polygon.cost.compute import model_flops_per_step
from polygon.cost.memory import MemoryBreakdown, stage_memory
from polygon.cost.reduction import ReductionCost, stage_reduction
from polygon.cost.schedule import ScheduleTimes, backward_order
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Messages, Placement, matrix_values, packed_bytes, price_messages
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


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimes:
    """Everything the step time is made of; the search looks at `step_s` alone."""

    schedule: ScheduleTimes
    messages: Messages
    place: Placement
    ends_s: np.ndarray
    reductions: tuple[ReductionCost, ...]
    tied_s: float
    norm_s: float
    """From the moment when the last rank knows its part of the gradient's norm until all know all of it."""
    update_s: np.ndarray
    """Shape (workers,)."""
    layers: tuple[int, ...]
    """Of every stage."""

    def reduction_span_s(self, stage: int) -> tuple[float, float]:
        """When a stage begins and ends to reduce its gradients.

        Layers are reduced one after another while backward of the last micro-batch still runs. With n layers alike,
        backward B of the last worker ending at e, and R for the whole reduction: from e - B (n - 1) / n to
        max(e + R / n, e - B (n - 1) / n + R).
        """
        mine = np.flatnonzero(self.place.stage == stage)
        last = mine[self.ends_s[mine].argmax()]
        end_s, whole_s, n = float(self.ends_s[last]), self.reductions[stage].total_s, self.layers[stage]
        begin_s = end_s - float(self.schedule.backward_s[last]) * (n - 1) / n
        return begin_s, max(end_s + whole_s / n, begin_s + whole_s)

    @property
    def done_s(self) -> np.ndarray:
        """When each worker has reduced and updated, shape (workers,)."""
        done = np.empty_like(self.ends_s)
        for s in range(len(self.reductions)):
            done[self.place.stage == s] = self.reduction_span_s(s)[1]
        if self.tied_s:
            ends = (self.place.stage == 0) | (self.place.stage == len(self.reductions) - 1)
            done[ends] = done[ends].max() + self.tied_s
        if self.norm_s:
            done[:] = done.max() + self.norm_s
        done += self.update_s
        outer_s = max(cost.outer_s for cost in self.reductions)
        return done.max() + np.full_like(done, outer_s) if outer_s else done

    @property
    def step_s(self) -> float:
        """Makespan of the whole step [s]; inf where a needed link is missing."""
        return float(self.done_s.max())


def alike(*columns: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Different rows of some integer columns, and for every place the number of its row."""
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    number = {row: k for k, row in enumerate(dict.fromkeys(rows))}
    return list(number), np.array([number[row] for row in rows])


def schedule_times(plan: Plan, tables: CostTables, place: Placement, messages: Messages) -> ScheduleTimes:
    """Durations of a plan's actions and messages, ready to simulate."""
    forward, backward = np.empty(len(place.stage)), np.empty(len(place.stage))
    for s, stage in enumerate(plan.stages):
        kinds, kind = alike(place.pool[place.members(s)], place.tp[place.members(s)])
        of_kind = np.empty((2, len(kinds)))
        for k, (pool, tp) in enumerate(kinds):
            times = tables.times(pool, tp, plan.micro_batch_size, stage.recompute)
            of_kind[0, k] = times.forward_s[stage.last_layer] - times.forward_s[stage.first_layer]
            of_kind[1, k] = times.backward_s[stage.last_layer] - times.backward_s[stage.first_layer]
        forward[place.members(s)], backward[place.members(s)] = of_kind[:, kind]
        if stage.zero >= 2 and stage.width > 1:
            extra = sharding_traffic_s(plan, tables, place, s)
            span = slice(place.offset[s], place.offset[s] + stage.width)
            backward[span] += extra if stage.zero == 2 else 2 * extra
            forward[span] += 0 if stage.zero == 2 else extra
    forward, backward = forward + messages.codec_s[0], backward + messages.codec_s[1]
    order, first = backward_order(windows(plan))
    return ScheduleTimes(
        routes=plan.routes + place.offset[None, :],
        order=order,
        first=first,
        forward_s=forward,
        backward_s=backward,
        down_busy_s=messages.busy_s[0],
        down_latency_s=messages.latency_s[0],
        up_busy_s=messages.busy_s[1],
        up_latency_s=messages.latency_s[1],
        down_channel=messages.channel[0],
        up_channel=messages.channel[1],
        channels=messages.channels,
    )


def shard_groups(place: Placement, stage: int) -> np.ndarray:
    """Over how many workers each worker of a stage shards under ZeRO: those of its pool and degree, shape (width,)."""
    mine = place.stage == stage
    key = place.pool[mine] * 64 + place.tp[mine]
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    return counts[inverse]


def sharding_traffic_s(plan: Plan, tables: CostTables, place: Placement, stage: int) -> np.ndarray:
    """Seconds per micro-batch to gather weights once or scatter gradients once within shard groups, shape (width,)."""
    held = plan.stages[stage]
    shards = shard_groups(place, stage)
    mine = np.flatnonzero(place.stage == stage)
    seconds = np.zeros(len(mine))
    for k, i in enumerate(mine):
        if shards[k] > 1:
            pool = tables.problem.cluster.pools[place.pool[i]]
            memory = tables.memory(int(place.tp[i]), plan.micro_batch_size, held.recompute)
            n_bytes = (memory.parameters[held.last_layer] - memory.parameters[held.first_layer]) * place.tp[i]
            n_bytes *= tables.problem.batch.element_bytes
            inside = shards[k] * place.tp[i] <= pool.devices_per_node
            link = pool.intra_node if inside else pool.inter_node
            seconds[k] = (shards[k] - 1) * link.transfer_s(n_bytes / shards[k])
    return seconds


def held_parameters(plan: Plan, tables: CostTables, stage: int, tp: int) -> float:
    """Parameters on one device of a worker of `tp` devices, a tied head's own copy included."""
    held = plan.stages[stage]
    memory = tables.memory(tp, plan.micro_batch_size, held.recompute)
    count = float(memory.parameters[held.last_layer] - memory.parameters[held.first_layer])
    if held.first_layer > 0 and held.last_layer == tables.problem.model.layers:
        count += memory.layers.tied_parameters
    return count


def stages_on_pairs(plan: Plan, place: Placement, regions: int) -> np.ndarray:
    """How many stages have workers in both regions of every pair, shape (regions, regions)."""
    present = np.zeros((len(plan.stages), regions), dtype=np.int64)
    present[place.stage, place.region] = 1
    return present.T @ present


def step_times(plan: Plan, tables: CostTables) -> StepTimes:
    """Simulate a plan's schedule and price its reduction and update."""
    problem = tables.problem
    place = Placement.of(plan, tables.links)
    messages = price_messages(plan, problem.model, problem.batch, tables.links, place)
    schedule = schedule_times(plan, tables, place, messages)
    ends_s, _ = schedule.simulate()
    shared = stages_on_pairs(plan, place, len(problem.cluster.regions))
    reductions = []
    updates = np.empty(len(place.stage))
    for s, stage in enumerate(plan.stages):
        degrees = set(place.tp[place.members(s)].tolist())
        n_values = max(held_parameters(plan, tables, s, tp) * tp for tp in degrees)
        cost = stage_reduction(
            plan, s, n_values, problem.batch, tables.links, place, shared, matrix_values(problem.model)
        )
        reductions.append(cost.with_local_steps(plan.local_steps))
        mine = place.members(s)
        shards = shard_groups(place, s) if stage.zero else np.ones(stage.width, dtype=np.int64)
        kinds, kind = alike(place.pool[mine], place.tp[mine], shards)
        updates[mine] = np.array([tables.update_s(p, held_parameters(plan, tables, s, tp) / k) for p, tp, k in kinds])[
            kind
        ]
    return StepTimes(
        schedule=schedule,
        messages=messages,
        place=place,
        ends_s=ends_s,
        reductions=tuple(reductions),
        tied_s=tied_embedding_s(plan, tables),
        norm_s=gradient_norm_s(plan, tables, place),
        update_s=updates,
        layers=tuple(stage.last_layer - stage.first_layer for stage in plan.stages),
    )


def gradient_norm_s(plan: Plan, tables: CostTables, place: Placement) -> float:
    """Seconds to agree on the gradient's norm before the update: the longest latency between the plan's regions.

    A number or two, exchanged directly between the regions; with local updates regions do not wait for one another.
    """
    used = np.unique(place.region)
    if plan.local_steps > 1 or len(used) == 1:
        return 0.0
    latency_s = tables.problem.cluster.latency_s[np.ix_(used, used)]
    linked = tables.problem.cluster.bytes_per_s[np.ix_(used, used)] > 0
    return float(latency_s[linked & ~np.eye(len(used), dtype=bool)].max(initial=0.0))


def tied_embedding_s(plan: Plan, tables: CostTables) -> float:
    """Seconds to exchange the gradient of embeddings that first and last stage both hold; 0 if one stage does."""
    model, batch = tables.problem.model, tables.problem.batch
    if not model.tied_embeddings or model.family == "vit" or len(plan.stages) == 1:
        return 0.0
    first, last = plan.stages[0].workers, plan.stages[-1].workers
    n_values = model.head_weight_parameters()
    best = np.inf
    for a in {w.pool for w in first}:
        for b in {w.pool for w in last}:
            link = tables.problem.cluster.node_link(a, b)
            if link is not None:
                source, target = int(tables.links.region[a]), int(tables.links.region[b])
                mode = plan.link_use(source, target).weight_gradients if source != target else "none"
                best = min(best, link.transfer_s(packed_bytes(n_values, batch.gradient_bytes, mode)))
    return best


def worker_memory(plan: Plan, tables: CostTables, place: Placement) -> list[MemoryBreakdown]:
    """Peak bytes of one device of every worker, stage by stage."""
    result: list[MemoryBreakdown] = []
    for s, stage in enumerate(plan.stages):
        kinds, kind = alike(place.tp[place.members(s)], in_flight(plan, s), shard_groups(place, s))
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
    peak = sum(
        cluster.pools[w.pool].device.peak_flops(batch.precision) * w.tp for stage in plan.stages for w in stage.workers
    )
    bill = step_bill(problem, plan, times)
    memory = worker_memory(plan, tables, times.place)
    workers = tuple(
        WorkerEstimate(
            stage=int(times.place.stage[i]),
            worker=int(i - times.place.offset[times.place.stage[i]]),
            region=cluster.regions[times.place.region[i]].name,
            device=cluster.pools[times.place.pool[i]].device.name,
            tp=int(times.place.tp[i]),
            micro_batches=int(shares),
            busy_s=float(shares * (times.schedule.forward_s[i] + times.schedule.backward_s[i])),
            peak_bytes=memory[i].total_bytes,
            limit_bytes=cluster.pools[times.place.pool[i]].device.memory_bytes,
            memory_owner=memory[i].owner,
        )
        for i, shares in enumerate(np.concatenate([plan.shares(s) for s in range(len(plan.stages))]))
    )
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
    free = ScheduleTimes(
        routes=schedule.routes,
        order=schedule.order,
        first=schedule.first,
        forward_s=schedule.forward_s,
        backward_s=schedule.backward_s,
        down_busy_s=np.zeros_like(schedule.down_busy_s),
        down_latency_s=np.zeros_like(schedule.down_latency_s),
        up_busy_s=np.zeros_like(schedule.up_busy_s),
        up_latency_s=np.zeros_like(schedule.up_latency_s),
        down_channel=schedule.down_channel,
        up_channel=schedule.up_channel,
        channels=schedule.channels,
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


def step_bill(problem: Problem, plan: Plan, times: StepTimes) -> Bill:
    """Time, money, energy and egress of one step of a plan."""
    moved, reduced = traffic_bytes(problem, plan, times)
    return bill_of(problem, plan, times.step_s, moved + reduced)


def traffic_bytes(problem: Problem, plan: Plan, times: StepTimes) -> tuple[np.ndarray, np.ndarray]:
    """Bytes from region to region per step: activations and their gradients, and weight gradients.

    Returns
    -------
    tuple of ndarray, shape (regions, regions) each
    """
    n = len(problem.cluster.regions)
    place, messages = times.place, times.messages
    pair = (place.region[messages.sender] * n + place.region[messages.receiver]).ravel()
    moved = np.bincount(pair, weights=messages.n_bytes.ravel(), minlength=n * n).reshape(n, n)
    np.fill_diagonal(moved, 0.0)
    reduced = np.zeros((n, n))
    for reduction in times.reductions:
        for a, b, n_bytes in reduction.across_bytes:
            reduced[a, b] += n_bytes
    if times.tied_s > 0 and len(plan.stages) > 1:
        a, b = (int(place.region[place.stage == s][0]) for s in (0, len(plan.stages) - 1))
        if a != b:
            values = problem.model.head_weight_parameters()
            for x, y in ((a, b), (b, a)):
                mode = plan.link_use(x, y).weight_gradients
                reduced[x, y] += packed_bytes(values, problem.batch.gradient_bytes, mode)
    return moved, reduced


def _link_estimates(plan: Plan, problem: Problem, times: StepTimes, step_s: float) -> tuple[LinkEstimate, ...]:
    """Traffic between regions, activations and their gradients apart from weight gradients."""
    names = [region.name for region in problem.cluster.regions]
    n = len(names)
    place, messages = times.place, times.messages
    moved, reduced = traffic_bytes(problem, plan, times)
    workers = len(place.stage)
    channel = (messages.sender * n + place.region[messages.receiver]).ravel()
    busy = np.bincount(channel, weights=messages.busy_s.ravel(), minlength=workers * n).reshape(workers, n)
    return tuple(
        LinkEstimate(
            source=names[a],
            target=names[b],
            activation_bytes=float(moved[a, b]),
            gradient_bytes=float(reduced[a, b]),
            busy_fraction=float(busy[place.region == a, b].max(initial=0.0)) / step_s,
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
        s = int(np.argmax([reduction.total_s for reduction in times.reductions]))
        return f"gradient reduction of stage {s}"
    return {"pipeline": "pipeline filling and imbalance of stages", "update": "optimizer update"}.get(largest, largest)
