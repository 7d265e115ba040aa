"""One transformer block: its linear layers, what its attention sees, its parameters.

What differs from block to block of a model - attention over everything or a window, dense or routed MLP - goes through
here: `polygon.domain.model.Model.block` makes the blocks, and parameters, FLOP, seconds and bytes are all computed from
the linear layers that a block lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from polygon.domain.errors import one_of, require, require_number
from polygon.domain.message import Message

WINDOW_BLOCK = 256
"""Queries that attention to a window takes at a time at least, where it goes in blocks (`runners.engine.windows`)."""
ATTENTIONS = ("full", "window", "chunk", "linear")
"""Over all tokens; over the last `window` of them; over those of the same chunk of `window`; by a running state."""

ROTARY_SCALINGS = ("linear", "llama3", "yarn")

MOST_SIZE = 2**31 - 1
"""Largest number of anything that a model's shape has; larger ones are slips."""


def require_size(value: object, name: str, *, at_most: int = MOST_SIZE, or_zero: bool = False) -> None:
    """Require a whole number of at least 1, or 0 where that says that there is none."""
    fits = isinstance(value, int) and not isinstance(value, bool)
    if or_zero:
        require(fits and value >= 0, name, value, "a whole number >= 0")  # type: ignore[operator]
    else:
        require(fits and value >= 1, name, value, "a whole number >= 1")  # type: ignore[operator]
    found = Message("found.number", value=value)
    require(value <= at_most, name, found, Message("expected.at_most", most=at_most))  # type: ignore[operator]


