"""Laws of uniform splits: lanes in bulk, and the plans that they are."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from polygon.cost.compute import layer_times, model_flops_per_step
from polygon.cost.estimate import estimate, worker_memory
from polygon.cost.lanes import TERMS, Lanes
from polygon.cost.overlap import overlap_of, summed_s
from polygon.cost.simulation import ScheduleTimes, backward_order
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import price_messages
from polygon.domain.cluster import Device, Link
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.domain.runtime import DP_OVERLAP, POLYGON, Runtime
from polygon.domain.uniform import ParallelConfig, stage_bounds, uniform_config, uniform_plan
from tests.nightly import cases
from tests.uniform_splits import FABRIC, equal_nodes, lane, with_links

A100 = Device(
    name="A100",
    memory_bytes=80e9,
    flops={"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    memory_bytes_per_s=2.039e12,
    power_w=400,
    architecture="Ampere",
)
MODEL = Model(
    name="g",
    blocks=16,
    hidden_size=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    ffn_size=8192,
    vocab_size=51200,
    max_seq_len=2048,
)
EXPERTS = replace(MODEL, experts=8, experts_per_token=2, expert_ffn_size=4096)
BATCH = Batch(global_batch=256, seq_len=2048)
MEGATRON = Runtime(name="fused", dp_overlap="backward", tp_overlap="backward")


def problem(nodes: int = 64, node_bytes_per_s: float = 200e9, **changes) -> Problem:
    between = Link(latency_s=5e-6, bytes_per_s=node_bytes_per_s)
    return replace(equal_nodes(MODEL, BATCH, A100, nodes=nodes, between=between), **changes)


configs = st.builds(
    ParallelConfig,
    dp=st.sampled_from([1, 2, 4, 8, 16]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "full"]),
)
runtimes = st.builds(
    Runtime,
    dp_overlap=st.sampled_from(DP_OVERLAP),
    by_layer=st.booleans(),
    p2p_overlap=st.booleans(),
    p2p_buffer_bytes=st.sampled_from([0.0, 1e5, 1e7]),
    host_buffer_bytes_per_s=st.sampled_from([0.0, 1e10]),
    host_update=st.booleans(),
    scattered_gradients=st.booleans(),
    message_gathers=st.integers(0, 2),
    scattered_sends=st.booleans(),
    owned_weights=st.booleans(),
    zero2_by_micro_batch=st.booleans(),
    gathers_again=st.booleans(),
    keeps_outputs=st.booleans(),
    fused=st.booleans(),
) | st.just(POLYGON)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Problem, ParallelConfig]:
    """A problem of 1 to 8 nodes on a slow or a fast network, and a split of (some of) its devices."""
    nodes, ways = draw(st.sampled_from([1, 2, 8])), st.sampled_from
    tp, cp, pp = draw(ways([1, 2, 4, 8])), draw(ways([1, 1, 2, 4])), draw(ways([1, 2, 4, 8]))
    assume(tp * cp * pp <= 8 * nodes)
    dp = draw(ways([n for n in (1, 2, 4, 8, 16, 64) if n * tp * cp * pp <= 8 * nodes]))
    chunks = draw(ways([1, 1, 2])) if 1 < pp <= 4 else 1
    model = draw(ways([MODEL, EXPERTS, replace(MODEL, tied_embeddings=False)]))
    ep = draw(ways([n for n in (1, 2, 8) if (dp * cp) % n == 0])) if model.experts else 1
    size = draw(ways([1, 2]))
    config = ParallelConfig(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        chunks=chunks,
        micro_batch_size=size,
        zero=draw(st.integers(0, 3)),
        shards=draw(ways([0, dp * cp, max(1, dp * cp // 2)])) if dp * cp > 1 else 0,
        recompute=draw(ways(["none", "selective", "full"])),
        sequence_parallel=draw(st.booleans()) and tp > 1,
        schedule=draw(ways(["1f1b", "gpipe"])) if pp > 1 and chunks == 1 else "1f1b",
    )
    count = draw(ways([1, 3, 8, 40])) * (pp if chunks > 1 else 1)
    batch = Batch(global_batch=dp * size * count, seq_len=draw(ways([512, 2048])))
    rate, latency_s = draw(ways([1.25e9, 25e9, 200e9])), draw(ways([5e-6, 1e-4]))
    between = Link(latency_s=latency_s, bytes_per_s=rate)
    asked = equal_nodes(model, batch, A100, nodes=nodes, between=between, runtime=draw(runtimes))
    return asked, config


@settings(deadline=None, max_examples=cases(60))
@given(config=configs, runtime=runtimes)
def test_terms_add_up_and_respect_the_peak(config: ParallelConfig, runtime: Runtime):
    """The terms sum to the step, the interval holds it, and no step beats the data sheet."""
    asked = problem(runtime=runtime)
    found = lane(asked, config)
    assert sum(found.terms_s) == pytest.approx(found.step_s)
    whole = estimate(asked, uniform_plan(asked, config))
    assert whole.low_s <= whole.step_s <= whole.high_s
    assert sum(whole.terms.values()) == pytest.approx(whole.step_s)
    assert found.step_s > model_flops_per_step(MODEL, BATCH) / (config.devices * 312e12)
    assert len(found.memory) == config.pp


LATE = equal_nodes(MODEL, Batch(global_batch=80, seq_len=512), A100, nodes=2, between=FABRIC, runtime=POLYGON)
"""A problem in which the second stage leads for 32 micro-batches, and then the first, which is busier."""


TURNS = equal_nodes(
    EXPERTS,
    Batch(global_batch=160, seq_len=2048),
    A100,
    nodes=2,
    between=Link(latency_s=5e-6, bytes_per_s=1.25e9),
    runtime=Runtime(scattered_sends=True),
)
"""One of rounds that take turns: a longer one, a shorter one."""


@settings(deadline=None, max_examples=cases(150))
@given(split=splits())
@example(split=(TURNS, ParallelConfig(dp=1, tp=1, pp=4, cp=4, chunks=2, micro_batch_size=1)))
@example(split=(LATE, ParallelConfig(dp=1, tp=2, pp=2, cp=2, chunks=2, micro_batch_size=1, zero=3)))
def test_a_lane_is_what_its_plan_is(split: tuple[Problem, ParallelConfig]):
    """Time and memory of a lane are those of the whole plan, all of its pipelines simulated."""
    asked, config = split
    tables = CostTables(asked)
    plan = uniform_plan(asked, config)
    found, times = Lanes(tables).estimate(config), step_times(plan, tables)
    assert found.step_s == pytest.approx(times.step_s, rel=1e-9)
    assert sum(found.terms_s) == pytest.approx(found.step_s, rel=1e-9)
    held = worker_memory(plan, tables, tables.placement(plan))
    assert found.peak.total_bytes == pytest.approx(max(each.total_bytes for each in held), rel=1e-9)
    for group, one in enumerate(found.memory):
        assert one.total_bytes == pytest.approx(held[group * config.dp].total_bytes, rel=1e-9)
    again = uniform_config(plan)
    assert again is not None and (again.dp, again.tp, again.pp, again.cp) == (
        config.dp,
        config.tp,
        config.pp,
        config.cp,
    )


@settings(deadline=None, max_examples=cases(40))
@given(split=splits())
def test_a_pool_among_others_is_priced_as_alone(split: tuple[Problem, ParallelConfig]):
    """Lanes on a pool take what they would if its devices were all; their plan is on these."""
    asked, config = split
    (region,) = asked.cluster.regions
    several = replace(region, node_groups=(replace(region.node_groups[0], nodes=1), *region.node_groups))
    among = replace(asked, cluster=replace(asked.cluster, regions=(several,)))
    tables, pool = CostTables(among), among.cluster.pools[1]
    plan, found, alone = uniform_plan(among, config, pool), Lanes(tables, pool).estimate(config), lane(asked, config)
    assert {worker.pool for worker in plan.workers} == {1}
    assert found.step_s == pytest.approx(alone.step_s, rel=1e-9)
    assert found.step_s == pytest.approx(step_times(plan, tables).step_s, rel=1e-9)
    assert found.peak_bytes == pytest.approx(alone.peak_bytes, rel=1e-9)


@settings(deadline=None, max_examples=cases(60))
@given(config=configs, factor=st.floats(1, 10))
def test_a_faster_network_is_never_slower(config: ParallelConfig, factor: float):
    """More bandwidth between nodes never lengthens the step."""
    slow, fast = (lane(problem(node_bytes_per_s=200e9 * times), config) for times in (1, factor))
    assert fast.step_s <= slow.step_s * (1 + 1e-12)


def test_weights_dealt_out_whole_cost_latency_that_grows_with_the_ranks():
    """Owners broadcast one after another: twice the ranks double every ring, and each is slower than one gathering."""
    seconds = []
    for nodes in (32, 64, 128):
        config = ParallelConfig(dp=nodes * 8, zero=1)
        asked = problem(nodes, batch=replace(BATCH, global_batch=nodes * 8))
        divided_s, owned_s = (
            lane(replace(asked, runtime=Runtime(dp_overlap="none", owned_weights=owned)), config).terms_s[
                TERMS.index("data-parallel")
            ]
            for owned in (False, True)
        )
        seconds.append(owned_s - divided_s)
    assert 0 < seconds[0] < seconds[1] < seconds[2]
    matrices = 16 * 4 + 2
    assert seconds[2] > matrices * 1024 * 6e-6 / 2


def test_a_batch_that_does_not_divide_is_refused():
    """The message names the batch and what it must be a multiple of."""
    for price in (lane, uniform_plan):
        with pytest.raises(InputError, match="expected a multiple of dp x micro_batch_size = 6"):
            price(problem(), ParallelConfig(dp=3, micro_batch_size=2))


def test_more_pools_than_one_are_refused():
    """Lanes are all alike, so that their devices have to be, unless a pool is named."""
    asked = problem()
    (region,) = asked.cluster.regions
    two = replace(asked.cluster, regions=(replace(region, node_groups=2 * region.node_groups),))
    with pytest.raises(InputError, match="pools: found 2"):
        Lanes(CostTables(replace(asked, cluster=two)))


@settings(deadline=None, max_examples=cases(30))
@given(many=st.lists(configs, min_size=1, max_size=6))
def test_what_lanes_remember_changes_nothing(many: list[ParallelConfig]):
    """Many splits priced by one object get what each gets by itself."""
    together = Lanes(CostTables(problem()))
    for config in many + many:
        one, alone = together.estimate(config), lane(problem(), config)
        assert one.step_s == pytest.approx(alone.step_s, rel=1e-12)
        assert one.terms_s == pytest.approx(alone.terms_s, rel=1e-12, abs=1e-15)
        assert one.peak.total_bytes == pytest.approx(alone.peak.total_bytes, rel=1e-12)


@settings(deadline=None, max_examples=cases(60))
@given(runtime=runtimes, whole_s=st.floats(0, 2), part=st.floats(0, 1), backward_s=st.floats(0, 1))
def test_compiled_sums_equal_their_formula(runtime: Runtime, whole_s: float, part: float, backward_s: float):
    """Kernel and interpreter agree; sums end no sooner than their last part, nor later than all after backward."""
    overlap = overlap_of(runtime, BATCH)
    args = (3.0, backward_s, whole_s, part * whole_s, 7.0, overlap)
    begin_s, end_s = summed_s(*args)
    assert summed_s.py_func(*args) == pytest.approx((begin_s, end_s))
    assert begin_s <= 3.0 <= end_s <= 3.0 + whole_s * (1 + runtime.contention) + 1e-12


@settings(deadline=None, max_examples=cases(40))
@given(config=configs, pipeline=st.sampled_from([2, 4]))
def test_pipeline_is_no_shorter_than_its_busiest_stage_or_one_micro_batch(config: ParallelConfig, pipeline: int):
    """Makespan >= busiest worker, and >= the way of one micro-batch through every stage."""
    config = replace(config, pp=pipeline, dp=1, cp=1)
    layers = layer_times(
        MODEL,
        BATCH,
        A100,
        FABRIC,
        tp=config.tp,
        micro_batch_size=config.micro_batch_size,
        recompute=config.recompute,
        runtime=POLYGON,
    )
    step_s = lane(problem(), config).step_s
    both = layers.forward_s + layers.backward_s
    stages = [float(both[a:b].sum()) for a, b in pairwise(stage_bounds(MODEL, config))]
    micro_batches = BATCH.global_batch // config.micro_batch_size
    assert step_s >= micro_batches * max(stages)
    assert step_s >= sum(stages)


def test_sharding_inside_a_node_keeps_gathers_off_the_network():
    """ZeRO-1 over eight of 64 ranks gathers inside the node: fewer bytes cross, in shorter rings; states grow."""
    whole = ParallelConfig(dp=64, zero=1)
    near = replace(whole, shards=8)
    batch = replace(BATCH, gradient_precision="bf16")
    thin = problem(8, 20e9, batch=batch, runtime=Runtime(dp_overlap="none"))
    all_ranks, one_node = (lane(thin, config) for config in (whole, near))
    data = TERMS.index("data-parallel")
    assert one_node.terms_s[data] < all_ranks.terms_s[data]
    assert one_node.peak.optimizer == pytest.approx(8 * all_ranks.peak.optimizer)
    with pytest.raises(InputError, match="shards: found 7"):
        replace(whole, shards=7)


@settings(deadline=None, max_examples=cases(60))
@given(
    shape=st.sampled_from([(1, 4, 4), (1, 8, 4), (2, 2, 4), (2, 4, 4), (2, 8, 4), (4, 2, 8), (4, 8, 1), (8, 8, 1)]),
    rate=st.sampled_from([10e9, 25e9, 200e9]),
    rounds=st.sampled_from([4, 8]),
)
def test_messages_in_turn_take_about_as_long_as_messages_side_by_side(shape, rate, rounds):
    """Lanes that pass what they share one after another are never later than with a part each: the last message leaves
    at the same time, the others sooner. Only where messages take longer than computing does it matter."""
    dp, pp, tp = shape
    config = ParallelConfig(dp=dp, tp=tp, pp=pp)
    asked = problem(8, rate, batch=Batch(global_batch=dp * pp * rounds, seq_len=2048))
    tables, plan = CostTables(asked), uniform_plan(asked, config)
    place, links = tables.placement(plan), tables.links
    schedule, ends_s = step_times(plan, tables).schedule, []
    for in_step in (False, True):
        sent = price_messages(plan, MODEL, asked.batch, links, place, asked.runtime, in_step=in_step)
        other = replace(
            schedule,
            link=sent.link,
            hold_s=sent.hold_s,
            latency_s=sent.latency_s,
            links=sent.links if sent.shared else sent.channels,
            shared=sent.shared,
        )
        ends_s.append(other.simulate()[0].max())
    in_turn_s, beside_s = ends_s
    least = 0.7 if rate < 25e9 else 0.93
    assert least * beside_s <= in_turn_s <= beside_s * (1 + 1e-9)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_worker_over_two_nodes_sums_over_the_network(zero: int):
    """The parts of a sequence on two nodes of eight tensor ranks: each sends its eighth over an eighth of the card."""
    asked = problem(2, 10e9, runtime=Runtime(dp_overlap="none"))
    found, plain = (lane(asked, ParallelConfig(tp=8, cp=2, zero=z)) for z in (zero, 0))
    bytes_each = {0: 2 * 4, 1: 4 + 2, 3: 256 * (2 * 2 + 4)}[zero]  # fp32 gradients, bf16 weights; forward and backward
    data_s = found.terms_s[TERMS.index("data-parallel")] if zero < 3 else found.step_s - plain.step_s
    assert data_s > 0.9 * bytes_each / 2 * MODEL.parameters / 10e9


def interleaved_ends(forward_s, backward_s, sent_s, latency_s, pp: int, chunks: int, count: int) -> list[float]:
    """When every rank ends interleaved 1F1B, by a simulation of its own: ranks that take what is next on their list.

    The list is Megatron-LM's: warm-up forwards, then a forward and a backward in turn; groups of pp micro-batches go
    through the chunks one after another.
    """
    stages, total = pp * chunks, count * chunks

    def unit(index: int, forward: bool) -> tuple[int, int]:
        """Micro-batch and chunk of the index-th forward or backward."""
        turn, rest = divmod(index, pp * chunks)
        chunk = rest // pp
        return turn * pp + rest % pp, chunk if forward else chunks - 1 - chunk

    todo = []
    for rank in range(pp):
        warm = min(total, 2 * (pp - rank - 1) + (chunks - 1) * pp)
        order = [("F", i) for i in range(warm)]
        for i in range(total - warm):
            order += [("F", warm + i), ("B", i)]
        todo.append(deque(order + [("B", i) for i in range(total - warm, total)]))
    ready = {("F", m, 0): 0.0 for m in range(count)}
    free, wire = [0.0] * pp, {}
    while any(todo):
        before = sum(map(len, todo))
        for rank, mine in enumerate(todo):
            while mine:
                kind, index = mine[0]
                m, chunk = unit(index, kind == "F")
                s = chunk * pp + rank
                if (kind, m, s) not in ready:
                    break
                mine.popleft()
                start = max(free[rank], ready[kind, m, s])
                end = free[rank] = start + (forward_s if kind == "F" else backward_s)[s]
                to = s + (1 if kind == "F" else -1)
                if 0 <= to < stages:
                    way = "FB".index(kind), min(s, to)
                    leaves = wire[way] = max(end, wire.get(way, 0.0)) + sent_s[way]
                    ready[kind, m, to] = leaves + latency_s[way]
                elif kind == "F":
                    ready["B", m, s] = end
        assert sum(map(len, todo)) < before, "deadlock"
    return free


@settings(deadline=None, max_examples=cases(60))
@given(
    pp=st.sampled_from([2, 3, 4]),
    chunks=st.sampled_from([2, 3]),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    far=st.sampled_from([0.0, 0.1, 2.0]),
)
def test_interleaving_equals_ranks_that_take_what_is_next(pp: int, chunks: int, rounds: int, seed: int, far: float):
    """The simulation of an interleaved pipeline ends when ranks with Megatron-LM's lists of work do."""
    rng = np.random.default_rng(seed)
    stages, count = pp * chunks, rounds * pp
    forward_s, backward_s = rng.uniform(0.5, 1.5, (2, stages))
    sent_s, latency_s = far * rng.uniform(0, 1, (2, 2, stages - 1))
    window = np.broadcast_to(np.arange(stages, 0, -1), (count, stages))
    order, first = backward_order(np.ascontiguousarray(window))
    channel = np.broadcast_to(np.arange(2 * (stages - 1)).reshape(2, 1, stages - 1), (2, count, stages - 1))
    schedule = ScheduleTimes(
        routes=np.broadcast_to(np.arange(stages), (count, stages)).copy(),
        order=order,
        first=first,
        forward_s=forward_s,
        backward_s=backward_s,
        link=np.ascontiguousarray(channel)[..., None],
        hold_s=np.ascontiguousarray(np.broadcast_to(sent_s[:, None], channel.shape))[..., None],
        latency_s=np.ascontiguousarray(np.broadcast_to(latency_s[:, None], channel.shape)),
        links=2 * (stages - 1),
        shared=False,
        chunks=chunks,
    )
    expected = interleaved_ends(forward_s, backward_s, sent_s, latency_s, pp, chunks, count)
    assert schedule.simulate()[0][:pp] == pytest.approx(expected)


