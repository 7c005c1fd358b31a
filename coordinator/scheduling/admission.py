"""Whether new sequences may join a model's queue: a pure function of the fleet's views and the queue."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from coordinator.fleet.values import Role
from coordinator.scheduling.queueing import QueueEntry
from coordinator.scheduling.routing import Need, WorkerView
from pdserve.core.errors import ErrorReason, PdserveError

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most that may wait, counted in sequences and in tokens (prompt + max_tokens)."""

    max_requests: int
    max_tokens: int


def check_pools(model: str, views: Seq[WorkerView], entries: Seq[QueueEntry]) -> None:
    """Every entry could run on the model's workers, were they idle.

    Raises:
        PdserveError: NO_WORKERS, NEVER_FITS.
    """
    for entry in entries:
        need = Need(entry.num_prompt_tokens, entry.num_tokens_max)
        _check_pool(model, views, Role.PREFILL, need.num_prompt_tokens, "the prompt alone")
        if entry.max_tokens > 1:
            _check_pool(model, views, Role.DECODE, need.num_tokens_max, "prompt + max_tokens")


def _check_pool(model: str, views: Seq[WorkerView], role: Role, num_tokens: int, what: str) -> None:
    pool = [view for view in views if view.can(role)]
    if not pool:
        message = f"no {role.value} worker for {model} is ready"
        raise PdserveError(ErrorReason.NO_WORKERS, message, retry_after_s=MIN_RETRY_AFTER_S)
    if any(view.info.blocks_for(num_tokens) <= view.usable_blocks for view in pool):
        return
    largest = max(pool, key=lambda view: view.usable_blocks * view.info.capacity.block_size)
    raise PdserveError(
        ErrorReason.NEVER_FITS,
        f"{what} needs {num_tokens} tokens ({largest.info.blocks_for(num_tokens)} KV blocks); the largest "
        f"{role.value} worker holds {largest.usable_blocks * largest.info.capacity.block_size} "
        f"({largest.usable_blocks} blocks)",
        param="prompt" if role is Role.PREFILL else "max_tokens",
    )


def split_startable(entries: Iterable[QueueEntry], views: Seq[WorkerView]) -> list[QueueEntry]:
    """Those of `entries` (in service order) that must wait; the leading ones, for which there are blocks now, need not.

    Sequences of one token reserve nothing, so nothing bounds them but the queue: they always count as waiting.
    """
    free = {view.key: view.free_blocks for view in views if view.can(Role.DECODE)}
    infos = {view.key: view.info for view in views}
    waiting: list[QueueEntry] = []
    blocked = False
    for entry in entries:
        if blocked or entry.max_tokens == 1 or not free:
            waiting.append(entry)
            continue
        best = max(free, key=lambda key: free[key])
        needed = infos[best].blocks_for(entry.num_tokens_max)
        if needed <= free[best]:
            free[best] -= needed
        else:
            blocked = True
            waiting.append(entry)
    return waiting


def check_queue(queued: Seq[QueueEntry], new: Seq[QueueEntry], bounds: QueueBounds, views: Seq[WorkerView]) -> None:
    """The queue with `new` at its end stays within bounds, not counting what can start at once.

    Raises:
        PdserveError: QUEUE_FULL, without a hint.
    """
    waiting: Seq[QueueEntry] = (*queued, *new)
    if not _exceeds(waiting, bounds):
        return
    waiting = split_startable(waiting, views)
    if _exceeds(waiting, bounds):
        raise PdserveError(
            ErrorReason.QUEUE_FULL,
            f"{len(queued)} sequences are queued; at most {bounds.max_requests} sequences of {bounds.max_tokens} "
            "tokens in all may wait",
        )


def _exceeds(entries: Seq[QueueEntry], bounds: QueueBounds) -> bool:
    return len(entries) > bounds.max_requests or sum(entry.num_tokens_max for entry in entries) > bounds.max_tokens


class DepartureRate:
    """How fast sequences leave the queue, for an honest retry hint: the last few departures' times."""

    def __init__(self, window: int = 32) -> None:
        self._departures_s: deque[float] = deque(maxlen=window)

    def record(self, now_s: float) -> None:
        self._departures_s.append(now_s)

    def retry_after_s(self, num_ahead: int, now_s: float) -> float:
        """Seconds until `num_ahead` sequences will have left at the recent pace, within sane limits."""
        if len(self._departures_s) < 2:
            return MIN_RETRY_AFTER_S
        gap_s = (now_s - self._departures_s[0]) / len(self._departures_s)
        return min(max(num_ahead * gap_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
