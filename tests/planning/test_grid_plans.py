"""Uniform configurations as plans on real devices."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from polygon.commands import cli
from polygon.cost.estimate import estimate
from polygon.cost.lanes import Lanes
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, NodeGroup, Region
from polygon.domain.errors import InputError
from polygon.domain.message import Violation
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.domain.runnable import is_run
from polygon.domain.uniform import ParallelConfig
from polygon.formats import catalogue
from polygon.grid3d.splits import all_splits
from polygon.planning.checker import violations
from polygon.planning.grid_plans import find_grid_plan, plan_of
from polygon.planning.objectives import MONEY, STEP_TIME, Objective
from polygon.search import main as search


def region(name: str, device: str, nodes: int, per_node: int) -> Region:
    group = NodeGroup(
        device=device,
        nodes=nodes,
        devices_per_node=per_node,
        intra_node=catalogue.link("nvlink3"),
        inter_node=catalogue.link("infiniband-hdr-x8"),
    )
    return Region(name=name, node_groups=(group,), intra_region=catalogue.link("infiniband-hdr-x8"))


def problem(*regions: Region, model: str = "gpt3-1.3b") -> Problem:
    n = len(regions)
    names = {group.device for place in regions for group in place.node_groups}
    cluster = Cluster(
        name="c",
        regions=regions,
        latency_s=np.full((n, n), 0.02),
        bytes_per_s=np.full((n, n), 1.25e9),
        capacity_bytes_per_s=np.full((n, n), np.inf),
        catalogue={name: catalogue.device(name) for name in names},
    )
    return Problem(cluster=cluster, model=catalogue.model(model), batch=Batch(global_batch=64, seq_len=1024))


TWO_REGIONS = (region("a", "a100-40gb", 1, 8), region("b", "v100-32gb", 1, 8))
TWO_NODES = problem(region("here", "a100-40gb", 2, 8))


@pytest.mark.parametrize(("dp", "tp", "pp"), [(16, 1, 1), (4, 2, 2), (2, 8, 1), (1, 2, 8), (2, 1, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_plans_can_be_run_and_simulate_to_what_the_grid_says(dp, tp, pp, schedule):
    """Every worker has its devices, nothing is violated, and the exact schedule takes as long as its lane."""
    config = ParallelConfig(dp=dp, tp=tp, pp=pp, micro_batch_size=2, schedule=schedule, zero=1)
    plan = plan_of(TWO_NODES, config)
    assert violations(TWO_NODES, plan) == []
    assert sorted(itertools.chain(*(w.devices for s in plan.stages for w in s.workers))) == list(range(16))
    exact = estimate(TWO_NODES, plan).step_s
    assert exact == pytest.approx(Lanes(CostTables(TWO_NODES)).estimate(config).step_s, rel=1e-9)


def test_what_cannot_be_run_is_refused():
    """A tensor group stays on a node, the parts of a sequence need not; every device is used."""
    apart = plan_of(TWO_NODES, ParallelConfig(cp=2, tp=8))
    assert violations(TWO_NODES, apart) == []
    assert violations(TWO_NODES, plan_of(TWO_NODES, ParallelConfig(dp=4, cp=2, tp=2))) == []
    torn = plan_of(TWO_NODES, ParallelConfig(tp=16))
    assert {violation.kind for violation in violations(TWO_NODES, torn)} == {"plan.several_nodes"}
    with pytest.raises(InputError, match="dp x tp x pp x cp: found 8, expected 16"):
        plan_of(TWO_NODES, ParallelConfig(dp=4, tp=2))


def test_interleaved_stages_share_their_devices():
    """Several stages on the same workers are no fault; other workers, or chunks that do not divide the stages, are."""
    plan = plan_of(TWO_NODES, ParallelConfig(dp=2, tp=2, pp=4, chunks=2))
    assert violations(TWO_NODES, plan) == []
    swapped = replace(plan.stages[5], workers=plan.stages[5].workers[::-1])
    torn = replace(plan, stages=(*plan.stages[:5], swapped, *plan.stages[6:]))
    assert violations(TWO_NODES, torn) == [Violation("plan.chunk_workers", stage=5, first=1, chunks=2)]
    assert violations(TWO_NODES, replace(plan, chunks=3)) == [Violation("plan.chunks", chunks=3, stages=8)]


def test_best_plan_of_equal_devices():
    """The found plan is valid and simulates to the value it claims; no simple configuration beats it."""
    found = find_grid_plan(TWO_NODES, jobs=1, tries=6)
    assert found.plan is not None and violations(TWO_NODES, found.plan) == []
    assert estimate(TWO_NODES, found.plan).step_s == pytest.approx(found.value_s)
    for dp, tp, pp in ((16, 1, 1), (2, 8, 1), (4, 1, 4)):
        other = plan_of(TWO_NODES, ParallelConfig(dp=dp, tp=tp, pp=pp, micro_batch_size=1, recompute="full"))
        assert estimate(TWO_NODES, other).step_s >= found.value_s


def test_unequal_regions_get_a_plan_too():
    """Two regions of different devices: uniform widths over all of them, links with streams."""
    mixed = problem(*TWO_REGIONS)
    found = find_grid_plan(mixed, jobs=1, tries=4)
    assert found.plan is not None and violations(mixed, found.plan) == []
    assert len({stage.width for stage in found.plan.stages}) == 1
    assert all(use.streams >= 1 for use in found.plan.links) and len(found.plan.links) == 2


def test_the_objective_and_the_limits_count():
    """Of the plans tried the best by the objective is taken; a deadline that none keeps is said with the nearest."""
    mixed = problem(*TWO_REGIONS)
    slowness = Objective(name="slowness", value=lambda bill: -bill.step_s, unit="s")
    fastest, slowest, cheapest = (
        find_grid_plan(mixed, jobs=1, tries=6, objective=o) for o in (STEP_TIME, slowness, MONEY)
    )
    assert (
        estimate(mixed, fastest.plan).step_s < estimate(mixed, slowest.plan).step_s == pytest.approx(-slowest.value_s)
    )
    assert cheapest.value_s == pytest.approx(estimate(mixed, cheapest.plan).cost_usd, rel=1e-6)
    assert cheapest.value_s <= estimate(mixed, fastest.plan).cost_usd * (1 + 1e-6)
    hurried = replace(mixed, constraints=Constraints(most_step_s=1e-6))
    found = find_grid_plan(hurried, jobs=1, tries=3)
    assert found.plan is None and found.reason["why"]["over"][0]["limit"] == 1e-6


def test_a_time_limit_keeps_the_best_so_far():
    """A plan however short it is, and how much of the grid it is the best of."""
    found = find_grid_plan(TWO_NODES, jobs=1, seconds_left=lambda: 0.0)
    assert found.plan is not None and violations(TWO_NODES, found.plan) == []
    assert found.cut_short is not None and found.cut_short["simulated"] == 1
    assert 0 < found.cut_short["part"]["looked_at"] < found.cut_short["part"]["splits"]
    whole = find_grid_plan(TWO_NODES, jobs=1)
    assert whole.cut_short is None and whole.value_s <= found.value_s


def test_a_search_for_a_program_finds_a_split_that_it_runs():
    """Whatever is faster for others."""
    asked = replace(TWO_NODES, runtime=catalogue.runtime("deepspeed"))
    found = find_grid_plan(asked, jobs=1, tries=4)
    assert found.plan is not None and is_run(asked, found.plan)


def test_no_plan_has_a_reason():
    """A model that fits nowhere."""
    found = find_grid_plan(problem(region("a", "t4", 1, 2), model="gpt3-13b"), jobs=1)
    assert found.plan is None and found.reason["devices"] == 2


def test_search_offers_the_grid(tmp_path, capsys):
    """polygon search --method grid3d writes a plan that evaluates, and all configurations."""
    cluster, plan, every = (tmp_path / name for name in ("cluster.yaml", "plan.json", "output.json"))
    cluster.write_text(
        "name: one\nregions:\n- name: here\n  nodes:\n"
        "  - {device: a100-40gb, count: 1, devices_per_node: 4, intra_node: nvlink3}\n"
    )
    words = ["--method", "grid3d", "--cluster", str(cluster), "--model", "gpt3-125m", "--global-batch", "16"]
    words += ["--seq-len", "1024", "-o", str(plan), "--configurations", str(every), "--json"]
    assert cli.run(search, words) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0
    assert json.loads(plan.read_text())["solver"] == "grid3d"
    rows = json.loads(every.read_text())["configurations"]
    assert {(row["dp"], row["tp"], row["pp"]) for row in rows} == {s[:3] for s in all_splits(4)}
    assert cli.run(search, [*words, "--time-limit", "1e-9"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["search"]["cut_short"] in shown.err
    assert json.loads(every.read_text())["splits_looked_at"] < len(list(all_splits(4)))
