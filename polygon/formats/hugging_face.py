"""Models from Hugging Face's `config.json`: what a `model_type` implies is in `polygon.formats.hugging_face_types`.

Faults are `InputError` with the key. What a shape cannot say is said in the model's `notes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polygon.domain.block import ROTARY_SCALINGS, LatentAttention, LinearAttention, RotaryScaling
from polygon.domain.errors import one_of, require, require_number
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.formats.hugging_face_config import (
    SYNONYMS,
    ConfigReader,
    blocks_number,
    is_list,
    mlp_ratio,
    repeated,
    whole_number,
)
from polygon.formats.hugging_face_towers import vision_tower
from polygon.formats.hugging_face_types import TYPES

_ATTENTIONS = {
    "full_attention": "full",
    "global": "full",
    "sliding_attention": "window",
    "local": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
}
"""Names of `layer_types` (and of GPT-Neo's `attention_types`): ours."""

VISION = "a vision tower is counted with the embedding, one image a sequence"
TEXT = "a text tower is counted with the embedding, one text an image"
NO_TOWER = "a tower that the config does not describe is left out"
ENCODER = "messages between decoder stages carry the encoder's output too, which is not counted"
AHEAD = "blocks that predict further tokens are counted with the head"
NARROW = "embeddings narrower than the model are counted as wide as it is"


def is_hugging_face(data: Any) -> bool:
    """Whether parsed JSON looks like a Hugging Face `config.json`."""
    return isinstance(data, Mapping) and any(key in data for key in ("model_type", "architectures", "text_config"))


def hugging_face_model(data: Mapping[str, Any], name: str) -> Model:
    """The model of a parsed `config.json`.

    Leaves out what changes no shape that polygon models: rotary positions that are scaled otherwise than
    `RotaryScaling` says or in models that the engine does not run, caps and multipliers, biases of
    single layers (GPT-J's head and MLP, routers), token types, attention sinks, gates of shared experts, OPT-350M's
    projection of its embeddings.

    Raises
    ------
    InputError
        For a `model_type` that is not supported, and for numbers that are not whole numbers >= 1.
    """
    whole = str(data.get("model_type", ""))
    called = str(data.get("_name_or_path") or name)
    config = _language_part(data)
    found = config.get("model_type", data.get("model_type"))
    model_type = str(found).removesuffix("_text").removesuffix("_text_model")
    # The one that is spelt most alike may be of quite another shape (mamba and llama): none is proposed.
    known = Message("expected.model_type", words=tuple(sorted(TYPES)))
    require(isinstance(found, str) and model_type in TYPES, "model_type", found, known)
    if whole == "siglip":
        return _image_and_text(data, called)
    model = _model(config, model_type, called)
    notes = [ENCODER] if model.encoder_blocks else []
    notes += [AHEAD] if model.predicted_ahead else []
    notes += [NARROW] if config.get("word_embed_proj_dim", model.hidden_size) != model.hidden_size else []
    tower = vision_tower(data, whole, model.hidden_size)
    if tower is not None:
        notes.append(VISION)
    elif data.get("vision_config") is not None or data.get("audio_config") is not None:
        notes.append(NO_TOWER)
    return replace(model, tower=tower, notes=tuple(notes))


def _language_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config (multi-modal models nest it)."""
    nested = data.get("text_config")
    if nested is None:
        return data
    require(isinstance(nested, Mapping), "text_config", type(nested).__name__, "a mapping")
    if "vision_config" in data and any(key in data for key in SYNONYMS["blocks"]):
        return data
    # Before transformers 4.50 some models kept this one key outside.
    outside = {"tie_word_embeddings": data["tie_word_embeddings"]} if "tie_word_embeddings" in data else {}
    inside = {} if "model_type" in nested else {"model_type": data.get("model_type")}
    return {**outside, **inside, **nested}


def _model(config: Mapping[str, Any], model_type: str, name: str) -> Model:
    """The model of a config without towers."""
    defaults, fixed = TYPES[model_type]
    reader = ConfigReader(config, defaults)
    hidden_size, heads = reader.required("hidden_size"), reader.required("heads")
    found = {field: reader.number(field) for field in SYNONYMS if field != "window"}
    fields: dict[str, Any] = {**fixed, **{key: value for key, value in found.items() if value is not None}}
    fields |= {
        "name": name,
        "head_dim": found["head_dim"] or hidden_size // heads,
        "kv_heads": found["kv_heads"] or heads,
        "ffn_size": found["ffn_size"] or mlp_ratio(reader, 4) * hidden_size,
        "tied_embeddings": reader.switch("tie_word_embeddings", bool(defaults.get("tied", False))),
        "predicted_ahead": ConfigReader(config, {}).whole("num_nextn_predict_layers"),
        "source": "Hugging Face config.json",
    }
    fields |= _floats(config)
    if fixed["family"] == "llama":
        fields |= _rotary_scaling(reader)
    fields |= _switches(reader, fields)
    if model_type == "falcon":
        fields |= _falcon(reader, heads)
    if model_type in ("t5", "mt5"):
        fields |= _encoder_and_decoder(reader, fields["blocks"])
    if fields.get("experts"):
        fields |= _experts(reader, fields)
    if reader.get("kv_lora_rank") is not None:
        fields |= _latent(reader, heads)
    fields |= _attention(reader, fields["blocks"], fields["max_seq_len"]) if "max_seq_len" in fields else {}
    if fixed["family"] == "vit":
        fields |= _images(reader, fields)
    return Model(**fields)


def _floats(config: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of norms and rotary positions, where the config has them."""
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping):  # of windows and of the others apart
        nested = nested.get("full_attention", nested)
    rope = nested if isinstance(nested, Mapping) and "rope_theta" in nested else config
    theta = "global_rope_theta" if "global_rope_theta" in rope else "rope_theta"
    found = {"norm_eps": (config, "rms_norm_eps"), "rope_theta": (rope, theta)}
    for where, key in found.values():
        if where.get(key) is not None:
            require_number(where[key], key, above=0)
    return {field: float(where[key]) for field, (where, key) in found.items() if where.get(key) is not None}


