"""The optimizer step on flat buckets: clipping, loss scaling, ZeRO-1, optimizer state under parameters' names.

The optimizer sees each bucket as at most two vectors, weights with decay (matrices) and without. Under ZeRO-1 the
workers of a stage in one region split every bucket evenly: each keeps the optimizer state of its part, updates it, and
hands it to the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from polygon_comm.parameter_server import ServerGroup
from torch import nn

from polygon.domain.errors import require
from runners.engine.gradients import Bucket
from runners.engine.optimizers import STATE_KEYS, make_optimizer
from runners.engine.options import Options

FIRST_LOSS_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without overflow after which the loss scale doubles (as torch's GradScaler)."""
AVERAGE = "average"
"""Beside the optimizer's state: the moving average of the weights."""


@dataclass
class _Piece:
    """A stretch of a bucket that this rank updates, as the optimizer sees it."""

    bucket: Bucket
    start: int
    parameter: nn.Parameter
    """A view into the bucket, or with offloading a copy in host memory."""

    @property
    def stop(self) -> int:
        """End of the stretch."""
        return self.start + self.parameter.numel()

    @property
    def _apart(self) -> bool:
        return self.parameter.data_ptr() != self.bucket.weights_of(self.start, self.stop).data_ptr()

    def fetch_gradient(self, factor: float) -> None:
        """Let the optimizer see the bucket's gradient times a factor."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self._apart:
            gradient.copy_(self.bucket.gradient_of(self.start, self.stop))
        if factor != 1.0:
            gradient.mul_(factor)

    def return_weights(self) -> None:
        """Put what the optimizer made of the weights into the bucket."""
        if self._apart:
            self.bucket.weights_of(self.start, self.stop).copy_(self.parameter.detach())

    def take_weights(self) -> None:
        """Let the optimizer see the bucket's weights."""
        if self._apart:
            self.parameter.data.copy_(self.bucket.weights_of(self.start, self.stop))


