"""Small changes of finished plans, one by one: what they change, and where there are none."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem, Stage, StageRule, Worker
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.planning import polish
from polygon.planning.checker import violations
from polygon.planning.polish import changes, fitted, in_chunks, interleaved, polished
from polygon.planning.warmup_depths import Pacing
from tests.linked_regions import cluster_of, small_gpt

PROBLEM = Problem(
    cluster=cluster_of([[("a100-40gb", 2, 4)]]), model=small_gpt(), batch=Batch(global_batch=16, seq_len=512)
)


def stage(first=0, last=5, *, workers=2, tp=1, cp=1, **more):
    """A stage of equal workers."""
    devices = np.arange(workers * tp * cp).reshape(workers, -1)
    members = tuple(Worker(pool=0, devices=tuple(row.tolist()), cp=cp) for row in devices)
    return Stage(first_layer=first, last_layer=last, workers=members, **more)


def again(of):
    """Recomputation of a stage: mode and blocks."""
    return None if of is None else (of.recompute, of.recompute_blocks)


def plan_of(**config):
    """A uniform plan of the problem."""
    return uniform_plan(PROBLEM, ParallelConfig(**config))


@pytest.mark.parametrize(
    ("how", "more", "expected"),
    [
        ({}, 1, ("full", 1)),
        ({}, 4, ("full", None)),
        ({}, 8, ("full", None)),
        ({}, -1, None),
        ({"recompute": "selective", "recompute_blocks": 2}, 1, ("selective", 3)),
        ({"recompute": "selective", "recompute_blocks": 2}, -2, ("none", None)),
        ({"recompute": "selective", "recompute_blocks": 2}, -4, ("none", None)),
        ({"recompute": "full"}, 1, None),
        ({"recompute": "full"}, -1, ("full", 3)),
    ],
)
def test_blocks_are_recomputed_in_part(how, more, expected):
    """Of four blocks after the embedding, from its first layer on; in a later stage all layers are blocks."""
    assert again(polish._recomputing(stage(0, 5, **how), more)) == expected
    assert again(polish._recomputing(stage(1, 5, **how), more)) == expected
    assert again(polish._recomputing(stage(3, 7, **how), more)) == expected


def test_sequence_is_split_where_it_can_be():
    """Among the tokens' divisors, over layers that are cut; and put back."""
    split = polish._with_sequence(stage(tp=2), 8)
    assert split.sequence_parallel and not polish._with_sequence(split, 8).sequence_parallel
    assert polish._with_sequence(stage(tp=1), 8) is None
    assert polish._with_sequence(stage(tp=2, cp=2), 6) is None
    assert polish._with_sequence(stage(tp=3), 8) is None


def test_experts_are_spread_over_more_devices_or_fewer():
    """Twice or half as many, a divisor of the experts and of the devices that hold the same."""
    assert polish._spread(stage(workers=4, ep=2), 2, 8).ep == 4
    assert polish._spread(stage(workers=4, ep=2), 0.5, 8).ep == 1
    assert polish._spread(stage(workers=2, cp=2, tp=1), 2, 8).ep == 2
    assert polish._spread(stage(workers=4, ep=1), 0.5, 8) is None
    assert polish._spread(stage(workers=4, ep=2), 2, 6) is None
    assert polish._spread(stage(workers=6, ep=2), 2, 8) is None
    one = stage(workers=2)
    unlike = replace(one, workers=(one.workers[0], replace(one.workers[1], pool=1)))
    assert polish._spread(unlike, 2, 8) is None


def test_zero_divides_by_what_there_is():
    """Shards that divide the members, fewer than all, other than they are."""
    assert polish._sharded(stage(workers=4, zero=1), 2).shards == 2
    assert polish._sharded(stage(workers=4, zero=1), 3) is None
    assert polish._sharded(stage(workers=4, zero=1), 4) is None
    assert polish._sharded(stage(workers=4), 2) is None
    assert polish._sharded(stage(workers=4, zero=1, shards=2), 2) is None
    both = polish._dividing(stage(workers=4, zero=1, shards=2), 2)
    assert (both.zero, both.shards) == (2, 0)
    assert polish._dividing(stage(workers=1), 1) is None
    assert polish._dividing(stage(workers=1, cp=2), 1).zero == 1
    assert polish._dividing(stage(workers=4, zero=1), 1) is None
    assert polish._dividing(stage(workers=4, zero=1, shards=2), 1).shards == 0


