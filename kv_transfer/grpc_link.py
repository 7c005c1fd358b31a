"""A link over gRPC: a channel of its own, protobuf for control, raw frames for chunks. Decides nothing."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import ChunkHeader, chunk_spans, encode
from kv_transfer.handshake import Terms
from kv_transfer.interfaces import Peer
from kv_transfer.link import ChunkBatch, PairBroken
from kv_transfer.messages import STALE_PAIR_PARAM, Busy, CommitOrder, PairKey, PrepareOrder, Ready, WorkerIdentity
from pdserve.client.channels import Keepalive, sync_channel
from pdserve.client.errors import ERROR_METADATA_KEY, error_from_rpc
from pdserve.client.wire import PROTOCOL_VERSION, error_from_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.interfaces import BlockStore
from pdserve.v1 import kv_transfer_pb2 as pb
from pdserve.v1 import kv_transfer_pb2_grpc as rpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GrpcSource:
    """What all links of one sender share: whose blocks go out, and how they are cut and guarded."""

    identity: WorkerIdentity
    model_fingerprint: str
    store: BlockStore
    chunk_bytes: int
    keepalive: Keepalive


class FrameFeed:
    """A batch's frames, made one at a time on gRPC's thread; after `stop` returns no block is read any more."""

    def __init__(self, store: BlockStore, batch: ChunkBatch, epoch: int, chunk_bytes: int) -> None:
        self.num_frames = 0
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._frames = self._make(store, batch, epoch, chunk_bytes)

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

    @staticmethod
    def _make(store: BlockStore, batch: ChunkBatch, epoch: int, chunk_bytes: int) -> Iterator[bytes]:
        transfer_id, first, sequence = batch.transfer_id, batch.first_block, batch.first_sequence
        if not batch.block_ids:
            yield encode(ChunkHeader(transfer_id, epoch, sequence, first, 0, 0), ())
        for span in chunk_spans(first, len(batch.block_ids), store.layout.block_bytes, chunk_bytes):
            index, offset = span.first_block - first, span.byte_offset
            pages = [store.read_block(block_id) for block_id in batch.block_ids[index : index + span.num_blocks]]
            if span.num_blocks == 1:
                pages = [pages[0][offset : offset + span.num_bytes]]
            yield encode(ChunkHeader(transfer_id, epoch, sequence, span.first_block, offset, span.num_blocks), pages)
            sequence += 1


class GrpcLink:
    """Implements kv_transfer.link.Link."""

    def __init__(self, source: GrpcSource, peer: Peer, epoch: int) -> None:
        self._source = source
        self._peer = peer
        self._pair = PairKey(source.identity.incarnation, epoch)
        self._channel = sync_channel(peer.kv_address, None, source.keepalive)
        self._stub = rpc.KvTransferStub(self._channel)
        self._send_chunks: grpc.StreamUnaryMultiCallable[bytes, pb.ChunksAck] = self._channel.stream_unary(
            f"/{wire.SERVICE}/{wire.SEND_CHUNKS}", response_deserializer=pb.ChunksAck.FromString
        )
        self._metadata = (
            (wire.INCARNATION_KEY, str(self._pair.incarnation)),
            (wire.EPOCH_KEY, str(self._pair.epoch)),
        )

    def handshake(self, timeout_s: float) -> None:
        source, receiver = self._source, WorkerIdentity(self._peer.worker_id, self._peer.incarnation)
        terms = Terms(PROTOCOL_VERSION, source.model_fingerprint, source.store.layout, "grpc")
        request = wire.handshake_to_proto(source.identity, receiver, self._pair.epoch, terms)
        _call(lambda: self._stub.Handshake(request, timeout=timeout_s))

    def prepare(self, order: PrepareOrder, timeout_s: float) -> Ready | Busy:
        request = wire.prepare_to_proto(self._pair, order)
        answer = wire.prepared_from_proto(_call(lambda: self._stub.Prepare(request, timeout=timeout_s)))
        if answer is None:
            raise PairBroken("Prepare was answered by nothing that this version knows")
        if isinstance(answer, PdserveError):
            raise refusal_to_raise(answer)
        return answer

    def send(self, batch: ChunkBatch, timeout_s: float) -> int:
        source = self._source
        feed = FrameFeed(source.store, batch, self._pair.epoch, source.chunk_bytes)
        try:
            ack = _call(lambda: self._send_chunks(feed, timeout=timeout_s, metadata=self._metadata))
        finally:
            feed.stop()
        if feed.error is not None:
            raise PdserveError(ErrorReason.INTERNAL, "reading KV blocks failed") from feed.error
        if ack.HasField("error"):
            raise refusal_to_raise(error_from_proto(ack.error))
        expected = (batch.first_sequence + feed.num_frames, batch.first_block + len(batch.block_ids))
        if (ack.next_sequence, ack.num_blocks_received) != expected:
            raise PairBroken(f"chunks were answered by {ack.next_sequence, ack.num_blocks_received}, not {expected}")
        return ack.next_sequence

    def commit(self, order: CommitOrder, timeout_s: float) -> None:
        request = wire.commit_to_proto(self._pair, order)
        answer = _call(lambda: self._stub.Commit(request, timeout=timeout_s))
        if answer.HasField("error"):
            raise refusal_to_raise(error_from_proto(answer.error))
        if not answer.HasField("done"):
            raise PairBroken("Commit was answered by nothing that this version knows")

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


def refusal_to_raise(error: PdserveError) -> Exception:
    """Some errors of a transfer say that the pair itself is out of step."""
    if error.reason is ErrorReason.TRANSFER_FAILED or error.param == STALE_PAIR_PARAM:
        return PairBroken(error.message)
    return error
