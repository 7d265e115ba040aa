"""What becomes of an allocation whose first draft memory does not hold."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.fluid import FIRST
from tests.linked_regions import cluster_of, small_gpt

LARGE_VOCABULARY = Problem(
    cluster=cluster_of([[("v100-16gb", 2, 4)], [("t4", 4, 2)]]),
    model=small_gpt(blocks=24, head_dim=128, heads=8, kv_heads=8, vocab_size=250_000),
    batch=Batch(global_batch=32, seq_len=1024),
)
"""Tied embeddings of a quarter of a billion weights at both ends."""


def allocation(decoder: Decoder, *stages: tuple[str, int, int], micro_batch_size: int) -> Allocation:
    """Stages of so many workers of so many devices of a type."""
    pools = [pool.device.name for pool in decoder.problem.cluster.pools]
    workers = np.zeros((len(stages) + 1, len(decoder.classes)), dtype=np.int64)
    for row, (device, width, tp) in zip(workers, stages, strict=False):
        row[decoder.classes.index((pools.index(device), tp))] = width
    return Allocation(workers=workers, micro_batch_size=micro_batch_size)


def test_ends_of_unlike_zero_divide_alike_where_memory_lacks_the_whole_weight():
    """ZeRO 1 at the first and 2 at the last end divide the tied weight as 1 would, which a V100 does not hold; under 2
    at both it is a plan that breaks no rule, and with 1 at the first it would break that of the memory."""
    decoder = Decoder(LARGE_VOCABULARY)
    plan = decoder.decode(allocation(decoder, ("t4", 8, 1), ("v100-16gb", 8, 1), micro_batch_size=4), relax=False)
    assert isinstance(plan, Plan)
    assert [stage.zero for stage in plan.stages] == [2, 2]
    assert violations(LARGE_VOCABULARY, plan) == []
    unlike = replace(plan, stages=(replace(plan.stages[0], zero=1), plan.stages[1]))
    broken = [str(rule) for rule in violations(LARGE_VOCABULARY, unlike)]
    assert len(broken) == 8 and all("(v100-16gb): needs" in rule for rule in broken)


def test_the_relaxation_knows_where_a_tied_weight_stays_whole():
    """Of ends cut unlike each holds the tied weight whole under ZeRO, which a T4 does not: no draft is made at all."""
    decoder = Decoder(LARGE_VOCABULARY)
    x = allocation(decoder, ("v100-16gb", 2, 4), ("t4", 8, 1), micro_batch_size=4)
    assert decoder.fluid_s(x)[0] == np.inf


def test_a_draft_that_packing_leaves_no_memory_is_one_that_packs_nothing():
    """One end on four pairs of V100, the other on eight T4: what packing owes of the gradients, and ZeRO inside nodes
    alone, would leave a T4 without room for even one micro-batch, and it is said where and what it would lack."""
    decoder = Decoder(LARGE_VOCABULARY)
    x = allocation(decoder, ("v100-16gb", 4, 2), ("t4", 8, 1), micro_batch_size=2)
    plan = decoder.decode(x, relax=False, cuts=(FIRST,))
    assert isinstance(plan, Plan) and violations(LARGE_VOCABULARY, plan) == []
    assert {use.weight_gradients for use in plan.links} == {"none"} and decoder.over_memory(plan) is None
    packed = replace(plan, links=tuple(replace(use, weight_gradients="int8") for use in plan.links))
    reason = decoder.over_memory(packed)
    assert reason.kind == "reason.lacks_memory"
    assert reason["device"] == "t4" and 0 < reason["lacking_bytes"] < 2**31


def test_a_kind_of_workers_owes_what_its_own_regions_nodes_share_out():
    """Packing owes a node of A100 all gradients and each of two nodes of T4 half of them: more than that a T4 would not
    hold, and 5.6 GB unpacked would take three times as long."""
    model = small_gpt(blocks=20, hidden_size=2048, ffn_size=8192, vocab_size=50000)
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 2, 1)]], bytes_per_s=1e7)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024)))
    workers = np.array([[4 if (pool, tp) == (0, 1) else 2 if tp == 1 else 0 for pool, tp in decoder.classes]])
    x = Allocation(workers=workers, micro_batch_size=1)
    plan = decoder.decode(x)
    assert isinstance(plan, Plan) and {use.weight_gradients for use in plan.links} == {"int8"}
    assert decoder.fluid_s(x)[0] == pytest.approx(decoder.plan_value(plan), rel=0.05)


EXPERTS = Problem(
    cluster=cluster_of([[("a100-40gb", 1, 6), ("t4", 1, 4)]]),
    model=small_gpt(blocks=4, heads=4, kv_heads=4, head_dim=64, experts=2, experts_per_token=1, expert_ffn_size=512),
    batch=Batch(global_batch=16, seq_len=512),
)


@pytest.mark.parametrize(
    ("stages", "kept"),
    [
        # Six do not divide sixteen micro-batches, four do; and no less than a pair is left out.
        ([("a100-40gb", 6, 1)], [{"a100-40gb": 4}]),
        # Slower ones take as many as the others.
        ([("a100-40gb", 4, 1), ("t4", 4, 1)], [{"a100-40gb": 4}, {"t4": 4}]),
        ({"a100-40gb": 4, "t4": 4}, [{"a100-40gb": 4, "t4": 4}]),
        # Of ten the slowest pair is left out.
        ({"a100-40gb": 6, "t4": 4}, [{"a100-40gb": 6, "t4": 2}]),
    ],
)
def test_who_shares_experts_takes_as_many_micro_batches_as_the_others(stages, kept):
    """Where they would not divide, or devices are unequal, a plan is made all the same, and breaks no rule."""
    decoder = Decoder(EXPERTS)
    if isinstance(stages, dict):
        x = allocation(decoder, *((name, width, 1) for name, width in stages.items()), micro_batch_size=1)
        x = x.with_workers(x.workers.sum(axis=0, keepdims=True))
    else:
        x = allocation(decoder, *stages, micro_batch_size=1)
    plan = decoder.decode(replace(x, ep=2), relax=False)
    assert isinstance(plan, Plan) and violations(EXPERTS, plan) == []
    pools = EXPERTS.cluster.pools
    used = [Counter(pools[worker.pool].device.name for worker in stage.workers) for stage in plan.stages]
    assert used == kept and all(stage.ep == 2 for stage in plan.stages)
    for s, stage in enumerate(plan.stages):
        assert set(plan.shares(s).tolist()) == {16 // stage.width}


def test_experts_that_nobody_can_share_alike_are_no_plan():
    """Of three micro-batches two devices take unequally many, however they are dealt."""
    problem = replace(EXPERTS, batch=replace(EXPERTS.batch, global_batch=3))
    decoder = Decoder(problem)
    found = decoder.decode(replace(allocation(decoder, ("a100-40gb", 2, 1), micro_batch_size=1), ep=2), relax=False)
    assert not isinstance(found, Plan) and found.reason.kind == "reason.expert_shares"


@pytest.mark.parametrize("bytes_per_s", [1e8, 5e8, 2e9])
def test_one_stage_in_several_regions_divides_as_is_quickest(bytes_per_s):
    """Regions lead by turns where all have the whole gradient, which the relaxation does not know."""
    cluster = cluster_of([[("a100-40gb", 1, 2)]] * 4, latency_s=0.05, bytes_per_s=bytes_per_s)
    model = small_gpt(blocks=16, hidden_size=2048, head_dim=128, ffn_size=8192)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=512)))
    workers = np.zeros((1, len(decoder.classes)), dtype=np.int64)
    workers[0, [tp == 1 for _, tp in decoder.classes]] = 2
    plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1))
    others = [replace(plan, stages=(replace(plan.stages[0], zero=zero, shards=0),)) for zero in range(4)]
    fitting = [other for other in others if not violations(decoder.problem, other)]
    assert decoder.plan_value(plan) <= min(map(decoder.plan_value, fitting)) * (1 + 1e-9)
