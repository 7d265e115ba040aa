"""Requests drawn from the OpenAPI of a running server by schemathesis, for a test and for the benchmark."""

from __future__ import annotations

import collections
import warnings

from tests.patience import PATIENCE_S
from tests.web.conftest import Server


def fuzz(server: Server, plan: str, examples: int) -> collections.Counter[int]:
    """Answers by status to so many requests of every operation, half of them on a plan that exists.

    Raises
    ------
    AssertionError
        For an answer of 500 or more, with the request as a curl command.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis
    from hypothesis import HealthCheck, Phase, given, seed, settings

    statuses: collections.Counter[int] = collections.Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/api/v1/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.endswith("/events"):
            continue

        @seed(examples)
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
            status = case.call(base_url=server.url, timeout=PATIENCE_S).status_code
            statuses[status] += 1
            assert status < 500, case.as_curl_command()

        check()
    return statuses
