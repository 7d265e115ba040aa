"""The table operation x topology: every algorithm with its time, steps and bytes, the bound, and the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polygon.cost.network import SWITCH, Group, all_reduce_s, gather_s
from polygon.domain.errors import require, require_number
from polygon.overhead.collective_algorithm import VTRAIN, AlgorithmCost, along_a_path, entry
from polygon.overhead.collective_flat import on_ring, on_switch, on_tree
from polygon.overhead.collective_grids import on_grid
from polygon.overhead.collective_nodes import between_nodes, on_nodes
from polygon.overhead.topologies import OPERATIONS, Bound, Topology, lower_bound

MEASURED = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations that the planner prices by measured tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One operation on one topology."""

    op: str
    topology: Topology
    n_bytes: float
    algorithms: tuple[AlgorithmCost, ...]
    bound: Bound

    @property
    def chosen(self) -> AlgorithmCost:
        """The fastest (the first of equals)."""
        return min(self.algorithms, key=lambda cost: cost.time_s)

    def only(self, names: tuple[str, ...]) -> Cell:
        """The cell with some of its algorithms; they must exist."""
        known = [cost.algorithm for cost in self.algorithms]
        kept = tuple(cost for cost in self.algorithms if cost.algorithm in names)
        where = f"algorithm for {self.op} on {self.topology.kind}"
        require(bool(kept), where, " or ".join(names), " or ".join(known))
        return Cell(op=self.op, topology=self.topology, n_bytes=self.n_bytes, algorithms=kept, bound=self.bound)


def as_measured(op: str, topology: Topology, n_bytes: float) -> AlgorithmCost:
    """What NCCL takes on such nodes, as the planner prices it: its ring's bytes at the rate that follows."""
    inter = topology.inter or topology.link
    per_node = topology.per_node if topology.kind == "hierarchical" else topology.ranks
    node = replace(inter, bytes_per_s=inter.bytes_per_s * per_node)
    group = Group(
        members=topology.ranks,
        per_node=per_node,
        devices_per_node=per_node,
        intra_node=topology.link,
        inter_node=node,
        fabric=SWITCH if topology.fabric is None else topology.fabric,
    )
    passes = 2 if op == "all_reduce" else 1
    time_s = all_reduce_s(n_bytes, group) if passes == 2 else gather_s(n_bytes, group)
    sent = passes * (topology.ranks - 1) / topology.ranks * n_bytes
    formula = f"{passes} * (n - 1) / n * M / R" if n_bytes else "0"
    numbers = {"n": topology.ranks, "M": n_bytes, "R": sent / time_s if time_s else 0.0}
    steps = passes * (topology.ranks - 1)
    return entry("nccl, measured", time_s, steps, sent, formula, numbers, VTRAIN, ranks=topology.ranks)


def _algorithms(op: str, topology: Topology, n_bytes: float, hops: int, shards: int) -> list[AlgorithmCost]:
    if topology.fabric is not None and topology.kind in ("switch", "hierarchical") and op in MEASURED:
        return [as_measured(op, topology, n_bytes)]
    if topology.kind == "hierarchical":
        if op == "p2p":
            return between_nodes(topology, n_bytes, shards)
        return on_nodes(op, topology, n_bytes)
    if op == "p2p":
        return along_a_path(topology, n_bytes, hops)
    if topology.kind in ("mesh", "torus"):
        return on_grid(op, topology, n_bytes)
    return {"ring": on_ring, "tree": on_tree, "switch": on_switch}[topology.kind](op, topology, n_bytes)


def collective_cell(op: str, topology: Topology, n_bytes: float, *, hops: int = 1, shards: int = 1) -> Cell:
    """Every algorithm for an operation on a topology, with the lower bound.

    Parameters
    ----------
    op : one of `OPERATIONS`.
    n_bytes : M in the convention of `polygon.cost.collectives` [bytes].
    hops : distance of the two ranks of a point-to-point message on a ring, mesh or torus.
    shards : ranks on either side of a point-to-point message between nodes that hold the same data and share the work.

    Returns
    -------
    Cell
        With one rank every time is 0. Nothing here counts additions or other traffic on the same links.

    Raises
    ------
    InputError
        For an unknown operation, a negative size, or a distance that the topology does not have.
    """
    require(op in OPERATIONS, "op", op, " or ".join(OPERATIONS))
    require_number(n_bytes, "size M", at_least=0)
    require(isinstance(shards, int) and shards >= 1, "shards", shards, "a whole number >= 1")
    if topology.ranks == 1:
        alone = AlgorithmCost(
            algorithm="none", time_s=0.0, steps=0, sent_bytes=0.0, link_bytes=0.0, formula="0", numbers={}, source=""
        )
        return Cell(op=op, topology=topology, n_bytes=n_bytes, algorithms=(alone,), bound=Bound(0.0, 0.0, 0.0))
    if op == "p2p" and topology.kind != "hierarchical":
        farthest = topology.largest_distance()
        require(1 <= hops <= farthest, "hops", hops, f"1..{farthest} on a {topology.kind} of {topology.ranks}")
    algorithms = _algorithms(op, topology, n_bytes, hops, shards)
    bound = lower_bound(op, topology, n_bytes, shards=shards)
    return Cell(op=op, topology=topology, n_bytes=n_bytes, algorithms=tuple(algorithms), bound=bound)
