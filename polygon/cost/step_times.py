"""When every worker of a plan is done with a step: its schedule simulated, its reductions and updates priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from polygon.cost.finish import done_s, led_s, reduction_spans_s
from polygon.cost.network import gather_s, group_of
from polygon.cost.overlap import Overlap, gathered_s, overlap_of
from polygon.cost.sharding import ShardingTraffic
from polygon.cost.shared_links import busy_on_shared, last_end_s
from polygon.cost.simulation import ScheduleTimes, backward_order
from polygon.cost.stage_reduction import ReductionCost, Ways, stage_devices, stage_reduction, tied_reduction
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Messages, Placement, boundary_values, packed_bytes, price_messages
from polygon.cost.zero_sums import summed_part
from polygon.domain.plan import Plan
from polygon.domain.runtime import Runtime
from polygon.domain.schedule import windows
from polygon.domain.uniform import uniform_config, uniform_order

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimes:
    """Everything the step time is made of; the search looks at `step_s` alone."""

    schedule: ScheduleTimes
    messages: Messages
    place: Placement
    ends_s: np.ndarray
    reductions: tuple[ReductionCost, ...]
    sums: np.ndarray
    """Seconds of every stage's reduction, of what comes last of it, of gathering weights, and with local steps of the
    exchange between regions: shape (4, stages)."""
    tied: ReductionCost
    """Of the gradient of tied embeddings, where it is summed by itself."""
    norm_s: float
    """From the moment when the last rank knows its part of the gradient's norm until all know all of it."""
    update_s: np.ndarray
    """Shape (workers,)."""
    layers: tuple[int, ...]
    """Of every stage."""
    overlaps: Overlap
    chunks: int
    first_s: float
    """Of ZeRO's traffic in the first layers, which nothing hides."""
    shared_cards_s: np.ndarray
    shared_pairs_s: np.ndarray
    """Seconds that each stage's reduction keeps links busy which others use too (`shared_links.busy_on_shared`)."""
    window: float = 1.0
    """Part used of the last backward beside which the runtime sums; less only where somebody asks what that brings."""

    @property
    def tied_s(self) -> float:
        """Seconds of the sum of tied embeddings' gradient in every step."""
        return self.tied.total_s

    @cached_property
    def reduction_spans_s(self) -> np.ndarray:
        """When every stage begins [0] and ends [1] to sum its gradients, alone on its links: (2, stages)."""
        whole_s, last_s = self.sums[:2]
        return reduction_spans_s(
            self.ends_s,
            self.window * self.schedule.backward_s,
            self.place.offset,
            self.chunks,
            whole_s,
            last_s,
            np.array(self.layers, dtype=float),
            self.overlaps,
        )

    def reduction_span_s(self, stage: int) -> tuple[float, float]:
        """When a stage begins and ends to sum its gradients (`polygon.cost.overlap.summed_s`)."""
        begin_s, end_s = self.reduction_spans_s[:, stage].tolist()
        return begin_s, end_s

    @cached_property
    def outer_s(self) -> np.ndarray:
        """Seconds after the update, the mean per step, that each stage needs where regions take local steps, else 0."""
        alone_s: np.ndarray = self.sums[3]
        # Stages meet at the same time: what shares a pair's capacity is done when the last of them is.
        if alone_s.any():
            alone_s = np.maximum(alone_s, last_end_s(np.zeros_like(alone_s), self.shared_pairs_s))
        return alone_s

    @property
    def whole_reductions_s(self) -> np.ndarray:
        """Seconds that each stage's reduction takes, hidden part and waiting for shared links included: (stages,)."""
        alone_s = self.sums[0] + self.outer_s
        ends_s = self.reduction_spans_s[1]
        waits = self.reduced_s > ends_s
        found: np.ndarray = alone_s + np.subtract(self.reduced_s, ends_s, out=np.zeros_like(ends_s), where=waits)
        return found

    @cached_property
    def reduced_s(self) -> np.ndarray:
        """When each stage has reduced its gradients, links shared with other stages considered, shape (stages,)."""
        begin_s, spans_s = self.reduction_spans_s
        end_s: np.ndarray = spans_s
        # With local steps nothing crosses regions before the update: there `outer_s` shares the pairs.
        for busy_s in (self.shared_cards_s,) if self.outer_s.any() else (self.shared_cards_s, self.shared_pairs_s):
            end_s = np.maximum(end_s, last_end_s(begin_s, busy_s))
        return end_s

    @property
    def ways(self) -> Ways | None:
        """Where regions may lead by turns, what gradients take from one to another."""
        return self.reductions[0].ways

    @cached_property
    def done_s(self) -> np.ndarray:
        """When each worker has reduced and updated, shape (workers,); where regions lead, the mean per step."""
        if self.ways is not None:
            seen_s = gathered_s(float(self.sums[2, 0]), float(self.schedule.forward_s.max()), self.overlaps)
            return led_s(
                self.ends_s,
                self.window * self.schedule.backward_s,
                self.place.region,
                *self.ways,
                float(self.layers[0]),
                self.update_s,
                seen_s + self.first_s,
                self.overlaps,
            )
        done = done_s(
            self.reduced_s,
            self.place.offset,
            self.chunks,
            self.schedule.forward_s,
            self.update_s,
            self.sums[2],
            self.tied_s,
            self.norm_s,
            self.first_s,
            self.overlaps,
        )
        # The exchange between regions stands for all: nobody begins the next round before it.
        return np.full_like(done, done.max() + self.outer_s.max()) if self.outer_s.any() else done

    @property
    def step_s(self) -> float:
        """Makespan of the whole step [s]; inf where a needed link is missing."""
        return float(self.done_s.max())


