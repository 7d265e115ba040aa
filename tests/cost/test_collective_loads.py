"""Rings, crossbars and nodes against schedules played message by message (see `link_loads`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from fractions import Fraction

import numpy as np
import pytest
from link_loads import (
    ALPHA,
    LINK,
    PRIMES_AND_OTHERS,
    RATE,
    M,
    Network,
    Rounds,
    agree,
    both_ways_gather,
    circulant_gather,
    crossbar,
    cycle_loads,
    entry,
    gathered,
    halves,
    mirrored,
    reduced,
    ring_gather,
    ring_route,
    routed,
)

from polygon.cost import collectives as c
from polygon.domain.cluster import Link
from polygon.overhead.collective_table import collective_cell
from polygon.overhead.topologies import Topology


@pytest.mark.parametrize("n", PRIMES_AND_OTHERS)
def test_ring(n):
    """The ring passes deliver all blocks (all sums) in the time, the steps and the bytes of the table."""
    topology = Topology(kind="ring", ranks=n, link=LINK)
    rounds = ring_gather(n)
    assert all(mine == set(range(n)) for mine in gathered(n, rounds, lambda rank: {rank}))
    sums = reduced(n, mirrored(rounds), range(n))
    assert all(sums[rank][rank] == frozenset(range(n)) for rank in range(n))
    for op, schedule in (("all_gather", rounds), ("all_reduce", mirrored(rounds) + rounds)):
        network = Network(ring_route(n))
        network.play(schedule, M / n)
        agree(entry(op, topology, "ring"), network)
    assert c.ring_all_reduce_s(M, [ALPHA] * n, [RATE] * n) == pytest.approx(network.time_s)


@pytest.mark.parametrize("n", [n for n in PRIMES_AND_OTHERS if n > 2])
def test_ring_both_ways(n):
    """Both directions at once: half the bytes per link, half the rounds."""
    rounds = both_ways_gather(n)
    everything = set().union(*map(halves, range(n)))
    assert all(mine == everything for mine in gathered(n, rounds, halves))
    sums = reduced(n, mirrored(rounds), everything)
    assert all(sums[rank][block] == frozenset(range(n)) for rank in range(n) for block in halves(rank))
    network = Network(ring_route(n))
    network.play(mirrored(rounds) + rounds, M / n)
    agree(entry("all_reduce", Topology(kind="ring", ranks=n, link=LINK), "ring-both-ways"), network)


@pytest.mark.parametrize("n", PRIMES_AND_OTHERS)
def test_logarithmic_passes_for_any_number_of_ranks(n):
    """Bruck's all-gather and its mirror take ceil(log2 n) rounds and (n-1)/n of the buffer, prime n or not."""
    rounds = circulant_gather(n)
    assert len(rounds) == math.ceil(math.log2(n))
    assert all(mine == set(range(n)) for mine in gathered(n, rounds, lambda rank: {rank}))
    sums = reduced(n, mirrored(rounds), range(n))
    assert all(sums[rank][rank] == frozenset(range(n)) for rank in range(n))
    network = Network(crossbar)
    network.play(mirrored(rounds) + rounds, M / n)
    agree(entry("all_reduce", Topology(kind="switch", ranks=n, link=LINK), "circulant"), network, total=False)


