"""One algorithm's cost, and the building blocks that several topologies share.

Every algorithm carries its formula as an expression of the symbols it lists (`formula` and `numbers`), so that it can
be printed, filled in and checked: evaluated, it gives `time_s`. Symbols: n ranks, M bytes, α latency [s], B bandwidth
[bytes/s], L = ceil(log2 n), k pieces; g ranks per node, N nodes, α1 B1 inside, α2 B2 between nodes; X, Y sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polygon.cost import collectives as c
from polygon.overhead.topologies import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmCost:
    """One algorithm for one operation on one topology."""

    algorithm: str
    time_s: float
    steps: int
    """Messages one after another on the longest way."""
    sent_bytes: float
    """That the busiest rank puts out of its own account."""
    link_bytes: float
    """Sum over all links (a crossbar counts as one link per message)."""
    transit_bytes: float = 0.0
    """That the busiest rank passes on for others."""
    formula: str
    numbers: Mapping[str, float]
    source: str


CHAN = "Chan et al. 2007"
THAKUR = "Thakur, Rabenseifner and Gropp 2005"
PATARASUK = "Patarasuk and Yuan 2009"
SANDERS = "Sanders, Speck and Träff 2009"
BRUCK = "Bruck et al. 1997"
TRAEFF = "Träff 2024"
JAIN = "Jain and Sabharwal 2010"
KUMAR = "Kumar and Jouppi 2020"
BLUECONNECT = "Cho et al. 2019 (BlueConnect)"
NCCL = "NCCL tuning model"
MEGATRON = "Narayanan et al. 2021"
PXN = "Rajbhandari et al. 2022 (DeepSpeed-MoE)"
LOADS = "link loads"
VTRAIN = "nccl-tests tables of vTrain, SimAI's between nodes"


def entry(
    algorithm: str,
    time_s: float,
    steps: float,
    sent: float,
    formula: str,
    numbers: Mapping[str, float],
    source: str,
    *,
    total: float | None = None,
    transit: float = 0.0,
    ranks: int = 1,
) -> AlgorithmCost:
    """One entry; `total` defaults to every rank sending the same."""
    return AlgorithmCost(
        algorithm=algorithm,
        time_s=float(time_s),
        steps=int(steps),
        sent_bytes=float(sent),
        link_bytes=float(ranks * sent if total is None else total),
        transit_bytes=float(transit),
        formula=formula,
        numbers=dict(numbers),
        source=source,
    )


Entries = list[AlgorithmCost]


def flat_symbols(topology: Topology, n_bytes: float) -> dict[str, float]:
    return {"n": topology.ranks, "M": n_bytes, "α": topology.link.latency_s, "B": topology.link.bytes_per_s}


def uniform(topology: Topology, n_bytes: float) -> tuple[float, int, float, float]:
    return n_bytes, topology.ranks, topology.link.latency_s, topology.link.bytes_per_s


def chain(name: str, hops: int, n_bytes: float, topology: Topology, *, ways: int = 1, total: float) -> AlgorithmCost:
    """A pipelined broadcast over branches of separate links, `ways` of them carrying a part each."""
    alpha, rate = topology.link.latency_s, topology.link.bytes_per_s
    k = c.best_pieces(max(hops - 1, 0), 1, n_bytes / ways, alpha, n_bytes / (ways * rate)) if hops else 0
    numbers = {"h": hops, "k": k, "w": ways, "M": n_bytes, "α": alpha, "B": rate}
    formula = "(h - 1 + k) * (α + M / (w * k * B))" if hops else "0"
    time_s = c.pipelined_s(hops, n_bytes / ways, alpha, rate)
    return entry(name, time_s, hops - 1 + k if hops else 0, n_bytes, formula, numbers, CHAN, total=total)


def binomial(n_bytes: float, topology: Topology, *, reduce_first: bool = False) -> AlgorithmCost:
    n, times = topology.ranks, 2 if reduce_first else 1
    levels = c.log2_ceil(n)
    time_s = times * c.binomial_s(*uniform(topology, n_bytes))
    numbers = {"L": levels, **flat_symbols(topology, n_bytes)}
    formula = f"{'2 * ' * reduce_first}L * (α + M / B)"
    links = lowest_bits(n) if topology.kind == "ring" else n - 1
    total = times * links * n_bytes
    return entry("binomial-tree", time_s, times * levels, levels * n_bytes, formula, numbers, CHAN, total=total)


def ring_pass(n_bytes: float, topology: Topology, *, twice: bool = False) -> AlgorithmCost:
    n, times = topology.ranks, 2 if twice else 1
    time_s = times * c.ring_pass_s(*uniform(topology, n_bytes))
    formula = f"{'2 * ' * twice}(n - 1) * (α + M / (n * B))"
    sent = times * (n - 1) / n * n_bytes
    source = PATARASUK if twice else THAKUR
    return entry("ring", time_s, times * (n - 1), sent, formula, flat_symbols(topology, n_bytes), source, ranks=n)


def both_ways(name: str, n_bytes: float, topology: Topology, *, twice: bool = False) -> AlgorithmCost:
    n, times = topology.ranks, 2 if twice else 1
    time_s = times * c.both_ways_pass_s(*uniform(topology, n_bytes))
    formula = f"{'2 * ' * twice}(floor(n / 2) * α + (n - 1) * M / (2 * n * B))"
    sent = times * (n - 1) / n * n_bytes
    return entry(name, time_s, times * (n // 2), sent, formula, flat_symbols(topology, n_bytes), JAIN, ranks=n)


def along_a_path(topology: Topology, n_bytes: float, hops: int) -> Entries:
    numbers = {**flat_symbols(topology, n_bytes), "h": hops, "αh": topology.hop_latency_s}
    once_s = c.point_to_point_s(n_bytes, topology.link.latency_s, topology.link.bytes_per_s)
    total, transit = hops * n_bytes, (hops > 1) * n_bytes

    def cost(name: str, time_s: float, steps: int, text: str) -> AlgorithmCost:
        return entry(name, time_s, steps, n_bytes, text, numbers, LOADS, total=total, transit=transit)

    cut = cost("cut-through", once_s + (hops - 1) * topology.hop_latency_s, 1, "α + (h - 1) * αh + M / B")
    stored = cost("store-and-forward", hops * once_s, hops, "h * (α + M / B)")
    return [cut, stored] if topology.kind in ("ring", "mesh", "torus") else [cut]


def lowest_bits(ranks: int) -> int:
    """Links of a binomial tree along a line of ranks: rank j hangs from j less its lowest one, that many links away."""
    total, bit = 0, 1
    while bit < ranks:
        total += bit * ((ranks - 1) // bit - (ranks - 1) // (2 * bit))
        bit *= 2
    return total


def scatter_bytes(ranks: int) -> float:
    """Messages of a binomial scatter in units of M: the block of rank j is sent once per one in the binary j."""
    return c.bruck_blocks(ranks) / ranks
