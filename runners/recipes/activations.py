"""Bytes that the engine's layers keep for backward, counted operation by operation as torch computes them.

Beside `polygon.cost.memory`, which speaks of any framework, this knows which tensors these layers keep and in which
number format: under autocast norms compute in 32 bits and keep their inputs so, and the loss takes 32 bits a logit
three times (log-probabilities, their gradient, the logits' gradient).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.memory import LayerMemory, layer_memory
from polygon.domain.block import shares_heads
from polygon.domain.model import Batch, Model

LOSS_BYTES = {False: (4, 8), True: (8, 8)}
"""A logit, by whether a tensor-parallel group spreads them: what is kept for backward (log-probabilities; spread, what
the exponential took and gave), and what its start needs beside that."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How layers are computed, as far as it says what they keep."""

    micro_batch: int
    recompute: str = "none"
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence: bool = False
    """Whether the tp ranks split the tokens between the products that they share."""
    ring: bool = False
    """Whether keys and values of the cp ranks pass round a ring."""
    norms_in_32_bits: bool = True
    """Autocast's way; where weights are in 16 bits (DeepSpeed) norms are too."""
    sums_in_32_bits: bool = False
    """What passes from block to block: replicas leave it as autocast makes it, the engine rounds it."""
    fused_norms: bool = False
    """Whether torch computes RMS norms by one kernel (on GPUs), which keeps their input alone."""
    trained: Collection[str] | None = None
    """Linear layers beside which additions are trained, by the last part of their names; None: all weights are."""

    def keeps_input(self, *names: str) -> bool:
        """Whether the input of linear layers is kept: for gradients of weights or of additions beside them."""
        return self.trained is None or bool(set(names) & set(self.trained))


def _norm(model: Model, way: Way, e: int) -> int:
    """Bytes a token of one norm: its input, an RMS norm's values before their weight, factors."""
    width = 4 if way.norms_in_32_bits else e
    copies = 2 if model.rms_norm and not way.fused_norms and way.trained is None else 1
    return width * model.hidden_size * copies + (4 if model.rms_norm else 8)


def _attention(model: Model, way: Way, e: int) -> float:
    """Bytes a token inside attention and its projections, but for the input of those."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # Queries, keys and values as attention takes them (repeated for all heads), and its result.
    core = 4 * q * e + 4 * model.heads
    heads, kv_heads = model.heads / way.tp, max(1.0, model.kv_heads / way.tp)
    if way.ring and way.cp > 1:  # keys and values as they are sent
        core = 2 * (q + kv) * e + 4 * model.heads
    elif not shares_heads(heads, kv_heads, way.cp):  # keys and values of all tokens are gathered
        core += 2 * (way.cp - 1) * q * e
    if way.recompute == "selective":
        return (q + 2 * kv + q) * e
    if not model.learned_positions and model.family != "vit":
        # Attention's result then lies head by head, and is copied for the output's product.
        core += q * e * way.keeps_input("output")
    return core


def _mlp(model: Model, way: Way, width: int, e: int) -> float:
    """Bytes a token inside the MLP but for its input; a gated one keeps both products, the value of its gate too."""
    return ((3 if model.gated_mlp else 1) + way.keeps_input("down")) * width * e


def _block(model: Model, way: Way, *, experts: bool, e: int) -> tuple[float, float]:
    """Bytes a token that a block keeps, and further ones that its backward needs for a while."""
    h, shard = model.hidden_size, way.tp if way.sequence else 1
    outside = 2 * _norm(model, way, e) / shard
    outside += e * h / shard * (way.keeps_input("query", "key", "value") + way.keeps_input("up", "gate"))
    inside = _attention(model, way, e) / way.tp
    widest = model.ffn_size
    if experts:
        chosen = model.experts_per_token
        widest = model.expert_ffn_size * chosen
        # Rows in the order of their experts, and the results before they are weighted.
        outside += 2 * chosen * h * e
        inside += _mlp(model, way, model.expert_ffn_size * (chosen + model.shared_experts), e) / way.tp
    else:
        inside += _mlp(model, way, model.ffn_size, e) / way.tp
    # Gradients of the MLP's widest values and of the sums between blocks.
    return outside + inside, widest * e / way.tp + 4 * h / shard


def own_layer_memory(
    model: Model, batch: Batch, way: Way, first_layer: int = 0, last_layer: int | None = None
) -> LayerMemory:
    """As `polygon.cost.memory.layer_memory`, with activations as the engine's layers keep them.

    What a layer needs for a while is beside what all layers of the stage, from `first_layer` to `last_layer`, keep:
    less what those after it have given back when backward comes to it.

    Ignores what one operation needs inside (the tokens that a product gathers under sequence parallelism) and buffers
    of communication.
    """
    usual = layer_memory(model, batch, tp=way.tp, micro_batch_size=way.micro_batch, cp=way.cp, ep=way.ep)
    tokens, e = way.micro_batch * batch.seq_len / way.cp, batch.element_bytes
    kept, passing = np.zeros(model.layers), np.zeros(model.layers)
    for layer in range(model.layers):
        kind = model.layer_kind(layer)
        if kind == "embedding":
            kept[layer] = tokens * 8
        elif kind == "head":
            rows = way.micro_batch if model.family == "vit" else tokens
            shard = way.tp if way.sequence else 1
            kept[layer] = rows * (_norm(model, way, e) + e * model.hidden_size) / shard
            logits = rows * model.vocab_size / (1 if model.family == "vit" else way.tp)
            kept_bytes, more_bytes = LOSS_BYTES[way.tp > 1 and model.family != "vit"]
            kept[layer] += logits * kept_bytes
            # After the loss its weight's gradient, before it is added, takes the place of one of the two.
            weight = e * model.head_weight_parameters() / way.tp if way.trained is None else 0.0
            passing[layer] = logits * more_bytes + max(0.0, weight - logits * (more_bytes - 4))
        else:
            block, backward = _block(model, way, experts=model.is_sparse(layer), e=e)
            kept[layer], passing[layer] = tokens * block, tokens * backward
            if way.recompute == "full":
                width = 4 if way.sums_in_32_bits else e
                kept[layer] = tokens * model.hidden_size * width / (way.tp if way.sequence else 1)
                passing[layer] += tokens * block
    held = kept[first_layer:last_layer]
    passing[first_layer:last_layer] -= held[::-1].cumsum()[::-1] - held
    return replace(usual, activation_bytes=kept, transient_bytes=passing)
