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
- **Regions.** All wait for the latency of the first stage's sum and for the gradient's norm, and regions that do not
  hold the first stage wait for messages; for every set of regions (`polygon.bounds.region_sets`), joined with the three
  above. Interleaved plans are bounded by themselves.
- **Traffic.** A region computes no more than its links bring micro-batches for, unless it has gradients to exchange
  instead (`polygon.bounds.region_traffic`); part of *Regions*.

All of this for every micro-batch size, of which the least counts. docs/objectives.md has the inequalities, and the
plans that are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from scipy.optimize import linprog

from polygon.bounds.region_sets import RegionSets, Ways, region_sets
from polygon.bounds.fitting import SHARDINGS, Executions, fitting_s
from polygon.bounds.region_sums import NODES, Hop, LedSets, Links, groups_by_capacity, led_sets, summing_sets
from polygon.bounds.region_traffic import Borders, Layers, RegionTraffic, borders
from polygon.bounds.stage_bound import Pipeline, best_class, least_capacity
from polygon.bounds.stage_tiers import (
    MANY_NODES,
    Distances,
    Kinds,
    NodeCapacity,
    Tier,
    best_hop,
    best_tiers,
    differences,
    least_wire_bytes,
    region_tiers,
)
from polygon.cost.convergence import TRAFFIC, allowed, level_needed
from polygon.cost.memory import state_bytes
from polygon.cost.reduction import least_part
from polygon.cost.tables import CostTables, running_sum
from polygon.cost.transfers import boundary_values, codec_s, matrix_values, packed_bytes
from polygon.domain.plan import COMPRESSIONS, PARITY_LEVELS, RECOMPUTE, Problem
from polygon.domain.runtime import Runtime

