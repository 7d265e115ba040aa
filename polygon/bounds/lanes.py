"""Interleaved plans as lanes: kernels of the lower bound.

All groups of an interleaved plan have as many workers, and in every chunk a micro-batch takes the same worker of each
group (`polygon.planning.checker`). So it is made of lanes, one worker a group, each with micro-batches of its own.
A worker that does k of them does all k of all its layers, in what filling and draining leave of the time; the first
group has the model's first layer, the last one its last. Let C(k) be the least compute of such a lane. Whatever the
lanes, that of all of them is the micro-batches times the least of C(k) / k, or more.

No micro-batch takes longer than the step to pass all workers of its lane: where these may be more than the lane has
micro-batches, what it takes is added to the compute at a price, and as much of the step (a Lagrangian relaxation).
"""

from __future__ import annotations

import numpy as np

from polygon.bounds.in_turn import MANY
from polygon.bounds.pipeline_costs import Pipeline
from polygon.bounds.stage_bound import unhidden_s, waiting_s, workers_capacity
from polygon.jit.compilation import general, kernel

LANES = 1.02
"""Micro-batches of a lane at which the bound takes a step, one over the other, where they are many."""
MOST_SPLITS = 5000
"""Ways to share out the layers among groups of which each is looked at."""
PRICES = (0.0, 0.3, 0.5, 0.7, 0.85, 1.2, 1.5)
"""What a device of one kind may count over what it computes: no prices let lanes have more devices than there are."""
PASSING = (0.3, 1.0, 3.0)
"""Weights of the time that a micro-batch takes to pass a lane, where that may have more groups than micro-batches."""


@kernel
def own_s(
    pipeline: Pipeline,
    group: int,
    waits_s: np.ndarray,
    scatters: int,
    layers: int,
    c: int,
    count: float,
    ends: bool,
    trip_s: float,
    held: float,
    time_s: float,
) -> float:
    """Seconds of a micro-batch on a worker of class c that has so many layers in a group, with the model's last one if
    the group is at the end, and does so many; inf if these do not end in time.

    Before its first backward it waits until a micro-batch has made a trip of so many seconds, and does so many forwards
    at most. `waits_s`: its group's of `group_waits_s`.
    """
    first, level = 2 if ends else min(group, 1), 0
    while level + 1 < pipeline.levels[min(group, len(pipeline.levels) - 1)] and pipeline.held[level + 1] <= count:
        level += 1
    each_s = float(pipeline.class_s[scatters - 3, first, first + layers, c, level])
    back_s = layers * pipeline.back_s[0, c]
    if group == 0:
        back_s += pipeline.back_s[1, c]
    if ends:
        back_s += pipeline.back_s[2, c]
    left_s = time_s - waits_s[scatters, layers, c, level]
    if each_s * count > (left_s - waits_s[0, 0, 0, 0]) * (1 + 1e-9):
        return np.inf
    after_s = trip_s + count * each_s - min(count, held) * max(each_s - back_s, 0.0)
    return each_s if after_s <= left_s * (1 + 1e-9) else np.inf


