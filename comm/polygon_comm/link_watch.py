"""Looks after the connections to other regions while a rank trains: keeps their control awake, says which link is slow.

Ten times a second every connection is asked what TCP knows of it. bbr is begun anew (`polygon_comm.pacing.restart`)
where nothing is under way, before it would look for the shortest round trip in the middle of a sum. A link that stays
below what it is said to carry is named once, with what TCP gives as the reason: what has arrived over the time in which
something waited to be sent. (TCP's own delivery rate will not do: it counts pauses between bursts that are shorter than
a round trip, and gave 35 of 50 Mbit/s for a link on which nothing waited.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polygon_comm.pacing import Seen, congestion_control, restart, seen

TICK_S, MOST_TICKS_PER_S = 0.1, 1000
"""Between two looks, and how many connections are looked at in a second at most: about a hundredth of a core."""
RESTART_S, LATEST_RESTART_S = 3.0, 8.0
"""Age at which a control is begun anew where nothing is under way, and in any case; bbr looks after 10 s
(bbr_min_rtt_win_sec, net/ipv4/tcp_bbr.c)."""
SLOW = 0.8
"""Part of what a link is said to carry."""
WINDOW_S, WINDOWS = 20.0, 2
"""So long, and so many times, it has to be slow."""
LEAST_WAITING = 40
"""Looks at which something waited to be sent; with fewer in that time nothing is said."""
LOST = 0.01
"""Part of segments that were sent again from which losses are named."""


def idle_slow_start() -> bool:
    """Whether this host's TCP starts slowly after a pause (loss-based controls)."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text().strip() != "0"
    return False


def reason(before: Sequence[Seen], now: Sequence[Seen], control: str) -> str:
    """Why connections that share a link were slow between two looks, as far as TCP can tell.

    Parameters
    ----------
    before, now : sequence of Seen
        Of the same connections.
    control : str
        Name of their congestion control.
    """

    def grown(name: str) -> int:
        return sum(getattr(b, name) - getattr(a, name) for a, b in zip(before, now, strict=True))

    busy_us, lost = grown("busy_us"), grown("resent") / max(1, grown("segments"))
    late = max(state.round_trip_us / max(1, state.least_round_trip_us) for state in now)
    if lost > LOST:
        text = f"{100 * lost:.0f} % of the segments were sent again"
        return text if control == "bbr" else f"{text}, which {control} takes for a full link; bbr would not"
    if grown("receiver_us") > busy_us / 2:
        return "the receiver's window is full: raise net.ipv4.tcp_rmem there"
    if grown("buffer_us") > busy_us / 2:
        return "the send buffer is full: raise net.ipv4.tcp_wmem here"
    if control != "bbr" and idle_slow_start():
        return (
            f"{control} starts slowly after every pause: sysctl -w net.ipv4.tcp_slow_start_after_idle=0, or allow bbr"
        )
    if late > 2:
        return f"round trips have become {late:.1f} times as long: others fill the link's queue"
    return "nothing was lost or late: the link carries no more, or something limits this sender's rate"


@dataclass
class WatchedLink:
    """The connections to one peer.

    Parameters
    ----------
    name : str
        For people.
    descriptors : sequence of int
    bytes_per_s : float
        What the link is said to carry.
    """

    name: str
    descriptors: Sequence[int]
    bytes_per_s: float
    _begun_s: dict[int, float] = field(default_factory=dict)
    _first: dict[int, Seen] = field(default_factory=dict)
    _since_s: float = 0.0
    _looked_s: float = 0.0
    _waiting: int = 0
    _waiting_s: float = 0.0
    _slow: int = 0
    """Windows in a row."""

    def look(self, now_s: float) -> str | None:
        """Begin controls anew where it is time; what is to be said of the link, if anything."""
        found = {d: state for d in self.descriptors if (state := seen(d)) is not None}
        for descriptor, state in found.items():
            age_s = now_s - self._begun_s.setdefault(descriptor, now_s - RESTART_S)
            if state.whole_window and age_s >= (RESTART_S if state.idle else LATEST_RESTART_S):
                restart(descriptor)
                self._begun_s[descriptor] = now_s
        return self._judge(found, now_s) if found else None

    def _judge(self, found: Mapping[int, Seen], now_s: float) -> str | None:
        if found.keys() != self._first.keys():
            self._begin(found, now_s)
        elif any(state.unsent_bytes for state in found.values()):
            self._waiting += 1
            self._waiting_s += now_s - self._looked_s
        # A link that nobody waits for says nothing about its rate: only time with unsent bytes counts.
        self._looked_s = now_s
        if now_s - self._since_s < WINDOW_S:
            return None
        text = None
        if self._waiting >= LEAST_WAITING:
            before, now = list(self._first.values()), list(found.values())
            arrived = sum(b.bytes_confirmed - a.bytes_confirmed for a, b in zip(before, now, strict=True))
            bytes_per_s = arrived / self._waiting_s
            self._slow = self._slow + 1 if bytes_per_s < SLOW * self.bytes_per_s else 0
            if self._slow == WINDOWS:
                text = (
                    f"link to {self.name}: {8e-6 * bytes_per_s:.1f} Mbit/s where {8e-6 * self.bytes_per_s:.1f} were "
                    f"expected: {reason(before, now, congestion_control(next(iter(found))))}"
                )
        self._begin(found, now_s)
        return text

    def _begin(self, found: Mapping[int, Seen], now_s: float) -> None:
        self._first, self._since_s, self._waiting, self._waiting_s = dict(found), now_s, 0, 0.0


class LinkWatch:
    """Looks at links again and again, in a thread of its own, until it is closed.

    Parameters
    ----------
    links : sequence of WatchedLink
    say : callable
        Takes a line for people.
    """

    def __init__(self, links: Sequence[WatchedLink], say: Callable[[str], None]) -> None:
        self._links, self._say = list(links), say
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link-watch", daemon=True)
        if self._links:
            self._thread.start()

    def _run(self) -> None:
        tick_s = max(TICK_S, sum(len(link.descriptors) for link in self._links) / MOST_TICKS_PER_S)
        while not self._closed.wait(tick_s):
            for link in self._links:
                text = link.look(time.monotonic())
                if text is not None:
                    self._say(text)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
