import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.chunk_frame import ChunkHeader
from kv_transfer.inbound.payload import ReceivedBytes
from kv_transfer.inbound.registry import InboundStats
from kv_transfer.inbound.transfers import InboundTransfers
from kv_transfer.messages import Busy, PairKey, Ready, WorkerIdentity
from pdserve.core.errors import ErrorReason, PdserveError
from tests.kv_transfer.support import LAYOUT, SENDER, WAIT_S, CheckingHost, MemoryStore, commit_order, prepare_order

PAIR = PairKey(SENDER.incarnation, 1)
SIZE = LAYOUT.block_bytes
LEASE_S = 10.0


class Bench:
    """A receiver of 8 blocks with one open pair."""

    def __init__(self) -> None:
        self.store = MemoryStore(8)
        self.host = CheckingHost(8)
        self.inbound = InboundTransfers(self.host, self.store, LEASE_S, max_open=4)
        self.inbound.open_pair(SENDER, 1)

    def prepare(self, transfer_id: int, num_blocks: int, reservation_id: int = 1, now_s: float = 0.0) -> Ready | Busy:
        return self.inbound.prepare(PAIR, prepare_order(transfer_id, num_blocks, reservation_id), now_s)

    def chunk(self, transfer_id: int, sequence: int, block: int, count: int = 1, now_s: float = 0.0) -> None:
        payload = b"".join(page_of(transfer_id, i) for i in range(block, block + count))
        header = ChunkHeader(transfer_id, PAIR.epoch, sequence, block, 0, count)
        self.inbound.receive(PAIR, header, ReceivedBytes(memoryview(payload)), now_s)

    def part(self, sequence: int, block: int, offset: int, size: int) -> None:
        header = ChunkHeader(1, PAIR.epoch, sequence, block, offset, 1)
        self.inbound.receive(PAIR, header, ReceivedBytes(memoryview(page_of(1, block)[offset : offset + size])), 0.0)

    def commit(self, transfer_id: int, num_blocks: int, num_chunks: int) -> None:
        self.inbound.commit(PAIR, commit_order(transfer_id, num_blocks, num_chunks))

    def check_content(self, transfer_id: int, reservation_id: int = 1) -> None:
        for index, block_id in enumerate(self.host.committed[reservation_id].block_ids):
            assert self.store.pages[block_id] == page_of(transfer_id, index)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def page_of(transfer_id: int, index: int) -> bytes:
    return bytes((transfer_id * 31 + index * 5 + i) % 256 for i in range(SIZE))


def reason_of(call: object, *args: object) -> ErrorReason:
    assert callable(call)
    with pytest.raises(PdserveError) as refused:
        call(*args)
    return refused.value.reason


def test_blocks_arrive_and_are_handed_over(bench: Bench):
    assert bench.prepare(1, 3) == Ready(LEASE_S, (0, 1, 2))
    bench.chunk(1, 0, 0, 2)
    bench.chunk(1, 1, 2)
    bench.commit(1, 3, 2)
    commit = bench.host.committed[1]
    assert (commit.block_ids, commit.num_tokens, commit.output_token_ids) == ((0, 1, 2), 12, (7,))
    assert commit.num_bytes == 3 * SIZE
    bench.check_content(1)
    stats = bench.inbound.stats
    assert (stats.num_open, stats.num_completed, stats.num_bytes, stats.stale_events) == (0, 1, 3 * SIZE, 0)


def test_nothing_to_send_still_prepares_and_commits(bench: Bench):
    order = prepare_order(1, 0)
    assert bench.inbound.prepare(PAIR, order, 0.0) == Ready(LEASE_S, ())
    bench.commit(1, 0, 0)
    assert bench.host.committed[1].block_ids == ()


def test_blocks_in_any_order_and_in_parts_give_the_same_bytes(bench: Bench):
    bench.prepare(1, 3)
    bench.chunk(1, 0, 2)
    bench.part(1, 0, 0, 16)
    bench.chunk(1, 2, 1)
    bench.part(3, 0, 16, SIZE - 16)
    bench.commit(1, 3, 4)
    bench.check_content(1)


@pytest.mark.parametrize("seed", range(30))
def test_fuzzed_order_duplication_and_loss_never_commit_wrong_bytes(seed: int, bench: Bench):
    rng = random.Random(seed)
    chunks = [0, 1, 2, 3, 4]
    rng.shuffle(chunks)
    changed = rng.choice(["none", "lose", "duplicate"])
    if changed == "lose":
        chunks.pop()
    elif changed == "duplicate":
        chunks.insert(rng.randrange(6), rng.choice(chunks))
    bench.prepare(1, 5)

    def deliver() -> None:
        for sequence, block in enumerate(chunks):
            bench.chunk(1, sequence, block)
        bench.commit(1, 5, len(chunks))

    if changed == "none":
        deliver()
        bench.check_content(1)
    else:
        assert reason_of(deliver) is ErrorReason.TRANSFER_FAILED
        assert [reservation for reservation, _ in bench.host.released] == [1]
        bench.host.check_all_free()


