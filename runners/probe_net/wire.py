"""Measuring one direction of one link with plain TCP sockets.

The receiving side is a small server on every host; the sending side measures: round trips of one byte, the steady rate
of n parallel streams, and the time that messages of given sizes need on a connection that is warm.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

CONNECT_TIMEOUT_S = 6.0
SILENT_S = 60.0
"""A connection on which nothing moves for so long is broken."""
LONGEST_MESSAGE_S = 8.0
"""Messages that would take longer are not measured: five of the largest are sent."""
LONGEST_COUNT_S = 20.0
"""Most seconds after which something must have been counted."""
_CHUNK = 1 << 20
_BIN_S = 0.05
"""Receivers count arrived bytes in bins of this length."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with zero timeout: unsent data of a finished measurement is thrown away, not delivered for seconds."""


def send_line(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON object as a line."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def receive_line(sock: socket.socket) -> dict[str, Any]:
    """Read one JSON line, byte-exactly (what follows it stays in the socket)."""
    line = bytearray()
    while not line.endswith(b"\n"):
        seen = sock.recv(4096, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("closed by peer")
        cut = seen.find(b"\n")
        line += sock.recv(len(seen) if cut < 0 else cut + 1)
    return json.loads(line)


def _receive_exactly(sock: socket.socket, n_bytes: int, buffer: memoryview) -> None:
    left = n_bytes
    while left:
        got = sock.recv_into(buffer[: min(left, len(buffer))])
        if not got:
            raise ConnectionError("closed by peer")
        left -= got


class DataServer:
    """The receiving side: a listening socket and one thread per connection."""

    def __init__(self, address: str = "", port: int = 0) -> None:
        self._listener = socket.create_server((address, port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._bins: dict[str, dict[int, int]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        # A sender ends a stream by resetting it, and may vanish at any time: both end only this connection.
        with sock, contextlib.suppress(OSError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = receive_line(sock)
            if request["verb"] == "stream":
                self._count(sock, request["id"])
            elif request["verb"] == "result":
                with self._lock:
                    bins = self._bins.pop(request["id"], {})
                send_line(sock, {"bins": sorted(bins.items()), "bin_s": _BIN_S})
            else:
                self._echo(sock)

    def _count(self, sock: socket.socket, name: str) -> None:
        buffer = bytearray(_CHUNK)
        with self._lock:
            bins = self._bins.setdefault(name, {})
        while got := sock.recv_into(buffer):
            place = int(time.monotonic() / _BIN_S)
            with self._lock:
                bins[place] = bins.get(place, 0) + got

    def _echo(self, sock: socket.socket) -> None:
        """Messages announced by an 8-byte length; each is answered with one byte when it has arrived."""
        buffer = memoryview(bytearray(_CHUNK))
        head = memoryview(bytearray(8))
        while True:
            _receive_exactly(sock, 8, head)
            _receive_exactly(sock, struct.unpack("!Q", head)[0], buffer)
            sock.sendall(b"!")


class NotReachedError(OSError):
    """No connection came about: nothing could be measured at all."""


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other host has vanished (a cable, a power cut) within 40 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 40_000)):
        if hasattr(socket, option):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


@contextlib.contextmanager
def _connected(target: tuple[str, int], source: str | None, verb: str, name: str = "") -> Iterator[socket.socket]:
    try:
        sock = socket.create_connection(target, CONNECT_TIMEOUT_S, source_address=(source, 0) if source else None)
    except OSError as error:
        raise NotReachedError(str(error)) from None
    with sock:
        sock.settimeout(SILENT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_line(sock, {"verb": verb, "id": name})
        yield sock


def _message_s(sock: socket.socket, payload: bytes) -> float:
    start_s = time.perf_counter()
    sock.sendall(struct.pack("!Q", len(payload)) + payload)
    if not sock.recv(1):
        raise ConnectionError("closed by peer")
    return time.perf_counter() - start_s


def measure_rtt_s(target: tuple[str, int], source: str | None = None, times: int = 12) -> tuple[float, float]:
    """Least and median round trip [s] of an empty message on one connection."""
    with _connected(target, source, "messages") as sock:
        seconds = [_message_s(sock, b"") for _ in range(times)]
    return min(seconds), statistics.median(seconds)


def measure_messages_s(
    target: tuple[str, int], sizes_bytes: Sequence[int], source: str | None = None, times: int = 3
) -> dict[int, float]:
    """Median time [s] from the start of sending a message until its arrival is confirmed, by size, connection warm.

    Includes one way back, half a round trip.
    """
    with _connected(target, source, "messages") as sock:
        for _ in range(2):
            _message_s(sock, bytes(max(sizes_bytes)))  # the congestion window opens
        return {n: statistics.median(_message_s(sock, bytes(n)) for _ in range(times)) for n in sizes_bytes}


def _pump(sock: socket.socket, stop: threading.Event) -> None:
    buffer = bytes(_CHUNK)
    with contextlib.suppress(OSError):  # reset when the measurement ends
        while not stop.is_set():
            sock.send(buffer)


def measure_rate(
    target: tuple[str, int], streams: int, *, rtt_s: float, seconds: float | None = None, source: str | None = None
) -> float:
    """Steady rate [bytes/s] that n parallel streams deliver together, counted where it arrives.

    Runs for `seconds` (default: 1 s and 14 round trips, long enough for TCP to open its window), twice as long where
    that is too short to count anything; what arrived in the first half is left out.

    Raises
    ------
    OSError
        Where the connection breaks, or nothing arrives.
    """
    duration_s = seconds if seconds is not None else 1.0 + 14 * rtt_s
    while not (rate := _rate(target, streams, duration_s, source)):
        if duration_s > LONGEST_COUNT_S:
            raise OSError(f"nothing arrived in {duration_s:g} s")
        duration_s = max(2 * duration_s, 4 * _BIN_S)
    return rate


def message_sizes(sizes_bytes: Sequence[int], bytes_per_s: float) -> list[int]:
    """Of the sizes those that such a link carries within `LONGEST_MESSAGE_S`, at least the smallest."""
    return [n for n in sizes_bytes if n <= max(LONGEST_MESSAGE_S * bytes_per_s, min(sizes_bytes))]


def _rate(target: tuple[str, int], streams: int, duration_s: float, source: str | None) -> float:
    name = f"{time.monotonic_ns():x}-{streams}"
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(_connected(target, source, "stream", name)) for _ in range(streams)]
        threads = [threading.Thread(target=_pump, args=(sock, stop), daemon=True) for sock in socks]
        for thread in threads:
            thread.start()
        time.sleep(duration_s)
        with _connected(target, source, "result", name) as sock:
            bins = dict(map(tuple, receive_line(sock)["bins"]))
        stop.set()
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(2.0)
    return steady_rate(bins)


def steady_rate(bins: dict[int, int]) -> float:
    """Bytes/s over the second half of the bins, the last (perhaps unfinished) one left out; 0 for too few bins."""
    if len(bins) < 3:
        return 0.0
    first, last = min(bins), max(bins)
    middle = (first + last) // 2
    counted = [count for place, count in bins.items() if middle <= place < last]
    return sum(counted) / ((last - middle) * _BIN_S)
