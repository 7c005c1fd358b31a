"""Which transport a transfer takes: the one that the coordinator named, among those that this worker has."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from kv_transfer.interfaces import KvSender, OutboundEnd, OutboundTransfer, TransferPlan
from pdserve.core.errors import ErrorReason, PdserveError


def build_senders(transports: Seq[str], makers: Mapping[str, Callable[[], KvSender]]) -> dict[str, KvSender]:
    """Make a sender for every allowed transport (best first) that this process can make.

    Raises:
        PdserveError: UNSUPPORTED: none is left.
    """
    senders = {transport: makers[transport]() for transport in transports if transport in makers}
    if not senders:
        allowed, known = ", ".join(transports) or "none", ", ".join(makers) or "none"
        raise PdserveError(
            ErrorReason.UNSUPPORTED, f"allowed transports: {allowed}; possible: {known}", param="transfer.transports"
        )
    return senders


class TransportSelector:
    """A KvSender over several: `plan.peer.transport` names the one to use."""

    def __init__(self, senders: Mapping[str, KvSender]) -> None:
        self._senders = dict(senders)

    @property
    def transports(self) -> tuple[str, ...]:
        """Best first."""
        return tuple(self._senders)

    def open(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> OutboundTransfer:
        """Raises:
        PdserveError: UNSUPPORTED: this worker lacks the transport; or the sender's own.
        """
        sender = self._senders.get(plan.peer.transport)
        if sender is None:
            ours = ", ".join(self._senders)
            raise PdserveError(ErrorReason.UNSUPPORTED, f"transport {plan.peer.transport!r} is not one of: {ours}")
        return sender.open(plan, on_end)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
