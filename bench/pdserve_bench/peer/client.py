"""A light client of streaming completions: it shares the cores with the server, so it parses no token's JSON.

Speaks HTTP/1.1 itself, one connection a request. Knows no server by name and nothing of what is compared.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

REQUEST_TIMEOUT_S = 600.0
PAGE_TIMEOUT_S = 30.0


class ServerError(Exception):
    """A server does not answer, or not as asked."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`base_url` without /v1, as in http://127.0.0.1:8000; `model` as the server calls it."""

    base_url: str
    model: str


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: clock readings at its start and at each event that carried tokens, and the tokens the server says
    it made. A server may put several tokens into one event."""

    begin_s: float
    event_s: tuple[float, ...]
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.begin_s

    @property
    def gaps_s(self) -> list[float]:
        """Between events, in order."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]


async def complete(
    endpoint: Endpoint, token_ids: Sequence[int], max_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S
) -> Timing:
    """Greedy completion of exactly `max_tokens` tokens, streamed.

    Raises:
        ServerError: nobody answers, or with an error, or the answer is not of the size asked for.
    """
    body = {
        "model": endpoint.model,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin_s, event_s, last = time.perf_counter(), list[float](), b""
    async with _time_limit(timeout_s):
        async for data in _events(endpoint.base_url + "/v1/completions", json.dumps(body).encode()):
            if data != b"[DONE]":
                event_s.append(time.perf_counter())
                last = data
    usage = _usage(last)
    if usage != (len(token_ids), max_tokens):
        raise ServerError(f"asked for {len(token_ids)} + {max_tokens} tokens, got {usage}: {last[:500]!r}")
    return Timing(begin_s, tuple(event_s[:-1]), max_tokens)


async def get_json(url: str) -> Any:
    """The body of a GET.

    Raises:
        ServerError: nobody answers, or not with JSON.
    """
    async with _time_limit(PAGE_TIMEOUT_S):
        body = b"".join([part async for part in _body(url, b"")])
    try:
        return json.loads(body)
    except ValueError:
        raise ServerError(f"{url} is no JSON") from None


@asynccontextmanager
async def _time_limit(timeout_s: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise ServerError(f"no whole answer within {timeout_s:g} s") from None


def _usage(event: bytes) -> tuple[int, int] | None:
    """Prompt and completion tokens of the last event; None if it does not carry them."""
    try:
        usage = json.loads(event)["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return None


async def _events(url: str, body: bytes) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for part in _body(url, body):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _body(url: str, body: bytes) -> AsyncIterator[bytes]:
    """The answer's body as it arrives: a POST if there is something to send."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except OSError as error:
        raise ServerError(f"{url}: {error}") from None
    try:
        writer.write(_request(parts.netloc, parts.path, body))
        status, headers = await _head(reader)
        answer = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader, headers)
        if status != 200:
            raise ServerError(f"{url}: {status} {b''.join([part async for part in answer])[:500]!r}")
        async for part in answer:
            yield part
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ServerError(f"{url}: the connection broke: {error}") from None
    finally:
        writer.close()


def _request(host: str, path: str, body: bytes) -> bytes:
    method = "POST" if body else "GET"
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = text.strip().split("\r\n")
    headers = [line.partition(":") for line in lines]
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in headers}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    length = headers.get("content-length")
    yield await reader.readexactly(int(length)) if length else await reader.read()
