"""Who sums what of a vector, over ranks in several regions.

Each part of a vector is summed over a *tree* of regions: every region sends what it has to its parent, a *relay* adds
its children's versions to its own before it does, the root adds up all, and the sum goes back the same way. Where it is
not said otherwise, each region is the root of an equal part, and the parent of all others there.

Where a region has several nodes, the first rank on each of them *leads*. The root of a part deals it out to its leaders
as it is cut into cells, one to each in turn, and in several *turns*; on the leaders of its children lie equal stretches
of that part, and their children deal again, so that of two regions that exchange anything one always deals. So a vector
crosses a link once however wide the stage is, every node's card passes its part, however few nodes other regions have,
and as many connections are used as there are pairs of leaders that have something in common: eight leaders beside eight
exchange over 56 connections in seven turns, over 8 in one. What two leaders have in common in a round is one message,
however many *pieces* it has: a piece has one leader in every region.

Leaves send first (round `LEAVES`), then relays (`RELAYS`); sums go from roots to their children (`ROOTS`), and from
relays to theirs (`BACK`). Of two regions, and of what goes whole (`Members.whole`), all send all at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

from polygon_comm.line import MOST_UNDER_WAY
from polygon_comm.near_sums import SMALL

LEAVES, RELAYS, ROOTS, BACK = range(4)
"""Rounds of messages, by who sends; without relays there are the first and the third."""
SUMS_APART = 2 * MOST_UNDER_WAY
"""Of so many sums of a group, under way or expected, messages are told apart: each round of each has a tag."""
CUT = 4
"""Which way of cutting vectors among leaders this is: what packing owes under another one is of other stretches."""
_FINE = 1 << 40
"""Elements of a vector in which every piece has some."""


class Tree(NamedTuple):
    """A way in which a part of a vector is summed."""

    part: float
    """Of the vector: those of all trees make 1."""
    parents: tuple[int, ...]
    """Place of each region's parent, -1 of the root; that of a parent is the root, or has it for its own."""

    @property
    def root(self) -> int:
        """Place of the region that has the sum first."""
        return self.parents.index(-1)

    def depth(self, place: int) -> int:
        """How many regions are above one."""
        parent = self.parents[place]
        return 0 if parent < 0 else 1 if self.parents[parent] < 0 else 2

    def children(self, place: int) -> list[int]:
        """Places of the regions whose parent is at a place."""
        return [child for child, parent in enumerate(self.parents) if parent == place]

    def way(self, source: int, target: int) -> list[tuple[int, int]]:
        """Pairs of places over which what a region has gets to another one: up to the root, and down from there."""
        up, down = [source], [target]
        for of in (up, down):
            while self.parents[of[-1]] >= 0:
                of.append(self.parents[of[-1]])
        return [*pairwise(up), *pairwise(reversed(down))]


class Piece(NamedTuple):
    """A stretch of a vector with one leader in every region."""

    start: int
    stop: int
    owner: int
    """Place of the region whose leader adds it up, where not all do: the root of its tree."""
    leaders: tuple[int, ...]
    """Of each region."""
    tree: int
    """Number of its tree (`Members.sum_trees`)."""


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
    trees : tuple of Tree
        Over which more than two regions sum; empty: each is the root of an equal part, and the parent of all others.
    """

    name: str
    regions: tuple[tuple[int, ...], ...]
    leaders: tuple[tuple[int, ...], ...]
    turns: tuple[int, ...]
    codec: str = "none"
    first_tag: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()
    trees: tuple[Tree, ...] = ()

    @property
    def tags(self) -> int:
        """How many tags the group uses, in turn."""
        return SUMS_APART * self.rounds

    @cached_property
    def rounds(self) -> int:
        """Of messages in a sum; of which two regions, and what goes whole, use the first."""
        relays = any(tree.depth(place) > 1 for tree in self.sum_trees for place in range(len(self.regions)))
        return 4 if relays else 2

    @cached_property
    def sum_trees(self) -> tuple[Tree, ...]:
        """Trees over which what is not sent whole is summed; two regions give each other all they have."""
        count = len(self.regions)
        if self.trees and count > 2 and self.codec != "powersgd":
            return self.trees
        stars = [tuple(-1 if place == root else root for place in range(count)) for root in range(count)]
        return tuple(Tree(1 / count, star) for star in stars)

    def _borders(self, elements: int) -> list[int]:
        """Where the trees' parts of a vector begin and end."""
        if self.sum_trees is not self.trees:
            return [elements * root // len(self.regions) for root in range(len(self.regions) + 1)]
        ends = list(accumulate(tree.part for tree in self.trees))[:-1]
        return [0, *(min(elements, round(elements * end)) for end in ends), elements]

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
        for number, (tree, (start, stop)) in enumerate(
            zip(self.sum_trees, pairwise(self._borders(elements)), strict=True)
        ):
            counts = [
                len(leaders) * (1 if tree.depth(place) % 2 else turns)
                for place, (leaders, turns) in enumerate(zip(self.leaders, self.turns, strict=True))
            ]
            begins = [[start + (stop - start) * i // count for i in range(count)] for count in counts]
            for begin, end in pairwise(sorted({stop, *(at for of in begins for at in of)})):
                at = [bisect_right(of, begin) - 1 for of in begins]
                led = tuple(leaders[i % len(leaders)] for leaders, i in zip(self.leaders, at, strict=True))
                if pieces and pieces[-1][2:] == (tree.root, led, number):
                    begin = pieces.pop().start
                if begin < end:
                    pieces.append(Piece(begin, end, tree.root, led, number))
        return pieces

    def adds(self, piece: Piece, place: int, other: int) -> bool:
        """Whether leaders of two regions exchange a piece: of two regions all, else what one adds up for the other."""
        parents = self.sum_trees[piece.tree].parents
        return len(self.regions) == 2 or parents[place] == other or parents[other] == place

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

    @cached_property
    def leader_pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of ranks that exchange messages between regions: the first leaders of all do, if only what is small."""
        firsts = combinations(sorted(leaders[0] for leaders in self.leaders), 2)
        return tuple(dict.fromkeys([*self.shared, *firsts]))

    def leader_peers(self, rank: int) -> set[int]:
        """Ranks with which a rank exchanges messages between regions."""
        return {b if a == rank else a for a, b in self.leader_pairs if rank in (a, b)}


def members_of(
    name: str,
    ranks: Iterable[int],
    region_of: Mapping[int, int],
    node_of: Mapping[int, int] | None = None,
    codec: str = "none",
    first_tag: int = 0,
    turns: Callable[[Sequence[int], int], int] = lambda leaders, region: 1,
    trees: tuple[Tree, ...] = (),
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
    return Members(name, regions, tuple(leaders), tuple(dealt), codec, first_tag, tuple(nodes), trees)