@kernel
def lane_capacity(
    pipeline: Pipeline,
    waits_s: np.ndarray,
    count: int,
    most_groups: int,
    time_s: float,
    largest: float,
    path_s: float,
    price: float,
    room: np.ndarray,
) -> float:
    """Least compute of a lane that does so many micro-batches, on workers with so much compute at most, whose forwards
    take a micro-batch so long; and at so much for a second, what one of them takes to pass it.

    Parameters
    ----------
    room : ndarray, shape (2, n + 1)
    """
    layers = pipeline.forward_s.shape[0] - 1
    used, after = room[0], room[1]
    used[:] = np.inf
    used[0], best = 0.0, np.inf
    for group in range(most_groups):
        after[:] = np.inf
        behind = max(pipeline.fewest - 1 - group, 0)
        trip_s = path_s + (2 * pipeline.fewest - 1) * pipeline.message_s[0, 0]
        trip_s += behind * (pipeline.passing_s[1] + pipeline.message_s[0, 1])
        held = most_groups + max(most_groups - 2 * group - 1, 0)
        for c in range(len(pipeline.class_capacity)):
            capacity = pipeline.class_capacity[c]
            if capacity > largest:
                continue
            for scatters in range(2):
                reached = 0
                for own in range(1, layers + 1 - min(group, 1)):
                    each_s = own_s(
                        pipeline, group, waits_s[group], scatters, own, c, count, False, trip_s, held, time_s
                    )
                    if each_s == np.inf:
                        break
                    reached = own
                    if group + 1 >= pipeline.fewest and used[layers - own] < best:
                        last_s = own_s(
                            pipeline, group, waits_s[group], scatters, own, c, count, True, trip_s, held, time_s
                        )
                        if last_s < np.inf:
                            best = min(best, used[layers - own] + capacity + price * last_s)
                    if price > 0:
                        for b in range(own, layers):
                            after[b] = min(after[b], used[b - own] + capacity + price * each_s)
                for a in range(group, layers - 1 if price == 0 and reached > 0 else group):
                    b = min(a + reached, layers - 1)
                    after[b] = min(after[b], used[a] + capacity)
        # Whoever can have more layers can have fewer, but for one a group.
        for b in range(layers - 2, group if price == 0 else layers, -1):
            after[b] = min(after[b], after[b + 1])
        used, after = after, used
    return best


@kernel
def lane_needs(
    pipeline: Pipeline,
    waits_s: np.ndarray,
    count: int,
    more: int,
    most_groups: int,
    time_s: float,
    limit: float,
    known: float,
    room: np.ndarray,
) -> float:
    """Least compute of a lane that does so many micro-batches, up to `more`, or what is known if that is more; where it
    is above the limit, anything above that."""
    classes, least, smallest = len(pipeline.class_capacity), np.inf, np.inf
    for c in range(classes):
        smallest = min(smallest, pipeline.class_capacity[c])
    for c in range(classes):
        # Its largest worker is of this class.
        largest = pipeline.class_capacity[c]
        floor = largest + (pipeline.fewest - 1) * smallest
        if floor >= least or floor > limit or least <= known:
            continue
        again = False
        for other in range(c):
            again = again or pipeline.class_capacity[other] == largest
        if again:
            continue
        path_s = pipeline.path_s[c]
        need = lane_capacity(pipeline, waits_s, count, most_groups, time_s, largest, path_s, 0.0, room)
        if more < most_groups:
            for weight in PASSING:
                if need <= limit:
                    price = weight * need / time_s
                    passing = lane_capacity(pipeline, waits_s, count, most_groups, time_s, largest, path_s, price, room)
                    need = max(need, passing - price * time_s)
        least = min(least, max(need, floor))
    return max(least, known)


@general
def lane_counts(micro_batches: int) -> np.ndarray:
    """Micro-batches of a lane at which the bound takes a step, ascending; the last is one more than there are."""
    counts, different, count = np.empty(micro_batches + 1, dtype=np.int64), 0, 1
    while count <= micro_batches:
        counts[different] = count
        different, count = different + 1, max(count, int(count * LANES)) + 1
    counts[different] = micro_batches + 1
    return counts[: different + 1]


@general
def able_classes(pipeline: Pipeline, waits_s: np.ndarray, groups: int, counts: np.ndarray, time_s: float) -> np.ndarray:
    """Whether a worker of a class does so many micro-batches of so many layers in time, in exactly so many groups;
    shape (groups, counts, n + 1, classes)."""
    layers, path_s = pipeline.forward_s.shape[0] - 1, pipeline.path_s.min()
    able = np.zeros((groups, len(counts), layers + 1, len(pipeline.class_capacity)), dtype=np.bool_)
    for group in range(groups):
        trip_s = path_s + (2 * groups - 1) * pipeline.message_s[0, 0]
        trip_s += (groups - 1 - group) * (pipeline.passing_s[1] + pipeline.message_s[0, 1])
        held = groups + max(groups - 2 * group - 1, 0)
        for i in range(len(counts)):
            for c in range(len(pipeline.class_capacity)):
                for scatters in range(2):
                    for own in range(1, layers + 1 - min(group, 1)):
                        ends = group == groups - 1
                        each_s = own_s(
                            pipeline, group, waits_s[group], scatters, own, c, counts[i], ends, trip_s, held, time_s
                        )
                        if each_s == np.inf:
                            break
                        able[group, i, own, c] = True
    return able


