"""The flow of micro-batches between regions by hand: shares, ways, and how long messages and links take.

The kernels run as plain Python: compiled they can only be called by other kernels.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from polygon.planning import flow
from polygon.planning.flow import lock_shares, places_for

KERNELS = {name: getattr(flow, name).py_func for name in ("transport", "_way_s", "_even", "_pair_crowd")}
NO_HOSTS = SimpleNamespace(busiest=np.ones((3, 3)))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """What the kernels call is Python, too; of stages on the same nodes the tests say which there are."""
    for name, function in KERNELS.items():
        monkeypatch.setattr(flow, name, function)


def bank_of(
    regions=2, *, latency_s=1.0, rate=10.0, card=1e9, capacity=1e9, wire=100.0, codec_s=0.0, pools=None, p2p=False
):
    """A pool in every region (or more), links all alike where no matrix is given; workers wait for their messages."""
    pools = pools or regions

    def matrix(value, n):
        return np.array(np.broadcast_to(value, (n, n)), dtype=float)

    links = SimpleNamespace(
        latency_s=matrix(latency_s, pools),
        bytes_per_s=matrix(rate, pools),
        card_bytes_per_s=np.array(np.broadcast_to(card, pools), dtype=float),
        capacity_bytes_per_s=matrix(capacity, regions),
        node_latency_s=np.full(pools, 0.25),
        node_bytes_per_s=np.full(pools, 200.0),
    )
    return SimpleNamespace(
        stands=np.arange(regions),
        links=links,
        activation_wire=matrix(wire, regions),
        activation_codec_s=matrix(codec_s, regions),
        overlap=SimpleNamespace(p2p=p2p),
        micro_batches=8,
    )


def places_of(stages=2, regions=2, *, nodes=1, workers=1, rates=1.0):
    """Stages with equally much in every region, none of which is sent anywhere yet."""
    places = places_for(stages, regions)
    places.nodes[:], places.workers[:], places.rates[:] = nodes, workers, rates
    places.pool[:] = np.arange(regions)
    return places


def sent(bank, supply, demand):
    """The flow from supplies to demands, None where a link is missing."""
    out = np.full((len(supply), len(supply)), 7.0)
    there = flow.transport(bank, np.arange(len(supply)), np.array(supply), np.array(demand), out)
    return out.tolist() if there else None


def test_a_region_takes_micro_batches_by_its_speed():
    """Not locked: every stage by itself."""
    rates, share = np.array([[1.0, 3.0], [2.0, 2.0], [9.0, 9.0]]), np.full((3, 2), 7.0)
    lock_shares(rates, 2, False, share)
    assert share.tolist() == [[0.25, 0.75], [0.5, 0.5], [7, 7]]


def test_locked_regions_go_by_their_slowest_stage():
    """A run of stages in the same regions has one share; where a region is missing the next run begins."""
    rates = np.array([[1.0, 3.0, 0.0], [4.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 4.0, 2.0], [0.0, 1.0, 0.0]])
    share = np.zeros((5, 3))
    lock_shares(rates, 5, True, share)
    expected = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0.5, 0.5], [0, 1, 0]]
    assert share.tolist() == expected
    lock_shares(rates, 1, True, share)
    assert share[0].tolist() == [0.25, 0.75, 0]


def test_what_can_stay_in_its_region_stays():
    """Half of the first region's, all of the second's."""
    assert sent(bank_of(), [0.5, 0.5], [0.25, 0.75]) == [[0.25, 0.25], [0, 0.5]]
    assert sent(bank_of(rate=0.0), [0.5, 0.5], [0.5, 0.5]) == [[0.5, 0], [0, 0.5]]


def test_the_quickest_way_goes_first():
    """Latency and bytes over the rate: 0 to 3 takes 2 + 100 / 50, 0 to 2 only 1 + 100 / 10, all others longer."""
    latency, rate = np.full((4, 4), 100.0), np.full((4, 4), 10.0)
    latency[0, 2], latency[0, 3] = 1.0, 2.0
    rate[0, 3] = 50.0
    flows = sent(bank_of(4, latency_s=latency, rate=rate), [0.5, 0.5, 0, 0], [0, 0, 0.75, 0.25])
    assert flows == [[0, 0, 0.25, 0.25], [0, 0, 0.5, 0], [0] * 4, [0] * 4]
    # Of equal ways the first.
    assert sent(bank_of(4), [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]) == [[0, 0, 0.5, 0], [0, 0, 0, 0.5], [0] * 4, [0] * 4]


def test_where_there_is_no_link_nothing_is_sent():
    """Over another region nothing goes; the way that is there is taken."""
    rate = np.array([[0, 0.0, 10], [10, 0, 10], [10, 10, 0]])
    assert sent(bank_of(3, rate=rate), [1, 0.0, 0], [0, 1.0, 0]) is None
    assert sent(bank_of(3, rate=rate), [0.5, 0.5, 0], [0, 0.5, 0.5]) == [[0, 0, 0.5], [0, 0.5, 0], [0, 0, 0]]


def test_places_add_up_the_classes_of_a_region():
    """Two classes in the first region, one in the second; what was there before is gone."""
    stages = SimpleNamespace(
        members=[2, 2], classes=np.array([[0, 1], [0, 2]]), counts=np.array([[2, 1], [4, 1]]),
        seconds=np.array([[0.5, 0.25], [2.0, 4.0]]),
    )  # fmt: skip
    bank = SimpleNamespace(region=[0, 0, 1], pool=[0, 1, 2])
    places = places_of(workers=9, rates=9.0)
    flow.find_places.py_func(bank, stages, 2, places)
    assert places.workers.tolist() == [[3, 0], [4, 1]]
    assert places.rates.tolist() == [[8, 0], [2, 0.25]]
    assert places.slowest.tolist() == [[0.5, 0], [2, 4]]
    assert places.pool.tolist() == [[1, 0], [0, 2]]


def test_messages_of_all_stages_meet_on_a_link():
    """Three stages: a fourth from 0 to 1 and a half back; activations one way, their gradients the other."""
    places = places_of(3)
    places.share[:] = [[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]
    places.busy[:] = 7.0
    assert flow.find_flows.py_func(bank_of(), places, NO_HOSTS, 3, False)
    assert places.flow[0].tolist() == [[0.5, 0.25], [0, 0.25]]
    assert places.flow[1].tolist() == [[0.5, 0], [0.5, 0]]
    assert places.busy.tolist() == [[2.0, 0.75], [0.75, 0.5]]
    assert not flow.find_flows.py_func(bank_of(rate=0.0), places, NO_HOSTS, 3, False)


def test_stages_on_shared_nodes_send_less_from_them(monkeypatch):
    """Of what stays in a region a quarter stays on its node: the rest leaves the one and arrives at the other."""
    told = []
    monkeypatch.setattr(flow, "near_part", lambda hosts, s, t, r, workers: 0.25)
    monkeypatch.setattr(flow, "find_crowds", lambda hosts, n, nodes, leaving, crowd: told.append(leaving.tolist()))
    places = places_of(2)
    places.share[:] = [[0.75, 0.25], [0.25, 0.75]]
    places.leaving[:] = 7.0
    assert flow.find_flows.py_func(bank_of(), places, NO_HOSTS, 2, True)
    assert places.near[0].tolist() == [0.25, 0.25]
    # Flow: a quarter stays in either region, half goes from 0 to 1.
    assert told == [[[0.1875 + 0.5, 0.1875], [0.1875, 0.5 + 0.1875]]]


def test_a_message_waits_for_its_workers_share_of_the_slowest_part_of_its_way():
    """Two workers on a node: half of the link each, or of the card, or of what all regions' flows may take."""
    places = places_of(workers=[[2, 1], [1, 4]])
    places.flow[0, 0, 1] = 0.5
    bank = bank_of(latency_s=[[0, 1], [2, 0]], codec_s=3.0)
    # Down 1 + 100 / (10 / 2) + 3, up by one of four workers 2 + 100 / (10 / 4) + 3; 8 messages of a half over 10,
    # of which the last takes 20 or 40.
    found = flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, False)
    assert found == (0.5 * (24 + 45), 40.0, 20.0, 0.25 * (24 + 45))
    bank = bank_of(latency_s=[[0, 1], [2, 0]], codec_s=3.0, card=[5, 8.0])
    # Cards of 5 and 8: 100 / 2.5 down, 100 / 2 up; the fullest is 400 bytes over 5.
    assert flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, False)[:2] == (0.5 * (44 + 55), 80.0)
    bank = bank_of(latency_s=[[0, 1], [2, 0]], codec_s=3.0, capacity=[[0, 4], [2, 0]])
    # 100 / (4 / 2) down, 100 / (2 / 4) up; 400 / 2.
    assert flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, False)[:2] == (0.5 * (54 + 205), 200.0)


