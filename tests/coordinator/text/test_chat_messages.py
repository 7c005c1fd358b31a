import pytest

from coordinator.text.chat_messages import MAX_MESSAGES, check_messages
from pdserve.core.errors import ErrorReason, PdserveError

USER = {"role": "user", "content": "hi"}


def assistant(*calls: object, **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def call(arguments: object, name: object = "f") -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"a": [1]}', {"a": [1]}), ("{}", {}), ("", {}), ({"a": 1}, {"a": 1})]
)
def test_templates_get_arguments_as_objects(arguments: object, expected: object) -> None:
    _, message = check_messages([USER, assistant(call(arguments))], "messages")
    assert message["tool_calls"] == [call(expected)]
    assert message["content"] == ""


@pytest.mark.parametrize("arguments", ["[1]", "no JSON", "1", "null", "[" * 100_000, None, 3])
def test_arguments_that_are_no_object_are_refused_by_their_place(arguments: object) -> None:
    with pytest.raises(PdserveError) as caught:
        check_messages([USER, assistant(call("{}"), call(arguments))], "messages")
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (assistant(3), "messages[0].tool_calls[0]"),
        (assistant({"id": "c"}), "messages[0].tool_calls[0].function"),
        (assistant(call("{}", name=None)), "messages[0].tool_calls[0].function.name"),
        (assistant(tool_calls={}), "messages[0].tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "function", "name": "f", "content": ""}, "messages[0].role"),
        ({"role": "tool", "tool_call_id": 1, "content": ""}, "messages[0].tool_call_id"),
        ({"role": "user", "name": ["x"], "content": ""}, "messages[0].name"),
        ({"role": ["user"], "content": ""}, "messages[0].role"),
    ],
)
def test_malformed_messages_are_refused_by_name(message: dict[str, object], param: str) -> None:
    with pytest.raises(PdserveError) as caught:
        check_messages([message], "messages")
    assert (caught.value.reason, caught.value.param) == (ErrorReason.INVALID_ARGUMENT, param)


def test_too_many_messages() -> None:
    assert len(check_messages([USER] * MAX_MESSAGES, "messages")) == MAX_MESSAGES
    with pytest.raises(PdserveError, match=str(MAX_MESSAGES)):
        check_messages([USER] * (MAX_MESSAGES + 1), "messages")


def test_a_turn_without_calls_has_none_to_template_eyes() -> None:
    for calls in ([], None):
        (message,) = check_messages([{"role": "assistant", "content": "x", "tool_calls": calls}], "messages")
        assert message == {"role": "assistant", "content": "x"}


def test_a_tool_message_keeps_its_fields() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "4"}]}
    assert check_messages([answer], "messages") == [{**answer, "content": "4"}]
