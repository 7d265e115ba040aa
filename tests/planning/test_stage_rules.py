"""Rules for stages: what they take out of an allocation, and allocations that keep them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Plan, Problem, StageRule
from polygon.planning.checker import broken_rules
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.stage_rules import StageRules
from tests.linked_regions import cluster_of, small_gpt

CLASS_REGIONS = np.array([0, 0, 1, 2])


def rules_of(*rules, **more):
    """Of a problem with three regions and four classes of workers, two of them in the first."""
    problem = Problem(
        cluster=cluster_of([[("t4", 4, 2)]] * 3),
        model=small_gpt(),
        batch=Batch(global_batch=8, seq_len=512),
        constraints=Constraints(stage_rules=rules, **more),
    )
    return StageRules(problem, CLASS_REGIONS)


def test_a_stage_may_be_served_by_what_all_its_rules_allow():
    """Counted from the first or from the last; a rule that names regions excludes all others."""
    rules = rules_of(
        StageRule(stage=1, never_regions=("r0",)),
        StageRule(stage=-1, only_regions=("r0", "r2")),
        StageRule(stage=-2, never_regions=("r2",)),
    )
    assert rules and not rules_of()
    assert rules.allowed(0, 4).tolist() == [True] * 4
    assert rules.allowed(1, 4).tolist() == [False, False, True, True]
    assert rules.allowed(2, 4).tolist() == [True, True, True, False]
    assert rules.allowed(3, 4).tolist() == [True, True, False, True]
    assert rules.allowed(1, 2).tolist() == [False, False, False, True]
    assert rules.allowed(0, 1).tolist() == [True, True, False, True]


def test_a_stage_that_loses_its_workers_falls_away_and_the_rules_move_on():
    """First in r0, second never there: what stands second, only in r0, goes; the third becomes the second."""
    rules = rules_of(StageRule(stage=1, never_regions=("r0",)), first_stage_regions=("r0",))
    workers = np.array([[1, 2, 3, 0], [0, 0, 0, 0], [4, 0, 0, 0], [1, 0, 2, 1], [1, 1, 1, 1]])
    expected = [[1, 2, 0, 0], [0, 0, 2, 1], [1, 1, 1, 1], [0] * 4, [0] * 4]
    assert rules.legal(workers).tolist() == expected
    assert rules.legal(np.zeros((2, 4), dtype=np.int64)).tolist() == [[0] * 4] * 2
    assert rules.legal(np.array([[0, 0, 5, 0]])).tolist() == [[0] * 4]


def test_workers_are_brought_to_where_they_may_be():
    """Those of r1 that stood first go to the others, evenly; the pinned first stage takes half of what may serve it."""
    rules = rules_of(first_stage_regions=("r0",))
    first, longer = rules.starts(np.array([[0, 0, 3, 0], [4, 2, 0, 0], [0, 0, 1, 1], [0] * 4]))
    assert first.tolist() == [[2, 1, 0, 0], [2, 1, 2, 0], [0, 0, 2, 1], [0] * 4]
    assert longer.tolist() == [[2, 1, 0, 0], [0, 0, 3, 0], [2, 1, 0, 0], [0, 0, 1, 1]]
    last = rules_of(last_stage_regions=("r2",))
    assert [x.tolist() for x in last.starts(np.array([[1, 0, 0, 2], [0] * 4]))] == [
        [[0, 0, 0, 2], [0] * 4],
        [[1, 0, 0, 1], [0, 0, 0, 1]],
    ]
    assert list(rules.starts(np.zeros((2, 4), dtype=np.int64))) == []


@pytest.mark.parametrize("more", [{"first_stage_regions": ("r0",)}, {"last_stage_regions": ("r1", "r2")}, {}])
@given(seed=st.integers(0, 999))
def test_starts_keep_the_rules_and_invent_no_workers(more, seed):
    """Whatever the allocation; so does what is legal, which changes nothing the second time."""
    rules = rules_of(StageRule(stage=1, never_regions=("r1",)), **more)
    workers = np.random.default_rng(seed).integers(0, 4, (4, 4)) * np.random.default_rng(seed + 1).integers(
        0, 2, (4, 4)
    )
    for x in (rules.legal(workers), *rules.starts(workers)):
        assert (x.sum(axis=0) <= workers.sum(axis=0)).all()
        assert (rules.legal(x) == x).all()
        stages = int(x.any(axis=1).sum())
        assert x[:stages].any(axis=1).all()
        assert all((x[s][~rules.allowed(s, stages)] == 0).all() for s in range(stages))


@pytest.mark.parametrize("rule", [{"last_stage_regions": ("r1",)}, {"first_stage_regions": ("r2",)}])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_stage_of_less_than_a_unit_falls_away_before_the_rules_look(rule, cp):
    """Workers come in units of as many as cut a sequence; whatever is decoded keeps the rules."""
    problem = Problem(
        cluster=cluster_of([[("t4", 4, 2)]] * 3),
        model=small_gpt(),
        batch=Batch(global_batch=8, seq_len=512),
        constraints=Constraints(**rule),
    )
    decoder, rng, made = Decoder(problem), np.random.default_rng(cp), 0
    for _ in range(12):
        workers = rng.integers(0, 3, (4, len(decoder.classes)))
        for c, (_, tp) in enumerate(decoder.classes):
            workers[:, c] *= tp == 1
        plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1, cp=cp), relax=False)
        if isinstance(plan, Plan):
            made += 1
            assert broken_rules(problem, plan) == [], workers.tolist()
    assert made
