"""Sailor's own score of a plan (Strati et al., SOSP 2025), as its Python simulator computes it.

With M micro-batches per worker and, per stage s, the slowest worker's compute c_s (forward and backward of its layers,
from the profile) and the slowest message's time m_s,

    step = (M - 1) max_s (c_s + m_s) + sum_s (c_s + m_s) + max_s update_s + max_s all-reduce_s .

Messages are whole activations (and as large gradients) from worker j of a stage to worker j mod width of the next. The
update of a stage is that of its first layer alone. The all-reduce is a flat ring in buckets of 5e8 bytes over the
slowest pair of consecutive workers, of weights divided by the smallest tensor-parallel degree of the stage, at most
4. Independent pipelines share the batch and reduce every stage between them once more.

Source: eth-easl/sailor at cf2c8e3, the simulator that scored `sailor_planner_bench.json`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polygon.domain.errors import InputError, require

BUCKET_BYTES = 500_000_000
"""Of Sailor's all-reduce."""
RING_TENSOR_PARALLEL = 4
"""Weights are divided by at most this degree."""
STATE_BYTES = 24
"""Per parameter under Adam: weight, gradient, two moments, a communication copy, an extra copy of DeepSpeed."""
GIB = 2**30

LinkKey = tuple[str, str, int, str, str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Sailor's measurements of one model: layer times by (type, micro-batch, tensor parallelism), sizes, links."""

    model: str
    forward_s: Mapping[tuple[str, int, int], np.ndarray]
    backward_s: Mapping[tuple[str, int, int], np.ndarray]
    update_s: Mapping[tuple[str, int, int], np.ndarray]
    activation_bytes: np.ndarray
    """What a layer sends on, per sequence, shape (layers,)."""
    parameters: Mapping[int, np.ndarray]
    """By tensor-parallel degree, of one device, shape (layers,)."""
    held_bytes: Mapping[int, np.ndarray]
    """Activations that a layer keeps for backward, by tensor-parallel degree, per sequence, shape (layers,)."""
    link: Mapping[LinkKey, tuple[float, float, float]]
    memory_bytes: Mapping[str, float]
    devices_per_node: Mapping[str, int]

    @property
    def layers(self) -> int:
        """Profiled layers."""
        return len(self.activation_bytes)

    def message_s(self, n_bytes: float, key: LinkKey) -> float:
        """Seconds of a message: the fitted bandwidth, at least 1e6 bytes/s (the fit goes negative)."""
        if n_bytes <= 0:
            return 0.0
        if key not in self.link:
            raise InputError(f"network: no link {key[:3]} -> {key[3:]}, expected one measured between these workers")
        c0, c1, c2 = self.link[key]
        log_size = math.log2(n_bytes / 1e6)
        return n_bytes / (1e9 * max(c0 * log_size**2 + c1 * log_size + c2, 1e-3))


def measured_degrees(measured: Measured) -> list[int]:
    """Tensor-parallel degrees that were measured on any type."""
    return sorted({tp for _, _, tp in measured.forward_s})


def measured_from_documents(profiles: Mapping[str, Any], network: Mapping[str, Any], model: str) -> Measured:
    """Measurements of a model from the `sailor_profiles` and `sailor_network` formats.

    Raises
    ------
    InputError
        The model is not in the profiles, or a file is not of its format.
    """
    for name, document, needed in (("profiles", profiles, ("models", "compute")), ("network", network, ("links",))):
        for part in needed:
            require(part in document, name, sorted(document), f"the key {part}")
    require(model in profiles["models"], "profiles: model", model, f"one of {sorted(profiles['models'])}")
    by_tp = {int(tp): entry for tp, entry in profiles["models"][model]["by_tensor_parallel"].items()}
    times: dict[str, dict[tuple[str, int, int], np.ndarray]] = {"forward": {}, "backward": {}, "optimizer_update": {}}
    for entry in profiles["compute"]:
        if entry["model"] == model:
            key = (entry["gpu_type"], int(entry["micro_batch_size_sequences"]), int(entry["tensor_parallel"]))
            for kind, by_key in times.items():
                by_key[key] = np.array(entry[f"{kind}_s_per_layer"], dtype=float)
    link = {}
    for entry in network["links"]:
        ends = [(entry[f"{e}_zone"], entry[f"{e}_gpu_type"], int(entry[f"{e}_gpus"])) for e in ("sender", "receiver")]
        link[(*ends[0], *ends[1])] = tuple(float(c) for c in entry["coefficients_GBps"])

    def per_layer(entry: Mapping[str, Any], key: str) -> np.ndarray:
        return np.array(entry[key], dtype=float)

    return Measured(
        model=model,
        forward_s=times["forward"],
        backward_s=times["backward"],
        update_s=times["optimizer_update"],
        activation_bytes=per_layer(by_tp[1], "output_activation_bytes_per_layer_per_sequence"),
        parameters={tp: per_layer(entry, "parameters_count_per_gpu_per_layer") for tp, entry in by_tp.items()},
        held_bytes={
            tp: per_layer(entry, "activation_memory_bytes_per_gpu_per_layer_per_sequence")
            for tp, entry in by_tp.items()
        },
        link=link,  # type: ignore[arg-type]
        memory_bytes={name: float(gib) * GIB for name, gib in network["gpu_memory_GiB"].items()},
        devices_per_node={name: int(count) for name, count in network["gpus_per_node"].items()},
    )


Stages = Sequence[Mapping[str, Any]]
"""Stages of Sailor's plan form: `layers` and `workers` with `gpu_type`, `tp` and `zone`."""


def pipelines(plan: Mapping[str, Any]) -> list[Stages]:
    """The pipelines of a plan form, each with its stages."""
    independent = plan.get("independent_pipelines")
    if independent:
        return list(independent)
    if not plan.get("stages"):
        raise InputError("plan: found no stages, expected layers and workers by stage")
    return [plan["stages"]]


def score_s(plan: Mapping[str, Any], measured: Measured, global_batch: int) -> float:
    """Seconds of a step under Sailor's simulator.

    Raises
    ------
    InputError
        The plan uses a combination of type, micro-batch and tensor-parallel degree, or a link, that was not measured.
    """
    size = int(plan["micro_batch_size_sequences"])
    lines = pipelines(plan)
    micro_batches = math.ceil(global_batch / (size * len(lines[-1][0]["workers"]) * len(lines)))
    pipeline_s = max(_pipeline_s(stages, measured, size, micro_batches) for stages in lines)
    inside_s = max(_reduce_s(stage, measured) for stages in lines for stage in stages)
    return pipeline_s + inside_s + _between_pipelines_s(lines, measured)


def _pipeline_s(stages: Stages, measured: Measured, size: int, micro_batches: int) -> float:
    compute_s, update_s = [], []
    for stage in stages:
        layers, workers = list(stage["layers"]), _kinds(stage)
        compute_s.append(max(_worker_s(worker, layers, measured, size) for worker in workers))
        update_s.append(max(float(measured.update_s[_profiled(w, measured, size)][layers[0]]) for w in workers))
    message_s = _messages_s(stages, measured, size)
    stage_s = [c + m for c, m in zip(compute_s, message_s, strict=True)]
    return (micro_batches - 1) * max(stage_s) + sum(stage_s) + max(update_s)


def _profiled(worker: Mapping[str, Any], measured: Measured, size: int) -> tuple[str, int, int]:
    """Which profile holds for a worker."""
    key = (worker["gpu_type"], size, int(worker["tp"]))
    if key not in measured.forward_s:
        raise InputError(f"plan: no profile of {measured.model} on {key[0]} at micro-batch {key[1]}, tp {key[2]}")
    return key


def _worker_s(worker: Mapping[str, Any], layers: list[int], measured: Measured, size: int) -> float:
    """Forward and backward of layers on a worker.

    Where the devices of a worker are on several nodes, Sailor counts the tensor-parallel all-reduces between them (two
    per block, forward and backward alike) and, evidently by oversight, no compute at all. Reproduced as it is.
    """
    key = _profiled(worker, measured, size)
    if int(worker.get("spans_nodes_count", 1)) < 2:
        return float((measured.forward_s[key] + measured.backward_s[key])[layers].sum())
    n_bytes = float(measured.activation_bytes[0]) * size
    end = (worker["zone"], worker["gpu_type"], measured.devices_per_node[worker["gpu_type"]])
    ring_s = 2 * (key[2] - 1) * measured.message_s(n_bytes / key[2], (*end, *end))
    blocks = measured.layers - 2
    return sum(2 * ring_s * (1 if layer == 0 else 2 if layer < blocks - 1 else 0) for layer in layers)


def _kinds(stage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One worker of each kind."""
    return list({(w["gpu_type"], w["tp"], w["zone"]): w for w in stage["workers"]}.values())


def _end(worker: Mapping[str, Any], devices: int | None = None) -> tuple[str, str, int]:
    return worker["zone"], worker["gpu_type"], int(worker["tp"]) if devices is None else devices


def _messages_s(stages: Stages, measured: Measured, size: int) -> list[float]:
    """Per stage what Sailor charges for messages: both ways in the middle, twice one way at the ends."""

    def slowest_s(sender: Mapping[str, Any], receiver: Mapping[str, Any], layer: int) -> float:
        n_bytes = float(measured.activation_bytes[layer]) * size
        to = receiver["workers"]
        pairs = {(*_end(w), *_end(to[j % len(to)])) for j, w in enumerate(sender["workers"])}
        return max(measured.message_s(n_bytes, pair) for pair in pairs)

    last = len(stages) - 1
    charged = []
    for s, stage in enumerate(stages):
        onward_s = slowest_s(stage, stages[s + 1], stage["layers"][-1]) if s < last else 0.0
        back_s = slowest_s(stage, stages[s - 1], stage["layers"][0]) if s else 0.0
        if s == 0:
            charged.append(onward_s * (1 if len(stages) <= 3 else 2) if last else 0.0)
        else:
            charged.append(2 * back_s if s == last else onward_s + back_s)
    return charged


def _ring_s(n_bytes: float, members: int, key: LinkKey, measured: Measured) -> float:
    """Flat ring in buckets."""
    if members < 2:
        return 0.0
    seconds = 0.0
    while n_bytes > 0:
        bucket = min(n_bytes, BUCKET_BYTES)
        seconds += 2 * (members - 1) * measured.message_s(bucket / members, key)
        n_bytes -= bucket
    return seconds


def _weight_bytes(stage: Mapping[str, Any], measured: Measured) -> float:
    return 4 * float(measured.parameters[1][list(stage["layers"])].sum())


def _reduce_s(stage: Mapping[str, Any], measured: Measured) -> float:
    """All-reduce inside a stage, at the pace of the slowest pair of consecutive workers."""
    workers = stage["workers"]
    degree = min(RING_TENSOR_PARALLEL, *(int(w["tp"]) for w in workers), RING_TENSOR_PARALLEL)
    n_bytes = _weight_bytes(stage, measured) / degree
    pairs = {(*_end(a, 1), *_end(b, 1)) for a, b in itertools.pairwise(workers)}
    return max((_ring_s(n_bytes, len(workers), pair, measured) for pair in pairs), default=0.0)


def _between_pipelines_s(lines: list[Stages], measured: Measured) -> float:
    """All-reduce between independent pipelines, along the one with most stages."""
    longest = max(lines, key=len)
    return max(
        _ring_s(_weight_bytes(stage, measured), len(lines), (*_end(worker, 1), *_end(worker, 1)), measured)
        for stage in longest
        for worker in _kinds(stage)
    )


def reserved_bytes(tp: int) -> float:
    """What Sailor sets aside on every device beside states and activations."""
    return 2e9 if tp == 1 else 3e9


def memory_fits(plan: Mapping[str, Any], measured: Measured) -> list[str]:
    """Where Sailor's simulator says that a plan runs out of memory; empty if nowhere.

    `STATE_BYTES` per parameter, activations of (stages - s) micro-batches, and `reserved_bytes`.
    """
    size, problems = int(plan["micro_batch_size_sequences"]), []
    for stages in pipelines(plan):
        for s, stage in enumerate(stages):
            layers = list(stage["layers"])
            for worker in _kinds(stage):
                tp = int(worker["tp"])
                held = float(measured.held_bytes[tp][layers].sum()) * size * (len(stages) - s)
                used = STATE_BYTES * float(measured.parameters[tp][layers].sum()) + held + reserved_bytes(tp)
                limit = measured.memory_bytes[worker["gpu_type"]]
                if used > limit:
                    problems.append(
                        f"stage {s}: {worker['gpu_type']} tp {tp} needs {used / GIB:.1f} GiB of {limit / GIB:.1f}"
                    )
    return problems
