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
    so many nodes of a region, several regions). The first axis of `class_s` and `tier_s` tells stages that shard
    optimizer states at most (0) from those that also shard gradients or weights (1).
    """

    micro_batches: float
    forward_s: np.ndarray
    backward_s: np.ndarray
    """(n + 1,) running sums over the layers of the least seconds per micro-batch on any worker."""
    class_s: np.ndarray
    """(2, c, n, n + 1) forward and backward of layers [a, b) as quick as memory allows; inf if they do not fit."""
    class_capacity: np.ndarray
    """(c,) compute of a worker, in any unit."""
    best: np.ndarray
    """(2, 2, n, n + 1) least compute times seconds of a micro-batch of any class [0], and the seconds of that [1]."""
    tier_s: np.ndarray
    """(2, j, n, n + 1) least exposed seconds of reducing layers [a, b)."""
    tier_capacity: np.ndarray
    """(j,) most compute that workers so placed have together."""
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
    product = class_s * class_capacity[:, None, None]
    which = product.argmin(axis=1)[:, None]
    return np.stack([np.take_along_axis(values, which, axis=1)[:, 0] for values in (product, class_s)])


@kernel
def workers_capacity(pipeline: Pipeline, sharded: int, first: int, last: int, left_s: float) -> float:
    """Least compute of workers that do all micro-batches of layers [first, last) in so much time; inf if none can.

    A worker of class c does k whole micro-batches; the class with least compute for each may make up the whole stage.
    """
    each = np.inf
    many = left_s / pipeline.best[1, sharded, first, last]
    if many >= 1 and (not pipeline.whole or MANY <= many <= pipeline.micro_batches):
        # So many that whole ones or parts make no difference.
        each = pipeline.best[0, sharded, first, last] / left_s
    for c in range(pipeline.class_s.shape[1] if each == np.inf else 0):
        done = left_s * (1 + 1e-9) / pipeline.class_s[sharded, c, first, last]
        if done < 1:
            continue
        if pipeline.whole:
            done = min(np.floor(done), pipeline.micro_batches)
        each = min(each, pipeline.class_capacity[c] / done)
    if pipeline.whole and pipeline.unit > 0 and each < np.inf:
        return float(np.ceil(each * pipeline.micro_batches / pipeline.unit - 1e-6) * pipeline.unit)
    return each * pipeline.micro_batches


@kernel
def stage_capacity(
    pipeline: Pipeline, sharded: int, first: int, last: int, begins_s: float, tail_s: float, time_s: float
) -> float:
    """Least compute of a stage with layers [first, last) that ends in time; inf if none is enough.

    Its workers have `time_s` less the time until the first micro-batch arrives and less the longer of what follows the
    last one: reduction (the wider the tier, the longer), or backward through the stages before.
    """
    tied_s = pipeline.tied_s if (first > 0) == (last == pipeline.forward_s.shape[0] - 1) else 0.0
    best = np.inf
    at_best = workers_capacity(pipeline, sharded, first, last, time_s - begins_s - tail_s)
    for j in range(pipeline.tier_s.shape[1]):
        room = pipeline.tier_capacity[j] * (1 + 1e-9)
        if at_best > room:
            continue
        reduced_s = pipeline.tier_s[sharded, j, first, last] + tied_s
        if reduced_s <= tail_s:
            return at_best
        need = workers_capacity(pipeline, sharded, first, last, time_s - begins_s - reduced_s)
        if need <= room:
            best = min(best, need)
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
                for sharded in range(2):
                    if used[a] + workers_capacity(pipeline, sharded, a, b, left_s) <= limit * (1 + 1e-9):
                        possible = True
                        total = used[a] + stage_capacity(pipeline, sharded, a, b, begins_s, tail_s, time_s)
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
