"""Which inbound transfers are open, which were committed, and the counts. No locks, no host: transfers.py has both."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.inbound.pair_table import PairTable
from kv_transfer.inbound.transfer import InboundPhase, InboundTransfer
from kv_transfer.messages import Busy, PairKey, PrepareOrder, stale
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens

MAX_COMMITTED = 4096
CLOSING_RETRY_S = 0.02
FULL_RETRY_S = 0.1

TransferKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class InboundStats:
    """Totals since start, and `num_open` now. A cancelled transfer did not fail."""

    num_open: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_bytes: int = 0
    stale_events: int = 0


class InboundRegistry:
    """Mutable; every call is made under the owner's lock. A transfer's key is (sender's incarnation, transfer id)."""

    def __init__(self, layout: KvLayout, lease_s: float, max_open: int) -> None:
        self.pairs = PairTable()
        self.stale_events = 0
        self._layout = layout
        self._lease_s = lease_s
        self._max_open = max_open
        self._open: dict[TransferKey, InboundTransfer] = {}
        self._by_reservation: dict[int, InboundTransfer] = {}
        self._committed: OrderedDict[TransferKey, None] = OrderedDict()
        self._num_completed = self._num_failed = self._num_cancelled = self._num_bytes = 0

    def admit(self, pair: PairKey, order: PrepareOrder, now_s: float) -> InboundTransfer | Busy:
        """Open a transfer, unless its reservation's earlier one is still closing or too many are open.

        Raises:
            PdserveError: STALE, DEADLINE_EXCEEDED, INVALID_ARGUMENT.
        """
        self.pairs.check(pair)
        self._check_counts(order)
        key = (pair.incarnation, order.transfer_id)
        if key in self._open or key in self._committed:
            raise stale("this transfer id was used before")
        earlier = self._by_reservation.get(order.reservation_id)
        if earlier is not None:
            if earlier.phase in (InboundPhase.CLOSING, InboundPhase.RELEASED):
                return Busy(CLOSING_RETRY_S)
            raise stale("the reservation has a transfer already")
        if len(self._open) >= self._max_open:
            return Busy(FULL_RETRY_S)
        transfer = InboundTransfer(pair, order, self._layout.block_bytes, self._lease_s, now_s)
        self._open[key] = self._by_reservation[order.reservation_id] = transfer
        return transfer

    def find(self, pair: PairKey, transfer_id: int) -> InboundTransfer:
        """Raises:
        PdserveError: STALE: the pair's epoch is over, or the transfer is unknown or ended.
        """
        self.pairs.check(pair)
        transfer = self._open.get((pair.incarnation, transfer_id))
        if transfer is None:
            raise stale("unknown or ended transfer")
        return transfer

    def is_committing(self, key: TransferKey) -> bool:
        transfer = self._open.get(key)
        return transfer is not None and transfer.phase is InboundPhase.COMMITTING

    def was_committed(self, key: TransferKey) -> bool:
        return key in self._committed

    def close_where(self, condition: Callable[[InboundTransfer], bool], error: PdserveError) -> list[InboundTransfer]:
        """Close every open transfer that meets `condition` and is not being committed."""
        closing = [t for t in self._open.values() if t.closable and condition(t)]
        for transfer in closing:
            transfer.close(error)
        return closing

    def drop(self, transfer: InboundTransfer) -> None:
        """The transfer got no blocks: as if it had never been."""
        del self._open[transfer.pair.incarnation, transfer.order.transfer_id]
        del self._by_reservation[transfer.order.reservation_id]

    def forget(self, transfer: InboundTransfer) -> None:
        """The transfer is over and its blocks are the host's again: count it."""
        self.drop(transfer)
        if transfer.phase is InboundPhase.COMMITTED:
            self._num_completed += 1
            self._num_bytes += transfer.num_bytes
            self._committed[transfer.pair.incarnation, transfer.order.transfer_id] = None
            if len(self._committed) > MAX_COMMITTED:
                self._committed.popitem(last=False)
        elif transfer.error is not None and transfer.error.reason is ErrorReason.CANCELLED:
            self._num_cancelled += 1
        else:
            self._num_failed += 1

    def stats(self) -> InboundStats:
        return InboundStats(
            num_open=len(self._open),
            num_completed=self._num_completed,
            num_failed=self._num_failed,
            num_cancelled=self._num_cancelled,
            num_bytes=self._num_bytes,
            stale_events=self.stale_events,
        )

    def _check_counts(self, order: PrepareOrder) -> None:
        if order.deadline_remaining_s <= 0:
            raise PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the request's deadline passed before its transfer")
        needed = blocks_for_tokens(order.num_tokens, self._layout.block_size)
        if order.first_block + order.num_blocks != needed:
            counts = f"{order.first_block} cached + {order.num_blocks} sent"
            raise invalid(f"{counts} blocks for {order.num_tokens} tokens, which need {needed}", "num_blocks")
