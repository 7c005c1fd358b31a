"""C04 and C08: chats that agent clients send, and prompts of megabytes."""

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from coordinator.generation.generator import Generator
from coordinator.http_api import serve_http
from tests.coordinator.http_api.conftest import app_of
from tests.coordinator.text.tool_calls import templates
from tests.coordinator.text_fakes import (
    EOS,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    scheduler_of,
    text_model,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
ALTERNATING = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


class Chat:
    """A client of an app with a template, and the prompts that reached the model."""

    def __init__(self, template: str | None) -> None:
        self._scheduler: ScriptedScheduler = scheduler_of([ord("x")], [EOS])
        app = app_of(build_generator(self._scheduler, text_model(template=template, context_length=2000)))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20)

    async def prompt(self, *messages: object) -> str:
        response = await self.client.post(CHAT, json={"messages": messages})
        assert response.status_code == 200, response.text
        return bytes(self._scheduler.streams[-1].request.token_ids).decode()

    async def refusal(self, *messages: object) -> dict[str, Any]:
        response = await self.client.post(CHAT, json={"messages": messages})
        assert response.status_code == 400
        return response.json()["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("template", [templates.HERMES, templates.MISTRAL, templates.LLAMA3_JSON])
async def test_null_content_is_empty_content_in_every_style_of_template(template: str) -> None:
    """C04: agents send it beside tool calls, and servers wrote the word None into the prompt."""
    chat = Chat(template)
    for calls in ({"tool_calls": [CALL]}, {}):
        turns = [
            (user("hi"), {"role": "assistant", **content, **calls}, user("go on"))
            for content in ({"content": None}, {"content": ""}, {}, {"content": []})
        ]
        prompts = {await chat.prompt(*turn) for turn in turns}
        assert len(prompts) == 1
        assert "None" not in prompts.pop()


async def test_text_parts_are_the_text_they_make_and_other_parts_are_refused() -> None:
    """C04."""
    chat = Chat(templates.HERMES)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert await chat.prompt(user(parts)) == await chat.prompt(user("ab"))
    for part in (parts, {"type": "image_url", "image_url": {"url": "x"}}, "a", None, {"type": "text", "text": parts}):
        assert (await chat.refusal(user([parts[0], part])))["param"] == "messages[0].content[1]"


async def test_a_templates_own_refusal_is_the_clients_error() -> None:
    """C04: two user turns in a row are no server error."""
    chat = Chat(ALTERNATING)
    assert await chat.prompt(user("a"), {"role": "assistant", "content": "b"}, user("c"))
    error = await chat.refusal(user("a"), user("b"))
    assert "Conversation roles must alternate user/assistant" in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_unknown_roles_and_models_without_a_template() -> None:
    """C04."""
    assert (await Chat(ALTERNATING).refusal({"role": "wizard", "content": "x"}))["param"] == "messages[0].role"
    chat = Chat(None)
    assert "no chat template" in (await chat.refusal(user("x")))["message"]
    assert (await chat.client.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200


async def test_a_body_over_the_limit_is_refused_without_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    """C08."""
    tokenizer = byte_tokenizer()
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    app = app_of(build_generator(scheduler_of(), text_model(tokenizer, context_length=2**30)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20) as client:
        for path, body in ((COMPLETIONS, {"prompt": "a" * 2**22}), (CHAT, {"messages": [user("a" * 2**22)]})):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert encoded == []


class GatedEncoding:
    """Holds whoever encodes a long text until told otherwise; what comes out is short."""

    def __init__(self, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = next(iter(generator.models)).tokenizer
        self._encode = tokenizer.encode
        self.began, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(tokenizer, "encode", self._gated)

    def _gated(self, text: str, add_special: bool = True) -> list[int]:
        if len(text) < 1_000_000:
            return self._encode(text, add_special)
        self.began.set()
        assert self.may_end.wait(20)
        return [1]


async def test_others_go_on_while_megabytes_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """C08: health, a running stream and a short chat, all while the tokenizer's thread is busy with 5 MB."""
    generator = build_generator(
        scheduler_of(*[[ord("x")]] * 50), text_model(context_length=2**22), max_body_bytes=2**24
    )
    gate = GatedEncoding(generator, monkeypatch)
    server = await serve_http(app_of(generator), "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
        async with client.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            long = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "ab " * 1_700_000}))
            assert await asyncio.to_thread(gate.began.wait, 20)
            assert (await client.get("/health")).status_code == 200
            assert [line async for line in lines][-2] == "data: [DONE]"
            assert (await client.post(CHAT, json={"messages": [user("hi")]})).status_code == 200
        assert not long.done()
        gate.may_end.set()
        assert (await long).status_code == 200
    await server.stop(grace_s=1)


def test_encoding_lets_other_threads_run() -> None:
    """C08: off the event loop is not enough while the interpreter's lock is held."""
    tokenizer = byte_tokenizer()
    num_turns = 0
    thread = threading.Thread(target=tokenizer.encode, args=("ab " * 200_000,))
    thread.start()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0)
    assert num_turns > 100
