"""Least compute that a pipeline needs to end in time: the kernel of `polygon.bounds.lower_bound`."""

from __future__ import annotations

import numpy as np

from polygon.bounds.in_turn import MANY, in_turn_capacity
from polygon.bounds.pipeline_costs import Pipeline
from polygon.jit.compilation import general, kernel

FEW = 24
"""Classes of workers up to which what each sees of sums counts where all do many micro-batches."""
NOTHING = 0.0
"""Of sums that take no longer than what the time is without already."""


@kernel
def unhidden_s(pipeline: Pipeline, first: int, last: int, c: int, each_s: float, over_s: float) -> float:
    """What a worker of class c that needs so long for a micro-batch of layers [first, last) sees of sums that take
    `over_s`: none begins before its last backward does.

    Whatever a plan's micro-batches take longer than that in backward, they take longer as well.
    """
    part = pipeline.hidden_part[first, last]
    return over_s - part * max(0.0, each_s - pipeline.own_forward_s[first, last, c]) if part > 0 else over_s


@kernel
def most_done(
    pipeline: Pipeline, sharding: int, c: int, stage: int, first: int, last: int, left_s: float, over_s: float
) -> float:
    """Most micro-batches of layers [first, last) that a worker of class c does in so much time; 0 if it cannot.

    One that does m has min(m, held) in flight, and the more it has in flight the more it recomputes: of the levels up
    to m the last counts. Sums take `over_s` more than the time is without already, as far as nothing hides them.
    """
    levels, most = pipeline.levels[min(stage, len(pipeline.levels) - 1)], 0.0
    for level in range(levels):
        each_s = pipeline.class_s[sharding, first, last, c, level]
        seen_s = max(0.0, unhidden_s(pipeline, first, last, c, each_s, over_s)) if over_s > 0 else 0.0
        done = (left_s - seen_s) * (1 + 1e-9) / each_s
        if done < 1:
            break  # with more in flight a micro-batch takes no less
        if level + 1 < levels:
            more = pipeline.held[level + 1]
            done = min(done, np.ceil(more) - 1 if pipeline.whole else more)
        if pipeline.whole:
            done = min(np.floor(done), pipeline.micro_batches)
        most = max(most, done)
    return most


@kernel
def workers_capacity(
    pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float, over_s: float
) -> float:
    """Least compute of workers that do all micro-batches of layers [first, last) in so much time; inf if none can.

    A worker of class c does k whole micro-batches; the class with least compute for each may make up the whole stage.
    `over_s`: see `most_done`.
    """
    return rounded(pipeline, parts_capacity(pipeline, sharding, stage, first, last, left_s, over_s))


@kernel
def parts_capacity(
    pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float, over_s: float
) -> float:
    """`workers_capacity` where parts of a worker are allowed."""
    each = np.inf
    alike = len(pipeline.held) == 1 and (over_s <= 0 or len(pipeline.class_capacity) > FEW)
    many = left_s / pipeline.best[1, sharding, first, last] if alike else 0.0
    if many >= 1 and (not pipeline.whole or MANY <= many <= pipeline.micro_batches):
        # So many that whole ones or parts make no difference.
        return float(pipeline.best[0, sharding, first, last] / left_s * pipeline.micro_batches)
    for c in range(len(pipeline.class_capacity)):
        if pipeline.class_capacity[c] * pipeline.class_s[sharding, first, last, c, 0] >= each * left_s:
            continue  # without any sums it would not be less
        done = most_done(pipeline, sharding, c, stage, first, last, left_s, over_s)
        if done > 0:
            each = min(each, pipeline.class_capacity[c] / done)
    return each * pipeline.micro_batches


@kernel
def passing_capacity(
    pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float, over_s: float, price: float
) -> float:
    """`parts_capacity` and, at so much for a second, what a micro-batch takes on the worker that does it."""
    each = np.inf
    for c in range(len(pipeline.class_capacity)):
        own_s = pipeline.class_s[sharding, first, last, c, 0]
        if (pipeline.class_capacity[c] * pipeline.micro_batches / left_s + price) * own_s >= each:
            continue  # without any sums it would not be less
        done = most_done(pipeline, sharding, c, stage, first, last, left_s, over_s)
        if done > 0:
            each = min(each, pipeline.class_capacity[c] / done * pipeline.micro_batches + price * own_s)
    return each


@kernel
def rounded(pipeline: Pipeline, capacity: float) -> float:
    """Whole devices with so much compute or more."""
    sums, wanted = pipeline.sums, capacity * (1 - 1e-6)
    if not pipeline.whole or not wanted < sums[-1]:
        return capacity
    low, high = 0, len(sums) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if sums[middle] < wanted:
            low = middle
        else:
            high = middle
    return max(capacity, float(sums[high]))


