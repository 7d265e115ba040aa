"""What regions that add up gradients need at least, for every set of regions that could.

A stage with workers in the regions S sums its gradients between them as `polygon.cost.reduction` says: first inside the
regions, then in one or two rounds, every pair of regions at once, over all pairs of their nodes at best. With n bytes
of gradient, w of it packed, and f nodes in the region that has most of them, that takes

    at least  2 (f - 1) / f n / B  +  max over a, b in S of  latency_ab + 2 m_ab,  m_ab = w / (|S| k rate_ab)

with k node pairs, f^2 at most, and on the k cards of a region 2 w (|S| - 1) / |S| / k, longest where k is least; in two
rounds, where what comes over a link goes on over another, at least m_ab and the latencies of the longest way with that
link. Of the pairs those count that are farthest or slowest. All that leaves a region passes its egress. A stage with f
nodes at most has the compute of so many of every region: so f is looked at in steps (`NODES`).

Three regions and more may sum over trees (`polygon.domain.plan.SumTree`), which need not use the slowest link, nor all
alike. Take the regions in groups, m of them, a region by itself being one too: every tree has m - 1 edges or more from
group to group, and its part of w passes each both ways. So with o_a the bytes per second that region a sends to other
groups, over links that have the rate of the slower way and by its egress and its cards, that takes at least

    2 (m - 1) w / (sum over a of o_a),  and  w / (sum over a of o_a in one of two groups).

Links take turns at nothing better than the least latency; and all goes from everywhere to some root and back
(`longest_way_s`). Groups are one of any regions and each other region by itself, and any two (`_over_trees`): of links
alone the most that any groups say is enough for trees that are let have any depth (Nash-Williams 1961; Tutte 1961).

Where packed, all nodes may send one another parts: N nodes 2 w / N each, and nothing is summed before that. Beside
such nodes a region that sums first has a node pair to each from every node.

Up to `ENUMERATED` regions every set is looked at. Of more, sets are told apart by their longest latency and slowest
link, in `STEPS` steps each: a set lies in the neighbourhood of each of its members, so it has no more regions, compute
and nodes than the largest such neighbourhood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polygon.bounds.region_sets import ENUMERATED, longest_way_s, quickest, ways_within_s
from polygon.bounds.stage_tiers import node_steps
from polygon.cost.reduction import exchange_rounds, passed_on_s

STEPS = 8
NODES = (1, 2, 4, 8, 16, 32, 128)
"""Nodes of the region that has most of a stage at which the bound takes a step."""


LEAST_RATE = 1e-30
"""Bytes/s of a link that is none, so that nothing passes it in no time."""
PASSED_ON_S = np.vectorize(passed_on_s, otypes=[float])


class Hop(NamedTuple):
    """The best link between two nodes of a region, and the least part of an all-reduce over it that is seen."""

    latency_s: float
    bytes_per_s: float
    part: float
    card_bytes_per_s: float = math.inf
    """What a node can send in all at most."""

    def sum_s(self, n_bytes: np.ndarray, nodes: int) -> np.ndarray:
        """Least seconds that are seen of a sum over so many nodes of a region."""
        if nodes < 2:
            return np.zeros_like(n_bytes)
        rounds_s = 2 * math.ceil(math.log2(nodes)) * self.latency_s
        return self.part * (rounds_s + 2 * (nodes - 1) / nodes * n_bytes / self.bytes_per_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """Links between regions that a plan may use, shape (regions, regions) each, and what the regions are.

    Parameters
    ----------
    latency_s, slowness : ndarray
        Seconds, and seconds per byte of one node pair; inf without a link, 0 on the diagonal.
    shared : ndarray
        Seconds per byte of what all node pairs of two regions share.
    egress : ndarray, shape (regions,)
        Seconds per byte of what all that leaves a region shares.
    nodes : ndarray of int, shape (regions,)
        0 for a region that must not be used.
    hop : Hop
        Least latency and most bytes/s between two nodes of a region.
    trees : bool
        Whether three regions or more may sum over trees.
    """

    latency_s: np.ndarray
    slowness: np.ndarray
    shared: np.ndarray
    egress: np.ndarray
    nodes: np.ndarray
    hop: Hop
    trees: bool

    def rates(self, most: float) -> np.ndarray:
        """Bytes/s between two regions with so many nodes each at most, the slower of both ways; 0 without a link."""
        nodes = np.minimum(self.nodes, most).astype(float)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.minimum(np.outer(nodes, nodes) / self.slowness, 1 / self.shared)
        np.fill_diagonal(rate, 0.0)
        found: np.ndarray = np.minimum(rate, rate.T).clip(LEAST_RATE, 1 / LEAST_RATE)
        np.fill_diagonal(found, 0.0)
        return found

    def sends(self, most: float) -> np.ndarray:
        """Bytes/s that leave a region with so many nodes at most."""
        with np.errstate(divide="ignore"):
            found: np.ndarray = np.minimum(1 / self.egress, np.minimum(self.nodes, most) * self.hop.card_bytes_per_s)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class SummingSets:
    """Sets of two or more regions, and what each has at best; shape (sets,) unless said otherwise.

    Parameters
    ----------
    members : ndarray of bool, shape (sets, centres, regions)
        Of each set; where neighbourhoods stand for sets, the neighbourhood of every centre.
    fewest, count, cards, nodes : ndarray of int
        Fewest and most regions, most nodes of the region that has the fewest, most nodes.
    lanes : ndarray of int, shape (2, sets)
        Most node pairs side by side of the farthest and of the slowest pair.
    rounds : ndarray of int
    latency_s : ndarray
        Seconds that the smallest sum takes (`longest_way_s`).
    far, thin : ndarray, shape (3, sets)
        Latency of the farthest and of the slowest pair, of the longest way that it is part of, and slowness.
    near_s, shared, egress : ndarray
        Least latency, and seconds per byte of the narrowest capacity and of the narrowest egress.
    over : ndarray of bool
        Whether they may sum over trees.
    over_s : callable
        Given the most nodes that any region has: least seconds per packed byte of a gradient over any trees.
    """

    members: np.ndarray
    fewest: np.ndarray
    count: np.ndarray
    cards: np.ndarray
    lanes: np.ndarray
    nodes: np.ndarray
    rounds: np.ndarray
    latency_s: np.ndarray
    far: np.ndarray
    thin: np.ndarray
    near_s: np.ndarray
    shared: np.ndarray
    egress: np.ndarray
    over: np.ndarray
    over_s: Callable[[float], np.ndarray]

    def capacity(self, of_region: np.ndarray) -> np.ndarray:
        """Most that a set has of something, given what every region has."""
        found: np.ndarray = (self.members @ of_region).max(axis=1)
        return found

    def seconds(
        self, n_bytes: np.ndarray, wire_bytes: np.ndarray, hop: Hop, fewest: int, most: int, *, trees: bool = True
    ) -> np.ndarray:
        """Least seconds of a sum where some region has `fewest` nodes in it or more, and none more than `most`.

        Parameters
        ----------
        n_bytes, wire_bytes : ndarray, shape (sizes,)
            Gradient as it is inside a region and packed between regions.
        trees : bool
            Whether this sum may go over trees where its regions may.

        Returns
        -------
        ndarray, shape (2, sets, sizes)
            Of one gradient, which passes region and links one after the other, and of the longer of both, which is all
            that many gradients take that follow one another.
        """
        sent = 2 * wire_bytes[None, :] / self.count[:, None]
        # Every region sends its part to all the others, and all nodes that send for it share in that.
        leaves = 2 * wire_bytes[None, :] * (1 - 1 / self.fewest)[:, None]
        cards = np.maximum(np.minimum(most, self.cards), 1)[:, None]
        lanes = np.maximum(np.minimum(float(most) ** 2, self.lanes), 1)[:, :, None]
        busy_s = np.maximum(sent * self.shared[:, None], leaves * self.egress[:, None])
        busy_s = np.maximum(busy_s, leaves / cards / hop.card_bytes_per_s)
        pairs = list(zip((self.far, self.thin), lanes, strict=True))

        def pairs_s(sent: np.ndarray) -> np.ndarray:
            """Seconds of the longer of both pairs, with both rounds, and with one and the way to it or from it."""
            found = [(sent * slowness[:, None] / side, one, way) for (one, way, slowness), side in pairs]
            both = [np.maximum(one[:, None] + link_s, way[:, None] + link_s / 2) for link_s, one, way in found]
            longer: np.ndarray = np.maximum(*both)
            return longer

        between_s = np.maximum(pairs_s(sent), self.near_s[:, None] + busy_s)
        if trees and self.over.any():
            trees_s = np.maximum(self.latency_s, self.near_s + wire_bytes[:, None] * self.over_s(most)).T
            between_s = np.where(self.over[:, None], trees_s, between_s)
        inside_s = hop.sum_s(n_bytes, fewest)
        best: np.ndarray = np.stack([inside_s + between_s, np.maximum(inside_s, between_s)])
        if (wire_bytes < n_bytes).any():
            # Then one node of each place sends by itself.
            places = np.minimum(self.nodes, np.minimum(most, self.nodes) * self.count)
            parts = sent * (self.count / places)[:, None]
            apart_s = np.maximum(pairs_s(parts), leaves * np.maximum(1 / hop.card_bytes_per_s, self.egress[:, None]))
            # The region with most nodes adds up inside, or is one of those whose nodes send one another parts.
            passes = 1 - 1 / (self.fewest + fewest - 1)[:, None]
            alone_s = np.maximum(apart_s, 2 * wire_bytes * passes / hop.card_bytes_per_s)
            both_s = np.stack([inside_s + apart_s, np.maximum(inside_s, apart_s)])
            best = np.minimum(best, np.minimum(alone_s, both_s))
        return best


def summing_sets(links: Links, *, whole: bool) -> SummingSets:
    """Every set of linked regions, or neighbourhoods in their place.

    Parameters
    ----------
    whole : bool
        Whether regions may send whole gradients in one round (`exchange_rounds`).
    """
    used = np.flatnonzero(links.nodes > 0)
    if len(used) <= ENUMERATED:
        return _enumerated(links, used, whole=whole)
    return _neighbourhoods(links, used)


def _enumerated(links: Links, used: np.ndarray, *, whole: bool) -> SummingSets:
    regions = len(links.nodes)
    masks = np.arange(1 << len(used))
    members = np.zeros((len(masks), regions), dtype=bool)
    members[:, used] = (masks[:, None] >> np.arange(len(used))) & 1 == 1
    members = members[members.sum(axis=1) >= 2]
    apart = ~np.eye(regions, dtype=bool)
    pairs = np.argwhere(apart & (links.nodes[:, None] > 0) & (links.nodes[None, :] > 0))
    if not len(pairs):
        pairs = np.zeros((1, 2), dtype=np.int64)  # of no set
    inside = members[:, pairs[:, 0]] & members[:, pairs[:, 1]]
    a, b = pairs.T
    latency_s, slowness = links.latency_s[a, b], links.slowness[a, b]
    linked = np.isfinite(np.where(inside, slowness, 0.0)).all(axis=1)
    members, inside = members[linked], inside[linked]
    longest = np.where(inside, latency_s, -1.0)
    slowest = np.where(inside, slowness, -1.0)
    far, thin = longest.argmax(axis=1), slowest.argmax(axis=1)
    count = members.sum(axis=1)
    rounds = np.array([exchange_rounds(int(n), whole) for n in count], dtype=np.int64)
    # What comes over a link goes on over the longest one, or has come over it.
    held_s = np.where(members[:, :, None] & members[:, None, :], links.latency_s, 0.0)
    comes, goes = held_s.max(axis=1), held_s.max(axis=2)
    groups = _groups(members[:, used] if links.trees else members[:0, used])

    @cache
    def over_s(most: float) -> np.ndarray:
        part = np.ix_(used, used)
        return _over_trees(members[:, used], groups, links.rates(most)[part], links.sends(most)[used])

    def ends(pair: np.ndarray) -> np.ndarray:
        sets = np.arange(len(pair))
        more_s = np.where(rounds == 2, np.maximum(comes[sets, a[pair]], goes[sets, b[pair]]), 0.0)
        return np.stack([latency_s[pair], latency_s[pair] + more_s, slowness[pair]])

    return SummingSets(
        members=members[:, None, :],
        fewest=count,
        count=count,
        cards=np.where(members, links.nodes, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max),
        lanes=(links.nodes[a] * links.nodes[b])[np.stack([far, thin])],
        nodes=members @ links.nodes,
        rounds=rounds,
        latency_s=longest_way_s(links.latency_s, members, whole=whole, trees=links.trees),
        far=ends(far),
        thin=ends(thin),
        near_s=np.where(inside, latency_s, np.inf).min(axis=1, initial=np.inf),
        shared=np.where(inside, links.shared[a, b], 0.0).max(axis=1, initial=0.0),
        egress=np.where(members, links.egress, 0.0).max(axis=1, initial=0.0),
        over=links.trees & (count > 2),
        over_s=over_s,
    )


def _groups(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every set with every part of it, neither all nor nothing: number of the set, and of the part as bits."""
    bits = members @ (1 << np.arange(members.shape[1]))
    part = np.arange(1 << members.shape[1])
    of = [np.flatnonzero((part | mask) == mask)[1:-1] for mask in bits.tolist()]
    return np.repeat(np.arange(len(of)), [len(parts) for parts in of]), np.concatenate([*of, np.zeros(0, np.int64)])


