"""What the two ends of any transport say to each other, as plain values. Knows no wire format."""

from dataclasses import dataclass

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker's name, stable across restarts, and the incarnation of this run."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class PairKey:
    """Who sends, and in which epoch of its pair with this receiver: travels with every message but Handshake."""

    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PrepareOrder:
    """`num_blocks` blocks will come; with the `first_block` blocks that the receiver has, they hold `num_tokens`."""

    transfer_id: int
    sequence_id: SequenceId
    reservation_id: int
    num_tokens: int
    num_blocks: int
    first_block: int
    deadline_remaining_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The receiver holds blocks for the transfer until `lease_s` pass without a chunk."""

    lease_s: float
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Busy:
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """What a receiver has of one transfer: the next chunk's sequence number, and the blocks that are complete."""

    next_sequence: int
    num_blocks_received: int


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Everything was sent, in `num_chunks` chunks; all counts are compared with what arrived."""

    transfer_id: int
    num_tokens: int
    num_blocks: int
    num_chunks: int
    output_token_ids: tuple[int, ...]
    since_prefill_end_s: float


def stale(message: str) -> PdserveError:
    """The transfer or reservation is over (or never was): only this transfer ends."""
    return PdserveError(ErrorReason.STALE, message)


STALE_PAIR_PARAM = "epoch"


def stale_pair(message: str) -> PdserveError:
    """The sender's incarnation or epoch is not the current one: it must shake hands anew."""
    return PdserveError(ErrorReason.STALE, message, param=STALE_PAIR_PARAM)


def broken(message: str) -> PdserveError:
    """What arrived is not what was promised; the whole transfer must be sent again or given up."""
    return PdserveError(ErrorReason.TRANSFER_FAILED, message)
