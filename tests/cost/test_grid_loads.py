"""Mesh and torus against schedules played message by message (see `link_loads`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from fractions import Fraction

import pytest
from link_loads import (
    ALPHA,
    LINK,
    RATE,
    M,
    Network,
    Rounds,
    Route,
    agree,
    both_ways_gather,
    cycle_loads,
    entry,
    gathered,
    grid_route,
    line_route,
    mirrored,
    reduced,
    ring_gather,
    ring_route,
    routed,
)

from polygon.overhead.topologies import Topology

GRIDS = [(1, 1), (1, 5), (2, 2), (2, 3), (3, 2), (3, 3), (4, 4), (5, 3), (4, 6), (8, 2), (7, 1), (5, 7)]


def passed_on(n: int, route: Route, ends: Callable[[Hashable], tuple[int, int]]) -> float:
    """Most that a rank receives and sends on, in units of M."""
    load: dict[int, Fraction] = defaultdict(Fraction)
    for source in range(n):
        for target in range(n):
            way = route(source, target) if source != target else []
            for link in way[1:]:
                load[ends(link)[0]] += Fraction(1, n)
    return float(max(load.values(), default=Fraction(0)))


@pytest.mark.parametrize(("nx", "ny"), GRIDS)
def test_all_to_all_on_a_mesh(nx, ny):
    """Row then column: the busiest link carries floor(k/2) ceil(k/2) / k of M, k the longer side."""
    n = nx * ny
    if n == 1:
        return
    topology = Topology(kind="mesh", ranks=n, link=LINK, nx=nx, ny=ny)
    route = grid_route(nx, lambda _: line_route, ny)
    load = routed(n, route)
    cost = entry("all_to_all", topology, "rows-and-columns-at-once")
    assert cost.time_s == pytest.approx((nx + ny - 2) * ALPHA + float(max(load.values())) * M / RATE)
    assert cost.link_bytes == pytest.approx(float(sum(load.values())) * M)

    def ends(link: tuple) -> tuple[int, int]:
        kind, fixed, a, b = link
        return (fixed * nx + a, fixed * nx + b) if kind == "row" else (a * nx + fixed, b * nx + fixed)

    assert cost.transit_bytes == pytest.approx(passed_on(n, route, ends) * M)


@pytest.mark.parametrize(("nx", "ny"), GRIDS)
def test_all_to_all_on_a_torus(nx, ny):
    """Row then column the short way: max(k)/8 of M for even sides."""
    n = nx * ny
    if n == 1:
        return
    cost = entry("all_to_all", Topology(kind="torus", ranks=n, link=LINK, nx=nx, ny=ny), "rows-and-columns-at-once")
    # In a row every rank has M/nx for each column; the columns then carry M/ny for each row.
    loads = [cycle_loads(side) for side in (nx, ny)]
    busiest = max(float(max(load.values(), default=0)) for load in loads)
    assert cost.time_s == pytest.approx((nx // 2 + ny // 2) * ALPHA + busiest * M / RATE)
    total = ny * sum(loads[0].values()) + nx * sum(loads[1].values())
    assert cost.link_bytes == pytest.approx(float(total) * M)


def grid_passes(nx: int, ny: int) -> tuple[Rounds, Rounds]:
    """All-gather of a grid: along the columns first, then along the rows (a reduce-scatter begins with the rows)."""
    n = nx * ny
    columns: Rounds = [[] for _ in range(ny - 1)]
    for x in range(nx):
        for r, messages in enumerate(ring_gather(ny)):
            columns[r] += [(a * nx + x, b * nx + x, frozenset(k * nx + x for k in block)) for a, b, block in messages]
    rows: Rounds = [[] for _ in range(nx - 1)]
    for y in range(ny):
        for r, messages in enumerate(ring_gather(nx)):
            rows[r] += [
                (y * nx + a, y * nx + b, frozenset(k for x in block for k in range(x, n, nx)))
                for a, b, block in messages
            ]
    return columns, rows


@pytest.mark.parametrize(("nx", "ny"), [grid for grid in GRIDS if grid != (1, 1)])
@pytest.mark.parametrize("kind", ["mesh", "torus"])
def test_dimension_ordered_all_reduce(kind, nx, ny):
    """Rows, then columns on an nx-th: 2(n-1)/n of M in all. On a mesh the ring's closing message runs back the line."""
    n = nx * ny
    columns, rows = grid_passes(nx, ny)
    assert all(mine == set(range(n)) for mine in gathered(n, columns + rows, lambda rank: {rank}))
    sums = reduced(n, mirrored(columns + rows), range(n))
    assert all(sums[rank][rank] == frozenset(range(n)) for rank in range(n))
    network = Network(grid_route(nx, (lambda _: line_route) if kind == "mesh" else ring_route, ny))
    network.play(mirrored(columns + rows) + columns + rows, M / n)
    cost = entry("all_reduce", Topology(kind=kind, ranks=n, link=LINK, nx=nx, ny=ny), "dimension-ordered")
    agree(cost, network)
    assert cost.steps == 2 * (nx + ny - 2)


