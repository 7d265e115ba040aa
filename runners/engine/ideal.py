"""The run of a plan in which nothing but its computations and its links takes time: what no run of it can beat.

Every rank executes its actions in the plan's order, each as soon as its message is there. A message takes its bytes
over the link's rate, after those before it on the same way, and then the link's latency; inside a region it takes
nothing. A layer's gradient is on its way when its last backward has passed the layer. A region cannot know a sum
before the others' packed gradients have crossed its links, nor the norm (where not every rank has the whole gradient)
before all have their sums and the latency has passed; only then it updates, and begins the next step.

All of this is the longest path through what must follow one another, every part taken at its least (packing, sums
inside regions and the processors' time for messages are left out): with the same seconds of computing no run ends its
steps sooner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from polygon_comm.members import Members

from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values, packed_bytes
from polygon.domain.errors import require
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import BACKWARD, FORWARD, topological_order
from runners.engine.options import Options
from runners.engine.rank_layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a rank computes.

    Parameters
    ----------
    seconds : tuple of float
        Of a micro-batch's forward and backward.
    update_s : float
        Of the optimizer.
    shares : sequence of float
        Part of a backward that has passed when each layer, the last one first, has its gradient.
    """

    seconds: tuple[float, float]
    update_s: float
    shares: Sequence[float]


