"""What a runtime hides of its communication: one set of kernels for the simulation, the grid and the relaxation."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from polygon.cost.memory import state_bytes
from polygon.domain.model import Batch
from polygon.domain.runtime import DP_OVERLAP, Runtime
from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import kernel

HIDING = {"none": 0.0, "backward": 0.5, "full": 1.0}
"""Part of a layer's compute that may hide the gathering of the next, by `Runtime.dp_overlap`."""
GATHER_WINDOW = 0.8
"""Part of the first forward that hides the gathering of updated weights."""


class Overlap(NamedTuple):
    """A `Runtime`'s overlap as numbers for kernels."""

    data: int
    """Number of `dp_overlap` in `DP_OVERLAP`."""
    hidden_part: float
    last_bucket: float
    by_layer: bool
    contention: float
    gather_hidden: float
    """Part of a layer's compute that hides the gathering of the next."""
    scatters: bool
    """Whether ZeRO-2 scatters gradients after every micro-batch."""
    p2p: bool
    """Whether stages send while they compute."""
    apart: bool
    """Whether their messages follow one another where they do not."""
    weight_bytes: float
    gradient_bytes: float


@lru_cache(maxsize=256)
@gives_pointed
def overlap_of(runtime: Runtime, batch: Batch) -> Overlap:
    """The numbers of a runtime for a batch."""
    weight_bytes, gradient_bytes, _ = state_bytes(batch)
    return Overlap(
        data=DP_OVERLAP.index(runtime.dp_overlap),
        hidden_part=float(runtime.hidden_part),
        last_bucket=float(runtime.last_bucket),
        by_layer=bool(runtime.by_layer),
        contention=float(runtime.contention),
        gather_hidden=1.0 if runtime.by_layer else HIDING[runtime.dp_overlap],
        scatters=bool(runtime.zero2_by_micro_batch),
        p2p=bool(runtime.p2p_overlap),
        apart=bool(runtime.exchanges_apart),
        weight_bytes=float(weight_bytes),
        gradient_bytes=float(gradient_bytes),
    )


@kernel
def visible_s(communication_s: float, compute_s: float, contention: float) -> float:
    """What overlapped communication adds to compute: the longer part, and the compute that it slows."""
    return max(communication_s - compute_s, 0.0) + contention * min(communication_s, compute_s)


@kernel
def seen_parts(layers: float, part: float, overlap: Overlap) -> tuple[float, float]:
    """Part of a backward beside which gradients are summed, and part of the sums that none of it hides; `part` of the
    gradient is of what comes last (`polygon.cost.step_times.part_at_end`)."""
    if overlap.data == 0:
        return 0.0, 1.0
    if overlap.by_layer:
        return (layers - 1) / layers, part
    return overlap.hidden_part, overlap.last_bucket


@kernel
def sums_in_step(layers: float, n_bytes: float, bucket_bytes: float, overlap: Overlap) -> float:
    """How many sums the gradients of a stage go in, one behind the other: its layers, or a runtime's buckets."""
    return layers if overlap.by_layer else max(1.0, np.ceil(n_bytes / bucket_bytes))


@kernel
def summed_s(
    end_s: float, backward_s: float, whole_s: float, last_s: float, layers: float, overlap: Overlap
) -> tuple[float, float]:
    """When the gradients of a stage begin and end to be summed beside the backward of the last micro-batch, if it ends
    on all workers alike: a runtime that sums layer by layer begins the (n - 1)-th part of it, of n layers, before."""
    begin_s = end_s - seen_parts(layers, 1.0, overlap)[0] * backward_s
    return begin_s, sums_end_s(begin_s, end_s, whole_s, last_s, overlap.contention)


@kernel
def sums_end_s(begin_s: float, end_s: float, whole_s: float, last_s: float, contention: float) -> float:
    """When sums end that begin when every worker has a gradient to add, the last backward of all ending at `end_s`.

    What comes last waits for all of backward: of `whole_s` for all sums it takes `last_s`, latency and the last layer's
    part or the last bucket's (`seen_parts`). What runs beside backward slows it (`contention`).
    """
    return max(end_s + last_s, begin_s + whole_s) + contention * min(whole_s, end_s - begin_s)


@kernel
def gathered_s(gather_s: float, forward_s: float, overlap: Overlap) -> float:
    """What is seen of gathering updated weights beside the first forward of the next step."""
    if overlap.data < 2:
        return gather_s
    return visible_s(gather_s, GATHER_WINDOW * forward_s, overlap.contention)
