"""One sender and one run of one decode worker: a thread that takes its transfers' steps in turn, over one link.

Owns the link's life: connect, poison, reconnect with the next epoch, and each transfer's second attempt. Knows no
transport.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kv_transfer.interfaces import OutboundEnd, TransferPlan
from kv_transfer.outbound.link import Link, PairBroken
from kv_transfer.outbound.link_slot import LinkSlot
from kv_transfer.outbound.transfer import Outbound, Step
from pdserve.core.errors import ErrorReason, PdserveError

logger = logging.getLogger(__name__)

MIN_TIMEOUT_S = 0.001
MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class PairLimits:
    """A step's deadline is base + bytes / rate, within its request's. A pair without transfers ends after `idle_s`."""

    base_deadline_s: float
    min_bytes_per_s: int
    block_bytes: int
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PairNumbers:
    """The sender's counters: epochs rise over all of its pairs, transfer ids are never reused."""

    epochs: Iterator[int]
    transfer_ids: Iterator[int]


class PairTransfer:
    """The service's handle of one transfer (an OutboundTransfer)."""

    def __init__(self, pair: "Pair", outbound: Outbound) -> None:
        self._pair = pair
        self._outbound = outbound

    def send(self, block_ids: Seq[int]) -> None:
        group = tuple(block_ids)
        self._pair.wish(self._outbound, lambda _: self._outbound.add_group(group))

    def commit(self, output_token_ids: Seq[int]) -> None:
        token_ids = tuple(output_token_ids)
        self._pair.wish(self._outbound, lambda now_s: self._outbound.ask_commit(token_ids, now_s))

    def abort(self, reason: str) -> None:
        error = PdserveError(ErrorReason.CANCELLED, reason)
        self._pair.wish(self._outbound, lambda _: self._outbound.ask_end(error))


