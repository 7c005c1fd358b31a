"""Where senders on this host come in: a Unix socket, and a thread for each of them that reads blocks out of its memory.

A sender that is gone is noticed at once, by its closed socket; one that is frozen, by its lease.
"""

import contextlib
import logging
import os
import socket
import threading

from google.protobuf.message import DecodeError, Message

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import HEADER_BYTES, unseal
from kv_transfer.inbound.desk import Desk
from kv_transfer.inbound.payload import PeerPages
from kv_transfer.messages import PairKey, broken
from kv_transfer.over_shm.messages import (
    MAX_MESSAGE_BYTES,
    TRANSFER_ID,
    Kind,
    address_of,
    block_ids_of,
    is_same_user,
    new_socket,
)
from kv_transfer.over_shm.peer_memory import PeerMemory
from pdserve.client.wire import error_to_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

TRANSPORT = "shm"
_BACKLOG = 64
_PAUSE_S = 0.1
"""Before the next try where a sender could not be let in."""


class ShmDoor:
    """`open`, then `close`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def open(self) -> None:
        """Raises:
        OSError: the address is taken.
        """
        self._listener = listener = new_socket()
        listener.bind(address_of(self._desk.identity.incarnation))
        listener.listen(_BACKLOG)
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="kv-receive-shm", daemon=True)
        self._thread.start()

    def close(self, grace_s: float) -> None:
        """Take nobody in, let running calls end for at most `grace_s`, and end every connection's thread as its last
        write returns."""
        with self._lock:
            self._closing.set()
            connections = list(self._connections.items())
        if self._listener is not None:
            _shut(self._listener, socket.SHUT_RDWR)
        for connection, _ in connections:
            _shut(connection, socket.SHUT_RD)
        for _, thread in connections:
            thread.join(grace_s)
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                self._let_in(listener.accept()[0])
            except (OSError, RuntimeError) as error:  # no file, or no thread, to be had
                if not self._closing.wait(_PAUSE_S):
                    logger.warning("cannot let a sender in: %s", error)

    def _let_in(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-pull", daemon=True)
        with self._lock:
            if self._closing.is_set():
                connection.close()
                return
            self._connections[connection] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._connections[connection]
                connection.close()
                raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            if is_same_user(connection):
                _Connection(connection, self._desk).run()
            else:
                logger.warning("turned away a process of another user")
        except Exception:
            logger.exception("a sender's connection failed")
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()


class _Connection:
    """One sender, one thread. Ends with the socket, or with what cannot be understood."""

    def __init__(self, connection: socket.socket, desk: Desk) -> None:
        self._socket = connection
        self._desk = desk
        self._pair: PairKey | None = None
        self._memory: PeerMemory | None = None
        self._chunk_error: PdserveError | None = None

    def run(self) -> None:
        try:
            while self._handle_next():
                pass
        except (OSError, DecodeError) as error:
            logger.info("a sender's connection ended: %s", error)
        finally:
            if self._pair is not None:
                self._desk.transfers.lose(self._pair)

    def _handle_next(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        try:
            return bool(data) and self._handle(memoryview(data), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _handle(self, data: memoryview, fds: list[int]) -> bool:
        """Whether to go on."""
        kind, body = data[0], data[1:]
        if kind == Kind.HANDSHAKE:
            return self._handshake(body, fds)
        if self._pair is None or self._memory is None:
            logger.warning("a sender spoke before it shook hands")
            return False
        match kind:
            case Kind.CHUNK:
                self._receive(self._pair, self._memory, body)
            case Kind.PROGRESS:
                self._answer(Kind.PROGRESS, self._progress(self._pair, body))
            case Kind.PREPARE:
                self._answer(Kind.PREPARE, self._prepare(pb.PrepareRequest.FromString(bytes(body))))
            case Kind.COMMIT:
                self._answer(Kind.COMMIT, self._desk.commit(pb.CommitRequest.FromString(bytes(body))))
            case Kind.ABORT:
                self._answer(Kind.ABORT, self._desk.abort(pb.AbortRequest.FromString(bytes(body))))
            case _:
                logger.warning("a sender sent a message of kind %d", kind)
                return False
        return True

    def _handshake(self, body: memoryview, fds: list[int]) -> bool:
        request = pb.HandshakeRequest.FromString(bytes(body))
        try:
            if len(fds) != 1:
                raise broken(f"{len(fds)} files came where one was due")
            response = self._desk.shake_hands(request, TRANSPORT)
            self._memory = PeerMemory(fds[0], self._desk.layout.block_bytes)
        except PdserveError as error:
            self._answer(Kind.ERROR, error_to_proto(error))
            return False
        sender = wire.identity_from_proto(request.sender)
        self._pair = PairKey(sender.incarnation, request.epoch)
        self._answer(Kind.HANDSHAKE, response)
        return True

    def _prepare(self, request: pb.PrepareRequest) -> pb.PrepareResponse:
        """Without the ids of the blocks: this side writes to them, and a message has a limit."""
        response = self._desk.prepare(request)
        if response.HasField("ready"):
            response.ready.ClearField("block_ids")
        return response

    def _receive(self, pair: PairKey, memory: PeerMemory, chunk: memoryview) -> None:
        """After a bad chunk the rest of its batch is not looked at; the sender hears of it when it asks."""
        if self._chunk_error is not None:
            return
        try:
            sealed = unseal(chunk[:HEADER_BYTES])
            pages = [memory.block(block_id) for block_id in block_ids_of(chunk)]
            if sealed.num_bytes != len(pages) * self._desk.layout.block_bytes:
                raise broken(f"a chunk of {len(pages)} blocks where its header says {sealed.num_bytes} bytes")
            self._desk.transfers.receive(pair, sealed.header, PeerPages(sealed, pages), self._desk.clock())
        except PdserveError as error:
            self._chunk_error = error

    def _progress(self, pair: PairKey, body: memoryview) -> pb.ChunksAck:
        error, self._chunk_error = self._chunk_error, None
        if error is not None:
            return pb.ChunksAck(error=error_to_proto(error))
        if body.nbytes != TRANSFER_ID.size:
            wrong = PdserveError(ErrorReason.INVALID_ARGUMENT, f"a transfer id of {body.nbytes} bytes")
            return pb.ChunksAck(error=error_to_proto(wrong))
        return self._desk.progress(pair, TRANSFER_ID.unpack(body)[0])

    def _answer(self, kind: Kind, message: Message) -> None:
        self._socket.send(kind.message(message.SerializeToString()))


def _shut(connection: socket.socket, how: int) -> None:
    """Wakes whoever waits at it."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)
