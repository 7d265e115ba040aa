"""Weights of Hugging Face: the same logits as transformers' own model, whole, in pieces, tied or not."""

import json

import pytest
import torch

from polygon.domain.errors import InputError
from polygon.files import read_model
from runners.engine.layers import build_layers
from runners.engine.pretrained import Pretrained
from tests.small_problems import small_model

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def saved(tmp_path, kind, **fields):
    """A small model of transformers with weights that are not near its initial ones, in a folder."""
    config = getattr(transformers, f"{kind}Config")(**(SIZES | fields))
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("kind", "fields", "shard_size"),
    [
        ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "1GB"),
        ("Qwen2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}, "20KB"),
        ("Llama", {"tie_word_embeddings": False}, "1GB"),
        ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}, "1GB"),
    ],
)
def test_loss_is_that_of_transformers(tmp_path, kind, fields, shard_size):
    """From config.json and safetensors alone, the summed loss of every text is transformers' own."""
    theirs = saved(tmp_path, kind, **fields)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    model = read_model(tmp_path)
    ours = build_layers(model, range(model.layers), 0, pretrained=Pretrained(tmp_path, model))
    ids = torch.randint(0, 96, (3, 33))
    with torch.no_grad():
        logits = theirs(ids[:, :-1]).logits
        x = ids[:, :-1]
        for layer in ours.values():
            x = layer(x, ids[:, 1:]) if layer is ours[str(model.layers - 1)] else layer(x)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    assert x.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sum(p.numel() for p in dict.fromkeys(ours.parameters())) == sum(p.numel() for p in theirs.parameters())


def test_what_is_missing_is_named(tmp_path):
    """No files, a tensor that is not there, another shape, another family: one line each."""
    llama = small_model(family="llama", gated_mlp=True, rms_norm=True, learned_positions=False, linear_bias=False)
    with pytest.raises(InputError, match=r"found no model\.safetensors"):
        Pretrained(tmp_path, llama)
    saved(tmp_path, "Qwen2").save_pretrained(tmp_path)
    model = read_model(tmp_path)
    weights = Pretrained(tmp_path, model)
    with pytest.raises(InputError, match=r"found no tensor model\.layers\.7\.self_attn\.q_proj\.weight"):
        weights.tensor("blocks.7.attention.query.weight", torch.Size((32, 32)))
    with pytest.raises(InputError, match=r"shape: found \(32, 32\), expected \(64, 32\)"):
        weights.tensor("blocks.0.attention.query.weight", torch.Size((64, 32)))
    with pytest.raises(InputError, match="family gpt"):
        Pretrained(tmp_path, small_model())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"map": {}}))
    with pytest.raises(InputError, match="expected an index"):
        Pretrained(tmp_path, model)