@pytest.mark.parametrize(
    ("sequence", "block", "offset", "count", "num_bytes"),
    [
        (1, 0, 0, 1, SIZE),
        (0, 3, 0, 1, SIZE),
        (0, 2, 0, 2, 2 * SIZE),
        (0, 2**32 - 1, 0, 1, SIZE),
        (0, 0, 1, 1, SIZE),
        (0, 0, 16, 1, 16),
        (0, 0, 0, 1, SIZE + 1),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 2, SIZE),
        (0, 0, 16, 2, 2 * SIZE),
        (0, 4, 0, 0, 0),
    ],
)
def test_a_chunk_that_contradicts_the_transfer_ends_it(
    sequence: int, block: int, offset: int, count: int, num_bytes: int, bench: Bench
):
    bench.prepare(1, 3)
    header = ChunkHeader(1, 1, sequence, block, offset, count)
    assert reason_of(bench.inbound.receive, PAIR, header, memoryview(bytes(num_bytes)), 0.0) is (
        ErrorReason.TRANSFER_FAILED
    )
    bench.host.check_all_free()
    assert reason_of(bench.chunk, 1, 0, 0) is ErrorReason.STALE
    assert bench.store.pages[0] == bytes(SIZE)


@pytest.mark.parametrize(("block", "count"), [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3)])
def test_a_block_that_comes_twice_ends_the_transfer(block: int, count: int, bench: Bench):
    bench.prepare(1, 3)
    bench.chunk(1, 0, 0, 2)
    assert reason_of(bench.chunk, 1, 1, block, count) is ErrorReason.TRANSFER_FAILED
    bench.host.check_all_free()


def test_a_missing_block_is_never_committed(bench: Bench):
    bench.prepare(1, 2)
    bench.chunk(1, 0, 0)
    assert reason_of(bench.commit, 1, 2, 1) is ErrorReason.TRANSFER_FAILED
    assert not bench.host.committed
    bench.host.check_all_free()
    assert bench.inbound.stats.num_failed == 1


def test_a_half_block_is_never_committed(bench: Bench):
    bench.prepare(1, 1)
    bench.part(0, 0, 0, SIZE - 1)
    assert reason_of(bench.commit, 1, 1, 1) is ErrorReason.TRANSFER_FAILED
    bench.host.check_all_free()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(4, 2), (5, 1), (0, 1), (9, 2)])
def test_counts_that_contradict_each_other_are_refused(num_tokens: int, num_blocks: int, bench: Bench):
    order = prepare_order(1, num_blocks)
    order = type(order)(1, order.sequence_id, 1, num_tokens, num_blocks, 0, 60.0)
    assert reason_of(bench.inbound.prepare, PAIR, order, 0.0) is ErrorReason.INVALID_ARGUMENT
    bench.host.check_all_free()


def test_every_late_or_unknown_message_is_answered_and_counted(bench: Bench):
    bench.prepare(1, 1)
    bench.chunk(1, 0, 0)
    bench.commit(1, 1, 1)
    bench.commit(1, 1, 1)
    assert reason_of(bench.chunk, 1, 1, 0) is ErrorReason.STALE
    bench.inbound.abort(PAIR, 1, "late")
    assert reason_of(bench.prepare, 1, 1, 2) is ErrorReason.STALE
    for unknown in (77, 2**64 - 1):
        assert reason_of(bench.chunk, unknown, 0, 0) is ErrorReason.STALE
        assert reason_of(bench.commit, unknown, 1, 1) is ErrorReason.STALE
        bench.inbound.abort(PAIR, unknown, "unknown")
    assert not bench.inbound.cancel(999)
    assert bench.inbound.stats.stale_events == 10
    assert not bench.host.released


def test_a_commit_after_an_abort_is_stale(bench: Bench):
    bench.prepare(1, 1)
    bench.chunk(1, 0, 0)
    bench.inbound.abort(PAIR, 1, "changed my mind")
    bench.inbound.abort(PAIR, 1, "again")
    assert reason_of(bench.commit, 1, 1, 1) is ErrorReason.STALE
    bench.host.check_all_free()
    assert bench.inbound.stats.num_cancelled == 1


