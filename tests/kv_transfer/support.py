"""A block store in memory, a decode host that checks ownership, and plans: what every transfer test needs."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from kv_transfer.interfaces import InboundCommit, InboundGrant, OutboundEnd, Peer, TransferPlan
from kv_transfer.messages import CommitOrder, PrepareOrder, WorkerIdentity, stale
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout
from pdserve_kernels.host_memory import shared_empty

LAYOUT = KvLayout(dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=2)  # 64 bytes a block
FINGERPRINT = "model-a"
SENDER = WorkerIdentity("prefill-0", 11)
RECEIVER = WorkerIdentity("decode-0", 22)
WAIT_S = 20.0


def layout_of(block_bytes: int) -> KvLayout:
    """A layout whose blocks have (a multiple of 16) `block_bytes` bytes."""
    layout = replace(LAYOUT, dtype="bfloat16", head_dim=block_bytes // 16)
    assert layout.block_bytes == block_bytes
    return layout


class MemoryStore:
    """A BlockStore; `before_write` runs inside write_block, `before_read` inside read_block.

    `shared`: peers may read it through `shared_fd`, as a prefill worker's pool.
    """

    def __init__(self, num_blocks: int, layout: KvLayout = LAYOUT, *, shared: bool = False) -> None:
        self.layout = layout
        self.shared_fd: int | None = None
        self.pages: Seq[bytearray | memoryview] = [bytearray(layout.block_bytes) for _ in range(num_blocks)]
        if shared:
            area, self.shared_fd = shared_empty(num_blocks * layout.block_bytes)
            weakref.finalize(self, os.close, self.shared_fd)
            self.pages = [row.numpy().data for row in area.view(num_blocks, -1)]
        self.before_write: Callable[[int], None] = lambda block_id: None
        self.before_read: Callable[[int], None] = lambda block_id: None

    def fill(self, block_ids: Iterable[int], seed: int = 0) -> None:
        for block_id in block_ids:
            size = self.layout.block_bytes
            pattern = bytes((block_id * 7 + seed * 13 + i * 3) % 251 for i in range(min(size, 997)))
            self.pages[block_id][:] = (pattern * (size // len(pattern) + 1))[:size]

    def read_block(self, block_id: int) -> memoryview:
        self.before_read(block_id)
        return memoryview(self.pages[block_id])

    def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
        self.before_write(block_id)
        assert offset + len(data) <= self.layout.block_bytes
        self.pages[block_id][offset : offset + len(data)] = data


class CheckingHost:
    """An InboundHost that fails if a block is freed twice, or granted while it is owned.

    A reservation survives a failed transfer, so that it can be tried again; a cancelled one is gone.
    """

    def __init__(self, num_blocks: int, reservations: Iterable[int] = range(1, 1000)) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.reservations = set(reservations)
        self.owned: dict[int, tuple[int, ...]] = {}
        self.committed: dict[int, InboundCommit] = {}
        self.released: list[tuple[int, PdserveError]] = []
        self.before_allocate: Callable[[int], None] = lambda reservation_id: None
        self.before_commit: Callable[[InboundCommit], None] = lambda commit: None
        self.changed = threading.Condition()

    def allocate(self, sequence_id: SequenceId, reservation_id: int, num_blocks: int) -> InboundGrant:
        self.before_allocate(reservation_id)
        with self.changed:
            if reservation_id not in self.reservations or reservation_id in self.owned | self.committed:
                raise stale("unknown, ended or used reservation")
            assert len(self.free) >= num_blocks, "a reservation guarantees its blocks"
            blocks, self.free = tuple(self.free[:num_blocks]), self.free[num_blocks:]
            self.owned[reservation_id] = blocks
            self.changed.notify_all()
            return InboundGrant(blocks)

    def commit(self, commit: InboundCommit) -> None:
        self.before_commit(commit)
        with self.changed:
            assert self.owned[commit.reservation_id] == commit.block_ids
            if commit.reservation_id not in self.reservations:
                raise stale("cancelled meanwhile")
            del self.owned[commit.reservation_id]
            self.committed[commit.reservation_id] = commit
            self.changed.notify_all()

    def release(self, sequence_id: SequenceId, reservation_id: int, block_ids: Seq[int], error: PdserveError) -> None:
        with self.changed:
            assert self.owned.pop(reservation_id) == tuple(block_ids)
            assert not set(self.free) & set(block_ids)
            self.free += block_ids
            self.released.append((reservation_id, error))
            if error.reason is ErrorReason.CANCELLED:
                self.reservations.discard(reservation_id)
            self.changed.notify_all()

    def finish(self, reservation_id: int) -> None:
        """A committed sequence is done decoding."""
        with self.changed:
            self.free += self.committed.pop(reservation_id).block_ids

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)

    def check_all_free(self) -> None:
        assert sorted(self.free) == list(range(self.num_blocks))
        assert not self.owned
        assert not self.committed


class EndLog:
    """Collects OutboundEnds and fails if a sequence ends twice."""

    def __init__(self) -> None:
        self.ends: dict[int, OutboundEnd] = {}
        self.changed = threading.Condition()

    def __call__(self, end: OutboundEnd) -> None:
        with self.changed:
            assert end.sequence_id.sequence not in self.ends, "ended twice"
            self.ends[end.sequence_id.sequence] = end
            self.changed.notify_all()

    def wait(self, sequence: int) -> OutboundEnd:
        with self.changed:
            assert self.changed.wait_for(lambda: sequence in self.ends, WAIT_S), "the transfer never ended"
            return self.ends[sequence]

    def has(self, sequence: int) -> bool:
        with self.changed:
            return sequence in self.ends


def join_threads_since(before: set[threading.Thread]) -> None:
    """Fail unless every thread that was started after `before` was taken ends."""
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"{thread.name} is left over"


def peer_at(
    address: str, layout: KvLayout = LAYOUT, receiver: WorkerIdentity = RECEIVER, transport: str = "grpc"
) -> Peer:
    return Peer(receiver.worker_id, receiver.incarnation, address, layout, transport)


def plan_of(sequence: int, peer: Peer, num_blocks: int, deadline_s: float = 60.0, first_block: int = 0) -> TransferPlan:
    """A plan for full blocks; the reservation's id is the sequence's."""
    return TransferPlan(
        sequence_id=SequenceId(5, sequence),
        peer=peer,
        reservation_id=sequence,
        num_tokens=(first_block + num_blocks) * peer.kv_layout.block_size,
        num_blocks=num_blocks,
        first_block=first_block,
        deadline_remaining_s=deadline_s,
    )


def prepare_order(
    transfer_id: int, num_blocks: int, reservation_id: int = 1, remaining_s: float = 60.0
) -> PrepareOrder:
    return PrepareOrder(
        transfer_id=transfer_id,
        sequence_id=SequenceId(5, reservation_id),
        reservation_id=reservation_id,
        num_tokens=num_blocks * LAYOUT.block_size,
        num_blocks=num_blocks,
        first_block=0,
        deadline_remaining_s=remaining_s,
    )


def commit_order(transfer_id: int, num_blocks: int, num_chunks: int) -> CommitOrder:
    return CommitOrder(transfer_id, num_blocks * LAYOUT.block_size, num_blocks, num_chunks, (7,), 0.001)
