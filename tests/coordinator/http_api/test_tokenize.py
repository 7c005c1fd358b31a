import threading
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.http_api.conftest import Serve, app_of
from tests.coordinator.text.tool_calls import templates
from tests.coordinator.text_fakes import CONTEXT, EOS, build_generator, byte_tokenizer, scheduler_of, text_model

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


async def tokenized(client: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def test_a_prompt(serve: Serve) -> None:
    async with serve(build_generator(scheduler_of())) as client:
        answer = await tokenized(client, prompt="aé<eos>", model="tiny")
        texts = await tokenized(client, prompt="aé<eos>", return_token_strs=True)
    assert answer == {"count": 4, "max_model_len": CONTEXT, "tokens": [97, 0xC3, 0xA9, EOS]}
    assert texts["token_strs"] == ["a", "\ufffd", "\ufffd", "<eos>"]


async def test_messages_are_rendered_as_they_would_be_answered(serve: Serve) -> None:
    model = text_model(template=templates.HERMES, context_length=500)
    async with serve(build_generator(scheduler := scheduler_of([EOS]), model)) as client:
        for fields in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 1}}):
            answer = await tokenized(client, messages=USER, **fields)
            await client.post("/v1/chat/completions", json={"messages": USER, **fields})
            assert tuple(answer["tokens"]) == scheduler.streams[-1].request.token_ids


async def test_special_tokens_around_the_text_are_for_prompts_unless_asked_otherwise(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = text_model()
    asked: list[bool] = []
    monkeypatch.setattr(model.tokenizer, "encode", lambda _text, add_special=True: asked.append(add_special) or [1])
    async with serve(build_generator(scheduler_of(), model)) as client:
        for prompt in ({"prompt": "x"}, {"messages": USER}):
            for choice in (None, True, False):
                await tokenized(client, **prompt, add_special_tokens=choice)
    assert asked == [True, True, False, False, True, False]


async def test_a_prompt_may_be_longer_than_the_context(serve: Serve) -> None:
    async with serve(build_generator(scheduler_of())) as client:
        assert (await tokenized(client, prompt="a" * 1000))["count"] == 1000
        assert (await tokenized(client, prompt=""))["tokens"] == []


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=50, deadline=None)
async def test_text_comes_back_as_it_was(text: str) -> None:
    transport = httpx.ASGITransport(app_of(build_generator(scheduler_of())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        tokens = (await tokenized(client, prompt=f"{text}<eos>{text}"))["tokens"]
        answer = await client.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": f"{text}<eos>{text}"}


async def test_ids_without_text_and_parts_of_characters(serve: Serve) -> None:
    async with serve(build_generator(scheduler_of())) as client:
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        assert (await client.post("/detokenize", json={"tokens": [97, 0xC3]})).json() == {"prompt": "a"}
        assert (await client.post("/detokenize", json={"tokens": [0xC3, 97]})).json() == {"prompt": "\ufffda"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": USER, "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [EOS + 1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
async def test_impossible_bodies_are_refused_by_name(
    path: str, body: dict[str, object], param: str, serve: Serve
) -> None:
    async with serve(build_generator(scheduler_of())) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
async def test_models_and_keys_as_under_v1(path: str, body: dict[str, object], serve: Serve) -> None:
    async with serve(build_generator(scheduler_of(), api_keys={"k": "acme"})) as client:
        assert (await client.post(path, json=body)).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert (await client.post(path, json=body, headers=key)).status_code == 200
        assert (await client.post(path, json={**body, "model": "gpt"}, headers=key)).status_code == 404


async def test_long_texts_are_no_work_for_the_event_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    threads: set[str] = set()
    encode, token_bytes = tokenizer.encode, tokenizer.token_bytes

    def spy(work: Any) -> Any:
        return lambda *given, **named: threads.add(threading.current_thread().name) or work(*given, **named)

    monkeypatch.setattr(tokenizer, "encode", spy(encode))
    async with serve(build_generator(scheduler_of(), text_model(tokenizer))) as client:
        tokens = (await tokenized(client, prompt="a" * 100_000))["tokens"]
        assert [name.startswith("tokenizer") for name in threads] == [True]
        threads.clear()
        monkeypatch.setattr(tokenizer, "token_bytes", spy(token_bytes))
        answer = await client.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": "a" * 100_000}
    assert [name.startswith("tokenizer") for name in threads] == [True]
