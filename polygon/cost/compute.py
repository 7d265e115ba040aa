"""Seconds of compute: forward and backward of every layer on a worker, the optimizer, and the FLOP behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from polygon.cost.kernels import Silicon, gemm_s, silicon, stream_s
from polygon.cost.network import intra_node_all_reduce_s
from polygon.domain.cluster import Device, Link
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds that one micro-batch spends in each layer on one worker, tensor-parallel communication included."""

    forward_s: np.ndarray
    """Shape (layers,): embedding, blocks, head with the loss."""
    backward_s: np.ndarray
    """Shape (layers,); includes what is recomputed."""
    source: str
    """`spec`, `profile` or `calibrated`."""
    relative_error: float
    """Half of a 90 % interval over the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How a framework computes: what it fuses, and whether it materialises the attention scores."""

    flash_attention: bool = True
    fused: bool = True
    dropout: bool = False


FUSED = Kernels()


def layer_times(
    model: Model,
    batch: Batch,
    device: Device,
    intra_node: Link,
    *,
    tp: int = 1,
    micro_batch_size: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    kernels: Kernels = FUSED,
) -> LayerTimes:
    """Seconds of one micro-batch in each layer on a worker of `tp` devices of one node.

    Parameters
    ----------
    intra_node : Link
        Between two devices of the node; carries the tensor-parallel all-reduces.
    recompute : str
        `none`, `selective` (attention scores) or `full` (whole blocks, with their tensor-parallel communication).
    """
    require(recompute in RECOMPUTE, "recompute", recompute, " or ".join(RECOMPUTE))
    return _layer_times(
        model,
        silicon(device, batch.precision),
        intra_node,
        batch.seq_len,
        tp,
        micro_batch_size,
        recompute,
        sequence_parallel,
        kernels,
    )


@lru_cache(maxsize=4096)
def _layer_times(
    model: Model,
    chip: Silicon,
    link: Link,
    seq_len: int,
    tp: int,
    micro_batch_size: int,
    recompute: str,
    sequence_parallel: bool,
    kernels: Kernels,
) -> LayerTimes:
    forward = np.zeros(model.layers)
    backward = np.zeros(model.layers)
    tokens = micro_batch_size * seq_len
    by_kind: dict[str, tuple[float, float]] = {}
    for layer in range(model.layers):
        kind = model.layer_kind(layer)
        if kind not in by_kind:
            if kind == "embedding":
                by_kind[kind] = _embedding_s(model, chip, tokens, tp, link)
            elif kind == "head":
                by_kind[kind] = _head_s(model, chip, tokens, seq_len, tp, link)
            else:
                by_kind[kind] = _block_s(model, chip, tokens, seq_len, tp, link, recompute, kernels, moe=kind == "moe")
        forward[layer], backward[layer] = by_kind[kind]
    forward.setflags(write=False)
    backward.setflags(write=False)
    error = chip.efficiency.relative_error
    return LayerTimes(forward_s=forward, backward_s=backward, source="spec", relative_error=error)


def _three_gemms_s(chip: Silicon, rows: float, columns: float, inner: float) -> tuple[float, float]:
    """Forward, and backward with respect to input and weight, of a linear layer."""
    forward = gemm_s(chip, rows, columns, inner)
    return forward, gemm_s(chip, rows, inner, columns) + gemm_s(chip, inner, columns, rows)


def _block_s(
    model: Model,
    chip: Silicon,
    tokens: int,
    seq_len: int,
    tp: int,
    link: Link,
    recompute: str,
    kernels: Kernels,
    *,
    moe: bool,
) -> tuple[float, float]:
    h, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    kv_here = max(kv / tp, model.head_dim)
    up = 2 if model.gated_mlp else 1
    linear: list[tuple[float, float, float]] = [(tokens, q / tp + 2 * kv_here, h), (tokens, h, q / tp)]
    if moe:
        per_expert = tokens * model.experts_per_token / model.experts
        ffn = model.expert_ffn_size / tp
        linear += [(per_expert, up * ffn, h), (per_expert, h, ffn)] * model.experts
        linear += [(tokens, up * ffn, h), (tokens, h, ffn)] * model.shared_experts
        width = ffn * (model.experts_per_token + model.shared_experts)
    else:
        width = model.ffn_size / tp
        linear += [(tokens, up * width, h), (tokens, h, width)]
    pairs = [_three_gemms_s(chip, *shape) for shape in linear]
    forward, backward = sum(p[0] for p in pairs), sum(p[1] for p in pairs)

    attention_f, attention_b = _attention_s(model, chip, tokens, seq_len, q / tp, model.heads / tp, kernels)
    e = chip.element_bytes
    passes = 1.0 if kernels.fused else 1.8
    forward += attention_f + stream_s(chip, passes * e * tokens * (11 * h + (1 + up) * width), 8 * passes)
    backward += attention_b + stream_s(chip, passes * e * tokens * (18 * h + (2 + 2 * up) * width), 12 * passes)
    communication = 2 * intra_node_all_reduce_s(e * tokens * h, tp, link)
    forward += communication
    backward += communication
    if recompute == "full":
        backward += forward
    elif recompute == "selective" and not kernels.flash_attention:
        backward += attention_f
    return forward, backward


