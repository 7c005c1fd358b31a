from pathlib import Path
from typing import Any

import pytest

from coordinator.http_api.unsupported import CHAT_FIELDS, COMPLETION_FIELDS
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text_fakes import build_generator, echo_scheduler

BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
TABLES = {"/v1/completions": COMPLETION_FIELDS, "/v1/chat/completions": CHAT_FIELDS}
ASKING: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "best_of": 2,
    "skip_special_tokens": False,
    "modalities": ["text", "audio"],
    "tool_choice": "required",
    "prompt_logprobs": 0,
}
IGNORED = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "verbosity",
    "safety_identifier",
    "whatever",
]


@pytest.mark.parametrize("path", BODIES)
async def test_every_known_field_is_refused_by_name_and_with_an_alternative(path: str, serve: Serve) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        for name, refusal in TABLES[path].items():
            answer = await client.post(path, json={**BODIES[path], name: ASKING.get(name, ["x"])})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", name), name
            assert error["message"] == f"{name} is not supported: {refusal.instead}"
            assert refusal.instead
    assert scheduler.streams == []


@pytest.mark.parametrize("path", BODIES)
async def test_known_fields_that_ask_for_nothing_are_fine(path: str, serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        for name, refusal in TABLES[path].items():
            for neutral in (None, *refusal.neutral):
                answer = await client.post(path, json={**BODIES[path], name: neutral})
                assert answer.status_code == 200, (name, neutral)


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_ignored(path: str, serve: Serve) -> None:
    unknown = {name: {"any": ["thing"]} for name in IGNORED}
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        assert (await client.post(path, json={**BODIES[path], **unknown})).status_code == 200


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "grammar"])
async def test_only_text_can_be_the_response_format(kind: str, serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        for path, body in BODIES.items():
            answer = await client.post(path, json={**body, "response_format": {"type": kind}})
            assert answer.json()["error"]["param"] == "response_format"


def test_the_documentation_names_every_refused_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    names = {"guided_*" if name.startswith("guided_") else name for name in (*COMPLETION_FIELDS, *CHAT_FIELDS)}
    assert [name for name in names if f"`{name}" not in page] == []