def test_another_epoch_or_incarnation_is_stale(bench: Bench):
    bench.prepare(1, 1)
    for pair in (PairKey(SENDER.incarnation, 0), PairKey(SENDER.incarnation, 2), PairKey(99, 1)):
        header = ChunkHeader(1, pair.epoch, 0, 0, 0, 1)
        assert reason_of(bench.inbound.receive, pair, header, memoryview(bytes(SIZE)), 0.0) is ErrorReason.STALE
        assert reason_of(bench.inbound.commit, pair, commit_order(1, 1, 1)) is ErrorReason.STALE
        assert reason_of(bench.inbound.prepare, pair, prepare_order(2, 1, 2), 0.0) is ErrorReason.STALE
        bench.inbound.abort(pair, 1, "stale")
    bench.chunk(1, 0, 0)
    bench.commit(1, 1, 1)


def test_epochs_only_rise_and_a_replaced_incarnation_stays_out(bench: Bench):
    assert reason_of(bench.inbound.open_pair, SENDER, 1) is ErrorReason.STALE
    bench.prepare(1, 1)
    restarted = WorkerIdentity(SENDER.worker_id, SENDER.incarnation + 1)
    bench.inbound.open_pair(restarted, 1)
    bench.host.check_all_free()
    assert reason_of(bench.inbound.open_pair, SENDER, 9) is ErrorReason.STALE
    assert reason_of(bench.prepare, 2, 1) is ErrorReason.STALE


def test_two_senders_may_use_the_same_transfer_id(bench: Bench):
    other = WorkerIdentity("prefill-1", 12)
    bench.inbound.open_pair(other, 1)
    bench.prepare(1, 1, 1)
    bench.inbound.prepare(PairKey(12, 1), prepare_order(1, 1, 2), 0.0)
    header = ChunkHeader(1, 1, 0, 0, 0, 1)
    bench.inbound.receive(PairKey(12, 1), header, ReceivedBytes(memoryview(b"\1" * SIZE)), 0.0)
    bench.chunk(1, 0, 0)
    bench.commit(1, 1, 1)
    bench.check_content(1)
    assert bench.store.pages[1] == b"\1" * SIZE


def test_a_second_transfer_into_a_reservation_is_refused(bench: Bench):
    bench.prepare(1, 1)
    assert reason_of(bench.prepare, 2, 1) is ErrorReason.STALE


def test_too_many_open_transfers_are_busy_and_leave_no_state(bench: Bench):
    for reservation in range(1, 5):
        bench.prepare(reservation, 1, reservation)
    assert isinstance(bench.prepare(5, 1, 5), Busy)
    bench.inbound.cancel(1)
    assert isinstance(bench.prepare(5, 1, 5), Ready)


def test_a_lease_is_renewed_by_chunks_and_bounded_by_the_deadline(bench: Bench):
    bench.inbound.prepare(PAIR, prepare_order(1, 3, 1, remaining_s=25.0), 0.0)
    for sequence, now_s in enumerate((9.0, 18.0)):
        bench.chunk(1, sequence, sequence, now_s=now_s)
        assert bench.inbound.reap(now_s + 6.0) == 0
    assert bench.inbound.reap(25.0) == 1
    assert bench.host.released[0][1].reason is ErrorReason.TRANSFER_FAILED
    bench.host.check_all_free()
    assert bench.inbound.reap(100.0) == 0


def test_an_empty_chunk_renews_the_lease(bench: Bench):
    bench.prepare(1, 1)
    bench.chunk(1, 0, 0, count=0, now_s=9.0)
    assert bench.inbound.reap(18.0) == 0
    bench.chunk(1, 1, 0)
    bench.commit(1, 1, 2)
    bench.check_content(1)


def test_a_silent_transfer_is_reaped(bench: Bench):
    bench.prepare(1, 1)
    assert bench.inbound.reap(LEASE_S - 0.1) == 0
    assert bench.inbound.reap(LEASE_S) == 1
    bench.host.check_all_free()


@pytest.mark.parametrize("ending", ["abort", "cancel", "reap", "epoch", "close"])
def test_blocks_are_not_released_under_a_writer(ending: str, bench: Bench):
    """E01: whatever ends the transfer, its blocks outlive the write that is going on."""
    endings = {
        "abort": lambda: bench.inbound.abort(PAIR, 1, "test"),
        "cancel": lambda: bench.inbound.cancel(1),
        "reap": lambda: bench.inbound.reap(1e9),
        "epoch": lambda: bench.inbound.open_pair(SENDER, 2),
        "close": bench.inbound.close,
    }
    inside, go_on = threading.Event(), threading.Event()

    def before_write(block_id: int) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)

    bench.prepare(1, 2)
    bench.store.before_write = before_write
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(bench.chunk, 1, 0, 0, 2)
        assert inside.wait(WAIT_S)
        endings[ending]()
        assert not bench.host.released
        assert set(bench.host.owned) == {1}
        pair = PairKey(SENDER.incarnation, 2 if ending == "epoch" else 1)
        assert isinstance(bench.inbound.prepare(pair, prepare_order(2, 1), 0.0), Busy)
        go_on.set()
        writing.result(WAIT_S)
    bench.host.wait_for(lambda: len(bench.host.released) == 1)
    assert not bench.host.owned
    assert bench.inbound.stats.num_open == 0
    assert reason_of(bench.chunk, 1, 1, 1) is ErrorReason.STALE


