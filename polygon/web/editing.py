"""Clusters as the page edits them: what was given, without what the reader fills in, and that beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polygon.cost.bench_fit import with_benches
from polygon.domain.cluster import Cluster, Link
from polygon.domain.errors import Phrase, fault, located
from polygon.domain.plan import Problem
from polygon.formats import bench_file, catalogue, convert, default_links, probe_file
from polygon.formats.schema import BenchSpec, ClusterSpec, check
from polygon.formats.serialization import check_text, format_yaml, parse_json


def lean(cluster: Cluster) -> dict[str, Any]:
    """Plain data of a cluster that reads back equal to it, without the links and prices that nobody gave and the
    devices that are the catalogue's."""
    data = convert.cluster_data(cluster)
    assumed = set(data.pop("defaults", ()))
    known = catalogue.devices()
    data["devices"] = {name: own for name, own in data["devices"].items() if known.get(name) != cluster.catalogue[name]}
    if not data["devices"]:
        del data["devices"]
    for region, groups in zip(data["regions"], (it.node_groups for it in cluster.regions), strict=True):
        inside = region["intra_region"]
        if f"{region['name']}.intra_region" in assumed:
            del region["intra_region"]
            assumed.discard(f"{region['name']}.intra_region")
        if region["egress_usd_per_gb"] == 0:
            del region["egress_usd_per_gb"]
        for i, node in enumerate(region["nodes"]):
            name = f"{region['name']}.nodes[{i}].intra_node"
            device = cluster.catalogue[node["device"]]
            own = catalogue.has_own_link(device) and groups[i].intra_node == device.link
            if name in assumed or own or node["devices_per_node"] == 1:
                del node["intra_node"]
                assumed.discard(name)
            if node["inter_node"] == inside:
                del node["inter_node"]
    if assumed:
        data["defaults"] = sorted(assumed)
    return data


MEASURED = "what was measured: a report of polygon-probe or of polygon-bench, in JSON"


def with_measured(problem: Problem, text: str) -> dict[str, Any]:
    """The cluster of a problem with what a file of measurements says in place of what was given or assumed.

    Parameters
    ----------
    problem : Problem
        Its precision says which measurements of a device are taken.
    text : str
        The report of `runners.probe` (links) or the file of `polygon bench-device` (what a device reaches, and the
        links inside its nodes).

    Returns
    -------
    dict
        `cluster` as the page edits it, and `measured`: names of the values that the file has, as `values` calls them.

    Raises
    ------
    InputError
        For another file, and for regions or devices that the cluster does not have.
    """
    check_text(text, MEASURED)
    if not text.lstrip().startswith("{"):
        raise fault("", Phrase("no JSON object"), MEASURED)
    data = parse_json(text)
    kind = data.get("format")
    if kind == probe_file.FORMAT and isinstance(data.get("links"), list):
        cluster = probe_file.measured_cluster(problem.cluster, data)
    elif kind == "polygon-bench":
        bench = bench_file.bench_from_spec(check(BenchSpec, data))
        cluster = with_benches(problem, [bench]).cluster
        old, new = (_inside_nodes(c) for c in (problem.cluster, cluster))
        found = {name for name in new if new[name] != old[name]}
        kept = tuple(name for name in cluster.defaults if name not in found)
        cluster = replace(cluster, defaults=kept)
    else:
        raise fault("format", kind, MEASURED)
    before, after = values(lean(problem.cluster)), values(lean(cluster))
    return {"cluster": lean(cluster), "measured": sorted(name for name in after if after[name] != before.get(name))}


def _inside_nodes(cluster: Cluster) -> dict[str, Link]:
    return {
        f"{region.name}.nodes[{i}].intra_node": group.intra_node
        for region in cluster.regions
        for i, group in enumerate(region.node_groups)
    }


def values(data: dict[str, Any]) -> dict[str, Any]:
    """What can be measured of a cluster, by names that outlive other edits: `region.intra_region`,
    `region.nodes[0].intra_node`, `a > b.latency_ms`, `device.name`."""
    found: dict[str, Any] = {f"device.{name}": device for name, device in data.get("devices", {}).items()}
    for region in data["regions"]:
        found[f"{region['name']}.intra_region"] = region.get("intra_region")
        for i, node in enumerate(region["nodes"]):
            for key in ("intra_node", "inter_node"):
                found[f"{region['name']}.nodes[{i}].{key}"] = node.get(key)
    names = [region["name"] for region in data["regions"]]
    for key in ("latency_ms", "bandwidth_gbps"):
        for a, row in zip(names, data.get(key) or [], strict=False):
            found |= {f"{a} > {b}.{key}": value for b, value in zip(names, row, strict=True) if a != b}
    return {name: value for name, value in found.items() if value is not None}


def default_link() -> dict[str, float]:
    """What is taken for the network inside a region of which nothing is said."""
    link = convert.DEFAULT_INTRA_REGION
    return {"latency_ms": convert.to_ms(link.latency_s), "bandwidth_gbps": convert.to_gbps(link.bytes_per_s)}


def default_link_between() -> dict[str, float]:
    """What is taken for a link between two regions with places of which nothing is said: its rate, and its latency by
    the distance."""
    floor_s, s_per_km = default_links.latency_by_distance()
    return {"between_gbps": convert.to_gbps(default_links.DEFAULT_BYTES_PER_S),
            "latency_ms_floor": floor_s * 1e3, "latency_ms_per_km": s_per_km * 1e3}  # fmt: skip


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
