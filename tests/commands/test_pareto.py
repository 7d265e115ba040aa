"""The commands that weigh time against money: search within limits, pareto, evaluate for a whole run."""

from __future__ import annotations

import json

import pytest

from polygon.api import planner
from polygon.commands.evaluate import main as evaluate
from polygon.commands.pareto import main as pareto
from polygon.domain import clock
from polygon.formats import files
from polygon.planning.checker import violations
from polygon.search import _simpler
from polygon.search import main as search

CLUSTER = """
name: two
regions:
  - {name: dear, egress_usd_per_gb: 0.1, nodes: [{device: a100-40gb, count: 1, devices_per_node: 1}]}
  - {name: cheap, nodes: [{device: t4, count: 1, devices_per_node: 1}]}
links:
  - {between: [dear, cheap], latency_ms: 5, bandwidth_gbps: 10}
"""
WHAT = ["--model", "gpt2", "--global-batch", "4", "--seq-len", "256", "--quiet"]


@pytest.fixture
def task(tmp_path):
    """Options of a small planning problem."""
    path = tmp_path / "two.yaml"
    path.write_text(CLUSTER)
    return ["--cluster", str(path), *WHAT]


def test_pareto_writes_front_picture_and_plans_that_can_be_run(task, tmp_path, capsys):
    """JSON of rising time and falling money, a PNG, a plan file per point, the whole run."""
    out, png, folder = tmp_path / "front.json", tmp_path / "front.png", tmp_path / "plans"
    assert pareto([*task, "--tokens", "1e9", "-o", str(out), "--plot", str(png), "--plans", str(folder)]) == 0
    points = json.loads(out.read_text())["points"]
    assert [p["step_s"] for p in points] == sorted(p["step_s"] for p in points)
    assert [p["usd"] for p in points] == sorted((p["usd"] for p in points), reverse=True)
    assert png.read_bytes().startswith(b"\x89PNG")
    for point in points:
        problem, plan, estimate = files.read_plan(point["plan"])
        assert violations(problem, plan) == []
        assert estimate["step_s"] == pytest.approx(point["step_s"])
        assert point["run"]["usd"] == pytest.approx(point["run"]["steps"] * point["usd"])
    assert "USD per step" in capsys.readouterr().out


def test_pareto_names_the_nearest_of_what_keeps_no_limit(task, tmp_path, capsys):
    """Under a budget of nothing the nearest is the cheapest, not the fastest."""
    out = tmp_path / "front.json"
    task += ["--effort", "quick"]
    assert pareto([*task, "-o", str(out)]) == 0
    points = json.loads(out.read_text())["points"]
    assert points[-1]["usd"] < 0.9 * points[0]["usd"]
    capsys.readouterr()
    assert pareto([*task, "--budget", "1e-9"]) == 3
    assert f"the nearest one takes {points[-1]['usd']:.4g} USD" in capsys.readouterr().err


def test_search_within_limits_or_exit_3(task, tmp_path, capsys):
    """A deadline that can be kept is kept; a budget of nothing is exit 3 with the nearest; evaluate checks it."""
    plan = tmp_path / "plan.json"
    task += ["--effort", "quick"]
    assert search([*task, "--objective", "money", "--deadline", "100", "--tokens", "1e8", "-o", str(plan)]) == 0
    assert "whole run     1e+08 tokens" in capsys.readouterr().out
    assert files.read_plan(plan).problem.constraints.most_step_s == 100
    assert search([*task, "--budget", "1e-9", "-o", str(plan)]) == 3
    assert "1e-09 are allowed" in capsys.readouterr().err
    data = json.loads(plan.read_text())
    data["problem"]["constraints"]["most_step_s"] = 1e-6
    plan.write_text(json.dumps(data))
    assert evaluate([str(plan), "--json", "--tokens", "1e8"]) == 3
    result = json.loads(capsys.readouterr().out)
    excess = result["violations"][0]["arguments"]["excess"]
    assert excess["kind"] == "limit.step_s" and excess["arguments"]["limit"] == 1e-6
    assert result["run"]["tokens"] == 1e8


