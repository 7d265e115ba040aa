"""Laws of uniform configurations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.compute import layer_times
from polygon.cost.memory import layer_memory
from polygon.cost.uniform import ParallelConfig, estimate_many, estimate_uniform, stage_bounds
from polygon.cost.uniform_kernel import terms_kernel
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
    owned_matrices=st.sampled_from([0, 82]),
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


def test_weights_dealt_out_whole_cost_latency_that_grows_with_the_ranks():
    """Owners broadcast one after another: twice the ranks double every ring, and each is slower than one gathering."""
    seconds = []
    for nodes in (32, 64, 128):
        batch = replace(BATCH, global_batch=nodes * 8)
        spread = ParallelConfig(dp=nodes * 8, zero=1, overlap="none")
        whole = replace(spread, owned_matrices=98)
        divided_s, owned_s = (
            estimate_uniform(MODEL, batch, pool(nodes), config).terms["data-parallel"].seconds
            for config in (spread, whole)
        )
        seconds.append(owned_s - divided_s)
    assert 0 < seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] > 98 * 1024 * 6e-6 / 2


def test_a_batch_that_does_not_divide_is_refused():
    """The message names the batch and what it must be a multiple of."""
    with pytest.raises(InputError, match="expected a multiple of dp x micro_batch_size = 6"):
        estimate_uniform(MODEL, BATCH, pool(), ParallelConfig(dp=3, micro_batch_size=2))


@settings(deadline=None, max_examples=30)
@given(many=st.lists(configs, min_size=1, max_size=6))
def test_many_at_once_equal_one_by_one(many: list[ParallelConfig]):
    """The batch interface gives what single estimates give."""
    together = estimate_many(MODEL, BATCH, pool(), many)
    for i, config in enumerate(many):
        alone = estimate_uniform(MODEL, BATCH, pool(), config)
        assert together.step_s[i] == pytest.approx(alone.step_s, rel=1e-12)
        assert together.terms_s[i] == pytest.approx([term.seconds for term in alone.terms.values()], rel=1e-12)
        assert together.peak_bytes[i] == pytest.approx(alone.peak.total_bytes, rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    stage_s=st.lists(st.floats(1e-3, 1), min_size=1, max_size=6),
    zero=st.integers(0, 3),
    overlap=st.integers(0, 2),
    members=st.sampled_from([1, 2, 16]),
    owned=st.sampled_from([0, 5]),
    again=st.sampled_from([0, 1]),
)
def test_kernel_equals_its_python(stage_s: list[float], zero: int, overlap: int, members: int, owned: int, again: int):
    """Compiled and interpreted kernels agree."""
    stages = np.array(stage_s)
    kinds = np.array([[1, 0.01, 0.02, 1e6], [4, 0.02, 0.04, 4e6]])
    network = np.array([8, 300e9, 2e-6, 200e9, 5e-6, 0.0])
    machine = (members, min(members, 8), max(1, members // 2), network)
    args = (
        stages,
        stages / 4,
        0.3,
        1e7,
        kinds,
        8,
        1,
        10,
        1e-4,
        *machine,
        zero,
        overlap,
        1,
        again,
        owned,
        2.0,
        4.0,
        1e-3,
        1e-5,
        1e-11,
    )
    compiled, interpreted = np.empty(6), np.empty(6)
    total = terms_kernel(*args, compiled)
    assert terms_kernel.py_func(*args, interpreted) == pytest.approx(total)
    assert compiled == pytest.approx(interpreted)


@settings(deadline=None, max_examples=40)
@given(config=configs, pipeline=st.sampled_from([2, 4]))
def test_pipeline_is_no_shorter_than_its_busiest_stage_or_one_micro_batch(config: ParallelConfig, pipeline: int):
    """Makespan >= busiest worker, and >= the way of one micro-batch through every stage."""
    config = replace(config, pp=pipeline, dp=1, cp=1)
    layers = layer_times(
        MODEL,
        BATCH,
        A100,
        pool().intra_node,
        tp=config.tp,
        micro_batch_size=config.micro_batch_size,
        recompute=config.recompute,
    )
    estimate = estimate_uniform(MODEL, BATCH, pool(), config)
    both = layers.forward_s + layers.backward_s
    cuts = stage_bounds(MODEL, config)
    stages = [float(both[a:b].sum()) for a, b in pairwise(cuts)]
    micro_batches = BATCH.global_batch // config.micro_batch_size
    assert estimate.step_s >= micro_batches * max(stages)
    assert estimate.step_s >= sum(stages)


def test_context_and_expert_parallelism_divide_activations_and_experts():
    """Twice the context-parallel degree halves activations; experts spread over ep devices."""
    long = Batch(global_batch=64, seq_len=2048)
    one = layer_memory(MODEL, long, cp=1)
    two = layer_memory(MODEL, long, cp=2)
    assert two.activation_bytes[1] == pytest.approx(one.activation_bytes[1] / 2)
    moe = replace(MODEL, experts=8, experts_per_token=2, expert_ffn_size=4096)
    whole, spread = (layer_memory(moe, long, ep=ep).parameters[1] for ep in (1, 8))
    expert = 2 * 2048 * 4096
    assert whole - spread == pytest.approx(7 * expert)
    assert layer_times(moe, long, A100, pool().intra_node, ep=8).communication_s[1] > 0


def test_sharding_inside_a_node_keeps_gathers_off_the_network():
    """ZeRO-1 over eight of 64 ranks gathers inside the node: fewer bytes cross, in shorter rings; states grow."""
    whole = ParallelConfig(dp=64, zero=1, overlap="none")
    near = replace(whole, shards=8)
    batch = replace(BATCH, gradient_precision="bf16")
    thin = pool(node_bytes_per_s=20e9)
    all_ranks, one_node = (estimate_uniform(MODEL, batch, thin, config) for config in (whole, near))
    assert one_node.terms["data-parallel"].seconds < all_ranks.terms["data-parallel"].seconds
    assert one_node.peak.optimizer == pytest.approx(8 * all_ranks.peak.optimizer)
    with pytest.raises(InputError, match="shards: found 7"):
        replace(whole, shards=7)
