"""Runs beside predictions: a real rehearsal that the server starts, folders that are followed, opened files."""

import json
import urllib.request
from collections import defaultdict
from statistics import median

import pytest

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.export.measured import compare, intervals_of
from polygon.export.predicted import predicted_intervals, predicted_trace
from polygon.formats.convert_plan import plan_data
from polygon.formats.files import write_plan
from polygon.formats.run_log import LogFollower
from polygon.formats.serialization import format_json
from polygon.web.runs import MOST_POINTS, Runs
from tests.exported_plans import planned
from tests.patience import PATIENCE_S, eventually
from tests.web.conftest import Server, run_lines

PARTS = ("forward", "backward", "update", "reduce", "waiting")


@pytest.fixture(scope="module")
def rehearsing(tmp_path_factory):
    """A server that may start rehearsals, and a plan in it."""
    pytest.importorskip("torch", reason="torch is not installed: nothing is rehearsed")
    running = Server(tmp_path_factory.mktemp("rehearsing"), "--allow-rehearsals")
    running.plan = running.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    yield running
    running.stop()


@pytest.fixture(scope="module")
def rehearsed(rehearsing):
    """Name of a rehearsal that has ended."""
    asked = {"name": "first", "steps": 4, "ranks": 2}
    status, _, row = rehearsing.request("POST", f"/api/v1/plans/{rehearsing.plan}/rehearsals", asked)
    assert (status, row["state"], row["wanted"], row["ranks"]) == (202, "running", 4, 2)
    with urllib.request.urlopen(f"{rehearsing.url}/api/v1/runs/first/events", timeout=PATIENCE_S) as stream:
        events = [json.loads(line[6:]) for line in stream.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1]["state"] == "done", events[-1]["log"]
    assert [step for step, _, _ in events[-1]["points"]] == [0, 1, 2, 3]
    assert [e["steps"] for e in events] == sorted(e["steps"] for e in events)
    return "first"


def test_a_rehearsal_is_followed_and_held_against_its_prediction(rehearsing, rehearsed):
    """Step and loss are those of its log; the stages those that `polygon compare` finds in its trace."""
    folder = rehearsing.folder / "runs" / rehearsed
    said = rehearsing.request("GET", f"/api/v1/runs/{rehearsed}")[2]
    steps = [row for row in LogFollower(folder / "rank-0.jsonl").new() if row["type"] == "step"]
    assert said["points"] == [[row["step"], row["seconds"], row["loss"]] for row in steps]
    assert said["device"] == "cpu" and "loss" in said["log"] and said["plan"] == rehearsing.plan
    beside = rehearsing.request("GET", f"/api/v1/runs/{rehearsed}/comparison")[2]
    plan = json.loads((folder / "plan.json").read_text())
    job = rehearsing.request("POST", "/api/v1/plans", plan)[2]["id"]
    view = rehearsing.request("POST", f"/api/v1/plans/{job}/view", {})[2]
    assert beside["predicted_step_s"] == pytest.approx(view["estimate"]["step_s"])
    assert beside["predicted_step_s"] == pytest.approx(said["predicted_step_s"])
    assert len(beside["stages"]) == len(view["stages"])
    trace = json.loads((folder / "trace.json").read_text())
    measured = [i for i in intervals_of(trace, "trace") if i.kind == "compute" and i.step > 0]
    spent_s = defaultdict(lambda: defaultdict(float))
    for i in measured:
        spent_s[i.stage, i.worker, i.name[0]][i.step] += i.end_s - i.start_s
    medians_s = [median(by_step.values()) for by_step in spent_s.values()]
    widths = [stage["width"] for stage in view["stages"]]
    both = sum(w * (s["forward"][1] + s["backward"][1]) for w, s in zip(widths, beside["stages"], strict=True))
    assert {len(by_step) for by_step in spent_s.values()} == {beside["steps"]}
    assert both == pytest.approx(sum(medians_s))
    for which in ("predicted", "measured"):
        shown = rehearsing.request("GET", f"/api/v1/runs/{rehearsed}/timeline?which={which}&open=0")[2]
        assert [row["stage"] for row in shown["rows"]].count(0) == widths[0]
        for row in shown["rows"]:
            done = [(kind, m) for kind, m, _, _ in row["bars"] if kind < 2]
            assert len(done) == len(set(done)) > 0


