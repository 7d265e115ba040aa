"""Who sums what of a vector, over ranks in several regions.

Where a region has several nodes, the first rank on each of them *leads*. Each region adds up an equal part of the
vector for all, and deals it out to its leaders as it is cut into cells, one to each in turn, and in several *turns*;
on every other region's leaders lie equal stretches of that part. So a vector crosses a link once however wide the stage
is, every node's card passes its part, however few nodes other regions have, and as many connections are used as there
are pairs of leaders that have something in common: eight leaders beside eight exchange over 56 connections in seven
turns, over 8 in one. What two leaders have in common is one message, however many *pieces* it has: a piece has one
leader in every region.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from polygon_comm.line import MOST_UNDER_WAY
from polygon_comm.near_sums import SMALL

TAGS_PER_GROUP = 4 * MOST_UNDER_WAY
"""A group uses so many tags in turn: two for each sum that is under way or expected."""
CUT = 4
"""Which way of cutting vectors among leaders this is: what packing owes under another one is of other stretches."""
_FINE = 1 << 40
"""Elements of a vector in which every piece has some."""


class Piece(NamedTuple):
    """A stretch of a vector with one leader in every region."""

    start: int
    stop: int
    owner: int
    """Place of the region whose leader adds it up, where not all do."""
    leaders: tuple[int, ...]
    """Of each region."""


@dataclass(frozen=True)
class Members:
    """Ranks that sum vectors, region by region; what every member agrees on.

    Parameters
    ----------
    name : str
        Unique among the groups of a run.
    regions : tuple of tuples of rank
        Members of each region that has any, in ascending order; or of each node, where nodes are to exchange packed
        vectors as regions do.
    leaders : tuple of tuples of rank
        Of each region.
    turns : tuple of int
        In which each region deals out to its leaders what it adds up.
    codec : str
        How vectors are packed between regions.
    first_tag : int
        Of `tags` that no other message between the leaders uses.
    nodes : tuple of tuples of rank
        Members on each node of the regions that have several; empty where it is not told who is on which.
    """

    name: str
    regions: tuple[tuple[int, ...], ...]
    leaders: tuple[tuple[int, ...], ...]
    turns: tuple[int, ...]
    codec: str = "none"
    first_tag: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()

    tags = TAGS_PER_GROUP

    @property
    def ranks(self) -> tuple[int, ...]:
        """All members."""
        return tuple(rank for region in self.regions for rank in region)

    def whole(self, elements: int) -> bool:
        """Whether the first leaders send one another all of a vector, not each its part to who adds it up."""
        return elements < SMALL or self.codec == "powersgd"

    def pieces(self, elements: int) -> list[Piece]:
        """Of a vector, one after the other; none is empty."""
        pieces: list[Piece] = []
        for owner in range(len(self.regions)):
            start, stop = (elements * place // len(self.regions) for place in (owner, owner + 1))
            counts = [
                len(leaders) * (turns if place == owner else 1)
                for place, (leaders, turns) in enumerate(zip(self.leaders, self.turns, strict=True))
            ]
            begins = [[start + (stop - start) * i // count for i in range(count)] for count in counts]
            for begin, end in pairwise(sorted({stop, *(at for of in begins for at in of)})):
                at = [bisect_right(of, begin) - 1 for of in begins]
                led = tuple(leaders[i % len(leaders)] for leaders, i in zip(self.leaders, at, strict=True))
                if pieces and pieces[-1][2:] == (owner, led):
                    begin = pieces.pop().start
                if begin < end:
                    pieces.append(Piece(begin, end, owner, led))
        return pieces

    def adds(self, piece: Piece, place: int, other: int) -> bool:
        """Whether leaders of two regions exchange a piece: of two regions all, else what one of them adds up."""
        return len(self.regions) == 2 or piece.owner in (place, other)

    @cached_property
    def shared(self) -> dict[tuple[int, int], float]:
        """What two leaders exchange (by rank, the lower one first), as part of a vector each way in a round."""
        found: dict[tuple[int, int], int] = {}
        for piece in self.pieces(_FINE):
            for place, leader in enumerate(piece.leaders):
                for other, peer in enumerate(piece.leaders[:place]):
                    if self.adds(piece, place, other):
                        pair = (leader, peer) if leader < peer else (peer, leader)
                        found[pair] = found.get(pair, 0) + piece.stop - piece.start
        return {pair: elements / _FINE for pair, elements in found.items()}

    @cached_property
    def pairs_at_once(self) -> dict[tuple[int, int], float]:
        """How many pairs of leaders share what two regions exchange (by place), by what the one with most has."""
        place = {leader: place for place, leaders in enumerate(self.leaders) for leader in leaders}
        parts: dict[tuple[int, int], list[float]] = {}
        for (a, b), part in self.shared.items():
            parts.setdefault((place[a], place[b]), []).append(part)
            parts.setdefault((place[b], place[a]), []).append(part)
        return {regions: sum(shares) / max(shares) for regions, shares in parts.items()}

    def leader_pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks that exchange messages between regions."""
        return list(self.shared)

    def leader_peers(self, rank: int) -> set[int]:
        """Ranks with which a rank exchanges messages between regions."""
        return {b if a == rank else a for a, b in self.shared if rank in (a, b)}


