"""The gradient of a weight that first and last stage both hold: what they sum apart from all others, and who waits."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.estimate import worker_memory
from polygon.cost.money import traffic_bytes
from polygon.cost.reduction import pairs_at_once
from polygon.cost.step_times import part_at_end, step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from tests.linked_regions import cluster_of, small_gpt

LATENCY_S, RATE, CARD = 0.05, 1e8, 1e9
TIED = 32000 * 1024
"""Numbers of the embedding of `small_gpt`."""


def plan_on(ends, *, mode="none", tied=True, once=True, local_steps=1):
    """A plan of two stages on the devices of each end, in regions of two T4s on a node each, and its times."""
    cluster = cluster_of(
        [[("t4", 2, 1)]] * 3, latency_s=LATENCY_S, bytes_per_s=RATE, between=Link(latency_s=5e-5, bytes_per_s=CARD)
    )
    batch = Batch(global_batch=12, seq_len=256, precision="fp32")
    problem = Problem(cluster=cluster, model=small_gpt(tied_embeddings=tied), batch=batch)
    problem = replace(problem, runtime=replace(problem.runtime, tied_once=once))
    layers = ((0, 4), (4, problem.model.layers))
    stages = tuple(
        Stage(first_layer=a, last_layer=b, workers=tuple(Worker(pool=d // 2, devices=(d,)) for d in devices))
        for (a, b), devices in zip(layers, ends, strict=True)
    )
    routes = np.stack([np.arange(12) % stage.width for stage in stages], axis=1)
    links = tuple(LinkUse(source=a, target=b, weight_gradients=mode) for a in range(3) for b in range(3) if a != b)
    plan = Plan(
        stages=stages,
        routes=routes,
        micro_batch_size=1,
        spans=stage_spans(stages, [stage.width for stage in stages]),
        links=links,
        local_steps=local_steps,
    )
    return plan, problem, step_times(plan, CostTables(problem))


def test_the_workers_of_both_stages_sum_it_once():
    """Stages of two nodes in a region each: over the nodes of each region, then between these over all pairs of nodes.
    Each stage sums what else it holds, as if the weight were none of it."""
    ends = (0, 1), (2, 3)
    once = plan_on(ends)[2]
    pairs = pairs_at_once(2, 2, 2, 2)
    across_s = LATENCY_S + TIED * 4 / min(RATE * pairs, 2 * CARD)
    assert once.tied.across_s == pytest.approx(across_s)
    assert once.tied.region_s == pytest.approx(TIED * 4 / CARD, rel=0.2)
    others = plan_on(ends, tied=False)[2]
    held = [stage.wire_bytes for stage in others.reductions]
    assert once.reductions[0].wire_bytes == pytest.approx(held[0] - TIED * 4)  # whose embedding is its own
    assert once.reductions[1].wire_bytes == pytest.approx(held[1] - TIED * 4)
    twice = plan_on(ends, once=False)[2]
    assert [of.wire_bytes for of in twice.reductions] == pytest.approx(held)
    assert twice.tied_s == pytest.approx(LATENCY_S + TIED * 4 / RATE)


@pytest.mark.parametrize("once", [True, False])
def test_factors_are_of_the_matrix_that_it_is(once):
    """32,000 rows of 1,024 numbers, not a square of as many: PowerSGD sends eight numbers for each row and column."""
    tied = plan_on(((0, 1), (2, 3)), mode="powersgd", once=once)[2].tied
    assert {n_bytes for *_, n_bytes in tied.across_bytes} == {8 * (TIED // 1024 + 1024) * 4}


def test_three_regions_send_parts_and_the_sums_of_parts():
    """First stage in two regions, last in a third: two rounds in which each has a third, and so the bytes that go."""
    plan, problem, times = plan_on(((0, 2), (4,)))
    part_s = TIED * 4 / 3 / RATE
    assert times.tied_s == pytest.approx(2 * (LATENCY_S + part_s))
    tied = np.where(np.eye(3, dtype=bool), 0.0, 2 * TIED * 4 / 3)
    first = np.zeros((3, 3))
    first[[0, 1], [1, 0]] = times.reductions[0].wire_bytes
    assert traffic_bytes(problem, plan, times)[1] == pytest.approx(tied + first)


def test_cards_that_a_regions_sums_use_pass_what_leaves_it_as_well():
    """A stage on two nodes of a region and one of another: each of the two sends and hears half of what crosses."""
    cost = plan_on(((0, 1, 2), (4,)))[2].reductions[0]
    assert cost.card_s == pytest.approx(cost.wire_bytes / 2 / CARD, rel=0.15)
    rest_s = cost.across_s - cost.latency_s
    busiest_s = max(cost.region_s + cost.card_s, rest_s)
    others_s = cost.region_s + rest_s - busiest_s
    assert cost.streamed_s == pytest.approx(cost.latency_s + busiest_s + cost.last * others_s)
    assert plan_on(((0, 2), (4,)))[2].reductions[0].card_s == 0  # no card has sums inside a region


def test_packing_leaves_a_quarter_to_be_sent():
    """Two regions, int8 for fp32."""
    plain, packed = (plan_on(((0,), (2,)), mode=mode)[2].tied for mode in ("none", "int8"))
    assert packed.wire_bytes == pytest.approx(plain.wire_bytes / 4, rel=0.02)
    assert LATENCY_S + packed.wire_bytes / RATE < packed.across_s < LATENCY_S + 1.5 * packed.wire_bytes / RATE


def test_regions_that_hold_both_copies_meet_seldom():
    """With four local steps each sums inside, and all once in four; where a region holds one copy alone, in every
    step."""
    every, seldom = (plan_on(((0, 2), (1, 3)), local_steps=steps)[2] for steps in (1, 4))
    assert seldom.tied.across_s == 0 and seldom.tied_s == pytest.approx(every.tied.region_s)
    assert seldom.tied.outer_s == pytest.approx(every.tied_s / 4)
    met = [of.outer_s for of in seldom.reductions]
    assert seldom.sums[3] == pytest.approx(np.array(met) + every.tied_s / 4)
    apart = plan_on(((0, 1), (2, 3)), local_steps=4)[2]
    assert apart.tied_s == pytest.approx(plan_on(((0, 1), (2, 3)))[2].tied_s)


def test_an_embedding_comes_last_with_the_layer_before_which_it_is():
    """Its backward takes no time. Of a model in one stage that is the shared weight and a block, of the first of two
    stages, which sums that weight apart, what else it has there, and a block; of the last a block."""
    block = 12 * 1024**2 + 13 * 1024
    positions = 1024 * 1024
    plan, problem, times = plan_on(((0, 1), (2, 3)))
    tables = CostTables(problem)
    assert part_at_end(plan, tables, 0) == pytest.approx((positions + block) / (positions + 3 * block), rel=1e-3)
    assert part_at_end(plan, tables, 1) == pytest.approx(1 / 3, rel=1e-3)
    assert [of.last for of in times.reductions] == [part_at_end(plan, tables, s) for s in (0, 1)]
    stage = Stage(first_layer=0, last_layer=problem.model.layers, workers=plan.stages[0].workers)
    alone = replace(plan, stages=(stage,), routes=plan.routes[:, :1], spans=stage_spans((stage,), (2,)))
    whole = TIED + positions + 6 * block
    assert part_at_end(alone, tables, 0) == pytest.approx((TIED + positions + block) / whole, rel=1e-3)
    # What is left of the sums when backward has ended is that part.
    cost = times.reductions[0]
    assert cost.last_s == pytest.approx(cost.latency_s + (cost.total_s - cost.latency_s) * cost.last)


@pytest.mark.parametrize(
    ("ends", "owed"), [(((0,), (2,)), (1, 1)), (((0, 1), (2,)), (1 / 2, 1)), (((0,), (1,)), (0, 0))]
)
def test_who_leads_the_sum_of_a_packed_weight_keeps_what_it_drops(ends, owed):
    """Stages of one region sum nothing of their own over others; what both sum of the weight that they share, leaders
    keep as much of as they lead. In one region nothing is packed."""
    memories = []
    for mode in ("none", "int8"):
        plan, problem, _ = plan_on(ends, mode=mode)
        tables = CostTables(problem)
        memories.append([of.gradients for of in worker_memory(plan, tables, tables.placement(plan))])
    more = np.subtract(*memories[::-1])
    assert more == pytest.approx(np.repeat(owed, [len(end) for end in ends]) * TIED * 4)
