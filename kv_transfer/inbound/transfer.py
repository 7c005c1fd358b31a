"""One inbound transfer's automaton: what was promised, what has arrived, who is writing. No locks, no host, no clock.

    PREPARING ──► RECEIVING ──► COMMITTING ──► COMMITTED
        │             │  ▲            │
        │             │  └ chunks     │ refused by the host
        └──────┬──────┘               │
               ▼                      │
            CLOSING ◄─────────────────┘
               │ last user gone
               ▼
           RELEASED

A user is a thread inside the host's allocate or the store's write_block; blocks outlive the last one.
"""

from dataclasses import dataclass
from enum import Enum

from kv_transfer.chunk_frame import ChunkHeader
from kv_transfer.messages import ChunkProgress, CommitOrder, PairKey, PrepareOrder, broken, stale
from pdserve.core.errors import PdserveError


class InboundPhase(Enum):
    PREPARING = "preparing"
    RECEIVING = "receiving"
    COMMITTING = "committing"
    COMMITTED = "committed"
    CLOSING = "closing"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Bytes [start, stop) of a payload go to byte `offset` of block `block_id`."""

    block_id: int
    offset: int
    start: int
    stop: int


class InboundTransfer:
    """Mutable; every call is made under its registry's lock. A new transfer has one user: the host's allocate."""

    def __init__(self, pair: PairKey, order: PrepareOrder, block_bytes: int, lease_s: float, now_s: float) -> None:
        self.pair = pair
        self.order = order
        self.phase = InboundPhase.PREPARING
        self.block_ids: tuple[int, ...] = ()
        self.error: PdserveError | None = None
        self.num_users = 1
        self.num_bytes = 0
        self.expires_s = now_s
        self._deadline_s = now_s + order.deadline_remaining_s
        self._lease_s = lease_s
        self._block_bytes = block_bytes
        self._received: list[int] = []
        self._num_complete = 0
        self._next_sequence = 0
        self.renew(now_s)

    @property
    def progress(self) -> ChunkProgress:
        return ChunkProgress(self._next_sequence, self._num_complete)

    @property
    def closable(self) -> bool:
        return self.phase in (InboundPhase.PREPARING, InboundPhase.RECEIVING)

    def renew(self, now_s: float) -> None:
        """Something was heard of the sender: a new lease, within the request's deadline."""
        self.expires_s = min(now_s + self._lease_s, self._deadline_s)

    def grant(self, block_ids: tuple[int, ...]) -> None:
        """The host gave blocks; a transfer that was closed meanwhile keeps them until it is released."""
        self.block_ids = block_ids
        self._received = [0] * len(block_ids)
        if self.phase is InboundPhase.PREPARING:
            self.phase = InboundPhase.RECEIVING

    def begin_write(self, header: ChunkHeader, num_bytes: int) -> list[BlockWrite]:
        """Account for a chunk and become its user; nothing changes if it is refused.

        Raises:
            PdserveError: STALE (not receiving), TRANSFER_FAILED (sequence, range, length or overlap is wrong).
        """
        if self.phase is not InboundPhase.RECEIVING:
            raise stale(f"the transfer is {self.phase.value}")
        if header.sequence != self._next_sequence:
            raise broken(f"chunk {header.sequence} came where {self._next_sequence} was due")
        writes = (
            self._whole_writes(header, num_bytes) if header.num_blocks != 1 else self._part_write(header, num_bytes)
        )
        for index, write in enumerate(writes, header.first_block):
            self._received[index] += write.stop - write.start
            self._num_complete += self._received[index] == self._block_bytes
        self._next_sequence += 1
        self.num_bytes += num_bytes
        self.num_users += 1
        return writes

    def begin_commit(self, order: CommitOrder) -> None:
        """Every promised byte must be in its block, and no writer inside.

        Raises:
            PdserveError: STALE (not receiving), TRANSFER_FAILED (a count differs, a block is missing).
        """
        if self.phase is not InboundPhase.RECEIVING:
            raise stale(f"the transfer is {self.phase.value}")
        if self.num_users:
            raise broken("commit came while a chunk was being written")
        pairs = {
            "tokens": (order.num_tokens, self.order.num_tokens),
            "blocks": (order.num_blocks, self.order.num_blocks),
            "chunks": (order.num_chunks, self._next_sequence),
            "complete blocks": (order.num_blocks, self._num_complete),
        }
        wrong = [f"{name} ({theirs}, {ours})" for name, (theirs, ours) in pairs.items() if theirs != ours]
        if wrong:
            raise broken("commit does not match what arrived: " + ", ".join(wrong))
        self.phase = InboundPhase.COMMITTING

    def close(self, error: PdserveError) -> None:
        """No chunk enters any more. The first error is the one that is told."""
        if self.phase not in (InboundPhase.CLOSING, InboundPhase.RELEASED):
            self.phase = InboundPhase.CLOSING
            self.error = error

    def try_release(self) -> bool:
        """Whether the blocks are to be given back now: true once, when closing and the last user has left."""
        if self.phase is not InboundPhase.CLOSING or self.num_users:
            return False
        self.phase = InboundPhase.RELEASED
        return True

    def _whole_writes(self, header: ChunkHeader, num_bytes: int) -> list[BlockWrite]:
        first, end = header.first_block, header.first_block + header.num_blocks
        if header.byte_offset or end > len(self.block_ids) or num_bytes != header.num_blocks * self._block_bytes:
            raise self._out_of_range(header, num_bytes)
        if any(self._received[first:end]):
            raise broken(f"a block from {first} to {end - 1} came twice")
        size = self._block_bytes
        return [BlockWrite(self.block_ids[first + i], 0, i * size, (i + 1) * size) for i in range(header.num_blocks)]

    def _part_write(self, header: ChunkHeader, num_bytes: int) -> list[BlockWrite]:
        block, offset = header.first_block, header.byte_offset
        if block >= len(self.block_ids) or not num_bytes or offset + num_bytes > self._block_bytes:
            raise self._out_of_range(header, num_bytes)
        if offset != self._received[block]:
            raise broken(f"byte {offset} of block {block} came where {self._received[block]} was due")
        return [BlockWrite(self.block_ids[block], offset, 0, num_bytes)]

    def _out_of_range(self, header: ChunkHeader, num_bytes: int) -> PdserveError:
        where = f"byte {header.byte_offset} of block {header.first_block}"
        room = f"{len(self.block_ids)} blocks of {self._block_bytes} bytes"
        return broken(f"{header.num_blocks} blocks in {num_bytes} bytes at {where} do not fit {room}")
