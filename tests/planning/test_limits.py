"""What limits a plan is what its improvement saves most of, priced as everything is."""

import json
from dataclasses import replace
from importlib.resources import files as resource_files

import numpy as np

from polygon import Batch, Cluster, Constraints, Plan, Problem
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.message import say, words
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.planning.limits import (
    ALONE,
    ENOUGH,
    RELAXED,
    Limits,
    Resource,
    assumed,
    limits,
    limits_as_found,
    replanned,
    resources,
)
from tests.exported_plans import INSTANCES, drawn, wide
from tests.small_problems import routed_problem

REGIONS = [
    {"name": "virginia", "nodes": [{"device": "a100-80gb", "count": 4, "devices_per_node": 8},
                                   {"device": "v100-16gb", "count": 2, "devices_per_node": 4}]},
    {"name": "frankfurt", "nodes": [{"device": "h100-sxm", "count": 2, "devices_per_node": 8}]},
    {"name": "tokyo", "nodes": [{"device": "t4", "count": 8, "devices_per_node": 4}]},
]  # fmt: skip
LINKS = [
    {"between": ["virginia", "frankfurt"], "latency_ms": 45, "bandwidth_gbps": 5},
    {"between": ["virginia", "tokyo"], "latency_ms": 75, "bandwidth_gbps": 5},
    {"between": ["frankfurt", "tokyo"], "latency_ms": 115, "bandwidth_gbps": 5},
]


def test_the_named_limit_saves_at_least_as_much_as_any_other():
    """On drawn plans: every resource relaxed here and priced anew saves no more than the first that is named."""
    for problem, plan, tables in drawn(10):
        said = limits(problem, plan, tables)
        step_s = step_times(plan, tables).step_s
        assert said.step_s == step_s
        best = said.limits[0].saves if said.limits else 0.0005
        for resource in resources(problem, plan, step_times(plan, tables)):
            if resource.kind != "memory":
                other = replace(problem, cluster=resource.better(problem.cluster, RELAXED))
                assert 1 - step_times(plan, CostTables(other)).step_s / step_s <= best + 1e-9, resource
        assert all(limit.would_save >= 0.01 for limit in said.limits if limit.suggested is not None)


def test_the_network_inside_a_region_is_named_where_nobody_gave_it():
    """Replicas on two fast nodes and ten assumed Gbit/s: planned anew with more the step is shorter."""
    cluster = Cluster.from_dict({"regions": REGIONS[1:2]})
    plain = Constraints(compressions=("none",))  # packed sums would want memory instead
    problem = Problem(cluster, "llama2-7b", Batch(global_batch=512, seq_len=2048), constraints=plain)
    plan = uniform_plan(problem.data, ParallelConfig(dp=16, zero=1, micro_batch_size=1, recompute="full"))
    said = limits(problem.data, plan, problem.tables)
    first = said.limits[0]
    assert (first.resource.kind, first.resource.region, first.resource.default) == ("intra_region", "frankfurt", True)
    again = replanned(problem.data, plan, problem.tables, first)
    assert again["region"] == "frankfurt" and again["value"] > 10 and again["would_save"] > 0.05
    assert again["value"] == first.suggested and abs(again["same_plan"] - first.would_save) < 1e-9


def test_reports_name_the_limit_that_the_page_names(tmp_path):
    """In words and in the plan's file; more of it saves what they say. With no time they say that there was none."""
    cluster = Cluster.from_dict({"regions": REGIONS[1:2]})
    plain = Constraints(compressions=("none",))
    problem = Problem(cluster, "llama2-7b", Batch(global_batch=512, seq_len=2048), constraints=plain)
    config = ParallelConfig(dp=16, zero=1, micro_batch_size=1, recompute="full")
    plan = Plan(problem, uniform_plan(problem.data, config))
    first = limits(problem.data, plan.data, problem.tables).limits[0]
    named = f"the network inside frankfurt (10 % more saves {first.saves:.1%}, {first.suggested:g} Gbit/s instead of "
    assert f"\nlimited by    {named}" in plan.describe()
    plan.save(tmp_path / "plan.json")
    said = json.loads((tmp_path / "plan.json").read_text())["estimate"]
    assert said["limited_by"]["text"].startswith(named) and said["limits"]["limits"][0]["saves"] == first.saves
    hurried = Plan(problem, plan.data)
    assert not hurried.limits(time_limit_s=1e-9).whole
    assert "\nlimited by    (there was no time to find out)\n" in hurried.describe()


