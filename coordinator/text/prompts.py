"""A request's prompt, in whatever form it came, to token ids. Checks everything about prompts but their length."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from coordinator.generation.inputs import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from coordinator.generation.served_model import TextModel
from pdserve.core.errors import ErrorReason, PdserveError, invalid

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(text: str) -> str:
    """`text` with lone surrogates, which have no UTF-8, as U+FFFD."""
    return _LONE_SURROGATE.sub("�", text)


def render_prompt(prompt: Prompt, model: TextModel) -> str | list[int]:
    """The prompt as text still to be encoded by `encode_prompt`, or as checked token ids.

    Raises:
        PdserveError: INVALID_ARGUMENT or UNSUPPORTED, naming the field at fault.
    """
    match prompt:
        case TextPrompt():
            return clean_text(prompt.text)
        case TokenPrompt():
            return check_token_ids(prompt.token_ids, model.info.vocab_size, prompt.param)
        case ChatPrompt():
            return _render_chat(prompt, model)


def encode_prompt(prompt: Prompt, rendered: str | list[int], model: TextModel) -> list[int]:
    """Token ids of a rendered prompt; a chat template has written the special tokens itself.

    Raises:
        PdserveError: INVALID_ARGUMENT, for a text that cannot fit the context however it is cut, without encoding it.
    """
    if isinstance(rendered, list):
        return rendered
    least = model.tokenizer.least_num_tokens(rendered)
    if least >= model.info.context_length:
        message = f"the prompt has more than {least} tokens; the context holds {model.info.context_length}"
        raise invalid(message, prompt.param)
    return model.tokenizer.encode(rendered, add_special=not isinstance(prompt, ChatPrompt))


def check_token_ids(values: Sequence[object], vocab_size: int, param: str) -> list[int]:
    """The ids of a list, each an integer in [0, `vocab_size`): any row of the embedding, with or without a token.

    Raises:
        PdserveError: INVALID_ARGUMENT, naming the first index at fault.
    """
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < vocab_size:
            shown = value if type(value) is int and abs(value) < 2**64 else f"a {_json_type(value)}"
            message = f"{param}[{index}] must be a token id from 0 to {vocab_size - 1}; it is {shown}"
            raise invalid(message, f"{param}[{index}]")
    return cast("list[int]", list(values))


def _render_chat(prompt: ChatPrompt, model: TextModel) -> str:
    if model.chat_template is None:
        message = f"model {model.info.name!r} has no chat template; use /v1/completions or a text prompt"
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, message, param=prompt.param)
    if not prompt.messages:
        raise invalid(f"{prompt.param} must hold at least one message", prompt.param)
    if len(prompt.messages) > MAX_MESSAGES:
        raise invalid(f"{prompt.param} may hold at most {MAX_MESSAGES} messages", prompt.param)
    messages = [_check_message(message, f"{prompt.param}[{i}]") for i, message in enumerate(prompt.messages)]
    return clean_text(model.chat_template.render(messages))


def _check_message(raw: object, param: str) -> Mapping[str, object]:
    """A message as templates expect it: `role`, `content` (always text), and what else the client gave."""
    if not isinstance(raw, Mapping):
        raise invalid(f"{param} must be an object; it is a {_json_type(raw)}", param)
    message = cast("Mapping[str, object]", raw)
    if message.get("role") not in ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(ROLES)}", f"{param}.role")
    checked: dict[str, object] = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content_text(message.get("content"), f"{param}.content")
    return checked


def _content_text(content: object, param: str) -> str:
    """null is the empty text; a list of text parts is their concatenation."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{param} must be text, null or a list of text parts; it is a {_json_type(content)}", param)
    parts = cast("list[object]", content)
    return "".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(parts))


def _part_text(raw: object, param: str) -> str:
    part = cast("Mapping[str, object]", raw if isinstance(raw, Mapping) else {})
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise invalid(f'{param} must be {{"type": "text", "text": …}}: no other kind of part is supported', param)
    return text


def _json_type(value: object) -> str:
    """As the client would call it; never the value, which may be part of a prompt."""
    return _JSON_TYPES.get(type(value).__name__, "object")


_JSON_TYPES = {
    "bool": "boolean",
    "int": "number",
    "float": "number",
    "str": "string",
    "list": "list",
    "NoneType": "null",
}
