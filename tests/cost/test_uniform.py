"""Laws of uniform configurations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.uniform import ParallelConfig, estimate_uniform
from polygon.domain.cluster import Device, Link, Pool
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model

A100 = Device(
    name="A100",
    memory_bytes=80e9,
    flops={"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    memory_bytes_per_s=2.039e12,
    power_w=400,
    architecture="Ampere",
)
MODEL = Model(
    name="g",
    blocks=16,
    hidden_size=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    ffn_size=8192,
    vocab_size=51200,
    max_seq_len=2048,
)
BATCH = Batch(global_batch=256, seq_len=2048)


def pool(nodes: int = 8, node_bytes_per_s: float = 200e9) -> Pool:
    return Pool(
        index=0,
        region=0,
        device=A100,
        nodes=nodes,
        devices_per_node=8,
        intra_node=Link(latency_s=2e-6, bytes_per_s=300e9),
        inter_node=Link(latency_s=5e-6, bytes_per_s=node_bytes_per_s),
        first_device=0,
        price_usd_per_hour=0,
    )


configs = st.builds(
    ParallelConfig,
    dp=st.sampled_from([1, 2, 4, 8, 16]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "full"]),
)


@settings(deadline=None, max_examples=60)
@given(config=configs)
def test_terms_add_up_and_respect_the_peak(config: ParallelConfig):
    """The terms sum to the step, the interval holds it, and no step beats the data sheet."""
    estimate = estimate_uniform(MODEL, BATCH, pool(), config)
    assert sum(term.seconds for term in estimate.terms.values()) == pytest.approx(estimate.step_s)
    assert estimate.low_s <= estimate.step_s <= estimate.high_s
    assert estimate.step_s > estimate.flops / (config.devices * 312e12)
    assert len(estimate.memory) == config.pp


@settings(deadline=None, max_examples=60)
@given(config=configs, factor=st.floats(1, 10))
def test_a_faster_network_is_never_slower(config: ParallelConfig, factor: float):
    """More bandwidth between nodes never lengthens the step."""
    slow = estimate_uniform(MODEL, BATCH, pool(), config)
    fast = estimate_uniform(MODEL, BATCH, pool(node_bytes_per_s=200e9 * factor), config)
    assert fast.step_s <= slow.step_s * (1 + 1e-12)


def test_a_batch_that_does_not_divide_is_refused():
    """The message names the batch and what it must be a multiple of."""
    with pytest.raises(InputError, match="expected a multiple of dp x micro_batch_size = 6"):
        estimate_uniform(MODEL, BATCH, pool(), ParallelConfig(dp=3, micro_batch_size=2))
