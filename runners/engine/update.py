"""The optimizer step on flat buckets: clipping, loss scaling, ZeRO-1, optimizer state under parameters' names.

AdamW and SGD see each bucket as at most two vectors, weights with decay (matrices) and without. Under ZeRO-1 the
workers of a stage in one region split every bucket evenly: each keeps the optimizer state of its part, updates it, and
hands it to the others.

Muon and Adafactor need whole matrices. Muon's momentum is split as AdamW's state is; then the members share the
directions, in the 16 bits in which they are made orthogonal, and each makes those matrices orthogonal of which it
updates some rows (Liu et al., arXiv:2502.16982, algorithm 1). Adafactor keeps next to nothing: every member has the
state of whole matrices and updates all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from polygon_comm.parameter_server import ServerGroup
from torch import nn

from polygon.domain.errors import require
from runners.engine.gradients import Bucket
from runners.engine.optimizers import MUON_MOMENTUM, STATE_KEYS, make_optimizer, orthogonal_step
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
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Where torch's optimizer keeps none of it: Muon's momentum, the average of what Adafactor updates."""

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
        adamw, sgd, muon or adafactor.
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
        self._scaled, self.good_steps = scaled, 0
        self._pieces = [piece for bucket in buckets for piece in self._split(bucket)]
        flat = [piece for piece in self._pieces if not (self._factored or self._is_muons(piece))]
        decayed = [piece.parameter for piece in flat if self._decays(piece)]
        plain = [piece.parameter for piece in flat if not self._decays(piece)]
        rate, decay = options.learning_rate, options.weight_decay
        self._optimizer = make_optimizer(optimizer, decayed, plain, rate=rate, weight_decay=decay)
        self._whole: dict[tuple[str, str], nn.Parameter] = {}
        """By bucket and name, what Adafactor updates; with memory only while it does."""
        self._adafactor = self._make_adafactor() if self._factored else None

    @property
    def _factored(self) -> bool:
        return self._name == "adafactor"

    def _make_adafactor(self) -> torch.optim.Adafactor | None:
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.options.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for bucket in self.buckets:
            for name, (start, _, _) in bucket.places.items():
                whole = self._whole[bucket.name, name] = nn.Parameter(torch.empty(0, device=bucket.weights.device))
                groups[0 if self._decayed(bucket, start) else 1]["params"].append(whole)
        held = [group for group in groups if group["params"]]
        return torch.optim.Adafactor(held, lr=self.options.learning_rate) if held else None

    def _decayed(self, bucket: Bucket, start: int) -> bool:
        return self.options.decay == "all" or start < bucket.matrix_elements

    def _decays(self, piece: _Piece) -> bool:
        return self._decayed(piece.bucket, piece.start)

    def _in_muon(self, bucket: Bucket) -> int:
        """How many weights of a bucket, from its start, are Muon's: the matrices of blocks."""
        return bucket.matrix_elements if self._name == "muon" and bucket.name.startswith("blocks.") else 0

    def _is_muons(self, piece: _Piece) -> bool:
        return piece.start < self._in_muon(piece.bucket)

    def _state_of(self, piece: _Piece) -> dict[str, torch.Tensor]:
        """What is kept of a stretch."""
        if self._optimizer is None or self._factored or self._is_muons(piece):
            return piece.state
        return self._optimizer.state[piece.parameter]

    def _share(self, bucket: Bucket, vector: torch.Tensor) -> None:
        """Fill in what other members updated."""
        if isinstance(bucket.group, ServerGroup):
            bucket.group.share_from_owners_(vector, bucket.parts)
        bucket.fill_in(vector)

    def _split(self, bucket: Bucket) -> list[_Piece]:
        mine = bucket.owned_by(self._rank)
        if bucket.divided:
            mine = [(bucket.own.start, bucket.own.stop)]
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
            False if the gradient is not finite: then the weights stay, and where losses are scaled the scale is halved.
        """
        finite = math.isfinite(norm)
        if finite:
            self._step(norm, step)
        elif self._scaled:
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0
        for bucket in self.buckets:
            bucket.vector.zero_()
        return finite

    def _step(self, norm: float, step: int) -> None:
        options = self.options
        factor = 1.0 / self.loss_scale
        if options.clip_norm is not None and norm * factor > options.clip_norm:
            factor *= options.clip_norm / (norm * factor)
        rate = options.rate.at(step)
        for piece in self._pieces if not self._factored else ():
            piece.fetch_gradient(factor)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        for bucket in self.buckets:
            if self._in_muon(bucket):
                self._take_orthogonal_step(bucket, rate)
            elif self._adafactor is not None:
                self._take_factored_step(self._adafactor, bucket, rate, factor)
        self._take_average()
        for piece in self._pieces:
            piece.return_weights()
        for bucket in self.buckets:
            if not self._factored and (weights := bucket.updated()) is not None:
                self._share(bucket, weights)
        self.applied += 1
        self.good_steps += 1
        if self._scaled and self.good_steps % GROWTH_STEPS == 0:
            self.loss_scale *= 2

    def scaling(self) -> dict[str, Any]:
        """Where losses are scaled, by what, as `SavedProgress` has it; else empty."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps} if self._scaled else {}

    def resume_scaling(self, loss_scale: float, good_steps: int) -> None:
        """Go on with a scale, where losses are scaled, and it is known (not 0)."""
        if self._scaled and loss_scale:
            self.loss_scale, self.good_steps = loss_scale, good_steps

    @torch.no_grad()
    def _take_orthogonal_step(self, bucket: Bucket, rate: float) -> None:
        """Muon on the matrices of a bucket; a collective (ZeRO, parameter servers, TP)."""
        direction = torch.zeros(bucket.size, dtype=torch.bfloat16, device=bucket.weights.device)
        pieces = [piece for piece in self._pieces if piece.bucket is bucket and self._is_muons(piece)]
        for piece in pieces:
            gradient = piece.parameter.grad
            assert gradient is not None
            momentum = piece.state.setdefault("momentum_buffer", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            direction[piece.start : piece.stop] = gradient.lerp(momentum, MUON_MOMENTUM)
            piece.parameter.mul_(1 - rate * self.options.weight_decay)
        self._share(bucket, direction)
        for name, (start, stop, shape) in bucket.places.items():
            mine = [piece for piece in pieces if piece.start < stop and piece.stop > start]
            if stop > bucket.matrix_elements or not mine:
                continue
            whole = orthogonal_step(bucket.gathered(name, direction[start:stop].view(shape)), rate)
            step = bucket.cut(name, whole).reshape(-1)
            for piece in mine:
                a, b = max(start, piece.start), min(stop, piece.stop)
                part = step[a - start : b - start]
                piece.parameter[a - piece.start : b - piece.start] += part.to(piece.parameter.device)

    @torch.no_grad()
    def _take_factored_step(self, optimizer: torch.optim.Adafactor, bucket: Bucket, rate: float, factor: float) -> None:
        """Adafactor on a bucket, whose gradient is to be taken times a factor; a collective (ZeRO, servers, TP)."""
        gradient, weights = bucket.whole_of(bucket.vector.mul_(factor)), bucket.whole_of(bucket.weights)
        if isinstance(bucket.group, ServerGroup):
            self._share(bucket, gradient)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, (start, stop, shape) in bucket.places.items():
            whole = self._whole[bucket.name, name]
            whole.data = bucket.gathered(name, weights[start:stop].view(shape))
            whole.grad = bucket.gathered(name, gradient[start:stop].view(shape))
        optimizer.step()
        for name, (start, stop, _) in bucket.places.items():
            whole = self._whole[bucket.name, name]
            weights[start:stop] = bucket.cut(name, whole.detach()).reshape(-1)
            whole.grad, whole.data = None, whole.data.new_empty(0)
        if weights is not bucket.weights:
            bucket.put(weights)

    @torch.no_grad()
    def _take_average(self) -> None:
        """Move the average towards the weights; it begins as those of the first update (as torch's AveragedModel)."""
        for piece in self._pieces if self.options.average else ():
            state, weights = self._state_of(piece), piece.parameter.detach()
            if AVERAGE in state:
                state[AVERAGE].lerp_(weights, 1 - self.options.average)
            else:
                state[AVERAGE] = weights.clone()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, without its counters of steps."""
        states: list[Mapping[str, Any]] = [self._state_of(piece) for piece in self._pieces]
        if self._adafactor is not None:
            states += self._adafactor.state.values()
        return sum(state[key].nbytes for state in states for key in self._keys if key in state)

    def take_weights(self, names: Collection[str]) -> None:
        """Let the optimizer see weights of some buckets that an exchange changed, and the other owners and layers; a
        collective of the owners."""
        for piece in self._pieces:
            if piece.bucket.name in names:
                piece.take_weights()
        for bucket in self.buckets:
            if bucket.name in names and (weights := bucket.updated()) is not None:
                bucket.fill_in(weights)

    def state(self, bucket: Bucket, more: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Weights, optimizer state and more vectors of a bucket by parameter, uncut; a collective (ZeRO-1, TP)."""
        weights = bucket.whole_of(bucket.weights)
        flat = {"value": weights} | {key: bucket.whole_of(vector) for key, vector in more.items()}
        keys = {name: self._kept(bucket, name) if self.applied else () for name in bucket.places}
        # Every member takes part in every sharing, also one that updates nothing of this bucket.
        for key in dict.fromkeys(key for kept in keys.values() for key in kept):
            whole = flat[key] = torch.zeros_like(weights)
            for piece in self._pieces:
                if piece.bucket is bucket and key in (state := self._state_of(piece)):
                    whole[piece.start : piece.stop] = state[key]
            self._share(bucket, whole)
        return {
            name: {
                key: bucket.gathered(name, flat[key][start:stop].view(shape)) for key in ("value", *more, *keys[name])
            }
            | self._factors(bucket, name)
            | {"updates": self.applied}
            for name, (start, stop, shape) in bucket.places.items()
        }

    def _kept(self, bucket: Bucket, name: str) -> tuple[str, ...]:
        """What is kept for every weight of a parameter, once updates were made."""
        average = (AVERAGE,) if self.options.average else ()
        if self._factored:
            return average
        if self._name != "muon":
            return self._keys
        in_muon = bucket.places[name][0] < self._in_muon(bucket)
        return (*(STATE_KEYS["muon"][:1] if in_muon else STATE_KEYS["adamw"]), *average)

    def _factors(self, bucket: Bucket, name: str) -> dict[str, torch.Tensor]:
        """What Adafactor keeps of a parameter."""
        if self._adafactor is None:
            return {}
        state = self._adafactor.state[self._whole[bucket.name, name]]
        return {key: state[key] for key in STATE_KEYS[self._name] if key in state}

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What `state` may give of a parameter beside its weights, once updates were made."""
        return self._keys if self.applied else ()

    def load(self, bucket: Bucket, states: Mapping[str, Mapping[str, Any]], more: Mapping[str, torch.Tensor]) -> None:
        """Set weights, optimizer state and more vectors (where saved; all of one, or what this rank updates) of a
        bucket from those of its parameters."""
        first = next(iter(states.values()))
        self.applied = int(first["updates"])
        for name in bucket.places if self.applied else ():
            found = states[name]
            wanted = [("row_var", "variance")] if self._factored else [(key,) for key in self._kept(bucket, name)]
            for keys in wanted:
                # A run that averages from here on begins with the weights as they are.
                there = any(key in found or key == AVERAGE for key in keys)
                require(there, "checkpoint: optimizer state", sorted(found), f"{keys[0]} (optimizer {self._name})")

        def vector_of(key: str) -> torch.Tensor:
            vector = torch.zeros(bucket.size, dtype=bucket.weights.dtype, device=bucket.weights.device)
            for name, (start, stop, _) in bucket.places.items():
                if key in states[name]:
                    vector[start:stop] = bucket.cut(name, states[name][key]).reshape(-1).to(vector.device)
            return vector

        bucket.put(vector_of("value"))
        for key, vector in more.items():
            if key in first:
                vector.copy_(vector_of(key)[bucket.own if len(vector) < bucket.size else slice(None)])
        kept = [(start, self._kept(bucket, name), states[name]) for name, (start, _, _) in bucket.places.items()]
        flat = {
            key: vector_of(key) for key in dict.fromkeys(key for _, keys, state in kept for key in keys if key in state)
        }
        for piece in self._pieces:
            if piece.bucket is not bucket:
                continue
            piece.take_weights()
            if self.applied:
                # All parameters of a stretch have the same.
                keys = next(keys for start, keys, _ in reversed(kept) if start <= piece.start)
                self._restore(piece, {key: flat[key][piece.start : piece.stop] for key in keys if key in flat})
        if self._adafactor is not None and self.applied:
            for name in bucket.places:
                whole, found = self._whole[bucket.name, name], states[name]
                self._adafactor.state[whole] = {
                    key: found[key].to(whole.device) for key in STATE_KEYS[self._name] if key in found
                } | {"step": torch.tensor(float(self.applied))}

    def _restore(self, piece: _Piece, found: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was kept of a stretch."""
        device = piece.parameter.device
        state = {key: vector.to(device, copy=True) for key, vector in found.items()}
        if self._optimizer is None or self._factored or self._is_muons(piece):
            piece.state = state
            return
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(self.applied), device=device)
        self._optimizer.state[piece.parameter] = state
