"""ZeRO's traffic of every micro-batch: which bytes go how often, and what compute hides of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.network import CARD_EFFICIENCY, RING_STEP_S
from polygon.cost.sharding import ShardingTraffic, copies_s
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Device, Link
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.runtime import Runtime
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.planning.decode import Allocation, Decoder
from tests.linked_regions import cluster_of, small_gpt
from tests.uniform_splits import equal_nodes

A100 = Device(
    name="A100",
    memory_bytes=80e9,
    flops={"fp32": 20e12, "bf16": 312e12},
    memory_bytes_per_s=2e12,
    power_w=400,
    architecture="Ampere",
)
MODEL = small_gpt(tied_embeddings=False)
BARE = Runtime(dp_overlap="none")
"""Nothing hides anything, and layers are not gathered again."""
LATENCY_S, RATE, BLOCK = 1e-6, 1e9, 12 * 1024**2
"""Seconds and bytes/s that messages between nodes reach; numbers in the matrices of a block."""


def tables(runtime: Runtime = BARE, rate: float = RATE) -> CostTables:
    """Two nodes of one device, weights in bf16 (2 bytes) and gradients in fp32 (4)."""
    between = Link(latency_s=LATENCY_S, bytes_per_s=rate / CARD_EFFICIENCY)
    batch = Batch(global_batch=8, seq_len=128)
    return CostTables(equal_nodes(MODEL, batch, A100, nodes=2, per_node=1, between=between, runtime=runtime))


def traffic(
    runtime: Runtime = BARE, rate: float = RATE, *, first: int = 1, last: int = 7, shards: int = 2, **config
) -> ShardingTraffic:
    """Of all six blocks, or from one layer to another, on two devices, one a node."""
    priced = tables(runtime, rate)
    (stage,) = uniform_plan(priced.problem, ParallelConfig(dp=2, **config)).stages
    stage = replace(stage, first_layer=first, last_layer=last)
    return ShardingTraffic(priced, stage, pool=0, tp=1, cp=1, shards=shards, per_node=1, micro_batch_size=1)


def test_copies_of_gathered_weights_pass_through_memory():
    """3.7 passes over 2 + 4 bytes a parameter at 98 % of 2 TB/s; none where a runtime works in place."""
    assert copies_s(1e6, tables(), 0) == pytest.approx(3.7 * 6e6 / (0.98 * 2e12))
    assert copies_s(1e6, tables(Runtime(by_layer=True)), 0) == 0


@pytest.mark.parametrize(
    ("recompute", "again", "gathers"),
    [("full", True, 2), ("full", False, 1), ("selective", True, 1), ("none", True, 1)],
)
def test_weights_are_gathered_both_ways_and_gradients_scattered(recompute, again, gathers):
    """ZeRO-3 in forward sends half of a weight's 2 bytes to the other device; in backward it does so once, or twice
    where layers are let go before they are recomputed, and half of a gradient's 4 bytes; copies come on top."""
    runtime = replace(BARE, gathers_again=again)
    found = traffic(runtime, zero=3, recompute=recompute)
    gather_s = 6 * BLOCK * 2 / 2 / RATE
    assert found.forward_s == pytest.approx(gather_s, rel=0.01)
    in_place_s = found.backward_s - copies_s(6 * BLOCK, tables(), 0)
    assert in_place_s == pytest.approx(gathers * gather_s + 6 * BLOCK * 4 / 2 / RATE, rel=0.01)
    assert found.first_s == pytest.approx(3 * gather_s / 6, rel=0.01)  # of one block: its gather and its scatter


def test_gradients_alone_are_scattered_under_the_second_stage():
    """Half of 4 bytes in every backward where a program does so by micro-batch, else nothing; one device has none."""
    by_micro_batch = replace(BARE, zero2_by_micro_batch=True)
    found = traffic(by_micro_batch, zero=2)
    assert (found.forward_s, found.backward_s) == (0, pytest.approx(6 * BLOCK * 4 / 2 / RATE, rel=0.01))
    nothing = (traffic(zero=2), traffic(by_micro_batch, zero=1), traffic(zero=3, shards=1))
    assert all((none.forward_s, none.backward_s, none.first_s) == (0, 0, 0) for none in nothing)


