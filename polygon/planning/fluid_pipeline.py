"""When the stages of an allocation end their micro-batches, taken as a flow.

A part of the relaxed step of `polygon.planning.fluid`, which says what a makespan is; what follows, the sums of
gradients, is in `polygon.planning.fluid_sums`.
"""

from __future__ import annotations

import numpy as np

from polygon.jit.compilation import inner
from polygon.planning.flow import Places, boundary_s, cards_s, find_flows, find_trips, lock_shares
from polygon.planning.fluid_work import FluidWork, PipelineTimes
from polygon.planning.layer_split import held_most, kinds_makespan_s, whole_makespan_s
from polygon.planning.problem_arrays import Bank
from polygon.planning.stage_lists import Stages, kind_at

FEW_EACH = 10.0
"""Micro-batches of its slowest worker up to which a region's share is taken in whole ones."""
LONGER = 2.0
"""Times the mean of its trips that a worker waits for one at most: all wait for the slowest, if that is no rare one."""
ROUND = 8.0
"""Power of which a mean is taken of what two limits ask for that are reached at the same time."""


@inner
def pipeline_s(
    bank: Bank, work: FluidWork, n: int, bounds: np.ndarray, options: np.ndarray, locked: bool, shared: bool
) -> float:
    """When stage 0 of n ends its last backward; inf where a link is missing.

    Fills `passing`, `quickest`, `waits`, `message`, `before`, `away_s` and `limits_s`.

    Parameters
    ----------
    locked : bool
        See `lock_shares`.
    shared : bool
        Whether any node serves several stages.
    """
    stages, places, pipe = work.stages, work.places, work.pipeline
    away_s, limits_s = work.away_s[int(locked)], work.limits_s[int(locked)]
    lock_shares(places.rates, n, locked, places.share)
    if not find_flows(bank, places, work.hosts, n, shared):
        return np.inf
    busy_s, links_s, longest_s, fullest_s, before_s, waited, fill_s = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for s in range(n):
        slowest, quickest, width, rate = 0.0, np.inf, 0.0, 0.0
        makespan = kinds_makespan_s(bank, stages, s)
        for i in range(stages.kind_members[s]):
            if stages.kind_seconds[s, i] <= makespan * (1 + 1e-9):  # others get no micro-batch
                slowest = max(slowest, stages.kind_seconds[s, i])
                quickest = min(quickest, stages.kind_seconds[s, i])
                width += stages.kind_counts[s, i]
                rate += stages.kind_counts[s, i] / stages.kind_seconds[s, i]
        if locked:
            makespan = _locked_makespan_s(bank, stages, places, s, makespan)
        message, sent, fullest, rest = 0.0, 0.0, 0.0, 0.0
        if s + 1 < n:
            message, fullest, rest, sent = boundary_s(bank, places, work.hosts, n, s, shared)
        pipe.waits[s] = 0.0
        if not bank.overlap.p2p:  # workers wait for what they send and receive
            longest = message + waited if bank.overlap.apart else max(message, waited)
            pipe.waits[s] = 2 * longest
            makespan, slowest = makespan * (1 + 2 * longest / slowest), slowest + 2 * longest
            waited, message, sent = message, 0.0, 0.0
            for a in places.region[: places.regions[0]]:
                places.slowest[s, a] += 2 * longest
                for b in places.region[: places.regions[0]]:
                    places.message[s, a, b] = 0.0
        pipe.passing[s], pipe.message[s], away_s[s], pipe.before[s] = slowest, message, 2 * sent, before_s
        pipe.quickest[s] = quickest
        longest_s, fullest_s = max(longest_s, makespan), max(fullest_s, fullest)
        pipe.fill[s], pipe.span[s], pipe.rest[s] = fill_s, makespan, rest
        busy_s = max(busy_s, before_s + makespan)
        passed = min(slowest, width / rate + pipe.waits[s])
        before_s += passed + 2 * message
        fill_s += passed / 3 + message
    for s in range(n - 1):  # who passes a link last still goes all the rest of the way
        links_s = max(links_s, before_s + pipe.rest[s])
    if bank.overlap.p2p:
        cards = cards_s(bank, places, work.hosts, n, shared)
        fullest_s, links_s = max(fullest_s, cards), max(links_s, cards + before_s / 2)
    find_trips(places, n)
    away, held_s, held_end_s = 0.0, 0.0, 0.0
    for s in range(n - 1, -1, -1):
        away += away_s[s]
        away_s[s] = away
        if n > 1:
            held = _held_s(bank, work, s, bounds[s], bounds[s + 1], options)
            held_s = max(held_s, held)
            busy_s = max(busy_s, pipe.before[s] + pipe.waited[s])
            held_end_s = max(held_end_s, held + pipe.before[s] if held > 0 else 0.0)
    limits_s[0], limits_s[1] = max(longest_s, fullest_s), held_s
    longest = max(busy_s, links_s)
    return float(longest * (1 + (held_end_s / longest) ** ROUND) ** (1 / ROUND))


