"""The typed client: from a search to what limits its plan, on a real server."""

import pytest

from polygon import Batch, Cluster, Problem
from polygon.cost.tables import CostTables
from polygon.formats.convert_plan import plan_data
from polygon.planning.limits import limits
from polygon.web.client import Client, RefusedError
from tests.exported_plans import planned
from tests.patience import PATIENCE_S
from tests.web.conftest import Server, run_lines

CLUSTER = {
    "name": "two",
    "regions": [
        {"name": "a", "nodes": [{"device": "a100-40gb", "count": 1, "devices_per_node": 4}]},
        {"name": "b", "nodes": [{"device": "t4", "count": 2, "devices_per_node": 2}]},
    ],
    "links": [{"between": ["a", "b"], "latency_ms": 20, "bandwidth_gbps": 1}],
}
PROBLEM = {"cluster": CLUSTER, "model": "gpt3-1.3b", "batch": {"global_batch": 16, "seq_len": 512}}


def test_a_search_is_followed_to_its_plan_and_what_limits_it(server):
    """Search, states, plan, view, what-if, limits, variant: one number all the way."""
    client = Client(server.url, timeout_s=PATIENCE_S)
    job = client.search(PROBLEM, name="mine", seed=2)
    states = list(client.follow(job["id"]))
    assert states[-1]["state"] == "done" and states[-1]["has_plan"] and states[-1]["seed"] == 2
    assert client.result(job["id"]) == states[-1]
    step_s = client.plan(job["id"])["estimate"]["step_s"]
    view = client.view(job["id"])
    assert view["estimate"]["step_s"] == pytest.approx(step_s)
    assert sum(place["nodes"] for place in view["hosts"]) <= 3
    said = client.limits(job["id"])
    assert said["step_s"] == pytest.approx(step_s)
    assert [row["saves"] for row in said["limits"]] == sorted((r["saves"] for r in said["limits"]), reverse=True)
    slower = client.keep(job["id"], "slower", {"device_factors": {"a100-40gb": 0.5, "t4": 0.5}})
    assert client.view(slower["id"])["estimate"]["step_s"] > step_s
    assert {job["id"], slower["id"]} <= {row["id"] for row in client.jobs()}


def test_problems_and_plans_of_the_library_go_as_they_are(server):
    """As what their files say goes: the same plan, and the same step of one that was made here."""
    client, problem = (
        Client(server.url, timeout_s=PATIENCE_S),
        Problem(Cluster.from_dict(CLUSTER), "gpt3-1.3b", Batch(global_batch=16, seq_len=512)),
    )
    found = [client.plan(client.result(client.search(asked)["id"])["id"]) for asked in (problem, PROBLEM)]
    assert found[0]["stages"] == found[1]["stages"]
    plan = problem.search(effort="quick").plan
    kept = client.upload(plan)
    assert client.view(kept["id"])["estimate"]["step_s"] == pytest.approx(plan.evaluate().step_s)


def test_limits_through_the_client_are_those_of_the_library(server):
    """Every field arrives as it was computed."""
    client, (problem, plan) = Client(server.url, timeout_s=PATIENCE_S), planned()
    job = client.upload(plan_data(problem, plan))
    assert client.limits(job["id"]) == limits(problem, plan, CostTables(problem)).to_dict()


def test_refusals_are_typed(tmp_path):
    """A wrong token, a plan that is not there, bad input: status and the server's words; runs are told, too."""
    server = Server(tmp_path, "--token", "ann=a")
    try:
        ann = Client(server.url, token="a", timeout_s=PATIENCE_S)
        for client, ask, status, words in (
            (Client(server.url), lambda c: c.jobs(), 401, "token"),
            (ann, lambda c: c.view("no/such"), 404, "Not Found"),
            (Client(server.url, token="a", language="zh"), lambda c: c.limits("none"), 404, "没有这个方案"),
            (ann, lambda c: c.search(PROBLEM | {"batch": {"global_batch": 0, "seq_len": 512}}), 422, "global_batch"),
        ):
            with pytest.raises(RefusedError, match=words) as refused:
                ask(client)
            assert refused.value.status == status and refused.value.retry_after_s is None
        plan = ann.upload(plan_data(*planned()))["id"]
        asked = {"name": "mine", "plan": plan, "files": {"rank-0.jsonl": run_lines(3)}}
        assert server.request("POST", "/api/v1/runs", asked, {"Authorization": "Bearer a"})[0] == 201
        assert [run["name"] for run in ann.runs()["runs"]] == ["mine"]
        assert len(ann.run("mine")["points"]) == 3
        with pytest.raises(RefusedError, match="traced"):
            ann.comparison("mine")
    finally:
        server.stop()
