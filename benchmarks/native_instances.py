"""Write the native benchmark's problems, instances/native/*.yaml.

    python -m benchmarks.native_instances

Where a problem's cluster is not one of instances/ it is put together here from the catalogue's devices and links: cloud
regions with what DT-FM's authors measured between them (`polygon.formats.catalogue.cloud_regions`), campuses and homes
with round numbers, large ones drawn by `polygon generate` with a fixed seed. What is written is the benchmark: change a
line here and the best known results of that problem are void.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polygon.commands.generate import city_link, drawn
from polygon.formats import catalogue
from polygon.formats.files import write_text
from polygon.formats.serialization import format_yaml

FOLDER = Path(__file__).resolve().parents[1] / "instances" / "native"

Nodes = tuple[str, int, int]
"""Device, nodes, devices of a node."""
Cluster = dict[str, Any] | str
FEW = 8
"""Regions whose links are written one by one; of more in matrices."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A problem and what it is like."""

    name: str
    about: str
    cluster: Cluster
    model: str
    batch: tuple[int, int]
    """Sequences of a step, and tokens of a sequence."""
    constraints: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The file."""
        sequences, tokens = self.batch
        data = {"format": "polygon-problem", "cluster": self.cluster, "model": self.model}
        data["batch"] = {"global_batch": sequences, "seq_len": tokens}
        if self.constraints:
            data["constraints"] = self.constraints
        return f"# {self.about}\n{format_yaml(data)}"


def _region(name: str, nodes: Sequence[Nodes], inside: str, **more: Any) -> dict[str, Any]:
    """A region whose nodes are all joined by one kind of link."""
    listed = [{"device": d, "count": n, "devices_per_node": k, "inter_node": inside} for d, n, k in nodes]
    return {"name": name.lower(), **more, "intra_region": inside, "nodes": listed}


def site(name: str, nodes: Sequence[Nodes], inside: str) -> Cluster:
    """One data center."""
    return {"name": name, "regions": [_region("here", nodes, inside)]}


def cloud(name: str, regions: Mapping[str, Sequence[Nodes]], inside: str) -> Cluster:
    """Cloud regions in cities, with the links that were measured between these."""
    places = catalogue.cloud_regions()["regions"]
    keys = ("latitude", "longitude", "egress_usd_per_gb")
    pairs = [(a, b, city_link(a, b)) for a, b in itertools.combinations(regions, 2)]
    return {
        "name": name,
        "regions": [_region(c, nodes, inside, **{k: places[c][k] for k in keys}) for c, nodes in regions.items()],
        "links": [
            {"between": [a.lower(), b.lower()], "latency_ms": l["latency_ms"], "bandwidth_gbps": l["bandwidth_gbps"]}
            for a, b, l in pairs
        ],
    }


def apart(
    name: str, regions: Mapping[str, Sequence[Nodes]], inside: str, latency_ms: float, gbps: float, **link: float
) -> Cluster:
    """Campuses (or homes, or halls) any two of which are equally far apart."""
    cluster = {"name": name, "regions": [_region(r, nodes, inside) for r, nodes in regions.items()]}
    if len(regions) <= FEW:
        link |= {"latency_ms": latency_ms, "bandwidth_gbps": gbps}
        return cluster | {"links": [{"between": [a, b], **link} for a, b in itertools.combinations(regions, 2)]}
    n = len(regions)
    matrix = {"latency_ms": latency_ms, "bandwidth_gbps": gbps, **link}
    return cluster | {key: [[None if a == b else x for b in range(n)] for a in range(n)] for key, x in matrix.items()}


def homes() -> Cluster:
    """Eight homes with a gaming card each: what leaves a home is slow, and shared by all that it talks to."""
    cards = ["rtx-4090", "rtx-3090", "rtx-3090", "rtx-2080ti", "rtx-4090", "rtx-3090", "rtx-2080ti", "rtx-3090"]
    up_gbps = [0.5, 0.2, 0.1, 0.2, 0.5, 0.05, 0.1, 0.2]
    names = [f"home{i}" for i in range(8)]
    regions = [
        _region(name, [(card, 1, 1)], "ethernet-1g", egress_gbps=gbps)
        for name, card, gbps in zip(names, cards, up_gbps, strict=True)
    ]
    links = [
        {
            "between": [names[a], names[b]],
            "latency_ms": 10 + 3 * abs(a - b),
            "bandwidth_gbps": min(up_gbps[a], up_gbps[b]),
        }
        for a, b in itertools.combinations(range(8), 2)
    ]
    return {"name": "homes", "regions": regions, "links": links}


def _drawn(regions: int, types: int, devices: int) -> Cluster:
    """What `polygon generate` draws with seed 0."""
    return drawn(regions, types, devices, np.random.default_rng(0), f"generated-{regions}-{types}-{devices}-0")


LOCAL = {"local_steps": [1, 10, 100]}
"""Weights of regions may meet once in so many steps."""
TINY = (
    Instance(
        name="tiny-2-t4-one-site",
        about="Two nodes with a T4 each and 10 Gbit/s: little to decide but micro-batches and memory.",
        cluster=site("two-t4", [("t4", 2, 1)], "ethernet-10g"),
        model="gpt3-350m",
        batch=(32, 1024),
    ),
    Instance(
        name="tiny-2-a100-two-cities",
        about="An A100 in London, one in Frankfurt: gradients or activations over 1.1 Gbit/s, or one city alone.",
        cluster=cloud(
            "london-frankfurt", {"London": [("a100-40gb", 1, 1)], "Frankfurt": [("a100-40gb", 1, 1)]}, "efa-400g"
        ),
        model="gpt3-350m",
        batch=(64, 1024),
    ),
    Instance(
        name="tiny-4-rtx-two-hosts",
        about="Two gaming hosts under a desk with 1 Gbit/s between them, one of them faster.",
        cluster=site("desk", [("rtx-3090", 1, 2), ("rtx-4090", 1, 2)], "ethernet-1g"),
        model="gpt3-760m",
        batch=(48, 1024),
    ),
    Instance(
        name="tiny-4-2080ti-vit",
        about="A vision transformer on one host of four small cards: short sequences, memory is what matters.",
        cluster=site("host", [("rtx-2080ti", 1, 4)], "ethernet-10g"),
        model="vit-large",
        batch=(256, 197),
    ),
    Instance(
        name="tiny-4-a100-local-steps",
        about="Two cities with two A100 each, where weights may meet once in 1, 10 or 100 steps.",
        cluster=cloud(
            "oregon-ireland", {"Oregon": [("a100-40gb", 1, 2)], "Ireland": [("a100-40gb", 1, 2)]}, "efa-400g"
        ),
        model="gpt3-350m",
        batch=(64, 1024),
        constraints=LOCAL,
    ),
    Instance(
        name="tiny-6-a100-beside-t4",
        about="Two A100 beside four T4 in one hall: how much the slow ones can help.",
        cluster=site("hall", [("a100-40gb", 1, 2), ("t4", 1, 4)], "ethernet-25g"),
        model="gpt3-760m",
        batch=(64, 1024),
    ),
    Instance(
        name="tiny-6-three-labs",
        about="Three labs of one campus with two cards of another type each, 1 Gbit/s between the buildings.",
        cluster=apart(
            "labs",
            {
                "physics": [("rtx-a5000", 1, 2)],
                "biology": [("rtx-3090", 1, 2)],
                "mathematics": [("v100-16gb", 1, 2)],
            },
            "ethernet-10g",
            0.5,
            1.0,
        ),
        model="gpt3-350m",
        batch=(48, 1024),
    ),
    Instance(
        name="tiny-8-a10-two-zones",
        about="Two zones of a city with a node of four A10 each; the model does not fit one card.",
        cluster=apart("zones", {"zone-a": [("a10", 1, 4)], "zone-b": [("a10", 1, 4)]}, "ethernet-25g", 1.0, 5.0),
        model="gpt3-2.7b",
        batch=(64, 2048),
    ),
)
"""Two to eight devices: most can be proved."""
SMALL = (
    Instance(
        name="small-8-h100-dense",
        about="One node of eight H100: the grid's home.",
        cluster=site("node", [("h100-sxm", 1, 8)], "efa-3200g"),
        model="llama3-8b",
        batch=(128, 4096),
    ),
    Instance(
        name="small-8-h100-long",
        about="The same node, eight sequences of 32 thousand tokens: sequences have to be cut.",
        cluster=site("node", [("h100-sxm", 1, 8)], "efa-3200g"),
        model="llama3.2-1b",
        batch=(8, 32768),
    ),
    Instance(
        name="small-8-a100-experts",
        about="Two nodes of four A100 with 100 Gbit/s: experts apart or not.",
        cluster=site("nodes", [("a100-80gb", 2, 4)], "ethernet-100g"),
        model="deepseek-moe-16b",
        batch=(64, 2048),
    ),
    Instance(
        name="small-8-two-campus",
        about="Two campuses, four device types, 5 ms and 1 Gbit/s.",
        cluster="../two-campus.yaml",
        model="gpt3-1.3b",
        batch=(128, 2048),
    ),
    Instance(
        name="small-8-homes",
        about="Eight homes with a gaming card each and 0.05 to 0.5 Gbit/s of upload.",
        cluster=homes(),
        model="gpt3-350m",
        batch=(256, 1024),
    ),
    Instance(
        name="small-8-homes-local-steps",
        about="The same homes, where weights may meet once in 1, 10 or 100 steps.",
        cluster=homes(),
        model="gpt3-350m",
        batch=(256, 1024),
        constraints=LOCAL,
    ),
    Instance(
        name="small-16-a100-v100-one-hall",
        about="A node of eight A100 and one of eight V100 with 25 Gbit/s between.",
        cluster=site("hall", [("a100-40gb", 1, 8), ("v100-16gb", 1, 8)], "ethernet-25g"),
        model="gpt3-2.7b",
        batch=(128, 2048),
    ),
    Instance(
        name="small-16-regional",
        about="A100, V100 and T4 in four regions of one country.",
        cluster="../regional-16.yaml",
        model="gpt3-1.3b",
        batch=(256, 2048),
    ),
    Instance(
        name="small-16-rtx-lab",
        about="Four hosts of four RTX 4090 without NVLink: tensor parallelism is dear even inside a host.",
        cluster=site("lab", [("rtx-4090", 4, 4)], "ethernet-10g"),
        model="qwen2.5-7b",
        batch=(64, 4096),
    ),
    Instance(
        name="small-16-h100-experts-two-sites",
        about="Two sites of eight H100 with 10 Gbit/s between; 128 small experts a layer.",
        cluster=apart("sites", {"east": [("h100-sxm", 1, 8)], "west": [("h100-sxm", 1, 8)]}, "efa-3200g", 10.0, 10.0),
        model="qwen3-30b-a3b",
        batch=(128, 4096),
    ),
    Instance(
        name="small-16-h100-mi300x",
        about="A node of H100 and one of MI300X, which has more memory and more FLOP, on one fabric.",
        cluster=site("hall", [("h100-sxm", 1, 8), ("mi300x", 1, 8)], "infiniband-ndr"),
        model="llama2-13b",
        batch=(128, 4096),
    ),
    Instance(
        name="small-24-europe",
        about="Eight A100 in each of London, Ireland and Frankfurt.",
        cluster=cloud(
            "europe", {city: [("a100-40gb", 1, 8)] for city in ("London", "Ireland", "Frankfurt")}, "efa-400g"
        ),
        model="gpt3-6.7b",
        batch=(256, 2048),
    ),
    Instance(
        name="small-24-three-types-one-rack",
        about="A100, V100 and T4, a node of eight each, one rack with 25 Gbit/s.",
        cluster=site("rack", [("a100-80gb", 1, 8), ("v100-16gb", 1, 8), ("t4", 1, 8)], "ethernet-25g"),
        model="gpt3-2.7b",
        batch=(256, 2048),
    ),
    Instance(
        name="small-32-pacific",
        about="Two nodes of four L4 in each of four cities around the Pacific: 34 to 148 ms, 0.6 to 1.1 Gbit/s.",
        cluster=cloud(
            "pacific", {city: [("l4", 2, 4)] for city in ("Tokyo", "Seoul", "Singapore", "Sydney")}, "ethernet-25g"
        ),
        model="gpt3-1.3b",
        batch=(512, 2048),
    ),
    Instance(
        name="small-32-v100-ethernet",
        about="Four nodes of eight V100 with 25 Gbit/s between.",
        cluster=site("nodes", [("v100-32gb", 4, 8)], "ethernet-25g"),
        model="gpt3-6.7b",
        batch=(256, 2048),
    ),
    Instance(
        name="small-32-budget",
        about="Sailor's zone of 32 A100 and 80 USD an hour: two thirds of what all of it costs.",
        cluster="../sailor-a100.yaml",
        model="opt-350m",
        batch=(2048, 2048),
        constraints={"most_usd_per_hour": 80},
    ),
)
"""Eight to 32 devices."""
CONTINENTS = {city: [("a100-40gb", 2, 8)] for city in ("Oregon", "Ireland", "Singapore", "Sydney")}
MEDIUM = (
    Instance(
        name="medium-48-ptafm-testbed",
        about="PTAFM's test bed: six regions with 12 A100 and 36 T4.",
        cluster="../ptafm-testbed.yaml",
        model="gpt3-1.3b",
        batch=(512, 2048),
    ),
    Instance(
        name="medium-64-regional",
        about="A100, V100 and T4 in four regions of one country.",
        cluster="../regional-64.yaml",
        model="gpt3-1.3b",
        batch=(512, 2048),
    ),
    Instance(
        name="medium-64-world",
        about="Eight device types in eight regions of the world.",
        cluster="../world-64.yaml",
        model="gpt3-2.7b",
        batch=(512, 2048),
    ),
    Instance(
        name="medium-64-dtfm-worldwide",
        about="DT-FM's case 5: single V100 in eight regions of the world.",
        cluster="../dtfm-worldwide.yaml",
        model="gpt3-1.3b",
        batch=(1024, 2048),
    ),
    Instance(
        name="medium-64-dtfm-universities",
        about="DT-FM's case 3: two universities with 32 V100 each.",
        cluster="../dtfm-two-universities.yaml",
        model="gpt3-1.3b",
        batch=(1024, 2048),
    ),
    Instance(
        name="medium-64-irregular",
        about="Single V100 at random over ten cities.",
        cluster="../dtfm-irregular0.yaml",
        model="gpt3-1.3b",
        batch=(512, 2048),
    ),
    Instance(
        name="medium-64-continents-local-steps",
        about="16 A100 on each of four continents, where weights may meet once in 1, 10 or 100 steps.",
        cluster=cloud("continents", CONTINENTS, "efa-400g"),
        model="gpt3-2.7b",
        batch=(512, 2048),
        constraints=LOCAL,
    ),
    Instance(
        name="medium-64-h100-two-sites",
        about="70 billion parameters on two sites of 32 H100 with 100 Gbit/s between and 20 shared by all flows.",
        cluster=apart(
            "sites",
            {"east": [("h100-sxm", 4, 8)], "west": [("h100-sxm", 4, 8)]},
            "infiniband-ndr-x8",
            8.0,
            10.0,
            capacity_gbps=20.0,
        ),
        model="llama3-70b",
        batch=(512, 4096),
    ),
    Instance(
        name="medium-64-h100-experts",
        about="Eight experts a layer on one fabric of 64 H100.",
        cluster=site("fabric", [("h100-sxm", 8, 8)], "infiniband-ndr-x8"),
        model="mixtral-8x7b",
        batch=(512, 4096),
    ),
    Instance(
        name="medium-64-h100-long",
        about="64 H100 and 16 sequences of 128 thousand tokens.",
        cluster=site("fabric", [("h100-sxm", 8, 8)], "infiniband-ndr-x8"),
        model="qwen2.5-7b",
        batch=(16, 131072),
    ),
    Instance(
        name="medium-80-aws",
        about="A node of eight V100 in each of ten cloud regions.",
        cluster="../aws-regions.yaml",
        model="gpt3-1.3b",
        batch=(1024, 2048),
    ),
    Instance(
        name="medium-96-ptafm",
        about="PTAFM's seven data centers: 12 A100 and 84 T4, every device a node.",
        cluster="../ptafm-7dc.yaml",
        model="gpt3-1.3b",
        batch=(1024, 2048),
    ),
    Instance(
        name="medium-96-campus",
        about="Four nodes of eight A100 and 16 of four T4 in two buildings of one campus, 40 Gbit/s between them.",
        cluster=apart("campus", {"new": [("a100-80gb", 4, 8)], "old": [("t4", 16, 4)]}, "ethernet-100g", 0.2, 40.0),
        model="gpt3-6.7b",
        batch=(512, 2048),
    ),
    Instance(
        name="medium-128-sailor-a100-v100",
        about="Sailor's figure 8b: 32 A100 and 96 V100 in one zone.",
        cluster="../sailor-a100-v100.yaml",
        model="gpt-neo-2.7b",
        batch=(2048, 2048),
    ),
    Instance(
        name="medium-128-spot-zones",
        about="Spot T4 in four zones of a region, 5 ms and 2 Gbit/s apart.",
        cluster=apart("zones", {f"zone-{z}": [("t4", 8, 4)] for z in "abcd"}, "ethernet-25g", 5.0, 2.0),
        model="gpt3-1.3b",
        batch=(1024, 2048),
    ),
    Instance(
        name="medium-160-sailor-zones",
        about="Sailor's figure 10: 32 A100 in each of five zones of two regions.",
        cluster="../sailor-5zones.yaml",
        model="gpt-neo-2.7b",
        batch=(2048, 2048),
    ),
)
"""48 to 160 devices."""
LARGE = (
    Instance(
        name="large-192-drawn",
        about="Drawn: ten regions, three device types.",
        cluster=_drawn(10, 3, 192),
        model="gpt3-6.7b",
        batch=(1024, 2048),
    ),
    Instance(
        name="large-256-edge",
        about="32 places of an edge cloud with eight L4 each, 10 ms and 2 Gbit/s apart.",
        cluster=apart("edge", {f"edge{i}": [("l4", 2, 4)] for i in range(32)}, "ethernet-25g", 10.0, 2.0),
        model="gpt3-1.3b",
        batch=(2048, 2048),
    ),
    Instance(
        name="large-256-h100-experts",
        about="235 billion parameters, 22 of them active, on one fabric of 256 H100.",
        cluster=site("fabric", [("h100-sxm", 32, 8)], "infiniband-ndr-x8"),
        model="qwen3-235b-a22b",
        batch=(1024, 4096),
    ),
    Instance(
        name="large-384-h100-b200",
        about="An older hall of 256 H100 and a new one of 128 B200, ten kilometres of fibre between them.",
        cluster=apart(
            "halls",
            {"old": [("h100-sxm", 32, 8)], "new": [("b200", 16, 8)]},
            "infiniband-ndr-x8",
            0.1,
            100.0,
            capacity_gbps=800.0,
        ),
        model="llama3-70b",
        batch=(1024, 4096),
    ),
    Instance(
        name="large-512-regional",
        about="A100, V100 and T4 in four regions of one country.",
        cluster="../regional-512.yaml",
        model="gpt3-13b",
        batch=(2048, 2048),
    ),
    Instance(
        name="large-1024-superpod",
        about="One data center with 128 nodes of eight A100.",
        cluster="../superpod.yaml",
        model="llama3-70b",
        batch=(2048, 4096),
    ),
    Instance(
        name="large-1024-drawn",
        about="Drawn: 16 regions, four device types.",
        cluster=_drawn(16, 4, 1024),
        model="gpt3-13b",
        batch=(4096, 2048),
    ),
    Instance(
        name="large-1536-a100-175b",
        about="175 billion parameters on one fabric of 1,536 A100.",
        cluster=site("fabric", [("a100-80gb", 192, 8)], "infiniband-hdr-x8"),
        model="gpt3-175b",
        batch=(1536, 2048),
    ),
    Instance(
        name="huge-3072-drawn-local-steps",
        about="Drawn: 24 regions, six device types, where weights may meet once in 1, 10 or 100 steps.",
        cluster=_drawn(24, 6, 3072),
        model="llama-30b",
        batch=(4096, 2048),
        constraints=LOCAL,
    ),
    Instance(
        name="huge-10240-drawn",
        about="Drawn: 64 regions, eight device types; polygon generate --regions 64 --types 8 --devices 10240.",
        cluster=_drawn(64, 8, 10240),
        model="llama3-70b",
        batch=(4096, 2048),
    ),
)
"""192 devices to ten thousand."""


def instances() -> list[Instance]:
    """All of them, small ones first."""
    return [*TINY, *SMALL, *MEDIUM, *LARGE]


def main() -> None:
    """Write every file that differs."""
    FOLDER.mkdir(exist_ok=True)
    for instance in instances():
        write_text(FOLDER / f"{instance.name}.yaml", instance.text())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
