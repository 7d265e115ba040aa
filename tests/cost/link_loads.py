"""Brute force: schedules are played message by message over links, checked for their result, and timed by link load.

A message is a set of blocks from one rank to another in one round; it occupies every link on its way. A round takes the
latency and then as long as its busiest link. Nothing here uses the formulas under test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction

import pytest

from polygon.domain.cluster import Link
from polygon.overhead.collective_algorithm import AlgorithmCost
from polygon.overhead.collective_table import collective_cell
from polygon.overhead.topologies import Topology

M, ALPHA, RATE = 720720.0, 3e-6, 1e9
Message = tuple[int, int, frozenset[Hashable]]
Rounds = list[list[Message]]
Route = Callable[[int, int], list[Hashable]]
PRIMES_AND_OTHERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16)


class Network:
    """Loads of a schedule on links with one rate (or a rate by link)."""

    def __init__(self, route: Route, rate: Callable[[Hashable], float] = lambda link: RATE) -> None:
        self.route, self.rate = route, rate
        self.time_s = 0.0
        self.sent: dict[int, float] = defaultdict(float)
        self.links: dict[Hashable, float] = defaultdict(float)

    def play(self, rounds: Rounds, block_bytes: float, alpha: float = ALPHA) -> float:
        """Seconds of the rounds one after the other; loads are added up."""
        total_s = 0.0
        for messages in rounds:
            load: dict[Hashable, float] = defaultdict(float)
            for source, target, blocks in messages:
                size = sum(block[-1] if isinstance(block, tuple) else 1 for block in blocks) * block_bytes
                self.sent[source] += size
                for link in self.route(source, target):
                    load[link] += size
                    self.links[link] += size
            total_s += alpha + max(size / self.rate(link) for link, size in load.items())
        self.time_s += total_s
        return total_s


def crossbar(source: int, target: int) -> list[Hashable]:
    return [("out", source), ("in", target)]


def ring_route(n: int) -> Route:
    """Links of a cycle, the short way; two ranks share one link."""

    def route(source: int, target: int) -> list[Hashable]:
        forward = (target - source) % n
        step = 1 if forward <= n - forward else -1
        hops = min(forward, n - forward)
        return [((source + step * i) % n, (source + step * (i + 1)) % n) for i in range(hops)]

    return route


def line_route(source: int, target: int) -> list[Hashable]:
    step = 1 if target > source else -1
    return [(i, i + step) for i in range(source, target, step)]


def grid_route(nx: int, side_route: Callable[[int], Route], ny: int) -> Route:
    """Along the row, then along the column."""
    rows, columns = side_route(nx), side_route(ny)

    def route(source: int, target: int) -> list[Hashable]:
        (y0, x0), (y1, x1) = divmod(source, nx), divmod(target, nx)
        way: list[Hashable] = [("row", y0, *link) for link in rows(x0, x1)] if x0 != x1 else []
        return way + ([("column", x1, *link) for link in columns(y0, y1)] if y0 != y1 else [])

    return route


def gathered(n: int, rounds: Rounds, blocks_of: Callable[[int], set[Hashable]]) -> list[set[Hashable]]:
    """Play an all-gather or broadcast; a rank may only send what it has."""
    have = [set(blocks_of(rank)) for rank in range(n)]
    for messages in rounds:
        for source, _, blocks in messages:
            assert blocks <= have[source]
        for _, target, blocks in messages:
            have[target] |= blocks
    return have


def reduced(n: int, rounds: Rounds, blocks: Iterable[Hashable]) -> list[dict[Hashable, frozenset[int]]]:
    """Play a reduction: a message adds the sender's partial sums to the target's; no contribution may count twice."""
    held = [{block: frozenset([rank]) for block in blocks} for rank in range(n)]
    for messages in rounds:
        before = [dict(mine) for mine in held]
        for source, target, moved in messages:
            for block in moved:
                assert not held[target][block] & before[source][block]
                held[target][block] |= before[source][block]
    return held


def ring_gather(n: int, order: list[int] | None = None) -> Rounds:
    """In round r every rank passes on the block that it got in the round before."""
    place = order or list(range(n))
    return [[(place[i], place[(i + 1) % n], frozenset([place[(i - r) % n]])) for i in range(n)] for r in range(n - 1)]


def mirrored(rounds: Rounds) -> Rounds:
    """A reduce-scatter is an all-gather played backwards with every message turned round."""
    return [[(target, source, blocks) for source, target, blocks in messages] for messages in reversed(rounds)]


def both_ways_gather(n: int) -> Rounds:
    """Blocks travel both ways, each to the ranks that are nearer on that way; the opposite rank gets two halves."""
    rounds: Rounds = []
    for r in range(n // 2):
        last = n % 2 == 0 and r == n // 2 - 1
        messages: list[Message] = []
        for i in range(n):
            for way in (1, -1):
                origin = (i - way * r) % n
                halves = [(origin, 0, 0.5), (origin, 1, 0.5)]
                kept = halves[:1] if way == 1 else halves[1:]
                messages.append((i, (i + way) % n, frozenset(kept if last else halves)))
        rounds.append(messages)
    return rounds


def halves(rank: int) -> set[Hashable]:
    return {(rank, 0, 0.5), (rank, 1, 0.5)}


def circulant_gather(n: int) -> Rounds:
    """Bruck: in round i a rank fetches from 2**i further on all blocks that it still lacks there."""
    rounds, have = [], 1
    while have < n:
        count = min(have, n - have)
        rounds.append([((i + have) % n, i, frozenset((i + have + j) % n for j in range(count))) for i in range(n)])
        have += count
    return rounds


def agree(cost: AlgorithmCost, network: Network, *, total: bool = True) -> None:
    assert network.time_s == pytest.approx(cost.time_s, rel=1e-12)
    assert max(network.sent.values()) == pytest.approx(cost.sent_bytes)
    if total:
        assert sum(network.links.values()) == pytest.approx(cost.link_bytes)


def entry(op: str, topology: Topology, name: str, n_bytes: float = M) -> AlgorithmCost:
    return collective_cell(op, topology, n_bytes).only((name,)).chosen


LINK = Link(latency_s=ALPHA, bytes_per_s=RATE)


def routed(n: int, route: Route) -> dict[Hashable, Fraction]:
    """Loads (in units of M) when every rank sends M/n to every other at once."""
    load: dict[Hashable, Fraction] = defaultdict(Fraction)
    for source in range(n):
        for target in range(n):
            for link in route(source, target) if source != target else []:
                load[link] += Fraction(1, n)
    return load


def cycle_loads(n: int) -> dict[Hashable, Fraction]:
    """All-to-all on a cycle, the short way; blocks between opposite ranks go half each way."""
    load: dict[Hashable, Fraction] = defaultdict(Fraction)
    for source in range(n):
        for distance in range(1, n):
            ways = {1: Fraction(1)} if 2 * distance < n or n == 2 else {-1: Fraction(1)}
            if 2 * distance == n > 2:
                ways = {1: Fraction(1, 2), -1: Fraction(1, 2)}
            for way, part in ways.items():
                hops = distance if way == 1 else n - distance
                for i in range(hops):
                    load[(source + way * i) % n, (source + way * (i + 1)) % n] += part / n
    return load
