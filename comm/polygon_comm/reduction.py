"""Sums of vectors over ranks in several regions: on nodes, inside each region, between leaders of the regions, back.

Where a region has several nodes, the ranks of each add up first what they have, at the first of them, and only these
first ranks exchange anything with others: a card passes nothing that its node could have added up before. These lead:
each sums an equal part of the vector in its region, and exchanges what it has in common with leaders of other regions
with these (`polygon_comm.members`).
Between leaders it travels packed, and every leader adds up the very same unpacked numbers in the same order, so that
replicas stay equal bit by bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ReduceOptions

from polygon_comm.compression import ErrorFeedback, make_codec
from polygon_comm.line import Pending
from polygon_comm.members import LEAVES, Members
from polygon_comm.near_sums import SMALL, HandingBack, NearSums, hand_out
from polygon_comm.pacing import connections, open_descriptors, opened_since, prefer_near
from polygon_comm.shares import Cut, Share, cut_for
from polygon_comm.transport import Receipt, Sending, Wires
from polygon_comm.tree_sums import TreeSum


class _Round(NamedTuple):
    """Receives that are posted, and what for."""

    key: str
    elements: int
    """Of the vector."""
    tags: tuple[int, ...]
    receipts: tuple[dict[int, Receipt], ...]
    """By round and peer."""


class _Crossing(NamedTuple):
    """A part on its way between regions."""

    total: Callable[[], torch.Tensor]
    """Waits for the sum, and until this rank's own part has been sent: the sum takes its place."""
    rounds: Sequence[Callable[[], None]] = ()
    """Each waits for earlier rounds and sends another one."""


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
        self._expected: dict[int, _Round] = {}
        """By sum."""
        self._cuts: dict[int, Cut] = {}
        """By the elements of a vector."""
        self._mine = next(region for region in members.regions if wires.rank in region)
        self._place = {rank: place for place, leaders in enumerate(members.leaders) for rank in leaders}
        # Sums begin and end in threads of their own: each has its order of collectives, and a group for it.
        self._near = self._near_group("begin", self._mine)
        later = wires.accelerator.later  # its own sums know nodes, and keep links busy
        self._near_out = self._near_group("end", self._mine) if later else None
        nodes = [] if later else [ranks for ranks in members.nodes if ranks[0] in self._mine]
        on_node = next((ranks for ranks in nodes if wires.rank in ranks), self._mine[:1])
        self._node = self._near_sums(on_node)
        """Of this node's members, where others in the region are on other nodes; None where nothing is to be summed."""
        firsts = tuple(ranks[0] for ranks in nodes) or self._mine
        self._first = wires.rank in firsts
        """Whether this rank exchanges anything with others than those on its node."""
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
        number, (arrangement, share) = self._number(), self._cut(vector.numel())
        holders = arrangement.holders
        later = self._wires.accelerator.later  # memory belongs to the stream of the thread that begins
        on_node = None if replicated else self._sum_on_node(vector)
        arranged = arrangement.of(vector) if later or self._first else vector
        parts = arranged.split(arrangement.sizes)
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
            if share is not None:
                part = parts[holders.index(self._wires.rank)]
                crossings.append((part, self._cross(number, vector.numel(), share, part, key, shapes)))

        def advance(step: int) -> None:
            for _, crossing in crossings:
                crossing.rounds[step]()

        def share_out() -> None:
            for part, crossing in crossings:
                part.copy_(crossing.total())
            for handing in back:
                handing.start()

        def arrive() -> None:
            if later:
                share_out()
                hand_out(self._near_out, parts, self._near_places(holders))
            elif replicated and self._nodes is not None:
                self._nodes.hand_out(parts, holders)
            for handing in back:
                handing.end()
            if arranged is not vector:
                arrangement.put_back(arranged, vector)
            if on_node is not None:
                on_node.start()
                on_node.end()
            elif replicated and self._node is not None:
                self._node.hand_out([vector], self._node.ranks[:1])

        rounds = [partial(advance, step) for step in range(0 if share is None else share.steps)]
        if later:
            gather()
            return Pending(arrive, rounds=rounds)
        return Pending(arrive, gather=gather, rounds=rounds, share=share_out)

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

    def _cut(self, elements: int) -> Cut:
        """How a vector of so many elements is cut for this rank."""
        if elements not in self._cuts:
            self._cuts[elements] = cut_for(self.members, self._wires.rank, elements)
        return self._cuts[elements]

    def _cross(
        self,
        number: int,
        elements: int,
        share: Share,
        part: torch.Tensor,
        key: str,
        shapes: Sequence[Sequence[int]],
    ) -> _Crossing:
        """Start to sum what this rank leads of a vector over the leaders."""
        round_ = self._expected.pop(number, None)
        if round_ is None:
            round_ = self._post(number, key, elements, share, part.dtype, shapes)
        assert (round_.key, round_.elements) == (key, elements), "sums begin as they are expected"
        small = elements < SMALL
        packers = [
            ErrorFeedback(make_codec("none")) if small else self._packer(key, index, shapes)
            for index in range(len(share.exchanged) + share.pieces_summed)
        ]
        if self._direct(elements):
            return self._exchange(part, share, packers, round_)

        def send(of: int, peer: int, payload: torch.Tensor) -> Sending:
            return self._wires.send(peer, round_.tags[of], payload)

        trees = TreeSum(part, share, packers, round_.receipts, send=send, place=self._place, rank=self._wires.rank)
        return _Crossing(trees.total, trees.rounds)

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
        """Who leads in this rank's region."""
        return self.members.leaders[self.members.regions.index(self._mine)]

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

    def _tag(self, number: int, round_: int = LEAVES) -> int:
        """Of the messages in a round of a sum; without relays, which have every other one, there are half as many."""
        rounds, tags = self.members.rounds, self.members.tags
        return self.members.first_tag + (rounds * number + round_ * rounds // 4) % tags

    def _packer(self, key: str, part: int, shapes: Sequence[Sequence[int]]) -> ErrorFeedback:
        slot = (key, part)
        if slot not in self._feedback:
            self._feedback[slot] = ErrorFeedback(make_codec(self.members.codec, shapes))
            if slot in self._restored:
                # Moved by the thread that works with it: its memory then belongs to that thread's stream.
                state, scale = self._restored.pop(slot)
                self._feedback[slot].restore({**state, "error": _moved(state["error"], self._wires.device)}, scale)
        return self._feedback[slot]

    def _direct(self, elements: int) -> bool:
        """Whether leaders send one another all that they have in common, and each adds it up for itself."""
        return len(self.members.regions) == 2 or self.members.whole(elements)

    def buffer_bytes(self, elements: int, dtype: torch.dtype, shapes: Sequence[Sequence[int]] = ()) -> int:
        """Bytes that the sum of a vector of so many elements needs on this rank while it is under way, beside the
        vector: what this rank packs and hears of what it leads, what is added up in the region, and the vector as its
        region's leaders have it."""
        n_bytes = 0 if self._near is None and self._node is None else elements * dtype.itemsize
        if len(self.members.regions) > 1:
            arrangement, share = self._cut(elements)
            if self._first and not arrangement.in_place:
                n_bytes += elements * dtype.itemsize
            if share is not None:
                heard = self._heard_bytes(elements, share, dtype, shapes)
                led = arrangement.sizes[arrangement.holders.index(self._wires.rank)]
                n_bytes += make_codec(self.members.codec, shapes).payload_bytes(led, dtype)
                n_bytes += sum(sum(of.values()) for of in heard)
        return n_bytes

    def expect(self, elements: int, dtype: torch.dtype, key: str, shapes: Sequence[Sequence[int]] = ()) -> None:
        """Say what the next sum will be, before its vector is there: the other leaders can then send theirs.

        Without that, a vector that comes last pays a latency for asking before it pays one for the answer.
        """
        if len(self.members.regions) == 1:
            return
        number, (arrangement, share) = self._number(expected=True), self._cut(elements)
        vector = torch.empty(elements, dtype=dtype, device="meta")
        if self._node is not None:
            self._node.expect([vector], self._node.ranks[:1])
        if self._nodes is not None:
            self._nodes.expect(vector.split(arrangement.sizes), arrangement.holders)
        if share is not None:
            self._expected[number] = self._post(number, key, elements, share, dtype, shapes)

    def _heard_bytes(
        self, elements: int, share: Share, dtype: torch.dtype, shapes: Sequence[Sequence[int]]
    ) -> list[dict[int, int]]:
        """Bytes of messages to this leader, by round and peer."""
        codec = make_codec("none" if elements < SMALL else self.members.codec, shapes)

        def n_bytes(of_trees: Mapping[int, tuple[int, ...]]) -> int:
            return sum(codec.payload_bytes(n, dtype) for sizes in of_trees.values() for n in sizes)

        return [{peer: n_bytes(of_trees) for peer, of_trees in heard.items()} for heard in share.heard]

    def _post(
        self,
        number: int,
        key: str,
        elements: int,
        share: Share,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
    ) -> _Round:
        """Post the receives of a sum."""
        heard = self._heard_bytes(elements, share, dtype, shapes)
        tags = tuple(self._tag(number, of) for of in range(len(heard)))
        receipts = tuple(
            {peer: self._wires.post_receive(peer, tag, n_bytes) for peer, n_bytes in of.items()}
            for tag, of in zip(tags, heard, strict=True)
        )
        return _Round(key, elements, tags, receipts)

    def _in_order(self, ranks: Iterable[int]) -> list[int]:
        """Leaders by region: in that order all add up."""
        return sorted(ranks, key=self._place.__getitem__)

    def _exchange(
        self, part: torch.Tensor, share: Share, packers: Sequence[ErrorFeedback], round_: _Round
    ) -> _Crossing:
        """Every leader sends what it has in common with others to these: one latency."""
        tag, receipts, me = round_.tags[LEAVES], round_.receipts[LEAVES], self._wires.rank
        packed = [p.compress(part[s.start : s.stop]) for s, p in zip(share.exchanged, packers, strict=True)]
        sendings = [
            self._wires.send(peer, tag, payload)
            for stretch, (payload, _) in zip(share.exchanged, packed, strict=True)
            for peer in stretch.peers
        ]

        def total() -> torch.Tensor:
            total = torch.zeros_like(part)
            for stretch, packer, (_, mine) in zip(share.exchanged, packers, packed, strict=True):
                of = total[stretch.start : stretch.stop]
                for rank in self._in_order((me, *stretch.peers)):
                    of += mine if rank == me else packer.codec.decompress(receipts[rank].wait(), of.shape, of.dtype)
            for sending in sendings:
                sending.wait()
            return total

        return _Crossing(total)


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
