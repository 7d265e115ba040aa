"""The best cut of the layers over given stages, each with the quickest memory option that fits: kernels of the search.

A stage is a list of kinds of workers with their counts. Its makespan is that of whole micro-batches dealt to workers of
unequal speed; its memory depends on how many micro-batches it holds at one time.
"""

from __future__ import annotations

import numpy as np

from polygon.cost.memory import under_way_bytes
from polygon.cost.overlap import gathered_s, seen_parts, summed_s, visible_s
from polygon.cost.reduction import collective_s
from polygon.jit.compilation import inner, kernel
from polygon.planning.problem_arrays import Bank
from polygon.planning.stage_lists import Stages, key_of, take_turn

SHORTER = 5e-3
"""Part by which a step is to be shorter for the layers to be cut once more (`split_layers_under_way`)."""


FEW = 4.0
"""Micro-batches of the quickest worker within which a makespan is known before ends of micro-batches are looked at."""


@inner
def _ended(counts: np.ndarray, seconds: np.ndarray, members: int, at_s: float) -> tuple[float, float]:
    """Micro-batches that `counts[c]` workers of `seconds[c]` each have done at a time, and when the next one ends."""
    done, following = 0.0, np.inf
    for c in range(members):
        each = np.floor(at_s / seconds[c] * (1 + 1e-12) + 1e-9)
        done += counts[c] * each
        following = min(following, (each + 1) * seconds[c])
    return done, following


@kernel
def whole_makespan_s(counts: np.ndarray, seconds: np.ndarray, members: int, micro_batches: int) -> float:
    """Least time in which `counts[c]` workers of `seconds[c]` each finish `micro_batches` in whole shares.

    It lies between the fluid time and one micro-batch more per worker. Where workers are of very unlike speeds it is
    bisected down to a few micro-batches of the quickest; then one end of micro-batches after another is looked at.
    """
    if members == 1:
        return float(seconds[0] * np.ceil(micro_batches / counts[0] - 1e-9))
    rate, quickest, slowest = 0.0, np.inf, 0.0
    for c in range(members):
        rate += counts[c] / seconds[c]
        quickest, slowest = min(quickest, seconds[c]), max(slowest, seconds[c])
    low = micro_batches / rate
    high = low + slowest
    while high - low > FEW * quickest:
        middle = 0.5 * (low + high)
        if _ended(counts, seconds, members, middle)[0] >= micro_batches:
            high = middle
        else:
            low = middle
    done, following = _ended(counts, seconds, members, low)
    while done < micro_batches:
        low = following
        done, following = _ended(counts, seconds, members, low)
    return float(low)


@inner
def _shards_traffic_s(
    bank: Bank, c: int, zero: int, held: float, layers: int, forward_s: float, backward_s: float, shards: int, near: int
) -> float:
    """Seen of the traffic of ZeRO-2 or 3 in a micro-batch (`polygon.cost.sharding.ShardingTraffic`), of like layers.

    `near`: the most of the `shards` that are on one node.
    """
    p, of = bank.pool[c], bank.overlap
    latency_s, rate = bank.links.ring_latency_s[p, p], bank.links.ring_bytes_per_s[p, p]
    scatter = layers * collective_s(held * of.gradient_bytes / layers, shards, near, p, latency_s, rate, 1, bank.links)
    if zero == 2:
        return visible_s(scatter, of.gather_hidden * backward_s, of.contention)
    gather = layers * collective_s(held * of.weight_bytes / layers, shards, near, p, latency_s, rate, 1, bank.links)
    seen = visible_s(gather, of.gather_hidden * forward_s, of.contention)
    seen += visible_s(gather + scatter, of.gather_hidden * backward_s, of.contention)
    return float(seen + held * bank.copies_s[c])


