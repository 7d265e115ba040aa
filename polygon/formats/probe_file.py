"""The report of `runners.probe` (`polygon-probe`, version 1): links as they were measured, put into a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from polygon.domain.cluster import Cluster, Link, Region, link_between
from polygon.domain.errors import fault, require_number
from polygon.domain.message import Message

FORMAT = "polygon-probe"


def region_links(links: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """Latency [s] and rate [bytes/s] by ordered pair of regions: medians over the measured pairs of ranks.

    Raises
    ------
    InputError
        For a link without its regions, round trip or rate, or where these are no numbers.
    """
    grouped: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for i, link in enumerate(links):
        try:
            pair = str(link["source_region"]), str(link["target_region"])
            rtt_s, rate = float(link["rtt_s"]), float(link["link_bytes_per_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise fault(
                f"links[{i}]", Message("found.event_without", what=str(error)[:60]), "a measured link"
            ) from None
        require_number(rtt_s, f"links[{i}].rtt_s", at_least=0)
        require_number(rate, f"links[{i}].link_bytes_per_s", above=0)  # 0 would be no link
        grouped.setdefault(pair, []).append((rtt_s / 2, rate))
    return {pair: (median(r[0] for r in rows), median(r[1] for r in rows)) for pair, rows in grouped.items()}


def measured_cluster(cluster: Cluster, report: Mapping[str, Any]) -> Cluster:
    """The cluster with the links that were measured in place of the given ones; others stay.

    Between regions the matrices change, and a direction that was not measured takes the other one's value only where
    the cluster had no link. Inside a region the link between its nodes changes (of its one node group, else between
    its groups), and is no default any more. The latency is half the least round trip. A probe sees what sockets
    reach: a link by RDMA between nodes with accelerators stays as it is given.

    Raises
    ------
    InputError
        For a region that the cluster does not have.
    """
    latency_s, bytes_per_s = cluster.latency_s.copy(), cluster.bytes_per_s.copy()
    regions = list(cluster.regions)
    measured = region_links(report["links"])
    known: set[str] = set()
    for (source, target), (one_way_s, rate) in measured.items():
        a, b = cluster.region_index(source), cluster.region_index(target)
        if a == b:
            if _beside_sockets(cluster, regions[a]):
                continue
            regions[a] = _with_inner_link(regions[a], Link(latency_s=one_way_s, bytes_per_s=rate))
            known |= set(_inner_names(regions[a]))
            continue
        known.add(link_between(*sorted((source, target), key=cluster.region_index)))
        latency_s[a, b], bytes_per_s[a, b] = one_way_s, rate
        if (target, source) not in measured and bytes_per_s[b, a] == 0:
            latency_s[b, a], bytes_per_s[b, a] = one_way_s, rate
    defaults = tuple(name for name in cluster.defaults if name not in known)
    return replace(cluster, regions=tuple(regions), latency_s=latency_s, bytes_per_s=bytes_per_s, defaults=defaults)


def _beside_sockets(cluster: Cluster, region: Region) -> bool:
    """Whether what a probe inside a region would measure is not what its devices use."""
    groups = region.node_groups
    link = region.intra_region if len(groups) > 1 else groups[0].inter_node
    return link.rdma and not all(cluster.catalogue[group.device].is_cpu for group in groups)


def _inner_names(region: Region) -> Iterator[str]:
    """What `Cluster.defaults` calls the link inside a region that is measured."""
    yield f"{region.name}.intra_region"
    if len(region.node_groups) == 1:
        yield f"{region.name}.nodes[0].inter_node"


def _with_inner_link(region: Region, link: Link) -> Region:
    if len(region.node_groups) > 1:
        return replace(region, intra_region=link)
    group = replace(region.node_groups[0], inter_node=link)
    return replace(region, node_groups=(group,), intra_region=link)
