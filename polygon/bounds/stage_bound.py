"""Least compute that a pipeline needs to end in time: the kernel of `polygon.bounds.lower_bound`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.jit.compilation import general, kernel

MANY = 50
"""Micro-batches of a worker above which parts of one are allowed."""


class Pipeline(NamedTuple):
    """What stages cost at best, for one micro-batch size.

    Shapes: n layers, c worker classes, j tiers. A tier is a way to place the workers of a stage (one worker, one node,
    so many nodes of a region, several regions). The sharding axis of `class_s` and `best` is that of
    `polygon.bounds.fitting.SHARDINGS`; tiers are told apart by whether gradients are summed as a step ends (0) or
    micro-batches scatter them (1).
    """

    micro_batches: float
    forward_s: np.ndarray
    backward_s: np.ndarray
    """(n + 1,) running sums over the layers of the least seconds per micro-batch on any worker."""
    work: np.ndarray
    """(3, n + 1) running sums of what forward and backward of a micro-batch are worth at least, in compute times seconds,
    and of both of all micro-batches."""
    class_s: np.ndarray
    """(3 spreads, n, n + 1, c, levels) forward and backward of layers [a, b) as quick as memory allows; inf if they do
    not fit. All shardings of the first spread come first."""
    spreads: np.ndarray
    """(spreads,) least compute of a stage whose devices share out as much as those of each."""
    held: np.ndarray
    """(levels,) ascending: a worker that does so many micro-batches or more has as many in flight."""
    levels: np.ndarray
    """(s,) of these levels, how many stand for the workers of each stage; the last for all further stages."""
    class_capacity: np.ndarray
    """(c,) compute of a worker, in any unit."""
    class_kind: np.ndarray
    """(c,) kind of its devices."""
    class_devices: np.ndarray
    """(c,) devices of a worker."""
    kind_devices: np.ndarray
    """(kinds,) all devices of a kind."""
    best: np.ndarray
    """(2, 3 spreads, n, n + 1) least compute times seconds of a micro-batch of any class [0], and the seconds of that [1], at
    the last level."""
    tier_s: np.ndarray
    """(2, n, n + 1, j) least exposed seconds of reducing layers [a, b)."""
    tier_capacity: np.ndarray
    """(2, j) most compute that workers so placed have together."""
    tier_free: np.ndarray
    """(j,) of these, of workers that scatter inside of nodes or not at all; the others do so over nodes."""
    message_s: np.ndarray
    """(2, 2) least seconds of a message between two workers [0] and between two nodes [1], down the stages and up."""
    per_node: int
    """Most workers of a node."""
    passing_s: tuple[float, float]
    """Least seconds of forward and of backward in each stage before, the first left out (interleaved plans)."""
    tied_s: float
    """Least seconds to exchange the gradient of tied embeddings, if first and last stage are two."""
    tied_capacity: float
    """Most compute of either of these."""
    sums: np.ndarray
    """(sums,) ascending from 0: what whole devices compute together, as far as it is known."""
    fewest: int
    """Groups of an interleaved plan at least."""
    end_s: np.ndarray
    """(2, c) least seconds of a micro-batch in the layers that the first group has before the alike ones, and the last
    group after them."""
    end_work: float
    """Worth of the layers after them, of all micro-batches."""
    alike: bool
    """Whether all layers are, so that it does not matter which of them a stage has: two first layers stand for all."""
    whole: bool
    """Whether workers do whole micro-batches, and stages have whole workers; else any part of them."""


def best_class(class_s: np.ndarray, class_capacity: np.ndarray) -> np.ndarray:
    """`Pipeline.best`; inf where no class fits."""
    last = class_s[..., -1]
    product = last * class_capacity
    which = product.argmin(axis=-1)[..., None]
    return np.stack([np.take_along_axis(values, which, axis=-1)[..., 0] for values in (product, last)])


@kernel
def most_done(pipeline: Pipeline, sharding: int, c: int, stage: int, first: int, last: int, left_s: float) -> float:
    """Most micro-batches of layers [first, last) that a worker of class c does in so much time; 0 if it cannot.

    One that does m has min(m, held) in flight, and the more it has in flight the more it recomputes: of the levels up
    to m the last counts.
    """
    levels, most = pipeline.levels[min(stage, len(pipeline.levels) - 1)], 0.0
    for level in range(levels):
        done = left_s * (1 + 1e-9) / pipeline.class_s[sharding, first, last, c, level]
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
def workers_capacity(pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float) -> float:
    """Least compute of workers that do all micro-batches of layers [first, last) in so much time; inf if none can.

    A worker of class c does k whole micro-batches; the class with least compute for each may make up the whole stage.
    """
    return rounded(pipeline, parts_capacity(pipeline, sharding, stage, first, last, left_s))


@kernel
def parts_capacity(pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float) -> float:
    """`workers_capacity` where parts of a worker are allowed."""
    each = np.inf
    many = left_s / pipeline.best[1, sharding, first, last] if len(pipeline.held) == 1 else 0.0
    if many >= 1 and (not pipeline.whole or MANY <= many <= pipeline.micro_batches):
        # So many that whole ones or parts make no difference.
        each = pipeline.best[0, sharding, first, last] / left_s
    for c in range(len(pipeline.class_capacity) if each == np.inf else 0):
        done = most_done(pipeline, sharding, c, stage, first, last, left_s)
        if done > 0:
            each = min(each, pipeline.class_capacity[c] / done)
    return each * pipeline.micro_batches


@kernel
def passing_capacity(
    pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float, price: float
) -> float:
    """`parts_capacity` and, at so much for a second, what a micro-batch takes on the worker that does it."""
    each = np.inf
    for c in range(len(pipeline.class_capacity)):
        done = most_done(pipeline, sharding, c, stage, first, last, left_s)
        if done > 0:
            own_s = pipeline.class_s[sharding, first, last, c, 0]
            each = min(each, pipeline.class_capacity[c] / done * pipeline.micro_batches + price * own_s)
    return each


@kernel
def turn_count(need_s: float, time_s: float, begins_s: float, tail_s: float, begin_s: float, end_s: float) -> float:
    """Fewest workers that compute for so long together; inf if none do. Where that is 0 s, the most workers that do.

    Of them the r-th to begin waits for begins_s and for r times begin_s, whatever is longer, and the r-th of those that
    end last for tail_s and for r times end_s (sums over r taken as integrals, which are less).
    """
    first = begins_s / begin_s if begin_s > 0 else np.inf
    last = tail_s / end_s if end_s > 0 else np.inf
    for step in range(3):
        # Up to so many workers each of the two waits is the same for all, then one grows, then both.
        least = 0.0 if step == 0 else min(first, last) if step == 1 else max(first, last)
        most = min(first, last) if step == 0 else max(first, last) if step == 1 else np.inf
        if least == np.inf:
            break
        passed, rate_s, each_s = need_s, time_s, 0.0
        for at, wait_s, more_s in ((first, begins_s, begin_s), (last, tail_s, end_s)):
            if step == 2 or (step == 1 and at == min(first, last)):
                passed, each_s = passed + 0.5 * more_s * at * at, each_s + more_s
            else:
                rate_s -= wait_s
        if each_s == 0:
            count = passed / rate_s if rate_s > 0 and need_s > 0 else np.inf
        else:
            root = rate_s * rate_s - 2 * each_s * passed
            if root < 0:
                count = np.inf
            else:
                count = (rate_s + (np.sqrt(root) if need_s == 0 else -np.sqrt(root))) / each_s
        if need_s > 0 and count <= most * (1 + 1e-12):
            return float(count)
        if need_s == 0 and least <= count <= most:
            return float(count)
    return np.inf if need_s > 0 else 0.0


@kernel
def whole_count(
    pipeline: Pipeline, own_s: float, time_s: float, begins_s: float, tail_s: float, begin_s: float, end_s: float
) -> tuple[float, float]:
    """Fewest workers that do all micro-batches, whole ones of so many seconds each, where they begin and end one after
    another (`turn_count`), and how many one more of them would do.

    Of all workers no more than Q(k) do k or more, for who does waits for no more than the rest of the time.
    """
    most = int(min((time_s - begins_s - tail_s) * (1 + 1e-9) / own_s, pipeline.micro_batches))
    behind = 0.0
    for k in range(most, 0, -1):
        left_s = (time_s - k * own_s) * (1 + 1e-9)
        able = np.inf
        if begin_s + end_s > 0:
            able = turn_count(0.0, left_s, begins_s, tail_s, begin_s, end_s)
            if begin_s > 0:
                able = min(able, (left_s - tail_s) / begin_s)
            if end_s > 0:
                able = min(able, (left_s - begins_s) / end_s)
            able = np.floor(able * (1 + 1e-9) + 1e-6)
        # Of so many workers all do k.
        count = (pipeline.micro_batches - behind) / k
        if count <= able:
            return float(count), float(k)
        behind += able
    return np.inf, 1.0


@kernel
def in_turn_capacity(
    pipeline: Pipeline,
    sharding: int,
    first: int,
    last: int,
    begins_s: float,
    tail_s: float,
    time_s: float,
    limit: float,
) -> float:
    """Least compute of workers of layers [first, last) that begin and end one after another.

    Each has a first micro-batch of its own, which all layers before have passed, and a last one that comes back through
    these; those who compute them have what the devices have beside what this stage and those after it need. So the r-th
    worker to begin waits for r forwards there, and the r-th of those that end last for r backwards.

    Of classes that no price for a micro-batch makes worth while beside the best one, none is there: by the dual of the
    program, at the price at which one more worker of that class pays.
    """
    before = limit - (pipeline.work[2, -1] - pipeline.work[2, first]) / time_s
    if before <= 0:
        return np.inf
    begin_s, end_s = pipeline.work[0, first] / before, pipeline.work[1, first] / before
    classes = len(pipeline.class_capacity)
    least, quick_s, best, best_s = np.inf, np.inf, 0.0, 0.0
    for c in range(classes):
        own_s = pipeline.class_s[sharding, first, last, c, -1]
        if pipeline.class_capacity[c] * own_s < least:
            least, best, best_s = pipeline.class_capacity[c] * own_s, pipeline.class_capacity[c], own_s
        quick_s = min(quick_s, own_s)
    if least == np.inf:
        return np.inf
    left_s = time_s - begins_s - tail_s
    count = pipeline.micro_batches * best_s / left_s
    if count * begin_s <= begins_s and count * end_s <= tail_s:
        return 0.0
    if left_s <= MANY * best_s:
        count, each = whole_count(pipeline, best_s, time_s, begins_s, tail_s, begin_s, end_s)
        alone = True
        for c in range(classes):
            capacity, own_s = pipeline.class_capacity[c], pipeline.class_s[sharding, first, last, c, -1]
            if capacity != best or own_s != best_s:
                done = np.floor(min(left_s * (1 + 1e-9) / own_s, pipeline.micro_batches))
                alone = alone and best / each * done <= capacity * (1 + 1e-9)
        if alone:
            return count * best
    # Parts of micro-batches, and as quick as the quickest class that may pay.
    dear, known_s = least, 0.0
    for _ in range(classes):
        quick_s = np.inf
        for c in range(classes):
            own_s = pipeline.class_s[sharding, first, last, c, -1]
            if pipeline.class_capacity[c] * own_s <= dear:
                quick_s = min(quick_s, own_s)
        if quick_s != known_s:
            count, known_s = turn_count(pipeline.micro_batches * quick_s, time_s, begins_s, tail_s, begin_s, end_s), quick_s
        alone_s = time_s - max(begins_s, count * begin_s) - max(tail_s, count * end_s)
        worth = least / alone_s * left_s if alone_s > 0 else np.inf
        more = np.inf
        for c in range(classes):
            price = pipeline.class_capacity[c] * pipeline.class_s[sharding, first, last, c, -1]
            if dear < price < worth:
                more = min(more, price)
        if more == np.inf:
            break
        dear = more
    return count / quick_s * least


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
def all_done(pipeline: Pipeline, sharding: int, stage: int, first: int, last: int, left_s: float) -> float:
    """Most micro-batches of layers [first, last) that all devices together do in so much time."""
    total = 0.0
    for kind in range(len(pipeline.kind_devices)):
        each = 0.0
        for c in range(len(pipeline.class_capacity)):
            if pipeline.class_kind[c] == kind:
                done = most_done(pipeline, sharding, c, stage, first, last, left_s) / pipeline.class_devices[c]
                each = max(each, done)
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
        most = all_done(pipeline, sharding, stage, first, last, left_s)
        if most < pipeline.micro_batches * (1 - 1e-9):
            return np.inf
    need = parts_capacity(pipeline, sharding, stage, first, last, left_s)
    if sharding % 3 and need > pipeline.tier_free[tier]:
        free = pipeline.tier_free[tier]
        apart = parts_capacity(pipeline, sharding + 1, stage, first, last, left_s)
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
    return max(need, passing_capacity(pipeline, sharding, stage, first, last, left_s, price)) if price > 0 else need


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
    """Least compute of a stage with layers [first, last) that ends in time; inf if none is enough or less than is known.

    Its workers have `time_s` less the time until the first micro-batch arrives and less the longer of what follows the
    last one: reduction (the wider the tier, the longer), or backward through the stages before. `price`: see
    `placed_capacity`.
    """
    ends, scatters = last == pipeline.forward_s.shape[0] - 1, sharding % 3
    # Of alike layers, the first group waits for the last one's, or for one before it; all others for the first one.
    tied = first == 0 if pipeline.alike else (first > 0) == ends
    tied_s = pipeline.tied_s if tied else 0.0
    most = pipeline.tied_capacity if tied else np.inf
    best = np.inf
    found_s, found_free = np.inf, 0.0
    for j in range(pipeline.tier_s.shape[3]):
        room, free = min(pipeline.tier_capacity[scatters, j], most) * (1 + 1e-9), pipeline.tier_free[j]
        reduced_s = max(tail_s, pipeline.tier_s[scatters, first, last, j] + tied_s)
        if at_best > room or reduced_s == np.inf:
            continue
        if reduced_s >= found_s and (not scatters or free <= found_free):
            continue  # a tier with less to wait has room enough
        left_s = time_s - begins_s - reduced_s
        room = min(room, best, known)
        need = placed_capacity(pipeline, sharding, j, stage, first, last, left_s, room, price, begins_s, time_s, limit)
        if need < best:
            best, found_s, found_free = need, reduced_s, free
        if best <= at_best:
            break
    return best


@kernel
def messages_s(pipeline: Pipeline, stage: int, way: int) -> float:
    """Least seconds of the messages of a micro-batch before a stage: a node has workers of so many stages at most."""
    far = stage // pipeline.per_node
    return (stage - far) * pipeline.message_s[0, way] + far * pipeline.message_s[1, way]


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
        if possible and pipeline.spreads[spread] >= least:
            break  # with more devices it needs no less
        for sharding in range(3 * spread, 3 * spread + 2):
            at_best = workers_capacity(pipeline, sharding, stage, first, last, time_s - begins_s - tail_s)
            if at_best <= limit:
                possible = True
                if max(at_best, pipeline.spreads[spread]) < least:
                    need = stage_capacity(
                        pipeline, sharding, stage, first, last, begins_s, tail_s, time_s, price, total, at_best, least
                    )
                    least = min(least, max(need, pipeline.spreads[spread]))
    if possible and least == known:
        least = np.inf
    return least if possible else -1.0


@general
def least_capacity(
    pipeline: Pipeline, time_s: float, most_stages: int, limit: float, further: bool, weight: float
) -> float:
    """Least compute, over all ways to cut the layers into stages, of a pipeline that ends in time.

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
    used, needs = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    used[0] = 0.0
    best = np.inf
    last = min(most_stages, layers) - 1
    for s in range(last + 1):
        # The last round goes on from what it finds: any number of further stages.
        after = used if s == last and further else np.full(layers + 1, np.inf)
        some = False
        if pipeline.alike:
            first = min(s, 1)
            needs[:] = -1.0
            for count in range(1, layers + 1 - first):
                needs[count] = stage_need(pipeline, s, first, first + count, room, np.inf, time_s, price, limit)
                if needs[count] < 0:
                    break
        for a in range(s, layers):
            if used[a] > limit:
                continue
            for b in range(a + 1, layers + 1):
                if pipeline.alike:
                    need = needs[b - a]
                else:
                    known = after[b] - used[a]
                    need = stage_need(pipeline, s, a, b, room - used[a], known, time_s, price, limit)
                if need < 0:
                    break
                if used[a] + need < after[b]:
                    after[b] = used[a] + need
                    some = True
        best = min(best, after[layers])
        if not some:
            break
        used = after
        used[layers] = np.inf
    return best if best <= room else np.inf


