"""Links that the reductions of several stages share, and what that makes them wait.

Stages that have devices on the same nodes send their gradients over the same node pairs. However they take turns, a
link passes their bytes at its rate: of stages that begin to use it at b_1 <= b_2 <= ... and keep it busy for w_1, w_2
and so on, the last ends no earlier than max_j (b_j + w_j + w_{j+1} + ...). `stage_reduction` prices each stage
by itself, with its latencies; here is what it cannot know.

Considered are node pairs between regions, and a node's card with all that it sends, within its region and out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from polygon.cost.stage_reduction import ReductionCost, group_packing, places_of
from polygon.cost.transfers import LinkTable, Placement
from polygon.domain.plan import Plan


def busy_on_shared(
    plan: Plan, place: Placement, links: LinkTable, reductions: Sequence[ReductionCost], n_bytes: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """How long each stage's reduction keeps the links busy that it shares with another stage's.

    Parameters
    ----------
    reductions : sequence of ReductionCost
        Of every stage; with local steps as a mean over the steps.
    n_bytes : sequence of float
        Gradient bytes of a worker of each stage that are summed inside regions at the end of a step (`summed_part`).

    Returns
    -------
    tuple of ndarray, shape (links, stages) each
        Seconds on the cards of nodes, and on node pairs between regions; no rows without sharing. With local steps
        cards have what stays within regions, which is what a step waits for.
    """
    stages = len(plan.stages)
    several = place.several
    if not several.any():
        return np.zeros((0, stages)), np.zeros((0, stages))
    cards, pairs = _Rows(stages), _Rows(stages)
    most = len(several)
    for s, (nodes, region, pool) in enumerate(place.hosts):
        places = places_of(plan.packed_inside, region, np.ones_like(region), len(links.cluster.regions))
        # Plain gradients pass the cards inside a place, packed ones between the places of a region.
        members, sent = np.bincount(region)[region], np.full(len(region), n_bytes[s])
        apart = places.apart[region]
        if apart.any():
            members[apart], sent[apart] = places.total, reductions[s].wire_bytes
        rate, shared = links.bytes_per_s[pool, pool], several[nodes]
        busy = shared & (members > 1)
        cards.add(s, nodes[busy], 2 * (1 - 1 / members[busy]) * sent[busy] / rate[busy])
        alone = group_packing(plan, places.regions) == "powersgd"  # then one node of a place sends all
        leaders = {  # by their places among the nodes
            r: np.flatnonzero(region == r)[: 1 if alone and k == 1 else None]
            for r, k in zip(places.regions.tolist(), places.counts.tolist(), strict=True)
        }
        for a, b, sent_bytes in reductions[s].across_bytes:
            rate_ab = float(links.cluster.bytes_per_s[a, b])
            from_a, to_b = leaders[a], leaders[b]
            if plan.local_steps == 1 and not places.apart[a]:
                out = from_a[shared[from_a]]
                cards.add(s, nodes[out], sent_bytes / len(from_a) / links.card_bytes_per_s[pool[out]])
            if rate_ab > 0:
                i, k, part = node_pairs(len(from_a), len(to_b), every=bool(places.apart[a] or places.apart[b]))
                i, k = from_a[i], to_b[k]
                both = shared[i] & shared[k]
                pairs.add(s, (nodes[i] * most + nodes[k])[both], sent_bytes / rate_ab * part[both])
    return cards.shared(), pairs.shared()


@cache
def node_pairs(senders: int, receivers: int, *, every: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which nodes of a region send to which of another, and what part each pair has of what the regions exchange.

    Each node leads an equal part, in their order, and shares with another what both lead; nodes that are places by
    themselves send to `every` one.
    """
    if every:
        i, k = np.divmod(np.arange(senders * receivers), receivers)
        return i, k, np.full(len(i), 1 / len(i))
    ends = np.unique(np.concatenate([np.arange(1, senders + 1) * receivers, np.arange(1, receivers + 1) * senders]))
    i, k = -(-ends // receivers) - 1, -(-ends // senders) - 1
    return i, k, np.diff(ends, prepend=0) / (senders * receivers)


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
        self._stage: list[np.ndarray] = []
        self._seconds: list[np.ndarray] = []

    def add(self, stage: int, links: np.ndarray, seconds: np.ndarray) -> None:
        """A stage's seconds on some links."""
        self._links.append(links)
        self._stage.append(np.full(len(links), stage))
        self._seconds.append(seconds)

    def shared(self) -> np.ndarray:
        """Shape (links that several stages use, stages)."""
        if not self._links:
            return np.zeros((0, self._stages))
        links, row = np.unique(np.concatenate(self._links), return_inverse=True)
        table = np.zeros((len(links), self._stages))
        np.add.at(table, (row, np.concatenate(self._stage)), np.concatenate(self._seconds))
        found: np.ndarray = table[(table > 0).sum(axis=1) > 1]
        return found
