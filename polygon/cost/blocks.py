"""Seconds of one transformer block on a worker: products, attention, what passes through memory, what is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from polygon.cost.kernels import Silicon, attention_s, delta_rule_s, gemm_s, stream_s
from polygon.cost.network import FABRIC_EFFICIENCY, RING_STEP_S, Group, all_reduce_s
from polygon.domain.block import Block, shares_heads
from polygon.domain.cluster import Link
from polygon.domain.runtime import Runtime

UNFUSED_PASSES = 1.35
"""Memory passes of eager element-wise kernels over those of fused ones (fitted, MosaicML)."""
NORM_PASSES = (2, 3)
"""Passes over its input that a norm makes in one kernel, forward (read, write) and backward (read both, write): of what
a block has beyond two norms, and of norms inside attention."""
GATE_PASSES = (3, 5)
"""The same for a gate over what attention gives: reads two and writes one, then reads three and writes two."""
CAST_BYTES = {"fused": (4, 4, 0), "apart": (14, 19, 19)}
"""Bytes moved per element that is cast to 8 bits: of what products take, of the gradients of what they gave, and of
what they took when it is cast once more in backward; the last two with their transpose. `apart`: element-wise kernels
on an H200 would move 14 in the time of a cast by torch's compiler, and 5 in that of a transposed copy
(instances/measured/gpu_check_h200.json)."""
EXPERT_BIAS_BYTES = (24, 40)
"""Bytes moved per number that the experts give, forward and backward, where they have biases: grouped products add
none, and a bias times the router's weight in fp32 is added expert by expert by kernels of their own (product, sum,
joining, cast; casts, both products and their sums; megatron/core/transformer/moe/experts.py of Megatron-LM,
`_apply_bias`)."""
EXPERT_BIAS_KERNELS = (2, 5)
"""How many of these kernels every expert has."""
EXPERT_LIMIT_BYTES = (16, 20)
"""Bytes moved per number of the width of experts with biases and a gate, forward and backward: gpt-oss, the one such
model, limits the gate and what it is multiplied with before the activation, which no compiled function has (two
`clamp` and what joins them; the gradient of either and what joins these; megatron/core/fusions/fused_bias_geglu.py of
Megatron-LM, `weighted_bias_quick_geglu_impl`)."""
FUSED_CAST_PART = 0.5
"""Of a cast's bytes those that are written: what fused products of experts cast, they do not read from memory."""
SCORE_PASSES = {True: (7, 9), False: (7, 16)}
"""Passes over materialised attention scores, forward and backward, with a fused softmax or an eager one: products,
softmax, mask and dropout each read and write them; the eager backward holds mask, dropout and scale apart."""
DROPOUT_SLOWS = (1.25, 1.5)
"""Fused attention with dropout draws a random number per score: 75-85 % of the forward's rate and 60-70 % of the
backward's are left (FlashAttention-4 measurements, Dao-AILab/flash-attention pull request 2597)."""
MASK_SLOWS = (2.5, 1.8)
"""Attention of queries in blocks to the keys of a window, under a mask that the kernel reads (`windows_in_blocks`):
what torch needs, over attention without one (an H100 does 0.20 and 0.23 of its peak, forward and backward, not 0.50
and 0.42; instances/measured/gpu_check_h100.json, `masked_attention`; other cards were not measured)."""
DETERMINISTIC_SLOWS = 1.3
"""Deterministic backward of fused attention: up to 37.9 % of the throughput is lost (DASH, arXiv:2601.21824)."""
NORM_BYTES = {"fused": (0, 0), "copies": (8, 10), "operations": (28, 40)}
"""Bytes that an RMS norm moves per element of 16 bits, forward and backward, over a fused kernel, by `Runtime.norms`. A
copy of 32 is written and read in forward; in backward the kernel reads it and writes a gradient of 32 bits, which is
cast back. Seven fp32 operations where each is a kernel."""
EAGER_ROTARY_BYTES = (16, 16)
"""The same for rotary positions as complex fp32 numbers, over a kernel that turns them in place."""
HOST_PART = {False: 1.0, True: 15 / 24}
"""What the host launches of an eager block's kernels, by whether element-wise ones are fused: Megatron's block is then
15 kernels in forward, else 24."""
MERGED_BYTES = (40, 59)
"""Bytes moved per number of a device's queries for each part of attention that is put together with those before it, as
operations apart. Forward: keys and values laid end to end (8), what the part gave cast to 32 bits and added, weighted
(38; half of the parts are of half of the queries, put back: 19 and 8). Backward: the same 8, the gradients of keys and
values summed (20, or 26 for half of them) and laid end to end (16), that of queries summed (10, or 13)
(torch/distributed/tensor/experimental/_attention.py, torch 2.6 and later)."""
ROUTING_HOST_PART = {"none": 12 / 24, "routing": 6 / 24, "step": 0.0}
"""The same for router, dispatch and combination of experts, taken for half as many kernels as an eager block, half of
them the router's and what prepares the dispatch."""
LOOPED_EXPERT_HOST_PART = {True: (5 / 24, 16 / 70), False: (3 / 24, 15 / 70)}
"""What the host launches in forward and backward for one expert of those that run one after another, over an eager
block, by whether the expert has a gate. Forward: products, activation and gate. Backward: two products for each and
what goes with it (the gradient cast to 32 bits and added, sums of biases), of the 70 kernels of the engine's block of
GPT (counted on an H100, instances/measured/gpu_check_h100.json, where `host` has what they took)."""
LOOPED_ROUTING_HOST_PART = (1.2, 0.34)
"""The same for routing as the engine does it, be its experts looped or grouped: 0.8 to 1.6 and 0.4 to 0.6 ms (`host` of
both files of an H100, what is left at no experts of the difference to a block without)."""
GROUPED_EXPERT_HOST_PART = 3 / 70
"""The same in backward for each expert of those that the engine runs as one product: the gradients of three weights,
added to those there are."""
CHECKPOINT_HOST_PART = 0.32
"""What a checkpoint costs the host beyond a second forward, over what it needs for both passes: random states kept and
put back, a graph within a graph (0.31 to 0.34 by `python -m benchmarks.host_launches`)."""
HOST_ERROR = 0.5
"""Half of a 90 % interval over what the host needs: another processor, Python or library."""
EXPERT_CASTS = (2, 1)
"""Kernels per product of an expert that cast its operands to 8 bits, forward and backward."""
TOKEN_VECTOR = 8
"""The gradient of a weight sums over tokens, which lie apart in memory: any number of them is read as well as the next
multiple of this (in 8 bits programs pad them, Megatron-LM's moe_router_padding_for_fp8)."""
HIDING = 0.8
"""Part of a communication that overlap hides where the overlapped compute is long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
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
    runtime: Runtime
    gradient_bytes: int = 4
    hosted: bool = True
    """Whether a host has to launch the kernels of an accelerator; a CPU calls its own."""
    whole_experts: bool = False
    """Whether the devices of the tensor-parallel group have experts of their own, not slices of each."""
    communication: float = 1.0
    """Measured over predicted seconds of all that is sent (`polygon.cost.calibration`)."""

    @property
    def tokens(self) -> float:
        """Tokens on one device."""
        return self.micro_batch_size * self.seq_len / self.cp


def linear_s(chip: Silicon, rows: float, columns: float, inner: float) -> tuple[float, float]:
    """Forward, and backward with respect to input and weight, of a linear layer."""
    forward = gemm_s(chip, rows, columns, inner)
    summed = math.ceil(rows / TOKEN_VECTOR) * TOKEN_VECTOR
    return forward, gemm_s(chip, rows, inner, columns) + gemm_s(chip, inner, columns, summed)


Seconds = tuple[float, float, float, float]
"""Of a layer: forward, backward, the communication exposed in both, and what a slower host would add to both."""


def block_s(block: Block, cast_parameters: float, chip: Silicon, split: LayerSplit) -> Seconds:
    """Of one block.

    Parameters
    ----------
    cast_parameters : float
        Weights on this device that products in 8 bits cast, where the runtime does not keep the casts.
    """
    runtime = split.runtime
    products_f, products_b, routed_f = _products_s(block, chip, split)
    attention_f, attention_b = _attention_s(block, chip, split)
    moved_f, moved_b = _moved_s(block, chip, split)
    forward, backward = products_f + (attention_f + moved_f), products_b + (attention_b + moved_b)
    if chip.operand_bytes == 1:
        cast_f, cast_b = _casts_s(block, 0 if runtime.cached_casts else cast_parameters, chip, split)
        forward, backward = forward + cast_f, backward + cast_b

    # An accelerator waits where the host launches more slowly than it computes; beyond that the host costs nothing.
    host_f, host_b, loop_f, loop_b, asked_f, asked_b = _host_s(block, chip, split)

    def idle_s(slower: float) -> tuple[float, float]:
        """What the accelerator waits for a host that needs so many times as long, forward and backward."""
        # In forward the host knows how many rows an expert gets when the device has come as far: it launches experts
        # behind nothing, and the rest of the block behind what of the experts is still to be done.
        ahead_s = max(0.0, routed_f - slower * loop_f)
        waits_f = max(0.0, slower * loop_f - routed_f) + max(0.0, slower * host_f - ahead_s - (forward - routed_f))
        return waits_f, max(0.0, slower * (host_b + loop_b) - backward)

    idle_f, idle_b = idle_s(1.0)  # what is sent is hidden by it as well
    slower_f, slower_b = idle_s(1 + HOST_ERROR)
    longer_f, longer_b = slower_f - idle_f, slower_b - idle_b
    slack_f = max(0.0, forward - host_f - loop_f)
    forward, backward = forward + idle_f + asked_f, backward + idle_b + asked_b
    if block.experts:
        apart_f, apart_b = _expert_launches_s(block, chip, split)
        forward, backward = forward + apart_f, backward + apart_b
    sent_f, exposed_f, exposed_b = _sums_s(block, chip, split, products_f, products_b, idle_f, idle_b)
    if split.runtime.context == "heads" and block.linear is None:
        ring_f = ring_b = _exchanged_heads_s(block, chip, split)
    elif split.runtime.context == "gathered" and block.linear is None:
        merged_f, merged_b = _merged_s(block, chip, split)
        forward, backward = forward + merged_f, backward + merged_b
        ring_f, ring_b = _gathered_keys_s(block, chip, split, attention_f + idle_f, attention_b + idle_b)
    else:
        ring_f, ring_b = _ring_attention_s(block, chip, split, attention_f + idle_f, attention_b + idle_b)
    expert_f = expert_b = 0.0
    if block.experts:
        expert_f, expert_b, slower_f, slower_b = _experts_s(block, chip, split, forward, backward)
        forward, backward = forward + slower_f, backward + slower_b
    # What is computed once more in backward sends once more, and nobody hides that; the host has more to do for it.
    checkpoint_s = CHECKPOINT_HOST_PART * (host_f + loop_f + host_b + loop_b)
    again_f = forward + max(0.0, checkpoint_s - slack_f)
    longer_again = max(0.0, (1 + HOST_ERROR) * (host_f + loop_f + checkpoint_s) - again_f)
    recomputed = again_f + sent_f + ring_f + expert_f
    forward += exposed_f + ring_f + expert_f
    backward += exposed_b + ring_b + expert_b
    communication = exposed_f + exposed_b + ring_f + ring_b + expert_f + expert_b
    if split.recompute == "full":
        communication += sent_f + ring_f + expert_f
        return forward, backward + recomputed, communication, longer_f + longer_again + longer_b
    if split.recompute == "selective":
        backward += _repeated_s(block, chip, split, products_f, attention_f, moved_f)
    return forward, backward, communication, longer_f + longer_b


class HostSeconds(NamedTuple):
    """What a host needs to launch a block, by what hides it."""

    forward: float
    """Beside the device's work."""
    backward: float
    looped_forward: float
    """Experts one after another: in forward beside their work alone."""
    looped_backward: float
    asked_forward: float
    """Hidden behind nothing: the host knows only then how many rows experts get ("host-boundedness",
    arXiv:2603.07685)."""
    asked_backward: float


