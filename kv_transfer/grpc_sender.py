"""The grpc transport as the prefill service uses it: pairs over gRPC links."""

from collections.abc import Callable

from kv_transfer.chunk_frame import HEADER_BYTES
from kv_transfer.grpc_link import GrpcLink, GrpcSource
from kv_transfer.interfaces import OutboundEnd, OutboundTransfer, TransferPlan
from kv_transfer.messages import WorkerIdentity
from kv_transfer.pair import PairLimits
from kv_transfer.paired_sender import PairedKvSender
from pdserve.client.channels import KEEPALIVE, MAX_MESSAGE_BYTES, Keepalive
from pdserve.core.errors import invalid
from pdserve.engine.interfaces import BlockStore
from pdserve.serving.settings import TransferSettings


class GrpcKvSender:
    """Implements KvSender. One thread a decode worker; `on_end` is called from it, and must not block.

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
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        if settings.chunk_bytes + HEADER_BYTES > MAX_MESSAGE_BYTES:
            limit = MAX_MESSAGE_BYTES - HEADER_BYTES
            raise invalid(f"{settings.chunk_bytes} bytes a chunk; at most {limit} fit", "transfer.chunk_bytes")
        source = GrpcSource(identity, model_fingerprint, store, settings.chunk_bytes, keepalive)
        limits = PairLimits(settings.base_deadline_s, settings.min_bytes_per_s, store.layout.block_bytes)
        self._pairs = PairedKvSender(lambda peer, epoch: GrpcLink(source, peer, epoch), limits)

    def open(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> OutboundTransfer:
        """See KvSender. Raises PdserveError (DRAINING) once closed."""
        return self._pairs.open(plan, on_end)

    @property
    def num_open(self) -> int:
        return self._pairs.num_open

    def close(self) -> None:
        self._pairs.close()
