"""What a `model_type` of Hugging Face implies: the values of keys that a config leaves out, and its fixed features.

Values as of transformers 5.23's configuration classes (tests hold the parameters of all of them against that library);
`internlm2` and `kimi_k2` are those of the code beside their checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Type(NamedTuple):
    """One `model_type`."""

    defaults: Mapping[str, Any]
    """By a key of config.json or by a field of `polygon.domain.model.Model`."""
    fixed: Mapping[str, Any]
    """Fields of the model that no key decides."""


_LLAMA: dict[str, Any] = {
    "family": "llama",
    "gated_mlp": True,
    "rms_norm": True,
    "learned_positions": False,
    "linear_bias": False,
    "qkv_bias": False,
}
_OTHER_LLAMA = {**_LLAMA, "family": "other"}
"""Shaped like Llama, with something that the engine's blocks do not do."""
_GPT: dict[str, Any] = {"family": "gpt"}
_OTHER_GPT = {"family": "other", "learned_positions": False}
_ENCODER = {"family": "other", "causal": False, "head_transform": True}
_GEMMA = {**_OTHER_LLAMA, "norms": 4}
_QWEN_EXPERTS = {**_OTHER_LLAMA, "query_key_norm": "head"}

_BASE = {"blocks": 32, "hidden_size": 4096, "heads": 32}
_QWEN_WINDOW = {"use_sliding_window": False, "window": 4096, "max_window_layers": 28}
_QWEN = {**_BASE, "kv_heads": 32, "ffn_size": 22016, "vocab_size": 151936, "max_seq_len": 32768, **_QWEN_WINDOW}
_QWEN_VL = {
    "blocks": 80,
    "hidden_size": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn_size": 29568,
    "vocab_size": 152064,
    "max_seq_len": 32768,
    **_QWEN_WINDOW,
    "max_window_layers": 80,
}
_QWEN_MOE = {"blocks": 24, "hidden_size": 2048, "vocab_size": 151936, "max_seq_len": 32768, **_QWEN_WINDOW}
_MISTRAL = {**_BASE, "kv_heads": 8, "ffn_size": 14336, "vocab_size": 32000, "max_seq_len": 131072}
_LLAMA_SIZES = {**_BASE, "ffn_size": 11008, "vocab_size": 32000, "max_seq_len": 2048}
_SMALL = {"blocks": 12, "hidden_size": 768, "heads": 12}
_IMAGES = {**_SMALL, "image_size": 224, "channels": 3}
_GEMMA_SIZES = {
    "blocks": 26,
    "hidden_size": 2304,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 256,
    "ffn_size": 9216,
    "window": 4096,
    "tied": True,
}
_DEEPSEEK_SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_DEEPSEEK_V3 = Type(
    {"blocks": 61, "hidden_size": 7168, "heads": 128, "ffn_size": 18432, "vocab_size": 129280, "max_seq_len": 4096}
    | {"experts": 256, "experts_per_token": 8, "expert_ffn_size": 2048, "n_shared_experts": 1}
    | {"first_k_dense_replace": 3, "v_head_dim": 128, "n_group": 8, "topk_group": 4, **_DEEPSEEK_SIZES},
    _OTHER_LLAMA,
)
_LOCAL, _FULL, _LINEAR, _CHUNK = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"

