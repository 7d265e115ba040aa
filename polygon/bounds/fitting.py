"""How quickly a worker does layers that have to fit its memory: recomputation, ZeRO's traffic, micro-batches in flight.

Of layers [a, b) that do not fit as they are, those are recomputed that give most memory for their time, the last one in
part: the relaxation of a knapsack, with an item for each step of a layer from one way to recompute to the next
(`_steps`). A worker that holds k micro-batches at most, each of them until it has passed all layers behind and come
back, does no more than k in that time (Little's law); the best k counts.

States are sharded as widely as can be. A worker of a stage that

- sums gradients when the step ends sends nothing else (`SHARDINGS`: *end*);
- scatters gradients after every micro-batch (and gathers weights, under ZeRO-3) does so among devices of two or more
  nodes (*apart*),
- or among devices of one node, or has nobody to do so with, where others of its stage do (*any* of the last two or
  three).

What is seen of the traffic of a layer with forward F and backward B beside which h of it may hide is, with gather g and
scatter s, max(g - h F, 0) and max(g + s - h B, 0) (`polygon.cost.sharding`); latency and copies are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polygon.bounds.stage_tiers import Kinds, WorkerClass, differences
from polygon.cost.memory import state_bytes
from polygon.cost.overlap import overlap_of
from polygon.cost.reduction import collective_s
from polygon.cost.tables import ClassMemory, CostTables, running_sum
from polygon.domain.divisors import divisors
from polygon.domain.plan import RECOMPUTE

EVERY = slice(None)
SHARDINGS = ("end", "any", "apart")
MANY_BYTES = 1e12
"""So many that latency does not matter."""
FLIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Micro-batches in flight at which the bound takes a step; from one to the next it takes the better of both."""


