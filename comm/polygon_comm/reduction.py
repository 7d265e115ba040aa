"""Sums of vectors over ranks in several regions: on nodes, inside each region, between leaders of the regions, back.

Where a region has several nodes, the ranks of each add up first what they have, at the first of them, and only these
first ranks exchange anything with others: a card passes nothing that its node could have added up before. A region's
leaders are these first ranks, and each leads an equal part of the vector: it sums that
in its region, and exchanges of it with the leaders of every other region what these lead as well. So a vector crosses
a link once however wide the stage is, and every node's card passes its part, however few nodes other regions have:
five beside one pass 1.8 vectors over a card, where a single leader passed 3. In several *turns*, each with an equal
part of the vector, other leaders meet, so that as many connections are used as there are pairs of them: eight leaders
beside eight exchange over 56 connections in seven turns, over 8 in one.
What one leader of every region leads is a *lane*. Between leaders it travels packed, and every leader adds up the very
same unpacked numbers in the same order, so that replicas stay equal bit by bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ReduceOptions

from polygon_comm.compression import ErrorFeedback, make_codec
from polygon_comm.line import MOST_UNDER_WAY, Pending
from polygon_comm.near_sums import SMALL, HandingBack, NearSums, hand_out
from polygon_comm.pacing import connections, open_descriptors, opened_since, prefer_near
from polygon_comm.transport import Receipt, Wires

TAGS_PER_GROUP = 4 * MOST_UNDER_WAY
"""Each lane of a group uses so many tags in turn: two for each sum that is under way or expected."""
CUT = 3
"""Which way of cutting vectors among leaders this is: what packing owes under another one is of other stretches."""


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
        Of each region, who exchanges each lane with the other regions; a rank may have several.
    borders : tuple of Fraction
        Where lanes begin and end in a vector, from 0 to 1.
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
    borders: tuple[Fraction, ...] = (Fraction(0), Fraction(1))
    codec: str = "none"
    first_tag: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def tags(self) -> int:
        """How many tags the group uses."""
        return TAGS_PER_GROUP * (len(self.borders) - 1)

    def places(self, elements: int) -> list[int]:
        """Where lanes begin and end in a vector of so many elements."""
        return [int(elements * border) for border in self.borders]

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """What of a vector each lane has; all of a small one is the first lane's."""
        if vector.numel() < SMALL:
            return [vector]
        return [vector[start:stop] for start, stop in pairwise(self.places(vector.numel()))]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All members."""
        return tuple(rank for region in self.regions for rank in region)

    @cached_property
    def pairs_at_once(self) -> dict[tuple[int, int], float]:
        """How many pairs of leaders share what two regions exchange (by place), by what the one with most has."""
        parts: dict[tuple[int, int], dict[tuple[int, int], Fraction]] = {}
        for (start, stop), *lane in zip(pairwise(self.borders), *self.leaders, strict=True):
            for (a, leader), (b, other) in permutations(enumerate(lane), 2):
                shared = parts.setdefault((a, b), {})
                shared[leader, other] = shared.get((leader, other), Fraction(0)) + stop - start
        return {regions: float(1 / max(shared.values())) for regions, shared in parts.items()}

    def leader_pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks that exchange messages between regions."""
        pairs: dict[tuple[int, int], None] = {}
        for lane in zip(*self.leaders, strict=True):
            ranks = sorted(lane)
            pairs |= dict.fromkeys((a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :])
        return list(pairs)

    def leader_peers(self, rank: int) -> set[int]:
        """Ranks with which a rank exchanges messages between regions."""
        return {b if a == rank else a for a, b in self.leader_pairs() if rank in (a, b)}


def members_of(
    name: str,
    ranks: Iterable[int],
    region_of: Mapping[int, int],
    node_of: Mapping[int, int] | None = None,
    codec: str = "none",
    first_tag: int = 0,
    turns: Callable[[Sequence[int]], int] = lambda leaders: 1,
) -> Members:
    """Group ranks by region, regions by their number; without `node_of` a region counts as one node.

    `turns` are those in which regions with so many leaders each exchange what they sum.
    """
    by_region: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_region.setdefault(region_of[rank], []).append(rank)
    regions = tuple(tuple(by_region[region]) for region in sorted(by_region))
    firsts, nodes = [], []
    for region in regions:
        on_node: dict[int, list[int]] = {}
        for rank in region:
            on_node.setdefault(0 if node_of is None else node_of[rank], []).append(rank)
        firsts.append(tuple(ranks[0] for ranks in on_node.values()))
        nodes += [tuple(ranks) for ranks in on_node.values()] if len(on_node) > 1 else []
    if codec == "powersgd":  # low-rank factors need whole matrices: one leader then carries all
        firsts = [first[:1] for first in firsts]
    counts = [len(first) for first in firsts]
    borders, places = _lanes(counts, turns(counts))
    leaders = tuple(tuple(first[place[region]] for place in places) for region, first in enumerate(firsts))
    return Members(name, regions, leaders, tuple(borders), codec, first_tag, tuple(nodes))


