"""The KvTransfer gRPC server: a port and threads of its own, away from the loop that streams tokens.

Translates messages and runs the reaper; what they mean is decided in inbound.py.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import decode
from kv_transfer.handshake import Terms, check_receiver, check_terms
from kv_transfer.inbound import InboundTransfers
from kv_transfer.inbound_registry import InboundStats
from kv_transfer.interfaces import InboundHost
from kv_transfer.messages import PairKey, WorkerIdentity, broken
from pdserve.client.channels import KEEPALIVE, Keepalive, bind, sync_server
from pdserve.client.errors import error_metadata, grpc_status
from pdserve.client.wire import PROTOCOL_VERSION, error_to_proto
from pdserve.core.errors import PdserveError, invalid
from pdserve.engine.interfaces import BlockStore
from pdserve.serving.settings import TransferSettings
from pdserve.v1 import kv_transfer_pb2 as pb
from pdserve.v1 import kv_transfer_pb2_grpc as rpc

logger = logging.getLogger(__name__)

MAX_THREADS = 32
REAP_INTERVAL_S = 0.25
Clock = Callable[[], float]


class GrpcKvReceiver:
    """Receives KV for one decode worker. `start`, then `close`; every other method is for any thread."""

    def __init__(
        self,
        identity: WorkerIdentity,
        model_fingerprint: str,
        store: BlockStore,
        host: InboundHost,
        settings: TransferSettings,
        *,
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        self._transfers = InboundTransfers(host, store, settings.lease_s)
        terms = Terms(PROTOCOL_VERSION, model_fingerprint, store.layout, "grpc")
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kv-receive")
        self._server = sync_server(self._pool, keepalive)
        servicer = _KvTransferServicer(self._transfers, identity, terms, time.monotonic)
        rpc.add_KvTransferServicer_to_server(servicer, self._server)
        self._server.add_generic_rpc_handlers((_chunks_handler(servicer.send_chunks),))
        self._stopping = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="kv-reaper", daemon=True)

    def start(self, host: str, port: int) -> int:
        """Listen on host:port (0 picks one) and return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        bound = bind(self._server.add_insecure_port, host, port)
        self._server.start()
        self._reaper.start()
        return bound

    def cancel(self, reservation_id: int, reason: str = "the request was cancelled") -> bool:
        """End the transfer into a reservation; false if there is none, or `host.commit` has been called for it.

        `host.release` runs inside this call, or later from a receiver thread that is still writing.
        """
        return self._transfers.cancel(reservation_id, reason)

    @property
    def stats(self) -> InboundStats:
        return self._transfers.stats

    def close(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones `grace_s`, abort what is open; threads end as last writes return."""
        self._stopping.set()
        self._server.stop(grace_s).wait()
        self._transfers.close()
        self._pool.shutdown(wait=False)
        if self._reaper.is_alive():
            self._reaper.join()

    def _reap(self) -> None:
        while not self._stopping.wait(REAP_INTERVAL_S):
            expired = self._transfers.reap(time.monotonic())
            if expired:
                logger.warning(
                    "gave up %d inbound transfers whose sender fell silent or whose deadline passed", expired
                )


class _KvTransferServicer(rpc.KvTransferServicer):
    def __init__(self, transfers: InboundTransfers, identity: WorkerIdentity, terms: Terms, clock: Clock) -> None:
        self._transfers = transfers
        self._identity = identity
        self._terms = terms
        self._clock = clock

    def Handshake(self, request: pb.HandshakeRequest, context: grpc.ServicerContext) -> pb.HandshakeResponse:
        try:
            check_receiver(wire.identity_from_proto(request.receiver), self._identity)
            check_terms(wire.terms_from_proto(request), self._terms)
            self._transfers.open_pair(wire.identity_from_proto(request.sender), request.epoch)
        except PdserveError as error:
            logger.warning("refused a handshake of %s: %s", request.sender.worker_id, error)
            context.set_trailing_metadata(error_metadata(error))
            context.abort(grpc_status(error), error.message)
        return pb.HandshakeResponse(epoch=request.epoch)

    def Prepare(self, request: pb.PrepareRequest, context: grpc.ServicerContext) -> pb.PrepareResponse:
        try:
            order = wire.prepare_from_proto(request)
            result = self._transfers.prepare(wire.pair_from_proto(request), order, self._clock())
        except PdserveError as error:
            return wire.prepared_to_proto(error)
        return wire.prepared_to_proto(result)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        try:
            self._transfers.commit(wire.pair_from_proto(request), wire.commit_from_proto(request))
        except PdserveError as error:
            return wire.committed_to_proto(error)
        return wire.committed_to_proto(None)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self._transfers.abort(wire.pair_from_proto(request), request.transfer_id, request.reason)
        return pb.AbortResponse()

    def send_chunks(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> pb.ChunksAck:
        """Write each frame as it comes. The first bad one ends the call, with its error in the answer."""
        try:
            pair = _pair_from_metadata(context)
            transfer_id = self._receive_all(pair, frames)
            progress = self._transfers.progress(pair, transfer_id)
        except PdserveError as error:
            return pb.ChunksAck(error=error_to_proto(error))
        return pb.ChunksAck(next_sequence=progress.next_sequence, num_blocks_received=progress.num_blocks_received)

    def _receive_all(self, pair: PairKey, frames: Iterator[bytes]) -> int:
        transfer_id: int | None = None
        for frame in frames:
            header, payload = decode(frame)
            if transfer_id not in (None, header.transfer_id):
                raise broken("one call carried chunks of two transfers")
            transfer_id = header.transfer_id
            self._transfers.receive(pair, header, payload, self._clock())
        if transfer_id is None:
            raise broken("a call without chunks")
        return transfer_id


def _pair_from_metadata(context: grpc.ServicerContext) -> PairKey:
    metadata = dict(context.invocation_metadata())
    try:
        return PairKey(int(metadata[wire.INCARNATION_KEY]), int(metadata[wire.EPOCH_KEY]))
    except (KeyError, ValueError) as error:
        raise invalid(f"SendChunks needs {wire.INCARNATION_KEY} and {wire.EPOCH_KEY}", "metadata") from error


def _chunks_handler(
    behavior: Callable[[Iterator[bytes], grpc.ServicerContext], pb.ChunksAck],
) -> grpc.GenericRpcHandler:
    method: grpc.RpcMethodHandler[bytes, pb.ChunksAck] = grpc.stream_unary_rpc_method_handler(
        behavior, request_deserializer=None, response_serializer=pb.ChunksAck.SerializeToString
    )
    return grpc.method_handlers_generic_handler(wire.SERVICE, {wire.SEND_CHUNKS: method})