@kernel
def all_done(
    pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float, over_s: float
) -> float:
    """Most micro-batches of layers [first, last) that all devices together do in so much time."""
    total = 0.0
    for kind in range(len(pipeline.kind_devices)):
        each = 0.0
        for c in range(len(pipeline.class_capacity)):
            if pipeline.class_kind[c] == kind:
                done = most_done(pipeline, sharding, c, stage, first, last, left_s, over_s)
                each = max(each, done / pipeline.class_devices[c])
        total += each * pipeline.kind_devices[kind]
    return total


@kernel
def placed_capacity(
    pipeline: Pipeline,
    sharding: int,
    tier: int,
    stage: int,
    first: int,
    last: int,
    left_s: float,
    over_s: float,
    room: float,
    price: float,
    begins_s: float,
    time_s: float,
    limit: float,
) -> float:
    """Least compute of workers of a tier, of which some scatter gradients over nodes if the others are too many; inf if
    it has no room for them. With a price, `passing_capacity` if that is more.

    A stage of all layers has no other devices than all, each kind at its own pace.
    """
    if first == 0 and last == pipeline.forward_s.shape[0] - 1:
        most = all_done(pipeline, sharding, stage, first, last, left_s, over_s)
        if most < pipeline.micro_batches * (1 - 1e-9):
            return np.inf
    need = parts_capacity(pipeline, sharding, stage, first, last, left_s, over_s)
    if sharding % 3 and need > pipeline.tier_free[tier]:
        free = pipeline.tier_free[tier]
        apart = parts_capacity(pipeline, sharding + 1, stage, first, last, left_s, over_s)
        need = free + (1 - free / need) * apart if need < np.inf else np.inf
    need = rounded(pipeline, need)
    if need > room:
        return np.inf
    if stage > 0 and pipeline.whole and not pipeline.alike:
        # Nobody computes while tied embeddings are exchanged.
        ends_s = time_s - pipeline.tied_s
        turn = in_turn_capacity(pipeline, sharding, first, last, begins_s, ends_s - begins_s - left_s, ends_s, limit)
        need = max(need, rounded(pipeline, turn))
        if need > room:
            return np.inf
    if price > 0:
        need = max(need, passing_capacity(pipeline, sharding, stage, first, last, left_s, over_s, price))
    return need


@kernel
def stage_capacity(
    pipeline: Pipeline,
    sharding: int,
    stage: int,
    first: int,
    last: int,
    begins_s: float,
    tail_s: float,
    time_s: float,
    price: float,
    limit: float,
    at_best: float,
    known: float,
) -> float:
    """Least compute of a stage with layers [first, last) that ends in time; inf if none is enough, or less than
    is known.

    Its workers have `time_s` less the time until the first micro-batch arrives and less the longer of what follows the
    last one: reduction (the wider the tier, the longer, and the longer the shorter its own last backward), or backward
    through the stages before. `price`: see `placed_capacity`.
    """
    ends, scatters = last == pipeline.forward_s.shape[0] - 1, sharding % 3
    # Of alike layers, the first group waits for the last one's, or for one before it; all others for the first one.
    tied = first == 0 if pipeline.alike else (first > 0) == ends
    tied_s = pipeline.tied_s if tied else 0.0
    most = pipeline.tied_capacity if tied else np.inf
    best = np.inf
    found_s, found_whole_s, found_free = np.inf, np.inf, 0.0
    for j in range(pipeline.tier_s.shape[3]):
        room, free = min(pipeline.tier_capacity[scatters, j], most) * (1 + 1e-9), pipeline.tier_free[j]
        reduced_s = max(tail_s, pipeline.tier_s[scatters, first, last, j] + tied_s)
        if at_best > room or reduced_s == np.inf:
            continue
        whole_s = pipeline.whole_s[scatters, first, last, j] + tied_s
        if reduced_s >= found_s and whole_s >= found_whole_s and (not scatters or free <= found_free):
            continue  # a tier with less to wait has room enough
        left_s = time_s - begins_s - reduced_s
        room = min(room, best, known)
        need = placed_capacity(
            pipeline, sharding, j, stage, first, last, left_s, whole_s - reduced_s, room, price, begins_s, time_s, limit
        )
        if need < best:
            best, found_s, found_whole_s, found_free = need, reduced_s, whole_s, free
        if best <= at_best:
            break
    return best


@kernel
def messages_s(pipeline: Pipeline, stage: int, way: int) -> float:
    """Least seconds of the messages of a micro-batch before a stage: a node has workers of so many stages at most."""
    far = stage // pipeline.per_node
    return float((stage - far) * pipeline.message_s[0, way] + far * pipeline.message_s[1, way])


@kernel
def waiting_s(pipeline: Pipeline, stage: int, first: int) -> tuple[float, float]:
    """Least seconds before the first micro-batch comes to a stage, and after the last one leaves it."""
    before = max(stage - 1, 0)
    begins_s = pipeline.forward_s[first] + messages_s(pipeline, stage, 0) + before * pipeline.passing_s[0]
    tail_s = 0.0
    if first > 0:
        tail_s = pipeline.backward_s[first] + messages_s(pipeline, stage, 1) + pipeline.tied_s
        tail_s += before * pipeline.passing_s[1]
    return begins_s, tail_s