def _lanes(counts: Sequence[int], turns: int) -> tuple[list[Fraction], list[list[int]]]:
    """Borders of lanes in a vector, and the place of each lane's leader among those of every region (`counts`).

    In every turn each leader of a region has an equal stretch of that turn's part; stretches are turned against those
    of the region before by one part in so many turns of it, and one more in each.
    """
    borders, places = [Fraction(0)], []
    for turn in range(turns):
        ahead = [Fraction(region * turn, turns) for region in range(len(counts))]
        ends = {(Fraction(i, n) - by) % 1 for n, by in zip(counts, ahead, strict=True) if n > 1 for i in range(n)}
        for start, stop in pairwise(sorted(ends | {Fraction(0), Fraction(1)})):
            borders.append((turn + stop) / turns)
            places.append([int(n * ((start + by) % 1)) for n, by in zip(counts, ahead, strict=True)])
    return borders, places


class _Round(NamedTuple):
    """Receives that are posted, and what for."""

    key: str
    elements: int
    """Of a lane's part of the vector."""
    tags: tuple[int, ...]
    receipts: tuple[dict[int, Receipt], ...]
    """By round and peer."""


class _Crossing(NamedTuple):
    """A part on its way between regions."""

    total: Callable[[], torch.Tensor]
    """Waits for the sum, and until this rank's own part has been sent: the sum takes its place."""
    advance: Callable[[], None] = lambda: None
    """Waits for the first round and sends the second."""


