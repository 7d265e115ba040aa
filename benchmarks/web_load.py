"""How the web application stands up: parallel users asking what-if, the page's first chart, fuzzed requests.

    python benchmarks/web_load.py [--users 100] [--examples 300] [--skip-fuzz] [--only-users]

Prints wall and CPU seconds: of a what-if of each control; what-ifs of the page's controls once a plan was opened and
before, what-ifs that differ and what-ifs that are equal (kept answers), with median and 95th percentile; a timeline of
2,048 micro-batches and a plan for 10,240 devices; where Chromium is installed the page from navigation to its first
chart, and its longest task (CPU) while that plan opens and while pointer and keys move over it; and for the fuzz,
requests sent and answers by status. Any error or 5xx fails.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.domain.plan import Plan, Problem
from polygon.formats.convert_plan import plan_data
from polygon.formats.serialization import format_json
from polygon.web import questions
from polygon.web.answers import compact
from polygon.web.sliders import Changes, positions
from tests.exported_plans import planned, wide
from tests.patience import PATIENCE_S
from tests.web.conftest import Server
from tests.web.fuzzing import fuzz


def cpu_s(server: Server) -> float:
    """CPU seconds that the server and the processes below it have used (Linux)."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has ended meanwhile
            fields = stat.read_text("utf-8").rsplit(")", 1)[1].split()
            process = int(stat.parent.name)
            parents[process], ticks[process] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {server.process.pid}
    while more := {process for process, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(ticks[process] for process in mine if process in ticks) / os.sysconf("SC_CLK_TCK")


ROOT = Path(__file__).resolve().parents[1]

Ask = Callable[[int, int], dict[str, Any]]
"""Changes that a user asks for, by the user and how many they asked before."""


def of_controls(devices: list[str], local_steps: int, users: int, each: int) -> list[list[dict[str, Any]]]:
    """For every user a row of what-ifs as the page's sliders and menus can ask them: a control, moved to one position
    after another."""
    every, draw = positions(devices, local_steps), random.Random(users)
    names = [draw.choice(sorted(every)) for _ in range(users)]
    return [[draw.choice(every[name]) for _ in range(each)] for name in names]


def control_cpu_s(problem: Problem, plan: Plan, tries: int = 9) -> dict[str, float]:
    """CPU seconds of a what-if of each control, at its position that takes longest: priced and written as JSON as the
    processes that price do, the median of so many."""
    it = questions.load(format_json(plan_data(problem, plan)), {})
    devices = sorted({pool.device.name for pool in problem.cluster.pools})
    asks = {json.dumps(ask): ask for row in of_controls(devices, plan.local_steps, 400, 1) for ask in row}
    longest: dict[str, float] = {}
    for ask in ({}, *asks.values()):
        seconds = []
        for _ in range(tries):
            begin = time.process_time()
            compact(questions.answer("view", it, Changes.model_validate(ask), {"bound": False}))
            seconds.append(time.process_time() - begin)
        if ask:
            name = next(iter(ask))
            longest[name] = max(longest.get(name, 0.0), statistics.median(seconds))
    return longest


async def asked(
    server: Server, plans: Sequence[str], users: int, ask: Ask, *, each: int, pause_s: float = 0.0
) -> list[float]:
    """Seconds of every what-if of so many users at once, one after another or one every `pause_s`, of plans in turn.

    Each has a connection that stays, as a browser's does, and nothing is parsed: what asks takes no time from what
    answers, with which it shares the machine.
    """
    place = urllib.parse.urlsplit(server.url)
    start_s = time.perf_counter()

    async def one(user: int) -> list[float]:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 24)
        seconds = []
        for step in range(each):
            # With a pause users begin one after another, as people do.
            await asyncio.sleep(max(0.0, start_s + (user / users + step) * pause_s - time.perf_counter()))
            body, plan = json.dumps(ask(user, step)).encode(), plans[user % len(plans)]
            head = (f"POST /api/v1/plans/{plan}/view?bound=false HTTP/1.1\r\nHost: {place.netloc}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")  # fmt: skip
            begin = time.perf_counter()
            writer.write(head.encode() + body)
            told = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", told)
            assert told.startswith(b"HTTP/1.1 200") and length is not None, told
            await reader.readexactly(int(length[1]))
            seconds.append(time.perf_counter() - begin)
        writer.close()
        return seconds

    return [s for row in await asyncio.gather(*(one(user) for user in range(users))) for s in row]


