"""The receiver's transfers, for every transport: thread-safe, no sockets, clock readings as arguments.

Every message meets the pair's epoch first, then its transfer's automaton. The host and the store are called without
the lock, so that neither can hold up another transfer.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from kv_transfer.chunk_frame import ChunkHeader
from kv_transfer.inbound.payload import Payload
from kv_transfer.inbound.registry import InboundRegistry, InboundStats
from kv_transfer.inbound.transfer import BlockWrite, InboundPhase, InboundTransfer
from kv_transfer.interfaces import InboundCommit, InboundHost
from kv_transfer.messages import (
    Busy,
    ChunkProgress,
    CommitOrder,
    PairKey,
    PrepareOrder,
    Ready,
    WorkerIdentity,
    broken,
    stale,
)
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.interfaces import BlockStore

logger = logging.getLogger(__name__)


class InboundTransfers:
    """Any event, in any order, for a known or forgotten transfer, ends in an answer or a PdserveError.

    A committed id is remembered for a while, so that a sender that missed Done can ask again. All blocks that the host
    gave go back through exactly one of `host.commit` and `host.release`.
    """

    def __init__(self, host: InboundHost, store: BlockStore, lease_s: float, max_open: int = 256) -> None:
        self._host = host
        self._store = store
        self._lease_s = lease_s
        self._changed = threading.Condition(threading.Lock())
        self._registry = InboundRegistry(store.layout, lease_s, max_open)

    def open_pair(self, sender: WorkerIdentity, epoch: int) -> None:
        """Accept a handshake: transfers of the sender's older epochs and incarnations are aborted.

        Raises:
            PdserveError: STALE.
        """
        pairs = self._registry.pairs
        with self._guard():
            pairs.open(sender, epoch)
        self._close_where(lambda t: not pairs.is_current(t.pair), broken("the sender began a new epoch"))

    def prepare(self, pair: PairKey, order: PrepareOrder, now_s: float) -> Ready | Busy:
        """Take blocks from the host, or pass on that it wants to be asked again.

        Raises:
            PdserveError: STALE, DEADLINE_EXCEEDED, INVALID_ARGUMENT (counts that contradict each other), or the host's.
        """
        with self._guard():
            transfer = self._registry.admit(pair, order, now_s)
        if isinstance(transfer, Busy):
            return transfer
        try:
            block_ids = self._allocate(transfer)
        except PdserveError as error:
            if error.retry_after_s is None:
                raise
            return Busy(error.retry_after_s)
        with self._changed:
            transfer.grant(block_ids)
        wrong = f"the host granted {len(block_ids)} blocks where {order.num_blocks} were asked for"
        failure = None if len(block_ids) == order.num_blocks else PdserveError(ErrorReason.INTERNAL, wrong)
        self._leave(transfer, failure)
        if transfer.error is not None:
            raise stale(f"ended while it was prepared: {transfer.error.message}")
        return Ready(self._lease_s, block_ids)

    def receive(self, pair: PairKey, header: ChunkHeader, payload: Payload, now_s: float) -> None:
        """Write one chunk into its blocks. A chunk that contradicts the transfer, or is not what was sent, ends it.

        Raises:
            PdserveError: STALE, TRANSFER_FAILED (also if the store failed).
        """
        with self._guard():
            transfer = self._registry.find(pair, header.transfer_id)
        with self._ending_on_error(transfer), self._guard():
            if header.epoch != pair.epoch:
                raise broken(f"a chunk of epoch {header.epoch} came in epoch {pair.epoch}")
            writes = transfer.begin_write(header, payload.nbytes)
            transfer.renew(now_s)
        failure = self._write(writes, payload)
        self._leave(transfer, failure)
        if failure is not None:
            raise failure

    def progress(self, pair: PairKey, transfer_id: int) -> ChunkProgress:
        """What has arrived so far.

        Raises:
            PdserveError: STALE: unknown, or ended while its chunks were being written.
        """
        with self._guard():
            transfer = self._registry.find(pair, transfer_id)
            if transfer.phase is not InboundPhase.RECEIVING:
                raise stale(f"the transfer is {transfer.phase.value}")
            return transfer.progress

    def commit(self, pair: PairKey, order: CommitOrder) -> None:
        """Hand a complete transfer to the host; returns at once for one that was committed before.

        Raises:
            PdserveError: STALE, TRANSFER_FAILED (something is missing), or the host's. The transfer is then over.
        """
        key = (pair.incarnation, order.transfer_id)
        with self._guard():
            self._changed.wait_for(lambda: not self._registry.is_committing(key), self._lease_s)
            if self._registry.was_committed(key):
                self._registry.stale_events += 1
                return
            transfer = self._registry.find(pair, order.transfer_id)
        with self._ending_on_error(transfer), self._guard():
            transfer.begin_commit(order)
        self._hand_over(transfer, order)

    def lose(self, pair: PairKey) -> None:
        """Nothing more can come from this epoch of the sender."""
        self._close_where(lambda t: t.pair == pair, broken("the sender is gone"))

    def abort(self, pair: PairKey, transfer_id: int, reason: str) -> None:
        """The sender gave up. An abort that comes too late counts as stale and changes nothing."""
        error = PdserveError(ErrorReason.CANCELLED, f"the sender gave up: {reason}")
        if not self._close_where(lambda t: t.pair == pair and t.order.transfer_id == transfer_id, error):
            with self._changed:
                self._registry.stale_events += 1

    def cancel(self, reservation_id: int, reason: str = "the request was cancelled") -> bool:
        """The host wants a reservation's transfer to end; false if there is none, or it is being committed already.

        `host.release` runs inside this call, or later, once the last writer has left.
        """
        error = PdserveError(ErrorReason.CANCELLED, reason)
        return self._close_where(lambda t: t.order.reservation_id == reservation_id, error) > 0

    def reap(self, now_s: float) -> int:
        """Abort what has heard nothing for a lease or is past its deadline; the number of transfers."""
        error = broken("the sender fell silent, or the request's deadline passed")
        return self._close_where(lambda t: t.expires_s <= now_s, error)

    def close(self) -> None:
        """Abort everything; blocks under a writer's hand follow when it leaves."""
        self._close_where(lambda t: True, PdserveError(ErrorReason.DRAINING, "the receiver is stopping"))

    @property
    def stats(self) -> InboundStats:
        with self._changed:
            return self._registry.stats()

    @contextmanager
    def _guard(self) -> Generator[None]:
        """The lock; a stale message that is refused inside is counted."""
        with self._changed:
            try:
                yield
            except PdserveError as error:
                self._registry.stale_events += error.reason is ErrorReason.STALE
                raise

    @contextmanager
    def _ending_on_error(self, transfer: InboundTransfer) -> Generator[None]:
        """What is refused inside ends the transfer, too; goes outside `_guard`."""
        try:
            yield
        except PdserveError as error:
            self._close_where(lambda t: t is transfer, error)
            raise

    def _allocate(self, transfer: InboundTransfer) -> tuple[int, ...]:
        order = transfer.order
        try:
            return self._host.allocate(order.sequence_id, order.reservation_id, order.num_blocks).block_ids
        except Exception as error:
            typed = _typed(error, "allocate")
            with self._changed:
                self._registry.stale_events += typed.reason is ErrorReason.STALE and typed.retry_after_s is None
                transfer.close(typed)
                self._registry.drop(transfer)
            raise typed from error

    def _write(self, writes: list[BlockWrite], payload: Payload) -> PdserveError | None:
        try:
            payload.write(self._store, writes)
        except PdserveError as error:
            return error
        except Exception:
            logger.exception("writing received blocks failed")
            return broken("writing received blocks failed")
        return None

    def _hand_over(self, transfer: InboundTransfer, order: CommitOrder) -> None:
        commit = InboundCommit(
            sequence_id=transfer.order.sequence_id,
            reservation_id=transfer.order.reservation_id,
            block_ids=transfer.block_ids,
            num_tokens=order.num_tokens,
            output_token_ids=order.output_token_ids,
            num_bytes=transfer.num_bytes,
            since_prefill_end_s=order.since_prefill_end_s,
        )
        try:
            self._host.commit(commit)
        except Exception as error:
            typed = _typed(error, "commit")
            with self._changed:
                self._registry.stale_events += typed.reason is ErrorReason.STALE
                transfer.close(typed)
            self._settle([transfer])
            raise typed from error
        with self._changed:
            transfer.phase = InboundPhase.COMMITTED
            self._registry.forget(transfer)
            self._changed.notify_all()

    def _leave(self, transfer: InboundTransfer, failure: PdserveError | None) -> None:
        """A user is done with the transfer's blocks; with a failure, the transfer ends."""
        with self._changed:
            transfer.num_users -= 1
            if failure is not None:
                transfer.close(failure)
        self._settle([transfer])

    def _close_where(self, condition: Callable[[InboundTransfer], bool], error: PdserveError) -> int:
        with self._changed:
            closing = self._registry.close_where(condition, error)
        self._settle(closing)
        return len(closing)

    def _settle(self, transfers: list[InboundTransfer]) -> None:
        """Give back the blocks of those that are closing and have no user left, each exactly once."""
        with self._changed:
            ready = [(t, t.error) for t in transfers if t.try_release()]
        for transfer, error in ready:
            order = transfer.order
            assert error is not None  # a transfer closes with its error
            try:
                self._host.release(order.sequence_id, order.reservation_id, transfer.block_ids, error)
            except Exception:
                logger.exception("the host failed to take back the blocks of %s", order.sequence_id)
            with self._changed:
                self._registry.forget(transfer)
                self._changed.notify_all()


def _typed(error: Exception, where: str) -> PdserveError:
    if isinstance(error, PdserveError):
        return error
    logger.error("%s raised %r", where, error, exc_info=error)
    return PdserveError(ErrorReason.INTERNAL, f"{where} failed on the receiver")
