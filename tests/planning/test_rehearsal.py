"""Laws of scaling a plan down."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.domain.plan import Problem, Stage, Worker
from polygon.domain.schedule import orders_end, worker_order
from polygon.planning.rehearsal import MAX_LAYERS, MAX_MICRO_BATCH_SIZE, _select, rehearsal_problem
from tests.nightly import cases
from tests.routed_plans import ranked
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan


@st.composite
def plans(draw):
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=10))
    counts = [draw(st.integers(1, 20)) for _ in widths]
    counts[0] += 2
    borders = np.cumsum([0, *counts]).tolist()
    cluster = small_cluster(*[draw(st.integers(1, 4)) for _ in range(3)], sum(widths))
    numbers = iter(draw(st.permutations(range(cluster.devices)))[: sum(widths)])
    micro_batches = draw(st.integers(1, 80))
    routes = [[draw(st.integers(0, width - 1)) for width in widths] for _ in range(micro_batches)]
    spans = tuple(draw(st.integers(1, 30)) for _ in widths)
    model = small_model(blocks=sum(counts) - 2)
    plan = small_plan(
        cluster,
        list(itertools.pairwise(borders)),
        [[next(numbers) for _ in range(width)] for width in widths],
        routes,
        spans=spans,
    )
    problem, _ = routed_problem(1)
    return Problem(cluster=cluster, model=model, batch=problem.batch), plan


@settings(max_examples=cases(60), deadline=None)
@given(problem_plan=plans(), max_ranks=st.none() | st.integers(1, 12))
def test_rehearsal_keeps_the_shape_within_the_limits(problem_plan, max_ranks):
    """Stages (as far as ranks allow), layers covered, every stage with a layer, routes valid, nobody loses all work."""
    problem, plan = problem_plan
    small, short = rehearsal_problem(problem, plan, max_ranks=max_ranks)
    stages = len(plan.stages)
    assert len(short.stages) == (stages if max_ranks is None else min(stages, max_ranks))
    assert short.world_size <= (max_ranks or plan.world_size)
    if max_ranks is None:
        assert [stage.width for stage in short.stages] == [stage.width for stage in plan.stages]
    borders = [stage.first_layer for stage in short.stages] + [short.stages[-1].last_layer]
    assert borders[0] == 0
    assert borders[-1] == small.model.layers <= max(MAX_LAYERS, len(short.stages), 3) + stages
    assert (np.diff(borders) >= 1).all()
    assert all(len(row) == stage.width and min(row) >= 1 for row, stage in zip(short.spans, short.stages, strict=True))
    assert short.micro_batches * short.micro_batch_size == small.batch.global_batch
    for s, stage in enumerate(short.stages):
        assert short.routes[:, s].max() < stage.width
        assert all(worker.tp == 1 for worker in stage.workers)
    if max_ranks is None:
        for s in range(stages):
            assert ((short.shares(s) > 0) == (plan.shares(s) > 0)).all()


@settings(max_examples=cases(60), deadline=None)
@given(
    problem_plan=plans(),
    max_ranks=st.none() | st.integers(1, 12),
    max_micro_batches=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_an_order_of_the_plan_s_own_is_kept(problem_plan, max_ranks, max_micro_batches, seed):
    """Who is not merged does what is left of the step in the same order; merged or not, no worker waits for ever."""
    problem, plan = problem_plan
    plan = ranked(plan, np.random.default_rng(seed))
    _, short = rehearsal_problem(problem, plan, max_ranks=max_ranks, max_micro_batches=max_micro_batches)
    assert short.order.shape == (2, short.micro_batches, len(short.stages)) and orders_end(short)
    if max_ranks is not None:
        return
    chosen = _select(plan.routes, [stage.width for stage in plan.stages], max_micro_batches)
    number = {int(m): i for i, m in enumerate(chosen)}
    for s, stage in enumerate(plan.stages):
        for w in range(stage.width):
            left = [a for a in worker_order(plan, s, w) if a.micro_batch in number]
            assert worker_order(short, s, w) == [a._replace(micro_batch=number[a.micro_batch]) for a in left]


def test_merged_workers_take_turns():
    """What one of them did is done in the same order, between what the other did."""
    problem, plan = routed_problem(8)
    own = ranked(plan, np.random.default_rng(0))
    _, short = rehearsal_problem(problem, own, max_ranks=4)
    of_both = [worker_order(own, 1, w) for w in range(2)]
    merged = worker_order(short, 1, 0)
    assert sorted(map(str, merged)) == sorted(str(action) for actions in of_both for action in actions)
    for actions in of_both:
        assert [action for action in merged if action in actions] == actions


def test_small_plan_is_kept_as_it_is():
    """A plan within the limits keeps its routes, spans and workers."""
    problem, plan = routed_problem(8)
    _, short = rehearsal_problem(problem, plan)
    assert (short.routes == plan.routes).all()
    assert short.spans == plan.spans
    assert [stage.workers for stage in short.stages] == [stage.workers for stage in plan.stages]


def test_merged_workers_take_over_the_shares():
    """When widths shrink, every micro-batch stays with the rank that stands for its worker."""
    problem, plan = routed_problem(8)
    _, short = rehearsal_problem(problem, plan, max_ranks=4)
    assert [stage.width for stage in short.stages] == [1, 2, 1]
    first_two, last_two = plan.shares(1)[:2].sum(), plan.shares(1)[2:].sum()
    assert short.shares(1).tolist() == [first_two, last_two]


@pytest.mark.parametrize(
    ("degrees", "max_ranks", "expected"),
    [
        ((8, 8), None, [[4, 4], [4, 4]]),
        ((2, 4), None, [[2, 4], [2, 4]]),
        ((4, 4), 8, [[4], [4]]),
        ((4, 4), 7, [[2, 2], [2]]),
        ((2, 4), 3, [[1, 1], [1]]),
        ((6, 3), None, [[2, 1], [2, 1]]),
    ],
)
def test_rehearsal_keeps_tensor_parallel_groups_where_ranks_suffice(degrees, max_ranks, expected):
    """Degrees shrink to what divides four heads, and further before stages are merged; widths share what is left."""
    cluster = small_cluster(40)
    numbers = iter(range(40))
    stages = tuple(
        Stage(
            first_layer=first,
            last_layer=last,
            workers=tuple(Worker(pool=0, devices=tuple(next(numbers) for _ in range(tp))) for tp in degrees),
        )
        for first, last in ((0, 3), (3, 6))
    )
    problem, plain = routed_problem(1)
    routes = np.array([[0, 1], [1, 0]] * 4)
    plan = replace(plain, stages=stages, routes=routes, spans=((8, 8), (8, 8)))
    _, short = rehearsal_problem(replace(problem, cluster=cluster), plan, max_ranks=max_ranks)
    assert [[worker.tp for worker in stage.workers] for stage in short.stages] == expected
    assert short.world_size <= (max_ranks or 40)


def test_what_is_split_stays_split_and_sizes_have_limits():
    """ZeRO where there are workers to split among; micro-batches of at most the limit, dense blocks of all blocks."""
    problem, plan = routed_problem(8)
    plan = replace(plan, stages=tuple(replace(stage, zero=2) for stage in plan.stages))
    problem = replace(problem, batch=replace(problem.batch, global_batch=8 * 64))
    for size in (1, MAX_MICRO_BATCH_SIZE, 64):
        small, short = rehearsal_problem(problem, replace(plan, micro_batch_size=size), max_ranks=4)
        assert [(stage.width, stage.zero) for stage in short.stages] == [(1, 0), (2, 2), (1, 0)]
        assert short.micro_batch_size == min(size, MAX_MICRO_BATCH_SIZE)
        assert small.batch.global_batch == short.micro_batches * short.micro_batch_size
    for dense in (1, 30):
        model = small_model(blocks=40, experts=8, experts_per_token=2, expert_ffn_size=32, dense_blocks=dense)
        whole = replace(plan, stages=tuple(replace(s, last_layer=42 if s is plan.stages[-1] else s.last_layer)
                                           for s in plan.stages))  # fmt: skip
        small, _ = rehearsal_problem(replace(problem, model=model), whole)
        assert small.model.blocks < 30
        assert small.model.dense_blocks == min(dense, small.model.blocks)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_share_keys_still_share_them(kv_heads):
    """Grouped-query attention stays what it is, and attention without groups too."""
    problem, plan = routed_problem(2)
    small, _ = rehearsal_problem(replace(problem, model=small_model(heads=4, kv_heads=kv_heads)), plan)
    assert (small.model.kv_heads < small.model.heads) == (kv_heads < 4)


@pytest.mark.parametrize("ratio", [0.01, 1.0, 2.6875, 3.5, 4.0])
def test_widths_keep_their_ratio_in_eights(ratio):
    """Of feed-forward layers and experts to the model: as it is, to the nearest eight, and eight at least."""
    problem, plan = routed_problem(2)
    width = 1600
    model = replace(problem.model, hidden_size=width, heads=10, kv_heads=10, head_dim=160, ffn_size=int(ratio * width))
    small = rehearsal_problem(replace(problem, model=model), plan)[0].model
    assert small.ffn_size % 8 == 0
    assert abs(small.ffn_size - max(8, ratio * small.hidden_size)) <= 4
