"""The best cut of the layers over given stages, each with the quickest memory option that fits: kernels of the search.

A stage is a list of worker classes with their counts. Its makespan is that of whole micro-batches dealt to workers of
unequal speed; its memory depends on how many micro-batches it holds at one time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from polygon.kernels import inner
from polygon.planning.bank import Bank


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