def test_borders_move_by_a_block_or_a_few():
    """Three stages of eight layers, borders at 3 and 5: no stage is left without layers."""
    plan = plan_of(pp=3, stage_layers=(3, 2, 3))
    found = [tuple(s.last_layer for s in draft.stages[:2]) for draft in polish._borders(plan, 8)]
    assert found == [(2, 5), (4, 5), (1, 5), (3, 4), (3, 6), (3, 7)]
    for draft in polish._borders(plan, 8):
        assert all(a.last_layer == b.first_layer for a, b in zip(draft.stages, draft.stages[1:], strict=False))
        assert draft.spans == plan.spans
    assert polish._tidy(stage(3, 6, recompute="full", recompute_blocks=3)).recompute_blocks is None
    assert polish._tidy(stage(3, 6, recompute="full", recompute_blocks=2)).recompute_blocks == 2


def test_parts_differ_by_one_and_larger_ones_come_first():
    """7 in 3: 3, 2, 2."""
    assert [polish._part(7, 3, i) for i in range(3)] == [3, 2, 2]


def test_interleaved_groups_keep_their_layers():
    """Embedding with the first, head with the last: 8 layers by two groups as 4 and 4, each in two or three parts."""
    plan = plan_of(pp=2)
    assert polish._blocks(plan) == [3, 3]
    assert [s.layers for s in interleaved(plan, 2)] == [(0, 3), (3, 5), (5, 6), (6, 8)]
    assert [s.layers for s in interleaved(plan, 3)] == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 8)]
    assert interleaved(plan, 4) is None
    assert [s.layers for s in interleaved(replace(plan, stages=interleaved(plan, 3), chunks=3), 1)] == [(0, 4), (4, 8)]


def test_interleaved_groups_recompute_as_many_blocks():
    """Two of the first group's three blocks, all three of the other's."""
    plan = plan_of(pp=2)
    first, second = plan.stages
    first = replace(first, recompute="selective", recompute_blocks=2)
    plan = replace(plan, stages=(first, replace(second, recompute="full")))
    # Group 0 holds blocks in parts of 2 and 1, group 1 of 2 and 1.
    assert [again(s) for s in interleaved(plan, 2)] == [
        ("selective", 1), ("full", None), ("selective", None), ("full", None),
    ]  # fmt: skip
    first = replace(first, recompute_blocks=1)
    assert [again(s) for s in interleaved(replace(plan, stages=(first, second)), 2)] == [
        ("selective", 1), ("none", None), ("none", None), ("none", None),
    ]  # fmt: skip


def test_the_best_other_number_of_chunks_is_taken():
    """By whatever counts, of those that memory holds; none where a stage is the only one."""
    tables = CostTables(PROBLEM)
    for sign in (1, -1):
        found = in_chunks(plan_of(dp=2, pp=2), tables, lambda plan, sign=sign: sign * plan.chunks)
        assert found.chunks == (2 if sign == 1 else 3) and not violations(PROBLEM, found, tables)
    assert in_chunks(plan_of(dp=4), tables, lambda plan: plan.chunks) is None


def test_chunks_keep_the_limits_on_stages():
    """Chunks are stages: no more than may be, and none where a rule says that its place in the pipeline must not be."""
    plan = plan_of(dp=2, pp=2)
    for limits, expected in (
        (Constraints(most_stages=5), 2),
        (Constraints(most_stages=3), None),
        (Constraints(stage_rules=(StageRule(stage=4, never_regions=(PROBLEM.cluster.regions[0].name,)),)), 2),
        (Constraints(stage_rules=(StageRule(stage=3, never_regions=(PROBLEM.cluster.regions[0].name,)),)), None),
    ):
        tables = CostTables(replace(PROBLEM, constraints=limits))
        found = in_chunks(plan, tables, lambda plan: -plan.chunks)
        assert (found and found.chunks) == expected


def test_only_lanes_are_interleaved():
    """Every micro-batch stays in its lane, spans are as wide as the stage; other numbers of parts than there are."""
    plan = plan_of(pp=2, dp=2)
    drafts = list(polish.interleavings(plan))
    assert [draft.chunks for draft in drafts] == [2, 3]
    assert all(draft.routes.shape == (plan.micro_batches, len(draft.stages)) for draft in drafts)
    assert all((draft.routes == plan.routes[:, :1]).all() for draft in drafts)
    assert all(set(draft.spans) == {(2, 2)} for draft in drafts)
    assert [draft.chunks for draft in polish.interleavings(drafts[0])] == [1, 3]
    routes = plan.routes.copy()
    routes[0, 1] = 1 - routes[0, 1]
    assert not list(polish.interleavings(replace(plan, routes=routes)))
    assert not list(polish.interleavings(plan_of(dp=4)))
    unlike = (plan.stages[0], replace(plan.stages[1], workers=plan.stages[1].workers[:1]))
    assert not list(polish.interleavings(replace(plan, stages=unlike, routes=np.zeros_like(plan.routes))))


