"""What every endpoint's way of answering has in common: the interface, and a request's usage. Sends nothing."""

from typing import Protocol

from coordinator.generation.generation import ChoiceDelta, Generation, GenerationEvent
from coordinator.http_api.answers import PromptTokensDetails, UsageAnswer
from coordinator.http_api.chat_answers import ChatAnswer, ChatChunk
from coordinator.http_api.completion_answers import CompletionAnswer

Chunk = ChatChunk | CompletionAnswer
"""One event of a stream."""


class Totals:
    """A request's usage so far, over all choices. Prompts count once, however many choices share them.

    An output token counts from its event on, shown or not: text may be held back, and some tokens have none.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_completion_tokens = 0

    def add(self, event: GenerationEvent) -> None:
        if isinstance(event, ChoiceDelta):
            self._num_completion_tokens += len(event.token_ids)

    def answer(self) -> UsageAnswer:
        num_prompt_tokens, num_completion_tokens = self._generation.num_prompt_tokens, self._num_completion_tokens
        return UsageAnswer(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._generation.num_cached_tokens),
        )


class AnswerFormat(Protocol):
    """One endpoint's way of saying it, for one generation. Instead of a chunk None: nothing to send."""

    def first_chunk(self, choice: int) -> Chunk | None: ...

    def chunk(self, event: GenerationEvent) -> Chunk | None: ...

    def usage_chunk(self, usage: UsageAnswer) -> Chunk: ...

    def add(self, event: GenerationEvent) -> None:
        """Work an event of an answer that is not streamed into it, while others are still to come."""
        ...

    def whole(self, usage: UsageAnswer) -> ChatAnswer | CompletionAnswer:
        """The answer that is not streamed, from all of its events."""
        ...