MESSAGES = ("activations", "activation_gradients")
MOST_STAGES = 8
"""Messages between stages are counted up to so many."""
LONGER = 2
"""Passing all layers takes a micro-batch of more sequences no less than one over so much of the time of a smaller."""
MOST_SPREADS = 24
"""Tiers of several regions, by their nodes and compute."""
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Groups of an interleaved plan at which the bound takes a step: those from one to the next hold what the first does."""
HELD = sorted({*(1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0), *((groups + 1) / 2 for groups in GROUPS)})
"""Micro-batches in flight of these, and steps below."""
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
    compute_s = path_s = stages_s = regions_s = np.inf
    for number in tables.micro_batch_sizes:
        size = _size(tables, kinds, number)
        compute_s, path_s = min(compute_s, size.compute_s), min(path_s, size.least_s)
        if size.least_s < regions_s:
            stages = _Stages(size, traffic)
            stages_s = stages.least_s(constant(size.capacity), stages_s)
            sets = traffic.sets(size)
            # The most promising first: the others then need one look each.
            for some in sorted(sets.bins(), key=lambda some: float((some.waits_s + size.work / some.capacity).min())):
                regions_s = min(regions_s, stages.apart_s(some, regions_s))
            led = traffic.led(size, stages.hidden_s, stages.last)
            regions_s = min(regions_s, stages.single_s(led, regions_s), stages.interleaved_s(sets, regions_s))
            if local_steps > 1:
                regions_s = min(regions_s, stages.local_s(regions_s))
        elif size.path_s > LONGER * regions_s:
            break  # larger micro-batches pass the layers no sooner
    parts = {"compute": compute_s, "path": path_s, "stages": min(stages_s, regions_s), "regions": regions_s}
    return LowerBound(seconds=regions_s, parts=parts)


def _size(tables: CostTables, kinds: Kinds, micro_batch_size: int) -> _Size:
    """Kept in the tables: links between regions do not change it."""
    key = micro_batch_size, tables.problem.batch.global_batch
    if key not in tables.bounds_by_size:
        tables.bounds_by_size[key] = _Size(tables, kinds, micro_batch_size)
    known: _Size = tables.bounds_by_size[key]
    return known


def compute_of_size(tables: CostTables, kinds: Kinds, micro_batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Least device-seconds of a layer and a micro-batch, (layer kinds, device kinds), and how many of these there are,
    (layer kinds,)."""
    size = _size(tables, kinds, micro_batch_size)
    return size.device_s, size.count


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
        least_s = each_s.min(axis=0)
        self.path_s = float(least_s.sum())
        self.rest_s = running_sum(least_s[::-1])[::-1]
        """Least seconds of a micro-batch, forward and backward, in layers [b, layers), shape (layers + 1,)."""
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
        self.device_s, self.count = device_s, work
        self.compute_s, prices = _compute_program(device_s, work, count)
        self.device_capacity = (prices[:, None] / device_s).max(axis=0)
        """Worth of what a device of each kind computes in a second, shape (kinds,)."""
        self.class_capacity = np.array([self.device_capacity[c.kind] * c.devices for c in kinds.classes])
        self.capacity = float(self.device_capacity @ count)
        self.devices = float(count.sum())
        self.work = float(prices @ work)
        """Worth of all layers of all micro-batches."""
        self.layer_work = prices[[layer_kinds.index(name) for name in names]] * self.micro_batches
        """Of these, of every layer, shape (layers,)."""
        self.run = slice(*longest_run(names))
        """The most layers of one kind that follow one another."""
        self.rest_work = float(self.layer_work.sum() - self.layer_work[self.run].sum())
        """Worth of all other layers."""
        self.block_s = np.diff([self.forward_s, self.backward_s])[..., self.run].min(axis=(1, 2, 3))
        """Least seconds of forward and of backward of a layer of that run."""

    @cached_property
    def fitting_s(self) -> np.ndarray:
        """See `stage_tiers.fitting_s`."""
        return fitting_s(self.tables, self.kinds, self.micro_batch_size, self.rest_s)

    @cached_property
    def held_s(self) -> np.ndarray:
        """See `stage_tiers.fitting_s`, of so many micro-batches in flight as `HELD` says."""
        return fitting_s(self.tables, self.kinds, self.micro_batch_size, self.rest_s, held=HELD)

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
    free: float
    """As in `Tier`."""
    whole_s: np.ndarray
    """Shape (layers, layers + 1), as all that follow."""
    exposed_s: np.ndarray
    """What backward does not hide."""
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
        self._modes = {traffic: _kinds(problem, traffic) for traffic in TRAFFIC}
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
        self.packed = float(self._gradient_wire_bytes(np.array([1e9]))[0]) / (1e9 * batch.gradient_bytes)
        """Least bytes of a packed gradient over plain ones."""
        links = self._links_between_regions()
        self.sets_of_regions = summing_sets(links, whole="powersgd" in self._modes["weight_gradients"])
        spans, where = np.unique(
            np.floor([self.gradient_bytes.ravel(), wire_bytes.ravel()]), axis=1, return_inverse=True
        )
        self._span_of = where.reshape(values.shape)
        # Where micro-batches scatter gradients, nodes of a region sum what those inside of nodes have scattered.
        scattered = links.hop._replace(latency_s=0.0, part=1.0)
        steps = [(fewest, more - 1) for fewest, more in pairwise((*NODES, MANY_NODES)) if fewest <= links.nodes.max()]
        self._sums_s = [
            (
                most,
                self.sets_of_regions.seconds(spans[0], spans[1], links.hop, fewest, most),
                self.sets_of_regions.seconds(spans[0], spans[1], scattered, fewest, MANY_NODES),
            )
            for fewest, most in steps
        ]

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
                egress=1 / links.egress_bytes_per_s,
                nodes=nodes.astype(np.int64),
                hop=Hop(*best_hop(self.tables, self.kinds), part, float(links.card_bytes_per_s.max())),
            )

    def _gradient_wire_bytes(self, n_values: np.ndarray) -> np.ndarray:
        problem = self.tables.problem
        matrix = matrix_values(problem.model)
        return least_wire_bytes(self._modes["weight_gradients"], n_values, problem.batch.gradient_bytes, matrix)

    def _between_nodes_s(self, n_values: float) -> float:
        """Least seconds to exchange the gradient of tied embeddings, as `estimate.tied_embedding_s` prices it."""
        cluster = self.tables.problem.cluster
        used = [pool for pool in cluster.pools if self.kinds.of_pool[pool.index] >= 0]
        regions = np.bincount([pool.region for pool in used], minlength=len(cluster.regions))
        links = {pool.inter_node for pool in used if pool.nodes > 1}
        links |= {cluster.regions[r].intra_region for r in np.flatnonzero(regions > 1)}
        n_bytes, table = n_values * self.tables.problem.batch.gradient_bytes, self.tables.links
        wire = float(
            least_wire_bytes(
                self._modes["weight_gradients"], np.array([n_values]), self.tables.problem.batch.gradient_bytes
            )[0]
        )
        least = table.factor * min((link.transfer_s(wire) for link in links), default=np.inf)
        for pool in used:
            if pool.devices_per_node == 1:
                continue
            node_s = table.node_latency_s[pool.index]
            node_s += n_bytes / self.kinds.most_degree / table.node_bytes_per_s[pool.index]
            least = min(least, float(node_s))
        joined = (regions[:, None] > 0) & (regions[None, :] > 0) & (cluster.bytes_per_s > 0)
        np.fill_diagonal(joined, False)
        if joined.any():
            way_s = table.factor * (cluster.latency_s[joined] + wire / cluster.bytes_per_s[joined])
            least = min(least, float(way_s.min()))
        return least if np.isfinite(least) else 0.0

    def _region_capacity(self, device_capacity: np.ndarray) -> np.ndarray:
        cluster, used = self.tables.problem.cluster, self.kinds.of_pool >= 0
        devices = np.array([pool.devices for pool in cluster.pools])
        worth = np.where(used, devices * device_capacity[self.kinds.of_pool], 0.0)
        return np.bincount(self.tables.links.region, weights=worth, minlength=len(cluster.regions))

    @property
    def second_largest(self) -> int:
        """Devices of the region that has most but one."""
        devices = self._region_capacity(np.ones(int(self.kinds.of_pool.max()) + 1))
        return int(np.sort(devices)[-2]) if len(devices) > 1 else 1

    @cached_property
    def _used_regions(self) -> np.ndarray:
        return np.unique(self.tables.links.region[self.kinds.of_pool >= 0])

    @cached_property
    def _borders(self) -> Borders:
        problem, links, cluster = self.tables.problem, self.tables.links, self.tables.problem.cluster
        used = [pool for pool in cluster.pools if self.kinds.of_pool[pool.index] >= 0]
        some = self._used_regions

        def total(values: list[float]) -> np.ndarray:
            weights = np.array(values)
            found: np.ndarray = np.bincount(
                [pool.region for pool in used], weights=weights, minlength=len(cluster.regions)
            )[some]
            return found

        nodes, context = total([pool.nodes for pool in used]), problem.runtime.context_bytes
        part = np.ix_(some, some)
        rate = np.where(np.eye(len(some), dtype=bool), 0.0, cluster.bytes_per_s[part] * np.outer(nodes, nodes))
        capacity = links.capacity_bytes_per_s[part]
        return borders(
            np.minimum(rate / links.factor, capacity),
            # Where sums share a node pair, they take turns at what the cluster says.
            np.minimum(rate / min(links.factor, 1.0), capacity),
            links.egress_bytes_per_s[some],
            total([pool.nodes * links.card_bytes_per_s[pool.index] for pool in used]),
            total([pool.devices * max(0.0, self.tables.limit_bytes[pool.index] - context) for pool in used]),
        )

    def between_regions(self, size: _Size) -> RegionTraffic:
        """What passes the borders of regions where micro-batches have a size."""
        problem, one = self.tables.problem, np.arange(self.tables.problem.model.layers)
        gradients = self.gradient_bytes[one, one + 1]
        values = gradients / problem.batch.gradient_bytes
        held = self.tables.memory(1, size.micro_batch_size, "none").layers.parameters
        capacity = self._region_capacity(size.device_capacity)[self._used_regions]
        down, up = (self._wire_bytes(size.micro_batch_size, self._modes[t]) for t in MESSAGES)
        return RegionTraffic(
            borders=self._borders,
            layers=Layers(
                work=size.layer_work / size.work,
                gradient_bytes=np.minimum(gradients, self._gradient_wire_bytes(values)),
                state_bytes=held * sum(state_bytes(problem.batch)),
            ),
            part=capacity / size.work,
            message_bytes=(down * size.micro_batches, up * size.micro_batches),
        )

    def sets(self, size: _Size) -> RegionSets:
        """Sets of regions for micro-batches of a size."""
        return region_sets(
            self._region_capacity(size.device_capacity), self._ways(size.micro_batch_size), least_s=size.least_s
        )

    def led(self, size: _Size, hidden_s: float, last: float) -> LedSets:
        """Sets of regions that each hold the whole model (`led_sets`)."""
        n_bytes = float(self.gradient_bytes[0, -1])
        values = np.array([n_bytes / self.tables.problem.batch.gradient_bytes])
        wire_bytes = float(self._gradient_wire_bytes(values)[0])
        nodes = NodeCapacity(self.tables, self.kinds, size.device_capacity)
        links, sets = self._links_between_regions(), self.sets_of_regions
        return led_sets(links, sets, nodes.within_regions, n_bytes, wire_bytes, hidden_s=hidden_s, last=last)

    def _ways(self, micro_batch_size: int) -> Ways:
        """Links between regions; messages that a runtime sends between computing count in its workers' time alone."""
        links, cluster = self.tables.links, self.tables.problem.cluster
        latency_s = links.factor * cluster.latency_s
        linked = cluster.bytes_per_s > 0
        least_s = self.message_s(micro_batch_size)
        over = []
        for traffic in MESSAGES:
            wire = self._wire_bytes(micro_batch_size, self._modes[traffic])
            with np.errstate(divide="ignore"):
                rate = np.minimum(cluster.bytes_per_s / links.factor, links.capacity_bytes_per_s)
                more_s = np.maximum(latency_s + wire / rate - least_s, 0.0)
            more_s = more_s if self.tables.problem.runtime.p2p_overlap else np.zeros_like(more_s)
            over.append(np.where(linked, more_s, np.inf))
        return Ways(
            latency_s=latency_s,
            linked=linked,
            down_s=over[0],
            up_s=over[1],
            whole="powersgd" in self._modes["weight_gradients"],
        )

    def _wire_bytes(self, micro_batch_size: int, modes: Iterable[str]) -> float:
        """Least bytes of the activation of a micro-batch between two stages, or of its gradient."""
        problem = self.tables.problem
        values = boundary_values(problem.model, problem.batch, micro_batch_size)
        element_bytes = problem.batch.element_bytes
        return min(packed_bytes(values, element_bytes, mode, width=problem.model.hidden_size) for mode in modes)

    def across(
        self, device_capacity: np.ndarray, hidden_s: np.ndarray, last: np.ndarray
    ) -> tuple[list[Across], list[Across]]:
        """Tiers of several regions: where gradients are summed as a step ends, and where micro-batches scatter them.

        Parameters
        ----------
        hidden_s, last : ndarray, shape (layers, layers + 1)
            What of the reduction of layers [a, b) backward hides at most, and which part it hides nothing of.
        """
        sets, nodes = self.sets_of_regions, NodeCapacity(self.tables, self.kinds, device_capacity)
        all_of_it = sets.capacity(nodes.within_pools(MANY_NODES))
        tiers: tuple[list[Across], list[Across]] = [], []
        for most, end_s, scattered_s in self._sums_s:
            capacity, free = sets.capacity(nodes.within_regions(most)), sets.capacity(nodes.within_pools(most))
            for found, sums_s, held, scatter_free in (
                (tiers[0], end_s, capacity, np.full_like(free, np.inf)),
                (tiers[1], scattered_s, all_of_it, free),
            ):
                for some in groups_by_capacity(held, max(3, MOST_SPREADS // len(self._sums_s))):
                    found.append(self._tier(sums_s[some], held[some], scatter_free[some], some, hidden_s, last))
        return tiers

    def _tier(
        self,
        sums_s: np.ndarray,
        capacity: np.ndarray,
        free: np.ndarray,
        some: np.ndarray,
        hidden_s: np.ndarray,
        last: np.ndarray,
    ) -> Across:
        """The least of some sets, each part by itself."""
        far_s = self.sets_of_regions.latency_s[some, None]
        whole = sums_s.min(axis=0)[self._span_of]
        near = np.maximum(sums_s - far_s, 0.0).min(axis=0)[self._span_of]
        return Across(
            capacity=float(capacity.max()),
            free=float(free.max()),
            whole_s=whole,
            exposed_s=np.maximum(float(far_s.min()) + near * last, whole - hidden_s),
            near_s=np.maximum(near * last, near - hidden_s),
        )

    def message_s(self, micro_batch_size: int) -> float:
        """Least seconds of a message between any two workers (0 without two nodes or devices to a node)."""
        links, used = self.tables.links, self.kinds.of_pool >= 0
        # Inside a region anything may be packed: the bound does not look for who forbids it.
        n_bytes = self._wire_bytes(micro_batch_size, COMPRESSIONS)
        pools = self.tables.problem.cluster.pools
        several = np.array([pool.devices_per_node > 1 for pool in pools])
        node_s = links.node_latency_s + n_bytes / self.kinds.most_degree / links.node_bytes_per_s
        joined = (links.region[:, None] == links.region[None, :]) & used[:, None] & used[None, :]
        joined[np.diag_indices(len(pools))] &= np.array([pool.nodes > 1 for pool in pools])
        seconds = min(
            float(node_s[several & used].min(initial=np.inf)),
            float((links.latency_s + n_bytes / links.bytes_per_s.clip(1e-300))[joined].min(initial=np.inf)),
            self.distances.message_s(n_bytes),
        )
        return seconds if np.isfinite(seconds) else 0.0

    def codec_s(self, micro_batch_size: int) -> float:
        """Most seconds of packing and unpacking a gradient in a worker's backward."""
        problem = self.tables.problem
        values = boundary_values(problem.model, problem.batch, micro_batch_size)
        rate = min(pool.device.memory_bytes_per_s for pool in problem.cluster.pools)
        return max(sum(codec_s(values, problem.batch.element_bytes, mode, rate)) for mode in COMPRESSIONS)


def _kinds(problem: Problem, traffic: str) -> set[str]:
    """Packings between regions that a plan may name: those that the search chooses from, and those without a row."""
    limits = problem.constraints
    kinds = {"none", *getattr(allowed(problem), traffic)}
    for mode in COMPRESSIONS:
        known = PARITY_LEVELS.index(level_needed(problem, traffic, mode)) <= PARITY_LEVELS.index(limits.parity)
        if mode in limits.compressions if limits.compressions else known:
            kinds.add(mode)
    return kinds


def longest_run(names: Sequence[str]) -> tuple[int, int]:
    """Where the most equal names that follow one another begin, and where they have ended."""
    best, begin = (0, 1), 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[begin]:
            best, begin = max(best, (begin, i), key=lambda run: run[1] - run[0]), i
    return best


def constant(capacity: float) -> Callable[[float], float]:
    """As much compute whatever the time."""
    return lambda _: capacity


NOWHERE = Tier(0.0, np.inf, 0.0, 0.0)
"""A tier without any room."""


class _Stages:
    """The dynamic program over stages for one micro-batch size."""

    def __init__(self, size: _Size, traffic: _Traffic) -> None:
        self.size, self.traffic_s = size, traffic.between_regions(size).least_s
        capacity = size.class_capacity
        ratio = capacity / capacity.min()
        most = float(capacity.max())
        inside = [
            [Tier(most, 0.0, 0.0, most), *best_tiers(tiers)]
            for tiers in region_tiers(traffic.tables, size.kinds, size.device_capacity, traffic.packed)
        ]
        self.inside = max(map(len, inside))
        inside = [[*tiers, *[NOWHERE] * (self.inside - len(tiers))] for tiers in inside]
        # (end or scattered, tiers, layers, layers + 1)
        whole_s = np.array(
            [[tier.fixed_s + tier.s_per_byte * traffic.gradient_bytes for tier in tiers] for tiers in inside]
        )
        runtime = traffic.tables.problem.runtime
        layers = np.maximum(differences(np.arange(whole_s.shape[2] + 1.0)), 1.0)
        # Layers are reduced one after another while backward of the last micro-batch still runs.
        backward_s = differences(size.backward_s).max(axis=(0, 1)) + traffic.codec_s(size.micro_batch_size)
        each_s = np.diff(size.backward_s).max(axis=(0, 1))
        others_s, others = each_s.sum() - each_s[size.run].sum(), len(each_s) - len(each_s[size.run])

        def exposed(more: int, more_s: float) -> tuple[np.ndarray, np.ndarray, tuple[list[Across], list[Across]]]:
            """Sums as far as backward does not hide them, with and without latency between regions, of stages that may
            have so many more layers, with a backward of so much."""
            count = layers + more
            part = np.maximum((count - 1) / count, _hidden_part(runtime))
            hidden_s = (backward_s + more_s) * part
            last = 1 / count if runtime.by_layer else np.minimum(1 / count, runtime.last_bucket)
            if not more:
                self.hidden_s, self.last = float(hidden_s[0, -1]), float(last[0, -1])
            inside_s = np.maximum(whole_s * last, whole_s - hidden_s)
            across = traffic.across(size.device_capacity, hidden_s, last)
            far, near = (
                np.array([[*inside_s[i], *(getattr(tier, name) for tier in across[i])] for i in range(2)])
                for name in ("exposed_s", "near_s")
            )
            return far, near, across

        tier_s, self.near_s, across = exposed(0, 0.0)
        self.group_tier_s = exposed(others, float(others_s))[0]
        # Regions that meet only every so many steps do it after the update.
        self.local_tier_s = tier_s.copy()
        for i, tiers in enumerate(across):
            for t, tier in enumerate(tiers, self.inside):
                self.local_tier_s[i, t] = np.minimum(tier_s[i, t], tier.whole_s / traffic.local_steps)
        self.most_stages_inside = traffic.second_largest
        one_layer = np.arange(len(layers)), np.arange(1, len(layers) + 1)
        self.meeting_s = min(
            (float(tier.whole_s[one_layer].min()) / traffic.local_steps for tiers in across for tier in tiers),
            default=np.inf,
        )
        self.pipeline = Pipeline(
            micro_batches=float(size.micro_batches),
            forward_s=_least_sum(size.forward_s),
            backward_s=_least_sum(size.backward_s),
            class_s=size.fitting_s,
            held=np.ones(1),
            class_capacity=capacity,
            best=best_class(size.fitting_s, capacity),
            tier_s=tier_s,
            tier_capacity=np.array([[tier.capacity for tier in (*inside[i], *across[i])] for i in range(2)]),
            tier_free=np.array([tier.free for tier in (*inside[1], *across[1])]),
            message_s=traffic.message_s(size.micro_batch_size),
            passing_s=(0.0, 0.0),
            tied_s=traffic.tied_s,
            unit=float(capacity.min()) if np.allclose(ratio, np.round(ratio), rtol=1e-9) else 0.0,
            whole=True,
        )

    def least_s(
        self,
        capacity: Callable[[float], float],
        known_s: float,
        *,
        only: Pipeline | None = None,
        most_stages: int = MOST_STAGES,
        further: bool = True,
    ) -> float:
        """Least time in which a pipeline can end, if it is less than `known_s` (else that).

        Parameters
        ----------
        capacity : callable
            Compute of the devices, given the time.
        only : Pipeline, optional
            With these costs.
        most_stages, further
            See `least_capacity`.
        """
        pipeline = only or self.pipeline

        def ends(time_s: float) -> bool:
            limit = capacity(time_s)
            if self.size.work > limit * time_s * (1 + 1e-9):
                return False
            return least_capacity(pipeline, time_s, most_stages, limit, further) < np.inf

        low_s = max(self.size.path_s, self.size.compute_s)
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

    def apart_s(self, sets: RegionSets, known_s: float) -> float:
        """Least time of a plan on one of some sets of regions; `known_s` if that is less.

        What all wait is taken off the time. A stage's own sum goes on while they wait, but for the first stage's, whose
        latency it is.
        """
        first_s, tier_s = float(sets.first_s.max()), self.pipeline.tier_s.copy()
        if first_s == 0:
            tier_s[:, self.inside :, 0] = np.inf
        else:
            tier_s = np.maximum(tier_s - first_s, 0.0)
            tier_s[:, : self.inside, 0] = np.inf
            tier_s[:, self.inside :, 0] = self.near_s[:, self.inside :, 0]
        return self._waiting_s(sets, known_s, self.pipeline._replace(tier_s=tier_s))

    def _waiting_s(
        self,
        sets: RegionSets,
        known_s: float,
        pipeline: Pipeline,
        *,
        rest: float = 0.0,
        most_stages: int = MOST_STAGES,
        further: bool = True,
    ) -> float:
        """Least time of a pipeline after what all of some sets of regions wait; `known_s` if that is less.

        Workers do whole micro-batches; and those whose regions are away do less of everything, parts of one included.

        Parameters
        ----------
        rest : float
            Work beside the pipeline's.
        """
        if self.traffic_s >= known_s:
            return known_s
        waits_s, most = float(sets.waits_s.min()), float(sets.capacity.max())
        least = partial(self.least_s, most_stages=most_stages, further=further)

        least_s = least(lambda time_s: most - rest / time_s, known_s - waits_s, only=pipeline)
        if least_s + waits_s < known_s and sets.away.any():
            part, most_s = pipeline._replace(whole=False), known_s - waits_s
            least_s = max(least_s, least(lambda time_s: sets.most(time_s) - rest / time_s, most_s, only=part))
        return min(known_s, max(least_s + waits_s, self.traffic_s))

    def single_s(self, led: LedSets, known_s: float) -> float:
        """Least time of one stage in several regions, which find the norm in what they have summed and may lead."""
        tier_s = self.pipeline.tier_s.copy()
        tier_s[:, self.inside :] = 0.0
        pipeline = self.pipeline._replace(tier_s=tier_s)
        least = partial(self.least_s, most_stages=1, further=False)
        least_s = least(constant(float(led.capacity.max(initial=0.0))), known_s, only=pipeline)
        if least_s < known_s:
            least_s = max(least_s, least(led.most, known_s, only=pipeline._replace(whole=False)))
        return least_s

    def interleaved_s(self, sets: RegionSets, known_s: float) -> float:
        """Least time of an interleaved plan; `known_s` if that is less.

        Its groups hold any layers: what the blocks of a group ask counts, and compute for the rest, in what regions
        apart leave of the time. A group waits for a layer or more of every group before. Of p groups with v chunks
        each holds (p (v - 1) + 1) / v micro-batches in flight, (p + 1) / 2 or more, or all that it does if these are
        fewer (`polygon.domain.schedule.interleaved_in_flight`). Of layers of one kind any are as good as neighbours;
        those outside of the longest run of one kind count as compute alone.
        """
        least_s = np.maximum((self.size.work + sets.away) / sets.capacity, self.size.path_s) + sets.waits_s
        sets = sets.some(least_s < known_s)
        blocks = len(self.size.layer_work[self.size.run])
        if blocks < 2 or not len(sets.capacity):
            return min(known_s, float(least_s.min()))
        for fewest, more in pairwise((*(groups for groups in GROUPS if groups <= blocks), blocks + 1)):
            pipeline = self._groups(fewest)
            for some in sets.bins():
                tier_s = np.maximum(pipeline.tier_s - float(some.first_s.max()), 0.0)
                known_s = self._waiting_s(
                    some,
                    known_s,
                    pipeline._replace(tier_s=tier_s),
                    rest=self.size.rest_work,
                    most_stages=more - 1,
                    further=False,
                )
        return known_s

    def _groups(self, fewest: int) -> Pipeline:
        """The longest run of alike layers in so many groups or more."""
        run = self.size.run
        inside = (..., run, slice(run.start, run.stop + 1))
        levels = np.array(HELD) <= (fewest + 1) / 2
        nothing = np.zeros(run.stop - run.start + 1)
        class_s = np.ascontiguousarray(self.size.held_s[levels][inside])
        return self.pipeline._replace(
            forward_s=nothing,
            backward_s=nothing,
            class_s=class_s,
            held=np.array(HELD)[levels],
            best=best_class(class_s, self.pipeline.class_capacity),
            tier_s=np.ascontiguousarray(self.group_tier_s[inside]),
            passing_s=(float(self.size.block_s[0]), float(self.size.block_s[1])),
            tied_s=0.0,
        )

    def local_s(self, known_s: float) -> float:
        """Least time of two regions or more that each hold all layers and meet every so many steps.

        All have the same stages, so of these no more than the second largest has devices.
        """
        pipeline, most = self.pipeline._replace(tier_s=self.local_tier_s), self.most_stages_inside
        least_s = self.least_s(
            constant(self.size.capacity),
            known_s,
            only=pipeline,
            most_stages=min(most, MOST_STAGES),
            further=most > MOST_STAGES,
        )
        return min(known_s, max(least_s, self.meeting_s))


def _least_sum(sums: np.ndarray) -> np.ndarray:
    """Running sum over the layers of the least over classes and recomputations."""
    return running_sum(np.diff(sums).min(axis=(0, 1)))
