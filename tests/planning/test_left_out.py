"""Idle devices have a reason, and the reason is right."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.messages.report import describe_left_out
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.left_out import left_out
from polygon.planning.nearby import allocation_of, with_idle
from polygon.planning.objectives import ENERGY, MONEY, STEP_TIME, TOKENS_PER_USD
from tests.linked_regions import cluster_of, small_gpt

REGIONS = ([("a100-40gb", 1, 4)], [("t4", 1, 2)])


def problem_of(groups=REGIONS, **changes):
    constraints = changes.pop("constraints", Constraints())
    batch = Batch(global_batch=changes.pop("global_batch", 32), seq_len=512)
    return Problem(cluster=cluster_of(groups, **changes), model=small_gpt(), batch=batch, constraints=constraints)


def plan_on_first_region(problem, devices=4):
    """All data-parallel on some devices of the first pool."""
    decoder = Decoder(problem)
    workers = np.zeros((1, len(decoder.classes)), dtype=np.int64)
    workers[0, decoder.classes.index((0, 1))] = devices
    return decoder.decode(Allocation(workers=workers, micro_batch_size=2))


def reasons(problem, plan):
    return {(row.region, row.device, row.devices): row.reason for row in left_out(problem, plan, CostTables(problem))}


def test_nothing_idle_no_reason():
    """All devices in use: an empty list."""
    problem = problem_of((REGIONS[0],))
    assert left_out(problem, plan_on_first_region(problem), CostTables(problem)) == []


def test_far_slow_devices_would_lengthen_the_step():
    """Two T4 behind a thin link: named with what they would add."""
    problem = problem_of(bytes_per_s=1e9)
    found = reasons(problem, plan_on_first_region(problem))
    assert found.keys() == {("r1", "t4", 2)}
    assert found["r1", "t4", 2].kind == "idle.more_time" and found["r1", "t4", 2]["part"] > 0
    text = describe_left_out(left_out(problem, plan_on_first_region(problem), CostTables(problem)))
    assert "2 x t4" in text and "because" in text


@pytest.mark.parametrize("objective", [STEP_TIME, MONEY, ENERGY])
def test_what_devices_would_add_is_simulated(objective, monkeypatch):
    """The relaxation only says what is looked at: where it is off by the more the more workers there are, the answer is
    the same, and it is what the best of the allocations takes."""
    problem = problem_of(bytes_per_s=1e9)
    plan, tables = plan_on_first_region(problem), CostTables(problem)
    (row,) = left_out(problem, plan, tables, objective)
    fluid_s, fluid_bill = Decoder.fluid_s, Decoder.fluid_bill

    def longer(decoder, x):
        step_s, why = fluid_s(decoder, x)
        return step_s * x.workers.sum(), why

    def dearer(decoder, x):
        bill, times = fluid_bill(decoder, x), x.workers.sum()
        return replace(bill, step_s=bill.step_s * times, usd=bill.usd * times, energy_j=bill.energy_j * times)

    monkeypatch.setattr(Decoder, "fluid_s", longer)
    monkeypatch.setattr(Decoder, "fluid_bill", dearer)
    (again,) = left_out(problem, plan, tables, objective)
    assert again.reason == row.reason and row.reason.kind == f"idle.more_{objective.name}"
    decoder = Decoder(problem, tables=tables, objective=objective)
    options = with_idle(decoder, allocation_of(decoder, plan), 1, 2)
    least = min(objective.value(decoder.bill(decoder.decode(x))) for x in options)
    part = least / objective.value(decoder.bill(plan)) - 1
    assert 0.9 * part <= row.reason["part"] <= part * (1 + 1e-9)  # polished a little


@pytest.mark.parametrize("objective", [STEP_TIME, MONEY, ENERGY])
def test_what_would_take_many_times_as_long_is_said_in_times(objective):
    """Two T4 behind a link of 80 kbit/s: thousands of per cent say nothing to people."""
    problem = problem_of(bytes_per_s=1e4)
    (row,) = left_out(problem, plan_on_first_region(problem), CostTables(problem), objective)
    assert row.reason.kind == f"idle.times_{objective.name}" and row.reason["times"] > 2


def test_devices_that_would_help_are_not_called_useless():
    """Half of a region idle without need: the report says that the step would be shorter with them."""
    problem = problem_of((REGIONS[0],), global_batch=256)
    (reason,) = reasons(problem, plan_on_first_region(problem, devices=2)).values()
    assert reason.kind == "idle.less_time" and 0 < reason["part"] < 1


@pytest.mark.parametrize(
    ("objective", "kind"),
    [(MONEY, "idle.more_money"), (TOKENS_PER_USD, "idle.more_money"), (ENERGY, "idle.more_energy")],
)
def test_a_plan_is_held_against_what_it_was_made_for(objective, kind):
    """Devices that would shorten the step are no reason to search longer for a plan that was to be cheap."""
    problem = problem_of((REGIONS[0],), global_batch=256)
    plan = plan_on_first_region(problem, devices=1)
    (row,) = left_out(problem, plan, CostTables(problem), objective)
    assert row.reason.kind == kind and row.reason["part"] > 0


def test_devices_without_a_price_cost_nothing_more():
    """Own devices that have no price: no division by it."""
    free = problem_of((REGIONS[0],), global_batch=256)
    (region,) = free.cluster.regions
    region = replace(region, node_groups=(replace(region.node_groups[0], price_usd_per_hour=0.0),))
    free = replace(free, cluster=replace(free.cluster, regions=(region,)))
    (row,) = left_out(free, plan_on_first_region(free, devices=2), CostTables(free), MONEY)
    assert row.reason.kind == "idle.same_money"


def test_a_plan_without_a_price_is_said_to_have_none():
    """Own devices and rented ones: nothing is no base of a percentage."""
    problem = problem_of()
    own, rented = problem.cluster.regions
    own = replace(own, node_groups=(replace(own.node_groups[0], price_usd_per_hour=0.0),))
    problem = replace(problem, cluster=replace(problem.cluster, regions=(own, rented)))
    (row,) = left_out(problem, plan_on_first_region(problem), CostTables(problem), MONEY)
    assert row.reason.kind == "idle.free_money"


def test_forbidden_and_unlinked_devices_are_called_so():
    """A forbidden region, and one without links to those in use."""
    problem = problem_of(constraints=Constraints(forbidden_regions=("r1",)))
    (reason,) = reasons(problem, plan_on_first_region(problem)).values()
    assert reason.kind == "idle.forbidden"
    apart = problem_of()
    apart = replace(apart, cluster=replace(apart.cluster, bytes_per_s=np.zeros((2, 2))))
    (reason,) = reasons(apart, plan_on_first_region(apart)).values()
    assert reason.kind == "idle.no_link"


def test_devices_of_cut_sequences_are_not_idle():
    """Workers of several parts of a sequence, and several stages on the same devices, count each device once."""
    problem = problem_of(([("a100-40gb", 1, 8)], [("t4", 1, 2)]))
    split = ParallelConfig(dp=1, cp=2, tp=2, pp=2, chunks=2, micro_batch_size=2)
    plan = uniform_plan(problem, split)
    assert plan.devices_of_pools == {0: 8}
    assert set(reasons(problem, plan)) == {("r1", "t4", 2)}


def test_idle_devices_join_as_whole_workers():
    """Of four parts of a sequence, twelve idle devices make three more workers and no stage too large for its pool."""
    problem = problem_of(([("a100-40gb", 2, 8)],))
    plan = uniform_plan(problem, ParallelConfig(dp=1, cp=4, micro_batch_size=4))
    ((_, _, count),) = reasons(problem, plan)
    assert count == 12
    decoder = Decoder(problem)
    for option in with_idle(decoder, allocation_of(decoder, plan), 0, count):
        assert not (option.workers % 4).any()
        assert sum(tp * n for (_, tp), n in zip(decoder.classes, option.workers.sum(axis=0), strict=True)) <= 16


def test_pools_for_which_there_is_no_time_say_so():
    """What needs no pricing is said all the same."""
    far = problem_of((*REGIONS, [("t4", 1, 1)]), constraints=Constraints(forbidden_regions=("r2",)))
    rows = left_out(far, plan_on_first_region(far), CostTables(far), seconds_left=lambda: 0.0)
    assert {row.region: row.reason.kind for row in rows} == {"r1": "idle.no_time", "r2": "idle.forbidden"}
