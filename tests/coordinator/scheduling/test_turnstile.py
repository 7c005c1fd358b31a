from coordinator.scheduling.queueing import FifoQueue, QueueEntry
from coordinator.scheduling.turnstile import Ticket, Turnstile


def entry(key: int) -> QueueEntry:
    return QueueEntry(key, 1, 1, arrival_s=0.0, deadline_s=1.0)


def turns(tickets: list[Ticket]) -> list[bool]:
    return [ticket.turn.done() for ticket in tickets]


async def test_one_turn_at_a_time_in_order() -> None:
    left: list[str] = []
    turnstile = Turnstile(FifoQueue(), on_leave=lambda: left.append("left"))
    tickets = [turnstile.join(entry(key)) for key in range(3)]
    assert turns(tickets) == [True, False, False]
    tickets[1].leave()
    assert left == []
    tickets[0].leave()
    tickets[0].leave()
    assert left == ["left"]
    assert turns(tickets) == [True, False, True]
    assert turnstile.policy.num_requests == 1
    tickets[2].leave()
    assert turnstile.policy.num_requests == 0


async def test_one_put_back_goes_next_but_displaces_nobody() -> None:
    turnstile = Turnstile(FifoQueue())
    tickets = [turnstile.join(entry(key)) for key in range(3)]
    tickets[0].leave()
    again = turnstile.join(entry(0), front=True)
    assert turns([again, tickets[1]]) == [False, True]
    tickets[1].leave()
    assert turns([again, tickets[2]]) == [True, False]
    tickets[0].leave()
    assert turns([again, tickets[2]]) == [True, False]