def _over_trees(
    members: np.ndarray, groups: tuple[np.ndarray, np.ndarray], rates: np.ndarray, sends: np.ndarray
) -> np.ndarray:
    """Least seconds per byte of a sum of each of some sets over any trees (the module's second formula).

    Parameters
    ----------
    members : ndarray of bool, shape (sets, regions)
    groups
        Of `_groups`.
    rates : ndarray, shape (regions, regions)
        Bytes/s of links, as much either way.
    sends : ndarray, shape (regions,)
        Bytes/s of all that leaves a region.
    """
    of, bits = groups
    inside = (bits[:, None] >> np.arange(members.shape[1])) & 1 == 1
    others = members[of] & ~inside
    count = others.sum(axis=1)
    leave = np.where(inside, np.minimum(others @ rates, sends), 0.0).sum(axis=1)
    alone = np.where(others, np.minimum(members @ rates, sends)[of], 0.0).sum(axis=1)
    found = np.zeros(len(members))
    np.maximum.at(found, of, np.maximum(1 / leave, 2 * count / (leave + alone)))
    return found


def _steps(values: np.ndarray) -> np.ndarray:
    """Ends of steps that hold about equally many of some values; the last is the largest."""
    return np.unique(np.quantile(values, np.linspace(0, 1, STEPS + 1), method="higher"))


