"""The schedule kernels against an independent event-driven simulator, and the laws of a makespan."""

import heapq
import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost import simulation as kernels
from polygon.cost.simulation import ScheduleTimes, backward_order, plain_step_s
from polygon.domain.schedule import windows, worker_order
from tests.nightly import cases
from tests.routed_plans import plain_plan, routed_plans


def simulate_events(plan, times):
    """Discrete events: workers take their next action when it is due, messages queue on all that they pass.

    Knows of the schedule only every worker's list of actions. Returns the end of every (kind, micro-batch, stage).
    """
    offset = np.cumsum([0] + [stage.width for stage in plan.stages])
    micro_batches, stages = plan.routes.shape
    todo = {
        int(offset[s]) + w: [(a.kind, a.micro_batch, s) for a in worker_order(plan, s, w)]
        for s, stage in enumerate(plan.stages)
        for w in range(stage.width)
    }
    arrived = {("F", m, 0) for m in range(micro_batches)}
    link_free, busy, ends, events, tick = {}, set(), {}, [], itertools.count()

    def begin_what_can(now):
        for worker, actions in todo.items():
            if worker in busy or not actions:
                continue
            kind, m, s = actions[0]
            if (kind == "B" and s == stages - 1 and ("F", m, s) in ends) or (kind, m, s) in arrived:
                actions.pop(0)
                busy.add(worker)
                duration = (times.forward_s if kind == "F" else times.backward_s)[worker]
                heapq.heappush(events, (now + duration, next(tick), "done", worker, (kind, m, s)))

    begin_what_can(0.0)
    while events:
        now, _, what, worker, (kind, m, s) = heapq.heappop(events)
        if what == "arrive":
            arrived.add((kind, m, s))
        else:
            busy.discard(worker)
            ends[kind, m, s] = now
            down = kind == "F"
            if (down and s + 1 < stages) or (not down and s > 0):
                boundary = s if down else s - 1
                to = s + 1 if down else s - 1
                message, leaves = (0 if down else 1, m, boundary), now
                for link, hold in zip(times.link[message], times.hold_s[message], strict=True):
                    if link >= 0:
                        link_free[link] = max(now, link_free.get(link, 0.0)) + hold
                        leaves = max(leaves, link_free[link])
                arrives = leaves + times.latency_s[message]
                heapq.heappush(events, (arrives, next(tick), "arrive", -1, (kind, m, to)))
        begin_what_can(now)
    assert not any(todo.values()), "the schedule deadlocked"
    return ends


def random_times(plan, seed, shared=False):
    """Durations and messages drawn at random, over a channel for every (sender, receiver, direction).

    Or, `shared`, over links between a few nodes, and some through the card of the sender's node.
    """
    rng = np.random.default_rng(seed)
    offset = np.cumsum([0] + [stage.width for stage in plan.stages])
    routes = plan.routes + offset[:-1]
    workers = int(offset[-1])
    order, first = backward_order(windows(plan))
    busy = rng.random((2, workers, workers)) * rng.choice([0.0, 1.0, 5.0])
    latency = rng.random((2, workers, workers)) * rng.choice([0.0, 3.0])
    a, b = routes[:, :-1], routes[:, 1:]
    sender, receiver = np.stack([a, b]), np.stack([b, a])
    way = np.arange(2)[:, None, None]
    link = ((way * workers + sender) * workers + receiver)[..., None]
    hold_s = busy[way, sender, receiver].reshape(*link.shape)
    if shared:
        node = rng.integers(0, 3, workers)
        card = np.where(rng.random(workers) < 0.5, 9 + node, -1)
        link = np.stack([node[sender] * 3 + node[receiver], card[sender]], axis=-1)
        hold_s = np.concatenate([hold_s, hold_s * rng.random()], axis=-1)
    return ScheduleTimes(
        routes=routes,
        order=order,
        first=first,
        forward_s=rng.random(workers) + 0.1,
        backward_s=rng.random(workers) * 2 + 0.1,
        link=link,
        hold_s=hold_s,
        latency_s=latency[way, sender, receiver],
        links=2 * workers * workers + 12,
        shared=shared,
    )


