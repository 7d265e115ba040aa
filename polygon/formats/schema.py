"""What a file or a request may say: one strict schema for YAML, JSON and HTTP.

Keys carry the units that people use (`latency_ms`, `bandwidth_gbps`, `memory_gib`); `polygon.formats.convert` turns
them into the frozen domain data in SI units, and back. Everything is strict: an unknown key, a wrong type, NaN and
infinity are errors, and the message of the first one alone lets the user mend it.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from polygon.domain import bench
from polygon.domain.block import LatentAttention, LinearAttention, RotaryScaling
from polygon.domain.cluster import EVERY_REGION
from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.errors import InputError, one_of
from polygon.domain.message import Message
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints, LinkUse, Plan, Stage, StageRule
from polygon.domain.runtime import Runtime


class _FirstFault(FailFast):
    """Of a list: its first fault is told, so the others need not be looked for. Unlike its parent it fits in unions."""

    __hash__ = object.__hash__


FIRST_FAULT = _FirstFault()


def _seen(text: str) -> str:
    """A name that somebody can see, on one line."""
    if text.isspace():
        raise ValueError
    if any(unicodedata.category(sign) in ("Cc", "Zl", "Zp") for sign in text):
        raise _refuse(_short(text), "a name on one line, without control characters")
    return text


Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Count = Annotated[int, Ge(1)]
Index = Annotated[int, Ge(0)]
Name = Annotated[str, MinLen(1), AfterValidator(_seen)]
Pair = Annotated[list[Name], Len(2, 2)]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Matrix = Annotated[list[Annotated[list[NotNegative | None], FIRST_FAULT]], FIRST_FAULT]


class Strict(BaseModel):
    """Base of every schema class: unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, populate_by_name=True)

    wanted: ClassVar[str] = ""
    """What a file of this kind is, for who brought another (a phrase)."""


def _refuse(found: str | Message, expected: str | Message) -> PydanticCustomError:
    """An error whose parts `fault_message` puts into the words that every message uses."""
    return PydanticCustomError("polygon", "refused", {"found": found, "expected": expected})


LEAST_GBPS, MOST_GBPS = 1e-9, 1e6
"""Rates that no link has: a bit a second, and a hundred times that of the fastest fabric of a device (bytes or bits
were meant)."""
MOST_MS = 1e6
"""Latency that no link has, of a quarter of an hour."""
Rate = Annotated[float, Gt(LEAST_GBPS), Lt(MOST_GBPS)]
Capacity = Annotated[float, Gt(LEAST_GBPS)]
Capacities = Annotated[list[Annotated[list[Capacity | None], FIRST_FAULT]], FIRST_FAULT]
"""No capacity is no link, and `Matrix` says so of the rate."""
Latency = Annotated[float, Ge(0), Lt(MOST_MS)]
Latencies = Annotated[list[Annotated[list[Latency | None], FIRST_FAULT]], FIRST_FAULT]
MOST_TFLOPS, MOST_GIB, MOST_GB_PER_S = 1e6, 1e6, 1e6
"""What no device has, a hundred times the largest: FLOP/s, bytes or bytes/s were meant."""
LEAST_OF_DEVICE = 1e-9
"""Of these, what none has either: a byte, a byte/s, a thousand FLOP/s."""


