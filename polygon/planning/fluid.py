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

import numpy as np

from polygon.cost.memory import OUTER_BYTES
from polygon.domain.message import Message
from polygon.jit.compilation import inner, kernel
from polygon.planning.flow import find_places, find_regions
from polygon.planning.fluid_pipeline import pipeline_s
from polygon.planning.fluid_sums import price_reductions, with_reductions
from polygon.planning.fluid_work import FluidWork
from polygon.planning.layer_split import (
    in_flight_estimate,
    kinds_makespan_s,
    layers_left_over,
    split_layers,
    split_layers_under_way,
    stage_option,
    work_as_cut,
)
from polygon.planning.node_sharing import Hosts, common_nodes, find_hosts
from polygon.planning.problem_arrays import Bank
from polygon.planning.stage_lists import Stages, gather_stages, kind_at, merge_kinds, take_turn, width

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
        if width(stages, s) > bank.micro_batches:
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
        stages.near[s] = 1.0 if width(stages, s) * bank.cp > regions else 0.0
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
        k = kind_at(bank, stages, s, c)
        count = _nodes_of_both(work.hosts, nodes, s, t, bank.region[c])
        owed_bytes[s, k] = max(owed_bytes[s, k], bank.owed_bytes / count)
    return regions, fewest


@inner
def _nodes_of_both(hosts: Hosts, nodes: np.ndarray, s: int, t: int, region: int) -> int:
    """Nodes of a region on which any of two stages is."""
    return int(nodes[s, region] if s == t else nodes[s, region] + nodes[t, region] - common_nodes(hosts, s, t, region))


@inner
def _hold_windows(bank: Bank, stages: Stages, n: int) -> None:
    """Have every worker of n stages hold what is in flight if each behind it works on one micro-batch: fills `held`."""
    window = 0
    for s in range(n - 1, -1, -1):
        window = min(bank.micro_batches, window + width(stages, s))
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
            norm = price_reductions(bank, work, n, bounds, options)
        if norm < np.inf:
            end = pipeline_s(bank, work, n, bounds, options, way == 1, shared)
            local_steps = bank.local_steps if way == 1 or not several else 1
            value, steps = with_reductions(bank, work, n, bounds, options, end, local_steps, norm, shared)
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
            stages.seconds[s, i] = stages.kind_seconds[s, kind_at(bank, stages, s, c)]
            several = several or (n > 1 and bank.region[c] != bank.region[stages.classes[s, 0]])
    return several


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
