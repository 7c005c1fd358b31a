"""What one request came to, the same for a whole answer and for a stream put together again."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.clients.sides import Side

METHODS = {"completions": "completions.create", "chat": "chat.completions.create"}

# What OpenAI's own answers also say with null.
_NULLS = {"finish_reason", "logprobs", "content", "refusal", "token_logprobs", "top_logprobs"}


@dataclass
class Choice:
    """`logprobs` are OpenAI's entries of /v1/chat/completions, or the one object of /v1/completions."""

    text: str = ""
    finish_reason: str | None = None
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    content_is_null: bool = False


@dataclass
class Outcome:
    """`refusal` is (class of the client's exception, param, code)."""

    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: tuple[str, str | None, str | None] | None = None
    message: str = ""


async def ask(side: Side, endpoint: str, streamed: bool, arguments: dict[str, Any]) -> Outcome:
    """Make the request; whatever comes back must be of the client's own types, with no null out of place."""
    try:
        if not streamed:
            return _of_answers([await side.call(METHODS[endpoint], **arguments)])
        wanted = {"stream": True, "stream_options": {"include_usage": True}} | arguments
        return _of_answers(await side.items(await side.call(METHODS[endpoint], **wanted)))
    except openai.APIStatusError as error:
        return Outcome(refusal=(type(error).__name__, error.param, error.code), message=error.message)


def _of_answers(answers: list[Any]) -> Outcome:
    found: dict[int, Choice] = {}
    outcome = Outcome()
    for answer in answers:
        check_types(answer)
        for choice in answer.choices:
            known = found.setdefault(choice.index, Choice())
            assert known.finish_reason is None, "something follows the end of a choice"
            _add(known, choice)
        if answer.usage is not None:
            outcome.prompt_tokens = answer.usage.prompt_tokens
            outcome.completion_tokens = answer.usage.completion_tokens
            assert answer.usage.total_tokens == outcome.prompt_tokens + outcome.completion_tokens
    outcome.choices = [found[index] for index in range(len(found))]
    assert len({(answer.id, answer.model, answer.created) for answer in answers}) == 1
    return outcome


def _add(known: Choice, new: Any) -> None:
    known.finish_reason = new.finish_reason
    message = getattr(new, "message", None) or getattr(new, "delta", None)
    if message is None:
        known.text += new.text
    else:
        known.text += message.content or ""
        known.content_is_null = not known.text
        known.tool_calls += [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    if new.logprobs is not None:
        for name, entries in new.logprobs.model_dump().items():
            known.logprobs.setdefault(name, []).extend(entries or [])


def check_types(answer: Any) -> None:
    """The client builds its objects unchecked; here what was sent must satisfy the types it declares."""
    sent = answer.model_dump(exclude_unset=True)
    assert set(_nulls(sent)) <= _NULLS
    if isinstance(answer, Completion):
        for choice in sent["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "length"  # this type serves its chunks as well
            if choice["logprobs"]:
                _without_leading_null(choice["logprobs"])
    if isinstance(answer, Completion | ChatCompletion | ChatCompletionChunk):
        assert answer.system_fingerprint
    type(answer).model_validate(sent)


def _without_leading_null(logprobs: dict[str, Any]) -> None:
    """With `echo` the first token has no logprob, which the declared types leave out."""
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name] = [entry for entry in logprobs.get(name) or [] if entry is not None]


def _nulls(value: Any, name: str = "") -> Iterable[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nulls(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _nulls(item, name)
    elif value is None:
        yield name
