"""In which order waiting sequences go: the policy alone. Who waits for what, and how, is turnstile's business."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A waiting sequence. `key` is unique in its queue; times are readings of one monotonic clock."""

    key: int
    num_prompt_tokens: int
    max_tokens: int
    arrival_s: float
    deadline_s: float
    tenant: str = "default"
    request_class: str = "default"

    @property
    def num_tokens_max(self) -> int:
        return self.num_prompt_tokens + self.max_tokens


class QueuePolicy(Protocol):
    """A queue of one model's sequences. Iteration is in service order."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Work waiting: prompt + max_tokens of every entry."""
        ...

    def push(self, entry: QueueEntry) -> None: ...

    def push_front(self, entry: QueueEntry) -> None:
        """Put back one that had its turn already."""
        ...

    def head(self) -> QueueEntry | None: ...

    def remove(self, key: int) -> None:
        """Take out an entry, wherever it stands; an unknown key is ignored."""
        ...

    def __iter__(self) -> Iterator[QueueEntry]: ...


class FifoQueue:
    """First come, first served. Every operation takes constant time."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, QueueEntry] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def push(self, entry: QueueEntry) -> None:
        if entry.key in self._entries:
            raise ValueError(f"key {entry.key} is queued already")
        self._entries[entry.key] = entry
        self._num_tokens += entry.num_tokens_max

    def push_front(self, entry: QueueEntry) -> None:
        self.push(entry)
        self._entries.move_to_end(entry.key, last=False)

    def head(self) -> QueueEntry | None:
        return next(iter(self._entries.values()), None)

    def remove(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_tokens -= entry.num_tokens_max

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(self._entries.values())