class Executions:
    """What the ways to execute a class of workers cost, each layer under the best of them: experts spread more or less,
    sequences split beside the layers or not."""

    def __init__(self, tables: CostTables, of: WorkerClass, micro_batch_size: int) -> None:
        self._tables, self._of, self._size = tables, of, micro_batch_size
        model, tokens = tables.problem.model, tables.problem.batch.seq_len
        # Every tensor-parallel degree of a stage has its experts spread alike, so that ep divides all its devices.
        fewest, most = of.stage_devices
        self.spreads = [
            ep for ep in divisors(model.experts or 1) if ep <= of.shards and (fewest - 1) // ep < most // ep
        ]
        self._sequence = (False, True) if of.tp > 1 and tokens % (of.tp * of.cp) == 0 else (False,)

    def least_s(self, recompute: str, *, accumulates: bool, spread: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Least seconds of forward and of backward of every layer, shape (layers,) each.

        Experts of a stage are spread over so many devices, by default over as many as is best for each layer.
        Gradients need not be added up in layers where they can be sharded (ZeRO-3), unless a stage `accumulates` them.
        """
        accumulates = accumulates or self._of.shards < 2
        found = [
            self._tables.times(
                self._of.pool, self._of.tp, self._size, recompute, self._of.cp, ep, sequence, accumulates
            ).layers
            for ep in (self.spreads if spread is None else [spread])
            for sequence in self._sequence
        ]
        return np.min([of.forward_s for of in found], axis=0), np.min([of.backward_s for of in found], axis=0)

    def memory(self, recompute: str, ep: int) -> ClassMemory:
        """What layers hold at least."""
        return self._tables.memory(self._of.tp, self._size, recompute, self._of.cp, ep, self._sequence[-1])


def fitting_s(
    tables: CostTables,
    kinds: Kinds,
    micro_batch_size: int,
    rest_s: np.ndarray,
    *,
    held: Sequence[float] = (),
    rows: slice = EVERY,
    columns: slice = EVERY,
) -> np.ndarray:
    """Seconds per micro-batch of layers [a, b) with as little recomputation as fits a worker's memory.

    Parameters
    ----------
    rest_s : ndarray, shape (layers + 1,)
        Least seconds in which a micro-batch passes layers [b, layers) and comes back.
    held : sequence of float, optional
        Micro-batches in flight, whatever a micro-batch takes: of interleaved plans.
    rows, columns : slice
        First layers a, and ends b, that matter.

    Returns
    -------
    ndarray, shape (shardings, rows, columns, classes, 1 or one for each of `held`)
        inf where nothing fits.
    """
    layers = tables.problem.model.layers
    some = len(range(layers)[rows]), len(range(layers + 1)[columns])
    least_s = np.full((max(1, len(held)), len(SHARDINGS), len(kinds.classes), *some), np.inf)
    for c, of in enumerate(kinds.classes):
        if of.shards < of.cp:
            continue  # fewer devices than a worker has
        ways = Executions(tables, of, micro_batch_size)
        for ep in ways.spreads:
            for where, work, room in _ways(tables, kinds, of, ways, ep, (rows, columns)):
                quickest = work.held_s(room, held[0] if held else 1.0)
                if all((quickest >= least_s[-1, sharding, c]).all() for sharding in where):
                    continue  # with more in flight it takes no less
                for level, found in enumerate(
                    [work.held_s(room, count) for count in held] if held else [work.passing_s(room, rest_s)]
                ):
                    for sharding in where:
                        least = least_s[level, sharding, c]
                        np.minimum(least, found, out=least)
    return np.ascontiguousarray(np.moveaxis(least_s, (0, 2), (4, 3)))


def _ways(
    tables: CostTables, kinds: Kinds, of: WorkerClass, ways: Executions, ep: int, some: tuple[slice, slice]
) -> Sequence[tuple[tuple[int, ...], Work, np.ndarray]]:
    """What a micro-batch takes in layers [a, b) of a class of workers, and the room for its activations, by the ways to
    shard; and to which of `SHARDINGS` each belongs."""
    runtime = tables.problem.runtime
    per_weight, per_gradient, per_optimizer = state_bytes(tables.problem.batch)
    layers = tables.problem.model.layers
    memory = {recompute: ways.memory(recompute, ep).layers for recompute in RECOMPUTE}
    plain = memory["none"]
    held = differences(running_sum(plain.parameters))
    held[1:, layers] += plain.tied_parameters
    held = held[some]
    divided = plain.parameters if plain.sharded_parameters is None else plain.sharded_parameters
    whole = differences(running_sum(divided))
    whole[1:, layers] += plain.tied_parameters
    whole = whole[some]
    transient = np.minimum.reduce([_longest(memory[r].transient_bytes)[some] for r in RECOMPUTE])
    limit = tables.limit_bytes[of.pool] - runtime.context_bytes - transient
    activations = differences(running_sum(plain.activation_bytes))[some]
    hidden = overlap_of(runtime, tables.problem.batch).gather_hidden
    # Experts of which every device has others are gathered and scattered by nobody.
    summed = plain.parameters - plain.spread_over(ep)
    found = []

    def add(where: tuple[int, ...], need: np.ndarray, zero: int, per_byte: float) -> None:
        """Layers that have such needs beside activations, and such traffic."""
        accumulates = zero < 3
        forward, backward = ways.least_s("none", accumulates=accumulates, spread=ep)
        freed = [plain.activation_bytes - memory[recompute].activation_bytes for recompute in RECOMPUTE[1:]]
        more_s = [
            sum(ways.least_s(recompute, accumulates=accumulates, spread=ep)) - forward - backward
            for recompute in RECOMPUTE[1:]
        ]
        gather_s = summed * per_weight * per_byte if zero == 3 else np.zeros(layers)
        scatter_s = summed * per_gradient * per_byte
        seen_s = np.maximum(gather_s - hidden * forward, 0.0)
        seen_s += np.maximum(gather_s + scatter_s - hidden * backward, 0.0)
        once = running_sum(forward + backward)
        work = Work(
            seconds=differences(once)[some],
            bytes=activations,
            gives=[(rate, differences(running_sum(each))[some]) for rate, each in _steps(freed, more_s)],
            least_s=differences(running_sum(forward + backward + seen_s))[some]
            if per_byte
            else np.zeros_like(activations),
        )
        found.append((where, work, limit - need))

    need = held * (per_weight + per_gradient) + whole / of.shards * per_optimizer
    add((0,), need, 1, 0.0)
    add((1,), held * (per_weight + per_gradient + per_optimizer), 1, 0.0)
    for where, shards in (((1,), min(of.shards, node_shards(tables, of))), ((1, 2), of.shards)):
        per_byte = _least_scatter(tables, kinds, of, apart=len(where) == 2)
        if math.isinf(per_byte):
            continue
        part = whole / shards
        if runtime.zero2_by_micro_batch:
            add(where, held * per_weight + part * (per_gradient + per_optimizer), 2, per_byte)
        add(where, part * (per_weight + per_gradient + per_optimizer), 3, per_byte)
    return found


def _steps(freed: Sequence[np.ndarray], more_s: Sequence[np.ndarray]) -> list[tuple[float, np.ndarray]]:
    """Items of the knapsack: bytes per second, best first, and the bytes that each layer frees at that rate.

    Of a layer the points (bytes freed, seconds more) of all ways to recompute it, with none at all, have a lower convex
    hull; its edges are the items.

    Parameters
    ----------
    freed, more_s : sequence of ndarray, shape (layers,)
        By way to recompute.
    """
    columns, of_layer = np.unique(np.array([*freed, *more_s]), axis=1, return_inverse=True)
    by_rate: dict[float, np.ndarray] = {}
    for column, ways in enumerate(columns.T):
        at, spent = 0.0, 0.0
        points = list(zip(ways[: len(freed)].tolist(), np.maximum(ways[len(freed) :], 0.0).tolist(), strict=True))
        while ahead := [(f - at, max(s - spent, 0.0)) for f, s in points if f > at * (1 + 1e-12)]:
            # The next corner of the hull: from here the most bytes for a second.
            more, seconds = max(ahead, key=lambda step: (step[0] / max(step[1], 1e-300), step[0]))
            # Rates that differ by less than rounding are one.
            rate = float(f"{more / max(seconds, 1e-300) * (1 + 1e-9):.9g}")
            each = by_rate.setdefault(rate, np.zeros(len(freed[0])))
            each[of_layer.ravel() == column] += more * (1 + 1e-12)
            at, spent = at + more, spent + seconds
    return sorted(by_rate.items(), key=lambda item: -item[0])


class Work(NamedTuple):
    """A micro-batch in layers [a, b) of a worker, shape (layers, layers + 1), without recomputation."""

    seconds: np.ndarray
    bytes: np.ndarray
    """Of its activations."""
    gives: list[tuple[float, np.ndarray]]
    """Bytes per second, falling, and the bytes that recomputing frees at that rate."""
    least_s: np.ndarray
    """What a micro-batch takes whatever is computed."""

    def held_s(self, room: np.ndarray, count: float) -> np.ndarray:
        """Seconds with as much recomputed as so many in flight ask for; inf where they do not fit into the room."""
        short, more_s = np.maximum(self.bytes - room / count, 0.0), np.zeros_like(room)
        for rate, most in self.gives:
            freed = np.minimum(short, most)
            more_s += freed / rate
            short -= freed
        fits = (short <= 0) & (self.seconds > 0) & (room >= 0)
        return np.where(fits, np.maximum(self.seconds + more_s, self.least_s), np.inf)

    def passing_s(self, room: np.ndarray, rest_s: np.ndarray) -> np.ndarray:
        """Seconds between two micro-batches with the best number in flight."""
        best = np.full_like(room, np.inf)
        for count, more in pairwise((*FLIGHTS, np.inf)):
            seconds = self.held_s(room, count)
            trip_s = (seconds + rest_s) / (more - 1) if more < np.inf else 0.0
            best = np.minimum(best, np.maximum(seconds, trip_s))
        return best


def node_shards(tables: CostTables, of: WorkerClass) -> int:
    """Most devices of one node that hold the same part of the layers."""
    return max(1, tables.problem.cluster.pools[of.pool].devices_per_node // of.tp)


def _least_scatter(tables: CostTables, kinds: Kinds, of: WorkerClass, *, apart: bool) -> float:
    """Least seconds per byte to scatter gradients (or to gather weights) over devices of a class, latency left out.

    Parameters
    ----------
    apart : bool
        Over devices of two or more nodes, else of one.

    Returns
    -------
    float
        inf where there are not as many.
    """
    pools, links = tables.problem.cluster.pools, tables.links
    arrays = links.arrays(tables.problem.runtime)
    best = math.inf
    for p in np.flatnonzero(kinds.of_pool == of.kind).tolist():
        if apart and pools[p].nodes < 2:
            continue
        rate = float(links.ring_bytes_per_s[p, p])
        for near in range(1, node_shards(tables, of) + 1):
            members = near + apart
            if 2 <= members <= of.shards:
                seconds = collective_s(MANY_BYTES, members, near, p, 0.0, rate, 1, arrays)
                best = min(best, seconds / MANY_BYTES)
    return best


def _longest(values: np.ndarray) -> np.ndarray:
    """Largest of the values [a, b), by a and b, shape (n, n + 1)."""
    longest = np.zeros((len(values), len(values) + 1))
    for a in range(len(values)):
        longest[a, a + 1 :] = np.maximum.accumulate(values[a:])
    return longest
