"""Generation events to the response objects of /v1/completions. Sends nothing."""

from collections.abc import Sequence
from typing import Literal

from coordinator.generation.generation import ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import UsageAnswer
from coordinator.http_api.completion_answers import CompletionAnswer, CompletionChoice


class CompletionFormat:
    """See `formats.AnswerFormat`."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s

    def first_chunk(self, choice: int) -> None:
        return None

    def chunk(self, event: GenerationEvent) -> CompletionAnswer | None:
        if isinstance(event, ChoiceEnd):
            return self._answer([_choice(event.choice, "", event)])
        return self._answer([_choice(event.choice, event.text, None)]) if event.text else None

    def usage_chunk(self, usage: UsageAnswer) -> CompletionAnswer:
        return self._answer([]).model_copy(update={"usage": usage})

    def whole(self, events: Sequence[GenerationEvent], usage: UsageAnswer) -> CompletionAnswer:
        texts = [""] * self._generation.num_choices
        ends: list[ChoiceEnd] = []
        for event in events:
            if isinstance(event, ChoiceEnd):
                ends.append(event)
            else:
                texts[event.choice] += event.text
        choices = [_choice(end.choice, texts[end.choice], end) for end in sorted(ends, key=lambda end: end.choice)]
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


def _choice(index: int, text: str, end: ChoiceEnd | None) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=_finish_name(end))


def _finish_name(end: ChoiceEnd | None) -> Literal["stop", "length"] | None:
    if end is None:
        return None
    return "stop" if end.finish_reason.value == "stop" else "length"
