"""Trees over which the regions of a stage sum its gradients soonest (`polygon.cost.sum_trees`).

What passes links, cards, capacities and egress is linear in the parts of trees, so the trees that let a gradient pass
soonest are a linear program with a column for each tree: as many gradients a second as their parts carry are packed
into what everything carries in a second. Columns are made as they are needed: at the program's prices a tree is worth
its part where its edges cost less than one. At the start every region is the root of a tree without relays. For each
root relays are added one at a time, that which saves most first; of two levels the cheapest tree is hard to find
(facility location), and where all prices are equal there is none to be found.

HiGHS solves it (scipy). The trees with the largest parts are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.optimize import linprog

from polygon.cost.reduction import TREE_NODES, TREE_REGIONS
from polygon.cost.stage_reduction import region_standing
from polygon.cost.step_times import StepTimes, stages_on_pairs, unpaced_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem, SumTree, sums_over_trees
from polygon.planning.checker import violations

MOST_TREES = 2
"""Times as many as there are regions: those with the largest parts."""
LEAST_PART = 0.003
"""Of a gradient; smaller trees are left out."""
ROUNDS = 40
"""In which trees are added at most."""
EQUAL = 0.0
"""In place of one of `DEARNESS`: no trees, every region adds up an equal part."""
DEARNESS = (math.inf, 4.0, 2.0, 1.0)
"""Times that what goes over a relay counts: inf without relays, 1 for most that passes; between these fewer links lie
one behind the other."""
QUICK = (math.inf, 2.0)
"""Of these, what is tried of a plan that is only compared with others: each takes programs of its own."""
VISIBLE = 0.02
"""Of what the busiest worker computes: sums that take less are left as they are."""
GAIN = 1e-4
"""Part by which something has to be shorter to count."""
ENOUGH = 1e-4
"""Part of its worth by which a tree has to be cheaper to be added."""


def able_groups(plan: Plan, problem: Problem) -> list[int]:
    """Groups of workers (`Plan.groups`) whose sums may go over trees that are looked for."""
    pools = problem.cluster.pools
    able = [
        sums_over_trees(problem, plan, s)
        and len({pools[worker.pool].region for worker in stage.workers}) <= TREE_REGIONS
        for s, stage in enumerate(plan.stages)
    ]
    return [g for g in range(plan.groups) if all(able[g :: plan.groups])]


def legal(plan: Plan, problem: Problem) -> Plan:
    """The plan without trees of stages that, as it packs gradients, cannot have any."""
    lost = [bool(stage.trees) and not sums_over_trees(problem, plan, s) for s, stage in enumerate(plan.stages)]
    if not any(lost):
        return plan
    stages = (replace(stage, trees=()) if gone else stage for stage, gone in zip(plan.stages, lost, strict=True))
    return replace(plan, stages=tuple(stages))


def with_trees(plan: Plan, tables: CostTables, value_of: Callable[[Plan], float]) -> Plan:
    """The plan with the trees that make its value least: of all stages together, then of one group after another."""
    groups = able_groups(plan, tables.problem)
    value = value_of(plan) if groups else 0.0
    for some in [groups, *([group] for group in groups if len(groups) > 1)]:
        for dearness in (EQUAL, *DEARNESS) if some else ():
            draft = drafted(plan, tables, some, dearness)
            found = value if draft is plan else value_of(draft)
            if found < value - GAIN * abs(value) and not violations(tables.problem, draft, tables):
                plan, value = draft, found
    return plan


def with_quick_sums(plan: Plan, tables: CostTables, times: StepTimes) -> Plan:
    """The plan with trees for those sums that take much of its step, by what they take alone, and have few nodes.

    Parameters
    ----------
    times : StepTimes
        Of the plan; nothing is simulated.
    """
    schedule = times.schedule
    shares = np.bincount(schedule.routes.ravel(), minlength=len(schedule.forward_s))
    busiest_s = float((shares * (schedule.forward_s + schedule.backward_s)).max())
    given, several = plan, []
    for group in able_groups(plan, tables.problem):
        least, mine = _seen_s(times, group), times.place.node[times.place.members(group)]
        if least <= VISIBLE * busiest_s or len(np.unique(mine)) > TREE_NODES:
            continue
        several.append(group)
        for dearness in QUICK:
            draft = drafted(plan, tables, [group], dearness)
            found = least if draft is plan else _seen_s(unpaced_times(draft, tables), group)
            if found < (1 - GAIN) * least:
                plan, least = draft, found
    if len(several) == 1 or plan is given:
        return plan
    least = _seen_together_s(unpaced_times(plan, tables), several)
    for dearness in QUICK:
        draft = drafted(plan, tables, several, dearness)
        found = least if draft is plan else _seen_together_s(unpaced_times(draft, tables), several)
        if found < (1 - GAIN) * least:
            plan, least = draft, found
    return plan


def _seen_together_s(times: StepTimes, groups: Sequence[int]) -> float:
    """The same of several groups: of the longest, or as long as a pair of nodes is busy with all of them."""
    busy_s = float(times.shared_pairs_s.sum(axis=1).max(initial=0.0))
    return max(busy_s, max(_seen_s(times, group) for group in groups))


def _seen_s(times: StepTimes, group: int) -> float:
    """Seconds of a group's sums: all of them, and once more what no backward hides."""
    reduction = times.reductions[group]
    return reduction.streamed_s + reduction.last_s


