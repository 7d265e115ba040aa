"""What nobody gave is judged by what another plan would make of it, not by this plan alone."""

from dataclasses import replace

import numpy as np
import pytest

from polygon import Batch, Cluster, Constraints, Plan, Problem
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.messages.report import describe_assumptions
from polygon.planning.alternatives import SHORT
from polygon.planning.assumptions import FACTOR, LEAST, _scaled, assumptions
from polygon.planning.search_engine import find_plan

REGIONS = [
    {"name": "here", "nodes": [{"device": "h100-sxm", "count": 2, "devices_per_node": 4}]},
    {"name": "idle", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]},
]


@pytest.fixture(scope="module")
def on_one_node():
    """One stage on one node of two: the network between, at its default, is not worth its use."""
    links = [{"between": ["here", "idle"], "latency_ms": 40, "bandwidth_gbps": 1}]
    cluster = Cluster.from_dict({"regions": REGIONS, "links": links})
    plain = Constraints(compressions=("none",), most_stages=1)
    problem = Problem(cluster, "gpt3-1.3b", Batch(global_batch=1024, seq_len=1024), constraints=plain)
    found = find_plan(problem.data, np.random.default_rng(0), effort=SHORT, tables=problem.tables)
    assert found.plan is not None and found.plan.world_size == 4
    return problem.data, found.plan, problem.tables


def test_a_link_is_named_by_what_another_plan_gains(on_one_node):
    """Faster it saves this plan nothing and another some; that one is found again with the step that is said."""
    problem, plan, tables = on_one_node
    first = assumptions(problem, plan, tables, anew=True)[0]
    assert first.name == "here.intra_region" and first.faster == 0 and LEAST < first.anew == first.gain
    faster = replace(problem, cluster=_scaled(problem.cluster, first.name, FACTOR))
    found = find_plan(faster, np.random.default_rng(1), effort=SHORT)
    assert found.plan.world_size == 8
    assert found.value_s <= (1 - first.anew) * step_times(plan, tables).step_s * 1.05


def test_without_planning_anew_nothing_is_said_of_other_plans(on_one_node):
    """What is cheap says so, in data and in words; the same links are told either way where this plan rests on them."""
    problem, plan, tables = on_one_node
    cheap, whole = assumptions(problem, plan, tables), assumptions(problem, plan, tables, anew=True)
    assert all(it.anew is None for it in cheap) and all(it.anew is not None for it in whole)
    assert {it.name for it in cheap} <= {it.name for it in whole}
    both_nodes = uniform_plan(problem, ParallelConfig(dp=8, micro_batch_size=1, zero=1))
    assert "not tried" in describe_assumptions(assumptions(problem, both_nodes, tables))
    assert "with another plan" in describe_assumptions(whole) and "not tried" not in describe_assumptions(whole)


def test_what_changes_hardly_has_no_sign(on_one_node):
    """A change that rounds to nothing, and another plan that gains no more than is seen, are not told as gains."""
    told = assumptions(*on_one_node, anew=True)
    said = describe_assumptions([replace(told[0], slower=0.29, faster=0.001, anew=0.004)])
    assert said.endswith("+29% if it were 4 times slower, 0% if faster")


def test_what_is_given_is_not_assumed(on_one_node):
    """A cluster whose every link is given assumes nothing, planned anew or not."""
    problem, plan, tables = on_one_node
    given = replace(problem, cluster=replace(problem.cluster, defaults=()))
    assert assumptions(given, plan, tables.for_problem(given), anew=True) == []


def test_what_a_slow_plan_loses_by_itself_is_not_the_links(on_one_node):
    """Of a plan on fewer devices, for least money say, the link is told to save what it saves a plan made for speed."""
    problem, fast, tables = on_one_node
    node = {"device": "h100-sxm", "count": 1, "devices_per_node": 2}
    small = Problem(Cluster.from_dict({"regions": [{"name": "here", "nodes": [node]}]}), "gpt3-1.3b", problem.batch)
    slow = uniform_plan(small.data, ParallelConfig(dp=2, micro_batch_size=1))
    assert step_times(slow, tables).step_s > 1.8 * step_times(fast, tables).step_s
    told = {it.name: it.anew for it in assumptions(problem, slow, tables, anew=True)}
    expected = {it.name: it.anew for it in assumptions(problem, fast, tables, anew=True)}
    assert told["here.intra_region"] == pytest.approx(expected["here.intra_region"], abs=0.05)


