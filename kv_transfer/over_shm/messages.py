"""What goes over the Unix socket of a pair on one host: datagrams of one byte, the kind, and what it carries.

The socket is SOCK_SEQPACKET in the abstract namespace, which belongs to the network namespace: two workers that cannot
reach each other over it share no host as far as this transport is concerned, and nothing is left in any file system.
Only processes of the same user are let in.

    sender                                  receiver
    HANDSHAKE HandshakeRequest, memfd  ──►
                                       ◄──  HANDSHAKE HandshakeResponse, or ERROR ErrorInfo
    PREPARE   PrepareRequest           ──►
                                       ◄──  PREPARE PrepareResponse
    CHUNK     header, block ids        ──►  (no answer)
    PROGRESS  transfer id              ──►
                                       ◄──  PROGRESS ChunksAck
    COMMIT, ABORT                           likewise

A CHUNK's header is the one of kv_transfer.proto, over bytes that stay in the sender's memory: the u32 block ids that
follow it say where.
"""

import os
import socket
import struct
import sys
from array import array
from collections.abc import Sequence as Seq
from enum import IntEnum

from kv_transfer.chunk_frame import HEADER_BYTES
from kv_transfer.messages import broken

MAX_MESSAGE_BYTES = 64 * 1024
MAX_BLOCKS_A_CHUNK = 4096
TRANSFER_ID = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")


class Kind(IntEnum):
    ERROR = 0
    HANDSHAKE = 1
    PREPARE = 2
    CHUNK = 3
    PROGRESS = 4
    COMMIT = 5
    ABORT = 6

    def message(self, body: bytes) -> bytes:
        return bytes((self,)) + body


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def address_of(incarnation: int) -> str:
    """Where the decode worker of this incarnation listens."""
    return f"\0pdserve-kv-{incarnation:016x}"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return int(user) == os.geteuid()


def chunk_message(header: bytes, block_ids: Seq[int]) -> bytes:
    ids = array("I", block_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return Kind.CHUNK.message(header + ids.tobytes())


def block_ids_of(chunk: memoryview) -> list[int]:
    """Of what follows a CHUNK's kind.

    Raises:
        PdserveError: TRANSFER_FAILED: it is cut off within an id.
    """
    data = chunk[HEADER_BYTES:]
    if data.nbytes % 4:
        raise broken(f"block ids in {data.nbytes} bytes")
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
