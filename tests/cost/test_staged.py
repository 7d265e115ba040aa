"""Pipelines whose stages name their workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.catalogue import device
from polygon.cost.staged import Place, StagedConfig, StagedEstimate, estimate_staged
from polygon.domain.cluster import Link
from polygon.domain.model import Batch, Model

MODEL = Model(
    name="g",
    blocks=8,
    hidden_size=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_size=4096,
    vocab_size=50272,
    max_seq_len=2048,
)
BATCH = Batch(global_batch=64, seq_len=2048, precision="fp16", gradient_precision="fp16")
FABRIC, NETWORK = Link(latency_s=2e-6, bytes_per_s=300e9), Link(latency_s=5e-6, bytes_per_s=12e9)
A100, T4 = (Place(device=device(name), tp=1, zone="") for name in ("a100-40gb", "t4"))


def estimate(config: StagedConfig, network: Link = NETWORK) -> StagedEstimate:
    return estimate_staged(MODEL, BATCH, config, fabric=FABRIC, network=network)


def config(*stages: tuple[Place, ...], micro_batches: int = 16) -> StagedConfig:
    bounds = {1: (0, 10), 2: (0, 5, 10), 3: (0, 4, 7, 10)}[len(stages)]
    return StagedConfig(bounds=bounds, stages=stages, micro_batch_size=4, micro_batches=micro_batches)


@settings(deadline=None, max_examples=25)
@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    micro_batches=st.integers(1, 40),
    faster=st.floats(1, 10),
)
def test_more_work_never_helps_and_a_faster_network_never_hurts(widths, micro_batches, faster):
    """A step grows with its micro-batches and does not with the bandwidth; its terms add up."""
    plan = config(*((A100,) * width for width in widths), micro_batches=micro_batches)
    found = estimate(plan)
    assert found.step_s == pytest.approx(sum(term.seconds for term in found.terms.values()))
    assert found.low_s <= found.step_s <= found.high_s
    assert estimate(replace(plan, micro_batches=micro_batches + 1)).step_s >= found.step_s
    wide = replace(NETWORK, bytes_per_s=NETWORK.bytes_per_s * faster)
    assert estimate(plan, wide).step_s <= found.step_s * (1 + 1e-12)


def test_a_stage_keeps_step_with_its_slowest_worker():
    """One T4 beside an A100, with half of the micro-batches each, is as slow as two T4 and slower than two A100."""
    mixed, slow, fast = (estimate(config(pair, (A100,))).step_s for pair in ((A100, T4), (T4, T4), (A100, A100)))
    assert fast < mixed
    assert mixed == pytest.approx(slow, rel=0.02)


def test_memory_is_of_the_stage_that_needs_most():
    """Two micro-batches in flight on the first of two stages, one on the last."""
    found = estimate(config((A100,), (A100,)))
    assert len(found.memory) == 2
    assert found.peak.total_bytes == max(stage.total_bytes for stage in found.memory)
    alone = estimate(config((A100,), (A100,), micro_batches=1))
    assert found.memory[0].activations == pytest.approx(2 * alone.memory[0].activations)
    assert found.memory[1].activations == pytest.approx(alone.memory[1].activations)