def _host_s(block: Block, chip: Silicon, split: LayerSplit) -> HostSeconds:
    """Seconds of a host; none where CUDA graphs launch the whole step.

    Of experts that are grouped by their program router, dispatch and combination are taken for as many kernels as the
    rest of the block; `gemm_s` has the products' own.
    """
    runtime = split.runtime
    hosted = 1.0 if split.hosted and runtime.graphs != "step" else 0.0
    usual_f, eager_b = hosted * chip.efficiency.host_forward_s, hosted * chip.efficiency.host_backward_s
    eager_f = usual_f * runtime.host_forward_factor
    host_f, host_b = HOST_PART[runtime.fused] * eager_f, HOST_PART[runtime.fused] * eager_b
    if not block.experts:
        return HostSeconds(host_f, host_b, 0.0, 0.0, 0.0, 0.0)
    if not runtime.looped_experts:
        part = ROUTING_HOST_PART[runtime.graphs]
        return HostSeconds(host_f, host_b, 0.0, 0.0, part * eager_f, part * eager_b)
    here = block.experts // split.experts.members
    routing_f = LOOPED_ROUTING_HOST_PART[0] * usual_f
    host_b += LOOPED_ROUTING_HOST_PART[1] * eager_b
    whole = split.tp == 1 or split.whole_experts
    if runtime.grouped_experts and chip.grouped and whole and not block.linear_bias:
        host_b += here * GROUPED_EXPERT_HOST_PART * eager_b
        if split.experts.members > 1:
            return HostSeconds(host_f, host_b, 0.0, 0.0, routing_f, 0.0)
        return HostSeconds(host_f + routing_f, host_b, 0.0, 0.0, 0.0, 0.0)
    each_f, each_b = LOOPED_EXPERT_HOST_PART[block.gated_mlp]
    return HostSeconds(host_f + routing_f, host_b, here * each_f * usual_f, here * each_b * eager_b, 0.0, 0.0)


