"""Bytes that a device must hold: weights, gradients, optimizer, activations in flight, working set, context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from polygon.domain.block import Block, shares_heads
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.optimizer import OPTIMIZERS
from polygon.domain.plan import RECOMPUTE
from polygon.domain.runtime import Runtime
from polygon.jit.compilation import kernel

FUSED = Runtime()
"""A program whose kernels are the vendor's best."""
CONTEXT_BYTES = FUSED.context_bytes
LOGIT_BYTES = {"torch": 12, "vocab-parallel": 4, "fused": 4}
"""Bytes held per logit beside the logit itself. torch: log-softmax, its gradient and the gradient of what it took, in
fp32; Megatron works in place on one fp32 copy; one fused kernel writes the gradient and a partial result."""

OUTER_BYTES = 8.0
"""Per parameter of an outer optimizer: weights at the last meeting and momentum, in fp32."""
NORM_KEEPS_BYTES = {"copies": 4, "operations": 8}
"""Per number of its input that an RMS norm keeps for backward: a copy in 32 bits, and what is made of it in 32 bits."""
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

    def spread_over(self, ep: int) -> np.ndarray:
        """Shape (layers,): of `parameters` the experts, which the other `ep` - 1 devices of an expert-parallel group
        have others of; none where there is no such group."""
        if ep == 1 or self.sharded_parameters is None:
            return np.zeros_like(self.parameters)
        others: np.ndarray = self.sharded_parameters - self.parameters
        return others / (ep - 1)


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


class _Way(NamedTuple):
    """How a micro-batch is spread and what the runtime keeps: all that memory depends on beside the model."""

    seq_len: int
    element_bytes: int
    """Of an activation."""
    input_bytes: int
    """Of an input of a block's product, as it is kept for backward: in 8-bit training of some programs (`keeps_8_bit`)
    as it was multiplied; the others keep 16-bit ones, or 8-bit ones and their transposes."""
    tp: int
    micro_batch_size: int
    recompute: str
    sequence_parallel: bool
    flash_attention: bool
    fused: bool
    norms: str
    dropout: bool
    cp: int
    ep: int
    selective: str
    keep_gathered: bool
    gather_keys: bool
    """Whether a device's heads that cannot be shared out have the keys and values of all tokens."""
    logit_bytes: float

    @property
    def tokens(self) -> float:
        """Tokens on one device."""
        return self.micro_batch_size * self.seq_len / self.cp

    @property
    def shard(self) -> int:
        """Devices that share what lies outside of the tensor-parallel part."""
        return self.tp if self.sequence_parallel else 1

    def gathered(self, hidden_size: int) -> float:
        """Bytes of a whole input that is kept although the devices share it."""
        return self.tokens * hidden_size * self.element_bytes if self.keep_gathered and self.shard > 1 else 0.0


class _Held(NamedTuple):
    """What one layer puts on one device."""

    parameters: float
    elsewhere: float
    """Parameters on the other devices of an expert-parallel group, in this one's place."""
    activations: float
    transient: float


@lru_cache(maxsize=4096)
def _layer_memory(model: Model, way: _Way) -> LayerMemory:
    kinds = model.layer_kinds()
    # Layers of one kind hold the same: a model of a hundred blocks has three or four kinds.
    by_kind = {kind: _held(kinds.index(kind), model, way) for kind in set(kinds)}
    parameters, elsewhere, activations, transient = np.array([by_kind[kind] for kind in kinds]).T.copy()
    sharded = parameters + elsewhere
    for array in (parameters, activations, transient, sharded):
        array.setflags(write=False)
    # The last stage has a copy of its own of the first one's matrix; a ViT's classes are not its patches.
    tied = model.head_weight_parameters() / way.tp if model.tied_embeddings and model.family != "vit" else 0.0
    return LayerMemory(
        parameters=parameters,
        activation_bytes=activations,
        transient_bytes=transient,
        tied_parameters=tied,
        sharded_parameters=sharded,
    )


