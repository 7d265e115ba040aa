"""Devices are dealt out once each, no worker straddles two nodes, and stages are not spread over nodes without need."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polygon.planning.device_assignment import deal_devices


@st.composite
def dealings(draw):
    """Nodes of 1, 2, 4 or 8 devices, and workers of degrees that divide them, no more than there are devices."""
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    devices = per_node * draw(st.integers(1, 4))
    degrees = [t for t in (8, 4, 2, 1) if t <= per_node]
    counts = np.zeros((draw(st.integers(1, 5)), len(degrees)), dtype=np.int64)
    left = devices
    for _ in range(draw(st.integers(1, 12))):
        s, c = draw(st.integers(0, len(counts) - 1)), draw(st.integers(0, len(degrees) - 1))
        if degrees[c] <= left:
            counts[s, c] += 1
            left -= degrees[c]
    return counts, degrees, devices, per_node


@given(case=dealings())
def test_every_worker_has_its_own_devices_on_one_node(case):
    """The counts are kept, devices are used once, and the first and last device of a worker share a node."""
    counts, degrees, devices, per_node = case
    dealt = deal_devices(counts, degrees, devices, per_node)
    used = [first + k for workers in dealt for first, tp in workers for k in range(tp)]
    assert len(used) == len(set(used)) == (counts @ degrees).sum()
    assert set(used) <= set(range(devices))
    for s, workers in enumerate(dealt):
        assert [sum(1 for _, tp in workers if tp == degree) for degree in degrees] == counts[s].tolist()
        assert all(first // per_node == (first + tp - 1) // per_node for first, tp in workers)


def test_stages_are_not_cut_where_nodes_can_hold_them():
    """One, one, one and two workers on nodes of four: the pair shares a node; three pairs and two singles do too."""
    pair = deal_devices(np.array([[1], [1], [1], [2], [1]]), [1], 8, 4)
    assert pair == [[(0, 1)], [(1, 1)], [(2, 1)], [(4, 1), (5, 1)], [(3, 1)]]
    crowded = deal_devices(np.array([[1], [2], [2], [1], [2]]), [1], 8, 4)
    assert all(len({first // 4 for first, _ in workers}) == 1 for workers in crowded)
    full = deal_devices(np.array([[1], [1], [1], [3], [2]]), [1], 8, 4)
    assert all(len({first // 4 for first, _ in workers}) == 1 for workers in full)


@given(case=dealings())
def test_what_fits_on_one_node_is_cut_only_where_nodes_are_full(case):
    """A single group never is; a group that no node can hold is on as few as can be."""
    counts, degrees, devices, per_node = case
    for c, tp in enumerate(degrees):
        alone = np.zeros_like(counts)
        alone[0, c] = counts[:, c].sum()
        workers = deal_devices(alone, degrees, devices, per_node)[0]
        assert len({first // per_node for first, _ in workers}) == -(-alone[0, c] * tp // per_node)


def test_workers_straddle_nodes_that_are_no_multiple_of_them():
    """Three workers of four devices on two nodes of six: the second is on both."""
    assert deal_devices(np.array([[2], [1]]), [4], 12, 6) == [[(0, 4), (4, 4)], [(8, 4)]]


def test_the_last_node_may_be_smaller():
    """Seven devices on nodes of four: three go to the first, what needs four to none but it."""
    assert deal_devices(np.array([[0, 3], [1, 0]]), [4, 1], 7, 4) == [[(4, 1), (5, 1), (6, 1)], [(0, 4)]]
    assert deal_devices(np.array([[3], [2], [2]]), [1], 7, 4) == [
        [(0, 1), (1, 1), (2, 1)], [(4, 1), (5, 1)], [(3, 1), (6, 1)]
    ]  # fmt: skip