def _expert_launches_s(block: Block, chip: Silicon, split: LayerSplit) -> tuple[float, float]:
    """Forward and backward seconds of launching kernels that every expert on a device has beside its products."""
    casts = 2 if chip.operand_bytes == 1 else 0  # of what either product takes
    biases = 1 if block.linear_bias and not split.runtime.fused_experts else 0
    one_s = block.experts // split.experts.members * chip.efficiency.launch_s
    forward, backward = (
        casts * cast + biases * bias for cast, bias in zip(EXPERT_CASTS, EXPERT_BIAS_KERNELS, strict=True)
    )
    return forward * one_s, backward * one_s


def _repeated_s(
    block: Block, chip: Silicon, split: LayerSplit, products_f: float, attention_f: float, moved_f: float
) -> float:
    """What selective recomputation computes once more, of the forward's seconds."""
    kind = split.runtime.selective
    if kind == "attention":
        return attention_f
    if kind == "operators":  # every second product is kept: the other half, and what lies between, is made again
        return 0.5 * products_f + moved_f
    outer = block.hidden_size / split.tp if split.sequence_parallel else block.hidden_size
    more_bytes = NORM_BYTES[split.runtime.norm_way][0] if block.rms_norm else 0
    norms_bytes = (chip.element_bytes * NORM_PASSES[0] + more_bytes) * block.norms * outer
    activation_bytes = _activation_bytes(block, chip, split)[0] if block.experts else 0.0
    return stream_s(chip, split.tokens * (norms_bytes + activation_bytes), block.norms + 1)


