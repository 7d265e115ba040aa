"""A time that the plan of an allocation cannot beat, whatever decode makes of routes, windows, packing and local steps.

The layer split and the memory options of an allocation (`polygon.planning.layer_split`) depend on what packings owe and
on how long messages and sums then take: the floor is the least over all levels of parity that decode tries
(`Decoder.banks`). For every stage: its first micro-batch has passed the stages before, its workers end no sooner than
whole shares allow, and then the last one goes back through the stages before, or gradients are reduced, whatever takes
longer. Where it is certain that no worker is left without a micro-batch (such a worker is dropped), the reduction is at
least that between the fewest nodes that can hold the stage's workers, and all regions agree on the gradient's norm
where not every worker has the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polygon.cost.convergence import allowed
from polygon.cost.reduction import LevelsRoom, least_over_trees_s, least_part, least_sum_s, levels_s
from polygon.cost.transfers import LinkArrays, boundary_values, codec_s, matrix_values, packed_bytes
from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import general, kernel
from polygon.planning.decode import Decoder
from polygon.planning.flow import lock_shares
from polygon.planning.fluid import CUTS, fluid_step_s
from polygon.planning.fluid_work import FluidWork, work_for
from polygon.planning.layer_split import gradient_bytes, part_at_end, passing_s, sends_in_passing, whole_makespan_s
from polygon.planning.link_compression import pays_inside
from polygon.planning.problem_arrays import BLOCKS, RECOMPUTED, ZERO, Bank
from polygon.planning.stage_lists import Stages, gather_stages

SLACK = 1e-5
"""Relative precision of `whole_makespan_s`, and more."""


class Limits(NamedTuple):
    """What packing and places allow at best; c classes, d regions."""

    message_s: np.ndarray
    """(c, c) least seconds of a message from a worker of one class to another; inf without a link."""
    gradient_ratio: float
    """Least bytes of packed gradients over plain ones."""
    codec_s: float
    """Most seconds of packing and unpacking in a worker's backward."""
    tied_s: np.ndarray
    """(c, c) least seconds to exchange the gradient of tied embeddings; zeros if they are not tied or summed once."""
    tied_ratio: float
    """As `gradient_ratio`, of a tied weight."""
    update_s_per_parameter: np.ndarray
    """(c,) without the start of kernels."""
    inside: float
    """Least part of an all-reduce that is seen (`polygon.cost.reduction.least_part`)."""
    packs_inside: bool
    """Whether the search packs gradients inside regions (`polygon.planning.link_compression.pays_inside`)."""
    whole: bool
    """Whether a packing may be chosen under which regions send one another whole gradients in one round."""
    agree_s: np.ndarray
    """(d, d) latency of linked pairs of regions, 0 of others."""
    local_steps: int


