"""Senders that know how fast a link is send no faster: TCP's own pacing, by socket option (Linux).

Congestion controls find a link's rate by overshooting it. bbr stays at 2.9 times what it has seen for as long as a
sender often has nothing to send, which is what training does: a gradient that goes out in one burst then overflows the
router's queue, and after such a loss bbr takes the link for as slow as its last retransmissions were. At 75 ms and
50 Mbit/s: 2.2 MB at 156 Mbit/s into a queue of 1.25 MB, after it 9 Mbit/s, and every step of the next ten seconds takes
up to twice as long. gloo does not hand out its sockets, but they are this process's own file descriptors.

Loss-based controls take every lost packet for a full queue (at 400 ms round trip and one loss in a thousand reno sends
0.14 MB/s, whatever the link carries) and start slowly after every pause, so connections are given bbr where the host
lets them have it. bbr in turn looks for the shortest round trip every ten seconds, with four packets under way for
0.2 s and a round trip: on a long link half a step. Who is paced below what fills a queue needs no such look, and a
control that begins anew has just had it (`restart`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

_SO_MAX_PACING_RATE = 47
"""Of Linux, asm-generic/socket.h; Python has no name for it."""
_TCP_INFO = struct.Struct("=xB5xB16xI40xI8xI16xI16xQ16xII4xIQQQQ")
"""The fields of struct tcp_info (linux/tcp.h) that `Seen` has, in the order of the latter."""
_NAME_BYTES = 16
"""TCP_CA_NAME_MAX (net/tcp.h)."""
PREFERRED = "bbr"
NEAR = ("cubic", "reno")
"""In the order in which they are tried."""
_BBR_LEAST_WINDOW = 4
"""Segments under way while bbr looks for the shortest round trip (bbr_cwnd_min_target, net/ipv4/tcp_bbr.c)."""
NEAR_BYTES = 1 << 17
"""Send buffer of a connection within a region, which the system doubles. Sums of four hosts alone, six layers of 0.8
MB: on cards of 44 Mbit/s 1.40 s and no loss, not 1.47 s and 118 lost segments; of 84 Mbit/s 0.79 s, not 0.83."""
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


class Seen(NamedTuple):
    """What TCP says of a connection: counters since it was opened, and how things are now."""

    recovering: bool
    """Whether losses are suspected or being mended."""
    little: bool
    """Whether `bytes_per_s` is only what there was to send."""
    unconfirmed: int
    """Segments."""
    round_trip_us: int
    window: int
    """Congestion window, in segments."""
    resent: int
    """Segments."""
    bytes_confirmed: int
    unsent_bytes: int
    least_round_trip_us: int
    segments: int
    """That carried data."""
    bytes_per_s: int
    """How fast bytes arrive: lately, or the most where there was little to send since."""
    busy_us: int
    """How long something was under way."""
    receiver_us: int
    """Of that, how long the receiver's window was full."""
    buffer_us: int
    """Of that, how long the send buffer was."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self.unconfirmed and not self.unsent_bytes

    @property
    def whole_window(self) -> bool:
        """Whether the window is what the control wants it to be, and not narrowed for a while by losses or a look."""
        return not self.recovering and self.window > _BBR_LEAST_WINDOW


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


def seen(descriptor: int) -> Seen | None:
    """What TCP says of a connection; None where it is closed or the system does not say."""
    with _tcp_socket(descriptor) as tcp:
        if tcp is None or not hasattr(socket, "TCP_INFO"):
            return None
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return None
    mending, flags, *rest = _TCP_INFO.unpack(info)
    return Seen(mending != 0, bool(flags & 1), *rest)


def seen_bytes_per_s(descriptor: int) -> float:
    """How fast a connection's bytes have arrived lately, by its own account; 0 where it does not say."""
    found = seen(descriptor)
    return 0.0 if found is None else float(found.bytes_per_s)


def congestion_control(descriptor: int) -> str:
    """Name of a connection's congestion control; empty where it is closed or the system does not say."""
    with _tcp_socket(descriptor) as tcp:
        if tcp is None or not hasattr(socket, "TCP_CONGESTION"):
            return ""
        return tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()


def prefer(descriptors: Iterable[int]) -> None:
    """Give connections the preferred congestion control, where the host lets this process have it."""
    _set_control(descriptors, (PREFERRED,))


def prefer_near(descriptors: Collection[int]) -> None:
    """Give connections within a region a control that keeps its part of a shared queue, where the host's is bbr.

    bbr keeps two of its own shortest round trips under way. Behind 30 ms of what a card has queued for other regions
    that is nothing at a round trip of 0.4 ms, so a region's own sums wait until the card is idle, and leave it idle.
    Data parallel over two regions of two hosts, everything on cards of 70 Mbit/s: 1.47 s a step, with reno 1.31.

    And little is under way at once: all of a region send to all, so what each sends first would fill the queues of the
    cards that hear it, and drop what goes to other regions with the rest.
    """
    _set_control([one for one in descriptors if congestion_control(one) == PREFERRED], NEAR)
    for descriptor in descriptors:
        with _tcp_socket(descriptor) as tcp:
            if tcp is not None:
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES)


def _set_control(descriptors: Iterable[int], names: Iterable[str]) -> None:
    """Give connections the first of some congestion controls that the host has and lets this process have."""
    listed = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    # Asking for what is not there would have root's kernel load it.
    there = listed.read_text().split() if listed.exists() else []
    for descriptor in descriptors:
        with _tcp_socket(descriptor) as tcp:
            for name in [name for name in names if tcp is not None and name in there]:
                with contextlib.suppress(OSError):
                    cast(socket.socket, tcp).setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
                    break


def restart(descriptor: int) -> None:
    """Let a connection with bbr begin anew, with the window that it has: it takes the round trips seen for fresh.

    Not while the window is narrow (`Seen.whole_window`): bbr would forget what to widen it to.
    """
    if congestion_control(descriptor) == "bbr":
        with _tcp_socket(descriptor) as tcp:
            if tcp is not None:
                for name in (b"reno", b"bbr"):  # the same one again would change nothing
                    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


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
