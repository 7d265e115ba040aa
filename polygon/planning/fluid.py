"""The step time of an allocation without dealing out routes: the objective of the search.

Micro-batches are taken as a flow. For stages with workers of seconds t[c] per micro-batch (forward and backward), an
allocation's step takes about

    T = max_b (makespan_b + sum_(s < b) (t_s + 2 message_s)),   then reduction and update.

makespan_b is the longest of: the least time in which stage b's workers finish all micro-batches in whole shares; the
same where memory lets a worker begin only a few before the first is back, and it waits for that; and what Little's law
asks where memory lets only a few micro-batches be away from a worker at one time. Workers take micro-batches in a fixed
order, so all of them that take the same way are away for as long as its slowest worker and message. Nor does a step
end before the fullest link has carried all messages and the last micro-batch has gone the rest of its way.

Sums of gradients begin as stages end: the first at T, those behind it sooner, the more so the more micro-batches memory
lets be in flight and the less they compute.

The layer split is exact (`polygon.planning.layer_split`): the least makespan over all ways to cut the layers, each
stage with the fastest recomputation and ZeRO option that fits its memory. Where memory then holds too few micro-batches
for what messages take, layers are cut once more with room for these. And where a sum of gradients ends long after the
rest, as that of a stage between regions does, they are cut with fewer layers in such stages. The best cut counts. Plans
are made of a fourth one, too, whose borders are where the step is shortest. The exact simulation of the decoded plan
(`polygon.cost.simulation`) decides between the best candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.memory import OUTER_BYTES
from polygon.cost.overlap import gathered_s, seen_parts, summed_s, sums_in_step
from polygon.cost.reduction import LevelsRoom, copies_s, levels_room, levels_s, streamed_s, unpackings
from polygon.domain.message import Message
from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import inner, kernel
from polygon.planning.flow import (
    Places,
    boundary_s,
    cards_s,
    find_flows,
    find_places,
    find_regions,
    find_trips,
    lock_shares,
    places_for,
)
from polygon.planning.layer_split import (
    gradient_bytes,
    held_most,
    held_parameters,
    in_flight_estimate,
    kinds_makespan_s,
    layers_left_over,
    part_at_end,
    split_layers,
    split_layers_under_way,
    spread_bytes,
    stage_option,
    whole_makespan_s,
    work_as_cut,
)
from polygon.planning.node_sharing import (
    NONE,
    Hosts,
    beside,
    cards_free_s,
    common_nodes,
    find_hosts,
    find_sums,
    hosts_for,
    least_on_node,
    pairs_free_s,
)
from polygon.planning.problem_arrays import ZERO, Bank
from polygon.planning.stage_lists import Stages, gather_stages, merge_kinds, stages_for, take_turn

FITS, NO_MEMORY, NO_LINK, NO_STAGE, TOO_FEW_MICRO_BATCHES = 0, 1, 2, 3, 4
REASONS = {
    NO_MEMORY: Message("reason.no_memory"),
    NO_LINK: Message("reason.no_link"),
    NO_STAGE: Message("reason.no_stage"),
    TOO_FEW_MICRO_BATCHES: Message("reason.too_few_micro_batches"),
}
NEVER_ENDS = Message("reason.never_ends")
FIRST, SECOND, THIRD, BEST, FOURTH = range(5)
"""Which cut of the layers `fluid_step_s` prices; `BEST` of the first three."""
CUTS = (FIRST, SECOND, THIRD, FOURTH)
SHORTER = 0.02
"""Part of a step by which borders that move have to make it shorter for the fourth cut to count."""
SEEN = 0.02
"""Part of a step that is to be gained from shorter sums for layers to be cut a third time."""
MOST_CAPS = 4
"""Times that half of it is tried."""

FEW_EACH = 10.0
"""Micro-batches of its slowest worker up to which a region's share is taken in whole ones."""
LONGER = 2.0
"""Times the mean of its trips that a worker waits for one at most: all wait for the slowest, if that is no rare one."""
ROUND = 8.0
"""Power of which a mean is taken of what two limits ask for that are reached at the same time."""