class LinkSpec(Strict):
    """A link inside a region: latency and bandwidth, or the name of a link of the catalogue."""

    link: Name | None = None
    latency_ms: Latency | None = None
    latency_us: Latency | None = None
    bandwidth_gbps: Rate | None = None
    rdma: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, data: Any) -> Any:
        return {"link": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _either_name_or_numbers(self) -> LinkSpec:
        latencies = [key for key in ("latency_ms", "latency_us") if getattr(self, key) is not None]
        if self.link is not None:
            if latencies or self.bandwidth_gbps is not None or self.rdma is not None:
                raise _refuse("a link name and numbers", "either of them")
        elif len(latencies) != 1:
            raise _refuse(" and ".join(latencies) or "no latency", "one of latency_ms, latency_us")
        elif self.bandwidth_gbps is None:
            raise _refuse("no bandwidth", "bandwidth_gbps")
        return self


def _as_lists(kind: Any) -> Any:
    """A type with tuples of any length read as lists."""
    return list[_as_lists(get_args(kind)[0])] if get_origin(kind) is tuple else kind  # type: ignore[misc]


def _from_dataclass(name: str, source: type, *, without: Sequence[str] = (), optional: Sequence[str] = ()) -> Any:
    """A strict schema class with the fields of a domain dataclass (tuples are lists in a file)."""
    hints = get_type_hints(source)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        if field.name in without:
            continue
        kind = _as_lists(hints[field.name])
        if field.name in optional:
            fields[field.name] = (kind | None, None)
        elif field.default is not dataclasses.MISSING:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            fields[field.name] = (kind, default)
        else:
            fields[field.name] = (kind, ...)
    return create_model(name, __base__=Strict, __doc__=source.__doc__, **fields)


EfficiencySpec = _from_dataclass("EfficiencySpec", MeasuredEfficiency)


class DeviceSpec(Strict):
    """A type of accelerator, of the catalogue or of the user's own."""

    memory_gib: Annotated[float, Gt(LEAST_OF_DEVICE), Lt(MOST_GIB)] | None = None
    memory_gb: Annotated[float, Gt(LEAST_OF_DEVICE), Lt(MOST_GIB)] | None = None
    tflops: dict[Precision, Annotated[float, Gt(LEAST_OF_DEVICE), Lt(MOST_TFLOPS)]]
    """Dense peak by precision [1e12 FLOP/s]."""
    memory_bandwidth_gb_per_s: Annotated[float, Gt(LEAST_OF_DEVICE), Lt(MOST_GB_PER_S)]
    power_w: NotNegative
    price_usd_per_hour: NotNegative = 0.0
    link: LinkSpec | None = None
    """What usually joins two devices of one node."""
    clock: Positive = 1.0
    """Of the chip, beside the one that its architecture's rates are of: which part of the peaks is due to it."""
    architecture: str = ""
    source: str = ""
    efficiency: EfficiencySpec | None = None  # type: ignore[valid-type]
    """What it reaches of these numbers, where that was measured."""
    aliases: Annotated[list[Name], FIRST_FAULT] = []

    @model_validator(mode="after")
    def _one_memory_and_fp32(self) -> DeviceSpec:
        if (self.memory_gib is None) == (self.memory_gb is None):
            found = "no memory" if self.memory_gib is None else "both"
            raise _refuse(found, "one of memory_gib, memory_gb")
        if "fp32" not in self.tflops:
            raise _refuse(Message("found.tflops", kinds=tuple(self.tflops)), "at least fp32 in tflops")
        return self


class NodeSpec(Strict):
    """Identical nodes of a region: `count` hosts with `devices_per_node` devices each."""

    device: Name
    count: Count
    devices_per_node: Count = 1
    intra_node: LinkSpec | None = None
    inter_node: LinkSpec | None = None
    price_usd_per_hour: NotNegative | None = None


def _of_one_region(text: str) -> str:
    if text == EVERY_REGION:
        raise _refuse(repr(text), "another name: it stands for every region in constraints")
    return text


class RegionSpec(Strict):
    """A data center."""

    name: Annotated[Name, AfterValidator(_of_one_region)]
    nodes: Annotated[list[NodeSpec], MinLen(1), FIRST_FAULT]
    latitude: Annotated[float, Ge(-90), Le(90)] | None = None
    longitude: Annotated[float, Ge(-180), Le(180)] | None = None
    egress_usd_per_gb: NotNegative = 0.0
    egress_gbps: Capacity | None = None
    intra_region: LinkSpec | None = None


class RegionLinkSpec(Strict):
    """A link between two regions: both ways (`between`) or one way (`from`, `to`)."""

    between: Pair | None = None
    from_region: Name | None = Field(default=None, alias="from")
    to_region: Name | None = Field(default=None, alias="to")
    latency_ms: Latency
    bandwidth_gbps: Rate
    capacity_gbps: Capacity | None = None

    @model_validator(mode="after")
    def _one_way_or_both(self) -> RegionLinkSpec:
        directed = self.from_region is not None and self.to_region is not None
        if (self.between is not None) == directed or (self.between and (self.from_region or self.to_region)):
            raise _refuse("not exactly one of them", "between: [a, b], or from: a and to: b")
        return self


class ClusterSpec(Strict):
    """Regions and the links between them."""

    wanted: ClassVar[str] = "a cluster: YAML or JSON with the key regions, or a hostfile"

    format: Literal["polygon-cluster"] = "polygon-cluster"
    version: Literal[1] = 1
    name: Name | None = None
    description: str = ""
    source: str = ""
    stages: Count | None = None
    """Pipeline stages that the owner of the cluster asks for; left out: the planner's choice."""
    devices: dict[Name, DeviceSpec] = {}
    regions: Annotated[list[RegionSpec], MinLen(1), FIRST_FAULT]
    links: Annotated[list[RegionLinkSpec], FIRST_FAULT] = []
    latency_ms: Latencies | None = None
    bandwidth_gbps: Matrix | None = None
    capacity_gbps: Capacities | None = None
    defaults: Annotated[list[Name], FIRST_FAULT] = []
    """Links that nobody gave: what a program that wrote the file assumed. One of another value has been given."""


_ModelSpec = _from_dataclass(
    "_ModelSpec",
    Model,
    without=("latent", "linear", "rope_scaling", "tower"),
    optional=("kv_heads", "head_dim", "ffn_size"),
)
_LatentSpec = _from_dataclass("_LatentSpec", LatentAttention)
_RotarySpec = _from_dataclass("_RotarySpec", RotaryScaling)
_LinearSpec = _from_dataclass("_LinearSpec", LinearAttention)
BatchSpec = _from_dataclass("BatchSpec", Batch)
_SWITCHES = [field.name for field in dataclasses.fields(Runtime) if field.name not in ("name", "version", "sources")]
_RuntimeSpec = _from_dataclass("_RuntimeSpec", Runtime, without=("name", "version", "sources"), optional=_SWITCHES)
_StageRuleSpec = _from_dataclass("_StageRuleSpec", StageRule)
_ConstraintsSpec = _from_dataclass("_ConstraintsSpec", Constraints, without=("stage_rules", "egress_bytes_per_step"))
_LinkUseSpec = _from_dataclass("_LinkUseSpec", LinkUse, without=("source", "target"))
_StageSpec = _from_dataclass("_StageSpec", Stage, without=("first_layer", "last_layer", "workers", "trees"))
_PlanSpec = _from_dataclass("_PlanSpec", Plan, without=("stages", "routes", "links", "order"))


class ModelSpec(_ModelSpec):  # type: ignore[misc,valid-type]
    """A model by its shape."""

    wanted: ClassVar[str] = "a model: Hugging Face's config.json, or YAML with the keys blocks, hidden_size and heads"

    latent: _LatentSpec | None = None  # type: ignore[valid-type]
    linear: _LinearSpec | None = None  # type: ignore[valid-type]
    rope_scaling: _RotarySpec | None = None  # type: ignore[valid-type]
    tower: ModelSpec | None = None


class ConstraintsSpec(_ConstraintsSpec):  # type: ignore[misc,valid-type]
    """What the user demands of a plan beside being possible."""

    stage_rules: list[_StageRuleSpec] = Field(default_factory=list)  # type: ignore[valid-type]
    egress_bytes_per_step: dict[Name, NotNegative] = Field(default_factory=dict)


class RuntimeSpec(_RuntimeSpec):  # type: ignore[misc,valid-type]
    """A program of the catalogue by its name, or the name with the switches that differ from the catalogue's."""

    name: Name

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data


class SwitchSpec(Strict):
    """A switch of a runtime in the catalogue, with its source."""

    value: bool | int | float | str
    source: Name


class RuntimeEntry(Strict):
    """A runtime of the catalogue."""

    version: str
    program: str = ""
    since: str = ""
    architecture: str = ""
    precision: str = ""
    extends: str = ""
    aliases: list[Name] = []
    switches: dict[Name, SwitchSpec] = {}


class ProblemSpec(Strict):
    """What is asked: train this model with this batch on this cluster."""

    format: Literal["polygon-problem"] = "polygon-problem"
    version: Literal[1] = 1
    cluster: ClusterSpec
    model: ModelSpec
    batch: BatchSpec  # type: ignore[valid-type]
    constraints: ConstraintsSpec = Field(default_factory=ConstraintsSpec)
    runtime: RuntimeSpec = Field(default_factory=lambda: RuntimeSpec(name="polygon"))


class MemberSpec(Strict):
    """Devices of one pool in a stage; region and device name the pool for people and must agree with it."""

    pool: Index
    region: Name
    device: Name
    devices: Count


class GroupSpec(Strict):
    """The devices of one pipeline stage."""

    members: Annotated[list[MemberSpec], MinLen(1)]


class GroupsSpec(Strict):
    """Which devices form which pipeline stage; no layers, workers or routes yet."""

    format: Literal["polygon-groups"]
    version: Literal[1]
    problem: ProblemSpec
    stages: Annotated[list[GroupSpec], MinLen(1)]
    objective: dict[str, Any] = {}
    solver: str = ""
    seed: int = 0


class WorkerSpec(Strict):
    """A worker; region and device name its pool for people and must agree with it."""

    pool: Index
    region: Name
    device: Name
    devices: Annotated[list[Annotated[list[Index], Len(2, 2)]], MinLen(1)]
    """Runs [first, count] of device numbers."""
    cp: Count = 1


class SumTreeSpec(Strict):
    """A part of a stage's gradients, the region where it is summed, and regions whose versions go over others."""

    part: Annotated[float, Gt(0.0), Le(1.0)]
    root: Name
    relays: dict[Name, Name] = {}


class StageSpec(_StageSpec):  # type: ignore[misc,valid-type]
    """Layers [first, last) and the workers that hold them."""

    layers: Annotated[list[Index], Len(2, 2)]
    workers: Annotated[list[WorkerSpec], MinLen(1)]
    trees: list[SumTreeSpec] = Field(default_factory=list)


class LinkUseSpec(_LinkUseSpec):  # type: ignore[misc,valid-type]
    """How a plan packs and sends messages from one region to another."""

    from_region: Name = Field(alias="from")
    to_region: Name = Field(alias="to")


class PlanSpec(_PlanSpec):  # type: ignore[misc,valid-type]
    """A plan with the problem that it solves."""

    wanted: ClassVar[str] = "a plan: JSON with the format polygon-plan"

    format: Literal["polygon-plan"]
    version: Literal[1]
    problem: ProblemSpec
    stages: Annotated[list[StageSpec], MinLen(1)]
    routes: list[Any]
    """One row a micro-batch: its worker in every stage. Checked as one array by `polygon.formats.convert`."""
    order: list[list[str]] | None = None
    """Of every stage's workers: their actions in order, as `F0 F1 B0`; null: the order that spans give."""
    links: list[LinkUseSpec] = Field(default_factory=list)
    estimate: dict[str, Any] = Field(default_factory=dict)


ProductSpec = _from_dataclass("ProductSpec", bench.ProductRow)
AttentionSpec = _from_dataclass("AttentionSpec", bench.AttentionRow)
StreamSpec = _from_dataclass("StreamSpec", bench.StreamRow)
BlockSpec = _from_dataclass("BlockSpec", bench.BlockRow)
CollectiveSpec = _from_dataclass("CollectiveSpec", bench.CollectiveRow)


class BenchSpec(Strict):
    """What `polygon bench-device` measured: rows of seconds, and what they were measured on."""

    format: Literal["polygon-bench"]
    version: Literal[1]
    device: Name
    measured_on: str = ""
    power_limit_w: Positive | None = None
    clock_mhz: Positive | None = None
    threads: Count | None = None
    versions: list[Annotated[str, MinLen(1)]] = []
    date: str = ""
    complete: bool = True
    launch_s: Positive | None = None
    products: list[ProductSpec] = []  # type: ignore[valid-type]
    attention: list[AttentionSpec] = []  # type: ignore[valid-type]
    streams: list[StreamSpec] = []  # type: ignore[valid-type]
    blocks: list[BlockSpec] = []  # type: ignore[valid-type]
    collectives: list[CollectiveSpec] = []  # type: ignore[valid-type]


S = TypeVar("S", bound=Strict)


def check(schema: type[S], data: Any) -> S:
    """Read parsed YAML or JSON by a schema.

    Raises
    ------
    InputError
        For the first fault, as `links[2].bandwidth_gbps: found -3, expected a number > 0`. Data of another kind are
        told so as a whole. A wrong format or version comes before everything else, an unknown key before what is
        missing (it is mostly the missing one, misspelt).
    """
    if (found := _other_kind(schema, data)) is not None:
        raise InputError(Message("input.found", found=found, expected=schema.wanted))
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    worst = min(
        faults, key=lambda fault: (fault["loc"][-1:] not in (("format",), ("version",)), not _is_unknown_key(fault))
    )
    raise InputError(fault_message(schema, worst)) from None


_OF_ALL_KINDS = ("format", "version", "name", "description", "source", "notes")
_KINDS = {"regions": "a cluster", "hidden_size": "a model", "model_type": "a model", "architectures": "a model"}
MOST_NAMED = 6
"""Keys of a file of another kind that are named."""


def _other_kind(schema: type[S], data: Any) -> str | Message | None:
    """What data are that have nothing of a schema, not even a key misspelt; None where they may be of it."""
    if not schema.wanted or isinstance(data, schema):
        return None
    if not isinstance(data, Mapping):
        return _short(data)
    known = set(_keys(schema))
    own = known.difference(_OF_ALL_KINDS)
    keys = [str(key) for key in data]
    if known.issuperset(keys) or "format" in known.intersection(keys):
        return None
    if any(key in own or difflib.get_close_matches(key, own, n=1, cutoff=0.75) for key in keys):
        return None
    if "format" in keys:
        return _short(data["format"])
    kind = next((_KINDS[key] for key in keys if key in _KINDS), None)
    named = [_short_key(key) for key in keys if key not in _OF_ALL_KINDS]
    return kind or Message("found.keys", keys=tuple(named[:MOST_NAMED]))


def _short_key(key: str, limit: int = 30) -> str:
    return key if len(key) <= limit else key[: limit - 3] + "..."


def _is_unknown_key(fault: Mapping[str, Any]) -> bool:
    return bool(fault["type"] == "extra_forbidden")


def fault_message(schema: type[BaseModel], fault: Mapping[str, Any]) -> Message:
    """One line: where, what was found, what is allowed."""
    loc = fault["loc"]
    found: str | Message
    expected: str | Message
    if fault["type"] == "polygon":
        found, expected = fault["ctx"]["found"], fault["ctx"]["expected"]
    elif fault["type"] == "string_too_long":
        found = Message("found.characters", characters=len(fault["input"]))
        expected = Message("expected.at_most", most=fault["ctx"]["max_length"])
    elif fault["type"] == "too_long" and not any(isinstance(it, Len) for it in _annotation_at(schema, loc)[1]):
        found = Message("found.entries", entries=len(fault["input"]))
        expected = Message("expected.at_most", most=fault["ctx"]["max_length"])
    elif _is_unknown_key(fault):
        parent, _ = _annotation_at(schema, loc[:-1])
        key = str(loc[-1])
        found, expected = Message("found.unknown_key", key=key), one_of(key, _keys(parent))
    else:
        annotation, metadata = _annotation_at(schema, loc)
        found = "nothing" if fault["type"] == "missing" else _short(fault["input"])
        expected = _expected(annotation, metadata)
    if where := path(loc):
        return Message("input.expected", where=where, found=found, expected=expected)
    return Message("input.found", found=found, expected=expected)


def path(loc: Sequence[int | str]) -> str:
    """`links[2].bandwidth_gbps` from ("links", 2, "bandwidth_gbps")."""
    text = ""
    for part in loc:
        if part != "[key]":
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def seen_if_any(text: str) -> str:
    """A name that somebody can see, on one line; or none.

    Raises
    ------
    PydanticCustomError
        For another, so that it can stand in an `AfterValidator`.
    """
    if text and all(unicodedata.category(sign) in ("Cf", "Zs") for sign in text):
        raise _refuse(_short(text), "a name that can be seen")
    return text and _seen(text)


def all_different(words: list[str]) -> list[str]:
    """Words of which none comes twice.

    Raises
    ------
    PydanticCustomError
        For others.
    """
    for i, word in enumerate(words):
        if word in words[:i]:
            raise _refuse(_short(word), "each of them once")
    return words


def _short(value: object, limit: int = 60) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _keys(annotation: Any) -> list[str]:
    return [field.alias or name for name, field in annotation.model_fields.items()]


def _strip(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """Take `Optional` and `Annotated` off an annotation; returns what is inside and the constraints met."""
    found = list(metadata)
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *more = get_args(annotation)
            found += more
        elif origin in (Union, types.UnionType):
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        else:
            return annotation, found


def _annotation_at(schema: type[BaseModel], loc: Sequence[int | str]) -> tuple[Any, list[Any]]:
    """The annotation and the constraints of the field at a location."""
    annotation: Any = schema
    metadata: list[Any] = []
    for part, after in zip_longest(loc, loc[1:]):
        if after == "[key]":
            return _strip(get_args(annotation)[0])
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = _field(annotation, str(part))
            annotation, metadata = _strip(field.annotation, field.metadata)
        else:
            annotation, metadata = _strip(get_args(annotation)[-1])
    return annotation, metadata


def _field(schema: type[BaseModel], key: str) -> FieldInfo:
    return next(field for name, field in schema.model_fields.items() if key in (name, field.alias))


def _expected(annotation: Any, metadata: Sequence[Any]) -> str | Message:
    """What a field allows, in words: those that stand beside its type, if any."""
    if said := next((words for words in metadata if isinstance(words, str)), None):
        return said
    if get_origin(annotation) is Literal:
        return " or ".join(repr(value) for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Message("expected.mapping", keys=tuple(_keys(annotation)))
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    container = get_origin(annotation) or annotation
    text = words.get(annotation) or {list: "a list", dict: "a mapping"}.get(container, "a value")
    limits: list[Message] = []
    for limit in metadata:
        if isinstance(limit, Gt):
            limits.append(Message("bound.above", limit=limit.gt))
        elif isinstance(limit, Lt):
            limits.append(Message("bound.below", limit=limit.lt))
        elif isinstance(limit, Ge):
            limits.append(Message("bound.at_least", limit=limit.ge))
        elif isinstance(limit, Le):
            limits.append(Message("bound.at_most", limit=limit.le))
        elif isinstance(limit, Len):
            limits.append(Message("bound.entries", entries=limit.min_length))
        elif isinstance(limit, MinLen):
            fewest = limit.min_length
            limits.append(Message("bound.entries_least", entries=fewest) if fewest > 1 else Message("bound.not_empty"))
        elif pattern := getattr(limit, "pattern", None):
            return Message("expected.pattern", pattern=pattern)
    return Message("expected.bounded", what=text, bounds=tuple(limits)) if limits else text
