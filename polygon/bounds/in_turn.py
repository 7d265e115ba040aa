"""Workers of a stage that begin one after another, and end so: how many more of them that takes.

A worker of a stage begins with a micro-batch of its own, which all layers before have passed, and ends with one that
goes back through them. So of n workers the r-th to begin waits until the stages before have done r forwards, and the
r-th of those that end last is done so long before the end that these can do r backwards still. With f and b the compute
times seconds of a forward and of a backward of all layers before, and C what the devices of those stages compute, that
is r f / C and r b / C, or what the first and the last micro-batch take, if that is longer.
"""

from __future__ import annotations

import numpy as np

from polygon.bounds.pipeline_costs import Pipeline
from polygon.jit.compilation import kernel

MANY = 50
"""Micro-batches of a worker above which parts of one are allowed."""


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
            count, known_s = (
                turn_count(pipeline.micro_batches * quick_s, time_s, begins_s, tail_s, begin_s, end_s),
                quick_s,
            )
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
