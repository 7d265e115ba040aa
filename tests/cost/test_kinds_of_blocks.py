"""Laws of blocks that are not plain: windows, latent and linear attention, encoders, towers, tokens further ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polygon.cost.blocks import _inner_norms
from polygon.cost.compute import layer_times, model_flops_per_step
from polygon.cost.memory import layer_memory
from polygon.domain.block import LatentAttention
from polygon.domain.model import Batch, Model
from polygon.domain.runtime import Runtime
from polygon.formats import catalogue, files

PUBLISHED = {
    path.stem: files.read_model(path) for path in sorted(Path("polygon/domain/catalogue/configs").glob("*.json"))
}
H100, NVLINK = catalogue.device("h100-sxm"), catalogue.link("nvlink4")


def batch_of(model: Model, seq_len: int = 2048) -> Batch:
    seq_len = min(seq_len, model.max_seq_len) if model.learned_positions else seq_len
    return Batch(global_batch=1, seq_len=model.tokens_per_image or seq_len)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_published_model_is_faster_than_the_peak_or_loses_parameters(name: str):
    """Seconds of all layers are at least the FLOP at the peak; devices of a tensor- or expert-parallel group hold all
    parameters together, and what is not divided more than once."""
    model = PUBLISHED[name]
    batch = batch_of(model)
    for tp in (1, 2):
        times = layer_times(model, batch, H100, NVLINK, tp=tp)
        flops = model_flops_per_step(model, batch)
        assert times.forward_s.sum() + times.backward_s.sum() > flops / (tp * H100.flops["bf16"])
        compute_f, compute_b = times.forward_s[1:-1], times.backward_s[1:-1]
        assert (compute_b > compute_f).all()
    one, two = (layer_memory(model, batch, tp=tp) for tp in (1, 2))
    assert one.parameters.sum() == pytest.approx(model.parameters, rel=1e-12)
    assert model.parameters <= 2 * two.parameters.sum() < 2.05 * model.parameters or model.family == "vit"
    assert (two.activation_bytes <= one.activation_bytes).all()
    if model.experts:
        shared = layer_memory(model, batch, ep=2)
        gone = (one.parameters - shared.parameters).sum() * 2
        sparse = [layer for layer in range(model.layers) if model.is_sparse(layer)]
        in_head = model.predicted_ahead * model.block(model.blocks).expert_parameters
        assert gone == pytest.approx(sum(model.block(layer).expert_parameters for layer in sparse) + in_head)
        assert shared.sharded_parameters.sum() == pytest.approx(model.parameters)


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3-8b"])
def test_norms_of_queries_and_keys_are_cut_with_the_heads(name: str):
    """Of two tensor-parallel ranks each has half of them; a model without them has none."""
    block = PUBLISHED[name].block(1)
    one, two = (_inner_norms(block, tp) for tp in (1, 2))
    assert two == tuple(part / 2 for part in one)
    assert (min(one) > 0) == bool(block.query_key_norm)


def attention_flops(model: Model, seq_len: int) -> float:
    """FLOP of a step of one sequence beyond those where every token sees itself alone."""
    nothing = replace(model, window=1, attention_pattern=())
    whole, least = (model_flops_per_step(m, Batch(global_batch=1, seq_len=seq_len)) for m in (model, nothing))
    return whole - least


def test_windows_make_attention_linear_in_the_sequence():
    """Mistral beyond its window: every token sees w - w^2 / 2s keys; seconds follow, written scores are masked and save
    nothing, and a window that holds the sequence changes no bit."""
    mistral = PUBLISHED["mistral-7b-v0.1"]
    plain = replace(mistral, window=0)
    heads = 32 * 32 * 128
    for seq_len in (8192, 65536):
        seen = 4096 - 4096**2 / (2 * seq_len) - (1 - 1 / (2 * seq_len))
        assert attention_flops(mistral, seq_len) == pytest.approx(3 * seq_len * 4 * heads * seen, rel=1e-6)
    batch = Batch(global_batch=1, seq_len=65536)
    limited, whole = (layer_times(m, batch, H100, NVLINK) for m in (mistral, plain))
    spared_s = whole.forward_s[1] - limited.forward_s[1]
    assert spared_s > 4 * 4096 * 65536 * (32768 - 4096) / H100.flops["bf16"]
    eager = Runtime(attention="materialised")
    limited, whole = (layer_times(m, batch, H100, NVLINK, runtime=eager) for m in (mistral, plain))
    np.testing.assert_array_equal(limited.forward_s, whole.forward_s)
    short = Batch(global_batch=1, seq_len=4096)
    same = [layer_times(m, short, H100, NVLINK) for m in (mistral, plain)]
    np.testing.assert_array_equal(same[0].forward_s, same[1].forward_s)
    np.testing.assert_array_equal(same[0].backward_s, same[1].backward_s)


def test_layers_of_a_pattern_have_their_own_seconds():
    """Gemma 3 on a long sequence: every sixth block takes longer, all others are alike."""
    gemma = PUBLISHED["gemma-3-27b"]
    forward_s = layer_times(gemma, Batch(global_batch=1, seq_len=32768), H100, NVLINK).forward_s[1:-1]
    whole = np.array([gemma.attention_of(layer) == "full" for layer in range(1, 63)])
    assert len(set(forward_s[whole])) == len(set(forward_s[~whole])) == 1
    assert forward_s[whole][0] > 1.3 * forward_s[~whole][0]


def test_flops_of_deepseek_v3_by_hand():
    """Per token: two FLOP for each weight that it meets, and 2 k 128 (192 + 128) for attention over k = s / 2 keys."""
    model = replace(PUBLISHED["deepseek-v3"], predicted_ahead=0)
    h, heads = 7168, 128
    attention = h * 1536 + 1536 * heads * 192 + h * (512 + 64) + 512 * heads * (128 + 128) + heads * 128 * h
    dense, sparse = 3 * h * 18432, 3 * h * 2048 * (8 + 1) + h * 256
    scores = 2 * 2048 * heads * (192 + 128)
    forward = 61 * (2 * attention + scores) + 3 * 2 * dense + 58 * 2 * sparse + 2 * h * 129280
    assert model_flops_per_step(model, Batch(global_batch=1, seq_len=4096)) == pytest.approx(3 * 4096 * forward)
    ahead = model_flops_per_step(PUBLISHED["deepseek-v3"], Batch(global_batch=1, seq_len=4096))
    one = 2 * attention + scores + 2 * sparse + 4 * h * h + 2 * h * 129280
    assert ahead == pytest.approx(3 * 4096 * (forward + one))


def test_activations_of_latent_attention_by_hand():
    """Of a dense block of DeepSeek-V3 in 16 bits: queries, keys, values and what comes out per head; both ranks before
    and after their norms and the shared key, on every device of a tensor-parallel group."""
    model, tokens, h = PUBLISHED["deepseek-v3"], 4096, 7168
    heads = 128 * (192 + 192 + 128 + 128)
    ranks = 2 * (1536 + 512) + 64
    for tp in (1, 8):
        held = layer_memory(model, Batch(global_batch=1, seq_len=tokens), tp=tp).activation_bytes[1]
        assert held == 2 * tokens * (4 * h + (heads + 3 * 18432) / tp + ranks)
    plain = replace(model, latent=None, head_dim=128, value_dim=0)
    down = h * 1536 + h * (512 + 64) + 1536 + 512
    assert model.block(1).replicated_parameters == 2 * h + down
    assert plain.block(1).replicated_parameters == 2 * h


def test_linear_attention_does_not_grow_with_the_sequence():
    """Qwen3-Next: seconds per token of a linear block do not grow with the length, those of a full one do."""
    model = PUBLISHED["qwen3-next-80b-a3b"]
    linear, full = [], []
    for seq_len in (262144, 1048576):
        times = layer_times(model, Batch(global_batch=1, seq_len=seq_len), H100, NVLINK)
        linear.append(times.forward_s[1] / seq_len)
        full.append(times.forward_s[4] / seq_len)
    assert linear[1] <= linear[0] and full[1] > 2 * full[0]


def test_parallel_blocks_are_summed_once():
    """Falcon's tensor-parallel sums are half of those of the same blocks one after the other."""
    falcon = PUBLISHED["falcon-40b"]
    batch = Batch(global_batch=1, seq_len=2048)
    runtime = Runtime(tp_overlap="none")
    together, apart = (
        layer_times(replace(falcon, parallel_blocks=p), batch, H100, NVLINK, tp=8, runtime=runtime).communication_s[1]
        for p in (True, False)
    )
    assert apart == pytest.approx(2 * together)


