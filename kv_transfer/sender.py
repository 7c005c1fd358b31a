"""The sending side as a prefill service uses it: pairs over links of every transport that this worker has."""

from collections.abc import Callable

from kv_transfer.chunk_frame import HEADER_BYTES
from kv_transfer.interfaces import OutboundEnd, OutboundTransfer, Peer, TransferPlan
from kv_transfer.messages import WorkerIdentity
from kv_transfer.outbound.link import Link
from kv_transfer.outbound.pair import PairLimits
from kv_transfer.outbound.sender import PairedKvSender
from kv_transfer.outbound.source import Source
from kv_transfer.over_grpc.link import GrpcLink
from kv_transfer.over_shm.link import ShmLink
from pdserve.client.channels import KEEPALIVE, MAX_MESSAGE_BYTES, Keepalive
from pdserve.core.errors import invalid
from pdserve.engine.interfaces import BlockStore
from pdserve.serving.settings import TransferSettings

MakeLink = Callable[[Peer, int], Link]


class NetworkKvSender:
    """Implements KvSender. One thread a decode worker; `on_end` is called from it, and must not block.

    A transfer begins over the transport that its plan names; should the link break, the pair goes on over gRPC.

    Args:
        shared_fd: of the file that holds the blocks of `store` in order, where peers on this host may read it.

    Raises:
        PdserveError: INVALID_ARGUMENT: `chunk_bytes` does not fit a gRPC message.
    """

    def __init__(
        self,
        store: BlockStore,
        identity: WorkerIdentity,
        model_fingerprint: str,
        settings: TransferSettings,
        *,
        shared_fd: int | None = None,
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        if settings.chunk_bytes + HEADER_BYTES > MAX_MESSAGE_BYTES:
            limit = MAX_MESSAGE_BYTES - HEADER_BYTES
            raise invalid(f"{settings.chunk_bytes} bytes a chunk; at most {limit} fit", "transfer.chunk_bytes")
        source = Source(identity, model_fingerprint, store, settings.chunk_bytes)
        self._makers: dict[str, MakeLink] = {"grpc": lambda peer, epoch: GrpcLink(source, peer, epoch, keepalive)}
        if shared_fd is not None:
            self._makers = {"shm": lambda peer, epoch: ShmLink(source, shared_fd, peer, epoch), **self._makers}
        limits = PairLimits(settings.base_deadline_s, settings.min_bytes_per_s, store.layout.block_bytes)
        self._pairs = PairedKvSender(self._make_link, limits)

    @property
    def transports(self) -> tuple[str, ...]:
        """Those that a plan may name, best first."""
        return tuple(self._makers)

    def open(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> OutboundTransfer:
        """See KvSender. Raises PdserveError (DRAINING) once closed; `plan` names one of `transports`."""
        return self._pairs.open(plan, on_end)

    @property
    def num_open(self) -> int:
        return self._pairs.num_open

    def close(self) -> None:
        self._pairs.close()

    def _make_link(self, peer: Peer, epoch: int, num_broken: int) -> Link:
        return self._makers[peer.transport if num_broken == 0 else "grpc"](peer, epoch)
