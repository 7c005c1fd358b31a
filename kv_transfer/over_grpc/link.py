"""A link over gRPC: a channel of its own, protobuf for control, raw frames for chunks. Decides nothing."""

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import encode
from kv_transfer.interfaces import Peer
from kv_transfer.messages import Busy, CommitOrder, PairKey, PrepareOrder, Ready
from kv_transfer.outbound import answers
from kv_transfer.outbound.chunks import chunks_of
from kv_transfer.outbound.link import ChunkBatch, PairBroken
from kv_transfer.outbound.source import Source
from pdserve.client.channels import KEEPALIVE, Keepalive, sync_channel
from pdserve.client.errors import ERROR_METADATA_KEY, error_from_rpc
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.interfaces import BlockStore
from pdserve.v1 import kv_transfer_pb2 as pb
from pdserve.v1 import kv_transfer_pb2_grpc as rpc

T = TypeVar("T")


class FrameFeed:
    """A batch's frames, made one at a time on gRPC's thread; after `stop` returns no block is read any more."""

    def __init__(self, store: BlockStore, batch: ChunkBatch, epoch: int, chunk_bytes: int) -> None:
        self.num_frames = 0
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._frames = (encode(*chunk) for chunk in chunks_of(store, batch, epoch, chunk_bytes))

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._stopped:
                raise StopIteration
            try:
                frame = next(self._frames)
            except StopIteration:
                raise
            except Exception as error:
                self.error, self._stopped = error, True
                raise StopIteration from error
            self.num_frames += 1
            return frame

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


class GrpcLink:
    """Implements kv_transfer.outbound.link.Link."""

    transport = "grpc"

    def __init__(self, source: Source, peer: Peer, epoch: int, keepalive: Keepalive = KEEPALIVE) -> None:
        self._source = source
        self._peer = peer
        self._pair = PairKey(source.identity.incarnation, epoch)
        self._channel = sync_channel(peer.kv_address, None, keepalive)
        self._stub = rpc.KvTransferStub(self._channel)
        self._send_chunks: grpc.StreamUnaryMultiCallable[bytes, pb.ChunksAck] = self._channel.stream_unary(
            f"/{wire.SERVICE}/{wire.SEND_CHUNKS}", response_deserializer=pb.ChunksAck.FromString
        )
        self._metadata = (
            (wire.INCARNATION_KEY, str(self._pair.incarnation)),
            (wire.EPOCH_KEY, str(self._pair.epoch)),
        )

    def handshake(self, timeout_s: float) -> None:
        request = self._source.handshake(self._peer, self._pair.epoch, self.transport)
        _call(lambda: self._stub.Handshake(request, timeout=timeout_s))

    def prepare(self, order: PrepareOrder, timeout_s: float) -> Ready | Busy:
        request = wire.prepare_to_proto(self._pair, order)
        return answers.prepared(_call(lambda: self._stub.Prepare(request, timeout=timeout_s)))

    def send(self, batch: ChunkBatch, timeout_s: float) -> int:
        source = self._source
        feed = FrameFeed(source.store, batch, self._pair.epoch, source.chunk_bytes)
        try:
            ack = _call(lambda: self._send_chunks(feed, timeout=timeout_s, metadata=self._metadata))
        finally:
            feed.stop()
        if feed.error is not None:
            raise PdserveError(ErrorReason.INTERNAL, "reading KV blocks failed") from feed.error
        return answers.acknowledged(ack, batch, feed.num_frames)

    def commit(self, order: CommitOrder, timeout_s: float) -> None:
        request = wire.commit_to_proto(self._pair, order)
        answers.committed(_call(lambda: self._stub.Commit(request, timeout=timeout_s)))

    def abort(self, transfer_id: int, reason: str, timeout_s: float) -> None:
        request = pb.AbortRequest(
            sender_incarnation=self._pair.incarnation, epoch=self._pair.epoch, transfer_id=transfer_id, reason=reason
        )
        _call(lambda: self._stub.Abort(request, timeout=timeout_s))

    def close(self) -> None:
        self._channel.close()


def _call(invoke: Callable[[], T]) -> T:
    try:
        return invoke()
    except grpc.RpcError as error:
        refusal = error_from_rpc(error)
        trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
        if any(key == ERROR_METADATA_KEY for key, _ in trailing):
            raise refusal from error
        raise PairBroken(refusal.message) from error
    except ValueError as error:
        raise PairBroken("the channel was closed") from error
