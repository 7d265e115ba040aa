"""Laws of the table operation x topology."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.domain.cluster import Link
from polygon.domain.divisors import divisors
from polygon.domain.errors import InputError
from polygon.overhead.collective_table import Cell, collective_cell
from polygon.overhead.topologies import KINDS, OPERATIONS, Topology
from tests.nightly import cases

FUNCTIONS = {"min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "sqrt": math.sqrt}

links = st.builds(
    lambda latency, rate: Link(latency_s=latency, bytes_per_s=rate),
    st.sampled_from([0.0, 1e-6, 3.4e-6, 5e-2]),
    st.sampled_from([1e8, 25e9, 300e9]),
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    kind = draw(st.sampled_from(KINDS))
    ranks = draw(st.integers(1, 40) | st.sampled_from([64, 97, 1000, 1024]))
    per_node = draw(st.sampled_from(divisors(ranks)))
    return Topology(
        kind=kind,
        ranks=ranks,
        link=draw(links),
        per_node=per_node,
        inter=draw(links),
        nx=per_node,
        ny=ranks // per_node,
        root_bytes_per_s=draw(st.sampled_from([math.inf, 1e9])),
        in_network=draw(st.booleans()),
    )


def cell_of(op: str, topology: Topology, n_bytes: float) -> Cell:
    shards = topology.per_node if topology.kind == "hierarchical" and topology.nodes > 1 else 1
    return collective_cell(op, topology, n_bytes, shards=shards)


@settings(max_examples=cases(400), deadline=None)
@given(op=st.sampled_from(OPERATIONS), topology=topologies(), n_bytes=st.sampled_from([0.0, 1.0, 4096.0, 1e6, 1.4e11]))
def test_no_algorithm_beats_the_bound_and_the_printed_formula_gives_the_time(op, topology, n_bytes):
    """Every cell has an algorithm; every time is finite, at least the bound, and what its own formula evaluates to."""
    cell = cell_of(op, topology, n_bytes)
    assert cell.algorithms
    assert cell.chosen.time_s == min(cost.time_s for cost in cell.algorithms)
    for cost in cell.algorithms:
        assert math.isfinite(cost.time_s)
        assert cost.time_s >= cell.bound.time_s * (1 - 1e-9), cost
        value = eval(cost.formula, {"__builtins__": {}}, FUNCTIONS | dict(cost.numbers))
        assert cost.time_s == pytest.approx(value, rel=1e-9, abs=1e-15), cost


@given(op=st.sampled_from(OPERATIONS), topology=topologies(), n_bytes=st.floats(0, 1e12, allow_subnormal=False))
@settings(max_examples=cases(100), deadline=None)
def test_bytes_on_links_cover_what_is_sent(op, topology, n_bytes):
    """What the busiest rank sends is on some link, and links carry at least the bytes that must be delivered."""
    n = topology.ranks
    least = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1, "all_to_all": n - 1}
    for cost in cell_of(op, topology, n_bytes).algorithms:
        assert cost.link_bytes >= cost.sent_bytes * (1 - 1e-9)
        if cost.algorithm != "in-switch" and n > 1:
            delivered = least.get(op, 1 if op == "p2p" else n - 1) * n_bytes
            assert cost.link_bytes >= delivered * (1 - 1e-9), cost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_one_rank_costs_nothing(op, kind):
    """With N = 1 there is nothing to send."""
    link = Link(latency_s=1e-6, bytes_per_s=1e9)
    cell = collective_cell(op, Topology(kind=kind, ranks=1, link=link, inter=link), 1e9)
    assert cell.chosen.time_s == cell.bound.time_s == cell.chosen.link_bytes == 0


def test_errors_name_the_legal_values():
    """A grid that does not multiply, a node size that does not divide, a negative size, an impossible distance."""
    link = Link(latency_s=1e-6, bytes_per_s=1e9)
    with pytest.raises(InputError, match=r"nx x ny: found '3x3', expected a product of 8: 1x8, 2x4, 4x2, 8x1"):
        Topology(kind="mesh", ranks=8, link=link, nx=3, ny=3)
    with pytest.raises(InputError, match=r"gpus per node: found 3, expected a divisor of 8: 1 or 2 or 4 or 8"):
        Topology(kind="hierarchical", ranks=8, link=link, inter=link, per_node=3)
    ring = Topology(kind="ring", ranks=8, link=link)
    with pytest.raises(InputError, match="size M: found -1, expected a number >= 0"):
        collective_cell("all_reduce", ring, -1)
    with pytest.raises(InputError, match=r"hops: found 5, expected 1..4"):
        collective_cell("p2p", ring, 1, hops=5)
    with pytest.raises(InputError, match="op: found 'gather', expected all_reduce or"):
        collective_cell("gather", ring, 1)


def test_every_source_is_in_the_references():
    """docs/REFERENCES.md lists what --verbose names."""
    text = (Path(__file__).parents[2] / "docs" / "REFERENCES.md").read_text(encoding="utf-8")
    link = Link(latency_s=1e-6, bytes_per_s=1e9)
    sources = set()
    for kind in KINDS:
        topology = Topology(kind=kind, ranks=12, link=link, inter=link, per_node=4, nx=4, ny=3, in_network=True)
        sources |= {cost.source for op in OPERATIONS for cost in cell_of(op, topology, 1e6).algorithms}
    for source in sources:
        names = source.replace("(", "").replace(")", "").split()
        year = next((word for word in names if word.isdigit()), None)
        lines = [line for line in text.splitlines() if names[0].strip(",") in line]
        assert lines, source
        assert year is None or any(year in line for line in lines), source
