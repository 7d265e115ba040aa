"""Bytes that eager layers keep for backward, counted operation by operation as torch's autograd keeps them.

Beside `polygon.cost.memory`, which speaks of programs with fused kernels, this knows which tensors the layers of this
project's engine keep and in which number format: norms keep their inputs as they come, keys and values are repeated
for all heads, a gated MLP keeps what its gate gives too, and the loss takes 32 bits a logit three times
(log-probabilities, their gradient, the logits' gradient).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.memory import ROUTED_COPIES, LayerMemory, layer_memory
from polygon.domain.block import Block, shares_heads
from polygon.domain.model import Batch, Model

LOSS_BYTES = {False: (4, 8), True: (8, 8)}
"""A logit, by whether a tensor-parallel group spreads them: what is kept for backward (log-probabilities; spread, what
the exponential took and gave), and what its start needs beside that."""
SUM_BYTES = 4
"""A number of a gradient between two blocks, while a block's backward adds to it."""


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
    whole_experts: bool = False
    """Whether the tp ranks have whole experts of their own, and each routes its part of the tokens."""
    grouped_experts: bool = False
    """Whether experts are one product, whose weights get their gradients at a time."""
    norms_in_32_bits: bool = False
    """Autocast's way: norms cast what comes to 32 bits and keep that. The engine's do not, nor those of 16-bit weights
    (DeepSpeed)."""
    sums_in_32_bits: bool = False
    """What passes from block to block: replicas leave it as autocast makes it, the engine rounds it."""
    fused_norms: bool = True
    """Whether torch computes RMS norms by one kernel (on GPUs), which keeps their input alone."""
    compiled: bool = False
    """Whether what lies between products is compiled: casts of a norm's input and a gate's value are made again."""
    trained: Collection[str] | None = None
    """Linear layers beside which additions are trained, by the last part of their names; None: all weights are."""

    def keeps_input(self, *names: str) -> bool:
        """Whether the input of linear layers is kept: for gradients of weights or of additions beside them."""
        return self.trained is None or bool(set(names) & set(self.trained))

    @property
    def shard(self) -> int:
        """Devices that share what lies outside of the tensor-parallel part."""
        return self.tp if self.sequence else 1


def _norm(width: float, way: Way, e: int, *, rms: bool) -> float:
    """Bytes a token of one norm: its input, an RMS norm's values before their weight, factors."""
    if way.compiled:
        return e * width + (4 if rms else 8)
    operations = rms and not way.fused_norms  # in 32 bits, whatever comes
    copies = 2 if operations and way.trained is None else 1
    return (4 if way.norms_in_32_bits or operations else e) * width * copies + (4 if rms else 8)


def _attention(block: Block, way: Way, e: int) -> float:
    """Bytes a token, on one device, inside attention and its projections, but for the input of those."""
    if block.linear is not None:
        return e * block.mixing_size / way.tp
    q, kv, heads = block.query_size, block.key_size, max(1.0, block.kv_heads / way.tp)
    repeated = block.heads * block.value_dim
    if way.recompute == "selective":
        gate = block.mixed_size if block.attention_gate else 0
        return e * ((q + kv + block.value_size + block.mixed_size + gate) / way.tp + block.latent_size)
    # Queries, keys and values as attention takes them (repeated for all heads), and its result.
    core: float = e * (2 * q + 2 * repeated) + 4 * block.heads
    if way.ring and way.cp > 1:  # keys and values as they are sent
        core = e * (q + kv + block.value_size + repeated) + 4 * block.heads
    elif not shares_heads(block.heads / way.tp, heads, way.cp):  # keys and values of all tokens are gathered
        core += e * (way.cp - 1) * (q + repeated)
    if block.rotary:
        # Attention's result then lies head by head, and is copied for the output's product.
        core += e * repeated * way.keeps_input("output")
    if block.query_key_norm and block.latent is None:
        core += _norm(q + kv, way, e, rms=True)
    if block.attention_gate:
        core += 2 * e * repeated
    return core * (2 if block.cross else 1) / way.tp + e * block.latent_size


