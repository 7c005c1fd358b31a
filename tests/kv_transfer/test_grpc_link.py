"""What one link does on a real socket: keepalive, frozen peers, limits, cancelled calls."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import uvloop

from kv_transfer import transfer_wire as wire
from kv_transfer.chunk_frame import ChunkHeader, encode
from kv_transfer.interfaces import Peer
from kv_transfer.messages import Ready, WorkerIdentity, broken, stale, stale_pair
from kv_transfer.outbound.answers import refusal_to_raise
from kv_transfer.outbound.link import ChunkBatch, PairBroken
from kv_transfer.outbound.source import Source
from kv_transfer.over_grpc.link import FrameFeed, GrpcLink
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import NetworkKvSender
from pdserve.client.channels import KEEPALIVE, MAX_MESSAGE_BYTES, Keepalive, aio_channel, aio_server, bind, sync_channel
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import TransferSettings
from pdserve.v1 import kv_transfer_pb2 as pb
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
    peer_at,
    plan_of,
    prepare_order,
)

ROOT = Path(__file__).parents[2]
FAST_KEEPALIVE = Keepalive(interval_ms=1000, timeout_ms=1000, server_min_interval_ms=500)
METADATA = ((wire.INCARNATION_KEY, str(SENDER.incarnation)), (wire.EPOCH_KEY, "1"))


class Served:
    def __init__(self, keepalive: Keepalive = KEEPALIVE, num_blocks: int = 16) -> None:
        self.store = MemoryStore(num_blocks)
        self.host = CheckingHost(num_blocks)
        settings = TransferSettings(lease_s=120.0)
        self.receiver = KvReceiver(RECEIVER, FINGERPRINT, self.store, self.host, settings, keepalive=keepalive)
        self.address = f"127.0.0.1:{self.receiver.start('127.0.0.1', 0)}"

    def link(self, epoch: int = 1, keepalive: Keepalive = KEEPALIVE) -> GrpcLink:
        return link_to(self.address, MemoryStore(16), epoch, keepalive)


@pytest.fixture
def served() -> Iterator[Served]:
    threads = set(threading.enumerate())
    served = Served()
    yield served
    served.receiver.close()
    join_threads_since(threads)
    served.host.check_all_free()


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], Peer]]:
    """A receiver that can be frozen."""
    command = [sys.executable, "-m", "tests.kv_transfer.receiver_process"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield process, peer_at(f"127.0.0.1:{port}")
        process.kill()


def link_to(address: str, store: MemoryStore, epoch: int = 1, keepalive: Keepalive = KEEPALIVE) -> GrpcLink:
    source = Source(SENDER, FINGERPRINT, store, 1024 * 1024)
    return GrpcLink(source, peer_at(address, store.layout), epoch, keepalive)


def send_chunks(channel: grpc.Channel) -> "grpc.StreamUnaryMultiCallable[bytes, pb.ChunksAck]":
    return channel.stream_unary(f"/{wire.SERVICE}/{wire.SEND_CHUNKS}", response_deserializer=pb.ChunksAck.FromString)


def frame_of(transfer_id: int, sequence: int, block: int) -> bytes:
    return encode(ChunkHeader(transfer_id, 1, sequence, block, 0, 1), (memoryview(bytes(LAYOUT.block_bytes)),))


@pytest.mark.parametrize("refusal", [broken("checksum"), stale_pair("old epoch")])
def test_what_says_that_the_pair_is_out_of_step_is_told_apart(refusal: PdserveError):
    assert isinstance(refusal_to_raise(refusal), PairBroken)
    over = stale("cancelled")
    assert refusal_to_raise(over) is over


def test_a_feed_reads_nothing_after_stop():
    store = MemoryStore(4)
    feed = FrameFeed(store, ChunkBatch(1, 0, 0, (0, 1)), 1, LAYOUT.block_bytes)
    next(feed)
    feed.stop()
    store.before_read = lambda block_id: pytest.fail("a block was read")
    assert list(feed) == []


def test_stop_waits_for_the_read_that_is_going_on():
    store = MemoryStore(4)
    inside, go_on, stopped = threading.Event(), threading.Event(), threading.Event()

    def slow(block_id: int) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)

    store.before_read = slow
    feed = FrameFeed(store, ChunkBatch(1, 0, 0, (0,)), 1, LAYOUT.block_bytes)
    reader = threading.Thread(target=next, args=(feed,))
    reader.start()
    assert inside.wait(WAIT_S)
    stopper = threading.Thread(target=lambda: (feed.stop(), stopped.set()))
    stopper.start()
    assert not stopped.wait(0.05)
    go_on.set()
    assert stopped.wait(WAIT_S)
    reader.join(WAIT_S)
    stopper.join(WAIT_S)


def test_a_stale_epoch_breaks_the_pair(served: Served):
    old, new = served.link(1), served.link(2)
    old.handshake(WAIT_S)
    new.handshake(WAIT_S)
    with pytest.raises(PairBroken, match="not current"):
        old.prepare(prepare_order(1, 1), WAIT_S)
    assert isinstance(new.prepare(prepare_order(2, 1), WAIT_S), Ready)
    new.abort(2, "done", WAIT_S)
    for link in (old, new):
        link.close()
    with pytest.raises(PairBroken, match="closed"):
        new.commit(commit_order(2, 1, 1), WAIT_S)


def test_a_message_over_the_limit_is_refused_and_the_connection_stays(served: Served):
    """K02: RESOURCE_EXHAUSTED from either side, then business as usual on the same channel."""
    link = served.link()
    link.handshake(WAIT_S)
    link.prepare(prepare_order(1, 1), WAIT_S)
    with sync_channel(served.address) as channel:
        call = send_chunks(channel)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter([bytes(MAX_MESSAGE_BYTES + 1)]), metadata=METADATA, timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        ack = call(iter([frame_of(1, 0, 0)]), metadata=METADATA, timeout=WAIT_S)
        assert (ack.next_sequence, ack.num_blocks_received) == (1, 1)
    link.abort(1, "done", WAIT_S)
    link.close()


@pytest.mark.parametrize("frames", [[], [b"noise"], [frame_of(1, 0, 0)[:-1]], [frame_of(9, 0, 0)]])
def test_bad_chunks_get_a_typed_answer(frames: list[bytes], served: Served):
    link = served.link()
    link.handshake(WAIT_S)
    with sync_channel(served.address) as channel:
        ack = send_chunks(channel)(iter(frames), metadata=METADATA, timeout=WAIT_S)
        assert ack.error.reason in (ErrorReason.TRANSFER_FAILED.name, ErrorReason.STALE.name)
        ack = send_chunks(channel)(iter(frames), timeout=WAIT_S)
        assert ack.error.reason == ErrorReason.INVALID_ARGUMENT.name
    link.close()


def test_cancelled_calls_leave_no_threads_and_no_blocks(served: Served):
    """K03: 100 calls are cancelled in the middle of their stream; the server serves on."""
    link = served.link()
    link.handshake(WAIT_S)
    with sync_channel(served.address) as channel:
        for number in range(1, 101):
            link.prepare(prepare_order(number, 1, number), WAIT_S)
            cancel_inside(served, channel, frame_of(number, 0, 0))
            link.abort(number, "its call was cancelled", WAIT_S)
    link.close()
    served.host.wait_for(lambda: len(served.host.released) == 100)
    run_a_transfer(served, sequence=500)
    served.host.finish(500)


def cancel_inside(served: Served, channel: grpc.Channel, frame: bytes) -> None:
    arrived, over = threading.Event(), threading.Event()
    served.store.before_write = lambda block_id: arrived.set()

    def frames() -> Iterator[bytes]:
        yield frame
        over.wait(WAIT_S)

    call = send_chunks(channel).future(frames(), metadata=METADATA, timeout=WAIT_S)
    assert arrived.wait(WAIT_S)
    call.cancel()
    over.set()


@pytest.mark.parametrize("silence_s", [4.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_silent_stream_and_an_idle_channel_survive(silence_s: float):
    """K01: pings every second are not called abuse; a GOAWAY would take the channel out of READY."""
    served = Served(FAST_KEEPALIVE)
    link = served.link(keepalive=FAST_KEEPALIVE)
    link.handshake(WAIT_S)
    link.prepare(prepare_order(1, 1), WAIT_S)
    silence_over = threading.Event()
    states: list[grpc.ChannelConnectivity] = []

    def frames() -> Iterator[bytes]:
        silence_over.wait(silence_s)
        yield frame_of(1, 0, 0)

    with (
        sync_channel(served.address, None, FAST_KEEPALIVE) as idle,
        sync_channel(served.address, None, FAST_KEEPALIVE) as busy,
    ):
        for channel in (idle, busy):
            grpc.channel_ready_future(channel).result(WAIT_S)
            channel.subscribe(states.append)
        ack = send_chunks(busy)(frames(), metadata=METADATA, timeout=silence_s + WAIT_S)
        assert ack.num_blocks_received == 1
        assert set(states) == {grpc.ChannelConnectivity.READY}
    link.abort(1, "done", WAIT_S)
    link.close()
    served.receiver.close()


def freeze(process: subprocess.Popen[str]) -> None:
    """Returns once every thread of it has stopped: until then it may answer."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_frozen_peer_is_noticed_by_keepalive(other_process: tuple[subprocess.Popen[str], Peer]):
    """K01: long before the call's own deadline; UNAVAILABLE says who noticed."""
    process, peer = other_process
    link = link_to(peer.kv_address, MemoryStore(1, peer.kv_layout), keepalive=FAST_KEEPALIVE)
    link.handshake(WAIT_S)
    freeze(process)
    with pytest.raises(PairBroken, match="UNAVAILABLE"):
        link.prepare(prepare_order(1, 1), timeout_s=60.0)
    link.close()


