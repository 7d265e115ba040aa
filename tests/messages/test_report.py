"""What people read of a plan."""

from dataclasses import replace

from polygon import Batch, Cluster, Plan, Problem
from polygon.bounds.lower_bound import lower_bound
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