@settings(deadline=None, max_examples=cases(150))
@given(plan=routed_plans(), seed=st.integers(0, 2**32 - 1), shared=st.booleans())
def test_kernel_equals_event_driven_simulation(plan, seed, shared):
    """Every action starts when an independent simulator says so."""
    times = random_times(plan, seed, shared)
    ends = simulate_events(plan, times)
    ends_s, start_s = times.simulate(record=True)
    for (kind, m, s), end_s in ends.items():
        k = "FB".index(kind)
        assert np.isclose(start_s[k, m, s] + times.duration_s(k, m, s), end_s, rtol=1e-12)
    for worker in range(len(ends_s)):
        mine = [end for (_, m, s), end in ends.items() if times.routes[m, s] == worker]
        assert np.isclose(ends_s[worker], max(mine, default=0.0), rtol=1e-12)


@settings(deadline=None, max_examples=cases(60))
@given(plan=routed_plans(), seed=st.integers(0, 2**32 - 1), shared=st.booleans())
def test_makespan_is_at_least_every_path_worker_and_link(plan, seed, shared):
    """No shorter than any micro-batch's way down and up, nor than any worker's work, nor what passes any link."""
    times = random_times(plan, seed, shared)
    ends_s, _ = times.simulate()
    work = np.zeros(len(ends_s))
    np.add.at(work, times.routes.ravel(), (times.forward_s + times.backward_s)[times.routes].ravel())
    assert ends_s.max() >= work.max() * (1 - 1e-12)
    path = (times.forward_s + times.backward_s)[times.routes].sum(axis=1)
    path += (times.hold_s[..., 0] + times.latency_s).sum(axis=(0, 2))
    assert ends_s.max() >= path.max() * (1 - 1e-12)
    passed = np.bincount(times.link[times.link >= 0], weights=times.hold_s[times.link >= 0], minlength=1)
    assert ends_s.max() >= passed.max() * (1 - 1e-12)


@settings(deadline=None, max_examples=cases(60))
@given(plan=routed_plans(), seed=st.integers(0, 2**32 - 1))
def test_both_kernels_agree_where_nothing_is_shared(plan, seed):
    """A link for every channel: messages in order of time are messages in the order of their sender."""
    times = random_times(plan, seed)
    alone, together = times.simulate(record=True), replace(times, shared=True).simulate(record=True)
    assert np.allclose(alone[0], together[0], rtol=1e-12)
    assert np.allclose(alone[1], together[1], rtol=1e-12)


@given(stages=st.integers(1, 5), micro_batches=st.integers(1, 12), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=cases(60))
def test_plain_kernel_equals_routed_kernel(stages, micro_batches, seed):
    """One worker a stage, messages that only have latency: both kernels agree."""
    plan = plain_plan(stages, 1, micro_batches, span=1)
    times = random_times(plan, seed)
    rng = np.random.default_rng(seed)
    transfer_s = rng.random(stages)
    same = np.broadcast_to(transfer_s[:-1], times.latency_s.shape).copy()
    plain = plain_step_s(
        times.forward_s, times.backward_s, transfer_s, np.arange(stages, 0, -1, dtype=np.int64), micro_batches
    )
    routed = replace(times, hold_s=np.zeros_like(times.hold_s), latency_s=same)
    assert np.isclose(plain, routed.simulate()[0].max(), rtol=1e-12)


def test_plain_1f1b_of_equal_stages_takes_the_textbook_time():
    """Without messages: (micro-batches + stages - 1) * (forward + backward) (Narayanan et al., SC'21)."""
    f, b = np.full(4, 1.0), np.full(4, 2.0)
    assert plain_step_s(f, b, np.zeros(4), np.array([4, 3, 2, 1]), 8) == (8 + 4 - 1) * 3.0


@given(plan=routed_plans(), seed=st.integers(0, 1000), shared=st.booleans())
@settings(deadline=None, max_examples=cases(25))
def test_compiled_kernels_equal_their_source(plan, seed, shared):
    """Numba's result is Python's."""
    times = random_times(plan, seed, shared)
    order, first = kernels.backward_order.py_func(windows(plan))
    assert (order == times.order).all()
    assert (first == times.first).all()
    ends_s, start_s = times.simulate(record=True)
    python = "shared_ends_s" if shared else "routed_ends_s"
    with patch.object(kernels, python, getattr(kernels, python).py_func):
        python_ends, python_starts = times.simulate(record=True)
    assert (python_ends == ends_s).all()
    assert (python_starts == start_s).all()