def members_of(
    name: str,
    ranks: Iterable[int],
    region_of: Mapping[int, int],
    node_of: Mapping[int, int] | None = None,
    codec: str = "none",
    first_tag: int = 0,
    turns: Callable[[Sequence[int], int], int] = lambda leaders, region: 1,
) -> Members:
    """Group ranks by region, regions by their number; without `node_of` a region counts as one node.

    `turns` are those in which a region deals out what it adds up, by the leaders of all and its place among them.
    """
    by_region: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_region.setdefault(region_of[rank], []).append(rank)
    regions = tuple(tuple(by_region[region]) for region in sorted(by_region))
    leaders, nodes = [], []
    for region in regions:
        on_node: dict[int, list[int]] = {}
        for rank in region:
            on_node.setdefault(0 if node_of is None else node_of[rank], []).append(rank)
        leaders.append(tuple(ranks[0] for ranks in on_node.values()))
        nodes += [tuple(ranks) for ranks in on_node.values()] if len(on_node) > 1 else []
    if codec == "powersgd":  # low-rank factors need whole matrices: one leader then carries all
        leaders = [of[:1] for of in leaders]
    counts = [len(of) for of in leaders]
    dealt = [turns(counts, i) for i in range(len(counts))]
    return Members(name, regions, tuple(leaders), tuple(dealt), codec, first_tag, tuple(nodes))


class Arrangement:
    """Pieces of a vector in the order in which a region's leaders have them: those of each leader side by side.

    Attributes
    ----------
    holders : tuple of rank
        Leaders that have any.
    sizes : tuple of int
        Elements of each.
    """

    def __init__(self, pieces: Sequence[Piece], keys: Sequence[tuple[int, int, int]]) -> None:
        """`keys` are what each piece is put in order by, first its leader."""
        self._lengths = [piece.stop - piece.start for piece in pieces]
        self._order = sorted(range(len(pieces)), key=lambda i: (keys[i], i))
        self._back = sorted(range(len(pieces)), key=self._order.__getitem__)
        sizes: dict[int, int] = {}
        for i in self._order:
            sizes[keys[i][0]] = sizes.get(keys[i][0], 0) + self._lengths[i]
        self.holders, self.sizes = tuple(sizes), tuple(sizes.values())

    @property
    def in_place(self) -> bool:
        """Whether pieces stay where they are."""
        return self._order == self._back == list(range(len(self._order)))

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector in that order: itself, or a copy."""
        if self.in_place:
            return vector
        pieces = vector.split(self._lengths)
        return torch.cat([pieces[i] for i in self._order])

    def put_back(self, arranged: torch.Tensor, vector: torch.Tensor) -> None:
        """Give the vector what `of` it has become."""
        if not self.in_place:
            pieces = arranged.split([self._lengths[i] for i in self._order])
            torch.cat([pieces[i] for i in self._back], out=vector)


class Stretch(NamedTuple):
    """What a leader and others have in common, in what the leader has of a vector once arranged."""

    peers: tuple[int, ...]
    start: int
    stop: int
    sizes: tuple[int, ...]
    """Elements of its pieces."""


@dataclass(frozen=True)
class Share:
    """What a leader has of a vector, once arranged.

    Parameters
    ----------
    exchanged : tuple of Stretch
        Of every peer that adds them up; or, where all add up, of all that it exchanges them with.
    own : Stretch
        What it adds up for others.
    heard : mapping of rank to Stretch
        What of its own each other leader has, in the order of their regions.
    """

    exchanged: tuple[Stretch, ...]
    own: Stretch
    heard: Mapping[int, Stretch]

    @property
    def messages(self) -> int:
        """That the leader sends and receives."""
        return 2 * (sum(len(stretch.peers) for stretch in self.exchanged) + len(self.heard))


class Cut(NamedTuple):
    """How a vector is cut for a rank of a region."""

    arrangement: Arrangement
    share: Share | None
    """None where the rank leads nothing of it."""


def cut_for(members: Members, rank: int, elements: int) -> Cut:
    """How a vector of so many elements is cut for a member."""
    place = next(place for place, region in enumerate(members.regions) if rank in region)
    whole, firsts = members.whole(elements), tuple(leaders[0] for leaders in members.leaders)
    pieces = [Piece(0, elements, 0, firsts)] if whole else members.pieces(elements)

    def of(piece: Piece) -> tuple[int, int, int]:
        """This region's leader, and who adds the piece up for it: by region, and rank; of two regions both do."""
        if whole or (piece.owner == place and len(members.regions) > 2):
            return piece.leaders[place], place, rank
        other = 1 - place if len(members.regions) == 2 else piece.owner
        return piece.leaders[place], other, piece.leaders[other]

    keys = [of(piece) for piece in pieces]
    arrangement = Arrangement(pieces, keys)
    if rank not in arrangement.holders:
        return Cut(arrangement, None)
    if whole:
        others = tuple(leader for leader in firsts if leader != rank)
        return Cut(arrangement, Share((_stretch(others, 0, pieces),), _stretch((), elements, []), {}))
    exchanged, own, at = [], _stretch((), 0, []), 0
    mine = sorted((key, piece) for key, piece in zip(keys, pieces, strict=True) if key[0] == rank)
    added = [piece for (_, by, _), piece in mine if by == place]
    for (_, by, peer), common in groupby(mine, lambda pair: pair[0]):
        stretch = _stretch((peer,) if by != place else (), at, [piece for _, piece in common])
        at = stretch.stop
        if by == place:
            own = stretch
        else:
            exchanged.append(stretch)
    heard: dict[int, Stretch] = {}
    for other in range(len(members.regions)):
        begin = 0
        for leader, of_both in groupby(added if other != place else [], lambda piece: piece.leaders[other]):  # noqa: B023
            heard[leader] = _stretch((leader,), begin, list(of_both))
            begin = heard[leader].stop
    return Cut(arrangement, Share(tuple(exchanged), own, heard))


def _stretch(peers: tuple[int, ...], start: int, pieces: Sequence[Piece]) -> Stretch:
    sizes = tuple(piece.stop - piece.start for piece in pieces)
    return Stretch(peers, start, start + sum(sizes), sizes)
