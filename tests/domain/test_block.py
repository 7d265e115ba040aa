"""Blocks: what a query sees, token by token, and what their linear layers add up to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.block import LatentAttention, LinearAttention
from polygon.domain.errors import InputError
from polygon.domain.model import Model

SMALL = Model(
    name="m", family="other", blocks=4, hidden_size=64, heads=4, kv_heads=2, head_dim=16, ffn_size=96, vocab_size=100,
    max_seq_len=4096, linear_bias=False, qkv_bias=False, rms_norm=True,
)  # fmt: skip


@given(
    chunks=st.integers(1, 8), size=st.integers(1, 40), kind=st.sampled_from(["full", "window", "chunk"]),
    window=st.integers(1, 400),
)  # fmt: skip
def test_mean_of_the_keys_that_queries_see(chunks: int, size: int, kind: str, window: int):
    """Counted query by query, the diagonal by half; chunks of the same size, for the last may be shorter."""
    seq_len = chunks * size
    window = size if kind == "chunk" else window
    block = replace(SMALL, window=window, attention_pattern=(kind,)).block(1)
    query, key = np.meshgrid(np.arange(seq_len) + 0.5, np.arange(seq_len) + 0.5, indexing="ij")
    seen = np.where(key < query, 1.0, 0.0) + np.where(key == query, 0.5, 0.0)
    if kind == "window":
        seen *= np.where(key > query - window, 1.0, 0.0) + np.where(key == query - window, 0.5, 0.0)
    elif kind == "chunk":
        seen *= key // size == query // size
    assert block.keys_seen(seq_len) == pytest.approx(seen.sum() / seq_len)


def test_encoders_see_both_ways_and_linear_attention_nothing():
    """All keys without a mask, those of a window with one; a state stands for all of them."""
    encoder = replace(SMALL, causal=False)
    assert encoder.block(1).keys_seen(512) == 512
    assert replace(encoder, window=128).block(1).keys_seen(512) == 128
    state = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    mixed = replace(SMALL, linear=state, attention_pattern=("linear", "full"))
    assert [mixed.block(layer).keys_seen(512) for layer in (1, 2, 3)] == [0, 256, 0]


def test_parameters_of_every_kind_by_hand():
    """Grouped heads, gates, both norms of queries and keys, latent and linear attention; h = 64, MLP 2 h f."""
    mlp, norms = 2 * 64 * 96, 2 * 64
    plain = 64 * (64 + 2 * 32) + 64 * 64
    counts = {
        "plain": ({}, plain),
        "bias": ({"qkv_bias": True}, plain + 64 + 2 * 32),
        "gate": ({"attention_gate": True}, plain + 64 * 64),
        "head": ({"query_key_norm": "head"}, plain + 2 * 16),
        "width": ({"query_key_norm": "width"}, plain + 64 + 32),
        "latent": (
            {"latent": LatentAttention(q_rank=24, kv_rank=12, rope_dim=4), "kv_heads": 4, "value_dim": 8},
            64 * 24 + 24 * 64 + 64 * (12 + 4) + 12 * 4 * (12 + 8) + 4 * 8 * 64 + 24 + 12,
        ),
        "linear": (
            {"linear": LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=16),
             "attention_pattern": ("linear",)},
            64 * (2 * 16 + 2 * 64) + 64 * 2 * 4 + 64 * 64 + (2 * 16 + 64) * 4 + 2 * 4 + 16,
        ),
    }  # fmt: skip
    for name, (changes, mixing) in counts.items():
        block = replace(SMALL, **changes).block(1)
        assert block.parameters == mixing + mlp + norms, name


def test_experts_by_hand():
    """Of each expert 2 h f weights, and biases that do not count among what expert parallelism divides; the router."""
    sparse = {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 32, "shared_experts": 1, "dense_blocks": 1}
    model = replace(SMALL, **sparse, expert_every=2, linear_bias=True)
    assert [model.is_sparse(layer) for layer in range(6)] == [False, False, True, False, True, False]
    dense, moe = model.block(1), model.block(2)
    assert (dense.width, moe.width) == (96, 3 * 32)
    assert (dense.expert_parameters, moe.expert_parameters) == (0, 8 * 2 * 64 * 32)
    assert moe.parameters - dense.parameters == 9 * (2 * 64 * 32 + 32 + 64) + 64 * 8 - (2 * 64 * 96 + 96 + 64)
    flops = [sum(product.flops_per_token for product in block.products()) for block in (dense, moe)]
    assert flops[1] - flops[0] == 2 * (3 * 2 * 64 * 32 + 64 * 8 - 2 * 64 * 96)
    assert model.parameters - model.active_parameters == 2 * 6 * 2 * 64 * 32


def test_what_attention_keeps_by_hand():
    """Numbers of a token: queries 64, keys 32, values 32, what comes out 64; more where norms, gates, ranks are."""
    latent = LatentAttention(q_rank=24, kv_rank=12, rope_dim=4)
    state = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    kept = {
        "plain": ({}, 192, 0, 0),
        "head": ({"query_key_norm": "head"}, 192 + 96, 0, 32),
        "gate": ({"attention_gate": True}, 192 + 2 * 64, 0, 0),
        "latent": (
            {"latent": latent, "kv_heads": 4, "value_dim": 8, "query_key_norm": ""},
            64 + 64 + 32 + 32, 2 * 36 + 4, 36 + 64 * 24 + 64 * 16,
        ),
        "linear": ({"linear": state, "attention_pattern": ("linear",)}, 2 * (16 + 16 + 64 + 64) + 32, 0, 0),
    }  # fmt: skip
    for name, (changes, of_heads, of_ranks, whole) in kept.items():
        block = replace(SMALL, **changes).block(1)
        assert (block.mixing_size, block.latent_size) == (of_heads, of_ranks), name
        assert block.replicated_parameters == 2 * 64 + whole, name
    decoder = replace(SMALL, encoder_blocks=2).block(3)
    assert (decoder.mixing_size, decoder.norms) == (2 * 192, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_pattern": ("local",)}, r"model.attention_pattern\[0\]: found 'local', expected full, window"),
        (
            {"attention_pattern": ("full", "window")},
            r"model.attention_pattern\[1\]: found 'window', expected model.window",
        ),
        ({"attention_pattern": ("linear",)}, r"model.attention_pattern\[0\]: found 'linear', expected model.linear"),
        ({"latent": LatentAttention(kv_rank=8, rope_dim=4)}, "model.kv_heads: found 2, expected heads, with latent"),
        (
            {"latent": LatentAttention(kv_rank=8, rope_dim=16), "kv_heads": 4},
            r"model.latent.rope_dim: found 16, expected 1\.\.15",
        ),
        ({"query_key_norm": "both"}, "model.query_key_norm: found 'both', expected head, width or nothing"),
        ({"encoder_blocks": 4}, r"model.encoder_blocks: found 4, expected 0\.\.3"),
        ({"norms": 0}, "model.norms: found 0, expected a whole number >= 1"),
        ({"window": -1}, "model.window: found -1, expected a whole number >= 0"),
        ({"experts": -1}, "model.experts: found -1, expected a whole number >= 0"),
        ({"shared_experts": -1}, "model.shared_experts: found -1, expected a whole number >= 0"),
        ({"patch_size": -1}, "model.patch_size: found -1, expected a whole number >= 0"),
        ({"blocks": True}, "model.blocks: found True, expected a whole number >= 1"),
    ],
)
def test_shapes_that_do_not_go_together(changes, message):
    """Each fault names its field."""
    with pytest.raises(InputError, match=message):
        replace(SMALL, **changes)
