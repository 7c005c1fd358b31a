"""Generation events to the response objects of /v1/completions. Sends nothing."""

from collections.abc import Sequence
from typing import Literal

from coordinator.generation.generation import ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import UsageAnswer
from coordinator.http_api.completion_answers import CompletionAnswer, CompletionChoice, CompletionLogprobs
from coordinator.http_api.logprobs import LogprobsWriter, joined


class CompletionFormat:
    """See `formats.AnswerFormat`."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s
        self._logprobs = [LogprobsWriter(generation.model.tokenizer) for _ in range(generation.num_choices)]

    def first_chunk(self, choice: int) -> None:
        return None

    def chunk(self, event: GenerationEvent) -> CompletionAnswer | None:
        choice = self._choice([event])
        shows = choice.text or choice.logprobs is not None or choice.finish_reason is not None
        return self._answer([choice]) if shows else None

    def usage_chunk(self, usage: UsageAnswer) -> CompletionAnswer:
        return self._answer([]).model_copy(update={"usage": usage})

    def whole(self, events: Sequence[GenerationEvent], usage: UsageAnswer) -> CompletionAnswer:
        by_choice: list[list[GenerationEvent]] = [[] for _ in range(self._generation.num_choices)]
        for event in events:
            by_choice[event.choice].append(event)
        return self._answer([self._choice(of_one) for of_one in by_choice]).model_copy(update={"usage": usage})

    def _choice(self, events: Sequence[GenerationEvent]) -> CompletionChoice:
        """What some events of one choice, at least one, say together."""
        index, last = events[0].choice, events[-1]
        text = "".join(event.text for event in events if not isinstance(event, ChoiceEnd))
        logprobs = joined([self._logprobs[index].write(event) for event in events])
        return _choice(index, text, logprobs, last if isinstance(last, ChoiceEnd) else None)

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        return CompletionAnswer(
            id=f"cmpl-{self._generation.id}",
            object="text_completion",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
        )


def _choice(index: int, text: str, logprobs: CompletionLogprobs | None, end: ChoiceEnd | None) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=_finish_name(end))


def _finish_name(end: ChoiceEnd | None) -> Literal["stop", "length"] | None:
    if end is None:
        return None
    return "stop" if end.finish_reason.value == "stop" else "length"