def _neighbourhoods(links: Links, used: np.ndarray) -> SummingSets:
    regions = len(links.nodes)
    linked = np.isfinite(links.slowness) & ~np.eye(regions, dtype=bool)
    linked &= (links.nodes[:, None] > 0) & (links.nodes[None, :] > 0)
    both = linked & linked.T
    if not both.any():
        return _enumerated(links, used[:0], whole=True)
    # A set's longest latency either way, over trees by whatever way, and its slowest link.
    way_s = np.where(both, links.latency_s, np.inf)
    way_s = quickest(way_s) if links.trees else way_s
    latency_s = np.where(both, np.maximum(way_s, way_s.T), np.inf)
    slowness = np.where(both, np.maximum(links.slowness, links.slowness.T), np.inf)
    least = float(links.latency_s[both].min()), float(links.slowness[both].min())
    far, thin = _steps(latency_s[both]), _steps(slowness[both])
    members, points = [], []
    for before_s, longest_s in pairwise((0.0, *far)):
        for before, slowest in pairwise((0.0, *thin)):
            near = both & (latency_s <= longest_s) & (slowness <= slowest)
            near[used, used] = True
            members.append(near[used])
            points.append((max(before_s, least[0]), max(before, least[1])))
    held = np.array(members)
    bounds = np.array(points).T
    ones = np.ones(len(points), dtype=np.int64)

    @cache
    def over_s(most: float) -> np.ndarray:
        near = held & (np.arange(regions) != used[:, None])
        rates, sends = links.rates(most), links.sends(most)
        each = np.minimum((near * rates[used]).sum(axis=2), sends[used])
        # Any two members have one that sends no more than the second most. And k of them have k (k - 1) links, and send
        # k times the most that any does: whatever k is, 2 (k - 1) gradients take no less than this.
        second, link = np.sort(each, axis=1)[:, -2], (near * rates[used]).max(axis=(1, 2))
        found: np.ndarray = np.maximum(1 / second.clip(LEAST_RATE), 2 / (each.max(axis=1) + link).clip(LEAST_RATE))
        return found

    return SummingSets(
        members=held,
        fewest=np.full(len(points), 2),
        count=held.sum(axis=2).max(axis=1),
        cards=np.sort(np.where(held, links.nodes, 0), axis=2)[..., -2].max(axis=1),
        lanes=np.tile(np.where(held, links.nodes, 0).max(axis=(1, 2)) ** 2, (2, 1)),
        nodes=np.where(held, links.nodes, 0).sum(axis=2).max(axis=1),
        rounds=ones,
        latency_s=bounds[0],
        far=np.stack([bounds[0], bounds[0], np.full(len(points), least[1])]),
        thin=np.stack([*np.full((2, len(points)), least[0]), bounds[1]]),
        near_s=np.full(len(points), least[0]),
        shared=np.full(len(points), float(links.shared[both].min())),
        egress=np.full(len(points), float(links.egress[used].min())),
        over=np.full(len(points), links.trees),
        over_s=over_s,
    )


