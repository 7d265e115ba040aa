"""Measured training runs, from the tables that papers and projects publish, as problems and plans.

A row names its program (`runtime`) and what differs from the catalogue (`switches`) as fields; prose is never read.
Rows of other collections (`polygon.accuracy.foreign_rows`) are put into these fields first.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polygon.accuracy.foreign_rows import NotExpressibleError, in_our_fields
from polygon.cost.kernels import architecture_of
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Pool, Region
from polygon.domain.errors import located, require, require_number
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem
from polygon.domain.runtime import Runtime
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats.catalogue import device as device_by_name
from polygon.formats.catalogue import model as model_by_name
from polygon.formats.catalogue import runtime_from_spec, usual_link
from polygon.formats.convert_plan import plan_from_spec
from polygon.formats.measurement_specs import PlanRunsSpec
from polygon.formats.schema import RuntimeSpec, check

CONTEXT_BYTES = 1.5e9
"""CUDA context and communication buffers, which nvidia-smi counts and torch's allocator does not."""

COUNTS = {"allocated": 0.08, "reserved": 0.15, "process": 0.08, "device": 0.25}
"""How memory was counted (what the allocator handed out; what it reserved; that of a process, context included; what
nvidia-smi reports), and half of a 90 % interval over it: caches, fragmentation and communication buffers are a
program's own affair."""


MEASURED = (
    "measured_iteration_time_s", "derived_iteration_time_s", "measured_tokens_per_s_per_gpu",
    "measured_memory_gigabytes",
)  # fmt: skip
WHOLE = (
    "gpu_count", "gpus_per_node", "dp", "tp", "pp", "cp", "ep", "interleave_v", "micro_batch_sequences",
    "global_batch_sequences", "microbatches_per_step", "sequence_length_tokens", "layers", "hidden_size",
    "attention_heads", "kv_heads", "head_dim", "vocab_size", "experts", "experts_per_token",
)  # fmt: skip
"""Fields of a row that are counts; one that is missing, nothing or 0 is not said."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run: what was trained where, by which program and how, and what was measured."""

    identifier: str
    dataset: str
    problem: Problem
    plan: Plan
    step_s: float | None
    memory_bytes: float | None
    memory_counts: str = "process"
    """One of `COUNTS`."""
    calibration: bool = False
    """Whether the row may have been used to fit coefficients (else it is a test row)."""
    device_label: str = ""
    """What the table calls the devices."""
    model_key: str = ""
    """Name of the model in a profile file."""
    measurements: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Every measurement of time and memory, where the configuration was measured more than once."""
    misspelt: Mapping[str, str] = field(default_factory=dict)
    """Fields of the row that were not read, and the one that each may stand for: nearly its name, and not given."""

    @property
    def model(self) -> Model:
        """What was trained."""
        return self.problem.model

    @property
    def batch(self) -> Batch:
        """Sequences of a step."""
        return self.problem.batch

    @property
    def pool(self) -> Pool:
        """The devices of a run on one kind of them."""
        return self.problem.cluster.pools[0]

    @property
    def context_bytes(self) -> float:
        """What the way of measuring memory counts beside the model's own bytes: buffers, and mostly the context."""
        context = self.problem.runtime.context_bytes
        return max(0.0, context - CONTEXT_BYTES) if self.memory_counts in ("allocated", "reserved") else context

    @property
    def memory_factor(self) -> float:
        """What it counts over the bytes in use, the context left out: an allocator reserves more than it hands out."""
        return self.problem.runtime.reserved_factor if self.memory_counts in ("reserved", "device") else 1.0

    @property
    def memory_error(self) -> float:
        """Half of a 90 % interval over the memory, by how it was measured."""
        return COUNTS[self.memory_counts]

    @property
    def devices(self) -> frozenset[str]:
        """Types of the devices that were used."""
        pools = self.problem.cluster.pools
        return frozenset(pools[worker.pool].device.name for worker in self.plan.workers)

    @property
    def profiled(self) -> bool:
        """Whether a profile of the `sailor_profiles` format says what it did: 32-bit products, nothing recomputed."""
        plain = all((s.zero, s.ep, s.recompute) == (0, 1, "none") and s.workers[0].cp == 1 for s in self.plan.stages)
        return plain and self.plan.chunks == 1 and not self.model.experts and self.batch.precision in ("fp32", "tf32")


