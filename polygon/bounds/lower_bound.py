"""What no plan can beat under the cost model: relaxations of a problem, each of them easy to solve.

- **Compute.** Every (layer, micro-batch) is done somewhere. With t[k, d] the least device-seconds of device type d for
  a layer of kind k, the step takes at least the optimum of: min T subject to
  sum_d x[k, d] = layers_k * micro-batches, sum_k x[k, d] t[k, d] <= T n_d, x >= 0.
- **Path.** One micro-batch passes every layer forward and backward, one after another, at best on the fastest worker.
- **Stages.** For every way to cut the layers into stages: a stage's workers wait until the first micro-batch has passed
  the stages before, do whole micro-batches, and then reduce their gradients, or wait for the last one to go back
  through the stages before, whatever takes longer. More compute than one worker has means a reduction between two;
  more than a node has, between nodes; more than a region has, between regions. The compute that all stages need to end
  in time is minimised by dynamic programming (`polygon.bounds.stage_bound`); the devices have only so much.
- **Regions.** A plan that uses several regions passes the longest link between them at the end of a step, to agree on
  the gradient's norm or, if it has one stage, to sum the gradient; it also sends some message or gradient from one to
  another. A plan that does not has fewer devices. The least over all sets
  of regions (`polygon.bounds.region_sets`), joined with the three above.

All of this for every micro-batch size, of which the least counts. The bound holds for plans whose micro-batch sizes and
tensor-parallel degrees are those of `polygon.cost.tables`, whose packings and local steps the constraints allow
(`polygon.cost.convergence`; both weaken it), and that shard gradients or weights (ZeRO-2 and 3) no sooner than the
search does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from scipy.optimize import linprog

from polygon.bounds.region_sets import RegionSet, region_sets
from polygon.bounds.region_sums import Hop, Links, groups_by_capacity, summing_sets
from polygon.bounds.stage_bound import Pipeline, least_capacity
from polygon.bounds.stage_tiers import (
    Distances,
    Executions,
    Kinds,
    Tier,
    best_hop,
    best_tiers,
    differences,
    fitting_s,
    least_wire_bytes,
    region_tiers,
)
from polygon.cost.convergence import allowed
from polygon.cost.reduction import least_part
from polygon.cost.tables import CostTables, running_sum
from polygon.cost.transfers import boundary_values, codec_s, matrix_values
from polygon.domain.plan import RECOMPUTE
from polygon.domain.runtime import Runtime

MOST_CHUNKS = 8
"""Stages on each group of workers; plans with more are not counted."""
MOST_STAGES = 64
"""Messages between stages are counted up to so many."""
MOST_SPREADS = 8
"""Tiers of several regions, by their compute."""
TOLERANCE = 1e-3
"""Relative precision to which the least time is bisected (the lower end is returned)."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """What no plan can beat.

    Parameters
    ----------
    seconds : float
        Per step.
    parts : dict of str to float
        Seconds that compute, path and stages alone allow, and with regions.
    """

    seconds: float
    parts: dict[str, float]

    @property
    def binding(self) -> str:
        """The simplest relaxation that gives the bound."""
        return next(name for name, value in self.parts.items() if value >= self.seconds * (1 - TOLERANCE))


_known: WeakKeyDictionary[CostTables, dict[int, LowerBound]] = WeakKeyDictionary()


def lower_bound(tables: CostTables, *, local_steps: int | None = None) -> LowerBound:
    """What no plan for the problem can beat, by relaxation; worked out once for the same tables.

    Parameters
    ----------
    local_steps : int, optional
        Most local steps of a plan; by default what the constraints let the search choose.
    """
    if local_steps is None:
        local_steps = max(allowed(tables.problem).local_steps)
    known = _known.setdefault(tables, {})
    if local_steps not in known:
        known[local_steps] = _bound(tables, local_steps)
    return known[local_steps]


def lower_bound_s(tables: CostTables) -> float:
    """Seconds per step that no plan for the problem can beat."""
    return lower_bound(tables).seconds


def link_free_bound(tables: CostTables) -> LowerBound:
    """What no plan can beat whatever links join the regions: compute and path alone.

    Weaker than `lower_bound`, but a lookup in tables of a problem that differs in links between regions alone.
    """
    kinds = Kinds.of(tables)
    if not kinds.classes:
        return LowerBound(seconds=np.inf, parts={"compute": np.inf})
    sizes = [_size(tables, kinds, size) for size in tables.micro_batch_sizes]
    compute_s, path_s = min(size.compute_s for size in sizes), min(size.least_s for size in sizes)
    return LowerBound(seconds=path_s, parts={"compute": compute_s, "path": path_s})


def _bound(tables: CostTables, local_steps: int) -> LowerBound:
    kinds = Kinds.of(tables)
    if not kinds.classes:
        return LowerBound(seconds=np.inf, parts={"compute": np.inf})
    traffic = _Traffic(tables, kinds, local_steps)
    sizes = [_size(tables, kinds, size) for size in tables.micro_batch_sizes]
    compute_s, path_s = min(size.compute_s for size in sizes), min(size.least_s for size in sizes)
    stages_s = regions_s = np.inf
    for size in sorted(sizes, key=lambda size: size.least_s):
        if size.least_s < regions_s:
            stages = _Stages(size, traffic)
            stages_s = stages.least_s(size.capacity, stages_s)
            # The most promising set first: the others then need one look each.
            for regions in sorted(
                traffic.sets(size.device_capacity), key=lambda r: r.spread_s + size.work / r.capacity
            ):
                regions_s = min(regions_s, stages.within_s(regions, local_steps, regions_s))
            regions_s = min(regions_s, stages.interleaved_s(traffic.most_capacity(size.device_capacity), regions_s))
    parts = {"compute": compute_s, "path": path_s, "stages": min(stages_s, regions_s), "regions": regions_s}
    return LowerBound(seconds=regions_s, parts=parts)


def _size(tables: CostTables, kinds: Kinds, micro_batch_size: int) -> _Size:
    """Kept in the tables: links between regions do not change it."""
    key = micro_batch_size, tables.problem.batch.global_batch
    if key not in tables.bounds_by_size:
        tables.bounds_by_size[key] = _Size(tables, kinds, micro_batch_size)
    return tables.bounds_by_size[key]


class _Size:
    """What a micro-batch of one size costs on each class of worker, and what that alone asks of a step."""

    def __init__(self, tables: CostTables, kinds: Kinds, micro_batch_size: int) -> None:
        problem = tables.problem
        self.tables, self.kinds, self.micro_batch_size = tables, kinds, micro_batch_size
        self.micro_batches = problem.batch.global_batch // micro_batch_size
        times = np.array(
            [
                [Executions(tables, c, micro_batch_size).least_s(r, accumulates=False) for r in RECOMPUTE]
                for c in kinds.classes
            ]
        )
        sums = np.concatenate([np.zeros((*times.shape[:-1], 1)), np.cumsum(times, axis=-1)], axis=-1)
        self.forward_s, self.backward_s = sums[:, :, 0], sums[:, :, 1]
        """Running sums over the layers, shape (classes, recomputations, layers + 1)."""
        each_s = np.diff(self.forward_s + self.backward_s).min(axis=1)
        self.path_s = float(each_s.min(axis=0).sum())
        names = [problem.model.layer_kind(layer) for layer in range(problem.model.layers)]
        layer_kinds = list(dict.fromkeys(names))
        sample = [names.index(name) for name in layer_kinds]
        device_s = np.full((len(layer_kinds), int(kinds.of_pool.max()) + 1), np.inf)
        for c, of in enumerate(kinds.classes):
            device_s[:, of.kind] = np.minimum(device_s[:, of.kind], each_s[c, sample] * of.devices)
        used = kinds.of_pool >= 0
        devices = np.array([pool.devices for pool in problem.cluster.pools])
        count = np.bincount(kinds.of_pool[used], weights=devices[used])
        work = np.array([names.count(name) for name in layer_kinds]) * float(self.micro_batches)
        self.compute_s, prices = _compute_program(device_s, work, count)
        self.device_capacity = (prices[:, None] / device_s).max(axis=0)
        """Worth of what a device of each kind computes in a second, shape (kinds,)."""
        self.class_capacity = np.array([self.device_capacity[c.kind] * c.devices for c in kinds.classes])
        self.capacity = float(self.device_capacity @ count)
        self.work = float(prices @ work)
        """Worth of all layers of all micro-batches."""

    @cached_property
    def fitting_s(self) -> np.ndarray:
        """See `stage_tiers.fitting_s`."""
        return fitting_s(self.tables, self.kinds, self.micro_batch_size)

    @property
    def least_s(self) -> float:
        """What compute and path ask."""
        return max(self.compute_s, self.path_s)


def _compute_program(device_s: np.ndarray, work: np.ndarray, devices: np.ndarray) -> tuple[float, np.ndarray]:
    """Optimum of the compute program and its prices: what one (layer, micro-batch) of each kind is worth.

    Parameters
    ----------
    device_s : ndarray, shape (layer kinds, device kinds)
        Device-seconds for a layer and a micro-batch.
    work : ndarray, shape (layer kinds,)
        How many of these there are.
    devices : ndarray, shape (device kinds,)
    """
    kinds, types = device_s.shape
    # Each kind's work is scaled to one unit, so that the program is well scaled.
    scale = float((work[:, None] * device_s).min())
    equal = np.zeros((kinds, kinds * types + 1))
    limit = np.zeros((types, kinds * types + 1))
    for k in range(kinds):
        equal[k, k * types : (k + 1) * types] = 1.0
        for d in range(types):
            limit[d, k * types + d] = work[k] * device_s[k, d] / scale
    limit[:, -1] = -devices
    objective = np.zeros(kinds * types + 1)
    objective[-1] = 1.0
    result = linprog(objective, A_ub=limit, b_ub=np.zeros(types), A_eq=equal, b_eq=np.ones(kinds), method="highs")
    return float(result.fun) * scale, np.maximum(result.eqlin.marginals, 0.0) / work


class Across(NamedTuple):
    """A way to place the workers of a stage in several regions, and what reducing layers [a, b) then takes at least."""

    capacity: float
    whole_s: np.ndarray
    """Shape (layers, layers + 1), as all that follow in their last axes."""
    exposed_s: np.ndarray
    """What backward does not hide, where gradients are whole [0] and where they are sharded [1]."""
    near_s: np.ndarray
    """The same without the latency between regions."""


def _hidden_part(runtime: Runtime) -> float:
    """Part of a backward that hides sums of gradients, whatever the number of layers."""
    return 0.0 if runtime.by_layer else runtime.hidden_part


class _Traffic:
    """What messages and reductions cost at least, whatever the micro-batch size."""

    def __init__(self, tables: CostTables, kinds: Kinds, local_steps: int) -> None:
        problem, batch = tables.problem, tables.problem.batch
        self.tables, self.kinds, self.local_steps = tables, kinds, local_steps
        self.distances = Distances(tables, kinds)
        may = allowed(problem)
        self._activation_modes = {"none", *may.activations, *may.activation_gradients}
        self._gradient_modes = {"none", *may.weight_gradients}
        layers = problem.model.layers
        spread = max(Executions(tables, of, 1).spreads[-1] for of in kinds.classes)
        values = differences(tables.memory(1, tables.micro_batch_sizes[0], "none", ep=spread).parameters)
        tied = problem.model.head_weight_parameters() if problem.model.tied_embeddings else 0
        self.tied_s = 0.0
        if tied and problem.model.family != "vit":
            values[1:, layers] += tied
            self.tied_s = self._between_nodes_s(float(tied))
        self.gradient_bytes = values * batch.gradient_bytes
        wire_bytes = self._gradient_wire_bytes(values)
        links = self._links_between_regions()
        self.sets_of_regions = summing_sets(links, whole="powersgd" in self._gradient_modes)
        count = np.maximum(differences(np.arange(layers + 1.0)), 1.0)
        spans, where = np.unique(
            np.floor([self.gradient_bytes.ravel(), wire_bytes.ravel(), count.ravel()]), axis=1, return_inverse=True
        )
        self._span_of, self._last_part = where.reshape(count.shape), 1 / spans[2]
        if not problem.runtime.by_layer:
            self._last_part = np.minimum(self._last_part, problem.runtime.last_bucket)
        self._sums_s = self.sets_of_regions.seconds(spans[0], spans[1], links.hop)

    def _links_between_regions(self) -> Links:
        links, cluster = self.tables.links, self.tables.problem.cluster
        used = [pool for pool in cluster.pools if self.kinds.of_pool[pool.index] >= 0]
        nodes = np.bincount(
            [pool.region for pool in used], weights=[pool.nodes for pool in used], minlength=len(cluster.regions)
        )
        part = least_part(self.tables.problem.runtime, self.tables.problem.batch)
        with np.errstate(divide="ignore"):
            return Links(
                latency_s=links.factor * cluster.latency_s,
                slowness=links.factor / cluster.bytes_per_s,
                shared=1 / links.capacity_bytes_per_s,
                nodes=nodes.astype(np.int64),
                hop=Hop(*best_hop(self.tables, self.kinds), part),
            )

    def _gradient_wire_bytes(self, n_values: np.ndarray) -> np.ndarray:
        problem = self.tables.problem
        matrix = matrix_values(problem.model)
        return least_wire_bytes(self._gradient_modes, n_values, problem.batch.gradient_bytes, matrix)

    def _between_nodes_s(self, n_values: float) -> float:
        """Least seconds to exchange the gradient of tied embeddings, as `estimate.tied_embedding_s` prices it."""
        cluster = self.tables.problem.cluster
        used = [pool for pool in cluster.pools if self.kinds.of_pool[pool.index] >= 0]
        regions = np.bincount([pool.region for pool in used], minlength=len(cluster.regions))
        links = {pool.inter_node for pool in used}
        links |= {cluster.regions[r].intra_region for r in np.flatnonzero(regions > 1)}
        n_bytes, table = n_values * self.tables.problem.batch.gradient_bytes, self.tables.links
        least = table.factor * min(link.transfer_s(n_bytes) for link in links)
        for pool in used:
            node_s = table.node_latency_s[pool.index]
            node_s += n_bytes / self.kinds.most_degree / table.node_bytes_per_s[pool.index]
            least = min(least, float(node_s))
        joined = (regions[:, None] > 0) & (regions[None, :] > 0) & (cluster.bytes_per_s > 0)
        np.fill_diagonal(joined, False)
        if joined.any():
            element_bytes = self.tables.problem.batch.gradient_bytes
            wire = float(least_wire_bytes(self._gradient_modes, np.array([n_values]), element_bytes)[0])
            way_s = table.factor * (cluster.latency_s[joined] + wire / cluster.bytes_per_s[joined])
            least = min(least, float(way_s.min()))
        return least

    def _region_capacity(self, device_capacity: np.ndarray) -> np.ndarray:
        cluster, used = self.tables.problem.cluster, self.kinds.of_pool >= 0
        devices = np.array([pool.devices for pool in cluster.pools])
        worth = np.where(used, devices * device_capacity[self.kinds.of_pool], 0.0)
        return np.bincount(self.tables.links.region, weights=worth, minlength=len(cluster.regions))

    def most_capacity(self, device_capacity: np.ndarray) -> float:
        """Most worth of the devices of one region."""
        return float(self._region_capacity(device_capacity).max())

    def sets(self, device_capacity: np.ndarray) -> list[RegionSet]:
        """Sets of regions, given the worth of a device of each kind."""
        cluster = self.tables.problem.cluster
        capacity = self._region_capacity(device_capacity)
        return region_sets(capacity, cluster.latency_s, cluster.bytes_per_s > 0)

    def across(self, device_capacity: np.ndarray, hidden_s: np.ndarray) -> list[Across]:
        """Tiers of several regions; `hidden_s`: what of the reduction of layers [a, b) backward hides at most."""
        capacity = self.sets_of_regions.capacity(self._region_capacity(device_capacity))
        latency_s, tiers = self.sets_of_regions.latency_s[:, None], []
        for some in groups_by_capacity(capacity, MOST_SPREADS):
            whole_s, far_s = self._sums_s[some], latency_s[some]
            first_s = far_s + (whole_s - far_s) * self._last_part
            parts = (
                whole_s.min(axis=0),
                first_s.min(axis=0),
                (whole_s - far_s).min(axis=0),
                (first_s - far_s).min(axis=0),
            )
            whole, first, whole_near, first_near = (part[self._span_of] for part in parts)
            tiers.append(
                Across(
                    capacity=float(capacity[some].max()),
                    whole_s=whole,
                    exposed_s=np.array([np.maximum(first, whole - hidden_s), first]),
                    near_s=np.array([np.maximum(first_near, whole_near - hidden_s), first_near]),
                )
            )
        return tiers

    def message_s(self, micro_batch_size: int) -> tuple[float, float]:
        """Least seconds of a message between any two workers, and between workers of two regions."""
        problem, links, used = self.tables.problem, self.tables.links, self.kinds.of_pool >= 0
        values = float(boundary_values(problem.model, problem.batch, micro_batch_size))
        element_bytes = max(problem.batch.element_bytes, 2)
        n_bytes = values * element_bytes
        wire = float(least_wire_bytes(self._activation_modes, np.array([values]), element_bytes)[0])
        pools = problem.cluster.pools
        several = np.array([pool.devices_per_node > 1 for pool in pools])
        node_s = links.node_latency_s + n_bytes / self.kinds.most_degree / links.node_bytes_per_s
        joined = (links.region[:, None] == links.region[None, :]) & used[:, None] & used[None, :]
        joined[np.diag_indices(len(pools))] &= np.array([pool.nodes > 1 for pool in pools])
        near_s = min(
            float(node_s[several & used].min(initial=np.inf)),
            float((links.latency_s + n_bytes / links.bytes_per_s.clip(1e-300))[joined].min(initial=np.inf)),
        )
        far_s = self.distances.message_s(wire)
        return min(near_s, far_s), far_s

    def codec_s(self, micro_batch_size: int) -> float:
        """Most seconds of packing and unpacking a gradient in a worker's backward."""
        problem = self.tables.problem
        values = boundary_values(problem.model, problem.batch, micro_batch_size)
        rate = min(pool.device.memory_bytes_per_s for pool in problem.cluster.pools)
        modes = self._activation_modes if self.distances.linked else {"none"}
        return max(sum(codec_s(values, problem.batch.element_bytes, mode, rate)) for mode in modes)


