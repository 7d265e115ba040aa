"""Devices, links and models by name: the shipped catalogues, and what a user's file spells out instead.

Names are lower case with dashes; `A100`, `a100_40gb` or `NVIDIA A100-SXM4-40GB` are found as well. The numbers and
their sources are in `polygon/domain/catalogue/*.yaml`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from polygon.domain.cluster import Device, Link
from polygon.domain.errors import InputError, located, one_of, require
from polygon.domain.model import Model
from polygon.notation import parse_yaml
from polygon.schema import DeviceSpec, LinkSpec, ModelSpec, check

GIB = 2**30
GB = 1e9
TFLOP = 1e12
MS = 1e3
"""Milliseconds in a second."""
GBPS = 1e9 / 8
"""Bytes/s in 1 Gbit/s."""

T = TypeVar("T")


def link_from_spec(spec: LinkSpec) -> Link:
    """The link that a file names or spells out."""
    if spec.link is not None:
        return link(spec.link)
    assert spec.bandwidth_gbps is not None
    latency_ms = spec.latency_ms if spec.latency_ms is not None else (spec.latency_us or 0.0) / 1e3
    return Link(latency_s=latency_ms / MS, bytes_per_s=spec.bandwidth_gbps * GBPS)


def device_from_spec(name: str, spec: DeviceSpec) -> Device:
    """The device type that a file (or the catalogue) spells out."""
    memory_bytes = spec.memory_gib * GIB if spec.memory_gib is not None else (spec.memory_gb or 0.0) * GB
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        flops={precision: value * TFLOP for precision, value in spec.tflops.items()},
        memory_bytes_per_s=spec.memory_bandwidth_gb_per_s * GB,
        power_w=spec.power_w,
        price_usd_per_hour=spec.price_usd_per_hour,
        architecture=spec.architecture,
        source=spec.source,
    )


def model_from_spec(spec: Any) -> Model:
    """The model that a file spells out; kv_heads, head_dim and ffn_size have the usual defaults."""
    fields = spec.model_dump()
    if fields["kv_heads"] is None:
        fields["kv_heads"] = spec.heads
    if fields["head_dim"] is None:
        whole = spec.hidden_size % max(1, spec.heads) == 0
        require(whole, "hidden_size", spec.hidden_size, f"a multiple of heads = {spec.heads}, or head_dim beside it")
        fields["head_dim"] = spec.hidden_size // max(1, spec.heads)
    if fields["ffn_size"] is None:
        fields["ffn_size"] = 4 * spec.hidden_size
    return Model(**fields)


def device(name: str) -> Device:
    """Device type of the catalogue, by name or alias.

    Raises
    ------
    InputError
        Naming the nearest known ones.
    """
    return devices()[_find(name, devices(), _device_aliases(), "device")]


def usual_link(device_name: str) -> Link:
    """What usually joins two devices of one node, for a device type of the catalogue."""
    spec = _device_specs()[_find(device_name, devices(), _device_aliases(), "device")]
    assert spec.link is not None
    return link_from_spec(spec.link)


def link(name: str) -> Link:
    """Link of the catalogue, by name."""
    return links()[_find(name, links(), {}, "link")]


def model(name: str) -> Model:
    """Model of the catalogue, by name or alias."""
    return models()[_find(name, models(), _model_aliases(), "model")]


def knows_model(name: str) -> bool:
    """Whether the catalogue has a model of this name or alias."""
    return _normal(name) in models() or _normal(name) in _model_aliases()


@cache
def devices() -> Mapping[str, Device]:
    """Every device type of the catalogue."""
    return {name: device_from_spec(name, spec) for name, spec in _device_specs().items()}


@cache
def links() -> Mapping[str, Link]:
    """Every link of the catalogue."""
    return {
        name: link_from_spec(check(LinkSpec, {key: entry[key] for key in entry if key != "source"}))
        for name, entry in _load("links.yaml").items()
    }


@cache
def models() -> Mapping[str, Model]:
    """Every model of the catalogue."""
    known: dict[str, Model] = {}
    for name, entry in _load("models.yaml").items():
        fields = {key: value for key, value in entry.items() if key not in ("aliases", "published_parameters")}
        with located(f"catalogue: {name}: "):
            known[name] = model_from_spec(check(ModelSpec, {"name": name, **fields}))
    return known


@cache
def published_parameters() -> Mapping[str, float]:
    """Parameter count that a model's authors state, as precisely as they state it."""
    return {name: entry["published_parameters"] for name, entry in _load("models.yaml").items()}


@cache
def cloud_regions() -> Mapping[str, Any]:
    """Cities of a public cloud (`regions`), links between them (`pairs`) and inside one (`same_region`)."""
    return _load("regions.yaml")


@cache
def _device_specs() -> Mapping[str, DeviceSpec]:
    return {name: check(DeviceSpec, entry) for name, entry in _load("devices.yaml").items()}


@cache
def _device_aliases() -> Mapping[str, str]:
    return _aliases({name: spec.aliases for name, spec in _device_specs().items()})


@cache
def _model_aliases() -> Mapping[str, str]:
    return _aliases({name: entry.get("aliases", []) for name, entry in _load("models.yaml").items()})


def _aliases(listed: Mapping[str, list[str]]) -> dict[str, str]:
    return {_normal(alias): name for name, aliases in listed.items() for alias in (name, *aliases)}


@cache
def _load(file: str) -> Mapping[str, Any]:
    return parse_yaml(resources.files("polygon.domain.catalogue").joinpath(file).read_text("utf-8"))


def _normal(name: str) -> str:
    """Lower case, words joined by dashes, without the maker's name."""
    return re.sub(r"^((nvidia|amd|geforce|instinct)-)+", "", re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-"))


def _find(name: str, known: Mapping[str, T], aliases: Mapping[str, str], kind: str) -> str:
    """Canonical name of a catalogue entry."""
    normal = _normal(name)
    if normal in known:
        return normal
    if normal in aliases:
        return aliases[normal]
    raise InputError(f"found {kind} {name!r}, expected {one_of(_nearest(normal, known, aliases), known)}")


def _nearest(name: str, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    """The canonical name of the alias that looks most like a name; the name itself where none does."""
    near = difflib.get_close_matches(name, [*known, *aliases], n=1, cutoff=0.5)
    return aliases.get(near[0], near[0]) if near else name
