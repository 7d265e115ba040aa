"""Sets of times behave as sets of the moments in them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runners.traces.intervals import common, length, merged, without

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12).map(
    lambda rows: np.array([(a, a + n) for a, n in rows], dtype=float).reshape(-1, 2)
)


def moments(rows):
    """Unit intervals that whole-numbered spans cover."""
    return {t for a, b in rows.tolist() for t in range(int(a), int(b))}


@given(a=spans, b=spans)
def test_spans_are_sets_of_moments(a, b):
    """Merging, intersection, difference and length agree with sets of unit intervals."""
    assert moments(merged(a)) == moments(a)
    assert moments(common(a, b)) == moments(a) & moments(b)
    assert moments(without(a, b)) == moments(a) - moments(b)
    assert length(a) == len(moments(a))


@given(a=spans)
def test_merged_spans_are_apart_and_in_order(a):
    """No two merged spans touch, none is empty."""
    rows = merged(a)
    assert (rows[:, 1] > rows[:, 0]).all() and (rows[1:, 0] > rows[:-1, 1]).all()
