"""Rows that change places within a group of ranks, with their gradients going back the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import AllToAllOptions

from polygon_comm.tensor_group import TensorGroup, there_and_back


class ExchangeGroup(TensorGroup):
    """One rank's part in a group whose members send rows to one another."""

    sent_bytes = 0
    """Bytes that this rank has sent to others."""

    def move(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows (along the first dimension) from all members, those of the first member first; without gradient.

        Parameters
        ----------
        rows : tensor
            Those for the first member, then those for the second, ...
        sent, received : sequence of int
            How many go to and come from each member.
        """
        return self._start(rows, sent, received)()

    def _start(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Callable[[], torch.Tensor]:
        """What `move` does, begun; the call of the result waits for what arrives."""
        arrived, rows = rows.new_empty((sum(received), *rows.shape[1:])), rows.detach().contiguous()
        work = self._group.alltoall_base(arrived, rows, list(received), list(sent), AllToAllOptions())
        per_row = rows.element_size() * (rows[0].numel() if len(rows) else 0)
        self.sent_bytes += (len(rows) - sent[self.place]) * per_row
        held = [rows]  # until all has been sent

        def wait() -> torch.Tensor:
            work.wait()
            held.clear()
            return arrived

        return wait

    def pass_on(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send a tensor to the next member in a ring; the call of the result gives that of the one before.

        All members have tensors of one shape. Without gradient.
        """
        values = x.flatten()
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.place + 1) % self.size] = received[(self.place - 1) % self.size] = len(values)
        passing = self._start(values, sent, received)
        return lambda: passing().view(x.shape)

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """What `move` does, for autograd: gradients of the arrived rows go back to where they came from."""
        return there_and_back(
            rows, lambda x: self.move(x, sent, received), lambda gradient: self.move(gradient, received, sent)
        )

    def swap(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block i goes to member i; the result's block i is what came from member i. Shape (members, ...)."""
        ones = [1] * self.size
        return self.exchange(blocks, ones, ones)
