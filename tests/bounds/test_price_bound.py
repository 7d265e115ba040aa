"""Bounds on money and energy: below every plan, and what one device without waiting costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.lower_bound import lower_bound
from polygon.bounds.price_bound import least_energy_j, least_usd
from polygon.cost.money import step_bill
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from tests.bounds.test_lower_bound import LAN, problem_of, problems, random_plans
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases


@settings(max_examples=cases(12), deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_no_plan_is_cheaper_or_more_frugal_than_the_bound(problem, seed):
    """Whatever the plan: its step costs and draws no less."""
    tables = CostTables(problem)
    usd, energy_j = least_usd(tables), least_energy_j(tables)
    assert usd > 0
    for plan in random_plans(problem, np.random.default_rng(seed), count=3):
        bill = step_bill(problem, plan, step_times(plan, tables))
        assert bill.usd >= usd * (1 - 1e-9)
        assert bill.energy_j >= energy_j * (1 - 1e-9)


def test_one_device_costs_its_time():
    """With one device the cheapest step is the one that computes least."""
    problem = problem_of(cluster_of([[("a100-40gb", 1, 1)]], inside=LAN, between=LAN))
    tables = CostTables(problem)
    pool, compute_s = problem.cluster.pools[0], lower_bound(tables).parts["compute"]
    assert least_usd(tables) == pytest.approx(compute_s * pool.price_usd_per_hour / 3600, rel=1e-2)
    assert least_energy_j(tables) == pytest.approx(compute_s * pool.device.power_w, rel=1e-2)


def test_dear_devices_do_not_make_the_cheapest_step_dearer():
    """A faster type beside a cheap one lowers the bound on time and leaves that on money where it was."""
    cheap = problem_of(cluster_of([[("t4", 4, 1)]], inside=LAN, between=LAN))
    both = problem_of(cluster_of([[("t4", 4, 1), ("a100-40gb", 4, 1)]], inside=LAN, between=LAN))
    tables = [CostTables(problem) for problem in (cheap, both)]
    assert lower_bound(tables[1]).seconds < 0.5 * lower_bound(tables[0]).seconds
    assert least_usd(tables[1]) <= least_usd(tables[0]) * (1 + 1e-9)


def test_nothing_allowed_costs_more_than_any_money():
    """Without devices no step ends."""
    problem = Problem(
        cluster=cluster_of([[("t4", 1, 1)]], inside=LAN, between=LAN),
        model=small_gpt(),
        batch=Batch(global_batch=8, seq_len=512),
        constraints=Constraints(forbidden_regions=("r0",)),
    )
    assert least_usd(CostTables(problem)) == least_energy_j(CostTables(problem)) == np.inf
    assert least_usd(CostTables(replace(problem, constraints=Constraints()))) < np.inf
