"""Links between regions that nobody gave: what they are taken for, by one rule for files, commands and the page.

Where nothing joins two regions and both have a place, their link is one of `DEFAULT_BYTES_PER_S` whose latency grows
with the distance as between the cities of the catalogue's cloud. It is a default like the network inside a region of
which nothing is said, and told as one (`Cluster.defaults`). Of a region without a place nothing is made up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from polygon.domain.cluster import Link, Region
from polygon.formats import catalogue

Place = tuple[float, float]
"""Latitude and longitude [degrees]."""

MOST_REGIONS = 32
"""Of more, who has them is to say how they are joined."""

DEFAULT_BYTES_PER_S = 1e9 / 8
"""1 Gbit/s, a placeholder: what two clouds give a flow over the world lies around it."""


def km_between(a: Place, b: Place) -> float:
    """Great-circle distance on a sphere of 6371 km."""
    (la, oa), (lb, ob) = (tuple(map(math.radians, point)) for point in (a, b))
    h = math.sin((lb - la) / 2) ** 2 + math.cos(la) * math.cos(lb) * math.sin((ob - oa) / 2) ** 2
    return 2 * 6371 * math.asin(min(1.0, math.sqrt(h)))


@cache
def latency_by_distance() -> tuple[float, float]:
    """Floor [s] and slope [s/km] of one-way latency over distance, by the catalogue's cloud pairs.

    Their delays are round trips: half of each. Least squares of what the line is off as a part of the latency, as near
    pairs would else be told several times theirs: 2 ms and 1 ms every 142 km (light in fibre: 204), 15 % off in the
    mean.
    """
    table = catalogue.cloud_regions()
    places = {name: (p["latitude"], p["longitude"]) for name, p in table["regions"].items()}
    rows = [(km_between(places[a], places[b]), pair["latency_ms"] / 2e3) for pair in table["pairs"]
            for a, b in [pair["between"]]]  # fmt: skip
    km, latency_s = np.array(rows).T
    slope, floor = np.polyfit(km, latency_s, 1, w=1 / latency_s)
    return max(1e-4, float(floor)), float(slope)


def place_of(region: Region) -> Place | None:
    """Where a region is, if that is known."""
    return None if region.latitude is None or region.longitude is None else (region.latitude, region.longitude)


def between(a: Region, b: Region) -> Link | None:
    """What is taken for the link between two regions; None where one of them has no place."""
    here, there = place_of(a), place_of(b)
    if here is None or there is None:
        return None
    floor_s, s_per_km = latency_by_distance()
    return Link(latency_s=round(floor_s + s_per_km * km_between(here, there), 4), bytes_per_s=DEFAULT_BYTES_PER_S)


def fill(
    regions: Sequence[Region], latency_s: np.ndarray, bytes_per_s: np.ndarray, said: np.ndarray
) -> list[tuple[int, int]]:
    """Fill in, both ways, the links of regions with places that nothing joins.

    Parameters
    ----------
    latency_s, bytes_per_s : ndarray, shape (regions, regions)
        Changed where a link is filled in.
    said : ndarray of bool, shape (regions, regions)
        Whether a file says something of a direction, be it that there is no link: that stays as it is.

    Returns
    -------
    list of pairs of int
        The regions that were joined, lower number first.
    """
    part = parts(bytes_per_s)
    if not part.any() or len(part) > MOST_REGIONS:
        return []
    found = []
    for a, b in np.argwhere(np.triu(part[:, None] != part[None, :])).tolist():
        link = between(regions[a], regions[b])
        if said[a, b] or said[b, a] or link is None:
            continue
        for pair in ((a, b), (b, a)):
            latency_s[pair], bytes_per_s[pair] = link.latency_s, link.bytes_per_s
        found.append((a, b))
    return found


def parts(bytes_per_s: np.ndarray) -> np.ndarray:
    """Of every region the lowest number of those to which links lead that exist in both directions."""
    both_ways = (bytes_per_s > 0) & (bytes_per_s.T > 0)
    part = np.arange(len(bytes_per_s))
    for first in range(len(part)):
        if part[first] < first:
            continue
        frontier = [first]
        while frontier:
            fresh = np.flatnonzero(both_ways[frontier.pop()] & (part > first))
            part[fresh] = first
            frontier += fresh.tolist()
    return part
