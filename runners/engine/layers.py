"""The layers of a model as torch modules, named and initialised independently of any plan.

Layer 0 is the embedding, 1..L the blocks, L+1 the head with the loss (as in `polygon.domain.model`). Every layer draws
its first weights from a generator of its own, so that a layer starts the same wherever it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from polygon_comm.exchange import ExchangeGroup
from polygon_comm.tensor_group import TensorGroup
from torch import nn
from torch.distributed import ReduceOp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from polygon.domain.block import shares_heads
from polygon.domain.errors import require
from polygon.domain.model import Model
from runners.engine.context import gathered, part_of, spans_of, to_heads, to_tokens
from runners.engine.documents import Documents
from runners.engine.experts import EXPERT, BalanceLoss, Experts
from runners.engine.float8 import EightBits, fits
from runners.engine.positions import Turns, rotate
from runners.engine.pretrained import Pretrained
from runners.engine.ring_attention import ring_attention
from runners.engine.runnable import require_plain
from runners.engine.sequence import (
    Linear,
    Rows,
    as_autocast,
    column_products,
    join,
    row_product,
    split,
    sum_gradients,
    sum_over,
    sum_over_group,
)
from runners.engine.windows import Piece, pieces_of, window_mask

TIED_WEIGHT = "embedding.tokens.weight"
TIED_COPY = "head.output.weight"
ADDED = re.compile(r"(.+)\.lora_([AB])\.default\.weight")
"""A factor of an addition to a linear layer, by its name in the full model."""


def layer_name(model: Model, layer: int) -> str:
    """Name of a layer in the full model: the prefix of its parameters' names in checkpoints."""
    kind = model.layer_kind(layer)
    return kind if kind in ("embedding", "head") else f"blocks.{layer - 1}"


class RmsNorm(nn.RMSNorm):
    """In the input's number format, weight and all: one kernel, which sums in 32 bits inside. Autocast would have it
    cast what comes to 32 bits and what leaves back to 16, each a kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return functional.rms_norm(x, tuple(self.normalized_shape), weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """The same with a mean and a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return functional.layer_norm(x, tuple(self.normalized_shape), weight, bias, self.eps)


def _norm(model: Model) -> nn.Module:
    if model.rms_norm:
        return RmsNorm(model.hidden_size, eps=model.norm_eps)
    return LayerNorm(model.hidden_size, eps=1e-6 if model.family == "vit" else 1e-5)


class TokenEmbedding(nn.Module):
    """Token ids (batch, tokens) to vectors, with learned positions where the model has them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tp: TensorGroup | None = None
        self.split_over: TensorGroup | None = None
        """Ranks between which what leaves here is split by tokens."""
        self.tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.positions = nn.Embedding(model.max_seq_len, model.hidden_size) if model.learned_positions else None
        self.context: ExchangeGroup | None = None
        """Ranks that hold the other parts of the sequences."""

    def forward(self, ids: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        if self.tp is None:
            x = split(self.tokens(ids), self.split_over)
        else:
            rows = len(self.tokens.weight)
            local = ids - self.tp.place * rows
            here = (local >= 0) & (local < rows)
            found = self.tokens(local.clamp(0, rows - 1)) * here[..., None]
            x = sum_over(found, self.tp, by_tokens=self.split_over is not None)
        if self.positions is None:
            return x
        if documents is not None:
            places = documents.positions if self.context is None else part_of(documents.positions, self.context)
            return x + split(self.positions(places), self.split_over)
        tokens = ids.shape[1] * (1 if self.context is None else self.context.size)
        learned = self.positions.weight[None, :tokens]
        return x + split(learned if self.context is None else part_of(learned, self.context), self.split_over)


class ImageEmbedding(nn.Module):
    """Images (batch, channels, side, side) to vectors of patches, after a class token."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.patch_size = model.patch_size
        self.patches = nn.Linear(model.channels * model.patch_size**2, model.hidden_size)
        self.class_token = nn.Parameter(torch.empty(model.hidden_size))
        self.positions = nn.Embedding(model.tokens_per_image, model.hidden_size)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = functional.unfold(images, self.patch_size, stride=self.patch_size).transpose(1, 2)
        x = self.patches(patches)
        return torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], dim=1) + self.positions.weight


