"""The shipped clusters can be read, are whole, and say the numbers of their sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polygon.formats import files

FOLDER = Path("instances")
DEVICES = {
    "aws-regions": 80,
    "laptop": 4,
    "one-node": 4,
    "ptafm-7dc": 96,
    "ptafm-testbed": 48,
    "sailor-5zones": 160,
    "sailor-a100": 32,
    "sailor-a100-v100": 128,
    "superpod": 1024,
    "two-campus": 8,
    "world-64": 64,
} | {f"regional-{n}": n for n in (16, 32, 64, 128, 256, 512)}
DTFM = {"two-universities": "case3", "regional": "case4", "worldwide": "case5"} | {
    name: name for name in ("irregular0", "irregular1")
}
CLUSTERS = sorted(file for pattern in ("*.yaml", "*.txt") for file in FOLDER.glob(pattern))


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.name)
def test_every_cluster_is_whole(file):
    """Named as its file, with the stated number of devices, every region reachable from every other."""
    cluster = files.read_cluster(file)
    n = len(cluster.regions)
    assert cluster.name == file.stem
    assert cluster.devices == DEVICES.get(file.stem, 64)
    assert all(cluster.connected(a, b) for a in range(n) for b in range(n))
    assert all(pool.device.price_usd_per_hour >= 0 for pool in cluster.pools)


def test_every_cluster_is_explained():
    """The README names every file."""
    text = (FOLDER / "README.md").read_text("utf-8")
    listed = [file.name for file in CLUSTERS if not file.name.startswith("regional-")]
    assert [name for name in listed if f"`{name}`" not in text] == []


def dtfm(case):
    """DT-FM's numbers, region by region: devices, latency [s], bandwidth [bytes/s]."""
    data = json.loads((FOLDER / "dtfm" / f"{case}.json").read_text("utf-8"))
    counts = [region["devices"] for region in data["regions"]]
    return counts, np.array(data["latency_ms"]) / 1e3, np.array(data["bandwidth_gbit_per_s"]) * 1e9 / 8


@pytest.mark.parametrize(("name", "case"), DTFM.items())
def test_dtfm_clusters_have_dtfm_s_numbers(name, case):
    """Between regions and inside one, the YAML says what DT-FM's exact matrices say."""
    cluster = files.read_cluster(FOLDER / f"dtfm-{name}.yaml")
    counts, latency_s, bytes_per_s = dtfm(case)
    assert [pool.devices for pool in cluster.pools] == counts
    np.testing.assert_array_equal(cluster.latency_s, latency_s)
    np.testing.assert_array_equal(cluster.bytes_per_s, bytes_per_s)


@pytest.mark.parametrize(("name", "case"), [("datacenter", "case1"), ("spot", "case2")])
def test_dtfm_nodes_share_what_dtfm_gives_each_device(name, case):
    """A node pair's bandwidth, shared by the devices of a node, is what DT-FM gives a pair of devices."""
    cluster = files.read_cluster(FOLDER / f"dtfm-{name}.yaml")
    counts, latency_s, bytes_per_s = dtfm(case)
    assert sum(counts) == cluster.devices
    assert not latency_s.any()
    for pool in cluster.pools:
        share = pool.inter_node.bytes_per_s / pool.devices_per_node
        assert share == bytes_per_s[0, -1]
    assert cluster.pools[0].intra_node.bytes_per_s == bytes_per_s[0, 0]
