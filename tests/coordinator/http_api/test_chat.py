"""Tool calls and logprobs of /v1/chat/completions, whole and streamed."""

import json
from typing import Any

import httpx
import pytest

from coordinator.http_api.chat_answers import ChatAnswer, ChatChunk
from pdserve.core.sampling import FinishReason
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text.tool_calls import templates
from tests.coordinator.text_fakes import (
    EOS,
    Script,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    scheduler_of,
    text_model,
)

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "add")]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
OTHER = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
SMILE = "😊".encode()


def model_with_tools(context_length: int = 1000) -> Any:
    return text_model(template=templates.HERMES, context_length=context_length)


def says(text: str, *, ends: bool = True) -> ScriptedScheduler:
    """A model that emits `text` a byte at a time; unless it `ends`, it goes on until its limit."""
    return scheduler_of(*[[byte] for byte in text.encode()], *([[EOS]] if ends else []), end=FinishReason.LENGTH)


async def whole(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    answer = (await client.post(PATH, json={"messages": USER, **fields})).json()
    ChatAnswer.model_validate(answer, extra="forbid")
    return answer["choices"][0]  # type: ignore[no-any-return]


async def streamed(client: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    """The choices of all chunks of a one-choice answer."""
    response = await client.post(PATH, json={"messages": USER, **fields, "stream": True})
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        ChatChunk.model_validate(chunk, extra="forbid")
    return [chunk["choices"][0] for chunk in chunks]


def message_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client puts together; `content` null where nothing came."""
    text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": calls} if calls else {**message, "content": text}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", [])
    assert all(call.pop("id").startswith("call_") for call in calls)
    return message


def called(name: str, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [called("weather", city="Zürich")]),
        (f"One moment. \n{CALL}\n{OTHER}\n", "One moment.", [called("weather", city="Zürich"), called("add")]),
        ("No need.", "No need.", []),
        (CALL.replace("weather", "erase"), CALL.replace("weather", "erase"), []),
    ],
)
async def test_calls_whole_and_streamed(text: str, content: str | None, calls: list[object], serve: Serve) -> None:
    async with serve(build_generator(says(text), model_with_tools())) as client:
        choice = await whole(client, tools=TOOLS)
        chunks = await streamed(client, tools=TOOLS)
    message = without_ids(choice["message"])
    assert message == {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    assert without_ids(message_of(chunks)) == message
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_an_answer_that_was_cut_is_length(serve: Serve) -> None:
    generator = build_generator(says(f"{CALL}{CALL[:20]}", ends=False), model_with_tools())
    async with serve(generator) as client:
        choice = await whole(client, tools=TOOLS)
        chunks = await streamed(client, tools=TOOLS)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:20]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_without_parallel_calls_only_the_first_comes(serve: Serve) -> None:
    async with serve(build_generator(says(CALL + OTHER), model_with_tools())) as client:
        choice = await whole(client, tools=TOOLS, parallel_tool_calls=False)
        chunks = await streamed(client, tools=TOOLS, parallel_tool_calls=False)
    assert without_ids(choice["message"])["tool_calls"] == [called("weather", city="Zürich")]
    assert without_ids(message_of(chunks))["tool_calls"] == [called("weather", city="Zürich")]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_nothing_is_read_as_a_call_unless_offered(fields: dict[str, object], serve: Serve) -> None:
    async with serve(build_generator(scheduler := says(CALL), model_with_tools())) as client:
        choice = await whole(client, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert b"weather" not in bytes(scheduler.streams[0].request.token_ids)


async def test_each_choice_has_its_own_calls(serve: Serve) -> None:
    texts = [CALL, "words", OTHER]
    scheduler = ScriptedScheduler(lambda r: Script([list(texts[r.sampling.choice].encode()), [EOS]]))
    async with serve(build_generator(scheduler, model_with_tools())) as client:
        answer = (await client.post(PATH, json={"messages": USER, "tools": TOOLS, "n": 3})).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "tool_calls"]


async def test_special_tokens_of_the_notation_are_seen(serve: Serve) -> None:
    """Elsewhere special tokens have no text; [TOOL_CALLS] is one in Mistral's vocabulary."""
    tokenizer = byte_tokenizer(special=["[TOOL_CALLS]"])
    marker = tokenizer.special_token_id("[TOOL_CALLS]")
    assert marker is not None
    model = text_model(tokenizer, context_length=1000, template=templates.MISTRAL)
    scheduler = scheduler_of([marker], list(b'[{"name": "weather", "arguments": {}}]'), [EOS])
    async with serve(build_generator(scheduler, model)) as client:
        choice = await whole(client, tools=TOOLS)
        plain = await whole(client)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert plain["message"]["content"] == '[{"name": "weather", "arguments": {}}]'


async def test_a_history_of_calls_is_rendered(serve: Serve) -> None:
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **called("weather", city="Bern")}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    async with serve(build_generator(scheduler := says("x"), model_with_tools())) as client:
        assert (await client.post(PATH, json={"messages": history})).status_code == 200
        broken = json.loads(json.dumps(history).replace('{\\"city\\": \\"Bern\\"}', "[]"))
        refused = await client.post(PATH, json={"messages": broken})
    prompt = bytes(scheduler.streams[0].request.token_ids).decode()
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>' in prompt
    assert "None" not in prompt
    assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_logprobs_whole_and_streamed(top: int | None, serve: Serve) -> None:
    tokenizer = byte_tokenizer([b"Hello", SMILE[:2], SMILE[2:]])
    scheduler = scheduler_of([257, 258], [259], [EOS])
    async with serve(build_generator(scheduler, text_model(tokenizer))) as client:
        choice = await whole(client, logprobs=True, top_logprobs=top)
        chunks = await streamed(client, logprobs=True, top_logprobs=top)
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in entries] == ["Hello", "\ufffd", "\ufffd\ufffd", "<eos>"]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"Hello", SMILE[:2], SMILE[2:], b"<eos>"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [top or 0] * 4
    assert all(set(found) == {"token", "logprob", "bytes"} for entry in entries for found in entry["top_logprobs"])
    assert [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]] == entries


async def test_a_chunk_whose_text_is_held_back_still_has_its_logprobs(serve: Serve) -> None:
    async with serve(build_generator(scheduler_of(b"a", b"b", b"c", [EOS]))) as client:
        chunks = await streamed(client, logprobs=True, stop=["bcd"])
    shown = [
        (chunk["delta"].get("content"), [entry["token"] for entry in chunk["logprobs"]["content"]])
        for chunk in chunks
        if chunk["logprobs"]
    ]
    assert shown == [("a", ["a"]), ("", ["b"]), ("", ["c"]), ("", ["<eos>"])]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "abc"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
async def test_impossible_logprobs_are_refused_by_name(fields: dict[str, object], param: str, serve: Serve) -> None:
    async with serve(build_generator(says("x"))) as client:
        answer = await client.post(PATH, json={"messages": USER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_nobody_gets_logprobs_without_asking(serve: Serve) -> None:
    async with serve(build_generator(says("x"))) as client:
        choice = await whole(client, top_logprobs=0)
        chunks = await streamed(client)
    assert choice["logprobs"] is None
    assert {chunk["logprobs"] for chunk in chunks} == {None}
