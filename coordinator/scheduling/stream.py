"""One sequence's output on its way to one reader: in order, each index once, bounded. Knows nothing of workers.

push (any order) ──► IndexOrder (holds early ones) ──► unread deltas ──► reader
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

from coordinator.sequences import SequenceEnd, SequenceTimings, TokenDelta
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId


class IndexOrder:
    """Turns deltas that arrive in any order, even twice, into deltas in order, each index once."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._early: dict[int, TokenDelta] = {}
        self.next_index = 0

    def push(self, delta: TokenDelta) -> list[TokenDelta]:
        """The deltas that can be delivered now.

        Raises:
            PdserveError: INTERNAL, for an index that the sequence cannot have.
        """
        if delta.first_index + len(delta.token_ids) > self._max_tokens:
            raise PdserveError(
                ErrorReason.INTERNAL,
                f"a worker sent token {delta.first_index + len(delta.token_ids)} of at most {self._max_tokens}",
            )
        held = self._early.get(delta.first_index)
        if held is None or len(held.token_ids) < len(delta.token_ids):
            self._early[delta.first_index] = delta
        return self._ready()

    def _ready(self) -> list[TokenDelta]:
        ready: list[TokenDelta] = []
        for first_index in sorted(self._early):
            if first_index > self.next_index:
                break
            fresh = _from_index(self._early.pop(first_index), self.next_index)
            if fresh is not None:
                ready.append(fresh)
                self.next_index += len(fresh.token_ids)
        return ready


def _from_index(delta: TokenDelta, index: int) -> TokenDelta | None:
    skip = index - delta.first_index
    if skip == 0 and delta.token_ids:
        return delta
    if skip >= len(delta.token_ids):
        return None
    return replace(delta, first_index=index, token_ids=delta.token_ids[skip:], logprobs=delta.logprobs[skip:])


@dataclass(frozen=True, slots=True)
class UnreadBound:
    """A reader may leave `max_tokens` unread, and more for less than `grace_s`: a burst is no fault of the reader's."""

    max_tokens: int
    grace_s: float


MERGE_ABOVE = 8
"""So many unread deltas are handed over as one: a reader that is behind catches up."""


def _merged(deltas: Iterable[TokenDelta]) -> TokenDelta:
    first, *rest = deltas
    return replace(
        first,
        token_ids=first.token_ids + tuple(t for delta in rest for t in delta.token_ids),
        logprobs=first.logprobs + tuple(entry for delta in rest for entry in delta.logprobs),
    )


class TokenStream:
    """A `SequenceStream`: whoever runs the sequence delivers and ends, one reader iterates, either may stop it."""

    def __init__(
        self,
        sequence_id: SequenceId,
        bound: UnreadBound,
        on_cancel: Callable[[], None],
        timings: Callable[[], SequenceTimings],
    ) -> None:
        self._id = sequence_id
        self._bound = bound
        self._on_cancel = on_cancel
        self._timings = timings
        self._unread: deque[TokenDelta] = deque()
        self._num_unread_tokens = 0
        self._over_since_s: float | None = None
        self._end: SequenceEnd | PdserveError | None = None
        self._end_was_read = False
        self._news = asyncio.Event()

    @property
    def id(self) -> SequenceId:
        return self._id

    @property
    def end(self) -> SequenceEnd | PdserveError | None:
        """How it ended, whether or not that was read; None while it goes on."""
        return self._end

    def timings(self) -> SequenceTimings:
        return self._timings()

    def cancel(self) -> None:
        if self._end is None:
            self._unread.clear()
            self._on_cancel()

    def deliver(self, delta: TokenDelta, now_s: float) -> bool:
        """Queue a delta for the reader; False if that is more than it may leave unread (the delta is dropped)."""
        if self._unread and self._num_unread_tokens + len(delta.token_ids) > self._bound.max_tokens:
            self._over_since_s = now_s if self._over_since_s is None else self._over_since_s
            if now_s - self._over_since_s >= self._bound.grace_s:
                return False
        self._unread.append(delta)
        self._num_unread_tokens += len(delta.token_ids)
        self._news.set()
        return True

    def finish(self, end: SequenceEnd | PdserveError) -> None:
        """No more deltas. Only the first end counts; what is unread is still delivered before it."""
        if self._end is None:
            self._end = end
            self._news.set()

    def __aiter__(self) -> AsyncIterator[TokenDelta | SequenceEnd]:
        return self

    def _take(self) -> TokenDelta:
        if len(self._unread) > MERGE_ABOVE:
            delta = _merged(self._unread)
            self._unread.clear()
        else:
            delta = self._unread.popleft()
        self._num_unread_tokens -= len(delta.token_ids)
        if self._num_unread_tokens <= self._bound.max_tokens:
            self._over_since_s = None
        return delta

    async def __anext__(self) -> TokenDelta | SequenceEnd:
        while not self._unread and self._end is None:
            self._news.clear()
            await self._news.wait()
        if self._unread:
            return self._take()
        if isinstance(self._end, PdserveError):
            raise self._end
        if self._end is None or self._end_was_read:
            raise StopAsyncIteration
        self._end_was_read = True
        return self._end
