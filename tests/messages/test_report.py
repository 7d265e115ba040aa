"""What people read of a plan."""

from dataclasses import replace

import pytest

from polygon import Batch, Cluster, Plan, Problem
from polygon.bounds.gap import Bounds
from polygon.cost.money import TrainingRun
from polygon.domain.message import Message
from polygon.domain.plan import LinkUse
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.messages.report import columns, describe_plan, describe_run, seconds, size, table, written_out

NOTHING = Message("limits.none")
LAB = {"regions": [{"name": "lab", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]}]}


def test_what_rounding_has_left_of_a_term_is_not_told():
    """Terms are differences of times: one that is nothing may come out at 7e-18 s."""
    problem = Problem(Cluster.from_dict(LAB), "gpt2", Batch(global_batch=4, seq_len=128))
    plan = Plan(problem, uniform_plan(problem.data, ParallelConfig(dp=2)))
    priced = replace(plan.evaluate(), terms={"compute": 0.05, "reduction": 7e-18, "update": 1e-5})
    text = describe_plan(problem.data, plan.data, priced, Bounds.of(problem.tables), NOTHING)
    assert "compute 50.0 ms, update 10.0 µs\n" in text


def test_what_is_packed_inside_a_region_is_told():
    """No link between regions is used: what the nodes of one send packed is told all the same, with what is assumed of
    the loss, as in the plan's file."""
    problem = Problem(Cluster.from_dict(LAB), "gpt2", Batch(global_batch=4, seq_len=128))
    plain = uniform_plan(problem.data, ParallelConfig(dp=2))
    plan = Plan(problem, replace(plain, links=(LinkUse(source=0, target=0, activation_gradients="int8"),)))
    texts = [
        describe_plan(problem.data, data, plan.evaluate(), Bounds.of(problem.tables), NOTHING)
        for data in (plain, plan.data)
    ]
    assert "packing" not in texts[0] and "loss" not in texts[0]
    assert "packing       between nodes of lab: int8 activation gradients\n" in texts[1]
    [line] = plan.to_dict()["loss"]
    assert f"loss          {line['text']}" in texts[1]


@pytest.mark.parametrize(
    ("value", "time", "weight"),
    [(0, "0 s", "0 B"), (3, "3.00 s", "3 B"), (9.999, "10.0 s", "10 B"), (120, "120 s", "120 B"),
     (7433.2, "7,433 s", "7.43 kB"), (4e9, "4,000,000,000 s", "4.00 GB"), (999.7e9, "999,700,000,000 s", "1,000 GB")],
)  # fmt: skip
def test_numbers_have_three_digits(value, time, weight):
    """Zeros at their ends too, as the page beside which they stand has them; and no power of ten."""
    assert (seconds(value), size(value)) == (time, weight)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01184, "0.0118"), (9.2, "9.2"), (999.4, "999"), (999.6, "1,000"), (57_704.2, "57,704")],
)
def test_large_sums_are_no_powers_of_ten(value, text):
    """Dollars of a long run were 8.998e+04, milliseconds of a slow split 2.3231e+05."""
    assert written_out(value, 3) == text
    run = TrainingRun(tokens=1e12, steps=7_629_395, seconds=2.4e6, usd=89_983.4, energy_j=3.7e10)
    assert describe_run(run).endswith("27.8 days, 89,983 USD, at most 10,278 kWh")


def test_columns_stand_below_one_another_whatever_the_script():
    """Signs of East Asia are two columns wide; an accent that is put over a letter is none."""
    assert [columns(text) for text in ("Zürich", "Zu\u0308rich", "東京")] == [6, 6, 4]
    lines = table(["region", "because"], [["東京 区", "far"], ["Zürich", "near"]]).splitlines()
    assert lines == ["region   because", "東京 区  far", "Zürich   near"]


def test_devices_that_count_as_free_are_told():
    """A sum of money is not read as a price that somebody gave; where all have one nothing is said."""
    text = {}
    for price in (0.0, 0.5):
        node = {**LAB["regions"][0]["nodes"][0], "price_usd_per_hour": price}
        problem = Problem(Cluster.from_dict({"regions": [{"name": "lab", "nodes": [node]}]}), "gpt2",
                          Batch(global_batch=4, seq_len=128))  # fmt: skip
        text[price] = Plan(problem, uniform_plan(problem.data, ParallelConfig(dp=2))).describe()
    assert " kWh per step; t4 at 0 USD an hour\n" in text[0.0]
    assert "at 0 USD" not in text[0.5] and " kWh per step\n" in text[0.5] + "\n"


def test_what_compute_is_from_is_said_once():
    """Unlike devices are known from data sheets, some from published runs too."""
    node = {"count": 1, "devices_per_node": 1}
    nodes = [{"device": "a100-40gb", **node}, {"device": "t4", **node}]
    cluster = Cluster.from_dict({"regions": [{"name": "here", "nodes": nodes}]})
    problem = Problem(cluster, "gpt2", Batch(global_batch=4, seq_len=256))
    said = Plan(problem, uniform_plan(problem.data, ParallelConfig(pp=2, micro_batch_size=1))).describe()
    assert "\ncompute from  data sheets and, of some devices, published runs\n" in said


def test_shares_of_a_second_have_three_digits():
    """By hand, to where rounding needs a fourth."""
    shares = {0.05: "50.0 ms", 0.9999: "1,000 ms", 1e-5: "10.0 µs", 2.5e-6: "2.50 µs"}
    assert [seconds(value) for value in shares] == list(shares.values())
