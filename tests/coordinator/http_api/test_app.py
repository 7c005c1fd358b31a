import json
from typing import Any

import httpx
import pytest

from coordinator.http_api.chat_answers import ChatAnswer, ChatChunk
from coordinator.http_api.completion_answers import CompletionAnswer
from coordinator.sequences import SequenceRequest
from pdserve.core.errors import ErrorReason, PdserveError
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text_fakes import (
    CONTEXT,
    EOS,
    Script,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    echo_scheduler,
    scheduler_of,
    text_model,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def strict_json(text: str | bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = strict_json(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def events(response: httpx.Response) -> list[Any]:
    """The data of every event: parsed JSON, or the text [DONE]."""
    found = []
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else strict_json(data))
    return found


async def stream(client: httpx.AsyncClient, path: str, **body: object) -> list[Any]:
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return await events(response)


async def test_a_completion_whole_and_streamed(serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"hey"))) as client:
        whole = strict_json((await client.post(COMPLETIONS, json={"prompt": "ab", "model": "tiny"})).content)
        chunks = await stream(client, COMPLETIONS, prompt="ab", stream_options={"include_usage": True})
    CompletionAnswer.model_validate(whole, extra="forbid")
    assert whole["choices"] == [{"index": 0, "text": "hey", "logprobs": None, "finish_reason": "stop"}]
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["usage"] == whole["usage"]
    assert whole["usage"]["total_tokens"] == 6
    for chunk in chunks:
        CompletionAnswer.model_validate(chunk, extra="forbid")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hey"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_a_chat_whole_and_streamed(serve: Serve) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"hey"))) as client:
        whole = strict_json((await client.post(CHAT, json={"messages": USER})).content)
        chunks = await stream(client, CHAT, messages=USER)
    ChatAnswer.model_validate(whole, extra="forbid")
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "hey"}
    assert bytes(scheduler.streams[0].request.token_ids) == b"<user>hi\n<assistant>"
    assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        ChatChunk.model_validate(chunk, extra="forbid")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hey"
    assert scheduler.num_cancels == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
async def test_streamed_and_whole_agree_on_a_cut_character(serve: Serve, max_tokens: int) -> None:
    smile = "😊".encode()
    model = text_model(byte_tokenizer([b"Hello", b" " + smile[:2], smile[2:]]))
    scheduler = scheduler_of([257], [ord("!")], [258], [259], [EOS])
    body = {"messages": USER, "max_tokens": max_tokens}
    async with serve(build_generator(scheduler, model)) as client:
        whole = (await client.post(CHAT, json=body)).json()
        chunks = (await stream(client, CHAT, **body))[:-1]
    text = whole["choices"][0]["message"]["content"]
    assert text == ["Hello", "Hello!", "Hello! ", "Hello! 😊"][max_tokens - 1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == max_tokens


async def test_a_first_token_eos_still_closes_the_stream_properly(serve: Serve) -> None:
    async with serve(build_generator(scheduler_of([EOS]))) as client:
        chunks = await stream(client, COMPLETIONS, prompt="a")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == ["stop"]
    assert chunks[-1] == "[DONE]"


async def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(serve: Serve) -> None:
    scheduler = ScriptedScheduler(lambda r: Script([[*r.token_ids, ord(str(r.sampling.choice))], [EOS]]))
    async with serve(build_generator(scheduler)) as client:
        whole = (await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2})).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert whole["usage"]["prompt_tokens"] == 2


async def test_cached_tokens_are_those_of_each_prompt_that_no_choice_computed(serve: Serve) -> None:
    """Prompt by prompt: a choice that finds what its sibling has just computed saves the request nothing."""
    cached = {"aaaa": (0, 3), "bbbb": (2, 1)}

    def script_of(request: SequenceRequest) -> Script:
        num_cached = cached[bytes(request.token_ids).decode()][request.sampling.choice]
        return Script([[ord("x")], [EOS]], num_cached=num_cached)

    async with serve(build_generator(ScriptedScheduler(script_of))) as client:
        body = {"prompt": ["aaaa", "bbbb"], "n": 2}
        whole = (await client.post(COMPLETIONS, json=body)).json()
        *_, last, _ = await stream(client, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert whole["usage"] == last["usage"]
    assert whole["usage"]["prompt_tokens"] == 8
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 + 1}


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], None, 5, {"a": 1}, [-1], [1, "1"], [1.5], [True], [[1], [-1]], ["a", 1], [2**63]]
)
async def test_impossible_prompts_are_refused_and_the_server_goes_on(serve: Serve, prompt: object) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        response = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert response.status_code == 400
        assert error_of(response)["param"].startswith("prompt")
        assert scheduler.streams == []
        assert (await client.post(COMPLETIONS, json={"prompt": [255]})).status_code == 200


@pytest.mark.parametrize("messages", [[], None, "hi", [{"role": "user", "content": [{"type": "audio"}]}]])
async def test_impossible_messages_are_refused(serve: Serve, messages: object) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        response = await client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("messages")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "seed"])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", '"NaN"', "1e400", "true", "-3"])
async def test_numbers_that_are_none_get_400_in_strict_json(serve: Serve, name: str, literal: str) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        body = f'{{"prompt": "a", "{name}": {literal}}}'
        response = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == name
    assert scheduler.streams == []