@inner
def held_parameters(bank: Bank, values: np.ndarray, c: int, first: int, last: int) -> float:
    """Of layers [first, last) on a device of a class, from a running sum of parameters; a tied head's copy included."""
    tied = bank.tied[c] if last == bank.parameters.shape[1] - 1 and first > 0 else 0.0
    return float(values[c, last] - values[c, first] + tied)


@inner
def gradient_bytes(bank: Bank, c: int, first: int, last: int) -> float:
    """Of layers [first, last) on a class, those of all devices that divide a layer together; without a tied weight that
    two stages sum apart from all others."""
    held = held_parameters(bank, bank.parameters, c, first, last) * bank.tp[c]
    if bank.tied_once and (first == 0) != (last == bank.parameters.shape[1] - 1):
        held -= bank.tied_values
    return float(held * bank.gradient_bytes)


@inner
def spread_bytes(bank: Bank, c: int, first: int, last: int) -> float:
    """Of `gradient_bytes` the experts', where a group of workers spreads them."""
    if bank.ep == 1:
        return 0.0
    others = bank.divided[c, last] - bank.divided[c, first] - (bank.parameters[c, last] - bank.parameters[c, first])
    return float(others / (bank.ep - 1) * bank.tp[c] * bank.gradient_bytes)


@inner
def part_at_end(bank: Bank, c: int, first: int, last: int) -> float:
    """As `polygon.cost.step_times.part_at_end`, of layers [first, last) on a class."""
    after = min(first + (2 if first == 0 else 1), last)
    least, whole = bank.parameters[c, after] - bank.parameters[c, first], gradient_bytes(bank, c, first, last)
    if bank.tied_once and first == 0 and last < bank.parameters.shape[1] - 1:
        least -= bank.tied_values / bank.tp[c]
    return max(0.0, float(least * bank.tp[c] * bank.gradient_bytes)) / whole if whole > 0 else 1.0


@inner
def _outside(bank: Bank, c: int, first: int, last: int) -> float:
    """Parameters of the embedding and the head among layers [first, last) on a device of a class."""
    layers, outside = bank.divided.shape[1] - 1, 0.0
    if first == 0:
        outside += bank.divided[c, 1]
    if last == layers:
        outside += bank.divided[c, layers] - bank.divided[c, layers - 1] + (bank.tied[c] if first > 0 else 0.0)
    return outside


@inner
def states_bytes(bank: Bank, stages: Stages, s: int, i: int, zero: int, shards: int, first: int, last: int) -> float:
    """Weights, gradients and optimizer of layers [first, last) on a device of the i-th kind of stage s, divided by so
    many `shards`, and what packing owes there."""
    c, shards = stages.kinds[s, i], shards if zero else 1
    count = held_parameters(bank, bank.parameters, c, first, last)
    tied = bank.tied[c] if bank.tied_once and (first == 0) != (last == bank.parameters.shape[1] - 1) else 0.0
    owed = (count - tied) * stages.owed_bytes[s, i] * (bank.tp[c] if stages.unlike[s] else 1)
    owed += tied * stages.tied_owed_bytes[s, i] * (bank.tp[c] if stages.whole_ties[0] else 1)
    divided = held_parameters(bank, bank.divided, c, first, last) / shards
    held = count * bank.held_bytes[zero] + owed + (divided if zero else count) * stages.outer_bytes[0]
    if bank.on_host[c]:
        largest = 0.0
        for layer in (first, min(first + 1, last - 1), last - 1):
            largest = max(largest, bank.parameters[c, layer + 1] - bank.parameters[c, layer])
        heard = stages.near[s] + stages.heard[s] * (1.0 if stages.plain[0] else bank.packed_ratio)
        held += under_way_bytes(heard, count * bank.gradient_bytes, largest * bank.gradient_bytes)
    if bank.outside_bytes > 0:
        held += bank.outside_bytes * _outside(bank, c, first, last) / shards
    if zero and stages.whole_ties[0] and (first == 0) != (last == bank.parameters.shape[1] - 1):
        less = bank.held_bytes[0] - bank.held_bytes[zero] + bank.divided_bytes[0] - bank.divided_bytes[zero] / shards
        held += bank.tied[c] * (less + (bank.outside_bytes + stages.outer_bytes[0]) * (1 - 1 / shards))
    return float(held + divided * bank.divided_bytes[zero])


