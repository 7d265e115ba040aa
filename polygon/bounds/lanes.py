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

from polygon.bounds.pipeline_costs import Pipeline
from polygon.bounds.stage_bound import waiting_s, workers_capacity
from polygon.jit.compilation import general, kernel

LANES = 1.02
"""Micro-batches of a lane at which the bound takes a step, one over the other, where they are many."""
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
    more_s: float,
    time_s: float,
) -> float:
    """Seconds of a micro-batch on a worker of class c that has so many layers in a group, with so much more, and does
    so many; inf if these do not end in time."""
    first, level = min(group, 1), 0
    while level + 1 < pipeline.levels[min(group, len(pipeline.levels) - 1)] and pipeline.held[level + 1] <= count:
        level += 1
    each_s = float(pipeline.class_s[scatters - 3, first, first + layers, c, level]) + more_s
    return each_s if each_s * count <= (time_s - waits_s[scatters, layers]) * (1 + 1e-9) else np.inf


@kernel
def most_layers(
    pipeline: Pipeline, group: int, waits_s: np.ndarray, c: int, count: float, more_s: float, time_s: float
) -> int:
    """Most layers of which a worker of class c in a group does so many micro-batches, each with so much more."""
    most = 0
    for scatters in range(2):
        for layers in range(most + 1, pipeline.forward_s.shape[0] - min(group, 1)):
            if own_s(pipeline, group, waits_s, scatters, layers, c, count, more_s, time_s) == np.inf:
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


@kernel
def passing_lane(
    pipeline: Pipeline, waits_s: np.ndarray, count: int, most_groups: int, time_s: float, price: float, room: np.ndarray
) -> float:
    """`lane_capacity` and, at so much for a second, what a micro-batch takes to pass all workers of the lane."""
    layers = pipeline.forward_s.shape[0] - 1
    used, after = room[0], room[1]
    used[:] = np.inf
    used[0], best = 0.0, np.inf
    for group in range(most_groups):
        after[:] = np.inf
        for c in range(len(pipeline.class_capacity)):
            capacity = pipeline.class_capacity[c]
            more_s = pipeline.end_s[0, c] if group == 0 else 0.0
            end_s = more_s + pipeline.end_s[1, c]
            for scatters in range(2):
                for held in range(1, layers + 1 - min(group, 1)):
                    each_s = own_s(pipeline, group, waits_s[group], scatters, held, c, count, more_s, time_s)
                    if each_s == np.inf:
                        break
                    for b in range(held, layers):
                        after[b] = min(after[b], used[b - held] + capacity + price * each_s)
                    if group + 1 >= pipeline.fewest and used[layers - held] < best:
                        each_s = own_s(pipeline, group, waits_s[group], scatters, held, c, count, end_s, time_s)
                        best = min(best, used[layers - held] + capacity + price * each_s)
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
        part = more * limit / pipeline.micro_batches * (1 + 1e-9)
        possible = held <= part
        if possible and more < most_groups:
            for weight in PASSING:
                price = weight * part / time_s
                held = passing_lane(pipeline, waits_s, count, most_groups, time_s, price, room)
                possible = possible and held <= part * (1 + weight)
        if possible:
            return True
        count = more + 1
    return False
