"""All that is sent has one table of links: a factor reaches every term, and a node's own fabric what stays in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.calibration import Calibration
from polygon.cost.network import FABRIC_EFFICIENCY, NEAR_MESSAGE_S
from polygon.cost.sharding import ShardingTraffic, copies_s
from polygon.cost.stage_reduction import own_room
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import LinkTable
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.runtime import Runtime
from polygon.domain.schedule import stage_spans
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.formats.files import read_cluster
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases
from tests.uniform_splits import FABRIC, equal_nodes

MODEL = small_gpt()
EAGER = Runtime(dp_overlap="none", zero2_by_micro_batch=True)
INSIDE, ACROSS = ParallelConfig(pp=8), ParallelConfig(dp=8, pp=2)


def both(problem: Problem) -> tuple[CostTables, CostTables]:
    """Tables as they are, and with everything that is sent ten times as slow."""
    return CostTables(problem), CostTables(problem, calibration=Calibration(communication=10))


def assert_scaled(plan: Plan, problem: Problem) -> None:
    """Every term of communication takes ten times as long, and computing as long as before."""
    as_is, slow = both(problem)
    one, ten = (step_times(plan, tables) for tables in (as_is, slow))
    for a, b in zip(one.reductions, ten.reductions, strict=True):
        for name in ("node_s", "region_s", "across_s", "latency_s", "gather_s", "outer_s"):
            assert getattr(b, name) == pytest.approx(10 * getattr(a, name), rel=1e-9), name
    assert ten.tied_s == pytest.approx(10 * one.tied_s)
    assert ten.norm_s == pytest.approx(10 * one.norm_s)
    assert ten.messages.busy_s == pytest.approx(10 * one.messages.busy_s)
    assert ten.messages.latency_s == pytest.approx(10 * one.messages.latency_s)
    assert ten.messages.hold_s == pytest.approx(10 * one.messages.hold_s)
    assert ten.update_s == pytest.approx(one.update_s)
    for stage in plan.stages:
        for worker in stage.workers:
            how = (worker.pool, worker.tp, plan.micro_batch_size, stage.recompute, worker.cp, stage.ep)
            a, b = (tables.times(*how, stage.sequence_parallel).layers for tables in (as_is, slow))
            assert b.communication_s == pytest.approx(10 * a.communication_s)
            whole = (b.forward_s + b.backward_s).sum() - (a.forward_s + a.backward_s).sum()
            assert whole == pytest.approx(9 * a.communication_s.sum())


@settings(deadline=None, max_examples=cases(40))
@given(
    shape=st.sampled_from([(4, 1, 4, 1), (2, 2, 4, 1), (2, 8, 1, 1), (1, 4, 2, 2), (16, 1, 1, 1), (1, 1, 8, 1)]),
    zero=st.integers(0, 3),
    nodes=st.sampled_from([2, 4]),
    runtime=st.builds(
        Runtime, owned_weights=st.booleans(), zero2_by_micro_batch=st.booleans(), tied_once=st.booleans()
    ),
)
def test_a_factor_of_communication_scales_every_term_of_it(shape, zero, nodes, runtime):
    """Of splits of equal nodes: messages, sums, gathers, tied embeddings, tensor and context parallelism."""
    dp, tp, pp, cp = shape
    between = Link(latency_s=5e-6, bytes_per_s=25e9)
    problem = equal_nodes(
        MODEL,
        Batch(global_batch=16 * dp, seq_len=512),
        catalogue.device("a100-80gb"),
        nodes=nodes,
        between=between,
        runtime=runtime,
    )
    assert_scaled(uniform_plan(problem, ParallelConfig(dp=dp, tp=tp, pp=pp, cp=cp, zero=zero)), problem)


@pytest.mark.parametrize("local_steps", [1, 4])
def test_a_factor_of_communication_reaches_links_between_regions(local_steps):
    """Of two regions that share a stage: the sums across, the norm of the gradient, meetings after local steps."""
    cluster = cluster_of([[("a100-40gb", 1, 2)], [("t4", 2, 1)]])
    problem = Problem(cluster=cluster, model=MODEL, batch=Batch(global_batch=32, seq_len=512))
    plan = uniform_plan(problem, ParallelConfig(dp=2, pp=2))
    near, far = (stage.workers for stage in plan.stages)
    links = (LinkUse(source=0, target=1), LinkUse(source=1, target=0))
    stages = tuple(replace(stage, workers=(near[s], far[s])) for s, stage in enumerate(plan.stages))
    assert_scaled(replace(plan, stages=stages, links=links, local_steps=local_steps), problem)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_factor_of_communication_scales_traffic_of_shards(zero):
    """Nothing hides: what ZeRO sends in a micro-batch takes ten times as long, copies as long as before."""
    problem = equal_nodes(
        MODEL,
        Batch(global_batch=64, seq_len=512),
        catalogue.device("a100-80gb"),
        nodes=2,
        between=Link(latency_s=5e-6, bytes_per_s=25e9),
        runtime=EAGER,
    )
    stage = uniform_plan(problem, ParallelConfig(dp=16, zero=zero)).stages[0]
    seen = []
    for tables in both(problem):
        sent = ShardingTraffic(tables, stage, pool=0, tp=1, cp=1, shards=16, per_node=8, micro_batch_size=1)
        held = float(tables.memory(1, 1, "none").layers.parameters.sum())
        copied_s = copies_s(held, tables, 0) if zero == 3 else 0.0
        seen.append(np.array([sent.forward_s, sent.backward_s - copied_s, sent.first_s]))
    assert seen[0][1] > 0
    assert seen[1] == pytest.approx(10 * seen[0])


def test_tied_embeddings_of_one_node_take_its_fabric():
    """GPT-3 1.3B in eight stages on one NVLink node: 51,200 x 2,048 fp32 gradients at 300 GB/s, not by network, where
    two workers exchange them."""
    model = catalogue.model("gpt3-1.3b")
    between = Link(latency_s=5e-5, bytes_per_s=1.25e9)
    problem = equal_nodes(
        model,
        Batch(global_batch=64, seq_len=2048),
        catalogue.device("a100-80gb"),
        nodes=2,
        between=between,
        runtime=Runtime(),
    )
    near, far = (step_times(uniform_plan(problem, c), CostTables(problem)).tied_s for c in (INSIDE, ACROSS))
    n_bytes = model.head_weight_parameters() * 4
    assert near == pytest.approx(FABRIC.latency_s + NEAR_MESSAGE_S + n_bytes / (FABRIC_EFFICIENCY * 300e9))
    assert near < 0.002
    assert far > n_bytes / 1.25e9


def test_tied_slices_of_one_node_are_as_wide_as_the_wider():
    """A first stage on two devices and a last on one: half of the gradient cannot go to where the whole is held."""
    problem = equal_nodes(
        small_gpt(), Batch(global_batch=8, seq_len=512), catalogue.device("a100-80gb"), nodes=1, between=FABRIC
    )
    seconds = []
    for degrees in ((2, 2), (2, 1), (1, 1)):
        ranks = (range(degrees[0]), range(2, 2 + degrees[1]))
        layers = ((0, 4), (4, problem.model.layers))
        stages = tuple(
            Stage(first_layer=first, last_layer=last, workers=(Worker(pool=0, devices=tuple(devices)),))
            for (first, last), devices in zip(layers, ranks, strict=True)
        )
        routes = np.zeros((8, 2), dtype=np.int64)
        plan = Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (2, 1)))
        seconds.append(step_times(plan, CostTables(problem)).tied_s)
    assert seconds[1] == seconds[2] > 1.5 * seconds[0]


def test_the_slowest_pair_of_tied_stages_does_not_count_where_one_node_holds_both():
    """Of several workers in the first and the last stage, those on one node exchange over its fabric."""
    problem = equal_nodes(
        small_gpt(tied_embeddings=True),
        Batch(global_batch=64, seq_len=512),
        catalogue.device("a100-80gb"),
        nodes=2,
        between=Link(latency_s=5e-5, bytes_per_s=1.25e9),
    )
    plan = uniform_plan(problem, ParallelConfig(dp=4, pp=2))
    tied_s = step_times(plan, CostTables(problem)).tied_s
    assert tied_s < small_gpt().head_weight_parameters() * 4 / 1.25e9
    assert np.isfinite(tied_s) and tied_s > 0


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_table_with_other_links_is_that_of_the_cluster_with_them(factor: float) -> None:
    """Whether it is made from another one's or from nothing: to the last bit."""
    cluster = read_cluster(Path(__file__).parents[2] / "instances" / "aws-regions.yaml")
    links = {"latency_s": cluster.latency_s * 1.7, "bytes_per_s": cluster.bytes_per_s / 3}
    derived = LinkTable(cluster, factor).with_other_links(cluster.with_links(**links))
    fresh = LinkTable(replace(cluster, **links), factor)
    for name, value in vars(fresh).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(derived, name), value, err_msg=name)
    assert derived.arrays(Runtime()).latency_s is derived.latency_s


def test_every_thread_sums_in_a_room_of_its_own() -> None:
    """What one thread writes there no other one reads, and the same thread has it again."""
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(own_room, 3).result()
    assert own_room(3) is own_room(3) is not theirs
