"""One request on its way, and what becomes its record. Sends nothing and reads no clock."""

import asyncio
from dataclasses import dataclass, field

from pdserve_bench.load.client import Answer
from pdserve_bench.load.plan import PlannedRequest
from pdserve_bench.load.records import Outcome, RequestRecord, TokenEvent

_BROKEN_OFF = frozenset({"error", "abort", "cancelled"})
"""Finish reasons of answers that are no success, whatever they hold."""


class HangUp(asyncio.CancelledError):
    """A planned cancellation. To the client whose stream it ends it is as if its task had been cancelled there."""


def verdict(request: PlannedRequest, answer: Answer, num_counted: int) -> tuple[Outcome, str]:
    """Whether an answer that ended without an error is one, and if not, why. `num_counted`: tokens in its events."""
    num_tokens = num_counted if answer.num_output_tokens is None else answer.num_output_tokens
    if num_tokens == 0 or num_counted == 0:
        return Outcome.FAILED, f"an answer without tokens: {num_tokens} by its usage, {num_counted} in its events"
    if answer.finish_reason in _BROKEN_OFF:
        return Outcome.FAILED, f"finish reason {answer.finish_reason} after {num_tokens} tokens"
    if num_tokens < request.max_tokens and answer.finish_reason != "stop":
        told = answer.finish_reason or "none"
        return Outcome.FAILED, f"{num_tokens} of {request.max_tokens} tokens, finish reason {told}"
    return Outcome.COMPLETED, ""


@dataclass(slots=True)
class Flight:
    """Times in seconds from the run's begin. Numbers are kept in flat lists, so that the garbage collector, whose
    pauses would show as ITL, has nothing to look at."""

    request: PlannedRequest
    sent_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome = Outcome.UNFINISHED
    error: str = ""
    answer: Answer | None = None
    num_counted: int = 0
    event_times_s: list[float] = field(default_factory=list[float])
    event_counts: list[int] = field(default_factory=list[int])

    def note(self, at_s: float, num_tokens: int) -> None:
        """Raises HangUp: as many tokens are there as the plan wants of this request."""
        self.event_times_s.append(at_s)
        self.event_counts.append(num_tokens)
        self.num_counted += num_tokens
        limit = self.request.cancel_after_tokens
        if limit is not None and self.num_counted >= limit:
            raise HangUp

    def end(self, at_s: float, outcome: Outcome, error: str = "") -> None:
        self.ended_s, self.outcome, self.error = at_s, outcome, error

    def record(self, counts_are_exact: bool) -> RequestRecord:
        """`counts_are_exact`: what holds where no answer says so."""
        request, answer = self.request, self.answer
        by_usage = None if answer is None else answer.num_output_tokens
        return RequestRecord(
            number=request.number,
            request_class=request.request_class,
            tenant=request.tenant,
            num_prompt_tokens=len(request.token_ids),
            max_tokens=request.max_tokens,
            scheduled_s=request.at_s,
            outcome=self.outcome,
            sent_s=self.sent_s,
            ended_s=self.ended_s,
            events=tuple(map(TokenEvent, self.event_times_s, self.event_counts)),
            num_output_tokens=self.num_counted if by_usage is None else by_usage,
            num_counted_tokens=self.num_counted,
            counts_are_exact=counts_are_exact if answer is None else answer.counts_are_exact,
            num_cached_tokens=None if answer is None else answer.num_cached_tokens,
            finish_reason="" if answer is None else answer.finish_reason,
            error=self.error,
            output="" if answer is None else answer.output,
            server=None if answer is None else answer.server,
        )
