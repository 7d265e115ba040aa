"""The model to train and the batch it is trained with.

Layers are numbered as in a plan: 0 is the embedding, 1..L are the transformer blocks, L+1 is the final norm with
the output head and the loss. A stage holds layers [a, b) of these L + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from polygon.domain.errors import Phrase, require, require_number

MOST_BLOCKS, MOST_SIZE, MOST_SEQUENCES = 10_000, 2**31 - 1, 10_000_000
"""Largest that are read: of blocks, of any other size, of sequences per step; larger ones are slips."""

BYTES_PER_ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only language model or a vision transformer, by its shape."""

    name: str
    family: str = "gpt"
    """gpt (learned positions, LayerNorm, GELU), llama (rotary, RMSNorm, gated) or vit."""
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
    image_size: int = 0
    patch_size: int = 0
    channels: int = 3
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("blocks", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_size", "vocab_size", "max_seq_len"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"model.{name}", value, "a whole number >= 1")
            most = MOST_BLOCKS if name == "blocks" else MOST_SIZE
            require(value <= most, f"model.{name}", Phrase(f"{value:.3g}"), f"at most {most}")
        require(self.family in ("gpt", "llama", "vit"), "model.family", self.family, "gpt, llama or vit")
        require(self.heads % self.kv_heads == 0, "model.kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        require_number(self.norm_eps, "model.norm_eps", above=0)
        require_number(self.rope_theta, "model.rope_theta", above=0)
        if self.experts:
            require(
                0 < self.experts_per_token <= self.experts,
                "model.experts_per_token",
                self.experts_per_token,
                f"1..{self.experts}",
            )
            require(self.expert_ffn_size >= 1, "model.expert_ffn_size", self.expert_ffn_size, "a whole number >= 1")
        if self.family == "vit":
            require(
                self.patch_size >= 1 and self.image_size >= self.patch_size and self.image_size % self.patch_size == 0,
                "model.patch_size",
                self.patch_size,
                f"a divisor of image_size = {self.image_size}",
            )

    @property
    def layers(self) -> int:
        """Layers that a plan distributes: embedding, blocks, head."""
        return self.blocks + 2

    def layer_kind(self, layer: int) -> str:
        """`embedding`, `block`, `moe` or `head`."""
        if layer == 0:
            return "embedding"
        if layer == self.blocks + 1:
            return "head"
        return "moe" if self.experts and layer > self.dense_blocks else "block"

    def layer_parameters(self, layer: int) -> int:
        """Parameters that a stage holding this layer stores.

        A tied output head counts as its own copy when it is not on the embedding's stage; the plan's memory
        and reduction account for that, this number leaves the copy out (0 extra for a tied head).
        """
        h = self.hidden_size
        norm = h if self.rms_norm else 2 * h
        kind = self.layer_kind(layer)
        if kind == "embedding":
            if self.family == "vit":
                return self.channels * self.patch_size**2 * h + h + h + (self.tokens_per_image) * h
            return self.vocab_size * h + (self.max_seq_len * h if self.learned_positions else 0)
        if kind == "head":
            if self.family == "vit":
                return norm + h * self.vocab_size + self.vocab_size
            return norm + (0 if self.tied_embeddings else self.vocab_size * h)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = h * (q + 2 * kv) + q * h
        if self.qkv_bias:
            attention += q + 2 * kv
        if self.linear_bias:
            attention += h
        per_mlp = 3 if self.gated_mlp else 2

        def mlp(ffn: int) -> int:
            bias = ((per_mlp - 1) * ffn + h) if self.linear_bias else 0
            return per_mlp * h * ffn + bias

        if kind == "moe":
            ffn_parameters = (
                self.experts * mlp(self.expert_ffn_size)
                + self.shared_experts * mlp(self.expert_ffn_size)
                + h * self.experts
            )
        else:
            ffn_parameters = mlp(self.ffn_size)
        return attention + ffn_parameters + 2 * norm

    @property
    def tokens_per_image(self) -> int:
        """Tokens of one image: patches and the class token (vision transformers only)."""
        return (self.image_size // self.patch_size) ** 2 + 1 if self.patch_size else 0

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied head counted once."""
        return sum(self.layer_parameters(layer) for layer in range(self.layers))

    def head_weight_parameters(self) -> int:
        """Parameters of the output projection, tied or not (what its stage must hold)."""
        return self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's work and the number formats it is done in."""

    global_batch: int
    """Sequences (or images) per step."""
    seq_len: int
    precision: str = "bf16"
    """Of compute, parameters and activations."""
    gradient_precision: str = "fp32"
    """In which weight gradients are accumulated and reduced."""
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"batch.{name}", value, "a whole number >= 1")
            most = MOST_SEQUENCES if name == "global_batch" else MOST_SIZE
            require(value <= most, f"batch.{name}", Phrase(f"{value:.3g}"), f"at most {most}")
        for name in ("precision", "gradient_precision"):
            value = getattr(self, name)
            require(value in BYTES_PER_ELEMENT, f"batch.{name}", value, " or ".join(BYTES_PER_ELEMENT))
        require(self.optimizer in ("adamw", "sgd"), "batch.optimizer", self.optimizer, "adamw or sgd")

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.seq_len

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter or activation."""
        return BYTES_PER_ELEMENT[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one weight gradient as it is reduced."""
        return BYTES_PER_ELEMENT[self.gradient_precision]


def check_sequence(model: Model, batch: Batch) -> None:
    """Require that the batch's sequences fit the model's positions."""
    if model.family == "vit":
        require(
            batch.seq_len == model.tokens_per_image,
            "batch.seq_len",
            batch.seq_len,
            f"{model.tokens_per_image}, the tokens of one image",
        )
    elif model.learned_positions:
        require_number(batch.seq_len, "batch.seq_len", above=0)
        require(batch.seq_len <= model.max_seq_len, "batch.seq_len", batch.seq_len, f"at most {model.max_seq_len}")