def _block(block: Block, way: Way, e: int) -> tuple[float, float]:
    """Bytes a token that a block keeps, and further ones that its backward needs for a while."""
    h, shard = block.hidden_size, way.shard
    outside = block.norms * _norm(h, way, e, rms=block.rms_norm)
    inputs = way.keeps_input("query", "key", "value") + way.keeps_input("up", "gate") + 2 * block.cross
    outside += e * h * (1 if block.parallel and block.norms == 1 else inputs)
    inside = _attention(block, way, e)
    products = (2 if way.compiled else 3) if block.gated_mlp else 1
    inside += (products + way.keeps_input("down")) * block.width * e / way.tp
    widest = block.ffn_size
    if block.experts:
        widest = block.expert_ffn_size * block.experts_per_token
        # Rows in the order of their experts, and the results before they are weighted, of all tokens.
        inside += ROUTED_COPIES * block.experts_per_token * h * e / (way.tp if way.whole_experts else 1)
    # Gradients of the MLP's widest values and of the sums between blocks.
    return outside / shard + inside, widest * e / way.tp + SUM_BYTES * h / shard


def _head(model: Model, way: Way, tokens: float, e: int) -> tuple[float, float]:
    """Bytes that the head keeps, and further ones for the loss; after that its weight's gradient, before it is added,
    takes the place of one of the two numbers a logit."""
    once = model.answers_once
    rows = way.micro_batch if once else tokens
    kept = rows * (_norm(model.hidden_size, way, e, rms=model.rms_norm) + e * model.hidden_size) / way.shard
    logits = rows * model.answers / (1 if once else way.tp)
    kept_bytes, more_bytes = LOSS_BYTES[way.tp > 1 and not once]
    weight = e * model.head_weight_parameters() / way.tp if way.trained is None else 0.0
    return kept + logits * kept_bytes, logits * more_bytes + max(0.0, weight - logits * (more_bytes - 4))


def autograd_memory(model: Model, batch: Batch, way: Way) -> LayerMemory:
    """As `polygon.cost.memory.layer_memory`, with activations as eager layers keep them.

    Ignores what one operation needs inside (the tokens that a product gathers under sequence parallelism) and buffers
    of communication. Towers, tokens predicted ahead and what a head transforms are as in `layer_memory`.
    """
    usual = layer_memory(
        model, batch, tp=way.tp, micro_batch_size=way.micro_batch, cp=way.cp, ep=way.ep,
        sequence_parallel=way.sequence,
    )  # fmt: skip
    tokens, e = way.micro_batch * batch.seq_len / way.cp, batch.element_bytes
    kept, passing = usual.activation_bytes.copy(), usual.transient_bytes.copy()
    kinds = np.array(model.layer_kinds())
    for kind in dict.fromkeys(kinds[1:-1].tolist()):
        alike = kinds == kind
        block = model.block(int(alike.argmax()))
        of_block = _block(block, way, e)
        kept[alike], passing[alike] = tokens * of_block[0], tokens * of_block[1]
        whole = way.tp == 1 or way.whole_experts  # else they run one after another
        if way.grouped_experts and block.experts and whole and not block.linear_bias:
            here = block.experts / way.ep / way.tp
            passing[alike] += e * here * block.expert_ffn_size * block.hidden_size
        if way.recompute == "full":
            kept[alike] = tokens * model.hidden_size * (SUM_BYTES if way.sums_in_32_bits else e) / way.shard
            passing[alike] += tokens * of_block[0]
    if not model.predicted_ahead:
        kept[-1], passing[-1] = _head(model, way, tokens, e)
    return replace(usual, activation_bytes=kept, transient_bytes=passing)


def beside_stage(layers: LayerMemory, first_layer: int, last_layer: int) -> LayerMemory:
    """The same with what each layer of a stage needs for a while counted beside what all of them keep: less what those
    after it have given back when backward comes to it."""
    held, passing = layers.activation_bytes[first_layer:last_layer], layers.transient_bytes.copy()
    passing[first_layer:last_layer] -= held[::-1].cumsum()[::-1] - held
    return replace(layers, transient_bytes=passing)
