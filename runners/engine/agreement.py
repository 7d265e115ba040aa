"""What ranks tell one another about a step: its loss, the gradient's norm, and whether somebody wants to stop."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from polygon_comm.line import Pending
from polygon_comm.reduction import SumGroup

from runners.engine.gradients import Bucket
from runners.engine.worker import StageWorker

NUMBERS = 4
"""How many are summed: loss, part of the samples, squared norm, wishes to stop."""
LOSS, SQUARE = 0, 2
"""Their places."""


class Scalars(NamedTuple):
    """What all know of a step, or all of a region."""

    loss: float
    """Mean over the targets; NaN where no rank asked computed any."""
    norm: float
    """Of the gradient as accumulated (times the loss scale)."""
    stop: bool


class Agreement:
    """How a rank comes to know what all ranks, or those of its region, have to say about a step.

    Parameters
    ----------
    everyone : SumGroup
        Of all ranks.
    stop_requested : Event
        Whether this rank wants to stop.
    """

    def __init__(self, rank: int, worker: StageWorker, everyone: SumGroup, stop_requested: threading.Event) -> None:
        self.rank, self.worker, self._everyone, self._stop = rank, worker, everyone, stop_requested
        self.buckets = worker.reducer.buckets

    def expect(self) -> None:
        """Let the others send early."""
        self.worker.reducer.line.submit(lambda: self._everyone.expect(NUMBERS, torch.float64, "scalars"))

    def reduce(self, *, alone: bool) -> Scalars:
        """Wait for the sums of gradients and for what ranks tell one another; `alone`: those of this region."""
        reducer = self.worker.reducer
        # Between two outer steps regions do not wait for one another: each clips by its own norm, shows its own loss.
        if not self.worker.layout.gradient_everywhere:
            waiting = reducer.line.submit(lambda: self._sum(alone=alone))
            reducer.wait()
            return waiting.result()
        told: list[torch.Tensor] = []

        def begin() -> Pending:
            values, pending = self._begin(None, near=alone)
            told.append(values)
            return pending

        # Everybody finds the norm in what it has: what ranks tell one another travels with the last gradients.
        reducer.line.add(begin)
        reducer.wait()
        values = told[0]
        values[SQUARE] = self._square(self.buckets)
        return self._read(values)

    def meet(self, *, lost: bool) -> Scalars:
        """Of all ranks, after local steps; `lost`: this one had a gradient that is no number, as then is the norm."""

        def tell() -> Scalars:
            square = torch.tensor(math.nan if lost else 0.0, device=self.worker.wires.device)
            values, pending = self._begin(square, near=False)
            pending()
            return self._read(values)

        return self.worker.reducer.line.submit(tell).result()

    def _sum(self, *, alone: bool) -> Scalars:
        counted = [bucket for bucket in self.buckets if self._counts(bucket, alone=alone)]
        values, pending = self._begin(self._square(counted), near=alone)
        pending()
        return self._read(values)

    def _begin(self, square: torch.Tensor | None, *, near: bool) -> tuple[torch.Tensor, Pending]:
        """Start to sum, over all or those of this region."""
        worker = self.worker
        part = float(worker.is_last and worker.place == 0)
        parts = worker.layout.plan.micro_batches * worker.layout.worker_of(self.rank).cp
        fraction = part * worker.shares[-1] / parts
        stop = float(self._stop.is_set())
        values = worker.wires.accelerator.from_host(torch.tensor([part, fraction, 0.0, stop], dtype=torch.float64))
        values[LOSS] *= worker.loss_sum
        if square is not None:
            values[SQUARE] = square
        return values, self._everyone.begin_near(values) if near else self._everyone.begin(values, "scalars")

    def _read(self, values: torch.Tensor) -> Scalars:
        loss, samples, square, stops = values.tolist()
        return Scalars(loss * self.worker.loss_scale / samples if samples else math.nan, square**0.5, stops > 0)

    def _counts(self, bucket: Bucket, *, alone: bool) -> bool:
        """Whether what this rank holds of a bucket's gradient counts in the norm; of equal copies one does."""
        if bucket.parts:
            return True
        if bucket.zero < 2:
            return bucket.leads if not alone else bucket.group is not None and bucket.group.near_place == 0
        # Whoever shares a copy has a part of the gradient: the first copy of the first region counts, or of each one.
        assert bucket.group is not None and bucket.owners is not None
        first = bucket.group.near_ranks[0] if alone else bucket.group.members.regions[0][0]
        return first in bucket.owners.near_ranks

    def _square(self, buckets: Sequence[Bucket]) -> torch.Tensor:
        """Squared norm of what this rank holds of buckets' gradients, without what another of its worker counts."""
        norms = [torch.linalg.vector_norm(part) for bucket in buckets for part in self._parts(bucket)]
        device = self.worker.wires.device
        return (
            torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        )

    def _parts(self, bucket: Bucket) -> Iterator[torch.Tensor]:
        # Slices add up; of what is whole on every device of a worker, the first counts.
        counted = [place[:2] for name, place in bucket.places.items() if name in bucket.dims]
        if bucket.first_here(self.worker.place):
            counted = [(0, bucket.size)]
        for a, b in counted:
            for start, end in bucket.owned_by(self.rank):
                yield bucket.gradient_of(max(a, start), max(a, start, min(b, end)))
