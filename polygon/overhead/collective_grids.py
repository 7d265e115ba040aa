"""Algorithms on a two-dimensional mesh (no wrap-around) and torus."""

from __future__ import annotations

from polygon.cost import collectives as c
from polygon.overhead.collective_algorithm import (
    JAIN,
    KUMAR,
    LOADS,
    AlgorithmCost,
    Entries,
    both_ways,
    chain,
    entry,
    flat_symbols,
)
from polygon.overhead.topologies import Topology


def _symbols(t: Topology, m: float) -> dict[str, float]:
    return {**flat_symbols(t, m), "X": t.nx, "Y": t.ny}


def _line_totals(x: int, y: int, m: float) -> tuple[float, float]:
    """Bytes on links and passed on when m bytes make one pass over the x lines, then over the y lines.

    The ring over a line sends its last message back over the whole line, against the direction of the others: every
    round uses 2 (k - 1) links, and every inner rank passes one message on.
    """
    n = x * y
    total = y * 2 * (x - 1) ** 2 * m / x + x * 2 * (y - 1) ** 2 * m / n
    transit = (x > 2) * (x - 1) * m / x + (y > 2) * (y - 1) * m / n
    return total, transit


def _mesh_reduce(op: str, t: Topology, m: float) -> Entries:
    times = 2 if op == "all_reduce" else 1
    lead, n, x, y = "2 * " * (times == 2), t.ranks, t.nx, t.ny
    alpha, rate = t.link.latency_s, t.link.bytes_per_s
    numbers, sent = _symbols(t, m), times * (n - 1) / n * m
    ordered_s = times * (c.ring_pass_s(m, x, alpha, rate) + c.ring_pass_s(m / x, y, alpha, rate))
    ordered = f"{lead}((X - 1) * (α + M / (X * B)) + (Y - 1) * (α + M / (n * B)))"
    total, transit = _line_totals(x, y, times * m)
    entries = [
        entry(
            "dimension-ordered",
            ordered_s,
            times * (x + y - 2),
            sent,
            ordered,
            numbers,
            JAIN,
            total=total,
            transit=transit,
        )
    ]
    if min(x, y) < 2:
        return entries
    long = max(x, y)
    first_s = max(c.ring_pass_s(m / 2, x, alpha, rate), c.ring_pass_s(m / 2, y, alpha, rate))
    second_s = (long - 1) * (alpha + m / (2 * n * rate))
    halves = (
        f"{lead}(max((X - 1) * (α + M / (2 * X * B)), (Y - 1) * (α + M / (2 * Y * B)))"
        " + (max(X, Y) - 1) * (α + M / (2 * n * B)))"
    )
    one, two = _line_totals(x, y, times * m / 2), _line_totals(y, x, times * m / 2)
    entries.append(
        entry(
            "two-halves",
            times * (first_s + second_s),
            times * 2 * (long - 1),
            sent,
            halves,
            numbers,
            KUMAR,
            total=one[0] + two[0],
            transit=one[1] + two[1],
        )
    )
    if n % 2 == 0:
        entries.append(both_ways("hamiltonian-both-ways", m, t, twice=times == 2))
    return entries


def _ways(side: int) -> int:
    """Link directions by which a rank reaches its neighbours along a side (two ranks share one link)."""
    return 2 if side > 2 else 1


def _side_pass_s(m: float, side: int, alpha: float, rate: float) -> float:
    """All-gather or reduce-scatter of m bytes along one side of a torus, all its links in use."""
    if side > 2:
        return float(c.both_ways_pass_s(m, side, alpha, rate))
    return float(c.ring_pass_s(m, side, alpha, rate))