@general
def splits_end(pipeline: Pipeline, waits_s: np.ndarray, groups: int, time_s: float, limit: float) -> bool:
    """Whether some split of the layers among exactly so many groups lets lanes end in time that have no more devices of
    any kind than there are: all lanes have the same split.

    At any prices of devices, lanes that do all cost the micro-batches times the least of what a lane costs over those
    that it does, or more; and no more than all devices. Of first and last group alone they cost no more than those that
    a tied embedding is summed among in that time.
    """
    layers, kinds = pipeline.forward_s.shape[0] - 1, len(pipeline.kind_devices)
    counts = lane_counts(int(pipeline.micro_batches))
    able = able_classes(pipeline, waits_s, groups, counts[:-1], time_s)
    several = 1 + (len(PRICES) * kinds if kinds > 1 else 0)
    costs = np.full((several + 1, groups, len(counts) - 1, layers + 1), np.inf)
    limits = np.full(several + 1, limit)
    limits[several] = pipeline.tied_capacity
    for price in range(several):
        kind, factor = -1, 1.0
        if price > 0:
            kind, factor = (price - 1) // len(PRICES), PRICES[(price - 1) % len(PRICES)]
            limits[price] = 0.0
        known = np.zeros(kinds, dtype=np.bool_)
        for c in range(len(pipeline.class_capacity)):
            of, cost = pipeline.class_kind[c], pipeline.class_capacity[c]
            cost *= factor if of == kind else 1.0
            if price > 0 and not known[of]:
                limits[price] += cost / pipeline.class_devices[c] * pipeline.kind_devices[of]
                known[of] = True
            for group in range(groups):
                for i in range(len(counts) - 1):
                    for own in range(1, layers + 1):
                        if able[group, i, own, c]:
                            costs[price, group, i, own] = min(costs[price, group, i, own], cost)
    # Number by number: assignments of whole arrays take longest of all to compile.
    for group in (0, groups - 1):
        for i in range(len(counts) - 1):
            for own in range(layers + 1):
                costs[several, group, i, own] = costs[0, group, i, own]
    for group in range(1, groups - 1):
        costs[several, group] = 0.0
    split = np.ones(groups, dtype=np.int64)
    split[-1] = layers + 1 - groups
    while True:
        possible = True
        for price in range(several + 1):
            possible = False
            for i in range(len(counts) - 1):
                cost = 0.0
                for group in range(groups):
                    cost += costs[price, group, i, split[group]]
                if cost * pipeline.micro_batches <= limits[price] * (counts[i + 1] - 1) * (1 + 1e-9):
                    possible = True
                    break
            if not possible:
                break
        if possible:
            return True
        # The next split: one layer more in a group, one in each before, the rest in the last.
        group, split[-1] = 0, split[-1] - 1
        split[0] += 1
        while split[-1] < 1:
            if group >= groups - 2:
                return False
            split[-1] += split[group] - 1
            split[group] = 1
            group += 1
            split[group] += 1
            split[-1] -= 1


@general
def lanes_end(pipeline: Pipeline, time_s: float, most_groups: int, limit: float) -> bool:
    """Whether an interleaved plan of so many groups can end in time, with so much compute for its lanes."""
    if most_groups == 2:  # all lanes are in first and last group
        limit = min(limit, pipeline.tied_capacity)
    waits_s = group_waits_s(pipeline, time_s, most_groups)
    if not lanes_suffice(pipeline, waits_s, time_s, most_groups, limit):
        return False
    splits = 1.0
    for group in range(1, most_groups):
        splits *= (pipeline.forward_s.shape[0] - 1 - group) / group
    if pipeline.fewest < most_groups or splits > MOST_SPLITS:
        return True
    return splits_end(pipeline, waits_s, most_groups, time_s, limit)


