"""The flow of micro-batches between the regions of neighbouring stages: kernels of the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import inner, kernel
from polygon.planning.node_sharing import Hosts, common_nodes, find_crowds, near_part
from polygon.planning.problem_arrays import Bank
from polygon.planning.stage_lists import Stages


class Places(NamedTuple):
    """What every region lends to every stage, and room for the flow between two of them.

    Arrays of shape (rows, regions); `supply` and `demand` (regions,).
    """

    region: np.ndarray
    regions: np.ndarray
    """(regions,) those in which stages are, ascending; (1,) how many: of others no flow is looked at."""
    nodes: np.ndarray
    workers: np.ndarray
    pool: np.ndarray
    """One of the region's pools in the stage."""
    rates: np.ndarray
    """Micro-batches per second; 0 where a region has no workers in a stage."""
    slowest: np.ndarray
    """Seconds of a micro-batch on the slowest worker."""
    share: np.ndarray
    """Parts of the micro-batches; each row sums to one."""
    supply: np.ndarray
    demand: np.ndarray
    flow: np.ndarray
    """(rows, regions, regions) parts of the micro-batches that go from region to region, by stage that sends them."""
    message: np.ndarray
    """(rows, regions, regions) seconds that a micro-batch is under way there and back, where any goes."""
    trip: np.ndarray
    mean_trip: np.ndarray
    """Most and mean seconds from the end of a micro-batch's forward to the begin of its backward in a stage."""
    busy: np.ndarray
    """(regions, regions) messages in parts of the micro-batches, of all stages, activations and gradients."""
    near: np.ndarray
    """Part of what stays in its region between a stage and the next that stays on its node."""
    leaving: np.ndarray
    crowd: np.ndarray
    """Messages that leave a stage's nodes; and those of all stages there over its own."""


@gives_pointed
def places_for(rows: int, regions: int) -> Places:
    """Room for allocations of so many rows."""
    shape = (rows, regions)
    return Places(
        region=np.arange(regions),
        regions=np.array([regions]),
        nodes=np.zeros(shape, dtype=np.int64),
        workers=np.zeros(shape, dtype=np.int64),
        pool=np.zeros(shape, dtype=np.int64),
        rates=np.zeros(shape),
        slowest=np.zeros(shape),
        share=np.zeros(shape),
        supply=np.zeros(regions),
        demand=np.zeros(regions),
        flow=np.zeros((rows, regions, regions)),
        message=np.zeros((rows, regions, regions)),
        trip=np.zeros(shape),
        mean_trip=np.zeros(shape),
        busy=np.zeros((regions, regions)),
        near=np.zeros(shape),
        leaving=np.zeros(shape),
        crowd=np.ones(shape),
    )


@inner
def find_regions(bank: Bank, stages: Stages, n: int, places: Places) -> None:
    """Fill in the regions in which the first n stages are."""
    used = places.supply
    used[:] = 0.0
    for s in range(n):
        for i in range(stages.members[s]):
            used[bank.region[stages.classes[s, i]]] = 1.0
    places.regions[0] = 0
    for r in range(used.shape[0]):
        if used[r] > 0:
            places.region[places.regions[0]] = r
            places.regions[0] += 1