def test_a_frozen_peer_costs_its_own_pair_only(other_process: tuple[subprocess.Popen[str], Peer]):
    process, frozen = other_process
    settings, healthy = TransferSettings(base_deadline_s=1.0), WorkerIdentity("decode-1", 33)
    store, host = MemoryStore(16), CheckingHost(16)
    receiver = KvReceiver(healthy, FINGERPRINT, MemoryStore(16), host, settings)
    port = receiver.start("127.0.0.1", 0)
    sender, ends = NetworkKvSender(store, SENDER, FINGERPRINT, settings), EndLog()
    freeze(process)
    for sequence in (1, 2):
        sender.open(plan_of(sequence, frozen, 1), ends).send([0])
    transfer = sender.open(plan_of(3, peer_at(f"127.0.0.1:{port}", receiver=healthy), 1), ends)
    transfer.send([1])
    transfer.commit([5])
    assert ends.wait(3).error is None
    assert not ends.has(1)
    for sequence in (1, 2):
        error = ends.wait(sequence).error
        assert error is not None
        assert error.reason is ErrorReason.TRANSFER_FAILED
    sender.close()
    receiver.close()


def test_a_receiver_and_a_uvloop_server_share_a_process(served: Served):
    async def echo(request: bytes, context: object) -> bytes:
        return request

    async def main() -> int:
        server = aio_server()
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),))
        port = bind(server.add_insecure_port, "127.0.0.1", 0)
        await server.start()
        transfer = asyncio.create_task(asyncio.to_thread(run_a_transfer, served))
        num_echoes = 0
        async with aio_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test.Echo/Echo")
            while not transfer.done() or num_echoes < 20:
                assert await call(b"token") == b"token"
                num_echoes += 1
        await transfer
        await server.stop(None)
        return num_echoes

    assert uvloop.run(main()) >= 20
    assert len(served.host.committed) == 1
    served.host.finish(1)


def run_a_transfer(served: Served, sequence: int = 1) -> None:
    identity = WorkerIdentity("prefill-7", 77)
    sender, ends = NetworkKvSender(MemoryStore(16), identity, FINGERPRINT, TransferSettings()), EndLog()
    transfer = sender.open(plan_of(sequence, peer_at(served.address), 8), ends)
    for block in range(8):
        transfer.send([block])
    transfer.commit([1])
    assert ends.wait(sequence).error is None
    sender.close()
