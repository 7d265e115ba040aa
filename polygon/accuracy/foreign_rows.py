"""Rows of measured runs as other collections write them, put into the fields of ours.

Each value is looked up in a short list of words for its field. What a program does follows from its name and the date
by the catalogue of runtimes, never from notes; a program that is not there is `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from polygon.cost.kernels import architecture_of
from polygon.domain.cluster import Device
from polygon.domain.errors import InputError
from polygon.domain.optimizer import OPTIMIZERS
from polygon.domain.runtime import DP_OVERLAP, Runtime
from polygon.formats.catalogue import device as device_by_name
from polygon.formats.catalogue import runtime_of_program

PRECISIONS = {
    "amp_bf16": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "amp_fp16": "fp16",
    "half": "fp16", "amp_fp8": "fp8", "fp8": "fp8", "float8": "fp8", "mxfp8": "fp8", "tf32": "tf32",
    "fp32": "tf32", "float32": "tf32",
}  # fmt: skip
"""fp32: what the vendor's containers compute fp32 products in; without such units it is fp32."""
RECOMPUTE = {
    "none": "none", "no": "none", "off": "none", "false": "none", "": "none", "selective": "selective", "full": "full",
    "yes": "full", "on": "full", "true": "full", "block": "full", "uniform": "full", "every": "full", "all": "full",
    "checkpointing": "full",
}  # fmt: skip
COUNTED = {"allocated": "allocated", "reserved": "reserved", "smi": "device"}
ALSO_CALLED = {"a800": "a800-80gb"}
"""Names of devices that compute (in 16 and 8 bits) as another of the catalogue does."""
SAME = {
    "experts": ("num_experts", "moe_experts", "experts_count"),
    "experts_per_token": ("top_k", "moe_top_k", "topk", "moe_router_topk"),
    "expert_ffn_size": ("moe_ffn_size", "moe_intermediate_size"),
    "zero_shard_ranks": ("zero_group_size", "zero_shard_size", "optimizer_shard_ranks"),
}
"""Our fields, and what others call them."""
KEEPS_WEIGHTS = ("fsdp", "torchtitan", "torchtitan-2024")
"""Runtimes that divide the optimizer alone in a pipeline ("For PP, do not reshard after forward to avoid per-microbatch
all-gathers", torchtitan; gradients are reduced once a step)."""
LIVE_PARAMETERS = 1e9
"""Defaults of stage3_max_live_parameters and stage3_max_reuse_distance in DeepSpeed: no weights are fetched
ahead while so many are held, and those that are not used again within so many are let go."""


class NotExpressibleError(Exception):
    """A row that the predictor has no words for; the message is the reason."""


def in_our_fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row in our fields; one that names its `runtime` is in them already."""
    if row.get("runtime"):
        return row
    if not row.get("gpu_type"):
        raise NotExpressibleError("gpu_type is missing")
    same = {name: next((row[o] for o in (name, *others) if row.get(o)), None) for name, others in SAME.items()}
    precision = _word(row, "precision", PRECISIONS, "bf16")
    device = device_named(str(row["gpu_type"]))
    runtime = runtime_of_program(
        str(row.get("framework") or ""), str(row.get("date") or ""), architecture_of(device), precision
    )
    recompute = _word(row, "recompute", RECOMPUTE, "none")
    return {
        **row,
        **same,
        "runtime": runtime.name,
        "switches": _switches(row, runtime, recompute),
        "precision": precision,
        "gradient_precision": _gradient_precision(row, runtime, precision),
        "recompute": recompute,
        "optimizer": _optimizer(row),
        "zero_stage": _zero(row, runtime),
        "zero_shard_ranks": _shards(row, int(same["zero_shard_ranks"] or 0)),
        "device": device.name,
        "device_changes": {"flops_factor": _flops_factor(row, device, precision)},
        "memory_counts": next((COUNTED[word] for word in _words(row.get("memory_kind")) if word in COUNTED), "process"),
        "stage_layers": row.get("stage_layers"),
    }


def _plain(text: str) -> str:
    """The text without remarks in parentheses, where anything else is left."""
    return re.sub(r"\s*\(.*?\)", "", text).strip() or text


def _words(value: object) -> list[str]:
    """Words of a field, in lower case."""
    return re.findall(r"[a-z][a-z0-9]*", str(value or "").lower().replace("_", " "))


def _word(row: Mapping[str, Any], field: str, known: Mapping[str, str], default: str) -> str:
    """What the first known word of a field means."""
    said = row.get(field)
    if said is None:
        return default
    words = re.split(r"[^a-z0-9_]+", _plain(str(said)).lower())
    for word in words:
        if word in known:
            return known[word]
    raise NotExpressibleError(f"{field} {said!r} has none of the words {', '.join(word for word in known if word)}")


def device_named(label: str) -> Device:
    """The catalogue's device that a table names: without remarks and, if need be, without its memory size."""
    known_as = next((other for name, other in ALSO_CALLED.items() if label.lower().startswith(name)), label)
    plain = _plain(known_as)
    for name in (plain, re.sub(r"[ -]?\d+ ?GB\b", "", plain, flags=re.IGNORECASE)):
        with suppress(InputError):
            return device_by_name(name)
    try:
        return device_by_name(known_as)
    except InputError as error:
        raise NotExpressibleError(str(error)) from None