@inner
def find_places(bank: Bank, stages: Stages, n: int, places: Places) -> None:
    """Fill in what every region lends to the first n stages, all but nodes (`find_hosts`) and shares."""
    for s in range(n):
        for r in range(places.nodes.shape[1]):
            places.workers[s, r], places.pool[s, r], places.rates[s, r], places.slowest[s, r] = 0, 0, 0.0, 0.0
        for i in range(stages.members[s]):
            c, count = stages.classes[s, i], stages.counts[s, i]
            r = bank.region[c]
            places.workers[s, r] += count
            places.pool[s, r] = bank.pool[c]
            places.rates[s, r] += count / stages.seconds[s, i]
            places.slowest[s, r] = max(places.slowest[s, r], stages.seconds[s, i])


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
def transport(bank: Bank, regions: np.ndarray, supply: np.ndarray, demand: np.ndarray, flow: np.ndarray) -> bool:
    """Send micro-batches from the regions of one stage to those of the next; False where a link is missing.

    What can stay in its region stays; the rest goes over the quickest links first.

    Parameters
    ----------
    regions : ndarray of int64
        Those to look at.
    supply, demand : ndarray, shape (regions,)
        Parts of the micro-batches; each sums to one. Changed.
    flow : ndarray, shape (regions, regions)
        Out.
    """
    left = 0.0
    for r in regions:
        for b in regions:
            flow[r, b] = 0.0
        stay = min(supply[r], demand[r])
        flow[r, r] = stay
        supply[r] -= stay
        demand[r] -= stay
        left += supply[r]
    while left > 1e-9:
        best, source, target = np.inf, -1, -1
        for a in regions:
            if supply[a] <= 1e-12:
                continue
            for b in regions:
                if demand[b] <= 1e-12 or a == b:
                    continue
                pa, pb = bank.stands[a], bank.stands[b]
                rate = bank.links.bytes_per_s[pa, pb]
                if rate <= 0:
                    continue
                cost = bank.links.latency_s[pa, pb] + bank.activation_wire[a, b] / rate
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
def find_flows(bank: Bank, places: Places, hosts: Hosts, n: int, shared: bool) -> bool:
    """Fill in what n stages send one another, given their shares; False where a link is missing.

    Parameters
    ----------
    shared : bool
        Whether any node serves several of them.
    """
    regions = places.region[: places.regions[0]]
    for a in regions:
        for b in regions:
            places.busy[a, b] = 0.0
    for s in range(n - 1):
        for r in regions:
            places.supply[r], places.demand[r] = places.share[s, r], places.share[s + 1, r]
        if not transport(bank, regions, places.supply, places.demand, places.flow[s]):
            return False
        for a in regions:
            for b in regions:
                places.busy[a, b] += places.flow[s, a, b]
                places.busy[b, a] += places.flow[s, a, b]
    if shared:
        for s in range(n):
            for r in regions:
                places.leaving[s, r] = 0.0
        for s in range(n - 1):
            for a in regions:
                for b in regions:
                    part = places.flow[s, a, b]
                    if a == b and part > 0:
                        places.near[s, a] = near_part(hosts, s, s + 1, a, places.workers)
                        part *= 1 - places.near[s, a]
                    places.leaving[s, a] += part
                    places.leaving[s + 1, b] += part
        find_crowds(hosts, n, places.nodes, places.leaving, places.crowd)
    return True


@inner
def boundary_s(
    bank: Bank, places: Places, hosts: Hosts, n: int, s: int, shared: bool
) -> tuple[float, float, float, float]:
    """Seconds of the slowest message between stages s and s + 1, the time in which the fullest link carries all, the
    longest before the last message of any, and seconds of the mean message. Fills `message`.

    The mean of the slowest activation and the slowest gradient: workers take micro-batches in a fixed order, so all
    wait for the slowest way. The workers of a node share its links.

    Parameters
    ----------
    shared : bool
        Whether any node serves several of the n stages.
    """
    regions = places.region[: places.regions[0]]
    down, up, fullest, rest, mean = 0.0, 0.0, 0.0, 0.0, 0.0
    for a in regions:
        for b in regions:
            part = places.flow[s, a, b]
            if part <= 0:
                continue
            message, full, last = _way_s(bank, places, hosts, n, s, s + 1, a, b, part, shared)
            down, fullest, rest = max(down, message), max(fullest, full), max(rest, full - last)
            mean += 0.5 * part * message
            places.message[s, a, b] = message
            message, full, last = _way_s(bank, places, hosts, n, s + 1, s, b, a, part, shared)
            up, fullest, rest = max(up, message), max(fullest, full), max(rest, full - last)
            mean += 0.5 * part * message
            places.message[s, a, b] += message
    return 0.5 * (down + up), fullest, rest, mean


@inner
def find_trips(places: Places, n: int) -> None:
    """Fill in how long micro-batches are away from each of n stages, given what `boundary_s` says of all: on the way
    with the slowest workers and messages, and in the mean."""
    regions = places.region[: places.regions[0]]
    for s in range(n - 1, -1, -1):
        for a in regions:
            longest, total, sent = 0.0, 0.0, 0.0
            for b in regions[: len(regions) if s + 1 < n else 0]:
                part = places.flow[s, a, b]
                if part > 0:
                    longest = max(longest, places.message[s, a, b] + places.slowest[s + 1, b] + places.trip[s + 1, b])
                    mean = places.workers[s + 1, b] / places.rates[s + 1, b] + places.mean_trip[s + 1, b]
                    total, sent = total + part * (places.message[s, a, b] + mean), sent + part
            places.trip[s, a], places.mean_trip[s, a] = longest, total / sent if sent > 0 else 0.0