@inner
def _locked_makespan_s(bank: Bank, stages: Stages, places: Places, s: int, longest: float) -> float:
    """Seconds in which every region ends its share of the micro-batches in stage s, `longest` at least.

    In whole micro-batches, where these are few (`FEW_EACH`).
    """
    first = 0
    while first < stages.members[s]:
        r, last = bank.region[stages.classes[s, first]], first + 1
        while last < stages.members[s] and bank.region[stages.classes[s, last]] == r:
            last += 1
        part = int(bank.micro_batches * places.share[s, r] + 0.5)
        seconds = part / places.rates[s, r]
        longest = max(longest, seconds)
        if part > 0 and seconds + places.slowest[s, r] > longest and seconds < FEW_EACH * places.slowest[s, r]:
            counts, each_s = stages.counts[s, first:last], stages.seconds[s, first:last]
            longest = max(longest, whole_makespan_s(counts, each_s, last - first, part))
        first = last
    return longest


@inner
def _held_s(bank: Bank, work: FluidWork, s: int, first: int, last: int, options: np.ndarray) -> float:
    """Seconds that stage s takes because memory lets few micro-batches be away from it; 0: it holds all.

    By Little's law: a worker that holds h of its m micro-batches ends one every trip / h. A trip is as long as a
    micro-batch is computed there and away (`find_trips`): as the order of micro-batches is fixed, that of the slowest.
    """
    stages, places, pipe, most_s = work.stages, work.places, work.pipeline, 0.0
    pipe.flight[s], pipe.waited[s] = np.inf, 0.0
    for i in range(stages.members[s]):
        c = stages.classes[s, i]
        r, seconds = bank.region[c], stages.seconds[s, i]
        share = bank.micro_batches * places.share[s, r] / (places.rates[s, r] * seconds)
        k = kind_at(bank, stages, s, c)
        held = max(1.0, held_most(bank, stages, s, k, stages.kind_shards[s, k], first, last, options))
        pipe.flight[s] = min(pipe.flight[s], min(held, share) * (seconds + pipe.waits[s]) * 2 / 3)
        if held < share:
            away_s = min(places.trip[s, r], LONGER * places.mean_trip[s, r])
            busy_s = seconds + pipe.waits[s]
            most_s = max(most_s, share / held * (busy_s + away_s))
            idle_s = max(0.0, min(away_s, places.mean_trip[s, r]) - held * busy_s / 3)
            pipe.waited[s] = max(pipe.waited[s], share * busy_s + idle_s)
    return most_s


@inner
def find_ends(pipe: PipelineTimes, n: int, end: float) -> None:
    """Fill `ends`: when each of n stages ends its last backward, the first at `end`.

    At the latest a backward and a message before the stage in front of it. At the soonest when its own work and links,
    and those behind it, let it; and when the last micro-batch is back, whose forward a stage begins once memory holds
    all that are in flight from then on.
    """
    soonest, trip = 0.0, 0.0
    for s in range(n - 1, -1, -1):
        forward, own = pipe.passing[s] / 3, pipe.fill[s] + pipe.span[s]
        trip += 2 * forward
        if s + 1 < n:
            trip += 2 * pipe.message[s]
            own = max(own, pipe.fill[s + 1] + pipe.rest[s] + 2 * forward)
            soonest += pipe.message[s] + 2 * forward
        soonest = max(own, soonest)
        pipe.ends[s], pipe.trips[s] = soonest, trip
        trip += forward
    sent, latest = 0.0, end
    for s in range(n):
        forward = pipe.passing[s] / 3
        sent = max(sent, pipe.fill[s] + pipe.span[s] / 3)
        ends = end if s == 0 else min(latest, max(pipe.ends[s], sent + pipe.trips[s]))
        sent = max(sent, ends - pipe.flight[s])
        pipe.ends[s] = min(latest, max(ends, sent + pipe.trips[s]))
        latest = pipe.ends[s] - 2 * forward - pipe.message[s]
        if s + 1 < n:
            sent = max(sent + pipe.message[s], pipe.fill[s + 1] + pipe.rest[s]) + pipe.passing[s + 1] / 3