class Reductions(NamedTuple):
    """What every stage has to do when its backward ends: arrays of shape (rows,)."""

    whole: np.ndarray
    last: np.ndarray
    inside: np.ndarray
    inside_last: np.ndarray
    """Seconds to reduce without waiting for other stages and of what comes last of it, and those inside regions."""
    update: np.ndarray
    tied: np.ndarray
    tied_inside: np.ndarray
    """Seconds of the update, and before it of the sum of tied embeddings; of that inside regions."""
    n_bytes: np.ndarray
    spread_bytes: np.ndarray
    card_bytes: np.ndarray
    wire_bytes: np.ndarray
    """Gradient bytes of a worker, of these the experts' where workers spread them; of all experts what nodes of a
    region sum at the end of a step, and what goes from place to place."""
    begin: np.ndarray
    tail: np.ndarray
    zeros: np.ndarray
    """When it begins, seconds from its end to that of the step, and zeros for the one or the other."""
    late: np.ndarray
    """Seconds from the end of the pipeline to that of the reduction and what follows it."""


class PipelineTimes(NamedTuple):
    """Seconds of every stage, up to the sums of its gradients: arrays of shape (rows,)."""

    passing: np.ndarray
    quickest: np.ndarray
    waits: np.ndarray
    message: np.ndarray
    before: np.ndarray
    """Of a micro-batch: on a stage's slowest worker, on its quickest, what of them that waits for messages, on the
    slowest way to the next stage, and in all stages before, there and back."""
    fill: np.ndarray
    span: np.ndarray
    rest: np.ndarray
    """Until a stage's first forward; its makespan; for which links behind it carry messages before the last."""
    flight: np.ndarray
    waited: np.ndarray
    """Backwards of all that a worker holds, of whose are least; a worker that memory has wait for its first backward,
    all in all."""
    trips: np.ndarray
    ends: np.ndarray
    """From a stage's last forward to its last backward; until that ends."""


class FluidWork(NamedTuple):
    """Room in which `fluid_step_s` works; of what it leaves there, only the lists by class of `stages` are of use."""

    stages: Stages
    places: Places
    hosts: Hosts
    trial: np.ndarray
    """(rows + 1,)."""
    old_bounds: np.ndarray
    old_options: np.ndarray
    old_out: np.ndarray
    """(rows + 1,), (3, rows), (3,) what the best cut of the layers so far has led to."""
    lateness: np.ndarray
    """(2, rows) seconds from the end of the pipeline to that of a stage's sums: without them, and for each byte summed;
    for the best cut so far."""
    no_cap: np.ndarray
    most_bytes: np.ndarray
    """(rows,) inf, and gradient bytes that stages may have when layers are cut a third time."""
    pipeline: PipelineTimes
    away_s: np.ndarray
    limits_s: np.ndarray
    """Without and with shares kept along the stages: (2, rows) seconds that a micro-batch is under way behind each
    stage, there and back; (2, 2) those that all take at least, for stages and links, and for what memory holds."""
    reduction: Reductions
    pools: np.ndarray
    degrees: np.ndarray
    near: np.ndarray
    ring_nodes: np.ndarray
    """(classes,) of one stage, as `pools`, `degrees`, `members` and `nodes` of `levels_s`."""
    pair_share: np.ndarray
    alone: np.ndarray
    """(regions, regions), as in `levels_s`, and zeros for what shares no pair."""
    packs: np.ndarray
    apart: np.ndarray
    """(regions,) whether nodes of a region send one another packed gradients, and none that does: as in `levels_s`."""
    packed: np.ndarray
    plain: np.ndarray
    """(rows, regions) whether those of a stage do, and none that does."""
    levels: LevelsRoom