def _attention_s(
    model: Model, chip: Silicon, tokens: int, seq_len: int, width: float, heads: float, kernels: Kernels
) -> tuple[float, float]:
    flops = 4.0 * tokens * seq_len * width
    efficiency = chip.efficiency
    if kernels.flash_attention:
        flops *= 0.5 if model.causal else 1.0
        shape = min(1.0, model.head_dim / 128) ** 0.5 * (0.7 if model.head_dim % 8 else 1.0)
        forward = flops / (chip.peak_flops * efficiency.attention_forward * shape)
        backward = 2.5 * flops / (chip.peak_flops * efficiency.attention_backward * shape)
        return forward + efficiency.launch_s, backward + 2 * efficiency.launch_s
    scores = tokens * seq_len * heads * chip.element_bytes
    matrix_s = flops / (chip.peak_flops * efficiency.gemm * model.head_dim / (model.head_dim + efficiency.inner_half))
    return matrix_s + stream_s(chip, 7 * scores, 4), 2 * matrix_s + stream_s(chip, 9 * scores, 6)


def _embedding_s(model: Model, chip: Silicon, tokens: int, tp: int, link: Link) -> tuple[float, float]:
    h, e = model.hidden_size, chip.element_bytes
    if model.family == "vit":
        patch = model.channels * model.patch_size**2
        forward = gemm_s(chip, tokens, h, patch) + stream_s(chip, 3 * e * tokens * h, 2)
        return forward, gemm_s(chip, patch, h, tokens) + stream_s(chip, 3 * e * tokens * h, 2)
    forward = stream_s(chip, 5 * e * tokens * h, 3) + intra_node_all_reduce_s(e * tokens * h, tp, link)
    return forward, stream_s(chip, 8 * e * tokens * h, 3)


def _head_s(model: Model, chip: Silicon, tokens: int, seq_len: int, tp: int, link: Link) -> tuple[float, float]:
    h, e = model.hidden_size, chip.element_bytes
    rows = tokens / seq_len if model.family == "vit" else tokens
    columns = model.vocab_size if model.family == "vit" else model.vocab_size / tp
    forward, backward = _three_gemms_s(chip, rows, columns, h)
    forward += stream_s(chip, rows * columns * (e + 4 + 4 + 4) + 3 * e * tokens * h, 6)
    backward += stream_s(chip, rows * columns * (4 + e) + 4 * e * tokens * h, 4)
    return forward, backward + intra_node_all_reduce_s(e * rows * h, tp, link)


def update_s(parameters_held: float, device: Device, batch: Batch) -> float:
    """Seconds of the optimizer for as many parameters as one device updates.

    Adam reads gradient, master weight and two moments (16 bytes) and writes master, moments and the low-precision
    copy (12 + element); plain gradient descent with momentum leaves one moment out. Memory bound.
    """
    chip = silicon(device, batch.precision)
    low = 0 if chip.element_bytes == 4 else chip.element_bytes
    per_parameter = 12 + batch.gradient_bytes + 12 + low if batch.optimizer == "adamw" else 16 + batch.gradient_bytes
    return stream_s(chip, parameters_held * per_parameter, 2)


def model_flops_per_step(model: Model, batch: Batch) -> float:
    """FLOP of one step by the convention of MFU: no recomputation, causal attention counted by half.

    Per token and block :math:`2 p_{active}` for the linear layers plus :math:`4 s q` (half if causal) for attention;
    the head's :math:`2 h V`; backward twice the forward.
    """
    h, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    up_down = 3 if model.gated_mlp else 2
    attention = 2 * h * (2 * q + 2 * kv) + 4 * batch.seq_len * q * (0.5 if model.causal else 1.0)
    dense = 2 * up_down * h * model.ffn_size
    sparse = 2 * up_down * h * model.expert_ffn_size * (model.experts_per_token + model.shared_experts)
    sparse += 2 * h * model.experts
    sparse_blocks = model.blocks - model.dense_blocks if model.experts else 0
    per_token = model.blocks * attention + (model.blocks - sparse_blocks) * dense + sparse_blocks * sparse
    head = 2 * h * model.vocab_size
    if model.family == "vit":
        patches = 2 * model.channels * model.patch_size**2 * h
        return 3.0 * batch.global_batch * (batch.seq_len * (per_token + patches) + head)
    return 3.0 * batch.tokens * (per_token + head)
