"""The JSON API on a real server: jobs, what-if, exports, deployments, and what is refused."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import sqlite3
import subprocess
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from benchmarks.web_load import cpu_s, rest
from polygon import Problem
from polygon.commands.cli import run
from polygon.commands.serve import main
from polygon.formats import catalogue, convert
from polygon.formats.convert import cluster_data, cluster_from_spec, model_data, problem_data
from polygon.formats.convert_plan import plan_data
from polygon.formats.schema import ClusterSpec, check
from polygon.formats.serialization import format_json, format_yaml, parse_json, parse_yaml
from polygon.web import ahead
from polygon.web.app import Settings, create_app
from polygon.web.guard import Guard
from polygon.web.jobs import problem_of
from polygon.web.plan_routes import AHEAD
from polygon.web.pricing import Pricing
from tests.exported_plans import INSTANCES, planned, wide
from tests.patience import PATIENCE_S, eventually
from tests.real_programs import ran
from tests.web.conftest import Server

PROBE = {"format": "polygon-probe", "version": 1, "links": [
    {"source_region": "north", "target_region": "south", "rtt_s": 0.03, "link_bytes_per_s": 5e8}]}  # fmt: skip


def body(**more):
    problem, _ = planned()
    return {"problem": problem_data(problem) | {"model": "gpt3-1.3b"}, **more}


def reason_of(request):
    """Why the planner has no plan for a request, asked in this process."""
    problem = problem_of(parse_json(format_json(request["problem"])))
    return Problem.of(problem).search(objective=request.get("objective", "time"), effort="quick").reason


def finished(server, job):
    """The job once it has ended."""
    assert eventually(lambda: server.request("GET", f"/api/v1/jobs/{job}")[2]["state"] not in ("queued", "running"))
    return server.request("GET", f"/api/v1/jobs/{job}")[2]


def test_a_search_ends_in_a_plan_that_can_be_read_again(server):
    """POST a problem, follow its events to the end, get the plan file, price it."""
    status, _, row = server.request("POST", "/api/v1/jobs", body(seed=3))
    assert status == 202
    with urllib.request.urlopen(f"{server.url}/api/v1/jobs/{row['id']}/events", timeout=PATIENCE_S) as stream:
        events = [json.loads(line[6:]) for line in stream.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1]["state"] == "done"
    plan = server.request("GET", f"/api/v1/plans/{row['id']}")[2]
    assert plan["format"] == "polygon-plan" and plan["seed"] == 3
    view = server.request("POST", f"/api/v1/plans/{row['id']}/view", {})[2]
    assert view["estimate"]["step_s"] == pytest.approx(plan["estimate"]["step_s"])


def test_a_search_without_a_name_gets_one(server):
    """Model and cluster, as an uploaded plan does, with a number from the second on; a name that is given stays."""
    cluster = server.request("GET", "/api/v1/instances/two-campus")[2] | {"name": "unnamed"}
    problem = {"cluster": cluster, "model": "opt-350m", "batch": {"global_batch": 8, "seq_len": 256}}
    own = "opt-350m · unnamed"
    for asked, name in (
        ({}, own),
        ({}, f"{own} · 2"),
        ({"name": "mine"}, "mine"),
        ({"name": own}, own),
        ({}, f"{own} · 3"),
    ):
        row = server.request("POST", "/api/v1/jobs", {"problem": problem, **asked})[2]
        assert row["name"] == name
        server.request("DELETE", f"/api/v1/jobs/{row['id']}")


def test_a_search_can_be_stopped_and_keeps_its_best(server):
    """DELETE ends a long search early, in the state cancelled."""
    job = server.request("POST", "/api/v1/jobs", body(effort="long"))[2]["id"]
    assert eventually(lambda: server.request("GET", f"/api/v1/jobs/{job}")[2]["note"])
    assert server.request("DELETE", f"/api/v1/jobs/{job}")[0] == 200
    assert finished(server, job)["state"] == "cancelled"


def test_no_plan_is_a_state_with_a_reason(server):
    """A model that no device can hold: infeasible, and by how much."""
    request = body()
    request["problem"]["model"] = "gpt3-175b"
    row = finished(server, server.request("POST", "/api/v1/jobs", request)[2]["id"])
    assert row["state"] == "infeasible" and row["error"] == str(reason_of(request))


def test_bad_input_answers_422_with_the_planners_line(server):
    """The same message as the command line, with the field's path."""
    request = body()
    request["problem"]["cluster"]["regions"][0]["nodes"][0]["count"] = 0
    status, _, answer = server.request("POST", "/api/v1/jobs", request)
    assert status == 422
    assert answer["detail"].startswith("cluster.regions[0].nodes[0].count: found 0, expected a whole number")


def test_faults_of_a_request_are_said_like_faults_of_a_file(server):
    """What is wrong around the problem is told in the validator's words, too."""
    for wrong, line in (
        ({"objective": "beauty"}, "objective: found 'beauty', expected 'time' or 'money' or 'energy'"),
        ({"seed": -1}, "seed: found -1, expected a whole number >= 0"),
        ({"speed": 1}, "speed: found unknown key 'speed', expected 'seed' (nearest)"),
    ):
        status, _, answer = server.request("POST", "/api/v1/jobs", body(**wrong))
        assert status == 422
        assert answer["detail"].startswith(line)
    assert server.request("POST", "/api/v1/jobs", b"{")[2]["detail"].startswith("body: found no JSON")
    long = {"kind": "cluster", "text": "#" * 2_000_001}
    said = server.request("POST", "/api/v1/read", long)[2]["detail"]
    assert said == "text: found 2000001 characters, expected at most 2000000"