def test_one_rehearsal_at_a_time_can_be_stopped_and_removed(rehearsing, rehearsed):
    """A second is answered 429; stopped, it keeps its steps; what ended can be removed, what runs cannot."""
    ask = f"/api/v1/plans/{rehearsing.plan}/rehearsals"
    name = rehearsing.request("POST", ask, {"name": rehearsed, "steps": 500, "ranks": 2})[2]["name"]
    assert name == f"{rehearsed}-2"
    status, headers, refused = rehearsing.request("POST", ask, {"name": "other"})
    assert status == 429 and int(headers["retry-after"]) > 0 and "rehearsal" in refused["detail"]
    assert rehearsing.request("DELETE", f"/api/v1/runs/{name}")[0] == 422
    assert eventually(lambda: rehearsing.request("GET", f"/api/v1/runs/{name}")[2]["steps"] > 1)
    assert rehearsing.request("POST", f"/api/v1/runs/{name}/stop")[0] == 200
    assert eventually(lambda: rehearsing.request("GET", f"/api/v1/runs/{name}")[2]["state"] == "stopped")
    assert 1 < rehearsing.request("GET", f"/api/v1/runs/{name}")[2]["steps"] < 500
    assert rehearsing.request("DELETE", f"/api/v1/runs/{name}")[0] == 204
    assert rehearsing.request("GET", f"/api/v1/runs/{name}")[0] == 404


def test_a_server_starts_nothing_unless_it_was_told_that_it_may(server, plan_id):
    """Without the option the list says so and a request is refused."""
    assert server.request("GET", "/api/v1/runs")[2]["may_start"] is False
    status, _, refused = server.request("POST", f"/api/v1/plans/{plan_id}/rehearsals", {"name": "x"})
    assert status == 422 and "was not allowed to when it was started" in refused["detail"]
    assert "x" not in {row["name"] for row in server.request("GET", "/api/v1/runs")[2]["runs"]}


def test_a_trace_that_is_opened_is_held_against_the_plan(server, plan_id):
    """Twice as slow as predicted: the comparison says half, stage by stage; what is no trace is refused by its name."""
    problem, plan = planned()
    trace = predicted_trace(problem, plan)
    for event in trace["traceEvents"]:
        for key in ("ts", "dur"):
            if key in event:
                event[key] *= 2
    asked = {"name": "slow", "plan": plan_id, "files": {"t.json": format_json(trace)}}
    status, _, row = server.request("POST", "/api/v1/runs", asked)
    assert (status, row["kind"], row["state"], row["plan"]) == (201, "import", "done", plan_id)
    beside = server.request("GET", f"/api/v1/runs/{row['name']}/comparison")[2]
    assert beside["error"] == pytest.approx(-0.5, abs=1e-6)
    for stage in beside["stages"]:
        for part in PARTS:
            assert stage[part][1] == pytest.approx(2 * stage[part][0], rel=1e-6, abs=1e-9)
    rows = [server.request("GET", f"/api/v1/runs/slow/timeline?which={w}")[2] for w in ("predicted", "measured")]
    for ours, theirs in zip(*(r["rows"] for r in rows), strict=True):
        done = [[b for b in row["bars"] if b[0] < 2] for row in (ours, theirs)]
        assert [b[3] for b in done[1]] == pytest.approx([2 * b[3] for b in done[0]], rel=1e-5)
    for files, words in (({"x.json": "{}"}, "x.json: traceEvents"), ({"x.txt": "?"}, "x.txt: found"),
                         ({"a.jsonl": "{}\n"}, "a.jsonl: found"), ({"x.json": "[" * 100_000}, "x.json: found"),
                         ({"r.jsonl": '{"type": "run", "rank": 1' + "0" * 300 + "}\n"}, "r.jsonl: rank"),
                         ({"p.json": format_json(plan_data(problem, plan))}, "a plan alone"),
                         ({"b.jsonl": '{"type": "run", "rank": 0}\n{"type": "step", "step": "x"}\n'},
                          "b.jsonl: line 2: found "),
                         ({f"{name}.jsonl": run_lines(3) for name in "ab"}, "b.jsonl: rank: found 0, expected another"),
                         ({"y.json": '{"traceEvents": [3]}'}, "cannot be read")):  # fmt: skip
        status, _, refused = server.request("POST", "/api/v1/runs", asked | {"files": files, "name": "wrong"})
        assert status == 422 and words in refused["detail"]
    assert "wrong" not in {row["name"] for row in server.request("GET", "/api/v1/runs")[2]["runs"]}
    other = {"traceEvents": [event for event in trace["traceEvents"] if event.get("name") != "F1"]}
    name = server.request("POST", "/api/v1/runs", asked | {"files": {"t.json": format_json(other)}})[2]["name"]
    status, _, refused = server.request("GET", f"/api/v1/runs/{name}/comparison")
    assert name == "slow-2" and status == 422 and "a trace of this plan" in refused["detail"]


