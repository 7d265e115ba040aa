"""How the web application stands up: fuzzed requests from its OpenAPI, and parallel users asking what-if.

    python benchmarks/web_load.py [--examples 100] [--users 100]

Prints, for the fuzz, requests sent and answers by status (any 5xx fails); for the users, median and 95th percentile.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.convert_plan import plan_data
from tests.exported_plans import planned
from tests.web.conftest import Server


def fuzz(server: Server, plan: str, examples: int) -> collections.Counter[int]:
    """Answers by status to requests drawn from the schema of every operation, half of them on a plan that exists."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    statuses: collections.Counter[int] = collections.Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/api/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.endswith("/events"):
            continue

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def check(case) -> None:
            if "job" in (case.path_parameters or {}) and sum(statuses.values()) % 2:
                case.path_parameters["job"] = plan
            status = case.call(base_url=server.url, timeout=60).status_code
            statuses[status] += 1
            assert status < 500, case.as_curl_command()

        check()
    return statuses


def users(server: Server, plan: str, count: int) -> list[float]:
    """Seconds of every what-if of as many users at once, three each."""

    def one(user: int) -> list[float]:
        seconds = []
        for step in range(3):
            begin = time.perf_counter()
            status, _, _ = server.request(
                "POST", f"/api/plans/{plan}/view", {"bandwidth_factor": 1 + user / 100 + step}
            )
            assert status == 200
            seconds.append(time.perf_counter() - begin)
        return seconds

    with ThreadPoolExecutor(count) as pool:
        return [s for row in pool.map(one, range(count)) for s in row]


def main() -> int:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="requests an operation")
    parser.add_argument("--users", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            plan = server.request("POST", "/api/plans", plan_data(*planned()))[2]["id"]
            waits = sorted(users(server, plan, args.users))
            print(f"{args.users} users, {len(waits)} what-ifs, no error: median {statistics.median(waits):.2f} s, "
                  f"p95 {waits[int(0.95 * len(waits))]:.2f} s")  # fmt: skip
            begin = time.perf_counter()
            statuses = fuzz(server, plan, args.examples)
            total = sum(statuses.values())
            by_status = json.dumps(dict(sorted(statuses.items())))
            print(f"fuzz: {total} requests in {time.perf_counter() - begin:.0f} s, {by_status}")
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
