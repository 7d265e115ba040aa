"""What must hold of every estimate, whatever device, model, length, split and framework: more work is never faster, a
slower link or chip never either, memory grows with what is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polygon.cost.compute import model_flops_per_step
from polygon.domain.cluster import Link
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.domain.runtime import Runtime
from polygon.domain.uniform import ParallelConfig
from polygon.formats.catalogue import device, usual_link
from tests.nightly import cases
from tests.uniform_splits import equal_nodes, held_bytes, lane, with_device, with_links

CARDS = (
    "a40",
    "l4",
    "l40s",
    "rtx-4090",
    "rtx-5090",
    "mi300x",
    "mi250x",
    "v100-16gb",
    "t4",
    "gh200",
    "h20",
    "h800",
    "a800-80gb",
    "a100-80gb",
    "h100-sxm",
    "b200",
)
LLAMA = {
    "family": "llama",
    "gated_mlp": True,
    "learned_positions": False,
    "rms_norm": True,
    "linear_bias": False,
    "tied_embeddings": False,
}
SHAPES = (
    {
        "hidden_size": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn_size": 14336,
        "vocab_size": 128256,
        **LLAMA,
    },
    {"hidden_size": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "ffn_size": 4864, "vocab_size": 151936, **LLAMA},
    {"hidden_size": 6144, "heads": 64, "kv_heads": 64, "head_dim": 96, "ffn_size": 24576, "vocab_size": 50432},
    {"hidden_size": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "ffn_size": 3072, "vocab_size": 50257},
)
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 3584}
ROUNDING = 1 + 1e-9


@st.composite
def runs(draw: st.DrawFn) -> tuple[Problem, ParallelConfig]:
    """A model, a batch, devices, a program and a way to spread them."""
    card = device(draw(st.sampled_from(CARDS)))
    shape = draw(st.sampled_from(SHAPES))
    more = draw(st.sampled_from(({}, EXPERTS)))
    model = Model(name="m", blocks=draw(st.sampled_from((8, 24))), max_seq_len=1 << 18, **shape, **more)
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if model.heads % n == 0]))
    pp, cp, dp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 8)))
    ways = st.sampled_from
    runtime = Runtime(
        attention=draw(ways(("flash", "flash2", "flash1", "triton", "materialised"))),
        fused=draw(st.booleans()),
        loss=draw(ways(("torch", "vocab-parallel", "fused"))),
        fused_accumulation=draw(st.booleans()),
        selective=draw(ways(("attention", "operators", "norms"))),
        sorts_arrivals=draw(st.booleans()),
        fused_experts=draw(st.booleans()),
        keeps_gathered=draw(st.booleans()),
        keeps_8_bit=draw(st.booleans()),
        tp_overlap=draw(ways(("none", "backward", "pipelined"))),
        dp_overlap=draw(ways(("none", "backward", "full"))),
        by_layer=draw(st.booleans()),
        p2p_overlap=draw(st.booleans()),
        exchanges_apart=draw(st.booleans()),
        p2p_buffer_bytes=draw(ways((0.0, 1e6, 1e8))),
        host_forward_factor=draw(ways((1.0, 3.0))),
        owned_weights=draw(st.booleans()),
        gathers_again=draw(st.booleans()),
        zero2_by_micro_batch=draw(st.booleans()),
    )
    config = ParallelConfig(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=draw(ways((1, dp * cp))) if model.experts and dp * cp <= 8 else 1,
        chunks=draw(ways((1, 2))) if pp > 1 else 1,
        micro_batch_size=draw(ways((1, 2))),
        zero=draw(st.integers(0, 3)),
        recompute=draw(ways(("none", "selective", "full"))),
        sequence_parallel=draw(st.booleans()),
    )
    batch = Batch(
        global_batch=dp * config.micro_batch_size * draw(ways((1, 4, 16))),
        seq_len=draw(ways((512, 2048, 8192, 131072))),
        precision=draw(ways([name for name in ("fp32", "fp16", "bf16", "fp8") if name in card.flops])),
    )
    asked = equal_nodes(
        model,
        batch,
        card,
        nodes=-(-config.devices // 8),
        inside=Link(latency_s=2e-6, bytes_per_s=usual_link(card.name).bytes_per_s),
        between=Link(latency_s=4e-6, bytes_per_s=100e9),
        runtime=runtime,
    )
    return asked, config


Run = tuple[Problem, ParallelConfig]


@settings(deadline=None, max_examples=cases(60))
@given(run=runs())
def test_no_term_is_negative_and_no_step_beats_the_data_sheet(run: Run):
    """Terms >= 0; seconds >= FLOP over peak."""
    asked, config = run
    found = lane(*run)
    assert min(found.terms_s) >= -1e-9 * found.step_s
    (pool,) = asked.cluster.pools
    flops = model_flops_per_step(asked.model, asked.batch)
    assert found.step_s >= flops / (config.devices * pool.device.peak_flops(asked.batch.precision))
    assert found.peak.total_bytes > 0


@settings(deadline=None, max_examples=cases(60))
@given(run=runs(), factor=st.floats(1.5, 10))
def test_slower_links_and_slower_chips_are_never_faster(run: Run, factor: float):
    """Less bandwidth, more latency, fewer FLOP/s or less memory bandwidth never shorten a step."""
    asked, config = run
    step_s = lane(*run).step_s
    (pool,) = asked.cluster.pools
    chip, near, far = pool.device, pool.intra_node, pool.inter_node
    worse = [
        with_links(asked, inside=replace(near, bytes_per_s=near.bytes_per_s / factor)),
        with_links(asked, between=replace(far, bytes_per_s=far.bytes_per_s / factor)),
        with_links(asked, between=replace(far, latency_s=far.latency_s * factor)),
        with_device(asked, replace(chip, memory_bytes_per_s=chip.memory_bytes_per_s / factor)),
        # By two: the model then sees half as many multiprocessors, to a rounding.
        with_device(asked, replace(chip, flops={key: value / 2 for key, value in chip.flops.items()})),
    ]
    for other in worse:
        assert lane(other, config).step_s * (1 + 1e-3) >= step_s


@settings(deadline=None, max_examples=cases(60))
@given(run=runs())
def test_more_work_is_never_faster(run: Run):
    """Longer sequences, more of them, more layers, wider ones and more words never shorten a step."""
    asked, config = run
    model, batch = asked.model, asked.batch
    step_s = lane(*run).step_s
    for larger in (
        replace(model, blocks=2 * model.blocks),
        replace(model, ffn_size=2 * model.ffn_size, expert_ffn_size=2 * model.expert_ffn_size),
        replace(model, vocab_size=2 * model.vocab_size),
    ):
        assert lane(replace(asked, model=larger), config).step_s * ROUNDING >= step_s
    for more in (replace(batch, seq_len=2 * batch.seq_len), replace(batch, global_batch=2 * batch.global_batch)):
        assert lane(replace(asked, batch=more), config).step_s * ROUNDING >= step_s


@settings(deadline=None, max_examples=cases(60))
@given(run=runs())
def test_memory_grows_with_what_is_held(run: Run):
    """Never less for larger micro-batches, longer sequences or wider layers; never more with ZeRO 1, and with 2 where
    gradients are scattered once a step (after every micro-batch two layers have theirs whole)."""
    asked, config = run
    model, batch = asked.model, asked.batch
    held = held_bytes(*run)
    twice = replace(batch, global_batch=2 * batch.global_batch)
    size = replace(config, micro_batch_size=2 * config.micro_batch_size)
    assert held_bytes(replace(asked, batch=twice), size) * ROUNDING >= held
    assert held_bytes(replace(asked, batch=replace(batch, seq_len=2 * batch.seq_len)), config) * ROUNDING >= held
    wide = replace(model, ffn_size=2 * model.ffn_size, expert_ffn_size=2 * model.expert_ffn_size)
    assert held_bytes(replace(asked, model=wide), config) * ROUNDING >= held
    once = replace(asked, runtime=replace(asked.runtime, zero2_by_micro_batch=False))
    stages = [held_bytes(once, replace(config, zero=zero)) for zero in range(3)]
    assert stages[2] <= stages[1] * ROUNDING and stages[1] <= stages[0] * ROUNDING


@settings(deadline=None, max_examples=cases(60))
@given(run=runs())
def test_recomputation_trades_time_for_memory(run: Run):
    """None is fastest and holds most, full recomputation the reverse."""
    asked, config = run
    assume(config.pp < 4)
    by_mode = {mode: lane(asked, replace(config, recompute=mode)) for mode in ("none", "selective", "full")}
    times = [found.step_s for found in by_mode.values()]
    assert times == pytest.approx(sorted(times), rel=1e-9)
    none, selective, full = (found.peak.total_bytes for found in by_mode.values())
    assert selective <= none * ROUNDING and full <= none * ROUNDING