def _held(layer: int, model: Model, way: _Way) -> _Held:
    kind = model.layer_kind(layer)
    if kind == "embedding":
        return _embedding_held(model, way)
    return _head_held(model, way) if kind == "head" else _block_held(model.block(layer), way)


def _embedding_held(model: Model, way: _Way) -> _Held:
    """The embedding, and a tower before it: all of its layers, without the logits of the head that it has not."""
    count, tower = model.layer_parameters(0), model.tower
    # Rows of the vocabulary are dealt out; patches, a few MB, are whole everywhere.
    parameters = count if model.family == "vit" else count / way.tp
    # Dropout keeps a byte a value; 8 bytes a token are its number, by which backward finds its row.
    drop = 1 if way.dropout else 0
    activations = way.tokens * model.hidden_size * drop / way.shard + way.tokens * 8
    if tower is None:
        return _Held(parameters, 0.0, activations, 0.0)
    inside = way._replace(seq_len=tower.tokens_per_input)
    parts = [_held(layer, tower, inside) for layer in range(tower.layers - 1)]
    return _Held(
        parameters, 0.0, activations + sum(part.activations for part in parts), max(part.transient for part in parts)
    )


def _head_held(model: Model, way: _Way) -> _Held:
    """The head with the logits; for each further token that is predicted a block, both its inputs, and logits."""
    h, e, tokens, once = model.hidden_size, way.element_bytes, way.tokens, model.answers_once
    norm, ahead = model.norm_size, model.predicted_ahead
    count = model.layer_parameters(model.layers - 1) - model.prediction_parameters()
    # A class is told of one token of an image or text; logits are there while the loss is computed, and then no more.
    rows = way.micro_batch_size if once else tokens
    transient = rows * model.answers / way.tp * (e + way.logit_bytes) + 2 * way.gathered(h)
    own = _Held(
        count if once else (count - norm) / way.tp + norm,
        0.0,
        # Inputs of the norm and of the product; BERT's transform adds its own product and norm.
        2 * e * tokens * h / way.shard + (2 * e * tokens * h / way.shard if model.head_transform else 0.0),
        transient,
    )
    if not ahead:
        return own
    block = _block_held(model.block(model.blocks), way)
    # Norms of both inputs and of the output, and a matrix that takes them side by side (DeepSeek-V3, section 2.2).
    joining = 3 * norm + 2 * h * h / way.tp
    return _Held(
        own.parameters + ahead * (block.parameters + joining),
        ahead * block.elsewhere,
        own.activations + ahead * (block.activations + own.activations + 4 * e * tokens * h / way.shard),
        (1 + ahead) * transient + block.transient,
    )


