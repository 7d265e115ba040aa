"""Algorithms on nodes of several ranks: two bandwidths, two latencies."""

from __future__ import annotations

from polygon.cost import collectives as c
from polygon.overhead.collective_algorithm import (
    BLUECONNECT,
    CHAN,
    LOADS,
    MEGATRON,
    NCCL,
    PXN,
    THAKUR,
    AlgorithmCost,
    Entries,
    entry,
    scatter_bytes,
)
from polygon.overhead.topologies import Topology

# ---------------------------------------------------------------------------------------------------- hierarchical


def _two_level_numbers(t: Topology, m: float) -> dict[str, float]:
    assert t.inter is not None
    levels = {"L": c.log2_ceil(t.nodes), "Lg": c.log2_ceil(t.per_node)}
    fast, slow = t.link, t.inter
    links = {"α1": fast.latency_s, "B1": fast.bytes_per_s, "α2": slow.latency_s, "B2": slow.bytes_per_s}
    return {"n": t.ranks, "g": t.per_node, "N": t.nodes, "M": m, **links, **levels}


def _pair(t: Topology) -> tuple[tuple[float, float], tuple[float, float]]:
    assert t.inter is not None
    return (t.link.latency_s, t.link.bytes_per_s), (t.inter.latency_s, t.inter.bytes_per_s)


def on_nodes(op: str, t: Topology, m: float) -> Entries:
    if op == "broadcast":
        return _hierarchical_broadcast(t, m)
    if op == "all_to_all":
        return _hierarchical_all_to_all(t, m)
    n, g, nodes = t.ranks, t.per_node, t.nodes
    intra, inter = _pair(t)
    numbers = _two_level_numbers(t, m)
    times = 2 if op == "all_reduce" else 1
    lead = "2 * " * (times == 2)
    sent = times * (n - 1) / n * m
    inside = "(g - 1) * (α1 + M / (g * B1))"
    ring_s = times * c.hierarchical_pass_s(m, g, nodes, intra, inter)
    log_s = times * c.hierarchical_pass_s(m, g, nodes, intra, inter, logarithmic=True)
    flat_s = times * c.flat_ring_pass_s(m, g, nodes, intra, inter)
    ring = f"{lead}({inside} + (N - 1) * (α2 + M / (n * B2)))"
    log = f"{lead}({inside} + L * α2 + (N - 1) * M / (n * B2))"
    rate = c.flat_ring_bytes_per_s(g, nodes, intra[1], inter[1])
    flat = f"{lead}((n - N) * α1 + (N - 1) * α2 + (n - 1) * M / (n * Bf))"
    steps = times * (g - 1 + nodes - 1)
    entries = [
        entry("two-level-ring", ring_s, steps, sent, ring, numbers, BLUECONNECT, ranks=n),
        entry("two-level-log", log_s, times * (g - 1 + c.log2_ceil(nodes)), sent, log, numbers, BLUECONNECT, ranks=n),
        entry("flat-ring", flat_s, times * (n - 1), sent, flat, {**numbers, "Bf": rate}, NCCL, ranks=n),
    ]
    return entries + ([_in_pieces(times, t, m)] if min(g, nodes) > 1 else [])


def _in_pieces(times: int, t: Topology, m: float) -> AlgorithmCost:
    """Both levels at once, each with another piece."""
    n, g, nodes = t.ranks, t.per_node, t.nodes
    intra, inter = _pair(t)
    found = c.pipelined_levels_pass_s(m, g, nodes, intra, inter)
    k = found.pieces
    near, far = "Lg * α1 + (g - 1) * {} / (g * B1)", "L * α2 + (N - 1) * {} / (n * B2)"
    filled, busy = (near, far) if found.far_always_busy else (far, near)
    formula = f"{'2 * ' * (times == 2)}({filled.format('c')} + k * {busy.format('M')})"
    inside, between = int(c.log2_ceil(g)), int(c.log2_ceil(nodes))
    steps = inside + k * between if found.far_always_busy else between + k * inside
    sent, numbers = times * (n - 1) / n * m, {**_two_level_numbers(t, m), "k": k, "c": found.least_bytes}
    seconds = times * found.seconds
    return entry("two-level-pipelined", seconds, times * steps, sent, formula, numbers, BLUECONNECT, ranks=n)


