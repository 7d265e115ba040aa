"""Uniform splits in bulk: their pipelines are all alike, so that one of them, a lane, is simulated.

The same effects and the same assembly as for any plan (`polygon.cost.step_times`): what a lane shares with the others
(links, sums of gradients, shards) is taken from the plan that has one micro-batch for each of them. Long steps are
simulated until they repeat themselves, and go on so. What splits have in common is kept: messages by `Round`, seconds
and memory by execution, the order of actions by the number of stages and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polygon.cost.compute import LayerTimes
from polygon.cost.estimate import group_rows, memory_of
from polygon.cost.finish import done_s, reduction_spans_s
from polygon.cost.memory import MemoryBreakdown, under_way_bytes
from polygon.cost.overlap import Overlap, overlap_of
from polygon.cost.shared_schedule import shared_ends_s
from polygon.cost.simulation import backward_order, routed_ends_s
from polygon.cost.stage_reduction import stage_reduction
from polygon.cost.step_times import (
    held_parameters,
    part_at_end,
    received_s,
    seen_s,
    spread_parameters,
    stage_seconds,
    tied_embedding,
    tied_parameters,
    waiting_s,
)
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Placement, price_messages
from polygon.domain.cluster import Pool
from polygon.domain.errors import require
from polygon.domain.plan import Plan, Stage
from polygon.domain.schedule import interleaved_actions, interleaved_units
from polygon.domain.uniform import ParallelConfig, uniform_plan

TERMS = ("compute", "tensor-parallel", "bubble", "p2p", "data-parallel", "optimizer")
"""What a lane's step is made of; tensor-parallel is with context and expert traffic."""
ROUNDS = 8
"""Times that as many micro-batches as there are groups are simulated, at least 16."""
SAME = 1e-9
"""Part by which two times may differ through rounding alone."""
NO_STARTS = np.zeros((0, 0, 0))


class Round(NamedTuple):
    """One micro-batch for every lane: what lanes share, whatever ZeRO and recomputation."""

    plan: Plan
    place: Placement
    sent_s: np.ndarray
    latency_s: np.ndarray
    """Shape (2, stages - 1): of the slowest lane's messages down [0] and up [1]; sent_s holds the channel."""
    waits_s: np.ndarray
    """Shape (2, stages): in which a stage only sends or receives a micro-batch (`step_times.waiting_s`)."""
    tied_s: float
    layers: np.ndarray
    """Of every stage, shape (stages,)."""
    stages: np.ndarray
    """Their numbers: a lane has one worker in each."""


class LaneOrder(NamedTuple):
    """The order of a lane's actions, whatever they take; `at`, `hold_s` and the like are room to work in."""

    routes: np.ndarray
    order: np.ndarray
    first: np.ndarray
    channel: np.ndarray
    """Shape (2, micro_batches, stages - 1)."""
    hold_s: np.ndarray
    latency_s: np.ndarray
    actions: np.ndarray
    at: np.ndarray
    holder: np.ndarray


