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
    class_s: np.ndarray
    """(levels, 3, c, n, n + 1) forward and backward of layers [a, b) as quick as memory allows; inf if they do not fit.
    """
    held: np.ndarray
    """(levels,) ascending: a worker that does so many micro-batches or more has as many in flight."""
    class_capacity: np.ndarray
    """(c,) compute of a worker, in any unit."""
    best: np.ndarray
    """(2, 3, n, n + 1) least compute times seconds of a micro-batch of any class [0], and the seconds of that [1], at
    the last level."""
    tier_s: np.ndarray
    """(2, j, n, n + 1) least exposed seconds of reducing layers [a, b)."""
    tier_capacity: np.ndarray
    """(2, j) most compute that workers so placed have together."""
    tier_free: np.ndarray
    """(j,) of these, of workers that scatter inside of nodes or not at all; the others do so over nodes."""
    message_s: float
    """Least seconds of a message between two workers."""
    passing_s: tuple[float, float]
    """Least seconds of forward and of backward in each stage before, the first left out (interleaved plans)."""
    tied_s: float
    """Least seconds to exchange the gradient of tied embeddings, if first and last stage are two."""
    unit: float
    """Every worker's compute is a whole multiple of this; 0 if nothing is known."""
    whole: bool
    """Whether workers do whole micro-batches, and stages have whole workers; else any part of them."""


def best_class(class_s: np.ndarray, class_capacity: np.ndarray) -> np.ndarray:
    """`Pipeline.best`; inf where no class fits."""
    product = class_s[-1] * class_capacity[:, None, None]
    which = product.argmin(axis=1)[:, None]
    return np.stack([np.take_along_axis(values, which, axis=1)[:, 0] for values in (product, class_s[-1])])


@kernel
def most_done(pipeline: Pipeline, sharded: int, c: int, first: int, last: int, left_s: float) -> float:
    """Most micro-batches of layers [first, last) that a worker of class c does in so much time; 0 if it cannot.

    One that does m has min(m, held) in flight, and the more it has in flight the more it recomputes: of the levels up
    to m the last counts.
    """
    levels, most = len(pipeline.held), 0.0
    for level in range(levels):
        done = left_s * (1 + 1e-9) / pipeline.class_s[level, sharded, c, first, last]
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
def workers_capacity(pipeline: Pipeline, sharding: int, first: int, last: int, left_s: float) -> float:
    """Least compute of workers that do all micro-batches of layers [first, last) in so much time; inf if none can.

    A worker of class c does k whole micro-batches; the class with least compute for each may make up the whole stage.
    """
    return rounded(pipeline, parts_capacity(pipeline, sharding, first, last, left_s))


@kernel
def parts_capacity(pipeline: Pipeline, sharding: int, first: int, last: int, left_s: float) -> float:
    """`workers_capacity` where parts of a worker are allowed."""
    each = np.inf
    many = left_s / pipeline.best[1, sharding, first, last] if len(pipeline.held) == 1 else 0.0
    if many >= 1 and (not pipeline.whole or MANY <= many <= pipeline.micro_batches):
        # So many that whole ones or parts make no difference.
        each = pipeline.best[0, sharding, first, last] / left_s
    for c in range(len(pipeline.class_capacity) if each == np.inf else 0):
        done = most_done(pipeline, sharding, c, first, last, left_s)
        if done > 0:
            each = min(each, pipeline.class_capacity[c] / done)
    return each * pipeline.micro_batches


@kernel
def rounded(pipeline: Pipeline, capacity: float) -> float:
    """Whole workers with so much compute or more."""
    if pipeline.whole and pipeline.unit > 0 and capacity < np.inf:
        return float(np.ceil(capacity / pipeline.unit - 1e-6) * pipeline.unit)
    return capacity


@kernel
def placed_capacity(
    pipeline: Pipeline, scatters: int, tier: int, first: int, last: int, left_s: float, room: float
) -> float:
    """Least compute of workers of a tier, of which some scatter gradients over nodes if the others are too many; inf if
    it has no room for them."""
    need = parts_capacity(pipeline, scatters, first, last, left_s)
    if scatters and need > pipeline.tier_free[tier]:
        free = pipeline.tier_free[tier]
        apart = parts_capacity(pipeline, 2, first, last, left_s)
        need = free + (1 - free / need) * apart if need < np.inf else np.inf
    need = rounded(pipeline, need)
    return need if need <= room else np.inf


@kernel
def stage_capacity(
    pipeline: Pipeline, scatters: int, first: int, last: int, begins_s: float, tail_s: float, time_s: float
) -> float:
    """Least compute of a stage with layers [first, last) that ends in time; inf if none is enough.

    Its workers have `time_s` less the time until the first micro-batch arrives and less the longer of what follows the
    last one: reduction (the wider the tier, the longer), or backward through the stages before.
    """
    tied_s = pipeline.tied_s if (first > 0) == (last == pipeline.forward_s.shape[0] - 1) else 0.0
    best = np.inf
    at_best = workers_capacity(pipeline, scatters, first, last, time_s - begins_s - tail_s)
    for j in range(pipeline.tier_s.shape[1]):
        room = pipeline.tier_capacity[scatters, j] * (1 + 1e-9)
        reduced_s = max(tail_s, pipeline.tier_s[scatters, j, first, last] + tied_s)
        if at_best > room or reduced_s == np.inf:
            continue
        best = min(best, placed_capacity(pipeline, scatters, j, first, last, time_s - begins_s - reduced_s, room))
        if best <= at_best:
            break
    return best


@general
def least_capacity(pipeline: Pipeline, time_s: float, most_stages: int, limit: float, further: bool) -> float:
    """Least compute, over all ways to cut the layers into stages, of a pipeline that ends in time.

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
    used = np.full(layers + 1, np.inf)
    used[0] = 0.0
    best = np.inf
    last = min(most_stages, layers) - 1
    for s in range(last + 1):
        # The last round goes on from what it finds: any number of further stages.
        after = used if s == last and further else np.full(layers + 1, np.inf)
        some = False
        for a in range(s, layers):
            if used[a] > limit:
                continue
            before = max(s - 1, 0)
            begins_s = pipeline.forward_s[a] + s * pipeline.message_s + before * pipeline.passing_s[0]
            for b in range(a + 1, layers + 1):
                tail_s = 0.0
                if a > 0:
                    tail_s = pipeline.backward_s[a] + s * pipeline.message_s + pipeline.tied_s
                    tail_s += before * pipeline.passing_s[1]
                left_s = time_s - begins_s - tail_s
                possible = False
                for scatters in range(2):
                    if used[a] + workers_capacity(pipeline, scatters, a, b, left_s) <= limit * (1 + 1e-9):
                        possible = True
                        total = used[a] + stage_capacity(pipeline, scatters, a, b, begins_s, tail_s, time_s)
                        if total < after[b]:
                            after[b] = total
                            some = True
                if not possible:
                    break  # more layers need no less
        best = min(best, after[layers])
        if not some:
            break
        used = after
        used[layers] = np.inf
    return best if best <= limit * (1 + 1e-9) else np.inf