@pytest.mark.parametrize("n", PRIMES_AND_OTHERS)
def test_halving_and_doubling(n):
    """Ranks beyond the power of two fold in and out; the rest exchange halves, quarters, ..."""
    power = 1 << (n.bit_length() - 1)
    blocks = range(power)
    rounds: Rounds = [[(i + power, i, frozenset(blocks)) for i in range(n - power)]] if n > power else []
    span, owned = power, {i: list(blocks) for i in range(power)}
    halving: Rounds = []
    while span > 1:
        half = span // 2
        messages, after = [], {}
        for i in range(power):
            partner = i ^ half
            low, high = owned[i][: len(owned[i]) // 2], owned[i][len(owned[i]) // 2 :]
            keep, give = (low, high) if i & half == 0 else (high, low)
            messages.append((i, partner, frozenset(give)))
            after[i] = keep
        halving.append(messages)
        owned, span = after, half
    sums = reduced(n, rounds + halving, blocks)
    assert all(sums[i][owned[i][0]] == frozenset(range(n)) for i in range(power))
    network = Network(crossbar)
    network.play(rounds + halving + mirrored(rounds + halving), M / power)
    cost = entry("all_reduce", Topology(kind="switch", ranks=n, link=LINK), "halving-doubling")
    agree(cost, network, total=False)
    assert sum(network.sent.values()) == pytest.approx(cost.link_bytes)


@pytest.mark.parametrize("n", PRIMES_AND_OTHERS)
def test_bruck_all_to_all(n):
    """Blocks hop by the binary digits of their distance; each rank sends one block per one-bit of 0..n-1."""
    at = {(source, target): source for source in range(n) for target in range(n)}
    rounds: Rounds = []
    bit = 1
    while bit < n:
        grouped = defaultdict(set)
        for (source, target), place in at.items():
            if (target - source) % n & bit:
                grouped[place].add((source, target, 1))
        rounds.append([(place, (place + bit) % n, frozenset(blocks)) for place, blocks in grouped.items()])
        for source, target in at:
            if (target - source) % n & bit:
                at[source, target] = (at[source, target] + bit) % n
        bit *= 2
    assert all(place == target for (_, target), place in at.items())
    network = Network(crossbar)
    network.play(rounds, M / n)
    agree(entry("all_to_all", Topology(kind="switch", ranks=n, link=LINK), "bruck"), network, total=False)


@pytest.mark.parametrize("n", [*PRIMES_AND_OTHERS, 25])
def test_all_to_all_on_a_ring(n):
    """Busiest link: (n-1)/2 of M one way round, n/8 (even) or (n^2-1)/8n (odd) the short way."""
    one_way: dict[Hashable, Fraction] = defaultdict(Fraction)
    for source in range(n):
        for distance in range(1, n):
            for i in range(distance):
                one_way[(source + i) % n] += Fraction(1, n)
    assert max(one_way.values()) == Fraction(n - 1, 2)
    topology = Topology(kind="ring", ranks=n, link=LINK)
    cost = entry("all_to_all", topology, "ring")
    assert cost.time_s == pytest.approx((n - 1) * ALPHA + float(max(one_way.values())) * M / RATE)
    assert cost.link_bytes == pytest.approx(float(sum(one_way.values())) * M)
    load = cycle_loads(n)
    assert c.cycle_load(n) == pytest.approx(float(max(load.values())))
    if n > 2:
        cost = entry("all_to_all", topology, "ring-both-ways")
        assert cost.time_s == pytest.approx(n // 2 * ALPHA + float(max(load.values())) * M / RATE)
        assert cost.link_bytes == pytest.approx(float(sum(load.values())) * M)


@pytest.mark.parametrize(("n", "root"), [(8, 1e9), (8, 0.5e9), (12, 3e9), (7, 1e9), (2, 0.25e9)])
def test_all_to_all_under_a_tree_of_switches(n, root):
    """The root carries floor(n/2) ceil(n/2) / n of M each way; the ports carry (n-1)/n."""

    def route(source: int, target: int) -> list[Hashable]:
        crossing = (source < n // 2) != (target < n // 2)
        return crossbar(source, target) + [("root", source < n // 2)] * crossing

    load = routed(n, route)
    slowest = max(float(part) * M / (root if link[0] == "root" else RATE) for link, part in load.items())
    cost = entry("all_to_all", Topology(kind="tree", ranks=n, link=LINK, root_bytes_per_s=root), "pairwise")
    assert cost.time_s == pytest.approx((n - 1) * ALPHA + slowest)


@pytest.mark.parametrize(("g", "nodes"), [(8, 2), (4, 4), (3, 5), (1, 6), (6, 1), (2, 7)])
def test_two_level_all_reduce(g, nodes):
    """Reduce-scatter inside, ring between, all-gather inside: right sums, and 2(n-1)/n of M per rank in all."""
    n = g * nodes
    inside: Rounds = [[] for _ in range(g - 1)]
    for node in range(nodes):
        for r, messages in enumerate(ring_gather(g)):
            inside[r] += [
                (node * g + a, node * g + b, frozenset(k for k in range(n) if k % g in block))
                for a, b, block in messages
            ]
    between: Rounds = [[] for _ in range(nodes - 1)]
    for rank in range(g):
        for r, messages in enumerate(ring_gather(nodes)):
            between[r] += [(a * g + rank, b * g + rank, frozenset(k * g + rank for k in bl)) for a, b, bl in messages]
    sums = reduced(n, mirrored(between + inside), range(n))
    assert all(sums[rank][rank] == frozenset(range(n)) for rank in range(n))
    assert all(mine == set(range(n)) for mine in gathered(n, between + inside, lambda rank: {rank}))
    slow = Link(latency_s=5e-6, bytes_per_s=1e8)
    network = Network(crossbar, lambda link: RATE)
    network.play(mirrored(inside) + inside, M / n)
    rails = Network(crossbar, lambda link: slow.bytes_per_s)
    rails.play(mirrored(between) + between, M / n, slow.latency_s)
    topology = Topology(kind="hierarchical", ranks=n, per_node=g, link=LINK, inter=slow)
    cost = entry("all_reduce", topology, "two-level-ring")
    assert cost.time_s == pytest.approx(network.time_s + rails.time_s)
    assert cost.sent_bytes == pytest.approx(network.sent[0] + rails.sent[0]) == pytest.approx(2 * (n - 1) / n * M)


def test_errors_of_the_earlier_tool_are_not_repeated():
    """16 ranks in nodes of 8 with one bandwidth: 1.875 M/B, not 1.0. All-gather on a 4x4 torus: 0.9375, not 0.375."""
    free = Link(latency_s=0.0, bytes_per_s=1.0)
    two = Topology(kind="hierarchical", ranks=16, per_node=8, link=free, inter=free)
    assert entry("all_reduce", two, "two-level-ring", 1.0).time_s == pytest.approx(1.875)
    torus = Topology(kind="torus", ranks=16, link=free, nx=4, ny=4)
    assert entry("all_gather", torus, "dimension-ordered", 1.0).time_s == pytest.approx(0.9375)


@pytest.mark.parametrize("hops", [1, 2, 5, 15])
@pytest.mark.parametrize("n_bytes", [1.0, 1e3, 1e6])
def test_pipeline_uses_the_best_whole_number_of_pieces(hops, n_bytes):
    """Pieces through a chain, event by event, for every number of pieces: the formula finds the least time."""

    def played(pieces: int) -> float:
        arrived = [0.0] * pieces
        for _ in range(hops):
            free = 0.0
            for j in range(pieces):
                free = max(free, arrived[j]) + ALPHA + n_bytes / pieces / RATE
                arrived[j] = free
        return arrived[-1]

    least = min(played(k) for k in range(1, min(int(n_bytes), 200) + 1))
    assert c.pipelined_s(hops, n_bytes, ALPHA, RATE) == pytest.approx(least)


def test_pieces_of_one_message_are_a_number_and_of_many_an_array():
    """sqrt(3 x 12e-3 / (1 x 1e-3)) = 6 pieces of a message, and of a shorter one half as many; a byte is one piece."""
    one = c.best_pieces(3, 1, 1e6, 1e-3, 12e-3)
    many = c.best_pieces(3, 1, np.array([1e6, 1e6, 1.0]), 1e-3, np.array([12e-3, 3e-3, 12e-3]))
    assert isinstance(one, float) and one == 6
    assert many.tolist() == [6, 3, 1]


@pytest.mark.parametrize("far", [(5e-6, 25e9), (0.0, 25e9), (5e-6, 3e12), (1e-3, 1e6)])
@pytest.mark.parametrize(("per_node", "nodes"), [(1, 4), (4, 1), (4, 2), (8, 8), (3, 65)])
@pytest.mark.parametrize("n_bytes", [1.0, 1e5, 1e9])
def test_pieces_are_on_both_levels_at_once(n_bytes, per_node, nodes, far):
    """As a flow shop of these pieces; no number of equal ones is better, the longer level alone never is."""
    near = (3e-6, 3e11)

    def ends_s(pieces):
        """Of a flow shop: inside in order, then between in order."""
        inside_s = between_s = 0.0
        for piece in pieces:
            inside_s += c.circulant_pass_s(piece, per_node, *near)
            between_s = max(inside_s, between_s) + c.circulant_pass_s(piece / per_node, nodes, *far)
        return between_s

    found = c.pipelined_levels_pass_s(n_bytes, per_node, nodes, near, far)
    alone = [c.circulant_pass_s(n_bytes, per_node, *near), c.circulant_pass_s(n_bytes / per_node, nodes, *far)]
    assert max(alone) * (1 - 1e-9) <= found.seconds <= sum(alone) * (1 + 1e-9)
    for k in [n for n in (1, found.pieces - 1, found.pieces, found.pieces + 1, 17, 4096) if 1 <= n <= n_bytes]:
        assert found.seconds <= ends_s([n_bytes / k] * k) * (1 + 1e-9)
    if found.pieces < 5000:
        assert found.seconds == pytest.approx(ends_s(pieces_of(found, n_bytes, per_node, nodes, near, far)))


def pieces_of(found, n_bytes, per_node, nodes, near, far):
    """Equal ones, or from the first on each as long inside as the one before is between the nodes."""
    if found.least_bytes == n_bytes / found.pieces:
        return [found.least_bytes] * found.pieces
    pieces = [found.least_bytes]
    for _ in range(found.pieces - 1):
        between_s = c.circulant_pass_s(pieces[-1] / per_node, nodes, *far)
        rate_s = c.circulant_pass_s(1.0, per_node, 0.0, near[1])
        pieces.append((between_s - c.circulant_pass_s(0.0, per_node, *near)) / rate_s)
    assert sum(pieces) == pytest.approx(n_bytes)
    return pieces


@pytest.mark.parametrize(("ranks", "per_node"), [(16, 4), (64, 8), (256, 8)])
def test_sums_of_a_gigabyte_come_within_a_tenth_of_the_bound(ranks, per_node):
    """Pieces that grow fill the slower level in no time; equal ones took 1.10 to 1.12 times the bound."""
    near, far = Link(latency_s=3e-6, bytes_per_s=3e11), Link(latency_s=5e-6, bytes_per_s=2.5e10)
    topology = Topology(kind="hierarchical", ranks=ranks, per_node=per_node, link=near, inter=far)
    cell = collective_cell("all_reduce", topology, 1e9)
    assert cell.chosen.algorithm == "two-level-pipelined"
    assert cell.chosen.time_s < 1.1 * cell.bound.time_s


def test_large_sums_over_nodes_of_several_ranks_come_within_a_tenth_of_the_bound():
    """140 GB on two nodes of four: a level after the other takes 1.5 times the bound, pieces on both hardly more."""
    near, far = Link(latency_s=3e-6, bytes_per_s=3e11), Link(latency_s=5e-6, bytes_per_s=2.5e10)
    topology = Topology(kind="hierarchical", ranks=8, per_node=4, link=near, inter=far)
    cell = collective_cell("all_reduce", topology, 140e9)
    assert cell.chosen.algorithm == "two-level-pipelined"
    assert cell.chosen.time_s < 1.1 * cell.bound.time_s
    assert entry("all_reduce", topology, "two-level-ring", 140e9).time_s > 1.49 * cell.bound.time_s
