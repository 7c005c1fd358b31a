"""Hand-over inside one process and one pool: no byte moves, the very same blocks change their owner."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from kv_transfer.interfaces import InboundCommit, OutboundEnd, TransferPlan
from pdserve.core.errors import ErrorReason, PdserveError


class LocalTransfer:
    """Implements OutboundTransfer; everything happens inside the call, on the caller's thread."""

    def __init__(
        self,
        plan: TransferPlan,
        hand_over: Callable[[InboundCommit], None],
        on_end: Callable[[OutboundEnd], None],
        on_forget: Callable[["LocalTransfer"], None],
    ) -> None:
        self._plan = plan
        self._hand_over = hand_over
        self._on_end = on_end
        self._on_forget = on_forget
        self._started_s = time.monotonic()
        self._block_ids: list[int] = []
        self._ended = False

    def send(self, block_ids: Seq[int]) -> None:
        self._block_ids += block_ids

    def commit(self, output_token_ids: Seq[int]) -> None:
        if self._ended:
            return
        if len(self._block_ids) != self._plan.num_blocks:
            counts = f"{len(self._block_ids)} blocks were handed over where {self._plan.num_blocks} were planned"
            self._end(PdserveError(ErrorReason.INTERNAL, counts))
            return
        commit = InboundCommit(
            sequence_id=self._plan.sequence_id,
            reservation_id=self._plan.reservation_id,
            block_ids=tuple(self._block_ids),
            num_tokens=self._plan.num_tokens,
            output_token_ids=tuple(output_token_ids),
            num_bytes=0,
            since_prefill_end_s=0.0,
        )
        try:
            self._hand_over(commit)
        except PdserveError as error:
            self._end(error)
        else:
            self._end(None)

    def abort(self, reason: str) -> None:
        if not self._ended:
            self._end(PdserveError(ErrorReason.CANCELLED, reason))

    def _end(self, error: PdserveError | None) -> None:
        self._ended = True
        self._on_forget(self)
        duration_s = time.monotonic() - self._started_s
        self._on_end(OutboundEnd(self._plan.sequence_id, error, 0, duration_s, "local"))


class LocalKvSender:
    """Implements KvSender for a colocated worker; one thread only, its engine's, which also sees `on_end`.

    `hand_over` takes ownership of `block_ids` (those given to `send`, in order) before `on_end` reports success; it
    raises PdserveError to refuse, and the blocks then stay with the sender.
    """

    def __init__(self, hand_over: Callable[[InboundCommit], None]) -> None:
        self._hand_over = hand_over
        self._open: set[LocalTransfer] = set()
        self._closed = False

    def open(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> LocalTransfer:
        """Raises:
        PdserveError: DRAINING: the sender was closed.
        """
        if self._closed:
            raise PdserveError(ErrorReason.DRAINING, "the worker is stopping")
        transfer = LocalTransfer(plan, self._hand_over, on_end, self._open.discard)
        self._open.add(transfer)
        return transfer

    @property
    def num_open(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._closed = True
        for transfer in list(self._open):
            transfer.abort("the worker is stopping")
