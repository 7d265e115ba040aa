"""Sums of vectors over ranks that are near one another, of a node or a region: part by part where it is wanted, back.

gloo sums to one rank in a ring of small steps, each of which waits for the other side: beside messages to other
regions, which fill the card's queue, such a ring leaves the card idle for a third of the time, and it carries half as
much again as it need (with two members 1.5 n instead of n, counting both parts); its tree hands a sum out whole, level
by level. Parts therefore go straight to who adds them up, announced before they are there: to who holds the part, and
its sum straight back, or, where few holders would have to hear many members (`NearSums._straight`), to all members (but
a single holder), each of which adds up a piece for the holder and later passes that piece of the sum on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import BroadcastOptions

SMALL = 1024
"""Elements below which a latency counts more than any bytes: such a vector goes straight and unpacked."""


class _Piece(NamedTuple):
    """A stretch of a part, and the places of who adds it up and of who holds the part."""

    vector: torch.Tensor
    adder: int
    holder: int
    tag: int
    """Beyond the sum's; the next is the piece's, too."""


class _Collection(NamedTuple):
    """Receives of what the other members have of the pieces that this rank adds up."""

    tag: int
    arriving: tuple[tuple[tuple[torch.Tensor, Any], ...], ...]
    """By piece buffers and works, in the order of the members."""


class HandingBack(NamedTuple):
    """Sums on their way back to the members."""

    start: Callable[[], None]
    """Sends those that this rank holds."""
    end: Callable[[], None]
    """Waits for the others, and until all has been sent."""


class NearSums:
    """One rank's part in the sums of some members.

    Parameters
    ----------
    ranks : tuple of int
        The members; this rank is at `place` among them.
    begin, end : process group
        Of the members: sums begin and end in threads of their own, each in its order, and with a group for it.
    """

    def __init__(self, ranks: tuple[int, ...], place: int, begin: Any, end: Any) -> None:
        self.ranks, self.place = ranks, place
        self.begin, self.end = begin, end
        self._rounds = 0
        self._collections: deque[_Collection] = deque()
        """Those that were posted when their sums were expected."""

    def expect(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> None:
        """Post the receives of the next sum; arguments as for `start`."""
        self._collections.append(self._collect(self._pieces(parts, holders)))

    def start(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> Callable[[], HandingBack]:
        """Start to sum parts over the members, each where its holder is (its rank).

        The call of the result ends that, and returns what gives every member the parts that others hold, once they are
        complete.
        """
        pieces, me = self._pieces(parts, holders), self.place
        collection = self._collections.popleft() if self._collections else self._collect(pieces)
        works = [self.begin.send([p.vector], p.adder, collection.tag + p.tag) for p in pieces if p.adder != me]
        handing = self._handing_back(pieces, collection.tag, works)
        return lambda: self._end(pieces, collection, handing)

    def hand_out(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> None:
        """Give every member the parts that other members hold, where nothing was summed."""
        hand_out(self.end, parts, [self.ranks.index(holder) for holder in holders])

    def _straight(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> bool:
        """Whether members send their parts to their holders, instead of a piece of each to every member.

        Gathering n and handing it out, P members with L holders pass (P + L - 2) n / L through a holder's card each way
        if they send straight, and (P - 1) / P (2 + 1 / L) n by pieces, of a single holder 2 n.
        """
        small = len(parts) == 1 and parts[0].numel() < SMALL
        return small or len(self.ranks) <= len(set(holders)) + 1

    def _pieces(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> list[_Piece]:
        """What of each part is added up where."""
        straight, places = self._straight(parts, holders), list(range(len(self.ranks)))
        if len(set(holders)) == 1:
            places.remove(self.ranks.index(holders[0]))  # its card has the way to other regions beside
        pieces: list[_Piece] = []
        for part, rank in zip(parts, holders, strict=True):
            holder = self.ranks.index(rank)
            adders = [(part, holder)] if straight else zip(part.tensor_split(len(places)), places, strict=True)
            for vector, adder in adders:
                if vector.numel():
                    pieces.append(_Piece(vector, adder, holder, 2 * len(pieces)))
        return pieces

    def _end(self, pieces: Sequence[_Piece], collection: _Collection, handing: HandingBack) -> HandingBack:
        """Add up this rank's pieces, and give them to their holders."""
        (tag, arriving), me = collection, self.place
        mine = [piece for piece in pieces if piece.adder == me]
        for piece, received in zip(mine, arriving, strict=True):
            total, versions = piece.vector, [buffer for buffer, _ in received]
            versions.insert(me, total.clone())
            total.zero_()
            for _, work in received:
                work.wait()
            for version in versions:
                total += version
        moved = [piece for piece in pieces if piece.adder != piece.holder]
        works = [self.begin.send([p.vector], p.holder, tag + p.tag + 1) for p in moved if p.adder == me]
        works += [self.begin.recv([p.vector], p.adder, tag + p.tag + 1) for p in moved if p.holder == me]
        for work in works:
            work.wait()
        return handing

    def _handing_back(self, pieces: Sequence[_Piece], tag: int, sent: list[Any]) -> HandingBack:
        """What gives every member all pieces, once those that this rank holds are complete.

        What this rank has `sent` comes back, summed, to where it was. That is asked for at once: nobody has a sum
        before all of it has arrived there, and who asks late waits behind all that its card has queued.
        """
        me, group = self.place, self.end
        from_holder = {
            p.tag: group.recv([p.vector], p.holder, tag + p.tag) for p in pieces if p.adder == me != p.holder
        }
        from_adder = [group.recv([p.vector], p.adder, tag + p.tag + 1) for p in pieces if me not in (p.adder, p.holder)]

        def start() -> None:
            sent.extend(group.send([p.vector], p.adder, tag + p.tag) for p in pieces if p.holder == me != p.adder)
            places = [place for place in range(len(self.ranks)) if place != me]
            for p in pieces:
                if p.adder == me == p.holder:
                    sent.extend(group.send([p.vector], place, tag + p.tag + 1) for place in places)

        def end() -> None:
            for piece in pieces:
                if piece.tag in from_holder:
                    from_holder[piece.tag].wait()
                    others = [place for place in range(len(self.ranks)) if place not in (me, piece.holder)]
                    sent.extend(group.send([piece.vector], place, tag + piece.tag + 1) for place in others)
            for work in (*sent, *from_adder):
                work.wait()

        return HandingBack(start, end)

    def _collect(self, pieces: Sequence[_Piece]) -> _Collection:
        """Post the receives of the pieces that this rank adds up from all other members."""
        tag, me = self._rounds, self.place
        self._rounds += 2 * len(pieces)
        arriving = []
        for piece in pieces:
            if piece.adder == me:
                buffers = [
                    (torch.empty(piece.vector.numel(), dtype=piece.vector.dtype), place)
                    for place in range(len(self.ranks))
                    if place != me
                ]
                arriving.append(
                    tuple((buffer, self.begin.recv([buffer], place, tag + piece.tag)) for buffer, place in buffers)
                )
        return _Collection(tag, tuple(arriving))


def hand_out(group: Any, parts: Sequence[torch.Tensor], places: Sequence[int]) -> None:
    """Give every member of a process group the parts that are at others' places; None: there are no others."""
    works = []
    for part, place in zip(parts, places, strict=False):
        if group is not None and part.numel():
            options = BroadcastOptions()
            options.rootRank = place
            works.append(group.broadcast([part], options))
    for work in works:
        work.wait()