@gives_pointed
def reductions_for(rows: int) -> Reductions:
    """Room for allocations of so many rows."""
    whole, last, inside, inside_last, update, tied, tied_inside, *sizes = np.zeros((11, rows))
    n_bytes, spread, card_bytes, wire_bytes = sizes
    begin, tail, zeros, late = np.zeros((4, rows))
    return Reductions(
        whole=whole,
        last=last,
        inside=inside,
        inside_last=inside_last,
        update=update,
        tied=tied,
        tied_inside=tied_inside,
        n_bytes=n_bytes,
        spread_bytes=spread,
        card_bytes=card_bytes,
        wire_bytes=wire_bytes,
        begin=begin,
        tail=tail,
        zeros=zeros,
        late=late,
    )


@gives_pointed
def work_for(bank: Bank, rows: int) -> FluidWork:
    """Room for allocations of so many rows."""
    classes, regions = len(bank.pool), len(bank.stands)
    return FluidWork(
        stages=stages_for(rows, classes),
        places=places_for(rows, regions),
        hosts=hosts_for(bank, rows),
        trial=np.zeros(rows + 1, dtype=np.int64),
        old_bounds=np.zeros(rows + 1, dtype=np.int64),
        old_options=np.zeros((3, rows), dtype=np.int64),
        old_out=np.zeros(3, dtype=np.int64),
        lateness=np.zeros((2, rows)),
        no_cap=np.full(rows, np.inf),
        most_bytes=np.zeros(rows),
        pipeline=PipelineTimes(*np.zeros((len(PipelineTimes._fields), rows))),
        away_s=np.zeros((2, rows)),
        limits_s=np.zeros((2, 2)),
        reduction=reductions_for(rows),
        pools=np.zeros(classes, dtype=np.int64),
        degrees=np.zeros(classes, dtype=np.int64),
        near=np.zeros(classes, dtype=np.int64),
        ring_nodes=np.zeros(classes, dtype=np.int64),
        pair_share=np.zeros((regions, regions)),
        alone=np.zeros((regions, regions)),
        packs=np.zeros(regions, dtype=np.bool_),
        apart=np.zeros(regions, dtype=np.bool_),
        packed=np.zeros((rows, regions), dtype=np.bool_),
        plain=np.zeros((rows, regions), dtype=np.bool_),
        levels=levels_room(classes, regions),
    )


