"""Sums of vectors over ranks in several regions: inside each region, between leaders of the regions, back.

A region's leaders are the first rank on each of its nodes, as many in every region as the region with the fewest nodes
has; leader i of a region sums part i of the vector in its region and exchanges it with the leaders i of the others, so
that a vector crosses a link once however wide the stage is, over as many node pairs as there are. Between leaders it
travels packed, and every leader adds up the very same unpacked numbers in the same order, so that replicas stay equal
bit by bit.

gloo sums to one rank in a ring of small steps, each of which waits for the other side: beside messages to other
regions, which fill the card's queue, such a ring leaves the card idle for a third of the time, and it carries half as
much again as it need (with two members 1.5 n instead of n, counting both parts); its tree hands a sum out whole, level
by level. Parts therefore go straight to who adds them up, announced before they are there: to the leader, and its sum
straight back, or, where few leaders would have to hear many members (`SumGroup._straight`), to all members (but a
single leader), each of which adds up a piece for the leader and later passes that piece of the sum on. Five hosts
beside one, cards of 60 Mbit/s: 4.6 s a step by gloo's ring and tree, 2.5 s so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOptions

from polygon_comm.compression import ErrorFeedback, make_codec
from polygon_comm.line import MOST_UNDER_WAY, Pending
from polygon_comm.pacing import connections, open_descriptors, opened_since, prefer_near
from polygon_comm.transport import Receipt, Wires

TAGS_PER_GROUP = 4 * MOST_UNDER_WAY
"""A group's rounds use so many tags in turn: two for each sum that is under way or expected."""
SMALL = 1024
"""Elements below which a latency counts more than any bytes: such a vector goes straight and unpacked."""


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
        Of each region, those that exchange with the other regions; equally many in all.
    codec : str
        How vectors are packed between regions.
    first_tag : int
        Of `TAGS_PER_GROUP` tags that no other message between the leaders uses.
    """

    name: str
    regions: tuple[tuple[int, ...], ...]
    leaders: tuple[tuple[int, ...], ...]
    codec: str = "none"
    first_tag: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """All members."""
        return tuple(rank for region in self.regions for rank in region)

    def leader_pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks that exchange messages between regions."""
        pairs = []
        for lane in zip(*self.leaders, strict=True):
            ranks = sorted(lane)
            pairs += [(a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :]]
        return pairs

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
) -> Members:
    """Group ranks by region, regions by their number; without `node_of` a region counts as one node."""
    by_region: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_region.setdefault(region_of[rank], []).append(rank)
    regions = tuple(tuple(by_region[region]) for region in sorted(by_region))
    firsts = []
    for region in regions:
        first_on: dict[int, int] = {}
        for rank in region:
            first_on.setdefault(0 if node_of is None else node_of[rank], rank)
        firsts.append(tuple(first_on.values()))
    # Low-rank factors need whole matrices: one leader then carries all.
    lanes = 1 if codec == "powersgd" else min(len(first) for first in firsts)
    leaders = tuple(first[:lanes] for first in firsts)
    return Members(name=name, regions=regions, leaders=leaders, codec=codec, first_tag=first_tag)


class _Round(NamedTuple):
    """Receives that are posted, and what for."""

    key: str
    n_bytes: int
    """Of the whole vector, packed."""
    tags: tuple[int, ...]
    receipts: tuple[dict[int, Receipt], ...]
    """By round and peer."""


class _Piece(NamedTuple):
    """A stretch of a part, and the places of who adds it up and of who exchanges the part with other regions."""

    vector: torch.Tensor
    adder: int
    holder: int
    tag: int
    """Beyond the sum's; the next is the piece's, too."""


class _Collection(NamedTuple):
    """Receives of what the other members in the region have of the pieces that this rank adds up."""

    tag: int
    arriving: tuple[tuple[tuple[torch.Tensor, Any], ...], ...]
    """By piece buffers and works, in the order of the members."""


