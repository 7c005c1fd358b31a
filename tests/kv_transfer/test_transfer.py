"""Sender and receiver over loopback sockets, and through shared memory."""

import random
import threading
from dataclasses import replace

import pytest
import xxhash

from kv_transfer.interfaces import OutboundTransfer, Peer
from kv_transfer.messages import WorkerIdentity
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import NetworkKvSender
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from pdserve.serving.settings import TransferSettings
from tests.kv_transfer.support import (
    FINGERPRINT,
    LAYOUT,
    RECEIVER,
    SENDER,
    WAIT_S,
    CheckingHost,
    EndLog,
    MemoryStore,
    join_threads_since,
    layout_of,
    peer_at,
    plan_of,
)

MIB = 1024 * 1024
SETTINGS = TransferSettings()


class Fleet:
    """One sender and one receiver, `num_blocks` blocks each."""

    def __init__(
        self,
        transport: str,
        layout: KvLayout = LAYOUT,
        num_blocks: int = 16,
        settings: TransferSettings = SETTINGS,
    ) -> None:
        self.transport = transport
        self.source = MemoryStore(num_blocks, layout, shared=transport == "shm")
        self.target = MemoryStore(num_blocks, layout)
        self.source.fill(range(num_blocks))
        self.host = CheckingHost(num_blocks)
        self.receiver = self.new_receiver(RECEIVER, self.host, settings)
        self.port = self.receiver.start("127.0.0.1", 0)
        self.peer = self.peer_for(RECEIVER)
        self.sender = self.new_sender(SENDER, settings)
        self.ends = EndLog()

    def new_receiver(
        self, identity: WorkerIdentity, host: CheckingHost, settings: TransferSettings = SETTINGS
    ) -> KvReceiver:
        with_shm = self.transport == "shm"
        return KvReceiver(identity, FINGERPRINT, self.target, host, settings, with_shm=with_shm)

    def new_sender(self, identity: WorkerIdentity, settings: TransferSettings = SETTINGS) -> NetworkKvSender:
        return NetworkKvSender(self.source, identity, FINGERPRINT, settings, shared_fd=self.source.shared_fd)

    def peer_for(self, receiver: WorkerIdentity) -> Peer:
        return peer_at(f"127.0.0.1:{self.port}", self.source.layout, receiver, self.transport)

    def open(self, sequence: int, num_blocks: int, deadline_s: float = 60.0) -> OutboundTransfer:
        return self.sender.open(plan_of(sequence, self.peer, num_blocks, deadline_s), self.ends)

    def error_of(self, sequence: int) -> ErrorReason | None:
        error = self.ends.wait(sequence).error
        return None if error is None else error.reason

    def check_content(self, sequence: int, source_ids: list[int]) -> None:
        received = self.host.committed[sequence].block_ids
        assert len(received) == len(source_ids)
        for mine, theirs in zip(source_ids, received, strict=True):
            assert checksum(self.source, mine) == checksum(self.target, theirs)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=["grpc", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fleet(transport: str):
    threads = set(threading.enumerate())
    fleet = Fleet(transport)
    yield fleet
    fleet.close()
    assert not fleet.host.owned
    join_threads_since(threads)


def checksum(store: MemoryStore, block_id: int) -> int:
    return xxhash.xxh3_64_intdigest(store.pages[block_id])


def send_groups(transfer: OutboundTransfer, groups: list[list[int]]) -> None:
    for group in groups:
        transfer.send(group)
    transfer.commit([42])


@pytest.mark.parametrize("groups", [[], [[3]], [[3, 1]], [[5], [2, 9, 4], [1]], [list(range(16))]])
def test_blocks_arrive_bit_exact_group_by_group(groups: list[list[int]], fleet: Fleet):
    blocks = [block for group in groups for block in group]
    send_groups(fleet.open(1, len(blocks)), groups)
    assert fleet.error_of(1) is None
    fleet.check_content(1, blocks)
    commit = fleet.host.committed[1]
    assert commit.output_token_ids == (42,)
    assert commit.num_tokens == len(blocks) * LAYOUT.block_size
    assert commit.num_bytes == fleet.ends.wait(1).num_bytes == len(blocks) * LAYOUT.block_bytes
    assert 0.0 <= commit.since_prefill_end_s < WAIT_S


def test_every_group_is_complete_before_the_next_is_handed_over(fleet: Fleet):
    """E11: what the receiver holds after each chunk is the source's bytes of that chunk, though later ones change."""
    written: list[int] = []
    arrived = threading.Condition()

    def note(block_id: int) -> None:
        with arrived:
            written.append(block_id)
            arrived.notify_all()

    fleet.target.before_write = note
    transfer = fleet.open(1, 5)
    for count, block in enumerate([7, 3, 11, 0, 2], 1):
        fleet.source.fill([block], seed=count)
        transfer.send([block])
        with arrived:
            assert arrived.wait_for(lambda expected=count: len(written) >= expected, WAIT_S)
    transfer.commit([1])
    assert fleet.error_of(1) is None
    fleet.check_content(1, [7, 3, 11, 0, 2])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_block_counts_around_block_boundaries(length: int, fleet: Fleet):
    """E06: the receiver gets exactly ⌈length / block size⌉ blocks, for prompts shorter than a block too."""
    num_blocks = -(-length // LAYOUT.block_size)
    plan = replace(plan_of(1, fleet.peer, num_blocks), num_tokens=length)
    send_groups(fleet.sender.open(plan, fleet.ends), [list(range(num_blocks))])
    assert fleet.error_of(1) is None
    assert len(fleet.host.committed[1].block_ids) == num_blocks
    assert fleet.host.committed[1].num_tokens == length


@pytest.mark.parametrize("num_cached", [0, 1, 3])
def test_only_missing_blocks_are_sent(num_cached: int, fleet: Fleet):
    """E07: with everything cached nothing is sent, and both sides still end."""
    sent = list(range(num_cached, 3))
    plan = plan_of(1, fleet.peer, len(sent), first_block=num_cached)
    send_groups(fleet.sender.open(plan, fleet.ends), [sent])
    end = fleet.ends.wait(1)
    assert (end.error, end.num_bytes) == (None, len(sent) * LAYOUT.block_bytes)
    fleet.check_content(1, sent)


def test_many_transfers_interleave(fleet: Fleet):
    transfers = {sequence: fleet.open(sequence, 4) for sequence in range(1, 5)}
    for index in range(4):
        for sequence, transfer in transfers.items():
            transfer.send([(sequence + index * 3) % 16])
    for transfer in transfers.values():
        transfer.commit([1])
    for sequence in transfers:
        assert fleet.error_of(sequence) is None
        fleet.check_content(sequence, [(sequence + index * 3) % 16 for index in range(4)])
    assert fleet.receiver.stats.num_completed == 4


@pytest.mark.parametrize("size", [4 * MIB - 16, 4 * MIB, 4 * MIB + 16, 64 * MIB])
def test_blocks_beyond_every_message_limit_arrive(size: int, transport: str):
    """K02: a block is cut into chunks, whatever gRPC's limits (16 bytes is the least step of a block's size)."""
    fleet = Fleet(transport, layout_of(size), num_blocks=1)
    send_groups(fleet.open(1, 1), [[0]])
    assert fleet.error_of(1) is None
    fleet.check_content(1, [0])
    fleet.close()


@pytest.mark.parametrize("chunk_bytes", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 16 * MIB - 48])
def test_payloads_around_grpcs_own_limit_arrive(chunk_bytes: int):
    """K02: gRPC's default of 4 MiB a message is raised on both sides."""
    fleet = Fleet("grpc", layout_of(17 * MIB), num_blocks=1, settings=TransferSettings(chunk_bytes=chunk_bytes))
    send_groups(fleet.open(1, 1), [[0]])
    assert fleet.error_of(1) is None
    fleet.check_content(1, [0])
    fleet.close()


def test_chunks_too_large_for_a_message_are_refused_by_name():
    with pytest.raises(PdserveError, match="bytes a chunk") as refused:
        NetworkKvSender(MemoryStore(1), SENDER, FINGERPRINT, TransferSettings(chunk_bytes=16 * MIB))
    assert refused.value.param == "transfer.chunk_bytes"


@pytest.mark.parametrize("chunk_bytes", [1, 63, 64, 65, 128, 200])
def test_any_chunk_size_gives_the_same_bytes(chunk_bytes: int, transport: str):
    fleet = Fleet(transport, settings=TransferSettings(chunk_bytes=chunk_bytes))
    send_groups(fleet.open(1, 5), [[4, 2], [8, 6, 0]])
    assert fleet.error_of(1) is None
    fleet.check_content(1, [4, 2, 8, 6, 0])
    fleet.close()


def test_a_cancel_under_a_slow_write_keeps_the_blocks_until_it_is_over(fleet: Fleet):
    """E01: the pool has 16 blocks; A's 12 are free for B only when A's late write can no longer land in them."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(block_id: int) -> None:
        fleet.target.before_write = lambda _: None
        inside.set()
        assert go_on.wait(WAIT_S)

    fleet.target.before_write = slow
    fleet.open(1, 12).send(list(range(12)))
    assert inside.wait(WAIT_S)
    assert fleet.receiver.cancel(1)
    assert len(fleet.host.free) == 4
    go_on.set()
    assert fleet.error_of(1) is ErrorReason.STALE
    fleet.host.wait_for(lambda: len(fleet.host.free) == 16)
    send_groups(fleet.open(2, 12), [[15, *range(11)]])
    assert fleet.error_of(2) is None
    fleet.check_content(2, [15, *range(11)])


def test_a_sender_that_gives_up_frees_both_sides(fleet: Fleet):
    transfer = fleet.open(1, 3)
    transfer.send([0])
    transfer.abort("the client went away")
    assert fleet.error_of(1) is ErrorReason.CANCELLED
    fleet.host.check_all_free()


@pytest.mark.parametrize("seed", range(3))
def test_random_cancels_on_both_sides_lose_no_block(seed: int, transport: str):
    """E02: three senders, 20 transfers each, a third aborted by the sender, a third cancelled by the receiver."""
    fleet = Fleet(transport, num_blocks=64)
    senders = [fleet.new_sender(WorkerIdentity(f"p{i}", 100 + i)) for i in range(3)]
    rng = random.Random(seed)
    for sequence in range(1, 61):
        transfer = senders[sequence % 3].open(plan_of(sequence, fleet.peer, 4), fleet.ends)
        end_at, ending = rng.randrange(5), rng.choice(["commit", "abort", "cancel"])
        for index in range(4):
            if ending == "abort" and index == end_at:
                transfer.abort("test")
            elif ending == "cancel" and index == end_at:
                fleet.receiver.cancel(sequence)
            transfer.send([(sequence + index) % 64])
        transfer.commit([1])
        if sequence % 10 == 0:
            settle(fleet, sequence)
    for sender in senders:
        sender.close()
    fleet.close()
    fleet.host.check_all_free()
    assert fleet.receiver.stats.num_open == 0


def settle(fleet: Fleet, last: int) -> None:
    for sequence in range(last - 9, last + 1):
        if fleet.error_of(sequence) is None:
            fleet.check_content(sequence, [(sequence + index) % 64 for index in range(4)])
            fleet.host.finish(sequence)


def test_a_failed_group_is_sent_again_from_the_first_block(fleet: Fleet):
    """E09: the third of five groups fails once."""
    written: list[int] = []

    def fail_third(block_id: int) -> None:
        written.append(block_id)
        if len(written) == 3:
            raise OSError("write failed")

    fleet.target.before_write = fail_third
    groups = [[1], [3], [5], [7], [9]]
    send_groups(fleet.open(1, 5), groups)
    assert fleet.error_of(1) is None
    fleet.check_content(1, [1, 3, 5, 7, 9])
    assert len(written) == 8
    assert fleet.receiver.stats.num_failed == 1


def test_a_group_that_always_fails_ends_the_transfer_and_frees_both_sides(fleet: Fleet):
    def fail(block_id: int) -> None:
        raise OSError("write failed")

    fleet.target.before_write = fail
    send_groups(fleet.open(1, 2), [[1], [3]])
    assert fleet.error_of(1) is ErrorReason.TRANSFER_FAILED
    fleet.host.check_all_free()
    assert not fleet.host.committed


def test_source_blocks_that_cannot_be_read_end_the_transfer(fleet: Fleet):
    def fail(block_id: int) -> None:
        raise OSError("read failed")

    fleet.source.before_read = fail
    send_groups(fleet.open(1, 1), [[1]])
    assert fleet.error_of(1) is ErrorReason.INTERNAL
    fleet.host.check_all_free()


def test_an_unknown_reservation_ends_one_transfer_and_not_the_pair(fleet: Fleet):
    send_groups(fleet.open(5000, 1), [[1]])
    assert fleet.error_of(5000) is ErrorReason.STALE
    send_groups(fleet.open(1, 1), [[1]])
    assert fleet.error_of(1) is None


def test_nobody_at_the_address_is_a_failed_transfer(fleet: Fleet):
    fleet.receiver.close()
    send_groups(fleet.open(1, 1), [[1]])
    assert fleet.error_of(1) is ErrorReason.TRANSFER_FAILED


def test_a_restarted_receiver_refuses_what_was_meant_for_its_predecessor(fleet: Fleet):
    """E08: same address, new incarnation."""
    send_groups(fleet.open(1, 1), [[1]])
    assert fleet.error_of(1) is None
    fleet.receiver.close()
    restarted = WorkerIdentity(RECEIVER.worker_id, RECEIVER.incarnation + 1)
    host = CheckingHost(16)
    receiver = fleet.new_receiver(restarted, host)
    assert receiver.start("127.0.0.1", fleet.port) == fleet.port
    send_groups(fleet.open(2, 1), [[1]])
    assert fleet.error_of(2) is ErrorReason.STALE
    plan = replace(plan_of(3, fleet.peer, 1), peer=fleet.peer_for(restarted))
    send_groups(fleet.sender.open(plan, fleet.ends), [[1]])
    assert fleet.error_of(3) is None
    assert set(host.committed) == {3}
    receiver.close()


def test_a_restarted_sender_replaces_its_predecessor(fleet: Fleet):
    fleet.open(1, 2).send([1])
    fleet.host.wait_for(lambda: 1 in fleet.host.owned)
    restarted = fleet.new_sender(replace(SENDER, incarnation=12))
    send_groups(restarted.open(plan_of(2, fleet.peer, 1), fleet.ends), [[5]])
    assert fleet.error_of(2) is None
    fleet.host.wait_for(lambda: 1 not in fleet.host.owned)
    fleet.check_content(2, [5])
    restarted.close()


@pytest.mark.parametrize(
    ("layout", "fingerprint", "named"),
    [
        (replace(LAYOUT, dtype="bfloat16"), FINGERPRINT, "kv_layout.dtype (bfloat16, float32)"),
        (replace(LAYOUT, block_size=8), FINGERPRINT, "kv_layout.block_size (8, 4)"),
        (LAYOUT, "model-b", "model_fingerprint (model-b, model-a)"),
    ],
)
def test_an_incompatible_peer_is_refused_before_any_byte_moves(
    layout: KvLayout, fingerprint: str, named: str, fleet: Fleet
):
    """E08: the refusal names the field, reaches the request's end, and nothing was allocated."""
    store = MemoryStore(4, layout, shared=fleet.transport == "shm")
    store.before_read = lambda block_id: pytest.fail("a block was read")
    sender = NetworkKvSender(store, WorkerIdentity("prefill-9", 99), fingerprint, SETTINGS, shared_fd=store.shared_fd)
    send_groups(sender.open(plan_of(1, fleet.peer, 1), fleet.ends), [[0]])
    end = fleet.ends.wait(1)
    sender.close()
    assert end.error is not None
    assert end.error.reason is ErrorReason.INCOMPATIBLE_PEER
    assert named in end.error.message
    fleet.host.check_all_free()


def test_a_silent_sender_is_given_up_after_the_lease(transport: str):
    """The receiver's reaper frees blocks when no message can come any more."""
    fleet = Fleet(transport, settings=TransferSettings(lease_s=0.1))
    fleet.source.before_read = lambda block_id: released.wait(WAIT_S) and None
    released = threading.Event()
    fleet.open(1, 2).send([1])
    fleet.host.wait_for(lambda: bool(fleet.host.released))
    assert fleet.host.released[0][1].reason is ErrorReason.TRANSFER_FAILED
    released.set()
    assert fleet.error_of(1) is ErrorReason.STALE
    fleet.close()
    fleet.host.check_all_free()


def test_closing_the_receiver_ends_what_is_open_and_the_sender_notices(fleet: Fleet):
    transfer = fleet.open(1, 2)
    transfer.send([1])
    fleet.host.wait_for(lambda: 1 in fleet.host.owned)
    fleet.receiver.close()
    fleet.host.check_all_free()
    transfer.send([2])
    transfer.commit([1])
    assert fleet.error_of(1) is ErrorReason.TRANSFER_FAILED


def test_a_taken_port_is_an_os_error(fleet: Fleet):
    second = fleet.new_receiver(RECEIVER, fleet.host)
    with pytest.raises(OSError, match=str(fleet.port)):
        second.start("127.0.0.1", fleet.port)
    second.close()
