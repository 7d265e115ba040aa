"""Costs of one problem, looked up instead of recomputed: layer times and memory as running sums, links as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from polygon.cost.autograd_memory import Way, autograd_memory
from polygon.cost.calibration import NONE, Calibration
from polygon.cost.compute import LayerTimes, layer_times, orthogonal_s, update_s
from polygon.cost.kept import Kept
from polygon.cost.kernels import silicon
from polygon.cost.memory import LayerMemory, MemoryBreakdown, layer_memory
from polygon.cost.network import group_of, shared_link
from polygon.cost.profiles import KindProfile, ModelProfile
from polygon.cost.transfers import LinkTable, Placement
from polygon.domain.divisors import divisors
from polygon.domain.errors import require
from polygon.domain.message import Message
from polygon.domain.optimizer import OPTIMIZERS
from polygon.domain.plan import Plan, Problem, Stage

TENSOR_DEGREES = (1, 2, 4, 8)
SHORTEST_PIECE, LEAST_PIECE = 4096, 1024
"""Tokens of a piece of a sequence that a search looks at, and where a device has less than `FEW` sequences."""
FEW = 4
KEPT_PLANS, KEPT_GROUPS = 16, 1024
"""Plans, and groups of workers, of which tables keep what was worked out; a search prices each a few times, and others
that differ in little."""

Profile = KindProfile | ModelProfile
Measurements = tuple[Sequence[Profile], Calibration]


def running_sum(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, ... values, shape (n + 1,)."""
    return np.concatenate([[0.0], np.cumsum(values)])


def widest_pool(problem: Problem) -> int:
    """Devices of the largest pool that may be used."""
    return max((pool.devices for pool in problem.cluster.pools if problem.may_use(pool)), default=1)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ..., at most so much."""
    return [2**k for k in range(most.bit_length())]


def context_degrees(problem: Problem) -> list[int]:
    """Parts of a sequence that a search looks at: of at least `SHORTEST_PIECE` tokens, or `LEAST_PIECE` where sequences
    are few; as many as a pool has devices at most."""
    shortest = LEAST_PIECE if _has_few_sequences(problem) else SHORTEST_PIECE
    return _cuts(problem, powers_of_two(widest_pool(problem)), shortest)


def uniform_context_degrees(problem: Problem) -> list[int]:
    """The same of uniform splits, and what the lower bound knows of: pieces of at least `LEAST_PIECE` tokens; of any
    length, and any number of them, where sequences are few and one pool has all devices, as whole ones may not divide
    among these."""
    widest = widest_pool(problem)
    if _has_few_sequences(problem) and sum(problem.may_use(pool) for pool in problem.cluster.pools) == 1:
        return _cuts(problem, sorted({*powers_of_two(widest), *divisors(widest)}), 1)
    return _cuts(problem, powers_of_two(widest), LEAST_PIECE)


def _has_few_sequences(problem: Problem) -> bool:
    return problem.batch.global_batch < FEW * problem.cluster.devices


def _cuts(problem: Problem, degrees: list[int], shortest: int) -> list[int]:
    """Those that divide a sequence into pieces of so many tokens or more, or not at all."""
    tokens = problem.batch.seq_len
    return [cp for cp in degrees if tokens % cp == 0 and (cp == 1 or tokens // cp >= shortest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimes:
    """Running sums of seconds per micro-batch over the layers, shape (layers + 1,) each."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    communication_s: np.ndarray
    """Of the two above: exposed seconds of tensor, context and expert parallelism."""
    layers: LayerTimes
    """The same layer by layer."""
    source: str
    relative_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMemory:
    """Running sums over the layers, shape (layers + 1,), and what is needed for one layer at a time."""

    parameters: np.ndarray
    activation_bytes: np.ndarray
    layers: LayerMemory


