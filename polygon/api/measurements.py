"""What was measured on real devices: layer times, and factors fitted to the logs of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polygon.accuracy.run_logs import fit, read_run
from polygon.cost.calibration import Calibration, calibration
from polygon.cost.profiles import LAYER_FORMAT, kind_profile, model_profiles
from polygon.cost.tables import Profile
from polygon.domain.errors import located
from polygon.formats import files
from polygon.formats.files import PathLike


def calibrate(*logs: PathLike, plan: PathLike | None = None) -> Calibration:
    """Fit the cost model's factors to the logs of real runs.

    Compute and optimizer by device type (median of measured over predicted), and one factor for all communication (so
    that the predicted step is the measured one). Every third step is left out of the fit; the 90 % quantile of the
    error on those is the calibration's `relative_error`.

    Parameters
    ----------
    *logs : path
        Log directories of ``dist_runner`` or ``runners.launch``.
    plan : path, optional
        The plan that ran; by default ``plan.json`` in each log directory.

    Returns
    -------
    Calibration
        For ``Problem(..., calibration=...)``.

    Raises
    ------
    InputError
        Where a rank's log is missing, or a run is too short to fit and judge.
    """
    return fit([read_run(Path(log), Path(plan) if plan is not None else None) for log in logs])


def is_profile(data: object) -> bool:
    """Whether parsed data are layer times, of one device type or of whole models."""
    return isinstance(data, Mapping) and (data.get("format") == LAYER_FORMAT or {"models", "compute"} <= set(data))


def profiles_of(data: Any) -> tuple[Profile, ...]:
    """Layer times of parsed data, in either format."""
    whole_models = isinstance(data, Mapping) and "compute" in data
    return tuple(model_profiles(data).values()) if whole_models else (kind_profile(data),)


def read_profiles(paths: Iterable[PathLike]) -> tuple[Profile, ...]:
    """Layer times of files, in either format."""
    profiles: list[Profile] = []
    for path in paths:
        data = files.read_json(path)
        with located(f"{path}: "):
            profiles += profiles_of(data)
    return tuple(profiles)


def read_calibration(path: PathLike) -> Calibration:
    """Factors that `polygon calibrate` wrote."""
    data = files.read_json(path)
    with located(f"{path}: "):
        return calibration(data)