def test_the_server_speaks_chinese_to_those_who_ask(server, plan_id):
    """By Accept-Language: faults, reasons, views; the plan and its numbers are the same."""
    chinese = {"Accept-Language": "zh-CN,zh;q=0.9"}
    _, _, answer = server.request("POST", "/api/v1/jobs", body(seed=-1), chinese)
    assert answer["detail"].startswith("seed：得到 -1，应为")
    assert server.request("GET", "/api/v1/plans/none", None, chinese)[2]["detail"] == "没有这个方案"
    english = server.request("POST", f"/api/v1/plans/{plan_id}/view", {})[2]
    other = server.request("POST", f"/api/v1/plans/{plan_id}/view", {}, chinese)[2]
    assert other["traffic"] == english["traffic"]
    assert [row["formula"] for row in other["formulas"]] != [row["formula"] for row in english["formulas"]]


def test_a_search_minimises_what_it_is_asked_to(server):
    """The cheapest plan costs no more than the fastest; a budget that nothing keeps is told with its reason."""
    usd = {}
    for objective in ("time", "money"):
        row = finished(server, server.request("POST", "/api/v1/jobs", body(objective=objective))[2]["id"])
        usd[objective] = server.request("GET", f"/api/v1/plans/{row['id']}")[2]["estimate"]["cost_usd"]
    assert usd["money"] <= usd["time"]
    request = body()
    request["problem"]["constraints"] = {"most_usd_per_step": usd["money"] / 1000}
    row = finished(server, server.request("POST", "/api/v1/jobs", request)[2]["id"])
    (over,) = reason_of(request)["over"]
    assert row["state"] == "infeasible" and over.kind == "limit.usd_per_step" and str(over) in row["error"]


def test_why_not_is_worked_out_once_and_kept(server, plan_id):
    """A job a plan: ideas with their cost or why they cannot run, and what a better cluster would bring."""
    assert server.request("GET", f"/api/v1/plans/{plan_id}/explanation")[2]["state"] in ("none", "done")
    status, _, row = server.request("POST", f"/api/v1/plans/{plan_id}/explanation", {"time_limit_s": 600})
    assert status == 202
    assert finished(server, row["id"])["state"] == "done"
    answers = server.request("GET", f"/api/v1/plans/{plan_id}/explanation")[2]["answers"]
    view = server.request("POST", f"/api/v1/plans/{plan_id}/view", {})[2]
    assert answers["step_s"] == pytest.approx(view["estimate"]["step_s"])
    assert all(idea["possible"] or idea["reason"] for idea in answers["alternatives"])
    assert server.request("POST", f"/api/v1/plans/{plan_id}/explanation", {})[2]["created_s"] == row["created_s"]
    assert row["id"] not in [job["id"] for job in server.request("GET", "/api/v1/jobs")[2]]
    assert server.request("POST", "/api/v1/plans/none/explanation", {})[0] == 404


def test_an_explanation_that_is_stopped_keeps_what_it_found(server, wide_plan):
    """It names what it left out, and asked again with more time it begins anew; its limit is within bounds."""
    path = f"/api/v1/plans/{wide_plan}/explanation"
    row = server.request("POST", path, {"time_limit_s": 600})[2]
    assert server.request("POST", path, {"time_limit_s": 600})[2]["created_s"] == row["created_s"]
    assert eventually(lambda: server.request("GET", f"/api/v1/jobs/{row['id']}")[2]["state"] == "running")
    server.request("DELETE", f"/api/v1/jobs/{row['id']}")
    ended = finished(server, row["id"])
    answers = server.request("GET", path)[2]["answers"]
    assert ended["state"] == "cancelled" and answers["left_out"] and answers["changes_left_out"]
    again = server.request("POST", path, {"time_limit_s": 0.001})[2]
    assert again["created_s"] > row["created_s"]
    assert finished(server, row["id"])["state"] == "done"
    assert server.request("GET", path)[2]["answers"]["left_out"]
    assert server.request("POST", path, {"time_limit_s": 601})[0] == 422


def test_what_ifs_that_nobody_waits_for_are_not_worked_out(tmp_path, monkeypatch):
    """Of a slider's questions only those are priced whose asker is still there when their turn comes."""
    priced, ask = [], Pricing.ask

    def counted(self, question, tell=None):
        priced.append(json.loads(question.changes)["latency_factor"])
        return ask(self, question, tell)

    monkeypatch.setattr(Pricing, "ask", counted)
    app = create_app(Settings(database=tmp_path / "jobs.sqlite", deployments=tmp_path / "deployments"))
    left = [2.0 + i / 1000 for i in range(8)]

    async def at_once():
        async with what_ifs(app) as status:
            return await asyncio.gather(*(status(factor, factor in left) for factor in (*left, 3.0, 3.5)))

    assert asyncio.run(at_once()) == [204] * 8 + [200] * 2
    assert sorted(priced) == [3.0, 3.5]