def test_of_many_links_those_of_the_most_used_regions_are_looked_at(monkeypatch):
    """Where there is time for one, it is the one between nodes of the region with most of the workers."""
    monkeypatch.setattr("polygon.planning.assumptions.MOST_PRICED", 1)
    node = {"device": "a100-40gb", "devices_per_node": 1}
    regions = [{"name": "few", "nodes": [node | {"count": 2}]}, {"name": "many", "nodes": [node | {"count": 6}]}]
    links = [{"between": ["few", "many"], "latency_ms": 1, "bandwidth_gbps": 100}]
    problem = Problem(
        Cluster.from_dict({"regions": regions, "links": links}), "gpt3-1.3b", Batch(global_batch=8, seq_len=512)
    )
    plan = uniform_plan(problem.data, ParallelConfig(dp=8, micro_batch_size=1))
    names = problem.cluster.data.defaults
    assert [name for name in names if name.startswith("few")] and names[0].startswith("few")
    (told,) = assumptions(problem.data, plan, problem.tables)
    assert told.name.startswith("many")


def test_links_between_regions_that_nobody_gave_are_told():
    """With what the step would be were they slower, both ways at once; none of regions that the plan does not use."""
    node = {"device": "a100-40gb", "count": 1, "devices_per_node": 1}
    places = {"a": (40, -80), "b": (50, 10), "c": (36, 140)}
    regions = [{"name": n, "latitude": x, "longitude": y, "nodes": [node]} for n, (x, y) in places.items()]
    problem = Problem(Cluster.from_dict({"regions": regions}), "opt-350m", Batch(global_batch=8, seq_len=512)).data
    plan = uniform_plan(problem, ParallelConfig(pp=2, micro_batch_size=1))
    used = [problem.cluster.regions[problem.cluster.pools[w.pool].region].name for w in plan.workers]
    told = {it.name: it for it in assumptions(problem, plan, CostTables(problem))}
    name = " - ".join(sorted(used))
    assert {it for it in told if " - " in it} == {name}
    link = told[name]
    assert (link.region, link.other, link.device) == (*sorted(used), "") and link.slower > 0 < link.faster
    a, b = problem.cluster.default_pairs[name]
    slow = np.ones((3, 3))
    slow[a, b] = slow[b, a] = FACTOR
    cluster = replace(problem.cluster, latency_s=problem.cluster.latency_s * slow,
                      bytes_per_s=problem.cluster.bytes_per_s / slow)  # fmt: skip
    slower_s = step_times(plan, CostTables(replace(problem, cluster=cluster))).step_s
    assert link.slower == pytest.approx(slower_s / step_times(plan, CostTables(problem)).step_s - 1)


@pytest.mark.parametrize("looks", [0, 1, 2, 4])
def test_where_time_ends_before_plans_are_made_anew_none_was(on_one_node, looks):
    """A half of the answer would be taken for all of it: then nothing is said of other plans."""
    problem, plan, tables = on_one_node
    left = iter([1.0] * looks)
    told = assumptions(problem, plan, tables, anew=True, seconds_left=lambda: next(left, 0.0))
    assert told == assumptions(problem, plan, tables)


def test_links_for_which_there_was_no_time_are_spoken_of():
    """With none looked at that is said, with some that there may be more; a plan keeps what was found."""
    cluster = Cluster.from_dict({"regions": REGIONS[:1]})
    problem = Problem(cluster, "gpt3-1.3b", Batch(global_batch=64, seq_len=1024))
    data = uniform_plan(problem.data, ParallelConfig(dp=8, micro_batch_size=1, zero=1))
    late, whole = Plan(problem, data), Plan(problem, data)
    assert late.assumptions(time_limit_s=-1.0) == [] == late.assumptions() and whole.assumptions()
    assert late.describe().endswith("links that nobody gave were not looked at for lack of time")
    assert "no time" not in whole.describe()
    assert "no time for more links" in describe_assumptions(whole.assumptions(), cut_short=True)