def one_user_s(server: Server, plan: str, ask: Ask, count: int = 40) -> float:
    """Median seconds of a what-if of one user while nobody else asks."""
    return statistics.median(asyncio.run(asked(server, [plan], 1, ask, each=count)))


def free_cores() -> float:
    """How many cores a busy process on each gets at the moment: of a machine that others use, fewer than there are."""
    count = os.cpu_count() or 1
    spin = "import time; b = time.perf_counter()\nwhile time.perf_counter() < b + 1: pass\nprint(time.process_time())"
    ran = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return sum(float(process.communicate()[0]) for process in ran)


def rest(server: Server) -> None:
    """Wait until the server has nothing more to do."""
    before_s = -1.0
    while (now_s := cpu_s(server)) > before_s + 0.01:
        before_s = now_s
        time.sleep(0.3)


def crowd(server: Server, name: str, data: tuple[Problem, Plan], users: int) -> str:
    """Print how long what-ifs of many users take beside those of one; gives back the plan's id."""

    def kept(problem: Problem, plan: Plan) -> str:
        return str(server.request("POST", "/api/v1/plans", plan_data(problem, plan))[2]["id"])

    fresh = kept(*data)
    # Another plan that strangers made alike, of whom one opens theirs.
    longer = tuple(tuple(span + 1 for span in part) for part in data[1].spans)
    opened, *theirs = (kept(data[0], replace(data[1], spans=longer)) for _ in range(users + 1))
    alone_s = one_user_s(server, fresh, lambda _, i: {"bandwidth_factor": 0.5 + i / 100})
    print(f"{name}: {free_cores():.1f} of {os.cpu_count()} cores are free for busy processes")
    drawn = of_controls(sorted({pool.device.name for pool in data[0].cluster.pools}), data[1].local_steps, users, 3)
    server.request("POST", f"/api/v1/plans/{opened}/view?bound=false", {})
    rest(server)
    kept_s = one_user_s(server, opened, lambda _, i: drawn[i % users][i // users])
    print(f"{name}: one user alone, {alone_s * 1e3:.2f} ms; on the page's controls, once it has opened the plan, "
          f"{kept_s * 1e3:.2f} ms")  # fmt: skip
    rows: list[tuple[str, str | list[str], Ask, float]] = [
        ("of the page's controls", opened, lambda user, step: drawn[user][step], 0.0),
        ("of the page's controls, each of an own plan like it", theirs, lambda user, step: drawn[user][step], 0.0),
        ("of the page's controls on a plan that nobody has opened", fresh, lambda user, step: drawn[user][step], 0.0),
        ("of which no two are alike", fresh, lambda user, step: {"bandwidth_factor": 1 + user / 100 + step}, 0.0),
        ("that are equal", fresh, lambda _, step: {"bandwidth_factor": 1 + step + 1 / 7}, 0.0),
        ("of which no two are alike, one a second each", fresh,
         lambda user, step: {"bandwidth_factor": 1.001 + user / 100 + step}, 1.0),
    ]  # fmt: skip
    for kind, plan, ask, pause_s in rows:
        before_s, own_s = cpu_s(server), time.process_time()
        plans = [plan] if isinstance(plan, str) else plan
        waits = sorted(asyncio.run(asked(server, plans, users, ask, each=3, pause_s=pause_s)))
        each_ms, own_ms = (s / len(waits) * 1e3 for s in (cpu_s(server) - before_s, time.process_time() - own_s))
        p95_s = waits[int(0.95 * len(waits))]
        # Where all ask at once and cores only work, the last but 5 % has waited for so many answers' CPU on all cores.
        least = 0.95 * users * (each_ms + own_ms) / (os.cpu_count() or 1) / (alone_s * 1e3)
        print(f"{name}: {users} users, {len(waits)} what-ifs {kind}, no error: median "
              f"{statistics.median(waits) * 1e3:.0f} ms, p95 {p95_s * 1e3:.0f} ms, {p95_s / alone_s:.0f} times one "
              f"user's; CPU of the server {each_ms:.2f} ms each, of who asks {own_ms:.2f}"
              + ("" if pause_s else f": of these alone {least:.0f} times"))  # fmt: skip
    return fresh


def first_chart(server: Server, plan: str, tries: int = 5) -> list[tuple[str, float, float]]:
    """For a first visit and a plan: median seconds to the first chart, and of them those in which the page computes."""
    from playwright.sync_api import sync_playwright

    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    rows = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, address in (("first visit", "/"), ("a plan", f"/#plan={plan}")):
            walls, cpus = [], []
            for _ in range(tries):
                page = browser.new_context().new_page()
                page.set_default_timeout(PATIENCE_S * 1e3)
                meter = page.context.new_cdp_session(page)
                meter.send("Performance.enable")
                page.goto(server.url + address)
                page.wait_for_function("() => performance.getEntriesByName('first-chart').length > 0")
                walls.append(page.evaluate("performance.getEntriesByName('first-chart')[0].startTime") / 1e3)
                metrics = {m["name"]: m["value"] for m in meter.send("Performance.getMetrics")["metrics"]}
                cpus.append(metrics["TaskDuration"])
                page.context.close()
            rows.append((name, statistics.median(walls), statistics.median(cpus)))
        browser.close()
    return rows


def told_at_s(server: Server, path: str) -> list[float]:
    """When each of an operation's server-sent events came."""
    with urllib.request.urlopen(server.url + path, timeout=PATIENCE_S) as lines:
        return [time.perf_counter() for line in lines if line.startswith(b"data:")]


def first_example(server: Server, tries: int = 3) -> None:
    """Print what a quick plan of the page's first example takes, and the first and all limits of it after that.

    Warm: kernels and processes are there; every try is another seed, so that nothing of it is known.
    """
    cluster = server.request("GET", "/api/v1/instances/aws-regions")[2]
    problem = {"cluster": cluster, "model": "llama2-7b", "batch": {"global_batch": 512, "seq_len": 2048}}
    rows = []
    for seed in range(tries + 1):
        before_s, begin = cpu_s(server), time.perf_counter()
        job = server.request("POST", "/api/v1/jobs", {"problem": problem, "effort": "quick", "seed": seed})[2]["id"]
        planned_s, plan_cpu_s = told_at_s(server, f"/api/v1/jobs/{job}/events")[-1], cpu_s(server) - before_s
        with ThreadPoolExecutor(1) as beside:  # as the page asks
            view = beside.submit(server.request, "POST", f"/api/v1/plans/{job}/view?bound=false", {})
            told = told_at_s(server, f"/api/v1/plans/{job}/limits/events")
            view.result()
        rows.append((plan_cpu_s, planned_s - begin, told[0] - planned_s, told[-1] - planned_s))
    plan_cpu_s, wall_s, first_s, all_s = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    print(f"first example: a quick plan takes {plan_cpu_s:.2f} CPU-s ({wall_s:.2f} s); its first limit comes "
          f"{first_s:.2f} s after it, all {all_s:.2f} s")  # fmt: skip


def long_timeline(server: Server, plan: str) -> None:
    """Print what a timeline of 2,048 micro-batches weighs."""
    begin = time.perf_counter()
    rows = server.request("POST", f"/api/v1/plans/{plan}/timeline", {"accumulation": 32})[2]
    weight = len(json.dumps(rows).encode()) / 1e3
    print(f"timeline of 2,048 micro-batches: {weight:.0f} kB in {time.perf_counter() - begin:.2f} s")


def ten_thousand(server: Server) -> str:
    """A plan for 10,240 devices in 10 regions."""
    nodes = [{"device": "a100-80gb", "count": 128, "devices_per_node": 8}]
    regions = [
        {"name": f"r{i}", "latitude": 8.0 * i - 35, "longitude": 30.0 * i - 140, "nodes": nodes} for i in range(10)
    ]
    links = [{"between": [f"r{i}", f"r{j}"], "latency_ms": 10.0 + 5 * (j - i), "bandwidth_gbps": 100}
             for i in range(10) for j in range(i + 1, 10)]  # fmt: skip
    batch = {"global_batch": 8192, "seq_len": 2048}
    problem = {"cluster": {"regions": regions, "links": links}, "model": "llama2-7b", "batch": batch}
    begin = time.perf_counter()
    job = server.request("POST", "/api/v1/jobs", {"problem": problem})[2]["id"]
    while (row := server.request("GET", f"/api/v1/jobs/{job}")[2])["state"] in ("queued", "running"):
        time.sleep(0.1)
    assert row["has_plan"], row["error"]
    print(f"10,240 devices: a quick plan in {time.perf_counter() - begin:.1f} s")
    return job


def longest_tasks_s(server: Server, plan: str) -> tuple[float, float]:
    """The most CPU seconds of the page at a stretch: while it opens, and while pointer and keys move over map, stages
    and timeline. Not wall time, which others on the machine lengthen."""
    from playwright.sync_api import sync_playwright

    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1366, "height": 900})
        page.set_default_timeout(PATIENCE_S * 1e3)
        page.goto(f"{server.url}/api/v1/catalogue")
        browser.start_tracing(page=page)
        page.goto(f"{server.url}/#plan={plan}")
        canvas = page.locator("[data-chart=gantt] canvas")
        canvas.wait_for()
        opened_s = _longest_s(browser.stop_tracing())
        browser.start_tracing(page=page)
        for place in ("[data-region][tabindex='0'] circle", ".strip > li"):
            for spot in page.locator(place).all()[:10]:
                spot.hover()
        for key in ("+", "+", "-"):
            with page.expect_response(re.compile("/timeline")):
                canvas.press(key)
        moved_s = _longest_s(browser.stop_tracing())
        browser.close()
    return opened_s, moved_s