def _flops_factor(row: Mapping[str, Any], device: Device, precision: str) -> float:
    """The board's peak over the catalogue's; 1 within rounding, or where it is the peak of another precision."""
    stated = float(row.get("gpu_peak_dense_tflops_per_s") or 0.0)
    factor = stated * 1e12 / device.peak_flops(precision)
    return factor if 0.5 < factor < 0.99 else 1.0


def _gradient_precision(row: Mapping[str, Any], runtime: Runtime, precision: str) -> str:
    width = row.get("grad_reduce_bytes_per_element")
    if width:
        return {2: "bf16", 4: "fp32"}[int(width)]
    if runtime.name == "internevo":
        return "bf16"  # reduces in the precision of its parameters
    return "fp16" if precision == "fp16" else "fp32"


def _optimizer(row: Mapping[str, Any]) -> str:
    """The optimizer, where a word of the row is one of ours; else AdamW, which takes as long as LAMB and Adam."""
    return next((word for word in _words(row.get("optimizer")) if word in OPTIMIZERS), "adamw")


def _zero(row: Mapping[str, Any], runtime: Runtime) -> int:
    zero = int(row.get("zero_stage") or 0)
    return 1 if zero == 3 and int(row.get("pp") or 1) > 1 and runtime.name in KEEPS_WEIGHTS else zero


def _shards(row: Mapping[str, Any], stated: int) -> int:
    """Over how many ranks ZeRO divides, where a row says that it is not all of them; else 0."""
    members = int(row.get("gpu_count") or 1) // (int(row.get("tp") or 1) * int(row.get("pp") or 1))
    return stated if 0 < stated < members and members % stated == 0 else 0


def _switches(row: Mapping[str, Any], runtime: Runtime, recompute: str) -> dict[str, Any]:
    """What the row's fields say of its program: overlap, where it is one of our words; how DeepSpeed fetches."""
    said = _plain(str(row.get("overlap") or "")).lower()
    switches: dict[str, Any] = {"dp_overlap": said} if said in DP_OVERLAP else {}
    if runtime.name in ("deepspeed", "deepspeed-2021") and int(row.get("zero_stage") or 0) == 3:
        hidden = int(row.get("hidden_size") or 0)
        matrix = hidden * int(row.get("ffn_size") or 4 * hidden)
        gated = bool(row.get("gated_mlp"))
        if runtime.dp_overlap != "none":
            switches["dp_overlap"] = "none" if matrix > LIVE_PARAMETERS else "backward"
        layer = 4 * hidden**2 + (3 if gated else 2) * matrix
        switches["gathers_again"] = recompute == "full" and 2 * layer > LIVE_PARAMETERS
    return switches
