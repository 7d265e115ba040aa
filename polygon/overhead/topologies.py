"""How ranks are wired, and what no algorithm on that wiring can beat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from polygon.domain.cluster import Link
from polygon.domain.divisors import divisors
from polygon.domain.errors import require, require_number

KINDS = ("ring", "tree", "hierarchical", "switch", "mesh", "torus")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p")

CONCURRENT_MESSAGE_S = 0.4e-6
"""Extra latency per further peer that a rank writes to at the same time [s] (NCCL, CollNetDirect in tuning.cc)."""

IN_SWITCH_EFFICIENCY = 0.85
"""Part of the link rate that reduction inside the switch reaches (NCCL's NVLS figure for Hopper)."""


def most_square(number: int) -> tuple[int, int]:
    """Sides of the grid nearest to a square, the longer first."""
    short = max(d for d in divisors(number) if d * d <= number)
    return number // short, short


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A group of ranks and its links.

    - ring: neighbours are linked (two ranks: one link).
    - tree: a binary tree of switches over the ranks; `root_bytes_per_s` is one direction of the root's cut, by default
      wide enough not to be felt.
    - hierarchical: nodes of `per_node` ranks; `link` inside, `inter` per rank between nodes (rails).
    - switch: every rank has one port into a full crossbar; `in_network`: the switch reduces and copies.
    - mesh, torus: a grid of `nx` x `ny` ranks without and with wrap-around (a side of two has one link).
    """

    kind: str
    ranks: int
    link: Link
    per_node: int = 1
    inter: Link | None = None
    nx: int = 1
    ny: int = 1
    root_bytes_per_s: float = math.inf
    in_network: bool = False
    hop_latency_s: float = 0.0
    """What every further hop of a message that is not stored on its way adds [s]."""
    fabric: int | None = None
    """How the devices of a node are joined (`polygon.cost.network.fabric_of`), where it is known what they are: sums
    and gathers (switch, hierarchical) then take what NCCL was measured to take instead of what formulas promise."""

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "topology", self.kind, " or ".join(KINDS))
        require(isinstance(self.ranks, int) and self.ranks >= 1, "ranks", self.ranks, "a whole number >= 1")
        require_number(self.hop_latency_s, "hop_latency_s", at_least=0)
        require(self.root_bytes_per_s > 0, "root_bytes_per_s", self.root_bytes_per_s, "a number > 0")
        if self.kind == "hierarchical":
            legal = divisors(self.ranks)
            require(self.per_node in legal, "gpus per node", self.per_node, f"a divisor of {self.ranks}: {_any(legal)}")
            require(self.inter is not None, "inter", None, "the link between nodes")
        if self.kind in ("mesh", "torus"):
            sides = ", ".join(f"{d}x{self.ranks // d}" for d in divisors(self.ranks))
            require(
                self.nx >= 1 and self.ny >= 1 and self.nx * self.ny == self.ranks,
                f"{self.kind} nx x ny",
                f"{self.nx}x{self.ny}",
                f"a product of {self.ranks}: {sides}",
            )

    @property
    def nodes(self) -> int:
        """Nodes of a hierarchical group."""
        return self.ranks // self.per_node

    @property
    def sides(self) -> tuple[int, int]:
        """Sides of the grid, the longer first."""
        return max(self.nx, self.ny), min(self.nx, self.ny)

    def largest_distance(self) -> int:
        """Hops between the two ranks that are farthest apart."""
        if self.ranks == 1:
            return 0
        if self.kind == "ring":
            return self.ranks // 2
        if self.kind == "mesh":
            return self.nx + self.ny - 2
        if self.kind == "torus":
            return self.nx // 2 + self.ny // 2
        return 1


def _any(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


class Bound(NamedTuple):
    """What no algorithm can beat: the largest of three terms that hold each on its own [s]."""

    bandwidth_s: float
    latency_s: float
    bisection_s: float

    @property
    def time_s(self) -> float:
        """The bound."""
        return max(self)


def _degrees(topology: Topology) -> tuple[int, int]:
    """Fewest and most links of a rank."""
    if topology.kind == "ring":
        return (2, 2) if topology.ranks > 2 else (1, 1)
    if topology.kind == "mesh":
        return sum(side > 1 for side in topology.sides), sum(min(side - 1, 2) for side in topology.sides)
    if topology.kind == "torus":
        ports = sum(min(side - 1, 2) for side in topology.sides)
        return ports, ports
    return 1, 1


def _share(op: str, ranks: int, in_network: bool) -> float:
    """Part of M that the port of some rank must carry in one direction."""
    if op == "all_reduce":
        return 1.0 if in_network else 2 * (ranks - 1) / ranks
    return 1.0 if op in ("broadcast", "p2p") else (ranks - 1) / ranks


def _cut_share(op: str, ranks: int, side: int) -> float:
    """Part of M that crosses, in one direction, a cut with `side` of the ranks on one side."""
    other = ranks - side
    if op == "all_to_all":
        return side * other / ranks
    if op in ("all_gather", "reduce_scatter"):
        return max(side, other) / ranks
    return 1.0


def _cut(topology: Topology) -> tuple[int, float]:
    """The halving cut that counts: ranks on one side of it, and its bandwidth in one direction [bytes/s]."""
    rate, n = topology.link.bytes_per_s, topology.ranks
    long, short = topology.sides
    if topology.kind == "ring":
        return n // 2, rate * (2 if n > 2 else 1)
    if topology.kind == "mesh":
        return long // 2 * short, short * rate
    if topology.kind == "torus":
        return long // 2 * short, short * rate * (2 if long > 2 else 1)
    if topology.kind == "tree":
        return n // 2, min(topology.root_bytes_per_s, n // 2 * rate)
    return n // 2, n // 2 * rate


def lower_bound(op: str, topology: Topology, n_bytes: float, *, shards: int = 1) -> Bound:
    r"""What no algorithm beats: port, message count and cut, each alone.

    - port: some rank must send or receive 2(n-1)/n M (all-reduce; M with reduction in the switch), (n-1)/n M
      (all-gather, reduce-scatter, all-to-all) or M (broadcast) through its links;
    - messages: what one rank knows reaches the others in :math:`\lceil \log_{d+1} n \rceil` messages, d its links
      (a switch lets a rank write to all others at once: one message);
    - cut: what crosses between two halves over the bandwidth of the cut. Each node of a hierarchical group is one too.

    `shards` ranks on either side that hold the same message send a part each (point-to-point between nodes).

    References
    ----------
    Chan et al. 2007; Patarasuk and Yuan 2009.
    """
    require(op in OPERATIONS, "op", op, " or ".join(OPERATIONS))
    n, link = topology.ranks, topology.link
    if n == 1:
        return Bound(0.0, 0.0, 0.0)
    if topology.kind == "hierarchical":
        return _hierarchical_bound(op, topology, n_bytes, shards)
    fewest, most = _degrees(topology)
    if op == "p2p":
        return Bound(n_bytes / (fewest * link.bytes_per_s), link.latency_s, 0.0)
    if topology.kind == "switch":
        messages = 1
    else:
        messages = _log_ceil(n, most + 1)
    side, cut_rate = _cut(topology)
    return Bound(
        _share(op, n, topology.in_network) * n_bytes / (fewest * link.bytes_per_s),
        messages * link.latency_s,
        _cut_share(op, n, side) * n_bytes / cut_rate if not topology.in_network else 0.0,
    )


def _hierarchical_bound(op: str, topology: Topology, n_bytes: float, shards: int) -> Bound:
    """Lower bound with one port inside the node and one to the network per rank."""
    assert topology.inter is not None
    g, nodes, n = topology.per_node, topology.nodes, topology.ranks
    fast, slow = topology.link, topology.inter
    port = (fast.bytes_per_s if g > 1 else 0.0) + (slow.bytes_per_s if nodes > 1 else 0.0)
    least_s = min([fast.latency_s] * (g > 1) + [slow.latency_s] * (nodes > 1))
    if op == "p2p":
        if nodes == 1:
            return Bound(n_bytes / fast.bytes_per_s, fast.latency_s, 0.0)
        return Bound(n_bytes / (shards * slow.bytes_per_s), slow.latency_s, 0.0)
    latency_s = max(_log_ceil(n, 3) * least_s, slow.latency_s if nodes > 1 else 0.0)
    node_s = 0.0
    if nodes > 1:
        crossing = {"all_reduce": 2 * (nodes - 1) / nodes, "broadcast": 1.0, "all_to_all": g * (nodes - 1) / nodes}
        node_s = crossing.get(op, (nodes - 1) / nodes) * n_bytes / (g * slow.bytes_per_s)
    return Bound(_share(op, n, False) * n_bytes / port, latency_s, node_s)


def _log_ceil(ranks: int, base: int) -> int:
    """Smallest whole e with base**e >= ranks."""
    exponent, reached = 0, 1
    while reached < ranks:
        reached *= base
        exponent += 1
    return exponent
