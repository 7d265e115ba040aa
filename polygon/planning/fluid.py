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

import numpy as np
from numba import njit

from polygon.cost.reduction import levels_s
from polygon.kernels import inner
from polygon.planning.bank import Bank
from polygon.planning.flow import boundary_s, lock_shares
from polygon.planning.layer_split import in_flight_estimate, room_in_flight, split_layers, whole_makespan_s
from polygon.planning.stage_lists import Stages, gather_stages, merge_kinds

FITS, NO_MEMORY, NO_LINK, NO_STAGE, TOO_FEW_MICRO_BATCHES = 0, 1, 2, 3, 4
REASONS = {
    NO_MEMORY: "no split of the layers fits the memory of its stages",
    NO_LINK: "two neighbouring stages, or two members of one stage, have no link",
    NO_STAGE: "there is no stage, or there are more stages than layers",
    TOO_FEW_MICRO_BATCHES: "a stage has more workers than there are micro-batches",
}


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
            message[s], fullest = boundary_s(bank, stages, s, share, stands)
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