class Execution(NamedTuple):
    """What a round costs under a recomputation, a ZeRO stage, ...: by stage, shape (stages,), or by group."""

    plan: Plan
    forward_s: np.ndarray
    backward_s: np.ndarray
    first_s: float
    sent_s: np.ndarray
    """Of the two above: tensor, context and expert traffic, shape (groups,)."""
    sums_s: np.ndarray
    """Sums of gradients, their latency, gathers of weights, shape (3, stages)."""
    update_s: np.ndarray
    rows: np.ndarray
    """Of `estimate.group_rows`, shape (5, groups)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEstimate:
    """What a uniform split is predicted to cost."""

    step_s: float
    terms_s: tuple[float, ...]
    """In the order of `TERMS`; they add up to step_s."""
    groups: MemoryBreakdown
    """Of every group of devices that holds the same stages: arrays of shape (groups,), or one number for all."""
    peak_bytes: float
    """Of the group that needs most."""
    count: int
    """Groups."""

    @property
    def memory(self) -> tuple[MemoryBreakdown, ...]:
        """Of every group of devices."""
        names = MemoryBreakdown.__dataclass_fields__
        columns = {name: np.broadcast_to(getattr(self.groups, name), self.count).tolist() for name in names}
        return tuple(MemoryBreakdown(**{name: columns[name][g] for name in names}) for g in range(self.count))

    @property
    def peak(self) -> MemoryBreakdown:
        """Of the group that needs most."""
        return max(self.memory, key=lambda group: group.total_bytes)


class Lanes:
    """Prices uniform splits of one problem on the devices of a pool; keeps what many of them have in common.

    Raises
    ------
    InputError
        Where the cluster has several pools and none is named.
    """

    def __init__(self, tables: CostTables, pool: Pool | None = None) -> None:
        pools = tables.problem.cluster.pools
        require(pool is not None or len(pools) == 1, "pools", len(pools), "one for uniform splits")
        self.tables, self.pool = tables, pool or pools[0]
        self.overlap: Overlap = overlap_of(tables.problem.runtime, tables.problem.batch)
        self._known: dict[Hashable, Any] = {}
        self._latest: tuple[ParallelConfig, Round] | None = None
        self._executions: dict[Hashable, Execution] = {}
        self._ends: dict[Hashable, np.ndarray] = {}
        """Of the latest round, as executions: they may differ in what comes after the last backward alone."""

    def estimate(self, config: ParallelConfig) -> LaneEstimate:
        """Step time, its terms and memory of a split.

        Raises
        ------
        InputError
            Where the split takes more devices than there are, or does not divide the batch or the layers.
        """
        batch = self.tables.problem.batch
        shared = config.dp * config.micro_batch_size
        count, rest = divmod(batch.global_batch, shared)
        require(
            rest == 0 and count > 0,
            "global_batch",
            batch.global_batch,
            f"a multiple of dp x micro_batch_size = {shared}",
        )
        first = self._round(config)
        how = self._execution(first, config)
        step_s, done, ends = self._step(first, how, config, count)
        terms = self._terms(first, how, config, count, step_s, done, ends)
        memory = self._memory(how, config, count)
        peak_bytes = float(np.max(memory.total_bytes))
        return LaneEstimate(step_s=step_s, terms_s=terms, groups=memory, peak_bytes=peak_bytes, count=config.pp)

    def _round(self, config: ParallelConfig) -> Round:
        """The round of a split, whatever its memory options."""
        bare = ParallelConfig(
            dp=config.dp,
            tp=config.tp,
            pp=config.pp,
            cp=config.cp,
            chunks=config.chunks,
            micro_batch_size=config.micro_batch_size,
            stage_layers=config.stage_layers,
        )
        if self._latest is None or self._latest[0] != bare:
            problem = self.tables.problem
            batch = replace(problem.batch, global_batch=config.dp * config.micro_batch_size)
            plan = uniform_plan(replace(problem, batch=batch), bare, self.pool)
            place = self.tables.placement(plan)
            messages = price_messages(
                plan, problem.model, problem.batch, self.tables.links, place, problem.runtime, in_step=True
            )
            sent_s, latency_s, waited_s = messages.busy_s, messages.latency_s, seen_s(messages, problem.runtime)
            # Lanes differ in the nodes between which their stages lie: all wait for the slowest in the end.
            slowest = int((sent_s + latency_s).sum(axis=(0, 2)).argmax())
            sent_s, latency_s = sent_s[:, slowest], latency_s[:, slowest]
            waits_s = np.zeros((2, len(plan.stages)))
            if waited_s is not None:
                waits_s = waiting_s(
                    waited_s[:, slowest], apart=problem.runtime.exchanges_apart, interleaved=config.chunks > 1
                )
            made_s = received_s(plan, self.tables, place)
            waits_s = waits_s if made_s is None else waits_s + made_s[:, place.offset]
            if not problem.runtime.p2p_overlap:
                sent_s, latency_s = np.zeros_like(sent_s), np.zeros_like(latency_s)
            found = Round(
                plan=plan,
                place=place,
                sent_s=sent_s,
                latency_s=latency_s,
                waits_s=waits_s,
                tied_s=tied_embedding(plan, self.tables).total_s,
                layers=np.array([stage.last_layer - stage.first_layer for stage in plan.stages], dtype=float),
                stages=np.arange(len(plan.stages)),
            )
            self._latest = bare, found
            self._executions.clear()
            self._ends.clear()
        return self._latest[1]

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make()
        return known

    def _execution(self, first: Round, config: ParallelConfig) -> Execution:
        """What the stages of a round cost under the options of a split."""
        sequence = config.sequence_parallel and config.tp > 1
        options = (config.recompute, config.recompute_blocks, sequence, config.ep, config.zero, config.shards)
        if options not in self._executions:
            self._executions[options] = self._priced(first, config, sequence)
        return self._executions[options]

    def _priced(self, first: Round, config: ParallelConfig, sequence: bool) -> Execution:
        plan, tables, pool = first.plan, self.tables, self.pool.index
        plan = replace(
            plan,
            stages=tuple(
                replace(
                    stage,
                    zero=config.zero,
                    shards=config.shards,
                    recompute=config.recompute,
                    recompute_blocks=config.recompute_blocks,
                    sequence_parallel=sequence,
                    ep=config.ep,
                )
                for stage in plan.stages
            ),
        )
        stages, groups = len(plan.stages), plan.groups
        how = (
            config.tp, config.cp, config.ep, plan.micro_batch_size, config.recompute, config.recompute_blocks, sequence
        )  # fmt: skip
        times = tables.times(pool, config.tp, plan.micro_batch_size, config.recompute, config.cp, config.ep, sequence)
        held_by = tables.memory(
            config.tp, plan.micro_batch_size, config.recompute, config.cp, config.ep, sequence
        ).layers.parameters
        made = [self._made(stage, times.layers, held_by) for stage in plan.stages]
        shards, near = config.shard_width, [int(members[0]) for _, _, members in first.place.nodes]
        seconds, rows, sums, updates, sent = np.empty((stages, 3)), [], np.zeros((3, stages)), np.empty(groups), []
        for s in range(stages):
            seconds[s] = self._once(
                ("seconds", made[s], *how, config.zero, shards, near[s]),
                partial(stage_seconds, plan, tables, s, pool=pool, tp=config.tp, shards=shards, place=first.place),
            )
        for group in range(groups):
            parts = plan.stages[group::groups]
            together = tuple(made[group::groups])
            passing_s = partial(
                tables.passing_s, pool=pool, tp=config.tp, cp=config.cp, micro_batch_size=plan.micro_batch_size
            )
            sent.append(sum(passing_s(part)[2] for part in parts))
            rows.append(self._once(("rows", together, *how), partial(group_rows, plan, tables, group, config.tp)))
            held = self._once(("held", together, *how[:3]), partial(self._held, plan, group))
            summed = config.tp * held - tied_parameters(plan, tables, group)
            part = part_at_end(plan, tables, group)
            spread = self._once(("spread", together, *how[:3]), partial(self._spread, plan, group))
            key = (
                summed,
                spread,
                config.ep,
                part,
                config.tp,
                config.cp,
                near[group],
                len(first.place.nodes[group][0]),
                config.zero,
                config.shards,
            )
            nodes = int(first.place.nodes[group][1][0])
            cost = self._once(
                ("sums", nodes, config.dp, *key),
                partial(self._sums, plan, first, group, summed, part, config.tp * spread),
            )
            sums[:, group] = cost.streamed_s, cost.last_s, cost.gather_s
            # Under ZeRO a device's optimizer works on its own part.
            own = (held + (config.ep - 1) * spread) / shards if config.zero else held
            updates[group] = self._once(("update", own), partial(tables.update_s, pool, own))
        return Execution(
            plan=plan,
            forward_s=seconds[:, 0].copy(),
            backward_s=seconds[:, 1].copy(),
            first_s=float(seconds[:, 2].max()),
            sent_s=np.array(sent),
            sums_s=sums,
            update_s=np.tile(updates, plan.chunks),
            rows=np.array(rows).T,
        )

    def _made(self, stage: Stage, times: LayerTimes, held: np.ndarray) -> int:
        """A number for what a stage's layers cost and hold: stages that have the same are alike, wherever they are."""
        mine = slice(stage.first_layer, stage.last_layer)
        parts = (times.forward_s[mine], times.backward_s[mine], times.communication_s[mine], held[mine])
        key = ("made", *(part.tobytes() for part in parts))
        return int(self._once(key, lambda: 1 + len(self._known)))

    def _held(self, plan: Plan, group: int) -> float:
        """Parameters on a device of a group."""
        tp = plan.stages[group].workers[0].tp
        return sum(held_parameters(plan, self.tables, s, tp) for s in range(group, len(plan.stages), plan.groups))

    def _spread(self, plan: Plan, group: int) -> float:
        """Of these the experts that a group spreads."""
        tp = plan.stages[group].workers[0].tp
        return sum(spread_parameters(plan, self.tables, s, tp) for s in range(group, len(plan.stages), plan.groups))

    def _sums(self, plan: Plan, first: Round, group: int, values: float, part: float, spread_values: float) -> Any:
        problem, one = self.tables.problem, np.ones((1, 1))
        return stage_reduction(
            *(plan, group, values, problem.batch, self.tables.links, first.place, one, problem.runtime, problem.model),
            part,
            spread_values,
        )

    def _step(
        self, first: Round, how: Execution, config: ParallelConfig, count: int
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Seconds of a step, and when the stages of the steps that were simulated are done and end their actions."""
        # After some rounds every further one takes the same, so that many micro-batches cost no more than few to price.
        once = max(ROUNDS * config.pp, 16)
        once += -once % config.pp
        if count <= once + config.pp or config.schedule == "gpipe":
            done, ends = self._simulated(first, how, config, count)
            return float(done.max()), done, ends
        once += count % config.pp
        done, ends = self._simulated(first, how, config, once)
        step_s = float(done.max())
        round_s = self._round_s(first, how, config, once, step_s)
        if round_s is None:
            done, ends = self._simulated(first, how, config, count)
            return float(done.max()), done, ends
        return step_s + (count - once) / config.pp * round_s, done, ends

    def _round_s(self, first: Round, how: Execution, config: ParallelConfig, once: int, step_s: float) -> float | None:
        """What a micro-batch for every group takes after `once` of them; None where that is not the same for ever."""
        more, _ = self._simulated(first, how, config, once + config.pp)
        round_s = float(more.max()) - step_s
        if round_s < (1 - SAME) * config.pp * self._busiest_s(first, how, config):
            return None  # devices that are not the busiest still use up the time by which these began earlier
        if config.chunks > 1:  # rounds on slow links may take turns: a longer one, a shorter one
            after, _ = self._simulated(first, how, config, once + 2 * config.pp)
            if abs(float(after.max()) - float(more.max()) - round_s) > SAME * step_s:
                return None
        return round_s

    def _busiest_s(self, first: Round, how: Execution, config: ParallelConfig) -> float:
        """What a micro-batch takes the busiest devices or the busiest link: in the end a round takes no less."""
        held_s = (how.forward_s + how.backward_s + first.waits_s.sum(axis=0)).reshape(config.chunks, config.pp)
        return max(float(held_s.sum(axis=0).max()), float(first.sent_s.max(initial=0)))

    def _simulated(
        self, first: Round, how: Execution, config: ParallelConfig, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """When the stages of a lane that takes so many micro-batches are done, and when their last actions end."""
        forward_s, backward_s = how.forward_s + first.waits_s[0], how.backward_s + first.waits_s[1]
        ends_s = self._ends_s(first, config, count, forward_s, backward_s)
        whole_s, last_s, gather_s = how.sums_s
        spans_s = reduction_spans_s(
            ends_s, backward_s, first.stages, config.chunks, whole_s, last_s, first.layers, self.overlap
        )
        done = done_s(
            spans_s[1],
            first.stages,
            config.chunks,
            forward_s,
            how.update_s,
            gather_s,
            first.tied_s,
            0.0,
            how.first_s,
            self.overlap,
        )
        return done, ends_s

    def _ends_s(
        self, first: Round, config: ParallelConfig, count: int, forward_s: np.ndarray, backward_s: np.ndarray
    ) -> np.ndarray:
        """When every stage of a lane has ended its last action, shape (stages,)."""
        key = (config.schedule, count, forward_s.tobytes(), backward_s.tobytes())
        known = self._ends.get(key)
        if known is not None:
            return known
        # GPipe holds all micro-batches before the first backward; 1F1B one more with every stage towards the front.
        span = 1 if config.schedule == "1f1b" else count
        of = self._order(config.stages, count, span, config.chunks)
        of.hold_s[:], of.latency_s[:] = first.sent_s[:, None], first.latency_s[:, None]
        ends_s = np.empty(config.stages)
        if config.chunks > 1:
            free, links = np.empty(config.pp), 2 * (config.stages - 1)
            shared_ends_s(
                of.routes,
                of.actions,
                of.at.copy(),
                of.holder,
                forward_s,
                backward_s,
                of.channel[..., None],
                of.hold_s[..., None],
                of.latency_s,
                links,
                free,
                NO_STARTS,
            )
            ends_s = free[of.holder]
        else:
            hold_s, latency_s, channel = of.hold_s, of.latency_s, of.channel
            timing = hold_s[0], latency_s[0], hold_s[1], latency_s[1], channel[0], channel[1]
            fixed = of.routes, of.order, of.first, forward_s, backward_s
            routed_ends_s(*fixed, *timing, 2 * (config.stages - 1), ends_s, NO_STARTS)
        self._ends[key] = ends_s
        return ends_s

    def _order(self, stages: int, count: int, span: int, chunks: int) -> LaneOrder:
        order: LaneOrder = self._once(
            ("order", stages, count, span, chunks), lambda: _ordered(stages, count, span, chunks)
        )
        return order

    def _memory(self, how: Execution, config: ParallelConfig, count: int) -> MemoryBreakdown:
        if config.schedule == "gpipe":
            held = np.full(config.pp, float(count))
        else:
            units = [interleaved_units(config.pp, config.chunks, group) for group in range(config.pp)]
            held = np.minimum(count * config.chunks, np.array(units)) / config.chunks
        peak = memory_of(tuple(how.rows), config.zero, self.tables, in_flight=held, shards=config.shard_width)
        problem = self.tables.problem
        if problem.runtime.by_layer and self.pool.device.is_cpu and config.dp * config.cp > 1:
            # Of one region: a version of its others (`polygon.cost.stage_reduction.room_of_sums`).
            each = problem.batch.gradient_bytes
            held_rows = how.rows[:2].T.tolist()
            more: Any = np.array([under_way_bytes(1.0, each * held, each * most) for held, most in held_rows])
            peak = replace(peak, transient=peak.transient + more)
        return peak

    def _terms(
        self,
        first: Round,
        how: Execution,
        config: ParallelConfig,
        count: int,
        step_s: float,
        done: np.ndarray,
        ends: np.ndarray,
    ) -> tuple[float, ...]:
        by_group = (how.forward_s + how.backward_s).reshape(config.chunks, config.pp).sum(axis=0)
        busiest = int(by_group.argmax())
        tensor_s = count * float(how.sent_s[busiest])
        compute_s = count * float(by_group[busiest]) - tensor_s
        waits_s = count * float(first.waits_s[:, busiest :: config.pp].sum())
        # Terms of the busiest group and of the last one to be done; what neither accounts for is bubble.
        last = int(done.argmax())
        optimizer_s = float(how.update_s[last])
        data_s = float(done[last]) - float(ends[last]) - optimizer_s
        bubble_s = step_s - compute_s - tensor_s - waits_s - data_s - optimizer_s
        return compute_s, tensor_s, bubble_s, waits_s, data_s, optimizer_s


def _ordered(stages: int, count: int, span: int, chunks: int) -> LaneOrder:
    """The order of the actions of one lane."""
    shape = (2, count, stages - 1)
    routes = np.ascontiguousarray(np.broadcast_to(np.arange(stages), (count, stages)))
    nothing = np.zeros(0, dtype=np.int64)
    actions, at, holder = interleaved_actions(routes, stages, chunks) if chunks > 1 else (nothing, nothing, nothing)
    window = np.ascontiguousarray(np.broadcast_to(span * np.arange(stages, 0, -1), (count, stages)))
    order, first = backward_order(window)
    channel = np.ascontiguousarray(np.broadcast_to(np.arange(2 * (stages - 1)).reshape(2, 1, stages - 1), shape))
    return LaneOrder(routes, order, first, channel, np.empty(shape), np.empty(shape), actions, at, holder)