LANES = 1.02
"""Micro-batches of a lane at which the bound takes a step, one over the other, where they are many."""


@kernel
def most_layers(
    pipeline: Pipeline, group: int, waits_s: np.ndarray, c: int, count: float, more_s: float, time_s: float
) -> int:
    """Most layers of which a worker of class c in a group does so many micro-batches, each with so much more."""
    first = min(group, 1)
    most = 0
    levels = pipeline.levels[min(group, len(pipeline.levels) - 1)]
    level = 0
    while level + 1 < levels and pipeline.held[level + 1] <= count:
        level += 1
    for scatters in range(2):
        for layers in range(most + 1, pipeline.forward_s.shape[0] - first):
            own_s = pipeline.class_s[scatters - 3, first, first + layers, c, level] + more_s
            if own_s * count > (time_s - waits_s[scatters, layers]) * (1 + 1e-9):
                break
            most = layers
    return most


@kernel
def lane_capacity(
    pipeline: Pipeline, waits_s: np.ndarray, count: int, most_groups: int, time_s: float, room: np.ndarray
) -> float:
    """Least compute of a lane that does so many micro-batches; `room`: (2, n + 1)."""
    layers, classes = pipeline.forward_s.shape[0] - 1, len(pipeline.class_capacity)
    used, after = room[0], room[1]
    used[:] = np.inf
    used[0], best = 0.0, np.inf
    for group in range(most_groups):
        after[:] = np.inf
        for c in range(classes):
            capacity = pipeline.class_capacity[c]
            more_s = pipeline.end_s[0, c] if group == 0 else 0.0
            if group + 1 >= pipeline.fewest:
                # As the last one.
                most = most_layers(pipeline, group, waits_s[group], c, count, more_s + pipeline.end_s[1, c], time_s)
                for a in range(max(layers - most, 0), layers):
                    best = min(best, used[a] + capacity)
            most = most_layers(pipeline, group, waits_s[group], c, count, more_s, time_s)
            for a in range(layers if most > 0 else 0):
                b = min(a + most, layers)
                after[b] = min(after[b], used[a] + capacity)
        # Whoever can have more layers can have fewer.
        for b in range(layers - 1, -1, -1):
            after[b] = min(after[b], after[b + 1])
        used, after = after, used
    return best