def _torus_reduce(op: str, t: Topology, m: float) -> Entries:
    times = 2 if op == "all_reduce" else 1
    lead, n, x, y = "2 * " * (times == 2), t.ranks, t.nx, t.ny
    alpha, rate = t.link.latency_s, t.link.bytes_per_s
    numbers, sent = {**_symbols(t, m), "wx": _ways(x), "wy": _ways(y)}, times * (n - 1) / n * m
    one_s = times * (c.ring_pass_s(m, x, alpha, rate) + c.ring_pass_s(m / x, y, alpha, rate))
    one = f"{lead}((X - 1) * (α + M / (X * B)) + (Y - 1) * (α + M / (n * B)))"
    entries = [entry("dimension-ordered", one_s, times * (x + y - 2), sent, one, numbers, JAIN, ranks=n)]
    hops = x // 2 + y // 2
    both_s = times * (_side_pass_s(m, x, alpha, rate) + _side_pass_s(m / x, y, alpha, rate))
    both = (
        f"{lead}((floor(X / 2) + floor(Y / 2)) * α"
        " + (X - 1) * M / (X * wx * B) + (Y - 1) * M / (n * wy * B))"
    )  # fmt: skip
    if max(x, y) > 2:
        entries.append(entry("both-ways", both_s, times * hops, sent, both, numbers, JAIN, ranks=n))
    if min(x, y) < 2:
        return entries

    def phase_s(first: float, second: float) -> float:
        return max(_side_pass_s(first, x, alpha, rate), _side_pass_s(second, y, alpha, rate))

    all_s = times * (phase_s(m / 2, m / 2) + phase_s(m / 2 / y, m / 2 / x))
    all_links = (
        f"{lead}(max(floor(X / 2) * α + (X - 1) * M / (2 * X * wx * B), floor(Y / 2) * α"
        " + (Y - 1) * M / (2 * Y * wy * B)) + max(floor(X / 2) * α + (X - 1) * M / (2 * n * wx * B),"
        " floor(Y / 2) * α + (Y - 1) * M / (2 * n * wy * B)))"
    )
    steps = times * 2 * (max(x, y) // 2)
    entries.append(entry("all-links", all_s, steps, sent, all_links, numbers, JAIN, ranks=n))
    return entries


def _broadcast(t: Topology, m: float) -> Entries:
    x, y, total = t.nx, t.ny, (t.ranks - 1) * m
    if t.kind == "mesh":
        hops = x + y - 2
        entries = [chain("row-then-columns", hops, m, t, total=total)]
        if min(x, y) > 1:
            # Tree one: first row, then all columns; the first column is reached from the second. Tree two mirrors it.
            depth = max(hops, x + 1, y + 1)
            entries.append(chain("two-trees", depth, m, t, ways=2, total=total))
        return entries
    entries = [chain("row-then-columns", x // 2 + y // 2, m, t, total=total)]
    if min(x, y) > 2:
        # Four trees: out along +x, -x, +y or -y, then across; each takes the axis that it misses over the wrap-around.
        entries.append(chain("four-trees", x + y - 1, m, t, ways=4, total=total))
    elif min(x, y) == 1 and max(x, y) > 2:
        entries.append(chain("chain-both-ways", max(x, y) - 1, m, t, ways=2, total=total))
    return entries


def _load(t: Topology, side: int) -> float:
    return float(c.line_load(side) if t.kind == "mesh" else c.cycle_load(side))


def _load_text(t: Topology, side: int, name: str) -> str:
    if t.kind == "mesh":
        return f"floor({name} / 2) * ceil({name} / 2) / {name}"
    if side == 2:
        return "1 / 2"
    return f"{name} / 8" if side % 2 == 0 else f"({name}**2 - 1) / (8 * {name})"


def _links_of_side(t: Topology, side: int) -> int:
    """Directed links of one line or cycle."""
    return 2 * (side - 1) if t.kind == "mesh" or side < 3 else 2 * side


def _all_to_all_bytes(t: Topology, m: float) -> tuple[float, float]:
    """Bytes on all links and passed on by the busiest rank, rows first."""
    x, y, n = t.nx, t.ny, t.ranks
    own = (n - 1) / n * m
    if t.kind == "torus":
        total = sum(
            lines * _links_of_side(t, side) * c.cycle_load(side) * m for lines, side in ((y, x), (x, y)) if side > 1
        )
        return total, total / n - own
    total = (y * (x * x - 1) + x * (y * y - 1)) / 3 * m
    through = sum(2 * ((k - 1) // 2) * (k - 1 - (k - 1) // 2) / k for k in (x, y)) * m
    return total, through + (x - 1) * (y - 1) * m / n


def _all_to_all(t: Topology, m: float) -> Entries:
    x, y, n = t.nx, t.ny, t.ranks
    alpha, rate = t.link.latency_s, t.link.bytes_per_s
    hops = t.largest_distance()
    loads = _load(t, x), _load(t, y)
    numbers, own = _symbols(t, m), (n - 1) / n * m
    total, transit = _all_to_all_bytes(t, m)
    lx, ly = _load_text(t, x, "X"), _load_text(t, y, "Y")
    steps = "(X + Y - 2)" if t.kind == "mesh" else "(floor(X / 2) + floor(Y / 2))"
    once = f"{steps} * α + max({lx}, {ly}) * M / B"
    serial = f"{steps} * α + ({lx} + {ly}) * M / B"

    def cost(name: str, load: float, text: str) -> AlgorithmCost:
        time_s = hops * alpha + load * m / rate
        return entry(name, time_s, hops, own, text, numbers, LOADS, total=total, transit=transit)

    return [cost("rows-and-columns-at-once", max(loads), once), cost("rows-then-columns", sum(loads), serial)]


def on_grid(op: str, t: Topology, m: float) -> Entries:
    """Algorithms for one operation (not point-to-point) on a mesh or torus."""
    if op == "broadcast":
        return _broadcast(t, m)
    if op == "all_to_all":
        return _all_to_all(t, m)
    return _mesh_reduce(op, t, m) if t.kind == "mesh" else _torus_reduce(op, t, m)
