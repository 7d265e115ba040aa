"""Numbers of a Hugging Face `config.json`: by any of the keys that types use for one thing, and by their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from polygon.domain.block import require_size
from polygon.domain.errors import require
from polygon.domain.model import MOST_BLOCKS

SYNONYMS = {
    "blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
    "hidden_size": ("embed_dim", "hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn_size": ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff"),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_ffn_size": ("moe_intermediate_size",),
    "window": ("local_attention", "attention_chunk_size", "sliding_window", "window_size"),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "channels": ("num_channels", "in_chans", "in_channels"),
}
"""Our field: the keys that config.json may use for it."""

MAY_BE_NULL = ("kv_heads", "head_dim", "ffn_size", "experts", "experts_per_token", "expert_ffn_size", "window")


@dataclass(frozen=True)
class ConfigReader:
    """A config with the defaults of its type."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """By key or by our field (`polygon.formats.hugging_face_types`)."""

    def number(self, field: str) -> int | None:
        """A whole number by any of its keys; the type's default where it is left out, None for null."""
        for key in SYNONYMS[field]:
            if key in self.config:
                value = self.config[key]
                if value in (None, 0) and field == "window":
                    return None
                if value is None and field in MAY_BE_NULL:
                    return None
                if field in ("image_size", "patch_size") and is_list(value) and len(set(value)) == 1 and value[1:]:
                    value = value[0]  # of a height and a width that are equal
                return blocks_number(value, key) if field == "blocks" else whole_number(value, key)
        default = self.defaults.get(field)
        if field == "kv_heads" and any(key in self.config for key in SYNONYMS["heads"]) and default is not None:
            # A file that names its heads and leaves this out was written where both were equal or is older.
            heads = self.number("heads")
            return default if heads is not None and heads % default == 0 and heads >= default else heads
        return None if default is None else int(default)

    def required(self, field: str) -> int:
        """The same, which must be there."""
        value = self.number(field)
        require(value is not None, SYNONYMS[field][0], None, "a whole number >= 1")
        assert value is not None
        return value

    def whole(self, key: str) -> int:
        """A whole number by its key alone; 0 where it is null or left out and the type has no default."""
        value = self.get(key)
        return 0 if value in (None, 0) else whole_number(value, key)

    def get(self, key: str) -> Any:
        """The value of a key, or the type's default."""
        return self.config.get(key, self.defaults.get(key))

    def own(self, key: str) -> bool:
        """A switch that only types have whose defaults name it; else false."""
        return self.switch(key) if key in self.defaults else False

    def switch(self, key: str, usual: bool = False) -> bool:
        """A switch by its key, with its default where it is null or left out."""
        value = self.get(key)
        require(value is None or isinstance(value, bool), key, value, "true or false")
        return usual if value is None else bool(value)


def whole_number(value: Any, key: str) -> int:
    """A value that must be a whole number of at least 1."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(fits, key, value, "a whole number >= 1")
    return int(value)


def blocks_number(value: Any, key: str) -> int:
    """A number of blocks: patterns are lists of as many, so one that no model has is refused before they are made."""
    require_size(value, key, at_most=MOST_BLOCKS)
    return int(value)


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list of the config; a text is none."""
    return isinstance(value, list | tuple)


def mlp_ratio(reader: ConfigReader, usual: int) -> int:
    """Width of the MLP over that of the model."""
    for key in ("mlp_ratio", "expansion_ratio"):
        if reader.get(key) is not None:
            return whole_number(reader.get(key), key)
    return usual


def repeated(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest beginning of a list that gives all of it when it is repeated."""
    blocks = len(kinds)
    period = next(n for n in range(1, blocks + 1) if all(kinds[i] == kinds[i % n] for i in range(blocks)))
    return tuple(kinds[:period])