class _Stages:
    """The dynamic program over stages for one micro-batch size."""

    def __init__(self, size: _Size, traffic: _Traffic) -> None:
        self.size = size
        message_s, self.crossing_s = traffic.message_s(size.micro_batch_size)
        capacity = size.class_capacity
        ratio = capacity / capacity.min()
        inside = best_tiers(region_tiers(traffic.tables, size.kinds, size.device_capacity))
        tiers = [Tier(float(capacity.max()), 0.0, 0.0), *inside]
        whole_s = np.array([tier.fixed_s + tier.s_per_byte * traffic.gradient_bytes for tier in tiers])
        layers = np.maximum(differences(np.arange(whole_s.shape[1] + 1.0)), 1.0)
        # Layers are reduced one after another while backward of the last micro-batch still runs.
        backward_s = differences(size.backward_s).max(axis=(0, 1)) + traffic.codec_s(size.micro_batch_size)
        hidden_s = backward_s * np.maximum((layers - 1) / layers, _hidden_part(traffic.tables.problem.runtime))
        runtime = traffic.tables.problem.runtime
        last = 1 / layers if runtime.by_layer else np.minimum(1 / layers, runtime.last_bucket)
        # Where gradients or weights are sharded, micro-batches have their traffic, and nothing is left for the end.
        inside_s = np.array([np.maximum(whole_s * last, whole_s - hidden_s), np.zeros_like(whole_s)])
        across = traffic.across(size.device_capacity, hidden_s)
        # With and without the latency between regions.
        tier_s, self.near_s = (
            np.concatenate([inside_s, *(part[:, None] for part in parts)], axis=1)
            for parts in ([tier.exposed_s for tier in across], [tier.near_s for tier in across])
        )
        if traffic.local_steps > 1:
            # Regions that meet only every so many steps do it after the update.
            for t, tier in enumerate(across, len(tiers)):
                tier_s[:, t] = np.minimum(tier_s[:, t], tier.whole_s / traffic.local_steps)
        one_layer = np.arange(len(layers)), np.arange(1, len(layers) + 1)
        self.least_across_s = min(
            (float(tier.whole_s[one_layer].min()) / traffic.local_steps for tier in across), default=np.inf
        )
        self.pipeline = Pipeline(
            micro_batches=float(size.micro_batches),
            forward_s=_least_sum(size.forward_s),
            backward_s=_least_sum(size.backward_s),
            class_s=size.fitting_s,
            class_capacity=capacity,
            tier_s=tier_s,
            tier_capacity=np.array([*(tier.capacity for tier in tiers), *(tier.capacity for tier in across)]),
            message_s=message_s if np.isfinite(message_s) else 0.0,
            tied_s=traffic.tied_s,
            unit=float(capacity.min()) if np.allclose(ratio, np.round(ratio), rtol=1e-9) else 0.0,
        )

    def least_s(self, capacity: float, known_s: float, *, only: Pipeline | None = None, most_stages: int = 1) -> float:
        """Least time in which devices of so much compute can end a step, if it is less than `known_s` (else that).

        `only`: of at most so many stages, with these costs.
        """

        def ends(time_s: float) -> bool:
            if only is not None:
                return least_capacity(only, time_s, most_stages, capacity) < np.inf
            return least_capacity(self.pipeline, time_s, MOST_STAGES, capacity) < np.inf

        low_s = max(self.size.path_s, self.size.compute_s, self.size.work / capacity)
        if low_s >= known_s or not ends(known_s if np.isfinite(known_s) else 1e6 * low_s):
            return known_s
        if ends(low_s):
            return low_s
        high_s = 2 * low_s
        while high_s < known_s and not ends(high_s):
            low_s, high_s = high_s, 2 * high_s
        high_s = min(high_s, known_s)
        while high_s - low_s > TOLERANCE * low_s:
            middle_s = 0.5 * (low_s + high_s)
            if ends(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def interleaved_s(self, capacity: float, known_s: float) -> float:
        """Least time of an interleaved plan in a region of so much compute; `known_s` if that is less.

        Its workers hold as many layers as those of some plan that is not, under the same memory, and sum as many
        gradients. Their first action waits for a message from every group before, and for one chunk of its layers: of
        the at most `MOST_CHUNKS` equal parts, at least half of such a part of all.
        """
        part = 1 / (2 * MOST_CHUNKS)
        chunked = self.pipeline._replace(
            forward_s=part * self.pipeline.forward_s, backward_s=part * self.pipeline.backward_s
        )
        return self.least_s(capacity, known_s, only=chunked, most_stages=MOST_STAGES)

    def within_s(self, regions: RegionSet, local_steps: int, known_s: float) -> float:
        """Least time of a plan on regions so far apart and with so much compute; `known_s` if that is less."""
        if regions.spread_s == 0:
            return self.least_s(regions.capacity, known_s)
        agree_s = regions.spread_s if local_steps == 1 else 0.0
        passing_s = min(self.size.path_s + 2 * self.crossing_s, self.least_across_s)
        several_s = max(self.least_s(regions.capacity, known_s - agree_s), passing_s)
        if local_steps > 1:
            return several_s + agree_s
        # Devices that all have the whole gradient do not wait for its norm, but the sums of one stage take a round.
        single = self.pipeline._replace(tier_s=self.near_s)
        return min(several_s, self.least_s(regions.capacity, several_s, only=single)) + agree_s


def _least_sum(sums: np.ndarray) -> np.ndarray:
    """Running sum over the layers of the least over classes and recomputations."""
    return running_sum(np.diff(sums).min(axis=(0, 1)))