@inner
def _transient_bytes(bank: Bank, c: int, recompute: int, zero: int, shards: int, first: int, last: int) -> float:
    """Most that one of the layers [first, last) needs while it is computed; blocks are taken as alike."""
    most, gathered = 0.0, 0.0
    for layer in (first, min(first + 1, last - 1), last - 1):
        most = max(most, bank.transient_bytes[c, recompute, layer])
        gathered = max(gathered, bank.passing_bytes[zero, c, layer])
    if last - first < bank.parameters.shape[1] - 1:
        most += bank.posted_bytes
    return most + gathered if shards > 1 else most


@inner
def _sent_bytes(bank: Bank, last: int) -> float:
    """Of a micro-batch's output, what stays until its backward."""
    return bank.kept_output_bytes if last < bank.parameters.shape[1] - 1 else 0.0


@inner
def blocks_recomputed(bank: Bank, stages: Stages, s: int, mode: int, zero: int, first: int, last: int) -> int:
    """Fewest of the stage's first blocks to recompute so that layers [first, last) fit every kind; -1: none suffice."""
    begin, most = max(first, 1), 0
    for i in range(stages.kind_members[s]):
        c, held = stages.kinds[s, i], stages.held[s, i]
        shards = stages.kind_shards[s, i]
        free = bank.limit_bytes[c] - bank.context_bytes - states_bytes(bank, stages, s, i, zero, shards, first, last)
        plain = bank.activation_bytes[c, 0]
        sent = _sent_bytes(bank, last)
        whole = (plain[last] - plain[first] + sent) * held
        if whole + _transient_bytes(bank, c, 0, zero, shards, first, last) <= free:
            continue
        sums = bank.activation_bytes[c, mode]
        free -= max(
            _transient_bytes(bank, c, 0, zero, shards, first, last),
            _transient_bytes(bank, c, mode, zero, shards, first, last),
        )
        low, high = most, last - begin
        while low < high:
            middle = (low + high) // 2
            until = begin + middle
            kept = plain[begin] - plain[first] + sums[until] - sums[begin] + plain[last] - plain[until] + sent
            if kept * held <= free:
                high = middle
            else:
                low = middle + 1
        until = begin + low
        kept = plain[begin] - plain[first] + sums[until] - sums[begin] + plain[last] - plain[until] + sent
        if until > last or kept * held > free:
            return -1
        most = max(most, low)
    return most


@kernel
def passing_s(bank: Bank, c: int, recompute: int, blocks: int, first: int, last: int, zero: int) -> tuple[float, float]:
    """Forward and backward of layers [first, last) on a class, so many of its first blocks recomputed; fully sharded it
    adds up no gradient."""
    forward = bank.forward_s[c, 0, last] - bank.forward_s[c, 0, first]
    backward = bank.backward_s[c, 0, last] - bank.backward_s[c, 0, first]
    if blocks > 0:
        begin = max(first, 1)
        until = min(begin + blocks, last)
        more = bank.backward_s[c, recompute, until] - bank.backward_s[c, recompute, begin]
        backward += more - (bank.backward_s[c, 0, until] - bank.backward_s[c, 0, begin])
        more = bank.forward_s[c, recompute, until] - bank.forward_s[c, recompute, begin]
        forward += more - (bank.forward_s[c, 0, until] - bank.forward_s[c, 0, begin])
    if zero == 3:
        backward -= bank.accumulation_s[c, last] - bank.accumulation_s[c, first]
    return forward, backward


