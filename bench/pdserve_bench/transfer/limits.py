"""Bytes from one process to another with nothing around them: what this machine lets a transport do.

A limit ends as a transport's batch does: with one control message each way, and one pass of xxh3_64 over what arrived.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import xxhash

from kv_transfer.over_shm.peer_memory import PeerMemory
from pdserve_kernels.host_memory import shared_empty

_NUMBER = struct.Struct("<Q")
_HOST = "127.0.0.1"


class Limit(Protocol):
    """The sending half. `name`: what is measured, in words."""

    name: str

    def send(self, num_bytes: int) -> None:
        """Returns once all has arrived and was checked."""
        ...

    def close(self) -> None: ...


class TcpLimit:
    """One TCP connection over loopback, into a buffer that is there already."""

    name = "raw TCP"

    def __init__(self, port: int, max_bytes: int) -> None:
        self._data = memoryview(np.random.default_rng(0).bytes(max_bytes))
        self._socket = socket.create_connection((_HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, num_bytes: int) -> None:
        self._socket.sendall(_NUMBER.pack(num_bytes))
        self._socket.sendall(self._data[:num_bytes])
        _receive_exactly(self._socket, _NUMBER.size)

    def close(self) -> None:
        self._socket.close()


class ShmLimit:
    """The receiver copies out of the sender's memory once, into a buffer that is there already."""

    name = "one-copy shared memory"

    def __init__(self, address: str, max_bytes: int) -> None:
        self._memory, self._fd = shared_empty(max_bytes)
        self._memory.random_(256)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        socket.send_fds(self._socket, [_NUMBER.pack(max_bytes)], [self._fd])

    def send(self, num_bytes: int) -> None:
        self._socket.send(_NUMBER.pack(num_bytes))
        if len(self._socket.recv(_NUMBER.size)) != _NUMBER.size:
            raise ConnectionError("the receiver is gone")

    def close(self) -> None:
        self._socket.close()
        os.close(self._fd)


def serve_tcp(max_bytes: int) -> int:
    """Receive as TcpLimit's other half, on a thread; the port."""
    listener = socket.create_server((_HOST, 0))
    _on_thread(listener, lambda connection: _receive_tcp(connection, np.zeros(max_bytes, np.uint8)))
    return int(listener.getsockname()[1])


def serve_shm(address: str, max_bytes: int) -> None:
    """Receive as ShmLimit's other half, on a thread."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(1)
    _on_thread(listener, lambda connection: _receive_shm(connection, np.zeros(max_bytes, np.uint8)))


def _on_thread(listener: socket.socket, receive: Callable[[socket.socket], None]) -> None:
    def run() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection, contextlib.suppress(ConnectionError):
            receive(connection)

    threading.Thread(target=run, name="limit", daemon=True).start()


def _receive_tcp(connection: socket.socket, buffer: np.ndarray) -> None:
    view = memoryview(buffer)
    while True:
        (num_bytes,) = _NUMBER.unpack(_receive_exactly(connection, _NUMBER.size))
        done = 0
        while done < num_bytes:
            done += connection.recv_into(view[done:num_bytes])
        connection.sendall(_NUMBER.pack(xxhash.xxh3_64_intdigest(view[:num_bytes])))


def _receive_shm(connection: socket.socket, buffer: np.ndarray) -> None:
    data, fds, _, _ = socket.recv_fds(connection, _NUMBER.size, 1)
    source = np.frombuffer(PeerMemory(fds[0], _NUMBER.unpack(data)[0]).block(0), np.uint8)
    os.close(fds[0])
    while request := connection.recv(_NUMBER.size):
        (num_bytes,) = _NUMBER.unpack(request)
        buffer[:num_bytes] = source[:num_bytes]
        connection.send(_NUMBER.pack(xxhash.xxh3_64_intdigest(buffer[:num_bytes])))


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the other side is gone")
        data += more
    return data
