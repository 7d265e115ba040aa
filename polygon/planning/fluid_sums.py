"""Sums of gradients and updates of an allocation whose layers are cut: a part of the relaxed step of
`polygon.planning.fluid`, priced as in plans (`polygon.cost.stage_reduction`, `polygon.cost.step_times`)."""

from __future__ import annotations

import numpy as np

from polygon.cost.overlap import gathered_s, seen_parts, summed_s, sums_in_step
from polygon.cost.reduction import copies_s, levels_s, streamed_s, unpackings
from polygon.jit.compilation import inner
from polygon.planning.fluid_pipeline import find_ends
from polygon.planning.fluid_work import FluidWork
from polygon.planning.layer_split import gradient_bytes, held_most, held_parameters, part_at_end, spread_bytes
from polygon.planning.node_sharing import (
    NONE,
    beside,
    cards_free_s,
    common_nodes,
    find_sums,
    least_on_node,
    pairs_free_s,
)
from polygon.planning.problem_arrays import ZERO, Bank
from polygon.planning.stage_lists import kind_at


@inner
def price_reductions(bank: Bank, work: FluidWork, n: int, bounds: np.ndarray, options: np.ndarray) -> float:
    """Price the reductions and updates of n stages, each by itself: fills `reduction`.

    Returns the seconds in which all regions agree on the gradient's norm; inf where a link is missing.
    """
    stages, of = work.stages, work.reduction
    nodes = work.places.nodes
    regions = work.places.region[: work.places.regions[0]]
    for a in regions:
        for b in regions:
            together = 0.0
            for s in range(n):
                if nodes[s, a] > 0 and nodes[s, b] > 0:
                    together += 1.0
            work.pair_share[a, b] = together
    _find_packing(bank, work, n, bounds, options)
    tied, tied_inside = 0.0, 0.0
    if bank.tied_values > 0 and n > 1:
        tied, tied_inside = _tied_s(bank, work, n - 1)
    for s in range(n):
        m = stages.members[s]
        of.n_bytes[s], of.spread_bytes[s], update = 0.0, 0.0, 0.0
        for i in range(m):
            c, count = stages.classes[s, i], stages.counts[s, i]
            here = held_parameters(bank, bank.parameters, c, bounds[s], bounds[s + 1])
            of.n_bytes[s] = max(of.n_bytes[s], gradient_bytes(bank, c, bounds[s], bounds[s + 1]))
            of.spread_bytes[s] = max(of.spread_bytes[s], spread_bytes(bank, c, bounds[s], bounds[s + 1]))
            if options[ZERO, s] > 0:
                here = held_parameters(bank, bank.divided, c, bounds[s], bounds[s + 1]) / (count * bank.cp)
            update = max(update, here * bank.update_s_per_parameter[c])
        of.update[s] = update
        of.tied[s], of.tied_inside[s] = (tied, tied_inside) if s == 0 or s == n - 1 else (0.0, 0.0)
        of.whole[s], of.last[s], of.inside[s], of.inside_last[s], of.tree_s[s] = 0.0, 0.0, 0.0, 0.0, 0.0
        more = (bank.ep - 1) * of.spread_bytes[s]
        of.card_bytes[s] = (of.n_bytes[s] + more) * _summed_part(bank, options[ZERO, s])
        of.wire_bytes[s] = (of.n_bytes[s] + more) * (1.0 if stages.plain[0] else bank.packed_ratio)
        for a in regions:
            work.packed[s, a] = False
        if of.n_bytes[s] > 0 and (m > 1 or stages.counts[s, 0] * bank.cp > 1):
            packs = False
            for a in regions:
                packs = packs or (nodes[s, a] > 1 and work.packs[a])
            part = part_at_end(bank, stages.classes[s, 0], bounds[s], bounds[s + 1])
            depth = float(bounds[s + 1] - bounds[s])
            _, last = seen_parts(depth, part, bank.overlap)
            gather_s = _find_sum(bank, work, s, depth, options[ZERO, s], last, work.apart)
            of.tree_s[s] = work.levels.tree_s[0]
            if packs:  # where nodes send one another packed gradients, if that is sooner
                whole, ended = of.whole[s], of.last[s]
                inside, inside_ended = of.inside[s], of.inside_last[s]
                packed_gather_s = _find_sum(bank, work, s, depth, options[ZERO, s], last, work.packs)
                if of.whole[s] < whole:
                    gather_s, of.tree_s[s] = packed_gather_s, work.levels.tree_s[0]
                    for a in regions:
                        work.packed[s, a] = work.packs[a]
                else:
                    of.whole[s], of.last[s], of.inside[s], of.inside_last[s] = whole, ended, inside, inside_ended
            if gather_s > 0:
                of.update[s] += gathered_s(gather_s, stages.kind_seconds[s, 0] / 3, bank.overlap)
        if not of.whole[s] + of.tied[s] < np.inf:
            return np.inf
    return _norm_s(bank, work, n, options)


