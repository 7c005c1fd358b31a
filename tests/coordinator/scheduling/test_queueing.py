from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.queueing import FifoQueue, QueueEntry


def entry(key: int, num_tokens: int = 10) -> QueueEntry:
    return QueueEntry(key, num_tokens - 1, 1, arrival_s=0.0, deadline_s=1.0)


@dataclass
class Model:
    keys: list[int] = field(default_factory=list)


@given(st.lists(st.tuples(st.sampled_from(["push", "front", "remove", "pop"]), st.integers(0, 9))))
def test_order_and_totals_under_any_operations(steps: list[tuple[str, int]]) -> None:
    queue, model = FifoQueue(), Model()
    for step, key in steps:
        if step == "remove":
            queue.remove(key)
            model.keys = [k for k in model.keys if k != key]
        elif step == "pop" and (head := queue.head()) is not None:
            assert head.key == model.keys.pop(0)
            queue.remove(head.key)
        elif step in ("push", "front") and key not in model.keys:
            (queue.push if step == "push" else queue.push_front)(entry(key, key + 2))
            model.keys.insert(len(model.keys) if step == "push" else 0, key)
        assert [e.key for e in queue] == model.keys
        assert queue.num_requests == len(model.keys)
        assert queue.num_tokens == sum(k + 2 for k in model.keys)


def test_a_key_cannot_be_queued_twice() -> None:
    queue = FifoQueue()
    queue.push(entry(1))
    with pytest.raises(ValueError, match="queued already"):
        queue.push_front(entry(1))
    assert queue.num_requests == 1
