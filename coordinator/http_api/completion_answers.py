"""The response objects of /v1/completions, as OpenAI names their fields."""

from typing import Literal

from coordinator.http_api.answers import Answer, UsageAnswer


class CompletionLogprobs(Answer):
    """Lists in step, one entry a token. Of an echoed prompt's first token nothing is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(Answer):
    """Both the whole answer and a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None
