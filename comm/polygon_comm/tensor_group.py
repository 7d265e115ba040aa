"""The devices that hold one worker's layers in slices: sums and copies with their gradients, gathering, handing out.

Two functions make a pair of layers parallel: `copy` before the first (the identity; its gradient is summed) and `sum`
after the second (a sum; its gradient is the identity).

References
----------
Shoeybi et al., arXiv:1909.08053 (Megatron-LM), figure 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, Store

from polygon_comm.accelerator import Accelerator

Way = Callable[[torch.Tensor], torch.Tensor]


class _ThereAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def there_and_back(x: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    """What one function makes of a tensor; another makes the tensor's gradient of that of the result."""
    return _ThereAndBack.apply(x, there, back)


class TensorGroup:
    """One rank's part in a worker of several devices.

    Parameters
    ----------
    store : Store
        Of this worker alone.
    place, size : int
        Which slice this rank holds, of how many.
    devices : list
        gloo's network devices (see `polygon_comm.transport.gloo_devices`).
    timeout_s : float
    accelerator : Accelerator
    """

    def __init__(
        self, store: Store, place: int, size: int, *, devices: list, timeout_s: float, accelerator: Accelerator
    ) -> None:
        self.place, self.size = place, size
        self._group = accelerator.group(store, place, size, devices, timeout_s)

    def total(self, x: torch.Tensor, operation: Any = ReduceOp.SUM) -> torch.Tensor:
        """The sum (or another operation) over the group, as a new tensor without gradient."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        options = AllreduceOptions()
        options.reduceOp = operation
        self._group.allreduce([total], options).wait()
        return total

    def total_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice, along a dimension, of the sum over the group; without gradient."""
        parts = [part.contiguous() for part in x.detach().chunk(self.size, dim)]
        total = torch.empty_like(parts[0])
        self._group.reduce_scatter([total], [parts]).wait()
        return total

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself; its gradient is summed over the group."""
        return there_and_back(x, lambda x: x.view_as(x), self.total)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the group; its gradient goes back as it is."""
        return there_and_back(x, self.total, lambda gradient: gradient)

    def sum_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice, along a dimension, of the sum over the group; gradients are gathered."""
        return there_and_back(x, lambda x: self.total_part(x, dim), lambda gradient: self.gather(gradient, dim))

    def join(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole, for what every rank computes as a whole: of its gradients this rank's slice."""
        return there_and_back(part, lambda x: self.gather(x, dim), lambda g: self.part(g, dim).contiguous())

    def spread(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole, for products of which every rank computes some: of the sum of its gradients this rank's slice."""
        return there_and_back(part, lambda x: self.gather(x, dim), lambda g: self.total_part(g, dim))

    def split(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice of what every rank has computed as a whole; gradients are gathered."""
        return there_and_back(whole, lambda x: self.part(x, dim).contiguous(), lambda g: self.gather(g, dim))

    def broadcast_(self, x: torch.Tensor) -> None:
        """Overwrite with what the first rank of the group has."""
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole tensor from every rank's slice along a dimension."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [part.contiguous()]).wait()
        return torch.cat(parts, dim)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice of a tensor along a dimension."""
        return whole.chunk(self.size, dim)[self.place]