def test_messages_that_go_while_workers_compute_take_turns():
    """Each has all of the link, or of the card, however many workers and stages send over it."""
    places = places_of(workers=[[2, 1], [1, 4]])
    places.flow[0, 0, 1] = 0.5
    places.crowd[:], places.busy[0, 1] = 3.0, 0.5
    bank = bank_of(latency_s=[[0, 1], [2, 0]], codec_s=3.0, card=[5, 80.0], p2p=True)
    # Down 1 + 100 / 5 + 3, up 2 + 100 / 10 + 3; the card of 5 is shared with what is twice as much: 400 over 5 / 3.
    found = flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, True)
    assert found == (0.5 * (24 + 15), pytest.approx(240.0), pytest.approx(220.0), 0.25 * (24 + 15))


def test_several_nodes_send_at_once():
    """Three nodes, the busiest with half of the work: two even ones, each at the link's or the card's rate."""
    places = places_of(nodes=[[3, 1], [1, 1]], workers=[[3, 1], [1, 1]], rates=[[1.0, 0], [0, 1.0]])
    places.flow[0, 0, 1] = 1.0
    hosts = SimpleNamespace(busiest=np.array([[0.5, 1], [1, 0.25]]))
    # From 2 nodes to 4 even ones: min(10 * 4, 30) * 2 = 60 down, min(10 * 2, 30) * 4 = 80 up; 800 bytes.
    found = flow.boundary_s.py_func(bank_of(card=30.0), places, hosts, 2, 0, False)
    assert found[1] == pytest.approx(800 / 60)
    # One of three workers on three nodes has a link of its own.
    assert found[0] == 1 + 100 / 10
    assert found[2] == pytest.approx(800 / 60 - 100 / 10)
    assert found[3] == 1 + 100 / 10


