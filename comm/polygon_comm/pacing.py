"""Senders that know how fast a link is send no faster: TCP's own pacing, by socket option (Linux).

Congestion controls find a link's rate by overshooting it. bbr stays at 2.9 times what it has seen for as long as a
sender often has nothing to send, which is what training does: a gradient that goes out in one burst then overflows the
router's queue, and after such a loss bbr takes the link for as slow as its last retransmissions were. At 75 ms and
50 Mbit/s: 2.2 MB at 156 Mbit/s into a queue of 1.25 MB, after it 9 Mbit/s, and every step of the next ten seconds takes
up to twice as long. gloo does not hand out its sockets, but they are this process's own file descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

_SO_MAX_PACING_RATE = 47
"""Of Linux, asm-generic/socket.h; Python has no name for it."""
_DELIVERY_RATE = struct.Struct("=160xQ")
"""Where `tcpi_delivery_rate` is in struct tcp_info (linux/tcp.h)."""
HEADROOM = 1.2
"""Over the link's rate: headers, and what it may be wrong by. A sixth of a burst waits in the router's queue."""


def open_descriptors() -> dict[int, int]:
    """File descriptors of this process and the inode behind each, by which one that is used again is told from the one
    before; none where the system does not list them."""
    found: dict[int, int] = {}
    folder = Path("/proc/self/fd")
    for descriptor in [int(path.name) for path in folder.iterdir()] if folder.exists() else []:
        with contextlib.suppress(OSError):  # the one by which they were listed is no longer there
            found[descriptor] = os.fstat(descriptor).st_ino
    return found


def opened_since(before: Mapping[int, int]) -> set[int]:
    """File descriptors that are not what they were in an earlier list."""
    return {descriptor for descriptor, inode in open_descriptors().items() if before.get(descriptor) != inode}


@contextlib.contextmanager
def _tcp_socket(descriptor: int) -> Iterator[socket.socket | None]:
    """The TCP socket behind a descriptor; None where it is something else."""
    copy = -1
    try:
        copy = os.dup(descriptor)
        found = socket.socket(fileno=copy)
    except OSError:  # closed, or no socket
        if copy >= 0:
            os.close(copy)
        yield None
        return
    with found:
        tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
        yield found if tcp else None


def listening_ports(descriptors: Iterable[int]) -> set[int]:
    """Ports at which some of the descriptors wait for connections."""
    found = set()
    for descriptor in descriptors:
        with _tcp_socket(descriptor) as tcp:
            if tcp is not None and tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(tcp.getsockname()[1])
    return found


def connections(descriptors: Iterable[int], foreign_ports: Collection[int] = ()) -> list[int]:
    """Those of the descriptors that are TCP connections to other machines.

    Parameters
    ----------
    descriptors : iterable of int
    foreign_ports : collection of int
        Ports of this machine at which others than those asked for are taken.
    """
    found = []
    for descriptor in sorted(descriptors):
        with _tcp_socket(descriptor) as tcp, contextlib.suppress(OSError):  # not connected
            if tcp is not None:
                (here, port, *_), (there, *_) = tcp.getsockname(), tcp.getpeername()
                found += [descriptor] if here != there and port not in foreign_ports else []
    return found


def seen_bytes_per_s(descriptor: int) -> float:
    """How fast a connection's bytes have arrived lately, by its own account; 0 where it does not say."""
    with _tcp_socket(descriptor) as tcp:
        if tcp is None:
            return 0.0
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE.size)
    return float(_DELIVERY_RATE.unpack(info)[0]) if len(info) == _DELIVERY_RATE.size else 0.0


def pace(descriptors: Collection[int], bytes_per_s: float) -> None:
    """Have the TCP connections that share a link send no faster together than it carries, with some headroom.

    Where they have been faster already than the link is said to be, that counts.

    Parameters
    ----------
    descriptors : collection of int
    bytes_per_s : float
        What the link is said to carry [bytes/s]; infinite: nothing is limited.
    """
    most = HEADROOM * max(bytes_per_s, sum(map(seen_bytes_per_s, descriptors)))
    for descriptor in descriptors:
        with _tcp_socket(descriptor) as tcp:
            if tcp is not None and most < 2**60:
                each = max(1, int(most / len(descriptors)))
                tcp.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", each))
