"""What nobody gave is judged by what another plan would make of it, not by this plan alone."""

from dataclasses import replace

import numpy as np
import pytest

from polygon import Batch, Cluster, Constraints, Problem
from polygon.cost.step_times import step_times
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.messages.report import describe_assumptions
from polygon.planning.alternatives import SHORT
from polygon.planning.assumptions import FACTOR, LEAST, _scaled, assumptions
from polygon.planning.search_engine import find_plan


@pytest.fixture(scope="module")
def in_a_row():
    """Eight stages in a row over two nodes whose network nobody gave, beside a region that the plan does not use."""
    regions = [
        {"name": "here", "nodes": [{"device": "h100-sxm", "count": 2, "devices_per_node": 4}]},
        {"name": "idle", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]},
    ]
    links = [{"between": ["here", "idle"], "latency_ms": 40, "bandwidth_gbps": 1}]
    cluster = Cluster.from_dict({"regions": regions, "links": links})
    plain = Constraints(compressions=("none",))
    problem = Problem(cluster, "gpt3-1.3b", Batch(global_batch=64, seq_len=1024), constraints=plain)
    alone = Problem(Cluster.from_dict({"regions": regions[:1]}), "gpt3-1.3b", Batch(global_batch=64, seq_len=1024))
    plan = uniform_plan(alone.data, ParallelConfig(pp=8, micro_batch_size=1))
    return problem.data, plan, problem.tables


def test_a_link_is_named_by_what_another_plan_gains(in_a_row):
    """Faster it saves another plan more than this one; the other is found here again and has the step that is said."""
    problem, plan, tables = in_a_row
    first = assumptions(problem, plan, tables, anew=True)[0]
    assert first.name == "here.intra_region" and LEAST < first.faster < first.anew == first.gain
    faster = replace(problem, cluster=_scaled(problem.cluster, first.name, FACTOR))
    found = find_plan(faster, np.random.default_rng(1), effort=SHORT)
    assert found.value_s <= (1 - first.anew) * step_times(plan, tables).step_s * 1.05


def test_without_planning_anew_nothing_is_said_of_other_plans(in_a_row):
    """What is cheap says so, in data and in words; the same links are told either way where this plan rests on them."""
    problem, plan, tables = in_a_row
    cheap, whole = assumptions(problem, plan, tables), assumptions(problem, plan, tables, anew=True)
    assert all(it.anew is None for it in cheap) and all(it.anew is not None for it in whole)
    assert {it.name for it in cheap} <= {it.name for it in whole}
    assert "not tried" in describe_assumptions(cheap)
    assert "with another plan" in describe_assumptions(whole) and "not tried" not in describe_assumptions(whole)


def test_what_is_given_is_not_assumed(in_a_row):
    """A cluster whose every link is given assumes nothing, planned anew or not."""
    problem, plan, tables = in_a_row
    given = replace(problem, cluster=replace(problem.cluster, defaults=()))
    assert assumptions(given, plan, tables.for_problem(given), anew=True) == []
