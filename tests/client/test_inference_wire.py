import json
from typing import Any

import pytest

from pdserve.client import Delta, GenerateOptions, Message, PdserveError, PromptEcho, TokenLogprobs, ToolCall
from pdserve.client.inference_wire import event_from_proto, generate_request
from pdserve.core.errors import ErrorReason
from pdserve.v1 import common_pb2
from pdserve.v1 import inference_pb2 as pb

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_prompts_of_each_kind() -> None:
    chat = generate_request([Message("user", "x"), Message("assistant")], GenerateOptions()).chat
    assert [(m.role, m.HasField("content")) for m in chat.messages] == [("user", True), ("assistant", False)]
    assert list(generate_request([1, 2], GenerateOptions()).token_ids.ids) == [1, 2]
    assert generate_request([], GenerateOptions()).WhichOneof("prompt") == "token_ids"
    assert generate_request("", GenerateOptions()).WhichOneof("prompt") == "text"


def test_a_conversation_with_tools() -> None:
    messages = [
        Message("user", "2 + 2?", name="ann"),
        Message("assistant", tool_calls=[ToolCall("c1", "add", '{"a": 2}')]),
        Message("tool", "4", tool_call_id="c1"),
    ]
    options = GenerateOptions(
        tools=TOOLS, tool_choice="auto", parallel_tool_calls=False, template_variables={"enable_thinking": False}
    )
    chat = generate_request(messages, options).chat
    user, assistant, tool = chat.messages
    assert (user.name, tool.tool_call_id, assistant.HasField("content")) == ("ann", "c1", False)
    assert list(assistant.tool_calls) == [pb.ToolCall(id="c1", name="add", arguments_json='{"a": 2}')]
    assert json.loads(chat.tools_json) == TOOLS
    assert json.loads(chat.template_variables_json) == {"enable_thinking": False}
    assert (chat.tool_choice, chat.HasField("parallel_tool_calls"), chat.parallel_tool_calls) == ("auto", True, False)


def test_what_was_not_given_is_not_sent() -> None:
    assert generate_request("x", GenerateOptions()) == pb.GenerateRequest(text="x", sampling=pb.SamplingOptions())
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    expected = pb.GenerateRequest(chat=chat, sampling=pb.SamplingOptions())
    assert generate_request([Message("user", "x")], GenerateOptions()) == expected


def test_every_option_has_its_field() -> None:
    """Each one alone makes a message that differs from the bare one: none is forgotten on the way."""
    values: dict[str, Any] = {"model": "m", "stop": ["x"], "stop_token_ids": [1], "logit_bias": {1: 2.0}, "label": "l"}
    values |= {"cache_salt": "s", "ignore_eos": True, "echo": True, "tools": TOOLS, "tool_choice": "none"}
    values |= {"parallel_tool_calls": False, "template_variables": {"a": 1}, "add_generation_prompt": True}
    values |= {"continue_final_message": True}
    bare = generate_request([Message("user", "x")], GenerateOptions())
    for name in GenerateOptions.__dataclass_fields__:
        options = GenerateOptions(**{name: values.get(name, 1)})
        assert generate_request([Message("user", "x")], options) != bare, name


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([-1], {}),
        (["x"], {}),
        ("\ud800", {}),
        ("x", {"seed": -1}),
        ("x", {"max_tokens": 2**63}),
        ("x", {"temperature": "hot"}),
        ("x", {"deadline_s": float("inf")}),
        ([Message("user", "x"), 5], {}),
        ([Message("user", "x")], {"tools": [{1, 2}]}),
        ([Message("user", "x")], {"template_variables": {"a": float("nan")}}),
        ("x", {"tools": TOOLS}),
        ([1], {"tool_choice": "none"}),
        ([1], {"template_variables": {"a": 1}}),
        ("x", {"continue_final_message": True}),
    ],
)
def test_what_the_wire_cannot_carry_is_refused(prompt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(PdserveError) as caught:
        generate_request(prompt, GenerateOptions(**options))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_a_prompt_and_a_delta_with_all_that_they_can_carry() -> None:
    message = pb.GenerateResponse.Delta(
        choice=1,
        first_index=4,
        token_ids=[7],
        text="a",
        logprobs=[_logprobs(-0.5, 7)],
        tool_calls=[pb.ToolCall(id="c", name="add", arguments_json="{}")],
    )
    logprobs = (TokenLogprobs(-0.5, ((7, -0.5),)),)
    expected = Delta(1, 4, (7,), "a", logprobs, (ToolCall("c", "add", "{}"),))
    assert event_from_proto(pb.GenerateResponse(delta=message)) == expected
    prompt = pb.GenerateResponse.Delta(choice=1, text="a", is_prompt=True, prompt_logprobs=[_logprobs(-0.5, 7)])
    assert event_from_proto(pb.GenerateResponse(delta=prompt)) == PromptEcho(1, "a", logprobs)


def _logprobs(value: float, token_id: int) -> common_pb2.TokenLogprobs:
    top = common_pb2.TokenLogprob(token_id=token_id, logprob=value)
    return common_pb2.TokenLogprobs(logprob=value, top=[top])
