"""What messages of sums between regions cost the processors of those who send and receive them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.stage_reduction import room_of_sums
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import packed_bytes
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

MESSAGE_S = 2e-4
WIDE = Link(latency_s=0.0, bytes_per_s=1e12)
TINY = {"hidden_size": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn_size": 256, "vocab_size": 512}


def replicas(nodes, *, message_s=MESSAGE_S, mode="none", inside=(), bytes_per_s=1e10, device="t4", **changes):
    """The problem and a plan of a tiny model on every node, so many in each region, and what it takes; nodes of regions
    `inside` send one another packed gradients."""
    cluster = cluster_of(
        [[(device, n, 1)] for n in nodes], latency_s=0.0, bytes_per_s=bytes_per_s, inside=WIDE, between=WIDE
    )
    batch = Batch(global_batch=2 * sum(nodes), seq_len=16, precision="fp32")
    problem = Problem(cluster=cluster, model=small_gpt(**TINY, tied_embeddings=False), batch=batch)
    problem = replace(problem, runtime=replace(problem.runtime, message_s=message_s))
    first = np.concatenate([[0], np.cumsum(nodes)])
    workers = tuple(Worker(pool=r, devices=(int(first[r]) + k,)) for r, n in enumerate(nodes) for k in range(n))
    stages = (Stage(first_layer=0, last_layer=problem.model.layers, workers=workers),)
    every = range(len(nodes))
    links = [LinkUse(source=a, target=b, weight_gradients=mode) for a in every for b in every if a != b]
    links += [LinkUse(source=r, target=r, weight_gradients=mode) for r in inside]
    plan = Plan(
        stages=stages,
        routes=np.arange(2 * sum(nodes))[:, None] % len(workers),
        micro_batch_size=1,
        spans=stage_spans(stages, (len(workers),)),
        links=tuple(links),
        **changes,
    )
    return problem, plan, step_times(plan, CostTables(problem))


@pytest.mark.parametrize(
    ("nodes", "mode", "inside", "messages"),
    [
        ([1, 1], "none", (), 2),  # one there, one back
        ([32, 32], "none", (), 2 * 7),
        ([4, 4, 4], "none", (), 2 * 2 * (4 + 4)),  # with four of either other region, two rounds
        ([32, 32, 32], "none", (), 2 * 2 * (7 + 7)),
        ([1, 20], "none", (), 2 * 20),  # one beside many meets them all
        ([4, 4], "int8", (0,), (3 + 4) * 4),  # four by themselves and four together: to all others, two rounds
        ([8, 8, 8], "powersgd", (), 2 * 2),  # one of a region with one of each other, whole gradients
    ],
)
def test_sums_take_no_less_than_the_messages_of_the_busiest_leader(nodes, mode, inside, messages):
    """So many a layer, however little is in them; where they cost nothing only bytes take time."""
    problem, _, times = replicas(nodes, mode=mode, inside=inside)
    cost, free = times.reductions[0], replicas(nodes, mode=mode, inside=inside, message_s=0.0)[2].reductions[0]
    floor_s = problem.model.layers * messages * MESSAGE_S
    assert free.across_s < 0.2 * floor_s
    assert floor_s <= cost.across_s <= floor_s + free.across_s
    assert cost.ways.busy_s == pytest.approx(floor_s)


def test_who_has_much_to_send_does_not_notice_its_messages():
    """They are handled while bytes pass."""
    cost, free = (replicas([8, 8], message_s=m, bytes_per_s=1e4)[2].reductions[0] for m in (MESSAGE_S, 0.0))
    assert (cost.across_s, cost.streamed_s) == (free.across_s, free.streamed_s)


def test_regions_that_meet_seldom_have_messages_seldom():
    """With four local steps a quarter of the outer sum falls to each."""
    every, seldom = (replicas([16, 16], local_steps=steps)[2].reductions[0] for steps in (1, 4))
    assert seldom.across_s == 0
    assert seldom.outer_s == pytest.approx(every.streamed_s / 4)
    assert seldom.outer_s > replicas([16, 16], local_steps=4, message_s=0.0)[2].reductions[0].outer_s


@settings(max_examples=cases(20), deadline=None)
@given(
    nodes=st.lists(st.integers(1, 12), min_size=2, max_size=3),
    message_s=st.lists(st.floats(0, 1e-3), min_size=2, max_size=2),
    bytes_per_s=st.floats(1e5, 1e9),
)
def test_no_step_is_shorter_where_messages_cost_more(nodes, message_s, bytes_per_s):
    """Nor any of its sums."""
    less, more = (replicas(nodes, message_s=m, bytes_per_s=bytes_per_s)[2] for m in sorted(message_s))
    assert less.reductions[0].streamed_s <= more.reductions[0].streamed_s * (1 + 1e-12)
    assert less.step_s <= more.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("nodes", "mode", "copies"),
    [
        ([2, 2], "none", [2, 2]),
        ([1, 2], "none", [1, 2]),
        ([2, 1, 3], "int8", [2, 1, 2]),
        ([2, 2], "powersgd", [1, 1]),
        ([3], "none", [1]),
        ([1, 1], "none", [0, 0]),
    ],
)
def test_where_several_nodes_lead_each_lays_its_gradient_out_in_their_order(nodes, mode, copies):
    """Whoever has others in its region holds theirs and, where several nodes of any region lead, its own once more,
    beside what goes between regions."""
    problem, plan, _ = replicas(nodes, mode=mode, device="cpu-core")
    tables, count = CostTables(problem), len(nodes)
    rooms = room_of_sums(plan, tables.placement(plan), 0, tables.links, problem.runtime)
    versions = 0 if count == 1 else count if count == 2 else (3 * count - 2) / count
    between = versions * packed_bytes(1e6, 4, mode) / 4e6
    expected = [own + between / (1 if mode == "powersgd" else n) for n, own in zip(nodes, copies, strict=True)]
    assert [room.heard for room in rooms] == pytest.approx(np.repeat(expected, nodes))
