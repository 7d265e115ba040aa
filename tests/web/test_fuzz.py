"""Requests drawn from the application's own OpenAPI never make it fail."""

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed (pip install -e '.[bench]')")

from polygon.formats.convert_plan import plan_data
from tests.exported_plans import planned
from tests.nightly import cases
from tests.web.conftest import Server
from tests.web.fuzzing import fuzz


def test_no_request_of_the_schema_makes_the_server_fail(tmp_path):
    """Half a dozen requests of every operation: answers below 500, and the server goes on."""
    server = Server(tmp_path)  # of its own: it starts and stops jobs of plans
    try:
        plan = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
        statuses = fuzz(server, plan, cases(6))
        assert sum(statuses.values()) > 100
        assert {200, 404, 422} <= set(statuses)
        assert server.request("GET", "/api/v1/jobs")[0] == 200
    finally:
        server.stop()
