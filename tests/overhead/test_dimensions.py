"""What every dimension sends, against counts by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.formats import catalogue
from polygon.overhead.communication import (
    Configuration,
    TrafficAnalysis,
    analyse,
    expert_parameters,
    memory_by_zero,
    shape_of,
)
from polygon.overhead.communication_tables import traffic_rows
from polygon.overhead.dimensions import Degrees, Shape, group_topology, traffic
from polygon.overhead.topologies import Topology

LINK = Link(latency_s=3e-6, bytes_per_s=300e9)
SLOW = Link(latency_s=5e-6, bytes_per_s=25e9)
SHAPE = Shape(parameters=70e9, blocks=32, hidden_size=4096, seq_len=1024, micro_batches=4)


def ring(ranks: int) -> Topology:
    return Topology(kind="ring", ranks=ranks, link=LINK)


def sent(degrees: Degrees, shape: Shape = SHAPE) -> dict[tuple[str, str], tuple[float, float]]:
    """Message bytes and count by dimension and operation."""
    found = traffic(shape, degrees, ring(degrees.devices))
    return {(t.dimension, t.cell.op): (t.cell.n_bytes, t.count) for t in found}


def test_zero_stages_move_the_bytes_of_rajbhandari():
    """DDP and ZeRO-1, 2 send 2(d-1)/d of the weights' bytes, ZeRO-3 half as much again (one micro-batch)."""
    shape = replace(SHAPE, micro_batches=1)
    volume = [
        sum(t.sent_bytes for t in traffic(shape, Degrees(dp=8, zero=zero), ring(8))) / (7 / 8 * 140e9)
        for zero in range(4)
    ]
    assert volume == pytest.approx([2, 2, 2, 3])


def test_tensor_parallel_messages():
    """Four all-reduces of b s h e per layer and micro-batch, six with full recomputation; SP: the same bytes sent,
    and what is not kept gathered once more in backward."""
    message = 1024 * 4096 * 2
    assert sent(Degrees(tp=2)) == {("TP", "all_reduce"): (message, 4 * 32 * 4)}
    assert sent(Degrees(tp=2, recompute="full"))["TP", "all_reduce"][1] == 6 * 32 * 4
    plain = traffic(SHAPE, Degrees(tp=8), ring(8))
    sequence = traffic(SHAPE, Degrees(tp=8, sequence_parallel=True), ring(8))
    assert {t.cell.op for t in sequence} == {"all_gather", "reduce_scatter"}
    assert sum(t.sent_bytes for t in sequence) == pytest.approx(5 / 4 * sum(t.sent_bytes for t in plain))
    for recompute, scattered in (("none", 4), ("full", 6)):
        counts = {op: n / 32 / 4 for (_, op), (_, n) in sent(
            Degrees(tp=8, sequence_parallel=True, recompute=recompute)).items()}  # fmt: skip
        assert counts == {"all_gather": scattered + 2, "reduce_scatter": scattered}


def test_pipeline_messages():
    """An inner stage sends every micro-batch on and its gradient back, per chunk; the ends of two stages send one."""
    message = 1024 * 4096 * 2
    assert sent(Degrees(pp=4)) == {("PP", "p2p"): (message, 2 * 4)}
    assert sent(Degrees(pp=2)) == {("PP", "p2p"): (message, 4)}
    assert sent(Degrees(pp=4, interleave=2))["PP", "p2p"] == (message, 2 * 4 * 2)


def test_pipeline_messages_between_nodes_are_shared_by_a_tensor_group():
    """Eight ranks that hold the same activations send an eighth each and gather; sequence parallel ranks differ."""
    whole = Topology(kind="hierarchical", ranks=32, per_node=8, link=LINK, inter=SLOW)
    (message,) = (t for t in traffic(SHAPE, Degrees(tp=8, pp=4), whole) if t.dimension == "PP")
    assert {cost.algorithm for cost in message.cell.algorithms} == {"between-nodes", "scatter-gather"}
    degrees = Degrees(tp=8, pp=4, sequence_parallel=True)
    (part,) = (t for t in traffic(SHAPE, degrees, whole) if t.dimension == "PP")
    assert part.cell.n_bytes == message.cell.n_bytes / 8 and len(part.cell.algorithms) == 1


def test_context_parallel_messages():
    """Ulysses: four all-to-alls forward and back; ring and all-gather carry keys and values only."""
    own = 1024 / 4 * 4096 * 2
    ulysses = [t for t in traffic(SHAPE, Degrees(cp=4), ring(4)) if t.dimension == "CP"]
    assert sum(t.cell.n_bytes * t.count for t in ulysses) == pytest.approx(8 * own * 32 * 4)
    grouped = replace(SHAPE, kv_share=0.25)
    passes = sent(Degrees(cp=4, cp_mode="ring"), grouped)["CP", "p2p"]
    assert passes == (2 * 0.25 * own, 3 * 3 * 32 * 4)
    gathers = sent(Degrees(cp=4, cp_mode="all-gather"), grouped)
    assert gathers["CP", "all_gather"] == (4 * 2 * 0.25 * own, 2 * 32 * 4)


