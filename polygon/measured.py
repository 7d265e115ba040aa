"""Measured training runs, read from the tables that papers and projects publish, as things that can be predicted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from polygon.catalogue import device as device_by_name
from polygon.catalogue import model as model_by_name
from polygon.catalogue import usual_link
from polygon.cost.compute import Kernels
from polygon.cost.kernels import architecture_of
from polygon.cost.staged import Place, StagedConfig
from polygon.cost.uniform import ParallelConfig
from polygon.domain.cluster import Device, Link, Pool
from polygon.domain.errors import InputError, require
from polygon.domain.model import Batch, Model
from polygon.frameworks import kernels_of, program_error

CONTEXT_BYTES = 1.5e9
"""CUDA context and communication buffers, which nvidia-smi counts and torch's allocator does not."""


BUCKET_BYTES = 2e9
"""DeepSpeed's reduce_bucket_size and allgather_bucket_size: 5e8 elements of 16 bits each (its documented defaults)."""
ALLOCATOR_ERROR, SEEN_FROM_OUTSIDE = 0.15, 0.25
"""Half of a 90 % interval over memory that an allocator reserved, and that nvidia-smi reports: caches, fragmentation
and communication buffers are a program's own affair."""
LIVE_PARAMETERS = 1e9
"""Defaults of stage3_max_live_parameters and stage3_max_reuse_distance in DeepSpeed: no weights are fetched
ahead while so many are held, and those that are not used again within so many are let go."""
RESERVED = {"": 1.03, "deepspeed": 1 / (1 - 0.15)}
"""What torch's allocator reserves over what it has handed out at the peak, by what the framework's name holds.
DeepSpeed's engines: 15 % of what is reserved lies idle in the mean over eight language models in training (GMLake,
arXiv:2401.08156); others: an old figure."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run: what was trained where and how, and what was measured."""

    identifier: str
    dataset: str
    model: Model
    batch: Batch
    pool: Pool
    config: ParallelConfig
    step_s: float | None
    memory_bytes: float | None
    calibration: bool
    """Whether the row may have been used to fit coefficients (else it is a test row)."""
    context_bytes: float = 0.0
    """What the way of measuring memory counts beside the allocator."""
    memory_factor: float = 1.0
    """What it counts over the bytes in use, the context left out: an allocator reserves more than it hands out."""
    memory_error: float = 0.08
    """Half of a 90 % interval over the memory, by how it was measured."""
    program_error: float = 0.0
    """What not knowing the program adds to half of the interval over the time, as a part of what is measured."""
    device_label: str = ""
    profiled_precision: bool = False
    """Whether it ran in the 32-bit precision that profiles of this format were measured in."""


class NotExpressibleError(Exception):
    """A row that the predictor has no words for; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class StagedRun:
    """One run whose plan names the workers of every stage (the `sailor_validation` format)."""

    identifier: str
    dataset: str
    model: Model
    model_key: str
    """Name of the model in a profile file."""
    batch: Batch
    config: StagedConfig
    step_s: float | None
    memory_bytes: float | None
    """The mean where the configuration was measured twice."""
    measurements: Mapping[str, tuple[float, ...]]
    """Every measurement of time and memory."""
    device_label: str
    calibration: bool = False


def staged_runs(data: Mapping[str, Any]) -> list[StagedRun | tuple[str, str]]:
    """Every configuration of a `sailor_validation` file; (identifier, reason) where one cannot be expressed."""
    require("models" in data, "models", sorted(data), "a description of every model")
    runs: list[StagedRun | tuple[str, str]] = []
    for entry in data["configurations"]:
        try:
            runs.append(_staged_run(entry, data["models"]))
        except NotExpressibleError as error:
            runs.append((str(entry.get("id")), str(error)))
        except KeyError as error:
            runs.append((str(entry.get("id")), f"the field {error} is missing"))
    return runs


def profiled_model(name: str, info: Mapping[str, Any]) -> Model:
    """The model that a file describes; the catalogue's of that name where its width is left out."""
    length = int(info.get("sequence_length_tokens") or 2048)
    if not info.get("hidden_size"):
        for called in (name, f"{name}b"):
            try:
                return replace(model_by_name(called), max_seq_len=length)
            except InputError:
                continue
        raise NotExpressibleError(f"model {name}: hidden_size is missing, and no such model is in the catalogue")
    hidden, heads = int(info["hidden_size"]), int(info["attention_heads"])
    return Model(
        name=name,
        blocks=int(info["profiled_layers"]) - 2,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        vocab_size=int(info["vocabulary_size"]),
        max_seq_len=length,
        tied_embeddings=False,
    )


