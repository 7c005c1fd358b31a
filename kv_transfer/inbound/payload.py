"""A chunk's bytes on their way into blocks: where they are, and how it is known that they are the right ones."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.chunk_frame import Sealed
from kv_transfer.inbound.transfer import BlockWrite
from kv_transfer.messages import broken
from pdserve.engine.interfaces import BlockStore


class Payload(Protocol):
    @property
    def nbytes(self) -> int: ...

    def write(self, store: BlockStore, writes: Seq[BlockWrite]) -> None:
        """Put every byte into its block, once.

        Raises:
            PdserveError: TRANSFER_FAILED: what was written is not what was sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """Bytes of this process that were checked."""

    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def write(self, store: BlockStore, writes: Seq[BlockWrite]) -> None:
        for write in writes:
            store.write_block(write.block_id, write.offset, self.data[write.start : write.stop])


@dataclass(frozen=True, slots=True)
class PeerPages:
    """Blocks in the sender's memory, whole ones. They may change under the reader's hands, so what counts is the copy:
    it is checked in its place, while it is in the cache of the core that made it."""

    sealed: Sealed
    pages: Seq[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self.pages)

    def write(self, store: BlockStore, writes: Seq[BlockWrite]) -> None:
        if len(writes) != len(self.pages):
            raise broken(f"{len(self.pages)} blocks came for {len(writes)}")
        for write, page in zip(writes, self.pages, strict=True):
            store.write_block(write.block_id, 0, page)
        self.sealed.check([store.read_block(write.block_id) for write in writes])
