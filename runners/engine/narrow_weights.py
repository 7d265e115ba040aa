"""Weights in 16 bits for products, made once a step, whose gradients are added to those of the 32-bit weights at once.

torch's autocast makes such copies too, and keeps them while it is on. But autograd then passes the copies of the first
micro-batch last in every further backward: all gradients come at its end, none of their sums has any backward left to
go beside it, and all of them are held in 16 bits until then. Here a copy is a tensor of its own that autograd ends at:
when its gradient is there one kernel adds it to the weight's, which has 32 bits, and whoever waits for it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from runners.engine.experts import ALIGNED_BYTES, Experts
from runners.engine.gradients import Bucket
from runners.engine.sequence import summed_over


class _Copy:
    """The weights of a bucket in another number format, in one vector."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self._bucket, self._dtype = bucket, dtype
        self._vector: torch.Tensor | None = None
        self.leaves: list[torch.Tensor] = []
        """What products take."""
        self._unfilled: list[tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...]]] = []
        """Of those, with start, shape and strides, what the vector will hold."""

    def leaf(self, names: Sequence[str], *, stacked: bool = False) -> torch.Tensor:
        """What products take in place of a parameter, or in place of several that lie equally far apart, as one tensor
        with a dimension more."""
        bucket = self._bucket
        starts = [bucket.places[name][0] for name in names]
        shape = bucket.places[names[0]][2]
        strides = torch.empty(shape, device="meta").stride()
        if stacked:
            apart = starts[1] - starts[0] if len(starts) > 1 else 0
            shape, strides = (len(names), *shape), (apart, *strides)
        leaf = torch.empty(0, dtype=self._dtype, device=bucket.weights.device).requires_grad_()
        parameters = [bucket.parameters[name] for name in names]

        def add(leaf: torch.Tensor) -> None:
            gradient = leaf.grad
            assert gradient is not None
            leaf.grad = None
            for name, parameter, part in zip(names, parameters, gradient if stacked else gradient[None], strict=True):
                _add(parameter, part)
                bucket.collect(name)

        leaf.register_post_accumulate_grad_hook(add)
        self.leaves.append(leaf)
        if bucket.whole_weights.dtype == self._dtype:
            leaf.data = bucket.view(starts[0], shape, strides)
        else:
            self._unfilled.append((leaf, starts[0], shape, strides))
        return leaf

    def fill(self) -> None:
        """Take the weights as they are now."""
        if self._vector is not None:
            self._vector.copy_(self._bucket.whole_weights)
        elif self._unfilled:
            self._vector = self._bucket.whole_weights.to(self._dtype)
            for leaf, start, shape, strides in self._unfilled:
                leaf.data = self._vector.as_strided(shape, strides, start)


def _add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """To what a parameter's gradient is so far."""
    for group in summed_over(parameter):
        gradient = group.total(gradient.to(parameter.dtype))
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


class NarrowWeights:
    """Weights of linear layers, and of all experts at a time where one kernel takes them, in the format of products.

    Parameters
    ----------
    layers : iterable of Module
    buckets : sequence of Bucket
        Of their parameters; `leaves` of those become what gradients now come to.
    dtype : torch.dtype
        Of products; parameters that have it are left as they are.
    """

    def __init__(self, layers: Iterable[nn.Module], buckets: Sequence[Bucket], dtype: torch.dtype) -> None:
        self._swaps: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._copies: list[_Copy] = []
        if dtype == torch.float32:
            return
        modules = list(dict.fromkeys(part for layer in layers for part in layer.modules()))
        for bucket in buckets:
            copy = _Copy(bucket, dtype)
            leaves = self._stacks(modules, bucket, copy, dtype) | self._weights(modules, bucket, copy, dtype)
            if leaves:
                self._copies.append(copy)
                bucket.leaves = list(leaves)

    @staticmethod
    def _stacks(modules: Iterable[nn.Module], bucket: Bucket, copy: _Copy, dtype: torch.dtype) -> dict[Any, None]:
        """Give mixtures the weights of all their experts at a time."""
        names = {parameter: name for name, parameter in bucket.parameters.items()}
        found: dict[Any, None] = {}
        for part in modules:
            if not isinstance(part, Experts) or not part.may_run_at_once(bucket.weights.device, dtype):
                continue
            for name, weights in part.weights_by_layer().items():
                here = [names[weight] for weight in weights if weight in names]
                if len(here) == len(weights) and bucket.equally_far(here, ALIGNED_BYTES // dtype.itemsize):
                    part.stacked[name] = copy.leaf(here, stacked=True)
                    found[part.stacked[name]] = None
        return found

    def _weights(
        self, modules: Iterable[nn.Module], bucket: Bucket, copy: _Copy, dtype: torch.dtype
    ) -> dict[Any, None]:
        """Note what linear layers are given in place of their weights; what gradients come to."""
        names = {parameter: name for name, parameter in bucket.parameters.items()}
        stacked = {
            weight
            for part in modules
            if isinstance(part, Experts)
            for name in part.stacked
            for weight in part.weights_by_layer()[name]
        }
        made: dict[nn.Parameter, torch.Tensor] = {}
        found: dict[Any, None] = {}
        for part in modules:
            narrow = isinstance(part, nn.Linear) and getattr(part, "eight_bits", None) is None
            for name, parameter in part._parameters.items():
                if parameter is None or parameter not in names or parameter in stacked:
                    continue
                if not narrow or parameter.dtype == dtype:
                    found[parameter] = None
                    continue
                if parameter not in made:
                    made[parameter] = copy.leaf([names[parameter]])
                self._swaps.append((part._parameters, name, parameter, made[parameter]))
                found[made[parameter]] = None
        return found

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What products take in place of parameters."""
        return list({leaf: None for copy in self._copies for leaf in copy.leaves})

    def fill(self) -> None:
        """Take the weights as they are now."""
        for copy in self._copies:
            copy.fill()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let layers have them, as the weights are now, until the end."""
        self.fill()
        for held, name, _, leaf in self._swaps:
            held[name] = leaf
        try:
            yield
        finally:
            for held, name, parameter, _ in self._swaps:
                held[name] = parameter
