"""Parts of vectors that other ranks of a region own: sent to their owners, fetched from their owners, ahead of use.

Only messages between two ranks, in an order that both know beforehand, never a collective: the ranks of a stage may
then compute different numbers of micro-batches, in different orders, and none waits for another to come along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from polygon_comm.compression import Codec
from polygon_comm.transport import Receipt, Sending, Wires

PARTS_AHEAD = 2
"""Parts that are on their way between two ranks, in one direction, at one time."""
OWN_AHEAD = 4
"""Parts of its own that a rank may have handed over before the device has made them; they are copies."""
TAGS = 64
"""Messages of a pair use so many tags in turn."""

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """A vector of which every owner has a stretch, all about as long."""

    name: str
    owners: tuple[int, ...]
    elements: int

    def part(self, rank: int) -> slice:
        """The stretch of an owner."""
        place, n = self.owners.index(rank), len(self.owners)
        return slice(self.elements * place // n, self.elements * (place + 1) // n)

    def length(self, rank: int) -> int:
        """Elements of an owner's stretch."""
        part = self.part(rank)
        return part.stop - part.start


class PartExchange:
    """One rank's messages of parts, of one kind.

    Parameters
    ----------
    wires : Wires
        Connections that nothing else uses: on GPUs both sides must name the messages of a direction in one order.
    """

    def __init__(self, wires: Wires) -> None:
        self.rank, self._wires, self._plain = wires.rank, wires, Codec()
        self._threads = wires.accelerator.threads(max(1, len(wires.streams)), "parts")
        self._accelerator = wires.accelerator
        self._own = wires.accelerator.threads(1, "own") if wires.accelerator.later else None
        self._taking: deque[Future[None]] = deque()
        self._jobs: list[Future[None]] = []
        self._sent = dict.fromkeys(wires.streams, 0)
        self._received = dict.fromkeys(wires.streams, 0)

    def send(self, peer: int, part: torch.Tensor) -> Sending:
        """Start sending a part; it must not change until the result's `wait` has returned."""
        self._sent[peer] += 1
        return self._wires.send(peer, self._sent[peer] % TAGS, self._plain.compress(part))

    def post(self, peer: int, elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Announce that a part is wanted; the call of the result waits for it."""
        self._received[peer] += 1
        receipt: Receipt = self._wires.post_receive(
            peer, self._received[peer] % TAGS, self._plain.payload_bytes(elements, dtype)
        )
        return lambda: self._plain.decompress(receipt.wait(), (elements,), dtype)

    def serve(self, peer: int, parts: Iterable[torch.Tensor]) -> None:
        """Send parts to a peer one after the other, in a thread."""

        def job() -> None:
            for sending in _ahead(self.send(peer, part) for part in parts):
                sending.wait()

        self._jobs.append(self._threads.submit(job))

    def collect(
        self, peer: int, wanted: Iterable[Split], dtype: torch.dtype, take: Callable[[Split, torch.Tensor], None]
    ) -> None:
        """Take this rank's parts of vectors from a peer one after the other, in a thread."""

        def job() -> None:
            posted = ((split, self.post(peer, split.length(self.rank), dtype)) for split in wanted)
            for split, arrive in _ahead(posted):
                part = arrive()
                # Others wait for what is made of the part: nothing may be made of it before it is there.
                self._accelerator.finish()
                take(split, part)

        self._jobs.append(self._threads.submit(job))

    def take(self, part: torch.Tensor, take: Callable[[torch.Tensor], None]) -> None:
        """Take a part of this rank's own, among those that are collected, once it is there.

        Were it taken at once on a device that works later, the others would have to wait for this thread's stream,
        which waits until parts have left, for peers whose own streams wait likewise.
        """
        if self._own is None:
            take(part)
            return
        kept = part.clone()

        def job() -> None:
            self._accelerator.finish()
            take(kept)

        self._taking.append(self._own.submit(job))
        if len(self._taking) > OWN_AHEAD:
            self._taking.popleft().result()

    @property
    def jobs(self) -> list[Future[None]]:
        """What was asked for since the last `finish`."""
        return self._jobs

    def finish(self) -> None:
        """Return when all is sent and taken; raises what went wrong."""
        jobs, self._jobs = [*self._jobs, *self._taking], []
        self._taking.clear()
        for job in jobs:
            job.result()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        if self._own is not None:
            self._own.shutdown()


def _ahead(begun: Iterable[T]) -> Iterable[T]:
    """The items in their order, each handed out when the next ones have been begun."""
    waiting: deque[T] = deque()
    for item in begun:
        waiting.append(item)
        if len(waiting) == PARTS_AHEAD:
            yield waiting.popleft()
    yield from waiting