def rotary_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of rotary positions beside their base: `rope_parameters`, or `rope_scaling` of older ones."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, Mapping) and found:
            return found
    return {}


def rotary_kind(settings: Mapping[str, Any]) -> str:
    """How they are scaled, in the config's words; `default`: not at all."""
    return str(settings.get("rope_type", settings.get("type", "default")))


def _rotary_scaling(reader: ConfigReader) -> dict[str, Any]:
    """Scaled rotary positions of a kind that polygon's engine computes."""
    settings = rotary_settings(reader.config)
    kind = rotary_kind(settings)
    if kind not in ROTARY_SCALINGS or settings.get("mrope_section") is not None:
        return {}
    longest = reader.whole("max_position_embeddings")
    given: dict[str, Any] = {}
    for field, key in _SCALING.items():
        if settings.get(key) is not None:
            require_number(settings[key], key, above=0)
            given[field] = float(settings[key])
    if kind != "linear":
        given["original_tokens"] = ConfigReader(settings, {}).whole("original_max_position_embeddings") or longest
    if kind == "yarn":
        given.setdefault("factor", longest / max(1, given["original_tokens"]))
        given.setdefault("attention_factor", _yarn_attention(settings, given["factor"]))
        given["rounded"] = bool(settings.get("truncate", True))
    require("factor" in given, "factor", None, "a number > 0")
    return {"rope_scaling": RotaryScaling(kind=kind, **given)}


_SCALING = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention_factor": "attention_factor",
}
"""Numbers of `RotaryScaling`: their names."""


def scaled_config(scaling: RotaryScaling | None) -> dict[str, Any]:
    """What `rope_parameters` says beside the base: the inverse of what the reader makes of it."""
    if scaling is None:
        return {"rope_type": "default"}
    used = {
        "linear": ("factor",),
        "llama3": ("factor", "low_frequency", "high_frequency"),
        "yarn": ("factor", "fast", "slow", "attention_factor"),
    }[scaling.kind]
    found: dict[str, Any] = {"rope_type": scaling.kind} | {_SCALING[name]: getattr(scaling, name) for name in used}
    if scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original_tokens
    if scaling.kind == "yarn":
        found["truncate"] = scaling.rounded
    return found