@inner
def sends_in_passing(bank: Bank, zero: int) -> bool:
    """Whether every micro-batch of a sharded stage has traffic of its own."""
    return zero == 3 or (zero == 2 and bank.overlap.scatters)


@inner
def _kind_s(
    bank: Bank, stages: Stages, s: int, i: int, recompute: int, zero: int, blocks: int, first: int, last: int
) -> float:
    """Seconds per micro-batch of the i-th kind of stage s under a memory option."""
    c = stages.kinds[s, i]
    spread, near = stages.kind_spread[s, i, 0], stages.kind_spread[s, i, 1]
    forward, backward = passing_s(bank, c, recompute, blocks, first, last, zero if spread > 1 else 0)
    if spread <= 1 or not sends_in_passing(bank, zero):
        return float(forward + backward)
    # The embedding and the head send more than a block, beside other compute.
    layers, total, begin, end = bank.parameters.shape[1] - 1, forward + backward, first, last
    held = held_parameters(bank, bank.parameters, c, first, last)
    if first == 0 and last > 1:
        begin, weights = 1, bank.parameters[c, 1]
        ahead, back = passing_s(bank, c, 0, 0, 0, 1, 0)
        total += _shards_traffic_s(bank, c, zero, weights, 1, ahead, back, spread, near)
        held, forward, backward = held - weights, forward - ahead, backward - back
    if last == layers and layers - begin > 1:
        end, weights = layers - 1, held - (bank.parameters[c, layers - 1] - bank.parameters[c, begin])
        ahead, back = passing_s(bank, c, 0, 0, end, layers, 0)
        total += _shards_traffic_s(bank, c, zero, weights, 1, ahead, back, spread, near)
        held, forward, backward = held - weights, forward - ahead, backward - back
    return float(total + _shards_traffic_s(bank, c, zero, held, end - begin, forward, backward, spread, near))


@inner
def _ends_s(bank: Bank, stages: Stages, s: int, i: int, zero: int, seconds: float, first: int, last: int) -> float:
    """What a step sees at its end of sums of gradients and gathers of weights inside the pool of the i-th kind."""
    c, shards, of = stages.kinds[s, i], stages.kind_spread[s, i, 0], bank.overlap
    if shards <= 1 or zero == 3:
        return 0.0
    p, held = bank.pool[c], held_parameters(bank, bank.parameters, c, first, last)
    near = stages.kind_spread[s, i, 1]
    latency_s, rate = bank.links.ring_latency_s[p, p], bank.links.ring_bytes_per_s[p, p]
    scatter = 0.0
    if zero < 2 or not of.scatters:
        scatter = collective_s(held * of.gradient_bytes, shards, near, p, latency_s, rate, 1, bank.links)
    gather = collective_s(held * of.weight_bytes, shards, near, p, latency_s, rate, 1, bank.links)
    layers = float(last - first)
    last_s = scatter * seen_parts(layers, part_at_end(bank, c, first, last), of)[1]
    summed = summed_s(0.0, seconds * 2 / 3, scatter, last_s, layers, of)[1]
    return summed + gathered_s(gather, seconds / 3, of)