NEAR = 0.9
"""How alike a name is to one that it may be meant for (`difflib`): one letter in ten left out or other."""


def row_runtime(row: Mapping[str, Any]) -> Runtime:
    """The program of a row, with the switches that the row sets."""
    spec: RuntimeSpec = check(RuntimeSpec, {**(row.get("switches") or {}), "name": row["runtime"]})
    return runtime_from_spec(spec)


class _Asked(dict[str, Any]):
    """A row that knows which fields it was asked for."""

    def __init__(self, row: Mapping[str, Any], names: set[str] | None = None) -> None:
        super().__init__(row)
        self.names = set[str]() if names is None else names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, as of any mapping."""
        self.names.add(name)
        return super().get(name, default)


def misspelt(row: Mapping[str, Any], known: Iterable[str]) -> dict[str, str]:
    """Fields of a row that are none of the known ones but nearly one that it does not give, and that one."""
    missing = [name for name in known if row.get(name) is None]
    near = {name: difflib.get_close_matches(name, missing, n=1, cutoff=NEAR) for name in row.keys() - set(known)}
    return {name: found[0] for name, found in sorted(near.items()) if found}


def plan_runs(data: Mapping[str, Any], runtime: Runtime | None = None) -> list[MeasuredRun]:
    """Every row of a `polygon-plan-runs` file: a measured step of a whole plan.

    Raises
    ------
    InputError
        For a row that is none: where, what was found, what is allowed.
    """
    runs = []
    for i, (row, given) in enumerate(zip(check(PlanRunsSpec, data).rows, data["rows"], strict=True)):
        with located(f"rows[{i}]: "):
            problem, plan, _ = plan_from_spec(row.plan)
            said = problem.runtime if row.runtime is None else row_runtime(row.model_dump())
        used = {problem.cluster.pools[worker.pool].device.name for stage in plan.stages for worker in stage.workers}
        runs.append(
            MeasuredRun(
                identifier=row.id,
                dataset=row.dataset,
                problem=replace(problem, runtime=runtime or said),
                plan=plan,
                step_s=row.measured_step_s,
                memory_bytes=None,
                device_label="+".join(sorted(used)),
                misspelt=misspelt(given, type(row).model_fields),
            )
        )
    return runs


def published_run(row: Mapping[str, Any], runtime: Runtime | None = None) -> MeasuredRun:
    """A row of the `published_runs` format; `runtime` is put in place of the row's.

    Raises
    ------
    NotExpressibleError
        With the reason, where the row lacks what a prediction needs or uses what the model does not have.
    """
    row = asked = _Asked(row)
    if not row.get("predictable", True):
        raise NotExpressibleError(f"marked as not predictable: {row.get('notes') or 'no reason given'}")
    shape = () if row.get("model") else ("layers", "hidden_size", "attention_heads")
    for key in (*shape, "sequence_length_tokens", "gpu_count"):
        if not row.get(key):
            raise NotExpressibleError(f"{key} is missing")
    for key in MEASURED:
        if row.get(key):
            require_number(row[key], key, above=0)
    row = _Asked(in_our_fields(row), asked.names)
    for key in WHOLE:
        _require_whole(row.get(key) or 1, key, 1)
    runtime = runtime or row_runtime(row)
    degrees: dict[str, Any] = {key: int(row.get(key) or 1) for key in ("tp", "pp", "cp", "ep")}
    gpus = int(row["gpu_count"])
    dp = int(row.get("dp") or max(1, gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"])))
    if dp * degrees["tp"] * degrees["pp"] * degrees["cp"] != gpus:
        raise NotExpressibleError(f"dp {dp} x {degrees} is not {gpus} devices")
    model = _model(row, degrees["tp"], pads_vocabulary=runtime.pads_vocabulary)
    micro_batch = int(row.get("micro_batch_sequences") or 1)
    global_batch = int(row.get("global_batch_sequences") or micro_batch * dp * int(row.get("microbatches_per_step", 1)))
    global_batch = math.ceil(global_batch / (micro_batch * dp)) * micro_batch * dp
    config = ParallelConfig(
        dp=dp,
        **degrees,
        chunks=int(row.get("interleave_v") or 1) if degrees["pp"] > 1 else 1,
        micro_batch_size=micro_batch,
        zero=int(row.get("zero_stage") or 0),
        shards=int(row.get("zero_shard_ranks") or 0),
        recompute=row["recompute"],
        recompute_blocks=_recomputed(row),
        sequence_parallel=bool(row.get("sequence_parallel")),
        stage_layers=tuple(row.get("stage_layers") or ()),
    )
    problem = Problem(
        cluster=_cluster(row, _device(row), gpus),
        model=model,
        batch=Batch(
            global_batch=global_batch,
            seq_len=int(row["sequence_length_tokens"]),
            precision=row["precision"],
            gradient_precision=row["gradient_precision"],
            optimizer=str(row.get("optimizer") or "adamw"),
            state_precision=str(row.get("state_precision") or "fp32"),
        ),
        runtime=replace(runtime, fused_accumulation=True) if global_batch == micro_batch * dp else runtime,
    )
    memory = row.get("measured_memory_gigabytes")
    counts = str(row.get("memory_counts") or "process")
    require(counts in COUNTS, "memory_counts", counts, " or ".join(COUNTS))
    found = MeasuredRun(
        identifier=str(row.get("id")),
        dataset=str(row.get("dataset")),
        problem=problem,
        plan=uniform_plan(problem, config),
        step_s=_step_s(row, global_batch),
        memory_bytes=float(memory) * 1e9 if memory else None,
        memory_counts=counts,
        calibration=str(row.get("dataset")).startswith("mosaicml") and gpus <= 8,
        device_label=str(row.get("gpu_type") or row["device"]),
    )
    return replace(found, misspelt=misspelt(asked, asked.names))


def _require_whole(value: Any, key: str, least: int) -> None:
    """Require a whole number, written as one or as `8.0`."""
    fits = isinstance(value, int | float) and value >= least and value % 1 == 0
    require(fits, key, value, "a whole number >= 1" if least else "a whole number >= 0")


def _recomputed(row: Mapping[str, Any]) -> int | None:
    """How many blocks are recomputed, which may be none; None where the row does not say it."""
    value = row.get("recompute_blocks")
    if value is None:
        return None
    _require_whole(value, "recompute_blocks", 0)
    return int(value)


def _step_s(row: Mapping[str, Any], global_batch: int) -> float | None:
    for key in ("measured_iteration_time_s", "derived_iteration_time_s"):
        if row.get(key):
            return float(row[key])
    rate = row.get("measured_tokens_per_s_per_gpu")
    if rate:
        return global_batch * float(row["sequence_length_tokens"]) / (float(rate) * float(row["gpu_count"]))
    return None


def _model(row: Mapping[str, Any], tp: int, *, pads_vocabulary: bool) -> Model:
    """The model that a row describes, or names: the catalogue's `model`, where the row's fields cannot say it."""
    if row.get("model"):
        return model_by_name(str(row["model"]))
    hidden, heads = int(row["hidden_size"]), int(row["attention_heads"])
    gated = bool(row.get("gated_mlp"))
    tied = row.get("tied_embeddings")
    vocab = int(row.get("vocab_size") or 51200)
    if pads_vocabulary:
        vocab = math.ceil(vocab / (128 * tp)) * 128 * tp
    experts = int(row.get("experts") or 0)
    if int(row.get("ep") or 1) > 1 and not experts:
        raise NotExpressibleError(f"ep is {row['ep']}, but the row names no experts")
    return Model(
        name=str(row.get("model_name") or row.get("id")),
        family="llama" if gated else "gpt",
        blocks=int(row["layers"]),
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(row.get("kv_heads") or heads),
        head_dim=int(row.get("head_dim") or hidden // heads),
        ffn_size=int(row.get("ffn_size") or 4 * hidden),
        vocab_size=vocab,
        max_seq_len=int(row["sequence_length_tokens"]),
        gated_mlp=gated,
        tied_embeddings=(not gated) if tied is None else bool(tied),
        classes=int(row.get("classes") or 0),
        learned_positions=not gated,
        rms_norm=gated,
        linear_bias=not gated,
        qkv_bias=not gated,
        experts=experts,
        experts_per_token=int(row.get("experts_per_token") or 1) if experts else 0,
        expert_ffn_size=int(row.get("expert_ffn_size") or row.get("ffn_size") or 0) if experts else 0,
    )


def _device(row: Mapping[str, Any]) -> Device:
    """The row's device, with what the row says of its boards: another clock, or the slower memory of early ones."""
    device, changes = device_by_name(str(row["device"])), row.get("device_changes") or {}
    unknown = sorted(set(changes) - {"flops_factor", "memory_bandwidth_gigabytes_per_s"})
    require(not unknown, "device_changes", unknown, "flops_factor and memory_bandwidth_gigabytes_per_s")
    factor = float(changes.get("flops_factor", 1.0))
    memory = changes.get("memory_bandwidth_gigabytes_per_s")
    return replace(
        device.at_clock(factor),
        memory_bytes_per_s=device.memory_bytes_per_s if memory is None else float(memory) * 1e9,
    )


