"""The best cut of the layers over given stages, each with the quickest memory option that fits: kernels of the search.

A stage is a list of kinds of workers with their counts. Its makespan is that of whole micro-batches dealt to workers of
unequal speed; its memory depends on how many micro-batches it holds at one time.
"""

from __future__ import annotations

import numpy as np

from polygon.kernel_options import inner, kernel
from polygon.planning.bank import Bank
from polygon.planning.stage_lists import Stages


@kernel
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
def stage_option(bank: Bank, stages: Stages, s: int, first: int, last: int) -> int:
    """First option under which layers [first, last) fit every kind of worker of stage s; -1 if none does.

    `kind_seconds` receives their seconds per micro-batch.
    """
    layers = bank.parameters.shape[1] - 1
    for option in range(bank.option_zero.shape[0]):
        zero, recompute = bank.option_zero[option], bank.option_recompute[option]
        fits = True
        for i in range(stages.kind_members[s]):
            c = stages.kinds[s, i]
            shards = min(stages.kind_shards[s, i], bank.state_bytes.shape[1] - 1) if zero else 1
            here = bank.parameters[c, last] - bank.parameters[c, first]
            if last == layers and first > 0:
                here += bank.tied[c]
            transient = max(bank.transient_bytes[c, recompute, first], bank.transient_bytes[c, recompute, last - 1])
            if last - first > 2:
                transient = max(transient, bank.transient_bytes[c, recompute, first + 1])
            activations = bank.activation_bytes[c, recompute, last] - bank.activation_bytes[c, recompute, first]
            need = (
                here * bank.state_bytes[zero, shards] + activations * stages.held[s, i] + transient + bank.context_bytes
            )
            if need > bank.limit_bytes[c]:
                fits = False
                break
            seconds = (
                bank.forward_s[c, recompute, last]
                - bank.forward_s[c, recompute, first]
                + bank.backward_s[c, recompute, last]
                - bank.backward_s[c, recompute, first]
            )
            if zero >= 2:
                once = _shards_traffic_s(bank, c, here * bank.tp[c] * bank.element_bytes, shards)
                seconds += once * (3 if zero == 3 else 1)
            stages.kind_seconds[s, i] = seconds
        if fits:
            return option
    return -1


@inner
def in_flight_estimate(bank: Bank, stages: Stages, s: int, window: int) -> None:
    """Micro-batches in flight on a worker of each kind of stage s under a window, by speed: fills `held`."""
    layer = min(1, bank.parameters.shape[1] - 2)
    members = stages.kind_members[s]
    rate = 0.0
    for i in range(members):
        c = stages.kinds[s, i]
        t = (
            bank.forward_s[c, 0, layer + 1]
            - bank.forward_s[c, 0, layer]
            + bank.backward_s[c, 0, layer + 1]
            - bank.backward_s[c, 0, layer]
        )
        stages.held[s, i] = 1.0 / t
        rate += stages.kind_counts[s, i] / t
    for i in range(members):
        # Workers of unlike speed cannot be dealt perfectly evenly: one micro-batch more may be in flight.
        share = np.ceil(bank.micro_batches * stages.held[s, i] / rate)
        in_window = np.ceil(window * stages.held[s, i] / rate - 1e-9) + (1.0 if members > 1 else 0.0)
        stages.held[s, i] = max(1.0, min(in_window, share))


@inner
def kinds_makespan_s(bank: Bank, stages: Stages, s: int) -> float:
    """`whole_makespan_s` of stage s by kinds of workers."""
    return whole_makespan_s(stages.kind_counts[s], stages.kind_seconds[s], stages.kind_members[s], bank.micro_batches)


@inner
def _extend(bank: Bank, stages: Stages, s: int, first: int, limit: int, goal_s: float) -> int:
    """Largest end of stage s if it starts at layer `first`, ends by `limit`, fits and takes at most `goal_s`."""
    low, high = first, limit
    while low < high:
        middle = (low + high + 1) // 2
        option = stage_option(bank, stages, s, first, middle)
        if option >= 0 and kinds_makespan_s(bank, stages, s) <= goal_s:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def split_layers(
    bank: Bank, stages: Stages, n: int, trial: np.ndarray, bounds: np.ndarray, options: np.ndarray
) -> float:
    """Cut the layers so that the slowest of n stages' makespans is least; inf if no cut fits.

    Stage by stage the longest run of layers that stays within a goal is taken (no other choice leaves less to the
    stages after it, because time and memory never fall with more layers), and the goal is bisected.

    Parameters
    ----------
    stages : Stages
        The lists by kind count; in `kind_seconds` out: seconds per micro-batch.
    trial : ndarray, shape (rows + 1,)
        Room.
    bounds : ndarray, shape (rows + 1,)
        Out: first layer of every stage, and the end.
    options : ndarray, shape (rows,)
        Out: index of recomputation and ZeRO.
    """
    layers = bank.parameters.shape[1] - 1
    low, high, found = 0.0, np.inf, False
    for _ in range(26):
        goal = 0.5 * (low + high) if found else np.inf
        trial[0] = 0
        worst = 0.0
        ok = True
        for s in range(n):
            at = trial[s]
            end = _extend(bank, stages, s, at, layers - (n - 1 - s), goal)
            if end <= at or (s == n - 1 and end < layers):
                ok = False
                break
            stage_option(bank, stages, s, at, end)
            worst = max(worst, kinds_makespan_s(bank, stages, s))
            trial[s + 1] = end
        if ok:
            high = worst
            for s in range(n + 1):
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
    for s in range(n):
        options[s] = stage_option(bank, stages, s, bounds[s], bounds[s + 1])
    return high


@inner
def room_in_flight(bank: Bank, stages: Stages, s: int, first: int, last: int, option: int) -> float:
    """Micro-batches that stage s's workers can hold activations of at one time, each its share by speed."""
    zero, recompute = bank.option_zero[option], bank.option_recompute[option]
    layers = bank.parameters.shape[1] - 1
    members = stages.kind_members[s]
    rate = 0.0
    for i in range(members):
        rate += stages.kind_counts[s, i] / stages.kind_seconds[s, i]
    room = np.inf
    for i in range(members):
        c = stages.kinds[s, i]
        here = bank.parameters[c, last] - bank.parameters[c, first]
        if last == layers and first > 0:
            here += bank.tied[c]
        shards = min(stages.kind_shards[s, i], bank.state_bytes.shape[1] - 1) if zero else 1
        each = bank.activation_bytes[c, recompute, last] - bank.activation_bytes[c, recompute, first]
        free = bank.limit_bytes[c] - bank.context_bytes - here * bank.state_bytes[zero, shards]
        transient = max(
            bank.transient_bytes[c, recompute, first],
            max(bank.transient_bytes[c, recompute, (first + last) // 2], bank.transient_bytes[c, recompute, last - 1]),
        )
        held = max(1.0, np.floor((free - transient) / max(each, 1.0)))
        room = min(room, held * rate * stages.kind_seconds[s, i])
    return room
