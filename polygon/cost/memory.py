"""Bytes that a device must hold: weights, gradients, optimizer, activations in flight, working set, context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import RECOMPUTE

CONTEXT_BYTES = 1.5e9
"""CUDA context and communication buffers (1.3-1.6 GB beyond the allocator's, BigScience)."""
OUTER_BYTES = 8.0
"""Per parameter of an outer optimizer: weights at the last meeting and momentum, in fp32."""
UNFUSED_FACTOR = 1.9
"""Frameworks without fused element-wise kernels hold 64 rather than 34 bytes per token and unit (Galvatron)."""

ROUTED_COPIES = 2
"""Of a token, for each expert that it goes to, kept for backward: the expert's input in its order, and the result that
is weighted (so the experts of `runners`, and Megatron-LM's token dispatcher)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """What each layer puts on one device of a worker."""

    parameters: np.ndarray
    """Shape (layers,): parameters per device."""
    activation_bytes: np.ndarray
    """Shape (layers,): kept from forward to backward, per micro-batch in flight."""
    transient_bytes: np.ndarray
    """Shape (layers,): needed only while the layer is being computed (logits, the block that is recomputed)."""
    tied_parameters: float
    """The head's own copy of tied embeddings, per device; 0 if they are not tied."""
    sharded_parameters: np.ndarray | None = None
    """Shape (layers,): what ZeRO divides by the workers: `parameters`, with each expert counted once per
    expert-parallel rank, because only so many fewer workers share its state. None: `parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Peak bytes on one device, by owner."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    context: float

    @property
    def total_bytes(self) -> float:
        """Everything together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient + self.context

    @property
    def owner(self) -> str:
        """Name of the largest part."""
        return max(("weights", "gradients", "optimizer", "activations", "transient"), key=lambda p: getattr(self, p))


@lru_cache(maxsize=4096)
def _layer_memory(
    model: Model,
    seq_len: int,
    element_bytes: int,
    tp: int,
    micro_batch_size: int,
    recompute: str,
    sequence_parallel: bool,
    flash_attention: bool,
    fused: bool,
    dropout: bool,
    cp: int,
    ep: int,
    keep_operators: bool,
    keep_gathered: bool,
    logit_bytes: int,
) -> LayerMemory:
    layers = model.layers
    parameters, activations, transient, elsewhere = (np.zeros(layers) for _ in range(4))
    tokens = micro_batch_size * seq_len / cp
    h, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    e = max(element_bytes, 2)  # training in 8 bits keeps 16-bit activations, or 8-bit ones and their transposes
    shard = tp if sequence_parallel else 1
    gathered = tokens * h * e if keep_gathered and shard > 1 else 0.0
    norm = h if model.rms_norm else 2 * h
    for layer in range(layers):
        kind = model.layer_kind(layer)
        count = model.layer_parameters(layer)
        if kind == "embedding":
            parameters[layer] = count if model.family == "vit" else count / tp
            activations[layer] = tokens * h * (1 if dropout else 0) / shard + tokens * 8
        elif kind == "head":
            parameters[layer] = count if model.family == "vit" else (count - norm) / tp + norm
            rows = micro_batch_size if model.family == "vit" else tokens
            activations[layer] = 2 * e * tokens * h / shard
            transient[layer] = rows * model.vocab_size / tp * (e + logit_bytes) + 2 * gathered
        else:
            experts = 0
            if kind == "moe":
                per_expert = h * model.expert_ffn_size * (3 if model.gated_mlp else 2)
                experts = per_expert * model.experts
            parameters[layer] = (count - 2 * norm - experts) / tp + 2 * norm + experts / ep / tp
            elsewhere[layer] = experts / tp - experts / ep / tp
            width = model.ffn_size
            if kind == "moe":
                width = model.expert_ffn_size * (model.experts_per_token + model.shared_experts)
            per_width = 3 if model.gated_mlp else 2
            outside = (4 * e + (2 if dropout else 0)) * h / shard
            inside = e * (q + 2 * kv + q + per_width * width) / tp
            whole = tokens * (outside + inside)
            if not fused:
                whole *= UNFUSED_FACTOR
            if kind == "moe":
                # Rows sorted by expert as they arrive there, and the results before they are weighted.
                whole += tokens * ROUTED_COPIES * model.experts_per_token * e * h / shard
            if recompute == "selective" and keep_operators:
                # Every second product's output (queries, values, the MLP's first, and its last if it is gated), the
                # attention's, and the input of the block.
                kept = (2 * q + kv + width + (h if model.gated_mlp else 0)) / tp
                whole = tokens * e * (h / shard + kept)
            whole += 2 * gathered
            scores = tokens * seq_len * model.heads / tp * (2 * e + 1)
            if not flash_attention and recompute == "none":
                whole += scores
            if recompute == "full":
                activations[layer] = tokens * h * e / shard
                transient[layer] = whole + (0 if flash_attention else scores)
            else:
                activations[layer] = whole
                transient[layer] = scores if not flash_attention and recompute == "selective" else 0.0
    sharded = parameters + elsewhere
    for array in (parameters, activations, transient, sharded):
        array.setflags(write=False)
    tied = model.head_weight_parameters() / tp if model.tied_embeddings and model.family != "vit" else 0.0
    return LayerMemory(
        parameters=parameters,
        activation_bytes=activations,
        transient_bytes=transient,
        tied_parameters=tied,
        sharded_parameters=sharded,
    )


def layer_memory(
    model: Model,
    batch: Batch,
    *,
    tp: int = 1,
    micro_batch_size: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    flash_attention: bool = True,
    fused: bool = True,
    dropout: bool = False,
    cp: int = 1,
    ep: int = 1,
    keep_operators: bool = False,
    keep_gathered: bool = False,
    logit_bytes: int = 4,
) -> LayerMemory:
    """What each layer puts on one device of a worker of `tp` devices, for one micro-batch in flight.

    Per block and token, with element size e: 4 e h outside of the tensor-parallel part (inputs of norms and of
    attention and MLP), e (2 q + 2 kv + 2 f) inside it, and 2 e h for each routed expert that the token goes to; full
    recomputation keeps the block's input alone. While the loss is computed, `logit_bytes` are held per logit beside it.
    Sequence parallelism with `keep_gathered` holds the inputs of attention, MLP and head (with its gradient) whole.

    References
    ----------
    Korthikanti et al., MLSys 2023 (arXiv:2205.05198), with grouped heads and fused attention.
    """
    require(recompute in RECOMPUTE, "recompute", recompute, " or ".join(RECOMPUTE))
    return _layer_memory(
        model,
        batch.seq_len,
        batch.element_bytes,
        tp,
        micro_batch_size,
        recompute,
        sequence_parallel,
        flash_attention,
        fused,
        dropout,
        cp,
        ep,
        keep_operators,
        keep_gathered,
        logit_bytes,
    )


def stage_memory(
    layers: LayerMemory,
    first_layer: int,
    last_layer: int,
    *,
    in_flight: float,
    zero: int,
    shards: int,
    batch: Batch,
    context_bytes: float = CONTEXT_BYTES,
    gradient_copies: float = 0.0,
    outer: bool = False,
) -> MemoryBreakdown:
    """Peak bytes on one device of a stage that holds layers [first_layer, last_layer).

    Parameters
    ----------
    in_flight : float
        Most micro-batches whose activations the worker holds at one time.
    zero, shards : int
        ZeRO 0: nothing sharded; 1: optimizer state; 2: gradients too; 3: weights too; over `shards` workers.
    gradient_copies : float
        Further copies of the gradients that the framework keeps (reduction buckets).
    outer : bool
        Whether regions take local steps: weights at the last meeting and the outer momentum are held too.
    """
    rows = stage_rows(layers, first_layer, last_layer)
    return breakdown(
        *rows,
        in_flight=in_flight,
        zero=zero,
        shards=shards,
        batch=batch,
        context_bytes=context_bytes,
        gradient_copies=gradient_copies,
        outer=outer,
    )


def stage_rows(layers: LayerMemory, first_layer: int, last_layer: int) -> tuple[float, float, float, float, float]:
    """Of a stage: parameters, most parameters of a layer, bytes of activations per micro-batch, transient bytes, and
    what ZeRO divides by the workers."""
    divided = layers.parameters if layers.sharded_parameters is None else layers.sharded_parameters
    tied = layers.tied_parameters if first_layer > 0 and last_layer == len(layers.parameters) else 0.0
    return (
        float(layers.parameters[first_layer:last_layer].sum()) + tied,
        float(layers.parameters[first_layer:last_layer].max(initial=0.0)),
        float(layers.activation_bytes[first_layer:last_layer].sum()),
        float(layers.transient_bytes[first_layer:last_layer].max(initial=0.0)),
        float(divided[first_layer:last_layer].sum()) + tied,
    )


def state_bytes(batch: Batch) -> tuple[float, float, float]:
    """Bytes per parameter of weight, gradient and optimizer state (with the fp32 master of 16-bit weights)."""
    per_optimizer = {"adamw": 8, "sgd": 4}[batch.optimizer] + (4 if batch.element_bytes < 4 else 0)
    return max(batch.element_bytes, 2), batch.gradient_bytes, per_optimizer


def breakdown(
    held: float,
    largest: float,
    activation_bytes: float,
    transient_bytes: float,
    sharded: float,
    *,
    in_flight: float,
    zero: int,
    shards: int,
    batch: Batch,
    context_bytes: float = CONTEXT_BYTES,
    gradient_copies: float = 0.0,
    outer: bool = False,
) -> MemoryBreakdown:
    """Peak bytes from what `stage_rows` says of a stage."""
    per_weight, per_gradient, per_optimizer = state_bytes(batch)
    if zero >= 3 and shards > 1:
        transient_bytes += largest * (2 * per_weight + per_gradient)
    return MemoryBreakdown(
        weights=(sharded / shards if zero >= 3 else held) * per_weight,
        gradients=(sharded / shards if zero >= 2 else held) * per_gradient * (1 + gradient_copies),
        optimizer=(sharded / shards if zero >= 1 else held) * per_optimizer + (held * OUTER_BYTES if outer else 0.0),
        activations=activation_bytes * in_flight,
        transient=transient_bytes,
        context=context_bytes,
    )
