"""OpenAI's messages, checked and in the form that chat templates expect. Renders nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from coordinator.text.json_types import json_list, json_object, json_type
from pdserve.core.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_CALLS = 128
"""Of one message."""

Message = Mapping[str, object]


def check_messages(raw: Sequence[object], param: str) -> list[Message]:
    """Each with `role`, `content` (always text), and what else the client gave; arguments of tool calls as objects.

    Raises:
        PdserveError: INVALID_ARGUMENT, naming the message and field at fault.
    """
    if not raw:
        raise invalid(f"{param} must hold at least one message", param)
    if len(raw) > MAX_MESSAGES:
        raise invalid(f"{param} may hold at most {MAX_MESSAGES} messages", param)
    return [_check_message(message, f"{param}[{index}]") for index, message in enumerate(raw)]


def _check_message(raw: object, param: str) -> Message:
    message = json_object(raw, param)
    if message.get("role") not in ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(ROLES)}", f"{param}.role")
    if message.get("function_call") is not None:
        raise invalid(f"{param}.function_call is not supported; use tool_calls", f"{param}.function_call")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise invalid(f"{param}.{name} must be text; it is a {json_type(message[name])}", f"{param}.{name}")
    checked: dict[str, object] = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content_text(message.get("content"), f"{param}.content")
    calls = json_list(checked.pop("tool_calls", None), MAX_CALLS, f"{param}.tool_calls")
    if calls:
        checked["tool_calls"] = [_check_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _content_text(content: object, param: str) -> str:
    """null is the empty text; a list of text parts is their concatenation."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{param} must be text, null or a list of text parts; it is a {json_type(content)}", param)
    parts = cast("list[object]", content)
    return "".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(parts))


def _part_text(raw: object, param: str) -> str:
    part = cast("Mapping[str, object]", raw if isinstance(raw, Mapping) else {})
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise invalid(f'{param} must be {{"type": "text", "text": …}}: no other kind of part is supported', param)
    return text


def _check_call(raw: object, param: str) -> Mapping[str, object]:
    call = json_object(raw, param)
    function = json_object(call.get("function"), f"{param}.function")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{param}.function.name must be text", f"{param}.function.name")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(raw: object, param: str) -> Mapping[str, object]:
    """Templates write arguments themselves, so they need the object; clients send its JSON text, empty for none."""
    try:
        value = json.loads(raw or "{}") if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        value = raw
    if not isinstance(value, Mapping):
        raise invalid(f"{param} must be the JSON text of an object", param)
    return cast("Mapping[str, object]", value)
