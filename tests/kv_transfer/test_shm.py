"""What only the shared-memory transport can do wrong: files, sockets, and bytes that change while they are read."""

import fcntl
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest

from kv_transfer.messages import Ready
from kv_transfer.outbound.link import ChunkBatch, PairBroken
from kv_transfer.outbound.source import Source
from kv_transfer.over_shm.link import ShmLink
from kv_transfer.over_shm.messages import MAX_BLOCKS_A_CHUNK, Kind, address_of, new_socket
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import NetworkKvSender
from pdserve.core.errors import ErrorReason, PdserveError
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
    commit_order,
    join_threads_since,
    layout_of,
    peer_at,
    plan_of,
    prepare_order,
)

PEER = peer_at("127.0.0.1:1", transport="shm")
NUM_BLOCKS = 16


class Served:
    def __init__(self, *, with_shm: bool = True) -> None:
        self.source = MemoryStore(NUM_BLOCKS, shared=True)
        self.source.fill(range(NUM_BLOCKS))
        self.store, self.host = MemoryStore(NUM_BLOCKS), CheckingHost(NUM_BLOCKS)
        settings = TransferSettings(lease_s=120.0)
        self.receiver = KvReceiver(RECEIVER, FINGERPRINT, self.store, self.host, settings, with_shm=with_shm)
        self.port = self.receiver.start("127.0.0.1", 0)

    def link(self, epoch: int = 1, fd: int | None = None) -> ShmLink:
        shared_fd = self.source.shared_fd if fd is None else fd
        assert shared_fd is not None
        return ShmLink(Source(SENDER, FINGERPRINT, self.source, 1 << 20), shared_fd, PEER, epoch)

    def sender(self) -> NetworkKvSender:
        return NetworkKvSender(self.source, SENDER, FINGERPRINT, TransferSettings(), shared_fd=self.source.shared_fd)

    def holds(self, sequence: int, source_ids: list[int]) -> bool:
        received = self.host.committed[sequence].block_ids
        return [self.store.pages[block_id] for block_id in received] == [
            bytes(self.source.pages[block_id]) for block_id in source_ids
        ]


@pytest.fixture
def served() -> Iterator[Served]:
    threads = set(threading.enumerate())
    served = Served()
    yield served
    served.receiver.close()
    join_threads_since(threads)
    served.host.check_all_free()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def send_one(served: Served, blocks: list[int]) -> PdserveError | None:
    sender, ends = served.sender(), EndLog()
    peer = peer_at(f"127.0.0.1:{served.port}", transport="shm")
    transfer = sender.open(plan_of(1, peer, len(blocks)), ends)
    transfer.send(blocks)
    transfer.commit([7])
    end = ends.wait(1)
    sender.close()
    return end.error


def test_bytes_that_change_under_the_reader_are_never_committed(served: Served):
    """The copy is what is checked. The transfer is then made anew, over gRPC."""
    tampered: list[int] = []

    def tamper(_: int) -> None:
        if not tampered:
            tampered.append(1)
            served.source.fill([5], seed=9)

    served.store.before_write = tamper
    assert send_one(served, [3, 5, 7]) is None
    assert served.receiver.stats.num_failed == 1
    assert served.holds(1, [3, 5, 7])
    served.host.finish(1)


def test_a_receiver_without_the_door_is_reached_over_grpc():
    served = Served(with_shm=False)
    assert send_one(served, [1, 2]) is None
    assert served.holds(1, [1, 2])
    served.receiver.close()


def test_a_sender_that_is_gone_is_noticed_at_once(served: Served):
    """By its socket, which a killed process closes, too: long before the lease of two minutes."""
    link = served.link()
    link.handshake(WAIT_S)
    assert isinstance(link.prepare(prepare_order(1, 2), WAIT_S), Ready)
    link.close()
    served.host.wait_for(lambda: bool(served.host.released))
    assert served.host.released[0][1].reason is ErrorReason.TRANSFER_FAILED


def test_nothing_is_left_of_a_hundred_connections(served: Served):
    def connect(epoch: int) -> None:
        link = served.link(epoch)
        link.handshake(WAIT_S)
        link.close()

    connect(1)
    before = num_open_files()
    for epoch in range(2, 102):
        connect(epoch)
    served.receiver.close()
    assert num_open_files() <= before


def test_a_batch_of_many_chunks_comes_in_order(served: Served):
    link = ShmLink(
        Source(SENDER, FINGERPRINT, served.source, LAYOUT.block_bytes), served.source.shared_fd or 0, PEER, 1
    )
    link.handshake(WAIT_S)
    link.prepare(prepare_order(1, NUM_BLOCKS), WAIT_S)
    blocks = tuple(reversed(range(NUM_BLOCKS)))
    assert link.send(ChunkBatch(1, 0, 0, blocks), WAIT_S) == NUM_BLOCKS
    assert link.send(ChunkBatch(1, NUM_BLOCKS, NUM_BLOCKS, ()), WAIT_S) == NUM_BLOCKS + 1  # renews the lease
    link.commit(commit_order(1, NUM_BLOCKS, NUM_BLOCKS + 1), WAIT_S)
    assert served.holds(1, list(blocks))
    link.close()
    served.host.finish(1)


