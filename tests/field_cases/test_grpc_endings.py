"""K03: however a Generate call ends, its handler ends, its sequence is cancelled once, and the client gets a status."""

import asyncio
import gc
import sys
import tracemalloc
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from coordinator.auth import authenticator_for
from coordinator.generation.generator import Generator
from coordinator.grpc_api import InferenceService
from pdserve.client.channels import aio_channel, aio_server, bind
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from tests.coordinator.test_grpc_api import waits_for_calls
from tests.coordinator.text_fakes import ScriptedScheduler, build_generator, scheduler_of

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0
REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[97, 98]))


@asynccontextmanager
async def served(generator: Generator) -> AsyncIterator[str]:
    server = aio_server()
    add_InferenceServicer_to_server(InferenceService(generator, authenticator_for({})), server)
    port = bind(server.add_insecure_port, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def hanging() -> ScriptedScheduler:
    """Three tokens of many, then nothing until cancelled."""
    return scheduler_of(b"a", b"b", b"c", hang=True)


async def until_over(scheduler: ScriptedScheduler, tasks_before: "set[asyncio.Task[object]]") -> None:
    """Every sequence was cancelled, and no handler task is left."""
    for stream in scheduler.streams:
        await asyncio.wait_for(stream._cancelled.wait(), WAIT_S)
    left = {task for task in asyncio.all_tasks() - tasks_before if not waits_for_calls(task)}
    if left:
        _, alive = await asyncio.wait(left, timeout=WAIT_S)
        assert not alive
    assert {stream.num_cancels for stream in scheduler.streams} == {1}


async def read(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]", count: int) -> None:
    for _ in range(count):
        assert isinstance(await call.read(), pb.GenerateResponse)


@pytest.mark.parametrize("ending", ["cancel", "deadline", "channel close"])
async def test_a_call_that_ends_at_its_third_token_ends_its_handler(ending: str) -> None:
    async with served(build_generator(scheduler := hanging())) as address:
        before = asyncio.all_tasks()
        channel = aio_channel(address)
        call = InferenceStub(channel).Generate(REQUEST, timeout=2.0 if ending == "deadline" else WAIT_S)
        await read(call, 4)
        if ending == "cancel":
            call.cancel()
        elif ending == "channel close":
            await channel.close()
        expected = grpc.StatusCode.DEADLINE_EXCEEDED if ending == "deadline" else grpc.StatusCode.CANCELLED
        assert await asyncio.wait_for(call.code(), WAIT_S) is expected
        await channel.close()
        await until_over(scheduler, before)


async def test_a_client_that_is_killed_ends_its_handler() -> None:
    """kill -9: no goodbye, the kernel closes the socket."""
    async with served(build_generator(scheduler := hanging())) as address:
        before = asyncio.all_tasks()
        command = (sys.executable, "-m", "tests.support.impatient_client", address)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE)
        assert process.stdout is not None
        try:
            lines = [await process.stdout.readline() for _ in range(4)]
        finally:
            process.kill()
            await process.wait()
        assert lines == [b"Started\n", b"Delta\n", b"Delta\n", b"Delta\n"]
        await until_over(scheduler, before)


async def test_half_close_is_not_a_cancel() -> None:
    """The client has finished sending long before it has its last token; here it says so in an extra step."""
    async with (
        served(build_generator(scheduler := scheduler_of(*[b"x"] * 40))) as address,
        aio_channel(address) as channel,
    ):
        method = channel.stream_stream(
            "/pdserve.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        call = method(timeout=WAIT_S)
        await call.write(REQUEST)
        await call.done_writing()
        events = [event async for event in call]
        assert events[-1].finished.usage.completion_tokens == 40
        assert await call.code() is grpc.StatusCode.OK
    assert scheduler.num_cancels == 0


async def cancel_calls(address: str, scheduler: ScriptedScheduler, count: int) -> None:
    async with aio_channel(address) as channel:
        for _ in range(count):
            call = InferenceStub(channel).Generate(REQUEST, timeout=WAIT_S)
            await read(call, 4)
            call.cancel()
        for stream in scheduler.streams:
            await asyncio.wait_for(stream._cancelled.wait(), WAIT_S)


async def test_500_cancels_leave_no_task_and_no_memory() -> None:
    scheduler = hanging()
    generator = build_generator(scheduler)
    async with served(generator) as address:
        before = asyncio.all_tasks()
        await cancel_calls(address, scheduler, 100)
        sizes: list[int] = []
        tracemalloc.start()
        try:
            for _ in range(5):
                scheduler.streams.clear()
                generator._observer.records.clear()  # type: ignore[attr-defined]
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
                await cancel_calls(address, scheduler, 100)
        finally:
            tracemalloc.stop()
        await until_over(scheduler, before)
    assert sizes[-1] - sizes[1] < 300 * 200, "each cancelled call keeps less than 200 bytes"
