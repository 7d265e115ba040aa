"""Rate, then latency, for every ordered pair of hosts: what the relay does to packets, as a function of time.

A pair is a queue served at the pair's rate; a capacity that several pairs share is one more queue behind it. A packet
enters the next queue when its service in the one before starts (cut-through), leaves the last when every queue has
served it, and arrives one latency later. Per pair packets stay in order, also when the latency is lowered live.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from typing import Any

MIN_QUEUE_S = 0.2
"""A queue holds at least so long a backlog, on longer links one round trip (the usual size of a router's buffer).
Packets come in segments of up to 64 KiB, so a smaller buffer would drop in bursts that no real router shows: at 0.1 s
eight bbr flows lost 656 segments in 4 s and fell to 84 % of a link of 500 Mbit/s and 80 ms, at 0.2 s none and 99 %."""


@dataclass(slots=True)
class _Queue:
    """A server with a rate; `free_at_s` is when it has served all that it holds."""

    bytes_per_s: float
    limit_s: float
    free_at_s: float = -math.inf


@dataclass(slots=True)
class PairState:
    """What one ordered pair is given now, and what it carried."""

    latency_s: float
    queues: list[_Queue]
    connected: bool = True
    loss: float = 0.0
    bytes_carried: int = 0
    packets: int = 0
    drops: int = 0
    last_arrival_s: float = field(default=-math.inf)


class Shaper:
    """Packets in, packets out later.

    Parameters
    ----------
    latency_s, bytes_per_s : nested lists, shape (hosts, hosts)
        One way [s]; per direction [bytes/s], 0 for no link. Bytes are counted as a packet has them when it leaves the
        sender: one header for a segment of up to 64 KiB, so the rate is what an application gets.
    shared : list of (bytes_per_s, list of pairs)
        Capacities that several ordered pairs share.
    """

    def __init__(
        self,
        latency_s: list[list[float]],
        bytes_per_s: list[list[float]],
        shared: list[tuple[float, list[tuple[int, int]]]] = [],  # noqa: B006 - read only
        seed: int = 0,
    ) -> None:
        self._events: list[tuple[float, int, int, tuple[int, int], float, Any, int]] = []
        self._sequence = 0
        self._random = random.Random(seed)
        n = len(latency_s)
        self.pairs: dict[tuple[int, int], PairState] = {}
        for a in range(n):
            for b in range(n):
                if a != b:
                    rate, delay_s = bytes_per_s[a][b], latency_s[a][b]
                    round_trip_s = delay_s + latency_s[b][a]
                    queue = _Queue(rate if rate > 0 else math.inf, max(MIN_QUEUE_S, round_trip_s))
                    self.pairs[a, b] = PairState(delay_s, [queue], connected=rate > 0)
        for rate, members in shared:
            limit_s = max(self.pairs[tuple(pair)].queues[0].limit_s for pair in members)  # type: ignore[index]
            queue = _Queue(rate, limit_s)
            for pair in members:
                self.pairs[tuple(pair)].queues.append(queue)  # type: ignore[index]

    def change(
        self,
        source: int,
        target: int,
        *,
        latency_s: float | None = None,
        bytes_per_s: float | None = None,
        connected: bool | None = None,
        loss: float | None = None,
    ) -> None:
        """Change what a pair is given, from the next packet on; packets under way keep their time."""
        pair = self.pairs[source, target]
        if latency_s is not None:
            pair.latency_s = latency_s
            pair.queues[0].limit_s = max(MIN_QUEUE_S, latency_s + self.pairs[target, source].latency_s)
        if bytes_per_s is not None:
            pair.queues[0].bytes_per_s = bytes_per_s
        if connected is not None:
            pair.connected = connected
        if loss is not None:
            pair.loss = loss

    def offer(self, now_s: float, source: int, target: int, packet: Any, n_bytes: int) -> None:
        """Take a packet; it is dropped where the pair is cut, by chance (`loss`), or where the queue is full."""
        pair = self.pairs.get((source, target))
        if pair is None:
            return
        if not pair.connected or (pair.loss and self._random.random() < pair.loss):
            pair.drops += 1
            return
        self._serve(now_s, 0, (source, target), now_s, packet, n_bytes)

    def _serve(self, now_s: float, hop: int, key: tuple[int, int], served_s: float, packet: Any, n_bytes: int) -> None:
        pair = self.pairs[key]
        queue = pair.queues[hop]
        start_s = max(now_s, queue.free_at_s)
        if start_s - now_s > queue.limit_s:
            pair.drops += 1
            return
        queue.free_at_s = start_s + n_bytes / queue.bytes_per_s
        served_s = max(served_s, queue.free_at_s)
        self._sequence += 1
        if hop + 1 < len(pair.queues):
            event = (start_s, self._sequence, hop + 1, key, served_s, packet, n_bytes)
        else:
            arrival_s = max(served_s + pair.latency_s, pair.last_arrival_s)
            pair.last_arrival_s = arrival_s
            pair.bytes_carried += n_bytes
            pair.packets += 1
            event = (arrival_s, self._sequence, -1, key, served_s, packet, n_bytes)
        heapq.heappush(self._events, event)

    def next_s(self) -> float:
        """When `due` has something to do next; inf when nothing is under way."""
        return self._events[0][0] if self._events else math.inf

    def due(self, now_s: float) -> list[tuple[int, Any]]:
        """(target, packet) of all that has arrived by now, in order of arrival."""
        arrived = []
        events = self._events
        while events and events[0][0] <= now_s:
            time_s, _, hop, key, served_s, packet, n_bytes = heapq.heappop(events)
            if hop < 0:
                if self.pairs[key].connected:
                    arrived.append((key[1], packet))
                else:
                    self.pairs[key].drops += 1
            else:
                self._serve(time_s, hop, key, served_s, packet, n_bytes)
        return arrived
