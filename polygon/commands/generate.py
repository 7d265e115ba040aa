"""Draw a cluster at random.

    python -m polygon.generate --regions 64 --types 8 --devices 10240 --seed 0 -o cluster.yaml

Regions stand in the cities of the catalogue's table of cloud regions (several in one city where there are more regions
than cities); a link has the table's latency and bandwidth for its two cities, perturbed. Devices are dealt to the
regions unevenly, in full nodes of the usual size for their type where the number asked for allows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from polygon.commands import cli
from polygon.domain.cluster import Cluster
from polygon.domain.errors import require
from polygon.formats import catalogue, files
from polygon.formats.convert import cluster_data, cluster_from_spec
from polygon.formats.schema import ClusterSpec, check

NODES = {
    "a100-40gb": (8, ("efa-400g", "infiniband-hdr-x8")),
    "t4": (4, ("ethernet-25g", "ethernet-10g")),
    "h100-sxm": (8, ("efa-3200g", "infiniband-ndr-x8")),
    "v100-16gb": (8, ("ethernet-25g", "infiniband-edr")),
    "a100-80gb": (8, ("efa-400g", "infiniband-hdr-x8")),
    "l4": (4, ("ethernet-25g", "ethernet-100g")),
    "rtx-3090": (4, ("ethernet-10g", "ethernet-25g")),
    "h200": (8, ("efa-3200g", "infiniband-ndr-x8")),
    "a10": (4, ("ethernet-25g", "ethernet-100g")),
    "v100-32gb": (8, ("efa-100g", "infiniband-edr")),
    "rtx-4090": (8, ("ethernet-10g", "ethernet-100g")),
    "l40s": (8, ("ethernet-100g", "infiniband-hdr")),
    "gh200": (4, ("slingshot-200g", "infiniband-ndr")),
    "mi300x": (8, ("infiniband-ndr-x8", "roce-1600g")),
    "b200": (8, ("efa-3200g", "infiniband-ndr-x8")),
    "rtx-2080ti": (8, ("ethernet-10g", "ethernet-25g")),
}
"""Device types to draw from, the usual ones first: devices of a node, and links between nodes."""

LATENCY_SPREAD, BANDWIDTH_SPREAD = 0.1, 0.25
"""Standard deviation of the logarithm by which a link differs from the table's."""
MOST_TYPES_PER_REGION = 3


def generate(regions: int, types: int, devices: int, rng: np.random.Generator, name: str = "generated") -> Cluster:
    """Draw a cluster with exactly this many regions, device types and devices.

    Raises
    ------
    InputError
        Where the numbers do not go together.
    """
    return cluster_from_spec(check(ClusterSpec, drawn(regions, types, devices, rng, name)))


def drawn(regions: int, types: int, devices: int, rng: np.random.Generator, name: str) -> dict[str, Any]:
    """The cluster of `generate` as a file says it, device types and links by their names."""
    require(types <= len(NODES), "types", types, f"at most {len(NODES)}: {', '.join(NODES)}")
    require(devices >= regions, "devices", devices, f"at least one a region, {regions}")
    most_groups = MOST_TYPES_PER_REGION * regions
    require(
        types <= min(devices, most_groups),
        "types",
        types,
        f"at most {min(devices, most_groups)} (one a device, {MOST_TYPES_PER_REGION} a region)",
    )
    counts = _deal(devices, regions, rng)
    groups = _full_nodes(
        [
            [(kind, share) for kind, share in zip(kinds, _deal(count, len(kinds), rng), strict=True)]
            for kinds, count in zip(_types_of_regions(counts, types, rng), counts, strict=True)
        ],
        rng,
    )
    cities = _cities(regions, rng)
    table = catalogue.cloud_regions()
    data: dict[str, Any] = {"name": name, "regions": []}
    for r, city in enumerate(cities):
        place = table["regions"][city]
        data["regions"].append(
            {
                "name": f"{city.lower()}-{cities[: r + 1].count(city)}",
                "latitude": round(place["latitude"] + float(rng.uniform(-0.5, 0.5)), 2),
                "longitude": round(place["longitude"] + float(rng.uniform(-0.5, 0.5)), 2),
                "egress_usd_per_gb": place["egress_usd_per_gb"],
                "nodes": [node for kind, count in groups[r] for node in _nodes(kind, count, rng)],
            }
        )
    data["latency_ms"], data["bandwidth_gbps"] = _links(cities, rng)
    return data