def card_bytes_per_s(device: Device) -> float:
    """What a device gets of the network between nodes where a table does not say: as in DGX H100 and DGX A100."""
    return 50e9 if architecture_of(device) in ("hopper", "blackwell") else 25e9


def _cluster(row: Mapping[str, Any], device: Device, gpus: int) -> Cluster:
    """One region of equal nodes."""
    per_node = int(row.get("gpus_per_node") or 8)
    said = "{}_node_bandwidth_per_gpu_per_direction_gigabytes_per_s"
    intra = float(row.get(said.format("intra")) or usual_link(device.name).bytes_per_s / 1e9) * 1e9
    inter = float(row.get(said.format("inter")) or card_bytes_per_s(device) / 1e9) * 1e9
    # Without RDMA, as a row says by its latency, NCCL goes through sockets (`polygon.domain.cluster.TCP_LATENCY_S`).
    latency_s = float(row.get("inter_node_latency_milliseconds") or 0.004) * 1e-3
    network = Link(latency_s=latency_s, bytes_per_s=inter * per_node)
    group = NodeGroup(
        device=device.name,
        nodes=math.ceil(gpus / per_node),
        devices_per_node=per_node,
        intra_node=Link(latency_s=2e-6, bytes_per_s=intra),
        inter_node=network,
    )
    return cluster_of_regions([Region(name="here", node_groups=(group,), intra_region=network)], {device.name: device})


def cluster_of_regions(
    regions: list[Region], devices: Mapping[str, Device], links: Mapping[Any, Link] | None = None
) -> Cluster:
    """The cluster of some regions; `links` are those between two of them, by their numbers."""
    n = len(regions)
    latency_s, bytes_per_s = np.zeros((n, n)), np.zeros((n, n))
    every = {(r, r): region.intra_region for r, region in enumerate(regions)} | dict(links or {})
    for ends, link in every.items():
        latency_s[ends], bytes_per_s[ends] = link.latency_s, link.bytes_per_s
    return Cluster(
        name="measured",
        regions=tuple(regions),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        capacity_bytes_per_s=np.full((n, n), math.inf),
        catalogue=dict(devices),
    )