class Pair:
    """Any thread may add transfers and wishes; one thread of its own makes every call to the link and to `on_end`."""

    def __init__(
        self, name: str, make_link: Callable[[int, int], Link], numbers: PairNumbers, limits: PairLimits
    ) -> None:
        self._name = name
        self._slot = LinkSlot(make_link, numbers.epochs)
        self._transfer_ids = numbers.transfer_ids
        self._limits = limits
        self._changed = threading.Condition(threading.Lock())
        self._open: deque[Outbound] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{name}", daemon=True)
        self._steps: dict[Step, Callable[[Link, Outbound], None]] = {
            Step.PREPARE: self._prepare,
            Step.SEND: self._send,
            Step.RENEW: self._send,
            Step.COMMIT: self._commit,
            Step.ASK_COMMITTED: self._commit,
            Step.ABORT: self._abort,
        }

    def start(self) -> None:
        self._thread.start()

    def add(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> PairTransfer | None:
        """Open a transfer; None if the pair is closing."""
        outbound = Outbound(plan, on_end, time.monotonic())
        with self._changed:
            if self._closing:
                return None
            self._open.append(outbound)
            self._changed.notify()
        return PairTransfer(self, outbound)

    def wish(self, outbound: Outbound, change: Callable[[float], None]) -> None:
        """Apply `change` to a transfer that has not ended, and let the thread look again."""
        with self._changed:
            if not outbound.ended:
                change(time.monotonic())
                self._changed.notify()

    @property
    def closing(self) -> bool:
        with self._changed:
            return self._closing

    @property
    def num_open(self) -> int:
        with self._changed:
            return len(self._open)

    def retire(self) -> None:
        """Take nothing new; end once the open transfers have."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self) -> None:
        """Abort what is open, then end."""
        with self._changed:
            self._closing = True
            for outbound in self._open:
                outbound.ask_end(PdserveError(ErrorReason.CANCELLED, "the sending worker is stopping"))
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """After `close`: wait for the thread; one that is still busy then loses its link under its hands."""
        self._thread.join(timeout_s)
        self._slot.cut()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            outbound, step = task
            try:
                self._perform(outbound, step)
            except Exception:
                logger.exception("step %s of the transfer of %s failed", step.value, outbound.plan.sequence_id)
                self._end(outbound, PdserveError(ErrorReason.INTERNAL, "the sender failed"))
        self._slot.drop()

    def _next_task(self) -> tuple[Outbound, Step] | None:
        with self._changed:
            idle_until_s = time.monotonic() + self._limits.idle_s
            while True:
                now_s = time.monotonic()
                for outbound in self._open:
                    step = outbound.next_step(now_s)
                    if step is not None:
                        self._open.remove(outbound)
                        self._open.append(outbound)
                        return outbound, step
                if not self._open and (self._closing or now_s >= idle_until_s):
                    self._closing = True
                    return None
                until_s = min((o.next_time_s(now_s) for o in self._open), default=idle_until_s)
                self._changed.wait(min(max(until_s - now_s, MIN_TIMEOUT_S), MAX_WAIT_S))

    def _perform(self, outbound: Outbound, step: Step) -> None:
        if step is Step.ABORT and not outbound.prepared:
            self._end(outbound, outbound.end_error)
            return
        link = self._slot.link or self._connect(outbound)
        if link is None:
            return
        try:
            self._steps[step](link, outbound)
        except PairBroken as error:
            self._on_broken(outbound, step, str(error))
        except PdserveError as error:
            self._on_refused(outbound, step, error)

    def _connect(self, outbound: Outbound) -> Link | None:
        link = self._slot.renew()
        try:
            link.handshake(self._timeout_s(outbound, 0))
        except PairBroken as error:
            if time.monotonic() >= outbound.deadline_s:
                self._slot.drop()
            else:
                self._poison(f"handshake: {error}", lambda _: True)
        except PdserveError as error:
            self._slot.drop()
            with self._changed:
                refused = list(self._open)
            for other in refused:
                self._end(other, error)
        return self._slot.link

    def _prepare(self, link: Link, outbound: Outbound) -> None:
        outbound.transfer_id = next(self._transfer_ids)
        order = outbound.prepare_order(time.monotonic())
        answer = link.prepare(order, self._timeout_s(outbound, 0))
        outbound.on_prepared(answer, time.monotonic())

    def _send(self, link: Link, outbound: Outbound) -> None:
        batch = outbound.next_batch()
        num_bytes = len(batch.block_ids) * self._limits.block_bytes
        next_sequence = link.send(batch, self._timeout_s(outbound, num_bytes))
        outbound.on_sent(batch, next_sequence, num_bytes, time.monotonic())

    def _commit(self, link: Link, outbound: Outbound) -> None:
        link.commit(outbound.commit_order(time.monotonic()), self._timeout_s(outbound, 0))
        self._end(outbound, None)

    def _abort(self, link: Link, outbound: Outbound) -> None:
        error = outbound.end_error
        link.abort(outbound.transfer_id, "" if error is None else error.message, self._limits.base_deadline_s)
        self._end(outbound, error)

    def _on_broken(self, outbound: Outbound, step: Step, message: str) -> None:
        if step is not Step.ABORT and time.monotonic() >= outbound.deadline_s:
            return  # its request's time was up, not the pair's: the next step aborts it
        if step in (Step.COMMIT, Step.ASK_COMMITTED):
            outbound.on_commit_unanswered()
        self._poison(message, lambda other: other is outbound or other.prepared)

    def _on_refused(self, outbound: Outbound, step: Step, error: PdserveError) -> None:
        if step is Step.ASK_COMMITTED and error.reason is ErrorReason.STALE:
            outbound.on_not_committed()
        elif error.reason is ErrorReason.STALE or step is Step.ABORT:
            self._end(outbound, outbound.end_error or error)
        else:
            self.wish(outbound, lambda _: outbound.ask_end(error))

    def _poison(self, message: str, affected: Callable[[Outbound], bool]) -> None:
        logger.warning("dropped the KV link to %s: %s", self._name, message)
        self._slot.drop_broken()
        with self._changed:
            victims = [outbound for outbound in self._open if affected(outbound)]
        error = PdserveError(ErrorReason.TRANSFER_FAILED, f"the KV transfer to {self._name} failed twice: {message}")
        for outbound in victims:
            if not outbound.fail_attempt():
                self._end(outbound, outbound.end_error or error)

    def _end(self, outbound: Outbound, error: PdserveError | None) -> None:
        with self._changed:
            if outbound.ended:
                return
            self._open.remove(outbound)
            transport = outbound.plan.peer.transport if self._slot.link is None else self._slot.link.transport
            end = outbound.end(error, transport, time.monotonic())
        try:
            outbound.on_end(end)
        except Exception:
            logger.exception("the end of the transfer of %s was not taken", outbound.plan.sequence_id)

    def _timeout_s(self, outbound: Outbound, num_bytes: int) -> float:
        limits = self._limits
        allowed_s = limits.base_deadline_s + num_bytes / limits.min_bytes_per_s
        return max(MIN_TIMEOUT_S, min(allowed_s, outbound.deadline_s - time.monotonic()))