def test_a_tower_costs_what_its_layers_cost():
    """Gemma 3's embedding takes longer by all layers of its tower but the head, which is read for its parameters."""
    gemma = PUBLISHED["gemma-3-4b"]
    alone, tower, batch = replace(gemma, tower=None), gemma.tower, batch_of(gemma)
    both, less = (layer_times(m, batch, H100, NVLINK) for m in (gemma, alone))
    inside = layer_times(tower, batch_of(tower), H100, NVLINK)
    assert both.forward_s[0] - less.forward_s[0] == pytest.approx(inside.forward_s[:-1].sum())
    assert both.backward_s[0] - less.backward_s[0] == pytest.approx(inside.backward_s[:-1].sum())
    np.testing.assert_array_equal(both.forward_s[1:], less.forward_s[1:])
    held, without = (layer_memory(m, batch).activation_bytes[0] for m in (gemma, alone))
    assert held - without == pytest.approx(layer_memory(tower, batch_of(tower)).activation_bytes[:-1].sum())


def test_decoders_attend_to_their_encoder():
    """T5's decoder blocks have four matrices, a norm and a product over all of the encoder's tokens more."""
    t5 = PUBLISHED["t5-large"]
    encoder, decoder = t5.block(1), t5.block(t5.blocks)
    assert (encoder.causal, encoder.cross, decoder.causal, decoder.cross) == (False, False, True, True)
    assert decoder.parameters - encoder.parameters == 4 * 1024 * 1024 + 1024
    times = layer_times(t5, Batch(global_batch=1, seq_len=512), H100, NVLINK)
    assert (times.forward_s[25:49] > times.forward_s[1]).all()
    assert t5.layer_kind(24) == "block, encoder" and t5.layer_kind(25) == "block, decoder"


