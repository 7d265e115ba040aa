"""The model to train and the batch it is trained with.

Layers are numbered as in a plan: 0 is the embedding, 1..L are the transformer blocks, L+1 is the final norm with
the output head and the loss. A stage holds layers [a, b) of these L + 2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from numbers import Integral

from polygon.domain.block import (
    ATTENTIONS,
    MOST_SIZE,
    Block,
    LatentAttention,
    LinearAttention,
    RotaryScaling,
    require_size,
)
from polygon.domain.errors import one_of, require, require_number
from polygon.domain.message import Message
from polygon.domain.optimizer import OPTIMIZERS

MOST_BLOCKS, MOST_SEQUENCES = 10_000, 10_000_000
"""Largest that are read: of blocks, of sequences per step; larger ones are slips."""
FAMILIES = ("gpt", "llama", "vit", "other")
LAYER_KINDS = EMBEDDING, BLOCK, SPARSE, HEAD = "embedding", "block", "moe", "head"
"""How `Model.layer_kind` begins."""
SPECIAL = (
    "expert_every",
    "expert_groups",
    "groups_per_token",
    "norms",
    "norm_bias",
    "query_key_norm",
    "rotary",
    "parallel_blocks",
    "window",
    "attention_pattern",
    "attention_gate",
    "value_dim",
    "latent",
    "linear",
    "encoder_blocks",
    "head_transform",
    "predicted_ahead",
    "tower",
    "layer_scale",
    "classes",
)
"""Fields of a model that a plain GPT, Llama or vision transformer leaves at their defaults."""
OR_ZERO = (
    "window",
    "value_dim",
    "encoder_blocks",
    "predicted_ahead",
    "classes",
    "experts",
    "shared_experts",
    "dense_blocks",
    "image_size",
    "patch_size",
    "channels",
)
"""Sizes of which a model may have none."""

BYTES_PER_ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Of what a matrix product reads, by the precision of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer by its shape: a language model, an encoder, an encoder with a decoder, or a vision transformer."""

    name: str
    family: str = "gpt"
    """gpt (learned positions, LayerNorm, GELU), llama (rotary, RMSNorm, gated), vit, or other: planned and priced by
    its shape, and not run by polygon's engine."""
    blocks: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    """Tokens of a language model; classes of a vision transformer."""
    max_seq_len: int
    gated_mlp: bool = False
    tied_embeddings: bool = True
    learned_positions: bool = True
    rms_norm: bool = False
    norm_eps: float = 1e-6
    """Of RMSNorm, beside the mean square."""
    rope_theta: float = 10000.0
    """Base of the rotary positions of a model without learned ones. Neither number changes any cost."""
    rope_scaling: RotaryScaling | None = None
    """How rotary positions are stretched, where they are. Changes no cost."""
    linear_bias: bool = True
    qkv_bias: bool = True
    causal: bool = True
    experts: int = 0
    """Routed experts per block; 0 for a dense MLP."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_experts: int = 0
    dense_blocks: int = 0
    """Leading blocks of a mixture-of-experts model that keep a dense MLP."""
    expert_every: int = 1
    """After those, every so many blocks one has experts, the first of them to begin with."""
    expert_groups: int = 1
    """Equal groups of the experts; of how many a token's experts may be is `groups_per_token` (DeepSeek-V2, section
    2.1.4 of arXiv:2405.04434: with a group a node, a token goes to few nodes)."""
    groups_per_token: int = 1
    norms: int = 2
    """Norms of hidden_size in a block: 1 where attention and MLP share one, 4 with norms before and after both."""
    norm_bias: bool = True
    """Whether LayerNorm has one."""
    query_key_norm: str = ""
    """Norms of queries and keys: `head` (a weight for each number of a head), `width` (for each of all heads), none."""
    rotary: bool = True
    """Whether a model without learned positions rotates queries and keys; else scores have a bias, or nothing."""
    parallel_blocks: bool = False
    """Whether attention and MLP of a block stand side by side on one input and are added up together."""
    window: int = 0
    """Tokens that a query sees where attention is limited; 0: all. Without causality, half of them on either side."""
    attention_pattern: tuple[str, ...] = ()
    """Attention of the blocks, again and again: `full`, `window`, `chunk` (of as many tokens as the window) or
    `linear`; empty: all alike."""
    attention_gate: bool = False
    """Whether as many gates as queries multiply what attention gives."""
    value_dim: int = 0
    """Numbers of a head's value; 0: as many as head_dim."""
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    """What `linear` means in the pattern."""
    encoder_blocks: int = 0
    """Leading blocks of an encoder; those after them are the decoder's and attend to its output as well."""
    head_transform: bool = False
    """Whether a dense layer of hidden_size and a norm stand before the output projection (masked language models)."""
    predicted_ahead: int = 0
    """Further tokens that are predicted, each by a block of its own on the head's stage (DeepSeek-V3, section 2.2)."""
    tower: Model | None = None
    """Encoder of another modality that is computed with the embedding, once a sequence; its head is what joins them."""
    layer_scale: bool = False
    """Whether what attention and MLP give is scaled number by number before it is added (DINOv2)."""
    classes: int = 0
    """Classes of a whole text that the head tells apart by its first token, as BERT's does where it is fine-tuned: a
    dense layer of hidden_size, then one of so many columns, neither shared with the embedding. 0: it tells words."""
    image_size: int = 0
    patch_size: int = 0
    channels: int = 3
    source: str = ""
    notes: tuple[str, ...] = ()
    """What the shape does not say of the model that it stands for."""

    def __post_init__(self) -> None:
        for name in ("blocks", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_size", "vocab_size", "max_seq_len"):
            most = MOST_BLOCKS if name == "blocks" else MOST_SIZE
            require_size(getattr(self, name), f"model.{name}", at_most=most)
        for name in ("norms", "expert_every"):
            require_size(getattr(self, name), f"model.{name}")
        for name in OR_ZERO:
            require_size(getattr(self, name), f"model.{name}", or_zero=True)
        require(self.family in FAMILIES, "model.family", self.family, "gpt, llama, vit or other")
        require(
            self.heads % self.kv_heads == 0,
            "model.kv_heads",
            self.kv_heads,
            Message("expected.divisor_of", name="heads", value=self.heads),
        )
        require_number(self.norm_eps, "model.norm_eps", above=0)
        require_number(self.rope_theta, "model.rope_theta", above=0)
        self._check_experts()
        self._check_attention()
        if self.classes:
            words = self.tied_embeddings or self.predicted_ahead or self.head_transform or self.family == "vit"
            require(not words, "model.classes", self.classes, "0 of a model that tells words or images")
        if self.family == "vit":
            require(
                self.patch_size >= 1 and self.image_size >= self.patch_size and self.image_size % self.patch_size == 0,
                "model.patch_size",
                self.patch_size,
                Message("expected.divisor_of", name="image_size", value=self.image_size),
            )

    def _check_experts(self) -> None:
        if self.experts:
            require(
                0 < self.experts_per_token <= self.experts,
                "model.experts_per_token",
                self.experts_per_token,
                Message("expected.range", least=1, most=self.experts),
            )
            require_size(self.expert_ffn_size, "model.expert_ffn_size")
            require(
                self.expert_groups >= 1 and self.experts % self.expert_groups == 0,
                "model.expert_groups",
                self.expert_groups,
                Message("expected.divisor_of", name="experts", value=self.experts),
            )
            require(
                1 <= self.groups_per_token <= self.expert_groups,
                "model.groups_per_token",
                self.groups_per_token,
                Message("expected.range", least=1, most=self.expert_groups),
            )

    def _check_attention(self) -> None:
        for number, kind in enumerate(self.attention_pattern):
            place = f"model.attention_pattern[{number}]"
            require(kind in ATTENTIONS, place, kind, "full, window, chunk or linear")
            require(kind != "linear" or self.linear is not None, place, kind, "model.linear beside it")
            require(kind in ("full", "linear") or self.window > 0, place, kind, "model.window beside it")
        norm = self.query_key_norm
        require(norm in ("", "head", "width"), "model.query_key_norm", norm, "head, width or nothing")
        require(
            self.encoder_blocks < self.blocks,
            "model.encoder_blocks",
            self.encoder_blocks,
            Message("expected.range", least=0, most=self.blocks - 1),
        )
        if self.latent is not None:
            require(self.kv_heads == self.heads, "model.kv_heads", self.kv_heads, "heads, with latent attention")
            require(
                self.latent.rope_dim < self.head_dim,
                "model.latent.rope_dim",
                self.latent.rope_dim,
                Message("expected.range", least=1, most=self.head_dim - 1),
            )

    @property
    def layers(self) -> int:
        """Layers that a plan distributes: embedding, blocks, head."""
        return self.blocks + 2

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer is a block with experts."""
        past = layer - self.dense_blocks - 1
        return self.experts > 0 and past >= 0 and past % self.expert_every == 0 and layer <= self.blocks

    def attention_of(self, layer: int) -> str:
        """What the attention of a block sees: one of `ATTENTIONS`."""
        if self.attention_pattern:
            return self.attention_pattern[(layer - 1) % len(self.attention_pattern)]
        return "window" if self.window else "full"

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return _layer_kinds(self)

    def layer_kind(self, layer: int) -> str:
        """Name that all layers of the same shape share: `embedding`, `head`, `block`, or `moe` for a block with
        experts; behind the last two what tells blocks apart in a model where attention is not the same in all."""
        if layer == 0:
            return EMBEDDING
        if layer == self.blocks + 1:
            return HEAD
        kind = SPARSE if self.is_sparse(layer) else BLOCK
        if self.encoder_blocks:
            kind += ", encoder" if layer <= self.encoder_blocks else ", decoder"
        return f"{kind}, {self.attention_of(layer)}" if len(set(self.attention_pattern)) > 1 else kind

    def block(self, layer: int) -> Block:
        """The shape of a block."""
        sparse, attention = self.is_sparse(layer), self.attention_of(layer)
        encodes = layer <= self.encoder_blocks
        decodes = self.encoder_blocks > 0 and not encodes
        linear = self.linear if attention == "linear" else None
        return Block(
            hidden_size=self.hidden_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            attention=attention,
            window=self.window if attention in ("window", "chunk") else 0,
            causal=self.causal and not encodes,
            cross=decodes,
            latent=self.latent if linear is None else None,
            linear=linear,
            attention_gate=self.attention_gate and linear is None,
            query_key_norm=self.query_key_norm,
            rotary=self.rotary and not self.learned_positions and self.family != "vit" and linear is None,
            parallel=self.parallel_blocks,
            scaled=self.layer_scale,
            norms=self.norms + (1 if decodes else 0),
            norm_size=self.norm_size,
            rms_norm=self.rms_norm,
            qkv_bias=self.qkv_bias,
            linear_bias=self.linear_bias,
            gated_mlp=self.gated_mlp,
            ffn_size=self.ffn_size,
            experts=self.experts if sparse else 0,
            experts_per_token=self.experts_per_token,
            expert_ffn_size=self.expert_ffn_size,
            shared_experts=self.shared_experts,
            expert_groups=self.expert_groups,
            groups_per_token=self.groups_per_token,
        )

    @property
    def norm_size(self) -> int:
        """Parameters of a norm of hidden_size."""
        return self.hidden_size if self.rms_norm or not self.norm_bias else 2 * self.hidden_size

    def layer_parameters(self, layer: int) -> int:
        """Parameters that a stage holding this layer stores.

        A tied output head counts as its own copy when it is not on the embedding's stage; the plan's memory
        and reduction account for that, this number leaves the copy out (0 extra for a tied head).
        """
        return _layer_parameters(self)[layer]

    @property
    def tokens_per_image(self) -> int:
        """Tokens of one image: patches and the class token (vision transformers only)."""
        return (self.image_size // self.patch_size) ** 2 + 1 if self.patch_size else 0

    @property
    def tokens_per_input(self) -> int:
        """Tokens of one input of a tower: of an image, or of its longest text."""
        return self.tokens_per_image or self.max_seq_len

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied head counted once."""
        return sum(_layer_parameters(self))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it is not sent to."""
        idle = self.experts - self.experts_per_token
        blocks = [*range(1, self.blocks + 1), *[self.blocks] * self.predicted_ahead]
        unmet = sum(self.block(layer).expert_parameters * idle for layer in blocks if self.is_sparse(layer))
        return self.parameters - (unmet // self.experts if self.experts else 0)

    def special(self, seq_len: int) -> dict[str, object]:
        """What tells the model from a plain GPT, Llama or vision transformer on sequences of this length, with its
        value: its family, or fields of `SPECIAL`. A window that holds the whole sequence changes nothing."""
        found: dict[str, object] = {"family": self.family} if self.family == "other" else {}
        wide = ("window", "attention_pattern") if seq_len <= self.window and self.linear is None else ()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in SPECIAL and field.name not in wide and value != field.default:
                found[field.name] = value
        return found

    def beyond_engine(self, seq_len: int) -> dict[str, object]:
        """What of `special` our own engine has no layers for."""
        special = self.special(seq_len)
        if self.query_key_norm == "head":  # every rank applies it to its own heads
            del special["query_key_norm"]
        if self.causal and not {*self.attention_pattern} - {"full", "window"}:
            special = {name: value for name, value in special.items() if name not in ("window", "attention_pattern")}
        return special

    def plain(self) -> Model:
        """The same sizes as a plain GPT, Llama or vision transformer."""
        family = self.family if self.family != "other" else "llama" if self.rms_norm else "gpt"
        usual = {field.name: field.default for field in fields(self) if field.name in SPECIAL}
        return replace(self, family=family, **usual)  # type: ignore[arg-type]

    @property
    def answers_once(self) -> bool:
        """Whether the head tells one class of a whole sequence, which every device does for itself, not a word of each
        token."""
        return self.family == "vit" or self.classes > 0

    @property
    def answers(self) -> int:
        """Words or classes that the head chooses among."""
        return self.classes or self.vocab_size

    @property
    def tied_values(self) -> int:
        """Parameters of the weight that embedding and output head share; 0 if they share none."""
        return self.head_weight_parameters() if self.tied_embeddings and self.family != "vit" else 0

    def head_weight_parameters(self) -> int:
        """Parameters of the output projection, tied or not (what its stage must hold)."""
        return self.answers * self.hidden_size

    def prediction_parameters(self) -> int:
        """Parameters of the blocks that predict further tokens, with what joins each to the block before it: norms of
        both inputs and of the output, and a projection of the inputs together."""
        h = self.hidden_size
        return self.predicted_ahead * (self.block(self.blocks).parameters + 3 * self.norm_size + 2 * h * h)


@lru_cache(maxsize=256)
def _layer_kinds(model: Model) -> tuple[str, ...]:
    return tuple(map(model.layer_kind, range(model.layers)))


@lru_cache(maxsize=256)
def _layer_parameters(model: Model) -> tuple[int, ...]:
    """`Model.layer_parameters` of every layer."""
    h = model.hidden_size
    if model.family == "vit":
        embedding = model.channels * model.patch_size**2 * h + h + h + model.tokens_per_image * h
        head = model.norm_size + h * model.vocab_size + model.vocab_size
    else:
        embedding = model.vocab_size * h + (model.max_seq_len * h if model.learned_positions else 0)
        head = model.norm_size + (0 if model.tied_embeddings else model.answers * h)
        head += h * h + h + model.classes if model.classes else 0
    if model.tower is not None:
        embedding += model.tower.parameters
    if model.head_transform:
        head += h * h + h + model.norm_size
    by_kind: dict[str, int] = {}
    blocks = range(1, model.blocks + 1)
    for layer in blocks:
        kind = model.layer_kind(layer)
        if kind not in by_kind:
            by_kind[kind] = model.block(layer).parameters
    counts = [by_kind[model.layer_kind(layer)] for layer in blocks]
    return (embedding, *counts, head + model.prediction_parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's work and the number formats it is done in."""

    global_batch: int
    """Sequences (or images) per step."""
    seq_len: int
    precision: str = "bf16"
    """Of compute, parameters and activations; in fp8 the products of blocks alone read 8 bits, all else has 16."""
    gradient_precision: str = "fp32"
    """In which weight gradients are accumulated and reduced."""
    optimizer: str = "adamw"
    """A name of `polygon.domain.optimizer.OPTIMIZERS`."""
    state_precision: str = "fp32"
    """Of what the optimizer keeps: fp32, with a copy of 16-bit weights; or bf16, and the weights alone are updated."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len"):
            most = MOST_SEQUENCES if name == "global_batch" else MOST_SIZE
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):  # numpy's too, which JSON does not take
                object.__setattr__(self, name, int(value))
            require_size(getattr(self, name), f"batch.{name}", at_most=most)
        for name in ("precision", "gradient_precision"):
            value = getattr(self, name)
            formats = [one for one in BYTES_PER_ELEMENT if name == "precision" or one != "fp8"]
            require(value in formats, f"batch.{name}", value, " or ".join(formats))
        known = self.optimizer in OPTIMIZERS
        require(known, "batch.optimizer", self.optimizer, one_of(str(self.optimizer), OPTIMIZERS))
        widths = ("fp32", "bf16") if self.precision in ("bf16", "fp8") else ("fp32",)
        require(self.state_precision in widths, "batch.state_precision", self.state_precision, " or ".join(widths))

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.seq_len

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter or activation, as it is held and sent."""
        return max(2, BYTES_PER_ELEMENT[self.precision])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one weight gradient as it is reduced."""
        return BYTES_PER_ELEMENT[self.gradient_precision]

    @property
    def state_bytes(self) -> int:
        """Bytes of one number that the optimizer keeps."""
        return BYTES_PER_ELEMENT[self.state_precision]


def check_sequence(model: Model, batch: Batch) -> None:
    """Require that the batch's sequences fit the model's positions."""
    if model.family == "vit":
        require(
            batch.seq_len == model.tokens_per_image,
            "batch.seq_len",
            batch.seq_len,
            Message("expected.tokens_of_image", tokens=model.tokens_per_image),
        )
    elif model.learned_positions:
        require_number(batch.seq_len, "batch.seq_len", above=0)
        require(
            batch.seq_len <= model.max_seq_len,
            "batch.seq_len",
            batch.seq_len,
            Message("expected.at_most", most=model.max_seq_len),
        )
