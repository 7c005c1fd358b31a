"""A link to a decode worker on this host: it reads blocks out of this process's pool, one copy in all. Decides nothing.

Sealing a chunk (hashing it) overlaps with the receiver's copying the one before.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import seal
from kv_transfer.interfaces import Peer
from kv_transfer.messages import Busy, CommitOrder, PairKey, PrepareOrder, Ready
from kv_transfer.outbound import answers
from kv_transfer.outbound.chunks import Chunk, chunks_of
from kv_transfer.outbound.link import ChunkBatch, PairBroken
from kv_transfer.outbound.source import Source
from kv_transfer.over_shm.messages import (
    MAX_BLOCKS_A_CHUNK,
    MAX_MESSAGE_BYTES,
    TRANSFER_ID,
    Kind,
    address_of,
    chunk_message,
    is_same_user,
    new_socket,
)
from pdserve.client.wire import error_from_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import common_pb2
from pdserve.v1 import kv_transfer_pb2 as pb

Answer = TypeVar("Answer", bound=Message)


class ShmLink:
    """Implements kv_transfer.outbound.link.Link. `fd`: of the file that holds the store's blocks, in order."""

    transport = "shm"

    def __init__(self, source: Source, fd: int, peer: Peer, epoch: int) -> None:
        self._source = source
        self._fd = fd
        self._peer = peer
        self._pair = PairKey(source.identity.incarnation, epoch)
        block_bytes = source.store.layout.block_bytes
        # Blocks are never split here, and their ids fit into one message.
        self._chunk_bytes = min(max(source.chunk_bytes, block_bytes), MAX_BLOCKS_A_CHUNK * block_bytes)
        self._socket = new_socket()
        self._calling = threading.Lock()

    def handshake(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        request = self._source.handshake(self._peer, self._pair.epoch, self.transport).SerializeToString()
        with self._call(deadline_s):
            self._socket.connect(address_of(self._peer.incarnation))
            if not is_same_user(self._socket):
                raise PairBroken("another user's process answers at the receiver's address")
            socket.send_fds(self._socket, [Kind.HANDSHAKE.message(request)], [self._fd])
            self._answer(Kind.HANDSHAKE, pb.HandshakeResponse, deadline_s)

    def prepare(self, order: PrepareOrder, timeout_s: float) -> Ready | Busy:
        request = wire.prepare_to_proto(self._pair, order)
        return answers.prepared(self._ask(Kind.PREPARE, request, pb.PrepareResponse, timeout_s))

    def send(self, batch: ChunkBatch, timeout_s: float) -> int:
        deadline_s, num_chunks = time.monotonic() + timeout_s, 0
        with self._call(deadline_s):
            for header, pages in self._chunks(batch):
                start = header.first_block - batch.first_block
                block_ids = batch.block_ids[start : start + header.num_blocks]
                self._post(chunk_message(seal(header, pages), block_ids), deadline_s)
                num_chunks += 1
            self._post(Kind.PROGRESS.message(TRANSFER_ID.pack(batch.transfer_id)), deadline_s)
            ack = self._answer(Kind.PROGRESS, pb.ChunksAck, deadline_s)
        return answers.acknowledged(ack, batch, num_chunks)

    def commit(self, order: CommitOrder, timeout_s: float) -> None:
        request = wire.commit_to_proto(self._pair, order)
        answers.committed(self._ask(Kind.COMMIT, request, pb.CommitResponse, timeout_s))

    def abort(self, transfer_id: int, reason: str, timeout_s: float) -> None:
        request = pb.AbortRequest(
            sender_incarnation=self._pair.incarnation, epoch=self._pair.epoch, transfer_id=transfer_id, reason=reason
        )
        self._ask(Kind.ABORT, request, pb.AbortResponse, timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a call that waits
        with self._calling:
            self._socket.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _chunks(self, batch: ChunkBatch) -> Iterator[Chunk]:
        chunks = chunks_of(self._source.store, batch, self._pair.epoch, self._chunk_bytes)
        while True:
            try:
                chunk = next(chunks, None)
            except Exception as error:
                raise PdserveError(ErrorReason.INTERNAL, "reading KV blocks failed") from error
            if chunk is None:
                return
            yield chunk

    def _ask(self, kind: Kind, request: Message, answer: type[Answer], timeout_s: float) -> Answer:
        deadline_s = time.monotonic() + timeout_s
        with self._call(deadline_s):
            self._post(kind.message(request.SerializeToString()), deadline_s)
            return self._answer(kind, answer, deadline_s)

    def _post(self, message: bytes, deadline_s: float) -> None:
        self._set_timeout(deadline_s)
        self._socket.send(message)

    def _answer(self, kind: Kind, answer: type[Answer], deadline_s: float) -> Answer:
        self._set_timeout(deadline_s)
        data = self._socket.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise PairBroken("the receiver closed the connection")
        try:
            if data[0] == Kind.ERROR:
                raise answers.refusal_to_raise(error_from_proto(common_pb2.ErrorInfo.FromString(data[1:])))
            if data[0] != kind:
                raise PairBroken(f"{kind.name} was answered by a message of kind {data[0]}")
            return answer.FromString(data[1:])
        except DecodeError as error:
            raise PairBroken("an answer that cannot be read") from error

    def _set_timeout(self, deadline_s: float) -> None:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining_s)

    @contextlib.contextmanager
    def _call(self, deadline_s: float) -> Generator[None]:
        """One at a time; what the socket raises breaks the pair."""
        with self._calling:
            try:
                self._set_timeout(deadline_s)
                yield
            except OSError as error:  # TimeoutError is one
                raise PairBroken(f"shared memory: {error}") from error
