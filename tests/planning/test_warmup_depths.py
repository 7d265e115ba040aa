"""Spans fit the memory of every worker, are as long as it lets them be, and the best pace is taken."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.estimate import worker_memory
from polygon.cost.simulation import ScheduleTimes
from polygon.cost.step_times import alike, step_times
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Plan, Problem
from polygon.planning import warmup_depths
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.warmup_depths import (
    AT_ONCE,
    PACES,
    Pacing,
    StagePace,
    by_stage,
    cut_spans,
    find_limits,
    wanted_spans,
)
from tests.linked_regions import cluster_of, small_gpt
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan


def paced(workers, blocks=16):
    """Such workers of fast and slow devices in two regions, whose memory holds a few micro-batches each."""
    cluster = cluster_of([[("a100-40gb", 2, 1), ("t4", 4, 1)], [("t4", 4, 1)]], latency_s=0.05, bytes_per_s=1e8)
    model = small_gpt(blocks=blocks, hidden_size=2048, head_dim=128, ffn_size=8192)
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024))
    tables = CostTables(problem)
    decoder = Decoder(problem, tables=tables)
    plan = decoder.decode(Allocation(workers=np.array(workers), micro_batch_size=1), relax=False)
    return Pacing(plan, tables), plan, tables


@pytest.fixture(scope="module")
def pacing():
    """Two stages of fast and slow workers each."""
    return paced([[1, 2, 2], [1, 2, 2]])


def over_memory(plan, tables, place):
    """Whether each worker has too little memory."""
    need = np.array([memory.total_bytes for memory in worker_memory(plan, tables, place)])
    return need > tables.limit_bytes[place.pool]


def test_spans_wait_for_the_messages_behind_every_stage_but_the_last():
    """Three stages in three regions: a trip there and back is so many periods of the busiest; nothing is behind the
    last, which wants one micro-batch for each of its workers."""
    problem = replace(routed_problem(1)[0], cluster=small_cluster(1, 1, 1))
    plan = small_plan(problem.cluster, [(0, 2), (2, 4), (4, 6)], [[0], [1], [2]], [[0, 0, 0]] * 8)
    times = step_times(plan, CostTables(problem))
    alone, wanted = (wanted_spans(times, messages=messages) for messages in (False, True))
    assert alone.tolist() == [1, 1, 1]
    period_s = (times.schedule.forward_s + times.schedule.backward_s).max()
    trip_s = (times.messages.busy_s + times.messages.latency_s).sum(axis=0).max(axis=0)
    assert wanted == pytest.approx(np.minimum(8, [1 + trip_s[0] / period_s, 1 + trip_s[1] / period_s, 1]))
    assert (wanted[:2] > 1).all()


def test_what_sums_alone_change_is_not_simulated_again(monkeypatch):
    """A plan with unpacked gradients has the step that it finds by itself, from what was simulated of the packed one;
    one with unpacked activations is simulated."""
    first, plan, tables = paced([[0, 2, 2], [0, 2, 2]])
    windows = first.windows(PACES[0])[1]
    timed = first.timed(windows)
    for traffic, again in (("weight_gradients", False), ("activations", True)):
        other = replace(plan, links=tuple(replace(use, **{traffic: "none"}) for use in plan.links))
        assert other.links != plan.links
        alone = Pacing(other, tables).timed(windows)
        simulated = []
        monkeypatch.setattr(
            ScheduleTimes, "simulate", lambda self, ends=alone.ends_s, to=simulated: to.append(self) or (ends,)
        )
        found = Pacing(other, tables, beside=first).timed(windows)
        monkeypatch.undo()
        assert bool(simulated) == again and found.step_s == alone.step_s != timed.step_s


@pytest.mark.parametrize("pace", (*PACES, AT_ONCE))
def test_every_pace_fits_memory_and_is_timed_as_the_plan_is(pacing, pace):
    """No worker is over its memory, and the time is that of the plan with these spans."""
    paced, plan, tables = pacing
    cut = paced.windows(pace)
    assert cut is not None or pace != AT_ONCE
    if cut is None:
        return
    spans, windows = cut
    slower = replace(plan, spans=by_stage(spans, paced.times))
    times = step_times(slower, tables)
    assert not over_memory(slower, tables, times.place).any()
    assert paced.timed(windows).step_s == pytest.approx(times.step_s, rel=1e-12)
    assert times.step_s >= step_times(plan, tables).step_s * (1 - 1e-12)


def test_wanted_spans_of_a_plan_by_hand():
    """Shares of 4, 3 and 1 of four micro-batches; a message under way for L of a step of T lets 4 L / T more pass."""
    cluster = small_cluster(1, 2)
    problem = Problem(cluster=cluster, model=small_model(), batch=Batch(global_batch=16, seq_len=16))
    plan = small_plan(cluster, [(0, 3), (3, 6)], [[0], [1, 2]], [[0, 0], [0, 1], [0, 0], [0, 0]], micro_batch_size=4)
    times = step_times(plan, CostTables(problem))
    busy = wanted_spans(times, messages=False)
    assert busy == pytest.approx([1, 4 / 3, 4])
    schedule = times.schedule
    both_s = schedule.forward_s + schedule.backward_s
    step_s = max(4 * both_s[0], 3 * both_s[1], both_s[2])
    away_s = (times.messages.busy_s + times.messages.latency_s).sum(axis=0)
    expected = min(4, 1 + 4 * away_s.max() / step_s)
    assert wanted_spans(times, messages=True) == pytest.approx([expected, 4 / 3, 4])


def test_a_span_that_was_cut_down_cannot_be_longer(pacing):
    """One more on a worker of the first stage whose span memory cut down is over its memory."""
    paced, plan, tables = pacing
    spans, _ = paced.windows(StagePace(1000.0, 1000.0, 0.0, kept=0.0))
    place = paced.times.place
    cut = np.flatnonzero((spans < plan.micro_batches) & (place.stage == 0))
    assert len(cut)
    for worker in cut:
        longer = spans.copy()
        longer[worker] += 1
        assert over_memory(replace(plan, spans=by_stage(longer, paced.times)), tables, place)[worker]


def test_the_kernel_is_its_python(pacing):
    """Compiled and plain code cut alike."""
    paced, plan, _ = pacing
    order = np.argsort(plan.routes, axis=0, kind="stable")
    rng = np.random.default_rng(0)
    for _ in range(5):
        workers = sum(stage.width for stage in plan.stages)
        wanted, room, least = rng.integers(1, 40, workers), rng.integers(1, 6, workers), rng.integers(0, 3, workers)
        results = []
        for find, cut in ((find_limits, cut_spans), (find_limits.py_func, cut_spans.py_func)):
            spans, (windows, limits) = wanted.copy(), np.zeros((2, *plan.routes.shape), dtype=np.int64)
            find(plan.routes, order, paced.times.place.offset, room, least, limits)
            held = cut(plan.routes, order, paced.times.place.offset, room, limits, spans, windows)
            results.append((held, limits.tolist(), spans.tolist(), windows.tolist() if held else None))
        assert results[0] == results[1]


def test_later_stages_leave_room_for_earlier_ones():
    """Three stages of one worker that hold 6, 5 and 6 micro-batches: the last two get what leaves 2 to each before."""
    routes = np.zeros((32, 3), dtype=np.int64)
    order, offset, room = np.argsort(routes, axis=0, kind="stable"), np.arange(3), np.array([6, 5, 6])
    limits = np.empty_like(routes)
    find_limits(routes, order, offset, room, np.array([2, 2, 2]), limits)
    assert limits[0].tolist() == [6, 4, 2]
    windows, spans = np.empty_like(routes), np.array([9, 9, 9])
    assert cut_spans(routes, order, offset, room, limits, spans, windows)
    assert spans.tolist() == [2, 2, 2] and windows[0].tolist() == [6, 4, 2]
    spans = np.array([9, 9, 9])
    assert not cut_spans(routes, order, offset, room, np.full_like(routes, 99), spans, windows), "the last takes all"


@pytest.fixture
def by_spans(monkeypatch):
    """Plans are ordered by spans alone."""
    monkeypatch.setattr(Pacing, "_listed", lambda self, paced, more: None)


def test_other_spans_of_single_stages_are_never_worse_and_are_kept(by_spans):
    """With changes the step is shorter here, memory holds them, and a plan that has such spans does not lose them."""
    _, plan, tables = paced([[2, 0, 0], [0, 4, 4]], blocks=20)
    wide = replace(plan, spans=tuple((plan.micro_batches,) * stage.width for stage in plan.stages))
    steps_s, found = [], wide
    for tries in (0, 3, 60):
        found, times = Pacing(wide, tables).best(tries=tries)
        steps_s.append(times.step_s)
        assert not over_memory(found, tables, times.place).any()
        assert step_times(found, tables).step_s == pytest.approx(times.step_s, rel=1e-12)
    assert steps_s[0] >= steps_s[1] >= steps_s[2] < steps_s[0] * (1 - 1e-3)
    assert Pacing(found, tables).best()[1].step_s <= steps_s[2] * (1 + 1e-12)
    # A plan that is given up gets none: its first paces alone.
    assert Pacing(wide, tables).best(0.5 * steps_s[2], tries=60)[1].step_s >= steps_s[0]


def test_other_spans_of_workers_of_one_kind_help_where_those_of_a_stage_do_not(monkeypatch, by_spans):
    """Two stages of fast and slow workers: as if all of a stage were alike, the step is 3 % longer."""
    _, plan, tables = paced([[0, 3, 3], [2, 1, 1]], blocks=26)
    found, times = Pacing(plan, tables).best(tries=200)
    assert not over_memory(found, tables, times.place).any()
    asks_for_kinds = 2  # columns: pool and degree
    monkeypatch.setattr(
        warmup_depths,
        "alike",
        lambda *columns: alike(*(c if len(columns) != asks_for_kinds else np.zeros_like(c) for c in columns)),
    )
    assert times.step_s < (1 - 0.01) * Pacing(plan, tables).best(tries=200)[1].step_s


def test_where_memory_is_short_spans_in_proportion_beat_those_that_are_cut(by_spans):
    """Six T4 in a chain over 0.3 s each hold some thirty micro-batches: every pace that is cut leaves somebody waiting,
    all spans shorter by one factor do not. It is the largest that memory holds; with memory to spare there is none."""
    cluster = cluster_of([[("t4", 1, 1)]] * 6, latency_s=0.3, bytes_per_s=1e9)
    model = small_gpt(blocks=38, hidden_size=2048, head_dim=128, ffn_size=8192)
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=128, seq_len=1024))
    tables = CostTables(problem)
    plan = Decoder(problem, tables=tables).decode(Allocation(workers=np.eye(6, dtype=int), micro_batch_size=1))
    paced = Pacing(replace(plan, spans=((128,),) * 6), tables)
    found, times = paced.best()
    assert not over_memory(found, tables, times.place).any()
    cut = [windows for windows in map(paced.windows, PACES) if windows is not None]
    assert times.step_s < 0.97 * min(paced.timed(windows).step_s for _, windows in cut)
    in_proportion = paced.longest_in_proportion()
    longer = [paced.held(factor * in_proportion)[0] for factor in (1.0, 1.05)]
    assert (longer[0] >= in_proportion).all() and (longer[1] < 1.05 * in_proportion).any()
    roomy = replace(problem, model=replace(model, blocks=12))
    plan = Decoder(roomy).decode(Allocation(workers=np.eye(6, dtype=int), micro_batch_size=1))
    assert Pacing(plan, CostTables(roomy)).longest_in_proportion() is None


@pytest.mark.parametrize("local_steps", [(), (1, 8)])
def test_no_order_is_quicker_than_the_floor(local_steps):
    """Of drawn allocations under every pace and in listed orders; half of the floors are close. With local steps to
    come, sums are not counted."""
    cluster = cluster_of([[("a100-40gb", 2, 1), ("t4", 2, 1)], [("t4", 4, 1)], [("a100-40gb", 2, 1)]], bytes_per_s=3e7)
    limits = Constraints(local_steps=local_steps)
    batch = Batch(global_batch=24, seq_len=1024)
    problem = Problem(cluster=cluster, model=small_gpt(blocks=8), batch=batch, constraints=limits)
    tables, rng, ratios = CostTables(problem), np.random.default_rng(5), []
    decoder = Decoder(problem, tables=tables)
    for _ in range(30):
        workers = rng.integers(0, 3, (rng.integers(1, 4), len(decoder.classes)))
        plan = decoder.decode(Allocation(workers=workers, micro_batch_size=1), relax=False)
        if not isinstance(plan, Plan):
            continue
        paced = Pacing(plan, tables)
        held = [windows for windows in map(paced.windows, PACES) if windows is not None]
        steps_s = [paced.timed(windows).step_s for _, windows in held] + [step_times(plan, tables).step_s]
        assert paced.floor_s <= min(steps_s) * (1 + 1e-12)
        assert paced.least_s <= min(paced.timed(windows).ends_s.max() for _, windows in held) * (1 + 1e-12)
        assert plan.local_steps > 1 or not local_steps or paced.floor_s == paced.least_s
        ratios.append(min(steps_s) / paced.floor_s)
    assert len(ratios) > 10 and (local_steps or np.median(ratios) < 1.05)


def test_a_link_that_is_busy_for_most_of_the_step_is_a_floor():
    """By hand: eight micro-batches of 1 s there and back, messages that hold their link for 10 s each way: the first
    is handed over after 1 s, the last comes back, and 1 s of backward follows."""
    problem = replace(routed_problem(1)[0], cluster=small_cluster(1, 1))
    plan = small_plan(problem.cluster, [(0, 3), (3, 6)], [[0], [1]], [[0, 0]] * 8)
    pacing = Pacing(plan, CostTables(problem))
    shape = (2, 8, 1, 1)
    times = replace(
        pacing.times.schedule, forward_s=np.ones(2), backward_s=np.ones(2), links=2, hold_s=np.full(shape, 10.0),
        latency_s=np.full(shape[:3], 0.5), link=np.broadcast_to([[[[0]]], [[[1]]]], shape).copy(),
    )  # fmt: skip
    pacing.times = replace(pacing.times, schedule=times)
    there_s, back_s = 1 + 8 * 10 + 0.5 + 2 + 10 + 0.5 + 1, 1 + 10 + 0.5 + 2 + 8 * 10 + 0.5 + 1
    assert pacing.least_s == pytest.approx(max(there_s, back_s))
    one = replace(times, link=np.zeros(shape, dtype=np.int64), links=1)
    pacing = Pacing(plan, CostTables(problem))
    pacing.times = replace(pacing.times, schedule=one)
    assert pacing.least_s == pytest.approx(1 + 16 * 10 + 0.5 + 1)
