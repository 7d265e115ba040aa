"""Gradients of experts that a group of workers spreads: those alone that hold the same ones sum them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from tests.linked_regions import cluster_of

MODEL = Model(
    name="experts",
    family="llama",
    blocks=4,
    hidden_size=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn_size=2048,
    vocab_size=1024,
    max_seq_len=1024,
    experts=16,
    experts_per_token=2,
    expert_ffn_size=2048,
    gated_mlp=True,
    learned_positions=False,
    rms_norm=True,
    linear_bias=False,
    qkv_bias=False,
    tied_embeddings=False,
)
EXPERTS = sum(MODEL.block(layer).expert_parameters for layer in range(1, 1 + MODEL.blocks))
BYTES = 4.0
"""Of a gradient."""
INSIDE, SLOW = Link(latency_s=1e-9, bytes_per_s=1e13), Link(latency_s=1e-9, bytes_per_s=1e8)


def sums(ep: int, *, regions: int = 1, zero: int = 0, model: Model = MODEL):
    """What it takes to sum the gradients of sixteen devices that all hold the whole model, on two nodes of one region
    or one node in each of two."""
    groups = [[("a100-80gb", 2 // regions, 8)] for _ in range(regions)]
    cluster = cluster_of(groups, latency_s=1e-9, bytes_per_s=SLOW.bytes_per_s, inside=INSIDE, between=SLOW)
    batch = Batch(global_batch=16, seq_len=1024, gradient_precision="fp32")
    workers = tuple(Worker(pool=d // 8 if regions > 1 else 0, devices=(d,)) for d in range(16))
    stages = (Stage(first_layer=0, last_layer=model.layers, workers=workers, ep=ep, zero=zero),)
    plan = Plan(
        stages=stages, routes=np.arange(16)[:, None], micro_batch_size=1, spans=stage_spans(stages, [16])
    )  # fmt: skip
    (cost,) = step_times(plan, CostTables(Problem(cluster=cluster, model=model, batch=batch))).reductions
    return cost


@pytest.mark.parametrize(("zero", "bytes_each"), [(0, 4), (1, 2 + 1)])
def test_spread_over_a_node_every_expert_still_passes_the_nodes_cards(zero, bytes_each):
    """Eight ranks of a node hold other experts each: a ring of two nodes for each of these passes gradients once (under
    ZeRO half of them as it scatters, and half of the weights as it gathers), one ring of all devices nearly twice."""
    whole, spread = sums(1, zero=zero), sums(8, zero=zero)
    least_s = EXPERTS * bytes_each / SLOW.bytes_per_s
    assert least_s < spread.total_s + spread.gather_s < 1.2 * least_s
    assert spread.total_s + spread.gather_s < whole.total_s + whole.gather_s


@pytest.mark.parametrize("zero", [0, 1])
def test_experts_that_nobody_else_holds_are_not_summed(zero):
    """Spread over all sixteen devices: what is left to sum is a model with hardly any experts."""
    few = sums(1, zero=zero, model=replace(MODEL, experts=2))
    alone, shared = sums(16, zero=zero), sums(8, zero=zero)
    assert alone.total_s + alone.gather_s < few.total_s + few.gather_s < 0.5 * (shared.total_s + shared.gather_s)


def test_all_experts_go_from_region_to_region():
    """Bytes between regions are those of all experts, however a region spreads them."""
    whole, spread = sums(1, regions=2), sums(8, regions=2)
    assert spread.wire_bytes == pytest.approx(whole.wire_bytes)
    assert np.array(spread.across_bytes) == pytest.approx(np.array(whole.across_bytes))
    assert spread.across_s == pytest.approx(whole.across_s)
    assert spread.wire_bytes > EXPERTS * BYTES
