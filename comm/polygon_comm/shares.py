"""What a rank has of a vector that regions sum: its leaders' pieces side by side, and what of these a leader exchanges
with whom in which round (see `polygon_comm.members`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from polygon_comm.members import BACK, LEAVES, RELAYS, ROOTS, Members, Piece, Tree


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
    """What a leader has in common, in one tree, with the leader who adds it up (or, where all add up, with all others),
    in what the leader has of a vector once arranged."""

    peers: tuple[int, ...]
    start: int
    stop: int
    sizes: tuple[int, ...]
    """Elements of its pieces."""
    tree: int = 0
    sent: int = LEAVES
    """Round in which it goes to who adds it up."""
    returned: int = ROOTS
    """Round in which the sum comes back."""


class Version(NamedTuple):
    """What another leader has of what a leader adds up in one tree."""

    peer: int
    sent: int
    """Round in which it comes."""
    sizes: tuple[int, ...]
    """Elements of its pieces, in the order in which the peer has them."""
    places: tuple[int, ...]
    """Of these among the pieces of the block."""
    runs: tuple[tuple[int, int], ...]
    """Where they begin and end in the block; pieces that lie one behind the other are one."""


class Block(NamedTuple):
    """What a leader adds up in one tree, in what it has of a vector once arranged."""

    tree: int
    start: int
    stop: int
    sizes: tuple[int, ...]
    """Elements of its pieces."""
    relayed: bool
    """Whether it sends that on to the root's leaders, and does not have the sum before they do."""
    versions: tuple[Version, ...]
    """Of its children's leaders."""


@dataclass(frozen=True)
class Share:
    """What a leader has of a vector, once arranged.

    Parameters
    ----------
    exchanged : tuple of Stretch
        Of every tree and every leader that adds up what this one has there; or, where all add up, of all that it
        exchanges them with.
    blocks : tuple of Block
        What it adds up for others.
    """

    exchanged: tuple[Stretch, ...]
    blocks: tuple[Block, ...]

    @cached_property
    def heard(self) -> tuple[dict[int, dict[int, tuple[int, ...]]], ...]:
        """What comes in each round, by peer and tree: elements of what is packed together, one after the other."""
        found: tuple[dict[int, dict[int, tuple[int, ...]]], ...] = ({}, {}, {}, {})
        for block in self.blocks:
            for version in block.versions:
                found[version.sent].setdefault(version.peer, {})[block.tree] = (sum(version.sizes),)
        for stretch in self.exchanged:
            direct = stretch.returned == LEAVES
            for peer in stretch.peers:
                sizes = (stretch.stop - stretch.start,) if direct else stretch.sizes
                found[stretch.returned].setdefault(peer, {})[stretch.tree] = sizes
        return found

    @property
    def pieces_summed(self) -> int:
        """Of which this leader has the sum first."""
        return sum(len(block.sizes) for block in self.blocks if not block.relayed)

    @property
    def steps(self) -> int:
        """After the first messages of leaves: relays send, roots do, relays give the sum back."""
        relayed = {block.relayed for block in self.blocks}
        return 2 * (True in relayed) + (False in relayed)

    @property
    def messages(self) -> int:
        """That the leader sends and receives."""
        up = {(stretch.sent, peer) for stretch in self.exchanged for peer in stretch.peers}
        down = {(block.relayed, version.peer) for block in self.blocks for version in block.versions}
        return len(up) + len(down) + sum(len(of) for of in self.heard)


class Cut(NamedTuple):
    """How a vector is cut for a rank of a region."""

    arrangement: Arrangement
    share: Share | None
    """None where the rank leads nothing of it."""


def cut_for(members: Members, rank: int, elements: int) -> Cut:
    """How a vector of so many elements is cut for a member."""
    place = next(place for place, region in enumerate(members.regions) if rank in region)
    whole, firsts = members.whole(elements), tuple(leaders[0] for leaders in members.leaders)
    pieces = [Piece(0, elements, 0, firsts, 0)] if whole else members.pieces(elements)
    direct, trees = whole or len(members.regions) == 2, members.sum_trees

    def of(piece: Piece) -> tuple[int, int, int]:
        """This region's leader, the tree, and who adds the piece up for it there; of two regions both do."""
        if direct:
            return piece.leaders[place], 0, rank if whole else piece.leaders[1 - place]
        parent = trees[piece.tree].parents[place]
        return piece.leaders[place], piece.tree, rank if parent < 0 else piece.leaders[parent]

    keys = [of(piece) for piece in pieces]
    arrangement = Arrangement(pieces, keys)
    if rank not in arrangement.holders:
        return Cut(arrangement, None)
    if whole:
        others = tuple(leader for leader in firsts if leader != rank)
        return Cut(arrangement, Share((Stretch(others, 0, elements, (elements,), returned=LEAVES),), ()))
    mine = sorted((key, i) for i, key in enumerate(keys) if key[0] == rank)
    exchanged, blocks, at = [], [], 0
    for number, in_tree in groupby(mine, lambda pair: pair[0][1]):
        tree, start, led = trees[number], at, list(in_tree)
        depth, children = tree.depth(place), tree.children(place)
        for peer, common in groupby(led, lambda pair: pair[0][2]):
            sizes = tuple(pieces[i].stop - pieces[i].start for _, i in common)
            at += sum(sizes)
            if direct:
                exchanged.append(Stretch((peer,), at - sum(sizes), at, sizes, returned=LEAVES))
            elif depth:
                rounds = RELAYS if children else LEAVES, BACK if depth > 1 else ROOTS
                exchanged.append(Stretch((peer,), at - sum(sizes), at, sizes, number, *rounds))
        if children and not direct:
            blocks.append(_block(number, tree, place, start, pieces, [i for _, i in led]))
    return Cut(arrangement, Share(tuple(exchanged), tuple(blocks)))


def _block(number: int, tree: Tree, place: int, start: int, pieces: Sequence[Piece], led: Sequence[int]) -> Block:
    """What a leader at a place adds up: pieces (by their numbers, as it has them arranged) that its children have."""
    lengths = [pieces[i].stop - pieces[i].start for i in led]
    begins = list(accumulate(lengths, initial=0))
    versions = []
    for child in tree.children(place):
        of_peer: dict[int, list[int]] = {}
        for at in sorted(range(len(led)), key=led.__getitem__):  # as the child has them
            of_peer.setdefault(pieces[led[at]].leaders[child], []).append(at)
        sent = RELAYS if tree.children(child) else LEAVES
        for peer, places in of_peer.items():
            runs: list[tuple[int, int]] = []
            for at in places:
                begin = runs.pop()[0] if runs and runs[-1][1] == begins[at] else begins[at]
                runs.append((begin, begins[at + 1]))
            sizes = tuple(lengths[at] for at in places)
            versions.append(Version(peer, sent, sizes, tuple(places), tuple(runs)))
    return Block(number, start, begins[-1] + start, tuple(lengths), tree.depth(place) > 0, tuple(versions))
