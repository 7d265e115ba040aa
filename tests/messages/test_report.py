"""What people read of a plan."""

from dataclasses import replace

from polygon import Batch, Cluster, Plan, Problem
from polygon.bounds.lower_bound import lower_bound
from polygon.domain.plan import LinkUse
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.messages.report import describe_plan

LAB = {"regions": [{"name": "lab", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]}]}


def test_what_rounding_has_left_of_a_term_is_not_told():
    """Terms are differences of times: one that is nothing may come out at 7e-18 s."""
    problem = Problem(Cluster.from_dict(LAB), "gpt2", Batch(global_batch=4, seq_len=128))
    plan = Plan(problem, uniform_plan(problem.data, ParallelConfig(dp=2)))
    priced = replace(plan.evaluate(), terms={"compute": 0.05, "reduction": 7e-18, "update": 1e-5})
    text = describe_plan(problem.data, plan.data, priced, lower_bound(problem.tables))
    assert "compute 50 ms, update 10 us\n" in text


def test_what_is_packed_inside_a_region_is_told():
    """No link between regions is used: what the nodes of one send packed is told all the same, with what is assumed of
    the loss, as in the plan's file."""
    problem = Problem(Cluster.from_dict(LAB), "gpt2", Batch(global_batch=4, seq_len=128))
    plain = uniform_plan(problem.data, ParallelConfig(dp=2))
    plan = Plan(problem, replace(plain, links=(LinkUse(source=0, target=0, activation_gradients="int8"),)))
    texts = [
        describe_plan(problem.data, data, plan.evaluate(), lower_bound(problem.tables)) for data in (plain, plan.data)
    ]
    assert "packing" not in texts[0] and "loss" not in texts[0]
    assert "packing       between nodes of lab: int8 activation gradients\n" in texts[1]
    [line] = plan.to_dict()["loss"]
    assert f"loss          {line}" in texts[1]