async def test_max_tokens_at_and_above_the_room(serve: Serve) -> None:
    scheduler = scheduler_of(*[[97]] * CONTEXT)
    async with serve(build_generator(scheduler)) as client:
        room = CONTEXT - len(b"<user>hi\n<assistant>")
        fits = (await client.post(CHAT, json={"messages": USER, "max_completion_tokens": room})).json()
        too_many = await client.post(CHAT, json={"messages": USER, "max_completion_tokens": room + 1})
        unset = (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": None})).json()
        too_long = await client.post(COMPLETIONS, json={"prompt": "a" * CONTEXT})
    assert fits["usage"]["completion_tokens"] == room
    assert (too_many.status_code, error_of(too_many)["param"]) == (400, "max_completion_tokens")
    assert unset["usage"]["completion_tokens"] == CONTEXT - 1
    assert (too_long.status_code, error_of(too_long)["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"model": 3}, "model"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    serve: Serve, path: str, extra: dict[str, object], param: str
) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        response = await client.post(path, json={**prompt, **extra})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_unknown_fields_and_neutral_values_are_accepted(serve: Serve) -> None:
    neutral = {"user": "u", "whatever": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        response = await client.post(CHAT, json={"messages": USER, "logprobs": False, "n": None, **neutral})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "content", [b"{", b'{"prompt": 1' + b"0" * 5000 + b"}", b"[" * 100_000, b"[1]", b"", b"null", b"\xff"]
)
async def test_bodies_that_are_no_json_object_get_an_openai_error(serve: Serve, content: bytes) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_lone_surrogates_do_not_break_anything(serve: Serve) -> None:
    body = b'{"prompt": "a\\ud800b", "stop": "\\udc00x", "max_tokens": 2}'
    async with serve(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        response = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        unknown = await client.post(COMPLETIONS, content=b'{"prompt": "a", "model": "\\ud800"}')
    assert response.status_code == 200
    assert bytes(scheduler.streams[0].request.token_ids).decode() == "a\ufffdb"
    assert unknown.status_code in (400, 404)
    error_of(unknown)


async def test_paths_methods_and_models_that_do_not_exist(serve: Serve) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        missing = await client.get("/v1/nothing")
        wrong_method = await client.get(COMPLETIONS)
        unknown_model = await client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt-9"})
        unknown_card = await client.get("/v1/models/org/none")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong_method.status_code, error_of(wrong_method)["code"]) == (405, "method_not_allowed")
    assert (unknown_model.status_code, error_of(unknown_model)["code"]) == (404, "model_not_found")
    assert unknown_card.status_code == 404


async def test_models_health_and_metrics(serve: Serve) -> None:
    scheduler = echo_scheduler(b"x")
    async with serve(build_generator(scheduler)) as client:
        models = (await client.get("/v1/models")).json()
        assert (await client.get("/health")).status_code == 200
        assert (await client.head("/health")).status_code == (await client.head("/livez")).status_code == 200
        scheduler.ready = False
        unready = await client.get("/health")
        assert (await client.get("/livez")).status_code == 200
        metrics = await client.get("/metrics")
    (model,) = models["data"]
    assert (model["id"], model["context_length"], model["default_max_tokens"]) == ("tiny", CONTEXT, CONTEXT - 1)
    assert (unready.status_code, unready.json()["status"]) == (503, "unavailable")
    assert "tiny" in unready.json()["reason"]
    assert metrics.status_code == 200


async def test_overload_is_429_with_a_hint(serve: Serve) -> None:
    refuse = PdserveError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.2)
    async with serve(build_generator(ScriptedScheduler(lambda _: Script([]), refuse=refuse))) as client:
        for streamed in (True, False):
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": streamed})
            assert (response.status_code, response.headers["retry-after"]) == (429, "2")
            assert error_of(response)["type"] == "rate_limit_error"


@pytest.mark.parametrize("reason", [ErrorReason.DEADLINE_EXCEEDED, ErrorReason.NO_WORKERS, ErrorReason.INTERNAL])
async def test_a_failure_before_the_first_token_has_its_own_status(serve: Serve, reason: ErrorReason) -> None:
    failure = PdserveError(reason, "failed")
    async with serve(build_generator(scheduler_of(error=failure))) as client:
        for streamed in (True, False):
            response = await client.post(CHAT, json={"messages": USER, "stream": streamed})
            assert response.status_code == failure.codes.http_status
            assert error_of(response)["code"] == reason.value


async def test_a_failure_in_mid_stream_is_an_event_and_no_done(serve: Serve) -> None:
    failure = PdserveError(ErrorReason.WORKER_LOST, "the worker was lost")
    async with serve(build_generator(scheduler_of(b"a", error=failure))) as client:
        chunks = await stream(client, COMPLETIONS, prompt="a")
        whole = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert chunks[0]["choices"][0]["text"] == "a"
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert len(chunks) == 2
    assert whole.status_code == 503


async def test_a_bug_is_a_500_that_tells_nothing(serve: Serve) -> None:
    def script_of(_: object) -> Script:
        raise RuntimeError("the prompt was: secret")

    async with serve(build_generator(ScriptedScheduler(script_of))) as client:
        for streamed in (True, False):
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": streamed})
            assert (response.status_code, error_of(response)["message"]) == (500, "internal error")