def _sums_s(
    block: Block,
    chip: Silicon,
    split: LayerSplit,
    products_f: float,
    products_b: float,
    idle_f: float,
    idle_b: float,
) -> tuple[float, float, float]:
    """Tensor-parallel sums behind attention and MLP (one behind both where they are parallel): the seconds of those of
    the forward, and what compute and an idle host leave to be seen of them, forward and backward."""
    runtime = split.runtime
    sums = (1 if block.parallel else 2) + (1 if block.cross else 0)
    if split.whole_experts and block.experts and not block.shared_experts and not block.parallel:
        sums -= 1  # tokens stay where they are but for the way to their experts
    n_bytes = chip.element_bytes * split.tokens * block.hidden_size
    sent_f = sums * split.communication * all_reduce_s(n_bytes, split.group)
    # Where the tokens' parts were not kept whole, backward gathers them again: one pass more than the two of a sum.
    # Checkpointing by operators keeps what is scattered, and gathers anew.
    kept = runtime.keeps_gathered and not (split.recompute == "selective" and runtime.selective == "operators")
    regathered = split.sequence_parallel and not kept
    sent_b = sent_f * (1.5 if regathered else 1.0)
    pipelined = runtime.tp_overlap == "pipelined"
    hidden_f = HIDING * min(sent_f, products_f + idle_f) if pipelined else 0.0
    # Else the sum of an input's gradient has beside it the product for the gradient of the same matrix: one of two
    # products, of half of the matrices.
    hidden_b = HIDING * min(sent_b, (products_b if pipelined else products_b / 4) + idle_b)
    return sent_f, sent_f - hidden_f, sent_b - (hidden_b if runtime.tp_overlap != "none" else 0.0)


