"""Attention to a window: what queries see, in pieces of any size, and how many keys are compared for it."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from polygon.domain.uniform import ParallelConfig
from runners.engine import windows
from runners.engine.layers import build_layer
from runners.engine.options import Options
from runners.engine.windows import pieces_of, window_mask
from tests.real_ranks import run_ranks
from tests.runners.test_every_dimension import planned
from tests.runners.test_training import run_rank
from tests.small_problems import small_model

LLAMA = small_model(
    family="llama", kv_heads=2, gated_mlp=True, tied_embeddings=False, learned_positions=False, rms_norm=True,
    linear_bias=False, qkv_bias=False,
)  # fmt: skip
OPTIONS = Options(steps=3, learning_rate=3e-3, clip_norm=0.5)


def seen(tokens, window):
    """What every query may see, one by one."""
    return torch.tensor([[0 <= i - j < window for j in range(tokens)] for i in range(tokens)])


@pytest.mark.parametrize("window", [1, 3, 5, 16, 19])
@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
def test_a_query_sees_its_window_alone(window, block, packed, monkeypatch):
    """Outputs and gradients are those of one product with a mask, however queries are cut."""
    monkeypatch.setattr(windows, "WINDOW_BLOCK", block)
    attention, tokens = build_layer(replace(LLAMA, window=window), 1, 0).attention, 20
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 8, generator=generator, requires_grad=True) for _ in range(3))
    mask = None
    if packed:
        number = torch.arange(tokens)[None] // torch.tensor([[6], [9]])
        mask = (number[:, :, None] == number[:, None, :]).tril()[:, None]
    found = attention._of_pieces(q, k, v, pieces_of([(0, tokens)], window), mask)
    whole = seen(tokens, window) if mask is None else mask & seen(tokens, window)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=whole)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    weight = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("tokens", "window"), [(4096, 512), (1024, 64), (200, 64), (1024, 256), (256, 255)])
def test_as_many_keys_are_compared_as_the_price_says(tokens, window):
    """`Block.keys_compared` is the mean over the queries, but for the one key that a window's last query leaves out."""
    pieces = list(pieces_of([(0, tokens)], window))
    compared = sum((end - begin) * (end - first) for begin, end, first in pieces) / tokens
    block = small_model(window=window, max_seq_len=tokens).block(1)
    assert compared == pytest.approx(block.keys_compared(tokens), abs=1)
    assert block.keys_compared(window) == block.keys_seen(window)


def test_pieces_of_parts_of_a_sequence_lie_in_the_parts():
    """Queries come in the order in which a rank holds them; no piece looks further back than a window."""
    pieces = list(pieces_of([(0, 300), (900, 1200)], 100))
    assert [i for begin, end, _ in pieces for i in range(begin, end)] == [*range(300), *range(900, 1200)]
    assert all(begin - first in (0, 99) or first == 0 for begin, _, first in pieces)
    assert list(pieces_of([(3, 9)], 0)) == [(3, 9, 0)]


def test_pieces_in_the_middle_share_a_mask():
    """It is made once for a whole run."""
    assert window_mask(8, 3, 4, torch.float32, torch.device("cpu")) is window_mask(
        8, 3, 4, torch.float32, torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("heads", "config"),
    [
        (4, ParallelConfig(tp=2, sequence_parallel=True, recompute="selective")),
        (4, ParallelConfig(cp=2)),
        (1, ParallelConfig(cp=2, recompute="full")),
        (4, ParallelConfig(pp=2, dp=2, zero=3)),
    ],
    ids=["tensor", "heads of all tokens", "gathered keys", "pipeline and ZeRO-3"],
)
def test_windows_train_alike_under_any_plan(heads, config):
    """Some blocks with a window and some without: losses are those of one rank, and not those without windows."""
    model = replace(LLAMA, heads=heads, kv_heads=min(2, heads), window=5, attention_pattern=("window", "full"))
    wide = replace(model, window=0, attention_pattern=())
    [expected] = run_ranks(run_rank, 1, *planned(model, ParallelConfig()), OPTIONS)
    [other] = run_ranks(run_rank, 1, *planned(wide, ParallelConfig()), OPTIONS)
    for losses in run_ranks(run_rank, config.devices, *planned(model, config), OPTIONS):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx(other, rel=1e-5)