def _deal(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Random whole numbers >= 1 with this sum, uneven by about a factor of three."""
    weights = rng.gamma(3.0, size=parts)
    shares = (total - parts) * weights / weights.sum()
    counts = np.floor(shares).astype(int) + 1
    rest = total - int(counts.sum())
    counts[np.argsort(np.floor(shares) - shares, kind="stable")[:rest]] += 1
    return [int(count) for count in counts]


def _types_of_regions(counts: list[int], types: int, rng: np.random.Generator) -> list[list[str]]:
    """Device types of every region: each type somewhere, none twice in one region."""
    groups = [min(int(rng.integers(1, MOST_TYPES_PER_REGION + 1)), types, count) for count in counts]
    room = [min(MOST_TYPES_PER_REGION, types, count) for count in counts]
    while sum(groups) < types:
        open_regions = [r for r, n in enumerate(groups) if n < room[r]]
        require(bool(open_regions), "types", types, f"at most {sum(groups)} with so few devices")
        groups[open_regions[int(rng.integers(len(open_regions)))]] += 1
    names = list(NODES)[:types]
    deck: list[str] = []
    kinds: list[list[str]] = []
    for number in groups:
        mine: list[str] = []
        while len(mine) < number:
            fresh = next((kind for kind in deck if kind not in mine), None)
            if fresh is None:
                deck += [names[i] for i in rng.permutation(types)]
                continue
            deck.remove(fresh)
            mine.append(fresh)
        kinds.append(mine)
    return kinds


def _full_nodes(groups: list[list[tuple[str, int]]], rng: np.random.Generator) -> list[list[tuple[str, int]]]:
    """Round device counts to full nodes, keeping their sum; at most one group gets a broken node beside full ones."""
    places = [(r, g) for r, region in enumerate(groups) for g in range(len(region))]
    counts = {place: groups[place[0]][place[1]][1] for place in places}
    sizes = {place: NODES[groups[place[0]][place[1]][0]][0] for place in places}
    spare = 0
    for place in places:
        rest = counts[place] % sizes[place] if counts[place] > sizes[place] else 0
        counts[place] -= rest
        spare += rest
    order = [places[i] for i in rng.permutation(len(places))]
    while spare >= min(sizes.values()):
        for place in order:
            added = sizes[place] if counts[place] >= sizes[place] else sizes[place] - counts[place]
            if added <= spare:
                counts[place] += added
                spare -= added
    counts[order[0]] += spare
    return [[(kind, counts[r, g]) for g, (kind, _) in enumerate(region)] for r, region in enumerate(groups)]


def _nodes(kind: str, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Full nodes of a type, and one smaller node for the rest."""
    size, links = NODES[kind]
    link = links[int(rng.integers(len(links)))]
    whole, rest = divmod(count, size)
    return [
        {"device": kind, "count": nodes, "devices_per_node": per_node, "inter_node": link}
        for nodes, per_node in ((whole, size), (1, rest))
        if nodes * per_node
    ]


def _cities(regions: int, rng: np.random.Generator) -> list[str]:
    """A city for every region; all cities before one comes again."""
    names = list(catalogue.cloud_regions()["regions"])
    rounds = math.ceil(regions / len(names))
    return [names[i] for _ in range(rounds) for i in rng.permutation(len(names))][:regions]


def _links(cities: list[str], rng: np.random.Generator) -> tuple[list[list[float | None]], list[list[float | None]]]:
    """Latency [ms] and bandwidth [Gbit/s] between the regions, the same both ways."""
    n = len(cities)
    latency_ms: list[list[float | None]] = [[None] * n for _ in range(n)]
    gbps: list[list[float | None]] = [[None] * n for _ in range(n)]
    for a in range(n):
        for b in range(a + 1, n):
            pair = city_link(cities[a], cities[b])
            latency = pair["latency_ms"] * math.exp(LATENCY_SPREAD * float(rng.standard_normal()))
            rate = pair["bandwidth_gbps"] * math.exp(BANDWIDTH_SPREAD * float(rng.standard_normal()))
            latency_ms[a][b] = latency_ms[b][a] = round(latency, 2)
            gbps[a][b] = gbps[b][a] = round(rate, 3)
    return latency_ms, gbps


def city_link(a: str, b: str) -> dict[str, Any]:
    """The catalogue's `latency_ms` and `bandwidth_gbps` between cloud regions of two cities."""
    table: Mapping[str, Any] = catalogue.cloud_regions()
    if a == b:
        return dict(table["same_region"])
    pairs: dict[frozenset[str], dict[str, Any]] = {frozenset(pair["between"]): pair for pair in table["pairs"]}
    # California has measured links to three regions only; the others are taken as Oregon's, its neighbour.
    return (
        pairs.get(frozenset((a, b))) or pairs[frozenset("Oregon" if city == "California" else city for city in (a, b))]
    )


def main(argv: list[str] | None = None) -> int:
    """Write a random cluster."""
    parser = cli.CommandParser(
        prog="polygon generate", description=__doc__.splitlines()[0], parents=[cli.output_options(out="the cluster")]
    )
    parser.add_argument("--regions", type=cli.whole(1, 1000), required=True, metavar="N", help="data centers")
    parser.add_argument("--types", type=cli.whole(1), required=True, metavar="N", help="device types in the cluster")
    parser.add_argument("--devices", type=cli.whole(1, 10**7), required=True, metavar="N", help="devices in all")
    parser.add_argument("--seed", type=cli.whole(0), default=0, help="of the random numbers (default %(default)s)")
    args = parser.parse_args(argv)
    name = f"generated-{args.regions}-{args.types}-{args.devices}-{args.seed}"
    cluster = generate(args.regions, args.types, args.devices, np.random.default_rng(args.seed), name)
    if args.json and args.out in (None, "-"):
        cli.emit(cluster_data(cluster), "", as_json=True)
        return cli.EXIT_OK
    files.write_cluster(args.out or "-", cluster)
    if args.out not in (None, "-"):
        summary = {"name": name, "regions": len(cluster.regions), "devices": cluster.devices, "file": args.out}
        counts: dict[str, int] = {}
        for pool in cluster.pools:
            counts[pool.device.name] = counts.get(pool.device.name, 0) + pool.devices
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        text = f"{args.out}: {cluster.devices} devices in {len(cluster.regions)} regions: {listed}"
        if args.json:
            cli.emit(summary | {"devices_by_type": dict(sorted(counts.items()))}, text, as_json=True)
        else:
            cli.Talk(quiet=args.quiet).say(text)
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