def test_kept_answers_wait_for_nobody(tmp_path, monkeypatch):
    """What was asked before is answered while what-ifs of others take every turn."""
    ask, go = Pricing.ask, asyncio.Event()

    async def held(self, question, tell=None):
        if json.loads(question.changes)["latency_factor"] > 4:
            await go.wait()
        return await ask(self, question, tell)

    monkeypatch.setattr(Pricing, "ask", held)
    app = create_app(Settings(database=tmp_path / "jobs.sqlite", deployments=tmp_path / "deployments"))

    async def again():
        async with what_ifs(app) as status:
            assert await status(3.0) == 200
            others = [asyncio.create_task(status(5.0 + i)) for i in range(AHEAD)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(status(3.0), PATIENCE_S) == 200
            go.set()
            return await asyncio.gather(*others)

    assert asyncio.run(again()) == [200] * AHEAD


def test_what_the_page_can_ask_next_is_there_once_a_plan_was_opened(tmp_path, monkeypatch):
    """Without anybody asking; who does then gets it as it is."""
    priced, ask = [], Pricing.ask

    async def counted(self, question, tell=None):
        found = await ask(self, question, tell)
        priced.append(json.loads(question.changes))
        return found

    monkeypatch.setattr(Pricing, "ask", counted)
    monkeypatch.setattr(ahead, "MOST_S", PATIENCE_S)  # however busy the machine is
    app = create_app(Settings(database=tmp_path / "jobs.sqlite", deployments=tmp_path / "deployments"))

    async def opened():
        async with what_ifs(app) as status:
            assert await status(None) == 200
            for _ in range(int(PATIENCE_S / 0.05)):
                await asyncio.sleep(0.05)
                if {"price_factor": 4.0} in priced:
                    break
            told = len(priced)
            assert {"latency_factor": 10.0} in priced and await status(10.0) == 200
            assert await status(None) == 200
            await asyncio.sleep(0.2)
            return len(priced) - told

    assert asyncio.run(opened()) == 0


@contextlib.asynccontextmanager
async def what_ifs(app):
    """From a factor of latency (none: no change), and whether who asks is gone by then, to the status of the view."""

    async def ask(path, data, gone=False):
        parts = [{"type": "http.request", "body": format_json(data).encode(), "more_body": False}]
        sent = []

        async def receive():
            if parts:
                return parts.pop()
            if not gone:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
                 "raw_path": path.encode(), "query_string": b"bound=false",
                 "headers": [(b"content-type", b"application/json")], "server": ("127.0.0.1", 80),
                 "client": ("127.0.0.1", 1), "scheme": "http"}  # fmt: skip
        await app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], json.loads(body) if body else None

    async with app.router.lifespan_context(app):
        _, row = await ask("/api/v1/plans", plan_data(*planned()))

        async def status(factor, gone=False):
            changes = {} if factor is None else {"latency_factor": factor}
            return (await ask(f"/api/v1/plans/{row['id']}/view", changes, gone))[0]

        yield status