def _block_held(block: Block, way: _Way) -> _Held:
    h, e, k, tp = block.hidden_size, way.element_bytes, way.input_bytes, way.tp
    tokens, shard = way.tokens, way.shard
    norms, experts = block.replicated_parameters, block.expert_parameters
    # Matrices are cut by tp, experts also dealt out over ep; norms, and latent attention's ways down, are whole.
    parameters = (block.parameters - norms - experts) / tp + norms + experts / way.ep / tp
    elsewhere = experts / tp - experts / way.ep / tp
    # Inputs of norms, and of attention (twice with an encoder's output) and MLP, which may be one.
    inputs = block.norms + (1 if block.parallel and block.norms == 1 else 3 if block.cross else 2)
    # Dropout behind attention and behind the MLP: a byte a value each.
    # With norms computed once more what they give, and what the experts' activation gives, is not kept.
    again = way.recompute == "selective" and way.selective == "norms"
    given = 0 if again else inputs - block.norms
    held = inputs - block.norms if again else block.norms
    outside = (held * e + given * k + (2 if way.dropout else 0)) * h / shard
    # The MLP before and after its activation; with a gate the gate as well.
    before, after = (2 if block.gated_mlp else 1), (0 if again and block.experts else 1)
    inside = (e * block.mixing_size + (before * e + after * k) * block.width) / tp + e * block.latent_size
    # What attention gives is kept as it was for its own backward, beside what was multiplied.
    inside += (k if k < e else 0) * block.mixed_size / tp
    # Keys and values of the other parts of the sequence, where heads are too few to be exchanged instead.
    if (
        way.gather_keys
        and block.linear is None
        and not shares_heads(block.heads / tp, max(block.kv_heads / tp, 1.0), way.cp)
    ):
        inside += e * (way.cp - 1) * max(block.kv_heads / tp, 1.0) * (block.head_dim + block.value_dim)
    whole = tokens * (outside + inside)
    # Operations apart keep more: an RMS norm its input and what it makes of it in 32 bits (one kernel over a copy in 32
    # bits that copy alone), a gate's MLP what the activation gives.
    if block.rms_norm and not again and way.norms != "fused":
        whole += tokens * block.norms * (NORM_KEEPS_BYTES[way.norms] - e) * h / shard
    if not way.fused:
        whole += tokens * (e * block.width / tp if block.gated_mlp else 0.0)
    if block.experts:
        # Rows sorted by expert as they arrive there, and the results before they are weighted.
        whole += tokens * (k + (ROUTED_COPIES - 1) * e) * block.experts_per_token * h / shard
    if way.recompute == "selective" and way.selective == "operators":
        # Every second product's output (queries, values, the MLP's first, and its last if it is gated), the
        # attention's, and the input of the block.
        kept = block.query_size + block.mixed_size + block.value_size + block.width + (h if block.gated_mlp else 0)
        whole = tokens * e * (h / shard + kept / tp)
    whole += 2 * way.gathered(h)
    heads = 0 if block.linear is not None else block.heads * (2 if block.cross else 1)
    # Per score the softmax, and with dropout what is left of it and a byte of mask: the 5 a s^2 of Korthikanti et al.
    # in 16 bits. Fused attention keeps a number a row, which is left out.
    per_score = 2 * e + 1 if way.dropout else e
    scores = 0.0 if way.flash_attention else tokens * way.seq_len * heads / tp * per_score
    # What is recomputed is held for one block at a time: it moves from what every micro-batch keeps to the transient.
    if way.recompute == "full":
        return _Held(parameters, elsewhere, tokens * h * e / shard, whole + scores)
    if way.recompute == "selective" and not again:
        return _Held(parameters, elsewhere, whole, scores)
    return _Held(parameters, elsewhere, whole + scores, 0.0)


def layer_memory(
    model: Model,
    batch: Batch,
    *,
    tp: int = 1,
    micro_batch_size: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    cp: int = 1,
    ep: int = 1,
    runtime: Runtime = FUSED,
) -> LayerMemory:
    """What each layer puts on one device of a worker of `tp` devices, for one micro-batch in flight.

    Per block and token, with element size e: 4 e h outside of the tensor-parallel part (inputs of norms and of
    attention and MLP; e h more for each further norm), e (2 q + 2 kv + 2 f) inside it (`Block.mixing_size` has what
    other kinds of attention keep), and 2 e h for each routed expert that the token goes to; full recomputation keeps
    the block's input alone. While the loss is computed, `LOGIT_BYTES` are held per logit beside it. Sequence
    parallelism in a runtime that `keeps_gathered` holds the inputs of attention, MLP and head (with its gradient)
    whole.

    References
    ----------
    Korthikanti et al., MLSys 2023 (arXiv:2205.05198), with grouped heads and fused attention.
    """
    require(recompute in RECOMPUTE, "recompute", recompute, " or ".join(RECOMPUTE))
    way = _Way(
        seq_len=batch.seq_len,
        element_bytes=batch.element_bytes,
        input_bytes=1 if batch.precision == "fp8" and runtime.keeps_8_bit else batch.element_bytes,
        tp=tp,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        flash_attention=runtime.attention != "materialised",
        fused=runtime.fused,
        norms=runtime.norm_way,
        dropout=runtime.dropout,
        cp=cp,
        ep=ep,
        selective=runtime.selective,
        keep_gathered=runtime.keeps_gathered,
        gather_keys=runtime.context == "heads",
        logit_bytes=runtime.logit_bytes or LOGIT_BYTES[runtime.loss],
    )
    return _layer_memory(model, way)


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