@kernel
def fluid_step_s(
    bank: Bank,
    x: np.ndarray,
    bounds: np.ndarray,
    options: np.ndarray,
    stages_out: np.ndarray,
    work: FluidWork,
    cut: int,
) -> tuple[float, int]:
    """Seconds per step of an allocation, and why not if it is inf.

    Parameters
    ----------
    bank : Bank
    x : ndarray of int64, shape (rows, classes)
        Workers of each class in each stage; empty rows are no stages.
    bounds, options : ndarray of int64, shape (rows + 1,), (3, rows)
        Out: the layer split and the memory options (`polygon.planning.problem_arrays.RECOMPUTED` and on).
    stages_out : ndarray of int64, shape (3,)
        Out: number of stages, whether regions keep their share along the stages (`lock_shares`), and the local steps;
        where memory is short, in place of the second what `layers_left_over` counts.
    work : Work
        Of `work_for` the rows of x.
    cut : int
        `FIRST`: layers are cut as if nothing were under way between stages. `SECOND`: once more, where memory then
        holds too few micro-batches. `THIRD`: with fewer layers in stages whose gradients take long to sum, where that
        is better than both. `BEST`: the best of these. `FOURTH`: that with borders moved for as long as the step gets
        shorter, as where a stage that sums for long can end before the others. (Inf where a cut changes nothing.)
    """
    stages = work.stages
    n = gather_stages(x, stages, bank.cp)
    stages_out[0] = n
    layers = bank.parameters.shape[1] - 1
    if n == 0 or n > layers:
        return np.inf, NO_STAGE
    find_regions(bank, stages, n, work.places)
    stages.seconds[:n] = 1.0  # where devices are does not depend on it
    find_hosts(bank, stages, n, work.places.nodes, work.hosts)
    merge_kinds(bank, stages, n, work.hosts.member_most)
    stages.outer_bytes[0] = OUTER_BYTES if bank.local_steps > 1 and _may_meet_seldom(bank, stages, n) else 0.0
    for s in range(n):
        for i in range(stages.members[s]):
            if stages.counts[s, i] * bank.cp % bank.ep:
                return np.inf, NO_STAGE  # experts are spread over devices of one pool and degree
        if _width(stages, s) > bank.micro_batches:
            return np.inf, TOO_FEW_MICRO_BATCHES
    makespan = np.inf
    for _ in range(2 if stages.outer_bytes[0] > 0 else 1):  # without local steps where their optimizer has no room
        owes = makespan == np.inf and _find_owed(bank, work, n)
        for _ in range(2 if owes else 1):
            if makespan == np.inf:
                _hold_windows(bank, stages, n)
                makespan = split_layers(bank, stages, n, work.trial, bounds, options, 0.0, np.inf, work.no_cap)
            if makespan == np.inf and owes:
                stages.plain[0] = True
                for s in range(n):
                    for k in range(stages.kind_members[s]):
                        stages.owed_bytes[s, k], stages.tied_owed_bytes[s, k] = 0.0, 0.0
                    take_turn(stages, s)
        if makespan == np.inf:
            stages.outer_bytes[0] = 0.0
            for s in range(n):
                take_turn(stages, s)
    if makespan == np.inf:
        stages_out[1] = layers_left_over(bank, stages, n)
        return np.inf, NO_MEMORY
    value = _value_s(bank, work, x, n, bounds, options, stages_out)
    if value == np.inf:
        return value, NO_LINK
    if cut == FIRST:
        return value, FITS
    latest, soonest = _price_lateness(work, n)
    away_s, limits_s = work.away_s[stages_out[1]], work.limits_s[stages_out[1]]
    old_bounds, old_options, old_out = work.old_bounds, work.old_options, work.old_out
    _copy(n, bounds, options, stages_out, old_bounds, old_options, old_out)
    other = np.inf
    if split_layers_under_way(
        bank, stages, n, away_s, limits_s[0], limits_s[1], work.trial, bounds, options, work.no_cap
    ):
        other = _value_s(bank, work, x, n, bounds, options, stages_out)
    if cut == SECOND:
        return other, FITS
    if other < value:
        value, makespan = other, 0.0
        for s in range(n):
            makespan = max(makespan, kinds_makespan_s(bank, stages, s))
        latest, soonest = _price_lateness(work, n)
        _copy(n, bounds, options, stages_out, old_bounds, old_options, old_out)
    uncapped, caps = value, 0
    while n > 1 and caps < MOST_CAPS and latest - soonest > SEEN * value:
        caps += 1
        goal = 0.5 * (latest + soonest)
        for s in range(n):
            late, by_byte = work.lateness[0, s], work.lateness[1, s]
            work.most_bytes[s] = (goal - late) / by_byte if by_byte > 0 else np.inf
        _hold_windows(bank, stages, n)
        most_s, other = makespan + latest - goal, np.inf
        capped = split_layers(bank, stages, n, work.trial, bounds, options, makespan, most_s, work.most_bytes)
        if capped < np.inf:
            other = _value_s(bank, work, x, n, bounds, options, stages_out)
        if other < value:
            value, makespan = other, capped
            latest, soonest = _price_lateness(work, n)
            _copy(n, bounds, options, stages_out, old_bounds, old_options, old_out)
        else:
            soonest = goal
    if cut == FOURTH:
        return _move_borders(bank, work, x, n, bounds, options, stages_out, value), FITS
    _copy(n, old_bounds, old_options, old_out, bounds, options, stages_out)
    return (value if cut == BEST or value < uncapped else np.inf), FITS


