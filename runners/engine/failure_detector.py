"""Whether the others are still there: heartbeats between neighbours, one message to all when somebody is lost.

gloo notices a killed peer only at its direct neighbours, a stopped or cut-off one only by the timeout of a message.
Here every rank holds a small TCP connection to each rank that it exchanges messages with and to rank 0. A line goes
over it every interval: a beat with the rank's last action, a farewell, or an abort with the reason. A connection that
closes without farewell, or is silent too long, is a lost rank; whoever notices tells all its neighbours, who pass it
on once, and every rank ends with the same message.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch.distributed import Store

from runners.engine.rendezvous import RunFailedError

BEATS = 8
"""Beats within the silence after which a rank counts as lost."""
MEET_S, GREET_S = 60.0, 5.0
"""How long neighbours have to connect, and whoever connects to say who it is."""
GREETING_BYTES = 200
BEAT, FAREWELL, ABORT, HELLO = "beat", "farewell", "abort", "hello"


@dataclass
class _Neighbour:
    rank: int
    connection: socket.socket
    text: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)
    doing: str = "nothing yet"
    left: bool = False
    clock: tuple[float, float] | None = None
    """When its last beat was sent, by its clock, and heard, by ours."""


def _greeting(connection: socket.socket) -> int | None:
    """The rank that a connection says first that it is of; None: it closes, is silent, or says something else."""
    line, deadline_s = b"", time.monotonic() + GREET_S
    try:
        while not line.endswith(b"\n") and len(line) < GREETING_BYTES:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            # By bytes: what follows the line is not for us.
            data = connection.recv(1)
            if not data:
                return None
            line += data
        kind, rank, *_ = json.loads(line)
        return int(rank) if kind == HELLO else None
    except (OSError, ValueError, TypeError):
        return None


class Watch:
    """Heartbeats of one rank, in a thread.

    Parameters
    ----------
    rank : int
    neighbours : iterable of int
        Ranks to watch; who watches is watched by them.
    store : Store
        Where addresses are exchanged.
    address : str
        Of this machine, as neighbours reach it.
    dead_after_s : float
        Silence after which a rank counts as lost.
    describe : callable
        A rank for people.
    on_loss : callable
        Called once, in the thread, with the message when somebody is lost; expected to end the process.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Iterable[int],
        store: Store,
        *,
        address: str,
        dead_after_s: float,
        describe: Callable[[int], str],
        on_loss: Callable[[str], None],
    ) -> None:
        self.rank, self._dead_after_s, self._describe, self._on_loss = rank, dead_after_s, describe, on_loss
        self.doing = "nothing yet"
        """What the rank does; sent with every beat."""
        self.clock_offset_s = 0.0
        """This machine's clock minus that of rank 0, from the quickest exchange of beats so far (as NTP does)."""
        self._quickest_s = float("inf")
        self._selector = selectors.DefaultSelector()
        self._neighbours: dict[int, _Neighbour] = {}
        self._verdict = ""
        self._ended = threading.Event()
        self._meet(sorted(neighbours), store, address)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _meet(self, neighbours: list[int], store: Store, address: str) -> None:
        """Connect to neighbours of lower rank, then accept those of higher rank."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=len(neighbours) + 1) as listener:
            store.set(f"watch/{self.rank}", json.dumps([address, listener.getsockname()[1]]))
            for rank in (r for r in neighbours if r < self.rank):
                host, port = json.loads(store.get(f"watch/{rank}"))
                try:
                    connection = socket.create_connection((host, port), timeout=30)
                except OSError as error:
                    raise RunFailedError(f"lost {self._describe(rank)}: {error} (it was to watch us)") from error
                self._add(rank, connection)
                self._tell(self._neighbours[rank], HELLO, str(self.rank))
            self._welcome(listener, {r for r in neighbours if r > self.rank})

    def _welcome(self, listener: socket.socket, awaited: set[int]) -> None:
        """Accept neighbours until all are there; whoever else comes to the port is sent away."""
        deadline_s = time.monotonic() + MEET_S
        while awaited:
            left_s = deadline_s - time.monotonic()
            listener.settimeout(max(0.01, left_s))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                names = ", ".join(map(self._describe, sorted(awaited)))
                raise RunFailedError(f"rank {self.rank}: {names} did not connect in {MEET_S:g} s") from error
            rank = _greeting(connection)
            if rank in awaited:
                awaited.remove(rank)
                self._add(rank, connection)
            else:
                connection.close()

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        neighbour = self._neighbours[rank] = _Neighbour(rank, connection)
        self._selector.register(connection, selectors.EVENT_READ, neighbour)

    def _tell(self, neighbour: _Neighbour, kind: str, text: str) -> None:
        if neighbour.left:
            return
        try:
            line = json.dumps([kind, text, time.time(), neighbour.clock]) + "\n"
            neighbour.connection.send(line.encode())
        except BlockingIOError:
            pass  # its buffer is full because it does not read: silence will tell
        except OSError as error:
            self._lose(neighbour, f"connection lost ({error.strerror})")

    def _run(self) -> None:
        interval_s = self._dead_after_s / BEATS
        next_beat_s = time.monotonic()
        while not self._ended.is_set():
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                next_beat_s = now_s + interval_s
                for neighbour in list(self._neighbours.values()):
                    self._tell(neighbour, BEAT, self.doing)
            for key, _ in self._selector.select(timeout=min(0.2, interval_s)):
                self._hear(key.data)
            woke_s = time.monotonic()
            if woke_s - now_s > interval_s:
                # This process itself was stopped: what it did not hear meanwhile says nothing about the others.
                for neighbour in self._neighbours.values():
                    neighbour.heard_s = woke_s
            for neighbour in list(self._neighbours.values()):
                if not neighbour.left and woke_s - neighbour.heard_s > self._dead_after_s:
                    self._lose(neighbour, f"no sign of life for {woke_s - neighbour.heard_s:.1f} s")

    def _hear(self, neighbour: _Neighbour) -> None:
        try:
            data = neighbour.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(neighbour, f"connection lost ({error.strerror})")
            return
        *lines, neighbour.text = (neighbour.text + data).split(b"\n")
        for line in lines:
            neighbour.heard_s = time.monotonic()
            kind, text, sent_s, echo = json.loads(line)
            if kind == BEAT:
                neighbour.doing = text
                self._compare_clocks(neighbour, sent_s, echo)
            elif kind == FAREWELL:
                self._forget(neighbour)
            elif kind == ABORT:
                self._abort(text)
        if not data and not neighbour.left:
            self._lose(neighbour, "its process ended")

    def _compare_clocks(self, neighbour: _Neighbour, sent_s: float, echo: tuple[float, float] | None) -> None:
        """Note a beat for the answer; from an answer of rank 0 work out how far the clocks are apart."""
        heard_s = time.time()
        neighbour.clock = sent_s, heard_s
        if neighbour.rank or echo is None:
            return
        asked_s, reached_s = echo
        way_s = (heard_s - asked_s) - (sent_s - reached_s)
        if way_s < self._quickest_s:
            self._quickest_s = way_s
            self.clock_offset_s = ((asked_s - reached_s) + (heard_s - sent_s)) / 2

    def _forget(self, neighbour: _Neighbour) -> None:
        if not neighbour.left:
            neighbour.left = True
            self._selector.unregister(neighbour.connection)
            neighbour.connection.close()

    def _lose(self, neighbour: _Neighbour, reason: str) -> None:
        self._forget(neighbour)
        self._abort(
            f"lost {self._describe(neighbour.rank)}: {reason}; its last action was {neighbour.doing} "
            f"(noticed by {self._describe(self.rank)})"
        )

    def _abort(self, message: str) -> None:
        if self._verdict or self._ended.is_set():
            return
        self._verdict = message
        for neighbour in list(self._neighbours.values()):
            self._tell(neighbour, ABORT, message)
        self._on_loss(message)

    def verdict(self, wait_s: float) -> str:
        """What all ranks were told about the lost one; empty if nothing was within `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while not self._verdict and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self._verdict

    def close(self) -> None:
        """Say farewell to all and end."""
        self._ended.set()
        self._thread.join()
        for neighbour in list(self._neighbours.values()):
            self._tell(neighbour, FAREWELL, "")
            self._forget(neighbour)
        self._selector.close()
