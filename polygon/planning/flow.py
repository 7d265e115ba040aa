"""The flow of micro-batches between the regions of neighbouring stages: kernels of the search."""

from __future__ import annotations

import numpy as np
from numba import njit

from polygon.kernels import inner
from polygon.planning.bank import Bank
from polygon.planning.stage_lists import Stages


@inner
def region_means(
    bank: Bank,
    classes: np.ndarray,
    counts: np.ndarray,
    members: int,
    nodes: np.ndarray,
    workers: np.ndarray,
    pool: np.ndarray,
) -> None:
    """Nodes and workers that each region lends to a stage, and one of its pools; (regions,) each, in as 0, 0, -1."""
    for i in range(members):
        c = classes[i]
        per_node = max(1, bank.devices_per_node[c] // bank.tp[c])
        nodes[bank.region[c]] += (counts[i] + per_node - 1) // per_node
        workers[bank.region[c]] += counts[i]
        pool[bank.region[c]] = bank.pool[c]


@njit(cache=True)
def lock_shares(rates: np.ndarray, locked: bool) -> np.ndarray:
    """Parts of the micro-batches by region: by speed, or (locked) the same along stages with the same regions.

    Parameters
    ----------
    rates : ndarray, shape (stages, regions)
        Micro-batches per second of a region's workers in a stage; 0 where it has none.

    Returns
    -------
    ndarray, shape (stages, regions)
        Locked, in a run of stages that all have the same regions, every region takes micro-batches in proportion to its
        slowest stage of the run; then no micro-batch of the run has to leave its region.
    """
    stages, regions = rates.shape
    share = np.zeros((stages, regions))
    first = 0
    while first < stages:
        last = first + 1
        while locked and last < stages:
            same = True
            for r in range(regions):
                same = same and (rates[first, r] > 0) == (rates[last, r] > 0)
            if not same:
                break
            last += 1
        total = 0.0
        for r in range(regions):
            least = rates[first, r]
            for s in range(first, last):
                least = min(least, rates[s, r])
            share[first, r] = least
            total += least
        for r in range(regions):
            share[first, r] /= total
            for s in range(first + 1, last):
                share[s, r] = share[first, r]
        first = last
    return share


@inner
def transport(bank: Bank, supply: np.ndarray, demand: np.ndarray, stands: np.ndarray, flow: np.ndarray) -> bool:
    """Send micro-batches from the regions of one stage to those of the next; False where a link is missing.

    What can stay in its region stays; the rest goes over the quickest links first.

    Parameters
    ----------
    supply, demand : ndarray, shape (regions,)
        Parts of the micro-batches; each sums to one. Changed.
    stands : ndarray of int, shape (regions,)
        Any pool of each region.
    flow : ndarray, shape (regions, regions)
        Out.
    """
    n = supply.shape[0]
    left = 0.0
    for r in range(n):
        for b in range(n):
            flow[r, b] = 0.0
        stay = min(supply[r], demand[r])
        flow[r, r] = stay
        supply[r] -= stay
        demand[r] -= stay
        left += supply[r]
    while left > 1e-9:
        best, source, target = np.inf, -1, -1
        for a in range(n):
            if supply[a] <= 1e-12:
                continue
            for b in range(n):
                if demand[b] <= 1e-12 or a == b:
                    continue
                rate = bank.bytes_per_s[stands[a], stands[b]]
                if rate <= 0:
                    continue
                cost = bank.latency_s[stands[a], stands[b]] + bank.activation_wire[a, b] / rate
                if cost < best:
                    best, source, target = cost, a, b
        if source < 0:
            return False
        moved = min(supply[source], demand[target])
        flow[source, target] += moved
        supply[source] -= moved
        demand[target] -= moved
        left -= moved
    return True


@inner
def boundary_s(bank: Bank, stages: Stages, s: int, share: np.ndarray, stands: np.ndarray) -> tuple[float, float]:
    """Seconds of the slowest message from stage s to s + 1, and the time in which the fullest link carries them all.

    Workers take micro-batches in a fixed order, so all wait for the slowest way. The workers of a node share its links.
    Both are inf where a link is missing. `share` has shape (stages, regions).
    """
    regions = bank.activation_wire.shape[0]
    nodes, next_nodes = np.zeros(regions, dtype=np.int64), np.zeros(regions, dtype=np.int64)
    workers, next_workers = np.zeros(regions, dtype=np.int64), np.zeros(regions, dtype=np.int64)
    pool, next_pool = np.zeros(regions, dtype=np.int64), np.zeros(regions, dtype=np.int64)
    t = s + 1
    region_means(bank, stages.classes[s], stages.counts[s], stages.members[s], nodes, workers, pool)
    region_means(bank, stages.classes[t], stages.counts[t], stages.members[t], next_nodes, next_workers, next_pool)
    flow, supply, demand = np.zeros((regions, regions)), np.zeros(regions), np.zeros(regions)
    for r in range(regions):
        supply[r], demand[r] = share[s, r], share[t, r]
    if not transport(bank, supply, demand, stands, flow):
        return np.inf, np.inf
    message, fullest = 0.0, 0.0
    for a in range(regions):
        for b in range(regions):
            if flow[a, b] <= 0:
                continue
            pa, pb = (pool[a], next_pool[b]) if a == b else (stands[a], stands[b])
            rate, latency = bank.bytes_per_s[pa, pb], bank.latency_s[pa, pb]
            card = bank.card_bytes_per_s[pa]
            together = min(rate * nodes[a] * next_nodes[b], card * nodes[a])
            alone = min(rate, card) * nodes[a] / workers[a]
            if a != b:
                together = min(together, bank.capacity_bytes_per_s[a, b])
                alone = min(alone, bank.capacity_bytes_per_s[a, b] / workers[a])
            n_bytes = bank.activation_wire[a, b]
            fullest = max(fullest, flow[a, b] * bank.micro_batches * n_bytes / together)
            codec = 0.0 if a == b else bank.activation_codec_s[a, b]
            message = max(message, latency + n_bytes / alone + codec)
    return message, fullest
