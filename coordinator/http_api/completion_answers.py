"""The response objects of /v1/completions, as OpenAI names their fields."""

from typing import Literal

from coordinator.http_api.answers import Answer, UsageAnswer


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: None
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
