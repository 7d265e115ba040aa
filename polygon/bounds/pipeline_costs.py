"""What the stages of a pipeline cost at best: what the kernels of the lower bound are given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_SUMS = 4096
"""Of what some devices compute together (`device_sums`)."""


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
    """(3, n + 1) running sums of what forward and backward of a micro-batch are worth at least, in compute times
    seconds, and of what both of all micro-batches are."""
    class_s: np.ndarray
    """(3 spreads, n, n + 1, c, levels) forward and backward of layers [a, b) as quick as memory allows; inf if they do
    not fit. A spread is a step of the devices of a stage (`SizeWork.spreads`), each with all shardings."""
    spreads: np.ndarray
    """(spreads,) least compute of a stage with so many devices."""
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
    """(2, 3 spreads, n, n + 1) least compute times seconds of a micro-batch of any class [0], and the seconds of that
    [1], at the last level."""
    tier_s: np.ndarray
    """(2, n, n + 1, j) least exposed seconds of reducing layers [a, b)."""
    whole_s: np.ndarray
    """(2, n, n + 1, j) least seconds of all of these sums, hidden or not."""
    hidden_part: np.ndarray
    """(n, n + 1) part of a worker's own last backward that hides them."""
    own_forward_s: np.ndarray
    """(n, n + 1, c) least forward of a micro-batch: what is over of its time is backward."""
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
    """Most compute of these two together."""
    sums: np.ndarray
    """(sums,) ascending from 0: what whole devices compute together, as far as it is known."""
    fewest: int
    """Groups at least."""
    back_s: np.ndarray
    """(3, c) least seconds of backward alone: in one of the alike layers, and in the model's first and last layer, 0
    where these are of the alike."""
    path_s: np.ndarray
    """(c,) least seconds in which a micro-batch passes all layers and has gone back through the last, on workers with
    no more compute than one of the class."""
    alike: bool
    """Whether all layers are, so that it does not matter which of them a stage has: the first layer's place stands for
    the first group, the second's for all between, the third's for the last group."""
    whole: bool
    """Whether workers do whole micro-batches, and stages have whole workers; else any part of them."""


def best_class(class_s: np.ndarray, class_capacity: np.ndarray) -> np.ndarray:
    """`Pipeline.best`; inf where no class fits."""
    last = class_s[..., -1]
    product = last * class_capacity
    which = product.argmin(axis=-1)[..., None]
    return np.stack([np.take_along_axis(values, which, axis=-1)[..., 0] for values in (product, last)])


def device_sums(capacity: np.ndarray, devices: np.ndarray) -> np.ndarray:
    """What some devices compute together, ascending from 0, up to where the first that are not looked at begin.

    Parameters
    ----------
    capacity, devices : ndarray, shape (kinds,)
        Of a device of each kind, and how many there are.
    """
    found, limit = np.zeros(1), np.inf
    for kind in np.argsort(capacity, kind="stable"):
        count = int(min(devices[kind], MOST_SUMS // len(found)))
        if count < devices[kind]:
            limit = min(limit, (count + 1) * float(capacity[kind]))
        found = np.unique((found[:, None] + np.arange(count + 1) * capacity[kind]).ravel())
    kept: np.ndarray = found[found < limit * (1 - 1e-9)]
    return kept
