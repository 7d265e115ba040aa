"""The end of a step: when gradients are summed beside the last backward."""

import numpy as np
import pytest

from polygon.cost.finish import reduction_spans_s
from polygon.cost.overlap import overlap_of, seen_parts
from polygon.domain.model import Batch
from polygon.domain.runtime import POLYGON


@pytest.mark.parametrize("late_s", [-0.05, 0.0, 0.05])
def test_a_sum_waits_for_the_first_gradient_of_the_quickest_worker(late_s):
    """A slow worker beside a quick one, which both end at about the same time: whoever ends last, sums begin when the
    quick one has the first of its last gradients, though the slow one has begun its last backward long before."""
    overlap = overlap_of(POLYGON, Batch(global_batch=8, seq_len=512))
    hidden, last = seen_parts(8.0, overlap)
    ends_s, backward_s = np.array([2.0, 2.0 + late_s]), np.array([0.2, 1.0])

    def spans_s(members, whole_s):
        whole_s, count = np.array([whole_s]), np.array([8.0])
        of = ends_s[members], backward_s[members]
        return reduction_spans_s(*of, np.array([0]), 1, whole_s, np.zeros(1), count, overlap).ravel().tolist()

    begin_s, end_s = spans_s([0, 1], 3.0)
    assert begin_s == pytest.approx(2.0 - 0.2 * hidden)
    assert end_s - overlap.contention * (max(ends_s) - begin_s) == pytest.approx(begin_s + 3.0)
    assert spans_s([1, 0], 3.0) == [begin_s, end_s]
    # Alone, the slow one hides most of it.
    assert spans_s([1], 3.0)[1] == pytest.approx(end_s - 0.8 * hidden + late_s, abs=0.1)
    # Of a short sum the last part follows the last backward.
    assert spans_s([0, 1], 0.1)[1] >= max(ends_s) + 0.1 * last