@general
def lanes_end(pipeline: Pipeline, time_s: float, most_groups: int, limit: float) -> bool:
    """Whether an interleaved plan of so many groups can end in time.

    All of its groups have as many workers, and a micro-batch takes the same one of each in every chunk: it is made of
    lanes, one worker a group, each with micro-batches of its own. Of all lanes with so much compute for the
    micro-batches that they do, the one with least has no more than the devices have for all.
    """
    layers, widest = pipeline.forward_s.shape[0] - 1, 3 * len(pipeline.spreads) - 3
    waits_s, room = np.full((most_groups, 2, layers + 1), np.inf), np.empty((2, layers + 1))
    for group in range(most_groups):
        first = min(group, 1)
        begins_s, tail_s = waiting_s(pipeline, group, first)
        for scatters in range(2):
            for count in range(1, layers + 1 - first):
                least_s = np.inf
                for j in range(pipeline.tier_s.shape[3]):
                    reduced_s = max(tail_s, pipeline.tier_s[scatters, first, first + count, j])
                    if reduced_s >= least_s:
                        continue
                    left_s = time_s - begins_s - reduced_s
                    held = pipeline.tier_capacity[scatters, j] * (1 + 1e-9)
                    if workers_capacity(pipeline, widest + scatters, group, first, first + count, left_s) <= held:
                        least_s = reduced_s
                if least_s == np.inf:
                    break
                waits_s[group, scatters, count] = begins_s + least_s
    devices = pipeline.class_capacity.min()
    count = max(1, int(np.ceil(pipeline.micro_batches * pipeline.fewest * devices / limit * (1 - 1e-9))))
    while count <= pipeline.micro_batches:
        more = min(max(count, int(count * LANES)), int(pipeline.micro_batches))
        held = lane_capacity(pipeline, waits_s, count, most_groups, time_s, room)
        if held == np.inf:
            return False
        if held * pipeline.micro_batches <= more * limit * (1 + 1e-9):
            return True
        count = more + 1
    return False
