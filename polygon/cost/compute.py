"""Seconds of compute: forward and backward of every layer on a worker, the optimizer, and the FLOP behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from polygon.cost.kernels import LAUNCH_S, Silicon, gemm_s, silicon, stream_s
from polygon.cost.network import FABRIC_EFFICIENCY, RING_STEP_S, Group, all_reduce_s, joined_in_a_mesh, one_node
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
    communication_s: np.ndarray
    """Shape (layers,): exposed seconds of tensor, context and expert parallelism within the two above."""
    source: str
    """`spec`, `profile` or `calibrated`."""
    relative_error: float
    """Half of a 90 % interval over the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How a framework computes: what it fuses, and whether it materialises the attention scores."""

    attention: str = "flash"
    """Kernel: `flash` (the vendor's), `flash2`, `triton` (the first generation), `materialised` (scores written)."""
    fused: bool = True
    """Whether element-wise operations and the optimizer run as fused kernels."""
    loss: str = "torch"
    """How the loss is computed from the logits, see `LOSS_BYTES`."""
    fused_accumulation: bool = True
    """Whether weight gradients are added up inside the products, not in a pass of their own."""
    dropout: bool = False
    """Of hidden states (and of materialised attention scores)."""
    attention_dropout: bool = False
    """Inside a fused attention kernel."""
    deterministic: bool = False
    selective: str = "attention"
    """What selective recomputation repeats: `attention`, or every second product and what is element-wise
    (`operators`, torchtitan's per-operator checkpointing)."""
    keeps_outputs: bool = False
    """Whether a pipeline stage holds what it has sent until the backward of it (DeepSpeed; Megatron-LM frees it)."""
    keeps_gathered: bool = False
    """Whether sequence parallelism keeps its gathered inputs for the weight gradients, as autograd does by itself
    (DTensor); Megatron-LM keeps the shares and gathers them once more (Korthikanti et al., section 4.2)."""
    cached_casts: bool = False
    """Whether weights are cast to 8 bits once a step and not in every micro-batch (TransformerEngine's "FP8 weight
    caching", docs.nvidia.com/deeplearning/transformer-engine, Performance Optimizations)."""
    tp_overlap: str = "none"
    """What hides tensor-parallel traffic: `none`, weight-gradient products (`backward`), all of them (`pipelined`)."""

    def __post_init__(self) -> None:
        require(self.attention in ATTENTION, "attention", self.attention, " or ".join(ATTENTION))
        require(self.loss in LOSS_BYTES, "loss", self.loss, " or ".join(LOSS_BYTES))
        require(self.tp_overlap in TP_OVERLAP, "tp_overlap", self.tp_overlap, " or ".join(TP_OVERLAP))


ATTENTION = ("flash", "flash2", "triton", "materialised")
TP_OVERLAP = ("none", "backward", "pipelined")
LOSS_BYTES = {"torch": (18, 14), "vocab-parallel": (38, 14), "fused": (6, 4)}
"""Bytes moved per logit beside the product itself, forward and backward: torch's cross entropy in fp32; Megatron's,
which takes maximum, difference, exponential, sum and quotient in kernels of their own; one fused kernel."""

LOGIT_BYTES = {"torch": 12, "vocab-parallel": 4, "fused": 4}
"""Bytes held per logit beside the logit itself. torch: log-softmax, its gradient and the gradient of what it took, in
fp32; Megatron works in place on one fp32 copy; one fused kernel writes the gradient and a partial result."""

FUSED = Kernels()
UNFUSED_PASSES = 1.35
"""Memory passes of eager element-wise kernels over those of fused ones (fitted, MosaicML)."""
CAST_BYTES = 4
"""Bytes moved per element that is cast to 8 bits, with its transpose."""
SCORE_PASSES = {True: (7, 9), False: (7, 16)}
"""Passes over materialised attention scores, forward and backward, with a fused softmax or an eager one: products,
softmax, mask and dropout each read and write them; the eager backward holds mask, dropout and scale apart."""
DROPOUT_SLOWS = (1.25, 1.5)
"""Fused attention with dropout draws a random number per score: 75-85 % of the forward's rate and 60-70 % of the
backward's are left (FlashAttention-4 measurements, Dao-AILab/flash-attention pull request 2597)."""
DETERMINISTIC_SLOWS = 1.3
"""Deterministic backward of fused attention: up to 37.9 % of the throughput is lost (DASH, arXiv:2601.21824)."""
EAGER_NORM_BYTES, EAGER_ROTARY_BYTES = (28, 40), (16, 16)
"""Bytes moved per element, forward and backward, beyond a fused kernel: RMSNorm as seven fp32 operations, rotary
positions as complex fp32 numbers."""
EAGER_HOST_S = (1.2e-3, 1.7e-3)
"""Seconds the host needs to launch forward and backward of one block, operation by operation: the smallest times in
Sailor's profiles (1.2-1.5 and 1.7 ms)."""
HOST_S = {False: EAGER_HOST_S, True: (15 / 24 * EAGER_HOST_S[0], 15 / 24 * EAGER_HOST_S[1])}
"""The same by whether element-wise kernels are fused: Megatron's block is then 15 kernels in forward, else 24."""
ROUTING_HOST_S = (12 / 24 * EAGER_HOST_S[0], 12 / 24 * EAGER_HOST_S[1])
"""The same for router, dispatch and combination of experts, taken for half as many kernels as an eager block."""
HOST_ERROR = 0.5
"""Half of a 90 % interval over what the host needs: another processor, Python or library."""
EXPERT_CASTS = (2, 1)
"""Kernels per product of an expert that cast its operands to 8 bits, forward and backward."""
HIDING = 0.8
"""Part of a communication that overlap hides where the overlapped compute is long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a micro-batch is spread inside a worker: everything that the time of a layer depends on."""

    micro_batch_size: int
    seq_len: int
    tp: int
    group: Group
    """The tensor-parallel devices."""
    recompute: str
    sequence_parallel: bool
    cp: int
    cp_link: Link
    experts: Group
    """The devices over which experts are spread."""
    kernels: Kernels
    gradient_bytes: int = 4

    @property
    def tokens(self) -> float:
        """Tokens on one device."""
        return self.micro_batch_size * self.seq_len / self.cp


class LayerProfile(Protocol):
    """Measured layer times (see `polygon.cost.profiles`)."""

    def times(self, model: Model, batch: Batch, device: Device, split: Split) -> LayerTimes | None:
        """Times of every layer, or None where nothing was measured that applies."""


def layer_times(
    model: Model,
    batch: Batch,
    device: Device,
    intra_node: Link,
    *,
    tp: int = 1,
    tp_group: Group | None = None,
    micro_batch_size: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    cp: int = 1,
    cp_link: Link | None = None,
    ep: int = 1,
    ep_group: Group | None = None,
    kernels: Kernels = FUSED,
    profile: LayerProfile | None = None,
) -> LayerTimes:
    """Seconds of one micro-batch in each layer on a worker of `tp` devices of one node.

    Parameters
    ----------
    intra_node : Link
        Between two devices of the node; carries the tensor-parallel all-reduces.
    tp_group : optional
        Where the tensor-parallel devices lie on several nodes.
    recompute : str
        `none`, `selective` (attention scores) or `full` (whole blocks, with their tensor-parallel communication).
    sequence_parallel : bool
        Whether norms and dropout work on a share of the sequence (Korthikanti et al.).
    cp, ep : int
        Context- and expert-parallel degrees; `cp_link` is what one device of a ring gets, `ep_group` where the experts
        lie (`intra_node` and one node if not given).
    profile : optional
        Measured layer times; each layer kind that it holds replaces the model's.
    """
    require(recompute in RECOMPUTE, "recompute", recompute, " or ".join(RECOMPUTE))
    split = Split(
        micro_batch_size=micro_batch_size,
        seq_len=batch.seq_len,
        tp=tp,
        group=tp_group or one_node(tp, intra_node, mesh=joined_in_a_mesh(device, tp)),
        recompute=recompute,
        sequence_parallel=sequence_parallel and tp > 1,
        cp=cp,
        cp_link=cp_link or intra_node,
        experts=ep_group or one_node(ep, intra_node),
        kernels=kernels,
        gradient_bytes=batch.gradient_bytes,
    )
    if profile is not None:
        measured = profile.times(model, batch, device, split)
        if measured is not None:
            return measured
    return _layer_times(model, silicon(device, batch.precision), split)


@lru_cache(maxsize=4096)
def _layer_times(model: Model, chip: Silicon, split: Split) -> LayerTimes:
    kinds = [model.layer_kind(layer) for layer in range(model.layers)]
    by_kind = {kind: _kind_s(kind, model, chip, split) for kind in set(kinds)}
    arrays = [np.array([by_kind[kind][part] for kind in kinds]) for part in range(4)]
    for array in arrays:
        array.setflags(write=False)
    host_error = float(arrays[3].sum() / (arrays[0].sum() + arrays[1].sum()))
    return LayerTimes(
        forward_s=arrays[0],
        backward_s=arrays[1],
        communication_s=arrays[2],
        source=chip.efficiency.source,
        relative_error=math.hypot(chip.efficiency.relative_error, host_error),
    )


def _kind_s(kind: str, model: Model, chip: Silicon, split: Split) -> tuple[float, float, float, float]:
    """Of a layer: forward, backward, the communication exposed in both, and what a slower host would add to both."""
    if kind == "embedding":
        times = (*_embedding_s(model, chip, split), 0.0)
    elif kind == "head":
        times = (*_head_s(model, chip, split), 0.0)
    else:
        times = _block_s(model, chip, split, moe=kind == "moe")
    if split.kernels.fused_accumulation:
        return times
    layer = {"embedding": 0, "head": model.blocks + 1, "moe": model.blocks}.get(kind, 1)
    held = model.layer_parameters(layer) / split.tp / (split.experts.members if kind == "moe" else 1)
    added = stream_s(chip, held * (2 * split.gradient_bytes + chip.element_bytes))
    return times[0], times[1] + added, times[2], times[3]


def _linear_s(chip: Silicon, rows: float, columns: float, inner: float) -> tuple[float, float]:
    """Forward, and backward with respect to input and weight, of a linear layer."""
    forward = gemm_s(chip, rows, columns, inner)
    return forward, gemm_s(chip, rows, inner, columns) + gemm_s(chip, inner, columns, rows)


def _block_s(model: Model, chip: Silicon, split: Split, *, moe: bool) -> tuple[float, float, float, float]:
    """Of one block: forward, backward, the communication exposed in both, and what a slower host would add to both."""
    h, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    tokens, tp, kernels, e = split.tokens, split.tp, split.kernels, chip.element_bytes
    up = 2 if model.gated_mlp else 1
    shapes: list[tuple[float, float, float, int]] = [
        (tokens, q / tp + 2 * max(kv / tp, model.head_dim), h, 1),
        (tokens, h, q / tp, 1),
    ]
    if moe:
        ffn = model.expert_ffn_size / tp
        here = model.experts // split.experts.members
        per_expert = tokens * model.experts_per_token * split.experts.members / model.experts
        shapes += [(per_expert, up * ffn, h, here), (per_expert, h, ffn, here)]
        shapes += [(tokens, up * ffn, h, model.shared_experts), (tokens, h, ffn, model.shared_experts)]
        shapes += [(tokens, model.experts, h, 1)]
        width = ffn * (model.experts_per_token + model.shared_experts)
    else:
        width = model.ffn_size / tp
        shapes += [(tokens, up * width, h, 1), (tokens, h, width, 1)]
    forward = backward = 0.0
    for rows, columns, inner, count in shapes:
        if count:
            one = _linear_s(chip, rows, columns, inner)
            forward, backward = forward + count * one[0], backward + count * one[1]
    products_f, products_b = forward, backward

    attention_f, attention_b = _attention_s(model, chip, split)
    passes = 1.0 if kernels.fused else UNFUSED_PASSES
    outer = h / tp if split.sequence_parallel else h
    drop = 1.0 if kernels.dropout else 0.0
    moved_f = (10 + drop) * outer + (1 + up) * width
    moved_b = (15 + 2 * drop) * outer + (2 + 2 * up) * width
    if moe:  # rows are gathered by expert and put back
        moved_f, moved_b = moved_f + 4 * model.experts_per_token * h, moved_b + 4 * model.experts_per_token * h
    bytes_f, bytes_b = passes * e * moved_f, passes * e * moved_b
    if not model.learned_positions and model.family != "vit":
        bytes_f, bytes_b = bytes_f + 2 * e * (q + kv) / tp, bytes_b + 2 * e * (q + kv) / tp
    if not kernels.fused and model.rms_norm:
        bytes_f += 2 * EAGER_NORM_BYTES[0] * outer + EAGER_ROTARY_BYTES[0] * (q + kv) / tp
        bytes_b += 2 * EAGER_NORM_BYTES[1] * outer + EAGER_ROTARY_BYTES[1] * (q + kv) / tp
    moved_s = stream_s(chip, tokens * bytes_f, 8 * passes)
    forward += attention_f + moved_s
    backward += attention_b + stream_s(chip, tokens * bytes_b, 12 * passes)
    if chip.operand_bytes == 1:
        weights = 0 if kernels.cached_casts else model.layer_parameters(1) / tp
        taken = tokens * (2 * h + q / tp + width)
        given = tokens * (2 * h + (q + 2 * kv) / tp + up * width)  # gradients of what the products gave
        forward += stream_s(chip, CAST_BYTES * (taken + weights), 8)
        backward += stream_s(chip, CAST_BYTES * (given + weights), 8)

    host_f, host_b = HOST_S[kernels.fused]
    idle_f, idle_b = max(0.0, host_f - forward), max(0.0, host_b - backward)  # what is sent is hidden by it as well
    forward, backward = forward + idle_f, backward + idle_b
    longer_f = max(0.0, (1 + HOST_ERROR) * host_f - forward)
    longer_b = max(0.0, (1 + HOST_ERROR) * host_b - backward)
    if moe:
        # The host learns from the device how many rows each expert gets before it can launch the experts, so what it
        # does for them is hidden behind nothing ("host-boundedness", arXiv:2603.07685). Router, dispatch and
        # combination are taken for as many kernels as the rest of the block; `gemm_s` has the products' own.
        casts = 2 * (model.experts // split.experts.members) * LAUNCH_S if chip.operand_bytes == 1 else 0.0
        forward += ROUTING_HOST_S[0] + EXPERT_CASTS[0] * casts
        backward += ROUTING_HOST_S[1] + EXPERT_CASTS[1] * casts
    reduce_s = 2 * all_reduce_s(e * tokens * h, split.group)
    regathered = split.sequence_parallel and not kernels.keeps_gathered
    sent_f, sent_b = reduce_s, reduce_s * (1.5 if regathered else 1.0)
    pipelined = kernels.tp_overlap == "pipelined"
    hidden_f = HIDING * min(sent_f, products_f + idle_f) if pipelined else 0.0
    hidden_b = HIDING * min(sent_b, (products_b if pipelined else products_b / 4) + idle_b)
    exposed_f, exposed_b = sent_f - hidden_f, sent_b - (hidden_b if kernels.tp_overlap != "none" else 0.0)
    ring_f, ring_b = _ring_attention_s(model, chip, split, attention_f + idle_f, attention_b + idle_b)
    expert_s = 2 * _expert_exchange_s(model, chip, split) if moe else 0.0
    recomputed = forward + sent_f + ring_f + expert_s
    forward += exposed_f + ring_f + expert_s
    backward += exposed_b + ring_b + expert_s
    communication = exposed_f + exposed_b + ring_f + ring_b + 2 * expert_s
    if split.recompute == "full":
        return forward, backward + recomputed, communication + sent_f + ring_f + expert_s, 2 * longer_f + longer_b
    if split.recompute == "selective":
        backward += attention_f if kernels.selective == "attention" else 0.5 * products_f + moved_s
    return forward, backward, communication, longer_f + longer_b


def _ring_attention_s(
    model: Model, chip: Silicon, split: Split, attention_f: float, attention_b: float
) -> tuple[float, float]:
    """Exposed seconds of passing keys and values round a context-parallel ring, forward and backward."""
    if split.cp == 1:
        return 0.0, 0.0
    kv = max(model.kv_heads / split.tp, 1) * model.head_dim
    block = 2 * split.tokens * kv * chip.element_bytes
    step_s = split.cp_link.latency_s + RING_STEP_S + block / (split.cp_link.bytes_per_s * FABRIC_EFFICIENCY)
    sent = (split.cp - 1) * step_s
    exposed_f = sent - HIDING * min(sent, attention_f * (split.cp - 1) / split.cp)
    exposed_b = 2 * sent - HIDING * min(2 * sent, attention_b * (split.cp - 1) / split.cp)
    return exposed_f, exposed_b


def _expert_exchange_s(model: Model, chip: Silicon, split: Split) -> float:
    """Seconds of one all-to-all of tokens to their experts (or back).

    Members of the same node are reached over its fabric, the others over the device's part of the cards, both at once.
    """
    group = split.experts
    if group.members == 1:
        return 0.0
    sent = split.tokens * model.experts_per_token * model.hidden_size * chip.element_bytes / group.members
    if split.sequence_parallel:
        sent /= split.tp
    near, far = group.per_node - 1, group.members - group.per_node
    card = group.inter_node.bytes_per_s / group.devices_per_node
    wire_s = max(near * sent / group.intra_node.bytes_per_s, far * sent / card) / FABRIC_EFFICIENCY
    latency_s = group.inter_node.latency_s if far else group.intra_node.latency_s
    return wire_s + (group.members - 1) * (RING_STEP_S + latency_s)


def padded_head(head_dim: int) -> int:
    """Head size as fused attention computes it: the next multiple of 32."""
    return -(-head_dim // 32) * 32


def _attention_s(model: Model, chip: Silicon, split: Split) -> tuple[float, float]:
    """Forward and backward of softmax(QK')V: one fused kernel, or products and passes over the written scores.

    Fused, causal: half of the scores are computed; the backward has five products for the forward's two.
    """
    efficiency, tokens, heads = chip.efficiency, split.tokens, model.heads / split.tp
    peak = chip.peak_flops_16
    if split.kernels.attention != "materialised":
        flops = tokens * split.seq_len * heads * padded_head(model.head_dim) * (2.0 if model.causal else 4.0)
        forward, backward = {
            "flash": (efficiency.flash_forward, efficiency.flash_backward),
            "flash2": (efficiency.flash2_forward, efficiency.flash2_backward),
            "triton": (efficiency.triton_forward, efficiency.triton_backward),
        }[split.kernels.attention]
        forward_s, backward_s = flops / (peak * forward), 2.5 * flops / (peak * backward)
        if split.kernels.attention_dropout:
            forward_s, backward_s = forward_s * DROPOUT_SLOWS[0], backward_s * DROPOUT_SLOWS[1]
        if split.kernels.deterministic:
            backward_s *= DETERMINISTIC_SLOWS
        return forward_s + LAUNCH_S, backward_s + 2 * LAUNCH_S
    flops = 4.0 * tokens * split.seq_len * heads * model.head_dim
    score_bytes = tokens * split.seq_len * heads * chip.element_bytes
    product_s = flops / (peak * chip.gemm * (chip.unaligned if model.head_dim % 8 else 1.0))
    passes_f, passes_b = SCORE_PASSES[split.kernels.fused]
    forward = product_s + stream_s(chip, passes_f * score_bytes, 4)
    return forward, 2 * product_s + stream_s(chip, passes_b * score_bytes, 6)


def _embedding_s(model: Model, chip: Silicon, split: Split) -> tuple[float, float, float]:
    h, e, tokens = model.hidden_size, chip.element_bytes, split.tokens
    if model.family == "vit":
        patch = model.channels * model.patch_size**2
        moved_s = stream_s(chip, 3 * e * tokens * h, 2)
        return gemm_s(chip, tokens, h, patch) + moved_s, gemm_s(chip, patch, h, tokens) + moved_s, 0.0
    reduce_s = all_reduce_s(e * tokens * h, split.group)
    return stream_s(chip, 5 * e * tokens * h, 3) + reduce_s, stream_s(chip, 8 * e * tokens * h, 3), reduce_s


def _head_s(model: Model, chip: Silicon, split: Split) -> tuple[float, float, float]:
    h, e, tokens = model.hidden_size, chip.element_bytes, split.tokens
    vit = model.family == "vit"
    rows = split.micro_batch_size if vit else tokens
    columns = model.vocab_size if vit else model.vocab_size / split.tp
    in_16_bits = chip._replace(operand_bytes=e, peak_flops=chip.peak_flops_16)  # frameworks keep the logits out of fp8
    forward, backward = _linear_s(in_16_bits, rows, columns, h)
    loss_f, loss_b = LOSS_BYTES[split.kernels.loss]
    forward += stream_s(chip, rows * columns * loss_f + 3 * e * tokens * h, 8)
    backward += stream_s(chip, rows * columns * loss_b + 4 * e * tokens * h, 6)
    reduce_s = all_reduce_s(e * rows * h, split.group)
    return forward, backward + reduce_s, reduce_s


def update_s(parameters_held: float, device: Device, batch: Batch, *, fused: bool = True) -> float:
    """Seconds of the optimizer for as many parameters as one device updates.

    Adam reads gradient, master weight and two moments and writes master, moments and the low-precision copy; fp16
    adds the passes that unscale, check and clip; without fusion every arithmetic step is a pass of its own. Plain
    gradient descent with momentum leaves one moment out. Memory bound.
    """
    chip = silicon(device, batch.precision)
    low = 0 if chip.element_bytes == 4 else chip.element_bytes
    per_parameter: float = (24 if batch.optimizer == "adamw" else 16) + batch.gradient_bytes + low
    per_parameter += 4 + batch.gradient_bytes  # norm of the gradients and clipping
    if batch.precision == "fp16":
        per_parameter += 6 + 4
    if not fused:
        per_parameter = EAGER_ADAM_BYTES if batch.optimizer == "adamw" else EAGER_ADAM_BYTES / 2
    return stream_s(chip, parameters_held * per_parameter, 2)


EAGER_ADAM_BYTES = 84
"""Bytes per parameter of an optimizer written as some twenty element-wise tensor operations in fp32."""


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