def shares_heads(heads: float, kv_heads: float, parts: int) -> bool:
    """Whether so many devices can share out heads, and keys and values alike: each then has some of all tokens."""
    return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary positions are stretched over sequences longer than those of a model's first training.

    References
    ----------
    linear: Chen et al., arXiv:2306.15595. llama3: Llama 3.1's reference code, `apply_scaling`. yarn: Peng et al.,
    arXiv:2309.00071.
    """

    kind: str
    """linear (all frequencies divided by the factor), llama3 (those of long waves, in between in part) or yarn."""
    factor: float
    low_frequency: float = 1.0
    """llama3: waves longer than `original_tokens` over this are stretched by the whole factor."""
    high_frequency: float = 4.0
    """llama3: waves shorter than `original_tokens` over this are left."""
    original_tokens: int = 0
    """llama3 and yarn: of the longest sequence of the first training."""
    fast: float = 32.0
    """yarn: frequencies that turn as often in `original_tokens` are left."""
    slow: float = 1.0
    """yarn: those that turn less often are stretched by the whole factor."""
    rounded: bool = True
    """yarn: whether the border between them lies at whole frequencies."""
    attention_factor: float = 1.0
    """yarn: queries and keys are multiplied by it."""

    def __post_init__(self) -> None:
        known = self.kind in ROTARY_SCALINGS
        require(known, "model.rope_scaling.kind", self.kind, one_of(str(self.kind), ROTARY_SCALINGS))
        for name in ("factor", "low_frequency", "high_frequency", "fast", "slow", "attention_factor"):
            require_number(getattr(self, name), f"model.rope_scaling.{name}", above=0)
        require_size(self.original_tokens, "model.rope_scaling.original_tokens", or_zero=self.kind == "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads come out of one short vector per token.

    References
    ----------
    DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    q_rank: int = 0
    """Numbers that queries are compressed to; 0: they are not."""
    kv_rank: int
    """Numbers that keys and values are compressed to."""
    rope_dim: int
    """Of `head_dim`, the part that carries positions: its key is shared by all heads."""

    def __post_init__(self) -> None:
        require_size(self.q_rank, "model.latent.q_rank", or_zero=True)
        require_size(self.kv_rank, "model.latent.kv_rank")
        require_size(self.rope_dim, "model.latent.rope_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """A gated delta rule: every value head keeps a key_dim x value_dim state in place of all past tokens.

    References
    ----------
    Gated Delta Networks, arXiv:2412.06464.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    """Tokens that a convolution over queries, keys and values reaches back."""

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv"):
            require_size(getattr(self, name), f"model.linear.{name}")

    @property
    def key_size(self) -> int:
        """Numbers of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A linear layer: the product of (tokens x inner) by (inner x columns)."""

    inner: int
    columns: int
    split: str = "columns"
    """What tensor parallelism divides: `columns`, `inner`, or nothing (empty: every device computes all of it)."""
    pairs: int = 0
    """Further columns, of keys and values; a device has those of one head at least."""
    least: int = 0
    """Keys and values of one head."""
    copies: int = 1
    """Layers of this shape."""
    used: int = 1
    """How many of them a token passes."""
    routed: bool = False
    """Whether a router deals tokens out to the copies, and expert parallelism the copies."""
    bias: int = 0
    """Parameters of the bias of one copy."""

    @property
    def parameters(self) -> int:
        """Of all copies, with biases."""
        return self.copies * (self.inner * (self.columns + self.pairs) + self.bias)

    @property
    def flops_per_token(self) -> int:
        """A multiplication and an addition for every weight that a token meets."""
        return 2 * self.used * self.inner * (self.columns + self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block's shape; `polygon.domain.model.Model` says what the fields mean."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Numbers of a head's value."""
    attention: str
    window: int
    """Tokens that a query sees at most; 0: all."""
    causal: bool
    cross: bool
    """Whether it attends to the output of an encoder as well."""
    latent: LatentAttention | None
    linear: LinearAttention | None
    """Of a block with linear attention; None of any other."""
    attention_gate: bool
    query_key_norm: str
    rotary: bool
    parallel: bool
    scaled: bool
    """Whether what attention and MLP give is scaled number by number."""
    norms: int
    norm_size: int
    """Parameters of one norm."""
    rms_norm: bool
    qkv_bias: bool
    linear_bias: bool
    gated_mlp: bool
    ffn_size: int
    experts: int
    """0 for a block with a dense MLP."""
    experts_per_token: int
    expert_ffn_size: int
    shared_experts: int
    expert_groups: int = 1
    groups_per_token: int = 1

    @property
    def query_size(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head_dim if self.linear is None else self.linear.key_size

    @property
    def key_size(self) -> int:
        """Numbers of all keys of a token."""
        return self.kv_heads * self.head_dim if self.linear is None else self.linear.key_size

    @property
    def value_size(self) -> int:
        """Numbers of all values of a token."""
        return self.kv_heads * self.value_dim if self.linear is None else self.linear.value_size

    @property
    def mixed_size(self) -> int:
        """Numbers that attention gives for a token."""
        return self.heads * self.value_dim if self.linear is None else self.linear.value_size

    @property
    def mixing_size(self) -> int:
        """Numbers of a token that attention keeps for its backward, of all heads: queries, keys, values and what comes
        out of them; before norms of queries and keys and before a gate they are kept as well, and so are linear
        attention's before its convolution."""
        heads = self.query_size + self.key_size
        size = heads + self.value_size + self.mixed_size
        if self.linear is not None:
            return 2 * size + heads
        if self.query_key_norm and self.latent is None:
            size += heads
        if self.attention_gate:
            size += 2 * self.mixed_size
        return size * 2 if self.cross else size

    @property
    def ranks(self) -> int:
        """Numbers of the compressed queries, keys and values of latent attention."""
        return self.latent.q_rank + self.latent.kv_rank if self.latent is not None else 0

    @property
    def latent_size(self) -> int:
        """Numbers of a token that latent attention keeps on every device: the ranks before and after their norms, and
        the key that all heads share."""
        return 2 * self.ranks + self.latent.rope_dim if self.latent is not None else 0

    @property
    def width(self) -> int:
        """Width of the MLP that a token passes, of all its experts together."""
        if self.experts:
            return self.expert_ffn_size * (self.experts_per_token + self.shared_experts)
        return self.ffn_size

    def keys_compared(self, seq_len: float) -> float:
        """Mean number of keys that a query is compared with where windows go in blocks of queries: those that the first
        and the last query of a block see between them."""
        if self.attention != "window" or not self.causal or self.window >= seq_len:
            return self.keys_seen(seq_len)
        queries = min(float(max(self.window, WINDOW_BLOCK)), seq_len)
        return queries + self.window * (1 - queries / seq_len)

    def keys_seen(self, seq_len: float) -> float:
        r"""Mean number of keys that a query is compared with.

        Causal: :math:`s / 2`, with a window :math:`w < s` it is :math:`w - w^2 / 2s`, with chunks :math:`w / 2`; half
        of the diagonal is left out. Not causal: all, or the window around the query.
        """
        if self.attention == "linear":
            return 0.0
        reach = min(seq_len, self.window) if self.window else seq_len
        if not self.causal:
            return reach
        if self.attention == "window":
            return reach - reach * reach / (2 * seq_len)
        return reach / 2

    def products(self) -> tuple[Product, ...]:
        """Its linear layers: those of attention, then those of the MLP or the experts, then the router."""
        return (*self._mixing_products(), *self._mlp_products())

    def _mixing_products(self) -> list[Product]:
        h, bias = self.hidden_size, self.hidden_size if self.linear_bias else 0
        if self.linear is not None:
            return [
                Product(inner=h, columns=2 * self.key_size + 2 * self.value_size),
                Product(inner=h, columns=2 * self.linear.value_heads),
                Product(inner=self.mixed_size, columns=h, split="inner"),
            ]
        out = Product(inner=self.mixed_size, columns=h, split="inner", bias=bias)
        if self.latent is not None:
            return [*self._latent_products(self.latent), out]
        q, pairs = self.query_size, self.key_size + self.value_size
        least = self.head_dim + self.value_dim
        qkv = Product(
            inner=h,
            columns=2 * q if self.attention_gate else q,
            pairs=pairs,
            least=least,
            bias=q + pairs if self.qkv_bias else 0,
        )
        if not self.cross:
            return [qkv, out]
        crossing = [Product(inner=h, columns=q), Product(inner=h, columns=0, pairs=pairs, least=least), out]
        return [qkv, out, *crossing]

    def _latent_products(self, latent: LatentAttention) -> list[Product]:
        """Down to the ranks (on every device alike), and up from them to the heads."""
        h, q = self.hidden_size, self.query_size
        queries = [Product(inner=h, columns=q)]
        if latent.q_rank:
            queries = [Product(inner=h, columns=latent.q_rank, split=""), Product(inner=latent.q_rank, columns=q)]
        columns = self.heads * (self.head_dim - latent.rope_dim + self.value_dim)
        return [
            *queries,
            Product(inner=h, columns=latent.kv_rank + latent.rope_dim, split=""),
            Product(inner=latent.kv_rank, columns=columns),
        ]

    def _mlp_products(self) -> list[Product]:
        h, up = self.hidden_size, 2 if self.gated_mlp else 1

        def mlp(width: int, copies: int, used: int, *, routed: bool = False) -> list[Product]:
            first, last = (up * width, h) if self.linear_bias else (0, 0)
            return [
                Product(inner=h, columns=up * width, copies=copies, used=used, routed=routed, bias=first),
                Product(inner=width, columns=h, split="inner", copies=copies, used=used, routed=routed, bias=last),
            ]

        if not self.experts:
            return mlp(self.ffn_size, 1, 1)
        return [
            *mlp(self.expert_ffn_size, self.experts, self.experts_per_token, routed=True),
            *(mlp(self.expert_ffn_size, self.shared_experts, self.shared_experts) if self.shared_experts else []),
            Product(inner=h, columns=self.experts, split=""),
        ]

    @property
    def expert_parameters(self) -> int:
        """Weights of the routed experts, biases left out: what expert parallelism divides."""
        return sum(p.parameters - p.copies * p.bias for p in self.products() if p.routed)

    @property
    def replicated_parameters(self) -> int:
        """What every device of a tensor-parallel group holds whole: norms, and the ways down to latent attention's
        ranks."""
        latent = [] if self.latent is None else self._latent_products(self.latent)
        down = sum(product.parameters for product in latent if not product.split)
        return self.norms * self.norm_size + self._inner_norms + down

    @property
    def _inner_norms(self) -> int:
        """Parameters of the norms inside attention."""
        of_heads = {"": 0, "head": 2 * self.head_dim, "width": self.query_size + self.key_size}[self.query_key_norm]
        return self.ranks + (of_heads if self.linear is None and self.latent is None else 0)

    @property
    def parameters(self) -> int:
        """Of linear layers, norms, and linear attention's convolution, decay and norm."""
        of_state = 0
        if self.linear is not None:
            convolved = self.query_size + self.key_size + self.value_size
            of_state = convolved * self.linear.conv + 2 * self.linear.value_heads + self.linear.value_dim
        linear = sum(product.parameters for product in self.products())
        scales = 2 * self.hidden_size if self.scaled else 0
        return linear + self.norms * self.norm_size + self._inner_norms + of_state + scales
