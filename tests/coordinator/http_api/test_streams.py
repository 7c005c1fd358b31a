"""A stream put together is the whole answer, whatever is mixed: tools, stop strings, logprobs, echo, choices, UTF-8."""

import json
import re
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.generation.generator import Generator
from tests.coordinator.http_api.conftest import app_of
from tests.coordinator.text.tool_calls import templates
from tests.coordinator.text_fakes import (
    EOS,
    Script,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    text_model,
)

SMILE = "😊".encode()
TOKENS = (
    b'<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    b'"logprobs":{"content":[],"choices":[]',
    b"<tool_call>",
    b"</tool_call>",
    b'{"name": "add", "arguments": {}}',
    b'{"name": "add", "arguments": {"a": "',
    b'"}}',
    b"<tool",
    b"_call>",
    b"\n\n",
    b"ab",
    b"}}ST",
    b"OP",
    SMILE[:2],
    SMILE[2:],
)
IDS = st.one_of(st.integers(257, 256 + len(TOKENS)), st.sampled_from([97, 32, 0xE2, 0xF0, 0xFF, EOS]))
STEPS = st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=10)
STOP = st.sampled_from([[], ["STOP"], ["<tool_call>"], ["}}"], ["\n"], ["😊", "arg"], ["l></tool", "b"]])
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def generator_of(choices: list[list[list[int]]]) -> Generator:
    """Each choice emits its own of `choices`."""
    scheduler = ScriptedScheduler(lambda request: Script(choices[request.sampling.choice]))
    model = text_model(byte_tokenizer(TOKENS), context_length=1000, template=templates.HERMES)
    return build_generator(scheduler, model)


async def whole_and_streamed(path: str, choices: list[list[list[int]]], **fields: object) -> tuple[Any, Any]:
    """The whole answer, and what a client puts together of a stream; both without ids."""
    transport = httpx.ASGITransport(app_of(generator_of(choices)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        body = {"n": len(choices), **fields}
        whole = await client.post(path, json=body)
        stream = await client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert whole.status_code == 200, whole.text
    *events, done = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    assert done == "[DONE]"
    *chunks, last = [json.loads(event) for event in events]
    answer = json.loads(re.sub(r"call_\w{24}", "", whole.text))
    assert last["choices"] == []
    return {"choices": answer["choices"], "usage": answer["usage"]}, {
        "choices": put_together(chunks, len(choices)),
        "usage": last["usage"],
    }


def put_together(chunks: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    of_choice: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        of_choice[choice["index"]].append(choice)
    return [joined(index, pieces) for index, pieces in enumerate(of_choice)]


def joined(index: int, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    logprobs: dict[str, Any] = {}
    for piece in pieces:
        for key, entries in (piece["logprobs"] or {}).items():
            logprobs[key] = None if entries is None else [*logprobs.get(key, ()), *entries]
    what = message_of(pieces) if "delta" in pieces[0] else {"text": "".join(piece["text"] for piece in pieces)}
    return {"index": index, **what, "logprobs": logprobs or None, "finish_reason": pieces[-1]["finish_reason"]}


def message_of(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    text = "".join(piece["delta"].get("content") or "" for piece in pieces)
    calls = [call for piece in pieces for call in piece["delta"].get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    for call in calls:
        call["id"] = ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
    return {"message": {**message, "tool_calls": calls} if calls else message}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=st.lists(STEPS, min_size=1, max_size=3),
    stop=STOP,
    top=st.sampled_from([None, 0, 2]),
    tools=st.booleans(),
    parallel=st.booleans(),
)
async def test_chats(
    choices: list[list[list[int]]], stop: list[str], top: int | None, tools: bool, parallel: bool
) -> None:
    fields: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "stop": stop}
    if top is not None:
        fields |= {"logprobs": True, "top_logprobs": top}
    if tools:
        fields |= {"tools": TOOLS, "parallel_tool_calls": parallel}
    whole, streamed = await whole_and_streamed(CHAT, choices, **fields)
    assert streamed == whole
    for choice in whole["choices"]:
        assert not any(text in (choice["message"]["content"] or "") for text in stop if not tools)
    if top is not None:
        counts = [len(choice["logprobs"]["content"]) for choice in whole["choices"]]
        assert sum(counts) == whole["usage"]["completion_tokens"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=st.lists(STEPS, min_size=1, max_size=3),
    prompt=st.lists(IDS, min_size=1, max_size=5),
    stop=STOP,
    top=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
)
async def test_completions(
    choices: list[list[list[int]]], prompt: list[int], stop: list[str], top: int | None, echo: bool
) -> None:
    whole, streamed = await whole_and_streamed(COMPLETIONS, choices, prompt=prompt, stop=stop, logprobs=top, echo=echo)
    assert streamed == whole
    if top is None:
        return
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        assert "".join(logprobs["tokens"]) == choice["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_logprobs_of_a_whole_answer_are_worked_in_as_they_come(path: str) -> None:
    """All at the end, those of a long answer would stop the event loop for seconds."""
    generator = generator_of([[[97], [98], [99], [EOS]]])
    (model,) = generator.models
    scheduler, token_text = cast("ScriptedScheduler", generator._scheduler), model.tokenizer.token_text
    num_emitted: set[int] = set()

    def spy(token_id: int) -> str:
        num_emitted.add(scheduler.streams[0].num_emitted)
        return token_text(token_id)

    model.tokenizer.token_text = spy  # type: ignore[method-assign]
    transport = httpx.ASGITransport(app_of(generator))
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    body = chat if path == CHAT else {"prompt": "a", "logprobs": 2}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert num_emitted == {0, 1, 2, 3}