def test_a_commit_under_a_writer_is_refused(bench: Bench):
    refused: list[ErrorReason] = []
    bench.prepare(1, 1)
    bench.store.before_write = lambda block_id: refused.append(reason_of(bench.commit, 1, 1, 1))
    bench.chunk(1, 0, 0)
    assert refused == [ErrorReason.TRANSFER_FAILED]
    bench.host.check_all_free()


def test_a_store_that_fails_ends_the_transfer(bench: Bench):
    def fail(block_id: int) -> None:
        raise RuntimeError("disk on fire")

    bench.prepare(1, 1)
    bench.store.before_write = fail
    assert reason_of(bench.chunk, 1, 0, 0) is ErrorReason.TRANSFER_FAILED
    bench.host.check_all_free()


def test_a_cancel_during_allocate_gives_the_blocks_back(bench: Bench):
    bench.host.before_allocate = lambda reservation_id: bench.inbound.cancel(reservation_id) and None
    assert reason_of(bench.prepare, 1, 2) is ErrorReason.STALE
    bench.host.check_all_free()
    assert bench.inbound.stats.num_open == 0


def test_an_unknown_reservation_is_stale_and_an_exception_internal(bench: Bench):
    assert reason_of(bench.prepare, 1, 1, 5000) is ErrorReason.STALE
    assert bench.inbound.stats.stale_events == 1

    def fail(reservation_id: int) -> None:
        raise KeyError(reservation_id)

    bench.host.before_allocate = fail
    assert reason_of(bench.prepare, 2, 1, 2) is ErrorReason.INTERNAL
    bench.host.check_all_free()
    assert bench.inbound.stats.num_open == 0


def test_a_host_that_is_not_ready_yet_makes_the_sender_come_back(bench: Bench):
    def not_yet(reservation_id: int) -> None:
        bench.host.before_allocate = lambda _: None
        raise PdserveError(ErrorReason.STALE, "the earlier transfer's blocks are on their way", retry_after_s=0.5)

    bench.host.before_allocate = not_yet
    assert bench.prepare(1, 1) == Busy(0.5)
    assert bench.inbound.stats == InboundStats()
    assert isinstance(bench.prepare(1, 1), Ready)


@pytest.mark.parametrize("fault", ["stale", "exception"])
def test_a_commit_that_the_host_refuses_releases(fault: str, bench: Bench):
    def refuse(commit: object) -> None:
        if fault == "exception":
            raise RuntimeError("bug")
        bench.host.reservations.clear()

    bench.prepare(1, 1)
    bench.chunk(1, 0, 0)
    bench.host.before_commit = refuse
    expected = ErrorReason.STALE if fault == "stale" else ErrorReason.INTERNAL
    assert reason_of(bench.commit, 1, 1, 1) is expected
    bench.host.check_all_free()
    assert reason_of(bench.commit, 1, 1, 1) is ErrorReason.STALE


def test_while_the_host_commits_nothing_else_ends_the_transfer(bench: Bench):
    def interfere(commit: object) -> None:
        bench.inbound.abort(PAIR, 1, "late")
        assert not bench.inbound.cancel(1)
        assert bench.inbound.reap(1e9) == 0
        bench.inbound.open_pair(SENDER, 2)

    bench.prepare(1, 1)
    bench.chunk(1, 0, 0)
    bench.host.before_commit = interfere
    bench.commit(1, 1, 1)
    bench.check_content(1)
    bench.commit(1, 1, 1)  # an old epoch's sender asks again
    assert bench.inbound.stats.num_completed == 1


def test_a_second_commit_waits_for_the_first(bench: Bench):
    inside, go_on = threading.Event(), threading.Event()

    def block(commit: object) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)

    bench.prepare(1, 1)
    bench.chunk(1, 0, 0)
    bench.host.before_commit = block
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bench.commit, 1, 1, 1)
        assert inside.wait(WAIT_S)
        second = pool.submit(bench.commit, 1, 1, 1)
        go_on.set()
        first.result(WAIT_S)
        second.result(WAIT_S)
    assert len(bench.host.committed) == 1
