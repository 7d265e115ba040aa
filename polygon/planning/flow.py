"""The flow of micro-batches between the regions of neighbouring stages: kernels of the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.kernel_options import inner, kernel
from polygon.planning.bank import Bank
from polygon.planning.stage_lists import Stages


class Places(NamedTuple):
    """What every region lends to every stage, and room for the flow between two of them.

    Arrays of shape (rows, regions); `supply` and `demand` (regions,), `flow` (regions, regions).
    """

    nodes: np.ndarray
    workers: np.ndarray
    pool: np.ndarray
    """One of the region's pools in the stage."""
    rates: np.ndarray
    """Micro-batches per second; 0 where a region has no workers in a stage."""
    share: np.ndarray
    """Parts of the micro-batches; each row sums to one."""
    supply: np.ndarray
    demand: np.ndarray
    flow: np.ndarray


def places_for(rows: int, regions: int) -> Places:
    """Room for allocations of so many rows."""
    shape = (rows, regions)
    return Places(
        nodes=np.zeros(shape, dtype=np.int64),
        workers=np.zeros(shape, dtype=np.int64),
        pool=np.zeros(shape, dtype=np.int64),
        rates=np.zeros(shape),
        share=np.zeros(shape),
        supply=np.zeros(regions),
        demand=np.zeros(regions),
        flow=np.zeros((regions, regions)),
    )


@inner
def find_places(bank: Bank, stages: Stages, n: int, places: Places) -> None:
    """Fill in what every region lends to the first n stages, all but nodes (`find_hosts`) and shares."""
    for s in range(n):
        for r in range(places.nodes.shape[1]):
            places.workers[s, r], places.pool[s, r], places.rates[s, r] = 0, 0, 0.0
        for i in range(stages.members[s]):
            c, count = stages.classes[s, i], stages.counts[s, i]
            r = bank.region[c]
            places.workers[s, r] += count
            places.pool[s, r] = bank.pool[c]
            places.rates[s, r] += count / stages.seconds[s, i]


@kernel
def lock_shares(rates: np.ndarray, stages: int, locked: bool, share: np.ndarray) -> None:
    """Parts of the micro-batches by region: by speed, or (locked) the same along stages with the same regions.

    Parameters
    ----------
    rates : ndarray, shape (at least stages, regions)
        Micro-batches per second of a region's workers in a stage; 0 where it has none.
    share : ndarray, shape as `rates`
        Out. Locked, in a run of stages that all have the same regions, every region takes micro-batches in proportion
        to its slowest stage of the run; then no micro-batch of the run has to leave its region.
    """
    regions = rates.shape[1]
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


@inner
def transport(bank: Bank, supply: np.ndarray, demand: np.ndarray, flow: np.ndarray) -> bool:
    """Send micro-batches from the regions of one stage to those of the next; False where a link is missing.

    What can stay in its region stays; the rest goes over the quickest links first.

    Parameters
    ----------
    supply, demand : ndarray, shape (regions,)
        Parts of the micro-batches; each sums to one. Changed.
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
                pa, pb = bank.stands[a], bank.stands[b]
                rate = bank.bytes_per_s[pa, pb]
                if rate <= 0:
                    continue
                cost = bank.latency_s[pa, pb] + bank.activation_wire[a, b] / rate
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
def boundary_s(bank: Bank, places: Places, s: int) -> tuple[float, float]:
    """Seconds of the slowest message from stage s to s + 1, and the time in which the fullest link carries them all.

    Workers take micro-batches in a fixed order, so all wait for the slowest way. The workers of a node share its links.
    Both are inf where a link is missing.
    """
    regions = bank.activation_wire.shape[0]
    flow = places.flow
    for r in range(regions):
        places.supply[r], places.demand[r] = places.share[s, r], places.share[s + 1, r]
    if not transport(bank, places.supply, places.demand, flow):
        return np.inf, np.inf
    message, fullest = 0.0, 0.0
    for a in range(regions):
        for b in range(regions):
            if flow[a, b] <= 0:
                continue
            pa, pb = bank.stands[a], bank.stands[b]
            if a == b:
                pa, pb = places.pool[s, a], places.pool[s + 1, b]
            rate, latency = bank.bytes_per_s[pa, pb], bank.latency_s[pa, pb]
            card = bank.card_bytes_per_s[pa]
            nodes, workers = places.nodes[s, a], places.workers[s, a]
            together = min(rate * nodes * places.nodes[s + 1, b], card * nodes)
            alone = min(rate, card) * nodes / workers
            if a != b:
                together = min(together, bank.capacity_bytes_per_s[a, b])
                alone = min(alone, bank.capacity_bytes_per_s[a, b] / workers)
            n_bytes = bank.activation_wire[a, b]
            fullest = max(fullest, flow[a, b] * bank.micro_batches * n_bytes / together)
            codec = 0.0 if a == b else bank.activation_codec_s[a, b]
            message = max(message, latency + n_bytes / alone + codec)
    return message, fullest