def drafted(plan: Plan, tables: CostTables, groups: Sequence[int], dearness: float) -> Plan:
    """The plan with the quickest trees of some groups, where what goes over a relay counts as `DEARNESS` says, or with
    none (`EQUAL`; also where regions are not all linked); itself where it has these."""
    links, place = tables.links, tables.placement(plan)
    together, stages = stages_on_pairs(plan, place, len(links.cluster.regions)).astype(float), list(plan.stages)
    for group in groups:
        regions = tuple(np.unique(place.region[place.members(group)]).tolist())
        at = region_standing(place, group, links, together, tables.problem.runtime)
        trees: tuple[SumTree, ...] = ()
        if dearness != EQUAL and (at.bytes_per_s > 0).all():
            seconds = at.pair / at.bytes_per_s, 1 / at.capacity, 1 / at.egress, 1 / at.cards
            trees = _quickest(regions, dearness, *(array.tobytes() for array in seconds))
        for s in range(group, len(stages), plan.groups):
            stages[s] = replace(stages[s], trees=trees)
    return plan if stages == [*plan.stages] else replace(plan, stages=tuple(stages))


@lru_cache(maxsize=4096)
def _quickest(
    regions: tuple[int, ...], dearness: float, links: bytes, capacity: bytes, egress: bytes, cards: bytes
) -> tuple[SumTree, ...]:
    """The trees under which a gradient passes regions soonest.

    Parameters
    ----------
    dearness : float
        Of `DEARNESS`.
    links : array, shape (regions, regions)
        Seconds per byte of what passes a link, of which the first region deals out all.
    capacity : array, shape (regions, regions)
        The same of what all links between two have together.
    egress, cards : array, shape (regions,)
    """
    k = len(regions)
    costs = _Costs(k, *(np.frombuffer(each) for each in (links, capacity, egress, cards)))
    trees: list[tuple[int, dict[int, int]]] = [(root, {}) for root in range(k)]
    columns = [costs.column(*tree) for tree in trees]
    for _ in range(ROUNDS if dearness < math.inf else 0):
        _, price = _packed(columns)
        cheap = costs.of_edges(price)
        new = [
            tree for root in range(k) if (tree := _cheapest(cheap, root, dearness)) is not None and tree not in trees
        ]
        if not new:
            break
        trees += new
        columns += [costs.column(*tree) for tree in new]
    parts, _ = _packed(columns)
    chosen = np.argsort(-parts, kind="stable")[: MOST_TREES * k]
    parts, _ = _packed([columns[i] for i in chosen])
    total = parts.sum()
    kept = [(part, trees[i]) for part, i in zip(parts, chosen, strict=True) if part > LEAST_PART * total]
    total = sum(part for part, _ in kept)
    return tuple(
        SumTree(
            part=float(part / total),
            root=regions[root],
            relays=tuple((regions[child], regions[parent]) for child, parent in sorted(over.items())),
        )
        for part, (root, over) in kept
    )


