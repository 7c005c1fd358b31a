"""Generation events to OpenAI's response objects, for each endpoint. Sends nothing."""

from collections.abc import Sequence
from typing import Protocol

from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, Generation
from coordinator.http_api.answers import (
    Answer,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessageAnswer,
    CompletionAnswer,
    CompletionChoice,
    FinishName,
    PromptTokensDetails,
    UsageAnswer,
)


class Totals:
    """A request's usage, summed over its choices as they end. Prompts count once, however many choices share them."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0

    def add(self, end: ChoiceEnd) -> None:
        self._num_completion_tokens += end.usage.completion_tokens
        self._num_cached_tokens = max(self._num_cached_tokens, end.usage.cached_tokens)

    def answer(self) -> UsageAnswer:
        return UsageAnswer(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
        )


class AnswerFormat(Protocol):
    """One endpoint's way of saying it. A `…_chunk` is one event of a stream, or None for nothing to send."""

    def first_chunk(self, choice: int) -> Answer | None: ...

    def delta_chunk(self, delta: ChoiceDelta) -> Answer | None: ...

    def end_chunk(self, end: ChoiceEnd) -> Answer: ...

    def usage_chunk(self, usage: UsageAnswer) -> Answer: ...

    def whole(self, texts: Sequence[str], ends: Sequence[ChoiceEnd], usage: UsageAnswer) -> Answer: ...


def finish_name(end: ChoiceEnd) -> FinishName:
    return "stop" if end.finish_reason.value == "stop" else "length"


class CompletionFormat:
    """Of /v1/completions."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s

    def first_chunk(self, choice: int) -> None:
        return None

    def delta_chunk(self, delta: ChoiceDelta) -> CompletionAnswer | None:
        return self._answer([_completion_choice(delta.choice, delta.text, None)]) if delta.text else None

    def end_chunk(self, end: ChoiceEnd) -> CompletionAnswer:
        return self._answer([_completion_choice(end.choice, "", finish_name(end))])

    def usage_chunk(self, usage: UsageAnswer) -> CompletionAnswer:
        return self._answer([]).model_copy(update={"usage": usage})

    def whole(self, texts: Sequence[str], ends: Sequence[ChoiceEnd], usage: UsageAnswer) -> CompletionAnswer:
        choices = [_completion_choice(end.choice, texts[end.choice], finish_name(end)) for end in ends]
        return self._answer(choices).model_copy(update={"usage": usage})

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        return CompletionAnswer(
            id=f"cmpl-{self._generation.id}",
            object="text_completion",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
        )


class ChatFormat:
    """Of /v1/chat/completions."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s

    def first_chunk(self, choice: int) -> ChatChunk:
        return self._chunk([_chunk_choice(choice, ChatMessageAnswer(role="assistant", content=""), None)])

    def delta_chunk(self, delta: ChoiceDelta) -> ChatChunk | None:
        message = ChatMessageAnswer(content=delta.text)
        return self._chunk([_chunk_choice(delta.choice, message, None)]) if delta.text else None

    def end_chunk(self, end: ChoiceEnd) -> ChatChunk:
        return self._chunk([_chunk_choice(end.choice, ChatMessageAnswer(), finish_name(end))])

    def usage_chunk(self, usage: UsageAnswer) -> ChatChunk:
        return self._chunk([]).model_copy(update={"usage": usage})

    def whole(self, texts: Sequence[str], ends: Sequence[ChoiceEnd], usage: UsageAnswer) -> ChatAnswer:
        choices = [
            ChatChoice(
                index=end.choice,
                message=ChatMessageAnswer(role="assistant", content=texts[end.choice]),
                logprobs=None,
                finish_reason=finish_name(end),
            )
            for end in ends
        ]
        return ChatAnswer(
            id=f"chatcmpl-{self._generation.id}",
            object="chat.completion",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._generation.id}",
            object="chat.completion.chunk",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
        )


def _completion_choice(index: int, text: str, finish_reason: FinishName | None) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=finish_reason)


def _chunk_choice(index: int, delta: ChatMessageAnswer, finish_reason: FinishName | None) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)
