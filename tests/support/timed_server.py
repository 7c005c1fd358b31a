"""A server of OpenAI completions with no model and set timing. Token k of an answer is the text "é<k> ".

In the test's process: `async with TimedServer(…) as server`. As a process of its own: its module,
with a port and, optionally, seconds until the first token and between tokens.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, Self

MODEL = "timed"
WAIT_S = 20.0


@dataclass(frozen=True)
class Behaviour:
    """How one request is answered.

    Times in seconds, until the first chunk and between chunks. `end`: "done"; in mid-stream, after `num_before_end`
    tokens (all of them if None): an "error" event, the connection "cut", or "never" anything more; "empty": a whole
    answer without tokens; "open": a whole answer, after which the connection stays open. `usage`: with every chunk (if
    the client asks for it), with the last one, or nowhere.
    """

    first_token_s: float = 0.0
    chunk_s: float = 0.0
    tokens_per_chunk: tuple[int, ...] = (1,)
    status: int = 200
    end: Literal["done", "error", "cut", "never", "empty", "open"] = "done"
    num_before_end: int | None = None
    finish_reason: str = "length"
    usage: Literal["continuous", "final", "none"] = "continuous"
    num_cached: int = 0
    role_chunk: bool = False
    bytes_per_write: int = 1 << 20


class TimedServer:
    """`behave`: by the prompt. `one_at_a_time`: others wait, in the order in which they came. `hold_until`: no request
    is answered before so many have been in flight at once."""

    def __init__(
        self,
        behave: Callable[[list[int]], Behaviour] = lambda _: Behaviour(),
        *,
        one_at_a_time: bool = False,
        hold_until: int = 0,
        port: int = 0,
    ) -> None:
        self._behave = behave
        self._room = asyncio.Semaphore(1) if one_at_a_time else contextlib.nullcontext()
        self._hold_until = hold_until
        self._held = asyncio.Event()
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_in_flight = self.peak_in_flight = self.num_connections = 0
        self.num_hung_up = 0
        self.hung_up = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str] = []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port, backlog=1024)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, one after another."""
        self.num_connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("GET /v1/models "):
            _whole(writer, 200, {"data": [{"id": MODEL}]})
            return True
        if not first.startswith("POST /v1/completions "):
            _whole(writer, 404, {"error": "no such page"})
            return True
        self.bodies.append(json.loads(body))
        self.authorizations.append(headers.get("authorization", ""))
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        try:
            return await self._complete(self.bodies[-1], reader, writer)
        finally:
            self.num_in_flight -= 1

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self.peak_in_flight >= self._hold_until:
            self._held.set()
        await asyncio.wait_for(self._held.wait(), WAIT_S)
        behaviour = self._behave(body["prompt"])
        if behaviour.status != 200:
            _whole(writer, behaviour.status, {"error": {"message": "as set", "code": behaviour.status}})
            return True
        async with self._room:
            return await self._stream(_Stream(writer, behaviour.bytes_per_write), behaviour, body, reader)

    async def _stream(
        self, stream: "_Stream", behaviour: Behaviour, body: dict[str, Any], reader: asyncio.StreamReader
    ) -> bool:
        stream.begin()
        wait_s = behaviour.first_token_s
        for event in _token_events(behaviour, body):
            if wait_s:
                await asyncio.sleep(wait_s)
            wait_s = behaviour.chunk_s
            if reader.at_eof():
                self._hang_up()
                return False
            await stream.event(event)
        if behaviour.end == "never":
            await reader.read()
            self._hang_up()
        elif behaviour.end == "error":
            await stream.event({"error": {"message": "as set", "code": 500}})
            stream.end()
        elif behaviour.end != "cut":
            for event in _last_events(behaviour, body):
                await stream.event(event)
            await stream.write(b"data: [DONE]\n\n")
            if behaviour.end == "open":
                await reader.read()
                self._hang_up()
                return False
            stream.end()
            return True
        return False

    def _hang_up(self) -> None:
        self.num_hung_up += 1
        self.hung_up.set()


def _whole(writer: asyncio.StreamWriter, status: int, answer: object) -> None:
    text = json.dumps(answer).encode()
    writer.write(f"HTTP/1.1 {status} As Set\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)


def _token_events(behaviour: Behaviour, body: dict[str, Any]) -> Iterator[object]:
    with_usage = behaviour.usage == "continuous" and body.get("stream_options", {}).get("continuous_usage_stats")
    most = body["max_tokens"] if behaviour.num_before_end is None else behaviour.num_before_end
    num_tokens = 0
    if behaviour.role_chunk:
        yield {"choices": [{"text": ""}], "usage": _usage(behaviour, body, 0) if with_usage else None}
    for size in cycle(behaviour.tokens_per_chunk):
        if num_tokens >= most or behaviour.end == "empty":
            return
        last = min(num_tokens + size, most)
        text = "".join(f"é{number} " for number in range(num_tokens, last))
        num_tokens = last
        reason = behaviour.finish_reason if behaviour.end in ("done", "open") and num_tokens == most else None
        usage = _usage(behaviour, body, num_tokens) if with_usage else None
        yield {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": usage}


def _last_events(behaviour: Behaviour, body: dict[str, Any]) -> Iterator[object]:
    if behaviour.usage != "none":
        most = body["max_tokens"] if behaviour.num_before_end is None else behaviour.num_before_end
        yield {"choices": [], "usage": _usage(behaviour, body, 0 if behaviour.end == "empty" else most)}


def _usage(behaviour: Behaviour, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    cached = {"prompt_tokens_details": {"cached_tokens": behaviour.num_cached}}
    return {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens, **cached}


class _Stream:
    """A body in HTTP chunks of at most `bytes_per_write` bytes, which may cut an event, or a character, anywhere."""

    def __init__(self, writer: asyncio.StreamWriter, bytes_per_write: int) -> None:
        self._writer = writer
        self._bytes_per_write = bytes_per_write

    def begin(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._writer.write(head)

    async def event(self, event: object) -> None:
        await self.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())

    async def write(self, data: bytes) -> None:
        for begin in range(0, len(data), self._bytes_per_write):
            part = data[begin : begin + self._bytes_per_write]
            self._writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await self._writer.drain()

    def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")


async def _main(port: int, first_token_s: float = 0.0, chunk_s: float = 0.0) -> None:
    behaviour = Behaviour(first_token_s, chunk_s)
    async with TimedServer(lambda _: behaviour, port=port) as server:
        print(json.dumps({"base_url": server.base_url}), flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), *map(float, sys.argv[2:])))
