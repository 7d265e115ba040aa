"""The end of a step: when gradients are summed beside the last backward."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.finish import reduction_spans_s
from polygon.cost.overlap import overlap_of, seen_parts
from polygon.cost.reduction import streamed_s
from polygon.domain.model import Batch
from polygon.domain.runtime import POLYGON
from tests.nightly import cases

LEVELS_S = st.floats(0, 10)


@pytest.mark.parametrize("late_s", [-0.05, 0.0, 0.05])
def test_a_sum_waits_for_the_first_gradient_of_the_quickest_worker(late_s):
    """A slow worker beside a quick one, which both end at about the same time: whoever ends last, sums begin when the
    quick one has the first of its last gradients, though the slow one has begun its last backward long before."""
    overlap = overlap_of(POLYGON, Batch(global_batch=8, seq_len=512))
    hidden, last = seen_parts(8.0, 1 / 8, overlap)
    ends_s, backward_s = np.array([2.0, 2.0 + late_s]), np.array([0.2, 1.0])

    def spans_s(members, whole_s):
        whole_s, count = np.array([whole_s]), np.array([8.0])
        of = ends_s[members], backward_s[members]
        return reduction_spans_s(*of, np.array([0]), 1, whole_s, last * whole_s, count, overlap).ravel().tolist()

    begin_s, end_s = spans_s([0, 1], 3.0)
    assert begin_s == pytest.approx(2.0 - 0.2 * hidden)
    assert end_s - overlap.contention * (max(ends_s) - begin_s) == pytest.approx(begin_s + 3.0)
    assert spans_s([1, 0], 3.0) == [begin_s, end_s]
    # Alone, the slow one hides most of it.
    assert spans_s([1], 3.0)[1] == pytest.approx(end_s - 0.8 * hidden + late_s, abs=0.1)
    # Of a short sum the last part follows the last backward.
    assert spans_s([0, 1], 0.1)[1] >= max(ends_s) + 0.1 * last


@settings(deadline=None, max_examples=cases(60))
@given(
    node_s=LEVELS_S,
    region_s=LEVELS_S,
    across_s=LEVELS_S,
    latency=st.floats(0, 1),
    card=st.floats(0, 1),
    last=st.floats(0, 1),
)
def test_layers_stream_through_the_levels(node_s, region_s, across_s, latency, card, last):
    """Many small layers take what the busiest level does, one layer all levels in a row; a card that a region's sums
    keep busy is a level with what it sends to other regions."""
    latency_s, card_s = latency * across_s, card * across_s * (1 - latency)
    total_s = node_s + region_s + across_s
    of = node_s, region_s, across_s, latency_s, card_s
    found = streamed_s(*of, last)
    assert found == pytest.approx(streamed_s.py_func(*of, last))
    busiest_s = latency_s + max(node_s, region_s + card_s, across_s - latency_s)
    assert busiest_s * (1 - 1e-9) <= found <= total_s * (1 + 1e-9)
    assert streamed_s(*of, 1.0) == pytest.approx(total_s)
    assert streamed_s(*of, 0.0) == pytest.approx(busiest_s)


def test_sums_over_a_missing_link_never_end():
    assert streamed_s(1.0, 1.0, np.inf, 0.1, 0.0, 0.5) == np.inf
