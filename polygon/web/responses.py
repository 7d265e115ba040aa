"""What every operation answers, as types: from them come the schemas in the OpenAPI, and tests hold answers to them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

closed = with_config(ConfigDict(extra="forbid"))
Number = float | None
"""Infinities, which JSON lacks, are null."""
State = Literal["queued", "running", "done", "cancelled", "infeasible", "failed"]


@closed
class Refusal(TypedDict):
    """Why there is no answer, in the caller's language."""

    detail: str


@closed
class Job(TypedDict):
    """A search, an explanation, or a plan that was kept."""

    id: str
    created_s: float
    state: State
    progress: float
    note: str
    """What it is at; the step time once there is a plan."""
    error: str
    name: str
    has_plan: bool
    kind: Literal["search", "front", "variant", "upload"]
    tags: list[str]
    archived: bool
    parent: str
    changes: dict[str, Any]
    objective: str
    effort: str
    seed: int


@closed
class FrontPoint(TypedDict):
    """A plan that no other of its front beats in time and money."""

    step_s: float
    usd: float
    energy_j: float
    devices: int
    stages: int
    unpriced: NotRequired[list[str]]
    """Types of devices that it uses and of which nobody said a price; not there in fronts of before."""


@closed
class Front(Job):
    """A front, or how far its search is."""

    points: list[FrontPoint]


@closed
class Asked(TypedDict):
    """What a job was asked, as a search takes it."""

    problem: dict[str, Any]
    objective: str
    effort: str
    seed: int


@closed
class Resolved(TypedDict):
    """A cluster with every value spelt out, and the text of its file."""

    full: dict[str, Any]
    yaml: str
    devices: int


@closed
class MeasuredCluster(TypedDict):
    """A cluster with measured values, and the names of these."""

    cluster: dict[str, Any]
    measured: list[str]


@closed
class Explanation(TypedDict):
    """Why a plan and not another; `answers` is null until they are worked out. A job's fields once it was asked for."""

    id: str
    state: State | Literal["none"]
    answers: dict[str, Any] | None
    created_s: NotRequired[float]
    progress: NotRequired[float]
    note: NotRequired[str]
    error: NotRequired[str]
    name: NotRequired[str]
    has_plan: NotRequired[bool]
    kind: NotRequired[str]
    tags: NotRequired[list[str]]
    archived: NotRequired[bool]
    parent: NotRequired[str]
    changes: NotRequired[dict[str, Any]]
    objective: NotRequired[str]
    effort: NotRequired[str]
    seed: NotRequired[int]


@closed
class Known(TypedDict):
    """Catalogues."""

    devices: list[dict[str, Any]]
    architectures: list[str]
    models: list[dict[str, Any]]
    links: list[str]
    regions: list[dict[str, Any]]
    runtimes: list[dict[str, str]]
    optimizers: list[dict[str, str]]
    parity_levels: list[str]
    compressions: list[str]
    local_steps: list[int]
    default_link: dict[str, float]
    latency_ms_floor: float
    latency_ms_per_km: float
    between_gbps: float
    instances: list[str]


@closed
class EstimateOut(TypedDict):
    """The predicted step and what no plan can beat."""

    step_s: Number
    low_s: Number
    high_s: Number
    terms: dict[str, Number]
    sources: dict[str, str]
    tokens_per_s: Number
    mfu: Number
    cross_region_bytes: float
    cost_usd: Number
    energy_j: Number
    lower_bound_s: Number
    lower_bounds_s: dict[str, Number]
    bound_by: str
    gap: Number
    least_usd: Number
    least_energy_j: Number


@closed
class UsedNodes(TypedDict):
    """Nodes of a pool on which a plan has devices."""

    region: str
    device: str
    nodes: int


@closed
class View(TypedDict):
    """Everything shown of a plan."""

    model: str
    runtime: dict[str, str]
    run: bool
    """Whether the runtime runs the plan as it is."""
    batch: dict[str, int]
    estimate: EstimateOut
    micro_batches: int
    micro_batch_size: int
    local_steps: int
    chunks: int
    """Stages on the same devices (interleaving)."""
    assumptions: list[str]
    packings_inside: list[str]
    """Of messages between nodes of a region."""
    unpriced: list[str]
    """Devices that it uses of which nobody said a price: they count as free."""
    unpowered: list[str]
    """The same of what they draw, which counts as nothing."""
    devices: dict[str, int]
    hosts: list[UsedNodes]
    regions: list[dict[str, Any]]
    stages: list[dict[str, Any]]
    links: list[dict[str, Any]]
    traffic: dict[str, Number | str | bool]
    formulas: list[dict[str, str]]
    over_memory: float
    broken: list[str]
    """What the plan breaks of what the constraints allow, memory apart."""
    bubble: Number
    routes: list[list[int]]


