"""The KvTransfer gRPC server: a port and threads of its own, away from the loop that streams tokens.

Frames are read and checked here; what messages mean is decided in the inbound room.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import decode
from kv_transfer.inbound.desk import Desk
from kv_transfer.inbound.payload import ReceivedBytes
from kv_transfer.messages import PairKey, broken
from pdserve.client.channels import Keepalive, bind, sync_server
from pdserve.client.errors import error_metadata, grpc_status
from pdserve.client.wire import error_to_proto
from pdserve.core.errors import PdserveError, invalid
from pdserve.v1 import kv_transfer_pb2 as pb
from pdserve.v1 import kv_transfer_pb2_grpc as rpc

MAX_THREADS = 32
TRANSPORT = "grpc"


class GrpcDoor:
    """`open`, then `close`."""

    def __init__(self, desk: Desk, keepalive: Keepalive) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kv-receive")
        self._server = sync_server(self._pool, keepalive)
        servicer = _KvTransferServicer(desk)
        rpc.add_KvTransferServicer_to_server(servicer, self._server)
        self._server.add_generic_rpc_handlers((_chunks_handler(servicer.send_chunks),))

    def open(self, host: str, port: int) -> int:
        """Listen on host:port (0 picks one) and return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        bound = bind(self._server.add_insecure_port, host, port)
        self._server.start()
        return bound

    def refuse(self, grace_s: float) -> None:
        """Take no new calls, and end running ones after `grace_s`."""
        self._server.stop(grace_s).wait()

    def close(self) -> None:
        """After `refuse`; threads end as their last writes return."""
        self._pool.shutdown(wait=False)


class _KvTransferServicer(rpc.KvTransferServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def Handshake(self, request: pb.HandshakeRequest, context: grpc.ServicerContext) -> pb.HandshakeResponse:
        try:
            return self._desk.shake_hands(request, TRANSPORT)
        except PdserveError as error:
            context.set_trailing_metadata(error_metadata(error))
            context.abort(grpc_status(error), error.message)

    def Prepare(self, request: pb.PrepareRequest, context: grpc.ServicerContext) -> pb.PrepareResponse:
        return self._desk.prepare(request)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        return self._desk.commit(request)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        return self._desk.abort(request)

    def send_chunks(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> pb.ChunksAck:
        """Write each frame as it comes. The first bad one ends the call, with its error in the answer."""
        try:
            pair = _pair_from_metadata(context)
            transfer_id = self._receive_all(pair, frames)
        except PdserveError as error:
            return pb.ChunksAck(error=error_to_proto(error))
        return self._desk.progress(pair, transfer_id)

    def _receive_all(self, pair: PairKey, frames: Iterator[bytes]) -> int:
        transfer_id: int | None = None
        for frame in frames:
            header, payload = decode(frame)
            if transfer_id not in (None, header.transfer_id):
                raise broken("one call carried chunks of two transfers")
            transfer_id = header.transfer_id
            self._desk.transfers.receive(pair, header, ReceivedBytes(payload), self._desk.clock())
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
