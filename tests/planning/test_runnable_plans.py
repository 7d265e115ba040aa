"""Searches for programs that run uniform plans alone: what they find these run, and exports say it as it is."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Plan, Problem, Worker
from polygon.domain.runnable import RUNNABLE, blocks_of, is_run, runnable
from polygon.domain.runtime import PLANS
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.export.targets import export
from polygon.formats import catalogue
from polygon.formats.recognition import cluster_from_data
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder, most_stages
from polygon.planning.frontier import find_front, find_within_limits
from polygon.planning.search_engine import Effort, find_plan
from polygon.planning.uniform_plans import find_uniform, uniform_drafts
from tests.exported_plans import drawn
from tests.linked_regions import cluster_of
from tests.nightly import cases

EFFORT = Effort(fluid_evaluations=400, exact_evaluations=20, polish_evaluations=20, patience=200)
TARGETS = {"megatron-core": "megatron", "torchtitan": "torchtitan"}
"""Exports that say all that these programs run."""
PROGRAMS = ("megatron-core", "torchtitan", "deepspeed", "megatron-2022")


def problems(program, count=None):
    """Drawn ones, each once, for a program."""
    count = count or cases(1)
    for problem in list({id(problem): problem for problem, _, _ in drawn(4 * count)}.values())[:count]:
        yield replace(problem, runtime=catalogue.runtime(program))


def test_programs_say_what_they_run():
    """Ours runs every plan, others those of an entry; a user may say otherwise."""
    assert set(PLANS) == {"any", *RUNNABLE}
    said = {name: of.plans for name, of in catalogue.runtimes().items()}
    assert {name for name, plans in said.items() if plans == "any"} >= {"polygon", "polygon-compiled", "unknown"}
    for program in PROGRAMS:
        assert said[program] != "any", program


def test_a_program_runs_what_it_packs_as_the_plan_does():
    """Only packings of gradients that it has, one on all links in use, and sums in every step; ours has all."""
    cluster = cluster_of([[("a100-40gb", 1, 1)]] * 3)
    problem = Problem(cluster=cluster, model=catalogue.model("gpt2"), batch=Batch(global_batch=8, seq_len=128))
    plan = replace(uniform_plan(problem, ParallelConfig(dp=2)), links=())
    both = lambda **packs: tuple(LinkUse(source=a, target=b, **packs) for a, b in ((0, 1), (1, 0)))  # noqa: E731
    idle = (LinkUse(source=0, target=2, weight_gradients="int4"),)
    ways = {
        "none": {"links": both()}, "idle": {"links": both() + idle}, "bf16": {"links": both(weight_gradients="bf16")},
        "one": {"links": (both(weight_gradients="bf16")[0], both()[1])},
        "int4": {"links": both(weight_gradients="int4")},
        "activations": {"links": both(activations="bf16", activation_gradients="bf16")}, "local": {"local_steps": 8},
    }  # fmt: skip
    for program, has in (
        ("megatron-core", {"none", "idle"}),
        ("deepspeed", {"none", "idle", "bf16"}),
        ("polygon", {*ways}),
    ):
        run = replace(problem, runtime=catalogue.runtime(program))
        assert {name for name, way in ways.items() if is_run(run, replace(plan, **way))} == has


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_search_finds_what_the_program_runs(program):
    """On drawn clusters; no slower than the search for any plan, rearranged; exports say it as it is."""
    found = 0
    for problem in problems(program):
        tables, runs = CostTables(problem), runnable(problem)
        plan = find_plan(problem, np.random.default_rng(0), effort=EFFORT, tables=tables).plan
        free = replace(problem, runtime=replace(problem.runtime, plans="any"))
        other = find_plan(free, np.random.default_rng(0), effort=EFFORT, tables=CostTables(free)).plan
        uniform = other and find_uniform(problem, other, tables, runs)
        if plan is None:
            assert uniform is None
            continue
        found += 1
        assert runs.runs(problem, plan)
        assert violations(problem, plan, tables) == []
        assert {use.activations for use in plan.links} <= {"none"} and plan.local_steps == 1
        assert uniform is None or step_times(plan, tables).step_s <= 1.02 * uniform.step_s
        if program in TARGETS:
            result = export(problem, plan, TARGETS[program])
            assert result.step_s == pytest.approx(result.plan_step_s)
            assert not [loss for loss in result.losses if loss.cost_s]
    assert found


def test_every_allocation_decodes_to_what_the_program_runs():
    """Whatever its widths, degrees and setting; stages that memory has no room for are cut by what it has room for."""
    rng, made = np.random.default_rng(0), 0
    for problem in problems("megatron-core", 2):
        decoder = Decoder(problem)
        for _ in range(40):
            rows = rng.integers(0, 4, (int(rng.integers(1, min(5, most_stages(problem)) + 1)), len(decoder.classes)))
            room = np.array([pool.devices for pool in problem.cluster.pools])
            for c, (pool, tp) in enumerate(decoder.classes):
                for s in range(len(rows)):
                    rows[s, c] = min(rows[s, c], room[pool] // tp)
                    room[pool] -= rows[s, c] * tp
            size = int(rng.choice(decoder.tables.micro_batch_sizes))
            plan = decoder.decode(Allocation(workers=rows, micro_batch_size=size)) if rows.any() else None
            if isinstance(plan, Plan):
                made += 1
                assert decoder.runs.runs(problem, plan) and violations(problem, plan, decoder.tables) == []
    assert made > 40


def test_limits_and_fronts_keep_to_what_the_program_runs():
    """A budget by the hour, and all trade-offs of time and money."""
    for problem in problems("torchtitan", 1):
        runs = runnable(problem)
        points, _ = find_front(problem, 0, effort=EFFORT)
        assert points and all(runs.runs(problem, point.plan) for point in points)
        limits = replace(problem.constraints, most_usd_per_hour=0.7 * max(p.bill.usd_per_hour for p in points))
        plan = find_within_limits(replace(problem, constraints=limits), 0, effort=EFFORT).plan
        assert plan is None or runs.runs(problem, plan)


def test_a_program_without_pipelines_gets_none():
    """Fully sharded training: one stage, data parallelism alone."""
    for problem in problems("fsdp"):
        plan = find_plan(problem, np.random.default_rng(1), effort=EFFORT).plan
        if plan is not None:
            assert len(plan.stages) == 1 and {w.tp * w.cp for w in plan.workers} == {1}


@pytest.mark.parametrize(("program", "apart", "most_zero"), [("megatron-2022", 0, 1), ("nanotron", 1, 1)])
def test_programs_without_layouts_get_stages_alike(program, apart, most_zero):
    """Megatron-LM of 2022 divides layers by stages without rest; it and nanotron know no ZeRO-3 nor cut sequences."""
    nodes = [{"device": "a100-80gb", "count": 1, "devices_per_node": 5}]
    cluster = cluster_from_data({"name": "five", "regions": [{"name": "here", "nodes": nodes}]}, "five")
    for model, seq_len in (("llama3-8b", 8192), ("gpt3-1.3b", 2048)):
        batch = Batch(global_batch=5, seq_len=seq_len)
        problem = Problem(
            cluster=cluster, model=catalogue.model(model), batch=batch, runtime=catalogue.runtime(program)
        )
        plan = find_plan(problem, np.random.default_rng(0), effort=EFFORT).plan
        blocks = [blocks_of(problem.model, stage) for stage in plan.stages]
        assert max(blocks) - min(blocks) <= apart
        assert max(stage.zero for stage in plan.stages) <= most_zero and plan.stages[0].shards in (0, plan.world_size)
        assert {worker.cp for worker in plan.workers} == {1}


def test_stages_of_equal_blocks_divide_them():
    """A draft of five stages of 24 blocks is none for Megatron-LM of 2022; nearly equal stages are one for others."""
    _, _, tables = next(drawing for drawing in drawn(8) if drawing[0].model.blocks == 24)
    workers = [(Worker(pool=0, devices=(d,)),) for d in range(2)]
    rows = [workers[d % 2] for d in range(5)]
    for program, made in (("equal", False), ("even", True), ("megatron", True)):
        assert bool(list(uniform_drafts(rows, 1, 1, 32, tables, RUNNABLE[program]))) == made, program