def stage_rows(layers: LayerMemory, first_layer: int, last_layer: int) -> tuple[float, ...]:
    """Of a stage: parameters, most parameters of a layer, bytes of activations per micro-batch, transient bytes, what
    ZeRO divides by the workers, and of that what is outside of blocks."""
    divided = layers.parameters if layers.sharded_parameters is None else layers.sharded_parameters
    # A stage that has both ends has the matrix once.
    tied = layers.tied_parameters if first_layer > 0 and last_layer == len(layers.parameters) else 0.0
    return (
        float(layers.parameters[first_layer:last_layer].sum()) + tied,
        float(layers.parameters[first_layer:last_layer].max(initial=0.0)),
        float(layers.activation_bytes[first_layer:last_layer].sum()),
        float(layers.transient_bytes[first_layer:last_layer].max(initial=0.0)),
        float(divided[first_layer:last_layer].sum()) + tied,
        sum(float(divided[i]) for i in (0, len(divided) - 1) if first_layer <= i < last_layer) + tied,
    )


def state_bytes(batch: Batch) -> tuple[float, float, float]:
    """Bytes per parameter of weight, gradient and optimizer state (with the wider master of 16-bit weights)."""
    master = batch.state_bytes if batch.element_bytes < batch.state_bytes else 0
    per_optimizer = OPTIMIZERS[batch.optimizer].moment_bytes * batch.state_bytes / 4 + master
    return batch.element_bytes, batch.gradient_bytes, per_optimizer


def outside_bytes(batch: Batch) -> float:
    """More bytes of optimizer state per parameter outside of blocks (embedding and head): there Muon is AdamW.

    Vectors within blocks, norms and biases, are AdamW's too and left out.
    """
    optimizer = OPTIMIZERS[batch.optimizer]
    return (optimizer.outside_moment_bytes - optimizer.moment_bytes) * batch.state_bytes / 4


def gradient_copies(batch: Batch, runtime: Runtime, zero: int) -> float:
    """Further copies of the gradients: flattened ones of a reduction, and low-precision ones that live beside the
    wider ones they are added to, in units of those."""
    # Nothing narrower lives beside the sum where the product adds into it, or where both are of one width.
    wide = runtime.fused_accumulation or runtime.autograd or batch.gradient_bytes <= batch.element_bytes
    if wide or zero == 3:
        return runtime.gradient_copies
    return runtime.gradient_copies + batch.element_bytes / batch.gradient_bytes


MOST_POSTED = 16
"""Messages that are posted at most, however small."""


def posted_bytes(runtime: Runtime, message_bytes: float) -> float:
    """Room for messages between stages that have not arrived."""
    return max(runtime.posted_messages * message_bytes, min(MOST_POSTED * message_bytes, runtime.posted_bytes))


SUMS_UNDER_WAY, BYTES_UNDER_WAY, MOST_UNDER_WAY = 4, float(2 << 30), 32
"""Sums that may be under way at one time whatever their size, bytes of their buffers up to which more may, and how many
at most (`polygon_comm.line`)."""