def test_uploads_are_read_like_files(server):
    """PTAFM text, YAML and config.json become plain data; nonsense is refused."""
    text = (INSTANCES / "ptafm-7dc.txt").read_text()
    status, _, data = server.request("POST", "/api/v1/read", {"kind": "cluster", "text": text, "name": "seven"})
    assert status == 200 and len(data["regions"]) == 7 and data["name"] == "seven"
    config = json.dumps({"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4})
    assert server.request("POST", "/api/v1/read", {"kind": "model", "text": config})[2]["blocks"] == 3
    assert server.request("POST", "/api/v1/read", {"kind": "cluster", "text": "regions: ["})[0] == 422


def test_what_a_cluster_file_says_stays_in_the_page(server):
    """The link of an own device, what the file says of itself, and a value that was edited below `defaults`."""
    device = {"memory_gib": 24, "tflops": {"fp32": 30}, "memory_bandwidth_gb_per_s": 900, "power_w": 300}
    cluster = {"name": "own", "description": "mine", "source": "the box", "defaults": ["a.intra_region"],
               "devices": {"mine": device | {"link": "nvlink4"}},
               "regions": [{"name": "a", "intra_region": {"latency_ms": 0.5, "bandwidth_gbps": 100},
                            "nodes": [{"device": "mine", "count": 2, "devices_per_node": 8}]}]}  # fmt: skip
    said = server.request("POST", "/api/v1/read", {"kind": "cluster", "text": format_yaml(cluster)})[2]
    link = convert._link_data(catalogue.link("nvlink4"))
    assert said["devices"]["mine"]["link"] == link and "intra_node" not in said["regions"][0]["nodes"][0]
    assert said["description"] == "mine" and said["source"] == "the box"
    assert said["regions"][0]["intra_region"]["bandwidth_gbps"] == 100 and "defaults" not in said
    full = server.request("POST", "/api/v1/clusters", {"cluster": said})[2]["full"]
    assert full["regions"][0]["nodes"][0]["intra_node"] == link and "defaults" not in full


def test_a_model_is_written_as_it_is_read(server):
    """By name or spelt out, a language model becomes a `config.json` that says the same; another is refused."""
    for model in ("llama2-7b", server.request("POST", "/api/v1/read", {"kind": "model", "text": json.dumps(
        {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4})})[2]):  # fmt: skip
        status, _, config = server.request("POST", "/api/v1/config", {"model": model})
        assert status == 200
        again = server.request("POST", "/api/v1/read", {"kind": "model", "text": json.dumps(config)})[2]
        known = model_data(catalogue.model(model)) if isinstance(model, str) else model
        assert {**again, "name": "", "source": ""} == {**known, "name": "", "source": ""}
    status, _, refused = server.request("POST", "/api/v1/config", {"model": "vit-base"})
    assert status == 422 and "model: " in refused["detail"]


def test_a_what_if_is_read_alike_in_its_usual_form_and_in_others(server, wide_plan):
    """A content type with a character set goes the framework's general way: the same answers, the same faults."""
    path = f"/api/v1/plans/{wide_plan}/view"
    bodies = ({}, {"bandwidth_factor": 2.0}, {"bandwidth_factor": "2"}, {"bandwidth": 2}, [], None, b"{", b"\xff", b"")
    for query in ("", "?bound=false", "?bound=no", "?bound=perhaps"):
        for body in bodies:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            for language in ("en", "zh"):
                said = {"Accept-Language": language}
                usual = server.request("POST", path + query, data, said)
                general = server.request(
                    "POST", path + query, data, said | {"Content-Type": "application/json; charset=utf-8"}
                )
                assert (usual[0], usual[2]) == (general[0], general[2]), (query, body)
    assert server.request("POST", "/api/v1/plans/no%20plan/view", {})[0] == 422
    assert server.request("POST", "/api/v1/plans/none/view", {})[0] == 404


def test_a_view_without_the_bound_says_all_else(server, wide_plan):
    """Sooner, and with nothing where the bound stands."""
    whole, brief = (
        server.request("POST", f"/api/v1/plans/{wide_plan}/view{query}", {})[2] for query in ("", "?bound=false")
    )
    bound = {key: whole["estimate"][key] for key in ("lower_bound_s", "lower_bounds_s", "bound_by", "gap")}
    assert bound["gap"] == pytest.approx(whole["estimate"]["step_s"] / bound["lower_bound_s"] - 1)
    assert [row for row in whole["formulas"] if row["key"] != "bound"] == brief["formulas"] != whole["formulas"]
    nothing = {
        "lower_bound_s": None,
        "lower_bounds_s": {},
        "bound_by": "",
        "gap": None,
        "least_usd": None,
        "least_energy_j": None,
    }
    assert brief == {**whole, "formulas": brief["formulas"], "estimate": {**whole["estimate"], **nothing}}


def test_instances_are_those_shipped_and_nothing_else(server):
    """Only listed names are served."""
    names = server.request("GET", "/api/v1/catalogue")[2]["instances"]
    assert set(names) == {path.stem for path in INSTANCES.glob("*.yaml")}
    data = server.request("GET", "/api/v1/instances/two-campus")[2]
    assert cluster_data(cluster_from_spec(check(ClusterSpec, data))) == cluster_data(planned()[0].cluster)
    for name in ("..%2Fsetup", "%2e%2e", "nothing"):
        assert server.request("GET", f"/api/v1/instances/{name}")[0] == 404


@pytest.mark.parametrize(
    "target", ["deepspeed", "megatron", "torchtitan", "torchrun", "slurm", "kubernetes", "skypilot", "tc"]
)
def test_one_click_deployment_passes_its_dry_run(server, plan_id, target):
    """Files, README and checks; its own check.sh agrees."""
    answer = server.request("POST", f"/api/v1/plans/{plan_id}/deploy", {"name": f"my-{target}", "target": target})
    assert answer[0] == 201, answer
    assert answer[2]["checks"] and all(check["passed"] for check in answer[2]["checks"])
    folder = server.folder / "deployments" / f"my-{target}"
    assert sorted(path.name for path in folder.iterdir()) == answer[2]["files"]
    assert subprocess.run(["bash", "check.sh"], cwd=folder, capture_output=True).returncode == 0
    assert server.request("GET", f"/api/v1/deployments/my-{target}/README.md")[2].startswith(f"# my-{target}")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the CPU time of a process is read where Linux has it")
def test_a_deployment_is_worked_out_where_plans_are_priced(tmp_path):
    """The bound in its plan file takes seconds of a large plan: the server answers others meanwhile."""
    server = Server(tmp_path, anew=True)
    own = Path(f"/proc/{server.process.pid}/stat")

    def seconds() -> tuple[float, float]:
        """CPU of the server itself, and of those below it."""
        ticks = own.read_text("utf-8").rsplit(")", 1)[1].split()[11:13]
        own_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return own_s, cpu_s(server) - own_s

    plan = server.request("POST", "/api/v1/plans", plan_data(*wide()))[2]["id"]
    rest(server)
    before = seconds()
    assert server.request("POST", f"/api/v1/plans/{plan}/deploy", {"name": "a", "target": "torchrun"})[0] == 201
    here_s, there_s = (now - then for now, then in zip(seconds(), before, strict=True))
    assert here_s < there_s
    server.stop()


@pytest.mark.parametrize("name", ["../x", "a/b", "", "A", "-rf", "x" * 41, "a b", "a\nb", "$(touch pwned)"])
def test_deployment_names_go_through_a_whitelist(server, plan_id, name):
    """Nothing is written under a name that is none."""
    before = sorted(server.folder.rglob("*"))
    status, _, _ = server.request("POST", f"/api/v1/plans/{plan_id}/deploy", {"name": name, "target": "torchrun"})
    assert status == 422
    assert sorted(path for path in server.folder.rglob("*") if "sqlite" not in path.name) == [
        path for path in before if "sqlite" not in path.name
    ]


@pytest.mark.parametrize(
    "path",
    ["/setup.cfg", "/assets/../index.html", "/assets/..%2f..%2fapp.py", "/assets/%2e%2e/app.py", "/.git/config",
     "/jobs.sqlite", "/api/v1/deployments/../jobs.sqlite", "/api/v1/deployments/x/..%2F..%2Fjobs.sqlite", "/docs"],
)  # fmt: skip
def test_nothing_else_is_served(server, path):
    """Only the built page, the API and named deployments."""
    assert server.request("GET", path)[0] in (404, 405, 422)


def test_scripts_are_sent_compressed_to_those_who_take_it(server):
    """The same bytes with and without gzip."""
    name = re.search(r"/assets/[^\"]+\.js", server.request("GET", "/")[2])[0]
    plain = server.request("GET", name)[2]
    with urllib.request.urlopen(urllib.request.Request(server.url + name, headers={"Accept-Encoding": "gzip"})) as it:
        packed = it.read()
        assert it.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed).decode() == plain and len(packed) < len(plain) / 2


def test_no_browser_misses_an_icon(server):
    """It asks for one beside every answer that is no page, and says on its console what it did not get."""
    for method in ("GET", "HEAD"):
        status, _, body = server.request(method, "/favicon.ico")
        assert status == 204 and not body


def test_every_answer_carries_the_security_headers(server):
    """No inline script, no sniffing, no framing, no CORS; also on errors."""
    for path in ("/", "/api/v1/catalogue", "/nothing", "/api/v1/jobs/none"):
        _, headers, _ = server.request("GET", path)
        policy = headers["content-security-policy"]
        assert "script-src 'self'" in policy and "default-src 'none'" in policy
        assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
        assert headers["x-content-type-options"] == "nosniff"
        assert not [name for name in headers if name.startswith("access-control")]
    page = server.request("GET", "/")[2]
    assert "<script>" not in page and "http://" not in page and "https://" not in page


def test_other_sites_pages_are_refused(server):
    """A browser's request on behalf of another origin never reaches the API."""
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert server.request("POST", "/api/v1/jobs", body(), headers)[0] == 403


def test_a_server_answers_to_its_own_names_alone(server, plan_id):
    """A page of another site that lets its name point here is refused by every operation, the page's files included."""
    spec = server.request("GET", "/api/v1/openapi.json")[2]
    asked = [(method.upper(), path) for path, methods in spec["paths"].items() for method in methods]
    for method, path in [*asked, ("GET", "/"), ("GET", "/api/v1/openapi.json")]:
        where = path.replace("{job}", plan_id).replace("{index}", "0")
        for host in ("evil.example", "evil.example:5000", "127.0.0.1.evil.example", "[::2]:80"):
            status, _, answer = server.request(method, where, b"{}" if method != "GET" else None, {"Host": host})
            assert status == 421 and host.split(":5000")[0].strip("[]").split("]")[0] in answer["detail"]
    for host in ("localhost:1", "[::1]", "LOCALHOST"):
        assert server.request("GET", "/api/v1/jobs", None, {"Host": host})[0] == 200


def test_a_flood_of_jobs_is_turned_away_user_by_user(tmp_path):
    """Beyond their quota one user gets 429 with a time to come back; another goes on; each sees their own plans."""
    server = Server(tmp_path, "--token", "ann=a", "--token", "bob=b", "--allow-host", "box.lan")
    ann, bob = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b", "Host": "box.lan"}
    try:
        flood = [server.request("POST", "/api/v1/jobs", body(effort="long"), ann) for _ in range(12)]
        assert [status for status, _, _ in flood[-2:]] == [429, 429] and {s for s, _, _ in flood} == {202, 429}
        assert int(flood[-1][1]["retry-after"]) > 0 and "try again in" in flood[-1][2]["detail"]
        status, _, mine = server.request("POST", "/api/v1/jobs", body(), bob)
        assert status == 202
        assert [row["id"] for row in server.request("GET", "/api/v1/jobs", None, bob)[2]] == [mine["id"]]
    finally:
        server.stop()


def test_a_page_can_be_asked_for_by_its_head_alone(server):
    """HEAD gives the headers of GET and no body."""
    for path in ("/", re.search(r"/assets/[^\"]+\.js", server.request("GET", "/")[2])[0]):
        status, headers, text = server.request("HEAD", path)
        assert status == 200 and text == "" and int(headers["content-length"]) > 100


def test_what_can_be_got_can_be_asked_for_by_its_head(server, plan_id):
    """The status and headers of GET and no body, of what streams too; what cannot be got is refused as before."""
    paths = ("openapi.json", "catalogue", "jobs", f"plans/{plan_id}", f"plans/{plan_id}/exports/kubernetes", "nothing")
    for path in paths:
        (status, headers, _), head = (server.request(method, f"/api/v1/{path}") for method in ("GET", "HEAD"))
        assert head[0] == status and not head[2]
        assert [head[1][name] for name in ("content-type", "content-length")] == [
            headers[name] for name in ("content-type", "content-length")
        ]
    status, headers, text = server.request("HEAD", f"/api/v1/plans/{plan_id}/limits/events")
    assert (status, text) == (200, "") and headers["content-type"].startswith("text/event-stream")
    assert server.request("HEAD", "/api/v1/clusters")[0] == 405


def test_a_cluster_is_spelt_out_and_its_defaults_are_told(server):
    """What was not given is filled in as by the planner; what is wrong is told with its place."""
    cluster = {"regions": [{"name": "a", "nodes": [{"device": "t4", "count": 2, "devices_per_node": 4}]}]}
    said = server.request("POST", "/api/v1/clusters", {"cluster": cluster})[2]
    assert parse_yaml(said["yaml"]) == cluster and said["devices"] == 8
    assert said["full"]["regions"][0]["intra_region"] == {"latency_ms": 0.5, "bandwidth_gbps": 10}
    assert set(said["full"]["defaults"]) == {"a.intra_region", "a.nodes[0].intra_node"}
    cluster["regions"][0]["nodes"][0]["count"] = 0
    status, _, answer = server.request("POST", "/api/v1/clusters", {"cluster": cluster})
    assert status == 422 and answer["detail"].startswith("cluster.regions[0].nodes[0].count: found 0")


def test_a_variant_is_a_plan_of_its_own(server, wide_plan):
    """Its step is what the change was priced at, whatever the change; it can be exported; it knows where it is from."""
    every = {"bandwidth_factor": 2.0, "activations": "int4", "accumulation": 2, "streams": 4, "price_factor": 2.0,
             "local_steps": 2, "prefetch": 1.0, "device_factors": {"v100-16gb": 2.0}, "overlap": 0.5}  # fmt: skip
    for changes in ({"algorithm": "ring", "latency_factor": 2.0}, {"chunk_mb": 16.0}, every):
        priced = server.request("POST", f"/api/v1/plans/{wide_plan}/view", changes)[2]["estimate"]
        asked = {"name": "other", "changes": changes}
        status, _, row = server.request("POST", f"/api/v1/plans/{wide_plan}/variants", asked)
        assert status == 201 and (row["parent"], row["changes"], row["kind"]) == (wide_plan, changes, "variant")
        own = server.request("POST", f"/api/v1/plans/{row['id']}/view", {})[2]["estimate"]
        for key in ("step_s", "cost_usd", "tokens_per_s"):
            assert own[key] == pytest.approx(priced[key], rel=1e-9)
        assert server.request("GET", f"/api/v1/plans/{row['id']}/exports/torchrun")[0] == 200
    said = server.request("GET", f"/api/v1/plans/{row['id']}")[2]["estimate"]
    shown = server.request("POST", f"/api/v1/plans/{row['id']}/view", {})[2]["estimate"]
    assert said["lower_bound_s"] == pytest.approx(shown["lower_bound_s"])
    assert said["lower_bound_s"] * (1 + said["gap"]) == pytest.approx(said["step_s"])


def test_a_plan_knows_what_it_was_asked_for_and_what_it_is_called(server):
    """Problem, objective, effort and seed come back as they were given; names, tags and the archive are kept."""
    asked = body(objective="money", seed=5)
    asked["problem"]["cluster"] = server.request("GET", "/api/v1/instances/two-campus")[2]
    job = server.request("POST", "/api/v1/jobs", asked)[2]["id"]
    kept = server.request("GET", f"/api/v1/jobs/{job}/request")[2]
    assert kept == json.loads(format_json(asked)) | {"effort": "quick"}
    labels = {"name": "mine", "tags": ["a", "b"], "archived": True}
    row = server.request("PATCH", f"/api/v1/jobs/{job}", labels)[2]
    assert {key: row[key] for key in labels} == labels
    finished(server, job)
    assert server.request("DELETE", f"/api/v1/plans/{job}")[0] == 204
    assert server.request("GET", f"/api/v1/jobs/{job}")[0] == 404


@pytest.mark.parametrize(
    ("labels", "said"),
    [({"name": "\0"}, r"name: found '\x00', expected a name on one line, without control characters"),
     ({"name": " \u200b"}, r"name: found ' \u200b', expected a name that can be seen"),
     ({"tags": [""]}, "tags[0]: found '', expected a text that is not empty"),
     ({"tags": ["a", "b", "a"]}, "tags: found 'a', expected each of them once"),
     ({"tags": [str(i) for i in range(1000)]}, "tags: found 1000 entries, expected at most 12"),
     ({"tags": ["x" * 41]}, "tags[0]: found 41 characters, expected at most 40")],
)  # fmt: skip
def test_names_that_nobody_sees_are_refused(server, plan_id, labels, said):
    """In one line that says what is allowed; a plan without a name is called by its number, as before."""
    status, _, answer = server.request("PATCH", f"/api/v1/jobs/{plan_id}", labels)
    assert (status, answer["detail"]) == (422, said)
    before = server.request("GET", f"/api/v1/jobs/{plan_id}")[2]["name"]
    assert server.request("PATCH", f"/api/v1/jobs/{plan_id}", {"name": ""})[0] == 200
    assert server.request("PATCH", f"/api/v1/jobs/{plan_id}", {"name": before})[2]["name"] == before


@pytest.mark.parametrize("changes", [{}, {"bandwidth_factor": 1.0}, {"streams": None}])
def test_a_variant_without_a_change_is_refused(server, plan_id, changes):
    """It would be a second row for the same plan, without a name."""
    before = len(server.request("GET", "/api/v1/jobs")[2])
    status, _, answer = server.request("POST", f"/api/v1/plans/{plan_id}/variants", {"changes": changes})
    assert status == 422 and answer["detail"] == "changes: found none, expected what differs from the plan"
    assert len(server.request("GET", "/api/v1/jobs")[2]) == before


def test_sizes_are_limited(server):
    """A body beyond the limit is refused unread, announced or not."""
    for header in (("Content-Length", "9000000"), ("Transfer-Encoding", "chunked")):
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.putrequest("POST", "/api/v1/plans")
            connection.putheader(*header)
            connection.endheaders()
            if header[1] == "chunked":
                with contextlib.suppress(OSError):
                    for _ in range(9):
                        connection.send(b"f4240\r\n" + b" " * 1_000_000 + b"\r\n")
            with connection.getresponse() as answer:
                assert answer.status == 413


def test_a_body_that_is_none_is_told_what_it_should_be(server):
    """In words, as of every other value: another kind than JSON, none at all, a list, one that nests too deeply."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends unless it is told
    deep = b'{"cluster": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    mapping = "expected a mapping with the keys cluster"
    for data, headers, said in (
        ({}, form, "Content-Type: found 'application/x-www-form-urlencoded', expected 'application/json'"),
        (None, {}, f"found nothing, {mapping}"),
        ([], {}, f"found an empty list, {mapping}"),
        (deep, {}, "body: found JSON nested too deeply, expected JSON"),
        (b'{"cluster": "' + b"a" * 9_000 + b"\xff", {}, "body: found bytes that are not UTF-8, expected JSON"),
    ):
        assert server.request("POST", "/api/v1/clusters", data, headers)[::2] == (422, {"detail": said})
    assert server.request("POST", "/api/v1/plans", [])[2] == {"detail": "found an empty list, expected a mapping"}


def test_what_the_end_of_the_server_cuts_short_is_told_so():
    """503, as from what stands before a server that is gone, and not 500, the server's own fault."""
    sent = []

    async def endless(scope, receive, send):
        await asyncio.sleep(PATIENCE_S)

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    async def ended():
        scope = {"type": "http", "path": "/", "headers": []}
        task = asyncio.create_task(Guard(endless, {}, frozenset())(scope, receive, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(ended())
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"]) == {"detail": "the server is ending"}


def test_openapi_documents_every_path(server):
    """Names, summaries and error answers for all of the API."""
    spec = server.request("GET", "/api/v1/openapi.json")[2]
    for path, methods in spec["paths"].items():
        assert path.startswith("/api/v1/")
        for method in methods.values():
            assert method["summary"] and "422" in method["responses"]


def test_every_answer_is_what_its_schema_says(server, wide_plan):
    """Real answers of every operation that answers JSON, held to the OpenAPI; refusals have a schema, too."""
    trace = server.request("GET", f"/api/v1/plans/{wide_plan}/trace")[2]
    plan, other = wide_plan, {"name": "v", "changes": {"latency_factor": 2.0}}
    job = server.request("POST", "/api/v1/fronts", body())[2]["id"]
    assert finished(server, job)["state"] == "done"
    point = server.request("GET", f"/api/v1/fronts/{job}")[2]["points"][0]
    of_point = f"/api/v1/fronts/{job}/points/0?step_s="
    assert server.request("POST", f"{of_point}{point['step_s']!r}", {})[0] == 201
    assert server.request("POST", f"{of_point}{point['step_s'] + 1}", {})[0] == 404
    cluster = server.request("GET", "/api/v1/instances/two-campus")[2]
    asked = {
        ("POST", "/api/v1/plans"): plan_data(*planned()), ("POST", "/api/v1/clusters"): {"cluster": cluster},
        ("POST", "/api/v1/read"): {"kind": "model", "text": "{}"}, ("POST", "/api/v1/jobs"): body(),
        ("POST", "/api/v1/config"): {"model": "llama2-7b"},
        ("POST", "/api/v1/fronts"): body(), ("POST", "/api/v1/plans/{job}/variants"): other,
        ("POST", "/api/v1/plans/{job}/deploy"): {"name": "typed", "target": "tc"},
        ("PATCH", "/api/v1/jobs/{job}"): {"tags": ["x"]},
        ("POST", "/api/v1/plans/{job}/explanation"): {"time_limit_s": 1},
        ("POST", "/api/v1/measured"): {"problem": body()["problem"], "text": json.dumps(PROBE)},
        ("POST", "/api/v1/runs"): {"name": "typed", "plan": plan, "files": {"t.json": format_json(trace)}},
        ("POST", "/api/v1/plans/{job}/rehearsals"): {"name": "typed"},
    }  # fmt: skip
    run = server.request("POST", "/api/v1/runs", asked["POST", "/api/v1/runs"])[2]["name"]
    spec = server.request("GET", "/api/v1/openapi.json")[2]
    from jsonschema import Draft202012Validator  # takes two seconds, and every worker imports this file

    held = 0
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            where = path.replace("{job}", job if "fronts" in path else plan).replace("{index}", "0")
            where = where.replace("{name}", run if "/runs/" in path else "two-campus").replace("{target}", "torchrun")
            if path.endswith("/events") or method == "delete" or "deployments/{name}" in path:
                continue
            data = asked.get((method.upper(), path), {} if method != "get" else None)
            status, _, answer = server.request(method.upper(), where, data)
            schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
            held += 1
            assert not list(Draft202012Validator({**schema, "components": spec["components"]}).iter_errors(answer)), (
                where
            )
            assert status < 400 or path in ("/api/v1/read", "/api/v1/plans/{job}/rehearsals"), where
    assert held >= 36


def test_a_token_is_asked_of_the_whole_api(tmp_path):
    """With --token: 401 without it, the page itself comes; a wrong one is 401."""
    server = Server(tmp_path, "--token", "s3cret & more")
    try:
        assert server.request("GET", "/")[0] == 200
        assert server.request("GET", "/api/v1/catalogue")[0] == 401
        assert server.request("GET", "/api/v1/jobs", None, {"Authorization": "Bearer wrong"})[0] == 401
        assert server.request("GET", "/api/v1/jobs", None, {"Authorization": "Bearer s3cret & more"})[0] == 200
        assert server.request("GET", "/api/v1/jobs/x/events?token=s3cret+%26+more")[0] == 401
        assert server.request("POST", "/api/v1/plans/none/view", {})[0] == 401
    finally:
        server.stop()


def test_a_restart_in_the_middle_of_a_job_loses_nothing(tmp_path):
    """Killed while searching: plans are still there, and the search begins again and ends."""
    server = Server(tmp_path)
    kept = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    job = server.request("POST", "/api/v1/jobs", body(effort="long"))[2]["id"]
    server.stop(signal.SIGKILL)
    with sqlite3.connect(tmp_path / "jobs.sqlite") as database:
        database.execute("UPDATE jobs SET request = json_set(request, '$.effort', 'quick') WHERE id = ?", (job,))
    database.close()
    again = Server(tmp_path)
    try:
        assert again.request("GET", f"/api/v1/plans/{kept}")[2]["format"] == "polygon-plan"
        assert finished(again, job)["state"] == "done"
    finally:
        again.stop()


def test_command_says_what_is_wrong_in_one_line(server, tmp_path):
    """A database that cannot be opened or is another server's, a port in use, no such host: exit 2, no traceback."""
    port, jobs, none = server.url.rpartition(":")[2], str(server.folder / "jobs.sqlite"), str(tmp_path / "x.sqlite")
    for options, said in (
        (["--port", "0", "--database", str(tmp_path / "no" / "x.sqlite")], "cannot be used as a database"),
        (["--port", "0", "--database", jobs], "in use by another server"),
        (["--port", port, "--database", none], f"port: found 127.0.0.1:{port} (Address already in use)"),
        (["--host", "no.such.host.invalid", "--token", "x", "--database", none], "expected an address of this machine"),
    ):
        code, _, line = ran(partial(run, main), options, tmp_path)
        assert code == 2 and len(line.splitlines()) == 1, line
        assert said in line


def test_what_is_no_text_or_no_address_is_told_in_the_callers_language(server):
    """Bytes that are not UTF-8, names longer than any file's, methods and addresses that do not exist."""
    chinese = {"Accept-Language": "zh"}
    status, _, answer = server.request("POST", "/api/v1/read", b'{"kind": "cluster", "text": "\xff"}', chinese)
    assert status == 422 and answer["detail"] == "body：得到 非 UTF-8 字节，应为JSON"
    assert server.request("GET", f"/assets/{'a' * 5000}.js")[0] == 404
    assert server.request("GET", "/api/v1/nothing", None, chinese)[2]["detail"] == "没有这个地址"
    assert server.request("DELETE", "/api/v1/catalogue", None, chinese)[2]["detail"] == "不支持该方法"
    refused = server.request("GET", "/api/v1/jobs", None, chinese | {"Sec-Fetch-Site": "cross-site"})[2]["detail"]
    assert refused == "拒绝其他网站页面的请求"


def test_measured_links_and_devices_come_into_the_editor(server):
    """What a probe or a bench says replaces what was given or assumed, and is named; the rest stays as it was."""
    regions = [
        {"name": "a", "nodes": [{"device": "t4", "count": 2, "devices_per_node": 4}]},
        {"name": "b", "nodes": [{"device": "t4", "count": 1}]},
    ]
    links = [{"between": ["a", "b"], "latency_ms": 20, "bandwidth_gbps": 1}]
    batch = {"global_batch": 8, "seq_len": 512, "precision": "fp16"}
    problem = {"cluster": {"regions": regions, "links": links}, "model": "opt-350m", "batch": batch}

    def measured(data, name="report.json"):
        asked = {"problem": problem, "text": data if isinstance(data, str) else json.dumps(data), "name": name}
        return server.request("POST", "/api/v1/measured", asked)

    rows = [{"source_region": x, "target_region": y, "rtt_s": 0.03, "link_bytes_per_s": 5e8} for x, y in ("ab", "aa")]
    status, _, said = measured({"format": "polygon-probe", "version": 1, "links": rows})
    assert status == 200
    names = ["a > b.bandwidth_gbps", "a > b.latency_ms", "a.intra_region"]
    assert said["measured"] == names
    cluster = said["cluster"]
    assert cluster["bandwidth_gbps"][0][1] == 4 and cluster["latency_ms"][0][1] == 15
    assert cluster["bandwidth_gbps"][1][0] == 1 and cluster["regions"][0]["intra_region"]["bandwidth_gbps"] == 4
    full = server.request("POST", "/api/v1/clusters", {"cluster": cluster})[2]["full"]
    assert "a.intra_region" not in full["defaults"] and "a.nodes[0].intra_node" in full["defaults"]
    products = [{"precision": "fp16", "rows": n, "columns": n, "inner": n, "seconds": 2 * n**3 / 2e13 + 1e-5}
                for n in (256, 512, 1024, 1536, 2048, 3072, 4096, 6144)]  # fmt: skip
    bench = {"format": "polygon-bench", "version": 1, "device": "t4", "products": products}
    status, _, said = measured(bench)
    assert status == 200, said
    assert said["measured"] == ["device.t4"]
    assert said["cluster"]["devices"]["t4"]["efficiency"]["basis"] == "bench"
    for data, words in (({"format": "polygon-plan"}, "report.json: format"), ("{", "report.json: "),
                        (bench | {"device": "v100-16gb"}, "v100-16gb"),
                        ({"format": "polygon-probe", "links": [{}]}, "links[0]"),
                        ({"format": "polygon-probe", "links": [rows[0] | {"source_region": "x"}]}, "'x'")):  # fmt: skip
        status, _, refused = measured(data)
        assert status == 422 and words in refused["detail"], refused