def test_reports_and_page_have_one_name_for_a_resource():
    """In both languages."""
    page = json.loads(resource_files("polygon.web").joinpath("strings.json").read_text("utf-8"))["page"]
    names = words()["messages"]
    both = {kind.removeprefix("limit_"): said for kind, said in page.items() if kind.startswith("limit_")}
    assert len(both) == 9 and all(names[f"resource.{kind}"] == said for kind, said in both.items())
    assert names["resource.latency"] == page["latencyOf"] and names["resource.capacity"] == page["capacityOf"]


def test_limits_found_in_too_little_time_are_told_as_such():
    """Those met by then, worst first; more may be worse."""
    problem, plan = wide()
    tables, left = CostTables(problem), iter([1.0] * 6)
    found = limits(problem, plan, tables, lambda: next(left, 0.0))
    whole = limits(problem, plan, tables)
    assert 0 < len(found.limits) < len(whole.limits) and not found.whole and whole.whole
    assert found.said.kind == "limits.so_far" and str(found.said).endswith("(there was no time to look at all)")
    assert {limit.resource.name for limit in found.limits} <= {limit.resource.name for limit in whole.limits}


def test_what_limits_together_is_said_in_one_sentence():
    """Three of them by name, however many there are."""
    of = Resource(kind="pair", quality="latency", region="a", other="b", now=1.0, better=lambda cluster, _: cluster)
    found = Limits(step_s=1.0, limits=(), together=(of,) * 5, together_saves=0.0561, whole=True)
    name = "the latency of the link between a and b"
    expected = f"{name}, {name}, {name}, 2 more together: 10 % better saves 5.6%, of one alone at most 0.0%"
    assert str(found.said) == expected
    assert say(found.said, "zh").startswith("a 与 b 之间的链路的延迟")


def test_planning_anew_never_saves_less_than_keeping_the_plan():
    """Of a plan that a search would leave behind, too: what it gains by a better link is the least that is said."""
    cluster = Cluster.from_dict({"regions": REGIONS[1:2]})
    problem = Problem(cluster, "llama2-7b", Batch(global_batch=512, seq_len=2048))
    plan = uniform_plan(problem.data, ParallelConfig(dp=2, tp=8, zero=1, micro_batch_size=1, recompute="full"))
    for limit in limits(problem.data, plan, problem.tables).limits:
        again = replanned(problem.data, plan, problem.tables, limit)
        assert again["would_save"] >= again["same_plan"] >= -1e-12


def test_a_network_that_a_plan_avoids_is_named_where_nobody_gave_it():
    """The best plan for ten assumed Gbit/s keeps off them; another, for more, saves more than what limits this one."""
    cluster = Cluster.from_dict({"regions": REGIONS, "links": LINKS})
    problem = Problem(cluster, "llama2-7b", Batch(global_batch=512, seq_len=2048))
    plan = problem.search(effort="quick").plan
    named = limits(problem.data, plan.data, problem.tables).limits[0]
    worst = assumed(problem.data, plan.data, problem.tables)[0]
    assert (worst["name"], worst["region"]) == ("frankfurt.intra_region", "frankfurt")
    assert worst["anew"] > max(worst["faster"], named.saves, named.would_save)


def test_devices_that_wait_for_one_another_are_the_limit_together():
    """Two types as fast as each other share the work: 10 % more of one saves nothing, of both a tenth of it; what
    is named saves most of what everything relaxed does, and without any of it less."""
    device = {"memory_gib": 80, "tflops": {"fp32": 20, "bf16": 100}, "memory_bandwidth_gb_per_s": 2000, "power_w": 400,
              "price_usd_per_hour": 2}  # fmt: skip
    regions = [{"name": r, "nodes": [{"device": d, "count": 1, "devices_per_node": 1}]} for r, d in ("ax", "by")]
    links = [{"between": ["a", "b"], "latency_ms": 0.1, "bandwidth_gbps": 800}]
    cluster = Cluster.from_dict({"regions": regions, "links": links, "devices": {"x": device, "y": device}})
    problem = Problem(cluster, "opt-350m", Batch(global_batch=64, seq_len=1024))
    plan = uniform_plan(problem.data, ParallelConfig(dp=2, micro_batch_size=4))
    said = limits(problem.data, plan, problem.tables)
    assert {(resource.kind, resource.device) for resource in said.together} == {("compute", "x"), ("compute", "y")}
    step_s = step_times(plan, problem.tables).step_s

    def saved(relaxed):
        other = problem.data
        for resource in relaxed:
            other = replace(other, cluster=resource.better(other.cluster, RELAXED))
        return 1 - step_times(plan, CostTables(other)).step_s / step_s

    every = [it for it in resources(problem.data, plan, step_times(plan, problem.tables)) if it.kind != "memory"]
    assert all(limit.saves < ALONE * saved(every) for limit in said.limits)
    assert said.together_saves == saved(said.together) >= ENOUGH * saved(every) > 0.03
    for resource in said.together:
        assert saved([it for it in said.together if it is not resource]) < ENOUGH * saved(every)


