"""Requests drawn from the application's own OpenAPI never make it fail."""

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed (pip install -e '.[bench]')")

from tests.web.fuzzing import fuzz


def test_no_request_of_the_schema_makes_the_server_fail(server, plan_id):
    """A dozen requests of every operation: answers below 500, and the server goes on."""
    statuses = fuzz(server, plan_id, 12)
    assert sum(statuses.values()) > 200
    assert {200, 404, 422} <= set(statuses)
    assert server.request("GET", "/api/jobs")[0] == 200
