"""The arithmetic of a uniform configuration as numba kernels: one configuration, or many at once."""

from __future__ import annotations

import numpy as np

from polygon.cost.network import ring_kernel
from polygon.kernel_options import general

COMPUTE, TENSOR, BUBBLE, P2P, DATA, OPTIMIZER = range(6)
"""Places of the terms in what `terms_kernel` returns."""
CONTENTION = 0.126
"""How much slower compute is while a collective runs beside it (Galvatron's measured overlap coefficient)."""
LAST_BUCKET = 0.05
"""Part of the gradients whose reduction starts when backward has ended."""
BUCKET_BYTES = 5e8
"""Largest message of a reduction: gradients go in buckets, each of which waits for the latency of its ring (the default
of DeepSpeed, InternEvo and Sailor)."""
ZERO3_HIDING = (0.0, 0.5, 1.0)
"""Part of a layer's compute that may hide the gathering of the next: overlap none, backward, full."""


@general
def visible_kernel(communication_s: float, compute_s: float) -> float:
    """What overlapped communication adds to compute: the longer part, and the compute that it slows."""
    return max(communication_s - compute_s, 0.0) + CONTENTION * min(communication_s, compute_s)


@general
def exposed_kernel(reduce_s: float, gather_s: float, forward_s: float, backward_s: float, overlap: int) -> float:
    """What is seen of a reduction beside the last backward, and of a gathering beside the first forward (overlap: 0
    none, 1 backward, 2 both)."""
    if overlap == 0:
        return reduce_s + gather_s
    exposed = visible_kernel(reduce_s, 0.9 * backward_s) + LAST_BUCKET * reduce_s
    if overlap == 2:
        gather_s = visible_kernel(gather_s, 0.8 * forward_s)
    return exposed + gather_s


@general
def wire_kernel(n_bytes: float, members: int, per_node: int, network: np.ndarray, passes: int) -> float:
    """`ring_kernel` in buckets; `network`: devices per node, fabric rate and latency, node rate and latency, mesh."""
    if members < 2 or n_bytes <= 0:
        return 0.0
    buckets = max(1.0, np.ceil(n_bytes / BUCKET_BYTES))
    one_s = ring_kernel(
        n_bytes / buckets,
        members,
        per_node,
        int(network[0]),
        network[1],
        network[2],
        network[3],
        network[4],
        network[5] > 0,
        passes,
    )
    return buckets * one_s


@general
def sharded_kernel(
    kinds: np.ndarray,
    micro_batches: int,
    members: int,
    per_node: int,
    network: np.ndarray,
    hidden: float,
    pieces: int,
    again: int,
    weight_bytes: float,
    gradient_bytes: float,
    copies_s: float,
) -> float:
    """What ZeRO-3 shows of gathering weights and scattering gradients, layer by layer in every micro-batch (`again`: a
    further time in backward)."""
    first_s, seen_s = 0.0, 0.0
    for k in range(kinds.shape[0]):
        count, forward, backward, held = kinds[k]
        gather = pieces * wire_kernel(held * weight_bytes / pieces, members, per_node, network, 1)
        scatter = pieces * wire_kernel(held * gradient_bytes / pieces, members, per_node, network, 1)
        seen_s += count * visible_kernel(gather, hidden * forward)
        seen_s += count * visible_kernel((1 + again) * gather + scatter, hidden * backward)
        if k == 0:
            first_s += gather + scatter
        elif k == 1:
            first_s += gather
    return micro_batches * (seen_s + copies_s) + first_s


