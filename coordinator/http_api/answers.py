"""OpenAI's response objects: their fields and nothing else."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishName = Literal["stop", "length"]


class Answer(BaseModel):
    """One JSON object sent to a client."""

    model_config = ConfigDict(frozen=True)

    def to_json(self) -> str:
        """Only what was set: OpenAI's chunks leave out more than they hold."""
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(Answer):
    cached_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishName | None


class CompletionAnswer(Answer):
    """Both the whole answer and a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


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


class ModelAnswer(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdserve"
    max_model_len: int
    context_length: int
    default_max_tokens: int
    ready: bool


class ModelListAnswer(Answer):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]
