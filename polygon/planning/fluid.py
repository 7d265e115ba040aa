"""The step time of an allocation without dealing out routes: the objective of the search.

Micro-batches are taken as a flow. For stages with workers of seconds t[c] per micro-batch (forward and backward), an
allocation's step takes about

    T = max_b (makespan_b - t_b) + sum_s t_s + 2 sum_s message_s,   then reduction and update,

where t_s and message_s are those of the slowest worker and the slowest way (all wait for them, because the order of
micro-batches is fixed), and makespan_b is the longest of: the least time in which stage b's workers finish all
micro-batches in whole shares; the time in which a link carries all of its messages; and what Little's law asks where
memory lets only a few micro-batches be in flight behind a stage.

The layer split is exact (`polygon.planning.layer_split`): the least makespan over all ways to cut the layers, each
stage with the fastest recomputation and ZeRO option that fits its memory. The exact simulation of the decoded plan
(`polygon.cost.schedule`) decides between the best candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.reduction import LevelsRoom, levels_room, levels_s
from polygon.kernel_options import inner, kernel
from polygon.planning.bank import Bank
from polygon.planning.flow import Places, boundary_s, find_places, lock_shares, places_for
from polygon.planning.layer_split import in_flight_estimate, kinds_makespan_s, room_in_flight, split_layers
from polygon.planning.stage_lists import Stages, gather_stages, merge_kinds, stages_for

FITS, NO_MEMORY, NO_LINK, NO_STAGE, TOO_FEW_MICRO_BATCHES = 0, 1, 2, 3, 4
REASONS = {
    NO_MEMORY: "no split of the layers fits the memory of its stages",
    NO_LINK: "two neighbouring stages, or two members of one stage, have no link",
    NO_STAGE: "there is no stage, or there are more stages than layers",
    TOO_FEW_MICRO_BATCHES: "a stage has more workers than there are micro-batches",
}


class Work(NamedTuple):
    """Room in which `fluid_step_s` works; of what it leaves there, only the lists by class of `stages` are of use."""

    stages: Stages
    places: Places
    trial: np.ndarray
    """(rows + 1,)."""
    passing: np.ndarray
    message: np.ndarray
    """(rows,) seconds of a stage's slowest worker, and of the slowest way to the next stage, for a micro-batch."""
    pools: np.ndarray
    nodes: np.ndarray
    on_node: np.ndarray
    """(classes,) of one stage, as in `levels_s`."""
    wire_bytes: np.ndarray
    pair_share: np.ndarray
    """(regions, regions), as in `levels_s`."""
    levels: LevelsRoom


def work_for(rows: int, classes: int, regions: int) -> Work:
    """Room for allocations of a shape."""
    return Work(
        stages=stages_for(rows, classes),
        places=places_for(rows, regions),
        trial=np.zeros(rows + 1, dtype=np.int64),
        passing=np.zeros(rows),
        message=np.zeros(rows),
        pools=np.zeros(classes, dtype=np.int64),
        nodes=np.zeros(classes, dtype=np.int64),
        on_node=np.zeros(classes, dtype=np.int64),
        wire_bytes=np.zeros((regions, regions)),
        pair_share=np.zeros((regions, regions)),
        levels=levels_room(classes, regions),
    )


