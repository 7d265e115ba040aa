"""Weights of Hugging Face: the same logits as transformers' own model, whole, in pieces, tied or not."""

import json
from dataclasses import replace

import pytest
import torch

from polygon.domain.errors import InputError
from polygon.formats.files import read_model
from runners.engine.layers import build_layers, check_weights
from runners.engine.pretrained import LOOKED_AT_BYTES, SINGLE, Pretrained, weights_digest
from tests.small_problems import small_model
from tests.transformers_models import LLAMA3, YARN, logits_of, saved

transformers = pytest.importorskip("transformers")
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("kind", "fields", "shard_size"),
    [
        ("Qwen2", {"tie_word_embeddings": True, **ROPE}, "1GB"),
        ("Qwen2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}, "20KB"),
        ("Llama", {"tie_word_embeddings": False}, "1GB"),
        ("Mistral", {"sliding_window": 64, "head_dim": 16}, "1GB"),
        ("Llama", {"rope_parameters": LLAMA3}, "1GB"),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "1GB"),
        ("Qwen2", {"rope_parameters": YARN, "head_dim": 32}, "1GB"),
        ("Qwen3", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3}, "head_dim": 32}, "1GB"),
        ("Qwen3", {"head_dim": 16, **ROPE}, "1GB"),
        ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}, "1GB"),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "mlp_only_layers": [0]}, "30KB"),
        ("Mistral", {"sliding_window": 5}, "1GB"),
        ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7}, "1GB"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "1GB"),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, "1GB"),
        (
            "Qwen3Moe",
            {"use_sliding_window": True, "sliding_window": 4, "num_experts": 4, "num_experts_per_tok": 2},
            "1GB",
        ),
        ("Phi3", {"sliding_window": 9, "pad_token_id": 0}, "9KB"),
        ("GPT2", {}, "1GB"),
        ("GPT2", {"n_inner": 40, "tie_word_embeddings": False}, "9KB"),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, kind, fields, shard_size):
    """From config.json and safetensors alone, to 1e-4 in fp32; every tensor of the files has a place."""
    theirs = saved(tmp_path, kind, shard_size=shard_size, **fields)
    model = read_model(tmp_path)
    check_weights(tmp_path, model)
    ours = build_layers(model, range(model.layers), 0, pretrained=Pretrained(tmp_path, model))
    ids = torch.randint(0, 96, (3, 33))
    with torch.no_grad():
        expected = theirs(ids).logits
        found = logits_of(ours, ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert sum(p.numel() for p in dict.fromkeys(ours.parameters())) == sum(p.numel() for p in theirs.parameters())
    assert model.parameters == sum(p.numel() for p in theirs.parameters())


def test_files_without_the_head_have_other_names(tmp_path):
    """As GPT-2's on the hub: `wte.weight`, with the causal mask among the weights."""
    theirs = saved(tmp_path, "GPT2")
    from safetensors.torch import load_file, save_file

    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / SINGLE)
    model = read_model(tmp_path)
    check_weights(tmp_path, model)
    ours = build_layers(model, range(model.layers), 0, pretrained=Pretrained(tmp_path, model))
    ids = torch.randint(0, 96, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, ids), theirs(ids).logits, rtol=0, atol=1e-4)


def test_other_weights_under_the_same_names_have_another_digest(tmp_path):
    """Ranks compare it before they start."""
    saved(tmp_path, "Llama")
    first = weights_digest(tmp_path)
    data = bytearray((tmp_path / SINGLE).read_bytes())
    data[-1] ^= 1
    (tmp_path / SINGLE).write_bytes(data)
    assert weights_digest(tmp_path) != first


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_of_large_files_start_middle_and_end_count(part, tmp_path):
    """A file of which most is not looked at: one byte of each of the three places makes another digest."""
    data = bytearray(5 * LOOKED_AT_BYTES)
    (tmp_path / SINGLE).write_bytes(data)
    first = weights_digest(tmp_path)
    data[round(part * (len(data) - 1))] = 1
    (tmp_path / SINGLE).write_bytes(data)
    assert weights_digest(tmp_path) != first