def test_pareto_of_what_cannot_be_is_exit_3(task, capsys):
    """No plan before the deadline, however long one searches: the reason on stderr."""
    assert pareto([*task, "--deadline", "1e-6", "--time-limit", "0.5"]) == 3
    assert "are allowed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["front.foo", "front"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_search(name, task, tmp_path, capsys, monkeypatch):
    """By the ending of its name, in one line; matplotlib would find it after the search."""
    monkeypatch.setattr("polygon.commands.cli.read_task", None)  # nothing is read yet
    with pytest.raises(SystemExit) as stop:
        pareto([*task, "--plot", str(tmp_path / name)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"--plot: {tmp_path / name}: found no ending of a picture, expected .png, .svg or .pdf" in said
    assert said.count("\n") == 1


def test_a_search_whose_time_is_up_says_what_it_has_no_answer_to(tmp_path, capsys, monkeypatch):
    """The plan is there, with a bound that says what it leaves out; what was not looked at is told in words."""
    links = "links:\n  - {between: [dear, cheap], latency_ms: 50, bandwidth_gbps: 0.1}\n"
    path, now_s = tmp_path / "two.yaml", [0.0]
    path.write_text(CLUSTER.split("links:")[0] + links)
    find = planner.find_within_limits

    def late(*args, **more):
        now_s[0] += 100
        return find(*args, **more)

    monkeypatch.setattr(clock, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(planner, "find_within_limits", late)
    task = ["--cluster", str(path), *WHAT, "--effort", "quick", "--time-limit", "5"]
    assert search([*task, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bound_cut_short"] and "times" not in data["local_updates"]
    assert [row["reason"]["kind"] for row in data["left_out"]] == ["idle.no_time"] * len(data["left_out"])
    assert search(task) == 0
    text = capsys.readouterr().out
    assert "local steps   what they would bring was not worked out for lack of time" in text
    assert "; no time for stages and regions); gap" in text


FREE = """
name: own
devices:
  own: {memory_gib: 24, tflops: {fp32: 30, bf16: 100}, memory_bandwidth_gb_per_s: 800, power_w: 0}
regions:
  - {name: here, nodes: [{device: own, count: 1, devices_per_node: 2}]}
  - {name: there, nodes: [{device: a100-40gb, count: 1}]}
links:
  - {between: [here, there], latency_ms: 5, bandwidth_gbps: 10}
"""
"""Devices of which nobody says what they cost or draw, beside one of which it is known."""


def test_a_front_names_what_it_counts_as_nothing(tmp_path, capsys):
    """A plan on devices without a price is not just said to cost 0."""
    path, out = tmp_path / "own.yaml", tmp_path / "front.json"
    path.write_text(FREE)
    words = ["--cluster", str(path), *WHAT, "--effort", "quick", "-o", str(out)]
    assert pareto(words) == 0
    points = json.loads(out.read_text())["points"]
    assert {"own (here)"} == set(points[-1]["devices"]) and points[-1]["free"] == ["own"]
    assert all("free" in point or not {"own (here)"} & set(point["devices"]) for point in points)
    assert not any("without_power" in point for point in points)
    assert capsys.readouterr().out.endswith("counted       own at 0 USD an hour\n")
    assert pareto([*words, "--energy"]) == 0
    assert "own at 0 USD an hour; own at 0 W" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["money", "energy"])
def test_a_simpler_plan_of_free_devices_costs_no_more(tmp_path, objective):
    """Nothing is not divided by nothing."""
    path = tmp_path / "own.yaml"
    path.write_text(FREE)
    problem = planner.Problem(planner.Cluster.from_yaml(path), "gpt2", planner.Batch(global_batch=4, seq_len=256))
    plan = problem.search(effort="quick", objective=objective).plan
    data, words = _simpler(problem.data, plan, plan, objective)
    assert data["more_by"] == 0 and f"+0.0% {objective}" in words