@inner
def cards_s(bank: Bank, places: Places, hosts: Hosts, n: int, shared: bool) -> float:
    """The time in which the busiest nodes' cards send all that they send: activations down and gradients up.

    The crowd of stages that share nodes is that of `find_crowds`.
    """
    regions, longest = places.region[: places.regions[0]], 0.0
    for s in range(n):
        for r in regions:
            n_bytes = 0.0
            for q in (s, s - 1):  # to the next stage, and back to the one before
                if q < 0 or q > n - 2:
                    continue
                for other in regions:
                    part = places.flow[q, r, other] if q == s else places.flow[q, other, r]
                    if shared and other == r:
                        part *= 1 - places.near[q, r]
                    n_bytes += part * bank.activation_wire[r, other]
            if n_bytes > 0:
                crowd = places.crowd[s, r] if shared else 1.0
                card = bank.links.card_bytes_per_s[places.pool[s, r]] * _even(places, hosts, s, r)
                longest = max(longest, bank.micro_batches * n_bytes * crowd / card)
    return longest


@inner
def _way_s(
    bank: Bank, places: Places, hosts: Hosts, n: int, s: int, q: int, a: int, b: int, part: float, shared: bool
) -> tuple[float, float, float]:
    """Seconds of a message from stage s in region a to stage q in b, the time in which their links carry all, and what
    of it one message takes.

    Messages that go while workers compute take turns on a link and hardly ever wait there: each has all of it. Where
    workers wait for their messages, all send at once.
    """
    pa, pb, card_crowd, pair_crowd = bank.stands[a], bank.stands[b], 1.0, 1.0
    if a == b:
        pa, pb = places.pool[s, a], places.pool[q, b]
    if shared:
        if a == b:
            part *= 1 - places.near[min(s, q), a]
            if part < 1e-9:
                seconds = bank.links.node_latency_s[pa] + bank.activation_wire[a, b] / bank.links.node_bytes_per_s[pa]
                return seconds, 0.0, 0.0
        card_crowd = places.crowd[s, a]
        if places.busy[a, b] > part * (1 + 1e-9):
            pair_crowd = _pair_crowd(places, hosts, n, s, q, a, b)
    latency, n_bytes = bank.links.latency_s[pa, pb], bank.activation_wire[a, b]
    rate, card = bank.links.bytes_per_s[pa, pb] / pair_crowd, bank.links.card_bytes_per_s[pa] / card_crowd
    nodes, workers = places.nodes[s, a], places.workers[s, a]
    together = min(rate * _even(places, hosts, q, b), card) * _even(places, hosts, s, a)
    alone = min(rate, card) * nodes / workers
    if a != b:
        together = min(together, bank.links.capacity_bytes_per_s[a, b])
        alone = min(alone, bank.links.capacity_bytes_per_s[a, b] / workers)
    if bank.overlap.p2p:
        alone = min(bank.links.bytes_per_s[pa, pb], bank.links.card_bytes_per_s[pa])
    seconds = latency + n_bytes / alone + bank.activation_codec_s[a, b]
    return seconds, bank.micro_batches * n_bytes * part / together, n_bytes / alone


@inner
def _even(places: Places, hosts: Hosts, s: int, r: int) -> float:
    """Nodes of a stage in a region, as many as there would be if all had as much to do as the busiest."""
    return float(places.rates[s, r] / hosts.busiest[s, r])


@inner
def _pair_crowd(places: Places, hosts: Hosts, n: int, s: int, q: int, a: int, b: int) -> float:
    """All messages on the node pairs that stage s in region a uses to reach stage q in b, over its own, the mean."""
    own, total = 0.0, 0.0
    for t in range(n):
        if places.nodes[t, a] == 0:
            continue
        here = 1.0 if t == s else common_nodes(hosts, s, t, a) / places.nodes[s, a]
        if here == 0:
            continue
        for u in (t + 1, t - 1):
            if u < 0 or u == n or places.nodes[u, b] == 0:
                continue
            part = places.flow[t, a, b] if u > t else places.flow[u, b, a]
            if part > 0:
                there = 1.0 if u == q else common_nodes(hosts, q, u, b) / places.nodes[q, b]
                use = part * here * there / (places.nodes[t, a] * places.nodes[u, b])
                total += use
                if t == s:
                    own += use
    return total / own