@closed
class TimelineRow(TypedDict):
    """A worker in a window of the step."""

    stage: int
    worker: int
    region: str
    device: str
    tp: int
    width: int
    busy_s: float
    bars: list[tuple[int, int, float, float]]
    """Kind, micro-batch (-1: none), start and end [s]."""
    bands: list[tuple[float, float, list[float]]]
    """Start, end [s], and the parts of the first kinds."""


@closed
class Timeline(TypedDict):
    """Rows of a step or of a window of it."""

    kinds: list[str]
    rows: list[TimelineRow]
    step_s: float
    from_s: float
    to_s: float
    workers: int
    bubble_share: Number
    exposed_share: Number
    """Null of a measured step, whose logs do not part the two."""


@closed
class LimitedResource(TypedDict):
    """Something of a cluster that could be better, and what it is now."""

    kind: str
    quality: str
    region: str
    other: str
    device: str
    group: int
    now: float
    default: bool


@closed
class LimitRow(LimitedResource):
    """A resource and what more of it saves, as parts of the step."""

    saves: float
    suggested: Number
    would_save: float


@closed
class AssumedLink(TypedDict):
    """A link that nobody gave."""

    name: str
    region: str
    other: str
    device: str
    slower: float
    faster: float
    anew: float | None
    latency_ms: float
    bandwidth_gbps: float


@closed
class Limits(TypedDict):
    """What limits the step, worst first."""

    step_s: float
    limits: list[LimitRow]
    together: list[LimitedResource]
    """What limits it together, where more of one resource alone saves little."""
    together_saves: float
    whole: bool
    """Whether all resources have been looked at."""


@closed
class Anew(LimitedResource):
    """What more of a resource would bring with the cluster planned anew."""

    value: float
    same_plan: float
    """What the value saves with the plan as it is."""
    would_save: float


@closed
class Advice(TypedDict):
    """How communication could be hidden, in three cases."""

    case: Literal["balanced", "computation", "communication"]
    ratio: Number
    hidden: Number
    cases: dict[str, list[dict[str, Any]]]


@closed
class Saving(TypedDict):
    """What a better link would save."""

    source: str
    target: str
    what: str
    saved_s: Number


@closed
class Alternatives(TypedDict):
    """The plan beside others."""

    alternatives: list[dict[str, Any]]
    points: list[dict[str, Any]]


@closed
class ExportOut(TypedDict):
    """Files for another system, and what it cannot express."""

    target: str
    files: dict[str, str]
    losses: list[dict[str, Any]]
    plan_step_s: Number
    step_s: Number
    start: str
    notes: list[str]


@closed
class Written(TypedDict):
    """A deployment that was written, and its checks."""

    name: str
    folder: str
    """Below that of all deployments."""
    files: list[str]
    checks: list[dict[str, Any]]
    start: str


@closed
class Deployment(TypedDict):
    """A deployment that is there."""

    name: str
    folder: str
    files: list[str]


@closed
class Run(TypedDict):
    """A run of a plan, or of its rehearsal."""

    name: str
    plan: str
    """The stored plan that it belongs to; empty: none that is known."""
    kind: Literal["rehearsal", "import", "deployment", "folder"]
    state: Literal["running", "done", "failed", "stopped", "open"]
    """`open`: somebody else's, and its ranks have not said that they ended."""
    model: str
    ranks: int
    device: str
    """What its ranks computed on, as the runner calls it."""
    steps: int
    """That its log tells of."""
    reached: int
    """How many are done, those before its log began included, as where it went on from a checkpoint."""
    wanted: int | None
    traced: bool
    """Whether there is a timeline of a step."""
    predicted_step_s: float
    step_s: Number
    """Measured, without the first."""
    loss: Number
    error: Number
    """(predicted - measured) / measured step."""


@closed
class RunList(TypedDict):
    """Runs, and whether the server may start some."""

    runs: list[Run]
    may_start: bool


@closed
class FollowedRun(Run):
    """A run with its steps."""

    points: list[tuple[int, float, Number]]
    """Step, seconds, loss; of many steps the means of neighbours."""
    log: str


@closed
class StageBeside(TypedDict):
    """A stage, predicted and measured: means of its workers [s]."""

    stage: int
    layers: str
    regions: list[str]
    forward: tuple[float, float]
    backward: tuple[float, float]
    update: tuple[float, float]
    reduce: tuple[float, float]
    waiting: tuple[float, float]


@closed
class Comparison(TypedDict):
    """The predicted step beside the median of the traced ones."""

    steps: int
    predicted_step_s: float
    measured_step_s: float
    error: float
    stages: list[StageBeside]