def test_changes_are_of_all_stages_and_of_one():
    """Recomputation of both stages of a pipeline, of the first, of the second; spans stay, as `fitted` begins there."""
    tables = CostTables(PROBLEM)
    plan = plan_of(pp=2, dp=2)
    drafts = list(changes(plan, tables))
    modes = [tuple(s.recompute for s in draft.stages) for draft in drafts]
    assert modes[:3] == [("selective", "selective"), ("selective", "none"), ("none", "selective")]
    assert drafts[0].spans == plan.spans == ((2, 2),) * 2
    assert {s.zero for draft in drafts for s in draft.stages} == {0, 1, 2, 3}
    assert not any(s.shards for draft in drafts for s in draft.stages)
    four = list(changes(plan_of(dp=8, zero=1), tables))
    assert {s.shards for draft in four for s in draft.stages} == {0, 2, 4}
    # One stage: changes of all and of one are the same, and are made once.
    assert [draft.stages[0].recompute for draft in four][:2] == ["selective", "full"]
    # Interleaved: all at once, but for what is recomputed, and spans stay.
    [chunked] = [draft for draft in drafts if draft.chunks == 2]
    for draft in changes(chunked, tables):
        assert draft.chunks != 2 or draft.spans == chunked.spans
        assert len({(s.zero, s.shards, s.ep, s.sequence_parallel) for s in draft.stages}) == 1
    assert ("selective", "none", "none", "none") in [
        tuple(s.recompute for s in draft.stages) for draft in changes(chunked, tables)
    ]


def test_an_interleaved_draft_recomputes_what_memory_does_not_hold():
    """Block by block, only where it is short; None where all recomputed do not help."""
    tables = CostTables(PROBLEM)
    plan = next(draft for draft in polish.interleavings(plan_of(pp=2)) if draft.chunks == 2)
    assert fitted(plan, tables) is plan
    place = tables.placement(plan)
    need = np.array([memory.total_bytes for memory in polish.worker_memory(plan, tables, place)])
    tables.limit_bytes = np.full_like(tables.limit_bytes, need.max() - 1)
    smaller = fitted(plan, tables)
    short = {int(s) for s in place.stage[need > need.max() - 1]}
    assert smaller is not None and {s for s, of in enumerate(smaller.stages) if of.recompute != "none"} >= short
    assert all(of.recompute_blocks in (None, 1) for of in smaller.stages)
    tables.limit_bytes = np.zeros_like(tables.limit_bytes)
    assert fitted(plan, tables) is None
    assert fitted(plan_of(dp=2), tables) is None


def test_polishing_prices_no_more_than_it_may():
    """What helps by more than `GAIN` is kept; nothing is tried once time is up, or often enough."""
    tables = CostTables(PROBLEM)
    plan = plan_of(pp=2, dp=2)
    priced = []

    def value_of(draft):
        priced.append(draft)
        return -1.0 - all(s.recompute == "selective" for s in draft.stages)

    best = polished(plan, tables, value_of, evaluations=10**6)
    assert [s.recompute for s in best.stages] == ["selective", "selective"]
    priced.clear()
    assert polished(plan, tables, value_of, evaluations=10**6, expired=lambda: True) is plan
    assert priced == [plan]
    priced.clear()
    polished(plan, tables, lambda draft: priced.append(draft) or 1.0, evaluations=0)
    assert 1 < len(priced) <= 1 + polish.FEWEST and priced[0] is plan
    gains = iter([1.0, *[1.0 - 0.5 * polish.GAIN] * 10**6])
    assert polished(plan, tables, lambda draft: next(gains), evaluations=10**6) is plan


def test_by_time_a_change_that_no_order_makes_quicker_is_not_simulated():
    """The plan is the same, and fewer are priced; `fitted` gives none whose floor is what is known."""
    tables = CostTables(PROBLEM)
    plan = plan_of(pp=2, dp=2)
    found, priced = [], []

    def value_of(draft):
        priced.append(draft)
        return step_times(draft, tables).step_s

    for by_time in (False, True):
        priced.clear()
        best = polished(plan, tables, value_of, evaluations=10**6, by_time=by_time)
        found.append((step_times(best, tables).step_s, len(priced)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12) and found[1][1] < found[0][1]
    floor_s = Pacing(plan, tables).floor_s
    assert fitted(plan, tables, floor_s) is None is not fitted(plan, tables, floor_s * (1 + 1e-9))


def test_a_polish_to_the_end_looks_at_every_change():
    """By what no plan of the first pass has: with a few evaluations the last of all changes is not met."""
    tables, plan = CostTables(PROBLEM), plan_of(pp=4)
    last = list(changes(plan, tables))[-1]
    borders = [stage.layers for stage in last.stages]

    def value(other):
        return float([stage.layers for stage in other.stages] != borders)

    assert len(list(changes(plan, tables))) > polish.FEWEST
    few = polished(plan, tables, value, evaluations=1)
    whole = polished(plan, tables, value, evaluations=1, to_the_end=True)
    assert (value(few), value(whole)) == (1.0, 0.0)
