"""Which prompts get this step's token budget: shortest remaining first, with a bound on how often one is overtaken.

Policy only: plain Python, no clock. Knows nothing of blocks; what is queued here fits the pool already.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.ids import SequenceId


@dataclass(slots=True)
class _Waiting:
    sequence_id: SequenceId
    num_remaining_tokens: int
    arrival: int
    num_bypasses: int = 0
    begun: bool = False


class PrefillScheduler:
    """Shares `token_budget` prompt tokens a step.

    The shortest remaining prompt goes first, ties by arrival. A prompt that got nothing in a step in which a later one
    got something was bypassed; after `max_bypasses` of those it goes before all that were not, in order of arrival. So
    a short prompt never waits for a long one's many steps, and a long one waits for at most `max_bypasses` such steps
    (and for those ahead of it).
    """

    def __init__(self, token_budget: int, max_bypasses: int) -> None:
        self._token_budget = token_budget
        self._max_bypasses = max_bypasses
        self._waiting: dict[SequenceId, _Waiting] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def waits(self, sequence_id: SequenceId) -> bool:
        """Whether the prompt has tokens left to schedule."""
        return sequence_id in self._waiting

    @property
    def num_queued_tokens(self) -> int:
        return sum(entry.num_remaining_tokens for entry in self._waiting.values())

    def add(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Queue a prompt with `num_tokens` ≥ 1 tokens to compute, as far as is known before it begins."""
        self._waiting[sequence_id] = _Waiting(sequence_id, num_tokens, self._num_arrivals)
        self._num_arrivals += 1

    def remove(self, sequence_id: SequenceId) -> bool:
        """Forget a prompt; False if it was not here."""
        return self._waiting.pop(sequence_id, None) is not None

    def schedule(self, begin: Callable[[SequenceId], int | None] = lambda _: None) -> list[tuple[SequenceId, int]]:
        """Spend one budget: (prompt, number of its tokens) in order. Counts the tokens as computed.

        `begin` is called for each prompt at its first turn. It may correct the number of tokens to compute (0: it is
        not to be computed after all, and was removed).
        """
        budget = self._token_budget
        chosen: list[tuple[SequenceId, int]] = []
        latest_arrival = -1
        for entry in sorted(self._waiting.values(), key=self._rank):
            if budget == 0:
                break
            if not entry.begun:
                self._begin(entry, begin)
            num_tokens = min(budget, entry.num_remaining_tokens)
            if num_tokens == 0:
                continue
            budget -= num_tokens
            entry.num_remaining_tokens -= num_tokens
            latest_arrival = max(latest_arrival, entry.arrival)
            chosen.append((entry.sequence_id, num_tokens))
        self._count_bypasses({sequence_id for sequence_id, _ in chosen}, latest_arrival)
        for sequence_id, _ in chosen:
            if self._waiting[sequence_id].num_remaining_tokens == 0:
                del self._waiting[sequence_id]
        return chosen

    def _begin(self, entry: _Waiting, begin: Callable[[SequenceId], int | None]) -> None:
        entry.begun = True
        num_tokens = begin(entry.sequence_id)
        if num_tokens is not None:
            entry.num_remaining_tokens = num_tokens

    def _rank(self, entry: _Waiting) -> tuple[int, int, int]:
        if entry.num_bypasses >= self._max_bypasses:
            return (0, entry.arrival, entry.arrival)
        return (1, entry.num_remaining_tokens, entry.arrival)

    def _count_bypasses(self, chosen: set[SequenceId], latest_arrival: int) -> None:
        for entry in self._waiting.values():
            if entry.sequence_id not in chosen and entry.arrival < latest_arrival:
                entry.num_bypasses += 1
