"""What no plan can beat under the cost model: relaxations of a problem, each of them easy to solve.

- **Compute.** Every (layer, micro-batch) is done somewhere. With t[k, d] the least device-seconds of device type d for
  a layer of kind k, the step takes at least the optimum of: min T subject to
  sum_d x[k, d] = layers_k * micro-batches, sum_k x[k, d] t[k, d] <= T n_d, x >= 0.
- **Path.** One micro-batch passes every layer forward and backward, one after another, at best on the fastest worker.
- **Stages.** For every way to cut the layers into stages: a stage's workers wait until the first micro-batch has passed
  the stages before, do whole micro-batches, and then reduce their gradients, or wait for the last one to go back
  through the stages before, whatever takes longer. More compute than one worker has means a reduction between two;
  more than a node has, between nodes; more than a region has, between regions. The compute that all stages need to end
  in time is minimised by dynamic programming (`polygon.bounds.stage_bound`); the devices have only so much.
- **Regions.** All wait for the latency of the first stage's sum and for the gradient's norm, and regions that do not
  hold the first stage wait for messages; for every set of regions (`polygon.bounds.region_sets`), joined with the three
  above. Interleaved plans are bounded by themselves.
- **Traffic.** A region computes no more than its links bring micro-batches for, unless it has gradients to exchange
  instead (`polygon.bounds.region_traffic`); part of *Regions*.

All of this for every micro-batch size, of which the least counts. docs/objectives.md has the inequalities, and the
plans that are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from polygon.bounds.least_traffic import LeastTraffic
from polygon.bounds.pipeline_bound import TOLERANCE, PipelineBound, constant
from polygon.bounds.size_work import size_work
from polygon.bounds.stage_tiers import (
    Kinds,
)
from polygon.cost.convergence import allowed
from polygon.cost.tables import CostTables
from polygon.domain.errors import OutOfTimeError

LONGER = 2
"""Passing all layers takes a micro-batch of more sequences no less than one over so much of the time of a smaller."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """What no plan can beat.

    Parameters
    ----------
    seconds : float
        Per step.
    parts : dict of str to float
        Seconds that compute, path and stages alone allow, and with regions.
    of : tuple, optional
        The kind of plan that may be as quick (`Stages.kinds_of_plan`), and its micro-batch size.
    cut_short : bool
        Whether there was no time for stages and regions: true all the same, but weaker.
    """

    seconds: float
    parts: dict[str, float]
    of: tuple[str, int] | None = None
    cut_short: bool = False

    @property
    def binding(self) -> str:
        """The simplest relaxation that gives the bound."""
        return next(name for name, value in self.parts.items() if value >= self.seconds * (1 - TOLERANCE))


_known: WeakKeyDictionary[CostTables, dict[int, LowerBound]] = WeakKeyDictionary()


def lower_bound(
    tables: CostTables, *, local_steps: int | None = None, seconds_left: Callable[[], float] = lambda: math.inf
) -> LowerBound:
    """What no plan for the problem can beat, by relaxation; worked out once for the same tables.

    Parameters
    ----------
    local_steps : int, optional
        Most local steps of a plan; by default what the constraints let the search choose.
    seconds_left : callable
        Where this falls to 0 before all is known, it is `link_free_bound` (`LowerBound.cut_short`).
    """
    if local_steps is None:
        local_steps = max(allowed(tables.problem, by_any_program=True).local_steps)
    known = _known.setdefault(tables, {})
    if local_steps not in known:
        try:
            known[local_steps] = _bound(tables, local_steps, seconds_left)
        except OutOfTimeError:
            return replace(link_free_bound(tables), cut_short=True)
    return known[local_steps]


def lower_bound_s(tables: CostTables) -> float:
    """Seconds per step that no plan for the problem can beat."""
    return lower_bound(tables).seconds


def link_free_bound(tables: CostTables) -> LowerBound:
    """What no plan can beat whatever links join the regions: compute and path alone.

    Weaker than `lower_bound`, but a lookup in tables of a problem that differs in links between regions alone.
    """
    kinds = Kinds.of(tables)
    if not kinds.classes:
        return LowerBound(seconds=np.inf, parts={"compute": np.inf})
    sizes = [size_work(tables, kinds, size) for size in tables.micro_batch_sizes]
    compute_s, path_s = min(size.compute_s for size in sizes), min(size.least_s for size in sizes)
    return LowerBound(seconds=path_s, parts={"compute": compute_s, "path": path_s})


def _bound(tables: CostTables, local_steps: int, seconds_left: Callable[[], float]) -> LowerBound:
    kinds = Kinds.of(tables)
    if not kinds.classes:
        return LowerBound(seconds=np.inf, parts={"compute": np.inf})

    def go_on() -> None:
        if seconds_left() <= 0:
            raise OutOfTimeError

    go_on()
    traffic = LeastTraffic(tables, kinds, local_steps)
    compute_s = path_s = stages_s = np.inf
    known: dict[int, PipelineBound] = {}

    def least(begins: tuple[str, int] | None) -> tuple[float, tuple[str, int] | None]:
        """Of all kinds of plans and micro-batch sizes, and which; beginning with one, in whose parts sets of regions
        are told apart as finely as it matters."""
        nonlocal compute_s, path_s, stages_s
        found_s, of = np.inf, begins
        first, at = begins or ("stages", tables.micro_batch_sizes[0])
        numbers = sorted(tables.micro_batch_sizes, key=lambda number: number != at)
        # One kind of all sizes, then the others, of which many are then known to take longer.
        for others in (False, True):
            for number in numbers:
                size = size_work(tables, kinds, number)
                compute_s, path_s = min(compute_s, size.compute_s), min(path_s, size.least_s)
                if size.least_s < found_s:
                    if number not in known:
                        go_on()
                        known[number] = PipelineBound(size, traffic)
                        stages_s = known[number].least_s(constant(size.capacity), stages_s)
                    ways = known[number].kinds_of_plan(local_steps, finely=begins is not None)
                    for kind in (kind for kind in ways if (kind != first) == others):
                        go_on()
                        if (seconds := ways[kind](found_s)) < found_s:
                            found_s, of = seconds, (kind, number)
                elif size.path_s > LONGER * found_s:
                    break  # larger micro-batches pass the layers no sooner
        return found_s, of

    regions_s, of = least(None)
    if any(bound.tells_apart for bound in known.values()) and (finer := least(of))[0] > regions_s:
        regions_s, of = finer
    parts = {"compute": compute_s, "path": path_s, "stages": min(stages_s, regions_s), "regions": regions_s}
    return LowerBound(seconds=regions_s, parts=parts, of=of)