def _ends_together(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask by which the last query sees all keys, and each one before it one less.

    On GPUs as torch's own, which its flash kernel takes and no memory holds.
    """
    if q.is_cuda:
        # Brings torch's compiler along, which takes as long to import as torch.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(q.shape[2], k.shape[2])
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return ones.tril_(k.shape[2] - q.shape[2])


class Attention(nn.Module):
    """Multi-head attention, causal where the model is, with fewer key and value heads where it has them."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.tp: TensorGroup | None = None
        self.by_tokens = False
        """Whether between layers each rank of the group has its part of the tokens."""
        self.context: ExchangeGroup | None = None
        """Ranks that hold the other parts of the sequences."""
        self.ring = False
        """Whether their keys and values pass round a ring, where a mask says no more than that attention is causal."""
        self.kv_rows: slice | None = None
        """Of the key's and value's outputs, those of this rank, where both are whole on all: fewer heads than ranks."""
        self.recompute_core = False
        self.window = model.window if model.attention_of(layer) == "window" else 0
        """Tokens that a query sees; 0: all."""
        self.head_dim, self.causal, self.rotary = model.head_dim, model.causal, not model.learned_positions
        self.turns = Turns(model.rope_theta, model.rope_scaling)
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = Linear(model.hidden_size, q, bias=model.qkv_bias)
        self.key = Linear(model.hidden_size, kv, bias=model.qkv_bias)
        self.value = Linear(model.hidden_size, kv, bias=model.qkv_bias)
        self.output = Linear(q, model.hidden_size, bias=model.linear_bias)
        self.query_norm = RmsNorm(model.head_dim, eps=model.norm_eps) if model.query_key_norm == "head" else None
        self.key_norm = RmsNorm(model.head_dim, eps=model.norm_eps) if model.query_key_norm == "head" else None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    @staticmethod
    def _places(x: torch.Tensor, context: ExchangeGroup) -> torch.Tensor:
        """Positions of all tokens of sequences, shape (1, tokens), of which `x` has a part."""
        return torch.arange(x.shape[2] * context.size, device=x.device)[None]

    def _core(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        q, k, v = self._heads(query), self._heads(key), self._heads(value)
        context, positions = self.context, None if documents is None else documents.positions
        mask = None if documents is None else documents.mask
        tokens = q.shape[2] * (1 if context is None else context.size)
        window = self.window if self.window < tokens else 0
        ring = context is not None and self.ring and mask is None and self.causal and not window
        share = context is not None and not ring and shares_heads(q.shape[1], k.shape[1], context.size)
        if context is not None and share:
            q, k, v = to_heads(q, k, v, context)
        elif context is not None:
            positions = part_of(self._places(q, context) if positions is None else positions, context)
        q, k = self.turn(q, k, positions)
        if context is not None and ring:
            halved = len(spans_of(tokens, context)) == 2
            q, k, v = (as_autocast(x) for x in (q, k, v))
            return ring_attention(q, k, v, context, halved=halved).transpose(1, 2).flatten(2)
        if context is not None and not share:
            k, v = gathered(k, v, context)
        if k.shape[1] != q.shape[1]:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        if context is not None and not share:
            mixed = self._of_pieces(q, k, v, pieces_of(spans_of(tokens, context), window), mask)
        elif window:
            mixed = self._of_pieces(q, k, v, pieces_of([(0, tokens)], window), mask)
        else:
            causal = mask is None and self.causal
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        if context is not None and share:
            mixed = to_tokens(mixed, context)
        return mixed.transpose(1, 2).flatten(2)

    def turn(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normed and turned by their positions."""
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if not self.rotary:
            return q, k
        cos, sin = self.turns.of(q, positions)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def _of_pieces(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pieces: Iterable[Piece],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of pieces of the queries, which lie one after another, to the keys and values of all tokens."""
        mixed, done = [], 0
        for begin, end, first in pieces:
            piece = q[:, :, done : done + end - begin]
            done += end - begin
            last = end if self.causal else k.shape[2]
            keys, values = k[:, :, first:last], v[:, :, first:last]
            own = None if mask is None else mask[..., begin:end, first:last]
            if 0 < self.window < last:
                seen = window_mask(end - begin, begin - first, self.window, q.dtype if own is None else None, q.device)
                own = seen if own is None else own & seen
            elif mask is None and self.causal:
                own = _ends_together(piece, keys)
            mixed.append(functional.scaled_dot_product_attention(piece, keys, values, attn_mask=own))
        return torch.cat(mixed, 2)

    def forward(self, x: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        key, value = (layer if self.kv_rows is None else Rows(layer, self.kv_rows) for layer in (self.key, self.value))
        projected = column_products((self.query, key, value), x, self.tp, by_tokens=self.by_tokens)
        if self.recompute_core and torch.is_grad_enabled():
            mixed = checkpoint(self._core, *projected, documents, use_reentrant=False)
        else:
            mixed = self._core(projected[0], projected[1], projected[2], documents)
        return row_product(self.output, mixed, self.tp, by_tokens=self.by_tokens)


class Mlp(nn.Module):
    """Two layers with GELU (exact in a vision transformer, GPT-2's by tanh), or three with a SiLU gate."""

    def __init__(self, model: Model, ffn_size: int) -> None:
        super().__init__()
        self.tp: TensorGroup | None = None
        self.by_tokens = False
        self.gelu = "none" if model.family == "vit" else "tanh"
        self.gate = Linear(model.hidden_size, ffn_size, bias=model.linear_bias) if model.gated_mlp else None
        self.up = Linear(model.hidden_size, ffn_size, bias=model.linear_bias)
        self.down = Linear(ffn_size, model.hidden_size, bias=model.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (self.up,) if self.gate is None else (self.up, self.gate)
        inner = self.activate(*column_products(first, x, self.tp, by_tokens=self.by_tokens))
        return row_product(self.down, inner, self.tp, by_tokens=self.by_tokens)

    def activate(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """What the last layer takes, of what the first ones give."""
        return functional.gelu(up, approximate=self.gelu) if gate is None else functional.silu(gate) * up


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = Attention(model, layer)
        self.mlp_norm = _norm(model)
        self.mlp = Experts(model, Mlp) if model.is_sparse(layer) else Mlp(model, model.ffn_size)

    def forward(self, x: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        x, normed = self.add(x, self.attention(self.attention_norm(x), documents))
        return x + self.mlp(normed)

    def add(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum with what attention gives, and its norm."""
        x = x + attended
        return x, self.mlp_norm(x)


def _spread_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """Cross-entropy, summed over the targets, of logits whose classes are spread over a group."""
    largest = tp.total(logits.detach().amax(-1), ReduceOp.MAX)
    logits = logits - largest[..., None]
    local = targets - tp.place * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1]) & (targets >= 0)
    wanted = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * here
    return ((tp.sum(logits.exp().sum(-1)).log() - tp.sum(wanted)) * (targets >= 0)).sum()


class Head(nn.Module):
    """Final norm, output projection and the cross-entropy summed over the targets; targets of -100 count nothing."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tp: TensorGroup | None = None
        self.split_over: TensorGroup | None = None
        """Ranks between which what arrives here is split by tokens."""
        self.pooled = model.family == "vit"
        self.norm = _norm(model)
        self.output = Linear(model.hidden_size, model.vocab_size, bias=self.pooled)
        self.chunk = 0
        """Tokens whose logits are there at a time; 0: all. Where a group has the classes between it, all are."""
        self.correct: torch.Tensor | None = None
        """How many targets had the highest score; counted where this is a number (and classes are not spread)."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(x[:, 0] if self.pooled else x)
        if self.tp is not None:
            [spread] = column_products((self.output,), x, self.tp, by_tokens=self.split_over is not None)
            return _spread_cross_entropy(spread.float(), targets, self.tp)
        x = join(x, self.split_over)
        if not self.chunk or self.pooled:
            return self._loss(x, targets)
        parts = zip(x.flatten(0, -2).split(self.chunk), targets.flatten().split(self.chunk), strict=True)
        # Computed again in backward, as torch's linear_cross_entropy does not; in bf16 that sums the loss in bf16.
        losses = [checkpoint(self._loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum()

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.output(x).float()
        if self.correct is not None:
            self.correct += (logits.argmax(-1) == targets).sum()
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def _generator(seed: int, layer: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + layer) % 2**63)


def _initialise(module: nn.Module, model: Model, layer: int, seed: int) -> None:
    """GPT-2's initialisation: normal(0, 0.02), residual outputs narrower by sqrt(2 blocks), norms one, biases zero."""
    generator = _generator(seed, layer)
    for name, parameter in module.named_parameters():
        if name == "output.weight" and model.layer_kind(layer) == "head" and model.tied_embeddings:
            # The copy of the token embedding: the first numbers that layer 0 draws.
            drawn = torch.randn(parameter.shape, generator=_generator(seed, 0)) * 0.02
        elif name.endswith("bias"):
            drawn = torch.zeros(parameter.shape)
        elif name.rpartition(".")[0].endswith("norm"):
            drawn = torch.ones(parameter.shape)
        else:
            narrow = name.endswith(("attention.output.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * model.blocks) if narrow else 0.02
            drawn = torch.randn(parameter.shape, generator=generator) * std
        with torch.no_grad():
            parameter.copy_(drawn)


def shard_dim(model: Model, name: str, size: int) -> int | None:
    """Dimension along which a parameter (by its name in the full model) is cut for `size` devices; None: whole on each.

    Heads and inner MLP units are spread; the vocabulary too, where `size` divides it. Key and value heads that are
    fewer than the devices are whole on each, which computes the one that it needs.
    """
    if size == 1:
        return None
    added = ADDED.fullmatch(name)
    if added is not None:
        # Of the two factors that make up an addition the one is cut that has the cut outputs, or inputs.
        dim = shard_dim(model, f"{added[1]}.weight", size)
        return dim if dim == {"A": 1, "B": 0}[added[2]] else None
    part = name.rsplit(".", maxsplit=2)
    if name in (TIED_WEIGHT, TIED_COPY):
        return 0 if model.family != "vit" and model.vocab_size % size == 0 else None
    if len(part) == 3 and part[1] in ("key", "value") and model.kv_heads % size:
        return None
    if len(part) == 3 and part[1] in ("query", "key", "value", "up", "gate"):
        return 0
    if len(part) == 3 and part[1] in ("output", "down") and part[2] == "weight" and part[0] != "head":
        return 1
    return None


def shard_layer(
    module: nn.Module,
    model: Model,
    layer: int,
    tp: TensorGroup,
    *,
    by_tokens: bool = False,
    whole_experts: bool = False,
) -> None:
    """Keep this rank's slices of a layer's parameters and let the layer's parts know their group.

    `by_tokens`: between the products that are cut each rank of the group holds only its part of the tokens.
    `whole_experts`: routed experts are not cut, and get these.
    """
    prefix = layer_name(model, layer)
    for name, parameter in module.named_parameters():
        dim = shard_dim(model, f"{prefix}.{name}", 1 if whole_experts and EXPERT in f".{name}" else tp.size)
        if dim is not None:
            parameter.data = tp.part(parameter.data, dim).clone()
    _join_group(module, model, tp, by_tokens=by_tokens, whole_experts=whole_experts)


def _routed(module: nn.Module) -> set[nn.Module]:
    """The parts of a layer's routed experts."""
    return {
        inner
        for part in module.modules()
        if isinstance(part, Experts)
        for expert in part.experts.values()
        for inner in expert.modules()
    }


def _join_group(module: nn.Module, model: Model, tp: TensorGroup, *, by_tokens: bool, whole_experts: bool) -> None:
    """Let the parts of a layer know with whom they hold slices."""
    spread_vocabulary = shard_dim(model, TIED_WEIGHT, tp.size) is not None
    alone = _routed(module) if whole_experts else set()
    for part in module.modules():
        if part in alone:
            continue
        if isinstance(part, Attention | Mlp) or (isinstance(part, TokenEmbedding | Head) and spread_vocabulary):
            part.tp = tp
        if isinstance(part, Attention) and model.kv_heads % tp.size:
            first = tp.place * model.kv_heads // tp.size * model.head_dim
            part.kv_rows = slice(first, first + model.head_dim)
            for parameter in (*part.key.parameters(), *part.value.parameters()):
                sum_over_group(parameter, tp)
        if isinstance(part, Attention) and part.query_norm is not None and part.key_norm is not None:
            # Each rank applies them to its own heads alone; split by tokens, their sum is one of all norms'.
            for norm in (part.query_norm, part.key_norm) if not by_tokens else ():
                sum_over_group(norm.weight, tp)
    if by_tokens:
        _split_tokens(module, tp, whole_experts=whole_experts)


def _split_tokens(module: nn.Module, tp: TensorGroup, *, whole_experts: bool) -> None:
    """Let the parts of a layer know that between them tokens are split over a group; routed experts see all, or those
    that are sent to them where they are whole."""
    blind = {inner for part in module.modules() if isinstance(part, Experts) for inner in part.modules()}
    if whole_experts:
        blind = _routed(module)
    for part in module.modules():
        if isinstance(part, Attention | Mlp) and part not in blind:
            part.by_tokens = True
        if isinstance(part, Experts) and whole_experts:
            part.beside = tp
            for parameter in part.own_parameters():
                sum_over_group(parameter, tp)
        elif isinstance(part, TokenEmbedding | Head | Experts):
            part.split_over = tp
    sum_gradients(module, tp)


def attach_groups(
    layers: Iterable[nn.Module],
    context: ExchangeGroup | None,
    experts: ExchangeGroup | None,
    balance: BalanceLoss,
    *,
    ring: bool = False,
) -> None:
    """Let layers know who holds the other parts of the sequences (and whether keys pass round a `ring`), and who the
    other experts; drop those. All turn queries and keys by the same cosines and sines."""
    turns: Turns | None = None
    for part in (part for layer in layers for part in layer.modules()):
        if isinstance(part, Attention | TokenEmbedding | Experts):
            part.context = context
        if isinstance(part, Attention):
            part.ring = ring
            part.turns = turns = turns or part.turns
        if isinstance(part, Experts):
            part.balance = balance
            if experts is not None:
                part.share_out(experts)


def empty_layer(model: Model, layer: int) -> nn.Module:
    """One layer without memory for its weights (on torch's meta device)."""
    require(0 <= layer < model.layers, "layer", layer, f"0..{model.layers - 1}")
    require_plain(model)
    kind = model.layer_kind(layer)
    with torch.device("meta"):
        if kind == "embedding":
            return ImageEmbedding(model) if model.family == "vit" else TokenEmbedding(model)
        return Head(model) if kind == "head" else Block(model, layer)


def build_layer(
    model: Model,
    layer: int,
    seed: int,
    device: torch.device | None = None,
    tp: TensorGroup | None = None,
    pretrained: Pretrained | None = None,
    experts: ExchangeGroup | None = None,
    *,
    by_tokens: bool = False,
    whole_experts: bool = False,
) -> nn.Module:
    """One layer with its first weights (fp32), or this rank's slices of it.

    Of pretrained ones a rank reads its own alone: its slices, and its experts where these are shared out.
    """
    module, device = empty_layer(model, layer), device or torch.device("cpu")
    if pretrained is not None:
        for part in module.modules():
            if isinstance(part, Experts) and experts is not None:
                part.share_out(experts)
        _read_layer(module, model, layer, device, tp, pretrained, whole_experts=whole_experts)
        if tp is not None:
            _join_group(module, model, tp, by_tokens=by_tokens, whole_experts=whole_experts)
        return module
    module.to_empty(device=device)
    _initialise(module, model, layer, seed)
    if tp is not None:
        shard_layer(module, model, layer, tp, by_tokens=by_tokens, whole_experts=whole_experts)
    return module


def _read_layer(
    module: nn.Module,
    model: Model,
    layer: int,
    device: torch.device,
    tp: TensorGroup | None,
    pretrained: Pretrained,
    *,
    whole_experts: bool,
) -> None:
    """Put what is read in place of parameters without memory."""
    place, size = (0, 1) if tp is None else (tp.place, tp.size)
    for name, parameter in list(module.named_parameters()):
        full = f"{layer_name(model, layer)}.{name}"
        of, over = (0, 1) if whole_experts and EXPERT in full else (place, size)
        found = pretrained.tensor(full, parameter.shape, shard_dim(model, full, over), of, over)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(found.to(device)))


def use_eight_bits(layers: Iterable[nn.Module], *, keeps: bool) -> None:
    """Let the products of blocks have 8 bits, but for routers; `keeps`: see `EightBits`."""
    for module in (part for layer in layers if isinstance(layer, Block) for part in layer.modules()):
        if isinstance(module, Linear) and fits(module.weight):
            module.eight_bits = EightBits(keeps=keeps)


def tune(layers: nn.ModuleDict, *, compiler: str | None, loss_chunk: int, apart: bool = False) -> None:
    """Let blocks be compiled, and the head's logits come in chunks; no number changes but by rounding.

    `apart`: other ranks hold parts of the blocks, or of what these compute. What lies between the messages is compiled
    then: norms and sums, positions, activations.
    """
    for module in layers.values():
        if isinstance(module, Block) and compiler is not None:
            if apart or isinstance(module.mlp, Experts):
                _compile_parts(module, compiler)
            else:
                module.compile(backend=compiler)
        if isinstance(module, Head):
            module.chunk = loss_chunk


def _compile_parts(block: Block, backend: str) -> None:
    """Compile what a block computes by itself, but for products. Experts get another number of tokens each time."""
    block.attention_norm.compile(backend=backend)
    names: list[tuple[nn.Module, str, bool | None]] = [(block, "add", None), (block.attention, "turn", None)]
    routed = isinstance(block.mlp, Experts)
    names += [(part, "activate", routed or None) for part in block.mlp.modules() if isinstance(part, Mlp)]
    for module, name, dynamic in names:
        setattr(module, name, torch.compile(getattr(module, name), backend=backend, dynamic=dynamic))


def parameter_shapes(model: Model) -> dict[str, torch.Size]:
    """Shape of every parameter of the full model, by its name; a tied head's copy is one."""
    kinds: dict[str, dict[str, torch.Size]] = {}
    shapes: dict[str, torch.Size] = {}
    for layer in range(model.layers):
        kind = model.layer_kind(layer)
        if kind not in kinds:
            kinds[kind] = {name: parameter.shape for name, parameter in empty_layer(model, layer).named_parameters()}
        shapes |= {f"{layer_name(model, layer)}.{name}": shape for name, shape in kinds[kind].items()}
    return shapes


def check_weights(folder: Path, model: Model) -> None:
    """Require a folder with the weights of a model; `InputError` says what is missing (see `Pretrained`)."""
    Pretrained(folder, model).check(parameter_shapes(model))


def build_layers(
    model: Model,
    layers: Iterable[int],
    seed: int,
    device: torch.device | None = None,
    tp: TensorGroup | None = None,
    pretrained: Pretrained | None = None,
    experts: ExchangeGroup | None = None,
    *,
    by_tokens: bool = False,
    whole_experts: bool = False,
) -> nn.ModuleDict:
    """Layers by their number (as text); a tied head that is here together with the embedding shares its weight."""
    built = nn.ModuleDict(
        {
            str(layer): build_layer(
                *(model, layer, seed, device, tp, pretrained, experts),
                by_tokens=by_tokens,
                whole_experts=whole_experts,
            )
            for layer in layers
        }
    )
    first, last = "0", str(model.layers - 1)
    if model.tied_embeddings and model.family != "vit" and first in built and last in built:
        head, embedding = built[last], built[first]
        assert isinstance(head, Head) and isinstance(embedding, TokenEmbedding)
        head.output.weight = embedding.tokens.weight
    return built