@kernel
def under_way_bytes(heard: float, gradient_bytes: float, largest_bytes: float) -> float:
    """Most bytes of buffers of the sums that are under way, of a gradient in layers of `largest_bytes` at most.

    Parameters
    ----------
    heard : float
        Bytes of buffers per byte of gradient (`polygon.cost.stage_reduction.room_of_sums`).
    """
    any_size, small = SUMS_UNDER_WAY * largest_bytes, min(BYTES_UNDER_WAY, MOST_UNDER_WAY * heard * largest_bytes)
    return min(heard * gradient_bytes, max(heard * any_size, small))


def passing_bytes(batch: Batch, runtime: Runtime, zero: int) -> float:
    """Bytes per parameter of the largest layer that ZeRO has beside what each device keeps, while that is computed.

    ZeRO-3: its weights and their gradient, and weights or a gradient of a layer beside it; this project's engine has
    the weights of the layer before and the gradient of the one after. ZeRO-2, where gradients are scattered after every
    micro-batch: the gradients of two layers.
    """
    weight, gradient, _ = state_bytes(batch)
    if zero == 3:
        return (3 if runtime.autograd else 2) * weight + gradient
    return 2.0 * gradient if zero == 2 and runtime.zero2_by_micro_batch else 0.0


def breakdown(
    held: float,
    largest: float,
    activation_bytes: float,
    transient_bytes: float,
    sharded: float,
    outside: float = 0.0,
    *,
    in_flight: float,
    zero: int,
    shards: int,
    batch: Batch,
    context_bytes: float = CONTEXT_BYTES,
    gradient_copies: float = 0.0,
    outer: bool = False,
    passing: float | None = None,
    scattered: bool = True,
) -> MemoryBreakdown:
    """Peak bytes from what `stage_rows` says of a stage; `passing`: see `passing_bytes`.

    ZeRO-2 divides gradients where it scatters them after every micro-batch (`scattered`); until a sum at the end of the
    step all of them are there.
    """
    per_weight, per_gradient, per_optimizer = state_bytes(batch)
    if shards > 1:
        transient_bytes = transient_bytes + largest * (
            passing_bytes(batch, FUSED, zero) if passing is None else passing
        )
    return MemoryBreakdown(
        # `sharded` counts the experts of all devices of a group where `held` has one's own: ZeRO divides them all.
        weights=(sharded / shards if zero >= 3 else held) * per_weight,
        gradients=(sharded / shards if zero == 3 or (zero == 2 and scattered) else held)
        * per_gradient
        * (1 + gradient_copies),
        optimizer=(sharded / shards if zero >= 1 else held) * (per_optimizer + OUTER_BYTES * outer)
        + outside_bytes(batch) * outside / (shards if zero >= 1 else 1),
        activations=activation_bytes * in_flight,
        transient=transient_bytes,
        context=context_bytes,
    )


def divided_less(
    peak: MemoryBreakdown,
    parameters: float,
    batch: Batch,
    own: tuple[int, int],
    less: tuple[int, int],
    copies: float = 0.0,
    *,
    scattered: bool = True,
    outer: bool = False,
) -> MemoryBreakdown:
    """Memory of a device on which ZeRO divides some parameters less than the others: a tied weight, by what both its
    stages do.

    Parameters
    ----------
    parameters : float
        How many, on this device.
    own, less : pair of int
        ZeRO stage, and devices over which it divides: of `peak`, and of these parameters.
    copies, scattered, outer
        As `gradient_copies`, `scattered` and `outer` of `breakdown`.
    """
    parts = [
        breakdown(
            parameters, 0.0, 0.0, 0.0, parameters, parameters,
            in_flight=0.0, zero=zero, shards=shards, batch=batch, context_bytes=0.0, gradient_copies=copies,
            scattered=scattered, outer=outer,
        )
        for zero, shards in (own, less)
    ]  # fmt: skip
    # Whatever is the same both ways (activations, context) stays `peak`'s.
    states = {name: getattr(parts[1], name) - getattr(parts[0], name) for name in ("weights", "gradients", "optimizer")}
    return replace(peak, **{name: getattr(peak, name) + more for name, more in states.items()})
