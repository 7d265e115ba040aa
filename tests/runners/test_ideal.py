"""The run in which only computing and links take time: hand-computed steps, the planner's simulation, real runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from runners.engine.ideal import IdealRun, Speed
from runners.engine.metrics import StepFigures
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.launch import run
from tests.small_problems import routed_problem, small_plan


def even(plan, forward_s, backward_s, update_s=0.0):
    """All ranks equally fast, all layers alike."""
    found = {}
    for rank, (stage, _, _) in plan.rank_places.items():
        layers = plan.stages[stage].last_layer - plan.stages[stage].first_layer
        shares = [(k + 1) / layers for k in range(layers)]
        found[rank] = Speed(seconds=(forward_s, backward_s), update_s=update_s, shares=shares)
    return found


def data_parallel():
    """The problem of two regions with one device each, and a plan in which both compute half of the samples."""
    problem, _ = routed_problem(2)
    return problem, small_plan(problem.cluster, [(0, 6)], [[0, 1]], [[m % 2] for m in range(8)])


def test_messages_cost_what_the_planner_simulates():
    """Ends of the workers of a pipeline over regions, whose messages inside a region cost nothing here."""
    problem, plan = routed_problem(2)
    schedule = step_times(plan, CostTables(problem)).schedule
    speeds = {
        rank: Speed(seconds=(float(schedule.forward_s[rank]), float(schedule.backward_s[rank])), update_s=0.0, shares=s)
        for rank, s in ((0, [0.5, 1.0]), (1, [0.25, 0.5, 0.75, 1.0]))
    }
    lines = IdealRun(problem, plan, speeds, Options()).step()
    assert [line["schedule_end_s"] for line in lines] == pytest.approx(schedule.simulate()[0].tolist(), rel=1e-9)


def test_gradients_are_hidden_behind_backward_but_for_the_last_layer():
    """Two regions, all layers alike: after the last backward the embedding crosses, its bytes and one latency; then
    both update. Nothing is said of a norm: either has the whole gradient."""
    problem, plan = data_parallel()
    embedding = problem.model.hidden_size * (problem.model.vocab_size + problem.model.max_seq_len) * 4
    way_s, latency_s = embedding / 1e8, 0.01
    lines = IdealRun(problem, plan, even(plan, 1.0, 2.0, 0.5), Options()).step()
    for line, wait in zip(lines, StepFigures(problem, plan).waits(lines), strict=True):
        assert line["schedule_end_s"] == pytest.approx(4 * 3.0)
        assert line["seconds"] == pytest.approx(12.5 + way_s + latency_s)
        assert wait == pytest.approx((0.0, way_s + latency_s))


def test_a_pipeline_agrees_on_the_norm():
    """Without any bytes: the last stage is done first, yet updates a latency after the first one is done."""
    problem, plan = routed_problem(2)
    lines = IdealRun(problem, plan, even(plan, 1.0, 2.0), Options()).step()
    ends_s = [line["schedule_end_s"] for line in lines]
    assert lines[1]["seconds"] >= ends_s[0] + 0.01


def test_local_steps_wait_for_nobody():
    """Regions that meet every third step: only that one takes longer than its computations; none if it may overlap."""
    problem, plan = data_parallel()
    plan = replace(plan, local_steps=3)
    alone, overlapped = (Options(synchronous_steps=0, outer_overlap=n) for n in (0, 3))
    run_ = IdealRun(problem, plan, even(plan, 1.0, 2.0), alone)
    seconds = [run_.step()[0]["seconds"] for _ in range(6)]
    assert seconds == pytest.approx([12, 12, seconds[2]] * 2) and seconds[2] > 12.01
    run_ = IdealRun(problem, plan, even(plan, 1.0, 2.0), overlapped)
    assert [run_.step()[0]["seconds"] for _ in range(6)] == pytest.approx([12] * 6)


@pytest.mark.parametrize("kind", ["pipeline", "data parallel"])
def test_no_real_run_is_faster(kind, tmp_path):
    """With the shortest computations of a run over links that are kept to, its steps are never below the ideal."""
    problem, plan = routed_problem(2) if kind == "pipeline" else data_parallel()
    slow = np.where(np.eye(2), np.inf, 2e6)
    problem = replace(problem, cluster=replace(problem.cluster, bytes_per_s=slow, latency_s=np.full((2, 2), 0.02)))
    options = Options(steps=4, log_dir=tmp_path, device="cpu", emulate_links=True)
    assert run(problem, plan, options)[0] == 0
    speeds = {}
    for rank in range(2):
        took = {kind: [] for kind in "FBu"}
        for line in log_lines(tmp_path, rank):
            if line["type"] == "event" and line["kind"] in ("compute", "update"):
                took[line["name"][0]].append(line["end_s"] - line["start_s"])
        layers = plan.stages[plan.rank_places[rank][0]]
        shares = [0.0] * (layers.last_layer - layers.first_layer - 1) + [1.0]
        speeds[rank] = Speed(seconds=(min(took["F"]), min(took["B"])), update_s=min(took["u"]), shares=shares)
    ideal = IdealRun(problem, plan, speeds, options)
    least_s = sum(ideal.step()[0]["seconds"] for _ in range(4))
    steps = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert sum(step["seconds"] for step in steps) >= least_s
