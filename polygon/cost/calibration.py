"""A handful of factors, fitted to a run's logs, that the planner puts on its times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polygon.cost.compute import LayerTimes
from polygon.domain import efficiency
from polygon.domain.errors import require, require_number
from polygon.formats.measurement_specs import CalibrationSpec
from polygon.formats.schema import check

FORMAT = "polygon-calibration"
OTHER_RUN_ERROR = 0.158
"""Half of a 90 % interval over what factors of one run say of another by the same program on the same devices, beside
that of the run's own steps (`python benchmarks/one_run_factors.py`: the median of 33 groups of published runs)."""
BASES = (*efficiency.BASES, "profile")
"""What predicts the times of layers (`polygon.cost.tables.CostTables.basis`)."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Multiplicative factors: measured over predicted."""

    compute: Mapping[str, float] = field(default_factory=dict)
    """By device type, of forward and backward."""
    update: Mapping[str, float] = field(default_factory=dict)
    """By device type, of the optimizer."""
    communication: float = 1.0
    """Of every message and reduction between workers."""
    over: Mapping[str, str] = field(default_factory=dict)
    """By device type, what predicted the times that the factors are over: one of `BASES`."""
    relative_error: float = 0.1
    """Half of a 90 % interval over other steps of the same runs, from those that were left out of the fit."""

    def __post_init__(self) -> None:
        for name, factors in (("compute", self.compute), ("update", self.update)):
            for device, factor in factors.items():
                require_number(factor, f"{name}.{device}", above=0)
        for device, basis in self.over.items():
            require(basis in BASES, f"over.{device}", basis, " or ".join(BASES))
        require_number(self.communication, "communication", above=0)
        require_number(self.relative_error, "relative_error", at_least=0)

    def times(self, layers: LayerTimes, device: str) -> LayerTimes:
        """Layer times of a device type with its factor; as they are where none was fitted."""
        factor = self.compute.get(device)
        if factor is None:
            return layers
        return replace(
            layers,
            forward_s=layers.forward_s * factor,
            backward_s=layers.backward_s * factor,
            communication_s=layers.communication_s * factor,
            source="calibrated run",
            relative_error=math.hypot(self.relative_error, OTHER_RUN_ERROR),
            host_error=0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return {
            "format": FORMAT,
            "version": 1,
            "compute": dict(self.compute),
            "update": dict(self.update),
            "communication": self.communication,
            "over": dict(self.over),
            "relative_error": self.relative_error,
        }


NONE = Calibration()
"""Leaves everything as it is."""


def calibration(data: Mapping[str, Any]) -> Calibration:
    """Read the format that `polygon calibrate` writes."""
    return Calibration(**check(CalibrationSpec, data).model_dump(exclude={"format", "version"}))
