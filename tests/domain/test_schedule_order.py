"""Laws of the order of actions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.schedule import in_flight, topological_order, windows, worker_order
from tests.routed_plans import routed_plans


@given(routed_plans())
def test_order_respects_every_dependency(plan):
    """Forwards go down the stages, backwards up, and a backward never comes before its forward."""
    place = {tuple(row): i for i, row in enumerate(topological_order(plan).tolist())}
    micro_batches, stages = plan.routes.shape
    assert len(place) == 2 * micro_batches * stages
    for m in range(micro_batches):
        for s in range(stages - 1):
            assert place[0, m, s] < place[0, m, s + 1]
            assert place[1, m, s + 1] < place[1, m, s]
        assert place[0, m, stages - 1] < place[1, m, stages - 1]


@given(routed_plans())
def test_worker_order_is_a_part_of_the_whole_order(plan):
    """Every worker's list is the whole order without what others do, and holds its share twice."""
    whole = topological_order(plan)
    for s, stage in enumerate(plan.stages):
        for w in range(stage.width):
            mine = [(k, m) for k, m, stage_ in whole.tolist() if stage_ == s and plan.routes[m, s] == w]
            assert [("FB".index(a.kind), a.micro_batch) for a in worker_order(plan, s, w)] == mine
            assert len(mine) == 2 * plan.shares(s)[w]


@given(routed_plans())
def test_in_flight_counts_forwards_without_backward(plan):
    """The peak of forwards minus backwards along a worker's list."""
    for s, stage in enumerate(plan.stages):
        for w in range(stage.width):
            steps = [1 if action.kind == "F" else -1 for action in worker_order(plan, s, w)]
            assert in_flight(plan, s)[w] == max(np.cumsum(steps), default=0)


@given(stages=st.integers(1, 6), width=st.integers(1, 4), per_worker=st.integers(1, 12))
def test_spans_of_the_width_are_1f1b(stages, width, per_worker):
    """Equal widths, micro-batches in turn, span = width: stage s warms up with stages - s forwards, then alternates."""
    from tests.routed_plans import plain_plan

    plan = plain_plan(stages, width, per_worker * width, span=width)
    for s in range(stages):
        warm = min(stages - s, per_worker)
        expected = "F" * warm + "BF" * (per_worker - warm) + "B" * warm
        assert "".join(action.kind for action in worker_order(plan, s, 0)) == expected
        assert (in_flight(plan, s) == warm).all()


@given(stages=st.integers(1, 5), micro_batches=st.integers(1, 10))
def test_spans_of_all_micro_batches_are_gpipe(stages, micro_batches):
    """All forwards before all backwards."""
    from tests.routed_plans import plain_plan

    plan = plain_plan(stages, 1, micro_batches, span=micro_batches)
    for s in range(stages):
        kinds = "".join(action.kind for action in worker_order(plan, s, 0))
        assert kinds == "F" * micro_batches + "B" * micro_batches
    assert (windows(plan)[:, -1] == micro_batches).all()