def test_links_that_a_sum_over_many_regions_waits_for_are_the_limit_as_one():
    """Of 45 pairs one alone saves nothing, all of them most of what everything does: they are named, not computing."""
    cluster = Cluster.from_yaml(INSTANCES / "aws-regions.yaml")
    problem = Problem(cluster, "gpt3-1.3b", Batch(global_batch=160, seq_len=1024))
    plan = uniform_plan(problem.data, ParallelConfig(dp=80, zero=3, micro_batch_size=1, recompute="full"))
    step_s = step_times(plan, problem.tables).step_s
    said = limits(problem.data, plan, problem.tables)
    first, compute = said.limits[0], next(it for it in said.limits if it.resource.kind == "compute")
    assert (first.resource.kind, said.together) == ("between_rate", ())
    regions = ~np.eye(10, dtype=bool)
    faster = replace(problem.data.cluster, bytes_per_s=problem.data.cluster.bytes_per_s * np.where(regions, RELAXED, 1))
    saves = 1 - step_times(plan, CostTables(replace(problem.data, cluster=faster))).step_s / step_s
    assert abs(first.saves - saves) < 1e-9 and saves > max(0.05, compute.saves)
    assert all(it.saves < ALONE * saves for it in said.limits if it.resource.kind == "pair")
    again = replanned(problem.data, plan, problem.tables, first)
    assert again["value"] == 2.0 and again["same_plan"] > first.saves


def test_what_is_known_so_far_grows_into_the_answer():
    """Each telling has one limit more, worst first; the last is all."""
    problem, plan = wide()
    *parts, whole = limits_as_found(problem, plan, CostTables(problem))
    assert [len(part.limits) for part in parts] == list(range(1, len(whole.limits) + 1))
    assert whole.whole and not any(part.whole for part in parts)
    for part in (*parts, whole):
        assert list(part.limits) == sorted(part.limits, key=lambda limit: -limit.saves)


def test_a_slow_link_that_everything_crosses_is_the_limit():
    """Between regions at less than a Gbit/s nothing else matters as much, and a faster rate is worth its name."""
    problem, plan = routed_problem(4)
    problem = replace(
        problem, cluster=replace(problem.cluster, bytes_per_s=np.minimum(problem.cluster.bytes_per_s, 1e5))
    )
    first = limits(problem, plan, CostTables(problem)).limits[0]
    assert (first.resource.kind, first.resource.quality) == ("pair", "rate")
    assert first.suggested > first.resource.now and first.would_save >= first.saves - 1e-9


def test_a_capacity_that_flows_share_is_named_and_not_the_rate_above_it():
    """More of the rate alone saves nothing where flows share less; the value that is named is the capacity's."""
    problem, plan = routed_problem(4)
    cluster = problem.cluster
    slow = replace(cluster, capacity_bytes_per_s=np.minimum(cluster.bytes_per_s, 1e5))
    problem = replace(problem, cluster=slow)
    tables = CostTables(problem)
    said = limits(problem, plan, tables)
    first, pair = said.limits[0], {said.limits[0].resource.region, said.limits[0].resource.other}
    assert (first.resource.kind, first.resource.quality) == ("pair", "capacity")
    assert abs(first.resource.now - 1e5 * 8 / 1e9) < 1e-12 and first.suggested > first.resource.now
    assert str(first.resource.name).startswith("the shared capacity of the link between ")
    assert not any(
        it.resource.quality == "rate" and {it.resource.region, it.resource.other} == pair for it in said.limits
    )
    ends = [slow.region_index(name) for name in pair]
    capacity = slow.capacity_bytes_per_s.copy()
    capacity[np.ix_(ends, ends)] = first.suggested * 1e9 / 8
    typed = replace(problem, cluster=replace(slow, capacity_bytes_per_s=capacity))
    assert abs(1 - step_times(plan, CostTables(typed)).step_s / said.step_s - first.would_save) < 1e-9
