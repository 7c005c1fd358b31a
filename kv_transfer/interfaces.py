"""What a transport promises to the services on either side, and what it asks of them.

Sending side:   KvSender.open(plan) → OutboundTransfer: send, commit, abort; one OutboundEnd per transfer.
Receiving side: a receiver calls its InboundHost: allocate, commit, release.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode worker, as the coordinator named it."""

    worker_id: str
    incarnation: int
    kv_address: str
    kv_layout: KvLayout
    transport: str


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What is about to be sent: the KV of a prompt's `num_tokens` tokens, from block `first_block` on."""

    sequence_id: SequenceId
    peer: Peer
    reservation_id: int
    num_tokens: int
    num_blocks: int
    first_block: int
    deadline_remaining_s: float


@dataclass(frozen=True, slots=True)
class OutboundEnd:
    """How a transfer ended. `error` None: the peer committed it. Only now may the source blocks be reused.

    `transport`: the one that it used last, which a broken link makes another than its plan's.
    """

    sequence_id: SequenceId
    error: PdserveError | None
    num_bytes: int
    duration_s: float
    transport: str


class OutboundTransfer(Protocol):
    """Calls return at once and may come from any one thread; they take effect in order."""

    def send(self, block_ids: Seq[int]) -> None:
        """The next blocks are final in the pool: ship them."""
        ...

    def commit(self, output_token_ids: Seq[int]) -> None:
        """Every block was handed to `send`; on arrival the peer starts decoding after these tokens."""
        ...

    def abort(self, reason: str) -> None:
        """Give up, unless already ended."""
        ...


class KvSender(Protocol):
    """One way to reach decode workers. `on_end` is called exactly once a transfer, from a thread of the sender's."""

    def open(self, plan: TransferPlan, on_end: Callable[[OutboundEnd], None]) -> OutboundTransfer: ...

    def close(self) -> None:
        """Abort what is open and release threads and sockets."""
        ...


@dataclass(frozen=True, slots=True)
class InboundGrant:
    """Blocks of this worker's pool that now belong to one inbound transfer."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InboundCommit:
    """A verified transfer: the blocks hold the KV of `num_tokens` tokens; decoding goes on after `output_token_ids`."""

    sequence_id: SequenceId
    reservation_id: int
    block_ids: tuple[int, ...]
    num_tokens: int
    output_token_ids: tuple[int, ...]
    num_bytes: int
    since_prefill_end_s: float


class InboundHost(Protocol):
    """The decode service, as seen by a receiver. Called from receiver threads; may block for up to a step."""

    def allocate(self, sequence_id: SequenceId, reservation_id: int, num_blocks: int) -> InboundGrant:
        """Take blocks under a reservation.

        Raises:
            PdserveError: STALE (unknown or ended reservation). One with `retry_after_s` tells the sender to come
                back: the blocks of the reservation's earlier transfer are still being taken back, say.
        """
        ...

    def commit(self, commit: InboundCommit) -> None:
        """Hand the blocks over to the decode scheduler.

        Raises:
            PdserveError: STALE (cancelled meanwhile); the blocks are then released through `release`.
        """
        ...

    def release(self, sequence_id: SequenceId, reservation_id: int, block_ids: Seq[int], error: PdserveError) -> None:
        """The transfer ended without commit and no writer can touch the blocks any more. Called exactly once."""
        ...