class CostTables:
    """Layer costs of a problem for every pool, tensor-parallel degree, micro-batch size and recomputation.

    Where a profile was measured on a pool's device type, it takes the device model's place. A profile of a whole model
    (`ModelProfile`) also says which degrees a pool may use, and the parameters and activations of every layer. Of
    several profiles those that fit the problem's model (and, of layers by kind, its batch) are taken.

    Raises
    ------
    InputError
        All profiles of whole models are of others, or that of this one is of another precision or sequence length; or
        factors are over times that something else predicted.
    """

    def __init__(
        self,
        problem: Problem,
        profiles: Sequence[Profile] = (),
        calibration: Calibration | None = None,
        links: LinkTable | None = None,
    ) -> None:
        self.problem = problem
        self.calibration = calibration or NONE
        whole_models = [profile for profile in profiles if isinstance(profile, ModelProfile)]
        fitting = [profile for profile in whole_models if profile.fits(problem.model)]
        for profile in fitting or whole_models[:1]:
            profile.check(problem.model, problem.batch)
        kinds = [p for p in profiles if isinstance(p, KindProfile) and p.fits(problem.model, problem.batch)]
        self._profiles = tuple(p for p in profiles if p in kinds or p in fitting)
        self._profile_of = {device: profile for profile in self._profiles for device in profile.devices}
        for name, over in self.calibration.over.items():
            if name in problem.cluster.catalogue:
                now = Message("expected.factors_over", basis=self.basis(name))
                require(
                    over == self.basis(name), f"calibration of {name}", Message("found.factors_over", basis=over), now
                )
        self.links = links or LinkTable(problem.cluster, self.calibration.communication)
        self._times: dict[tuple[int, int, int, str, int, int, bool, bool], ClassTimes] = {}
        self._memory: dict[tuple[int, int, str, int, int, bool], ClassMemory] = {}
        self.class_layers: dict[tuple[Any, ...], Any] = {}
        """What classes of workers take and need for every layer (`polygon.planning.problem_arrays`)."""
        self.packing = Kept[np.ndarray](KEPT_PLANS)
        """What links take of messages by how they are packed (`polygon.planning.link_compression`)."""
        self.bounds_by_size: dict[tuple[Any, ...], Any] = {}
        """By micro-batch size, global batch and budget: what `polygon.bounds` works out that links do not change."""
        self.plan_memory: WeakKeyDictionary[Plan, list[MemoryBreakdown]] = WeakKeyDictionary()
        """Peak memory of the workers of plans that were priced."""
        self.like_memory = Kept[list[MemoryBreakdown]](KEPT_PLANS)
        """The same by what of a plan it follows from."""
        self.held = Kept[list[np.ndarray]](KEPT_PLANS)
        """Micro-batches in flight on the workers of every group, by routes, spans and order."""
        self.plan_terms = Kept[Any](KEPT_PLANS)
        """What `polygon.cost.step_times` works out of a plan and its spans do not change; then what its layers and
        their execution do not, and what one group of workers needs."""
        self.plan_traffic = Kept[Any](KEPT_PLANS)
        self.paced_times = Kept[Any](KEPT_PLANS)
        """Times of plans whose spans were found by simulating them (`polygon.planning.warmup_depths`)."""
        self.group_terms = Kept[Any](KEPT_GROUPS)
        self.group_work = Kept[Any](KEPT_GROUPS)
        """What such a group computes, which links between regions do not change."""
        self.stage_rows = Kept[tuple[float, ...]](KEPT_GROUPS)
        """What memory needs of a group's stages (`polygon.cost.estimate.group_rows`)."""
        self.begun = Kept[Any](1)
        """Where searches begin (`polygon.planning.search_engine`)."""
        self.parts = Kept[CostTables](KEPT_PLANS)
        """Tables of searches in some regions alone, by problem and regions."""
        self.polished = Kept[Any](KEPT_PLANS)
        """What small changes make of a plan, by problem, objective, value and number of changes: a value, the plan and
        its allocation."""
        self.fluid_values = Kept[dict[bytes, float]](KEPT_PLANS)
        """What allocations are worth by the relaxation, by problem and objective (`polygon.planning.decode`)."""
        self._places = Kept[Placement](2 * KEPT_PLANS)
        """By workers, and by these and where nodes send one another packed gradients."""
        headroom = 1 - problem.constraints.memory_headroom
        self.limit_bytes = np.array([pool.device.memory_bytes * headroom for pool in problem.cluster.pools])

    @cached_property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Sequences per micro-batch that plans may use, ascending: those that divide the batch, of which some device
        holds its part of one recomputed block, heads and sequence cut as far as they may be. The lower bound looks at
        the same ones."""
        problem = self.problem
        sizes: list[int] = []
        most_bytes = max((self.limit_bytes[p.index] for p in problem.cluster.pools if problem.may_use(p)), default=0.0)
        degree, cp = max(TENSOR_DEGREES), max(context_degrees(problem))
        for size in divisors(problem.batch.global_batch):
            layers = self.memory(degree, size, "full", cp, sequence_parallel=True).layers
            block = min(1, len(layers.parameters) - 1)
            # Of larger ones no device holds a block either: sizes ascend. The first one stays in any case.
            if sizes and layers.activation_bytes[block] + layers.transient_bytes[block] > most_bytes:
                break
            sizes.append(size)
        return tuple(sizes)

    @property
    def measurements(self) -> Measurements:
        """What they were made from beside the problem."""
        return self._profiles, self.calibration

    def for_problem(self, problem: Problem) -> CostTables:
        """Tables of another problem from the same measurements."""
        return CostTables(problem, *self.measurements)

    def basis(self, device: str) -> str:
        """What predicts the times of a device type's layers, before factors: of `polygon.cost.calibration.BASES`."""
        if device in self._profile_of:
            return "profile"
        efficiency = self.problem.cluster.catalogue[device].efficiency
        return "spec" if efficiency is None else efficiency.basis

    def with_other_prices(self, problem: Problem) -> CostTables:
        """Tables of a problem in which only prices are others: everything takes as long."""
        other = copy(self)
        other.problem = problem
        return other

    def with_other_links(self, problem: Problem) -> CostTables:
        """Tables of a problem with the same layers: other links between regions, prices, global batch, packings."""
        other = self.with_other_speeds(problem)
        other._times, other.class_layers = self._times, self.class_layers
        other.bounds_by_size, other.group_work = self.bounds_by_size, self.group_work
        return other

    def with_other_speeds(self, problem: Problem) -> CostTables:
        """The same where devices also compute and read their memory at other rates: they stand where they did, and
        hold as much."""
        links = self.links.with_other_links(problem.cluster)
        other = CostTables(problem, self._profiles, self.calibration, links)
        other._memory, other._places = self._memory, self._places
        other.plan_memory, other.like_memory, other.stage_rows = self.plan_memory, self.like_memory, self.stage_rows
        other.held = self.held
        return other

    def placement(self, plan: Plan) -> Placement:
        """Where the workers of a plan are."""
        objects = tuple(stage.workers for stage in plan.stages)
        known = self._places.get(objects, plan.packed_inside)
        shards = tuple(stage.shards for stage in plan.stages)
        if known is None:
            like = self._places.get(objects) or self._places.put(Placement.of(plan, self.links), objects)
            known = self._places.put(like.packing(plan.packed_inside), objects, plan.packed_inside)
        return known if known.zero_shards == shards else known.dividing(shards)

    def times(
        self,
        pool: int,
        tp: int,
        micro_batch_size: int,
        recompute: str,
        cp: int = 1,
        ep: int = 1,
        sequence_parallel: bool = False,
        accumulates: bool = True,
    ) -> ClassTimes:
        """Seconds per micro-batch on a worker of tp x cp devices of a pool, its experts spread over `ep` devices.

        Fully sharded gradients are added up where they are scattered to (`polygon.cost.sharding`), not in the layers:
        then nothing `accumulates`.
        """
        runtime = self.problem.runtime
        # Fused, the product that makes a gradient adds it to the sum: no pass over the parameters of its own.
        accumulates = accumulates and not runtime.fused_accumulation
        key = (pool, tp, micro_batch_size, recompute, cp, ep, sequence_parallel, accumulates)
        known = self._times.get(key)
        if known is None:
            place = self.problem.cluster.pools[pool]
            whole = runtime.whole_experts(self.problem.model.experts, tp=tp, ep=ep, sequence_parallel=sequence_parallel)
            # Whole experts are dealt out to all devices of the tensor-parallel groups, which then all exchange tokens;
            # cut ones to the groups, of which each device exchanges with its like: one in tp of a node.
            spread, per_node = (ep * tp, place.devices_per_node) if whole else (ep, place.devices_per_node // tp)
            layer = layer_times(
                self.problem.model,
                self.problem.batch,
                place.device,
                place.intra_node,
                tp=tp,
                tp_group=group_of(place, tp, tp),
                micro_batch_size=micro_batch_size,
                recompute=recompute,
                sequence_parallel=sequence_parallel,
                cp=cp,
                cp_link=shared_link(place, tp, cp),
                ep=ep,
                ep_group=group_of(place, spread, max(1, per_node)),
                runtime=runtime if accumulates else replace(runtime, fused_accumulation=True),
                profile=self._profile_of.get(place.device.name),
                communication=self.calibration.communication,
            )
            layer = self.calibration.times(layer, place.device.name)
            known = self._times[key] = ClassTimes(
                forward_s=running_sum(layer.forward_s),
                backward_s=running_sum(layer.backward_s),
                communication_s=running_sum(layer.communication_s),
                layers=layer,
                source=layer.source,
                relative_error=layer.relative_error,
            )
        return known

    def passing_s(
        self, stage: Stage, *, pool: int, tp: int, cp: int, micro_batch_size: int, accumulates: bool = True
    ) -> tuple[float, float, float]:
        """Seconds of a micro-batch in a stage's layers on a worker of tp x cp devices: forward, backward, and of these
        what is exposed of tensor, context and expert traffic."""
        forward_s = backward_s = sent_s = 0.0
        until = stage.recomputed_until
        parts = ((stage.recompute, stage.first_layer, until), ("none", until, stage.last_layer))
        for recompute, first, last in parts:
            if last > first:
                times = self.times(
                    pool, tp, micro_batch_size, recompute, cp, stage.ep, stage.sequence_parallel, accumulates
                )
                forward_s += float(times.forward_s[last] - times.forward_s[first])
                backward_s += float(times.backward_s[last] - times.backward_s[first])
                sent_s += float(times.communication_s[last] - times.communication_s[first])
        return forward_s, backward_s, sent_s

    def update_s(self, pool: int, parameters_held: float) -> float:
        """Seconds of the optimizer for as many parameters on one device of a pool."""
        device = self.problem.cluster.pools[pool].device
        factor = self.calibration.update.get(device.name, 1.0)
        profile = self._profile_of.get(device.name)
        measured = profile.update_rate_s(device.name) if profile else None  # seconds per parameter
        if measured is not None:
            return factor * parameters_held * measured
        runtime, batch = self.problem.runtime, self.problem.batch
        seconds = update_s(parameters_held, device, batch, way=runtime.update_way, by_host=runtime.host_update)
        if OPTIMIZERS[batch.optimizer].orthogonal:
            seconds += parameters_held * orthogonal_s(self.problem.model.hidden_size, device)
        return factor * seconds

    def memory(
        self,
        tp: int,
        micro_batch_size: int,
        recompute: str,
        cp: int = 1,
        ep: int = 1,
        sequence_parallel: bool = False,
    ) -> ClassMemory:
        """Bytes and parameters on one device of a worker of tp x cp devices, its experts spread over `ep` devices."""
        key = (tp, micro_batch_size, recompute, cp, ep, sequence_parallel)
        known = self._memory.get(key)
        if known is None:
            model, batch = self.problem.model, self.problem.batch
            # What layers keep does not depend on who keeps it: a profile of any device will do.
            measured = (p.memory(model, batch, tp, micro_batch_size, recompute) for p in self._profiles)
            layers = next((layers for layers in measured if layers is not None), None) or self._layer_memory(*key)
            known = self._memory[key] = ClassMemory(
                parameters=running_sum(layers.parameters),
                activation_bytes=running_sum(layers.activation_bytes),
                layers=layers,
            )
        return known

    def _layer_memory(
        self, tp: int, micro_batch_size: int, recompute: str, cp: int, ep: int, sequence_parallel: bool
    ) -> LayerMemory:
        """As the problem's runtime keeps it."""
        problem = self.problem
        runtime, pools = problem.runtime, problem.cluster.pools
        if runtime.autograd:
            way = Way(
                micro_batch=micro_batch_size,
                recompute=recompute,
                tp=tp,
                cp=cp,
                ep=ep,
                sequence=sequence_parallel,
                ring=runtime.context == "ring",
                whole_experts=runtime.whole_experts(
                    problem.model.experts, tp=tp, ep=ep, sequence_parallel=sequence_parallel
                ),
                compiled=runtime.fused,
                grouped_experts=runtime.grouped_experts
                and any(silicon(pool.device, problem.batch.precision).grouped for pool in pools),
                fused_norms=not all(pool.device.name.startswith("cpu") for pool in pools),
            )
            return autograd_memory(problem.model, problem.batch, way)
        return layer_memory(
            problem.model,
            problem.batch,
            tp=tp,
            micro_batch_size=micro_batch_size,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            cp=cp,
            ep=ep,
            runtime=runtime,
        )

    def layers_of(self, stage: Stage, *, tp: int, micro_batch_size: int) -> LayerMemory:
        """What each layer puts on one device of a worker of a stage: those recomputed, and behind them the others."""
        how = stage.workers[0].cp, stage.ep, stage.sequence_parallel
        layers = self.memory(tp, micro_batch_size, stage.recompute, *how).layers
        until = stage.recomputed_until
        if stage.recompute == "none" or until == stage.last_layer:
            return layers
        plain = self.memory(tp, micro_batch_size, "none", *how).layers
        recomputed = np.arange(len(layers.parameters)) < until
        return replace(
            layers,
            activation_bytes=np.where(recomputed, layers.activation_bytes, plain.activation_bytes),
            transient_bytes=np.where(recomputed, layers.transient_bytes, plain.transient_bytes),
        )

    def tensor_degrees(self, pool: int) -> tuple[int, ...]:
        """Degrees that divide a node of the pool and the model's heads; of those measured, where a profile says so."""
        place, model = self.problem.cluster.pools[pool], self.problem.model
        profile = self._profile_of.get(place.device.name)
        measured = profile.degrees(place.device.name) if profile else None
        return tuple(
            t
            for t in (TENSOR_DEGREES if measured is None else measured)
            if place.devices_per_node % t == 0 and model.heads % t == 0 and model.kv_heads % min(t, model.kv_heads) == 0
        )