@gives_pointed
def limits_of(decoder: Decoder, micro_batch_size: int) -> Limits:
    """What no packing, place and number of local steps that a problem allows can better."""
    problem, tables, classes = decoder.problem, decoder.tables, decoder.classes
    cluster, batch, links = problem.cluster, problem.batch, tables.links
    may = allowed(problem)
    values = boundary_values(problem.model, batch, micro_batch_size)
    modes = {"none", *may.activations, *may.activation_gradients}
    wire = min(packed_bytes(values, batch.element_bytes, mode) for mode in modes)
    matrix = matrix_values(problem.model)
    packings = {"none", *may.weight_gradients}
    ratio = min(packed_bytes(matrix, batch.gradient_bytes, mode, matrix) for mode in packings)
    rate = min(cluster.pools[p].device.memory_bytes_per_s for p, _ in classes)
    tied, n = problem.model.tied_values, len(classes)
    wires = [
        packed_bytes(max(tied, 1), batch.gradient_bytes, mode, size) for mode in packings for size in (matrix, None)
    ]
    message_s, tied_s = np.full((n, n), np.inf), np.full((n, n), np.inf)
    with np.errstate(divide="ignore"):
        for i, (a, _) in enumerate(classes):
            for j, (b, _) in enumerate(classes):
                message_s[i, j] = links.latency_s[a, b] + wire / links.bytes_per_s[a, b]
                degree = max(classes[i][1], classes[j][1])
                if a == b and cluster.pools[a].devices_per_node > 1:
                    node_s = links.node_latency_s[a] + wire / degree / links.node_bytes_per_s[a]
                    message_s[i, j] = min(message_s[i, j], node_s)
                    tied_s[i, j] = links.node_latency_s[a] + tied * batch.gradient_bytes / (
                        degree * links.node_bytes_per_s[a]
                    )
                if links.bytes_per_s[a, b] > 0:
                    way_s = links.latency_s[a, b] + min(wires) / links.bytes_per_s[a, b]
                    tied_s[i, j] = min(tied_s[i, j], way_s)
    return Limits(
        message_s=message_s,
        gradient_ratio=ratio / (matrix * batch.gradient_bytes),
        codec_s=max(sum(codec_s(values, batch.element_bytes, mode, rate)) for mode in modes),
        tied_s=np.zeros((n, n)) if problem.runtime.tied_once or not tied else tied_s,
        tied_ratio=min(wires) / (max(tied, 1) * batch.gradient_bytes),
        update_s_per_parameter=np.array(
            [(tables.update_s(p, 2e6) - tables.update_s(p, 1e6)) / 1e6 for p, _ in classes]
        ),
        inside=least_part(problem.runtime, batch),
        packs_inside=any(pays_inside(tables, mode).any() for mode in packings),
        whole="powersgd" in packings,
        agree_s=np.where(cluster.bytes_per_s > 0, cluster.latency_s, 0.0) * (1 - np.eye(len(cluster.regions))),
        local_steps=max(may.local_steps),
    )


@general
def all_busy(bank: Bank, stages: Stages, n: int, seconds: np.ndarray) -> bool:
    """Whether every worker of every stage certainly gets a micro-batch, with regions keeping their share or not."""
    rates = np.zeros((n, bank.activation_wire.shape[0]))
    slowest = np.zeros_like(rates)
    for s in range(n):
        for i in range(stages.members[s]):
            r = bank.region[stages.classes[s, i]]
            rates[s, r] += stages.counts[s, i] / seconds[s, i]
            slowest[s, r] = max(slowest[s, r], seconds[s, i])
    share = np.zeros_like(rates)
    lock_shares(rates, n, True, share)
    for s in range(n):
        if bank.micro_batches / rates[s].sum() < slowest[s].max():
            return False
        for r in range(rates.shape[1]):
            if rates[s, r] > 0 and np.floor(share[s, r] * bank.micro_batches) / rates[s, r] < slowest[s, r]:
                return False
    return True


@kernel
def _least_across_s(
    count: int, pools: np.ndarray, wire_bytes: float, links: LinkArrays, room: LevelsRoom
) -> tuple[float, float]:
    """Least seconds of a sum between regions over any trees, and of its latency; inf where there are not three regions.

    The formulas are those of `polygon.bounds.region_sums`, for each region beside the others and all by themselves.

    Parameters
    ----------
    count, pools
        As in `levels_s`, which has filled `room`.
    """
    found = 0
    for i in range(count):
        if i == 0 or links.region[pools[i]] != links.region[pools[i - 1]]:
            found += 1
    if found < 3:
        return np.inf, np.inf
    near_s, way_s, each, total = np.inf, np.inf, np.inf, 0.0
    for r in range(found):
        pr, sends, comes_s, goes_s = pools[room.first[r]], 0.0, 0.0, 0.0
        for a in range(found):
            if a == r:
                continue
            pa = pools[room.first[a]]
            near_s = min(near_s, links.latency_s[pr, pa])
            rate = min(links.bytes_per_s[pr, pa], links.bytes_per_s[pa, pr]) * room.leaders[r] * room.leaders[a]
            ra, rr = links.region[pa], links.region[pr]
            sends += min(rate, links.capacity_bytes_per_s[rr, ra], links.capacity_bytes_per_s[ra, rr])
            to_s, from_s = np.inf, np.inf
            for k in range(found):
                pk = pools[room.first[k]]
                to_s = min(to_s, _link_s(pa, pk, links) + _link_s(pk, pr, links))
                from_s = min(from_s, _link_s(pr, pk, links) + _link_s(pk, pa, links))
            comes_s, goes_s = max(comes_s, to_s), max(goes_s, from_s)
        way_s = min(way_s, comes_s + goes_s)
        sends = min(sends, links.egress_bytes_per_s[links.region[pr]], links.card_bytes_per_s[pr] * room.leaders[r])
        each, total = min(each, sends), total + sends
    if each <= 0:
        return np.inf, way_s
    return max(way_s, near_s + least_over_trees_s(wire_bytes, found, total, each)), way_s