def test_folders_are_followed_while_ranks_write(tmp_path):
    """Steps appear as they are written, a half line later; a run begun anew or resumed forgets what it redoes."""
    folder = tmp_path / "lab" / "monday"
    folder.mkdir(parents=True)
    write_plan(tmp_path / "lab" / "plan.json", *planned())
    log = folder / "rank-0.jsonl"
    text = run_lines(6)
    log.write_text(text[: len(text) // 2])
    runs = Runs(tmp_path / "runs", tmp_path / "deployments", (tmp_path / "lab",))
    assert list(runs.places()) == ["lab.monday"]
    run = runs.get("lab.monday")
    half = len(run.steps)
    assert 0 < half < 6 and not run.ended and run.wanted == 6
    log.write_text(text)
    assert runs.get("lab.monday") is run and list(run.steps) == [0, 1, 2, 3, 4, 5] and run.ended
    assert run.median_step_s() == pytest.approx(1.0)
    with log.open("a") as file:
        file.write(run_lines(7, first=3, end=False))
    run.update()
    assert list(run.steps) == [0, 1, 2, 3, 4, 5, 6] and not run.ended
    log.write_text(run_lines(2, seconds=9))
    run.update()
    assert list(run.steps) == [0, 1] and run.points()[0][1] == 9
    log.write_text(run_lines(5000))
    run.update()
    points = run.points()
    assert len(points) == MOST_POINTS and points[-1][0] == 4999
    assert sum(p[1] for p in points) / len(points) == pytest.approx(1.0, rel=0.01)
    with pytest.raises(Exception, match="no step was traced"):
        run.comparison()


def test_comparison_of_a_prediction_with_itself_has_no_error():
    """The law under all of it: what is measured as predicted differs by nothing."""
    problem, plan = planned()
    rows = predicted_intervals(step_times(plan, CostTables(problem)))
    assert compare(rows, rows).error == pytest.approx(0.0)


def test_users_see_their_own_runs(tmp_path):
    """Another user's run is not listed, not told and cannot be removed."""
    server = Server(tmp_path, "--token", "ann=a", "--token", "bob=b")
    ann, bob = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    try:
        plan = server.request("POST", "/api/v1/plans", plan_data(*planned()), ann)[2]["id"]
        asked = {"name": "mine", "plan": plan, "files": {"rank-0.jsonl": run_lines(3)}}
        assert server.request("POST", "/api/v1/runs", asked, ann)[0] == 201
        assert [row["steps"] for row in server.request("GET", "/api/v1/runs", None, ann)[2]["runs"]] == [3]
        assert server.request("GET", "/api/v1/runs", None, bob)[2]["runs"] == []
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/stop"),
            ("GET", "/comparison"),
            ("GET", "/events"),
        ):
            assert server.request(method, f"/api/v1/runs/mine{path}", None, bob)[0] == 404
        assert server.request("DELETE", "/api/v1/runs/mine", None, ann)[0] == 204
    finally:
        server.stop()


def test_users_have_their_own_deployments_and_plans(tmp_path):
    """Of one name each has their own; what is there is replaced by who says so only. Who has a plan's address looks at
    it and nothing else; what ranks of a deployment have written is told to its owner."""
    server = Server(tmp_path, "--token", "ann=a", "--token", "b/../ob=b")
    ann, bob = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    try:
        plan = server.request("POST", "/api/v1/plans", plan_data(*planned()), ann)[2]["id"]
        asked = {"name": "mine", "target": "torchrun"}
        deploy = f"/api/v1/plans/{plan}/deploy"
        assert server.request("POST", deploy, asked, ann)[2]["folder"] == "@ann/mine"
        file = tmp_path / "deployments" / "@ann" / "mine" / "hosts.txt"
        file.write_text("own")
        assert server.request("GET", "/api/v1/deployments", None, bob)[2] == []
        for path in ("mine", "mine/plan.json", "@ann/mine", "..%2F@ann%2Fmine"):
            assert server.request("GET", f"/api/v1/deployments/{path}", None, bob)[0] in (404, 422)
        status, _, answer = server.request("POST", deploy, asked, ann)
        assert status == 409 and "called mine already" in answer["detail"] and file.read_text() == "own"
        assert server.request("POST", deploy, asked, bob)[2]["folder"] == "@b%2F..%2Fob/mine"
        [theirs] = server.request("GET", "/api/v1/deployments", None, bob)[2]
        assert theirs["folder"] == "@b%2F..%2Fob/mine" and file.read_text() == "own"
        assert server.request("POST", deploy, asked | {"replace": True}, ann)[0] == 201 and file.read_text() != "own"
        logs = tmp_path / "deployments" / "@ann" / "mine" / "logs"
        logs.mkdir()
        (logs / "rank-0.jsonl").write_text(run_lines(3))
        runs = [server.request("GET", "/api/v1/runs", None, user)[2]["runs"] for user in (ann, bob)]
        assert [[row["name"] for row in rows] for rows in runs] == [["ann.mine.logs"], []]
        assert server.request("GET", "/api/v1/runs/ann.mine.logs", None, bob)[0] == 404

        for method, path, data in (
            ("PATCH", "jobs", {"name": "bob's"}),
            ("DELETE", "jobs", None),
            ("DELETE", "plans", None),
        ):
            status, _, answer = server.request(method, f"/api/v1/{path}/{plan}", data, bob)
            assert status == 403 and "another user's" in answer["detail"]
        assert server.request("GET", f"/api/v1/plans/{plan}", None, bob)[0] == 200
        kept = server.request("POST", f"/api/v1/plans/{plan}/variants", {"changes": {"streams": 2}}, bob)[2]["id"]
        assert server.request("PATCH", f"/api/v1/jobs/{kept}", {"name": "bob's"}, bob)[2]["name"] == "bob's"
        assert server.request("DELETE", f"/api/v1/plans/{plan}", None, ann)[0] == 204
    finally:
        server.stop()


def test_a_lower_ranks_log_that_comes_later_is_followed_instead(tmp_path):
    """Ranks begin at about the same time: steps are the lowest one's, whoever has written first."""
    folder = tmp_path / "lab"
    folder.mkdir()
    write_plan(folder / "plan.json", *planned())
    runs = Runs(tmp_path / "runs", tmp_path / "deployments", (folder,))
    (folder / "rank-1.jsonl").write_text(run_lines(4, seconds=7))
    run = runs.get("lab")
    assert list(run.steps) == [0, 1, 2, 3] and run.points()[0][1] == 7
    (folder / "rank-0.jsonl").write_text(run_lines(2, seconds=3, end=False))
    run.update()
    assert list(run.steps) == [0, 1] and run.points()[0][1] == 3 and not run.ended
    (folder / "rank-1.jsonl").write_text(run_lines(4, seconds=9))
    run.update()
    assert list(run.steps) == [0, 1]
