"""Anything at all over HTTP, to a real fleet: typed answers, never a 500, and nothing left behind."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, note, settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.fuzz.conftest import FACTOR, FuzzFleet
from tests.fuzz.hostile_http import RawRequest, check_answer, raw_requests

NUM_POSTED = 160
"""Generated requests for each operation with a body."""
NUM_OTHER = 50
NUM_HOSTILE = 500
TIMEOUT_S = 60.0
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
SCHEMA_CHECK = [openapi_checks.response_schema_conformance]
"""Not of streams, whose events `check_answer` checks."""

pytestmark = pytest.mark.timeout(300 * max(1, FACTOR))


def fuzz(num_examples: int) -> Callable[[Any], Any]:
    """The same examples in every run, as many as asked for."""
    return settings(
        max_examples=round(num_examples * FACTOR),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def http(fuzz_fleet: FuzzFleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fuzz_fleet.http_url, timeout=TIMEOUT_S) as client:
        yield client


def operations(http: httpx.Client) -> list[Any]:
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    return [result.ok() for result in schema.get_all_operations()]


def test_every_operation_keeps_to_the_schema(http: httpx.Client) -> None:
    num_requests = 0

    def run(operation: Any) -> None:
        @fuzz(NUM_POSTED if operation.method == "post" else NUM_OTHER)
        @given(case=operation.as_strategy())
        def one(case: Any) -> None:
            nonlocal num_requests
            num_requests += 1
            request = httpx.Request(**case.as_transport_kwargs(base_url=str(http.base_url)))
            response = http.send(request)
            check_answer(request.method, response)
            streamed = response.headers["content-type"].startswith("text/event-stream")
            case.validate_response(response, checks=CHECKS, excluded_checks=SCHEMA_CHECK if streamed else None)

        one()

    found = operations(http)
    for operation in found:
        run(operation)
    assert {operation.method for operation in found} == {"get", "post"}
    assert num_requests >= NUM_POSTED * FACTOR * sum(operation.method == "post" for operation in found)


def test_hostile_requests_get_typed_answers(http: httpx.Client) -> None:
    answers: Counter[str] = Counter()

    @fuzz(NUM_HOSTILE)
    @given(request=raw_requests())
    def one(request: RawRequest) -> None:
        note(str(request))
        response = request.send(http)
        check_answer(request.method, response)
        answers[f"{response.status_code} {response.headers['content-type'].partition(';')[0]}"] += 1

    one()
    assert answers.total() >= NUM_HOSTILE * FACTOR
    for kind in ("200 application/json", "200 text/event-stream", "400 application/json", "405 application/json"):
        assert answers[kind] >= 0.02 * NUM_HOSTILE * FACTOR, answers
