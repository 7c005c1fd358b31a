"""What every endpoint's way of answering has in common: the interface, and a request's usage. Sends nothing."""

from typing import Protocol

from coordinator.generation.generation import ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import Answer, PromptTokensDetails, UsageAnswer
from coordinator.http_api.chat_answers import ChatAnswer
from coordinator.http_api.completion_answers import CompletionAnswer


class Totals:
    """A request's usage, summed over its choices as they end. Prompts count once, however many choices share them.

    So do their cached tokens: those that no choice had to compute. That one choice finds what another of the same
    request has just computed is not counted.
    """

    def __init__(self, generation: Generation) -> None:
        self._num_prompt_tokens = generation.num_prompt_tokens
        self._choices_per_prompt = generation.choices_per_prompt
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, end: ChoiceEnd) -> None:
        self._num_completion_tokens += end.usage.completion_tokens
        prompt, cached = end.choice // self._choices_per_prompt, end.usage.cached_tokens
        self._num_cached_tokens[prompt] = min(cached, self._num_cached_tokens.get(prompt, cached))

    def answer(self) -> UsageAnswer:
        return UsageAnswer(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens.values())),
        )


class AnswerFormat(Protocol):
    """One endpoint's way of saying it, for one generation. A chunk is one event of a stream; None: nothing to send."""

    def first_chunk(self, choice: int) -> Answer | None: ...

    def chunk(self, event: GenerationEvent) -> Answer | None: ...

    def usage_chunk(self, usage: UsageAnswer) -> Answer: ...

    def add(self, event: GenerationEvent) -> None:
        """Work an event of an answer that is not streamed into it, while others are still to come."""
        ...

    def whole(self, usage: UsageAnswer) -> ChatAnswer | CompletionAnswer:
        """The answer that is not streamed, from all of its events."""
        ...
