"""The authority on promised KV blocks: lifetime reservations with leases. Counts only; block ids are the pool's.

Knows nothing of the prefix cache. A reservation counts a sequence's whole lifetime, blocks that it shares included, so
a block shared by three is counted three times: what is held is never more than what is promised. Cached blocks that
nobody holds can be evicted, and count as free.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens


@dataclass(frozen=True, slots=True)
class Reservation:
    """`num_blocks` promised to one sequence until released.

    It is due to be released when nobody has renewed it before `lease_end_s`, and at `deadline_s` whoever renews it.
    """

    reservation_id: int
    sequence_id: SequenceId
    num_blocks: int
    lease_end_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Denied:
    """Too little room: a retry is pointless before the ledger's version changes, or ever if `never_fits`."""

    needed: int
    free: int
    ledger_version: int
    never_fits: bool


@dataclass(frozen=True, slots=True)
class Demand:
    """What a sequence may need at most, and is expected to need, in tokens."""

    num_tokens_max: int
    num_tokens_expected: int


ReservationPolicy = Callable[[Demand, int], int]
"""(demand, block size) → blocks to reserve."""


def strict_lifetime(demand: Demand, block_size: int) -> int:
    """Everything the sequence can ever hold: growth never fails, nothing is ever preempted."""
    return blocks_for_tokens(demand.num_tokens_max, block_size)


class ReservationLedger:
    """Grants, renews and takes back reservations. One thread; the clock's reading is an argument.

    Invariant: the sum of granted blocks never exceeds `num_usable_blocks`.
    """

    def __init__(
        self, num_usable_blocks: int, block_size: int, lease_s: float, policy: ReservationPolicy = strict_lifetime
    ) -> None:
        self.num_usable_blocks = num_usable_blocks
        self.block_size = block_size
        self.lease_s = lease_s
        self.version = 0
        self.num_reserved_blocks = 0
        self._policy = policy
        self._next_id = 1
        self._reservations: dict[int, Reservation] = {}
        self._by_sequence: dict[SequenceId, int] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def num_unreserved_blocks(self) -> int:
        return self.num_usable_blocks - self.num_reserved_blocks

    def reserve(
        self, sequence_id: SequenceId, demand: Demand, now_s: float, deadline_s: float = math.inf
    ) -> Reservation | Denied:
        """Answer at once. Asking again for the same sequence gives the same reservation."""
        if (held := self._by_sequence.get(sequence_id)) is not None:
            return self._reservations[held]
        needed = self._policy(demand, self.block_size)
        if needed > self.num_unreserved_blocks:
            never_fits = needed > self.num_usable_blocks
            return Denied(needed, self.num_unreserved_blocks, self.version, never_fits)
        reservation = Reservation(self._next_id, sequence_id, needed, now_s + self.lease_s, deadline_s)
        self._next_id += 1
        self._reservations[reservation.reservation_id] = reservation
        self._by_sequence[sequence_id] = reservation.reservation_id
        self.num_reserved_blocks += needed
        return reservation

    def get(self, reservation_id: int) -> Reservation | None:
        return self._reservations.get(reservation_id)

    def of_sequence(self, sequence_id: SequenceId) -> Reservation | None:
        held = self._by_sequence.get(sequence_id)
        return None if held is None else self._reservations[held]

    def of_coordinator(self, coordinator_incarnation: int) -> list[Reservation]:
        return [
            reservation
            for reservation in self._reservations.values()
            if reservation.sequence_id.coordinator_incarnation == coordinator_incarnation
        ]

    def renew(self, coordinator_incarnation: int, now_s: float) -> None:
        """A coordinator's heartbeat: every reservation it holds lives on for a full lease."""
        for reservation in self.of_coordinator(coordinator_incarnation):
            renewed = replace(reservation, lease_end_s=now_s + self.lease_s)
            self._reservations[reservation.reservation_id] = renewed

    def release(self, reservation_id: int) -> bool:
        """Give the blocks back; False if there is nothing (any more) to give back."""
        reservation = self._reservations.pop(reservation_id, None)
        if reservation is None:
            return False
        del self._by_sequence[reservation.sequence_id]
        self.num_reserved_blocks -= reservation.num_blocks
        self.version += 1
        return True

    def expired(self, now_s: float) -> list[Reservation]:
        """Those whose time is up; they stay granted until released, when their blocks are really free."""
        return [r for r in self._reservations.values() if min(r.lease_end_s, r.deadline_s) <= now_s]
