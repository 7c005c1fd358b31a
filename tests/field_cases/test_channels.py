"""K01 and K02 for asyncio channels and servers, which all control traffic and all clients use."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.client.channels import (
    KEEPALIVE,
    MAX_MESSAGE_BYTES,
    Keepalive,
    aio_channel,
    aio_server,
    bind,
    channel_options,
    server_options,
)

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
FAST = Keepalive(interval_ms=1000, timeout_ms=1000, server_min_interval_ms=500)
ECHO, HUSH = "/test.Echo/Echo", "/test.Echo/Hush"


async def echo(request: bytes, context: object) -> bytes:
    return request


class Hush:
    """A stream that says one thing, nothing until told, and another thing."""

    def __init__(self) -> None:
        self.silence_over = asyncio.Event()

    async def say(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        await self.silence_over.wait()
        yield b"last"


@asynccontextmanager
async def served(server: grpc.aio.Server, hush: Hush | None = None) -> AsyncIterator[str]:
    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    if hush is not None:
        handlers["Hush"] = grpc.unary_stream_rpc_method_handler(hush.say)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = bind(server.add_insecure_port, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def first_change(channel: grpc.aio.Channel) -> grpc.ChannelConnectivity:
    """The state that the channel leaves READY for."""
    await channel.channel_ready()
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    return channel.get_state()


async def survives(server: grpc.aio.Server, silence_s: float) -> bool:
    """Whether an idle channel, and one with a stream that says nothing, stay up for so long."""
    hush = Hush()
    async with (
        served(server, hush) as address,
        aio_channel(address, keepalive=FAST) as idle,
        aio_channel(address, keepalive=FAST) as busy,
    ):
        call = busy.unary_stream(HUSH)(b"")
        assert await call.read() == b"first"
        changes = [asyncio.create_task(first_change(channel)) for channel in (idle, busy)]
        changed, _ = await asyncio.wait(changes, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
        for task in changes:
            task.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        if not changed:
            hush.silence_over.set()
            assert await call.read() == b"last"
        return not changed


def test_one_keepalive_table_for_all() -> None:
    """K01: the server tolerates what any client of ours sends, with calls and without."""
    assert KEEPALIVE.server_min_interval_ms <= KEEPALIVE.interval_ms
    client, server = dict(channel_options()), dict(server_options())
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.keepalive_permit_without_calls"):
        assert client[name] == server[name]
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"]


@pytest.mark.parametrize("silence_s", [5.0, pytest.param(60.0, marks=pytest.mark.slow)])
async def test_silent_streams_and_idle_channels_survive(silence_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    """K01: pings every second are not called abuse."""
    assert await survives(aio_server(keepalive=FAST), silence_s)
    assert "too_many_pings" not in capfd.readouterr().err


async def test_a_server_of_default_settings_would_have_hung_up() -> None:
    """The negative control of the test above: the very same pings are too many for it."""
    assert not await survives(grpc.aio.server(options=[("grpc.so_reuseport", 0)]), 20.0)


async def test_a_dead_peer_is_noticed_long_before_the_calls_deadline() -> None:
    """K01: a process that is stopped answers no pings."""
    command = (sys.executable, "-m", "tests.kv_transfer.receiver_process")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        async with aio_channel(f"127.0.0.1:{port}", keepalive=FAST) as channel:
            await channel.channel_ready()
            process.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)  # until then it may answer
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await channel.unary_unary(ECHO)(b"", timeout=60)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("num_bytes", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, MAX_MESSAGE_BYTES])
async def test_large_messages_pass_in_both_directions(num_bytes: int) -> None:
    """K02: gRPC's own limit of 4 MiB is raised at both ends."""
    payload = bytes(range(256)) * (num_bytes // 256 + 1)
    async with served(aio_server()) as address, aio_channel(address) as channel:
        assert await channel.unary_unary(ECHO)(payload[:num_bytes], timeout=30) == payload[:num_bytes]


async def test_over_the_limit_is_a_clear_error_and_the_connection_stays() -> None:
    """K02: refused by the sender's own limit, and by the receiver's if the sender has none."""
    too_large = bytes(MAX_MESSAGE_BYTES + 1)
    unlimited = [*channel_options(max_message_bytes=-1)]
    async with served(aio_server()) as address:
        for channel in (aio_channel(address), grpc.aio.insecure_channel(address, options=unlimited)):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(ECHO)(too_large, timeout=30)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(MAX_MESSAGE_BYTES) in str(refused.value.details())
                assert await channel.unary_unary(ECHO)(b"still here", timeout=30) == b"still here"
