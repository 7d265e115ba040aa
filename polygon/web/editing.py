"""Clusters as the page edits them: what was given, without what the reader fills in, and that beside it."""

from __future__ import annotations

from typing import Any

from polygon.domain.cluster import Cluster
from polygon.domain.errors import located
from polygon.formats import catalogue, convert
from polygon.formats.schema import ClusterSpec, check
from polygon.formats.serialization import format_yaml


def lean(cluster: Cluster) -> dict[str, Any]:
    """Plain data of a cluster that reads back equal to it, without the links and prices that nobody gave and the
    devices that are the catalogue's."""
    data = convert.cluster_data(cluster)
    assumed = set(data.pop("defaults", ()))
    known = catalogue.devices()
    data["devices"] = {name: own for name, own in data["devices"].items() if known.get(name) != cluster.catalogue[name]}
    if not data["devices"]:
        del data["devices"]
    for region in data["regions"]:
        inside = region["intra_region"]
        if f"{region['name']}.intra_region" in assumed:
            del region["intra_region"]
            assumed.discard(f"{region['name']}.intra_region")
        if region["egress_usd_per_gb"] == 0:
            del region["egress_usd_per_gb"]
        for i, node in enumerate(region["nodes"]):
            name = f"{region['name']}.nodes[{i}].intra_node"
            if name in assumed or node["devices_per_node"] == 1:
                del node["intra_node"]
                assumed.discard(name)
            if node["inter_node"] == inside:
                del node["inter_node"]
    if assumed:
        data["defaults"] = sorted(assumed)
    return data


def default_link() -> dict[str, float]:
    """What is taken for the network inside a region of which nothing is said."""
    link = convert.DEFAULT_INTRA_REGION
    return {"latency_ms": convert.to_ms(link.latency_s), "bandwidth_gbps": convert.to_gbps(link.bytes_per_s)}


def resolved(data: Any) -> dict[str, Any]:
    """The cluster with every value spelt out, and the text of what was given.

    Raises
    ------
    InputError
        With the place that is wrong, as for a file.
    """
    with located("cluster."):
        cluster = convert.cluster_from_spec(check(ClusterSpec, data))
    return {"full": convert.cluster_data(cluster), "yaml": format_yaml(data), "devices": cluster.devices}
