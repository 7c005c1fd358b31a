"""Logprobs, echo and tools through the typed client, from real workers; numbers are those of HTTP."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from pdserve.client import Delta, FinishReason, GenerateOptions, Message, PdserveError, PromptEcho, ToolCall
from tests.clients.alphabet_model import TOOL_ARGUMENTS, TOOL_NAME, write_alphabet_model
from tests.support.fleet import Fleet, run_fleet

TOOLS = [{"type": "function", "function": {"name": TOOL_NAME, "parameters": {"type": "object"}}}]
OPTIONS = {"max_tokens": 4, "temperature": 0.0, "echo": True, "logprobs": 2}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with run_fleet(write_alphabet_model(tmp_path_factory.mktemp("models") / "alphabet")) as fleet:
        yield fleet


async def test_echo_and_logprobs_are_those_of_http(fleet: Fleet) -> None:
    completion = await fleet.client.complete("abc", GenerateOptions(**OPTIONS, n=2))  # type: ignore[arg-type]
    assert len(completion.choices) == 2
    async with httpx.AsyncClient(base_url=fleet.http_url, timeout=60) as http:
        body = {"prompt": "abc", **OPTIONS, "n": 2}
        answer = (await http.post("/v1/completions", json=body)).json()
    for index, (choice, over_http) in enumerate(zip(completion.choices, answer["choices"], strict=True)):
        assert choice.prompt is not None
        assert (choice.prompt.choice, choice.prompt.text, choice.text) == (index, "abc", "defg")
        assert choice.prompt.text + choice.text == over_http["text"]
        found = over_http["logprobs"]["token_logprobs"]
        assert [None, *(entry.logprob for entry in (*choice.prompt.logprobs, *choice.logprobs))] == found
        assert all(len(entry.top) == 2 and entry.logprob == entry.top[0][1] for entry in choice.logprobs)


async def test_the_prompt_is_the_first_event_of_its_choice(fleet: Fleet) -> None:
    events = [event async for event in fleet.client.generate("abc", GenerateOptions(max_tokens=2, echo=True))]
    assert events[1] == PromptEcho(0, "abc")
    assert isinstance(events[2], Delta)


async def test_a_tool_is_called_and_its_result_answered(fleet: Fleet) -> None:
    messages = [Message("user", "How is the weather in Paris?")]
    options = GenerateOptions(max_tokens=200, temperature=0.0, tools=TOOLS)
    (choice,) = (await fleet.client.complete(messages, options)).choices
    (call,) = choice.tool_calls
    assert (call.name, json.loads(call.arguments)) == (TOOL_NAME, TOOL_ARGUMENTS)
    assert (choice.finish_reason, choice.text.strip()) == (FinishReason.STOP, "")
    messages += [Message("assistant", tool_calls=[call]), Message("tool", "sunny", tool_call_id=call.id)]
    (choice,) = (await fleet.client.complete(messages, options)).choices
    assert choice.tool_calls == ()
    assert choice.text.startswith("abc")


async def test_arguments_that_are_no_object_are_refused_by_name(fleet: Fleet) -> None:
    """Whatever a client puts in its history, the fault is told and nothing runs."""
    messages = [Message("assistant", tool_calls=[ToolCall("c", TOOL_NAME, "[]")])]
    with pytest.raises(PdserveError) as caught:
        await fleet.client.complete(messages)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