def _products_s(block: Block, chip: Silicon, split: LayerSplit) -> tuple[float, float, float]:
    """Forward and backward of the linear layers, and the experts' part of the forward; experts take their share of the
    tokens of all who exchange them."""
    forward = backward = routed = 0.0
    members = split.experts.members
    for product in block.products():
        rows, count, tp = split.tokens, product.copies, split.tp
        if product.routed:
            # Rows of one expert: those of all members' tokens, each to so many of the experts, taken for even.
            rows = split.tokens * block.experts_per_token * members / block.experts
            count = product.copies // members
            if split.whole_experts:
                rows, tp = rows / split.tp, 1
        columns, inner = float(product.columns), float(product.inner)
        if product.split == "columns":
            columns = product.columns / tp + max(product.pairs / tp, product.least)
        elif product.split == "inner":
            inner = product.inner / tp
        one = linear_s(chip, rows, columns, inner)
        forward, backward = forward + count * one[0], backward + count * one[1]
        routed += count * one[0] if product.routed else 0.0
    return forward, backward, routed


def _moved_s(block: Block, chip: Silicon, split: LayerSplit) -> tuple[float, float]:
    """Forward and backward of element-wise kernels: norms, residuals, activation, positions, gates, routing."""
    h, tp, runtime = block.hidden_size, split.tp, split.runtime
    heads = block.query_size + block.key_size
    passes = 1.0 if runtime.fused else UNFUSED_PASSES
    outer = h / tp if split.sequence_parallel else h
    drop = 1.0 if runtime.dropout else 0.0
    moved_f = (10 + drop + NORM_PASSES[0] * (block.norms - 2)) * outer
    moved_b = (15 + 2 * drop + NORM_PASSES[1] * (block.norms - 2)) * outer
    if block.experts:  # rows are gathered by expert and put back
        routed = 4 * block.experts_per_token * h / (tp if split.whole_experts else 1)
        if (
            runtime.sorts_arrivals
            and runtime.expert_dispatch == "experts"
            and block.experts > split.experts.members > 1
        ):
            routed *= 2  # sorted by expert where they arrive, the results put back, each read and written once
        moved_f, moved_b = moved_f + routed, moved_b + routed
    mixed = block.mixed_size / tp if block.attention_gate else 0.0
    inner_f, inner_b = _inner_norms(block, tp)
    moved_f += inner_f + GATE_PASSES[0] * mixed
    moved_b += inner_b + GATE_PASSES[1] * mixed
    bytes_f, bytes_b = passes * chip.element_bytes * moved_f, passes * chip.element_bytes * moved_b
    if block.rotary:
        turned = 2 * chip.element_bytes * heads / tp
        bytes_f, bytes_b = bytes_f + turned, bytes_b + turned
    if block.experts and block.linear_bias and not runtime.fused_experts:
        given = block.experts_per_token * h
        bytes_f, bytes_b = bytes_f + EXPERT_BIAS_BYTES[0] * given, bytes_b + EXPERT_BIAS_BYTES[1] * given
    activation_f, activation_b = _activation_bytes(block, chip, split)
    bytes_f, bytes_b = bytes_f + passes * activation_f, bytes_b + passes * activation_b
    if block.rms_norm:
        norm_f, norm_b = NORM_BYTES[runtime.norm_way]
        bytes_f, bytes_b = bytes_f + block.norms * norm_f * outer, bytes_b + block.norms * norm_b * outer
        if runtime.position_way == "operations":
            bytes_f += EAGER_ROTARY_BYTES[0] * heads / tp
            bytes_b += EAGER_ROTARY_BYTES[1] * heads / tp
    return stream_s(chip, split.tokens * bytes_f, 8 * passes), stream_s(chip, split.tokens * bytes_b, 12 * passes)