class IdealRun:
    """Steps of a plan, one after the other; `step` gives what every rank would log of it.

    Parameters
    ----------
    problem, plan
        The links are those of the problem's cluster.
    speeds : mapping of rank to Speed
    options : Options
        Of these, when regions take local steps and what they exchange.
    """

    def __init__(self, problem: Problem, plan: Plan, speeds: Mapping[int, Speed], options: Options) -> None:
        require(plan.chunks == 1, "plan.chunks", plan.chunks, "1, for the ideal run")
        self.problem, self.plan, self.speeds, self.options = problem, plan, speeds, options
        self.layout = Layout(problem, plan)
        self._order = topological_order(plan).tolist()
        self._regions = sorted(set(self.layout.region_of.values()))
        first = options.synchronous_steps
        self._first_local = options.steps // 5 if first is None else first
        self._buckets = self._sizes()
        self._free_s = dict.fromkeys(plan.rank_places, 0.0)
        self._busy_s: dict[tuple[str, int], float] = defaultdict(float)
        """Until when a group's gradients are on their way into a region (to its first rank there)."""
        self._under_way: list[tuple[int, dict[int, float]]] = []
        """Exchanges of local updates: the step at whose end they are waited for, and when each region has them."""
        self._step = 0

    def _sizes(self) -> list[tuple[Members, int, float]]:
        """Group, layer and elements of every gradient that is summed, in the order in which backward makes them."""
        model, plan = self.problem.model, self.plan
        tables = CostTables(self.problem)
        sizes = np.diff(tables.memory(1, plan.micro_batch_size, "none").parameters)
        found = []
        tied = float(model.head_weight_parameters()) if self.layout.tied_apart else 0.0
        sizes[0] -= tied
        for s, stage in enumerate(plan.stages):
            group = self.layout.groups[f"stage-{s}.0"]
            found += [(group, n, float(sizes[n])) for n in reversed(range(stage.first_layer, stage.last_layer))]
        return [*found, (self.layout.groups["tied.0"], 0, tied)] if tied else found

    def step(self) -> list[dict[str, Any]]:
        """What the ranks would log of the next step, in their order; times as in `StepFigures.waits`."""
        local = self.plan.local_steps > 1 and self._step >= self._first_local
        start_s = dict(self._free_s)
        logged, backward_s = self._schedule()
        ends_s = dict(self._free_s)
        ready_s = self._gradients(backward_s)
        summed_s = self._sum(ready_s, ends_s, local=local)
        for rank, speed in self.speeds.items():
            self._free_s[rank] = summed_s[self.layout.region_of[rank]] + speed.update_s
        updated_s = dict(self._free_s)
        if local:
            self._exchange()
        self._step += 1
        return [
            {
                "start_s": start_s[rank],
                "clock_offset_s": 0.0,
                "schedule_end_s": ends_s[rank] - start_s[rank],
                "reduced_s": summed_s[self.layout.region_of[rank]] - start_s[rank],
                "outer_s": [updated_s[rank] - start_s[rank], self._free_s[rank] - start_s[rank]],
                "seconds": self._free_s[rank] - start_s[rank],
                "together": not local,
                "waited_s": {a: [t - start_s[rank] for t in pair] for a, pair in logged[rank]["waited"].items()},
                "handed_s": {a: t - start_s[rank] for a, t in logged[rank]["handed"].items()},
            }
            for rank in sorted(self.speeds)
        ]

    def _schedule(self) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
        """Execute all actions: waits and messages of every rank, and when its last backward began."""
        last = len(self.plan.stages) - 1
        logged: dict[int, dict[str, Any]] = {rank: {"waited": {}, "handed": {}} for rank in self.speeds}
        arrived_s: dict[tuple[int, int, int], float] = {}
        taken_s: dict[tuple[int, int, int], float] = defaultdict(float)
        began_s: dict[int, float] = {}
        for kind, m, s in self._order:
            rank, name = self.layout.peer(m, s), f"{'FB'[kind]}{m}"
            begin_s = self._free_s[rank]
            if (kind, m, s) in arrived_s:
                begin_s = max(begin_s, arrived_s[kind, m, s])
                logged[rank]["waited"][name] = (self._free_s[rank], begin_s)
            end_s = self._free_s[rank] = begin_s + self.speeds[rank].seconds[kind]
            if kind == BACKWARD:
                began_s[rank] = begin_s
            target = s + 1 if kind == FORWARD else s - 1
            if 0 <= target <= last:
                peer = self.layout.peer(m, target)
                way_s, latency_s = self._message_s(kind, rank, peer)
                leaves_s = taken_s[rank, peer, kind] = max(end_s, taken_s[rank, peer, kind]) + way_s
                arrived_s[kind, m, target] = leaves_s + latency_s
                logged[rank]["handed"][name] = end_s
        return logged, began_s

    def _message_s(self, kind: int, source: int, target: int) -> tuple[float, float]:
        """Seconds that a message holds its way, and those that it then needs to arrive."""
        a, b = self.layout.region_of[source], self.layout.region_of[target]
        if a == b:
            return 0.0, 0.0
        batch, use = self.problem.batch, self.plan.link_use(a, b)
        values = boundary_values(self.problem.model, batch, self.plan.micro_batch_size)
        mode = use.activations if kind == FORWARD else use.activation_gradients
        cluster = self.problem.cluster
        n_bytes = packed_bytes(values, batch.element_bytes, mode)
        return n_bytes / float(cluster.bytes_per_s[a, b]), float(cluster.latency_s[a, b])

    def _gradients(self, backward_s: Mapping[int, float]) -> list[list[float]]:
        """When each bucket's gradient is whole in every region of its group (0: nothing was computed for it)."""
        found = []
        for group, layer, _ in self._buckets:
            ready = []
            for region in group.regions:
                at_s = 0.0
                for rank in region:
                    stage = self.plan.stages[self.plan.rank_places[rank][0]]
                    # The copy of a tied weight is in the head, whose gradient comes first.
                    place = stage.last_layer - 1 - layer if layer >= stage.first_layer else 0
                    if rank in backward_s:
                        speed = self.speeds[rank]
                        at_s = max(at_s, backward_s[rank] + speed.seconds[BACKWARD] * speed.shares[place])
                ready.append(at_s)
            found.append(ready)
        return found

    def _sum(self, ready_s: Sequence[Sequence[float]], ends_s: Mapping[int, float], *, local: bool) -> dict[int, float]:
        """When each region knows its sums and the norm that the update needs."""
        region_of = self.layout.region_of
        summed = {r: max(t for rank, t in ends_s.items() if region_of[rank] == r) for r in self._regions}
        for (group, _, elements), ready in zip(self._buckets, ready_s, strict=True):
            places = [region_of[ranks[0]] for ranks in group.regions]
            there = ready if local else self._cross(group, elements, ready)
            for region, at_s in zip(places, there, strict=True):
                summed[region] = max(summed[region], at_s)
        latency_s = self.problem.cluster.latency_s
        if local or self.layout.gradient_everywhere:
            return summed
        return {b: max(t + float(latency_s[a, b]) * (a != b) for a, t in summed.items()) for b in self._regions}

    def _cross(self, group: Members, elements: float, ready_s: Sequence[float]) -> list[float]:
        """When each region of a group (or node, where these exchange) knows the sum of what was there in the others."""
        firsts = [ranks[0] for ranks in group.regions]
        if len(firsts) == 1:
            return list(ready_s)
        n_bytes = packed_bytes(elements, self.problem.batch.gradient_bytes, group.codec)
        found = []
        for place, (a, own_s) in enumerate(zip(firsts, ready_s, strict=True)):
            others = [other for other in range(len(firsts)) if other != place]
            ways = {other: self._way(firsts[other], a) for other in others if (place, other) in group.pairs_at_once}
            way_s = n_bytes / sum(group.pairs_at_once[place, other] * rate for other, (_, rate) in ways.items())
            key = (group.name, a)
            self._busy_s[key] = max(self._busy_s[key], min(ready_s[other] for other in others)) + way_s
            latest_s = max(ready_s[other] + self._latency_s(group, firsts, other, place) for other in others) + way_s
            found.append(max(own_s, latest_s, self._busy_s[key] + min(latency_s for latency_s, _ in ways.values())))
        return found

    def _latency_s(self, group: Members, firsts: Sequence[int], source: int, target: int) -> float:
        """What a region's gradients take at least to another place of a group, straight or over the trees it has."""
        trees = [tree.way(source, target) for tree in group.trees] or [[(source, target)]]
        return min(sum(self._way(firsts[a], firsts[b])[0] for a, b in way) for way in trees)

    def _way(self, source: int, target: int) -> tuple[float, float]:
        """Latency and rate from a rank to one on another node."""
        cluster, a, b = self.problem.cluster, self.layout.region_of[source], self.layout.region_of[target]
        if a != b:
            return float(cluster.latency_s[a, b]), float(cluster.bytes_per_s[a, b])
        pools = [self.layout.worker_of(rank).pool for rank in (source, target)]
        link = cluster.pools[pools[0]].inter_node if pools[0] == pools[1] else cluster.regions[a].intra_region
        return link.latency_s, link.bytes_per_s

    def _exchange(self) -> None:
        """Begin and end the exchanges of local updates that are due after the step."""
        options, every = self.options, self.plan.local_steps
        fragments, overlap = options.outer_fragments, options.outer_overlap
        done = self._step + 1 - self._first_local
        for fragment in range(fragments):
            if (done - fragment * every // fragments) % every == 0:
                there: dict[int, float] = {}
                for place, (group, _, elements) in enumerate(self._buckets):
                    ready = [max(self._free_s[rank] for rank in ranks) for ranks in group.regions]
                    if place % fragments == fragment:
                        for ranks, at_s in zip(group.regions, self._cross(group, elements, ready), strict=True):
                            region = self.layout.region_of[ranks[0]]
                            there[region] = max(there.get(region, 0.0), at_s)
                self._under_way.append((self._step + overlap, there))
        for due, there in self._under_way:
            if due <= self._step:
                for rank in self._free_s:
                    self._free_s[rank] = max(self._free_s[rank], there.get(self.layout.region_of[rank], 0.0))
        self._under_way = [(due, there) for due, there in self._under_way if due > self._step]