@inner
def _move_borders(
    bank: Bank,
    work: FluidWork,
    x: np.ndarray,
    n: int,
    bounds: np.ndarray,
    options: np.ndarray,
    stages_out: np.ndarray,
    least_s: float,
) -> float:
    """Seconds per step with the borders of n stages moved, from the cut in `old_bounds` whose step takes `least_s`, a
    layer at a time for as long as it gets shorter; inf where that brings little."""
    old_bounds, old_options, old_out = work.old_bounds, work.old_options, work.old_out
    _hold_windows(bank, work.stages, n)
    for s in range(n):
        work_as_cut(bank, work.stages, s, old_bounds, old_options)
    value, at, failures = least_s, 0, 0
    while failures < 2 * (n - 1):
        s, by = 1 + at // 2 % (n - 1), 1 - 2 * (at % 2)
        border, moved, fits = old_bounds[s] + by, False, True
        if old_bounds[s - 1] < border < old_bounds[s + 1]:
            _copy(n, old_bounds, old_options, old_out, bounds, options, stages_out)
            bounds[s] = border
            for t in range(s - 1, s + 1):
                mode, zero, blocks = stage_option(bank, work.stages, t, bounds[t], bounds[t + 1])
                options[0, t], options[1, t], options[2, t] = mode, zero, blocks
                fits = fits and zero >= 0
            other = _value_s(bank, work, x, n, bounds, options, stages_out) if fits else np.inf
            moved = other < value * (1 - 1e-6)
            if moved:
                value = other
                _copy(n, bounds, options, stages_out, old_bounds, old_options, old_out)
            else:
                for t in range(s - 1, s + 1):
                    work_as_cut(bank, work.stages, t, old_bounds, old_options)
        if moved:
            failures = 0  # the same way once more
        else:
            at, failures = at + 1, failures + 1
    _copy(n, old_bounds, old_options, old_out, bounds, options, stages_out)
    return value if value < (1 - SHORTER) * least_s else np.inf


@inner
def _find_owed(bank: Bank, work: FluidWork, n: int) -> bool:
    """Fill `owed_bytes`, `tied_owed_bytes`, `near` and `heard` of n stages in several regions each: of a kind's region
    with the fewest nodes; whether any owes."""
    stages, nodes, owes = work.stages, work.places.nodes, False
    stages.plain[0], stages.tied_owed_bytes[0] = False, 0.0
    for s in range(n):
        for k in range(stages.kind_members[s]):
            stages.owed_bytes[s, k], stages.tied_owed_bytes[s, k] = 0.0, 0.0
        regions, fewest = _fill_owed(bank, work, s, s, stages.owed_bytes)
        owes = owes or (regions > 1 and bank.owed_bytes > 0)
        stages.near[s] = 1.0 if _width(stages, s) * bank.cp > regions else 0.0
        for r in work.places.region[: work.places.regions[0] if regions > 1 else 0]:
            if nodes[s, r] > 1:  # what is led by several nodes is laid out in their order
                stages.near[s] = 2.0
        whole = 2.0 if regions == 2 else (3 * regions - 2) / regions
        stages.heard[s] = whole / fewest if regions > 1 else 0.0
    if bank.tied_once and bank.tied_values > 0 and n > 1:
        regions, _ = _fill_owed(bank, work, 0, n - 1, stages.tied_owed_bytes)
        _fill_owed(bank, work, n - 1, 0, stages.tied_owed_bytes)
        owes = owes or (regions > 1 and bank.owed_bytes > 0)
    return owes


@inner
def _fill_owed(bank: Bank, work: FluidWork, s: int, t: int, owed_bytes: np.ndarray) -> tuple[int, int]:
    """Fill what the kinds of stage s owe of what it sums with stage t (or by itself); in how many regions that is, and
    on how many nodes of the one where these are fewest."""
    stages, nodes = work.stages, work.places.nodes
    regions, fewest = 0, 0
    for r in work.places.region[: work.places.regions[0]]:
        count = _nodes_of_both(work.hosts, nodes, s, t, r)
        if count > 0:
            regions += 1
            fewest = count if regions == 1 else min(fewest, count)
    for i in range(stages.members[s] if regions > 1 else 0):
        c = stages.classes[s, i]
        k = _kind_at(bank, stages, s, c)
        count = _nodes_of_both(work.hosts, nodes, s, t, bank.region[c])
        owed_bytes[s, k] = max(owed_bytes[s, k], bank.owed_bytes / count)
    return regions, fewest


