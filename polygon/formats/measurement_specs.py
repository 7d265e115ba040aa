"""What files of measured layer times, of fitted factors and of measured plans say: `runners.profile_layers` and
`polygon calibrate` write the first two, people the last; but for factors with more beside it that nobody reads."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MaxLen, MinLen
from pydantic import ConfigDict, Field

from polygon.formats.schema import FIRST_FAULT, Count, Index, Name, NotNegative, PlanSpec, Positive, Strict

_WITH_MORE = ConfigDict(extra="ignore")


class LayerTimeSpec(Strict):
    """Times of one kind of layer at one micro-batch size and degree."""

    model_config = _WITH_MORE

    kind: Name
    micro_batch_size: Count
    tp: Count = 1
    forward_s: Positive
    backward_s: NotNegative
    update_s: NotNegative | None = None
    parameters: Index | None = None


class LayerProfileSpec(Strict):
    """Layers as they were measured on one device type."""

    wanted: ClassVar[str] = "layer times: JSON with the format polygon-layer-profile"
    model_config = _WITH_MORE

    format: Literal["polygon-layer-profile"]
    device: Name
    hidden_size: Count | None = None
    seq_len: Count
    precision: Name = "bf16"
    layers: Annotated[list[LayerTimeSpec], MinLen(1), FIRST_FAULT]


class _ModelPointSpec(Strict):
    """Times of all layers of a model at one micro-batch size and degree."""

    model_config = _WITH_MORE

    model: Name
    gpu_type: Name
    tensor_parallel: Count
    micro_batch_size_sequences: Count
    forward_s_per_layer: list[NotNegative]
    backward_s_per_layer: list[NotNegative]
    optimizer_update_s_per_layer: list[NotNegative]


class _ModelInfoSpec(Strict):
    model_config = _WITH_MORE

    profiled_layers: Count


class _ModelMemorySpec(Strict):
    model_config = _WITH_MORE

    parameters_count_per_gpu_per_layer: list[NotNegative]
    activation_memory_bytes_per_gpu_per_layer_per_sequence: list[NotNegative]


class _ProfiledModelSpec(Strict):
    model_config = _WITH_MORE

    info: _ModelInfoSpec
    by_tensor_parallel: dict[str, _ModelMemorySpec]


class ModelProfilesSpec(Strict):
    """Whole models as they were measured on several device types: what `polygon.cost.profiles` reads of it."""

    wanted: ClassVar[str] = "measured models: JSON with `models` and `compute` (sailor_profiles)"
    model_config = _WITH_MORE

    models: dict[Name, _ProfiledModelSpec]
    compute: Annotated[list[_ModelPointSpec], MinLen(1), FIRST_FAULT]


class _LinkCurveSpec(Strict):
    model_config = _WITH_MORE

    coefficients_GBps: Annotated[list[float], MinLen(3), MaxLen(3)]  # noqa: N815 - the file has it so
    max_measured_bandwidth_bytes_per_s: Positive


class _ZoneLinkSpec(_LinkCurveSpec):
    sender_zone: Name
    sender_gpu_type: Name
    sender_gpus: Count
    receiver_zone: Name
    receiver_gpu_type: Name
    receiver_gpus: Count


class _NodeLinkSpec(_LinkCurveSpec):
    gpu_type: Name
    gpus_in_pair_or_group: Count


class LinkCurvesSpec(Strict):
    """Links as they were measured: what `polygon.cost.link_curves` reads of it."""

    wanted: ClassVar[str] = "measured links: JSON with `links` (sailor_network)"
    model_config = _WITH_MORE

    links: Annotated[list[_ZoneLinkSpec], FIRST_FAULT]
    intra_node_links: Annotated[list[_NodeLinkSpec], FIRST_FAULT] = Field(default_factory=list)
    gpus_per_node: dict[Name, Count] = Field(default_factory=dict)


class PlanRunSpec(Strict):
    """A measured step of a whole plan."""

    model_config = _WITH_MORE

    id: Name
    dataset: Name = "own runs"
    measured_step_s: Positive
    runtime: Name | None = None
    switches: dict[str, Any] = Field(default_factory=dict)
    plan: PlanSpec


class PlanRunsSpec(Strict):
    """Measured steps of plans."""

    wanted: ClassVar[str] = "measured steps of plans: JSON with the format polygon-plan-runs"
    model_config = _WITH_MORE

    format: Literal["polygon-plan-runs"]
    version: Literal[1]
    rows: Annotated[list[PlanRunSpec], MinLen(1), FIRST_FAULT]


class CalibrationSpec(Strict):
    """Factors by device type, fitted to runs."""

    wanted: ClassVar[str] = "factors: JSON with the format polygon-calibration"

    format: Literal["polygon-calibration"]
    version: Literal[1] = 1
    compute: dict[Name, Positive] = Field(default_factory=dict)
    update: dict[Name, Positive] = Field(default_factory=dict)
    communication: Positive = 1.0
    over: dict[Name, Name] = Field(default_factory=dict)
    relative_error: NotNegative = 0.1
