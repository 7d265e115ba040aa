"""Links that the reductions of several stages share, and what that makes them wait.

Stages that have devices on the same nodes send their gradients over the same node pairs. However they take turns, a
link passes their bytes at its rate: of stages that begin to use it at b_1 <= b_2 <= ... and keep it busy for w_1, w_2
and so on, the last ends no earlier than max_j (b_j + w_j + w_{j+1} + ...). `stage_reduction` prices each stage
by itself, with its latencies; here is what it cannot know.

Considered are node pairs between regions, and a node's card with all that it sends, within its region and out of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polygon.cost.reduction import find_turns, pairs_at_once
from polygon.cost.stage_reduction import ReductionCost, group_packing, places_of, trees_in_use
from polygon.cost.sum_trees import ways_over
from polygon.cost.transfers import LinkTable, Placement
from polygon.domain.plan import Plan, SumTree


def busy_on_shared(
    plan: Plan,
    place: Placement,
    links: LinkTable,
    reductions: Sequence[ReductionCost],
    n_bytes: Sequence[float],
    sum_turns: int,
) -> tuple[np.ndarray, np.ndarray]:
    """How long each stage's reduction keeps the links busy that it shares with another stage's.

    Parameters
    ----------
    reductions : sequence of ReductionCost
        Of every stage; with local steps as a mean over the steps.
    n_bytes : sequence of float
        Gradient bytes of a worker of each stage that are summed inside regions at the end of a step (`summed_part`).
    sum_turns : int
        Of the runtime.

    Returns
    -------
    tuple of ndarray, shape (links, stages) each
        Seconds on the cards of nodes, and on node pairs between regions; no rows without sharing. With local steps
        cards have what stays within regions, which is what a step waits for.
    """
    stages = len(plan.stages)
    if not place.several.any():
        return np.zeros((0, stages)), np.zeros((0, stages))
    cards, pairs = _Rows(stages), _Rows(stages)
    for s in range(stages):
        known = place.derived.get(("sharing", s))
        mine = known or place.derived.setdefault(("sharing", s), Sharing(place, s, links, sum_turns))
        places, reduction = mine.places, reductions[s]
        sent = np.where(mine.apart, reduction.wire_bytes, n_bytes[s])
        cards.add(s, mine.nodes, mine.passes * sent / links.bytes_per_s[mine.pool, mine.pool])
        mode = group_packing(plan, places.regions)
        alone = mode == "powersgd"  # then one node of a place sends all
        if not reduction.across_bytes:
            continue
        regions = tuple((a, b) for a, b, _ in reduction.across_bytes)
        ways = mine.ways(regions, links, trees_in_use(plan, s, places, mode), alone=alone)
        sent_bytes = np.array([n_bytes for *_, n_bytes in reduction.across_bytes])
        if plan.local_steps == 1:
            seconds = np.bincount(
                ways.node_at, weights=sent_bytes[ways.node_way] * ways.node_s, minlength=len(ways.nodes)
            )
            cards.add(s, ways.nodes, seconds)
        rate = links.cluster.bytes_per_s[ways.source, ways.target][ways.pair_way]
        pair_s = np.divide(ways.pair_part, rate, out=np.zeros(len(rate)), where=rate > 0)
        pairs.add(s, ways.pairs, sent_bytes[ways.pair_way] * pair_s)
    return cards.shared(place.derived), pairs.shared(place.derived)


class Ways(NamedTuple):
    """What a stage shares with others of the ways of its gradients from region to region, whatever links these have.

    Attributes
    ----------
    source, target : ndarray of int
        Regions of every way.
    nodes : ndarray of int
        Those that are shared and send for a whole region.
    node_at, node_way, node_s : ndarray
        A place in `nodes`, a way that it sends on, and seconds per byte sent there by all of its region.
    pairs, pair_way, pair_part : ndarray
        Numbers of the node pairs that are shared, the way that each is part of, and what part of its bytes they have.
    """

    source: np.ndarray
    target: np.ndarray
    nodes: np.ndarray
    node_at: np.ndarray
    node_way: np.ndarray
    node_s: np.ndarray
    pairs: np.ndarray
    pair_way: np.ndarray
    pair_part: np.ndarray


class Sharing:
    """What a stage shares with others, whatever its gradients take; kept with the placement that it follows from.

    Attributes
    ----------
    places : Places
    nodes, pool : ndarray of int, shape (shared nodes that add up with others,)
    apart : ndarray of bool
        Whether these are places by themselves: packed gradients pass their cards, as plain ones do inside a place.
    passes : ndarray
        How often each card passes a gradient.
    """

    def __init__(self, place: Placement, stage: int, links: LinkTable, sum_turns: int) -> None:
        self._nodes, self._region, self._pool = nodes, region, pool = place.hosts[stage]
        self._several = place.several
        self._ways: dict[Hashable, Ways] = {}
        self.places = places_of(place.packed_inside, region, np.ones_like(region), len(links.cluster.regions))
        self._turns = np.ones(len(links.cluster.regions), dtype=np.int64)
        self._turns[self.places.regions] = turns_of(self.places.nodes, sum_turns)
        apart = self.places.apart[region]
        members = np.where(apart, self.places.total, np.bincount(region)[region])
        busy = self._several[nodes] & (members > 1)
        self.nodes, self.pool, self.apart = nodes[busy], pool[busy], apart[busy]
        self.passes = 2 * (1 - 1 / members[busy])

    def ways(
        self, regions: tuple[tuple[int, int], ...], links: LinkTable, trees: tuple[SumTree, ...], *, alone: bool
    ) -> Ways:
        """Of ways from a region to another each; `alone`: one node of a place sends all."""
        key = alone, regions, trees
        known = self._ways.get(key)
        if known is None:
            known = self._ways[key] = self._make_ways(regions, links, trees, alone)
        return known

    def _leaders(self, region: int, alone: bool) -> np.ndarray:
        """By their places among the nodes."""
        one = alone and not self.places.apart[region]
        return np.flatnonzero(self._region == region)[: 1 if one else None]

    def _make_ways(
        self, regions: Sequence[tuple[int, int]], links: LinkTable, trees: tuple[SumTree, ...], alone: bool
    ) -> Ways:
        apart, shared, several = self.places.apart, self._several[self._nodes], len(self._several)
        leaders = {a: self._leaders(a, alone) for a in {a for way in regions for a in way}}
        out = {a: of[shared[of]] for a, of in leaders.items()}
        sent = {a: of[: 0 if apart[a] else None] for a, of in out.items()}
        each_s = {a: 1 / len(leaders[a]) / links.card_bytes_per_s[self._pool[of]] for a, of in sent.items()}
        known = ways_over(trees, tuple(self.places.regions.tolist())) if trees else None
        alike: dict[tuple[int, int, int, int, float, bool], list[int]] = {}
        for number, (a, b) in enumerate(regions):
            if len(out[a]) and len(out[b]):
                dealt = 0.5
                if known is not None:
                    x, y = np.searchsorted(self.places.regions, (a, b))
                    dealt = float(known.dealt[x, y] / known.parts[x, y])
                turns, every = (int(self._turns[a]), int(self._turns[b])), bool(apart[a] or apart[b])
                alike.setdefault((len(leaders[a]), len(leaders[b]), *turns, dealt, every), []).append(number)
        pairs, pair_way, parts = np.zeros((2, 0), dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
        for key, numbers in alike.items():
            i, k, part = node_pairs(*key[:5], every=key[5])
            senders = np.array([leaders[regions[number][0]] for number in numbers])[:, i]
            receivers = np.array([leaders[regions[number][1]] for number in numbers])[:, k]
            both = shared[senders] & shared[receivers]
            pairs = np.hstack([pairs, (senders[both], receivers[both])])
            pair_way = np.append(pair_way, np.repeat(numbers, both.sum(axis=1)))
            parts = np.append(parts, np.broadcast_to(part, both.shape)[both])
        order = np.argsort(pair_way, kind="stable")
        pairs = self._nodes[pairs[:, order]]
        of_ways = [sent[a] for a, _ in regions]
        nodes, node_at = np.unique(self._nodes[np.concatenate(of_ways)], return_inverse=True)
        source, target = np.array(regions).T
        return Ways(
            source=source,
            target=target,
            nodes=nodes,
            node_at=node_at,
            node_way=np.repeat(np.arange(len(regions)), [len(each) for each in of_ways]),
            node_s=np.concatenate([each_s[a] for a, _ in regions]),
            pairs=pairs[0] * several + pairs[1],
            pair_way=pair_way[order],
            pair_part=parts[order],
        )


def pairs_at_work(place: Placement, regions: int, sum_turns: int) -> np.ndarray:
    """Over how many pairs of nodes the gradients of all stages go at once between any two regions, shape (regions,
    regions): of stages on nodes of their own over those of each, of stages on the same nodes over no more than these
    have together."""
    known: np.ndarray | None = place.derived.get(("pairs at work", sum_turns))
    if known is not None:
        return known
    first = np.unique(np.concatenate([nodes for nodes, _, _ in place.hosts]), return_index=True)[1]
    region = np.concatenate([region for _, region, _ in place.hosts])[first]
    rows = [np.bincount(of, minlength=regions) for of in (region, *(it[1] for it in place.hosts))]

    apart = np.zeros(regions, dtype=bool)
    apart[list(place.packed_inside)] = True
    turns = [turns_of(np.where(apart, np.minimum(row, 1), row), sum_turns) for row in rows]

    def at_once(a: int, b: int, which: int) -> float:
        here, there = int(rows[which][a]), int(rows[which][b])
        if apart[a] or apart[b] or not here or not there:
            return float(here * there)
        return float(pairs_at_once(here, there, turns[which][a], turns[which][b]))

    # Of regions that hold different stages the tied weights of first and last: one pair.
    found = np.ones((regions, regions))
    there = np.flatnonzero(rows[0]).tolist()
    for a in there:
        for b in there:
            if a != b:
                found[a, b] = max(1.0, min(at_once(a, b, 0), sum(at_once(a, b, s) for s in range(1, len(rows)))))
    place.derived["pairs at work", sum_turns] = found
    return found


def turns_of(leaders: np.ndarray, sum_turns: int) -> np.ndarray:
    """In how many turns regions with so many nodes each deal out what they add up, shape (regions,)."""
    turns = np.ones(len(leaders), dtype=np.int64)
    find_turns(leaders, sum_turns, turns)
    return turns


@cache
def node_pairs(
    senders: int, receivers: int, turns: int, other_turns: int, dealt: float = 0.5, *, every: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which nodes of a region send to which of another, and what part each pair has of what the regions exchange.

    One region deals cells of it out in so many turns, of the part `dealt` the sender, while nodes of the other have
    equal stretches (`polygon.cost.reduction.part_of_pair`); nodes that are places by themselves send to `every` one.
    """
    if every:
        i, k = np.divmod(np.arange(senders * receivers), receivers)
        return i, k, np.full(len(i), 1 / len(i))
    i, k, part = _dealt(senders, receivers, other_turns)
    other_k, other_i, other_part = _dealt(receivers, senders, turns)
    pair = np.concatenate([i * receivers + k, other_i * receivers + other_k])
    pairs, where = np.unique(pair, return_inverse=True)
    i, k = np.divmod(pairs, receivers)
    return i, k, np.bincount(where, weights=np.concatenate([(1 - dealt) * part, dealt * other_part]))


