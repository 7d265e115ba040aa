"""Messages between two ranks: posted early, sent without waiting, spread over several TCP streams.

gloo moves data only once the receive is posted, so a late receive costs a round trip: receives are posted ahead
(`Wires.post_receive`), sends return at once and keep their bytes alive until waited for (`Wires.send`).
A pair of ranks has a process group of its own with one gloo device per stream; a message is cut into as many chunks,
chunk c with a tag that selects stream c. One stream carries about ``0.82 window / RTT``, whatever the link could do.

On GPUs messages inside a region go by NCCL, which has no tags, and whose operations of one communicator wait for one
another: every pair has a communicator for each direction in which it has messages, in an order that follows from the
plan on both sides. Messages between regions go through pinned host memory and by gloo.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from polygon_comm.accelerator import Accelerator, gloo_group
from polygon_comm.pacing import connections, listening_ports, open_descriptors, opened_since, pace, prefer, prefer_near
from polygon_comm.shaped import LinkShape, ShapedGroup

MIN_CHUNK_BYTES = 1 << 14
"""Messages are cut into no smaller chunks; each stream has learned its part of the link, so they are cut at all."""


class PeerLostError(Exception):
    """A message to or from a peer could not be completed."""

    def __init__(self, peer: int, doing: str, reason: object) -> None:
        self.peer = peer
        self.doing = doing
        super().__init__(f"{doing} rank {peer}: {str(reason).splitlines()[0]}")


def local_address(host: str, port: int) -> str:
    """The address of this machine on the way to `host` (what a peer can reach it by).

    Raises OSError when there is no way to the host.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def gloo_devices(count: int, address: str) -> list:
    """Network devices for gloo, on the interface of `GLOO_SOCKET_IFNAME` or the one that has `address`."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        return [ProcessGroupGloo.create_device(interface=name) for _ in range(count)]
    return [ProcessGroupGloo.create_device(hostname=address) for _ in range(count)]


class Sending:
    """A message on its way."""

    def __init__(self, peer: int, payload: torch.Tensor, works: list, *, on_device: bool) -> None:
        self._peer, self._payload, self._works = peer, payload, works
        self.on_device = on_device
        """Whether a device sends: `wait` then makes its stream wait, and not the thread."""

    def done(self) -> bool:
        """Whether the bytes have left; of what a device sends."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> None:
        """As `wait`."""
        self.wait()

    def wait(self) -> None:
        """Return once the bytes have left; `PeerLostError` if they cannot."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(self._peer, "sending to", error) from error
        self._works = []


class Receipt:
    """A posted receive."""

    def __init__(self, peer: int, buffer: torch.Tensor, works: list, accelerator: Accelerator | None) -> None:
        self._peer, self._buffer, self._works, self._accelerator = peer, buffer, works, accelerator

    def wait(self) -> torch.Tensor:
        """The bytes, on the rank's device, once they have arrived; `PeerLostError` if they cannot.

        What a device receives itself is there for what this thread hands over to it afterwards.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(self._peer, "receiving from", error) from error
        self._works = []
        return self._buffer if self._accelerator is None else self._accelerator.from_host(self._buffer)


