"""What a stage's regions need to sum gradients over trees (`polygon.domain.plan.SumTree`).

An edge of a tree carries the tree's part of the gradient up, packed, and the sum of it down: one way each as much. So
between regions a and b go s_ab of it either way, with s the parts of all trees that join them; each being the root of
an equal part, as where a plan gives no trees, is 2 / k of it for each pair of k regions. A link is busy for

    m_ab = w (e_ab L_a + e_ba L_b) / B_ab,   e_ab + e_ba = s_ab,

with w bytes of gradient and e_ab the parts of the trees in which a deals out what both exchange to its nodes (those at
an even depth do) and L_a what falls to a pair of nodes at most then (`polygon.cost.reduction.largest_share`); no less
than cards, capacities, egress and messages let it. A layer goes up to the root, and its sum down, one link after
another, while others are ahead of it or behind: a way of links h takes

    sum_h latency_h + max_h m_h + last (sum_h m_h - max_h m_h),

m_h here of what goes that way up, or down, as in `polygon.cost.reduction.passed_on_s`; and no link is done before all
that it carries has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from polygon.cost.reduction import TREE_HOPS, largest_share
from polygon.cost.transfers import LinkArrays
from polygon.domain.plan import SumTree


class Ways(NamedTuple):
    """Which parts of a gradient go from region to region over some trees, and by which links.

    Attributes
    ----------
    parts : ndarray, shape (regions, regions)
        What goes from one to another, of which as much goes back.
    up : ndarray, shape (regions, regions)
        Of it what is not yet the sum.
    dealt : ndarray, shape (regions, regions)
        Of it what the first of both deals out to its nodes.
    messages : ndarray of bool, shape (2, regions, regions)
        By level, the root's first: whether the first of both deals out some of what they exchange there.
    hops : ndarray of int, shape (ways, TREE_HOPS)
        Links of the ways from every region to every one, itself among them: source times regions plus target, with
        regions squared added where it leads down; twice that for none.
    source, target : ndarray of int, shape (ways,)
    """

    parts: np.ndarray
    up: np.ndarray
    dealt: np.ndarray
    messages: np.ndarray
    hops: np.ndarray
    source: np.ndarray
    target: np.ndarray

    @property
    def sent(self) -> np.ndarray:
        """How often each region sends a gradient, and hears one."""
        total: np.ndarray = self.parts.sum(axis=1)
        return total


@lru_cache(maxsize=4096)
def ways_over(trees: tuple[SumTree, ...], regions: tuple[int, ...]) -> Ways:
    """The ways over trees of so many regions (by number, ascending)."""
    k = len(regions)
    up, dealt = np.zeros((2, k, k))
    messages = np.zeros((2, k, k), dtype=bool)
    found: dict[tuple[int, ...], None] = {}
    for tree in trees:
        parents = tree.parents(regions)
        lines = [_line(parents, a) for a in range(k)]
        for a, parent in enumerate(parents):
            if parent >= 0:
                depth = len(lines[a]) - 1
                deals, other = (a, parent) if depth == 2 else (parent, a)
                up[a, parent] += tree.part
                dealt[deals, other] += tree.part
                messages[depth - 1, deals, other] = True
        for a in range(k):
            for b in range(k):
                if len(lines[a]) + len(lines[b]) > 2:  # not the root to itself
                    rise = [x * k + y for x, y in zip(lines[a], lines[a][1:], strict=False)]
                    fall = [y * k + x + k * k for x, y in zip(lines[b], lines[b][1:], strict=False)][::-1]
                    hops = [*rise, *fall]
                    found[(a, b, *hops, *[2 * k * k] * (TREE_HOPS - len(hops)))] = None
    table = np.array(list(found))
    return Ways(up + up.T, up, dealt, messages, table[:, 2:], table[:, 0], table[:, 1])


def _line(parents: Sequence[int], at: int) -> list[int]:
    """A region and those above it, up to the root."""
    line = [at]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


class TreeTimes(NamedTuple):
    """Seconds of a sum over trees.

    Attributes
    ----------
    busy_s : ndarray, shape (regions, regions)
        In which all that goes from one region to another has passed; inf over a link that is none.
    source, target : ndarray of int, shape (ways,)
        Of every way, over a tree or straight where regions have anything in common.
    latency_s, way_s, links_s : ndarray, shape (ways,)
        Latencies, seconds of all layers, and of one after another on every link.
    card_s : float
        In which a card passes what leaves its region.
    """

    busy_s: np.ndarray
    source: np.ndarray
    target: np.ndarray
    latency_s: np.ndarray
    way_s: np.ndarray
    links_s: np.ndarray
    card_s: float


class Standing(NamedTuple):
    """Regions that sum, and what joins them; shape (regions, regions), or (regions,).

    Attributes
    ----------
    latency_s, bytes_per_s : ndarray
        Of a link between two nodes.
    pair : ndarray
        Most that a pair of nodes has of what the first region deals out to its own.
    capacity, egress, cards : ndarray
        Bytes/s of what the stage may send over all links between two, of all that leaves a region, and of its cards.
    leaders, turns : ndarray of int
        Nodes of a region, and turns in which it deals out.
    """

    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    pair: np.ndarray
    capacity: np.ndarray
    egress: np.ndarray
    cards: np.ndarray
    leaders: np.ndarray
    turns: np.ndarray


def standing_of(
    pools: np.ndarray, leaders: np.ndarray, turns: np.ndarray, pair_share: np.ndarray, links: LinkArrays
) -> Standing:
    """What joins the regions of some pools, one of each; `pair_share` is that of `polygon.cost.reduction.levels_s`."""
    region = links.region[pools]
    at, pair = np.ix_(pools, pools), np.ix_(region, region)
    stages = np.maximum(1.0, pair_share[pair])
    return Standing(
        links.latency_s[at],
        links.bytes_per_s[at],
        np.array([[largest_share(n, m, t) for m in leaders] for n, t in zip(leaders, turns, strict=True)]),
        links.capacity_bytes_per_s[pair] / stages,
        links.egress_bytes_per_s[region] / np.where(np.eye(len(pools), dtype=bool), 1.0, stages).max(axis=1),
        links.card_bytes_per_s[pools] * leaders,
        leaders,
        turns,
    )


def tree_times(
    ways: Ways, at: Standing, wire_bytes: float, last: float, message_s: float, *, several: np.ndarray
) -> TreeTimes:
    """What the links of regions need for a sum over trees.

    Parameters
    ----------
    wire_bytes, last : float
        As in `polygon.cost.reduction.levels_s`.
    message_s : float
        Of what a leader sends to or receives from another in all sums.
    several : ndarray of bool, shape (regions,)
        Whether a region's cards are busy with sums inside it, too.
    """
    used = ways.parts > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        busy_s = wire_bytes * (ways.dealt * at.pair + (ways.dealt * at.pair).T) / at.bytes_per_s
        busy_s = np.maximum(busy_s, wire_bytes * ways.parts / at.capacity)
    cards_s = wire_bytes * ways.sent / at.cards
    sent_s = np.maximum(cards_s, message_s * messages_in_sum(ways, at.leaders, at.turns))
    leaves_s = np.maximum(sent_s, wire_bytes * ways.sent / at.egress)
    busy_s = np.where(used, np.maximum(busy_s, np.maximum(leaves_s[:, None], sent_s[None, :])), 0.0)
    latency_s = np.where(used, at.latency_s, 0.0)
    all_parts = np.where(used, ways.parts, 1.0)
    with np.errstate(invalid="ignore"):
        either_s = [np.where(some > 0, busy_s * some / all_parts, 0.0).ravel() for some in (ways.up, ways.up.T)]
    hop_s = np.concatenate([*either_s, [0.0]])[ways.hops]
    far_s = np.concatenate([latency_s.ravel(), latency_s.ravel(), [0.0]])[ways.hops].sum(axis=1)
    all_s, longest_s = hop_s.sum(axis=1), hop_s.max(axis=1)
    a, b = np.nonzero(used)
    return TreeTimes(
        busy_s,
        np.concatenate([a, ways.source]),
        np.concatenate([b, ways.target]),
        np.concatenate([latency_s[a, b], far_s]),
        np.concatenate([busy_s[a, b], longest_s + last * (all_s - longest_s)]),
        np.concatenate([busy_s[a, b], all_s]),
        float((several * cards_s).max()),
    )


def messages_in_sum(ways: Ways, leaders: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Messages that a node of each region sends and receives in one sum (`polygon.cost.reduction.messages_of_leader`);
    what two exchange at one level of several trees is in the same."""
    nodes, others = leaders[:, None].astype(float), leaders[None, :].astype(float)
    given = np.minimum(others, np.maximum(1.0, turns[None, :] * others / nodes))
    added = np.minimum(others, np.maximum(turns[:, None], others / nodes))
    deals = ways.messages.sum(axis=0)
    total: np.ndarray = 2 * (deals * added + deals.T * given).sum(axis=1)
    return total


def tree_ways_s(
    times: TreeTimes, regions: int, packing_s: float, near_s: np.ndarray, cards_s: np.ndarray, last: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """As `polygon.cost.reduction.ways_s`, over trees."""
    own_s = np.maximum(near_s, cards_s)
    all_s, end_s = np.full((2, regions, regions), -np.inf)
    np.fill_diagonal(all_s, own_s)
    np.fill_diagonal(end_s, last * own_s)
    a, b, latency_s = times.source, times.target, times.latency_s
    sent_s, first_s = own_s - 0.5 * last * near_s, 0.5 * last * near_s
    ahead_s = 0.5 * np.minimum(latency_s, near_s[a])
    whole_s = latency_s + np.maximum(sent_s[a] - ahead_s, first_s[a] + times.way_s) + packing_s + 0.5 * last * near_s[b]
    ends_s = packing_s + 0.5 * (near_s[a] + near_s[b])
    np.maximum.at(all_s, (b, a), whole_s)
    np.maximum.at(end_s, (b, a), latency_s + last * (ends_s + times.links_s))
    return all_s, end_s, float(times.busy_s.max())
