"""Hugging Face's `config.json` of a model: of the kinds of language models whose layers polygon's engine computes."""

from __future__ import annotations

from typing import Any

from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from polygon.formats.hugging_face import scaled_config


def kind_of(model: Model) -> str:
    """The `model_type` whose models are computed as this one is.

    Raises
    ------
    InputError
        There is none.
    """
    if model.family == "gpt":
        plain = model.qkv_bias and model.linear_bias and model.learned_positions and not model.experts
        if not plain or model.rms_norm or model.gated_mlp or model.kv_heads * model.head_dim != model.hidden_size:
            raise InputError(f"weights: found {model.name}, a GPT of another kind than GPT-2, expected a GPT-2")
        return "gpt2"
    if model.family != "llama":
        raise InputError(f"weights: found a model of family {model.family}, expected llama or gpt")
    if not (model.gated_mlp and model.rms_norm) or model.learned_positions or model.linear_bias:
        raise InputError(f"weights: found {model.name}, expected a Llama with rotary positions and no bias in its MLP")
    if model.shared_experts:
        raise InputError(f"weights: found {model.shared_experts} shared experts, expected none (Mixtral, Qwen3-MoE)")
    if model.experts:
        return _routed_kind(model)
    if model.query_key_norm == "head" or model.qkv_bias:
        return "qwen3" if model.query_key_norm == "head" else "qwen2"
    if len(set(model.attention_pattern)) > 1:
        raise InputError(f"weights: found {model.name}, of which some blocks have windows, expected Qwen2 or Qwen3")
    return "mistral" if model.window else "llama"


def _routed_kind(model: Model) -> str:
    if len(set(model.attention_pattern)) > 1:
        raise InputError(f"weights: found {model.name}, of which some blocks have windows, expected all or none")
    if model.query_key_norm == "head":
        return "qwen3_moe"
    if model.qkv_bias or model.dense_blocks:
        raise InputError(f"weights: found {model.name}, routed experts of another kind than Mixtral's or Qwen3-MoE's")
    return "mixtral"


def config_of(model: Model) -> dict[str, Any]:
    """`model_type` and the fields of its configuration in transformers; raises as `kind_of`."""
    kind = kind_of(model)
    if kind == "gpt2":
        return {
            "model_type": kind, "vocab_size": model.vocab_size, "n_positions": model.max_seq_len,
            "n_embd": model.hidden_size, "n_layer": model.blocks, "n_head": model.heads, "n_inner": model.ffn_size,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
            "attn_pdrop": 0.0, "tie_word_embeddings": model.tied_embeddings,
        }  # fmt: skip
    fields = {
        "model_type": kind, "vocab_size": model.vocab_size, "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size, "num_hidden_layers": model.blocks, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len, "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, **scaled_config(model.rope_scaling)},
        "tie_word_embeddings": model.tied_embeddings,
    }  # fmt: skip
    if model.window and kind in ("mistral", "mixtral"):
        fields["sliding_window"] = model.window
    if model.window and kind.startswith("qwen"):
        names = {"full": "full_attention", "window": "sliding_attention"}
        fields |= {"use_sliding_window": True, "sliding_window": model.window, "max_window_layers": 0}
        if not model.experts:
            fields["layer_types"] = [names[model.attention_of(layer)] for layer in range(1, model.blocks + 1)]
    if kind == "mixtral":
        fields |= {"num_local_experts": model.experts, "intermediate_size": model.expert_ffn_size}
    if kind == "qwen3_moe":
        dense = list(range(model.dense_blocks))
        fields |= {"num_experts": model.experts, "moe_intermediate_size": model.expert_ffn_size}
        fields |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    if model.experts:
        fields["num_experts_per_tok"] = model.experts_per_token
    return fields


def hugging_face_config(model: Model) -> dict[str, Any]:
    """All that a model is, as its `config.json`; raises as `kind_of`, and for a model with a tower."""
    require(model.tower is None, "tower", "a tower of another modality", "a language model alone")
    return config_of(model)
