"""One outbound transfer's automaton: what the service asked for, how far the current attempt is, what comes next.

    PREPARE ─► SEND … SEND ─► COMMIT ─► ended          RENEW: nothing to send, but the lease must not lapse
       ▲                        │ no answer
       └──── ASK_COMMITTED ◄────┘ (after a new handshake)      ABORT: from anywhere, then ended

No threads and no clock: its pair has both.
"""

from collections.abc import Callable
from enum import Enum

from kv_transfer.interfaces import OutboundEnd, TransferPlan
from kv_transfer.messages import Busy, CommitOrder, PrepareOrder, Ready
from kv_transfer.outbound.link import ChunkBatch
from pdserve.core.errors import ErrorReason, PdserveError

MAX_ATTEMPTS = 2
FOREVER_S = float("inf")


class Step(Enum):
    PREPARE = "prepare"
    SEND = "send"
    RENEW = "renew"
    COMMIT = "commit"
    ASK_COMMITTED = "ask_committed"
    ABORT = "abort"


class Outbound:
    """Mutable; wishes (`add_group`, `ask_commit`, `ask_end`) and steps are made under the pair's lock."""

    def __init__(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None], now_s: float) -> None:
        self.plan = plan
        self.on_end = on_end
        self.deadline_s = now_s + plan.deadline_remaining_s
        self.ended = False
        self.transfer_id = 0
        self._started_s = now_s
        self._groups: list[tuple[int, ...]] = []
        self._num_blocks = 0
        self._output_token_ids: tuple[int, ...] | None = None
        self._commit_asked_s = now_s
        self._end_error: PdserveError | None = None
        self._num_attempts = 1
        self._asked_id = 0
        self._lease_s = FOREVER_S
        self._not_before_s = now_s
        self._num_bytes = 0
        self._reset()

    def _reset(self) -> None:
        self.prepared = False
        self._num_groups_sent = 0
        self._num_blocks_sent = 0
        self._next_sequence = 0
        self._renew_s = FOREVER_S

    def add_group(self, block_ids: tuple[int, ...]) -> None:
        self._num_blocks += len(block_ids)
        if self._num_blocks > self.plan.num_blocks:
            planned = f"{self._num_blocks} blocks were handed over where {self.plan.num_blocks} were planned"
            self.ask_end(PdserveError(ErrorReason.INTERNAL, planned))
        elif block_ids:
            self._groups.append(block_ids)

    def ask_commit(self, output_token_ids: tuple[int, ...], now_s: float) -> None:
        self._output_token_ids = output_token_ids
        self._commit_asked_s = now_s
        if self._num_blocks < self.plan.num_blocks:
            missing = f"commit after {self._num_blocks} blocks where {self.plan.num_blocks} were planned"
            self.ask_end(PdserveError(ErrorReason.INTERNAL, missing))

    def ask_end(self, error: PdserveError) -> None:
        """The first error counts."""
        self._end_error = self._end_error or error

    def next_step(self, now_s: float) -> Step | None:
        """What to do now, if anything; an expired deadline becomes an abort."""
        if now_s >= self.deadline_s:
            self.ask_end(PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed during the KV transfer"))
        if self._end_error is not None:
            return Step.ABORT
        return self._next_work(now_s) if now_s >= self._not_before_s else None

    def _next_work(self, now_s: float) -> Step | None:
        if self._asked_id:
            return Step.ASK_COMMITTED
        if not self.prepared:
            return Step.PREPARE
        if self._num_groups_sent < len(self._groups):
            return Step.SEND
        if self._output_token_ids is not None:
            return Step.COMMIT
        return Step.RENEW if now_s >= self._renew_s else None

    def next_time_s(self, now_s: float) -> float:
        """When `next_step` may change without a new wish."""
        later = self._not_before_s if now_s < self._not_before_s else self._renew_s
        return min(self.deadline_s, later)

    @property
    def end_error(self) -> PdserveError | None:
        return self._end_error

    def prepare_order(self, now_s: float) -> PrepareOrder:
        plan = self.plan
        return PrepareOrder(
            transfer_id=self.transfer_id,
            sequence_id=plan.sequence_id,
            reservation_id=plan.reservation_id,
            num_tokens=plan.num_tokens,
            num_blocks=plan.num_blocks,
            first_block=plan.first_block,
            deadline_remaining_s=self.deadline_s - now_s,
        )

    def on_prepared(self, answer: Ready | Busy, now_s: float) -> None:
        match answer:
            case Ready():
                self.prepared = True
                self._lease_s = answer.lease_s
                self._renew(now_s)
            case Busy():
                self._not_before_s = now_s + answer.retry_after_s

    def next_batch(self) -> ChunkBatch:
        """The first group that was not sent; none left: an empty batch."""
        unsent = self._num_groups_sent < len(self._groups)
        block_ids = self._groups[self._num_groups_sent] if unsent else ()
        return ChunkBatch(self.transfer_id, self._next_sequence, self._num_blocks_sent, block_ids)

    def on_sent(self, batch: ChunkBatch, next_sequence: int, num_bytes: int, now_s: float) -> None:
        self._num_groups_sent += bool(batch.block_ids)
        self._num_blocks_sent += len(batch.block_ids)
        self._next_sequence = next_sequence
        self._num_bytes += num_bytes
        self._renew(now_s)

    def commit_order(self, now_s: float) -> CommitOrder:
        return CommitOrder(
            transfer_id=self._asked_id or self.transfer_id,
            num_tokens=self.plan.num_tokens,
            num_blocks=self.plan.num_blocks,
            num_chunks=self._next_sequence,
            output_token_ids=self._output_token_ids or (),
            since_prefill_end_s=now_s - self._commit_asked_s,
        )

    def on_commit_unanswered(self) -> None:
        """The peer may have committed: it is asked again by the old id before anything is sent anew."""
        self._asked_id = self._asked_id or self.transfer_id

    def on_not_committed(self) -> None:
        self._asked_id = 0

    def fail_attempt(self) -> bool:
        """The pair broke: start anew from the first block; false if this was the last attempt."""
        self._reset()
        self._num_attempts += 1
        return self._num_attempts <= MAX_ATTEMPTS

    def end(self, error: PdserveError | None, transport: str, now_s: float) -> OutboundEnd:
        self.ended = True
        return OutboundEnd(self.plan.sequence_id, error, self._num_bytes, now_s - self._started_s, transport)

    def _renew(self, now_s: float) -> None:
        self._renew_s = now_s + self._lease_s / 3
