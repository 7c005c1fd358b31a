"""`stream_options.continuous_usage_stats`: each chunk's usage so far, and nothing else of the stream changed."""

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.generation.generator import Generator
from coordinator.http_api.chat_answers import ChatChunk
from coordinator.http_api.completion_answers import CompletionAnswer
from coordinator.sequences import SequenceRequest
from tests.coordinator.http_api.conftest import app_of
from tests.coordinator.http_api.test_streams import CHAT, COMPLETIONS, STEPS, STOP, TOOLS, generator_of
from tests.coordinator.text_fakes import EOS, Script, ScriptedScheduler, build_generator, scheduler_of

BOTH = {"include_usage": True, "continuous_usage_stats": True}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "ab"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


async def stream(generator: Generator, path: str, options: object, **fields: object) -> list[dict[str, Any]]:
    """The chunks, without ids and times, which differ from one request to the next."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(generator)), base_url="http://test") as client:
        body = {**BODIES[path], **fields, "stream": True, "stream_options": options}
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(re.sub(r"call_\w{24}", "", event)) for event in events]
    for chunk in chunks:
        (ChatChunk if path == CHAT else CompletionAnswer).model_validate(chunk, extra="forbid")
    return [{**chunk, "id": "", "created": 0} for chunk in chunks]


def counts(chunks: Sequence[dict[str, Any]]) -> list[int]:
    return [chunk["usage"]["completion_tokens"] for chunk in chunks]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    choices=st.lists(STEPS, min_size=1, max_size=3),
    stop=STOP,
    tools=st.booleans(),
)
async def test_usage_is_all_that_is_added(
    path: str, choices: list[list[list[int]]], stop: list[str], tools: bool
) -> None:
    """Whatever is merged, held back, cut or taken out as a call."""
    fields: dict[str, object] = {"n": len(choices), "stop": stop}
    if path == CHAT and tools:
        fields["tools"] = TOOLS
    plain = await stream(generator_of(choices), path, {"include_usage": True}, **fields)
    *chunks, last = await stream(generator_of(choices), path, BOTH, **fields)
    assert [{k: v for k, v in chunk.items() if k != "usage"} for chunk in chunks] == plain[:-1]
    assert last == plain[-1]
    assert counts(chunks) == sorted(counts(chunks))
    assert chunks[-1]["usage"] == last["usage"]
    for usage in (chunk["usage"] for chunk in chunks):
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == last["usage"]["prompt_tokens_details"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(choices=st.lists(STEPS, min_size=1, max_size=3), stop=STOP)
async def test_each_chunk_counts_what_came_up_to_it(choices: list[list[list[int]]], stop: list[str]) -> None:
    """A chat's logprobs come with their tokens, one entry each: a second way to count."""
    fields: dict[str, object] = {"n": len(choices), "stop": stop, "logprobs": True}
    *chunks, last = await stream(generator_of(choices), CHAT, BOTH, **fields)
    num_entries, expected = 0, []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        num_entries += len((choice["logprobs"] or {}).get("content", ()))
        expected.append(num_entries)
    assert counts(chunks) == expected
    assert counts([last]) == [num_entries]


@pytest.mark.parametrize(
    ("steps", "stop", "texts", "expected"),
    [
        ([b"a", b"bcd", b"e"], None, ["a", "bcd", "e", ""], [1, 4, 5, 6]),  # merged; EOS has no text
        (["é".encode()[:1], "é".encode()[1:], b"x"], None, ["é", "x", ""], [2, 3, 4]),  # a character in two tokens
        ([b"x", b"y", b"q"], "xyz", ["xyq", ""], [3, 4]),  # held back for a stop string that does not come
        ([b"x", b"y"], "xyz", ["xy", ""], [3, 3]),  # nor at the end: EOS is the third
        ([b"a", b"xyzbc"], "xyz", ["a", ""], [1, 4]),  # which ends it in the middle of what came at once
    ],
)
async def test_text_that_is_held_back(
    steps: list[bytes], stop: str | None, texts: list[str], expected: list[int]
) -> None:
    generator = build_generator(scheduler_of(*map(list, steps), [EOS]))
    completion = await stream(generator, COMPLETIONS, BOTH, stop=stop)
    assert [chunk["choices"][0]["text"] for chunk in completion[:-1]] == texts
    assert counts(completion) == [*expected, expected[-1]]
    role, *chat = await stream(build_generator(scheduler_of(*map(list, steps), [EOS])), CHAT, BOTH, stop=stop)
    assert counts([role, *chat]) == [0, *expected, expected[-1]]


async def test_an_echoed_prompt_is_no_output() -> None:
    chunks = await stream(build_generator(scheduler_of([97, 98], [EOS])), COMPLETIONS, BOTH, echo=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["ab", "ab", ""]
    assert counts(chunks) == [0, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {2}


async def test_cached_tokens_are_those_of_what_has_begun() -> None:
    """Of two prompts of two choices each, the least of either; the last number is the request's."""
    cached = {"aaaa": (3, 1), "bbbb": (2, 2)}

    def script_of(request: SequenceRequest) -> Script:
        num_cached = cached[bytes(request.token_ids).decode()][request.sampling.choice]
        return Script([[ord("x")], [EOS]], num_cached=num_cached)

    generator = build_generator(ScriptedScheduler(script_of))
    chunks = await stream(generator, COMPLETIONS, BOTH, prompt=["aaaa", "bbbb"], n=2)
    begun: dict[int, int] = {}
    for chunk in chunks[:-1]:
        index = chunk["choices"][0]["index"]
        begun[index] = cached["aaaa" if index < 2 else "bbbb"][index % 2]
        expected = sum(
            min(found) for found in ([begun[i] for i in pair if i in begun] for pair in ((0, 1), (2, 3))) if found
        )
        assert chunk["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert len(begun) == 4
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1 + 2}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"continuous_usage_stats": True},
        {"include_usage": False, "continuous_usage_stats": True},
        {"include_usage": None, "continuous_usage_stats": True},
        {"include_usage": False, "no_such_option": 1},
    ],
)
async def test_without_include_usage_nothing_tells_usage(path: str, options: object) -> None:
    chunks = await stream(build_generator(scheduler_of([97], [EOS])), path, options)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("value", [False, None])
async def test_switched_off_it_changes_nothing(value: object) -> None:
    options = {"include_usage": True, "continuous_usage_stats": value}
    *chunks, last = await stream(build_generator(scheduler_of([97], [EOS])), COMPLETIONS, options)
    assert all("usage" not in chunk for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
@pytest.mark.parametrize("value", ["yes", 1, [], 0.0])
async def test_anything_but_true_and_false_is_refused_by_name(name: str, value: object) -> None:
    app = app_of(build_generator(scheduler := scheduler_of([97])))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        body = {"prompt": "a", "stream": True, "stream_options": {name: value}}
        response = await client.post(COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"stream_options.{name}")
    assert scheduler.streams == []