def _dealt(others: int, nodes: int, turns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of what a region of so many nodes adds up: the node of the other region in whose stretch each lies, who
    has the cell, and how large it is."""
    cells = nodes * turns
    whole = others * cells
    begin = np.union1d(np.arange(others) * cells, np.arange(cells) * others)
    return begin // cells, begin // others % nodes, np.diff(begin, append=whole) / whole


def last_end_s(begin_s: np.ndarray, busy_s: np.ndarray) -> np.ndarray:
    """When stages that share links can have ended at the earliest, shape (stages,).

    Parameters
    ----------
    begin_s : ndarray, shape (stages,)
        When each stage begins to reduce.
    busy_s : ndarray, shape (links, stages)
        Seconds that each stage keeps each link busy.

    Returns
    -------
    ndarray, shape (stages,)
        -inf for a stage that shares nothing. All that share a link are taken to end together.
    """
    if not len(busy_s):
        return np.full(len(begin_s), -np.inf)
    order = np.argsort(begin_s)
    rest = busy_s[:, order][:, ::-1].cumsum(axis=1)[:, ::-1]
    uses = busy_s > 0
    link_s = np.where(uses[:, order], begin_s[order] + rest, -np.inf).max(axis=1)
    found: np.ndarray = np.where(uses, link_s[:, None], -np.inf).max(axis=0)
    return found


class _Rows:
    """Seconds by link and stage, collected stage by stage."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._links: list[np.ndarray] = []
        self._stage: list[int] = []
        self._seconds: list[np.ndarray] = []

    def add(self, stage: int, links: np.ndarray, seconds: np.ndarray) -> None:
        """A stage's seconds on some links."""
        self._links.append(links)
        self._stage.append(stage)
        self._seconds.append(seconds)

    def shared(self, kept: dict[Hashable, Any]) -> np.ndarray:
        """Shape (links that several stages use, stages); which they are is kept, for what is shared by the same."""
        if not self._links:
            return np.zeros((0, self._stages))
        key = "rows", *map(id, self._links), *self._stage
        if key not in kept:
            links, row = np.unique(np.concatenate(self._links), return_inverse=True)
            stage = np.repeat(self._stage, [len(each) for each in self._links])
            # With the lists themselves: no others can take their places in memory.
            kept[key] = len(links), row * self._stages + stage, self._links
        links, cell, _ = kept[key]
        seconds = np.bincount(cell, weights=np.concatenate(self._seconds), minlength=links * self._stages)
        table = seconds.reshape(links, self._stages)
        found: np.ndarray = table[(table > 0).sum(axis=1) > 1]
        return found
