"""A request's prompt, in whatever form it came, to token ids. Checks everything about prompts but their length."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from coordinator.generation.inputs import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from coordinator.generation.served_model import TextModel
from coordinator.text.chat_messages import Message, check_messages
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.json_types import json_object, json_type
from coordinator.text.tool_calls.offer import tool_offer
from pdserve.core.errors import ErrorReason, PdserveError, invalid

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


def encode_prompt(prompt: Prompt, rendered: str | list[int], model: TextModel, must_fit: bool = True) -> list[int]:
    """Token ids of a rendered prompt. Text that spells a special token becomes that token, in messages too.

    Args:
        must_fit: refuse a text that cannot fit the context however it is cut, without encoding it.

    Raises:
        PdserveError: INVALID_ARGUMENT, if `must_fit`; or if the text spells a token without a row in the embedding.
    """
    if isinstance(prompt, TokenPrompt) or isinstance(rendered, list):
        return cast("list[int]", rendered)
    least = model.tokenizer.least_num_tokens(rendered)
    if must_fit and least >= model.info.context_length:
        message = f"the prompt has more than {least} tokens; the context holds {model.info.context_length}"
        raise invalid(message, prompt.param)
    token_ids = model.tokenizer.encode(rendered, add_special=prompt.add_special_tokens)
    highest = max(token_ids, default=0)
    if highest >= model.info.vocab_size:
        token = model.tokenizer.token_text(highest)
        raise invalid(f"the prompt spells {token!r}, a token that the model has no embedding for", prompt.param)
    return token_ids


def num_chars(prompt: Prompt, enough: int) -> int:
    """About how much there is to render; counting stops at `enough`."""
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)
        case ChatPrompt():
            return _num_chars((prompt.messages, prompt.tools, prompt.template_variables), enough)


def check_token_ids(values: Sequence[object], vocab_size: int, param: str) -> list[int]:
    """The ids of a list, each an integer in [0, `vocab_size`): any row of the embedding, with or without a token.

    Raises:
        PdserveError: INVALID_ARGUMENT, naming the first index at fault.
    """
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < vocab_size:
            shown = value if type(value) is int and abs(value) < 2**64 else f"a {json_type(value)}"
            message = f"{param}[{index}] must be a token id from 0 to {vocab_size - 1}; it is {shown}"
            raise invalid(message, f"{param}[{index}]")
    return cast("list[int]", list(values))


def _render_chat(prompt: ChatPrompt, model: TextModel) -> str:
    template = model.chat_template
    if template is None:
        message = f"model {model.info.name!r} has no chat template; use /v1/completions or a text prompt"
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, message, param=prompt.param)
    messages = check_messages(prompt.messages, prompt.param)
    continued = _flag(prompt.continue_final_message, False, "continue_final_message")
    opened = _flag(prompt.add_generation_prompt, not continued, "add_generation_prompt")
    if continued and opened:
        message = "continue_final_message and add_generation_prompt exclude each other; leave one of them out"
        raise invalid(message, "continue_final_message")
    variables = {**_template_variables(prompt.template_variables, template), "add_generation_prompt": opened}
    if offer := tool_offer(prompt, model):
        variables["tools"] = list(offer.tools.values())
    rendered = clean_text(template.render(messages, variables))
    return _up_to_content(rendered, messages[-1], prompt.param) if continued else rendered


def _template_variables(raw: object, template: ChatTemplate) -> Mapping[str, object]:
    param = "chat_template_kwargs"
    variables = json_object({} if raw is None else raw, param)
    for name in variables:
        if name in template.own_names:
            raise invalid(f"{param}.{name} would hide what the template gets under that name", f"{param}.{name}")
    return variables


def _up_to_content(rendered: str, message: Message, param: str) -> str:
    """`rendered` without what the template wrote behind the last message's content, so that the model goes on there."""
    content = clean_text(str(message["content"]))
    # Not `rfind`: unlike `find` it takes the product of both lengths for texts made for it, and holds the lock.
    num_behind = rendered[::-1].find(content.strip()[::-1])
    if not content.strip() or num_behind < 0:
        text = "continue_final_message: the last message has no content, or the template does not show it as it is"
        raise invalid(text, f"{param}[-1].content")
    end = len(rendered) - num_behind
    trailing = content[len(content.rstrip()) :]
    return rendered[: end + len(trailing)] if rendered.startswith(trailing, end) else rendered[:end]


def _flag(value: object, default: bool, param: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{param} must be true or false", param)
    return default if value is None else value


def _num_chars(value: object, enough: int) -> int:
    """Characters of all texts in a JSON value, and one for each value in it."""
    count, left = 0, [value]
    while left and count < enough:
        part = left.pop()
        count += 1
        if isinstance(part, str):
            count += len(part)
        elif isinstance(part, Mapping):
            left += cast("Mapping[str, object]", part).keys()
            left += cast("Mapping[str, object]", part).values()
        elif isinstance(part, list | tuple):
            left += cast("Sequence[object]", part)
    return count