class Wires:
    """All connections of one rank.

    Parameters
    ----------
    store : Store
        Where the ranks meet; all ranks open the same one.
    rank : int
    streams : mapping of peer to int
        Ranks that this rank exchanges messages with, and over how many TCP streams. Both sides must name the same.
    address : str
        This machine's address as the peers reach it.
    timeout_s : float
        How long an operation may last before the peer counts as lost.
    accelerator : Accelerator
        Where payloads come from and go to.
    near : frozenset of int
        Peers that an accelerator reaches by itself, where it works later than it is told to.
    shapes : mapping of peer to LinkShape
        Ways on which messages to a peer are made as late as a link would (see `polygon_comm.shaped`). Both sides must
        name the same peers.
    warm_bytes : mapping of peer to int
        How much is sent over every stream to a peer, and taken from it, before anything else: TCP then knows how fast
        the way is. Both sides must name the same.
    bytes_per_s : mapping of peer to float
        What the links to peers in other regions are said to carry: nothing is sent much faster (see
        `polygon_comm.pacing`).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        streams: Mapping[int, int],
        *,
        address: str,
        timeout_s: float,
        accelerator: Accelerator,
        near: frozenset[int] = frozenset(),
        shapes: Mapping[int, LinkShape] | None = None,
        warm_bytes: Mapping[int, int] | None = None,
        bytes_per_s: Mapping[int, float] | None = None,
    ) -> None:
        self.rank = rank
        self.accelerator, self.device = accelerator, accelerator.device
        self.streams = dict(streams)
        self.timeout_s = timeout_s
        self.store = store
        self._shapes = dict(shapes or {})
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.connections: dict[int, list[int]] = {}
        """File descriptors of the TCP connections to every peer on another machine, where the system tells."""
        self._foreign_ports = listening_ports(open_descriptors())
        self.devices = gloo_devices(max([1, *streams.values()]), address)
        self._gloo: dict[int, Any] = {}
        self._directed: dict[tuple[int, int], Any] = {}
        """By source and target, groups of peers that the accelerator reaches by itself."""
        # Both sides open their pairs in the same order, so that opening never waits in a circle.
        for low, high in sorted((min(rank, peer), max(rank, peer)) for peer in streams):
            self._open(low, high, near=accelerator.later and (high if low == rank else low) in near)
        far = self.connections if bytes_per_s is None else bytes_per_s
        for peer in bytes_per_s or {}:
            prefer(self.connections.get(peer, ()))
        for peer in self.connections.keys() - far.keys():
            prefer_near(self.connections[peer])
        self._warm(warm_bytes or {})
        for peer, rate in (bytes_per_s or {}).items():
            pace(self.connections.get(peer, ()), rate)

    def _open(self, low: int, high: int, *, near: bool) -> None:
        peer, place = (high, 0) if low == self.rank else (low, 1)
        prefix = f"pair/{low}/{high}"
        if not near:
            devices, before = self.devices[: self.streams[peer]], open_descriptors()
            group = gloo_group(PrefixStore(prefix, self.store), place, 2, devices, self.timeout_s)
            self.connections[peer] = connections(opened_since(before), self._foreign_ports)
            shape = self._shapes.get(peer)
            self._gloo[peer] = group if shape is None else ShapedGroup(group, {1 - place: shape})
            return
        for source, target in ((low, high), (high, low)):
            store, at = PrefixStore(f"{prefix}/{source}", self.store), int(self.rank == target)
            self._directed[source, target] = self.accelerator.direction(store, at, self.devices, self.timeout_s)

    def _warm(self, n_bytes: Mapping[int, int]) -> None:
        """Send zeros over all streams to all peers at once, and take theirs.

        A sender that paces itself (bbr) takes a link for as fast as the largest message in a round trip was, until
        something large has passed: at 40 ms and 100 Mbit/s a message of 64 KiB arrives after 40 ms, and after 26 once
        1 MiB has passed. Streams that are warmed one after the other each take the whole link for theirs, and lose
        packets when all send.
        """
        # All are zeros: the same memory serves every stream.
        taken, given = (torch.zeros(max(n_bytes.values(), default=0), dtype=torch.uint8) for _ in range(2))
        works = []
        for peer, n in n_bytes.items():
            place, streams = int(peer > self.rank), self.streams[peer]
            for stream in range(streams) if peer in self._gloo and peer not in self._shapes else ():
                works.append((peer, self._gloo[peer].recv([taken[:n]], place, stream * (streams + 1))))
                works.append((peer, self._gloo[peer].send([given[:n]], place, stream * (streams + 1))))
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLostError(peer, "meeting", error) from error

    def _chunks(self, peer: int, tag: int, payload: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        streams = self.streams[peer]
        count = max(1, min(streams, payload.numel() // MIN_CHUNK_BYTES))
        return [
            ((tag * streams + c) * streams + (tag + c) % streams, chunk)
            for c, chunk in enumerate(payload.tensor_split(count))
        ]

    def sends_itself(self, peer: int) -> bool:
        """Whether the device sends to a peer, so that the thread need not wait until the payload is there."""
        return (self.rank, peer) in self._directed

    def send(self, peer: int, tag: int, payload: torch.Tensor) -> Sending:
        """Start sending bytes; they must not be written to, nor the result dropped, until its `wait` has returned.

        Holds up the thread until the payload is there, where the device does not send itself.
        """
        self.sent_bytes[peer] += payload.numel()
        place = int(peer > self.rank)
        try:
            if self.sends_itself(peer):
                works = [self._directed[self.rank, peer].send([payload], 1, 0)]
            else:
                payload = self.accelerator.to_host(payload)
                group = self._gloo[peer]
                works = [group.send([chunk], place, t) for t, chunk in self._chunks(peer, tag, payload)]
        except RuntimeError as error:
            raise PeerLostError(peer, "sending to", error) from error
        return Sending(peer, payload, works, on_device=self.sends_itself(peer))

    def post_receive(self, peer: int, tag: int, n_bytes: int) -> Receipt:
        """Announce that so many bytes are wanted from a peer under a tag."""
        place = int(peer > self.rank)
        try:
            itself = (peer, self.rank) in self._directed
            if itself:
                buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
                works = [self._directed[peer, self.rank].recv([buffer], 0, 0)]
            else:
                buffer = self.accelerator.host_buffer(n_bytes)
                group = self._gloo[peer]
                works = [group.recv([chunk], place, t) for t, chunk in self._chunks(peer, tag, buffer)]
        except RuntimeError as error:
            raise PeerLostError(peer, "receiving from", error) from error
        return Receipt(peer, buffer, works, None if itself else self.accelerator)
