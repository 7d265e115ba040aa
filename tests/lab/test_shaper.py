"""What the relay does to packets: rate, then latency, in order, nothing lost but by a full queue."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.lab_net.shaper import MIN_QUEUE_S, Shaper

gaps = st.floats(0, 0.05)
sizes = st.integers(40, 65_000)
traffic = st.lists(st.tuples(gaps, sizes), min_size=1, max_size=40)


def drain(shaper):
    """(arrival time, target, packet) of all that is under way."""
    arrived = []
    while (time_s := shaper.next_s()) < math.inf:
        arrived += [(time_s, target, packet) for target, packet in shaper.due(time_s)]
    return arrived


@given(packets=traffic, latency_s=st.floats(0, 0.2), rate=st.floats(1e5, 1e9))
def test_one_pair_is_a_queue_then_a_delay(packets, latency_s, rate):
    """Arrival: max(offered, end of the one before) + size/rate + latency; dropped if the wait is too long."""
    shaper = Shaper([[0, latency_s], [latency_s, 0]], [[0, rate], [rate, 0]])
    now_s = end_s = 0.0
    expected = []
    for number, (gap_s, size) in enumerate(packets):
        now_s += gap_s
        shaper.offer(now_s, 0, 1, number, size)
        if max(end_s - now_s, 0) <= max(MIN_QUEUE_S, 2 * latency_s):
            end_s = max(now_s, end_s) + size / rate
            expected.append((pytest.approx(end_s + latency_s), 1, number))
    assert drain(shaper) == expected
    assert shaper.pairs[0, 1].drops == len(packets) - len(expected)


@given(
    packets=st.lists(st.tuples(gaps, sizes, st.integers(0, 1)), min_size=1, max_size=40), capacity=st.floats(2e5, 5e6)
)
def test_a_shared_capacity_bounds_the_sum(packets, capacity):
    """Two pairs of 5e6 bytes/s behind one capacity: in any time from the first packet it carries at most its rate."""
    shaper = Shaper([[0.0] * 3] * 3, [[0, 5e6, 5e6], [5e6, 0, 5e6], [5e6, 5e6, 0]], [(capacity, [(0, 2), (1, 2)])])
    now_s = 0.0
    size_of = {}
    for number, (gap_s, size, source) in enumerate(packets):
        now_s += gap_s
        size_of[number] = size
        shaper.offer(now_s, source, 2, number, size)
    start_s = packets[0][0]
    carried = 0
    for time_s, _, number in drain(shaper):
        carried += size_of[number]
        assert carried <= capacity * (time_s - start_s) * (1 + 1e-9) + 1e-6


def test_a_backlogged_pair_does_not_hold_the_shared_capacity_back():
    """A pair that waits for its own slow link reserves nothing: the other pair's packet passes at once."""
    shaper = Shaper([[0.0] * 3] * 3, [[0, 1e6, 1e6], [1e9, 0, 1e9], [1e6, 1e6, 0]], [(1e9, [(0, 2), (1, 2)])])
    for number in range(3):
        shaper.offer(0.0, 0, 2, number, 50_000)
    shaper.offer(0.0, 1, 2, "quick", 50_000)
    order = [packet for _, _, packet in drain(shaper)]
    assert order[0] == "quick"


@given(packets=traffic, lower_at=st.integers(0, 39))
def test_order_is_kept_when_the_latency_is_lowered_live(packets, lower_at):
    """Packets of a pair arrive in the order in which they were sent, whatever is changed meanwhile."""
    shaper = Shaper([[0, 0.3], [0.3, 0]], [[0, 1e9], [1e9, 0]])
    now_s = 0.0
    for number, (gap_s, size) in enumerate(packets):
        now_s += gap_s
        if number == lower_at:
            shaper.change(0, 1, latency_s=0.001)
        shaper.offer(now_s, 0, 1, number, size)
    assert [packet for _, _, packet in drain(shaper)] == list(range(len(packets)))


def test_a_cut_loses_what_is_offered_and_what_is_under_way():
    """After a cut nothing arrives; after joining again new packets do."""
    shaper = Shaper([[0, 0.1], [0.1, 0]], [[0, 1e6], [1e6, 0]])
    shaper.offer(0.0, 0, 1, "under way", 100)
    shaper.change(0, 1, connected=False)
    shaper.offer(0.01, 0, 1, "offered", 100)
    assert drain(shaper) == []
    shaper.change(0, 1, connected=True)
    shaper.offer(0.5, 0, 1, "after", 100)
    assert [packet for _, _, packet in drain(shaper)] == ["after"]
    assert shaper.pairs[0, 1].drops == 2


def test_no_link_carries_nothing():
    """A rate of 0 is no link."""
    shaper = Shaper([[0, 0], [0, 0]], [[0, 0], [1e6, 0]])
    shaper.offer(0.0, 0, 1, "lost", 100)
    shaper.offer(0.0, 1, 0, "arrives", 100)
    assert [packet for _, _, packet in drain(shaper)] == ["arrives"]


def test_loss_is_by_chance_at_the_given_rate():
    """A loss of 0.3 drops about that part of 2000 packets (5 standard deviations: 0.05)."""
    shaper = Shaper([[0, 0], [0, 0]], [[0, 1e12], [1e12, 0]], seed=1)
    shaper.change(0, 1, loss=0.3)
    for number in range(2000):
        shaper.offer(float(number), 0, 1, number, 100)
    assert abs(shaper.pairs[0, 1].drops / 2000 - 0.3) < 0.05