@general
def terms_kernel(
    stage_s: np.ndarray,
    stage_communication_s: np.ndarray,
    backward_s: float,
    parameters: float,
    kinds: np.ndarray,
    micro_batches: int,
    interleave: int,
    sends: int,
    send_s: float,
    members: int,
    per_node: int,
    shards: int,
    network: np.ndarray,
    zero: int,
    overlap: int,
    pieces: int,
    again: int,
    owned: int,
    weight_bytes: float,
    gradient_bytes: float,
    copies_s: float,
    update_base_s: float,
    update_parameter_s: float,
    out: np.ndarray,
) -> float:
    """Seconds of every term into `out`; returns their sum.

    Parameters
    ----------
    stage_s, stage_communication_s : ndarray, shape (stages,)
        Forward and backward of a stage, and the communication exposed in them.
    backward_s, parameters : float
        Largest backward and most parameters of a stage.
    kinds : ndarray, shape (kinds, 4)
        Per layer kind: most on a stage, forward, backward [s], parameters (used by ZeRO-3).
    members, per_node, shards : int
        Data-parallel ranks, how many of them on a node, and over how many ZeRO divides (the rest hold copies).
    network : ndarray, shape (6,)
        See `wire_kernel`.
    owned : int
        Weight matrices that ZeRO-1 or 2 deals out whole; 0: it divides every one.
    copies_s : float
        ZeRO-3's passes over its gathered copies, per micro-batch.
    update_base_s, update_parameter_s : float
        Optimizer: launch, and seconds per parameter.
    """
    slowest = np.argmax(stage_s)
    busiest = stage_s[slowest]
    out[TENSOR] = micro_batches * stage_communication_s[slowest]
    out[COMPUTE] = micro_batches * busiest - out[TENSOR]
    out[BUBBLE] = (stage_s.sum() - busiest) / interleave
    out[P2P] = sends * send_s
    near = min(per_node, shards)
    gradient, weight = parameters * gradient_bytes, parameters * weight_bytes
    if zero == 0:
        reduce_s, gather_s = wire_kernel(gradient, members, per_node, network, 2), 0.0
    elif owned > 0 and zero < 3:
        # All ranks sum; then one broadcast an owner, which passes every rank of the ring like a gathering does.
        owners = min(shards, owned)
        reduce_s = wire_kernel(gradient, members, per_node, network, 2)
        gather_s = owners * wire_kernel(weight / owners, shards, near, network, 1)
    else:
        # Inside the shards, then what a shard holds between the copies of it.
        reduce_s = 0.0 if zero == 3 else wire_kernel(gradient, shards, near, network, 1)
        reduce_s += wire_kernel(gradient / shards, members // shards, max(1, per_node // shards), network, 2)
        gather_s = 0.0 if zero == 3 else wire_kernel(weight, shards, near, network, 1)
    out[DATA] = exposed_kernel(reduce_s, gather_s, max(busiest - backward_s, 0.0), backward_s, overlap)
    if zero == 3 and shards > 1:
        hidden = ZERO3_HIDING[overlap]
        out[DATA] += sharded_kernel(
            kinds, micro_batches, shards, near, network, hidden, pieces, again, weight_bytes, gradient_bytes, copies_s
        )
    out[OPTIMIZER] = update_base_s + parameters / (shards if zero >= 1 else 1) * update_parameter_s
    return out.sum()


@general
def in_flight_kernel(gpipe: bool, stages: int, interleave: int, stage: int, micro_batches: int) -> float:
    """Most micro-batches whose activations a stage holds, in units of all of its layers."""
    if gpipe:
        return float(micro_batches)
    if interleave == 1:
        return float(min(micro_batches, stages - stage))
    chunks = 2 * (stages - stage - 1) + (interleave - 1) * stages + 1
    return min(micro_batches * interleave, chunks) / interleave


@general
def peak_kernel(
    held: np.ndarray,
    largest: np.ndarray,
    activation_bytes: np.ndarray,
    transient_bytes: np.ndarray,
    sharded: np.ndarray,
    micro_batches: int,
    interleave: int,
    gpipe: bool,
    zero: int,
    shards: int,
    weight_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
) -> float:
    """Most bytes that a device of any stage holds (see `polygon.cost.memory.stage_memory`), without context."""
    stages, peak = len(held), 0.0
    whole = weight_bytes * (zero < 3) + gradient_bytes * (zero < 2) + optimizer_bytes * (zero < 1)
    part = (weight_bytes + gradient_bytes + optimizer_bytes - whole) / shards
    for s in range(stages):
        total = held[s] * whole + sharded[s] * part + transient_bytes[s]
        total += activation_bytes[s] * in_flight_kernel(gpipe, stages, interleave, s, micro_batches)
        if zero >= 3 and shards > 1:
            total += largest[s] * (2 * weight_bytes + gradient_bytes)
        peak = max(peak, total)
    return peak


@general
def many_kernel(
    integers: np.ndarray,
    starts: np.ndarray,
    stages: np.ndarray,
    kind_starts: np.ndarray,
    kinds: np.ndarray,
    layouts: np.ndarray,
    network: np.ndarray,
    machine: np.ndarray,
    terms: np.ndarray,
    peaks: np.ndarray,
) -> None:
    """Terms and peaks of many configurations.

    Parameters
    ----------
    integers : ndarray of int, shape (n, 12)
        Layout, micro-batches, members, per node, zero, overlap, pieces, sends, GPipe or not, shards, owned matrices,
        whether ZeRO-3 gathers again.
    starts, kind_starts : ndarray, shape (layouts + 1,)
        Where a layout's stages begin in `stages` (rows: time, communication, held, largest, activations, transient,
        sharded) and its kinds in `kinds`.
    layouts : ndarray, shape (layouts, 5)
        Largest backward, most parameters, send seconds, seconds of ZeRO-3 copies, interleaving.
    network : ndarray, shape (6,)
        See `wire_kernel`.
    machine : ndarray, shape (6,)
        Bytes of weight, gradient, optimizer state, gradients as they are held; optimizer's base and slope [s].
    """
    for i in range(integers.shape[0]):
        layout = integers[i, 0]
        rows = stages[starts[layout] : starts[layout + 1]]
        backward_s, parameters, send_s, copies_s, interleave = layouts[layout]
        terms_kernel(
            rows[:, 0],
            rows[:, 1],
            backward_s,
            parameters,
            kinds[kind_starts[layout] : kind_starts[layout + 1]],
            integers[i, 1],
            int(interleave),
            integers[i, 7],
            send_s,
            integers[i, 2],
            integers[i, 3],
            integers[i, 9],
            network,
            integers[i, 4],
            integers[i, 5],
            integers[i, 6],
            integers[i, 11],
            integers[i, 10],
            machine[0],
            machine[1],
            copies_s,
            machine[4],
            machine[5],
            terms[i],
        )
        peaks[i] = peak_kernel(
            rows[:, 2],
            rows[:, 3],
            rows[:, 4],
            rows[:, 5],
            rows[:, 6],
            integers[i, 1],
            int(interleave),
            integers[i, 8] > 0,
            integers[i, 4],
            integers[i, 9],
            machine[0],
            machine[3],
            machine[2],
        )