def test_the_slowest_message_counts_and_the_mean_by_its_part():
    """Three quarters stay in region 0 (pool 2 there), a quarter goes: no limit of regions on what stays."""
    places = places_of(workers=1)
    places.pool[:] = [[2, 1], [0, 1]]
    places.flow[0, 0, 0], places.flow[0, 0, 1] = 0.75, 0.25
    latency = np.array([[9, 4.0, 2], [6, 9, 9], [1, 9, 9]])
    bank = bank_of(latency_s=latency, pools=3, capacity=[[1e-9, 1e9], [1e9, 1e-9]])
    # Stays: 1 + 10 down (pool 2 to 0), 2 + 10 up. Goes, by the pools that stand for regions: 4 + 10 and 6 + 10.
    mean = 0.5 * (0.75 * (11 + 12) + 0.25 * (14 + 16))
    assert flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, False) == (0.5 * (14 + 16), 60.0, 50.0, mean)


def test_messages_on_a_node_take_its_own_link(monkeypatch):
    """All stay on it: its latency, 100 bytes at 200 a second, and no link is filled; a quarter does: the rest fills."""
    places = places_of(regions=1)
    places.flow[0, 0, 0], places.near[0, 0] = 1.0, 1.0
    bank = bank_of(1)
    assert flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, True) == (0.75, 0.0, 0.0, 0.75)
    places.near[0, 0] = 0.25
    places.busy[0, 0] = 0.75
    places.crowd[:] = 1.0
    assert flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, True) == (11.0, 60.0, 50.0, 11.0)
    # Three times the messages on its pair of nodes, and five times on its card of 15: 10 / 3 and 3 bytes a second.
    places.busy[0, 0] = 1.5
    monkeypatch.setattr(flow, "_pair_crowd", lambda *_: 3.0)
    assert flow.boundary_s.py_func(bank, places, NO_HOSTS, 2, 0, True)[0] == pytest.approx(1 + 30)
    places.crowd[:] = 5.0
    assert flow.boundary_s.py_func(bank_of(1, card=15.0), places, NO_HOSTS, 2, 0, True)[0] == pytest.approx(1 + 100 / 3)


