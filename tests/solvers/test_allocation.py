"""Laws of allocation spaces: every way to make an allocation gives one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers.allocation import AllocationSpace


@st.composite
def spaces(draw: st.DrawFn) -> AllocationSpace:
    """Spaces in which classes may share a pool, with room for every group."""
    pools = draw(st.integers(1, 4))
    capacity = draw(st.lists(st.integers(2, 12), min_size=pools, max_size=pools))
    pool = list(range(pools)) + draw(st.lists(st.integers(0, pools - 1), max_size=3))
    units = [1] * pools + [draw(st.sampled_from([1, 2])) for _ in pool[pools:]]
    return AllocationSpace(
        groups=draw(st.integers(1, min(4, sum(capacity)))),
        capacity=np.array(capacity),
        pool=np.array(pool),
        units=np.array(units),
        ordered=draw(st.booleans()),
        use_all=draw(st.booleans()),
        empty_groups=draw(st.booleans()),
    )


@given(space=spaces(), seed=st.integers(0, 2**32 - 1))
def test_random_moves_and_mixtures_are_feasible(space: AllocationSpace, seed: int) -> None:
    """Capacity, non-empty groups and full use hold for random solutions, 20 moves from them, and their children."""
    rng = np.random.default_rng(seed)
    a, b = space.random(rng), space.random(rng)
    assert space.feasible(a) and space.feasible(b)
    for _ in range(20):
        before = a.copy()
        moved = space.neighbour(a, rng)
        assert np.array_equal(a, before)
        assert space.feasible(moved)
        child = space.crossover(moved, b, rng)
        assert space.feasible(child)
        a = moved


@given(space=spaces(), seed=st.integers(0, 2**32 - 1))
def test_repair_of_anything_is_feasible(space: AllocationSpace, seed: int) -> None:
    """Whatever whole numbers come in, an allocation comes out."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 15, size=(space.groups, space.classes))
    assert space.feasible(space.repair(x, rng))


@given(space=spaces(), seed=st.integers(0, 2**32 - 1))
def test_key_forgets_the_names_of_interchangeable_groups_only(space: AllocationSpace, seed: int) -> None:
    """Exchanging rows keeps the key exactly when rows are interchangeable (or equal)."""
    rng = np.random.default_rng(seed)
    x = space.random(rng)
    y = x[rng.permutation(space.groups)]
    assert (space.key(x) == space.key(y)) == (not space.ordered or np.array_equal(x, y))


@pytest.mark.parametrize(
    ("ordered", "use_all", "empty_groups"), list(itertools.product([False, True], [False, True], [False, True]))
)
def test_solutions_are_all_allocations_once(ordered: bool, use_all: bool, empty_groups: bool) -> None:
    """Compared with a filter over every small matrix; pool 1 can be used singly or in pairs."""
    space = AllocationSpace(
        groups=2,
        capacity=np.array([2, 3]),
        pool=np.array([0, 1, 1]),
        units=np.array([1, 1, 2]),
        ordered=ordered,
        use_all=use_all,
        empty_groups=empty_groups,
    )
    matrices = (np.array(cells).reshape(2, 3) for cells in itertools.product(range(4), repeat=6))
    expected = {space.key(x) for x in matrices if space.feasible(x)}
    found = [space.key(x) for x in space.solutions()]
    assert len(found) == len(set(found))
    assert set(found) == expected
    if ordered and empty_groups:
        assert space.count() == len(found)


def test_moves_reach_everything() -> None:
    """Random moves from one allocation reach every allocation of a small space."""
    space = AllocationSpace(groups=2, capacity=np.array([2, 2]), pool=np.array([0, 1, 1]), units=np.array([1, 1, 2]))
    rng = np.random.default_rng(0)
    x = space.random(rng)
    seen = set()
    for _ in range(5000):
        x = space.neighbour(x, rng)
        seen.add(space.key(x))
    assert seen == {space.key(y) for y in space.solutions()}
