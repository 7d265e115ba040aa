"""Walks that accept late go on where descents end."""

import numpy as np
import pytest

from solvers.local_search import Racing
from solvers.problem import SearchProblem
from solvers.stop import MaxEvaluations

HEIGHTS = (9.0, 5.0, 7.0, 6.0, 1.0, 3.0)


class Way(SearchProblem[int]):
    """A way over a rise, one step after another; at its end it begins anew."""

    def evaluate(self, x):
        return HEIGHTS[x]

    def random(self, rng):
        return 0

    def neighbour(self, x, rng):
        return (x + 1) % len(HEIGHTS)

    def crossover(self, a, b, rng):
        raise NotImplementedError

    def key(self, x):
        return x


@pytest.mark.parametrize(("memory", "least"), [(0, 5.0), (1, 5.0), (3, 1.0)])
def test_a_move_is_taken_if_it_is_no_worse_than_one_so_many_before(memory, least):
    """From 9 to 5; on to 7, as three moves before it was 9, and down behind it."""
    found = Racing(racers=1, lap=40, memory=memory).solve(
        Way(), np.random.default_rng(0), MaxEvaluations(30), start=[0]
    )
    assert found.value == least
