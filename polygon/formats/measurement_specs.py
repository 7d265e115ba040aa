"""What files of measured layer times, of fitted factors and of measured plans say: `runners.profile_layers` and
`polygon calibrate` write the first two, people the last; with more beside it that nobody reads."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen
from pydantic import ConfigDict, Field

from polygon.formats.schema import FIRST_FAULT, Count, Index, Name, NotNegative, PlanSpec, Positive, Strict

_WITH_MORE = ConfigDict(extra="ignore")


class LayerTimeSpec(Strict):
    """Times of one kind of layer at one micro-batch size and degree."""

    model_config = _WITH_MORE

    kind: Name
    micro_batch_size: Count
    tp: Count = 1
    forward_s: NotNegative
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
    model_config = _WITH_MORE

    format: Literal["polygon-calibration"]
    compute: dict[Name, Positive] = Field(default_factory=dict)
    update: dict[Name, Positive] = Field(default_factory=dict)
    communication: Positive = 1.0
    relative_error: NotNegative = 0.1