def test_what_is_missing_is_named(tmp_path):
    """No files, a tensor that is not there, of another shape, of no use; another model: one line each."""
    llama = small_model(family="llama", gated_mlp=True, rms_norm=True, learned_positions=False, linear_bias=False)
    with pytest.raises(InputError, match=r"found no config\.json"):
        Pretrained(tmp_path, llama)
    with pytest.raises(InputError, match=r"found no folder .*/none"):
        Pretrained(tmp_path / "none", llama)
    saved(tmp_path, "Qwen2", shard_size="20KB")
    model = read_model(tmp_path)
    weights = Pretrained(tmp_path, model)
    with pytest.raises(InputError, match=r"found no tensor model\.layers\.7\.self_attn\.q_proj\.weight"):
        weights.tensor("blocks.7.attention.query.weight", torch.Size((32, 32)))
    with pytest.raises(InputError, match=r"shape: found \(32, 32\), expected \(64, 32\)"):
        weights.tensor("blocks.0.attention.query.weight", torch.Size((64, 32)))
    with pytest.raises(InputError, match=r"config\.json: ffn_size: found 48, expected 64, as .* has"):
        Pretrained(tmp_path, replace(model, ffn_size=64))
    with pytest.raises(InputError, match="a GPT of another kind than GPT-2"):
        Pretrained(tmp_path, small_model(qkv_bias=False))
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    missing = files["model.norm.weight"]
    (tmp_path / missing).rename(tmp_path / "away")
    with pytest.raises(InputError, match=f"{missing}: No such file or directory, expected a safetensors file"):
        check_weights(tmp_path, model)
    (tmp_path / missing).write_bytes((tmp_path / "away").read_bytes()[:-40])
    with pytest.raises(InputError, match=f"{missing}: .*expected a safetensors file"):
        check_weights(tmp_path, model)
    (tmp_path / "away").rename(tmp_path / missing)
    index.write_text(json.dumps({"weight_map": {k: v for k, v in files.items() if k != "model.norm.weight"}}))
    with pytest.raises(InputError, match=r"found no tensor model\.norm\.weight"):
        check_weights(tmp_path, model)
    index.write_text(json.dumps({"weight_map": files | {"model.norm.weight": "../away"}}))
    with pytest.raises(InputError, match=r"norm\.weight: found '\.\./away', expected the name of a file in the same"):
        Pretrained(tmp_path, model)
    index.write_text(json.dumps({"map": {}}))
    with pytest.raises(InputError, match="expected an index"):
        Pretrained(tmp_path, model)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"config\.json: found 'list', expected an object"):
        Pretrained(tmp_path, model)


def test_quantised_weights_are_refused(tmp_path):
    """Whole numbers of 8 bits were taken for weights as they are."""
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "Llama")
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"], dtype=torch.int8)
    save_file(tensors, tmp_path / SINGLE)
    message = r"model\.norm\.weight: type: found I8, expected one of F64, F32, BF16, F16 \(weights that are not quant"
    with pytest.raises(InputError, match=message):
        check_weights(tmp_path, read_model(tmp_path))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("Llama", {"attention_bias": True}, r"o_proj\.bias, which .* has no place for"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act: found 'gelu', expected 'silu'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary positions: found 'dynamic', expected one of default, linear, llama3",
        ),
        ("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}, "partial_rotary_factor: found 0.5, expected 1"),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
            "norm_topk_prob: found Fal",
        ),
        ("GPT2", {"activation_function": "gelu"}, "activation_function: found 'gelu', expected 'gelu_new'"),
        ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 96}, "model_type: found 'qwen2_moe'"),
        ("GPTNeoX", {}, "model_type: found 'gpt_neox', expected .* or another of .*llama"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(tmp_path, kind, fields, message):
    """Each in one line, none run wrongly."""
    saved(tmp_path, kind, **fields)
    with pytest.raises(InputError, match=message) as caught:
        check_weights(tmp_path, read_model(tmp_path))
    assert "\n" not in str(caught.value)