def test_expert_parallel_messages_and_parameters():
    """Mixtral: 45.1e9 of 46.7e9 parameters are experts'; four all-to-alls a layer of k copies of the tokens."""
    model = catalogue.model("mixtral-8x7b")
    assert expert_parameters(model) == 32 * 8 * 3 * 4096 * 14336
    shape = shape_of(model, Batch(global_batch=8, seq_len=4096), 1, 1)
    found = {t.dimension: t for t in traffic(shape, Degrees(dp=8, ep=8), ring(8))}
    assert found["EP"].cell.n_bytes == 4096 * 4096 * 2 * 2
    assert found["EP"].count == 4 * 32
    assert found["DP"].cell.n_bytes == pytest.approx((model.parameters - expert_parameters(model)) * 4)


def test_groups_share_nodes_as_ranks_are_dealt():
    """Nodes of 8: a tensor group of 4 stays inside, a data group 4 apart has two members a node, 8 apart one."""
    whole = Topology(kind="hierarchical", ranks=64, per_node=8, link=LINK, inter=SLOW)
    groups = ((4, 1), (16, 4), (8, 8), (3, 1))
    assert [group_topology(whole, members, stride).per_node for members, stride in groups] == [4, 2, 1, 3]


def analysis_of(degrees: Degrees, model: str = "llama2-7b", gpu: str = "a100-80gb", **more: Any) -> TrafficAnalysis:
    known = catalogue.model(model)
    batch = Batch(global_batch=8 * degrees.dp, seq_len=4096, gradient_precision="bf16")
    return analyse(
        Configuration(
            shape=shape_of(known, batch, 1, 8),
            degrees=degrees,
            whole=ring(degrees.devices),
            batch=batch,
            model=known,
            device=catalogue.device(gpu),
            **more,
        )
    )


@pytest.mark.parametrize("zero", range(4))
def test_memory_is_sixteen_bytes_a_parameter_sharded(zero):
    """Weights 2, gradients 2, optimizer 12 bytes: 16, 4 + 12/d, 2 + 14/d, 16/d (Rajbhandari et al. 2020)."""
    batch = Batch(global_batch=8, seq_len=1, gradient_precision="bf16")
    c = Configuration(shape=Shape(parameters=70e9), degrees=Degrees(dp=8), whole=ring(8), batch=batch)
    part = memory_by_zero(c)[zero]
    per_parameter = [16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8][zero]
    assert part.weights + part.gradients + part.optimizer == pytest.approx(per_parameter * 70e9)


def test_experts_are_sharded_over_fewer_ranks():
    """With ep = dp nothing of the experts is left to shard; dense weights still are."""
    memory = analysis_of(Degrees(dp=8, ep=8), model="mixtral-8x7b").memory
    experts = expert_parameters(catalogue.model("mixtral-8x7b")) / 8
    assert memory[3].optimizer > 12 * experts
    assert memory[3].optimizer < memory[0].optimizer


def test_schedule_hides_some_and_never_adds():
    """What the step waits for is at most the upper bound where nothing hides, and less where backward hides DP."""
    hidden, shown = (analysis_of(Degrees(dp=8), overlap=overlap) for overlap in ("backward", "none"))
    assert shown.scheduled_s == {"DP": pytest.approx(shown.upper_bound_s)}
    assert hidden.scheduled_s is not None and 0 < hidden.scheduled_s["DP"] < hidden.upper_bound_s
    assert hidden.compute_s is not None and hidden.compute_s == shown.compute_s > 0


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("overlap", ["none", "backward", "full"])
@pytest.mark.parametrize(
    "degrees",
    [{"pp": 2}, {"pp": 4}, {"pp": 4, "interleave": 2}, {"pp": 2, "dp": 4, "tp": 2}, {"dp": 2, "cp": 2}, {"dp": 4}],
)
def test_upper_bound_is_above_what_any_schedule_waits_for(degrees, overlap, zero):
    """Two stages each send one message a micro-batch and wait for two (2 M + 2 (p - 1)): those sent are no bound."""
    for hides in (False, True):
        result = analysis_of(Degrees(zero=zero, **degrees), overlap=overlap, p2p_overlap=hides)
        assert result.scheduled_s is not None
        assert sum(result.scheduled_s.values()) <= result.upper_bound_s * (1 + 1e-12)


def test_shares_add_up_and_verdict_follows_memory():
    """Times are counted once; a device is enough exactly if the total is below what may be used."""
    result = analysis_of(Degrees(dp=2, tp=2, pp=2), gpu="t4")
    assert math.isclose(sum(row["share"] for row in traffic_rows(result)), 1.0)
    sent_s = {t.dimension: t.time_s for t in result.traffic}
    waits_s = {**sent_s, "PP": sent_s["PP"] * (2 * 8 + 2) / 8}
    assert math.isclose(sum(waits_s.values()), result.upper_bound_s)
    assert result.usable_bytes is not None
    assert result.fits is (result.chosen_memory.total_bytes <= result.usable_bytes) is False