def _hierarchical_broadcast(t: Topology, m: float) -> Entries:
    n, g, nodes = t.ranks, t.per_node, t.nodes
    (a1, b1), (a2, b2) = _pair(t)
    numbers = _two_level_numbers(t, m)
    hops = nodes - 1
    k = c.best_pieces(max(hops - 1, 0), 1, m / g, a2, m / (g * b2)) if hops else 0
    rail_s = 2 * c.ring_pass_s(m, g, a1, b1) + c.pipelined_s(hops, m / g, a2, b2)
    rails = "2 * (g - 1) * (α1 + M / (g * B1))" + " + (N - 2 + k) * (α2 + M / (g * k * B2))" * (hops > 0)
    rail_steps = 2 * (g - 1) + (hops - 1 + k if hops else 0)
    rail_total = (g - 1) / g * m + hops * m + nodes * (g - 1) * m
    levels, inside = c.log2_ceil(nodes), c.log2_ceil(g)
    lead_s = c.binomial_s(m, nodes, a2, b2) + c.scatter_all_gather_broadcast_s(m, g, a1, b1, ring=True)
    leaders = "L * (α2 + M / B2) + (Lg + g - 1) * α1 + 2 * (g - 1) * M / (g * B1)"
    lead_sent = levels * m + 2 * (g - 1) / g * m
    lead_total = hops * m + nodes * (scatter_bytes(g) + g - 1) * m
    lead_steps = levels + inside + g - 1
    alpha, rate = max(a1 * (g > 1), a2 * (nodes > 1)), c.flat_ring_bytes_per_s(g, nodes, b1, b2)
    pieces = c.best_pieces(max(n - 2, 0), 1, m, alpha, m / rate)
    chain_s = c.pipelined_s(n - 1, m, alpha, rate)
    chain = "(n - 2 + k) * (αf + M / (k * Bf))" if n > 1 else "0"
    chain_numbers = {**numbers, "k": pieces, "αf": alpha, "Bf": rate}
    rails_sent = (2 * (g - 1) + 1 * (hops > 0)) / g * m
    return [
        entry("rails", rail_s, rail_steps, rails_sent, rails, {**numbers, "k": k}, CHAN, total=rail_total),
        entry("node-leaders", lead_s, lead_steps, lead_sent, leaders, numbers, CHAN, total=lead_total),
        entry("flat-chain", chain_s, (n - 2 + pieces) * (n > 1), m, chain, chain_numbers, NCCL, total=(n - 1) * m),
    ]


def _hierarchical_all_to_all(t: Topology, m: float) -> Entries:
    n, g, nodes = t.ranks, t.per_node, t.nodes
    (a1, b1), (a2, b2) = _pair(t)
    numbers = _two_level_numbers(t, m)
    inside_s = (g - 1) * (a1 + m / (n * b1))
    direct_s = max(inside_s, (n - g) * a2 + (nodes - 1) / nodes * m / b2)
    direct = "max((g - 1) * (α1 + M / (n * B1)), (n - g) * α2 + (N - 1) * M / (N * B2))"
    two_s = c.ring_pass_s(m, g, a1, b1) + c.ring_pass_s(m, nodes, a2, b2)
    two = "(g - 1) * (α1 + M / (g * B1)) + (N - 1) * (α2 + M / (N * B2))"
    phases = ((g - 1) / g + (nodes - 1) / nodes) * m
    transit = phases - (n - 1) / n * m
    entries = [
        entry("direct", direct_s, max(g - 1, n - g), (n - 1) / n * m, direct, numbers, THAKUR, ranks=n),
        entry(
            "two-phase",
            two_s,
            g - 1 + nodes - 1,
            phases - transit,
            two,
            numbers,
            PXN,
            total=n * phases,
            transit=transit,
        ),
    ]
    return entries


def between_nodes(t: Topology, m: float, shards: int) -> Entries:
    (a1, b1), (a2, b2) = _pair(t)
    numbers = {**_two_level_numbers(t, m), "t": shards}
    if t.nodes == 1:
        return [entry("inside-the-node", a1 + m / b1, 1, m, "α1 + M / B1", numbers, LOADS)]
    entries = [entry("between-nodes", a2 + m / b2, 1, m, "α2 + M / B2", numbers, LOADS)]
    if shards > 1:
        time_s = c.point_to_point_s(m / shards, a2, b2) + c.ring_pass_s(m, shards, a1, b1)
        text = "α2 + M / (t * B2) + (t - 1) * (α1 + M / (t * B1))"
        total = m + (shards - 1) * m
        entries.append(entry("scatter-gather", time_s, shards, m, text, numbers, MEGATRON, total=total))
    return entries
