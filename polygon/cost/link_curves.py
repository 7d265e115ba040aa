"""Measured links: bandwidth by message size, as in Sailor's network files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polygon.domain.cluster import Link
from polygon.formats.catalogue import device as device_by_name
from polygon.formats.measurement_specs import LinkCurvesSpec
from polygon.formats.schema import check


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """Measured bandwidth of a link by message size: :math:`B = c_0 l^2 + c_1 l + c_2`, l = log2(size / 1 MB).

    The fit turns negative for small messages and falls again beyond its vertex; neither is physical. Below 1 MB the
    time stays what latency makes it, above the vertex the bandwidth stays, and it never exceeds the largest measured.
    """

    coefficients: tuple[float, float, float]
    most_bytes_per_s: float

    def transfer_s(self, n_bytes: float, copies: int = 1) -> float:
        """Seconds for a message (or several of its size at once, over a link measured with as many)."""
        if n_bytes <= 0:
            return 0.0
        c0, c1, c2 = self.coefficients
        log_size = max(0.0, math.log2(n_bytes / 1e6))
        if c0 < 0:
            log_size = min(log_size, -c1 / (2 * c0))
        rate = min(self.most_bytes_per_s, max(c0 * log_size**2 + c1 * log_size + c2, 1e-3) * 1e9)
        # From 0.1 MB on a message takes what 1 MB does, below what 0.1 MB does at the same rate.
        return copies * max(n_bytes, 1e6 if n_bytes >= 1e5 else 1e5) / rate

    def line(self) -> Link:
        """Latency and bandwidth that come nearest to the curve between 1 MB and 512 MB (least squares of the ratio)."""
        sizes = 1e6 * 2.0 ** np.arange(10)
        seconds = np.array([self.transfer_s(float(n)) for n in sizes])
        # Divided by the measured seconds, so that small messages count as much as large ones.
        terms = np.stack([1 / seconds, sizes / seconds], axis=1)
        (latency_s, s_per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
        # No link is quicker than nothing: then the best line through the origin.
        if latency_s <= 0:
            latency_s, s_per_byte = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
        return Link(latency_s=float(latency_s), bytes_per_s=1 / float(s_per_byte))


@dataclass(frozen=True, kw_only=True)
class LinkCurves:
    """Every measured link of a `sailor_network` file."""

    between: Mapping[tuple[str, str, str, str], Mapping[int, LinkCurve]]
    """By (zone, device, zone, device) and how many devices on each side send at once."""
    inside: Mapping[str, LinkCurve]
    """By device type: two devices of one node."""
    devices_per_node: Mapping[str, int]

    def transfer_s(
        self, n_bytes: float, zone_a: str, device_a: str, zone_b: str, device_b: str, senders: int = 1
    ) -> float | None:
        """Seconds until each of some devices of a node has sent `n_bytes` to one of another node.

        None where the pair was measured in neither direction. Zones that are not known (empty) stand for any one.
        """
        names = (zone_a, device_a, zone_b, device_b)
        curves = self.between.get(names) or self.between.get((zone_b, device_b, zone_a, device_a))
        if curves is None and not zone_a:
            curves = next(
                (c for (za, da, zb, db), c in self.between.items() if za == zb and (da, db) == (device_a, device_b)),
                None,
            )
        if not curves:
            return None
        together = _measured_together(curves, senders)
        return curves[together].transfer_s(n_bytes, together)

    def link(self, zone_a: str, device_a: str, zone_b: str, device_b: str, devices_per_node: int) -> Link | None:
        """What all devices of a node together get to another node, as latency and bandwidth; None if not measured."""
        curves = self.between.get((zone_a, device_a, zone_b, device_b))
        return curves[_measured_together(curves, devices_per_node)].line() if curves else None


def _measured_together(curves: Mapping[int, LinkCurve], senders: int) -> int:
    """The largest number of devices that were measured sending at once, of no more than `senders`."""
    return max((count for count in curves if count <= senders), default=min(curves))


def link_curves(data: Mapping[str, Any]) -> LinkCurves:
    """Read the `sailor_network` format."""
    check(LinkCurvesSpec, data)

    def curve(entry: Mapping[str, Any]) -> LinkCurve:
        c0, c1, c2 = entry["coefficients_GBps"]
        return LinkCurve(coefficients=(c0, c1, c2), most_bytes_per_s=float(entry["max_measured_bandwidth_bytes_per_s"]))

    between_devices: dict[tuple[str, str, str, str], dict[int, LinkCurve]] = {}
    inside = {}
    for entry in data["links"]:
        if entry["sender_gpus"] == entry["receiver_gpus"]:
            sender, receiver = (device_by_name(entry[f"{end}_gpu_type"]).name for end in ("sender", "receiver"))
            key = (entry["sender_zone"], sender, entry["receiver_zone"], receiver)
            between_devices.setdefault(key, {})[int(entry["sender_gpus"])] = curve(entry)
    for entry in data.get("intra_node_links", []):
        if entry["gpus_in_pair_or_group"] == 2:
            inside[device_by_name(entry["gpu_type"]).name] = curve(entry)
    return LinkCurves(
        between=between_devices,
        inside=inside,
        devices_per_node={device_by_name(k).name: int(v) for k, v in data.get("gpus_per_node", {}).items()},
    )
