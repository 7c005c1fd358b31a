import asyncio
import socket

import pytest

from coordinator.http_api import serve_http
from tests.coordinator.http_api.conftest import Serve, app_of
from tests.coordinator.text_fakes import build_generator, echo_scheduler, scheduler_of, text_model

COMPLETIONS = "/v1/completions"


async def test_events_leave_one_by_one(serve_on_socket: Serve) -> None:
    scheduler = scheduler_of(b"a", hang=True)
    async with (
        serve_on_socket(build_generator(scheduler)) as client,
        client.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert '"text":"a"' in await anext(lines)
        assert scheduler.num_cancels == 0


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("steps", [(), (b"ab",)])
async def test_a_client_that_hangs_up_cancels_its_sequences(
    serve_on_socket: Serve, streamed: bool, steps: tuple[bytes, ...]
) -> None:
    scheduler = scheduler_of(*steps, hang=True)
    async with serve_on_socket(build_generator(scheduler)) as client:
        body = {"prompt": "a", "n": 3, "stream": streamed}
        request = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await asyncio.wait_for(scheduler.submitted.wait(), 10)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        for sequence in scheduler.streams:
            await asyncio.wait_for(sequence._cancelled.wait(), 10)
    assert [sequence.num_cancels for sequence in scheduler.streams] == [1, 1, 1]


async def test_a_slow_reader_leaves_the_sequence_unread(serve_on_socket: Serve) -> None:
    scheduler = scheduler_of(*[b"x"] * 200_000, hang=True)
    model = text_model(context_length=300_000)
    async with (
        serve_on_socket(build_generator(scheduler, model)) as client,
        client.stream("POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 200_001, "stream": True}) as response,
    ):
        assert response.status_code == 200
        (sequence,) = scheduler.streams
        previous = -1
        while sequence.num_emitted != previous:
            previous = sequence.num_emitted
            await client.get("/livez")
        assert sequence.num_emitted < 200_000


async def test_stopping_tells_running_streams_why_they_end() -> None:
    generator = build_generator(scheduler := scheduler_of(b"a", hang=True))
    server = await serve_http(app_of(generator), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"prompt": "a", "stream": true}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.wait_for(reader.readuntil(b'"text":"a"'), 10)
    stopping = asyncio.create_task(server.stop(grace_s=1))
    rest = await asyncio.wait_for(reader.read(), 10)
    await stopping
    writer.close()
    assert b'"code":"draining"' in rest
    assert b"[DONE]" not in rest
    assert scheduler.num_cancels == 1


async def test_a_port_in_use_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="cannot listen"):
        await serve_http(app_of(build_generator(echo_scheduler(b"x"))), "127.0.0.1", taken.getsockname()[1])
