"""Links between regions that nobody gave: by distance where both have a place, told as defaults, else a fault."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.domain.errors import InputError
from polygon.formats import catalogue
from polygon.formats.convert import cluster_data
from polygon.formats.default_links import DEFAULT_BYTES_PER_S, MOST_REGIONS, km_between, latency_by_distance, parts
from polygon.formats.recognition import cluster_from_data
from tests.nightly import cases

PLACES = {"virginia": (39.0, -77.0), "frankfurt": (50.0, 9.0), "tokyo": (36.0, 140.0)}


def cluster(links=(), places=PLACES, **more):
    """Regions of one node, at these places."""
    nodes = [{"device": "t4", "count": 1, "devices_per_node": 4}]
    regions = [
        {"name": name, "nodes": nodes} | ({"latitude": place[0], "longitude": place[1]} if place else {})
        for name, place in places.items()
    ]
    return cluster_from_data({"regions": regions, "links": list(links), **more}, "c")


def test_distances():
    """Zurich to Lausanne 174 km; around the date line the short way; antipodes half the circumference."""
    assert km_between((47.38, 8.54), (46.52, 6.63)) == pytest.approx(174, abs=3)
    assert km_between((0, 179), (0, -179)) == pytest.approx(222.4, abs=0.5)
    assert km_between((0, 0), (0, 180)) == pytest.approx(20015, abs=1)


def test_latencies_are_those_of_one_way():
    """Of all known pairs no less than light in fibre takes, near half of what ping says; of two campuses few ms."""
    table, (floor_s, s_per_km) = catalogue.cloud_regions(), latency_by_distance()
    off = []
    for pair in table["pairs"]:
        a, b = ((table["regions"][name]["latitude"], table["regions"][name]["longitude"]) for name in pair["between"])
        km = km_between(a, b)
        assert floor_s + s_per_km * km > km / 204e3
        off.append((floor_s + s_per_km * km) / (pair["latency_ms"] / 2e3))
    assert min(off) > 0.5 and max(off) < 1.5 and np.mean(off) == pytest.approx(1, abs=0.1)
    assert 1e-3 < floor_s + s_per_km * 30 < 3e-3


def test_regions_that_nothing_joins_are_joined_by_distance():
    """Both ways alike, told as defaults beside the networks inside, and so they stay in a file that is written."""
    it = cluster()
    floor_s, s_per_km = latency_by_distance()
    for a, here in enumerate(PLACES.values()):
        for b, there in enumerate(PLACES.values()):
            if a != b:
                assert it.bytes_per_s[a, b] == DEFAULT_BYTES_PER_S
                assert it.latency_s[a, b] == pytest.approx(floor_s + s_per_km * km_between(here, there), abs=1e-4)
    assert it.default_pairs == {"virginia - frankfurt": (0, 1), "virginia - tokyo": (0, 2), "frankfurt - tokyo": (1, 2)}
    again = cluster_from_data(cluster_data(it), "c")
    assert again.defaults == it.defaults and np.array_equal(again.latency_s, it.latency_s)


def test_what_a_file_says_stays():
    """A link that it gives; regions that others join have none of their own; where it says that there is no link, and
    where one direction is missing, it is at fault."""
    link = {"between": ["virginia", "frankfurt"], "latency_ms": 44, "bandwidth_gbps": 5}
    it = cluster([link])
    assert set(it.default_pairs) == {"virginia - tokyo", "frankfurt - tokyo"} and it.latency_s[0, 1] == 0.044
    other = {"between": ["frankfurt", "tokyo"], "latency_ms": 120, "bandwidth_gbps": 1}
    assert not cluster([link, other]).default_pairs and not cluster([link, other]).connected(0, 2)
    none = [[None, 0, 0], [0, None, 0], [0, 0, None]]
    with pytest.raises(InputError, match="no links between virginia and frankfurt"):
        cluster(latency_ms=none, bandwidth_gbps=none)
    two = dict(list(PLACES.items())[:2])
    with pytest.raises(InputError, match="no links"):
        cluster([{"from": "virginia", "to": "frankfurt", "latency_ms": 44, "bandwidth_gbps": 5}], two)


def test_without_a_place_nothing_is_made_up():
    """The fault says what would help; of very many regions neither."""
    with pytest.raises(InputError, match=r"between virginia and tokyo.*latitude and longitude"):
        cluster(places=PLACES | {"tokyo": None})
    with pytest.raises(InputError, match="no links"):
        cluster(places={f"r{i}": (i, i) for i in range(MOST_REGIONS + 1)})


@settings(max_examples=cases(30))
@given(links=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_parts_are_what_links_both_ways_join(links):
    """As the closure of the links that exist in both directions says."""
    rate = np.zeros((7, 7))
    for a, b in links:
        rate[a, b] = 1.0
    joined = ((rate > 0) & (rate.T > 0)) | np.eye(7, dtype=bool)
    for _ in range(7):
        joined = joined @ joined
    assert parts(rate).tolist() == joined.argmax(axis=1).tolist()
