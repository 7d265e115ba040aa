"""Laws of the order of actions."""

from collections import deque
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.schedule import (
    Action,
    in_flight,
    interleaved_in_flight,
    orders_end,
    repeated,
    topological_order,
    windows,
    worker_order,
)
from tests.routed_plans import ranked, routed_plans


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


@given(routed_plans(), st.integers(0, 99))
def test_a_plan_s_own_order_is_kept_by_all_who_ask_for_it(plan, seed):
    """Workers have it, the whole order respects dependencies, and what is in flight is counted in it."""
    plan = ranked(plan, np.random.default_rng(seed))
    assert orders_end(plan)
    place = {tuple(row): i for i, row in enumerate(topological_order(plan).tolist())}
    micro_batches, stages = plan.routes.shape
    assert len(place) == 2 * micro_batches * stages
    for s, stage in enumerate(plan.stages):
        for w in range(stage.width):
            actions = worker_order(plan, s, w)
            assert [int(plan.order["FB".index(a.kind), a.micro_batch, s]) for a in actions] == list(range(len(actions)))
            places = [place["FB".index(a.kind), a.micro_batch, s] for a in actions]
            assert places == sorted(places)
            held = np.cumsum([1 if action.kind == "F" else -1 for action in actions])
            assert in_flight(plan, s)[w] == max(held, default=0)
    for m, s in np.ndindex(micro_batches, stages - 1):
        assert place[0, m, s] < place[0, m, s + 1] < place[1, m, s + 1] < place[1, m, s]


@given(routed_plans(max_micro_batches=6), st.integers(0, 99), st.integers(1, 3))
def test_a_repeated_plan_goes_through_its_order_again(plan, seed, times):
    """Every worker's list is its list, once after the other, with the numbers of later micro-batches."""
    plan = ranked(plan, np.random.default_rng(seed))
    more = repeated(plan, times)
    assert orders_end(more) and more.micro_batches == times * plan.micro_batches
    for s, stage in enumerate(plan.stages):
        for w in range(stage.width):
            once = worker_order(plan, s, w)
            expected = [
                action._replace(micro_batch=action.micro_batch + turn * plan.micro_batches)
                for turn in range(times)
                for action in once
            ]
            assert worker_order(more, s, w) == expected


def test_workers_that_wait_for_one_another_are_found():
    """The last stage wants micro-batch 1 first, the first ends 0 before it begins 1."""
    from tests.routed_plans import plain_plan

    plan = plain_plan(2, 1, 2, span=1)
    first, last = [[0, 2], [1, 3]], [[2, 0], [3, 1]]
    assert not orders_end(replace(plan, order=np.stack([first, last], axis=2)))
    assert orders_end(replace(plan, order=np.stack([first, first], axis=2)))


def interleaved(plan, chunks):
    """The plan with its stages repeated on the same workers."""
    return replace(
        plan, stages=plan.stages * chunks, routes=np.tile(plan.routes, chunks), spans=plan.spans * chunks, chunks=chunks
    )


def orders(plan):
    """Actions of every worker of every group."""
    return {(g, w): deque(worker_order(plan, g, w)) for g in range(plan.groups) for w in range(plan.stages[g].width)}


def test_interleaved_order_is_that_of_megatron():
    """Two groups of two chunks, four micro-batches: warm-ups of 4 and 2 forwards, then one of each in turn."""
    from tests.routed_plans import plain_plan

    plan = interleaved(plain_plan(2, 1, 4, span=1), 2)
    assert [" ".join(map(str, worker_order(plan, group, 0))) for group in range(2)] == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


@given(routed_plans(max_stages=4, max_width=3, max_micro_batches=9), st.integers(2, 3), st.data())
def test_interleaved_workers_never_wait_in_a_circle(plan, chunks, data):
    """Whatever the routes: whoever takes what is next on its list comes to its end, each action once."""
    plan = interleaved(plan, chunks)
    micro_batches, stages = plan.routes.shape
    routes = np.array(
        [[data.draw(st.integers(0, stage.width - 1)) for stage in plan.stages] for _ in range(micro_batches)]
    )
    plan = replace(plan, routes=routes)
    waiting, done = orders(plan), set()
    while any(waiting.values()):
        before = len(done)
        for (group, worker), actions in waiting.items():
            while actions:
                kind, m, chunk = actions[0]
                s = group + chunk * plan.groups
                assert routes[m, s] == worker
                needs = [("F", m, s - 1)] if kind == "F" else [("F", m, s), ("B", m, s + 1)]
                if any(need not in done for need in needs if 0 <= need[2] < stages):
                    break
                done.add((kind, m, s))
                actions.popleft()
        assert len(done) > before
    assert len(done) == 2 * micro_batches * stages


@given(routed_plans(max_stages=4, max_width=3, max_micro_batches=9), st.integers(1, 3))
def test_pairs_of_workers_name_their_messages_in_one_order(plan, chunks):
    """The one sends in the order of its list what the other takes in the order of its own: no tags are needed."""
    if chunks > 1:
        plan = interleaved(plan, chunks)
    sent, taken = {}, {}
    for (group, worker), actions in orders(plan).items():
        for kind, m, chunk in actions:
            s, way = group + chunk * plan.groups, 1 if kind == "F" else -1
            for messages, other, to in ((sent, s + way, s + way), (taken, s - way, s)):
                if 0 <= other < len(plan.stages):
                    peer = other % plan.groups, int(plan.routes[m, other])
                    pair = ((group, worker), peer) if messages is sent else (peer, (group, worker))
                    messages.setdefault(pair, []).append((kind, m, to))
    assert sent == taken


@given(groups=st.integers(2, 4), chunks=st.integers(2, 3), rounds=st.integers(1, 4))
def test_interleaved_in_flight_counts_forwards_without_backward(groups, chunks, rounds):
    """In units of a worker's whole layers, for as many micro-batches as fill rounds of all groups."""
    from tests.routed_plans import plain_plan

    plan = interleaved(plain_plan(groups, 1, rounds * groups, span=1), chunks)
    for group in range(groups):
        steps = [1 if action.kind == "F" else -1 for action in worker_order(plan, group, 0)]
        assert interleaved_in_flight(plan, group)[0] == max(np.cumsum(steps)) / chunks


@given(st.sampled_from("FBV"), st.integers(0, 999), st.integers(0, 9))
def test_actions_are_read_from_their_names(kind, micro_batch, chunk):
    """And other names are none's."""
    action = Action(kind, micro_batch, chunk)
    assert Action.named(str(action)) == action
    assert Action.named(f"recv {action}") is None