@kernel
def stage_need(
    pipeline: Pipeline,
    stage: int,
    first: int,
    last: int,
    limit: float,
    known: float,
    time_s: float,
    price: float,
    total: float,
) -> float:
    """`stage_capacity` of either kind where so many stages are before; inf if it is not below what is known or above
    the limit, -1 if more layers need no less than that."""
    begins_s, tail_s = waiting_s(pipeline, stage, first)
    least, possible = known, False
    for spread in range(len(pipeline.spreads)):
        # Of devices that do something else beside, a part is enough.
        fewest = float(pipeline.spreads[spread]) if pipeline.whole else 0.0
        if possible and fewest >= least:
            break  # with more devices it needs no less
        for sharding in range(3 * spread, 3 * spread + 2):
            at_best = workers_capacity(pipeline, sharding, stage, first, last, time_s - begins_s - tail_s, NOTHING)
            if at_best <= limit:
                possible = True
                if max(at_best, fewest) < least:
                    need = stage_capacity(
                        pipeline, sharding, stage, first, last, begins_s, tail_s, time_s, price, total, at_best, least
                    )
                    least = min(least, max(need, fewest))
    if possible and least == known:
        least = np.inf
    return least if possible else -1.0


@kernel
def rest_capacity(pipeline: Pipeline, stage: int, first: int, time_s: float) -> float:
    """Least compute of stages that have all layers from one on, so many stages being before: they are worth no less,
    and have no more time than the first of them, whatever they sum."""
    begins_s, tail_s = waiting_s(pipeline, stage, first)
    left_s = time_s - begins_s - tail_s
    worth = pipeline.work[2, -1] - pipeline.work[2, first]
    return float(worth / left_s * (1 - 1e-8)) if left_s > 0 else np.inf


@general
def least_capacity(
    pipeline: Pipeline, time_s: float, most_stages: int, limit: float, further: bool, weight: float
) -> float:
    """Compute with which a pipeline can end in time, if some way to cut the layers into stages needs no more than the
    limit: the least of a way with so few stages that it does.

    No micro-batch takes longer than that to pass all workers, so the mean does not: with a weight, that part of the
    limit times (the mean over the time) is added to the compute, and to the limit.

    Parameters
    ----------
    limit : float
        More than this does not matter: the search for it is given up.
    further : bool
        Whether there may be more stages than that: what they cost more in messages does not count.

    Returns
    -------
    float
        inf if there is none up to the limit.
    """
    layers = pipeline.forward_s.shape[0] - 1
    price = weight * limit / time_s
    limit *= 1 + weight
    room = limit * (1 + 1e-9)
    used, needs, ends = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    rest = np.zeros(layers + 1)
    used[0] = 0.0
    best = np.inf
    last = min(most_stages, layers) - 1
    for s in range(last + 1):
        # The last round goes on from what it finds: any number of further stages.
        goes_on = s == last and further
        after = used if goes_on else np.full(layers + 1, np.inf)
        some = False
        for b in range(layers):
            # Any number of further stages counts no more messages.
            rest[b] = rest_capacity(pipeline, min(s + 1, last), b, time_s) if s < last or further else np.inf
        if pipeline.alike:
            first = min(s, 1)
            needs[:] = -1.0
            for count in range(1, layers + 1 - first):
                known = np.inf if goes_on else -np.inf
                for a in range(s, layers + 1 - count):
                    known = max(known, room - used[a] - rest[a + count])
                needs[count] = stage_need(pipeline, s, first, first + count, room, known, time_s, price, limit)
                if needs[count] < 0:
                    break
            ends[:] = np.inf
            for count in range(1, layers + 1 - first if s + 1 >= pipeline.fewest else 0):
                known = np.inf if goes_on else room - used[layers - count]
                ends[count] = stage_need(pipeline, s, 2, 2 + count, room, known, time_s, price, limit)
                if ends[count] < 0:
                    ends[count] = np.inf
                    break
        for a in range(s, layers):
            if used[a] > limit:
                continue
            for b in range(a + 1, layers + 1):
                if pipeline.alike:
                    need = needs[b - a] if b < layers or needs[b - a] < 0 else ends[b - a]
                else:
                    known = min(after[b], room - rest[b]) - used[a]
                    need = stage_need(pipeline, s, a, b, room - used[a], known, time_s, price, limit)
                if need < 0:
                    break
                if used[a] + need < after[b]:
                    after[b] = used[a] + need
                    some = True
        best = after[layers]
        if best <= room or not some:
            break
        used = after
        used[layers] = np.inf
    return best if best <= room else np.inf
