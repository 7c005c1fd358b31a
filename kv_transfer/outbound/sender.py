"""A KvSender for every transport that has links: one pair per decode worker and incarnation. Knows no transport."""

import itertools
import threading
from collections.abc import Callable

from kv_transfer.interfaces import OutboundEnd, OutboundTransfer, Peer, TransferPlan
from kv_transfer.outbound.link import Link
from kv_transfer.outbound.pair import Pair, PairLimits, PairNumbers
from pdserve.core.errors import ErrorReason, PdserveError

CLOSE_GRACE_S = 1.0


class PairedKvSender:
    """`make_link(peer, epoch, num_broken)` makes an unconnected link, where `num_broken` of the pair's broke before;
    pairs are made at their first transfer, dropped when idle."""

    def __init__(self, make_link: Callable[[Peer, int, int], Link], limits: PairLimits) -> None:
        self._make_link = make_link
        self._limits = limits
        self._numbers = PairNumbers(epochs=itertools.count(1), transfer_ids=itertools.count(1))
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, int], Pair] = {}
        self._retired: list[Pair] = []
        self._closed = False

    def open(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> OutboundTransfer:
        """Begin a transfer; the peer is told as soon as its pair's thread is free.

        Raises:
            PdserveError: DRAINING: the sender was closed; `on_end` will not be called.
        """
        with self._lock:
            if self._closed:
                raise PdserveError(ErrorReason.DRAINING, "the sending worker is stopping")
            self._prune()
            key = (plan.peer.worker_id, plan.peer.incarnation)
            pair = self._pairs.get(key)
            transfer = pair.add(plan, on_end) if pair is not None else None
            if transfer is None:
                self._retire_older(plan.peer)
                pair = self._pairs[key] = self._new_pair(plan.peer)
                transfer = pair.add(plan, on_end)
                assert transfer is not None  # nobody else has the new pair
                pair.start()
            return transfer

    @property
    def num_open(self) -> int:
        with self._lock:
            return sum(pair.num_open for pair in [*self._pairs.values(), *self._retired])

    def close(self) -> None:
        """Abort what is open, telling peers that answer within a second; returns when every `on_end` was called."""
        with self._lock:
            self._closed = True
            pairs = [*self._pairs.values(), *self._retired]
            self._pairs.clear()
            self._retired.clear()
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.join(CLOSE_GRACE_S)

    def _new_pair(self, peer: Peer) -> Pair:
        def make_link(epoch: int, num_broken: int) -> Link:
            return self._make_link(peer, epoch, num_broken)

        return Pair(peer.worker_id, make_link, self._numbers, self._limits)

    def _retire_older(self, peer: Peer) -> None:
        for key in [key for key in self._pairs if key[0] == peer.worker_id and key[1] != peer.incarnation]:
            pair = self._pairs.pop(key)
            pair.retire()
            self._retired.append(pair)

    def _prune(self) -> None:
        self._pairs = {key: pair for key, pair in self._pairs.items() if not pair.closing}
        self._retired = [pair for pair in self._retired if pair.num_open]
