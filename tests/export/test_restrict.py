"""What uniform targets can express, and what the rest costs."""

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.export.restrict import Rules, find_uniform, losses
from polygon.planning.checker import violations
from tests.exported_plans import drawn

RULES = [Rules(), Rules(tensor=False, uneven_layers=False, gradient_packings=("none", "bf16"))]


@pytest.mark.parametrize("rules", RULES)
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
        if not rules.uneven_layers:
            blocks = np.diff([0] + [min(s.last_layer - 1, problem.model.blocks) for s in uniform.plan.stages])
            assert blocks.max() - blocks.min() <= 1
    assert made >= 12


@pytest.mark.parametrize("rules", RULES)
def test_losses_add_up_to_the_difference_of_the_steps(rules):
    """Each loss is priced by the shared estimate, one after another."""
    for problem, plan, tables in drawn(16):
        uniform = find_uniform(problem, plan, tables, rules)
        if uniform is not None:
            lost = losses(problem, plan, tables, rules, uniform, "it")
            total = sum(loss.cost_s for loss in lost)
            assert total == pytest.approx(uniform.step_s - step_times(plan, tables).step_s, abs=1e-9)
