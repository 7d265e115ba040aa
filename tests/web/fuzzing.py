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
        For an answer of 500 or more, and for one whose status, type or body is not as the OpenAPI says, with the
        request as a curl command.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis
        from schemathesis.specs.openapi import checks
    as_said = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
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
            answer = case.call(base_url=server.url, timeout=PATIENCE_S)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, case.as_curl_command()
            case.validate_response(answer, checks=as_said)

        check()
    return statuses
