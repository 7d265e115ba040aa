"""Sums of gradients inside places where ZeRO divides what the workers of a stage hold, and gathering of weights.

ZeRO divides inside shard groups, which lie in one pool. With n bytes of gradient, w of weights, d shards and c copies
of each (`polygon.cost.reduction.collective_s`):

    scatter (n over d)  +  all-reduce (n / d over c)  +  after the update: gather (w over d)

Under ZeRO-3, and under ZeRO-2 where the runtime scatters after every micro-batch, the first is part of every backward
(`polygon.cost.sharding`); under ZeRO-3 weights are gathered before they are used, not after the update.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.memory import state_bytes
from polygon.cost.reduction import collective_s, copies_s
from polygon.cost.transfers import LinkArrays, Placement
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan
from polygon.domain.runtime import Runtime


def summed_part(zero: int, runtime: Runtime) -> float:
    """Part of an all-reduce inside a region that a step waits for at its end before it updates: ZeRO gathers updated
    weights instead of gradients, and has scattered these before where it does so after every micro-batch."""
    if not zero or runtime.owned_weights:
        return 1.0
    return 0.0 if zero == 3 or (zero == 2 and runtime.zero2_by_micro_batch) else 0.5


class Held(NamedTuple):
    """Who holds the layers of a stage.

    Attributes
    ----------
    pools, nodes, members, degrees : ndarray, shape (pools used,)
        As of `levels_s`.
    values, spread_values : float
        Weight gradients of one worker, and of these the experts'.
    spread : int
        Expert parallelism.
    """

    pools: np.ndarray
    nodes: np.ndarray
    members: np.ndarray
    degrees: np.ndarray
    values: float
    spread_values: float
    spread: int


def with_zero(
    plan: Plan,
    stage: int,
    held: Held,
    apart: np.ndarray,
    node_s: float,
    region_s: float,
    batch: Batch,
    runtime: Runtime,
    links: LinkArrays,
    model: Model,
    place: Placement,
) -> tuple[float, float, float]:
    """Seconds of the sums inside nodes and regions as the stage's ZeRO makes them, and of gathering weights after the
    update; `node_s` and `region_s` are of summing whole gradients everywhere."""
    zero, pools, nodes = plan.stages[stage].zero, held.pools, held.nodes
    if not zero:
        return node_s, region_s, 0.0
    inside_s = node_s + region_s
    if len(pools) == 1:
        per_node = int(held.members[0])
        near = per_node if apart[links.region[pools[0]]] else int(nodes[0]) * per_node
        degree, spread = int(held.degrees[0]), held.spread
        group = Shards(
            values=(held.values - held.spread_values) / degree,
            members=near,
            per_node=per_node,
            shards=min(plan.stages[stage].shards or near, int(place.shards[stage].min())),
            pool=int(pools[0]),
        )
        sum_s, gather_s = zero_sums_s(group, zero, batch, runtime, links, whole_s=inside_s, model=model)
        if held.spread_values:
            experts = Shards(
                values=held.spread_values / degree,
                members=near // spread,
                per_node=max(1, per_node // spread),
                shards=max(1, group.shards // spread),
                pool=group.pool,
            )
            also = zero_sums_s(experts, zero, batch, runtime, links, whole_s=0.0, model=model)
            sum_s, gather_s = sum_s + also[0], gather_s + also[1]
        return 0.0, sum_s, gather_s
    if runtime.owned_weights:
        return node_s, region_s, 0.0
    gather_s = 0.0 if zero == 3 else 0.5 * inside_s * state_bytes(batch)[0] / batch.gradient_bytes
    part = summed_part(zero, runtime)
    n_bytes = float(held.values * batch.gradient_bytes)
    between_s = copies_s(n_bytes, len(pools), pools, nodes, held.degrees, apart, links)
    if part == 0:
        between_s += _within_s(held, n_bytes, apart, links, place, stage)
    return part * node_s, part * region_s + between_s, gather_s


def _within_s(held: Held, n_bytes: float, apart: np.ndarray, links: LinkArrays, place: Placement, stage: int) -> float:
    """Seconds to sum between the shard groups of each pool what they have scattered, all pools at the same time."""
    mine, longest = place.members(stage), 0.0
    for pool, members, degree in zip(held.pools, held.members, held.degrees, strict=True):
        if apart[links.region[pool]]:
            continue
        p, near, of_pool = int(pool), int(members), place.pool[mine] == pool
        shards = int(place.shards[stage][of_pool].min())
        copies = int((place.alike[stage][of_pool] // place.shards[stage][of_pool]).max())
        latency_s, rate = float(links.ring_latency_s[p, p]), float(links.ring_bytes_per_s[p, p])
        part, side_by_side = n_bytes / int(degree) / shards, min(max(1, near // shards), copies)
        longest = max(longest, collective_s(part, copies, side_by_side, p, latency_s, rate, 2, links))
    return longest


class Shards(NamedTuple):
    """Devices of one pool that hold the same layers, and over how many of them ZeRO divides."""

    values: float
    """Parameters on one device."""
    members: int
    per_node: int
    shards: int
    pool: int


def zero_sums_s(
    group: Shards, zero: int, batch: Batch, runtime: Runtime, links: LinkArrays, *, whole_s: float, model: Model
) -> tuple[float, float]:
    """Seconds to sum gradients under ZeRO when the last backward ends, and to gather weights after the update.

    Parameters
    ----------
    whole_s : float
        Seconds of summing them whole on every device.
    """
    p, shards = group.pool, group.shards
    latency_s, rate = float(links.ring_latency_s[p, p]), float(links.ring_bytes_per_s[p, p])
    gradient, weight = group.values * batch.gradient_bytes, group.values * state_bytes(batch)[0]
    near = min(group.per_node, shards)
    if runtime.owned_weights and zero < 3:
        # All ranks sum; then one broadcast an owner, which passes every rank of the ring like a gathering does.
        owners = min(shards, weight_matrices(model))
        return whole_s, owners * collective_s(weight / owners, shards, near, p, latency_s, rate, 1, links)
    scattered = zero == 3 or (zero == 2 and runtime.zero2_by_micro_batch)
    sum_s = 0.0 if scattered else collective_s(gradient, shards, near, p, latency_s, rate, 1, links)
    # What a group has summed in parts, the groups that hold copies sum part by part: those of a node inside it first.
    copies = group.members // shards
    apart = max(1, group.per_node // shards)
    sum_s += collective_s(gradient / shards, copies, min(apart, copies), p, latency_s, rate, 2, links)
    return sum_s, 0.0 if zero == 3 else collective_s(weight, shards, near, p, latency_s, rate, 1, links)


def weight_matrices(model: Model) -> int:
    """Weight matrices of a model: what InternEvo deals out to the ranks of ZeRO, each whole to one of them.

    Its HybridZeroOptimizer sums gradients on all data-parallel ranks (no destination rank), gives every parameter to
    one rank and broadcasts rank by rank (internlm/solver/optimizer/hybrid_zero_optim.py `_partition_param_list`,
    `broadcast_params`); biases and norms go with the matrix before them (internlm/core/communication/utils.py
    `ParamAsyncBcastHandler`).
    """
    return model.blocks * (2 + (3 if model.gated_mlp else 2)) + 2
