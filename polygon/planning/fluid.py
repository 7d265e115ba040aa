"""The step time of an allocation without dealing out routes: the objective of the search.

Micro-batches are taken as a flow. For stages with workers of seconds t[c] per micro-batch (forward and backward), an
allocation's step takes about

    T = max_b (makespan_b - t_b) + sum_s t_s + 2 sum_s message_s,   then reduction and update,

where t_s and message_s are those of the slowest worker and the slowest way (all wait for them, because the order of
micro-batches is fixed), and makespan_b is the longest of: the least time in which stage b's workers finish all
micro-batches in whole shares; the time in which a link carries all of its messages; and what Little's law asks where
memory lets only a few micro-batches be in flight behind a stage.

The layer split is exact (see `split_layers`): the least makespan over all ways to cut the layers, each stage with the
fastest recomputation and ZeRO option that fits its memory. The exact simulation of the decoded plan
(`polygon.cost.schedule`) decides between the best candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from polygon.cost.reduction import levels_s
from polygon.planning.bank import Bank

inner = njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")  # type: ignore[call-overload]
"""For functions of a bank that only kernels call; called from Python they crash. What Python would need to call them,
the checks of divisions, and whole-array expressions (each brings its own functions along) made up more than half of the
time that compiling took."""

FITS, NO_MEMORY, NO_LINK, NO_STAGE, TOO_FEW_MICRO_BATCHES = 0, 1, 2, 3, 4
REASONS = {
    NO_MEMORY: "no split of the layers fits the memory of its stages",
    NO_LINK: "two neighbouring stages, or two members of one stage, have no link",
    NO_STAGE: "there is no stage, or there are more stages than layers",
    TOO_FEW_MICRO_BATCHES: "a stage has more workers than there are micro-batches",
}


@njit(cache=True, error_model="numpy")
def whole_makespan_s(counts: np.ndarray, seconds: np.ndarray, members: int, micro_batches: int) -> float:
    """Least time in which `counts[c]` workers of `seconds[c]` each finish `micro_batches` in whole shares.

    The least T with sum_c counts[c] floor(T / seconds[c]) >= micro_batches: bisection between the fluid time and one
    micro-batch more per worker.
    """
    rate = 0.0
    slowest = 0.0
    for c in range(members):
        rate += counts[c] / seconds[c]
        slowest = max(slowest, seconds[c])
    low = micro_batches / rate
    if members == 1:
        return seconds[0] * np.ceil(micro_batches / counts[0] - 1e-9)
    high = low + slowest
    for _ in range(18):
        middle = 0.5 * (low + high)
        done = 0.0
        for c in range(members):
            done += counts[c] * np.floor(middle / seconds[c] + 1e-9)
        if done >= micro_batches:
            high = middle
        else:
            low = middle
    return high


@inner
def _shards_traffic_s(bank: Bank, c: int, n_bytes: float, shards: int) -> float:
    """Seconds to gather (or scatter) `n_bytes` of weights once within a shard group of class c."""
    if shards <= 1:
        return 0.0
    p = bank.pool[c]
    if shards * bank.tp[c] <= bank.devices_per_node[c]:
        return (shards - 1) * (bank.node_latency_s[p] + n_bytes / shards / bank.node_bytes_per_s[p])
    return (shards - 1) * (bank.latency_s[p, p] + n_bytes / shards / bank.bytes_per_s[p, p])


@inner
def stage_option(
    bank: Bank,
    classes: np.ndarray,
    shard_limit: np.ndarray,
    members: int,
    held: np.ndarray,
    first: int,
    last: int,
    seconds: np.ndarray,
) -> int:
    """First option under which layers [first, last) fit every class of a stage; -1 if none does.

    `held[i]` is how many micro-batches a worker of the i-th class has in flight, `shard_limit[i]` over how many of them
    ZeRO can shard; `seconds` receives their seconds per micro-batch, shape (members,).
    """
    layers = bank.parameters.shape[1] - 1
    for option in range(bank.option_zero.shape[0]):
        zero, recompute = bank.option_zero[option], bank.option_recompute[option]
        fits = True
        for i in range(members):
            c = classes[i]
            shards = min(shard_limit[i], bank.state_bytes.shape[1] - 1) if zero else 1
            here = bank.parameters[c, last] - bank.parameters[c, first]
            if last == layers and first > 0:
                here += bank.tied[c]
            transient = max(bank.transient_bytes[c, recompute, first], bank.transient_bytes[c, recompute, last - 1])
            if last - first > 2:
                transient = max(transient, bank.transient_bytes[c, recompute, first + 1])
            need = (
                here * bank.state_bytes[zero, shards]
                + (bank.activation_bytes[c, recompute, last] - bank.activation_bytes[c, recompute, first]) * held[i]
                + transient
                + bank.context_bytes
            )
            if need > bank.limit_bytes[c]:
                fits = False
                break
            seconds[i] = (
                bank.forward_s[c, recompute, last]
                - bank.forward_s[c, recompute, first]
                + bank.backward_s[c, recompute, last]
                - bank.backward_s[c, recompute, first]
            )
            if zero >= 2:
                once = _shards_traffic_s(bank, c, here * bank.tp[c] * bank.element_bytes, shards)
                seconds[i] += once * (3 if zero == 3 else 1)
        if fits:
            return option
    return -1


@inner
def in_flight_estimate(
    bank: Bank, classes: np.ndarray, counts: np.ndarray, members: int, window: int, held: np.ndarray
) -> None:
    """Micro-batches in flight on a worker of each class of a stage under a window, by speed."""
    layer = min(1, bank.parameters.shape[1] - 2)
    rate = 0.0
    for i in range(members):
        c = classes[i]
        t = (
            bank.forward_s[c, 0, layer + 1]
            - bank.forward_s[c, 0, layer]
            + bank.backward_s[c, 0, layer + 1]
            - bank.backward_s[c, 0, layer]
        )
        held[i] = 1.0 / t
        rate += counts[i] / t
    for i in range(members):
        # Workers of unlike speed cannot be dealt perfectly evenly: one micro-batch more may be in flight.
        share = np.ceil(bank.micro_batches * held[i] / rate)
        in_window = np.ceil(window * held[i] / rate - 1e-9) + (1.0 if members > 1 else 0.0)
        held[i] = max(1.0, min(in_window, share))


@inner
def _extend(
    bank: Bank,
    classes: np.ndarray,
    counts: np.ndarray,
    shard_limit: np.ndarray,
    members: int,
    held: np.ndarray,
    first: int,
    limit: int,
    goal_s: float,
    seconds: np.ndarray,
) -> int:
    """Largest end of a stage that starts at layer `first`, ends by `limit`, fits and takes at most `goal_s`."""
    low, high = first, limit
    while low < high:
        middle = (low + high + 1) // 2
        option = stage_option(bank, classes, shard_limit, members, held, first, middle, seconds)
        if option >= 0 and whole_makespan_s(counts, seconds, members, bank.micro_batches) <= goal_s:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def split_layers(
    bank: Bank,
    classes: np.ndarray,
    counts: np.ndarray,
    shard_limit: np.ndarray,
    members: np.ndarray,
    held: np.ndarray,
    bounds: np.ndarray,
    options: np.ndarray,
    seconds: np.ndarray,
) -> float:
    """Cut the layers so that the slowest stage's makespan is least; inf if no cut fits.

    Stage by stage the longest run of layers that stays within a goal is taken (no other choice leaves less to the
    stages after it, because time and memory never fall with more layers), and the goal is bisected.

    Parameters
    ----------
    classes, counts, shard_limit, held, seconds : ndarray, shape (stages, most classes)
        Worker classes of each stage, their workers, over how many ZeRO shards, micro-batches in flight, and (out)
        seconds per micro-batch.
    members : ndarray, shape (stages,)
    bounds : ndarray, shape (stages + 1,)
        Out: first layer of every stage, and the end.
    options : ndarray, shape (stages,)
        Out: index of recomputation and ZeRO.
    """
    stages = members.shape[0]
    layers = bank.parameters.shape[1] - 1
    trial = np.zeros(stages + 1, dtype=np.int64)
    low, high, found = 0.0, np.inf, False
    for _ in range(26):
        goal = 0.5 * (low + high) if found else np.inf
        trial[0] = 0
        worst = 0.0
        ok = True
        for s in range(stages):
            at = trial[s]
            limit = layers - (stages - 1 - s)
            end = _extend(bank, classes[s], counts[s], shard_limit[s], members[s], held[s], at, limit, goal, seconds[s])
            if end <= at or (s == stages - 1 and end < layers):
                ok = False
                break
            stage_option(bank, classes[s], shard_limit[s], members[s], held[s], at, end, seconds[s])
            worst = max(worst, whole_makespan_s(counts[s], seconds[s], members[s], bank.micro_batches))
            trial[s + 1] = end
        if ok:
            high = worst
            for s in range(stages + 1):
                bounds[s] = trial[s]
            if not found:
                found = True
                low = 0.0
        elif not found:
            return np.inf
        else:
            low = goal
        if found and high - low <= 1e-4 * high:
            break
    for s in range(stages):
        options[s] = stage_option(
            bank, classes[s], shard_limit[s], members[s], held[s], bounds[s], bounds[s + 1], seconds[s]
        )
    return high


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
def room_in_flight(
    bank: Bank,
    classes: np.ndarray,
    counts: np.ndarray,
    shard_limit: np.ndarray,
    members: int,
    seconds: np.ndarray,
    first: int,
    last: int,
    option: int,
) -> float:
    """Micro-batches that a stage's workers can hold activations of at one time, each its share by speed."""
    zero, recompute = bank.option_zero[option], bank.option_recompute[option]
    layers = bank.parameters.shape[1] - 1
    rate = 0.0
    for i in range(members):
        rate += counts[i] / seconds[i]
    room = np.inf
    for i in range(members):
        c = classes[i]
        here = bank.parameters[c, last] - bank.parameters[c, first]
        if last == layers and first > 0:
            here += bank.tied[c]
        shards = min(shard_limit[i], bank.state_bytes.shape[1] - 1) if zero else 1
        each = bank.activation_bytes[c, recompute, last] - bank.activation_bytes[c, recompute, first]
        free = bank.limit_bytes[c] - bank.context_bytes - here * bank.state_bytes[zero, shards]
        transient = max(
            bank.transient_bytes[c, recompute, first],
            max(bank.transient_bytes[c, recompute, (first + last) // 2], bank.transient_bytes[c, recompute, last - 1]),
        )
        held = max(1.0, np.floor((free - transient) / max(each, 1.0)))
        room = min(room, held * rate * seconds[i])
    return room


@njit(cache=True, error_model="numpy")
def gather_stages(x: np.ndarray, classes: np.ndarray, counts: np.ndarray, members: np.ndarray) -> int:
    """Drop empty rows of an allocation; fills (stage, member) lists of classes and counts; returns the stages."""
    stages = 0
    for s in range(x.shape[0]):
        k = 0
        for c in range(x.shape[1]):
            if x[s, c] > 0:
                classes[stages, k] = c
                counts[stages, k] = x[s, c]
                k += 1
        if k:
            members[stages] = k
            stages += 1
    return stages


class Stages(NamedTuple):
    """Stages of an allocation by worker class, and by kind of class where the place does not matter.

    Arrays of shape (stages, most members); `members` and `kind_members` say how many entries of a row count.
    """

    classes: np.ndarray
    counts: np.ndarray
    members: np.ndarray
    seconds: np.ndarray
    """Per micro-batch, forward and backward."""
    kinds: np.ndarray
    kind_counts: np.ndarray
    kind_shards: np.ndarray
    """Over how many workers the smallest class of a kind can shard."""
    kind_members: np.ndarray
    kind_seconds: np.ndarray
    bounds: np.ndarray
    """(stages + 1,) the layer split."""
    options: np.ndarray
    """(stages,) memory options."""


@inner
def merge_kinds(bank: Bank, stages: Stages) -> None:
    """Fill the arrays by kind from those by class."""
    for s in range(stages.members.shape[0]):
        k = 0
        for i in range(stages.members[s]):
            kind = bank.kind[stages.classes[s, i]]
            n = stages.counts[s, i]
            at = 0
            while at < k and stages.kinds[s, at] != kind:
                at += 1
            if at == k:
                stages.kinds[s, k], stages.kind_counts[s, k], stages.kind_shards[s, k] = kind, n, n
                k += 1
            else:
                stages.kind_counts[s, at] += n
                stages.kind_shards[s, at] = min(stages.kind_shards[s, at], n)
        stages.kind_members[s] = k


@njit(cache=True, error_model="numpy")
def fluid_step_s(
    bank: Bank, x: np.ndarray, bounds: np.ndarray, options: np.ndarray, stages_out: np.ndarray
) -> tuple[float, int]:
    """Seconds per step of an allocation, and why not if it is inf.

    Parameters
    ----------
    bank : Bank
    x : ndarray of int64, shape (rows, classes)
        Workers of each class in each stage; empty rows are no stages.
    bounds, options : ndarray of int64, shape (rows + 1,), (rows,)
        Out: the layer split and the memory options.
    stages_out : ndarray of int64, shape (3,)
        Out: number of stages, whether regions keep their share along the stages (`lock_shares`), and the local steps.
    """
    rows, columns = x.shape
    widest = 1
    for s in range(rows):
        k = 0
        for c in range(columns):
            if x[s, c] > 0:
                k += 1
        widest = max(widest, k)
    classes = np.zeros((rows, widest), dtype=np.int64)
    counts = np.zeros((rows, widest), dtype=np.int64)
    members = np.zeros(rows, dtype=np.int64)
    n = gather_stages(x, classes, counts, members)
    stages_out[0] = n
    layers = bank.parameters.shape[1] - 1
    if n == 0 or n > layers:
        return np.inf, NO_STAGE
    stages = Stages(
        classes[:n],
        counts[:n],
        members[:n],
        np.zeros((n, widest)),
        np.zeros((n, widest), dtype=np.int64),
        np.zeros((n, widest), dtype=np.int64),
        np.zeros((n, widest), dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros((n, widest)),
        bounds[: n + 1],
        options[:n],
    )
    merge_kinds(bank, stages)
    held = np.zeros((n, widest))
    window = 0
    for s in range(n - 1, -1, -1):
        width = 0
        for i in range(stages.kind_members[s]):
            width += stages.kind_counts[s, i]
        if width > bank.micro_batches:
            return np.inf, TOO_FEW_MICRO_BATCHES
        window = min(bank.micro_batches, window + width)
        in_flight_estimate(bank, stages.kinds[s], stages.kind_counts[s], stages.kind_members[s], window, held[s])
    slowest = split_layers(
        bank,
        stages.kinds,
        stages.kind_counts,
        stages.kind_shards,
        stages.kind_members,
        held,
        stages.bounds,
        stages.options,
        stages.kind_seconds,
    )
    if not np.isfinite(slowest):
        return np.inf, NO_MEMORY
    for s in range(n):
        for i in range(stages.members[s]):
            at = 0
            while stages.kinds[s, at] != bank.kind[stages.classes[s, i]]:
                at += 1
            stages.seconds[s, i] = stages.kind_seconds[s, at]
    ways = 1
    for s in range(n):
        for i in range(stages.members[s]):
            if n > 1 and bank.region[stages.classes[s, i]] != bank.region[stages.classes[s, 0]]:
                ways = 2
    best = np.inf
    passing, message = np.zeros(n), np.zeros(n)
    for way in range(ways):
        end = _pipeline_s(bank, stages, way == 1, passing, message)
        value, steps = _with_reductions(bank, stages, passing, message, end, bank.local_steps if way + 1 == ways else 1)
        if value < best or way == 0:
            best = value
            stages_out[1], stages_out[2] = way, steps
    return best, FITS if np.isfinite(best) else NO_LINK


@inner
def _boundary_s(bank: Bank, stages: Stages, s: int, share: np.ndarray, stands: np.ndarray) -> tuple[float, float]:
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


@inner
def _pipeline_s(bank: Bank, stages: Stages, locked: bool, passing: np.ndarray, message: np.ndarray) -> float:
    """When stage 0 ends its last backward; inf where a link is missing.

    Parameters
    ----------
    locked : bool
        See `lock_shares`.
    passing, message : ndarray, shape (stages,)
        Out: seconds of the slowest worker, and of the slowest way to the next stage, for a micro-batch.
    """
    n = stages.members.shape[0]
    micro_batches = bank.micro_batches
    rates = np.zeros((n, bank.activation_wire.shape[0]))
    for s in range(n):
        for i in range(stages.members[s]):
            rates[s, bank.region[stages.classes[s, i]]] += stages.counts[s, i] / stages.seconds[s, i]
    share = lock_shares(rates, locked)
    stands = np.zeros(bank.activation_wire.shape[0], dtype=np.int64)
    for p in range(bank.pool_region.shape[0]):
        stands[bank.pool_region[p]] = p
    bottleneck, link_bound = 0.0, 0.0
    for s in range(n):
        passing[s], message[s] = 0.0, 0.0
        for i in range(stages.kind_members[s]):
            passing[s] = max(passing[s], stages.kind_seconds[s, i])
        makespan = whole_makespan_s(
            stages.kind_counts[s], stages.kind_seconds[s], stages.kind_members[s], micro_batches
        )
        if locked:
            for r in range(rates.shape[1]):
                if share[s, r] > 0:
                    makespan = max(makespan, micro_batches * share[s, r] / rates[s, r])
        fastest = np.inf
        for i in range(stages.kind_members[s]):
            fastest = min(fastest, stages.kind_seconds[s, i])
        bottleneck = max(bottleneck, makespan - fastest)
        if s + 1 < n:
            message[s], fullest = _boundary_s(bank, stages, s, share, stands)
            if not np.isfinite(message[s]):
                return np.inf
            link_bound = max(link_bound, fullest)
    fill = 0.0
    for s in range(n - 1, -1, -1):
        fill += passing[s] + 2 * message[s]
        room = room_in_flight(
            bank,
            stages.kinds[s],
            stages.kind_counts[s],
            stages.kind_shards[s],
            stages.kind_members[s],
            stages.kind_seconds[s],
            stages.bounds[s],
            stages.bounds[s + 1],
            stages.options[s],
        )
        if room < micro_batches:
            # Little's law: no more than `room` micro-batches are between their forward and backward of this stage.
            bottleneck = max(bottleneck, (micro_batches - room) * fill / room)
    return max(bottleneck, link_bound) + fill


@inner
def _with_reductions(
    bank: Bank, stages: Stages, passing: np.ndarray, message: np.ndarray, end: float, local_steps: int
) -> tuple[float, int]:
    """When the last stage has reduced and updated (inf without a link), and the local steps.

    `end` is when stage 0 ends its last backward. With more than one of `local_steps` also where every region reduces by
    itself and all meet once in so many steps, if each holds a whole pipeline with workers of one degree and whole
    weights in a stage; the shorter of both counts.
    """
    regions = bank.activation_wire.shape[0]
    layers = bank.parameters.shape[1] - 1
    n = stages.members.shape[0]
    present = np.zeros((n, regions))
    for s in range(n):
        for i in range(stages.members[s]):
            present[s, bank.region[stages.classes[s, i]]] = 1.0
    pair_share = np.zeros((regions, regions))
    for s in range(n):
        for a in range(regions):
            for b in range(regions):
                pair_share[a, b] += present[s, a] * present[s, b]
        if bank.option_zero[stages.options[s]] == 3:
            local_steps = 1
        for i in range(stages.members[s]):
            if bank.tp[stages.classes[s, i]] != bank.tp[stages.classes[s, 0]]:
                local_steps = 1
        for r in range(regions):
            if present[s, r] != present[0, r]:
                local_steps = 1
    step, early, local_step, outer = 0.0, 0.0, 0.0, 0.0
    for s in range(n):
        m = stages.members[s]
        n_values, update = 0.0, 0.0
        pools, nodes, on_node = np.empty(m, dtype=np.int64), np.empty(m, dtype=np.int64), np.empty(m, dtype=np.int64)
        for i in range(m):
            c = stages.classes[s, i]
            here = bank.parameters[c, stages.bounds[s + 1]] - bank.parameters[c, stages.bounds[s]]
            if s > 0 and stages.bounds[s + 1] == layers:
                here += bank.tied[c]
            n_values = max(n_values, here * bank.tp[c])
            shards = stages.counts[s, i] if bank.option_zero[stages.options[s]] > 0 else 1
            update = max(update, here / shards * bank.update_s_per_parameter[c])
            pools[i] = bank.pool[c]
            per_node = max(1, bank.devices_per_node[c] // bank.tp[c])
            nodes[i] = (stages.counts[s, i] + per_node - 1) // per_node
            on_node[i] = min(stages.counts[s, i], per_node)
        reduction, inner = 0.0, 0.0
        if m > 1 or stages.counts[s, 0] > 1:
            n_bytes = n_values * bank.gradient_bytes
            node_s, region_s, across_s, _ = levels_s(
                n_bytes,
                pools,
                nodes,
                on_node,
                n_bytes * bank.gradient_ratio,
                pair_share,
                bank.pool_region,
                bank.latency_s,
                bank.bytes_per_s,
                bank.node_latency_s,
                bank.node_bytes_per_s,
                bank.capacity_bytes_per_s,
            )
            reduction, inner = node_s + region_s + across_s, node_s + region_s
            if not np.isfinite(reduction):
                return np.inf, 1
        tied = 0.0
        if bank.tied_values > 0 and n > 1 and (s == 0 or s == n - 1):
            tied = _tied_s(bank, stages)
            if not np.isfinite(tied):
                return np.inf, 1
        # Backward is about two thirds of passing a stage; layers are reduced while it runs.
        backward = passing[s] * 2 / 3
        depth = stages.bounds[s + 1] - stages.bounds[s]
        exposed = max(reduction / depth, reduction - backward * (depth - 1) / depth)
        step = max(step, end - early + exposed + tied + update)
        exposed = max(inner / depth, inner - backward * (depth - 1) / depth)
        local_step = max(local_step, end - early + exposed + tied + update)
        outer = max(outer, reduction)
        early += backward + message[s]
    local_step += outer / local_steps
    if local_steps > 1 and local_step < step:
        return local_step, local_steps
    return step, 1


@inner
def _tied_s(bank: Bank, stages: Stages) -> float:
    """Seconds to exchange the gradient of tied embeddings between first and last stage, over their best link."""
    last = stages.members.shape[0] - 1
    best = np.inf
    for i in range(stages.members[0]):
        for j in range(stages.members[last]):
            a, b = stages.classes[0, i], stages.classes[last, j]
            rate = bank.bytes_per_s[bank.pool[a], bank.pool[b]]
            if rate > 0:
                ratio = bank.gradient_ratio[bank.region[a], bank.region[b]]
                seconds = bank.tied_values * bank.gradient_bytes * ratio / rate
                best = min(best, bank.latency_s[bank.pool[a], bank.pool[b]] + seconds)
    return best
