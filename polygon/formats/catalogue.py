"""Devices, links, models and runtimes by name: the shipped catalogues, and what a user's file spells out instead.

Names are lower case with dashes; `A100`, `a100_40gb` or `NVIDIA A100-SXM4-40GB` are found as well. The numbers and
their sources are in `polygon/domain/catalogue/*.yaml`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from polygon.domain.block import LatentAttention, LinearAttention, RotaryScaling
from polygon.domain.cluster import Device, Link
from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.errors import InputError, fault, located, one_of, require
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.runtime import Runtime
from polygon.formats.hugging_face import hugging_face_model
from polygon.formats.schema import DeviceSpec, LinkSpec, ModelSpec, RuntimeEntry, RuntimeSpec, check
from polygon.formats.serialization import parse_json, parse_yaml

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
    known = {} if spec.rdma is None else {"rdma": spec.rdma}
    return Link(latency_s=latency_ms / MS, bytes_per_s=spec.bandwidth_gbps * GBPS, **known)


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
        efficiency=None if spec.efficiency is None else _efficiency(spec.efficiency),
        link=_link_of_device(spec),
        clock=spec.clock,
    )


def _efficiency(given: Any) -> MeasuredEfficiency:
    found = MeasuredEfficiency(**given.model_dump())
    found.require_fractions()
    return found


def _link_of_device(spec: DeviceSpec) -> Link | None:
    with located("link: "):
        return None if spec.link is None else link_from_spec(spec.link)


def model_from_spec(spec: Any) -> Model:
    """The model that a file spells out; kv_heads, head_dim and ffn_size have the usual defaults."""
    fields = spec.model_dump(exclude={"latent", "linear", "rope_scaling", "tower"})
    if fields["kv_heads"] is None:
        fields["kv_heads"] = spec.heads
    if fields["head_dim"] is None:
        whole = spec.hidden_size % max(1, spec.heads) == 0
        require(whole, "hidden_size", spec.hidden_size, Message("expected.multiple_of_heads", heads=spec.heads))
        fields["head_dim"] = spec.hidden_size // max(1, spec.heads)
    if fields["ffn_size"] is None:
        fields["ffn_size"] = 4 * spec.hidden_size
    fields |= {name: tuple(fields[name]) for name in ("attention_pattern", "notes")}
    return Model(
        **fields,
        latent=spec.latent and LatentAttention(**spec.latent.model_dump()),
        linear=spec.linear and LinearAttention(**spec.linear.model_dump()),
        rope_scaling=spec.rope_scaling and RotaryScaling(**spec.rope_scaling.model_dump()),
        tower=spec.tower and model_from_spec(spec.tower),
    )


def device(name: str) -> Device:
    """Device type of the catalogue, by name or alias.

    Raises
    ------
    InputError
        Naming the nearest known ones.
    """
    return devices()[_find(name, devices(), _device_aliases(), "device")]


def own_or_known(device_name: str) -> str:
    """The catalogue's name of a device; one that it does not have is the user's own and stays as it is."""
    try:
        return device(device_name).name
    except InputError:
        return device_name


def completed(spelt: Device) -> Device:
    """A device that a file spells out: of the name and peaks of one of the catalogue, it reaches as much of them and
    has its link, where the file does not say."""
    known = devices().get(spelt.name)
    if known is None or dict(known.flops) != dict(spelt.flops):
        return spelt
    return replace(spelt, efficiency=spelt.efficiency or known.efficiency, link=spelt.link or known.link)


def has_own_link(device: Device) -> bool:
    """Whether a file says what joins two of these devices, other than the catalogue does."""
    known = devices().get(device.name)
    return device.link is not None and (known is None or known.link != device.link)


def usual_link(device_name: str) -> Link:
    """What usually joins two devices of one node, for a device type of the catalogue."""
    found = device(device_name).link
    assert found is not None
    return found


def link(name: str) -> Link:
    """Link of the catalogue, by name."""
    return links()[_find(name, links(), {}, "link")]


def model(name: str) -> Model:
    """Model of the catalogue, by name or alias."""
    return models()[_find(name, models(), _model_aliases(), "model")]


def knows_model(name: str) -> bool:
    """Whether the catalogue has a model of this name or alias."""
    return _normal(name) in models() or _normal(name) in _model_aliases()


def runtime(name: str) -> Runtime:
    """Runtime of the catalogue, by name or alias (which means the newest version)."""
    return runtimes()[_find(name, runtimes(), _runtime_aliases(), "runtime")]


def runtime_of_program(program: str, date: str = "", architecture: str = "", precision: str = "") -> Runtime:
    """The runtime that a table means by a program's name, in the version of a date (year or year-month).

    The alias decides whose words stand first in the name, and of those the longest; `unknown` where none does. Without
    a date the program's own entry is meant, and a version of an architecture or a precision with these alone.
    """
    words = f"-{_normal(program)}-"
    found = [(words.index(f"-{alias}-"), -len(alias), alias) for alias in _runtime_aliases() if f"-{alias}-" in words]
    if not found:
        return runtimes()["unknown"]
    name = _runtime_aliases()[min(found)[2]]
    entries = _runtime_entries()
    if entries[name].program or not date:
        return runtimes()[name]  # a version by its own name
    versions = [
        other
        for other, entry in entries.items()
        if (other == name or entry.program == name)
        and entry.architecture in ("", architecture)
        and entry.precision in ("", precision)
    ]
    before = [other for other in versions if entries[other].since[: len(date)] <= date]
    return runtimes()[max(before or versions, key=lambda other: entries[other].since)]


def runtime_from_spec(spec: RuntimeSpec) -> Runtime:
    """The runtime that a file names, with the switches that it sets itself."""
    with located("runtime: "):
        known = runtime(spec.name)
    changed = {key: value for key, value in spec.model_dump(exclude={"name"}).items() if value is not None}
    return replace(known, **changed)


@cache
def runtimes() -> Mapping[str, Runtime]:
    """Every runtime of the catalogue, with the source of every switch that it sets."""
    known: dict[str, Runtime] = {}
    for name, entry in _runtime_entries().items():
        with located(f"catalogue: {name}: "):
            base = known[entry.extends] if entry.extends else Runtime()
            switches = {key: switch.value for key, switch in entry.switches.items()}
            spec = check(RuntimeSpec, {"name": name, **switches})
            known[name] = replace(
                base,
                name=name,
                version=entry.version,
                sources={**base.sources, **{key: switch.source for key, switch in entry.switches.items()}},
                **spec.model_dump(include=set(switches)),
            )
    return known


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
            if "config" in fields:
                config = parse_json(_text(f"configs/{fields['config']}"))
                known[name] = replace(hugging_face_model(config, name), source=fields["source"])
            else:
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


@cache
def _runtime_entries() -> Mapping[str, RuntimeEntry]:
    return {name: check(RuntimeEntry, entry) for name, entry in _load("runtimes.yaml").items()}


@cache
def _runtime_aliases() -> Mapping[str, str]:
    return _aliases({name: entry.aliases for name, entry in _runtime_entries().items()})


def _aliases(listed: Mapping[str, list[str]]) -> dict[str, str]:
    return {_normal(alias): name for name, aliases in listed.items() for alias in (name, *aliases)}


@cache
def _load(file: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = parse_yaml(_text(file))
    return found


def _text(file: str) -> str:
    return resources.files("polygon.domain.catalogue").joinpath(file).read_text("utf-8")


def _normal(name: str) -> str:
    """Lower case, words joined by dashes, without the maker's name."""
    return re.sub(r"^((nvidia|amd|geforce|instinct)-)+", "", re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-"))


def _find(name: str, known: Mapping[str, T], aliases: Mapping[str, str], kind: str) -> str:
    """Canonical name of a catalogue entry: by its name, an alias, or whole first words that only it begins with."""
    normal = _normal(name)
    if normal in known:
        return normal
    if normal in aliases:
        return aliases[normal]
    longer = sorted(
        {aliases.get(word, word) for word in [*known, *aliases] if normal and word.startswith(f"{normal}-")}
    )
    if len(longer) == 1:
        return longer[0]
    wanted = Message("expected.one_of", words=tuple(longer)) if longer else None
    found = Message("found.named", kind=kind, name=name)
    raise fault("", found, wanted or one_of(_nearest(normal, known, aliases), known))


def _nearest(name: str, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    """The canonical name of the alias that looks most like a name; the name itself where none does."""
    near = difflib.get_close_matches(name, [*known, *aliases], n=1, cutoff=0.5)
    return aliases.get(near[0], near[0]) if near else name
