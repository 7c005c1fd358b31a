"""Which transport a transfer takes: the one that the coordinator named, among those that this worker has."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from kv_transfer.interfaces import KvSender, OutboundEnd, OutboundTransfer, TransferPlan
from pdserve.core.errors import ErrorReason, PdserveError


class TransportSelector:
    """A KvSender over several: `plan.peer.transport` names the one to use.

    Args:
        allowed: transports, best first.
        senders: by transport; one may serve several.

    Raises:
        PdserveError: UNSUPPORTED: none is left. All senders are closed then.
    """

    def __init__(self, allowed: Seq[str], senders: Mapping[str, KvSender]) -> None:
        self._all = list({id(sender): sender for sender in senders.values()}.values())
        self._senders = {transport: senders[transport] for transport in allowed if transport in senders}
        if not self._senders:
            self.close()
            names, known = ", ".join(allowed) or "none", ", ".join(senders) or "none"
            raise PdserveError(
                ErrorReason.UNSUPPORTED, f"allowed transports: {names}; possible: {known}", param="transfer.transports"
            )

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
        for sender in self._all:
            sender.close()