@kernel
def fluid_step_s(
    bank: Bank, x: np.ndarray, bounds: np.ndarray, options: np.ndarray, stages_out: np.ndarray, work: Work
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
    work : Work
        Of `work_for` the shape of x.
    """
    stages = work.stages
    n = gather_stages(x, stages)
    stages_out[0] = n
    layers = bank.parameters.shape[1] - 1
    if n == 0 or n > layers:
        return np.inf, NO_STAGE
    merge_kinds(bank, stages, n)
    window = 0
    for s in range(n - 1, -1, -1):
        width = 0
        for i in range(stages.kind_members[s]):
            width += stages.kind_counts[s, i]
        if width > bank.micro_batches:
            return np.inf, TOO_FEW_MICRO_BATCHES
        window = min(bank.micro_batches, window + width)
        in_flight_estimate(bank, stages, s, window)
    if split_layers(bank, stages, n, work.trial, bounds, options) == np.inf:
        return np.inf, NO_MEMORY
    ways = 1
    for s in range(n):
        for i in range(stages.members[s]):
            at = 0
            while stages.kinds[s, at] != bank.kind[stages.classes[s, i]]:
                at += 1
            stages.seconds[s, i] = stages.kind_seconds[s, at]
            if n > 1 and bank.region[stages.classes[s, i]] != bank.region[stages.classes[s, 0]]:
                ways = 2
    find_places(bank, stages, n, work.places)
    best = np.inf
    for way in range(ways):
        end = _pipeline_s(bank, work, n, bounds, options, way == 1)
        local_steps = bank.local_steps if way + 1 == ways else 1
        value, steps = _with_reductions(bank, work, n, bounds, options, end, local_steps)
        if value < best or way == 0:
            best = value
            stages_out[1], stages_out[2] = way, steps
    return best, FITS if best < np.inf else NO_LINK


@inner
def _pipeline_s(bank: Bank, work: Work, n: int, bounds: np.ndarray, options: np.ndarray, locked: bool) -> float:
    """When stage 0 of n ends its last backward; inf where a link is missing. Fills `passing` and `message`.

    Parameters
    ----------
    locked : bool
        See `lock_shares`.
    """
    stages, places = work.stages, work.places
    micro_batches = bank.micro_batches
    lock_shares(places.rates, n, locked, places.share)
    bottleneck, link_bound = 0.0, 0.0
    for s in range(n):
        slowest, fastest = 0.0, np.inf
        for i in range(stages.kind_members[s]):
            slowest = max(slowest, stages.kind_seconds[s, i])
            fastest = min(fastest, stages.kind_seconds[s, i])
        makespan = kinds_makespan_s(bank, stages, s)
        if locked:
            for r in range(places.rates.shape[1]):
                if places.share[s, r] > 0:
                    makespan = max(makespan, micro_batches * places.share[s, r] / places.rates[s, r])
        bottleneck = max(bottleneck, makespan - fastest)
        message = 0.0
        if s + 1 < n:
            message, fullest = boundary_s(bank, places, s)
            if message == np.inf:
                return np.inf
            link_bound = max(link_bound, fullest)
        work.passing[s], work.message[s] = slowest, message
    fill = 0.0
    for s in range(n - 1, -1, -1):
        fill += work.passing[s] + 2 * work.message[s]
        room = room_in_flight(bank, stages, s, bounds[s], bounds[s + 1], options[s])
        if room < micro_batches:
            # Little's law: no more than `room` micro-batches are between their forward and backward of this stage.
            bottleneck = max(bottleneck, (micro_batches - room) * fill / room)
    return max(bottleneck, link_bound) + fill


@inner
def _with_reductions(
    bank: Bank, work: Work, n: int, bounds: np.ndarray, options: np.ndarray, end: float, local_steps: int
) -> tuple[float, int]:
    """When the last of n stages has reduced and updated (inf without a link), and the local steps.

    `end` is when stage 0 ends its last backward. With more than one of `local_steps` also where every region reduces by
    itself and all meet once in so many steps, if each holds a whole pipeline with workers of one degree and whole
    weights in a stage; the shorter of both counts.
    """
    stages, workers = work.stages, work.places.workers
    regions = bank.activation_wire.shape[0]
    layers = bank.parameters.shape[1] - 1
    for a in range(regions):
        for b in range(regions):
            together = 0.0
            for s in range(n):
                if workers[s, a] > 0 and workers[s, b] > 0:
                    together += 1.0
            work.pair_share[a, b] = together
    for s in range(n):
        if bank.option_zero[options[s]] == 3:
            local_steps = 1
        for i in range(stages.members[s]):
            if bank.tp[stages.classes[s, i]] != bank.tp[stages.classes[s, 0]]:
                local_steps = 1
        for r in range(regions):
            if (workers[s, r] > 0) != (workers[0, r] > 0):
                local_steps = 1
    step, early, local_step, outer = 0.0, 0.0, 0.0, 0.0
    for s in range(n):
        m = stages.members[s]
        n_values, update = 0.0, 0.0
        for i in range(m):
            c, count = stages.classes[s, i], stages.counts[s, i]
            here = bank.parameters[c, bounds[s + 1]] - bank.parameters[c, bounds[s]]
            if s > 0 and bounds[s + 1] == layers:
                here += bank.tied[c]
            n_values = max(n_values, here * bank.tp[c])
            shards = count if bank.option_zero[options[s]] > 0 else 1
            update = max(update, here / shards * bank.update_s_per_parameter[c])
            per_node = max(1, bank.devices_per_node[c] // bank.tp[c])
            work.pools[i] = bank.pool[c]
            work.nodes[i] = (count + per_node - 1) // per_node
            work.on_node[i] = min(count, per_node)
        reduction, inside, far = 0.0, 0.0, 0.0
        if m > 1 or stages.counts[s, 0] > 1:
            n_bytes = n_values * bank.gradient_bytes
            for a in range(regions):
                for b in range(regions):
                    work.wire_bytes[a, b] = n_bytes * bank.gradient_ratio[a, b]
            node_s, region_s, across_s, far = levels_s(
                n_bytes,
                m,
                work.pools,
                work.nodes,
                work.on_node,
                work.wire_bytes,
                work.pair_share,
                bank.pool_region,
                bank.latency_s,
                bank.bytes_per_s,
                bank.node_latency_s,
                bank.node_bytes_per_s,
                bank.capacity_bytes_per_s,
                False,
                work.levels,
            )
            reduction, inside = node_s + region_s + across_s, node_s + region_s
            if not reduction < np.inf:
                return np.inf, 1
        tied = 0.0
        if bank.tied_values > 0 and n > 1 and (s == 0 or s == n - 1):
            tied = _tied_s(bank, stages, n - 1)
            if tied == np.inf:
                return np.inf, 1
        # Backward is about two thirds of passing a stage; layers are reduced while it runs.
        backward = work.passing[s] * 2 / 3
        depth = bounds[s + 1] - bounds[s]
        exposed = max(far + (reduction - far) / depth, reduction - backward * (depth - 1) / depth)
        step = max(step, end - early + exposed + tied + update)
        exposed = max(inside / depth, inside - backward * (depth - 1) / depth)
        local_step = max(local_step, end - early + exposed + tied + update)
        outer = max(outer, reduction)
        early += backward + work.message[s]
    step += _norm_s(bank, work, n, options)
    local_step += outer / local_steps
    if local_steps > 1 and local_step < step:
        return local_step, local_steps
    return step, 1


@inner
def _norm_s(bank: Bank, work: Work, n: int, options: np.ndarray) -> float:
    """Seconds to agree on the gradient's norm, as `step_times.gradient_norm_s` prices it."""
    stages, workers = work.stages, work.places.workers
    everywhere = n == 1 and bank.option_zero[options[0]] < 2
    for i in range(stages.members[0]):
        everywhere = everywhere and bank.tp[stages.classes[0, i]] == 1
    if everywhere:
        return 0.0
    longest = 0.0
    for a in range(workers.shape[1]):
        for b in range(workers.shape[1]):
            linked = a != b and bank.bytes_per_s[bank.stands[a], bank.stands[b]] > 0
            if linked and workers[:n, a].sum() > 0 and workers[:n, b].sum() > 0:
                longest = max(longest, bank.latency_s[bank.stands[a], bank.stands[b]])
    return longest


@inner
def _tied_s(bank: Bank, stages: Stages, last: int) -> float:
    """Seconds to exchange the gradient of tied embeddings between first and last stage, over their best link."""
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