class SumGroup:
    """One rank's part in the sums of a group.

    Begins must come in the same order on all members, from one thread at a time; so must ends, from another one or the
    same.
    """

    def __init__(self, members: Members, wires: Wires) -> None:
        self.members = members
        self._wires = wires
        self._feedback: dict[tuple[str, int], ErrorFeedback] = {}
        self._restored: dict[tuple[str, int], tuple[Any, float]] = {}
        self._sums = 0
        """Begun or expected so far, by whomever they are led."""
        self._awaited: deque[int] = deque()
        """Of these, the numbers of those that are expected and have not begun."""
        self._expected: dict[tuple[int, int], _Round] = {}
        """By sum and lane."""
        self._mine = next(region for region in members.regions if wires.rank in region)
        # Sums begin and end in threads of their own: each has its order of collectives, and a group for it.
        self._near = self._near_group("begin", self._mine)
        later = wires.accelerator.later  # its own sums know nodes, and keep links busy
        self._near_out = self._near_group("end", self._mine) if later else None
        nodes = [] if later else [ranks for ranks in members.nodes if ranks[0] in self._mine]
        on_node = next((ranks for ranks in nodes if wires.rank in ranks), self._mine[:1])
        self._node = self._near_sums(on_node)
        """Of this node's members, where others in the region are on other nodes; None where nothing is to be summed."""
        firsts = tuple(ranks[0] for ranks in nodes) or self._mine
        self._nodes = None if later or wires.rank not in firsts else self._near_sums(firsts)
        """Of the first members on each node, or of all in the region; None, too, where this rank is none of these."""

    def _near_sums(self, ranks: tuple[int, ...]) -> NearSums | None:
        if len(ranks) == 1:
            return None
        begin = self._near if ranks == self._mine else self._near_group("begin", ranks)
        return NearSums(ranks, ranks.index(self._wires.rank), begin, self._near_group("end", ranks))

    def _near_group(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        """A process group of some of the members in this region; None where this rank is the only one."""
        if len(ranks) == 1:
            return None
        wires = self._wires
        store = PrefixStore(f"sum/{self.members.name}/{'-'.join(map(str, ranks))}/{purpose}", wires.store)
        before = open_descriptors()
        group = wires.accelerator.group(store, ranks.index(wires.rank), len(ranks), wires.devices, wires.timeout_s)
        prefer_near(connections(opened_since(before)))
        return group

    def sum_(self, vector: torch.Tensor, key: str, shapes: Sequence[Sequence[int]] = ()) -> None:
        """Replace the vector by its sum over the members; arguments as for `begin`."""
        self.begin(vector, key, shapes)()

    def begin(
        self, vector: torch.Tensor, key: str, shapes: Sequence[Sequence[int]] = (), *, replicated: bool = False
    ) -> Pending:
        """Start to replace the vector by its sum over the members; the call of the result ends it.

        Up to `MOST_UNDER_WAY` sums may have begun and not ended, so that a link stays busy while latencies pass.

        Parameters
        ----------
        vector : tensor, one dimension
        key : str
            What the vector is; error feedback of one key goes into the next sum of that key.
        shapes : sequence of shapes
            Of the tensors that lie in the vector one after the other (for low-rank packing).
        replicated : bool
            The members of a region hold the same vector, and it counts once.
        """
        if len(self.members.regions) == 1:
            return Pending(lambda: None) if replicated else self.begin_near(vector)
        number, parts = self._number(), self.members.parts(vector)
        leaders, small = self._leaders, vector.numel() < SMALL
        holders = leaders[: len(parts)]
        later = self._wires.accelerator.later  # memory belongs to the stream of the thread that begins
        on_node = None if replicated else self._sum_on_node(vector)
        near = None
        if later and not replicated:
            self._reduce_near(parts, holders)
        elif self._nodes is not None and not replicated:
            near = self._nodes.start(parts, holders)
        back: list[HandingBack] = []
        crossings: list[tuple[torch.Tensor, _Crossing]] = []

        def gather() -> None:
            if near is not None:
                back.append(near())
            for lane, part in enumerate(parts):
                if leaders[lane] == self._wires.rank:
                    crossings.append((part, self._cross(number, lane, part, key, shapes, small=small)))

        def advance() -> None:
            for _, crossing in crossings:
                crossing.advance()

        def share() -> None:
            for part, crossing in crossings:
                part.copy_(crossing.total())
            for handing in back:
                handing.start()

        def arrive() -> None:
            if later:
                share()
                hand_out(self._near_out, parts, self._near_places(holders))
            elif replicated and self._nodes is not None:
                self._nodes.hand_out(parts, holders)
            for handing in back:
                handing.end()
            if on_node is not None:
                on_node.start()
                on_node.end()
            elif replicated and self._node is not None:
                self._node.hand_out([vector], self._node.ranks[:1])

        if later:
            gather()
            return Pending(arrive, advance=advance)
        return Pending(arrive, gather=gather, advance=advance, share=share)

    def begin_near(self, vector: torch.Tensor) -> Pending:
        """Start to replace the vector by its sum over the members in this rank's region; the result's call ends it."""
        on_node = self._sum_on_node(vector)
        group = self._near if self._node is None else None
        if self._nodes is not None:
            group = self._nodes.begin
        work = None if group is None else group.allreduce([vector], AllreduceOptions())

        def arrive() -> None:
            if work is not None:
                work.wait()
            if on_node is not None:
                on_node.start()
                on_node.end()

        return Pending(arrive)

    def _sum_on_node(self, vector: torch.Tensor) -> HandingBack | None:
        """Wait until the first member on this node holds the sum over them; what then gives it to the others.

        None where there is nobody to wait for.
        """
        return None if self._node is None else self._node.start([vector], self._node.ranks[:1])()

    def _reduce_near(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> None:
        """Sum parts over the members in the region, each where its holder is, by an accelerator's own collectives."""
        works = []
        for part, place in zip(parts, self._near_places(holders), strict=True):
            if self._near is not None:
                options = ReduceOptions()
                options.rootRank = place
                works.append(self._near.reduce([part], options))
        for work in works:
            work.wait()

    def _near_places(self, ranks: Sequence[int]) -> list[int]:
        """Of ranks among the members in the region."""
        return [self._mine.index(rank) for rank in ranks]

    def _cross(
        self, number: int, lane: int, vector: torch.Tensor, key: str, shapes: Sequence[Sequence[int]], *, small: bool
    ) -> _Crossing:
        """Start to sum a part over the leaders of a lane."""
        round_ = self._expected.pop((number, lane), None)
        if round_ is None:
            round_ = self._post(number, lane, key, vector.numel(), vector.dtype, shapes, small=small)
        assert (round_.key, round_.elements) == (key, vector.numel()), "sums begin as they are expected"
        if small or self._direct:
            return self._exchange(vector, lane, self._whole_packer(key, lane, shapes, small=small), round_)
        return self._exchange_parts(vector, lane, key, round_)

    @property
    def packing_error(self) -> float:
        """Largest relative error of the last messages that this rank packed."""
        return max((packer.relative_error for packer in self._feedback.values()), default=0.0)

    def feedback(self, scale: float = 1.0) -> dict[tuple[str, int], Any]:
        """What packing has dropped and still owes, by vector and part, divided by `scale` (that of the vectors)."""
        return {slot: packer.state(scale) for slot, packer in self._feedback.items() if packer.codec.name != "none"}

    def restore_feedback(self, states: Mapping[tuple[str, int], Any], scale: float = 1.0) -> None:
        """Go on from what `feedback` gave."""
        self._restored = {slot: (state, scale) for slot, state in states.items()}

    @property
    def near_place(self) -> int:
        """Place of this rank among the members in its region."""
        return self._mine.index(self._wires.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank packs vectors for ranks in other regions."""
        return self.members.codec != "none" and len(self.members.regions) > 1 and self._wires.rank in self._leaders

    @property
    def _leaders(self) -> tuple[int, ...]:
        """Who leads each lane in this rank's region."""
        return self.members.leaders[self.members.regions.index(self._mine)]

    def _lane(self, lane: int) -> list[int]:
        """Who leads a lane, in every region."""
        return [region[lane] for region in self.members.leaders]

    def _slot(self, lane: int) -> int:
        """Number of a lane's first packer: of those that this rank leads, each has as many as there are regions."""
        return len(self.members.regions) * self._leaders[:lane].count(self._wires.rank)

    @property
    def near_ranks(self) -> tuple[int, ...]:
        """Members in this rank's region."""
        return self._mine

    @property
    def near_size(self) -> int:
        """How many members are in this rank's region."""
        return len(self._mine)

    def share_parts(self, vector: torch.Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Fill in the stretches (start, stop) of the vector that the other members in the region hold.

        Not while sums begin; those that have begun may be under way.
        """
        hand_out(self._near, [vector[start:stop] for start, stop in parts], range(self.near_size))

    def _number(self, *, expected: bool = False) -> int:
        """Number of a sum that begins, or is expected to: the same on all members, whoever of them leads."""
        if self._awaited and not expected:
            return self._awaited.popleft()
        self._sums += 1
        if expected:
            self._awaited.append(self._sums)
        return self._sums

    def _tag(self, number: int, lane: int, round_: int = 0) -> int:
        """Of the messages of a lane in a round of a sum."""
        return self.members.first_tag + lane * TAGS_PER_GROUP + (2 * number + round_) % TAGS_PER_GROUP

    def _packer(self, key: str, part: int, shapes: Sequence[Sequence[int]]) -> ErrorFeedback:
        slot = (key, part)
        if slot not in self._feedback:
            self._feedback[slot] = ErrorFeedback(make_codec(self.members.codec, shapes))
            if slot in self._restored:
                # Moved by the thread that works with it: its memory then belongs to that thread's stream.
                state, scale = self._restored.pop(slot)
                self._feedback[slot].restore({**state, "error": _moved(state["error"], self._wires.device)}, scale)
        return self._feedback[slot]

    def _whole_packer(self, key: str, lane: int, shapes: Sequence[Sequence[int]], *, small: bool) -> ErrorFeedback:
        """What packs all that a lane has of a vector."""
        return ErrorFeedback(make_codec("none")) if small else self._packer(key, self._slot(lane), shapes)

    @property
    def _direct(self) -> bool:
        """Whether leaders send one another all that a lane has, whatever its size."""
        return len(self.members.regions) == 2 or self.members.codec == "powersgd"

    def buffer_bytes(self, elements: int, dtype: torch.dtype, shapes: Sequence[Sequence[int]] = ()) -> int:
        """Bytes that the sum of a vector of so many elements needs on this rank while it is under way, beside the
        vector: what this rank packs and hears of the lanes that it leads, and of what is added up in the region."""
        places, mine = len(self.members.regions), self._leaders
        n_bytes = 0 if self._near is None and self._node is None else elements * dtype.itemsize
        if places > 1:
            codec = make_codec(self.members.codec, shapes)
            for lane, part in enumerate(self.members.parts(torch.empty(elements, dtype=dtype, device="meta"))):
                if mine[lane] == self._wires.rank:
                    payload = codec.payload_bytes(part.numel(), dtype)
                    # Whole versions; or parts that leave and come and sums that come, and the one that leaves.
                    n_bytes += payload * places if self._direct else payload * (3 * places - 2) // places
        return n_bytes

    def expect(self, elements: int, dtype: torch.dtype, key: str, shapes: Sequence[Sequence[int]] = ()) -> None:
        """Say what the next sum will be, before its vector is there: the other leaders can then send theirs.

        Without that, a vector that comes last pays a latency for asking before it pays one for the answer.
        """
        if len(self.members.regions) == 1:
            return
        number, mine, small = self._number(expected=True), self._leaders, elements < SMALL
        parts = self.members.parts(torch.empty(elements, dtype=dtype, device="meta"))
        if self._node is not None:
            self._node.expect([torch.empty(elements, dtype=dtype, device="meta")], self._node.ranks[:1])
        if self._nodes is not None:
            self._nodes.expect(parts, mine[: len(parts)])
        for lane, part in enumerate(parts):
            if mine[lane] == self._wires.rank:
                self._expected[number, lane] = self._post(number, lane, key, part.numel(), dtype, shapes, small=small)

    def _post(
        self,
        number: int,
        lane: int,
        key: str,
        elements: int,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
        *,
        small: bool,
    ) -> _Round:
        """Post the receives of a lane's sum: others' whole versions, or of my part first their versions, and then
        their sums of the other parts."""
        leaders, tags = self._lane(lane), (self._tag(number, lane), self._tag(number, lane, 1))
        if small or self._direct:
            codec = self._whole_packer(key, lane, shapes, small=small).codec
            sizes = [dict.fromkeys(leaders, elements)]
        else:
            codec, whole = make_codec(self.members.codec), torch.empty(elements, device="meta")
            parts = {r: part.numel() for r, part in zip(leaders, whole.tensor_split(len(leaders)), strict=True)}
            sizes = [dict.fromkeys(leaders, parts[self._wires.rank]), parts]
        receipts = tuple(
            {
                peer: self._wires.post_receive(peer, tag, codec.payload_bytes(size, dtype))
                for peer, size in of.items()
                if peer != self._wires.rank
            }
            for tag, of in zip(tags, sizes, strict=False)
        )
        return _Round(key, elements, tags, receipts)

    def _exchange(self, vector: torch.Tensor, lane: int, packer: ErrorFeedback, round_: _Round) -> _Crossing:
        """Every leader sends all to every other: one latency, (leaders - 1) n bytes each."""
        (tag, _), (receipts,), leaders = round_.tags, round_.receipts, self._lane(lane)
        payload, mine = packer.compress(vector)
        sendings = [self._wires.send(peer, tag, payload) for peer in receipts]

        def total() -> torch.Tensor:
            total = torch.zeros_like(vector)
            for leader in leaders:
                if leader == self._wires.rank:
                    total += mine
                else:
                    total += packer.codec.decompress(receipts[leader].wait(), vector.shape, vector.dtype)
            for sending in sendings:
                sending.wait()
            return total

        return _Crossing(total)

    def _exchange_parts(self, vector: torch.Tensor, lane: int, key: str, round_: _Round) -> _Crossing:
        """Every leader sums one part and sends it to all: two latencies, 2 n (leaders - 1) / leaders bytes each."""
        leaders, tags, receipts = self._lane(lane), round_.tags, round_.receipts
        place, slot = leaders.index(self._wires.rank), self._slot(lane)
        parts = vector.tensor_split(len(leaders))
        packers = [self._packer(key, slot + index, ()) for index in range(len(leaders))]
        codec = packers[0].codec
        sendings = [
            self._wires.send(leader, tags[0], packers[index].compress(parts[index])[0])
            for index, leader in enumerate(leaders)
            if leader != self._wires.rank
        ]

        summed: list[torch.Tensor] = []

        def advance() -> None:
            """Sum this leader's part and send it."""
            total = torch.zeros_like(parts[place])
            for leader in leaders:
                if leader == self._wires.rank:
                    total += parts[place]
                else:
                    total += codec.decompress(receipts[0][leader].wait(), total.shape, total.dtype)
            payload, total = packers[place].compress(total)
            sendings.extend(
                self._wires.send(leader, tags[1], payload) for leader in leaders if leader != self._wires.rank
            )
            summed.append(total)

        def total() -> torch.Tensor:
            sums = [
                summed[0]
                if leader == self._wires.rank
                else codec.decompress(receipts[1][leader].wait(), part.shape, part.dtype)
                for leader, part in zip(leaders, parts, strict=True)
            ]
            for sending in sendings:
                sending.wait()
            return torch.cat(sums)

        return _Crossing(total, advance)


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
