"""What the openai client does besides asking for answers, each with the synchronous and the asynchronous client."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.alphabet_model import ALPHABET, CONTEXT_LENGTH, TOOL_NAME, token_id
from tests.clients.chat_features import HELLO, TOOLS
from tests.clients.completion_features import MODEL
from tests.clients.outcomes import check_types
from tests.clients.sides import Side
from tests.support.fleet import Fleet

LONG = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
"""Takes seconds."""
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 5, "temperature": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0}
MISSING_ENDPOINTS: dict[str, dict[str, Any]] = {
    "embeddings.create": {"model": MODEL, "input": "a"},
    "responses.create": {"model": MODEL, "input": "a"},
    "images.generate": {"model": MODEL, "prompt": "a"},
    "moderations.create": {"input": "a"},
    "audio.speech.create": {"model": MODEL, "input": "a", "voice": "alloy"},
    "files.list": {},
    "batches.list": {},
    "fine_tuning.jobs.list": {},
}


@dataclass(frozen=True)
class Context:
    """`connect` makes another client of the same kind, with other arguments; it is closed at the end."""

    side: Side
    fleet: Fleet
    connect: Callable[..., Side]


Behaviour = Callable[[Context], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(name: str) -> Callable[[Behaviour], Behaviour]:
    def register(function: Behaviour) -> Behaviour:
        BEHAVIOURS[name] = function
        return function

    return register


@behaviour("`models.list`, `models.retrieve`")
async def _models(context: Context) -> None:
    (listed,) = await context.side.items(await context.side.call("models.list"))
    retrieved = await context.side.call("models.retrieve", model=MODEL)
    check_types(listed)
    assert listed == retrieved
    assert (listed.id, listed.object, listed.context_length, listed.ready) == (MODEL, "model", CONTEXT_LENGTH, True)


@behaviour("a stream without `include_usage`: no usage, one finish for each choice")
async def _stream_without_usage(context: Context) -> None:
    stream = await context.side.call("completions.create", **SHORT, n=2, stream=True)
    chunks = await context.side.items(stream)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1]


@behaviour("a stream with `continuous_usage_stats`: the usage so far in every chunk")
async def _stream_with_usage(context: Context) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for method, arguments in (("completions.create", SHORT), ("chat.completions.create", {**CHAT, "max_tokens": 5})):
        stream = await context.side.call(method, **arguments, stream=True, stream_options=options)
        *chunks, last = await context.side.items(stream)
        for chunk in (*chunks, last):
            check_types(chunk)
            assert chunk.usage.prompt_tokens == last.usage.prompt_tokens
            assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        letters, shown = 0, []
        for chunk in chunks:  # each letter is a token
            (choice,) = chunk.choices
            letters += len((choice.delta.content or "") if method.startswith("chat") else choice.text)
            shown.append(letters)
        assert [chunk.usage.completion_tokens for chunk in chunks] == shown
        assert (chunks[-1].usage, last.choices, letters) == (last.usage, [], 5)


@behaviour("`chat.completions.stream`: events and the final completion")
async def _stream_helper(context: Context) -> None:
    async with context.side.entered("chat.completions.stream", **CHAT) as stream:
        events = await context.side.items(stream)
        final = await context.side.read(stream.get_final_completion)
    assert "".join(event.delta for event in events if event.type == "content.delta") == ALPHABET
    (choice,) = final.choices
    assert (choice.message.content, choice.finish_reason) == (ALPHABET, "stop")


@behaviour("`chat.completions.stream`: a tool call's arguments")
async def _stream_helper_tools(context: Context) -> None:
    async with context.side.entered("chat.completions.stream", **CHAT, tools=TOOLS) as stream:
        events = await context.side.items(stream)
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.index) == (TOOL_NAME, 0)
    assert pydantic.TypeAdapter(dict[str, str]).validate_json(done.arguments) == {"city": "Paris"}


@behaviour("`chat.completions.parse` into a class: refused as `response_format`")
async def _parse(context: Context) -> None:
    class Answer(pydantic.BaseModel):
        city: str

    with pytest.raises(openai.BadRequestError) as caught:
        await context.side.call("chat.completions.parse", **CHAT, response_format=Answer)
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported")


@behaviour("`post` to `/tokenize` and `/detokenize`")
async def _tokenize(context: Context) -> None:
    async def post(path: str, body: object) -> Any:
        return await context.side.call("post", path=f"{context.fleet.http_url}{path}", cast_to=object, body=body)

    ids = [token_id(letter) for letter in "abc"]
    found = await post("/tokenize", {"model": MODEL, "prompt": "abc"})
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, 3, CONTEXT_LENGTH)
    assert await post("/detokenize", {"model": MODEL, "tokens": ids}) == {"prompt": "abc"}


@behaviour("`with_raw_response`: headers and the parsed answer")
async def _raw_response(context: Context) -> None:
    raw = await context.side.call("completions.with_raw_response.create", **SHORT)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse().choices[0].text == "defgh"


@behaviour("`with_streaming_response`: lines of server-sent events, `[DONE]` last")
async def _streaming_response(context: Context) -> None:
    method = "completions.with_streaming_response.create"
    async with context.side.entered(method, **SHORT, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in await context.side.items(response.iter_lines()) if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


@behaviour("`extra_headers`: `X-Request-Id` comes back")
async def _request_id(context: Context) -> None:
    headers = {"X-Request-Id": "label-1"}
    raw = await context.side.call("completions.with_raw_response.create", **SHORT, extra_headers=headers)
    assert raw.headers["x-request-id"] == "label-1"
    assert (await context.side.call("completions.create", **SHORT, extra_headers=headers))._request_id == "label-1"


@behaviour("`extra_headers`: `X-Request-Timeout` too short: 504")
async def _deadline(context: Context) -> None:
    headers = {"X-Request-Timeout": "0.000001"}
    with pytest.raises(openai.InternalServerError) as caught:
        await context.side.call("completions.create", **SHORT, extra_headers=headers)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


@behaviour("`timeout`: the client gives up, the server frees everything")
async def _client_timeout(context: Context) -> None:
    with pytest.raises(openai.APITimeoutError):
        await context.side.call("completions.create", **LONG, timeout=0.2)
    await context.fleet.until_idle()


@behaviour("closing a stream cancels the request")
async def _close_stream(context: Context) -> None:
    stream = await context.side.call("completions.create", **LONG, stream=True)
    chunks = aiter(stream) if context.side.name == "async" else iter(stream)
    for _ in range(3):
        chunk = await (anext(chunks) if context.side.name == "async" else context.side.read(chunks.__next__))
        assert chunk.choices[0].finish_reason is None
    await context.side.read(stream.close)
    await context.fleet.until_idle()


@behaviour("`BadRequestError` names the field, the code and the request")
async def _bad_request(context: Context) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await context.side.call("completions.create", **{**SHORT, "temperature": -1})
    error = caught.value
    assert (error.status_code, error.param, error.code) == (400, "temperature", "invalid_argument")
    assert error.type == "invalid_request_error"
    assert error.request_id


@behaviour("`BadRequestError` before the first event of a stream")
async def _bad_stream(context: Context) -> None:
    with pytest.raises(openai.BadRequestError):
        await context.side.call("chat.completions.create", **{**CHAT, "messages": []}, stream=True)


@behaviour("`NotFoundError` for an unknown model")
async def _unknown_model(context: Context) -> None:
    for method, arguments in (("completions.create", SHORT), ("models.retrieve", {})):
        with pytest.raises(openai.NotFoundError) as caught:
            await context.side.call(method, **{**arguments, "model": "nobody"})
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@behaviour("`AuthenticationError` for a wrong key")
async def _wrong_key(context: Context) -> None:
    stranger = context.connect(api_key="wrong")
    for method, arguments in {"models.list": {}, "completions.create": SHORT, **MISSING_ENDPOINTS}.items():
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.call(method, **arguments)
        assert (caught.value.status_code, caught.value.code) == (401, "unauthenticated")


@behaviour("`RateLimitError` when the queue is full, with `Retry-After`")
async def _queue_full(context: Context) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        await context.side.call("completions.create", **{**SHORT, "max_tokens": 1, "n": 16})
    error = caught.value
    assert (error.status_code, error.code, error.type) == (429, "queue_full", "rate_limit_error")
    assert int(error.response.headers["retry-after"]) >= 1


@behaviour("`APIConnectionError` where nobody listens")
async def _nobody(context: Context) -> None:
    lost = context.connect(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(openai.APIConnectionError):
        await lost.call("models.list")


@behaviour("`NotFoundError` naming the path for: " + ", ".join(f"`{name}`" for name in MISSING_ENDPOINTS))
async def _missing_endpoints(context: Context) -> None:
    for method, arguments in MISSING_ENDPOINTS.items():
        with pytest.raises(openai.NotFoundError) as caught:
            await context.side.call(method, **arguments)
        assert caught.value.code == "not_found"
        assert caught.value.response.request.url.path in caught.value.message


@behaviour("`chat.completions.list`: 405")
async def _wrong_method(context: Context) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await context.side.call("chat.completions.list")
    assert (caught.value.status_code, caught.value.code) == (405, "method_not_allowed")
