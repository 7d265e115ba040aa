"""Searches in rounds and along a front: each has a seed of its own."""

from __future__ import annotations

from polygon.planning.frontier import _seed_of


def test_the_first_search_is_the_one_with_the_users_seed():
    """So that a search in rounds finds at least what a plain one does; later rounds draw other numbers, each seed's."""
    assert [_seed_of(seed, 0) for seed in (0, 7)] == [0, 7]
    later = [_seed_of(seed, index) for seed in (0, 7) for index in (1, 2, 3)]
    assert len({0, 7, *later}) == 8
    assert later == [_seed_of(seed, index) for seed in (0, 7) for index in (1, 2, 3)]