@inner
def _nodes_of_both(hosts: Hosts, nodes: np.ndarray, s: int, t: int, region: int) -> int:
    """Nodes of a region on which any of two stages is."""
    return int(nodes[s, region] if s == t else nodes[s, region] + nodes[t, region] - common_nodes(hosts, s, t, region))


@inner
def _width(stages: Stages, s: int) -> int:
    """Workers of stage s."""
    width = 0
    for i in range(stages.kind_members[s]):
        width += stages.kind_counts[s, i]
    return width


@inner
def _hold_windows(bank: Bank, stages: Stages, n: int) -> None:
    """Have every worker of n stages hold what is in flight if each behind it works on one micro-batch: fills `held`."""
    window = 0
    for s in range(n - 1, -1, -1):
        window = min(bank.micro_batches, window + _width(stages, s))
        in_flight_estimate(bank, stages, s, n, float(window))


@inner
def _price_lateness(work: FluidWork, n: int) -> tuple[float, float]:
    """Fill `lateness`; seconds from the end of the pipeline to that of all sums, and to it with nothing to sum."""
    of, latest, soonest = work.reduction, 0.0, 0.0
    for s in range(n):
        work.lateness[0, s] = of.late[s] - of.whole[s]
        work.lateness[1, s] = of.whole[s] / of.n_bytes[s] if of.whole[s] > 0 else 0.0
        latest, soonest = max(latest, of.late[s]), max(soonest, work.lateness[0, s])
    return latest, soonest


@inner
def _may_meet_seldom(bank: Bank, stages: Stages, n: int) -> bool:
    """Whether n stages are in several regions that each hold a whole pipeline, with workers of one degree a stage."""
    several = False
    for s in range(n):
        for i in range(stages.members[s]):
            c = stages.classes[s, i]
            if bank.tp[c] != bank.tp[stages.classes[s, 0]] or not _in_region(bank, stages, 0, bank.region[c]):
                return False
            several = several or bank.region[c] != bank.region[stages.classes[0, 0]]
        for i in range(stages.members[0]):
            if not _in_region(bank, stages, s, bank.region[stages.classes[0, i]]):
                return False
    return several


@inner
def _in_region(bank: Bank, stages: Stages, s: int, region: int) -> bool:
    """Whether stage s has workers in a region."""
    found = False
    for i in range(stages.members[s]):
        found = found or bank.region[stages.classes[s, i]] == region
    return found


@inner
def _copy(
    n: int,
    bounds: np.ndarray,
    options: np.ndarray,
    stages_out: np.ndarray,
    to_bounds: np.ndarray,
    to_options: np.ndarray,
    to_out: np.ndarray,
) -> None:
    """Copy a cut of the layers of n stages and what it led to."""
    for s in range(n + 1):
        to_bounds[s] = bounds[s]
    for s in range(n):
        for k in range(3):
            to_options[k, s] = options[k, s]
    for k in range(3):
        to_out[k] = stages_out[k]


@inner
def _value_s(
    bank: Bank,
    work: FluidWork,
    x: np.ndarray,
    n: int,
    bounds: np.ndarray,
    options: np.ndarray,
    stages_out: np.ndarray,
) -> float:
    """Seconds per step of n stages whose layers are cut; inf where a link is missing."""
    best, several, idle, shared, norm = np.inf, False, False, False, 0.0
    for way in range(2):
        if way == 0 or idle:  # regions that keep their shares leave nobody out
            several = _list_members(bank, work.stages, x, n)
            idle = way == 0 and bank.ep == 1 and _leave_out_idle(bank, work.stages, n)
            find_places(bank, work.stages, n, work.places)
            shared = find_hosts(bank, work.stages, n, work.places.nodes, work.hosts)
            norm = _price_reductions(bank, work, n, bounds, options)
        if norm < np.inf:
            end = _pipeline_s(bank, work, n, bounds, options, way == 1, shared)
            local_steps = bank.local_steps if way == 1 or not several else 1
            value, steps = _with_reductions(bank, work, n, bounds, options, end, local_steps, norm, shared)
            if value < best or way == 0:
                best = value
                stages_out[1], stages_out[2] = way, steps
        if not several:
            break
    return best