def groups_by_capacity(capacity: np.ndarray, most: int) -> Sequence[np.ndarray]:
    """Sets put together, those with less compute first; at most so many groups."""
    order = np.argsort(capacity, kind="stable")
    return [part for part in np.array_split(order, min(len(order), most) or 1) if len(part)]


class LedSets(NamedTuple):
    """Sets of regions that each hold the whole model, and begin a step as they have the sums of the one before.

    Attributes
    ----------
    sets : SummingSets
    capacity : ndarray, shape (sets,)
        Compute of all regions.
    away : ndarray, shape (sets,)
        Compute times seconds of a step in which some of it is certain to wait.
    busy_s : ndarray, shape (sets,)
        Seconds that a step keeps the slowest link busy.
    of_nodes : ndarray, shape (steps, regions)
        Compute of so many nodes of each region.
    inside_s : ndarray, shape (steps,)
        Seconds in which these do nothing but sum.
    """

    sets: SummingSets
    capacity: np.ndarray
    away: np.ndarray
    busy_s: np.ndarray
    of_nodes: np.ndarray
    inside_s: np.ndarray

    def most(self, time_s: float) -> float:
        """Most compute in steps of so much time, over that time."""
        part = np.maximum(1 - self.inside_s / time_s, 0.0)
        by_regions = self.sets.capacity((self.of_nodes * part[:, None]).max(axis=0))
        able = np.minimum(by_regions, self.capacity - self.away / time_s)
        return float(np.where(self.busy_s <= time_s, able, 0.0).max(initial=0.0))