@inner
def stage_option(bank: Bank, stages: Stages, s: int, first: int, last: int) -> tuple[int, int, int]:
    """The quickest recomputation, ZeRO and number of recomputed blocks under which layers [first, last) fit stage s.

    A ZeRO stage of -1 if nothing fits. `kind_seconds` receives the seconds per micro-batch of every kind of worker.
    """
    members, spread = stages.kind_members[s], 1
    for i in range(0 if stages.unlike[s] else members):
        spread = max(spread, stages.kind_spread[s, i, 0])
    best, chosen = np.inf, (0, -1, 0)
    # Sharded optimizer states (ZeRO-1) cost nothing in a micro-batch, and a step sends less for them than without.
    for zero in range(1 if spread > 1 else 0, 4 if spread > 1 else 1):
        if zero == 2 and chosen[1] == 1 and chosen[2] == 0:
            continue  # nothing is recomputed: it would hold less than is needed
        if zero == 3 and chosen[1] >= 0 and bank.local_steps > 1:
            continue  # regions that train by themselves hold whole weights
        for m in range(bank.modes.shape[0]):
            mode = bank.modes[m]
            blocks = blocks_recomputed(bank, stages, s, mode, zero, first, last)
            if blocks < 0:
                continue
            rate, ends = 0.0, 0.0
            for i in range(members):
                seconds = _kind_s(bank, stages, s, i, mode, zero, blocks, first, last)
                rate += stages.kind_counts[s, i] / seconds
                ends = max(ends, _ends_s(bank, stages, s, i, zero, seconds, first, last))
            whole = bank.micro_batches / rate + ends
            if whole < best * (1 - 1e-9):
                best, chosen = whole, (mode if blocks else 0, zero, blocks)
            if blocks == 0:
                break
    if chosen[1] >= 0:
        _work_by(bank, stages, s, chosen, first, last)
    return chosen


@inner
def _work_by(bank: Bank, stages: Stages, s: int, option: tuple[int, int, int], first: int, last: int) -> None:
    """Fill `kind_seconds` of stage s with layers [first, last) under an option of `stage_option`."""
    for i in range(stages.kind_members[s]):
        stages.kind_seconds[s, i] = _kind_s(bank, stages, s, i, option[0], option[1], option[2], first, last)


@inner
def work_as_cut(bank: Bank, stages: Stages, s: int, bounds: np.ndarray, options: np.ndarray) -> None:
    """The same for a cut of the layers."""
    _work_by(bank, stages, s, (options[0, s], options[1, s], options[2, s]), bounds[s], bounds[s + 1])


@inner
def _block_s(bank: Bank, c: int) -> float:
    """Seconds of a micro-batch in the second layer on a class."""
    layer = min(1, bank.parameters.shape[1] - 2)
    forward, backward = passing_s(bank, c, 0, 0, layer, layer + 1, 0)
    return forward + backward


@inner
def in_flight_estimate(bank: Bank, stages: Stages, s: int, n: int, window: float) -> None:
    """Micro-batches in flight on a worker of each kind of stage s of n under a window, by speed: fills `held`.

    The last stage takes every micro-batch backward before it begins another.
    """
    members = stages.kind_members[s]
    rate, other = 0.0, False
    for i in range(members):
        rate += stages.kind_counts[s, i] / _block_s(bank, stages.kinds[s, i])
    for i in range(members):
        part = 1 / _block_s(bank, stages.kinds[s, i]) / rate
        # Workers of unlike speed cannot be dealt perfectly evenly: one micro-batch more may be in flight.
        in_window = np.ceil(window * part - 1e-9) + (1.0 if members > 1 else 0.0)
        held = max(1.0, min(in_window, np.ceil(bank.micro_batches * part))) if s < n - 1 else 1.0
        other = other or held != stages.held[s, i]
        stages.held[s, i] = held
    if other:
        take_turn(stages, s)


@inner
def kinds_makespan_s(bank: Bank, stages: Stages, s: int) -> float:
    """`whole_makespan_s` of stage s by kinds of workers."""
    return whole_makespan_s(stages.kind_counts[s], stages.kind_seconds[s], stages.kind_members[s], bank.micro_batches)