def _activation_bytes(block: Block, chip: Silicon, split: LayerSplit) -> tuple[float, float]:
    """Bytes a token that the activation of the MLP moves, forward and backward."""
    e, up, width = chip.element_bytes, 2 if block.gated_mlp else 1, block.width / split.tp
    routed = block.experts_per_token * block.expert_ffn_size / split.tp if block.experts else 0.0
    forward, backward = e * (1 + up) * width, e * (2 + 2 * up) * width
    if split.runtime.fused_experts:
        # The first product's kernel applies it; the second's backward reads what that product gave.
        return forward - e * (1 + up) * routed, backward - e * (2 + up) * routed
    if block.linear_bias and block.gated_mlp:
        forward, backward = forward + EXPERT_LIMIT_BYTES[0] * routed, backward + EXPERT_LIMIT_BYTES[1] * routed
    return forward, backward


def _inner_norms(block: Block, tp: int) -> tuple[float, float]:
    """Numbers that pass through memory for the norms inside attention, forward and backward, and for linear
    attention's convolution, norm and gate."""
    if block.linear is not None:
        convolved = (block.query_size + block.key_size + block.value_size) / tp
        gated = block.mixed_size / tp
        return (
            2 * NORM_PASSES[0] * convolved + (NORM_PASSES[0] + 1) * gated,
            2 * NORM_PASSES[1] * convolved + (NORM_PASSES[1] + 2) * gated,
        )
    normed = float(block.ranks)
    if block.query_key_norm and block.latent is None:
        normed = (block.query_size + block.key_size) / tp
    return NORM_PASSES[0] * normed, NORM_PASSES[1] * normed


def _casts_s(block: Block, weights: float, chip: Silicon, split: LayerSplit) -> tuple[float, float]:
    """Forward and backward of casts to 8 bits: of what products take, and of the gradients of what they gave."""
    h, tp, up, width = block.hidden_size, split.tp, 2 if block.gated_mlp else 1, block.width / split.tp
    if split.runtime.fused_experts and block.experts:
        width -= (1 - FUSED_CAST_PART) * block.experts_per_token * block.expert_ffn_size / tp
    taken = split.tokens * (2 * h + block.ranks + block.mixed_size / tp + width)
    qkv = block.query_size + block.key_size + block.value_size
    given = split.tokens * (2 * h + block.ranks + qkv / tp + up * width)
    taken_bytes, given_bytes, again_bytes = CAST_BYTES[split.runtime.casts]
    return (
        stream_s(chip, taken_bytes * (taken + weights), 8),
        stream_s(chip, given_bytes * (given + weights) + again_bytes * taken, 8),
    )


def _ring_attention_s(
    block: Block, chip: Silicon, split: LayerSplit, attention_f: float, attention_b: float
) -> tuple[float, float]:
    """Exposed seconds of passing keys and values round a context-parallel ring, forward and backward; linear attention
    passes its states on."""
    if split.cp == 1:
        return 0.0, 0.0
    if block.linear is not None:
        # A state of key x value numbers a head, in fp32, whatever the length of the sequence.
        sent_bytes = 4.0 * block.value_size / split.tp * block.linear.key_dim
    else:
        kv = max(block.kv_heads / split.tp, 1) * (block.head_dim + block.value_dim)
        sent_bytes = split.tokens * kv * chip.element_bytes
    step_s = split.cp_link.latency_s + RING_STEP_S + sent_bytes / (split.cp_link.bytes_per_s * FABRIC_EFFICIENCY)
    sent = split.communication * (split.cp - 1) * step_s
    # A rank attends to its own part first: beside the cp - 1 that come there is so much of attention. Backward passes
    # gradients of keys and values on beside these.
    exposed_f = sent - HIDING * min(sent, attention_f * (split.cp - 1) / split.cp)
    exposed_b = 2 * sent - HIDING * min(2 * sent, attention_b * (split.cp - 1) / split.cp)
    return exposed_f, exposed_b