@pytest.mark.parametrize(
    ("zero", "recompute", "blocks"), [(3, "none", None), (3, "full", None), (3, "full", 0), (2, "full", None)]
)
def test_what_compute_hides_is_not_seen(zero: int, recompute: str, blocks: int | None):
    """Layer by layer over a quick link only the first layer is seen; over a slow one all but what either pass takes."""
    in_place = Runtime(by_layer=True, contention=0.0, zero2_by_micro_batch=True, fused_accumulation=False)
    options = {"zero": zero, "recompute": recompute, "recompute_blocks": blocks}
    quick = traffic(in_place, 1e13, **options)
    assert (quick.forward_s, quick.backward_s) == (0, 0)
    assert quick.first_s > 0
    bare = replace(in_place, by_layer=False, dp_overlap="none")
    seen, part = (traffic(runtime, RATE / 10, **options) for runtime in (bare, in_place))
    # Fully sharded gradients are added up where they are scattered to, not in the layers.
    times = tables(in_place).times(0, 1, 1, "none" if blocks == 0 else recompute, accumulates=zero < 3).layers
    copies = copies_s(6 * MODEL.layer_parameters(1), tables(), 0) if zero == 3 else 0.0
    assert seen.forward_s - part.forward_s == pytest.approx(6 * times.forward_s[1] if zero == 3 else 0)
    assert seen.backward_s - copies - part.backward_s == pytest.approx(6 * times.backward_s[1])


def test_a_layer_gathered_in_pieces_waits_for_each():
    """A message for every parameter: no byte more, but three latencies for one, and so when gradients are scattered."""
    whole, pieces = (traffic(replace(BARE, gathers_per_layer=count), zero=3) for count in (1, 3))
    once_s = RING_STEP_S + LATENCY_S
    assert pieces.forward_s - whole.forward_s == pytest.approx(6 * 2 * once_s)
    assert pieces.backward_s - whole.backward_s == pytest.approx(2 * 6 * 2 * once_s)


def test_nothing_hides_the_first_of_the_layers():
    """The embedding's gather and scatter, and the gather of the block after it; the head's are no concern of theirs."""
    embedding = 32000 * 1024 + 1024 * 1024
    for last in (7, 8):
        found = traffic(zero=3, first=0, last=last)
        assert found.first_s == pytest.approx((embedding * (2 + 4) + BLOCK * 2) / 2 / RATE, rel=0.01)


def test_only_recomputed_layers_are_gathered_again():
    """Two of six blocks: their gathers come twice in backward; of either sort one layer is gathered while nothing is
    computed yet."""
    again = replace(BARE, gathers_again=True)
    some, none = (traffic(again, zero=3, recompute="full", recompute_blocks=blocks) for blocks in (2, 0))
    gather_s = BLOCK * 2 / 2 / RATE
    assert some.forward_s == none.forward_s
    assert some.backward_s - none.backward_s == pytest.approx(2 * gather_s, rel=0.01)
    assert some.first_s - none.first_s == pytest.approx(gather_s, rel=0.01)


def test_fully_sharded_gradients_are_not_added_up_in_the_layers():
    """A pass over a block's gradients less in its backward, but where products add them up by themselves anyway."""
    for fused, less in ((False, True), (True, False)):
        priced = tables(replace(BARE, fused_accumulation=fused))
        whole, sharded = (priced.times(0, 1, 1, "none", accumulates=held).layers for held in (True, False))
        assert (sharded.backward_s[1] < whole.backward_s[1]) == less
        assert sharded.forward_s[1] == whole.forward_s[1]


@pytest.mark.parametrize("groups", [[[("a100-40gb", 4, 2)]], [[("a100-40gb", 4, 2), ("v100-16gb", 4, 2)]]])
def test_shard_groups_of_a_node_sum_between_nodes_in_one_pool_and_in_several(groups):
    """ZeRO-3 inside of nodes: at least 2 (c - 1) / c of the gradient passes each node's card when the step ends."""
    problem = Problem(cluster=cluster_of(groups), model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    decoder = Decoder(problem)
    workers = np.array([[8 if tp == 1 else 0 for _, tp in decoder.classes]])
    plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1))
    sums_s = {}
    for shards in (0, 2):
        stages = (replace(plan.stages[0], zero=3, shards=shards),)
        sums_s[shards] = step_times(replace(plan, stages=stages, links=()), decoder.tables).reductions[0].total_s
    n_bytes = decoder.tables.memory(1, 1, "none").parameters[-1] * problem.batch.gradient_bytes
    card = decoder.tables.links.card_bytes_per_s[0]
    assert sums_s[2] - sums_s[0] >= 2 * 3 / 4 * n_bytes / card * (1 - 1e-9)
