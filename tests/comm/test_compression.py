"""Laws of the packings."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polygon_comm.compression import (
    INT4_BLOCK,
    INT8_BLOCK,
    ErrorFeedback,
    PowerSgd,
    activation_codec,
    make_codec,
    relative_error,
)

from polygon.cost.transfers import packed_bytes
from tests.nightly import cases

ELEMENTWISE = ("none", "bf16", "int8", "int4", "topk")
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def noise(shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("name", ELEMENTWISE)
@settings(max_examples=cases(25), deadline=None)
@given(shape=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_payload_has_the_announced_size_and_restores_shape_and_dtype(name, shape, dtype):
    """A receive is posted before the message exists: its size must be known from the number of elements."""
    codec, x = make_codec(name), noise(shape).to(dtype)
    payload = codec.compress(x)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.payload_bytes(x.numel(), dtype)
    restored = codec.decompress(payload, x.shape, dtype)
    assert restored.shape == x.shape
    assert restored.dtype == dtype


@pytest.mark.parametrize(("name", "block", "levels"), [("int8", INT8_BLOCK, 127), ("int4", INT4_BLOCK, 7)])
@settings(max_examples=cases(25), deadline=None)
@given(shape=shapes, exponent=st.integers(-20, 20), seed=st.integers(0, 99))
def test_rounding_error_is_at_most_half_a_level_of_its_block(name, block, levels, shape, exponent, seed):
    """|x - D(C(x))| <= max|block| / (2 levels), whatever the magnitude."""
    x = noise(shape, seed, 10.0**exponent)
    codec = make_codec(name)
    error = (codec.decompress(codec.compress(x), x.shape, x.dtype) - x).reshape(-1).abs()
    for start in range(0, x.numel(), block):
        limit = x.reshape(-1)[start : start + block].abs().max() / (2 * levels)
        assert error[start : start + block].max() <= limit * 1.001


def test_none_is_exact_and_bf16_is_torchs_rounding():
    """`none` loses nothing; `bf16` is the cast."""
    x = noise((33, 7))
    for name, expected in (("none", x), ("bf16", x.bfloat16().float())):
        codec = make_codec(name)
        assert torch.equal(codec.decompress(codec.compress(x), x.shape, x.dtype), expected)


def test_topk_keeps_the_largest():
    """Exactly the largest elements survive, rounded to bf16."""
    x = noise((1000,))
    codec = make_codec("topk")
    restored = codec.decompress(codec.compress(x), x.shape, x.dtype)
    kept = restored.nonzero().flatten().sort().values
    assert torch.equal(kept, x.abs().topk(50).indices.sort().values)
    assert torch.equal(restored[kept], x[kept].bfloat16().float())


def test_powersgd_is_exact_for_matrices_of_low_rank_and_keeps_vectors():
    """A matrix of rank <= r comes back whole (to fp32 rounding)."""
    left, right = noise((64, 4), 1), noise((4, 48), 2)
    parts = [left @ right, noise((48,), 3), noise((2, 3), 4)]
    x = torch.cat([part.reshape(-1) for part in parts])
    codec = PowerSgd([part.shape for part in parts])
    payload = codec.compress(x)
    assert payload.numel() == codec.payload_bytes(x.numel())
    restored = codec.decompress(payload, x.shape, x.dtype)
    assert torch.allclose(restored[: 64 * 48], x[: 64 * 48], atol=1e-4)
    assert torch.equal(restored[64 * 48 :], x[64 * 48 :].bfloat16().float())


def test_factors_of_activations_are_found_anew():
    """Bytes as priced for samples x width; what came before changes nothing; not a quarter over the least error."""
    samples, width = 256, 128
    left, right = (torch.linalg.qr(noise((n, width), seed)).Q for n, seed in ((samples, 1), (width, 2)))
    x = ((left * 0.9 ** torch.arange(width)) @ right.T).view(2, 128, width)
    codec = activation_codec("powersgd", x.shape)
    payload = codec.compress(x)
    assert payload.numel() == codec.payload_bytes(x.numel()) == packed_bytes(x.numel(), 4, "powersgd", width=width)
    codec.compress(noise((2, 128, width)))
    assert torch.equal(codec.compress(x), payload)
    values = torch.linalg.svdvals(x.view(samples, width))
    least = float(values[8:].norm() / values.norm())
    assert least < relative_error(codec, payload, x) < 1.25 * least


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_overflow_is_not_hidden(name, bad):
    """An infinity or NaN that goes in is seen on the other side."""
    x = noise((300,))
    x[7] = bad
    codec = make_codec(name)
    assert not torch.isfinite(codec.decompress(codec.compress(x), x.shape, x.dtype)).all()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk", "powersgd"])
def test_error_feedback_loses_nothing_over_time(name):
    """What was sent over n steps plus the error still held is the sum of what was to be sent."""
    feedback = ErrorFeedback(make_codec(name, shapes=[(40, 30), (50,)]))
    messages = [noise((1250,), seed) for seed in range(20)]
    sent = sum(feedback.compress(message)[1] for message in messages)
    assert torch.allclose(sent + feedback.error, sum(messages), atol=1e-3)


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int4", "topk", "powersgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_the_planner_reckons_with(name, dtype):
    """Prediction and execution agree on a message's size; the planner takes the plain one where packing grows it."""
    side = 1024
    plain = side * side * dtype.itemsize
    codec = make_codec(name, shapes=[(side, side)])
    expected = packed_bytes(side * side, dtype.itemsize, name)
    assert expected == pytest.approx(min(codec.payload_bytes(side * side, dtype), plain), rel=0.01)


