"""A `TimedServer` in a thread of its own, for tests whose own thread is not free to serve."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.timed_server import WAIT_S, Behaviour, TimedServer


@contextmanager
def threaded(behave: Callable[[list[int]], Behaviour]) -> Iterator[TimedServer]:
    """Serving until the end of the block."""
    started, stop = threading.Event(), asyncio.Event()
    server = TimedServer(behave)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server:
            started.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(WAIT_S)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()
