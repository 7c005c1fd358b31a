"""Generation events to the response objects of /v1/chat/completions. Sends nothing."""

from collections.abc import Sequence

from coordinator.generation.generation import ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import UsageAnswer
from coordinator.http_api.chat_answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessageAnswer,
    FinishName,
)


class ChatFormat:
    """See `formats.AnswerFormat`."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s

    def first_chunk(self, choice: int) -> ChatChunk:
        return self._chunk([_chunk_choice(choice, ChatMessageAnswer(role="assistant", content=""), None)])

    def chunk(self, event: GenerationEvent) -> ChatChunk | None:
        if isinstance(event, ChoiceEnd):
            return self._chunk([_chunk_choice(event.choice, ChatMessageAnswer(), _finish_name(event))])
        message = ChatMessageAnswer(content=event.text)
        return self._chunk([_chunk_choice(event.choice, message, None)]) if event.text else None

    def usage_chunk(self, usage: UsageAnswer) -> ChatChunk:
        return self._chunk([]).model_copy(update={"usage": usage})

    def whole(self, events: Sequence[GenerationEvent], usage: UsageAnswer) -> ChatAnswer:
        texts = [""] * self._generation.num_choices
        ends: list[ChoiceEnd] = []
        for event in events:
            if isinstance(event, ChoiceEnd):
                ends.append(event)
            else:
                texts[event.choice] += event.text
        choices = [
            ChatChoice(
                index=end.choice,
                message=ChatMessageAnswer(role="assistant", content=texts[end.choice]),
                logprobs=None,
                finish_reason=_finish_name(end),
            )
            for end in sorted(ends, key=lambda end: end.choice)
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


def _finish_name(end: ChoiceEnd) -> FinishName:
    return "stop" if end.finish_reason.value == "stop" else "length"


def _chunk_choice(index: int, delta: ChatMessageAnswer, finish_reason: FinishName | None) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)
