"""Nodes of a region that send one another packed gradients do what regions do, on real ranks."""

from dataclasses import replace

import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import NodeGroup, Region
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Problem
from polygon.planning.checker import violations
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.rank_layout import Layout
from runners.engine.run import train
from tests.real_ranks import run_ranks
from tests.small_problems import LAN, small_cluster, small_model, small_plan


def described(nodes, per_node, *, one_region, packing, zero=0):
    """Data parallelism over equal nodes, which are one region or as many, over the same links."""
    cluster = small_cluster(per_node) if one_region else small_cluster(*[per_node] * nodes)
    link = replace(LAN, latency_s=0.01, bytes_per_s=1e8)
    group = NodeGroup(
        device="cpu", nodes=nodes if one_region else 1, devices_per_node=per_node, intra_node=LAN, inter_node=link
    )
    regions = tuple(replace(region, node_groups=(group,), intra_region=link) for region in cluster.regions)
    cluster = replace(cluster, regions=regions)
    assert all(isinstance(region, Region) for region in regions)
    batch = Batch(global_batch=24, seq_len=16, precision="fp32")
    problem = Problem(cluster=cluster, model=small_model(blocks=2), batch=batch)
    width = nodes * per_node
    plan = small_plan(cluster, [(0, 4)], [range(width)], [[m % width] for m in range(12)], compression=packing)
    own = (LinkUse(source=0, target=0, weight_gradients=packing),) if one_region else plan.links
    stages = tuple(replace(stage, zero=zero) for stage in plan.stages)
    return problem, replace(plan, links=own, stages=stages)


def rank_of(rank, port, problem, plan):
    """Losses that this rank saw, and what packing dropped in the last step."""
    steps = []
    options = Options(steps=5, learning_rate=3e-3, clip_norm=0.5)
    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=steps.append)
    return [step["loss"] for step in steps], steps[-1]["packing_error"]


@pytest.mark.parametrize(("nodes", "per_node", "packing", "zero"), [(3, 1, "int8", 0), (2, 2, "bf16", 2)])
def test_nodes_sum_packed_gradients_as_regions_do(nodes, per_node, packing, zero):
    """Said of one region or of as many as nodes, training is the same (bit by bit without ZeRO), and the loss falls."""
    one, many = (
        run_ranks(rank_of, nodes * per_node, *described(nodes, per_node, one_region=o, packing=packing, zero=zero))
        for o in (True, False)
    )
    losses, dropped = one[0]
    # ZeRO adds up the parts of micro-batches as they come, so that the last digit is another in every run.
    assert one == many if not zero else losses == pytest.approx(many[0][0], rel=1e-6)
    assert losses[-1] < losses[0] and 0 < dropped["weight_gradients"] < 0.1


@pytest.mark.parametrize(("nodes", "per_node", "zero"), [(2, 1, 0), (3, 2, 0), (3, 2, 2), (5, 4, 3)])
def test_they_cost_what_regions_do(nodes, per_node, zero):
    """Sums take as long and memory is as much, however the machines are described.

    To 50 us: a message inside a region waits for the library of the accelerator.
    """
    one, many = (described(nodes, per_node, one_region=o, packing="int8", zero=zero) for o in (True, False))
    packed, apart = (step_times(plan, CostTables(problem)) for problem, plan in (one, many))
    for field in ("across_s", "latency_s", "region_s", "gather_s"):
        here, there = (getattr(times.reductions[0], field) for times in (packed, apart))
        assert here == pytest.approx(there, rel=1e-9, abs=5e-5)
    assert packed.place.shards[0].tolist() == apart.place.shards[0].tolist() == [per_node] * nodes * per_node


def test_packing_inside_needs_a_sum_in_every_step():
    """With local steps or a server the checker says what is allowed."""
    problem, plan = described(2, 2, one_region=True, packing="int8")
    assert "plan.packed_inside" not in {v.kind for v in violations(problem, plan)}
    for changes in ({"reduction": "central-server"}, {"local_steps": 2}):
        assert "plan.packed_inside" in {v.kind for v in violations(problem, replace(plan, **changes))}


def test_packed_messages_inside_a_region_have_tags():
    """Leaders of nodes reach one another by a way with tags; everybody else in the region as before."""
    layout = Layout(*described(3, 2, one_region=True, packing="int8"))
    assert layout.groups["stage-0.0"].leaders == ((0,), (2,), (4,))
    assert layout.near(0) == {0, 1, 3, 5} and layout.near(1) == {0, 1, 2, 3, 4, 5}
