"""How far a step may be from its prediction: errors that were measured, by term, calibrated on runs never fitted.

Every term has a relative error: compute by what is known of the device (its architecture in measured runs, a bench, a
profile, a calibration) and of the program, sums and messages by the kind of link, a mixture of experts and a sequence
over several devices by theirs. They are taken as independent; the interval is

    step * exp(-+ sqrt(sum over terms (share * error)^2))

with `errors.yaml` of the catalogue, which `polygon validate --errors` makes: the conformal 90 % quantiles of
|ln(measured / predicted)| (Vovk, Gammerman and Shafer 2005; split by group as Mondrian predictors are), so that 90 % of
runs like those lie inside. Where blocks are so small that the host takes longer to launch than they to compute, that
time has an error of its own, and the quantiles are of what it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from polygon.cost.kernels import architecture_of
from polygon.domain.cluster import Device
from polygon.domain.model import Model
from polygon.domain.plan import Plan
from polygon.domain.runtime import Runtime
from polygon.formats.serialization import parse_yaml

LINKS = {"near": 0.35, "far": 0.12}
"""Of sums and messages inside regions (collectives of NCCL between nodes: SimAI's fits are within a third for nine of
ten), and between them (docs/lab.md: the worst of thirty plans over emulated links)."""
LEAST_ROWS = 12
"""Runs that a group needs for a quantile of its own."""
COVERAGE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a prediction rests on."""

    group: str
    """Architecture, `experts` or `context`: a row of the catalogue's errors."""
    runtime: str
    measured: float | None
    """Error of compute where a bench, a profile or a calibration says it; None: by the group."""
    near: float
    far: float
    """Shares of the step that links inside and between regions take."""
    program: float
    """`Runtime.time_error`."""
    host: float = 0.0
    """Half width of the logarithm of compute, of what the host needs: the less a block is, the more depends on it."""


@cache
def errors() -> Mapping[str, Any]:
    """The catalogue's errors by group."""
    text = resources.files("polygon.domain.catalogue").joinpath("errors.yaml").read_text("utf-8")
    found: Mapping[str, Any] = parse_yaml(text)
    return found


def group_of_run(model: Model, plan: Plan, devices: Iterable[Device]) -> str:
    """What a run's error is counted under: the least known of what it has."""
    if model.experts:
        return "experts"
    if any(stage.workers[0].cp > 1 for stage in plan.stages):
        return "context"
    names = {architecture_of(device) or "other" for device in devices}
    return max(names, key=lambda name: (compute_error(name), name))


def compute_error(group: str, runtime: str = "", table: Mapping[str, Any] | None = None) -> float:
    """90 % quantile of |ln(measured / predicted)| of a group's runs by a runtime, else by any; without runs, the worst
    of all groups'. By another table (`quantiles`) than the catalogue's, if there is one."""
    table = errors() if table is None else table
    for name in (f"{group}/{runtime}", group):
        if name in table["groups"]:
            return float(table["groups"][name]["error"])
    return float(table["unknown"])


def log_half_width(known: Known, table: Mapping[str, Any] | None = None) -> float:
    """Half of the 90 % interval over the logarithm of the step; `table` as of `compute_error`."""
    table = errors() if table is None else table
    share = max(0.0, 1 - known.near - known.far)
    if known.measured is None:
        # Measured on whole steps, their links included, beyond what the host explains (`beyond_host`).
        compute = compute_error(known.group, known.runtime, table)
        links = 0.0 if known.far == 0 else known.far * LINKS["far"]
        program = 0.0 if f"{known.group}/{known.runtime}" in table["groups"] else known.program
        return math.hypot(compute * (share + known.near), links, program, known.host)
    # Errors of independent causes: their squares add up.
    return math.hypot(known.measured * share, known.near * LINKS["near"], known.far * LINKS["far"], known.program)


def interval(step_s: float, known: Known) -> tuple[float, float]:
    """Ends of the 90 % interval [s]."""
    # Errors are factors: as far up as down in the logarithm.
    half = log_half_width(known)
    return step_s * math.exp(-half), step_s * math.exp(half)


def program_error(runtime: Runtime) -> float:
    """What not knowing the program adds, as a half width of the logarithm."""
    return -math.log(max(1e-6, 1 - min(runtime.time_error, 0.99)))


def beyond_host(error: float, host: float) -> float:
    """Conformal score of a run's |ln(measured / predicted)|: what the host's part of its interval leaves of it.

    An interval of ``hypot(q, host)`` holds the run if and only if the score is at most q, so that the quantile of
    scores keeps its coverage (Lei et al., JASA 2018, of intervals whose width depends on the run).
    """
    return math.sqrt(max(0.0, error**2 - host**2))


def quantiles(scores: Mapping[str, list[float]]) -> dict[str, Any]:
    """The errors of groups, as `errors.yaml` says them.

    Parameters
    ----------
    scores : mapping of str to list of float
        Of the runs of every group by a runtime (``group/runtime``): `beyond_host` of |ln(measured / predicted)|.
    """
    whole: dict[str, list[float]] = {}
    for name, found in scores.items():
        whole.setdefault(name.split("/")[0], []).extend(found)
    every = [score for found in whole.values() for score in found]
    groups = {}
    for name, found in sorted({**scores, **whole}.items()):
        if len(found) >= LEAST_ROWS:
            groups[name] = {"error": rounded_up(conformal(found)), "runs": len(found)}
        elif "/" not in name:
            groups[name] = {"error": rounded_up(max(conformal(found), conformal(every))), "runs": len(found)}
    worst = max(entry["error"] for entry in groups.values())
    return {"coverage": COVERAGE, "groups": groups, "unknown": worst}


def rounded_up(error: float) -> float:
    """To three digits, so that the run whose score it is stays inside."""
    return math.ceil(error * 1000) / 1000


def conformal(scores: list[float]) -> float:
    """The ceil((n + 1) 0.9)-th of n scores; the largest where there are fewer than nine."""
    ordered = sorted(scores)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * COVERAGE)) - 1]