def test_micro_batches_are_away_for_the_slowest_way_and_in_the_mean():
    """From region 0 a quarter stays and three quarters go to 1, whose workers are slow; then all comes to region 0."""
    places = places_of(3, workers=[[1, 0], [2, 4], [1, 0]], rates=[[1, 0.0], [1, 0.5], [0.25, 0.0]])
    places.slowest[:] = [[1, 0], [3, 9], [5, 0]]
    places.flow[0, 0] = [0.25, 0.75]
    places.flow[1, 0, 0] = places.flow[1, 1, 0] = 0.5
    places.message[0, 0], places.message[1, :, 0] = [1, 2], [10, 20]
    places.trip[:], places.mean_trip[:] = 7.0, 7.0
    flow.find_trips.py_func(places, 3)
    # Last stage: nobody behind it. Before it: the message and its slowest worker, and in the mean 1 / 0.25 of work.
    assert places.trip.tolist() == [[2 + 9 + 25, 0], [10 + 5, 20 + 5], [0, 0]]
    mean = 0.25 * (1 + 2 / 1 + 14) + 0.75 * (2 + 4 / 0.5 + 24)
    assert places.mean_trip.tolist() == [[mean, 0], [10 + 4, 20 + 4], [0, 0]]


def test_cards_send_activations_down_and_gradients_up():
    """The middle one of three stages in region 0: all to 1 and all back to 1; 8 micro-batches of 200 bytes over 50."""
    places = places_of(3)
    places.flow[0, 1, 0] = places.flow[1, 0, 1] = 1.0
    assert flow.cards_s.py_func(bank_of(card=50.0), places, NO_HOSTS, 3, False) == 8 * 200 / 50
    # The first sends over a card of 40, and only its activations; two even nodes have two cards.
    bank = bank_of(card=[1e3, 40.0])
    assert flow.cards_s.py_func(bank, places, NO_HOSTS, 3, False) == 8 * 100 / 40
    hosts = SimpleNamespace(busiest=np.full((3, 2), 0.5))
    assert flow.cards_s.py_func(bank, places, hosts, 3, False) == 8 * 100 / 80
    # Of what goes to the own region a quarter stays on the node; others' messages take two thirds of the card.
    places = places_of(2)
    places.flow[0, 0, 0], places.near[0, 0], places.crowd[:] = 1.0, 0.25, 3.0
    assert flow.cards_s.py_func(bank_of(card=50.0), places, NO_HOSTS, 2, True) == 8 * 75 * 3 / 50
    assert flow.cards_s.py_func(bank_of(card=50.0), places, NO_HOSTS, 2, False) == 8 * 100 / 50


def test_stages_share_the_node_pairs_that_both_use(monkeypatch):
    """Four stages, 0 and 2 in region 0 on one of two nodes together, 1 and 3 in region 1 on the same node.

    Own: all of 0's micro-batches over 2 x 1 pairs. Stage 2 sends a half to 3 (its other half elsewhere) and its
    gradients of all to 1: half of 0's nodes are among its two, whichever they are.
    """
    places = places_of(4, nodes=[[2, 0], [0, 1], [2, 0], [0, 1]])
    places.flow[0, 0, 1], places.flow[1, 1, 0], places.flow[2, 0, 1] = 1.0, 1.0, 0.5
    monkeypatch.setattr(flow, "common_nodes", lambda hosts, s, t, region: 1)
    own = 1.0 * 1 * 1 / 2
    others = 0.5 * 0.5 * 1 / 2 + 1.0 * 0.5 * 1 / 2
    found = flow._pair_crowd(places, NO_HOSTS, 4, 0, 1, 0, 1)
    assert found == pytest.approx((own + others) / own)
    # Nobody beside it on its nodes: its own messages alone.
    monkeypatch.setattr(flow, "common_nodes", lambda hosts, s, t, region: 0)
    assert flow._pair_crowd(places, NO_HOSTS, 4, 0, 1, 0, 1) == 1.0