@inner
def _find_packing(bank: Bank, work: FluidWork, n: int, bounds: np.ndarray, options: np.ndarray) -> None:
    """Fill `packs`: regions whose nodes may send one another packed gradients, as `link_compression.settled` has them.

    ZeRO then divides inside nodes, and each keeps what packing owes of all its gradients: workers must hold that much.
    Regions that add up together pack together.
    """
    stages, nodes, packs = work.stages, work.places.nodes, work.packs
    regions, changed = nodes.shape[1], False
    for a in range(regions):
        packs[a] = bank.packs_inside[a] and not stages.plain[0]
    for s in range(n):
        plain = False
        for i in range(stages.members[s]):
            a = bank.region[stages.classes[s, i]]
            if packs[a] and nodes[s, a] > 1 and not plain:
                k, near = kind_at(bank, stages, s, stages.classes[s, i]), least_on_node(work.hosts, s, a) * bank.cp
                owed, tied = stages.owed_bytes[s, k], stages.tied_owed_bytes[s, k]
                stages.owed_bytes[s, k], stages.tied_owed_bytes[s, k] = bank.owed_bytes, bank.owed_bytes
                plain = held_most(bank, stages, s, k, near, bounds[s], bounds[s + 1], options) < stages.held[s, k]
                stages.owed_bytes[s, k], stages.tied_owed_bytes[s, k] = owed, tied
        for a in range(regions if plain else 0):
            changed = changed or (packs[a] and nodes[s, a] > 0)
            packs[a] = packs[a] and nodes[s, a] == 0
    while changed:
        changed = False
        for s in range(n):
            plain = False
            for a in range(regions):
                plain = plain or (nodes[s, a] > 0 and bank.packs_inside[a] and not packs[a])
            for a in range(regions if plain else 0):
                changed = changed or (packs[a] and nodes[s, a] > 0)
                packs[a] = packs[a] and nodes[s, a] == 0