def _yarn_attention(settings: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies queries and keys by where the config does not say it (arXiv:2309.00071, equation 22)."""
    grown = math.log(factor) if factor > 1 else 0.0
    for_values, for_all = settings.get("mscale"), settings.get("mscale_all_dim")
    if not for_values or not for_all:
        return 0.1 * grown + 1
    require_number(for_values, "mscale", above=0)
    require_number(for_all, "mscale_all_dim", above=0)
    return (0.1 * float(for_values) * grown + 1) / (0.1 * float(for_all) * grown + 1)


def _switches(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Biases, norms and positions that keys of some types switch."""
    config = reader.config
    switched: dict[str, Any] = {}
    if reader.get("attention_bias") is not None:
        switched["qkv_bias"] = reader.switch("attention_bias")
    if not reader.switch("enable_bias", usual=True) or not reader.switch("use_bias", usual=True):
        switched["qkv_bias"] = switched["linear_bias"] = False
    if reader.own("bias"):
        switched["qkv_bias"] = True
    if "no_bias" in reader.defaults and not reader.own("no_bias"):
        switched["qkv_bias"] = switched["linear_bias"] = switched["norm_bias"] = True
    elif reader.own("no_bias"):
        switched["norm_bias"] = False
    if "parallel_blocks" not in fields and reader.own("use_parallel_residual"):
        switched["parallel_blocks"] = True
    if reader.own("use_qk_norm"):
        switched["query_key_norm"] = reader.defaults.get("qk_norm_over", "width")
    if reader.own("qk_layernorm"):
        switched["query_key_norm"] = "head"
    attention = config.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("alibi") is False:
        switched["learned_positions"] = True
    return switched


def _falcon(reader: ConfigReader, heads: int) -> dict[str, Any]:
    """Falcon: one pair of heads for all unless it is the newer architecture, one norm where blocks are parallel."""
    newer, parallel, bias = reader.own("new_decoder_architecture"), reader.own("parallel_attn"), reader.own("bias")
    norms = 2 if newer or not parallel else 1
    return {
        "kv_heads": (reader.number("kv_heads") or heads) if newer else 1 if reader.own("multi_query") else heads,
        "parallel_blocks": newer or parallel,
        "norms": whole_number(reader.config.get("num_ln_in_parallel_attn") or norms, "num_ln_in_parallel_attn"),
        "qkv_bias": bias,
        "linear_bias": bias,
        "rotary": not reader.own("alibi"),
    }


def _encoder_and_decoder(reader: ConfigReader, encoder_blocks: int) -> dict[str, Any]:
    """T5: as many blocks in the decoder as in the encoder unless it says so, and an MLP that may be gated."""
    decoder_blocks = blocks_number(reader.whole("num_decoder_layers") or encoder_blocks, "num_decoder_layers")
    return {
        "blocks": encoder_blocks + decoder_blocks,
        "encoder_blocks": encoder_blocks,
        "gated_mlp": str(reader.get("feed_forward_proj")).startswith("gated-"),
    }


def _experts(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Mixture of experts: sizes, shared experts, which blocks have them."""
    expert_ffn_size = fields.get("expert_ffn_size") or fields["ffn_size"]
    if "intermediate_size_mlp" in reader.config:  # Llama 4 has two widths, and the usual key is the experts'
        expert_ffn_size = whole_number(reader.config.get("intermediate_size"), "intermediate_size")
    shared_size = reader.whole("shared_expert_intermediate_size")
    key = "shared_expert_intermediate_size"
    require(shared_size % expert_ffn_size == 0, key, shared_size, "a multiple of experts'")
    sparse = _sparse(reader, fields["blocks"])
    require(bool(sparse), "mlp_only_layers", reader.config.get("mlp_only_layers"), "at least one layer with experts")
    step = sparse[1] - sparse[0] if len(sparse) > 1 else fields["blocks"]
    even = sparse == list(range(sparse[0], fields["blocks"], step))
    require(even, "mlp_only_layers", sparse, "layers with experts evenly apart, to the last")
    groups = reader.whole("n_group") or 1
    return {
        "experts_per_token": reader.required("experts_per_token"),
        "expert_ffn_size": expert_ffn_size,
        "shared_experts": reader.whole("n_shared_experts") or shared_size // expert_ffn_size,
        "expert_groups": groups,
        "groups_per_token": reader.whole("topk_group") if groups > 1 else 1,
        "dense_blocks": sparse[0],
        "expert_every": step if len(sparse) > 1 else 1 if sparse[0] == fields["blocks"] - 1 else step,
    }


def _sparse(reader: ConfigReader, blocks: int) -> list[int]:
    """Numbers of the blocks that have experts, from 0."""
    listed = reader.config.get("moe_layers")
    if listed and is_list(listed):
        return sorted({whole_number(number + 1, "moe_layers") - 1 for number in listed if isinstance(number, int)})
    first, often = reader.whole("first_k_dense_replace"), reader.whole("moe_layer_freq") or 1
    step = reader.whole("decoder_sparse_step") or reader.whole("interleave_moe_layer_step") or 1
    dense = reader.config.get("mlp_only_layers") or []
    require(is_list(dense), "mlp_only_layers", dense, "a list")
    return [i for i in range(first, blocks) if i % often == 0 and (i + 1) % step == 0 and i not in dense]


def _latent(reader: ConfigReader, heads: int) -> dict[str, Any]:
    """Latent attention: the ranks, and heads with a part for positions."""
    rope_dim, rest = reader.whole("qk_rope_head_dim"), reader.whole("qk_nope_head_dim")
    return {
        "kv_heads": heads,
        "head_dim": rope_dim + rest,
        "value_dim": whole_number(reader.get("v_head_dim"), "v_head_dim"),
        "latent": LatentAttention(
            q_rank=reader.whole("q_lora_rank"), kv_rank=reader.whole("kv_lora_rank"), rope_dim=rope_dim
        ),
    }


def _attention(reader: ConfigReader, blocks: int, max_seq_len: int) -> dict[str, Any]:
    """Windows and linear attention, block by block."""
    window = reader.number("window") or 0
    if not reader.switch("use_sliding_window", usual=True):
        window = 0
    window = window if window < max_seq_len else 0
    kinds = _attention_kinds(reader, blocks) or ["window"] * blocks
    if not window:
        kinds = ["full" if kind in ("window", "chunk") else kind for kind in kinds]
    found: dict[str, Any] = {"window": window if {"window", "chunk"} & set(kinds) else 0}
    pattern = repeated(kinds)
    if pattern not in (("full",), ("window",)):
        found["attention_pattern"] = pattern
    if "linear" in kinds:
        found["linear"] = LinearAttention(
            key_heads=reader.whole("linear_num_key_heads"),
            value_heads=reader.whole("linear_num_value_heads"),
            key_dim=reader.whole("linear_key_head_dim"),
            value_dim=reader.whole("linear_value_head_dim"),
            conv=reader.whole("linear_conv_kernel_dim"),
        )
    return found


def _attention_kinds(reader: ConfigReader, blocks: int) -> list[str]:
    """What the config says of the attention of every block; nothing where it says nothing."""
    kind = reader.config.get("model_type")
    if kind == "qwen3_moe":
        return []  # transformers' Qwen3MoeModel looks at neither layer_types nor max_window_layers
    listed = reader.config.get("layer_types") or _gpt_neo_types(reader.config)
    if listed:
        require(is_list(listed) and len(listed) >= blocks, "layer_types", listed, "one a layer")
        for kind in listed[:blocks]:
            require(isinstance(kind, str) and kind in _ATTENTIONS, "layer_types", kind, one_of(str(kind), _ATTENTIONS))
        return [_ATTENTIONS[kind] for kind in listed[:blocks]]
    if full := reader.whole("sliding_window_pattern") if "sliding_window_pattern" in reader.defaults else 0:
        return ["full" if (i + 1) % full == 0 else "window" for i in range(blocks)]
    if full := reader.whole("full_attention_interval"):
        return ["full" if (i + 1) % full == 0 else "linear" for i in range(blocks)]
    if full := reader.whole("global_attn_every_n_layers"):
        return ["full" if i % full == 0 else "window" for i in range(blocks)]
    usual = [_ATTENTIONS[kind] for kind in reader.defaults.get("layer_types", ())]
    turned = reader.config.get("no_rope_layers")
    if "chunk" in usual and is_list(turned) and len(turned) >= blocks:
        return ["chunk" if turns else "full" for turns in turned[:blocks]]
    if usual:
        return [usual[i % len(usual)] for i in range(blocks)]
    first = reader.whole("max_window_layers")
    if kind == "qwen2_moe":  # Qwen2MoeConfig
        return ["window" if i % 2 == 0 and i < first else "full" for i in range(blocks)]
    return ["window" if i >= first else "full" for i in range(blocks)] if first else []


def _gpt_neo_types(config: Mapping[str, Any]) -> list[Any]:
    """`attention_types` such as [[["global", "local"], 12]], written out."""
    listed: list[Any] = []
    entries = config.get("attention_types") or []
    require(is_list(entries), "attention_types", entries, "a list")
    for entry in entries:
        pair = is_list(entry) and len(entry) == 2 and is_list(entry[0])
        require(pair and isinstance(entry[1], int), "attention_types", entry, "pairs of a list of types and a number")
        listed += list(entry[0]) * min(entry[1], 10_000)
    return listed


def _images(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Vision transformer: classes instead of a vocabulary, patches instead of positions."""
    config = reader.config
    labels = config.get("id2label")
    classes = config.get("num_labels") or (len(labels) if isinstance(labels, Mapping) else 2)
    found: dict[str, Any] = {
        "vocab_size": classes,
        "max_seq_len": (fields["image_size"] // fields["patch_size"]) ** 2 + 1,
        "tied_embeddings": False,
        "qkv_bias": reader.switch("qkv_bias", usual=True),
    }
    if reader.switch("use_swiglu_ffn"):  # DINOv2's gated MLP has two thirds of the width, in whole eights
        found |= {"gated_mlp": True, "ffn_size": (fields["ffn_size"] * 2 // 3 + 7) // 8 * 8}
    return found


def _image_and_text(data: Mapping[str, Any], name: str) -> Model:
    """SigLIP: the image's encoder, with the text's as a tower beside it."""
    vision = vision_tower(data, "siglip", 0)
    assert vision is not None
    text = _model(data.get("text_config") or {}, "siglip", f"{name} text")
    return replace(vision, name=name, tower=text, notes=(TEXT,))
