"""Fields one by one, without a server: requests to their neutral form, events to messages."""

import json
from dataclasses import replace

import pytest

from coordinator.auth import Caller
from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, PromptEcho, Usage
from coordinator.generation.inputs import ChatPrompt, GenerationInput
from coordinator.grpc_api.requests import generation_input
from coordinator.grpc_api.responses import event_to_proto
from coordinator.sequences import SequenceTimings
from coordinator.text.tool_calls import ToolCall
from pdserve.client import inference as client
from pdserve.client.inference_wire import event_from_proto, generate_request
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.v1 import inference_pb2 as pb

TOOLS = [{"type": "function", "function": {"name": "add"}}]
LOGPROBS = (TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5))), TokenLogprobs(-2.0))


def read(request: pb.GenerateRequest) -> GenerationInput:
    return generation_input(request, Caller(), 0.0, None)


def chat_of(**fields: object) -> ChatPrompt:
    (prompt,) = read(pb.GenerateRequest(chat=pb.ChatPrompt(**fields))).prompts  # type: ignore[arg-type]
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_conversation_is_what_openais_json_would_be() -> None:
    messages = [
        pb.ChatMessage(role="user", content="x", name="ann"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="add", arguments_json='{"a": 1}')]),
        pb.ChatMessage(role="tool", content="", tool_call_id="c"),
    ]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert chat_of(messages=messages).messages == [
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]


def test_tools_and_variables_are_handed_on_as_they_came() -> None:
    chat = chat_of(
        tools_json=json.dumps(TOOLS), tool_choice="none", parallel_tool_calls=False, template_variables_json='{"a": 1}'
    )
    assert (chat.tools, chat.tool_choice, chat.parallel_tool_calls) == (TOOLS, "none", False)
    assert chat.template_variables == {"a": 1}
    assert chat_of(add_generation_prompt=False).add_generation_prompt is False
    assert chat_of(continue_final_message=True).continue_final_message is True
    assert chat_of() == ChatPrompt([])


@pytest.mark.parametrize("field", ["tools_json", "template_variables_json"])
@pytest.mark.parametrize("text", ["[", "nothing", "[" * 100_000, "9" * 5_000])
def test_json_that_is_none_is_refused_by_its_field(field: str, text: str) -> None:
    with pytest.raises(PdserveError) as caught:
        chat_of(**{field: text})
    assert (caught.value.reason, caught.value.param) == (ErrorReason.INVALID_ARGUMENT, field)


def test_every_field_of_sampling_is_read() -> None:
    values = {"logit_bias": {1: 2.0}, "stop_token_ids": [1], "stop": ["x"], "ignore_eos": True}
    for name in pb.SamplingOptions.DESCRIPTOR.fields_by_name:
        options = pb.SamplingOptions(**{name: values.get(name, 1)})
        assert getattr(read(pb.GenerateRequest(text="x", sampling=options)).sampling, name) == values.get(name, 1)


def test_nothing_given_is_nothing_asked() -> None:
    bare = read(pb.GenerateRequest(text="x"))
    assert bare == read(generate_request("x", client.GenerateOptions(label="", n=None)))
    assert (bare.n, bare.echo, bare.timeout_s) == (None, False, None)
    assert read(pb.GenerateRequest(text="x", user="somebody")) == bare
    assert read(pb.GenerateRequest(text="x", echo=True, n=2)) == replace(bare, echo=True, n=2)


def test_an_echo_has_its_text_and_logprobs_from_the_second_token_on() -> None:
    echo = PromptEcho(1, (5, 7, 9), ("a", "b", "c"), (None, *LOGPROBS))
    message = event_to_proto(echo)
    assert list(message.delta.token_ids) == []
    assert event_from_proto(message) == client.PromptEcho(1, "abc", LOGPROBS)
    assert event_from_proto(event_to_proto(replace(echo, logprobs=()))) == client.PromptEcho(1, "abc")


def test_a_delta_has_its_logprobs_and_tool_calls() -> None:
    delta = ChoiceDelta(1, 4, (7, 8), "ab", ("a", "b"), LOGPROBS, (ToolCall("c", "add", '{"a": 1}'),))
    calls = (client.ToolCall("c", "add", '{"a": 1}'),)
    assert event_from_proto(event_to_proto(delta)) == client.Delta(1, 4, (7, 8), "ab", LOGPROBS, calls)


def test_an_end_has_usage_and_timings() -> None:
    end = ChoiceEnd(2, FinishReason.LENGTH, Usage(3, 4, 1), SequenceTimings(ttft_s=0.25, decode_worker="d"))
    event = event_from_proto(event_to_proto(end))
    assert isinstance(event, client.Finished)
    assert (event.choice, event.finish_reason, event.usage) == (2, FinishReason.LENGTH, client.Usage(3, 4, 1))
    assert (event.timings.ttft_s, event.timings.decode_worker) == (0.25, "d")