def _merged_s(block: Block, chip: Silicon, split: LayerSplit) -> tuple[float, float]:
    """Seconds in which the parts of attention are put together, forward and backward."""
    queries = (split.cp - 1) * split.tokens * block.heads / split.tp * block.head_dim
    return stream_s(chip, MERGED_BYTES[0] * queries, 0), stream_s(chip, MERGED_BYTES[1] * queries, 0)


def _gathered_keys_s(
    block: Block, chip: Silicon, split: LayerSplit, attention_f: float, attention_b: float
) -> tuple[float, float]:
    """Exposed seconds of gathering keys and values of all heads, in forward and again in backward, and there of passing
    on their gradients in 32 bits, cp times.

    Beside a gather is the first of cp parts of attention, beside a message the next part; beside the last is none.
    """
    if split.cp == 1:
        return 0.0, 0.0
    values = split.tokens * block.heads / split.tp * (block.head_dim + block.value_dim)
    rate, message_s = split.cp_link.bytes_per_s * FABRIC_EFFICIENCY, split.cp_link.latency_s + RING_STEP_S
    gather_s = split.communication * (split.cp - 1) * (message_s + values * chip.element_bytes / rate)
    passed_s = split.communication * (message_s + 4 * values / rate)

    def hidden_s(sent_s: float, attention_s: float) -> float:
        return HIDING * min(sent_s, attention_s / split.cp)

    exposed_b = gather_s - hidden_s(gather_s, attention_b)
    exposed_b += split.cp * passed_s - (split.cp - 1) * hidden_s(passed_s, attention_b)
    return gather_s - hidden_s(gather_s, attention_f), exposed_b


def _exchanged_heads_s(block: Block, chip: Silicon, split: LayerSplit) -> float:
    """Seconds of exchanging tokens for heads and back, in forward and again in backward; nothing hides them.

    Where heads cannot be shared out keys and values are gathered. Of causal attention all devices do as much: each has
    a piece from the front of a sequence and one from its back.
    """
    cp, link = split.cp, split.cp_link
    if cp == 1:
        return 0.0
    heads, kv = block.heads / split.tp, max(block.kv_heads / split.tp, 1.0)
    wide, message_s = block.head_dim + block.value_dim, RING_STEP_S + link.latency_s

    def sent_s(values: float, messages: int) -> float:
        wire_s = split.tokens * values * chip.element_bytes / (link.bytes_per_s * FABRIC_EFFICIENCY)
        return split.communication * (wire_s + messages * message_s)

    if shares_heads(heads, kv, cp):
        # There queries, keys and values, and back the result; every rank keeps its own cp-th. Keys and values of fewer
        # heads than ranks go to several.
        return sent_s((cp - 1) / cp * (heads + max(kv, cp)) * wide, 2 * (cp - 1))
    return sent_s((cp - 1) * kv * wide, cp - 1)


def _experts_s(
    block: Block, chip: Silicon, split: LayerSplit, forward: float, backward: float
) -> tuple[float, float, float, float]:
    """Exposed seconds of the way to the experts and back, forward and backward, and what compute loses to them.

    Beside another micro-batch's compute (`Runtime.ep_overlap`) only what takes longer than that is exposed, and compute
    is slower by the runtime's `contention` for as long as both run.
    """
    runtime = split.runtime
    narrow = runtime.narrow_dispatch and chip.operand_bytes == 1
    there = _expert_exchange_s(block, chip, split, 1.0 if narrow else chip.element_bytes)
    sent = there + _expert_exchange_s(block, chip, split, chip.element_bytes)
    if not runtime.ep_overlap:
        return sent, sent, 0.0, 0.0
    hidden_f, hidden_b = min(sent, forward), min(sent, backward)
    return sent - hidden_f, sent - hidden_b, runtime.contention * hidden_f, runtime.contention * hidden_b


