"""How transformers names, cuts and describes the language models that the engine's layers can be.

One table serves reading (`runners.engine.pretrained`) and writing (`runners.export_hf`). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polygon.domain.block import ROTARY_SCALINGS
from polygon.domain.errors import InputError, one_of, require
from polygon.domain.model import Model
from polygon.formats.hugging_face import rotary_kind, rotary_settings
from polygon.formats.hugging_face_export import kind_of


@dataclass(frozen=True)
class Place:
    """Where a file keeps one of our parameters."""

    name: str
    """Of the tensor."""
    first: int = 0
    rows: int = 0
    """Of the tensor's `rows` output rows our parameter has those from `first` on; 0: it is all of the tensor."""
    transposed: bool = False
    """Whether rows are inputs there (GPT-2's `Conv1D`)."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Names of a kind of model, ours to theirs."""

    kinds: tuple[str, ...]
    """Values of `model_type` whose files have these names."""
    top: str
    """Before every name but the output's; files of a model without its head leave it out."""
    outside: Mapping[str, str]
    blocks: str
    """Between `top` and the number of a block."""
    inside: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that are several of our parts, one below the other."""
    transposed: bool = False
    """Whether the matrices of blocks are."""
    expert: str = ""
    """Before the number of an expert."""
    expert_parts: Mapping[str, str] = field(default_factory=dict)
    ignored: str = r"(?!)"
    """Pattern of what files may hold beside weights."""

    def place(self, name: str, model: Model) -> Place:
        """Where a parameter of a model is, by its name in the full model (`blocks.3.attention.query.weight`).

        Raises
        ------
        InputError
            Models of this kind have no such parameter.
        """
        if name in self.outside:
            return Place(self.outside[name])
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if found is None:
            raise InputError(f"weights: found a model with {name}, which {self.kinds[0]} does not have")
        block, part, kind = found.groups()
        prefix = f"{self.top}{self.blocks}{block}."
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)", part)
        if expert and self.expert:
            return Place(f"{prefix}{self.expert}{expert[1]}.{self.expert_parts[expert[2]]}.{kind}")
        turned = self.transposed and kind == "weight" and not part.endswith("norm")
        for theirs, parts in self.fused.items():
            if part in parts:
                rows, place = [_rows(one, model) for one in parts], parts.index(part)
                return Place(f"{prefix}{theirs}.{kind}", sum(rows[:place]), sum(rows), transposed=turned)
        if part not in self.inside:
            raise InputError(f"weights: found a model with {part}, which {self.kinds[0]} does not have")
        return Place(f"{prefix}{self.inside[part]}.{kind}", transposed=turned)


def _rows(part: str, model: Model) -> int:
    """Outputs of a part of a block that some kind of model fuses with others."""
    heads = {"attention.query": model.heads, "attention.key": model.kv_heads, "attention.value": model.kv_heads}
    return heads[part] * model.head_dim if part in heads else model.ffn_size


_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA: dict[str, Any] = {
    "top": "model.",
    "blocks": "layers.",
    "outside": {
        "embedding.tokens.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.output.weight": "lm_head.weight",
    },
    "ignored": r".*\.rotary_emb\.inv_freq",
}
LLAMA = Architecture(kinds=("llama", "mistral", "qwen2", "qwen3"), inside=_LLAMA_BLOCK, **_LLAMA)
_QKV = ("attention.query", "attention.key", "attention.value")
PHI3 = Architecture(
    kinds=("phi3",),
    inside={name: _LLAMA_BLOCK[name] for name in ("attention_norm", "mlp_norm", "attention.output", "mlp.down")},
    fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": ("mlp.gate", "mlp.up")},
    **_LLAMA,
)
MIXTRAL = Architecture(
    kinds=("mixtral",),
    inside=_LLAMA_BLOCK | {"mlp.router": "block_sparse_moe.gate"},
    expert="block_sparse_moe.experts.",
    expert_parts={"gate": "w1", "up": "w3", "down": "w2"},
    **_LLAMA,
)
QWEN3_MOE = Architecture(
    kinds=("qwen3_moe",),
    inside=_LLAMA_BLOCK | {"mlp.router": "mlp.gate"},
    expert="mlp.experts.",
    expert_parts={"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    **_LLAMA,
)
GPT2 = Architecture(
    kinds=("gpt2",),
    top="transformer.",
    blocks="h.",
    outside={
        "embedding.tokens.weight": "transformer.wte.weight",
        "embedding.positions.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.output.weight": "lm_head.weight",
    },
    inside={
        "attention_norm": "ln_1",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    fused={"attn.c_attn": _QKV},
    transposed=True,
    ignored=r".*\.attn\.(masked_)?bias",  # older files keep the causal mask
)
ARCHITECTURES = (LLAMA, PHI3, MIXTRAL, QWEN3_MOE, GPT2)
KINDS = {kind: architecture for architecture in ARCHITECTURES for kind in architecture.kinds}


def architecture_of(model: Model, kind: str = "") -> Architecture:
    """Names of the models that are computed as this one is; raises as `kind_of`.

    Parameters
    ----------
    kind : str
        The `model_type` of files that are there; those of another kind than the model's raise `InputError`, too.
    """
    if kind:  # said first: what the files are tells more than how polygon plans them
        require(kind in KINDS, "weights: model_type", kind, one_of(kind, KINDS))
    own = kind_of(model)
    if not kind:
        return KINDS[own]
    alike = (*KINDS[own].kinds, *(PHI3.kinds if own in ("llama", "mistral") else ()))
    require(kind in alike, "weights: model_type", kind, f"{own!r}, as the model is computed")
    return KINDS[kind]


def check_config(config: Mapping[str, Any], model: Model, where: str) -> None:
    """Require a `config.json` that asks for nothing that the engine's layers do not compute.

    Parameters
    ----------
    config : mapping
        Parsed.
    model : Model
        The same model as polygon sees it.
    where : str
        The file, for messages.

    Raises
    ------
    InputError
        The first such thing.
    """
    kind = str(config.get("model_type"))
    architecture_of(model, kind)
    for key, (default, expected) in _SWITCHES["gpt2" if kind == "gpt2" else "llama"].items():
        require(config.get(key, default) == expected, f"{where}: {key}", config.get(key, default), repr(expected))
    if kind == "qwen3_moe":
        found = config.get("norm_topk_prob", False)
        require(bool(found), f"{where}: norm_topk_prob", found, "true: weights of the chosen experts that sum to 1")
    scaled = rotary_kind(rotary_settings(config))
    known = ("default", *ROTARY_SCALINGS)
    require(scaled in known, f"{where}: rotary positions", scaled, one_of(scaled, known))
    turned = rotary_settings(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    require(turned == 1.0, f"{where}: partial_rotary_factor", turned, "1: all of a head is rotated")


_SWITCHES: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "llama": {"hidden_act": ("silu", "silu")},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_new"),
        "layer_norm_epsilon": (1e-5, 1e-5),
        "scale_attn_weights": (True, True),
        "scale_attn_by_inverse_layer_idx": (False, False),
        "add_cross_attention": (False, False),
    },
}
"""Settings: what a file means that leaves it out (transformers 5), and what the engine's layers compute."""
