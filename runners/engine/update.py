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
from torch import nn

from runners.engine.gradients import Bucket
from runners.engine.options import Options

FIRST_LOSS_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without overflow after which the loss scale doubles (as torch's GradScaler)."""
OUTER_KEYS = ("outer_momentum",)
"""Vectors in checkpoints that are not the optimizer's."""


@dataclass
class _Piece:
    """A stretch of a bucket that this rank updates, as the optimizer sees it."""

    bucket: Bucket
    start: int
    parameter: nn.Parameter


class Update:
    """Optimizer of one rank.

    Parameters
    ----------
    buckets : sequence of Bucket
    optimizer : str
        adamw or sgd.
    options : Options
    sharded : bool
        ZeRO-1: split every bucket among its group's members in this region.
    scaled : bool
        Dynamic loss scaling (fp16).
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizer: str, options: Options, *, sharded: bool, scaled: bool
    ) -> None:
        self.buckets, self.options, self.sharded = list(buckets), options, sharded
        self.loss_scale = FIRST_LOSS_SCALE if scaled else 1.0
        self._scaled, self._good_steps = scaled, 0
        self._pieces = [piece for bucket in buckets for piece in self._split(bucket)]
        groups = [
            {"params": [], "weight_decay": options.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]  # type: list[dict[str, Any]]
        for piece in self._pieces:
            groups[piece.start >= piece.bucket.matrix_elements]["params"].append(piece.parameter)
        groups = [group for group in groups if group["params"]]
        self._optimizer: torch.optim.Optimizer | None = None
        if groups and optimizer == "sgd":
            self._optimizer = torch.optim.SGD(groups, lr=options.learning_rate, momentum=0.9)
        elif groups:
            self._optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))

    def _is_sharded(self, bucket: Bucket) -> bool:
        """Whether the bucket is split; not where only the first ranks of differently cut workers sum."""
        return self.sharded and not bucket.whole

    def _share(self, bucket: Bucket, vector: torch.Tensor) -> None:
        """Fill in what the other members in the region updated."""
        if self._is_sharded(bucket) and bucket.group is not None:
            bucket.group.share_parts(vector, self._parts(bucket))

    def _parts(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Which stretch each member in this region updates."""
        members = bucket.group.near_size if self._is_sharded(bucket) and bucket.group is not None else 1
        borders = [len(bucket.vector) * i // members for i in range(members + 1)]
        return list(itertools.pairwise(borders))

    def _split(self, bucket: Bucket) -> list[_Piece]:
        mine = bucket.group.near_place if self._is_sharded(bucket) and bucket.group is not None else 0
        start, stop = self._parts(bucket)[mine]
        borders = sorted({start, min(max(bucket.matrix_elements, start), stop), stop})
        pieces = []
        for a, b in itertools.pairwise(borders):
            parameter = nn.Parameter(bucket.weights[a:b])
            parameter.grad = bucket.vector[a:b]
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
        rate = options.learning_rate
        if options.warmup_steps:
            rate *= min(1.0, (step + 1) / options.warmup_steps)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            if factor != 1.0:
                for piece in self._pieces:
                    assert piece.parameter.grad is not None
                    piece.parameter.grad.mul_(factor)
            self._optimizer.step()
        for bucket in self.buckets:
            self._share(bucket, bucket.weights)
        self._good_steps += 1
        if self._scaled and self._good_steps % GROWTH_STEPS == 0:
            self.loss_scale *= 2

    def state(self, bucket: Bucket, more: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Weights, optimizer state and more vectors of a bucket by parameter, uncut; a collective (ZeRO-1, TP)."""
        flat: dict[str, torch.Tensor] = {"value": bucket.weights} | dict(more)
        single: dict[str, Any] = {}
        for piece in self._pieces:
            state = self._optimizer.state.get(piece.parameter, {}) if self._optimizer is not None else {}
            if piece.bucket is not bucket:
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == piece.parameter.shape:
                    whole = flat.setdefault(key, torch.zeros_like(bucket.weights))
                    whole[piece.start : piece.start + value.numel()] = value
                else:
                    single[key] = value
        for key, whole in flat.items():
            if key != "value" and key not in more:
                self._share(bucket, whole)
        return {
            name: {key: bucket.gathered(name, whole[start:stop].view(shape)) for key, whole in flat.items()} | single
            for name, (start, stop, shape) in bucket.places.items()
        }

    def load(self, bucket: Bucket, states: Mapping[str, Mapping[str, Any]], more: Mapping[str, torch.Tensor]) -> None:
        """Set weights, optimizer state and more vectors (where saved) of a bucket from those of its parameters."""
        first = next(iter(states.values()))
        keys = [key for key, value in first.items() if isinstance(value, torch.Tensor) and value.ndim > 0]
        single = {key: value for key, value in first.items() if key not in keys}
        flat = {key: torch.zeros_like(bucket.weights) for key in keys}
        for name, (start, stop, _) in bucket.places.items():
            for key in keys:
                flat[key][start:stop] = bucket.cut(name, states[name][key]).reshape(-1).to(bucket.weights.device)
        bucket.weights.copy_(flat.pop("value"))
        for key, vector in more.items():
            if key in flat:
                vector.copy_(flat.pop(key))
        flat = {key: whole for key, whole in flat.items() if key not in OUTER_KEYS}
        for piece in self._pieces:
            if piece.bucket is bucket and self._optimizer is not None and (flat or single):
                stop = piece.start + piece.parameter.numel()
                self._optimizer.state[piece.parameter] = {
                    key: whole[piece.start : stop].clone() for key, whole in flat.items()
                } | {key: _own(value) for key, value in single.items()}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
