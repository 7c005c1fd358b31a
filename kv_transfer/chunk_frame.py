"""The frame around a chunk's bytes: 48-byte little-endian header, checksum, payload. Knows no transfer's state.

The layout is written down in proto/pdserve/v1/kv_transfer.proto. The checksum covers the payload and, through its
seed, the header before it.
"""

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import xxhash

from kv_transfer.messages import broken

MAGIC = b"PDKV"
VERSION = 1

_FIELDS = struct.Struct("<4sHHQIIIIII")
_CHECKSUM = struct.Struct("<Q")

HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Where a payload belongs. `first_block` counts the transfer's blocks, not a pool's; `byte_offset` is within it."""

    transfer_id: int
    epoch: int
    sequence: int
    first_block: int
    byte_offset: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """`num_bytes` bytes from `byte_offset` of block `first_block` on: whole blocks, or a part of one."""

    first_block: int
    byte_offset: int
    num_blocks: int
    num_bytes: int


def chunk_spans(first_block: int, num_blocks: int, block_bytes: int, chunk_bytes: int) -> Iterator[ChunkSpan]:
    """Cut blocks into spans of at most `chunk_bytes`: several blocks together if they fit, else one block in parts."""
    end = first_block + num_blocks
    if block_bytes > chunk_bytes:
        for block in range(first_block, end):
            for offset in range(0, block_bytes, chunk_bytes):
                yield ChunkSpan(block, offset, 1, min(chunk_bytes, block_bytes - offset))
        return
    step = chunk_bytes // block_bytes
    for block in range(first_block, end, step):
        count = min(step, end - block)
        yield ChunkSpan(block, 0, count, count * block_bytes)


def encode(header: ChunkHeader, pages: Seq[memoryview]) -> bytes:
    """One frame of the contiguous `pages`, in order; each byte is copied once."""
    return b"".join((seal(header, pages), *pages))


def seal(header: ChunkHeader, pages: Seq[memoryview]) -> bytes:
    """The frame's header alone, with the checksum of the `pages`."""
    length = sum(page.nbytes for page in pages)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        0,
        header.transfer_id,
        header.epoch,
        header.sequence,
        header.first_block,
        header.byte_offset,
        header.num_blocks,
        length,
    )
    return fields + _CHECKSUM.pack(_checksum(fields, pages))


def decode(frame: bytes) -> tuple[ChunkHeader, memoryview]:
    """The header, and the payload without a copy.

    Raises:
        PdserveError: TRANSFER_FAILED: not a frame of this version, or a bit of it changed on the way.
    """
    view = memoryview(frame)
    sealed = unseal(view[:HEADER_BYTES])
    payload = view[HEADER_BYTES:]
    if payload.nbytes != sealed.num_bytes:
        raise broken(f"a chunk holds {payload.nbytes} bytes where its header says {sealed.num_bytes}")
    sealed.check((payload,))
    return sealed.header, payload


@dataclass(frozen=True, slots=True)
class Sealed:
    """A header as it came, of `num_bytes` bytes that may lie elsewhere."""

    header: ChunkHeader
    num_bytes: int
    fields: bytes
    checksum: int

    def check(self, pages: Seq[memoryview]) -> None:
        """Raises:
        PdserveError: TRANSFER_FAILED: these are not the bytes, or a bit of the header changed on the way.
        """
        if _checksum(self.fields, pages) != self.checksum:
            raise broken("a chunk's checksum does not match its bytes")


def unseal(data: bytes | memoryview) -> Sealed:
    """Raises:
    PdserveError: TRANSFER_FAILED: not a header of this version.
    """
    if len(data) < HEADER_BYTES:
        raise broken(f"a chunk of {len(data)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, version, flags, *numbers, length = _FIELDS.unpack_from(data)
    if magic != MAGIC or version != VERSION or flags != 0:
        raise broken(f"unknown chunk: magic {magic.hex()}, version {version}, flags {flags}")
    fields, (checksum,) = bytes(data[: _FIELDS.size]), _CHECKSUM.unpack_from(data, _FIELDS.size)
    return Sealed(ChunkHeader(*numbers), length, fields, checksum)


def _checksum(fields: bytes | memoryview, pages: Seq[memoryview]) -> int:
    digest = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(fields))
    for page in pages:
        digest.update(page)
    return digest.intdigest()