class _Costs:
    """Seconds per byte of a gradient that edges of a tree take of everything that carries some."""

    def __init__(self, k: int, links: np.ndarray, capacity: np.ndarray, egress: np.ndarray, cards: np.ndarray) -> None:
        self.k, self._links, self._capacity = k, links.reshape(k, k), capacity.reshape(k, k)
        self._ends = np.stack([egress, cards])

    def column(self, root: int, over: dict[int, int]) -> np.ndarray:
        """Of a tree, with the parents of those that do not send to the root: links and what they share, by source and
        target, then egress and cards."""
        between, ends = np.zeros((2, self.k, self.k)), np.zeros_like(self._ends)
        for child in range(self.k):
            if child != root:
                a, b = (child, over[child]) if child in over else (root, child)  # of both the first deals out
                between[0, [a, b], [b, a]] += self._links[a, b]
                between[1, [a, b], [b, a]] += self._capacity[[a, b], [b, a]]
                ends[:, [a, b]] += self._ends[:, [a, b]]
        return np.concatenate([between.ravel(), ends.ravel()])

    def of_edges(self, price: np.ndarray) -> np.ndarray:
        """What an edge costs at prices of everything, shape (regions, regions): the first of both deals out."""
        k = self.k
        (links, capacity), ends = price[: 2 * k * k].reshape(2, k, k), price[2 * k * k :].reshape(2, k)
        shared, ends = capacity * self._capacity, (ends * self._ends).sum(axis=0)
        found: np.ndarray = self._links * (links + links.T) + shared + shared.T + ends[:, None] + ends[None, :]
        return found


def _packed(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes per second of every tree that make most together, and what a second of everything is worth."""
    table = np.array(columns).T
    scale = 1 / table.max()
    found = linprog(-np.ones(table.shape[1]), A_ub=table * scale, b_ub=np.ones(len(table)), method="highs")
    return found.x * scale, -found.ineqlin.marginals * scale


def _cheapest(cheap: np.ndarray, root: int, dearness: float) -> tuple[int, dict[int, int]] | None:
    """A tree with this root that costs less than it is worth, 1; None where none is found.

    `cheap[a, b]` is the cost of an edge of which a deals out what it carries: a root does, and who sends over a relay,
    where it counts more.
    """
    k, dear = len(cheap), dearness * cheap
    relays: list[int] = []
    cost, parent = cheap[root].copy(), np.full(k, root)
    cost[root] = 0.0
    while True:
        gains = []
        for relay in range(k):
            if relay != root and relay not in relays:
                fixed = [root, *relays, relay]
                less = np.minimum(cost, dear[:, relay])
                less[fixed] = cost[fixed]
                less[relay] = cheap[root, relay]
                gains.append((cost.sum() - less.sum(), relay))
        gain, relay = max(gains, default=(0.0, -1))
        if gain <= ENOUGH * cost.sum():
            break
        over = dear[:, relay] < cost
        over[[root, *relays, relay]] = False
        cost[over], parent[over] = dear[over, relay], relay
        cost[relay], parent[relay] = cheap[root, relay], root
        relays.append(relay)
    if cost.sum() >= 1 - ENOUGH:
        return None
    return root, {v: int(parent[v]) for v in range(k) if v != root and parent[v] != root}
