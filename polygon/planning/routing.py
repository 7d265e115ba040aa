"""Shares and routes: which worker of each stage computes each micro-batch.

Shares are the whole numbers that end a stage soonest. Routes keep a micro-batch in its region where they can, send the
rest over the quickest links, and spread every worker's micro-batches evenly over the step, so that no worker waits for
a burst. What goes from region to region is spread over all pairs of nodes, as each has a connection of its own.
"""

from __future__ import annotations

import heapq

import numpy as np

from polygon.jit.compilation import kernel


def apportion(seconds: np.ndarray, micro_batches: int) -> np.ndarray:
    """Whole shares whose slowest worker ends soonest.

    Parameters
    ----------
    seconds : ndarray, shape (workers,)
        Per micro-batch.

    Returns
    -------
    ndarray of int64, shape (workers,)
        Shares that sum to `micro_batches` and minimise max(share * seconds): start from what every worker can do in
        the fluid time, then give one at a time to the worker that would end soonest (optimal, Fox 1966).
    """
    fluid_s = micro_batches / (1.0 / seconds).sum()
    shares: np.ndarray = np.floor(fluid_s / seconds + 1e-9).astype(np.int64)
    heap = [((share + 1) * t, w) for w, (share, t) in enumerate(zip(shares.tolist(), seconds.tolist(), strict=True))]
    heapq.heapify(heap)
    for _ in range(micro_batches - int(shares.sum())):
        _, w = heap[0]
        shares[w] += 1
        heapq.heapreplace(heap, ((int(shares[w]) + 1) * float(seconds[w]), w))
    return shares


def spread(shares: np.ndarray) -> np.ndarray:
    """Deal out places 0 .. sum - 1 so that every owner's places are as even as can be.

    Returns
    -------
    ndarray of int64, shape (sum of shares,)
        The owner of each place: owner w's k-th place is wanted at (k + 1/2) / share of the way.
    """
    return spread_in_turns(shares)[0]


