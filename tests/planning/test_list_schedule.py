"""Orders by list scheduling: laws on drawn schedules, and what they bring where devices and links differ."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.cost.simulation import ScheduleTimes, backward_order
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import in_flight, orders_end, windows
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.list_schedule import listed_starts, listed_starts_s, ranks_by
from polygon.planning.warmup_depths import Pacing
from tests.linked_regions import cluster_of, small_gpt
from tests.routed_plans import plan_of, routed_plans


def times_of(plan: Plan, rng: np.random.Generator, shared: bool) -> ScheduleTimes:
    """Drawn times of a plan's actions and messages; with `shared` all messages of a direction use one link, too."""
    micro_batches, stages = plan.routes.shape
    offset = np.cumsum([0, *(stage.width for stage in plan.stages)])
    routes = plan.routes + offset[:-1]
    pairs: dict[tuple[int, int, int], int] = {}
    link = np.zeros((2, micro_batches, stages - 1, 2 if shared else 1), dtype=np.int64)
    for k, m, s in np.ndindex(*link.shape[:3]):
        link[k, m, s, 0] = pairs.setdefault((k, routes[m, s], routes[m, s + 1]), len(pairs))
    link[..., 1:] = (len(pairs) + np.arange(2))[:, None, None, None]
    order, first = backward_order(windows(plan))
    return ScheduleTimes(
        routes=routes,
        order=order,
        first=first,
        forward_s=rng.uniform(0.5, 2, offset[-1]),
        backward_s=rng.uniform(1, 4, offset[-1]),
        link=link,
        hold_s=rng.uniform(0, 1, link.shape),
        latency_s=rng.uniform(0, 2, link.shape[:3]),
        links=len(pairs) + 2,
        shared=shared,
    )


drawn = given(
    plan=routed_plans(max_stages=4, max_width=3, max_micro_batches=10), seed=st.integers(0, 99), shared=st.booleans()
)


@drawn
def test_listed_orders_end_and_memory_holds_them(plan, seed, shared):
    """In both directions of time every action has its turn, and no worker holds more than it has room for."""
    rng = np.random.default_rng(seed)
    times = times_of(plan, rng, shared)
    room = rng.integers(1, 4, len(times.forward_s))
    _, starts_s = times.simulate(record=True)
    for from_end in (False, True):
        starts_s = listed_starts(times, room, starts_s, from_end=from_end)
        ranked = replace(plan, order=ranks_by(starts_s, times.routes))
        assert orders_end(ranked)
        held = np.concatenate([in_flight(ranked, s) for s in range(len(plan.stages))])
        assert (held <= room).all()


@drawn
def test_a_listed_schedule_is_the_simulation_of_its_order(plan, seed, shared):
    """Forwards in time the starts that the list gives are those that the order is simulated to have."""
    rng = np.random.default_rng(seed)
    times = times_of(plan, rng, shared)
    room = rng.integers(1, 4, len(times.forward_s))
    starts_s = listed_starts(times, room, rng.uniform(size=(2, *plan.routes.shape)), from_end=False)
    ranked = replace(times, ranks=ranks_by(starts_s, times.routes))
    assert ranked.simulate(record=True)[1] == pytest.approx(starts_s, abs=1e-9)


@drawn
def test_the_order_of_spans_is_the_same_when_it_is_said_outright(plan, seed, shared):
    """Ranks of a schedule of spans: every worker ends when it did."""
    times = times_of(plan, np.random.default_rng(seed), shared)
    ends_s, starts_s = times.simulate(record=True)
    again = replace(times, ranks=ranks_by(starts_s, times.routes)).simulate()[0]
    assert again == pytest.approx(ends_s, rel=1e-12)


def test_the_kernel_is_its_python():
    """Compiled and plain code list alike."""
    plan = plan_of([2, 3, 1], [[m % 2, m % 3, 0] for m in range(7)], (2, 2, 2))
    rng = np.random.default_rng(1)
    times = times_of(plan, rng, shared=True)
    given_ = (times.routes, times.forward_s, times.backward_s, np.full(6, 2), times.link, times.hold_s, times.latency_s)
    keys = rng.uniform(size=(2, 7, 3))
    compiled, plain = (of(*given_, times.links, keys) for of in (listed_starts_s, listed_starts_s.py_func))
    assert np.array_equal(compiled, plain)


def test_a_micro_batch_overtakes_one_whose_message_takes_long():
    """By hand: worker 0 is 10 s from the last stage, worker 1 next to it. Spans have it wait for micro-batch 0, a list
    does not; backwards come as their forwards did."""
    plan = plan_of([2, 1], [[0, 0], [1, 0], [1, 0]], (3, 3))
    times = replace(
        times_of(plan, np.random.default_rng(0), shared=False),
        forward_s=np.ones(3),
        backward_s=np.ones(3),
        hold_s=np.zeros((2, 3, 1, 1)),
        latency_s=np.broadcast_to(np.where(plan.routes[:, :1] == 0, 10.0, 0.0), (2, 3, 1)).copy(),
    )
    ends_s, starts_s = times.simulate(record=True)
    assert starts_s[0, :, 1].tolist() == [11, 12, 13]
    listed = listed_starts(times, np.full(3, 3), starts_s, from_end=False)
    assert listed[0, :, 1].tolist() == [11, 1, 3]
    ended = replace(times, ranks=ranks_by(listed, times.routes)).simulate()[0]
    assert ended.tolist() == [24, 6, 13] and ends_s.max() > 24


def test_unlike_workers_over_long_links_gain_and_keep_their_order(monkeypatch):
    """Three stages in three regions, the second in two: no spans tried are as short, memory holds the order, the
    checker finds nothing, and who paces the plan again does not lose it."""
    regions = [[("a100-40gb", 2, 1), ("t4", 2, 1)], [("t4", 4, 1)], [("t4", 4, 1)]]
    cluster = cluster_of(regions, latency_s=0.05, bytes_per_s=1e8)
    model = small_gpt(blocks=12, hidden_size=2048, head_dim=128, ffn_size=8192)
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024))
    tables, rows = CostTables(problem), np.array([[2, 0, 0, 0], [0, 2, 0, 2], [0, 0, 4, 0]])
    plan = Decoder(problem, tables=tables).decode(Allocation(workers=rows, micro_batch_size=1), relax=False)
    with monkeypatch.context() as patch:
        patch.setattr(Pacing, "_listed", lambda self, paced, more: None)
        _, by_spans = Pacing(plan, tables).best(tries=20)
    found, times = Pacing(plan, tables).best(tries=20)
    assert found.order is not None and times.step_s < 0.97 * by_spans.step_s
    assert violations(tables.problem, found, tables) == []
    again, kept = Pacing(replace(found), tables).best()
    assert again.order is not None and kept.step_s <= times.step_s * (1 + 1e-12)
    assert found.with_spans(found.spans).order is None
    # Memory for one micro-batch less does not hold it: then it is not kept.
    roomless = Pacing(replace(found), tables)
    roomless._room = np.concatenate([in_flight(found, s) for s in range(3)]) - 1
    assert roomless._own_order() is None
    # Workers that share experts do the same at the same time.
    shares = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], ep=2), plan.stages[2]))
    assert Pacing(shares, tables)._listed(by_spans, 0) is None is not Pacing(plan, tables)._listed(by_spans, 0)
