"""Allocations that memory holds where no start is one: by the layers that have no room, until none is left over.

What does not fit has no step time, so a search by it stays where something fits. On a cluster that barely holds a model
no start may, and larger micro-batches may need other stages than smaller ones. How many layers a pipeline cannot hold
(`polygon.planning.layer_split.layers_left_over`) says which of two that do not fit is nearer to one that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from polygon.planning.candidates import Candidates
from polygon.planning.decode import Allocation, Decoder
from solvers.local_search import Racing
from solvers.stop import Stop

RACERS = 8
"""Walks side by side that begin where the least is left over."""


class Fitted(NamedTuple):
    """The allocation with the fewest layers left over, how many these are (inf: it is none for other reasons), and of
    how many it is the best."""

    allocation: Allocation | None
    left_over: float
    looked_at: int


class LackingCandidates(Candidates):
    """The allocations of one setting, valued by the layers that memory has no room for."""

    def __init__(self, decoder: Decoder, stages: int, setting: Allocation) -> None:
        super().__init__(decoder, stages)
        self.sizes, self.degrees = (setting.micro_batch_size,), ((setting.cp, setting.ep),)

    def evaluate(self, x: Allocation) -> float:
        """Layers left over; inf where something else stands in the way."""
        return self.decoder.left_over(x)

    def lower_bound(self) -> float:
        """All have room."""
        return 0.0


def fitted(decoder: Decoder, stages: int, starts: Sequence[Allocation], rng: np.random.Generator, stop: Stop) -> Fitted:
    """The first allocation met that memory holds, else the nearest.

    Parameters
    ----------
    stages : int
        At most.
    starts : sequence of Allocation
        At least one, all in the same setting, which does not change.

    Raises
    ------
    KeyboardInterrupt
    """
    candidates = LackingCandidates(decoder, stages, starts[0])
    result = Racing(racers=RACERS).solve(candidates, rng, stop, start=starts)
    if result.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return Fitted(result.solution, result.value, result.evaluations)


def in_setting(starts: Sequence[Allocation], size: int, degree: tuple[int, int]) -> list[Allocation]:
    """The same workers in micro-batches of a size and in a context- and expert-parallel degree."""
    return [replace(x, micro_batch_size=size, cp=degree[0], ep=degree[1]) for x in starts]
