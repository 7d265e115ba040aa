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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from polygon.bounds.stage_tiers import Kinds, WorkerClass, differences
from polygon.cost.memory import LayerMemory, state_bytes
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


class Held(NamedTuple):
    """What a worker holds of layers [a, b) that nothing shards, arrays by a and b."""

    layers: LayerMemory
    """Of every layer, without recomputation."""
    parameters: np.ndarray
    divided: np.ndarray
    """Those of them whose states may be sharded."""
    transient_bytes: np.ndarray
    activation_bytes: np.ndarray
    """Of a micro-batch, without recomputation."""


class Computed(NamedTuple):
    """What a micro-batch takes."""

    forward_s: np.ndarray
    """Of every layer, without recomputation."""
    backward_s: np.ndarray
    seconds: np.ndarray
    """Of layers [a, b)."""
    gives: list[tuple[float, np.ndarray]]
    """See `Work`."""


Found = TypeVar("Found", Held, Computed)


class Executions:
    """What the ways to execute a class of workers cost, each layer under the best of them: experts spread more or less,
    sequences split beside the layers or not."""

    def __init__(
        self, tables: CostTables, of: WorkerClass, micro_batch_size: int, known: dict[Any, Any] | None = None
    ) -> None:
        self._tables, self._of, self._size = tables, of, micro_batch_size
        self._known = {} if known is None else known
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

    def held(self, ep: int, some: tuple[slice, slice]) -> Held:
        """What layers [a, b) hold, for some of these; worked out once for workers alike that shard otherwise."""

        def sums(of_layer: np.ndarray, tied: float = 0.0) -> np.ndarray:
            """Of layers [a, b)."""
            found = differences(running_sum(of_layer))
            found[1:, len(of_layer)] += tied
            return found[some]

        def make() -> Held:
            """See `Held`."""
            plain = self.memory("none", ep).layers
            longest = [_longest(self.memory(recompute, ep).layers.transient_bytes)[some] for recompute in RECOMPUTE]
            divided = plain.parameters if plain.sharded_parameters is None else plain.sharded_parameters
            return Held(
                plain,
                sums(plain.parameters, plain.tied_parameters),
                sums(divided, plain.tied_parameters),
                np.minimum.reduce(longest),
                sums(plain.activation_bytes),
            )

        return self._once(make, ep, some)

    def computed(self, ep: int, some: tuple[slice, slice], *, accumulates: bool) -> Computed:
        """What layers take, and what recomputing them frees; worked out once, too."""

        def make() -> Computed:
            """See `Computed`."""
            forward, backward = self.least_s("none", accumulates=accumulates, spread=ep)
            memory = [self.memory(recompute, ep).layers.activation_bytes for recompute in RECOMPUTE]
            more_s = [
                sum(self.least_s(recompute, accumulates=accumulates, spread=ep)) - forward - backward
                for recompute in RECOMPUTE[1:]
            ]
            steps = _steps([memory[0] - bytes_ for bytes_ in memory[1:]], more_s)
            gives = [(rate, differences(running_sum(each))[some]) for rate, each in steps]
            return Computed(forward, backward, differences(running_sum(forward + backward))[some], gives)

        return self._once(make, ep, some, accumulates or self._of.shards < 2)

    def _once(self, make: Callable[[], Found], ep: int, some: tuple[slice, slice], *others: bool) -> Found:
        """What was made for workers of this pool and these degrees, or is made now."""
        of, ends = self._of, tuple((places.start, places.stop) for places in some)
        key = of.pool, of.tp, of.cp, ep, ends, others
        if key not in self._known:
            self._known[key] = make()
        found: Found = self._known[key]
        return found


def fitting_s(
    tables: CostTables,
    kinds: Kinds,
    micro_batch_size: int,
    rest_s: np.ndarray,
    *,
    held: Sequence[float] = (),
    rows: slice = EVERY,
    columns: slice = EVERY,
    known: dict[Any, Any] | None = None,
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
    known : dict, optional
        What was worked out for other kinds, of these tables and this size.

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
        ways = Executions(tables, of, micro_batch_size, known)
        for ep in ways.spreads:
            for where, work, room in _ways(tables, kinds, of, ways, ep, (rows, columns)):
                if held:
                    found = work.held_s(room, np.array(held)[:, None, None])
                elif all((work.held_s(room, 1.0) >= least_s[0, sharding, c]).all() for sharding in where):
                    continue  # with more in flight it takes no less
                else:
                    found = work.passing_s(room, rest_s)
                for sharding in where:
                    least = least_s[:, sharding, c]
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
    plain, held, whole, transient, activations = ways.held(ep, some)
    limit = tables.limit_bytes[of.pool] - runtime.context_bytes - transient
    hidden = overlap_of(runtime, tables.problem.batch).gather_hidden
    # Experts of which every device has others are gathered and scattered by nobody.
    summed = plain.parameters - plain.spread_over(ep)
    found = []

    def add(where: tuple[int, ...], need: np.ndarray, zero: int, per_byte: float) -> None:
        """Layers that have such needs beside activations, and such traffic."""
        forward, backward, seconds, gives = ways.computed(ep, some, accumulates=zero < 3)
        gather_s = summed * per_weight * per_byte if zero == 3 else np.zeros(layers)
        scatter_s = summed * per_gradient * per_byte
        seen_s = np.maximum(gather_s - hidden * forward, 0.0)
        seen_s += np.maximum(gather_s + scatter_s - hidden * backward, 0.0)
        work = Work(
            seconds=seconds,
            bytes=activations,
            gives=gives,
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

    def held_s(self, room: np.ndarray, count: float | np.ndarray) -> np.ndarray:
        """Seconds with as much recomputed as so many in flight ask for; inf where they do not fit into the room."""
        short = np.maximum(self.bytes - room / count, 0.0)
        more_s = np.zeros_like(short)
        for rate, most in self.gives:
            freed = np.minimum(short, most)
            more_s += freed / rate
            short -= freed
        fits = (short <= 0) & (self.seconds > 0) & (room >= 0)
        return np.where(fits, np.maximum(self.seconds + more_s, self.least_s), np.inf)

    def passing_s(self, room: np.ndarray, rest_s: np.ndarray) -> np.ndarray:
        """Seconds between two micro-batches with the best number in flight."""
        counts = np.array(FLIGHTS)[:, None, None]
        seconds = self.held_s(room, counts)
        few = seconds[:-1]
        np.maximum(few, (few + rest_s) / (counts[1:] - 1), out=few)
        least: np.ndarray = seconds.min(axis=0)
        return least


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
