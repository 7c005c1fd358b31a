"""Generation events to the response objects of /v1/completions. Sends nothing."""

from collections.abc import Sequence
from typing import Literal

from coordinator.generation.generation import ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import UsageAnswer
from coordinator.http_api.completion_answers import CompletionAnswer, CompletionChoice
from coordinator.http_api.logprobs import LogprobsWriter, joined


class CompletionFormat:
    """See `formats.AnswerFormat`."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s
        self._logprobs = [LogprobsWriter(generation.model.tokenizer) for _ in range(generation.num_choices)]
        self._pieces: list[list[CompletionChoice]] = [[] for _ in range(generation.num_choices)]

    def first_chunk(self, choice: int) -> None:
        return None

    def chunk(self, event: GenerationEvent) -> CompletionAnswer | None:
        choice = self._choice(event)
        shows = choice.text or choice.logprobs is not None or choice.finish_reason is not None
        return self._answer([choice]) if shows else None

    def usage_chunk(self, usage: UsageAnswer) -> CompletionAnswer:
        return self._answer([]).model_copy(update={"usage": usage})

    def add(self, event: GenerationEvent) -> None:
        self._pieces[event.choice].append(self._choice(event))

    def whole(self, usage: UsageAnswer) -> CompletionAnswer:
        return self._answer([_joined(pieces) for pieces in self._pieces]).model_copy(update={"usage": usage})

    def _choice(self, event: GenerationEvent) -> CompletionChoice:
        """What one event says."""
        return CompletionChoice(
            index=event.choice,
            text="" if isinstance(event, ChoiceEnd) else event.text,
            logprobs=self._logprobs[event.choice].write(event),
            finish_reason=_finish_name(event) if isinstance(event, ChoiceEnd) else None,
        )

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        return CompletionAnswer(
            id=f"cmpl-{self._generation.id}",
            object="text_completion",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
        )


def _joined(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """All that one choice said, the end last."""
    return CompletionChoice(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        logprobs=joined([piece.logprobs for piece in pieces]),
        finish_reason=pieces[-1].finish_reason,
    )


def _finish_name(end: ChoiceEnd) -> Literal["stop", "length"]:
    return "stop" if end.finish_reason.value == "stop" else "length"
