"""Sums over trees of regions: one leader's rounds of messages (see `polygon_comm.members`).

Every region packs each number once: what it sends up, a relay its partial sum, and the root the sum. Relays pass packed
sums on as they are, and the root takes what it packed for what others will unpack, so that all have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from polygon_comm.compression import Codec, ErrorFeedback
from polygon_comm.members import BACK, LEAVES, RELAYS, ROOTS
from polygon_comm.shares import Block, Share, Stretch
from polygon_comm.transport import Receipt, Sending


class TreeSum:
    """One leader's part in the sum of a vector.

    Parameters
    ----------
    part : tensor
        What this leader has of it.
    share : Share
    packers : sequence of ErrorFeedback
        Of the stretches that it sends up, then of the pieces of which it has the sum first.
    receipts : sequence of mappings of peer to Receipt
        By round.
    send : callable
        Starts to send a payload to a peer in a round.
    place : mapping of rank to int
        Leaders' regions: versions are added up in their order.
    rank : int
        This leader.
    """

    def __init__(
        self,
        part: torch.Tensor,
        share: Share,
        packers: Sequence[ErrorFeedback],
        receipts: Sequence[Mapping[int, Receipt]],
        *,
        send: Callable[[int, int, torch.Tensor], Sending],
        place: Mapping[int, int],
        rank: int,
    ) -> None:
        self._part, self._share, self._packers, self._receipts = part, share, packers, receipts
        self._send, self._place, self._rank = send, place, rank
        self._codec: Codec = packers[0].codec
        self._sendings: list[Sending] = []
        self._summed: dict[int, torch.Tensor] = {}
        """By tree, sums as others will unpack them."""
        self._send_up(LEAVES, lambda stretch: part[stretch.start : stretch.stop])

    @property
    def rounds(self) -> list[Callable[[], None]]:
        """What is done after the first messages, in this order; each waits for others."""
        relayed = {block.relayed for block in self._share.blocks}
        steps = [(self._relay, True), (self._add_up, False), (self._pass_on, True)]
        return [step for step, relays in steps if relays in relayed]

    def total(self) -> torch.Tensor:
        """The sum of this leader's part, once it is there and its own messages have left."""
        heard, total = cache(self._heard), torch.empty_like(self._part)
        for block in self._blocks(relayed=False):
            total[block.start : block.stop] = self._summed[block.tree]
        for stretch in self._share.exchanged:
            payloads = heard(stretch.returned, stretch.peers[0])[stretch.tree]
            total[stretch.start : stretch.stop] = torch.cat(self._unpacked(payloads, stretch.sizes))
        for sending in self._sendings:
            sending.wait()
        return total

    def _blocks(self, *, relayed: bool) -> list[Block]:
        return [block for block in self._share.blocks if block.relayed == relayed]

    def _relay(self) -> None:
        """Add children's versions to this region's, and send them up."""
        heard = cache(self._heard)
        sums = {block.tree: (block.start, self._added(block, heard)) for block in self._blocks(relayed=True)}

        def values(stretch: Stretch) -> torch.Tensor:
            start, total = sums[stretch.tree]
            return total[stretch.start - start : stretch.stop - start]

        self._send_up(RELAYS, values)

    def _add_up(self) -> None:
        """Add up what this region is the root of, and send it piece by piece as each child's leader has it."""
        heard, packers = cache(self._heard), iter(self._packers[len(self._share.exchanged) :])
        payloads: dict[int, list[torch.Tensor]] = {}
        for block in self._blocks(relayed=False):
            pieces = self._added(block, heard).split(block.sizes)
            packed = [next(packers).compress(piece) for piece in pieces]
            payloads[block.tree] = [payload for payload, _ in packed]
            self._summed[block.tree] = torch.cat([restored for _, restored in packed])
        self._send_down(ROOTS, self._blocks(relayed=False), payloads)

    def _pass_on(self) -> None:
        """Give children the sums that came from roots."""
        heard, payloads = cache(self._heard), dict[int, list[torch.Tensor]]()
        for stretch in self._share.exchanged:
            if stretch.sent == RELAYS:
                packed = heard(stretch.returned, stretch.peers[0])[stretch.tree]
                payloads.setdefault(stretch.tree, []).extend(packed)
        self._send_down(BACK, self._blocks(relayed=True), payloads)

    def _added(self, block: Block, heard: Callable[[int, int], Mapping[int, Sequence[torch.Tensor]]]) -> torch.Tensor:
        """What all below a region and it itself have of a block."""
        own = self._part[block.start : block.stop]
        total, versions = torch.zeros_like(own), {version.peer: version for version in block.versions}
        for rank in sorted((self._rank, *versions), key=self._place.__getitem__):
            if rank == self._rank:
                total += own
                continue
            version = versions[rank]
            (values,) = self._unpacked(heard(version.sent, rank)[block.tree], (sum(version.sizes),))
            of = values.split([stop - start for start, stop in version.runs])
            for (start, stop), run in zip(version.runs, of, strict=True):
                total[start:stop] += run
        return total

    def _heard(self, round_: int, peer: int) -> dict[int, list[torch.Tensor]]:
        """What a peer packed, by tree, once it is there."""
        wanted = self._share.heard[round_][peer]
        lengths = [self._codec.payload_bytes(n, self._part.dtype) for sizes in wanted.values() for n in sizes]
        payloads = iter(self._receipts[round_][peer].wait().split(lengths))
        return {tree: [next(payloads) for _ in sizes] for tree, sizes in wanted.items()}

    def _unpacked(self, payloads: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Numbers that were packed each for themselves; together they may begin where wider numbers may not."""
        dtype, found = self._part.dtype, []
        for payload, size in zip(payloads, sizes, strict=True):
            aligned = payload if payload.storage_offset() % 8 == 0 else payload.clone()
            found.append(self._codec.decompress(aligned, (size,), dtype))
        return found

    def _send_up(self, round_: int, values: Callable[[Stretch], torch.Tensor]) -> None:
        """Send those who add them up the stretches that go to them in a round."""
        going: dict[int, list[tuple[Stretch, ErrorFeedback]]] = {}
        for stretch, packer in zip(self._share.exchanged, self._packers, strict=False):
            if stretch.sent == round_:
                going.setdefault(stretch.peers[0], []).append((stretch, packer))
        for peer, of_peer in going.items():
            self._give(round_, peer, [packer.compress(values(stretch))[0] for stretch, packer in of_peer])

    def _send_down(self, round_: int, blocks: Sequence[Block], payloads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Send children's leaders the pieces, packed, that each has of some blocks."""
        going: dict[int, list[torch.Tensor]] = {}
        for block in blocks:
            for version in block.versions:
                going.setdefault(version.peer, []).extend(payloads[block.tree][at] for at in version.places)
        for peer, of_peer in going.items():
            self._give(round_, peer, of_peer)

    def _give(self, round_: int, peer: int, payloads: Sequence[torch.Tensor]) -> None:
        payload = payloads[0] if len(payloads) == 1 else torch.cat(list(payloads))
        self._sendings.append(self._send(round_, peer, payload))