def test_tokens_further_ahead_cost_a_block_and_a_head_each():
    """The head's stage grows with every further token by the same."""
    small = Model(
        name="m", family="other", blocks=2, hidden_size=512, heads=8, kv_heads=8, head_dim=64, ffn_size=2048,
        vocab_size=32000, max_seq_len=2048, latent=LatentAttention(kv_rank=64, rope_dim=16),
    )  # fmt: skip
    batch = Batch(global_batch=1, seq_len=2048)
    heads = [replace(small, predicted_ahead=ahead) for ahead in (0, 1, 2)]
    seconds = [layer_times(model, batch, H100, NVLINK).forward_s for model in heads]
    assert seconds[1][-1] - seconds[0][-1] == pytest.approx(seconds[2][-1] - seconds[1][-1])
    assert seconds[1][-1] - seconds[0][-1] > seconds[0][-1] + seconds[0][2]
    counts = [model.layer_parameters(3) for model in heads]
    joining = 2 * 512 * 512 + 3 * 2 * 512
    assert counts[1] - counts[0] == counts[2] - counts[1] == small.layer_parameters(2) + joining
    held = [layer_memory(model, batch) for model in heads]
    assert held[1].parameters[3] - held[0].parameters[3] == counts[1] - counts[0]
    assert held[1].activation_bytes[3] > held[0].activation_bytes[3] + held[0].activation_bytes[2]