def _longest_s(trace: bytes) -> float:
    """Of a trace of Chromium's: CPU seconds of the longest task of a page's thread that is not the tracing's own."""
    events = json.loads(trace)["traceEvents"]
    mine = {(e["pid"], e["tid"]) for e in events
            if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"}  # fmt: skip
    rows = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in mine]
    tracing = [e["ts"] for e in rows if e["name"] == "V8.InvokeApiInterruptCallbacks" and e.get("tdur", 0) > 20_000]
    tasks = (e for e in rows if e["name"].endswith("RunTask"))
    own = (e for e in tasks if not any(e["ts"] <= at <= e["ts"] + e["dur"] for at in tracing))
    return max(e.get("tdur", 0) for e in own) / 1e6


def main() -> int:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300, help="requests an operation of the fuzz")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--skip-fuzz", action="store_true")
    parser.add_argument("--only-users", action="store_true", help="what-ifs of many users and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), anew=True)
        try:
            for name, data in (("2 workers", planned()), ("80 devices in 10 regions", wide())):
                each = control_cpu_s(*data)
                words = ", ".join(
                    f"{control} {s * 1e3:.1f}" for control, s in sorted(each.items(), key=lambda it: -it[1])
                )
                print(f"{name}: CPU of a what-if in ms, at the position that takes longest: {words}")
                plan = crowd(server, name, data, args.users)
            if args.only_users:
                return 0
            first_example(server)
            long_timeline(server, plan)
            many = ten_thousand(server)
            if shutil.which("chromium"):
                opened_s, moved_s = longest_tasks_s(server, many)
                print(f"10,240 devices: longest task of the page {opened_s * 1e3:.0f} CPU-ms while it opens, "
                      f"{moved_s * 1e3:.0f} while pointer and keys move")  # fmt: skip
                for view, wall_s, page_s in first_chart(server, plan):
                    print(f"first chart, {view}: {wall_s:.2f} s after navigation, {page_s:.2f} s of it computing")
            if not args.skip_fuzz:
                begin = time.perf_counter()
                statuses: collections.Counter[int] = fuzz(server, plan, args.examples)
                by_status = json.dumps(dict(sorted(statuses.items())))
                print(f"fuzz: {sum(statuses.values())} requests in {time.perf_counter() - begin:.0f} s, {by_status}")
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
