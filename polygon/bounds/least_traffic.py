"""What messages and reductions of a problem cost at least, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polygon.bounds.fitting import Executions
from polygon.bounds.region_sets import RegionSets, Ways, region_sets
from polygon.bounds.region_sums import NODES, Hop, LedSets, Links, groups_by_capacity, led_sets, summing_sets
from polygon.bounds.region_traffic import Borders, Layers, RegionTraffic, borders
from polygon.bounds.size_work import SizeWork
from polygon.bounds.stage_tiers import (
    MANY_NODES,
    Distances,
    Kinds,
    NodeCapacity,
    best_hop,
    differences,
    least_wire_bytes,
    node_steps,
)
from polygon.cost.convergence import TRAFFIC, allowed, level_needed
from polygon.cost.memory import state_bytes
from polygon.cost.reduction import collective_s, least_part, lent_s
from polygon.cost.tables import CostTables, running_sum
from polygon.cost.transfers import boundary_values, codec_s, matrix_values, packed_bytes
from polygon.domain.plan import COMPRESSIONS, PARITY_LEVELS, Problem
from polygon.domain.runtime import Runtime

MESSAGES = ("activations", "activation_gradients")
MANY_VALUES = 1e12
"""Parameters of which a device updates most in a second."""
MOST_SPREADS = 24
"""Tiers of several regions, by their nodes and compute."""


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
    rest_s: np.ndarray
    """`whole_s` without it."""


def hidden_part(runtime: Runtime, layers: np.ndarray) -> np.ndarray:
    """Part of a backward of so many layers beside which gradients are summed (`polygon.cost.overlap.seen_parts`)."""
    part: np.ndarray = np.full_like(layers, runtime.hidden_part)
    if runtime.dp_overlap == "none":
        part[:] = 0.0
    elif runtime.by_layer:
        part = (layers - 1) / layers
    return part


class TiedSum(NamedTuple):
    """Least seconds of a sum of tied embeddings on a node of a pool, on so many nodes of a region at most, or across
    several regions with so many each, then of every set of regions."""

    seconds: float | np.ndarray
    node: int | None = None
    nodes: int = 0
    across: bool = False


class LeastTraffic:
    """What messages and reductions cost at least, whatever the micro-batch size."""

    def __init__(self, tables: CostTables, kinds: Kinds, local_steps: int) -> None:
        problem, batch = tables.problem, tables.problem.batch
        self.tables, self.kinds, self.local_steps = tables, kinds, local_steps
        self.distances = Distances(tables, kinds)
        self._modes = {traffic: _kinds(problem, traffic) for traffic in TRAFFIC}
        layers = problem.model.layers
        spread = max(Executions(tables, of, 1).spreads[-1] for of in kinds.classes)
        held = tables.memory(1, tables.micro_batch_sizes[0], "none", ep=spread).layers
        # Where no two devices have the same experts, nobody sums their gradients.
        values = differences(running_sum(held.parameters - held.spread_over(spread)))
        tied = float(problem.model.tied_values)
        if problem.runtime.tied_once:  # what is left is each stage's own
            values[0, 1:layers] -= tied
        else:
            values[1:, layers] += tied
        self.gradient_bytes = values * batch.gradient_bytes
        self.part_of_any = 0.0
        """`part_at_end` of whatever stages on the same devices."""
        self.part_at_end = self._parts_at_end(values, tied if problem.runtime.tied_once else 0.0)
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
        self.tied_s, self.tied_sums = 0.0, []
        if tied and layers > 1 and problem.runtime.tied_once:
            self.tied_sums = self._together(tied, links, steps)
            least = min((float(np.min(some.seconds, initial=np.inf)) for some in self.tied_sums), default=np.inf)
            self.tied_s = least if least < np.inf else 0.0
        elif tied and layers > 1:
            self.tied_s = self._between_nodes_s(tied)
        self._sums_s = [
            (
                most,
                self.sets_of_regions.seconds(spans[0], spans[1], links.hop, fewest, most),
                self.sets_of_regions.seconds(spans[0], spans[1], scattered, fewest, MANY_NODES),
            )
            for fewest, most in steps
        ]

    def _parts_at_end(self, values: np.ndarray, tied: float) -> np.ndarray:
        """Least part of the gradients of layers [a, b) that comes last (`polygon.cost.step_times.part_at_end`): most
        values have workers with all experts, and norms on each of most devices."""
        tables, layers = self.tables, values.shape[0]
        degree = max(of.tp for of in self.kinds.classes)
        most = differences(tables.memory(degree, tables.micro_batch_sizes[0], "none").parameters) * degree
        if tied:
            most[0, 1:layers] -= tied
        else:
            most[1:, layers] += tables.problem.model.tied_values
        least = np.repeat(values[np.arange(layers), np.arange(1, layers + 1)][:, None], layers + 1, axis=1)
        least[0, 1:] = values[0, np.minimum(2, np.arange(1, layers + 1))]
        least[0, layers] += tied * (layers > 2)
        held = np.maximum(np.maximum(most, values), 1.0)
        self.part_of_any = float(least[np.triu_indices(layers, 1, layers + 1)].min() / held.max())
        found: np.ndarray = np.clip(least / held, 0.0, 1.0)
        return found

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
                trees=self.tables.problem.runtime.sum_trees,
            )

    def _gradient_wire_bytes(self, n_values: np.ndarray) -> np.ndarray:
        problem = self.tables.problem
        matrix = matrix_values(problem.model)
        return least_wire_bytes(self._modes["weight_gradients"], n_values, problem.batch.gradient_bytes, matrix)

    def _together(self, n_values: float, between: Links, steps: Iterable[tuple[int, int]]) -> list[TiedSum]:
        """Least seconds of one sum of tied embeddings over two workers or more: on a node, on nodes of a region, or in
        several regions (`polygon.cost.stage_reduction.tied_reduction`); of a sum over several, any is taken alone."""
        tables, batch = self.tables, self.tables.problem.batch
        links, n_bytes = tables.links.arrays(tables.problem.runtime), n_values * batch.gradient_bytes
        wire = float(least_wire_bytes(self._modes["weight_gradients"], np.array([n_values]), batch.gradient_bytes)[0])
        hop, found = between.hop._replace(part=1.0), []
        for pool in tables.problem.cluster.pools:
            p, most = pool.index, pool.devices_per_node if self.kinds.of_pool[pool.index] >= 0 else 1
            inside_s = []
            if most > 1 and links.collective[p, 4] == 0:
                inside_s.append(lent_s(n_bytes, 2, links.node_latency_s[p], links.node_bytes_per_s[p], 1.0))
            for members in range(2, most + 1 if links.collective[p, 4] > 0 else 2):
                part = n_bytes / (most // members)  # each device of a worker has a part
                inside_s.append(collective_s(part, members, members, p, 0.0, np.inf, 2, links))
            if inside_s:
                found.append(TiedSum(min(inside_s), node=p))
        for fewest, most in node_steps(int(between.nodes.max())) if hop.bytes_per_s > 0 else ():
            inside = float(hop.sum_s(np.array([n_bytes]), fewest)[0])
            if wire < n_bytes:  # packed parts of nodes, each over its card
                inside = min(inside, 2 * (fewest - 1) / fewest * wire / hop.card_bytes_per_s)
            found.append(TiedSum(inside, nodes=most))
        sizes = np.floor([n_bytes]), np.floor([wire])
        for step in steps:
            sums_s = self.sets_of_regions.seconds(*sizes, hop, *step, trees=False)[0][:, 0] / self.local_steps
            found.append(TiedSum(sums_s, nodes=step[1], across=True))
        return found

    def tied_levels(self, device_capacity: np.ndarray) -> list[tuple[float, float]]:
        """Least seconds of the sum of tied embeddings, rising, and the most compute of first and last stage together
        that they are enough for."""
        nodes = NodeCapacity(self.tables, self.kinds, device_capacity)
        points = []
        for some in self.tied_sums:
            if some.node is not None:
                pool = self.tables.problem.cluster.pools[some.node]
                points.append((pool.devices_per_node * device_capacity[self.kinds.of_pool[some.node]], some.seconds))
            elif some.across:
                capacities = self.sets_of_regions.capacity(nodes.within_regions(some.nodes))
                points += zip(capacities, np.atleast_1d(some.seconds), strict=True)
            else:
                points.append((nodes.within_regions(some.nodes).max(), some.seconds))
        levels: list[tuple[float, float]] = []
        for capacity, seconds in sorted(points, reverse=True):
            if seconds == np.inf:
                continue
            if not levels or seconds < levels[-1][0]:
                levels.append((float(seconds), float(capacity)))
        return levels[::-1] or [(self.tied_s, np.inf)]

    def _between_nodes_s(self, n_values: float) -> float:
        """Least seconds in which two workers exchange the gradient of tied embeddings."""
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
    def update_s(self) -> float:
        """Least seconds in which all devices together update every parameter once (`CostTables.update_s`): experts
        spread, and then shared out among as many devices, count as that makes them."""
        tables = self.tables
        spread = max(Executions(tables, of, 1).spreads[-1] for of in self.kinds.classes)
        parameters = float(tables.memory(1, tables.micro_batch_sizes[0], "none", ep=spread).parameters[-1])
        used = [pool for pool in tables.problem.cluster.pools if self.kinds.of_pool[pool.index] >= 0]
        rates = [pool.devices * MANY_VALUES / tables.update_s(pool.index, MANY_VALUES) for pool in used]
        return parameters / sum(rates)

    @property
    def per_node(self) -> int:
        """Most devices of a node."""
        problem = self.tables.problem
        return max(pool.devices_per_node for pool in problem.cluster.pools if problem.may_use(pool))

    @cached_property
    def used_regions(self) -> np.ndarray:
        """Regions whose devices a plan may use."""
        return np.unique(self.tables.links.region[self.kinds.of_pool >= 0])

    @cached_property
    def _borders(self) -> Borders:
        problem, links, cluster = self.tables.problem, self.tables.links, self.tables.problem.cluster
        used = [pool for pool in cluster.pools if self.kinds.of_pool[pool.index] >= 0]
        some = self.used_regions

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

    def between_regions(self, size: SizeWork) -> RegionTraffic:
        """What passes the borders of regions where micro-batches have a size."""
        problem, one = self.tables.problem, np.arange(self.tables.problem.model.layers)
        gradients = self.gradient_bytes[one, one + 1]
        values = gradients / problem.batch.gradient_bytes
        held = self.tables.memory(1, size.micro_batch_size, "none").layers.parameters
        capacity = self._region_capacity(size.device_capacity)[self.used_regions]
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

    def sets(self, size: SizeWork) -> RegionSets:
        """Sets of regions for micro-batches of a size; who agrees on the norm updates after that."""
        sets = region_sets(
            self._region_capacity(size.device_capacity), self._ways(size.micro_batch_size), least_s=size.least_s
        )
        return replace(sets, agree_s=np.where(sets.agree_s > 0, sets.agree_s + self.update_s, 0.0))

    def led(self, size: SizeWork, hidden_s: float, last: float) -> LedSets:
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
        over = []
        for traffic, least_s in zip(MESSAGES, self.message_s(micro_batch_size)[0], strict=True):
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
            trees=self.tables.problem.runtime.sum_trees,
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
        tiers: tuple[list[Across], list[Across]] = ([], [])
        for most, end_s, scattered_s in self._sums_s:
            capacity, free = sets.capacity(nodes.within_regions(most)), sets.capacity(nodes.within_pools(most))
            for found, sums_s, held, scatter_free in (
                (tiers[0], end_s, capacity, np.full_like(free, np.inf)),
                (tiers[1], scattered_s, all_of_it, free),
            ):
                for some in groups_by_capacity(held, max(3, MOST_SPREADS // len(self._sums_s))):
                    found.append(self._tier(sums_s[:, some], held[some], scatter_free[some], some, hidden_s, last))
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
        near, rest = np.maximum(sums_s - far_s, 0.0).min(axis=1)[:, self._span_of]
        whole = sums_s[1].min(axis=0)[self._span_of]
        return Across(
            capacity=float(capacity.max()),
            free=float(free.max()),
            whole_s=whole,
            exposed_s=np.maximum(float(far_s.min()) + near * last, whole - hidden_s),
            near_s=np.maximum(near * last, rest - hidden_s),
            rest_s=rest,
        )

    def message_s(self, micro_batch_size: int) -> np.ndarray:
        """Least seconds of a message between any two workers [0] and between two nodes [1], down the stages and up;
        shape (2, 2). 0 where there are not two of them.

        Where the runtime does not send beside computing, workers wait for the mean of their messages, so that one
        between nodes may count as one inside of them.
        """
        modes = [self._modes[way] for way in MESSAGES]
        near_s, far_s = np.array([self._messages_s(self._wire_bytes(micro_batch_size, each)) for each in modes]).T
        return np.array([near_s, far_s if self.tables.problem.runtime.p2p_overlap else near_s])

    def _messages_s(self, n_bytes: float) -> tuple[float, float]:
        links, used = self.tables.links, self.kinds.of_pool >= 0
        pools = self.tables.problem.cluster.pools
        several = np.array([pool.devices_per_node > 1 for pool in pools])
        node_s = links.node_latency_s + n_bytes / self.kinds.most_degree / links.node_bytes_per_s
        joined = (links.region[:, None] == links.region[None, :]) & used[:, None] & used[None, :]
        joined[np.diag_indices(len(pools))] &= np.array([pool.nodes > 1 for pool in pools])
        rate = np.minimum(links.bytes_per_s, links.card_bytes_per_s[:, None])
        joined &= rate > 0
        far_s = min(
            float((links.latency_s[joined] + n_bytes / rate[joined]).min(initial=np.inf)),
            self.distances.message_s(n_bytes),
        )
        near_s = min(float(node_s[several & used].min(initial=np.inf)), far_s)
        return (near_s if near_s < np.inf else 0.0), (far_s if far_s < np.inf else 0.0)

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
