"""What people read of a plan."""

from dataclasses import replace

import pytest

from polygon import Batch, Cluster, Plan, Problem
from polygon.bounds.lower_bound import lower_bound
from polygon.domain.plan import LinkUse
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.messages.report import describe_plan, seconds, size

LAB = {"regions": [{"name": "lab", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]}]}


def test_what_rounding_has_left_of_a_term_is_not_told():
    """Terms are differences of times: one that is nothing may come out at 7e-18 s."""
    problem = Problem(Cluster.from_dict(LAB), "gpt2", Batch(global_batch=4, seq_len=128))
    plan = Plan(problem, uniform_plan(problem.data, ParallelConfig(dp=2)))
    priced = replace(plan.evaluate(), terms={"compute": 0.05, "reduction": 7e-18, "update": 1e-5})
    text = describe_plan(problem.data, plan.data, priced, lower_bound(problem.tables))
    assert "compute 50.0 ms, update 10.0 µs\n" in text


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


@pytest.mark.parametrize(
    ("value", "time", "weight"),
    [(0, "0 s", "0 B"), (3, "3.00 s", "3 B"), (9.999, "10.0 s", "10 B"), (120, "120 s", "120 B"),
     (7433.2, "7,433 s", "7.43 kB"), (4e9, "4,000,000,000 s", "4.00 GB"), (999.7e9, "999,700,000,000 s", "1,000 GB")],
)  # fmt: skip
def test_numbers_have_three_digits(value, time, weight):
    """Zeros at their ends too, as the page beside which they stand has them; and no power of ten."""
    assert (seconds(value), size(value)) == (time, weight)


def test_shares_of_a_second_have_three_digits():
    """By hand, to where rounding needs a fourth."""
    shares = {0.05: "50.0 ms", 0.9999: "1,000 ms", 1e-5: "10.0 µs", 2.5e-6: "2.50 µs"}
    assert [seconds(value) for value in shares] == list(shares.values())