@kernel
def _link_s(a: int, b: int, links: LinkArrays) -> float:
    """Latency of the link between regions of two pools; 0 of one region."""
    if a == b:
        return 0.0
    return float(links.latency_s[a, b]) if links.bytes_per_s[a, b] > 0 else np.inf


@general
def reduction_floor_s(
    bank: Bank,
    limits: Limits,
    classes: np.ndarray,
    counts: np.ndarray,
    members: int,
    values: float,
    ratio: float,
    trees: bool,
    room: LevelsRoom,
) -> tuple[float, float, float]:
    """Least seconds of a reduction inside regions, between them, and the latency in the latter.

    All workers of these classes take part; `ratio` is what packing leaves of the gradient at least, and `trees` whether
    three regions or more may sum over some.
    """
    if members == 1 and counts[0] * bank.cp == 1:
        return 0.0, 0.0, 0.0
    n_bytes = values * bank.gradient_bytes
    pools, fewest, most = np.empty(members, np.int64), np.empty(members, np.int64), np.empty(members, np.int64)
    used = 0
    for i in range(members):
        c = classes[i]
        devices = counts[i] * bank.tp[c] * bank.cp
        per_node = bank.devices_per_node[c]
        if used == 0 or pools[used - 1] != bank.pool[c]:
            pools[used], fewest[used], most[used] = bank.pool[c], 0, 0
            used += 1
        # Devices of one pool in several classes share its nodes.
        fewest[used - 1] = max(fewest[used - 1], (devices + per_node - 1) // per_node)
        most[used - 1] = min(bank.nodes[c], most[used - 1] + counts[i])
    regions = bank.activation_wire.shape[0]
    ones, none = np.ones((regions, regions)), np.zeros(regions, dtype=np.bool_)
    alone = np.ones(used, dtype=np.int64)
    wire = n_bytes * ratio
    room.ideal[0] = True  # with fewer nodes than these, turns and messages may be others
    _, _, across_s, far_s, _ = levels_s(
        n_bytes, 0.0, 1, used, pools, most, alone, alone, wire, ones, none, bank.links, limits.whole, 0.0, 1.0, room
    )
    room.ideal[0] = False
    if trees:
        over_s, way_s = _least_across_s(used, pools, wire, bank.links, room)
        across_s, far_s = min(across_s, over_s), min(far_s, way_s)
    inside_s, card, latency_s = 0.0, 0.0, np.inf
    nodes, several, apart, packed = 0, 0, 0, np.inf
    for i in range(used):
        inside_s = max(inside_s, limits.inside * least_sum_s(n_bytes, fewest[i], pools[i], bank.links))
        card = max(card, bank.links.card_bytes_per_s[pools[i]])
        for k in range(used):
            if i != k or most[i] > 1:
                latency_s = min(latency_s, bank.links.latency_s[pools[i], pools[k]])
        nodes, several = nodes + fewest[i], several + most[i]
        if i + 1 == used or bank.links.region[pools[i + 1]] != bank.links.region[pools[i]]:
            apart, packed = apart + 1, min(packed, max(nodes, 2) if several > 1 else np.inf)
            nodes, several = 0, 0
    if limits.packs_inside and packed < np.inf:
        # In some region all nodes, in others their leaders, send one another packed parts over their cards, at once.
        total = packed + apart - 1
        packed_s = latency_s + 2 * (total - 1) / total * wire / card
        across_s, far_s = min(across_s, packed_s), min(far_s, latency_s)
        inside_s = min(inside_s, packed_s - across_s)
    return inside_s, across_s, far_s


@general
def _tied_floor_s(bank: Bank, limits: Limits, stages: Stages, last: int, room: LevelsRoom) -> float:
    """Least seconds of the sum of tied embeddings over the workers of both stages."""
    classes, counts, used = np.empty(len(bank.pool), np.int64), np.empty(len(bank.pool), np.int64), 0
    for c in range(len(bank.pool)):
        count = 0
        for s in (0, last):
            for i in range(stages.members[s]):
                count += stages.counts[s, i] if stages.classes[s, i] == c else 0
        if count > 0:
            classes[used], counts[used] = c, count
            used += 1
    inside, across, _ = reduction_floor_s(
        bank, limits, classes, counts, used, bank.tied_values, limits.tied_ratio, False, room
    )
    # With local steps regions that hold both copies meet seldom.
    return inside + (across if limits.local_steps == 1 else 0.0)


@general
def floor_s(bank: Bank, limits: Limits, x: np.ndarray, work: FluidWork) -> float:
    """Seconds that no plan decoded from an allocation can beat, by any cut of its layers; inf where it has none.

    Parameters
    ----------
    x : ndarray of int64, shape (stages, classes)
        Without empty rows.
    work : Work
        Of `work_for` the rows of x.
    """
    floor = np.inf
    for cut in CUTS:
        floor = min(floor, _cut_floor_s(bank, limits, x, work, cut))
    return floor


@general
def _cut_floor_s(bank: Bank, limits: Limits, x: np.ndarray, work: FluidWork, cut: int) -> float:
    """`floor_s` for one cut of the layers."""
    rows, layers = x.shape[0], bank.parameters.shape[1] - 1
    bounds, options = np.zeros(rows + 1, dtype=np.int64), np.zeros((3, rows), dtype=np.int64)
    value, _ = fluid_step_s(bank, x, bounds, options, np.zeros(3, dtype=np.int64), work, cut)
    if not np.isfinite(value):
        return np.inf
    stages = work.stages
    n = gather_stages(x, stages, bank.cp)  # of what was tried last some may have been left out
    classes, counts, members = stages.classes, stages.counts, stages.members
    forward, backward = np.zeros(x.shape), np.zeros(x.shape)
    if bank.tied_values > 0 and min(options[ZERO, 0], options[ZERO, n - 1]) > 0:  # decode may divide both ends alike
        options[ZERO, 0] = options[ZERO, n - 1] = max(options[ZERO, 0], options[ZERO, n - 1])
    for s in range(n):
        r, blocks = options[RECOMPUTED, s], options[BLOCKS, s]
        for i in range(members[s]):
            forward[s, i], backward[s, i] = passing_s(
                bank, classes[s, i], r, blocks, bounds[s], bounds[s + 1], options[ZERO, s]
            )
    seconds = forward + backward
    busy = all_busy(bank, stages, n, seconds)
    for s in range(n):  # such traffic, of which some have more than others, is no part of these seconds
        busy = busy and not sends_in_passing(bank, options[ZERO, s])
    agree = 0.0
    everywhere = n == 1 and options[ZERO, 0] < 2
    for i in range(members[0]):
        everywhere = everywhere and bank.tp[classes[0, i]] == 1
    if busy and limits.local_steps == 1 and not everywhere:
        for s in range(n):
            for t in range(n):
                for i in range(members[s]):
                    for j in range(members[t]):
                        agree = max(agree, limits.agree_s[bank.region[classes[s, i]], bank.region[classes[t, j]]])
    tied, trees = 0.0, bank.links.sum_trees and bank.ep == 1
    if n > 1:
        tied = np.inf
        for i in range(members[0]):
            for j in range(members[n - 1]):
                tied = min(tied, limits.tied_s[classes[0, i], classes[n - 1, j]])
        if bank.tied_once and bank.tied_values > 0 and busy:
            tied = _tied_floor_s(bank, limits, stages, n - 1, work.levels)
    begins, back, floor = 0.0, 0.0, 0.0
    for s in range(n):
        a, b, k = bounds[s], bounds[s + 1], members[s]
        if s > 0:
            message = np.inf
            for i in range(members[s - 1]):
                for j in range(k):
                    message = min(message, limits.message_s[classes[s - 1, i], classes[s, j]])
            begins += message
            back += message
        values, update = 0.0, np.inf
        for i in range(k):
            c = classes[s, i]
            here = bank.parameters[c, b] - bank.parameters[c, a]
            if a > 0 and b == layers:
                here += bank.tied[c]
            values = max(values, gradient_bytes(bank, c, a, b) / bank.gradient_bytes) if busy else 0.0
            shards = counts[s, i] * bank.cp if options[ZERO, s] > 0 else 1
            update = min(update, here / shards * limits.update_s_per_parameter[c])
        inside, across, far = 0.0, 0.0, 0.0
        if busy:
            inside, across, far = reduction_floor_s(
                bank, limits, classes[s], counts[s], k, values, limits.gradient_ratio, trees, work.levels
            )
        hidden = (backward[s, :k].max() + limits.codec_s) * (b - a - 1) / (b - a)
        part = 1.0
        for i in range(k):
            part = min(part, part_at_end(bank, classes[s, i], a, b))
        reduced = far + (inside + across - far) * part
        if options[ZERO, s] < 2:  # else backward has traffic of its own and may hide all the rest
            reduced = max(reduced, max(inside, across) - hidden)
        if across > 0 and limits.local_steps > 1:
            reduced = min(reduced, max(inside, across) / limits.local_steps)
        if everywhere and across > 0:  # regions lead by turns, and nobody waits for the longest way in every step
            reduced = 0.0
        whole = whole_makespan_s(counts[s], seconds[s], k, bank.micro_batches) * (1 - SLACK)
        at_end = tied if s == 0 or s == n - 1 else 0.0
        floor = max(floor, begins + whole + max(reduced + at_end + update, back + (tied if s > 0 else 0.0)))
        begins += forward[s, :k].min()
        back += backward[s, :k].min()
    return (floor + agree) * (1 - SLACK)


@general
def _floors_s(bank: Bank, limits: Limits, xs: np.ndarray, out: np.ndarray, work: FluidWork) -> None:
    for k in range(xs.shape[0]):
        out[k] = floor_s(bank, limits, xs[k].astype(np.int64), work)


def floors_s(banks: Sequence[Bank], limits: Limits, xs: np.ndarray) -> np.ndarray:
    """`floor_s` of many allocations, each the least of what it is in several banks.

    Parameters
    ----------
    banks
        Of `Decoder.banks`: what a packing owes decides how layers are cut and recomputed, and decode takes the best.
    xs : ndarray of integers, shape (allocations, stages, classes)
        Without empty rows.

    Returns
    -------
    ndarray, shape (allocations,)
    """
    least, out = np.full(len(xs), np.inf), np.empty(len(xs))
    for bank in banks:
        _floors_s(bank, limits, xs, out, work_for(bank, xs.shape[1]))
        np.minimum(least, out, out=least)
    return least
