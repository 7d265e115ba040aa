"""Parameter servers: gradients go to the owner of a part of the weights, which updates it and hands the weights out.

*Sharded*: the leaders of every lane own equal parts of it (within one region all members do, of all). *Central*: the
first member owns all. Either way the optimizer state of a part exists once, and gradients travel only one way, packed;
weights travel back as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.distributed import ReduceOptions

from polygon_comm.compression import Codec, make_codec
from polygon_comm.line import Pending
from polygon_comm.near_sums import hand_out
from polygon_comm.reduction import SumGroup


class Part(NamedTuple):
    """A stretch of a vector and who owns it."""

    start: int
    stop: int
    owner: int
    lane: int
    """Which leader of each region carries it between regions."""


class ServerGroup(SumGroup):
    """One rank's part in a group with owners. Calls must come in the same order on all members."""

    def parts(self, elements: int, *, central: bool) -> list[Part]:
        """Who owns which part of a vector."""
        members = self.members
        if central:
            return [Part(0, elements, members.leaders[0][0], 0)]
        if len(members.regions) == 1:
            shares = [((0, elements), members.ranks)]
        else:
            shares = list(zip(pairwise(members.places(elements)), zip(*members.leaders, strict=True), strict=True))
        parts = []
        for lane, ((start, stop), owners) in enumerate(shares):
            borders = [start + (stop - start) * i // len(owners) for i in range(len(owners) + 1)]
            parts += [Part(borders[i], borders[i + 1], owner, lane) for i, owner in enumerate(owners)]
        return parts

    def _carrier(self, part: Part) -> int:
        """Member of this rank's region that holds a part's sum over the region, or its new weights."""
        if len(self.members.regions) == 1:
            return part.owner
        return self.members.leaders[self.members.regions.index(self._mine)][part.lane]

    def _far_carriers(self, part: Part) -> list[int]:
        """Carriers of a part in the regions that do not own it."""
        if len(self.members.regions) == 1:
            return []
        return [leaders[part.lane] for leaders in self.members.leaders if leaders[part.lane] != part.owner]

    def begin_to_owners(self, vector: torch.Tensor, key: str, parts: Sequence[Part]) -> Pending:
        """Start to sum over the members; when the call of the result returns, each owner's part is right, no other."""
        works = []
        for part in parts:
            if self._near is not None and part.stop > part.start:
                options = ReduceOptions()
                options.rootRank = self._mine.index(self._carrier(part))
                works.append(self._near.reduce([vector[part.start : part.stop]], options))
        for work in works:
            work.wait()
        me, codec = self._wires.rank, make_codec(self.members.codec)
        number = self._number()
        receipts, sendings = [], []
        for index, part in enumerate(parts):
            if self._carrier(part) != me or part.start == part.stop:
                continue
            values = vector[part.start : part.stop]
            if part.owner == me:
                n_bytes = codec.payload_bytes(values.numel(), vector.dtype)
                for peer in self._far_carriers(part):
                    receipts.append((self._wires.post_receive(peer, self._tag(number, part.lane), n_bytes), values))
            else:
                payload, _ = self._packer(key, index, ()).compress(values)
                sendings.append(self._wires.send(part.owner, self._tag(number, part.lane), payload))

        def arrive() -> None:
            for receipt, values in receipts:
                values += codec.decompress(receipt.wait(), values.shape, values.dtype)
            for sending in sendings:
                sending.wait()

        return Pending(arrive)

    def share_from_owners_(self, vector: torch.Tensor, parts: Sequence[Part]) -> None:
        """Give every member what the owners hold, as it is."""
        me, plain = self._wires.rank, Codec()
        number = self._number()
        receipts, sendings = [], []
        for part in parts:
            if self._carrier(part) != me or part.start == part.stop:
                continue
            values = vector[part.start : part.stop]
            if part.owner == me:
                for peer in self._far_carriers(part):
                    sendings.append(self._wires.send(peer, self._tag(number, part.lane), plain.compress(values)))
            else:
                n_bytes = plain.payload_bytes(values.numel(), vector.dtype)
                receipts.append((self._wires.post_receive(part.owner, self._tag(number, part.lane), n_bytes), values))
        for receipt, values in receipts:
            values.copy_(plain.decompress(receipt.wait(), values.shape, values.dtype))
        for sending in sendings:
            sending.wait()
        pieces = [vector[part.start : part.stop] for part in parts]
        hand_out(self._near, pieces, self._near_places([self._carrier(part) for part in parts]))