@general
def group_waits_s(pipeline: Pipeline, time_s: float, most_groups: int) -> np.ndarray:
    """What the workers of each group wait after the last micro-batch with either sharding, so many layers, by their
    class and what they hold, shape (groups, 2, n + 1, c, levels), inf where no tier has room; with no layers, before
    the first micro-batch."""
    layers, widest = pipeline.forward_s.shape[0] - 1, 3 * len(pipeline.spreads) - 3
    classes = len(pipeline.class_capacity)
    own_s, least_s = np.empty((classes, len(pipeline.held))), np.empty((classes, len(pipeline.held)))
    waits_s = np.full((most_groups, 2, layers + 1, classes, len(pipeline.held)), np.inf)
    for group in range(most_groups):
        first = min(group, 1)
        begins_s, tail_s = waiting_s(pipeline, group, first)
        waits_s[group, :, 0] = begins_s
        for scatters in range(2):
            for count in range(1, layers + 1 - first):
                last, sharding = first + count, widest + scatters
                least_s[:] = np.inf
                for j in range(pipeline.tier_s.shape[3]):
                    reduced_s = max(tail_s, pipeline.tier_s[scatters, first, last, j])
                    whole_s, sooner = pipeline.whole_s[scatters, first, last, j], False
                    if reduced_s == np.inf:
                        continue
                    for c in range(classes):
                        for level in range(len(pipeline.held)):
                            each_s = pipeline.class_s[sharding, first, last, c, level]
                            at_end_s = pipeline.class_s[sharding, 2, 2 + count, c, level]
                            if at_end_s < np.inf:
                                each_s = max(each_s, at_end_s)
                            own_s[c, level] = max(reduced_s, unhidden_s(pipeline, first, last, c, each_s, whole_s))
                            sooner = sooner or own_s[c, level] < least_s[c, level]
                    if not sooner:
                        continue
                    left_s = time_s - begins_s - reduced_s
                    need = workers_capacity(pipeline, sharding, group, first, last, left_s, whole_s - reduced_s)
                    if need <= pipeline.tier_capacity[scatters, j] * (1 + 1e-9):
                        for c in range(classes):
                            for level in range(len(pipeline.held)):
                                least_s[c, level] = min(least_s[c, level], own_s[c, level])
                found = False
                for c in range(classes):
                    for level in range(len(pipeline.held)):
                        waits_s[group, scatters, count, c, level] = least_s[c, level]
                        found = found or least_s[c, level] < np.inf
                if not found:
                    break
    return waits_s


@general
def lanes_suffice(pipeline: Pipeline, waits_s: np.ndarray, time_s: float, most_groups: int, limit: float) -> bool:
    """Whether lanes with so much compute do all micro-batches, each with the best split of the layers for it."""
    micro_batches, room = int(pipeline.micro_batches), np.empty((2, pipeline.forward_s.shape[0]))
    # Least compute of lanes that do so many micro-batches together.
    together = np.full(micro_batches + 1, np.inf)
    together[0] = 0.0
    counts, needs = np.zeros(micro_batches + 1, dtype=np.int64), np.zeros(micro_batches + 1)
    smallest = pipeline.class_capacity.min() * pipeline.fewest
    different, count = 0, int(micro_batches * smallest / limit) // 2 + 1
    if count > MANY:
        return True  # so many that whole ones and parts are no different
    if count > 1:
        counts[0], needs[0], different = count - 1, smallest, 1
    while count <= micro_batches:
        more = min(max(count, int(count * LANES)), micro_batches)
        known = needs[different - 1] if different > 0 else 0.0
        need = lane_needs(pipeline, waits_s, count, more, most_groups, time_s, limit * (1 + 1e-9), known, room)
        if need > limit * (1 + 1e-9):
            break
        if different == 0 or need > needs[different - 1] * (1 + 1e-9):
            different += 1
        # The more micro-batches for the same compute, the better.
        counts[different - 1], needs[different - 1] = more, need
        if np.ceil(micro_batches / more) * need <= limit:
            return True
        count = more + 1
    for total in range(1, micro_batches + 1):
        for i in range(different):
            together[total] = min(together[total], together[max(total - counts[i], 0)] + needs[i])
    return bool(together[micro_batches] <= limit * (1 + 1e-9))