@inner
def _extend(
    bank: Bank, stages: Stages, s: int, first: int, limit: int, goal_s: float, guess: int
) -> tuple[int, float, float]:
    """Largest end of stage s if it starts at layer `first`, ends by `limit`, fits and takes at most `goal_s`.

    Also the makespans with that end and with one layer more (inf if that does not fit). The search goes out from a
    guess in growing steps and bisects once it has passed the end.
    """
    low, high, taken, longer = first, limit, 0.0, np.inf
    at, step = max(first + 1, min(limit, guess)), 1
    while low < high:
        key, place = key_of(bank, stages, s, first, at)
        if stages.met[place] != key:
            found = stage_option(bank, stages, s, first, at)[1] >= 0
            stages.met[place], stages.met_s[place] = key, kinds_makespan_s(bank, stages, s) if found else np.inf
        makespan = stages.met_s[place]
        if makespan <= goal_s and makespan < np.inf:
            low, taken = at, makespan
        else:
            high, longer = at - 1, makespan
        if high == limit:
            at = min(high, low + step)
        elif low == first:
            at = max(low + 1, high + 1 - step)
        else:
            at = (low + high + 1) // 2
        step *= 2
    return low, taken, longer


@inner
def _last_within(bank: Bank, stages: Stages, s: int, first: int, limit: int, most_bytes: float) -> int:
    """Largest end of stage s, one layer at least, if it starts at layer `first` and has so many bytes of gradients."""
    low, high = first + 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if gradient_bytes(bank, stages.kinds[s, 0], first, middle) <= most_bytes:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def _cut_within(
    bank: Bank, stages: Stages, n: int, goal_s: float, trial: np.ndarray, most_bytes: np.ndarray
) -> tuple[float, float]:
    """Cut the layers so that n stages take at most `goal_s` each: the longest makespan, inf if none.

    Stage by stage the longest run of layers that stays within the goal is taken (no other choice leaves less to the
    stages after it, because time and memory never fall with more layers). Also the least goal above this one under
    which a stage would take more.

    Parameters
    ----------
    trial : ndarray, shape (rows + 1,)
        In: a cut that may be near; out: the cut.
    most_bytes : ndarray, shape (rows,)
        As of `split_layers`.
    """
    layers = bank.parameters.shape[1] - 1
    worst, next_s, before = 0.0, np.inf, trial[0]
    trial[0] = 0
    for s in range(n):
        at, guess = trial[s], trial[s] + trial[s + 1] - before
        limit = layers - (n - 1 - s)
        if most_bytes[s] < np.inf and at < limit:
            limit = _last_within(bank, stages, s, at, limit, most_bytes[s])
        end, taken, longer = _extend(bank, stages, s, at, limit, goal_s, guess)
        next_s = min(next_s, longer)
        if end <= at or (s == n - 1 and end < layers):
            return np.inf, next_s
        worst = max(worst, taken)
        before = trial[s + 1]
        trial[s + 1] = end
    return worst, next_s


@inner
def split_layers(
    bank: Bank,
    stages: Stages,
    n: int,
    trial: np.ndarray,
    bounds: np.ndarray,
    options: np.ndarray,
    least_s: float,
    most_s: float,
    most_bytes: np.ndarray,
) -> float:
    """Cut the layers so that the slowest of n stages' makespans is least, by bisection; inf if no cut fits.

    Parameters
    ----------
    stages : Stages
        The lists by kind count; in `kind_seconds` out: seconds per micro-batch.
    trial : ndarray, shape (rows + 1,)
        Room.
    bounds : ndarray, shape (rows + 1,)
        Out: first layer of every stage, and the end.
    options : ndarray, shape (3, rows)
        Out: recomputation, ZeRO and blocks recomputed.
    least_s, most_s : float
        What the longest makespan is known to be at least, and is to be at most.
    most_bytes : ndarray, shape (rows,)
        Of gradients that a stage has, unless one layer has more.
    """
    layers = bank.parameters.shape[1] - 1
    for s in range(n + 1):
        trial[s] = s * layers // n
    low, high = least_s, np.inf
    while high == np.inf or high - low > 1e-4 * high:
        goal_s = 0.5 * (low + high) if high < np.inf else most_s
        worst, next_s = _cut_within(bank, stages, n, goal_s, trial, most_bytes)
        if worst < np.inf:
            high = worst
            for s in range(n + 1):
                bounds[s] = trial[s]
        elif high == np.inf:
            return np.inf
        else:  # nothing changes before the next goal
            low = max(0.5 * (low + high), next_s)
    for s in range(n):
        options[0, s], options[1, s], options[2, s] = stage_option(bank, stages, s, bounds[s], bounds[s + 1])
    return high