TYPES: Mapping[str, Type] = {
    "gpt2": Type({**_SMALL, "vocab_size": 50257, "max_seq_len": 1024, "tied": True}, _GPT),
    "opt": Type({**_SMALL, "ffn_size": 3072, "vocab_size": 50272, "max_seq_len": 2048, "tied": True}, _GPT),
    "gpt_neo": Type(
        {"blocks": 24, "hidden_size": 2048, "heads": 16, "vocab_size": 50257, "max_seq_len": 2048, "tied": True}
        | {"window": 256, "layer_types": (_FULL, _LOCAL)},
        {**_GPT, "qkv_bias": False},
    ),
    "gpt_neox": Type(
        {"blocks": 44, "hidden_size": 6144, "heads": 64, "ffn_size": 24576, "vocab_size": 50432, "max_seq_len": 2048}
        | {"use_parallel_residual": True},
        _OTHER_GPT,
    ),
    "gptj": Type(
        {"blocks": 28, "hidden_size": 4096, "heads": 16, "vocab_size": 50400, "max_seq_len": 2048},
        {**_OTHER_GPT, "qkv_bias": False, "parallel_blocks": True, "norms": 1},
    ),
    "phi": Type(
        {"blocks": 24, "hidden_size": 2048, "heads": 32, "ffn_size": 8192, "vocab_size": 51200, "max_seq_len": 2048}
        | {"qk_layernorm": False},
        {**_OTHER_GPT, "parallel_blocks": True, "norms": 1},
    ),
    "starcoder2": Type(
        {"blocks": 30, "hidden_size": 3072, "heads": 24, "kv_heads": 2, "ffn_size": 12288, "vocab_size": 49152}
        | {"max_seq_len": 4096, "tied": True},
        {**_GPT, "learned_positions": False},
    ),
    "falcon": Type(
        {"blocks": 32, "hidden_size": 4544, "heads": 71, "vocab_size": 65024, "max_seq_len": 2048, "tied": True}
        | {"multi_query": True, "parallel_attn": True, "bias": False}
        | {"new_decoder_architecture": False, "alibi": False},
        _OTHER_GPT,
    ),
    "bloom": Type(
        {"blocks": 2, "hidden_size": 64, "heads": 8, "vocab_size": 250880, "max_seq_len": 2048, "tied": True},
        {**_OTHER_GPT, "rotary": False},
    ),
    "mpt": Type(
        {"blocks": 24, "hidden_size": 2048, "heads": 16, "vocab_size": 50368, "max_seq_len": 2048, "tied": True}
        | {"expansion_ratio": 4, "no_bias": True},
        {**_OTHER_GPT, "rotary": False, "qkv_bias": False, "linear_bias": False},
    ),
    "cohere": Type(
        {"blocks": 40, "hidden_size": 8192, "heads": 64, "kv_heads": 64, "ffn_size": 22528, "vocab_size": 256000}
        | {"max_seq_len": 8192, "tied": True, "use_qk_norm": False},
        {**_OTHER_LLAMA, "rms_norm": False, "norm_bias": False, "parallel_blocks": True, "norms": 1},
    ),
    "cohere2": Type(
        {"blocks": 40, "hidden_size": 8192, "heads": 64, "kv_heads": 64, "ffn_size": 22528, "vocab_size": 256000}
        | {"max_seq_len": 8192, "tied": True, "window": 4096, "sliding_window_pattern": 4},
        {**_OTHER_LLAMA, "rms_norm": False, "norm_bias": False, "parallel_blocks": True, "norms": 1},
    ),
    "nemotron": Type(
        {"blocks": 32, "hidden_size": 6144, "heads": 48, "head_dim": 128, "ffn_size": 24576, "vocab_size": 256000}
        | {"max_seq_len": 4096},
        {**_OTHER_GPT, "qkv_bias": False, "linear_bias": False},
    ),
    "llama": Type(_LLAMA_SIZES, _LLAMA),
    "internlm2": Type({**_LLAMA_SIZES, "vocab_size": 103168, "bias": True}, _LLAMA),
    "granite": Type(_LLAMA_SIZES, _OTHER_LLAMA),
    "granitemoe": Type({**_LLAMA_SIZES, "experts": 8, "experts_per_token": 2}, _OTHER_LLAMA),
    "olmo": Type({**_LLAMA_SIZES, "vocab_size": 50304}, {**_OTHER_LLAMA, "rms_norm": False, "norm_bias": False}),
    "olmo2": Type({**_LLAMA_SIZES, "vocab_size": 50304}, {**_OTHER_LLAMA, "query_key_norm": "width"}),
    "olmo3": Type(
        {**_LLAMA_SIZES, "vocab_size": 50304, "window": 4096, "layer_types": (_LOCAL, _LOCAL, _LOCAL, _FULL)},
        {**_OTHER_LLAMA, "query_key_norm": "width"},
    ),
    "olmoe": Type(
        {"blocks": 16, "hidden_size": 2048, "heads": 16, "kv_heads": 16, "ffn_size": 2048, "vocab_size": 50304}
        | {"max_seq_len": 4096, "experts": 64, "experts_per_token": 8},
        {**_OTHER_LLAMA, "query_key_norm": "width"},
    ),
    "phi3": Type(
        {"blocks": 32, "hidden_size": 3072, "heads": 32, "ffn_size": 8192, "vocab_size": 32064, "max_seq_len": 4096},
        _LLAMA,
    ),
    "smollm3": Type(
        {"blocks": 36, "hidden_size": 2048, "heads": 16, "kv_heads": 4, "ffn_size": 11008, "vocab_size": 128256}
        | {"max_seq_len": 32768, "tied": True},
        _OTHER_LLAMA,
    ),
    "glm4": Type(
        {"blocks": 40, "hidden_size": 4096, "heads": 32, "kv_heads": 2, "head_dim": 128, "ffn_size": 13696}
        | {"vocab_size": 151552, "max_seq_len": 131072, "attention_bias": True},
        {**_OTHER_LLAMA, "norms": 4},
    ),
    "glm4_moe": Type(
        {"blocks": 46, "hidden_size": 4096, "heads": 96, "kv_heads": 8, "ffn_size": 10944}
        | {"vocab_size": 151552, "max_seq_len": 131072, "experts": 128, "experts_per_token": 8}
        | {"expert_ffn_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"use_qk_norm": False, "qk_norm_over": "head"},
        _OTHER_LLAMA,
    ),
    "gemma": Type(
        {"blocks": 28, "hidden_size": 3072, "heads": 16, "kv_heads": 16, "head_dim": 256, "ffn_size": 24576}
        | {"vocab_size": 256000, "max_seq_len": 8192, "tied": True},
        _OTHER_LLAMA,
    ),
    "gemma2": Type({**_GEMMA_SIZES, "vocab_size": 256000, "max_seq_len": 8192, "layer_types": (_LOCAL, _FULL)}, _GEMMA),
    "gemma3": Type(
        {**_GEMMA_SIZES, "vocab_size": 262208, "max_seq_len": 131072, "sliding_window_pattern": 6},
        {**_GEMMA, "query_key_norm": "head", "rope_theta": 1e6},
    ),
    "mistral": Type({**_MISTRAL, "window": 4096}, _LLAMA),
    "mixtral": Type({**_MISTRAL, "experts": 8, "experts_per_token": 2}, _LLAMA),
    "qwen2": Type(_QWEN, {**_LLAMA, "qkv_bias": True}),
    "qwen2_vl": Type(_QWEN_VL, {**_LLAMA, "qkv_bias": True}),
    "qwen2_5_vl": Type(_QWEN_VL, {**_LLAMA, "qkv_bias": True}),
    "qwen3": Type({**_QWEN, "head_dim": 128}, {**_LLAMA, "query_key_norm": "head"}),
    "qwen2_moe": Type(
        {**_QWEN_MOE, "heads": 16, "kv_heads": 16, "ffn_size": 5632}
        | {"experts": 60, "experts_per_token": 4, "expert_ffn_size": 1408, "shared_expert_intermediate_size": 5632},
        {**_OTHER_LLAMA, "qkv_bias": True},
    ),
    "qwen3_moe": Type(
        {**_QWEN_MOE, "heads": 32, "kv_heads": 4, "ffn_size": 6144}
        | {"experts": 128, "experts_per_token": 8, "expert_ffn_size": 768},
        {**_LLAMA, "query_key_norm": "head"},
    ),
    "qwen3_next": Type(
        {**_QWEN_MOE, "blocks": 48, "heads": 16, "kv_heads": 2, "head_dim": 256, "ffn_size": 5632}
        | {"experts": 512, "experts_per_token": 10, "expert_ffn_size": 512, "shared_expert_intermediate_size": 512}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4},
        {**_QWEN_EXPERTS, "attention_gate": True},
    ),
    "gpt_oss": Type(
        {"blocks": 36, "hidden_size": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn_size": 2880}
        | {"vocab_size": 201088, "max_seq_len": 131072, "experts": 128, "experts_per_token": 4}
        | {"window": 128, "layer_types": (_LOCAL, _FULL)},
        {**_OTHER_LLAMA, "linear_bias": True, "qkv_bias": True},
    ),
    "llama4": Type(
        {"blocks": 48, "hidden_size": 5120, "heads": 40, "kv_heads": 8, "head_dim": 128, "expert_ffn_size": 8192}
        | {"ffn_size": 16384, "vocab_size": 202048, "max_seq_len": 131072, "experts": 16, "experts_per_token": 1}
        | {"n_shared_experts": 1, "window": 8192, "layer_types": (_CHUNK, _CHUNK, _CHUNK, _FULL)},
        _OTHER_LLAMA,
    ),
    "deepseek_v2": Type(
        {**_LLAMA_SIZES, "vocab_size": 102400, "experts": 64, "expert_ffn_size": 1407, "n_shared_experts": 2}
        | {"v_head_dim": 128, **_DEEPSEEK_SIZES},
        _OTHER_LLAMA,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "bert": Type({**_SMALL, "ffn_size": 3072, "vocab_size": 30522, "max_seq_len": 512, "tied": True}, _ENCODER),
    "roberta": Type({**_SMALL, "ffn_size": 3072, "vocab_size": 50265, "max_seq_len": 512, "tied": True}, _ENCODER),
    "xlm-roberta": Type({**_SMALL, "ffn_size": 3072, "vocab_size": 30522, "max_seq_len": 512, "tied": True}, _ENCODER),
    "modernbert": Type(
        {**_SMALL, "blocks": 22, "ffn_size": 1152, "vocab_size": 50368, "max_seq_len": 8192, "tied": True}
        | {"window": 128, "global_attn_every_n_layers": 3},
        {**_ENCODER, **_OTHER_GPT, "gated_mlp": True, "norm_bias": False, "linear_bias": False, "qkv_bias": False},
    ),
    "t5": Type(
        {"blocks": 6, "hidden_size": 512, "heads": 8, "head_dim": 64, "ffn_size": 2048, "vocab_size": 32128}
        | {"max_seq_len": 512, "tied": True, "feed_forward_proj": "relu"},
        {**_OTHER_LLAMA, "gated_mlp": False, "rotary": False},
    ),
    "mt5": Type(
        {"blocks": 8, "hidden_size": 512, "heads": 6, "head_dim": 64, "ffn_size": 1024, "vocab_size": 250112}
        | {"max_seq_len": 512, "tied": True, "feed_forward_proj": "gated-gelu"},
        {**_OTHER_LLAMA, "gated_mlp": False, "rotary": False},
    ),
    "siglip": Type({**_SMALL, "ffn_size": 3072, "vocab_size": 32000, "max_seq_len": 64, "tied": True}, _ENCODER),
    "vit": Type({**_IMAGES, "ffn_size": 3072, "patch_size": 16}, {"family": "vit", "causal": False}),
    "dinov2": Type(
        {**_IMAGES, "mlp_ratio": 4, "patch_size": 14}, {"family": "vit", "causal": False, "layer_scale": True}
    ),
}
"""By `model_type`; that of a multi-modal model is its language model's, whose own type ends in ``_text``."""

TOWERS: Mapping[str, Mapping[str, Any]] = {
    "siglip_vision_model": {**_IMAGES, "ffn_size": 3072, "patch_size": 16},
    "llama4_vision_model": {"blocks": 34, "hidden_size": 768, "heads": 16, "ffn_size": 5632}
    | {"image_size": 448, "patch_size": 14, "channels": 3},
    "pixtral": {"blocks": 24, "hidden_size": 1024, "heads": 16, "ffn_size": 4096}
    | {"image_size": 1024, "patch_size": 16, "channels": 3},
    "qwen2_vl": {"blocks": 32, "hidden_size": 1280, "heads": 16, "mlp_ratio": 4, "patch_size": 14, "channels": 3},
    "qwen2_5_vl": {"blocks": 32, "hidden_size": 3584, "heads": 16, "ffn_size": 3420, "patch_size": 14, "channels": 3},
}
"""Defaults of a `vision_config` by its `model_type`."""
TOWER_OF = {
    "gemma3": "siglip_vision_model",
    "siglip": "siglip_vision_model",
    "llama4": "llama4_vision_model",
    "mistral3": "pixtral",
}
"""`model_type` of a `vision_config` that leaves it out, by that of the whole; else it is the same."""
ANY_SIZE = 448
"""Side in pixels of the image that is counted where a tower takes images of any size (Qwen2-VL: 1024 patches)."""
