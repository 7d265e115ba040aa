"""What uniform targets can express, and what the rest costs."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import StageRule, SumTree
from polygon.domain.runnable import RUNNABLE
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.export.megatron import WORDS
from polygon.export.restrict import losses
from polygon.planning.checker import violations
from polygon.planning.uniform_plans import find_uniform, variants
from tests.cost.test_step_times import far_problem, replicas
from tests.exported_plans import DIMENSIONS, drawn, of_dimensions

DEEPSPEED, MEGATRON = RUNNABLE["deepspeed"], RUNNABLE["megatron"]


@pytest.mark.parametrize("rules", RUNNABLE.values(), ids=RUNNABLE)
def test_a_uniform_plan_is_uniform_and_can_be_run(rules):
    """One degree, one width, equal shares, no violation, and devices that the plan itself uses."""
    made = 0
    for problem, plan, tables in drawn(16):
        uniform = find_uniform(problem, plan, tables, rules)
        if uniform is None:
            continue
        made += 1
        assert violations(problem, uniform.plan, tables) == []
        assert {stage.width for stage in uniform.plan.stages} == {uniform.dp}
        assert {worker.tp for worker in uniform.chain} == {uniform.tp}
        assert all(len(set(uniform.plan.shares(s))) == 1 for s in range(uniform.pp))
        assert uniform.dp * uniform.gradient_accumulation * uniform.plan.micro_batch_size == problem.batch.global_batch
        mine = {d for stage in plan.stages for w in stage.workers for d in w.devices}
        assert {d for w in uniform.chain for d in w.devices} <= mine
        if rules.blocks_apart is not None:
            blocks = np.diff([0] + [min(s.last_layer - 1, problem.model.blocks) for s in uniform.plan.stages])
            assert blocks.max() - blocks.min() <= 1
    assert made >= 12


@pytest.mark.parametrize("rules", RUNNABLE.values(), ids=RUNNABLE)
def test_losses_add_up_to_the_difference_of_the_steps(rules):
    """Each loss is priced by the shared estimate, one after another."""
    for problem, plan, tables in drawn(16):
        uniform = find_uniform(problem, plan, tables, rules)
        if uniform is not None:
            lost = losses(problem, plan, tables, rules, uniform)
            total = sum(loss.cost_s for loss in lost)
            assert total == pytest.approx(uniform.step_s - step_times(plan, tables).step_s, abs=1e-9)


@pytest.mark.parametrize(("model", "degrees"), DIMENSIONS)
def test_a_plan_that_the_target_can_say_stays_as_it_is(model, degrees):
    """Every degree, chunk and recomputed block: nothing is lost, and what is priced is what is exported."""
    problem, plan, tables = of_dimensions(model, degrees)
    uniform = find_uniform(problem, plan, tables, MEGATRON)
    assert uniform.plan.stages == plan.stages and uniform.plan.chunks == plan.chunks
    assert uniform.step_s == step_times(plan, tables).step_s
    assert losses(problem, plan, tables, MEGATRON, uniform, WORDS) == []
    for name in ("dp", "tp", "pp", "cp", "ep"):
        assert getattr(uniform, name) == degrees.get(name, 1)


@pytest.mark.parametrize(("model", "degrees"), DIMENSIONS)
def test_what_a_target_lacks_is_re_arranged_and_named(model, degrees):
    """DeepSpeed's pipeline has none of it: another plan that runs, whose losses add up; other blocks have no price."""
    problem, plan, tables = of_dimensions(model, degrees)
    uniform = find_uniform(problem, plan, tables, DEEPSPEED)
    if uniform is None:
        return
    assert violations(problem, uniform.plan, tables) == []
    assert (uniform.tp, uniform.cp, uniform.ep, uniform.plan.chunks) == (1, 1, 1, 1)
    lost = losses(problem, plan, tables, DEEPSPEED, uniform)
    priced = [loss.cost_s for loss in lost if loss.cost_s is not None]
    assert {loss.what.kind for loss in lost if loss.cost_s is None} <= {"lost.blocks"}
    assert sum(priced) == pytest.approx(uniform.step_s - step_times(plan, tables).step_s)
    kinds = {change.kind for loss in lost if loss.what.kind == "lost.structure" for change in loss.what["changes"]}
    assert ("lost.context" in kinds) == ("cp" in degrees)
    assert ("lost.spread_experts" in kinds) == ("ep" in degrees)
    assert ("lost.chunks" in kinds) == ("chunks" in degrees)


@pytest.mark.parametrize(("model", "degrees"), DIMENSIONS)
def test_of_a_plan_with_speeds_of_its_own_the_degrees_are_kept(model, degrees):
    """Another order of the same shares, which no target knows: the re-arrangement is about as quick as the plan."""
    problem, plan, tables = of_dimensions(model, degrees)
    other = replace(plan, routes=np.ascontiguousarray(plan.routes[::-1]))
    uniform = find_uniform(problem, other, tables, MEGATRON)
    assert not MEGATRON.runs(problem, other) and violations(problem, uniform.plan, tables) == []
    assert uniform.step_s <= 1.05 * step_times(plan, tables).step_s


def test_trees_that_regions_sum_over_are_lost():
    """A slow pair of regions, which the plan spares: what the target's equal parts add, and no tree is left."""
    bytes_per_s = np.full((3, 3), 1e8)
    bytes_per_s[1, 2] = bytes_per_s[2, 1] = 1e6
    problem = far_problem(3)
    problem = replace(problem, cluster=replace(problem.cluster, bytes_per_s=bytes_per_s))
    plain, tables = replicas(problem), CostTables(problem)
    plan = replicas(problem, trees=(SumTree(part=1.0, root=0),))
    uniform = find_uniform(problem, plan, tables, MEGATRON)
    (lost,) = [
        loss for loss in losses(problem, plan, tables, MEGATRON, uniform, WORDS) if loss.what.kind == "lost.trees"
    ]
    assert lost.cost_s > 1
    assert lost.cost_s == pytest.approx(step_times(plain, tables).step_s - step_times(plan, tables).step_s)
    assert not any(stage.trees for stage in uniform.plan.stages)


def test_one_stage_takes_no_chunks_of_the_plan():
    """An interleaved plan that one stage takes the place of: that has no chunks."""
    problem = far_problem(2)
    tables = CostTables(problem)
    plan = uniform_plan(problem, ParallelConfig(pp=2, chunks=2))
    one = uniform_plan(problem, ParallelConfig(dp=2))
    found = list(variants(problem, plan, one, tables, MEGATRON))
    assert found and {(len(other.stages), other.chunks) for other in found} == {(1, 1)}
    two = uniform_plan(problem, ParallelConfig(pp=2))
    assert {other.chunks for other in variants(problem, plan, two, tables, MEGATRON)} == {2}


def test_what_is_rearranged_keeps_the_rules_on_stages():
    """As many stages as there may be, and none where a rule says that it must not lie."""
    checked = 0
    for problem, plan, tables in drawn(24):
        if len(plan.stages) < 2 or MEGATRON.runs(problem, plan):
            continue
        first = problem.cluster.regions[problem.cluster.pools[plan.stages[0].workers[0].pool].region].name
        for limits in (
            replace(problem.constraints, most_stages=1),
            replace(problem.constraints, stage_rules=(StageRule(stage=0, never_regions=(first,)),)),
        ):
            limited = replace(problem, constraints=limits)
            uniform = find_uniform(limited, plan, tables, MEGATRON)
            if uniform is not None:
                checked += 1
                assert violations(limited, uniform.plan, tables) == []
    assert checked
