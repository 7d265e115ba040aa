"""Rows that change places within a group of ranks, with their gradients going back the same way."""

from __future__ import annotations

from collections.abc import Sequence

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
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        self._group.alltoall_base(
            arrived, rows.detach().contiguous(), list(received), list(sent), AllToAllOptions()
        ).wait()
        per_row = rows.element_size() * (rows[0].numel() if len(rows) else 0)
        self.sent_bytes += (len(rows) - sent[self.place]) * per_row
        return arrived

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """What `move` does, for autograd: gradients of the arrived rows go back to where they came from."""
        return there_and_back(
            rows, lambda x: self.move(x, sent, received), lambda gradient: self.move(gradient, received, sent)
        )

    def swap(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block i goes to member i; the result's block i is what came from member i. Shape (members, ...)."""
        ones = [1] * self.size
        return self.exchange(blocks, ones, ones)