@inner
def _find_rings(bank: Bank, work: FluidWork, s: int) -> int:
    """Fill `pools`, `degrees`, `near` and `ring_nodes` as `polygon.cost.stage_reduction.stage_devices` has them, and
    return how many pools there are: workers of a pool sum together, whatever their degrees, and so do parts of a
    sequence."""
    hosts, stages, rings = work.hosts, work.stages, 0
    for i in range(stages.members[s]):
        p, tp = bank.pool[stages.classes[s, i]], bank.tp[stages.classes[s, i]]
        if rings == 0 or work.pools[rings - 1] != p:
            work.pools[rings], work.degrees[rings], work.near[rings], work.ring_nodes[rings] = p, tp, 0, 0
            rings += 1
        work.degrees[rings - 1] = min(work.degrees[rings - 1], tp)
        work.near[rings - 1] = max(work.near[rings - 1], hosts.member_most[s, i])
        work.ring_nodes[rings - 1] += hosts.member_nodes[s, i]
    for k in range(rings):
        held = work.near[k] * bank.cp
        work.near[k] = min(held, max(1, int(bank.links.collective[work.pools[k], 0]) // work.degrees[k]))
        work.ring_nodes[k] = work.ring_nodes[k] * held // work.near[k]
    return rings


@inner
def _find_sum(bank: Bank, work: FluidWork, s: int, depth: float, zero: int, last: float, apart: np.ndarray) -> float:
    """Fill `whole`, `last`, `inside` and `inside_last` of a stage of so many layers; seconds to gather weights inside
    places. `last` and `apart` as in `levels_s`."""
    n_bytes, rings = work.reduction.n_bytes[s], _find_rings(bank, work, s)
    work.levels.trees[0] = bank.links.sum_trees and bank.ep == 1
    node_s, region_s, across_s, far_s, card_s = levels_s(
        n_bytes,
        work.reduction.spread_bytes[s],
        bank.ep,
        rings,
        work.pools,
        work.ring_nodes,
        work.near,
        work.degrees,
        work.reduction.wire_bytes[s],
        work.pair_share,
        apart,
        bank.links,
        False,
        last,
        sums_in_step(depth, n_bytes, bank.links.bucket_bytes, bank.overlap),
        work.levels,
    )
    across_s += _packing_s(bank, work, s, apart)
    gather_s, part, of = 0.0, _summed_part(bank, zero), work.reduction
    if zero > 0:  # half of it scatters gradients, and half gathers updated weights
        if zero < 3:
            gather_s = 0.5 * (node_s + region_s) * bank.overlap.weight_bytes / bank.overlap.gradient_bytes
        node_s, region_s = part * node_s, part * region_s
        region_s += copies_s(n_bytes, rings, work.pools, work.ring_nodes, work.degrees, apart, bank.links)
    of.whole[s] = streamed_s(node_s, region_s, across_s, far_s, card_s, last)
    of.last[s] = far_s + (node_s + region_s + across_s - far_s) * last
    of.inside[s] = streamed_s(node_s, region_s, 0.0, 0.0, 0.0, last)
    of.inside_last[s] = (node_s + region_s) * last
    return gather_s


@inner
def _summed_part(bank: Bank, zero: int) -> float:
    """As `polygon.cost.zero_sums.summed_part`."""
    if zero == 0:
        return 1.0
    return 0.0 if zero == 3 or (zero == 2 and bank.overlap.scatters) else 0.5


@inner
def _packing_s(bank: Bank, work: FluidWork, s: int, apart: np.ndarray) -> float:
    """Seconds of packing in the sum of a stage's gradients, as `polygon.cost.stage_reduction.packing_s` prices it."""
    nodes, stages = work.places.nodes, work.stages
    places, lanes = 0, 0
    for r in range(nodes.shape[1]):
        if nodes[s, r] > 0:
            here = nodes[s, r] if apart[r] else 1
            lanes = nodes[s, r] // here if places == 0 else min(lanes, nodes[s, r] // here)
            places += here
    if places == 1 or stages.plain[0]:
        return 0.0
    pack_s, unpack_s, slices = 0.0, 0.0, work.degrees[0]
    for i in range(stages.members[s]):
        c = stages.classes[s, i]
        pack_s, unpack_s = max(pack_s, bank.gradient_codec_s[0, c]), max(unpack_s, bank.gradient_codec_s[1, c])
        slices = slices if bank.tp[c] == slices else 1
    n_bytes = work.reduction.n_bytes[s] + (bank.ep - 1) * work.reduction.spread_bytes[s]
    values = n_bytes / bank.gradient_bytes / lanes / slices
    return float(values * (pack_s + unpackings(places, False) * unpack_s))


@inner
def _norm_s(bank: Bank, work: FluidWork, n: int, options: np.ndarray) -> float:
    """Seconds to agree on the gradient's norm, as `step_times.gradient_norm_s` prices it."""
    stages, used = work.stages, work.pair_share
    everywhere = n == 1 and options[ZERO, 0] < 2
    for i in range(stages.members[0]):
        everywhere = everywhere and bank.tp[stages.classes[0, i]] == 1
    if everywhere:
        return 0.0
    longest = 0.0
    regions = work.places.region[: work.places.regions[0]]
    for a in regions:
        for b in regions:
            pa, pb = bank.stands[a], bank.stands[b]
            if a != b and used[a, a] > 0 and used[b, b] > 0 and bank.links.bytes_per_s[pa, pb] > 0:
                longest = max(longest, bank.links.latency_s[pa, pb])
    return longest


@inner
def with_reductions(
    bank: Bank,
    work: FluidWork,
    n: int,
    bounds: np.ndarray,
    options: np.ndarray,
    end: float,
    local_steps: int,
    norm: float,
    shared: bool,
) -> tuple[float, int]:
    """When the last of n stages has reduced and updated, and the local steps.

    `end` is when stage 0 ends its last backward. With more than one of `local_steps` also where every region reduces by
    itself and all meet once in so many steps, if each holds a whole pipeline with workers of one degree and whole
    weights in a stage (`_may_meet_seldom`, room for the outer optimizer is kept); the shorter of both counts.

    Parameters
    ----------
    norm : float
        Seconds in which all regions agree on the gradient's norm; without it no worker waits for other stages.
    shared : bool
        Whether any node serves several stages: then they wait for one another (`polygon.planning.node_sharing`).
    """
    stages, nodes, of, pipe = work.stages, work.places.nodes, work.reduction, work.pipeline
    for s in range(n):
        if options[ZERO, s] == 3:
            local_steps = 1
    if stages.outer_bytes[0] == 0:
        local_steps = 1
    step, local_step, outer, update = 0.0, 0.0, 0.0, 0.0
    find_ends(pipe, n, end)
    for s in range(n):
        # Backward is about two thirds of passing a stage; layers are reduced while it runs on all workers, so for no
        # longer than on the quickest.
        depth = float(bounds[s + 1] - bounds[s])
        window = pipe.quickest[s] * 2 / 3
        update_s = of.update[s] if norm == 0 else 0.0
        of.tail[s] = of.tied[s] + update_s
        of.begin[s], whole = summed_s(pipe.ends[s], window, of.whole[s], of.last[s], depth, bank.overlap)
        of.late[s] = whole + of.tail[s] - end
        step = max(step, whole + of.tail[s])
        inside = summed_s(pipe.ends[s], window, of.inside[s], of.inside_last[s], depth, bank.overlap)[1]
        local_step = max(local_step, inside + of.tied_inside[s] + update_s)
        outer = max(outer, of.whole[s] + of.tied[s] - of.tied_inside[s])
        update = max(update, of.update[s])
    if shared:
        hosts, regions = work.hosts, work.places.region[: work.places.regions[0]]
        find_sums(hosts, n, nodes, work.packed, bank.links.sum_turns)
        free = cards_free_s(
            bank, hosts, n, regions, nodes, of.card_bytes, of.wire_bytes, work.packed, of.begin, of.tail
        )
        step = pairs_free_s(
            bank, hosts, n, regions, nodes, of.wire_bytes, of.tree_s, of.begin, of.tail, max(step, free)
        )
        if local_steps > 1:
            find_sums(hosts, n, nodes, work.plain, bank.links.sum_turns)
            free = cards_free_s(bank, hosts, n, regions, nodes, of.card_bytes, of.zeros, work.plain, of.begin, of.tail)
            local_step = max(local_step, free)
            outer = pairs_free_s(bank, hosts, n, regions, nodes, of.wire_bytes, of.tree_s, of.zeros, of.zeros, outer)
    if norm > 0:
        step, local_step = step + norm + update, local_step + update
    local_step += outer / local_steps
    if local_steps > 1 and local_step < step:
        return local_step, local_steps
    return step, 1


@inner
def _tied_s(bank: Bank, work: FluidWork, last: int) -> tuple[float, float]:
    """Seconds to sum the gradient of tied embeddings over first and last stage, and of these inside regions, as
    `polygon.cost.step_times.tied_embedding` prices it."""
    if not bank.tied_once:
        seconds = tied_pair_s(bank, work, last)
        return seconds, seconds
    plain, inside = tied_sum_s(bank, work, last, work.apart)
    for r in work.places.region[: work.places.regions[0]]:
        if work.packs[r]:  # where nodes send one another packed gradients, if that is sooner
            packed, packed_inside = tied_sum_s(bank, work, last, work.packs)
            return (packed, packed_inside) if packed < plain else (plain, inside)
    return plain, inside


@inner
def tied_sum_s(bank: Bank, work: FluidWork, last: int, apart: np.ndarray) -> tuple[float, float]:
    """`_tied_s` in one sum over both stages, with places as `apart` has them (of `levels_s`)."""
    stages, hosts, rings = work.stages, work.hosts, 0
    places, lanes = 0, 0
    for r in work.places.region[: work.places.regions[0]]:
        begin, nodes = rings, 0
        for s in (0, last):
            e = hosts.first[s, r]
            while e != NONE:
                other = beside(hosts, e, last - s)
                if s == 0 or other == NONE:  # a node of both counts once
                    here = hosts.workers[e] + (hosts.workers[other] if other != NONE else 0)
                    k = begin
                    while k < rings and work.pools[k] != hosts.pool[e]:
                        k += 1
                    if k == rings:
                        work.pools[k], work.near[k], work.ring_nodes[k], work.degrees[k] = hosts.pool[e], 0, 0, 0
                        rings += 1
                    work.near[k] = max(work.near[k], here * bank.cp)
                    work.ring_nodes[k] += 1
                    nodes += 1
                e = hosts.following[e]
        if nodes > 0:
            mine = nodes if apart[r] else 1
            lanes = nodes // mine if places == 0 else min(lanes, nodes // mine)
            places += mine
    pack_s, unpack_s, slices = 0.0, 0.0, bank.tp[stages.classes[0, 0]]
    for s in (0, last):
        for i in range(stages.members[s]):
            c, k = stages.classes[s, i], 0
            while work.pools[k] != bank.pool[c]:
                k += 1
            work.degrees[k] = bank.tp[c] if work.degrees[k] == 0 else min(work.degrees[k], bank.tp[c])
            pack_s, unpack_s = max(pack_s, bank.gradient_codec_s[0, c]), max(unpack_s, bank.gradient_codec_s[1, c])
            slices = slices if bank.tp[c] == slices else 1
    for k in range(rings):
        held = work.near[k]
        work.near[k] = min(held, max(1, int(bank.links.collective[work.pools[k], 0]) // work.degrees[k]))
        work.ring_nodes[k] = work.ring_nodes[k] * held // work.near[k]
    n_bytes = bank.tied_values * bank.gradient_bytes
    work.levels.trees[0] = False  # of a weight that both ends hold every region adds up an equal part
    node_s, region_s, across_s, _, _ = levels_s(
        n_bytes,
        0.0,
        1,
        rings,
        work.pools,
        work.ring_nodes,
        work.near,
        work.degrees,
        n_bytes * (1.0 if stages.plain[0] else bank.packed_ratio),
        work.alone,
        apart,
        bank.links,
        False,
        1.0,
        1.0,
        work.levels,
    )
    if places > 1 and not stages.plain[0]:
        across_s += bank.tied_values / lanes / slices * (pack_s + unpackings(places, False) * unpack_s)
    return node_s + region_s + across_s, node_s + region_s


@inner
def tied_pair_s(bank: Bank, work: FluidWork, last: int) -> float:
    """`_tied_s` where a worker of each stage exchanges what its stage has summed: inside a node if they share one, else
    over their best link."""
    stages, hosts, packs = work.stages, work.hosts, work.packs
    best, together, least = np.inf, False, bank.tp[stages.classes[0, 0]]
    for r in range(packs.shape[0]):
        together = together or common_nodes(hosts, 0, last, r) > 0
    for i in range(stages.members[0]):
        for j in range(stages.members[last]):
            least = min(least, bank.tp[stages.classes[0, i]], bank.tp[stages.classes[last, j]])
    for i in range(stages.members[0]):
        a = stages.classes[0, i]
        p = bank.pool[a]
        if together:
            n_bytes = bank.tied_values * bank.gradient_bytes / least
            best = min(best, bank.links.node_latency_s[p] + n_bytes / bank.links.node_bytes_per_s[p])
            continue
        for j in range(stages.members[last]):
            b = stages.classes[last, j]
            rate = bank.links.bytes_per_s[p, bank.pool[b]]
            if rate > 0:
                apart = bank.region[a] != bank.region[b] or packs[bank.region[a]]
                packed = apart and not stages.plain[0]
                ratio = bank.gradient_ratio[bank.region[a], bank.region[b]] if packed else 1.0
                seconds = bank.tied_values * bank.gradient_bytes * ratio / rate
                best = min(best, bank.links.latency_s[p, bank.pool[b]] + seconds)
    return best