def led_sets(
    links: Links,
    sets: SummingSets,
    of_nodes: Callable[[int], np.ndarray],
    n_bytes: float,
    wire_bytes: float,
    *,
    hidden_s: float,
    last: float,
) -> LedSets:
    """What no region can compute in a step, because of the ways of gradients (`polygon.cost.finish.led_s`).

    A step T is at least the mean of any cycle of regions. What backward hides left out: in two rounds a region's own
    sums come back over b, so that it computes for T less what that way takes (`polygon.cost.reduction.passed_on_s`);
    in one round a and b together compute for 2 T - 2 x_ab or less, with x_ab the mean of both ways; over trees see
    `_away_over_trees`. Of neighbourhoods this does not count. A region alone is such a cycle: with f of its nodes it
    computes for T less what is seen of their sum.

    Parameters
    ----------
    of_nodes : callable
        Most compute of so many nodes of each region, shape (regions,).
    n_bytes, wire_bytes : float
        Gradient of the whole model as it is inside a region and packed between regions.
    hidden_s : float
        Most of a sum that backward hides.
    last : float
        Least part of it, latency apart, that backward does not hide.
    """
    steps = [(1, 1), *node_steps(int(links.nodes.max()))]
    sums_s = np.array([float(links.hop.sum_s(np.array([n_bytes]), fewest)[0]) for fewest, _ in steps])
    if wire_bytes < n_bytes:
        # Or all nodes are places by themselves, beside one more of another region.
        passes = np.array([2 * fewest / (fewest + 1) for fewest, _ in steps])
        sums_s = np.minimum(sums_s, passes * wire_bytes / links.hop.card_bytes_per_s)
    inside_s = np.maximum(last * sums_s, sums_s - hidden_s)
    by_steps = np.array([of_nodes(most) for _, most in steps])
    capacity = by_steps[-1]
    total, away, busy_s = sets.capacity(capacity), *np.zeros((2, len(sets.count)))
    if sets.members.shape[1] > 1:
        return LedSets(sets, total, away, busy_s, by_steps, inside_s)
    for i, members in enumerate(sets.members[:, 0]):
        some = np.flatnonzero(members)
        pairs = np.ix_(some, some)
        lanes = np.outer(links.nodes[some], links.nodes[some]).astype(float)
        if wire_bytes < n_bytes:  # as many places as nodes, at best
            lanes *= sets.nodes[i] / len(some)
        sent_s = 2 * wire_bytes / len(some) / lanes * links.slowness[pairs]
        # All that leaves a region passes its egress, whoever it goes to.
        sent_s = np.maximum(sent_s, 2 * wire_bytes * (1 - 1 / len(some)) * links.egress[some][:, None])
        if wire_bytes >= n_bytes:
            sent_s = np.maximum(sent_s, 2 * wire_bytes / len(some) * links.shared[pairs])
        np.fill_diagonal(sent_s, 0.0)
        busy_s[i] = sent_s.max()
        mean_s, far_s = (sent_s + sent_s.T) / 2, (links.latency_s[pairs] + links.latency_s[pairs].T) / 2
        whole_s = mean_s if sets.rounds[i] == 1 else PASSED_ON_S(sent_s / 2, sent_s.T / 2, last)
        wait_s = sets.rounds[i] * far_s + np.maximum(last * mean_s, whole_s - hidden_s)
        np.fill_diagonal(wait_s, 0.0)
        held = capacity[some]
        if sets.rounds[i] == 2:
            away[i] = held @ wait_s.max(axis=1)
        else:
            away[i] = (2 * wait_s * np.minimum(held[:, None], held[None, :])).max()
    if (over := np.flatnonzero(sets.over)).size:
        busy_s[over] = np.minimum(busy_s[over], wire_bytes * sets.over_s(math.inf)[over])
        least = _away_over_trees(links, sets.members[over, 0], capacity, wire_bytes, hidden_s, last)
        away[over] = np.minimum(away[over], least)
    return LedSets(sets, total, away, busy_s, by_steps, inside_s)


