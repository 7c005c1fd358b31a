"""What a pair needs of a transport: one peer, one epoch, blocking calls made by one thread. Decides nothing."""

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.messages import Busy, CommitOrder, PrepareOrder, Ready


class PairBroken(Exception):
    """The link, or what came over it, cannot be trusted any more: it is dropped, and its transfers start anew."""


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Blocks to send in one call. `first_block` counts the transfer's blocks; empty `block_ids` renew the lease."""

    transfer_id: int
    first_sequence: int
    first_block: int
    block_ids: tuple[int, ...]


class Link(Protocol):
    """Every call but `close` raises PairBroken, or PdserveError where the peer refused this one transfer."""

    @property
    def transport(self) -> str:
        """Its name, as settings and metrics know it."""
        ...

    def handshake(self, timeout_s: float) -> None:
        """A PdserveError refuses the whole pair."""
        ...

    def prepare(self, order: PrepareOrder, timeout_s: float) -> Ready | Busy: ...

    def send(self, batch: ChunkBatch, timeout_s: float) -> int:
        """The next sequence number. When it returns or raises, nothing reads the source blocks any more, or nothing
        that is read of them can be committed."""
        ...

    def commit(self, order: CommitOrder, timeout_s: float) -> None: ...

    def abort(self, transfer_id: int, reason: str, timeout_s: float) -> None: ...

    def close(self) -> None:
        """From any thread; a running call fails at once."""
        ...
