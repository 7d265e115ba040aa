"""Gradients of regions exchanged message by message: what the price of their sums is held against."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Exchange:
    """Regions that each hold the whole model, and send one another the gradient of every layer as the runtime does.

    In two rounds: its part to who adds it up, and the sum of that to all the others; of two regions in one. A link
    sends what comes first first, at its rate, and what has left it arrives after its latency.

    Parameters
    ----------
    compute_s, backward_s : ndarray, shape (regions,)
        Of a step until the end of the last backward, and of that one, in which layers have their gradients one by one.
    layers : int
    part_s : ndarray, shape (regions, regions)
        [source, target] seconds of a part of all layers on each link.
    latency_s : ndarray, shape (regions, regions)
    update_s : float
    """

    compute_s: np.ndarray
    backward_s: np.ndarray
    layers: int
    part_s: np.ndarray
    latency_s: np.ndarray
    update_s: float
    ends_s: list[list[float]] = field(default_factory=list)
    """Of every region's steps, as far as they have ended."""

    def step_s(self, steps: int = 12) -> float:
        """Mean of the later half of so many steps; each region begins the next one when it has all sums."""
        self._play(steps)
        half = steps // 2
        ends_s = np.array(self.ends_s)
        return float((ends_s[:, -1] - ends_s[:, half - 1]).mean() / (steps - half))

    def sums_s(self) -> float:
        """Seconds until all have the sums of one step which all begin together."""
        self._play(1)
        return float(np.max(self.ends_s)) - self.update_s

    def _play(self, steps: int) -> None:
        n = len(self.compute_s)
        self.ends_s = [[] for _ in range(n)]
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._count, self._steps = 0, steps
        self._waiting: dict[tuple[int, int], deque[tuple[int, int, int]]] = defaultdict(deque)
        self._sending: set[tuple[int, int]] = set()
        self._parts: dict[tuple[int, int, int], int] = defaultdict(int)
        self._sums: dict[tuple[int, int, int], int] = defaultdict(int)
        self._done: dict[tuple[int, int], int] = defaultdict(int)
        for a in range(n):
            self._begin(0.0, a)
        while self._events:
            at_s, _, what, who = heapq.heappop(self._events)
            getattr(self, f"_{what}")(at_s, *who)

    def _at(self, at_s: float, what: str, *who: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, what, who))

    def _begin(self, at_s: float, a: int) -> None:
        begin_s = at_s + self.compute_s[a] - self.backward_s[a]
        for layer in range(self.layers):
            part = (layer + 1) / self.layers
            self._at(begin_s + part * self.backward_s[a], "gradient", a, len(self.ends_s[a]), layer)

    def _gradient(self, at_s: float, a: int, step: int, layer: int) -> None:
        for k in range(len(self.compute_s)):
            self._part(at_s, k, step, layer) if k == a else self._send(at_s, a, k, 1, step, layer)

    def _send(self, at_s: float, a: int, b: int, round_: int, step: int, layer: int) -> None:
        self._waiting[a, b].append((round_, step, layer))
        if (a, b) not in self._sending:
            self._next(at_s, a, b)

    def _next(self, at_s: float, a: int, b: int) -> None:
        self._sending.discard((a, b))
        if self._waiting[a, b]:
            self._sending.add((a, b))
            parts = 2 if len(self.compute_s) == 2 else 1  # two send one another all they have
            leaves_s = at_s + parts * self.part_s[a, b] / self.layers
            self._at(leaves_s + self.latency_s[a, b], "arrive", b, *self._waiting[a, b].popleft())
            self._at(leaves_s, "next", a, b)

    def _arrive(self, at_s: float, b: int, round_: int, step: int, layer: int) -> None:
        (self._part if round_ == 1 else self._sum)(at_s, b, step, layer)

    def _part(self, at_s: float, k: int, step: int, layer: int) -> None:
        """Region k has one more region's part of a layer that it adds up."""
        n = len(self.compute_s)
        self._parts[k, step, layer] += 1
        if self._parts[k, step, layer] == n:
            for b in range(n):
                if b == k or n == 2:
                    self._sum(at_s, k, step, layer)
                else:
                    self._send(at_s, k, b, 2, step, layer)

    def _sum(self, at_s: float, b: int, step: int, layer: int) -> None:
        """Region b has one more part of a layer's sum."""
        n = len(self.compute_s)
        self._sums[b, step, layer] += 1
        self._done[b, step] += self._sums[b, step, layer] == n
        if self._sums[b, step, layer] == n and self._done[b, step] == self.layers:
            self.ends_s[b].append(at_s + self.update_s)
            if len(self.ends_s[b]) < self._steps:
                self._begin(at_s + self.update_s, b)
