"""Small models of transformers in folders, and the engine's layers beside them."""

from __future__ import annotations

import torch

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MORE = {"Qwen3Moe": {"moe_intermediate_size": 24, "norm_topk_prob": True}, "Qwen2Moe": {"moe_intermediate_size": 48}}

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def saved(folder, kind, *, shard_size="1GB", **fields):
    """A small model of transformers with weights that are not near its initial ones, saved in a folder."""
    import transformers

    sizes = GPT2_SIZES if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(**(sizes | MORE.get(kind, {}) | fields))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def logits_of(layers, ids):
    """What the engine's layers say of the next token."""
    *body, head = layers.values()
    x = ids
    for layer in body:
        x = layer(x)
    return head.output(head.norm(x))
