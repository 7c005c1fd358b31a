"""One row of the table of features: what is asked for and what must come of it, streamed or not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.clients.outcomes import Outcome


@dataclass(frozen=True)
class Feature:
    """`texts`, `finish_reasons` and `num_tokens` (prompt, completion) are checked where given, then `check`.

    `refused` is (param, code) of the 400 that the request must get instead.
    """

    name: str
    endpoint: str
    arguments: dict[str, Any]
    texts: tuple[str, ...] | None = None
    finish_reasons: tuple[str, ...] | None = None
    num_tokens: tuple[int, int] | None = None
    refused: tuple[str, str] | None = None
    check: Callable[[Outcome], None] | None = field(default=None, repr=False)

    @property
    def result(self) -> str:
        """For the page."""
        return "yes" if self.refused is None else f"400 `{self.refused[1]}`, naming `{self.refused[0]}`"

    def verify(self, outcome: Outcome) -> None:
        if self.refused is not None:
            assert outcome.refusal == ("BadRequestError", *self.refused)
            assert self.refused[0] in outcome.message
            return
        assert outcome.refusal is None, outcome.message
        if self.texts is not None:
            assert tuple(choice.text for choice in outcome.choices) == self.texts
        if self.finish_reasons is not None:
            assert tuple(choice.finish_reason for choice in outcome.choices) == self.finish_reasons
        if self.num_tokens is not None:
            assert (outcome.prompt_tokens, outcome.completion_tokens) == self.num_tokens
        assert all(choice.finish_reason in ("stop", "length", "tool_calls") for choice in outcome.choices)
        if self.check is not None:
            self.check(outcome)
