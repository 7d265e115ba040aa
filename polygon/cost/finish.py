"""The end of a step, from the last backward on: sums of gradients, tied embeddings, the norm, updates and gathers."""

from __future__ import annotations

import numpy as np

from polygon.cost.overlap import Overlap, gathered_s, seen_parts, sums_end_s
from polygon.jit.compilation import general


@general
def reduction_spans_s(
    ends_s: np.ndarray,
    backward_s: np.ndarray,
    offset: np.ndarray,
    chunks: int,
    whole_s: np.ndarray,
    last_s: np.ndarray,
    layers: np.ndarray,
    overlap: Overlap,
) -> np.ndarray:
    """When every stage begins [0] and ends [1] to sum its gradients (`sums_end_s`), alone on its links: (2, stages).

    A sum begins when the last of its members has a gradient to add, which need not be the one that ends last: a slow
    worker's last backward is long.

    Parameters
    ----------
    ends_s, backward_s : ndarray, shape (workers,)
        End of the last action, and backward of a micro-batch.
    offset : ndarray of int64, shape (stages,)
        First worker of every stage.
    chunks : int
        Stages on the devices of each worker, which are summed together.
    whole_s, last_s, layers : ndarray, shape (stages,)
        Seconds of the sums, of what comes last of them, and layers.
    """
    stages, workers = len(offset), len(ends_s)
    groups = stages // chunks
    spans = np.empty((2, stages))
    for group in range(groups):
        first = offset[group]
        after = offset[group + 1] if group + 1 < stages else workers
        count, whole, last = 0.0, 0.0, 0.0
        for s in range(group, stages, groups):
            count += layers[s]
            whole += whole_s[s]
            last += last_s[s]
        hidden, _ = seen_parts(count, 1.0, overlap)
        begin, ended = -np.inf, -np.inf
        for w in range(first, after):
            backward = 0.0
            for s in range(group, stages, groups):
                backward += backward_s[offset[s] + w - first]
            begin, ended = max(begin, ends_s[w] - hidden * backward), max(ended, ends_s[w])
        end = sums_end_s(begin, ended, whole, last, overlap.contention)
        for s in range(group, stages, groups):
            spans[0, s], spans[1, s] = begin, end
    return spans


@general
def done_s(
    reduced_s: np.ndarray,
    offset: np.ndarray,
    chunks: int,
    forward_s: np.ndarray,
    update_s: np.ndarray,
    gather_s: np.ndarray,
    tied_s: float,
    norm_s: float,
    first_s: float,
    overlap: Overlap,
) -> np.ndarray:
    """When each worker has its next weights, shape (workers,).

    Parameters
    ----------
    reduced_s, gather_s : ndarray, shape (stages,)
        When gradients are summed, and how long it takes to gather updated weights.
    forward_s, update_s : ndarray, shape (workers,)
        Forward of a micro-batch (beside the first of the next step weights may be gathered), and update.
    tied_s, norm_s, first_s : float
        Exchange of tied embeddings, agreement on the gradient's norm, and ZeRO's first layers, which nothing hides.
    """
    stages, workers = len(offset), len(forward_s)
    groups = stages // chunks
    summed = reduced_s.copy()
    # One weight on two stages: neither has its gradient before both have summed and met.
    if tied_s > 0:
        both = max(summed[0], summed[stages - 1]) + tied_s
        summed[0], summed[stages - 1] = both, both
    # Clipping scales by the norm of all gradients: nobody updates before the last stage has summed.
    if norm_s > 0:
        summed[:] = summed.max() + norm_s
    done = np.empty(workers)
    for group in range(groups):
        gather, forward = 0.0, 0.0
        for s in range(group, stages, groups):
            gather += gather_s[s]
            slowest = 0.0
            for w in range(offset[s], offset[s + 1] if s + 1 < stages else workers):
                slowest = max(slowest, forward_s[w])
            forward += slowest
        seen = gathered_s(gather, forward, overlap)
        for s in range(group, stages, groups):
            for w in range(offset[s], offset[s + 1] if s + 1 < stages else workers):
                done[w] = summed[s] + update_s[w] + seen + first_s
    return done


@general
def led_s(
    ends_s: np.ndarray,
    backward_s: np.ndarray,
    region: np.ndarray,
    regions: np.ndarray,
    whole_s: np.ndarray,
    last_s: np.ndarray,
    busy_s: float,
    layers: float,
    update_s: np.ndarray,
    more_s: float,
    overlap: Overlap,
) -> np.ndarray:
    """When each worker has its next weights, the mean per step, where regions begin a step as they are done with one.

    A region that has waited for a slow way begins the next step late, and the gradients that come over a quick one are
    then early: regions lead by turns. With M[b, a] the time from region a's begin to region b's end, begins follow
    x_b(t + 1) = max over a of x_a(t) + M[b, a], and a step takes the largest mean of M over a cycle of regions
    (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992, theorem 3.23), which Karp's recursion
    finds (Discrete Mathematics 23, 1978). No link carries more than one step in a step, and no worker is done later
    than if all had begun together.

    Parameters
    ----------
    ends_s, backward_s, update_s : ndarray, shape (workers,)
        End of the last action, backward of a micro-batch, and update.
    region : ndarray of int, shape (workers,)
    regions, whole_s, last_s, busy_s
        Of `polygon.cost.stage_reduction.Ways`.
    layers : float
        Of the stage.
    more_s : float
        What follows the update: gathers of weights.
    """
    n = len(regions)
    hidden, _ = seen_parts(layers, 1.0, overlap)
    begin, end, update = np.full(n, -np.inf), np.full(n, -np.inf), np.zeros(n)
    of = np.searchsorted(regions, region)
    for w in range(len(ends_s)):
        r = of[w]
        update[r] = max(update[r], update_s[w])
        begin[r], end[r] = max(begin[r], ends_s[w] - hidden * backward_s[w]), max(end[r], ends_s[w])
    steps = np.empty((n, n))
    for a in range(n):
        for b in range(n):
            summed = sums_end_s(begin[a], end[a], whole_s[b, a], last_s[b, a], overlap.contention)
            steps[b, a] = summed + update[b] + more_s
    # Karp: with longest[k, b] the heaviest path of k steps to b, the largest mean over cycles is the largest over b of
    # the least over k < n of (longest[n, b] - longest[k, b]) / (n - k). All regions reach one another: any is a source.
    longest = np.full((n + 1, n), -np.inf)
    longest[0, 0] = 0.0
    for k in range(n):
        for b in range(n):
            for a in range(n):
                longest[k + 1, b] = max(longest[k + 1, b], longest[k, a] + steps[b, a])
    mean = busy_s  # no step is shorter than what the busiest link carries in it
    for b in range(n):
        least = np.inf
        for k in range(n):
            if longest[k, b] > -np.inf:
                least = min(least, (longest[n, b] - longest[k, b]) / (n - k))
        mean = max(mean, least)
    if not steps.max() < np.inf:  # a link is missing
        mean = np.inf
    done = np.empty(len(ends_s))
    for w in range(len(ends_s)):
        # Had all begun together, the last gradient to arrive would end the step of its region: leading never costs.
        done[w] = min(mean, steps[of[w]].max() - update[of[w]] + update_s[w])
    return done
