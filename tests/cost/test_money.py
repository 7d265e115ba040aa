"""What a step and a run cost, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.estimate import estimate
from polygon.cost.money import Bill, bill_of, excesses, priced, step_bill, traffic_bytes, whole_run
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Constraints
from tests.small_problems import routed_problem


def with_prices(problem, per_hour, egress):
    """The problem with prices per hour of a device and per GB that leaves, by region."""
    regions = tuple(
        replace(
            region,
            egress_usd_per_gb=gb,
            node_groups=tuple(replace(group, price_usd_per_hour=usd) for group in region.node_groups),
        )
        for region, usd, gb in zip(problem.cluster.regions, per_hour, egress, strict=True)
    )
    return replace(problem, cluster=replace(problem.cluster, regions=regions))


@pytest.fixture
def routed():
    """Four ranks: device 0 of region 0 in stage 0, device 1 there and both of region 1 in stage 1."""
    problem, plan = routed_problem(4)
    return with_prices(problem, (2.0, 5.0), (0.1, 0.4)), plan


def test_devices_are_paid_by_the_hour_and_draw_their_power(routed):
    """Two devices at 2 and two at 5 USD an hour for half an hour: 7 USD; 4 x 10 W; egress by what leaves a region."""
    problem, plan = routed
    bill = bill_of(problem, plan, 1800.0, np.array([[0.0, 3e9], [5e9, 0.0]]))
    assert bill.usd == pytest.approx(7.0 + 3 * 0.1 + 5 * 0.4)
    assert bill.energy_j == pytest.approx(4 * 10 * 1800)
    assert bill.egress_bytes.tolist() == [3e9, 5e9]
    assert bill.tokens == 16 * 16
    assert bill.usd_per_hour == pytest.approx(2 * bill.usd)
    assert bill.tokens_per_usd == pytest.approx(256 / bill.usd)


def test_what_is_free_costs_nothing_however_long_it_takes(routed):
    """Also a step that never ends: 0 times infinity is no number."""
    problem, _ = routed
    bill = priced(problem, math.inf, 0.0, 0.0, np.zeros(2))
    assert (bill.usd, bill.energy_j, bill.usd_per_hour, bill.tokens_per_usd) == (0.0, 0.0, 0.0, math.inf)


def test_a_run_has_whole_steps(routed):
    """1000 tokens of 256 a step: four steps, each in full."""
    problem, plan = routed
    run = whole_run(bill_of(problem, plan, 1800.0, np.zeros((2, 2))), 1000)
    assert (run.steps, run.seconds, run.tokens) == (4, 7200.0, 1000)
    assert run.usd == pytest.approx(28.0) and run.energy_j == pytest.approx(4 * 72_000)


def test_traffic_is_what_crosses(routed):
    """Of eight micro-batches those of workers 1 and 2 leave region 0: each with 2 x 16 x 32 fp32 values."""
    problem, plan = routed
    moved, reduced = traffic_bytes(problem, plan, step_times(plan, CostTables(problem)))
    message = 2 * 16 * 32 * 4
    crossing = sum(int(worker) != 0 for worker in plan.routes[:, 1])
    assert moved.tolist() == [[0, crossing * message], [crossing * message, 0]]
    assert (np.diag(reduced) == 0).all() and reduced[0, 1] > 0 and reduced[1, 0] > 0
    bill = step_bill(problem, plan, step_times(plan, CostTables(problem)))
    assert bill.egress_bytes == pytest.approx((moved + reduced).sum(axis=1))


def bill(**changes):
    return Bill(**({"step_s": 10.0, "usd": 2.0, "energy_j": 5.0, "egress_bytes": np.array([4e9, 0.0]), "tokens": 100}
                   | changes))  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "part", "kind"),
    [
        ({"most_step_s": 8.0}, 0.25, "limit.step_s"),
        ({"most_usd_per_step": 1.6}, 0.25, "limit.usd_per_step"),
        ({"most_usd_per_hour": 600.0}, 0.2, "limit.usd_per_hour"),
        ({"egress_bytes_per_step": {"region-0": 1e9}}, 3.0, "limit.egress_bytes"),
        ({"egress_bytes_per_step": {"*": 2e9}}, 1.0, "limit.egress_bytes"),
        ({"egress_bytes_per_step": {"*": 0.0}}, 4e9 - 1, "limit.egress_bytes"),
    ],
)
def test_every_limit_is_compared(routed, limits, part, kind):
    """By which part of it a bill is over, and the kind of limit; kept where it is just met, but for rounding."""
    problem = replace(routed[0], constraints=Constraints(**limits))
    [(over, message)] = excesses(problem, bill())
    assert over == pytest.approx(part) and message.kind == kind
    free = {"egress_bytes_per_step": {"*": 1e9, "region-0": 9e9}}
    assert excesses(replace(problem, constraints=Constraints(**free)), bill()) == []
    met = {"most_step_s": 10.0, "most_usd_per_step": 2.0, "most_usd_per_hour": 720.0}
    limited = replace(problem, constraints=Constraints(**met, egress_bytes_per_step={"*": 4e9}))
    assert excesses(limited, bill()) == []
    assert len(excesses(limited, bill(step_s=10.1, usd=2.03, egress_bytes=np.full(2, 4.1e9)))) == 5


def test_an_estimate_says_what_the_bill_says_with_an_interval_around_the_step(routed):
    """Both ends as far from the step, by its logarithm, as the error of what it was worked out from."""
    problem, plan = routed
    found = estimate(problem, plan)
    places = [(s, w) for s, stage in enumerate(plan.stages) for w in range(stage.width)]
    assert [(worker.stage, worker.worker) for worker in found.workers] == places
    costs = step_bill(problem, plan, step_times(plan, CostTables(problem)))
    assert (found.cost_usd, found.energy_j) == (pytest.approx(costs.usd), pytest.approx(costs.energy_j))
    assert found.low_s < found.step_s < found.high_s
    assert found.step_s / found.low_s == pytest.approx(found.high_s / found.step_s)