class Update:
    """Optimizer of one rank.

    Parameters
    ----------
    buckets : sequence of Bucket
    rank : int
    optimizer : str
        adamw or sgd.
    options : Options
    scaled : bool
        Dynamic loss scaling (fp16).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rank: int,
        optimizer: str,
        options: Options,
        *,
        scaled: bool,
    ) -> None:
        self._rank, self._name = rank, optimizer
        self._keys = (*STATE_KEYS[optimizer], *((AVERAGE,) if options.average else ()))
        self.applied = 0
        """Updates made, over all runs; steps that overflowed are none."""
        self.buckets, self.options = list(buckets), options
        self.loss_scale = FIRST_LOSS_SCALE if scaled else 1.0
        self._scaled, self._good_steps = scaled, 0
        self._pieces = [piece for bucket in buckets for piece in self._split(bucket)]
        decayed = [piece.parameter for piece in self._pieces if self._decays(piece)]
        plain = [piece.parameter for piece in self._pieces if not self._decays(piece)]
        rate, decay = options.learning_rate, options.weight_decay
        self._optimizer = make_optimizer(optimizer, decayed, plain, rate=rate, weight_decay=decay)

    def _decays(self, piece: _Piece) -> bool:
        return self.options.decay == "all" or piece.start < piece.bucket.matrix_elements

    def _share(self, bucket: Bucket, vector: torch.Tensor) -> None:
        """Fill in what other members updated."""
        if isinstance(bucket.group, ServerGroup):
            bucket.group.share_from_owners_(vector, bucket.parts)
        if bucket.zero and bucket.owners is not None:
            bucket.owners.share_parts(vector, self._parts(bucket))

    def _parts(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Which stretch each member in this region updates."""
        members = bucket.owners.near_size if bucket.zero and bucket.owners is not None else 1
        borders = [bucket.size * i // members for i in range(members + 1)]
        return list(itertools.pairwise(borders))

    def _split(self, bucket: Bucket) -> list[_Piece]:
        mine = bucket.owned_by(self._rank)
        if bucket.zero and bucket.owners is not None:
            mine = [self._parts(bucket)[bucket.owners.near_place]]
        pieces = []
        for start, stop in mine:
            borders = sorted({start, min(max(bucket.matrix_elements, start), stop), stop})
            for a, b in itertools.pairwise(borders):
                if self.options.offload_optimizer:
                    parameter = nn.Parameter(bucket.weights_of(a, b).to("cpu", copy=True))
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    parameter = nn.Parameter(bucket.weights_of(a, b))
                    parameter.grad = bucket.gradient_of(a, b)
                pieces.append(_Piece(bucket, a, parameter))
        return pieces

    def apply(self, norm: float, step: int) -> bool:
        """Update the weights with the gradients as they are in the buckets and set those to zero.

        Parameters
        ----------
        norm : float
            Of the whole model's gradient as accumulated (times the loss scale).
        step : int

        Returns
        -------
        bool
            False if the gradient overflowed: then only the loss scale changes.
        """
        finite = math.isfinite(norm)
        if self._scaled and not finite:
            self.loss_scale, self._good_steps = self.loss_scale / 2, 0
        else:
            self._step(norm, step)
        for bucket in self.buckets:
            bucket.vector.zero_()
        return finite

    def _step(self, norm: float, step: int) -> None:
        options = self.options
        factor = 1.0 / self.loss_scale
        if options.clip_norm is not None and norm * factor > options.clip_norm:
            factor *= options.clip_norm / (norm * factor)
        rate = options.rate.at(step)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            for piece in self._pieces:
                piece.fetch_gradient(factor)
            self._optimizer.step()
            self._take_average(self._optimizer)
            for piece in self._pieces:
                piece.return_weights()
        for bucket in self.buckets:
            if bucket.zero < 3:
                self._share(bucket, bucket.weights)
        self.applied += 1
        self._good_steps += 1
        if self._scaled and self._good_steps % GROWTH_STEPS == 0:
            self.loss_scale *= 2

    @torch.no_grad()
    def _take_average(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the average towards the weights; it begins as those of the first update (as torch's AveragedModel)."""
        for piece in self._pieces if self.options.average else ():
            state, weights = optimizer.state[piece.parameter], piece.parameter.detach()
            if AVERAGE in state:
                state[AVERAGE].lerp_(weights, 1 - self.options.average)
            else:
                state[AVERAGE] = weights.clone()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, without its counters of steps."""
        states = [] if self._optimizer is None else self._optimizer.state.values()
        return sum(state[key].nbytes for state in states for key in self._keys if key in state)

    def take_weights(self) -> None:
        """Let the optimizer see weights that were changed by others."""
        for piece in self._pieces:
            piece.take_weights()

    def state(self, bucket: Bucket, more: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Weights, optimizer state and more vectors of a bucket by parameter, uncut; a collective (ZeRO-1, TP)."""
        weights = bucket.weights
        if bucket.zero == 3:
            weights = torch.zeros(bucket.size, dtype=weights.dtype, device=weights.device)
            start = bucket.weights_start
            weights[start : start + len(bucket.weights)] = bucket.weights
            self._share(bucket, weights)
        flat: dict[str, torch.Tensor] = {"value": weights} | dict(more)
        # Every member takes part in every sharing, also one that updates nothing of this bucket.
        for key in self.state_keys:
            whole = flat[key] = torch.zeros_like(weights)
            for piece in self._pieces:
                if piece.bucket is bucket:
                    assert self._optimizer is not None
                    values = self._optimizer.state[piece.parameter][key]
                    whole[piece.start : piece.stop] = values
            self._share(bucket, whole)
        return {
            name: {key: bucket.gathered(name, whole[start:stop].view(shape)) for key, whole in flat.items()}
            | {"updates": self.applied}
            for name, (start, stop, shape) in bucket.places.items()
        }

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What `state` gives of a parameter beside its weights, once updates were made."""
        return self._keys if self.applied else ()

    def load(self, bucket: Bucket, states: Mapping[str, Mapping[str, Any]], more: Mapping[str, torch.Tensor]) -> None:
        """Set weights, optimizer state and more vectors (where saved) of a bucket from those of its parameters."""
        first = next(iter(states.values()))
        self.applied = int(first["updates"])
        # A run that averages from here on begins with the weights as they are.
        wanted = tuple(key for key in self.state_keys if key != AVERAGE or key in first)
        for key in wanted:
            require(key in first, "checkpoint: optimizer state", sorted(first), f"{key} (optimizer {self._name})")

        def vector_of(key: str) -> torch.Tensor:
            vector = torch.zeros(bucket.size, dtype=bucket.weights.dtype, device=bucket.weights.device)
            for name, (start, stop, _) in bucket.places.items():
                vector[start:stop] = bucket.cut(name, states[name][key]).reshape(-1).to(vector.device)
            return vector

        start = bucket.weights_start
        bucket.weights.copy_(vector_of("value")[start : start + len(bucket.weights)])
        for key, vector in more.items():
            if key in first:
                vector.copy_(vector_of(key))
        flat = {key: vector_of(key) for key in wanted}
        for piece in self._pieces:
            if piece.bucket is bucket:
                piece.take_weights()
            if piece.bucket is bucket and self._optimizer is not None and flat:
                device = piece.parameter.device
                state: dict[str, torch.Tensor] = {
                    key: whole[piece.start : piece.stop].to(device, copy=True) for key, whole in flat.items()
                }
                if self._name == "adamw":
                    state["step"] = torch.tensor(float(self.applied), device=device)
                self._optimizer.state[piece.parameter] = state