class _Crossing(NamedTuple):
    """A part on its way between regions."""

    total: Callable[[], torch.Tensor]
    """Waits for the sum."""
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
        self._rounds = 0
        self._expected: deque[_Round] = deque()
        self._collections: deque[_Collection] = deque()
        """Those that were posted when their sums were expected."""
        self._near_rounds = 0
        self._mine = next(region for region in members.regions if wires.rank in region)
        # Sums begin and end in threads of their own: each has its order of collectives, and a group for it.
        self._near = self._near_group("begin")
        self._near_out = self._near_group("end")

    def _near_group(self, purpose: str) -> Any:
        """A process group of the members in this region; None where this rank is the only one."""
        if len(self._mine) == 1:
            return None
        wires, place, size = self._wires, self.near_place, self.near_size
        store = PrefixStore(f"sum/{self.members.name}/{self._mine[0]}/{purpose}", wires.store)
        before = open_descriptors()
        group = wires.accelerator.group(store, place, size, wires.devices, wires.timeout_s)
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
        leaders = self.members.leaders[self.members.regions.index(self._mine)]
        small = vector.numel() < SMALL
        parts = vector.tensor_split(1 if small else len(leaders))
        holders = leaders[: len(parts)]
        near = None if replicated else self._start_near(parts, holders)
        back: list[Callable[[], None]] = []
        crossings: list[tuple[torch.Tensor, _Crossing]] = []

        def gather() -> None:
            if near is not None:
                back.append(near())
            for lane, part in enumerate(parts):
                if leaders[lane] == self._wires.rank:
                    crossings.append((part, self._cross(lane, part, key, shapes, small=small)))

        def advance() -> None:
            for _, crossing in crossings:
                crossing.advance()

        def arrive() -> None:
            for part, crossing in crossings:
                part.copy_(crossing.total())
            if back:
                back[0]()
            else:
                self._hand_out(parts, holders, self._near_out)

        pending = Pending(arrive, gather=gather, advance=advance)
        if self._wires.accelerator.later:  # memory belongs to the stream of the thread that begins
            pending.gather()
        return pending

    def begin_near(self, vector: torch.Tensor) -> Pending:
        """Start to replace the vector by its sum over the members in this rank's region; the result's call ends it."""
        if self._near is None:
            return Pending(lambda: None)
        work = self._near.allreduce([vector], AllreduceOptions())

        def arrive() -> None:
            work.wait()

        return Pending(arrive)

    def _straight(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> bool:
        """Whether members send their parts to their holders, instead of a piece of each to every member.

        Gathering n and handing it out, P members with L holders pass (P + L - 2) n / L through a holder's card each way
        if they send straight, and (P - 1) / P (2 + 1 / L) n by pieces, of a single holder 2 n.
        """
        small = len(parts) == 1 and parts[0].numel() < SMALL
        return small or self.near_size <= len(set(holders)) + 1

    def _pieces(self, parts: Sequence[torch.Tensor], holders: Sequence[int]) -> list[_Piece]:
        """What of each part is added up where."""
        straight, places = self._straight(parts, holders), list(range(self.near_size))
        if len(set(holders)) == 1:
            places.remove(self._mine.index(holders[0]))  # its card has the way to other regions beside
        pieces: list[_Piece] = []
        for part, rank in zip(parts, holders, strict=True):
            holder = self._mine.index(rank)
            adders = [(part, holder)] if straight else zip(part.tensor_split(len(places)), places, strict=True)
            for vector, adder in adders:
                if vector.numel():
                    pieces.append(_Piece(vector, adder, holder, 2 * len(pieces)))
        return pieces

    def _start_near(
        self, parts: Sequence[torch.Tensor], holders: Sequence[int]
    ) -> Callable[[], Callable[[], None]] | None:
        """Start to sum parts over the members in the region, each where its holder is.

        The call of the result ends that, and returns what gives every member the parts that others hold, once they are
        complete. None: parts are summed, and `_hand_out` gives them.
        """
        if self._near is None:
            return None
        if self._wires.accelerator.later:  # its rings keep links busy
            works = []
            for part, holder in zip(parts, holders, strict=True):
                options = ReduceOptions()
                options.rootRank = self._mine.index(holder)
                works.append(self._near.reduce([part], options))
            for work in works:
                work.wait()
            return None
        pieces, me = self._pieces(parts, holders), self.near_place
        collection = self._collections.popleft() if self._collections else self._collect(pieces)
        works = [self._near.send([p.vector], p.adder, collection.tag + p.tag) for p in pieces if p.adder != me]
        return lambda: self._end_near(pieces, collection, works)

    def _end_near(self, pieces: Sequence[_Piece], collection: _Collection, works: list[Any]) -> Callable[[], None]:
        """Add up this rank's pieces, and give them to their holders."""
        (tag, arriving), me = collection, self.near_place
        mine = [piece for piece in pieces if piece.adder == me]
        for piece, received in zip(mine, arriving, strict=True):
            total, versions = piece.vector, [buffer for buffer, _ in received]
            versions.insert(me, total.clone())
            total.zero_()
            for _, work in received:
                work.wait()
            for version in versions:
                total += version
        for work in works:
            work.wait()
        moved = [piece for piece in pieces if piece.adder != piece.holder]
        works = [self._near.send([p.vector], p.holder, tag + p.tag + 1) for p in moved if p.adder == me]
        works += [self._near.recv([p.vector], p.adder, tag + p.tag + 1) for p in moved if p.holder == me]
        for work in works:
            work.wait()
        return self._handing_back(pieces, tag)

    def _handing_back(self, pieces: Sequence[_Piece], tag: int) -> Callable[[], None]:
        """What gives every member all pieces, once those that this rank holds are complete.

        What a member has sent away it needs no more: sums come back to its place.
        """
        me, group = self.near_place, self._near_out
        from_holder = {
            p.tag: group.recv([p.vector], p.holder, tag + p.tag) for p in pieces if p.adder == me != p.holder
        }
        from_adder = [group.recv([p.vector], p.adder, tag + p.tag + 1) for p in pieces if me not in (p.adder, p.holder)]

        def back() -> None:
            works = [group.send([p.vector], p.adder, tag + p.tag) for p in pieces if p.holder == me != p.adder]
            for piece in pieces:
                if piece.adder == me:
                    if piece.tag in from_holder:
                        from_holder[piece.tag].wait()
                    others = [place for place in range(self.near_size) if place not in (me, piece.holder)]
                    works += [group.send([piece.vector], place, tag + piece.tag + 1) for place in others]
            for work in (*works, *from_adder):
                work.wait()

        return back

    def _collect(self, pieces: Sequence[_Piece]) -> _Collection:
        """Post the receives of the pieces that this rank adds up from all other members in the region."""
        tag, me = self._near_rounds, self.near_place
        self._near_rounds += 2 * len(pieces)
        arriving = []
        for piece in pieces:
            if piece.adder == me:
                buffers = [
                    (torch.empty(piece.vector.numel(), dtype=piece.vector.dtype), place)
                    for place in range(self.near_size)
                    if place != me
                ]
                arriving.append(
                    tuple((buffer, self._near.recv([buffer], place, tag + piece.tag)) for buffer, place in buffers)
                )
        return _Collection(tag, tuple(arriving))

    def _hand_out(self, parts: Sequence[torch.Tensor], holders: Sequence[int], group: Any) -> None:
        """Give every member in the region the parts that other members hold."""
        works = []
        for part, holder in zip(parts, holders, strict=False):
            if group is not None and part.numel():
                options = BroadcastOptions()
                options.rootRank = self._mine.index(holder)
                works.append(group.broadcast([part], options))
        for work in works:
            work.wait()

    def _cross(
        self, lane: int, vector: torch.Tensor, key: str, shapes: Sequence[Sequence[int]], *, small: bool
    ) -> _Crossing:
        """Start to sum a part over the leaders of a lane."""
        leaders = [region[lane] for region in self.members.leaders]
        if small or self._direct(leaders):
            packer = ErrorFeedback(make_codec("none")) if small else self._packer(key, 0, shapes)
            return self._exchange(vector, leaders, packer, key)
        return self._exchange_parts(vector, leaders, key)

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
        leaders = self.members.leaders[self.members.regions.index(self._mine)]
        return self.members.codec != "none" and len(self.members.regions) > 1 and self._wires.rank in leaders

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
        self._hand_out([vector[start:stop] for start, stop in parts], self._mine, self._near)

    def _next_tag(self) -> int:
        self._rounds += 1
        return self.members.first_tag + self._rounds % TAGS_PER_GROUP

    def _packer(self, key: str, part: int, shapes: Sequence[Sequence[int]]) -> ErrorFeedback:
        slot = (key, part)
        if slot not in self._feedback:
            self._feedback[slot] = ErrorFeedback(make_codec(self.members.codec, shapes))
            if slot in self._restored:
                # Moved by the thread that works with it: its memory then belongs to that thread's stream.
                state, scale = self._restored.pop(slot)
                self._feedback[slot].restore({**state, "error": _moved(state["error"], self._wires.device)}, scale)
        return self._feedback[slot]

    def _direct(self, leaders: Sequence[int]) -> bool:
        """Whether leaders send whole vectors to one another, whatever their size."""
        return len(leaders) == 2 or self.members.codec == "powersgd"

    def expect(self, elements: int, dtype: torch.dtype, key: str, shapes: Sequence[Sequence[int]] = ()) -> None:
        """Say what the next sum will be, before its vector is there: the other leaders can then send theirs.

        Without that, a vector that comes last pays a latency for asking before it pays one for the answer.
        """
        if len(self.members.regions) == 1:
            return
        mine = self.members.leaders[self.members.regions.index(self._mine)]
        small = elements < SMALL
        parts = torch.empty(elements, dtype=dtype, device="meta").tensor_split(1 if small else len(mine))
        if self._near is not None and not self._wires.accelerator.later:
            self._collections.append(self._collect(self._pieces(parts, mine[: len(parts)])))
        for lane, part in enumerate(parts):
            leaders = [region[lane] for region in self.members.leaders]
            if mine[lane] != self._wires.rank:
                continue
            if small or self._direct(leaders):
                codec = make_codec("none") if small else self._packer(key, 0, shapes).codec
                self._expected.append(self._post(key, leaders, codec.payload_bytes(part.numel(), dtype)))
            else:
                self._expected.append(self._post_parts(key, leaders, part.numel(), dtype))

    def _post(self, key: str, leaders: Sequence[int], n_bytes: int) -> _Round:
        """Post the receives of a round."""
        tag = self._next_tag()
        others = [leader for leader in leaders if leader != self._wires.rank]
        receipts = {peer: self._wires.post_receive(peer, tag, n_bytes) for peer in others}
        return _Round(key, n_bytes, (tag,), (receipts,))

    def _post_parts(self, key: str, leaders: Sequence[int], elements: int, dtype: torch.dtype) -> _Round:
        """Post the receives of an exchange in two rounds: others' versions of my part, then others' summed parts."""
        codec, tags = make_codec(self.members.codec), (self._next_tag(), self._next_tag())
        parts = [part.numel() for part in torch.empty(elements, device="meta").tensor_split(len(leaders))]
        own = codec.payload_bytes(parts[leaders.index(self._wires.rank)], dtype)
        others = [(leader, parts[i]) for i, leader in enumerate(leaders) if leader != self._wires.rank]
        first = {leader: self._wires.post_receive(leader, tags[0], own) for leader, _ in others}
        second = {
            leader: self._wires.post_receive(leader, tags[1], codec.payload_bytes(size, dtype))
            for leader, size in others
        }
        return _Round(key, codec.payload_bytes(elements, dtype), tags, (first, second))

    def _posted(self, key: str, n_bytes: int, post: Callable[[], _Round]) -> _Round:
        """The receives of a sum: those that were posted when it was expected, or posted now."""
        round_ = self._expected.popleft() if self._expected else post()
        assert (round_.key, round_.n_bytes) == (key, n_bytes), "sums come in the order in which they were expected"
        return round_

    def _exchange(self, vector: torch.Tensor, leaders: Sequence[int], packer: ErrorFeedback, key: str) -> _Crossing:
        """Every leader sends the whole vector to every other: one latency, (leaders - 1) n bytes each."""
        n_bytes = packer.codec.payload_bytes(vector.numel(), vector.dtype)
        round_ = self._posted(key, n_bytes, lambda: self._post(key, leaders, n_bytes))
        (tag,), (receipts,) = round_.tags, round_.receipts
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

    def _exchange_parts(self, vector: torch.Tensor, leaders: Sequence[int], key: str) -> _Crossing:
        """Every leader sums one part and sends it to all: two latencies, 2 n (leaders - 1) / leaders bytes each."""
        place = leaders.index(self._wires.rank)
        parts = vector.tensor_split(len(leaders))
        packers = [self._packer(key, index, ()) for index in range(len(leaders))]
        codec, n_bytes = packers[0].codec, packers[0].codec.payload_bytes(vector.numel(), vector.dtype)
        round_ = self._posted(key, n_bytes, lambda: self._post_parts(key, leaders, vector.numel(), vector.dtype))
        tags, receipts = round_.tags, round_.receipts
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