@inner
def _list_members(bank: Bank, stages: Stages, x: np.ndarray, n: int) -> bool:
    """List classes, workers and their seconds of n > 1 stages; whether some stage is in several regions."""
    gather_stages(x, stages, bank.cp)
    several = False
    for s in range(n):
        for i in range(stages.members[s]):
            c = stages.classes[s, i]
            stages.seconds[s, i] = stages.kind_seconds[s, _kind_at(bank, stages, s, c)]
            several = several or (n > 1 and bank.region[c] != bank.region[stages.classes[s, 0]])
    return several


@inner
def _kind_at(bank: Bank, stages: Stages, s: int, c: int) -> int:
    """The place of a class's kind in the list of stage s."""
    at = 0
    while stages.kinds[s, at] != bank.kind[c]:
        at += 1
    return at


@inner
def _leave_out_idle(bank: Bank, stages: Stages, n: int) -> bool:
    """Take from the lists of classes the workers that get no micro-batch, as `Decoder` does; whether there are any.

    With the makespan T of a stage those that need more than T for one are idle. Of those that need T for one, only as
    many work as the others leave micro-batches for, the first of the stage's list.
    """
    any_idle = False
    for s in range(n):
        longest = kinds_makespan_s(bank, stages, s) * (1 + 1e-6)
        left = bank.micro_batches
        for i in range(stages.members[s]):
            if stages.seconds[s, i] < longest / (1 + 2e-6):
                left -= stages.counts[s, i] * int(longest / stages.seconds[s, i])
        kept = 0
        for i in range(stages.members[s]):
            count, seconds = stages.counts[s, i], stages.seconds[s, i]
            if seconds > longest:
                count = 0
            elif seconds >= longest / (1 + 2e-6):
                count = min(count, max(left, 0))
                left -= count
            any_idle = any_idle or count < stages.counts[s, i]
            if count > 0:
                stages.classes[s, kept], stages.counts[s, kept] = stages.classes[s, i], count
                stages.seconds[s, kept] = seconds
                kept += 1
        stages.members[s] = kept
    return any_idle


@inner
def _pipeline_s(
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
        k = _kind_at(bank, stages, s, c)
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
def _price_reductions(bank: Bank, work: FluidWork, n: int, bounds: np.ndarray, options: np.ndarray) -> float:
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
        of.whole[s], of.last[s], of.inside[s], of.inside_last[s] = 0.0, 0.0, 0.0, 0.0
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
            if packs:  # where nodes send one another packed gradients, if that is sooner
                whole, ended = of.whole[s], of.last[s]
                inside, inside_ended = of.inside[s], of.inside_last[s]
                packed_gather_s = _find_sum(bank, work, s, depth, options[ZERO, s], last, work.packs)
                if of.whole[s] < whole:
                    gather_s = packed_gather_s
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
                k, near = _kind_at(bank, stages, s, stages.classes[s, i]), least_on_node(work.hosts, s, a) * bank.cp
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
def _with_reductions(
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
    _find_ends(pipe, n, end)
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
        step = pairs_free_s(bank, hosts, n, regions, nodes, of.wire_bytes, of.begin, of.tail, max(step, free))
        if local_steps > 1:
            find_sums(hosts, n, nodes, work.plain, bank.links.sum_turns)
            free = cards_free_s(bank, hosts, n, regions, nodes, of.card_bytes, of.zeros, work.plain, of.begin, of.tail)
            local_step = max(local_step, free)
            outer = pairs_free_s(bank, hosts, n, regions, nodes, of.wire_bytes, of.zeros, of.zeros, outer)
    if norm > 0:
        step, local_step = step + norm + update, local_step + update
    local_step += outer / local_steps
    if local_steps > 1 and local_step < step:
        return local_step, local_steps
    return step, 1


@inner
def _find_ends(pipe: PipelineTimes, n: int, end: float) -> None:
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
