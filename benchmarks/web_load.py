"""How the web application stands up: parallel users asking what-if, the page's first chart, fuzzed requests.

    python benchmarks/web_load.py [--users 100] [--examples 300] [--skip-fuzz]

Prints wall and CPU seconds: what-ifs that differ and what-ifs that are equal (kept answers), with median and 95th
percentile; the page from navigation to its first chart, where Chromium is installed; and for the fuzz, requests sent
and answers by status. Any error or 5xx fails.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.convert_plan import plan_data
from tests.exported_plans import planned, wide
from tests.web.conftest import Server
from tests.web.fuzzing import fuzz


def cpu_s(server: Server) -> float:
    """CPU seconds that the server has used (Linux)."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def users(server: Server, plan: str, count: int, *, alike: bool) -> list[float]:
    """Seconds of every what-if of as many users at once, three each."""

    def one(user: int) -> list[float]:
        seconds = []
        for step in range(3):
            changes = {"bandwidth_factor": 1 + (0 if alike else user / 100) + step + alike / 7}
            begin = time.perf_counter()
            status, _, _ = server.request("POST", f"/api/plans/{plan}/view", changes)
            assert status == 200
            seconds.append(time.perf_counter() - begin)
        return seconds

    with ThreadPoolExecutor(count) as pool:
        return [s for row in pool.map(one, range(count)) for s in row]


def first_chart(server: Server, plan: str, tries: int = 5) -> list[tuple[str, float, float]]:
    """For the form and the map: median seconds to the first chart, and of them seconds in which the page computes."""
    from playwright.sync_api import sync_playwright

    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    rows = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, address in (("configure", "/"), ("map", f"/#plan={plan}&view=map")):
            walls, cpus = [], []
            for _ in range(tries):
                page = browser.new_context().new_page()
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


def main() -> int:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300, help="requests an operation of the fuzz")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--skip-fuzz", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            for name, data in (("2 workers", planned()), ("80 devices in 10 regions", wide())):
                plan = server.request("POST", "/api/plans", plan_data(*data))[2]["id"]
                for alike in (False, True):
                    before_s = cpu_s(server)
                    waits = sorted(users(server, plan, args.users, alike=alike))
                    each_ms = (cpu_s(server) - before_s) / len(waits) * 1e3
                    print(f"{name}: {args.users} users, {len(waits)} {'equal' if alike else 'different'} what-ifs, no "
                          f"error: median {statistics.median(waits):.2f} s, p95 {waits[int(0.95 * len(waits))]:.2f} s, "
                          f"CPU of the server {each_ms:.1f} ms each")  # fmt: skip
            if shutil.which("chromium"):
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