def test_interleaving_shortens_the_bubble_by_the_number_of_chunks():
    """With free links and equal layers the bubble of p stages is (p - 1) / v of a micro-batch (Narayanan et al.)."""
    model = replace(MODEL, tied_embeddings=False)
    asked = equal_nodes(model, Batch(global_batch=32, seq_len=2048), A100, nodes=1, between=FABRIC)
    free = with_links(asked, inside=Link(latency_s=0.0, bytes_per_s=1e15))
    bubbles = [lane(free, ParallelConfig(pp=4, chunks=v)).terms_s[TERMS.index("bubble")] for v in (1, 2, 4)]
    assert bubbles[0] > bubbles[1] > bubbles[2] > 0


@pytest.mark.parametrize("split", [{"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 8, "dp": 2, "tp": 2}, {"pp": 2, "chunks": 2}])
def test_a_lane_waits_as_its_plan_does_where_messages_follow_one_another(split: dict[str, int]):
    """The same step for lane and plan, longer than where stages send one way while they receive from the other."""
    config, steps = ParallelConfig(**{"dp": 4, **split}), []
    for apart in (False, True):
        asked = problem(nodes=4, node_bytes_per_s=25e9, runtime=replace(MEGATRON, exchanges_apart=apart))
        steps.append(lane(asked, config).step_s)
        tables = CostTables(asked)
        assert step_times(uniform_plan(asked, config), tables).step_s == pytest.approx(steps[-1], rel=1e-9)
    assert steps[0] < steps[1]
