"""Parameter servers: gradients go to the owner of a part of the weights, which updates it and hands the weights out.

*Sharded*: each leader owns the part that it adds up for all (`polygon_comm.members`; within one region all members own
equal parts). *Central*: the first member owns all. Either way the optimizer state of a part exists once, and gradients
travel only one way, packed; weights travel back as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

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
    carriers: tuple[int, ...]
    """Of each region, who carries it between regions: the owner in its own."""


Carried: TypeAlias = dict[int, list[torch.Tensor]]
"""Stretches of a vector by rank."""


class ServerGroup(SumGroup):
    """One rank's part in a group with owners. Calls must come in the same order on all members."""

    def parts(self, elements: int, *, central: bool) -> list[Part]:
        """Who owns which part of a vector."""
        members = self.members
        firsts = tuple(leaders[0] for leaders in members.leaders)
        if central:
            return [Part(0, elements, firsts[0], firsts)]
        if len(members.regions) == 1:
            borders = [elements * i // len(members.ranks) for i in range(len(members.ranks) + 1)]
            owners = zip(pairwise(borders), members.ranks, strict=True)
            return [Part(start, stop, owner, (owner,)) for (start, stop), owner in owners]
        return [Part(p.start, p.stop, p.leaders[p.owner], p.leaders) for p in members.pieces(elements)]

    def _carrier(self, part: Part) -> int:
        """Member of this rank's region that holds a part's sum over the region, or its new weights."""
        return part.carriers[self.members.regions.index(self._mine)]

    def _carried(self, vector: torch.Tensor, parts: Sequence[Part]) -> tuple[Carried, Carried]:
        """Stretches of the vector that this rank carries, by their owner; and its own, by who else carries them."""
        me, others, own = self._wires.rank, dict[int, list[torch.Tensor]](), dict[int, list[torch.Tensor]]()
        for part in parts:
            if self._carrier(part) == me and part.start < part.stop:
                values = vector[part.start : part.stop]
                if part.owner != me:
                    others.setdefault(part.owner, []).append(values)
                for peer in part.carriers if part.owner == me else ():
                    if peer != me:
                        own.setdefault(peer, []).append(values)
        return others, own

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
        codec, tag = make_codec(self.members.codec), self._tag(self._number())
        others, own = self._carried(vector, parts)
        receipts = [
            (self._wires.post_receive(peer, tag, codec.payload_bytes(_length(values), vector.dtype)), values)
            for peer, values in own.items()
        ]
        sendings = [
            self._wires.send(owner, tag, self._packer(key, index, ()).compress(torch.cat(values))[0])
            for index, (owner, values) in enumerate(others.items())
        ]

        def arrive() -> None:
            for receipt, values in receipts:
                heard = codec.decompress(receipt.wait(), (_length(values),), vector.dtype)
                for mine, theirs in zip(values, heard.split([each.numel() for each in values]), strict=True):
                    mine += theirs
            for sending in sendings:
                sending.wait()

        return Pending(arrive)

    def share_from_owners_(self, vector: torch.Tensor, parts: Sequence[Part]) -> None:
        """Give every member what the owners hold, as it is."""
        plain, tag = Codec(), self._tag(self._number())
        others, own = self._carried(vector, parts)
        sendings = [self._wires.send(peer, tag, plain.compress(torch.cat(values))) for peer, values in own.items()]
        receipts = [
            (self._wires.post_receive(owner, tag, plain.payload_bytes(_length(values), vector.dtype)), values)
            for owner, values in others.items()
        ]
        for receipt, values in receipts:
            heard = plain.decompress(receipt.wait(), (_length(values),), vector.dtype)
            for mine, theirs in zip(values, heard.split([each.numel() for each in values]), strict=True):
                mine.copy_(theirs)
        for sending in sendings:
            sending.wait()
        pieces = [vector[part.start : part.stop] for part in parts]
        hand_out(self._near, pieces, self._near_places([self._carrier(part) for part in parts]))


def _length(values: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() for each in values)
