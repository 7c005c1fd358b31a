"""The response objects of /v1/chat/completions, as OpenAI names their fields."""

from typing import Literal

from coordinator.http_api.answers import Answer, UsageAnswer

FinishName = Literal["stop", "length"]


class ChatMessageAnswer(Answer):
    """A message, or in a stream what comes next of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(Answer):
    index: int
    message: ChatMessageAnswer
    logprobs: None
    finish_reason: FinishName | None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatMessageAnswer
    logprobs: None
    finish_reason: FinishName | None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None