def test_ratio_is_what_is_saved():
    """Four times fewer bytes than fp32 for int8, less its scales; a codec that needs shapes says so."""
    assert make_codec("int8").ratio(1 << 20) == pytest.approx(4 / (1 + 4 / INT8_BLOCK))
    assert make_codec("bf16").ratio(1 << 20, torch.bfloat16) == 1
    with pytest.raises(ValueError, match="powersgd"):
        make_codec("powersgd")


def test_feedback_says_how_much_was_dropped_and_goes_on_where_it_stopped():
    """The relative error of the last message; a restored one, at another loss scale too, sends what the first would."""
    shapes = [(40, 30), (50,)]
    first = ErrorFeedback(make_codec("powersgd", shapes=shapes))
    assert first.relative_error == 0.0
    message = noise((1250,))
    _, restored = first.compress(message)
    dropped = (message - restored).norm()
    assert first.relative_error == pytest.approx(float(dropped / message.norm()), rel=1e-4)
    again = ErrorFeedback(make_codec("powersgd", shapes=shapes))
    state = first.state(scale=4.0)
    assert torch.allclose(state["error"], (message - restored) / 4)
    again.restore(state, scale=8.0)
    assert torch.allclose(again.error, 2 * first.error)
    again.restore(first.state(4.0), scale=4.0)
    assert torch.equal(again.compress(noise((1250,), 1))[0], first.compress(noise((1250,), 1))[0])
    plain = ErrorFeedback(make_codec("none"))
    assert torch.equal(plain.compress(message)[1], message) and plain.relative_error == 0.0 and plain.error is None


def test_an_overflow_is_forgotten_by_the_next_message():
    """Its error would poison all that follows."""
    feedback = ErrorFeedback(make_codec("bf16"))
    feedback.compress(torch.full((300,), math.inf))
    assert feedback.error is None and feedback.relative_error == 0.0
    feedback.compress(torch.zeros(300))
    assert feedback.relative_error == 0.0 and not feedback.error.any()
    codec = make_codec("int8")
    assert relative_error(codec, codec.compress(torch.zeros(300)), torch.zeros(300)) == 0.0