def _staged_run(entry: Mapping[str, Any], models: Mapping[str, Any]) -> StagedRun:
    if entry["model"] not in models:
        raise NotExpressibleError(f"model {entry['model']} is not described in the file")
    info = models[entry["model"]]
    stages, bounds = [], [0]
    for stage in entry["plan"]["stages"]:
        bounds.append(bounds[-1] + len(stage["layers"]))
        stages.append(
            tuple(
                Place(device=device_named(w["gpu_type"]), tp=int(w["tp"]), zone=str(w.get("zone", "")))
                for w in stage["workers"]
            )
        )
    if bounds[-1] != int(info["profiled_layers"]):
        raise NotExpressibleError(f"the plan has {bounds[-1]} layers, the model {info['profiled_layers']}")
    size = int(entry["micro_batch_size_sequences"])
    global_batch = int(entry["global_batch_sequences"])
    measured, again = entry.get("measured") or {}, entry.get("measured_rerun_artifact_branch") or {}
    model = profiled_model(entry["model"], info)

    def numbers(key: str, use: str) -> tuple[float, ...]:
        if not entry.get(use, True):
            return ()
        return tuple(float(source[key]) for source in (measured, again) if source.get(key))

    times, memories = numbers("iteration_time_s", "use_time"), numbers("peak_memory_per_gpu_bytes", "use_memory")
    return StagedRun(
        identifier=str(entry["id"]),
        dataset="sailor_validation",
        model=model,
        model_key=entry["model"],
        batch=Batch(
            global_batch=global_batch,
            seq_len=model.max_seq_len,
            precision="tf32",
            gradient_precision="fp32",
        ),
        config=StagedConfig(
            bounds=tuple(bounds),
            stages=tuple(stages),
            micro_batch_size=size,
            micro_batches=max(1, math.ceil(global_batch / size)),
            kernels=Kernels(attention="materialised", fused=False, dropout=True),
        ),
        step_s=sum(times) / len(times) if times else None,
        memory_bytes=sum(memories) / len(memories) if memories else None,
        measurements={"time": times, "memory": memories},
        device_label="+".join(sorted(entry["cluster"]["gpus_by_type_count"])),
    )


