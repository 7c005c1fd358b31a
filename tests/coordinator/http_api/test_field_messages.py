"""What a refused field's message says, and the field that decides what goes around a prompt's text."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.generation.served_model import ServedModels
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text_fakes import build_generator, echo_scheduler, text_model

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": "yes"}, "stream must be true or false"),
        ({"model": 3}, "model must be text"),
        ({"stream_options": True}, "stream_options must be an object"),
        ({"top_k": 2**31}, f"top_k must be at most {2**31 - 1}; it is {2**31}"),
        ({"seed": 2**64}, f"seed must be at most {2**64 - 1}; it is {2**64}"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; to score a prompt, ask for 1 with echo and logprobs"),
        ({"max_tokens": -1}, "max_tokens must be at least 1; it is -1"),
    ],
)
async def test_a_message_says_what_would_be_right(serve: Serve, changes: dict[str, Any], message: str) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", **changes})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


async def test_a_missing_field_is_called_missing(serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
            error = (await client.post(path, json={})).json()["error"]
            assert (error["message"], error["param"]) == (f"{field} is missing", field)


async def test_what_goes_around_a_text_is_as_tokenize_does_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model()
    asked: list[bool] = []
    monkeypatch.setattr(model.tokenizer, "encode", lambda _text, add_special=True: asked.append(add_special) or [1])
    async with serve(build_generator(echo_scheduler(b"x"), model)) as client:
        for path, body in PATHS.items():
            for choice in (None, True, False):
                assert (await client.post(path, json={**body, "add_special_tokens": choice})).status_code == 200
        await client.post("/v1/completions", json={"prompt": ["a", "b"], "add_special_tokens": False})
    assert asked == [True, True, False, False, True, False, False, False]


async def test_several_models_and_none_named(serve: Serve) -> None:
    one = text_model()
    other = replace(one, info=replace(one.info, name="other"))
    generator = build_generator(scheduler := echo_scheduler(b"x"), one)
    generator.models = ServedModels([one, other])
    async with serve(generator) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert (await client.post("/v1/completions", json={"prompt": "a", "model": "other"})).status_code == 200
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert answer.json()["error"]["message"].endswith(f"other, {one.info.name}")
    assert [stream.request.model for stream in scheduler.streams] == ["other"]
