"""The response objects of /v1/chat/completions, as OpenAI names their fields."""

from typing import Literal

from pydantic import Field

from coordinator.http_api.answers import Answer, UsageAnswer

FinishName = Literal["stop", "length", "tool_calls"]


class CalledFunction(Answer):
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ToolCallAnswer(Answer):
    """`index`, the call's number in its choice, in streams only."""

    index: int = 0
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessageAnswer(Answer):
    """A message, or in a stream what comes next of it. `content` is null in a message of nothing but calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    tool_calls: list[ToolCallAnswer] = []  # noqa: RUF012


class TopLogprob(Answer):
    """`bytes`: the token's part of the text in UTF-8, which `token` shows only where it is whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """An entry for each token of the choice, or of the chunk."""

    content: list[ChatLogprob]
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None


class WrittenChatChoice(ChatChoice):
    """Its `logprobs` are empty and their `entries` JSON already: a long answer has too many to keep as objects."""

    entries: list[str] = Field(exclude=True)

    def to_json(self) -> str:
        # No text of the choice can hold this: in JSON its quotes would be escaped.
        empty = '"logprobs":{"content":[]'
        return super().to_json().replace(empty, f"{empty[:-1]}{','.join(self.entries)}]", 1)


class ChatChunkChoice(Answer):
    index: int
    delta: ChatMessageAnswer
    logprobs: ChatLogprobs | None
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
