"""Laws of the memory model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.memory import layer_memory, stage_memory
from polygon.domain.model import Batch, Model


def gpt(**changes: object) -> Model:
    shape: dict[str, object] = {
        "name": "g",
        "blocks": 4,
        "hidden_size": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "ffn_size": 4096,
        "vocab_size": 51200,
        "max_seq_len": 2048,
    }
    return Model(**{**shape, **changes})  # type: ignore[arg-type]


BATCH = Batch(global_batch=64, seq_len=1024)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 8), in_flight=st.integers(1, 8), zero=st.integers(0, 3), shards=st.integers(1, 16))
def test_memory_grows_with_the_micro_batch_and_falls_with_zero(size: int, in_flight: int, zero: int, shards: int):
    """Never less memory for a larger micro-batch or more in flight; never more for a higher ZeRO stage's states."""
    model = gpt()
    small, large = (layer_memory(model, BATCH, micro_batch_size=s) for s in (size, size + 1))

    def total(layers, flight, stage):
        return stage_memory(layers, 0, 6, in_flight=flight, zero=stage, shards=shards, batch=BATCH)

    assert total(small, in_flight, zero).total_bytes <= total(large, in_flight, zero).total_bytes
    assert total(small, in_flight, zero).total_bytes <= total(small, in_flight + 1, zero).total_bytes
    lower, higher = total(small, in_flight, 0), total(small, in_flight, zero)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(higher, part) <= getattr(lower, part)


def test_states_of_mixed_precision_adam():
    """bf16 weights (2), fp32 gradients (4), master and moments (12): 18 bytes a parameter without sharding."""
    model = gpt()
    layers = layer_memory(model, BATCH)
    stage = stage_memory(layers, 0, 6, in_flight=0, zero=0, shards=1, batch=BATCH, context_bytes=0)
    states = stage.weights + stage.gradients + stage.optimizer
    assert states == pytest.approx(18 * model.parameters)
    # A tied head on another stage than the embedding holds its own copy.
    first = stage_memory(layers, 0, 3, in_flight=0, zero=0, shards=1, batch=BATCH)
    last = stage_memory(layers, 3, 6, in_flight=0, zero=0, shards=1, batch=BATCH)
    assert (first.weights + last.weights) / 2 == pytest.approx(model.parameters + 51200 * 1024)