def spread_in_turns(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The owners of `spread`, and the turn of each place: owners of one turn want their places equally early."""
    owners = np.repeat(np.arange(len(shares)), shares)
    first = np.cumsum(shares) - shares
    wanted = (np.arange(len(owners)) - first[owners] + 0.5) / shares[owners]
    order = np.lexsort((owners, wanted))
    return owners[order], np.cumsum(np.diff(wanted[order], prepend=0.0) > 0)


@kernel
def pair_evenly(owners: np.ndarray, turn: np.ndarray, source: np.ndarray, node: np.ndarray, used: np.ndarray) -> None:
    """Exchange owners within their turns so that no pair of nodes passes much more than others.

    Parameters
    ----------
    owners : ndarray of int64, shape (places,)
        Worker of each place, in and out.
    turn, source : ndarray of int64, shape (places,)
        As of `spread_in_turns`, and the node that sends, or -1 where it does not matter.
    node : ndarray of int64, shape (workers,)
    used : ndarray, shape (nodes, nodes)
        Zeros.
    """
    for i in range(len(owners)):
        if source[i] < 0:
            continue
        best, j = i, i + 1
        while j < len(owners) and turn[j] == turn[i]:
            if used[source[i], node[owners[j]]] < used[source[i], node[owners[best]]]:
                best = j
            j += 1
        owners[i], owners[best] = owners[best], owners[i]
        used[source[i], node[owners[i]]] += 1


def deal_regions(before: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """Region of every micro-batch in a stage, given its region in the stage before and the flow between them.

    Parameters
    ----------
    before : ndarray of int64, shape (micro_batches,)
    flow : ndarray of int64, shape (regions, regions)
        How many micro-batches go from region to region.

    Returns
    -------
    ndarray of int64, shape (micro_batches,)
        Every source region deals its micro-batches to targets evenly, and targets as a whole are served evenly: the
        target whose two arrears together are greatest is next.
    """
    n = len(flow)
    after = np.empty(len(before), dtype=np.int64)
    deal(before, flow, flow.sum(axis=1), np.zeros((n, n)), np.zeros((3, n)), after)
    return after


@kernel
def deal(
    before: np.ndarray, flow: np.ndarray, total: np.ndarray, given: np.ndarray, room: np.ndarray, after: np.ndarray
) -> None:
    """The dealing of `deal_regions`: fills `after`; `total`: row sums of flow; zeros in `given` and `room`, (3, n)."""
    n = flow.shape[0]
    seen, wanted, served = room[0], room[1], room[2]
    for a in range(n):
        for b in range(n):
            wanted[b] += flow[a, b] / before.shape[0]
    for m in range(before.shape[0]):
        a = before[m]
        seen[a] += 1
        best, lag = -1, -np.inf
        for b in range(n):
            if given[a, b] < flow[a, b]:
                behind = seen[a] * flow[a, b] / total[a] - given[a, b] + (m + 1) * wanted[b] - served[b]
                if behind > lag + 1e-12:
                    best, lag = b, behind
        after[m] = best
        given[a, best] += 1
        served[best] += 1


def region_flow(supply: np.ndarray, demand: np.ndarray, seconds: np.ndarray) -> np.ndarray | None:
    """How many micro-batches go from region to region between two stages.

    What can stay stays; the rest takes the quickest links first.

    Parameters
    ----------
    supply, demand : ndarray of int64, shape (regions,)
        Micro-batches in each region, with equal sums.
    seconds : ndarray, shape (regions, regions)
        Of one message; inf where there is no link.

    Returns
    -------
    ndarray of int64, shape (regions, regions), or None where a needed link is missing
    """
    supply, demand = supply.copy(), demand.copy()
    stay = np.minimum(supply, demand)
    flow = np.diag(stay)
    supply -= stay
    demand -= stay
    sources, targets = np.flatnonzero(supply), np.flatnonzero(demand)
    pairs = sorted((float(seconds[a, b]), int(a), int(b)) for a in sources for b in targets)
    for cost, a, b in pairs:
        moved = min(int(supply[a]), int(demand[b]))
        if moved and np.isfinite(cost):
            flow[a, b] += moved
            supply[a] -= moved
            demand[b] -= moved
    return flow if supply.sum() == 0 else None


def whole_parts(share: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to `share` that sum to `total` (largest remainders first)."""
    wanted = share / share.sum() * total
    parts: np.ndarray = np.floor(wanted + 1e-9).astype(np.int64)
    for i in np.argsort(parts - wanted, kind="stable")[: total - int(parts.sum())]:
        parts[i] += 1
    return parts


def build_routes(
    worker_seconds: list[np.ndarray],
    worker_regions: list[np.ndarray],
    message_s: np.ndarray,
    micro_batches: int,
    region_share: np.ndarray | None = None,
    worker_nodes: list[np.ndarray] | None = None,
) -> np.ndarray | None:
    """Routes of all micro-batches.

    Parameters
    ----------
    worker_seconds, worker_regions : list of ndarray, shape (width,)
        For every stage, seconds per micro-batch and region of each worker.
    message_s : ndarray, shape (regions, regions)
        Seconds of one message between regions; inf where there is no link.
    region_share : ndarray, shape (stages, regions), optional
        Part of the micro-batches that each region must take; by default what ends every stage soonest.
    worker_nodes : list of ndarray of int64, shape (width,), optional
        For every stage the node of each worker, by default one for each region.

    Returns
    -------
    ndarray of int64, shape (micro_batches, stages), or None where a needed link is missing
    """
    regions = len(message_s)
    nodes = worker_regions if worker_nodes is None else worker_nodes
    routes = np.empty((micro_batches, len(worker_seconds)), dtype=np.int64)
    before: np.ndarray | None = None
    for s, (seconds, places) in enumerate(zip(worker_seconds, worker_regions, strict=True)):
        if region_share is None:
            shares = apportion(seconds, micro_batches)
        else:
            shares = np.zeros(len(seconds), dtype=np.int64)
            for r, part in enumerate(whole_parts(region_share[s], micro_batches)):
                if part:
                    shares[places == r] = apportion(seconds[places == r], int(part))
        in_region = np.bincount(places, weights=shares, minlength=regions).astype(np.int64)
        if before is None:
            here = spread(in_region)
        else:
            supply = np.bincount(before, minlength=regions).astype(np.int64)
            flow = region_flow(supply, in_region, message_s)
            if flow is None:
                return None
            here = deal_regions(before, flow)
        for r in np.flatnonzero(in_region).tolist():
            workers = np.flatnonzero(places == r)
            mine = here == r
            owners, turn = spread_in_turns(shares[workers])
            targets, target = np.unique(nodes[s][workers], return_inverse=True)
            if before is not None and len(targets) > 1:
                sources, source = np.unique(nodes[s - 1], return_inverse=True)
                source = np.where(before[mine] == r, -1, source[routes[mine, s - 1]])
                pair_evenly(owners, turn, source, target, np.zeros((len(sources), len(targets))))
            routes[mine, s] = workers[owners]
        before = here
    return routes