@inner
def layers_left_over(bank: Bank, stages: Stages, n: int) -> int:
    """Layers that n stages have no room for if each holds as many as it can, and stages that hold none."""
    layers, at, empty = bank.parameters.shape[1] - 1, 0, 0
    for s in range(n):
        end = _extend(bank, stages, s, at, layers - (n - 1 - s), np.inf, at + 1)[0]
        empty += 1 if end <= at else 0
        at = max(at, end)
    return int(layers - at + empty)


@inner
def split_layers_under_way(
    bank: Bank,
    stages: Stages,
    n: int,
    away_s: np.ndarray,
    low: float,
    high: float,
    trial: np.ndarray,
    bounds: np.ndarray,
    options: np.ndarray,
    most_bytes: np.ndarray,
) -> bool:
    """Cut the layers again so that stages also hold the micro-batches that are under way between them.

    By Little's law M micro-batches in G seconds of which each is under way for A behind a stage are M A / G there on
    average, beside one per worker. Their activations take memory, so that less layers fit, or more is recomputed, the
    shorter G is. The shortest G between two values is bisected.

    Parameters
    ----------
    away_s : ndarray, shape (rows,)
        Seconds that a micro-batch is under way behind each stage, there and back.
    low, high : float
        Seconds that no cut beats, and those of the cut that there is.
    trial, bounds, options, most_bytes : ndarray
        As of `split_layers`.

    Returns
    -------
    bool
        Whether there is another cut, of less than `high`; else `bounds` and `options` are as they were, but not
        `kind_seconds`.
    """
    found = False
    while high - low > SHORTER * high:
        goal = 0.5 * (low + high)
        window = 0.0
        for s in range(n - 1, -1, -1):
            for i in range(stages.kind_members[s]):
                window += stages.kind_counts[s, i]
            under_way = bank.micro_batches * away_s[s] / goal
            in_flight_estimate(bank, stages, s, n, min(float(bank.micro_batches), window + under_way))
        if _cut_within(bank, stages, n, goal, trial, most_bytes)[0] < np.inf:
            high, found = goal, True
            for s in range(n + 1):
                bounds[s] = trial[s]
            for s in range(n):
                options[0, s], options[1, s], options[2, s] = stage_option(bank, stages, s, trial[s], trial[s + 1])
        else:
            low = goal
    for s in range(n if found else 0):
        work_as_cut(bank, stages, s, bounds, options)
    return found


@inner
def held_most(
    bank: Bank, stages: Stages, s: int, i: int, shards: int, first: int, last: int, options: np.ndarray
) -> float:
    """Micro-batches of which a worker of the i-th kind of stage s can hold the activations at one time.

    Below 1 where it cannot hold even the weights and what belongs to them, which ZeRO divides by so many `shards`.
    """
    recompute, zero, blocks = options[0, s], options[1, s], options[2, s]
    begin = max(first, 1)
    until = min(begin + blocks, last) if blocks else first
    c = stages.kinds[s, i]
    sums, plain = bank.activation_bytes[c, recompute], bank.activation_bytes[c, 0]
    each = sums[until] - sums[first] + plain[last] - plain[until] + _sent_bytes(bank, last)
    free = bank.limit_bytes[c] - bank.context_bytes - states_bytes(bank, stages, s, i, zero, shards, first, last)
    transient = max(
        _transient_bytes(bank, c, recompute, zero, shards, first, last),
        _transient_bytes(bank, c, 0, zero, shards, first, last),
    )
    return float(np.floor((free - transient) / max(each, 1.0)))