@pytest.mark.parametrize(("nx", "ny"), [(2, 2), (2, 3), (3, 3), (4, 4), (5, 3), (4, 6)])
def test_two_halves_use_different_links(nx, ny):
    """One half goes rows first, the other columns first: per phase the slower one counts, and no link serves both."""
    n = nx * ny
    columns, rows = grid_passes(nx, ny)
    swapped_columns, swapped_rows = grid_passes(ny, nx)

    def turned(rounds: Rounds) -> Rounds:
        place = [y * nx + x for x in range(nx) for y in range(ny)]
        return [[(place[a], place[b], frozenset(place[k] for k in block)) for a, b, block in ms] for ms in rounds]

    other_rows, other_columns = turned(swapped_columns), turned(swapped_rows)
    total_s, route = 0.0, grid_route(nx, lambda _: line_route, ny)
    for one, two in ((columns, other_rows), (rows, other_columns)):
        first, second = Network(route), Network(route)
        total_s += max(first.play(one, M / 2 / n), second.play(two, M / 2 / n))
        assert not set(first.links) & set(second.links)
    assert all(m == set(range(n)) for m in gathered(n, other_rows + other_columns, lambda rank: {rank}))
    cost = entry("all_gather", Topology(kind="mesh", ranks=n, link=LINK, nx=nx, ny=ny), "two-halves")
    assert cost.time_s == pytest.approx(total_s)


@pytest.mark.parametrize(("nx", "ny"), [(2, 2), (2, 3), (3, 2), (4, 4), (5, 4), (4, 7), (6, 2)])
def test_hamiltonian_ring_on_a_mesh(nx, ny):
    """With an even number of ranks a cycle visits all over mesh links: a bidirectional ring without wrap-around."""
    if ny % 2:
        nx, ny = ny, nx
    # Up the first column, back down in rows over the others.
    cycle = [(0, y) for y in range(ny)]
    for i, y in enumerate(reversed(range(ny))):
        columns = range(1, nx) if i % 2 == 0 else range(nx - 1, 0, -1)
        cycle += [(x, y) for x in columns]
    steps = [abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    assert steps == [1] * (nx * ny) and len(set(cycle)) == nx * ny
    n = nx * ny
    network = Network(ring_route(n))
    rounds = both_ways_gather(n)
    network.play(mirrored(rounds) + rounds, M / n)
    agree(
        entry("all_reduce", Topology(kind="mesh", ranks=n, link=LINK, nx=nx, ny=ny), "hamiltonian-both-ways"), network
    )


def spanning_depth(n: int, edges: list[tuple[int, int]], root: int = 0) -> int:
    """Depth of a tree given by directed edges, after checking that it reaches every rank once."""
    children, reached = defaultdict(list), [root]
    for a, b in edges:
        children[a].append(b)
    depth = {root: 0}
    for node in reached:
        for child in children[node]:
            assert child not in depth
            depth[child] = depth[node] + 1
            reached.append(child)
    assert len(depth) == n
    return max(depth.values())


@pytest.mark.parametrize(("nx", "ny"), [(2, 2), (3, 3), (4, 2), (2, 5), (4, 4), (5, 3), (6, 7)])
def test_disjoint_broadcast_trees(nx, ny):
    """Two trees from a corner of a mesh, four from any rank of a torus: no directed link in common, depth as stated."""

    def number(x: int, y: int) -> int:
        return y % ny * nx + x % nx

    first = [(number(x, 0), number(x + 1, 0)) for x in range(nx - 1)]
    first += [(number(x, y), number(x, y + 1)) for x in range(1, nx) for y in range(ny - 1)]
    first += [(number(1, y), number(0, y)) for y in range(1, ny)]
    second = [(number(0, y), number(0, y + 1)) for y in range(ny - 1)]
    second += [(number(x, y), number(x + 1, y)) for y in range(1, ny) for x in range(nx - 1)]
    second += [(number(x, 1), number(x, 0)) for x in range(1, nx)]
    depth = max(spanning_depth(nx * ny, tree) for tree in (first, second))
    assert not set(first) & set(second)
    cost = entry("broadcast", Topology(kind="mesh", ranks=nx * ny, link=LINK, nx=nx, ny=ny), "two-trees")
    assert cost.numbers["h"] == depth
    if min(nx, ny) < 3:
        return
    trees = []
    for sign in (1, -1):

        def at(x: int, y: int, sign: int = sign) -> int:
            return number(sign * x, sign * y)

        row = [(at(x, 0), at(x + 1, 0)) for x in range(nx - 1)]
        row += [(at(x, y), at(x, y + 1)) for x in range(1, nx) for y in range(ny - 1)]
        row += [(at(nx - 1, y), at(0, y)) for y in range(1, ny)]
        column = [(at(0, y), at(0, y + 1)) for y in range(ny - 1)]
        column += [(at(x, y), at(x + 1, y)) for y in range(1, ny) for x in range(nx - 1)]
        column += [(at(x, ny - 1), at(x, 0)) for x in range(1, nx)]
        trees += [row, column]
    depth = max(spanning_depth(nx * ny, tree) for tree in trees)
    assert sum(map(len, trees)) == len(set().union(*trees))
    cost = entry("broadcast", Topology(kind="torus", ranks=nx * ny, link=LINK, nx=nx, ny=ny), "four-trees")
    assert cost.numbers["h"] == depth