def sums_of(reductions: Sequence[ReductionCost]) -> np.ndarray:
    """`StepTimes.sums` of the reductions of all stages, shape (4, stages) [s]."""
    return np.array([(c.streamed_s, c.last_s, c.gather_s, c.outer_s) for c in reductions]).T.copy()


def alike(*columns: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Different rows of some integer columns, and for every place the number of its row."""
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    if len(rows) == 1:
        return rows, np.zeros(1, dtype=np.int64)
    which, different = numbered(rows)
    return different, which


def numbered(rows: Sequence[Row]) -> tuple[np.ndarray, list[Row]]:
    """For every place the number of its row, and the different rows."""
    number = {row: k for k, row in enumerate(dict.fromkeys(rows))}
    return np.array([number[row] for row in rows]), list(number)


def stage_seconds(
    plan: Plan, tables: CostTables, s: int, *, pool: int, tp: int, shards: int, place: Placement
) -> tuple[float, float, float]:
    """Forward and backward of a micro-batch on a worker of a stage, and ZeRO's traffic that nothing hides [s]."""
    stage, cp = plan.stages[s], int(place.cp[s])
    forward_s, backward_s, _ = tables.passing_s(
        stage,
        pool=pool,
        tp=tp,
        cp=cp,
        micro_batch_size=plan.micro_batch_size,
        accumulates=stage.zero < 3 or shards < 2,
    )
    if stage.zero < 2 or shards < 2:
        return forward_s, backward_s, 0.0
    pools, _, members = stage_devices(place, s, tables.links)
    traffic = ShardingTraffic(
        tables,
        stage,
        pool=pool,
        tp=tp,
        cp=cp,
        shards=shards,
        per_node=int(members[pools == pool][0]),
        micro_batch_size=plan.micro_batch_size,
    )
    return forward_s + traffic.forward_s, backward_s + traffic.backward_s, traffic.first_s


def seen_s(messages: Messages, runtime: Runtime) -> np.ndarray | None:
    r"""Seconds of every message in which neither of its ends computes, shape (2, micro_batches, stages - 1); None where
    that is none of any.

    All of them, unless the runtime sends beside compute: then, of a message of n bytes that keeps its link busy for b
    seconds, what is neither in its buffers of B bytes nor on its way, :math:`b (1 - B / n) - \alpha`.
    """
    if not messages.latency_s.size or (runtime.p2p_overlap and not runtime.p2p_buffer_bytes):
        return None
    if runtime.p2p_overlap:
        with np.errstate(invalid="ignore"):
            left_s = messages.busy_s * (1 - runtime.p2p_buffer_bytes / messages.n_bytes) - messages.latency_s
        # A missing link is in the simulation's own time.
        found: np.ndarray = np.where(np.isfinite(messages.busy_s), np.maximum(left_s, 0.0), 0.0)
    else:
        found = messages.busy_s + messages.latency_s
    return found


def waiting_s(sent_s: np.ndarray, *, apart: bool, interleaved: bool) -> np.ndarray:
    """Seconds in which every stage only sends and receives, in forward [0] and in backward [1] of a micro-batch.

    In 1F1B a stage sends an activation down while the gradient of an earlier micro-batch comes up from there, computes
    that backward, and sends its gradient up while the next activation comes down: one exchange with the stage behind
    it, one with the stage before it, each as long as the longer of its two messages. Where devices hold several stages
    (`interleaved`), all four messages go at once and share the device's card: the longer of a forward's two and the
    longer of a backward's. If exchanges are `apart`, every message is waited for.

    Parameters
    ----------
    sent_s : ndarray, shape (2, ..., stages - 1)
        Of the messages between each stage and the next, down [0] and up [1].

    Returns
    -------
    ndarray, shape (2, ..., stages)

    References
    ----------
    Megatron-LM, `forward_backward_pipelining_without_interleaving` and `..._with_interleaving`; torch's `Schedule1F1B`
    has the same two exchanges.
    """
    # The first stage has nobody before it, the last nobody behind it.
    none = np.zeros((*sent_s.shape[:-1], 1))
    below, above = np.concatenate([sent_s, none], axis=-1), np.concatenate([none, sent_s], axis=-1)
    if apart:
        found: np.ndarray = below + above
    elif interleaved:
        found = np.maximum(below, above)
    else:
        found = np.stack([below.max(axis=0), above.max(axis=0)])
    return found


def received_s(plan: Plan, tables: CostTables, place: Placement) -> np.ndarray | None:
    """Seconds of forward and backward in which each worker stands still for what it makes of a message that came, shape
    (2, workers); None where that is nothing.

    Its host makes the buffer, the ranks of a tensor-parallel group put its parts together.
    """
    problem, stages = tables.problem, len(plan.stages)
    rate, gathers = problem.runtime.host_buffer_bytes_per_s, problem.runtime.message_gathers
    if stages == 1 or not (rate or gathers):
        return None
    values = boundary_values(problem.model, problem.batch, plan.micro_batch_size) / plan.stages[0].workers[0].cp
    found = np.zeros((2, len(place.stage)))
    if rate:
        found += 4 * values / rate
    if gathers:
        kinds, kind = alike(place.pool, place.tp)
        n_bytes, pools = values * problem.batch.element_bytes, problem.cluster.pools
        each = [gather_s(n_bytes, group_of(pools[pool], tp, tp)) if tp > 1 else 0.0 for pool, tp in kinds]
        found += np.array([[1], [gathers]]) * tables.links.factor * np.array(each)[kind]
    # Nobody is before the first stage, or behind the last.
    found[0, place.members(0)] = found[1, place.members(stages - 1)] = 0.0
    return found


def blocked_s(waits_s: np.ndarray, routes: np.ndarray, workers: int) -> np.ndarray:
    """Seconds per micro-batch in which each worker only sends or receives: in forward and backward, shape (2, workers).

    Parameters
    ----------
    waits_s : ndarray, shape (2, micro_batches, stages)
        Of `waiting_s`, down and up.
    """
    # The mean over the micro-batches that a worker takes; one without any waits for none.
    share = np.maximum(np.bincount(routes.ravel(), minlength=workers), 1)
    return np.stack([np.bincount(routes.ravel(), weights=way.ravel(), minlength=workers) for way in waits_s]) / share


def held_parameters(plan: Plan, tables: CostTables, stage: int, tp: int) -> float:
    """Parameters on one device of a worker of `tp` devices, a tied head's own copy included."""
    held = plan.stages[stage]
    memory = tables.memory(
        tp, plan.micro_batch_size, held.recompute, held.workers[0].cp, held.ep, held.sequence_parallel
    )
    count = float(memory.parameters[held.last_layer] - memory.parameters[held.first_layer])
    # A head apart from the embedding has the tied weight once more.
    if held.first_layer > 0 and held.last_layer == tables.problem.model.layers:
        count += memory.layers.tied_parameters
    return count


def spread_parameters(plan: Plan, tables: CostTables, stage: int, tp: int) -> float:
    """Of `held_parameters` the experts, of which the other devices of an expert-parallel group have others; 0 where
    there is no such group."""
    held = plan.stages[stage]
    if held.ep == 1:
        return 0.0
    layers = tables.layers_of(held, tp=tp, micro_batch_size=plan.micro_batch_size)
    return float(layers.spread_over(held.ep)[held.first_layer : held.last_layer].sum())


def part_at_end(plan: Plan, tables: CostTables, group: int) -> float:
    """Part of the gradients that stages on one group of workers sum that comes last: the first layer's, and with an
    embedding, whose backward takes no time, that of the layer before which it is."""
    stage, tied = plan.stages[group], tied_parameters(plan, tables, group)
    tp = stage.workers[0].tp
    memory = tables.memory(
        tp, plan.micro_batch_size, stage.recompute, stage.workers[0].cp, stage.ep, stage.sequence_parallel
    )
    first = stage.first_layer
    after = min(first + (2 if first == 0 else 1), stage.last_layer)
    least = tp * float(memory.parameters[after] - memory.parameters[first]) - (tied if first == 0 else 0.0)
    held = sum(held_parameters(plan, tables, part, tp) for part in range(group, len(plan.stages), plan.groups))
    return max(0.0, least) / (tp * held - tied) if tp * held > tied else 1.0


def stages_on_pairs(plan: Plan, place: Placement, regions: int) -> np.ndarray:
    """How many stages have workers in both regions of every pair, shape (regions, regions)."""
    present = np.zeros((len(plan.stages), regions), dtype=np.int64)
    present[place.stage, place.region] = 1
    return present.T @ present


def step_times(plan: Plan, tables: CostTables) -> StepTimes:
    """Simulate a plan's schedule and price its reduction and update."""
    known: StepTimes | None = tables.paced_times.get((plan,))
    if known is not None:
        return known
    durations, terms = plan_terms(plan, tables)
    order, first = backward_order(windows(plan))
    schedule = ScheduleTimes(order=order, first=first, chunks=plan.chunks, ranks=plan.order, **durations)
    return StepTimes(schedule=schedule, ends_s=schedule.simulate()[0], **terms)


def unpaced_times(plan: Plan, tables: CostTables) -> StepTimes:
    """A plan's step but for its spans: no order of the backwards, and no ends."""
    durations, terms = plan_terms(plan, tables)
    none = np.empty(0, dtype=np.int64)
    schedule = ScheduleTimes(order=none, first=none, chunks=plan.chunks, **durations)
    return StepTimes(schedule=schedule, ends_s=np.full(len(schedule.forward_s), np.nan), **terms)


def plan_terms(plan: Plan, tables: CostTables) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `ScheduleTimes` and of `StepTimes` that do not follow from a plan's spans, kept for the next plan that
    differs in these alone."""
    objects = plan.stages, plan.links
    values = plan.micro_batch_size, plan.reduction, plan.local_steps, plan.chunks, uniform_order(plan)
    known = tables.plan_terms.get(objects, *values)
    if known is not None and np.array_equal(known[0], plan.routes):
        return known[1], known[2]
    made = _plan_terms(plan, tables)
    tables.plan_terms.put((plan.routes.copy(), *made), objects, *values)
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """What a step needs for who sits where and what is sent where, whatever layers the stages hold and how they are
    executed."""

    routes: np.ndarray
    """Of the plan, with workers numbered over all stages, shape (micro_batches, stages)."""
    messages: Messages
    waits_s: np.ndarray | None
    """Of forward and backward of each worker, where it only sends or receives, shape (2, workers)."""
    beside: bool
    """Whether the runtime computes while it sends."""
    shared: np.ndarray
    """Of `stages_on_pairs`."""
    tied: ReductionCost
    """Of `tied_reduction`."""
    farthest_s: float
    """Of `gradient_norm_s`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTerms:
    """What the stages on one group of workers need (one, unless they are interleaved).

    Attributes
    ----------
    forward_s, backward_s : ndarray, shape (stages of the group, width)
        Of a micro-batch in each, messages apart.
    first_s : float
        ZeRO's traffic that nothing hides.
    reduction : ReductionCost
        Of all their gradients, every step.
    n_bytes : float
        Of the gradients that a worker holds, and of the experts that others of its group hold in their place: what its
        region's cards pass.
    update_s : ndarray, shape (width,)
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    first_s: float
    reduction: ReductionCost
    n_bytes: float
    update_s: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupWork:
    """The part of `GroupTerms` that links between regions do not change; `n_values` are the gradients that a worker
    holds, all its tensor-parallel ranks together, `spread_values` those of them that are experts spread over several
    workers, and `part` is of `part_at_end`."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    first_s: float
    n_values: float
    spread_values: float
    part: float
    update_s: np.ndarray


NOTHING = ReductionCost(node_s=0.0, region_s=0.0, across_s=0.0)


def _plan_terms(plan: Plan, tables: CostTables) -> tuple[dict[str, Any], dict[str, Any]]:
    problem = tables.problem
    place = tables.placement(plan)
    traffic = _traffic(plan, tables, place)
    stages = len(plan.stages)
    forward_s, backward_s, updates = np.empty((3, len(place.stage)))
    reductions, n_bytes, first_s = [NOTHING] * stages, [0.0] * stages, 0.0
    for g in range(plan.groups):  # the sums of a group's stages count as those of its first
        terms = _group_terms(plan, tables, place, traffic, g)
        reductions[g] = terms.reduction.with_local_steps(plan.local_steps)
        n_bytes[g] = terms.n_bytes * summed_part(plan.stages[g].zero, problem.runtime)
        first_s = max(first_s, terms.first_s)
        for k, part in enumerate(range(g, stages, plan.groups)):
            mine = place.members(part)
            forward_s[mine], backward_s[mine], updates[mine] = terms.forward_s[k], terms.backward_s[k], terms.update_s
    shared_cards_s, shared_pairs_s = busy_on_shared(
        plan, place, tables.links, reductions, n_bytes, problem.runtime.sum_turns
    )
    sums, tied = sums_of(reductions), traffic.tied
    first, last = (np.unique(place.region[place.members(s)]) for s in (0, stages - 1))
    # Where a region holds one copy alone, neither has the gradient before regions meet, and they do in every step.
    if plan.local_steps > 1 and np.array_equal(first, last):
        tied = tied.with_local_steps(plan.local_steps)
    # Regions that meet after their updates sum a tied weight after what else its stages hold.
    sums[3, [0, plan.groups - 1]] += tied.outer_s
    silent = plan.local_steps > 1 or plan.gradient_everywhere
    return _durations(traffic, forward_s, backward_s), {
        "messages": traffic.messages,
        "place": place,
        "reductions": tuple(reductions),
        "sums": sums,
        "tied": tied,
        "norm_s": 0.0 if silent else traffic.farthest_s,
        "update_s": updates,
        "layers": tuple(stage.last_layer - stage.first_layer for stage in plan.stages),
        "overlaps": overlap_of(problem.runtime, problem.batch),
        "chunks": plan.chunks,
        "first_s": first_s,
        "shared_cards_s": shared_cards_s,
        "shared_pairs_s": shared_pairs_s,
    }


def _durations(traffic: Traffic, forward_s: np.ndarray, backward_s: np.ndarray) -> dict[str, Any]:
    """Fields of `ScheduleTimes` that spans do not change, from what every worker computes in a micro-batch."""
    messages = traffic.messages
    forward_s, backward_s = forward_s + messages.codec_s[0], backward_s + messages.codec_s[1]
    durations = {
        "routes": traffic.routes,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "link": messages.link,
        "hold_s": messages.hold_s,
        "latency_s": messages.latency_s,
        "links": messages.links if messages.shared else messages.channels,
        "shared": messages.shared,
    }
    if traffic.waits_s is None:
        return durations
    durations |= {"forward_s": forward_s + traffic.waits_s[0], "backward_s": backward_s + traffic.waits_s[1]}
    if traffic.beside:
        return durations
    # Who does not compute while it sends is busy for its messages' time itself; of the link a missing one is left.
    return durations | {
        "link": messages.channel[..., None],
        "hold_s": np.where(np.isinf(messages.busy_s), np.inf, 0.0)[..., None],
        "latency_s": np.zeros_like(messages.latency_s),
        "links": messages.channels,
        "shared": False,
    }


def _traffic(plan: Plan, tables: CostTables, place: Placement) -> Traffic:
    """A plan's traffic, kept for the next with the same workers, routes and packings."""
    # Pipelines that are all alike send at the same time: each gets its part of what they share.
    uniform = uniform_config(plan) is not None
    objects = (plan.links, *(stage.workers for stage in plan.stages))
    values = plan.micro_batch_size, plan.chunks, uniform
    known: Traffic | None = tables.plan_traffic.get(objects, *values)
    routes = plan.routes + place.offset[None, :]
    if known is not None and np.array_equal(known.routes, routes):
        return known
    problem, links = tables.problem, tables.links
    runtime = problem.runtime
    messages = price_messages(plan, problem.model, problem.batch, links, place, runtime, in_step=uniform)
    sent_s, waits_s = seen_s(messages, runtime), None
    if sent_s is not None:
        waited_s = waiting_s(sent_s, apart=runtime.exchanges_apart, interleaved=plan.chunks > 1)
        waits_s = blocked_s(waited_s, routes, len(place.stage))
    made_s = received_s(plan, tables, place)
    if made_s is not None:
        waits_s = made_s if waits_s is None else waits_s + made_s
    made = Traffic(
        routes=routes,
        messages=messages,
        waits_s=waits_s,
        beside=runtime.p2p_overlap,
        shared=stages_on_pairs(plan, place, len(problem.cluster.regions)),
        tied=tied_embedding(plan, tables),
        farthest_s=gradient_norm_s(tables, place),
    )
    tables.plan_traffic.put(made, objects, *values)
    return made


def _group_terms(plan: Plan, tables: CostTables, place: Placement, traffic: Traffic, group: int) -> GroupTerms:
    """What a group's stages need, kept for the next plan that has the same ones and the same traffic."""
    stages = plan.stages[group :: plan.groups]
    known: GroupTerms | None = tables.group_terms.get((traffic, *stages), group, plan.reduction)
    if known is not None:
        return known
    problem, work = tables.problem, group_work(plan, tables, place, group)
    made = GroupTerms(
        forward_s=work.forward_s,
        backward_s=work.backward_s,
        first_s=work.first_s,
        reduction=stage_reduction(
            plan,
            group,
            work.n_values,
            problem.batch,
            tables.links,
            place,
            traffic.shared,
            problem.runtime,
            problem.model,
            work.part,
            work.spread_values,
        ),
        n_bytes=float((work.n_values + (stages[0].ep - 1) * work.spread_values) * problem.batch.gradient_bytes),
        update_s=work.update_s,
    )
    tables.group_terms.put(made, (traffic, *stages), group, plan.reduction)
    return made


def group_work(plan: Plan, tables: CostTables, place: Placement, group: int) -> GroupWork:
    """What a group's stages compute; kept for plans that hold the same ones, whatever joins the regions."""
    parts = range(group, len(plan.stages), plan.groups)
    objects, values = tuple(plan.stages[part] for part in parts), (plan.micro_batch_size, plan.packed_inside)
    known: GroupWork | None = tables.group_work.get(objects, *values)
    if known is not None:
        return known
    stage, mine = plan.stages[group], place.members(group)
    forward, backward, first_s = np.empty((len(parts), stage.width)), np.empty((len(parts), stage.width)), 0.0
    for row, part in enumerate(parts):
        kinds, kind = alike(place.pool[mine], place.tp[mine], place.shards[part])
        of_kind = np.empty((2, len(kinds)))
        for k, (pool, tp, shards) in enumerate(kinds):
            of_kind[0, k], of_kind[1, k], seen_s = stage_seconds(
                plan, tables, part, pool=pool, tp=tp, shards=shards, place=place
            )
            first_s = max(first_s, seen_s)
        forward[row], backward[row] = of_kind[:, kind]
    degrees = set(place.tp[mine].tolist())
    held = {tp: sum(held_parameters(plan, tables, part, tp) for part in parts) for tp in degrees}
    spread = {tp: sum(spread_parameters(plan, tables, part, tp) for part in parts) for tp in degrees}
    # The optimizer works on what ZeRO leaves a device of the parameters: of experts only so many fewer devices share.
    divided = place.shards[group] if stage.zero else np.ones(stage.width, dtype=np.int64)
    also = stage.ep - 1 if stage.zero else 0
    kinds, kind = alike(place.pool[mine], place.tp[mine], divided)
    each = np.array([tables.update_s(pool, (held[tp] + also * spread[tp]) / k) for pool, tp, k in kinds])
    made = GroupWork(
        forward_s=forward,
        backward_s=backward,
        first_s=first_s,
        # Norms are whole on every tensor-parallel rank: a worker of more ranks holds more of them.
        n_values=max(tp * count for tp, count in held.items()) - tied_parameters(plan, tables, group),
        spread_values=max(tp * count for tp, count in spread.items()),
        part=part_at_end(plan, tables, group),
        update_s=each[kind],
    )
    tables.group_work.put(made, objects, *values)
    return made


def gradient_norm_s(tables: CostTables, place: Placement) -> float:
    """Seconds to agree on the gradient's norm before the update: the longest latency between a plan's regions.

    A number or two, exchanged directly between the regions. Nobody waits for them where every device finds the norm in
    the gradient that it has, nor, with local updates, for other regions.
    """
    links = tables.links
    pairs = place.derived.get("a pool of each of two regions")
    if pairs is None:
        used = np.unique(place.region).tolist()
        stands = np.array([int(np.flatnonzero(links.region == region)[0]) for region in used])
        a, b = np.nonzero(~np.eye(len(stands), dtype=bool))
        pairs = place.derived["a pool of each of two regions"] = stands[a], stands[b]
    return float(links.latency_s[pairs][links.bytes_per_s[pairs] > 0].max(initial=0.0))


def tied_parameters(plan: Plan, tables: CostTables, group: int) -> float:
    """Gradients of a tied weight that a worker of a group holds and sums apart from all others."""
    return sum(tied_in_stage(plan, tables, stage) for stage in range(group, len(plan.stages), plan.groups))


def tied_in_stage(plan: Plan, tables: CostTables, stage: int) -> float:
    """The same of one of its stages: of the first or the last."""
    last = len(plan.stages) - 1
    if last == 0 or stage not in (0, last) or not tables.problem.runtime.tied_once:
        return 0.0
    return float(tables.problem.model.tied_values)


def tied_embedding(plan: Plan, tables: CostTables) -> ReductionCost:
    """What it takes to sum the gradient of embeddings that first and last stage both hold; nothing if one does."""
    problem, place, links = tables.problem, tables.placement(plan), tables.links
    n_values, batch = problem.model.tied_values, problem.batch
    if not n_values or len(plan.stages) == 1:
        return NOTHING
    if problem.runtime.tied_once:
        return tied_reduction(plan, batch, links, place, problem.runtime, problem.model)
    first, last = place.members(0), place.members(len(plan.stages) - 1)
    if np.intersect1d(place.node[first], place.node[last]).size:
        # Ends that meet on a node sum there, all ranks of a worker at once, each its slice of the vocabulary.
        least = np.minimum(place.tp[first].min(), place.tp[last].min())
        n_bytes = n_values / int(least) * batch.gradient_bytes
        pools = place.pool[first]
        node_s = float((links.node_latency_s[pools] + n_bytes / links.node_bytes_per_s[pools]).min())
        return replace(NOTHING, node_s=node_s)
    best = replace(NOTHING, across_s=np.inf)
    for a in set(place.pool[first].tolist()):
        for b in set(place.pool[last].tolist()):
            rate = float(links.bytes_per_s[a, b])
            if rate > 0:
                source, target = int(links.region[a]), int(links.region[b])
                mode = plan.link_use(source, target).weight_gradients
                n_bytes = packed_bytes(n_values, batch.gradient_bytes, mode, width=problem.model.hidden_size)
                ways = ((source, target, n_bytes), (target, source, n_bytes)) if source != target else ()
                seconds = float(links.latency_s[a, b]) + n_bytes / rate
                if seconds < best.across_s:
                    best = replace(NOTHING, across_s=seconds, across_bytes=ways)
    return best
