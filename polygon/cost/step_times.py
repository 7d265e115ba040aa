"""When every worker of a plan is done with a step: its schedule simulated, its reductions and updates priced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polygon.cost.reduction import ReductionCost, stage_reduction
from polygon.cost.schedule import ScheduleTimes, backward_order
from polygon.cost.shared_links import busy_on_shared, last_end_s
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Messages, Placement, matrix_values, packed_bytes, price_messages
from polygon.domain.plan import Plan
from polygon.domain.schedule import windows


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
    shared_cards_s: np.ndarray
    shared_pairs_s: np.ndarray
    """Seconds that each stage's reduction keeps links busy which others use too (`shared_links.busy_on_shared`)."""

    def reduction_span_s(self, stage: int) -> tuple[float, float]:
        """When a stage begins and ends to reduce its gradients.

        Layers are reduced one after another while backward of the last micro-batch still runs; several are under way
        at once, but each passes the latency between regions. With n layers alike, backward B of the last worker ending
        at e, and R for the whole reduction, L of it latency: from e - B (n - 1) / n to
        max(e + L + (R - L) / n, e - B (n - 1) / n + R).
        """
        mine = np.flatnonzero(self.place.stage == stage)
        last = mine[self.ends_s[mine].argmax()]
        end_s, n = float(self.ends_s[last]), self.layers[stage]
        whole_s, latency_s = self.reductions[stage].total_s, self.reductions[stage].latency_s
        begin_s = end_s - float(self.schedule.backward_s[last]) * (n - 1) / n
        return begin_s, max(end_s + latency_s + (whole_s - latency_s) / n, begin_s + whole_s)

    @cached_property
    def outer_s(self) -> np.ndarray:
        """Seconds after the update, the mean per step, that each stage needs where regions take local steps, else 0."""
        alone_s = np.array([cost.outer_s for cost in self.reductions])
        if not alone_s.any():
            return alone_s
        return np.maximum(alone_s, last_end_s(np.zeros_like(alone_s), self.shared_pairs_s))

    @property
    def whole_reductions_s(self) -> np.ndarray:
        """Seconds that each stage's reduction takes, hidden part and waiting for shared links included: (stages,)."""
        alone_s = np.array([cost.total_s for cost in self.reductions]) + self.outer_s
        ends_s = np.array([self.reduction_span_s(s)[1] for s in range(len(self.reductions))])
        waits = self.reduced_s > ends_s
        return alone_s + np.subtract(self.reduced_s, ends_s, out=np.zeros_like(ends_s), where=waits)

    @cached_property
    def reduced_s(self) -> np.ndarray:
        """When each stage has reduced its gradients, links shared with other stages considered, shape (stages,)."""
        begin_s, end_s = np.array([self.reduction_span_s(s) for s in range(len(self.reductions))]).T
        for busy_s in (self.shared_cards_s,) if self.outer_s.any() else (self.shared_cards_s, self.shared_pairs_s):
            end_s = np.maximum(end_s, last_end_s(begin_s, busy_s))
        return end_s

    @cached_property
    def done_s(self) -> np.ndarray:
        """When each worker has reduced and updated, shape (workers,)."""
        done = self.reduced_s[self.place.stage]
        if self.tied_s:
            ends = (self.place.stage == 0) | (self.place.stage == len(self.reductions) - 1)
            done[ends] = done[ends].max() + self.tied_s
        if self.norm_s:
            done[:] = done.max() + self.norm_s
        done += self.update_s
        return np.full_like(done, done.max() + self.outer_s.max()) if self.outer_s.any() else done

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
        link=messages.link,
        hold_s=messages.hold_s,
        latency_s=messages.latency_s,
        links=messages.links,
        shared=messages.shared,
    )


def sharding_traffic_s(plan: Plan, tables: CostTables, place: Placement, stage: int) -> np.ndarray:
    """Seconds per micro-batch to gather weights once or scatter gradients once within shard groups, shape (width,)."""
    held = plan.stages[stage]
    shards = place.shards[stage]
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
    place = tables.placement(plan)
    messages = price_messages(plan, problem.model, problem.batch, tables.links, place)
    schedule = schedule_times(plan, tables, place, messages)
    ends_s, _ = schedule.simulate()
    shared = stages_on_pairs(plan, place, len(problem.cluster.regions))
    reductions, n_bytes = [], []
    updates = np.empty(len(place.stage))
    for s, stage in enumerate(plan.stages):
        degrees = set(place.tp[place.members(s)].tolist())
        n_values = max(held_parameters(plan, tables, s, tp) * tp for tp in degrees)
        cost = stage_reduction(
            plan, s, n_values, problem.batch, tables.links, place, shared, matrix_values(problem.model)
        )
        reductions.append(cost.with_local_steps(plan.local_steps))
        n_bytes.append(float(n_values * problem.batch.gradient_bytes))
        mine = place.members(s)
        shards = place.shards[s] if stage.zero else np.ones(stage.width, dtype=np.int64)
        kinds, kind = alike(place.pool[mine], place.tp[mine], shards)
        updates[mine] = np.array([tables.update_s(p, held_parameters(plan, tables, s, tp) / k) for p, tp, k in kinds])[
            kind
        ]
    shared_cards_s, shared_pairs_s = busy_on_shared(plan, place, tables.links, reductions, n_bytes)
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
        shared_cards_s=shared_cards_s,
        shared_pairs_s=shared_pairs_s,
    )


def gradient_norm_s(plan: Plan, tables: CostTables, place: Placement) -> float:
    """Seconds to agree on the gradient's norm before the update: the longest latency between the plan's regions.

    A number or two, exchanged directly between the regions. Nobody waits for them where every device finds the norm in
    the gradient that it has, nor, with local updates, for other regions.
    """
    used = np.unique(place.region)
    if plan.local_steps > 1 or len(used) == 1 or plan.gradient_everywhere:
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
