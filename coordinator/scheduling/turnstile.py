"""Lets queued sequences through one at a time: a policy decides the order, this does the waiting. Event loop only."""

import asyncio
from collections.abc import Callable

from coordinator.scheduling.queueing import QueueEntry, QueuePolicy


class Ticket:
    """A place in the queue. `turn` is done once it is this sequence's turn, which lasts until `leave`."""

    def __init__(self, turnstile: "Turnstile", entry: QueueEntry) -> None:
        self._turnstile = turnstile
        self.entry = entry
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        """Give up the place, and the turn if it has come; harmless the second time."""
        self._turnstile.leave(self)


class Turnstile:
    """At most one ticket has its turn at any moment: whoever waits there for blocks holds up everyone behind."""

    def __init__(self, policy: QueuePolicy, on_leave: Callable[[], None] = lambda: None) -> None:
        self.policy = policy
        self._on_leave = on_leave
        self._tickets: dict[int, Ticket] = {}
        self._active: Ticket | None = None

    def join(self, entry: QueueEntry, *, front: bool = False) -> Ticket:
        """Queue `entry`, or put it back in front after a turn that came to nothing."""
        (self.policy.push_front if front else self.policy.push)(entry)
        ticket = Ticket(self, entry)
        self._tickets[entry.key] = ticket
        self._promote()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.entry.key) is not ticket:
            return
        del self._tickets[ticket.entry.key]
        self.policy.remove(ticket.entry.key)
        if self._active is ticket:
            self._active = None
            self._on_leave()
        self._promote()

    def _promote(self) -> None:
        head = self.policy.head()
        if self._active is None and head is not None:
            self._active = self._tickets[head.key]
            self._active.turn.set_result(None)