def _expert_exchange_s(block: Block, chip: Silicon, split: LayerSplit, element_bytes: float) -> float:
    """Seconds of one all-to-all of tokens to their experts (or back), in so many bytes a number.

    Members of the same node are reached over its fabric, the others over the device's part of the cards, both at once.
    Of n nodes, at most m of which a token's k experts are on (`Block.groups_per_token`), m (1 - (1 - 1 / m)^k) have
    some of them: as often a token crosses where the runtime sends to nodes, and once less where one is its own.
    """
    group = split.experts
    if group.members == 1:
        return 0.0
    token = split.tokens * block.hidden_size * element_bytes
    if split.sequence_parallel:
        token /= split.tp
    share = block.experts_per_token * token / group.members
    card = group.inter_node.bytes_per_s / group.devices_per_node
    nodes, steps = group.members / group.per_node, group.members - 1.0
    near, far = (group.per_node - 1) * share, (group.members - group.per_node) * share
    if split.runtime.expert_dispatch == "nodes":
        steps = (nodes > 1) + (group.per_node > 1)
    if split.runtime.expert_dispatch == "nodes" and nodes > 1:
        reached = min(nodes, max(1.0, nodes * block.groups_per_token / block.expert_groups))
        far = token * reached * (1 - (1 - 1 / reached) ** block.experts_per_token) * (nodes - 1) / nodes
        near = token * block.experts_per_token * (group.per_node - 1) / group.per_node  # passed on where it arrives
    wire_s = max(near / group.intra_node.bytes_per_s, far / card) / FABRIC_EFFICIENCY
    latency_s = group.inter_node.latency_s if nodes > 1 else group.intra_node.latency_s
    return split.communication * (wire_s + steps * (RING_STEP_S + latency_s))


def _attention_s(block: Block, chip: Silicon, split: LayerSplit) -> tuple[float, float]:
    """Forward and backward of what mixes tokens, over an encoder's output too where the block attends to it."""
    if block.linear is not None:
        state = block.linear
        forward, backward = delta_rule_s(
            chip,
            tokens=split.tokens,
            heads=state.value_heads / split.tp,
            key_dim=state.key_dim,
            value_dim=state.value_dim,
        )
        return forward + chip.efficiency.launch_s, backward + 2 * chip.efficiency.launch_s
    keys = (block.keys_compared if split.runtime.windows_in_blocks else block.keys_seen)(split.seq_len)
    forward, backward = _scores_s(block, chip, split, keys)
    if block.cross:
        over = _scores_s(block, chip, split, float(split.seq_len))
        forward, backward = forward + over[0], backward + over[1]
    return forward, backward


def _scores_s(block: Block, chip: Silicon, split: LayerSplit, keys: float) -> tuple[float, float]:
    """Forward and backward of softmax(QK')V: one fused kernel, or products and passes over the written scores, which
    mask what a window leaves out and save nothing by it."""
    tokens, heads, launch_s = split.tokens, block.heads / split.tp, chip.efficiency.launch_s
    kernel = split.runtime.attention
    if kernel == "flash" and split.runtime.deterministic and split.runtime.attention_dropout:
        kernel = "flash" if chip.efficiency.flash_repeats_dropout else "flash2"
    if kernel != "materialised":
        forward_s, backward_s = attention_s(
            chip,
            kernel,
            tokens=tokens,
            seq_len=min(split.seq_len, block.window) if block.window else split.seq_len,
            keys=keys,
            heads=heads,
            head_dim=block.head_dim,
            value_dim=block.value_dim,
        )
        if split.runtime.attention_dropout:
            forward_s, backward_s = forward_s * DROPOUT_SLOWS[0], backward_s * DROPOUT_SLOWS[1]
        if block.window and block.window < split.seq_len and split.runtime.windows_in_blocks:
            forward_s, backward_s = forward_s * MASK_SLOWS[0], backward_s * MASK_SLOWS[1]
        if split.runtime.deterministic:
            backward_s *= DETERMINISTIC_SLOWS
        return forward_s + launch_s, backward_s + 2 * launch_s
    flops = 2.0 * tokens * split.seq_len * heads * (block.head_dim + block.value_dim)
    score_bytes = tokens * split.seq_len * heads * chip.element_bytes
    unaligned = block.head_dim % 8 or block.value_dim % 8
    product_s = flops / (chip.peak_flops_16 * chip.gemm * (chip.unaligned if unaligned else 1.0))
    passes_f, passes_b = SCORE_PASSES[split.runtime.fused]
    forward = product_s + stream_s(chip, passes_f * score_bytes, 4)
    return forward, 2 * product_s + stream_s(chip, passes_b * score_bytes, 6)