def published_run(row: Mapping[str, Any]) -> MeasuredRun:
    """A row of the `published_runs` format.

    Raises
    ------
    NotExpressibleError
        With the reason, where the row lacks what a prediction needs or uses what the model does not have.
    """
    if not row.get("predictable", True):
        raise NotExpressibleError(f"marked as not predictable: {row.get('notes') or 'no reason given'}")
    for key in ("layers", "hidden_size", "attention_heads", "sequence_length_tokens", "gpu_count", "gpu_type"):
        if not row.get(key):
            raise NotExpressibleError(f"{key} is missing")
    degrees = {key: int(row.get(key) or 1) for key in ("tp", "pp", "cp", "ep")}
    gpus = int(row["gpu_count"])
    dp = int(row.get("dp") or max(1, gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"])))
    if dp * degrees["tp"] * degrees["pp"] * degrees["cp"] != gpus:
        raise NotExpressibleError(f"dp {dp} x {degrees} is not {gpus} devices")
    framework = str(row.get("framework") or "")
    kernels = kernels_of(
        f"{framework} {row.get('dataset')}",
        str(row.get("date") or ""),
        str(row.get("overlap") or ""),
        f"{row.get('notes')} {row.get('precision')}",
    )
    model = _model(row, degrees["tp"], framework)
    precision = _precision(str(row.get("precision") or "bf16"))
    micro_batch = int(row.get("micro_batch_sequences") or 1)
    global_batch = int(row.get("global_batch_sequences") or micro_batch * dp * int(row.get("microbatches_per_step", 1)))
    if global_batch % (micro_batch * dp):
        micro_batches = math.ceil(global_batch / (micro_batch * dp))
        global_batch = micro_batches * micro_batch * dp
    device = _as_measured(device_named(str(row["gpu_type"])), row, precision)
    zero, recompute = int(row.get("zero_stage") or 0), _recompute(str(row.get("recompute") or "none"))
    if zero == 3 and degrees["pp"] > 1 and re.search("fsdp|titan", framework.lower()):
        # torchtitan: "For PP, do not reshard after forward to avoid per-microbatch all-gathers"; gradients are reduced
        # once a step, so that both are held whole and only the optimizer is divided.
        zero = 1
    if (
        zero == 3 or global_batch == micro_batch * dp
    ):  # the first gradient is kept, and shards are added up by SHARD_COPIES
        kernels = replace(kernels, fused_accumulation=True)
    config = ParallelConfig(
        dp=dp,
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        interleave=int(row.get("interleave_v") or 1) if degrees["pp"] > 1 else 1,
        micro_batch_size=micro_batch,
        zero=zero,
        shards=_shards(row, dp * degrees["cp"]),
        recompute=recompute,
        sequence_parallel=bool(row.get("sequence_parallel")),
        overlap=_overlap(f"{row.get('overlap') or 'none'} {framework}", int(row.get("zero_stage") or 0), model),
        gathers_per_layer=12 if "deepspeed" in framework.lower() and "zero" in framework.lower() else 1,
        gathers_again=recompute == "full"
        and "deepspeed" in framework.lower()
        and 2 * model.layer_parameters(1) > LIVE_PARAMETERS,
        owned_matrices=_weight_matrices(model) if "internevo" in framework.lower() else 0,
        p2p_overlap="p2p" in str(row.get("overlap") or "").lower(),
        stage_layers=_stage_layers(str(row.get("notes") or "")),
        kernels=kernels,
    )
    batch = Batch(
        global_batch=global_batch,
        seq_len=int(row["sequence_length_tokens"]),
        precision=precision,
        gradient_precision=_gradient_precision(row, precision),
    )
    kind = str(row.get("memory_kind") or "")
    memory = row.get("measured_memory_gigabytes")
    return MeasuredRun(
        identifier=str(row.get("id")),
        dataset=str(row.get("dataset")),
        model=model,
        batch=batch,
        pool=_pool(row, device, gpus),
        config=config,
        step_s=_step_s(row, global_batch),
        memory_bytes=float(memory) * 1e9 if memory else None,
        calibration=str(row.get("dataset")).startswith("mosaicml") and gpus <= 8,
        context_bytes=_context_bytes(kind, framework, zero),
        memory_factor=_reserved(framework) if "reserved" in kind or "smi" in kind else 1.0,
        memory_error=SEEN_FROM_OUTSIDE if "smi" in kind else ALLOCATOR_ERROR if "reserved" in kind else 0.08,
        program_error=program_error(f"{framework} {row.get('dataset')}", experts=model.experts, cp=degrees["cp"]),
        device_label=str(row["gpu_type"]),
        profiled_precision=precision in ("fp32", "tf32"),
    )


def _weight_matrices(model: Model) -> int:
    """Weight matrices of a model: what InternEvo deals out to the ranks of ZeRO, each whole to one of them.

    Its HybridZeroOptimizer sums gradients on all data-parallel ranks (no destination rank), gives every parameter to
    one rank and broadcasts rank by rank (internlm/solver/optimizer/hybrid_zero_optim.py `_partition_param_list`,
    `broadcast_params`); biases and norms go with the matrix before them (internlm/core/communication/utils.py
    `ParamAsyncBcastHandler`).
    """
    return model.blocks * (2 + (3 if model.gated_mlp else 2)) + 2


def _reserved(framework: str) -> float:
    """See `RESERVED`."""
    return next(factor for name, factor in reversed(RESERVED.items()) if name in framework.lower())


def _context_bytes(kind: str, framework: str, zero: int) -> float:
    """What the way of measuring counts beside the model's own bytes."""
    buckets = BUCKET_BYTES if zero in (1, 2) and "deepspeed" in framework.lower() else 0.0
    return buckets + (0.0 if "allocated" in kind or "reserved" in kind else CONTEXT_BYTES)


def _step_s(row: Mapping[str, Any], global_batch: int) -> float | None:
    for key in ("measured_iteration_time_s", "derived_iteration_time_s"):
        if row.get(key):
            return float(row[key])
    rate = row.get("measured_tokens_per_s_per_gpu")
    if rate:
        return global_batch * float(row["sequence_length_tokens"]) / (float(rate) * float(row["gpu_count"]))
    return None


def _first(row: Mapping[str, Any], *names: str) -> int:
    """The first of some fields that the row has; 0 if it has none."""
    return next((int(row[name]) for name in names if row.get(name)), 0)


def _model(row: Mapping[str, Any], tp: int, framework: str) -> Model:
    hidden, heads = int(row["hidden_size"]), int(row["attention_heads"])
    gated = bool(row.get("gated_mlp"))
    tied = row.get("tied_embeddings")
    vocab = int(row.get("vocab_size") or 51200)
    if "megatron" in framework.lower() or "nemo" in framework.lower():
        vocab = math.ceil(vocab / (128 * tp)) * 128 * tp
    experts = _first(row, "experts", "num_experts", "moe_experts", "experts_count")
    chosen = _first(row, "experts_per_token", "top_k", "moe_top_k", "topk", "moe_router_topk")
    expert_width = _first(row, "expert_ffn_size", "moe_ffn_size", "moe_intermediate_size", "ffn_size")
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
        learned_positions=not gated,
        rms_norm=gated,
        linear_bias=not gated,
        qkv_bias=not gated,
        experts=experts,
        experts_per_token=(chosen or 1) if experts else 0,
        expert_ffn_size=expert_width if experts else 0,
    )


ALSO_CALLED = {"gb300": "gb200", "b300": "b200", "a800": "a800-80gb"}
"""Names of devices that compute (in 16 and 8 bits) as another of the catalogue does."""


def device_named(label: str) -> Device:
    """The catalogue's device that a table names: without remarks and, if need be, without its memory size."""
    known_as = next((other for name, other in ALSO_CALLED.items() if label.lower().startswith(name)), label)
    plain = re.sub(r"\s*\(.*?\)", "", known_as).strip()
    for name in (plain, re.sub(r"[ -]?\d+ ?GB\b", "", plain, flags=re.IGNORECASE)):
        with suppress(InputError):
            return device_by_name(name)
    try:
        return device_by_name(known_as)
    except InputError as error:
        raise NotExpressibleError(str(error)) from None


def _as_measured(device: Device, row: Mapping[str, Any], precision: str) -> Device:
    """The device with what the row says of it: another peak, or the slower memory of early or export boards."""
    text = " ".join(str(row.get(key) or "") for key in ("gpu_type", "notes", "interconnect", "framework")).lower()
    scale = 1.0
    stated = row.get("gpu_peak_dense_tflops_per_s")
    if stated:
        scale = float(stated) * 1e12 / device.peak_flops(precision)
        if not 0.5 < scale < 0.99:  # within rounding, or the peak of another precision
            scale = 1.0
    if device.name.startswith("h100-sxm") and ("hbm2e" in text or "torchtitan" in text):
        # torchtitan's authors: "96GB HBM2e with 2.4 TB/sec peak memory bandwidth", "default 500W power limit"; dynamic
        # power goes with the cube of the clock (frequency times voltage squared).
        clock = (500 / device.power_w) ** (1 / 3)
        return replace(
            device,
            flops={key: value * min(scale, clock) for key, value in device.flops.items()},
            memory_bytes_per_s=2.4e12,
        )
    if scale == 1.0:
        return device
    return replace(device, flops={key: value * scale for key, value in device.flops.items()})


def _pool(row: Mapping[str, Any], device: Device, gpus: int) -> Pool:
    per_node = int(row.get("gpus_per_node") or 8)
    usual = usual_link(device.name).bytes_per_s / 1e9
    card = 50.0 if architecture_of(device) in ("hopper", "blackwell") else 25.0  # as in DGX H100 and DGX A100
    intra = float(row.get("intra_node_bandwidth_per_gpu_per_direction_gigabytes_per_s") or usual)
    inter = float(row.get("inter_node_bandwidth_per_gpu_per_direction_gigabytes_per_s") or card)
    return Pool(
        index=0,
        region=0,
        device=device,
        nodes=max(1, gpus // per_node),
        devices_per_node=per_node,
        intra_node=Link(latency_s=2e-6, bytes_per_s=intra * 1e9),
        inter_node=Link(latency_s=4e-6, bytes_per_s=inter * 1e9 * per_node),
        first_device=0,
        price_usd_per_hour=0.0,
    )


def _precision(text: str) -> str:
    text = text.lower()
    text = text.replace("float", "fp")
    for name in ("fp8", "bf16", "tf32"):
        if name in text:
            return name
    if "fp32" in text:
        return "tf32"  # what the vendor's containers compute fp32 products in; without such units it is fp32
    if "fp16" in text:
        return "fp16"
    raise NotExpressibleError(f"precision {text!r} is not one of fp32, tf32, fp16, bf16, fp8")


def _gradient_precision(row: Mapping[str, Any], precision: str) -> str:
    width = row.get("grad_reduce_bytes_per_element")
    if width:
        return {2: "bf16", 4: "fp32"}[int(width)]
    if "internevo" in str(row.get("framework") or "").lower():
        return "bf16"  # reduces in the precision of its parameters
    return "fp16" if precision == "fp16" else "fp32"


def _recompute(text: str) -> str:
    lower = text.lower()
    if re.search(r"\b(true|yes|every layer|all layers|checkpoint)", lower) and "no " not in lower:
        lower += " full"
    return next((name for name in ("selective", "full") if name in lower), "none")


def _overlap(text: str, zero: int, model: Model) -> str:
    lower = text.lower()
    if zero == 3 and "deepspeed" in lower:
        return "none" if model.hidden_size * model.ffn_size > LIVE_PARAMETERS else "backward"
    if zero == 3:
        return "full"
    if "param" in lower:
        return "full"
    if re.search(r"no dp|none|not overlapped|no overlap", lower):
        return "none"
    return "backward" if "overlap" in lower or "ddp" in lower or "fsdp" in lower else "none"


def _shards(row: Mapping[str, Any], members: int) -> int:
    """Over how many ranks ZeRO divides, where a row says that it is not all of them; else 0."""
    stated = _first(row, "zero_shard_ranks", "zero_group_size", "zero_shard_size", "optimizer_shard_ranks")
    text = f"{row.get('overlap') or ''}. {row.get('notes') or ''}".lower()
    said = re.search(r"(?:shard\w*|zero[- ]?1?)[^.;\d]{0,40}(?:over|across|within|size|group of|=)\s*(\d+)", text)
    shards = stated or (int(said.group(1)) if said else 0)
    return shards if 0 < shards < members and members % shards == 0 else 0


def _stage_layers(notes: str) -> tuple[int, ...]:
    match = re.search(r"stages layers (\[\[.*?\]\])", notes)
    return tuple(len(part.split(",")) for part in re.findall(r"\[([\d, ]+)\]", match.group(1))) if match else ()
