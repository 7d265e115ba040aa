"""Algorithms on a ring, a tree and a switch."""

from __future__ import annotations

import math
from dataclasses import replace

from polygon.cost import collectives as c
from polygon.overhead.collective_algorithm import (
    BRUCK,
    LOADS,
    NCCL,
    SANDERS,
    THAKUR,
    TRAEFF,
    Entries,
    binomial,
    both_ways,
    chain,
    entry,
    flat_symbols,
    ring_pass,
    scatter_bytes,
    uniform,
)
from polygon.overhead.topologies import CONCURRENT_MESSAGE_S, IN_SWITCH_EFFICIENCY, Topology

# ----------------------------------------------------------------------------------------------------------- ring


def on_ring(op: str, t: Topology, m: float) -> Entries:
    n = t.ranks
    args, numbers = uniform(t, m), flat_symbols(t, m)
    levels = c.log2_ceil(n)
    if op in ("all_gather", "reduce_scatter", "all_reduce"):
        twice = op == "all_reduce"
        entries = [ring_pass(m, t, twice=twice)]
        if n > 2:
            entries.append(both_ways("ring-both-ways", m, t, twice=twice))
        return [*entries, binomial(m, t, reduce_first=True)] if twice else entries
    if op == "broadcast":
        entries = [chain("chain", n - 1, m, t, total=(n - 1) * m), binomial(m, t)]
        if n > 2:
            entries.append(chain("chain-both-ways", n - 1, m, t, ways=2, total=(n - 1) * m))
            entries.append(chain("chain-from-the-middle", n // 2, m, t, total=(n - 1) * m))
        time_s = c.scatter_all_gather_broadcast_s(*args, ring=True)
        text = "(L + n - 1) * α + 2 * (n - 1) * M / (n * B)"
        sent = 2 * (n - 1) / n * m
        total = scatter_hops(n) * m / n + (n - 1) * m
        both = {**numbers, "L": levels}
        entries.append(entry("scatter-all-gather", time_s, levels + n - 1, sent, text, both, THAKUR, total=total))
        return entries
    own = (n - 1) / n * m
    time_s = c.ring_all_to_all_s(*args)
    total = n * (n - 1) / 2 * m
    text = "(n - 1) * α + (n - 1) * M / (2 * B)"
    entries = [entry("ring", time_s, n - 1, own, text, numbers, LOADS, total=total, transit=total / n - own)]
    if n > 2:
        load = c.cycle_load(n)
        time_s = n // 2 * t.link.latency_s + load * m / t.link.bytes_per_s
        text = "floor(n / 2) * α + n * M / (8 * B)" if n % 2 == 0 else "floor(n / 2) * α + (n**2 - 1) * M / (8 * n * B)"
        both_total = 2 * n * load * m
        transit = both_total / n - own
        entries.append(
            entry("ring-both-ways", time_s, n // 2, own, text, numbers, LOADS, total=both_total, transit=transit)
        )
    return entries


def scatter_hops(ranks: int) -> int:
    """Block-hops of a binomial scatter along a line of ranks (block of rank j travels j links)."""
    return ranks * (ranks - 1) // 2


# --------------------------------------------------------------------------------------- tree and switch (crossbar)


def _under_root(t: Topology) -> tuple[Topology, Topology]:
    """The network as algorithms feel it that cross a narrow root once per round, and half of the ranks per round.

    Both are the worst round taken for all rounds; a root as wide as the ranks below it is not felt.
    """
    if t.kind != "tree" or not math.isfinite(t.root_bytes_per_s):
        return t, t

    def at_most(bytes_per_s: float) -> Topology:
        return replace(t, link=replace(t.link, bytes_per_s=min(t.link.bytes_per_s, bytes_per_s)))

    return at_most(t.root_bytes_per_s), at_most(t.root_bytes_per_s / max(1, t.ranks // 2))


def _crossbar_reduce(op: str, t: Topology, m: float) -> Entries:
    """All-reduce, all-gather and reduce-scatter where any two ranks reach each other."""
    in_order, t = _under_root(t)
    n, levels = t.ranks, c.log2_ceil(t.ranks)
    numbers = {**flat_symbols(t, m), "L": levels}
    args = uniform(t, m)
    if op != "all_reduce":
        time_s = c.circulant_pass_s(*args)
        name, source = ("bruck", BRUCK) if op == "all_gather" else ("circulant", TRAEFF)
        text = "L * α + (n - 1) * M / (n * B)"
        sent = (n - 1) / n * m
        return [ring_pass(m, in_order), entry(name, time_s, levels, sent, text, numbers, source, ranks=n)]
    power, folded = 2 ** c.log2_floor(n), n > 2 ** c.log2_floor(n)
    sent = 2 * (n - 1) / n * m
    text = "2 * L * α + 2 * (n - 1) * M / (n * B)"
    circulant = entry("circulant", c.circulant_all_reduce_s(*args), 2 * levels, sent, text, numbers, TRAEFF, ranks=n)
    halving = entry(
        "halving-doubling",
        c.halving_doubling_all_reduce_s(*args),
        2 * c.log2_floor(n) + 2 * folded,
        2 * (power - 1) / power * m + folded * m,
        "2 * l * α + 2 * (q - 1) * M / (q * B)" + " + 2 * (α + M / B)" * folded,
        {**flat_symbols(t, m), "q": power, "l": c.log2_floor(n)},
        THAKUR,
        total=2 * (power - 1) * m + 2 * (n - power) * m,
    )
    alpha, rate = t.link.latency_s, t.link.bytes_per_s
    k = c.best_pieces(2 * levels, 2, m / 2, alpha, m / (2 * rate))
    double = entry(
        "double-tree",
        c.double_tree_all_reduce_s(*args),
        2 * (2 * levels + 2 * k) * (n > 1),
        2 * m * (n > 1),
        "2 * (2 * L + 2 * k) * (α + M / (2 * k * B))" if n > 1 else "0",
        {**numbers, "k": k},
        SANDERS,
        total=2 * (n - 1) * m,
    )
    return [ring_pass(m, in_order, twice=True), circulant, halving, double, binomial(m, in_order, reduce_first=True)]


def _crossbar_broadcast(t: Topology, m: float) -> Entries:
    in_order, t = _under_root(t)
    n, levels = t.ranks, c.log2_ceil(t.ranks)
    alpha, rate = t.link.latency_s, t.link.bytes_per_s
    k = c.best_pieces(2 * levels, 2, m / 2, alpha, m / (2 * rate))
    two = entry(
        "two-tree",
        c.two_tree_broadcast_s(*uniform(t, m)),
        (2 * levels + 2 * k) * (n > 1),
        m,
        "(2 * L + 2 * k) * (α + M / (2 * k * B))" if n > 1 else "0",
        {**flat_symbols(t, m), "L": levels, "k": k},
        SANDERS,
        total=(n - 1) * m,
    )
    scatter = entry(
        "scatter-all-gather",
        c.scatter_all_gather_broadcast_s(*uniform(t, m)),
        2 * levels,
        2 * (n - 1) / n * m,
        "2 * L * α + 2 * (n - 1) * M / (n * B)",
        {**flat_symbols(t, m), "L": levels},
        THAKUR,
        total=(scatter_bytes(n) + n - 1) * m,
    )
    return [chain("chain", n - 1, m, in_order, total=(n - 1) * m), two, binomial(m, in_order), scatter]


def _crossbar_all_to_all(t: Topology, m: float) -> Entries:
    n, levels = t.ranks, c.log2_ceil(t.ranks)
    alpha, rate = t.link.latency_s, t.link.bytes_per_s
    blocks = c.bruck_blocks(n)
    own = (n - 1) / n * m
    pair_s, pair = c.pairwise_all_to_all_s(*uniform(t, m)), "(n - 1) * α + (n - 1) * M / (n * B)"
    bruck_s, bruck = c.bruck_all_to_all_s(*uniform(t, m)), "L * α + W * M / (n * B)"
    numbers: dict[str, float] = {**flat_symbols(t, m), "L": levels, "W": blocks}
    if t.kind == "tree" and math.isfinite(t.root_bytes_per_s):
        numbers |= {"Br": t.root_bytes_per_s}
        over = " + (n - 1) * α"
        pair = f"max((n - 1) * M / (n * B), floor(n / 2) * ceil(n / 2) * M / (n * Br)){over}"
        pair_s = max(own / rate, c.line_load(n) * m / t.root_bytes_per_s) + (n - 1) * alpha
        # In every round of Bruck's algorithm all ranks may send across the root at once.
        bruck = "L * α + W * M / n * max(1 / B, floor(n / 2) / Br)"
        bruck_s = levels * alpha + blocks * m / n * max(1 / rate, n // 2 / t.root_bytes_per_s)
    return [
        entry("pairwise", pair_s, n - 1, own, pair, numbers, THAKUR, ranks=n),
        entry("bruck", bruck_s, levels, blocks * m / n, bruck, numbers, BRUCK, ranks=n),
    ]


def on_tree(op: str, t: Topology, m: float) -> Entries:
    if op == "broadcast":
        return _crossbar_broadcast(t, m)
    return _crossbar_all_to_all(t, m) if op == "all_to_all" else _crossbar_reduce(op, t, m)


def on_switch(op: str, t: Topology, m: float) -> Entries:
    entries = on_tree(op, t, m)
    n, alpha, rate = t.ranks, t.link.latency_s, t.link.bytes_per_s
    numbers = {**flat_symbols(t, m), "o": CONCURRENT_MESSAGE_S}
    share = (n - 1) / n * m
    if op in ("all_reduce", "all_gather", "reduce_scatter") and n > 1:
        twice = op == "all_reduce"
        time_s = (1 + twice) * (alpha + (n - 2) * CONCURRENT_MESSAGE_S + share / rate)
        text = f"{'2 * ' * twice}(α + (n - 2) * o + (n - 1) * M / (n * B))"
        entries.append(entry("direct", time_s, 1 + twice, (1 + twice) * share, text, numbers, NCCL, ranks=n))
    if t.in_network and op in ("all_reduce", "broadcast") and n > 1:
        efficiency = IN_SWITCH_EFFICIENCY if op == "all_reduce" else 1.0
        senders = n if op == "all_reduce" else 1
        time_s = alpha + m / (efficiency * rate)
        numbers = {**flat_symbols(t, m), "e": efficiency}
        entries.append(entry("in-switch", time_s, 1, m, "α + M / (e * B)", numbers, NCCL, ranks=senders))
    return entries