def _away_over_trees(
    links: Links, members: np.ndarray, capacity: np.ndarray, wire_bytes: float, hidden_s: float, last: float
) -> np.ndarray:
    """Compute times seconds of a step in which regions that each hold the whole model wait for sums over trees, shape
    (sets,), for sets whose regions are all linked.

    What a region sends to another root comes back from there. So all wait for the latencies to any root and back, and
    who is the root of the part q waits for those of the quickest way to another root and for 1 - q of a gradient over
    all its links. Parts make 1: least is waited where they are of the regions that wait at the highest price, each as
    far as backward does not hide the rest. The other parameters are those of `led_sets`.

    Parameters
    ----------
    members : ndarray of bool, shape (sets, regions)
    capacity : ndarray, shape (regions,)
        Compute of each.
    """
    some = np.flatnonzero(members.any(axis=0))
    members, pairs = members[:, some], np.ix_(some, some)
    held = np.where(members, capacity[some], 0.0)
    way_s = ways_within_s(np.where(np.eye(len(some), dtype=bool), 0.0, links.latency_s[pairs]), members)
    back_s = way_s + way_s.transpose(0, 2, 1)
    to_root = np.where(members, (held[:, :, None] * np.where(members[:, :, None], back_s, 0.0)).sum(axis=1), np.inf)
    back_s[:, np.arange(len(some)), np.arange(len(some))] = np.inf
    nearest_s = np.where(members[:, None, :], back_s, np.inf).min(axis=2)
    # Of one root alone, the quickest way is the way to that.
    one_root = to_root.min(axis=1)
    away = np.minimum(one_root, (held * np.where(members, nearest_s, 0.0)).sum(axis=1))
    with np.errstate(divide="ignore"):
        sends = np.minimum(members @ links.rates(math.inf)[pairs], 1 / links.egress[some])
    sent_s = wire_bytes / sends
    price = held * sent_s
    seen = np.maximum(1 - hidden_s / np.maximum(sent_s, 1e-300), 0.0)
    order = np.argsort(-price, axis=1, kind="stable")
    price, seen = (np.take_along_axis(of, order, axis=1) for of in (price, seen))
    spared = np.clip(1.0 - (seen.cumsum(axis=1) - seen), 0.0, seen)
    rest = (price * (seen - spared)).sum(axis=1)
    away += np.maximum(last * (price.sum(axis=1) - price[:, 0]), rest)
    found: np.ndarray = np.maximum(one_root, away)
    return found