def test_no_chunk_names_more_blocks_than_a_message_holds():
    layout = layout_of(16)
    store = MemoryStore(2 * MAX_BLOCKS_A_CHUNK, layout, shared=True)
    target, host = MemoryStore(2 * MAX_BLOCKS_A_CHUNK, layout), CheckingHost(2 * MAX_BLOCKS_A_CHUNK)
    receiver = KvReceiver(RECEIVER, FINGERPRINT, target, host, TransferSettings(), with_shm=True)
    receiver.start("127.0.0.1", 0)
    link = ShmLink(Source(SENDER, FINGERPRINT, store, 1 << 30), store.shared_fd or 0, PEER, 1)
    link.handshake(WAIT_S)
    link.prepare(prepare_order(1, 2 * MAX_BLOCKS_A_CHUNK), WAIT_S)
    assert link.send(ChunkBatch(1, 0, 0, tuple(range(2 * MAX_BLOCKS_A_CHUNK))), WAIT_S) == 2
    link.close()
    receiver.close()


def test_blocks_that_the_sender_does_not_have_end_the_transfer(served: Served):
    link = served.link()
    link.handshake(WAIT_S)
    link.prepare(prepare_order(1, 1), WAIT_S)
    served.source.pages = [*served.source.pages, bytearray(LAYOUT.block_bytes)]
    with pytest.raises(PairBroken, match="none of the sender's 16"):
        link.send(ChunkBatch(1, 0, 0, (NUM_BLOCKS,)), WAIT_S)
    link.close()
    served.host.wait_for(lambda: bool(served.host.released))


def sealed_file(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("size", "seals", "named"),
    [
        (LAYOUT.block_bytes, 0, "could be cut off"),
        (LAYOUT.block_bytes + 1, fcntl.F_SEAL_SHRINK, "does not hold blocks"),
        (0, fcntl.F_SEAL_SHRINK, "does not hold blocks"),
    ],
)
def test_a_pool_that_cannot_be_trusted_breaks_the_pair(size: int, seals: int, named: str, served: Served):
    fd = sealed_file(size, seals)
    link = served.link(fd=fd)
    with pytest.raises(PairBroken, match=named):
        link.handshake(WAIT_S)
    link.close()
    os.close(fd)


def test_a_plain_file_breaks_the_pair(served: Served):
    with tempfile.TemporaryFile() as file:
        file.write(bytes(LAYOUT.block_bytes))
        file.flush()
        link = served.link(fd=file.fileno())
        with pytest.raises(PairBroken, match="cannot be mapped"):
            link.handshake(WAIT_S)
        link.close()


@pytest.mark.parametrize(
    "message",
    [b"\x63", Kind.HANDSHAKE.message(b"\xff\xff"), Kind.PREPARE.message(b""), Kind.CHUNK.message(b"short"), bytes(9)],
)
def test_noise_ends_its_connection_and_no_other(message: bytes, served: Served):
    link = served.link()
    link.handshake(WAIT_S)
    with new_socket() as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(address_of(RECEIVER.incarnation))
        stranger.send(message)
        assert stranger.recv(100) == b""
    assert isinstance(link.prepare(prepare_order(1, 1), WAIT_S), Ready)
    link.abort(1, "done", WAIT_S)
    link.close()


def test_noise_within_a_pair_is_a_typed_error(served: Served):
    link = served.link()
    link.handshake(WAIT_S)
    link.prepare(prepare_order(1, 1), WAIT_S)
    socket.socket.send(link._socket, Kind.CHUNK.message(b"short"))
    with pytest.raises(PairBroken, match="shorter than its header"):
        link.send(ChunkBatch(1, 0, 0, (1,)), WAIT_S)
    link.close()
    served.host.wait_for(lambda: bool(served.host.released))


def test_a_receiver_that_does_not_answer_breaks_the_pair_in_time():
    with new_socket() as silent:
        silent.bind(address_of(RECEIVER.incarnation))
        silent.listen(1)
        store = MemoryStore(1, shared=True)
        link = ShmLink(Source(SENDER, FINGERPRINT, store, 1 << 20), store.shared_fd or 0, PEER, 1)
        with pytest.raises(PairBroken, match="timed out"):
            link.handshake(0.05)
        link.close()


def test_closing_a_link_wakes_the_call_that_waits():
    with new_socket() as silent:
        silent.bind(address_of(RECEIVER.incarnation))
        silent.listen(1)
        store = MemoryStore(1, shared=True)
        link = ShmLink(Source(SENDER, FINGERPRINT, store, 1 << 20), store.shared_fd or 0, PEER, 1)
        failed = threading.Event()

        def shake_hands() -> None:
            with pytest.raises(PairBroken):
                link.handshake(600.0)
            failed.set()

        caller = threading.Thread(target=shake_hands)
        caller.start()
        connection, _ = silent.accept()
        assert connection.recv(1 << 16)  # the handshake: now it waits
        link.close()
        assert failed.wait(WAIT_S)
        caller.join(WAIT_S)
        connection.close()


def test_a_peer_can_neither_write_to_a_pool_nor_cut_it_off():
    store = MemoryStore(1, shared=True)
    assert store.shared_fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(store.shared_fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(store.shared_fd, 0)
    store.pages[0][:] = bytes(range(LAYOUT.block_bytes))  # its owner still can
    with mmap.mmap(store.shared_fd, 0, prot=mmap.PROT_READ) as view:
        assert view[: LAYOUT.block_bytes] == bytes(range(LAYOUT.block_bytes))
