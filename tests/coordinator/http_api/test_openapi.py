"""The OpenAPI document against what the routes really answer."""

from typing import Any

import httpx
import jsonschema_rs
import pytest

from coordinator.http_api import openapi
from pdserve.core.errors import ErrorReason, PdserveError
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text.tool_calls import templates
from tests.coordinator.text_fakes import (
    Script,
    ScriptedScheduler,
    build_generator,
    echo_scheduler,
    text_model,
)

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
GOOD: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("POST", "/v1/completions"): [
        {"prompt": "a"},
        {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "stop": "y"},
        {"prompt": [1, 2], "logit_bias": {"3": 1.5}, "seed": 2**64 - 1, "top_k": -1, "stream_options": None},
    ],
    ("POST", "/v1/chat/completions"): [
        {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 3},
        {"messages": [*USER, {"role": "assistant", "content": None}], "tools": TOOLS, "tool_choice": "auto"},
    ],
    ("POST", "/tokenize"): [{"prompt": "a", "return_token_strs": True}, {"messages": USER, "tools": TOOLS}],
    ("POST", "/detokenize"): [{"tokens": [1, 2]}],
    ("GET", "/v1/models"): [{}],
    ("GET", "/v1/models/{name}"): [{}],
    ("GET", "/health"): [{}],
    ("GET", "/livez"): [{}],
}


def model() -> Any:
    return text_model(template=templates.HERMES, context_length=500)


async def document_of(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/openapi.json")).json()  # type: ignore[no-any-return]


def check(document: dict[str, Any], schema: dict[str, Any], instance: object) -> None:
    jsonschema_rs.validate({**schema, "components": document["components"]}, instance)


def schema_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["content"]["application/json"]["schema"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("method", "path"), GOOD)
async def test_good_bodies_and_their_answers_are_as_described(method: str, path: str, serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"), model())) as client:
        document = await document_of(client)
        operation = document["paths"][path][method.lower()]
        for body in GOOD[method, path]:
            json = body or None
            if json:
                check(document, schema_of(operation["requestBody"]), json)
            answer = await client.request(method, path.format(name="tiny"), json=json)
            assert answer.status_code == 200, answer.text
            check(document, schema_of(operation["responses"]["200"]), answer.json())


async def test_every_operation_describes_its_errors(serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"), model())) as client:
        document = await document_of(client)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            described = set(operation["responses"])
            assert "422" not in described
            assert {str(status) for status in openapi.EVERYWHERE} <= described, path
    generation = document["paths"]["/v1/completions"]["post"]["responses"]
    statuses = {PdserveError(reason, "").codes.http_status for reason in ErrorReason}
    assert {str(status) for status in statuses} <= set(generation)


@pytest.mark.parametrize("reason", list(ErrorReason))
async def test_every_failure_is_as_described(reason: ErrorReason, serve: Serve) -> None:
    refuse = PdserveError(reason, "failed", retry_after_s=1.0)
    async with serve(build_generator(ScriptedScheduler(lambda _: Script([]), refuse=refuse), model())) as client:
        document = await document_of(client)
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        described = document["paths"]["/v1/completions"]["post"]["responses"][str(answer.status_code)]
    check(document, schema_of(described), answer.json())


async def test_an_unready_server_answers_as_described(serve: Serve) -> None:
    scheduler = echo_scheduler(b"x")
    scheduler.ready = False
    async with serve(build_generator(scheduler)) as client:
        document = await document_of(client)
        answer = await client.get("/health")
    assert answer.status_code == 503
    check(document, schema_of(document["paths"]["/health"]["get"]["responses"]["503"]), answer.json())


async def test_streams_are_described(serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        document = await document_of(client)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


async def test_ranges_are_those_of_the_validator(serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        document = await document_of(client)
        fields = document["components"]["schemas"]["ChatBody"]["properties"]
        for name, field in fields.items():
            for kind in field.get("anyOf", []):
                for bound, step in (("minimum", -1), ("maximum", 1)):
                    if kind.get(bound) is None or abs(kind[bound]) > 2**53:
                        continue
                    beyond = {"messages": USER, "logprobs": True, name: kind[bound] + step}
                    answer = await client.post("/v1/chat/completions", json=beyond)
                    assert answer.status_code == 400, (name, bound)
                    assert answer.json()["error"]["param"] == name
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 100.0}
