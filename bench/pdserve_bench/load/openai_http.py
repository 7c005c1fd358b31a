"""Streaming completions over the OpenAI API, of any server that speaks it. Measures nothing itself."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.openai_answer import AnswerReader, shown
from pdserve_bench.load.plan import PlannedRequest

_NO_ROOM = (429, 503)
_LINGER_S = 1.0
"""How long after [DONE] to wait for the answer's end, after which the connection can be used again."""
_KEEPALIVE_S = 2.0
"""Shorter than any server's, so that no request is sent on a connection that its server is about to close."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`connect_s`: until a connection stands. `silence_s`: the longest wait for the next byte of an answer."""

    connect_s: float = 30.0
    silence_s: float = 600.0


class OpenAiClient:
    """As `LoadClient`, with as many connections as there are requests in flight.

    Args:
        base_url: without /v1, as in http://127.0.0.1:8000.
        model: as the server calls it.
        api_keys: by tenant; that of "" serves tenants without their own.
        continuous_usage: ask for the number of tokens in each event (vLLM's `continuous_usage_stats`). From a server
            that does not say it, every event with text counts as one token, and counts are not exact.

    Raises:
        ValueError: the URL or the endpoint cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        endpoint: str = "/v1/completions",
        api_keys: Mapping[str, str] | None = None,
        continuous_usage: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        if endpoint.rstrip("/").endswith("/chat/completions"):
            raise ValueError(f"{endpoint} takes messages, no token ids: measure the server's /v1/completions")
        self._url = _checked(base_url) + "/" + endpoint.lstrip("/")
        self._model = model
        self._keys = dict(api_keys or {})
        self._stream_options = {"include_usage": True, **({"continuous_usage_stats": True} if continuous_usage else {})}
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
        """See `LoadClient`."""
        if self._session is None:
            self._session = _session(self._timeouts)
        reader = AnswerReader(note)
        with_key = _authorization(self._keys.get(request.tenant) or self._keys.get("", ""))
        async with (
            _as_request_errors(self._url),
            self._session.post(self._url, data=self._body(request), headers=with_key) as response,
        ):
            if response.status != 200:
                raise await _refusal(response)
            async for part in response.content.iter_any():
                reader.feed(part)
                if reader.whole:
                    await _read_out(response.content)
                    break
        return reader.answer()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _body(self, request: PlannedRequest) -> bytes:
        body = {
            "model": self._model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": self._stream_options,
        }
        return json.dumps(body, separators=(",", ":")).encode()


async def served_model(base_url: str, api_key: str = "", timeout_s: float = 30.0) -> str:
    """The name of the first model that a server serves.

    Raises:
        RequestError: nobody answers there, or not as the OpenAI API does.
        ValueError: the URL cannot be used.
    """
    url = _checked(base_url) + "/v1/models"
    async with (
        _as_request_errors(url),
        _session(Timeouts(timeout_s, timeout_s)) as session,
        session.get(url, headers=_authorization(api_key)) as response,
    ):
        if response.status != 200:
            raise await _refusal(response)
        body = await response.read()
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RequestError(f"{url} lists no model: {shown(body)}") from None


def _checked(base_url: str) -> str:
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"{base_url!r} is no server's URL: it begins with http:// or https://")
    return base_url.rstrip("/")


def _session(timeouts: Timeouts) -> aiohttp.ClientSession:
    """Without a limit on connections: requests that wait in the client would look like a slow server."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s, sock_read=timeouts.silence_s),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
    )


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _read_out(content: aiohttp.StreamReader) -> None:
    try:
        async with asyncio.timeout(_LINGER_S):
            while not content.at_eof():
                await content.readany()
    except (TimeoutError, aiohttp.ClientError):
        return  # The answer is whole; only its connection cannot be used again.


async def _refusal(response: aiohttp.ClientResponse) -> RequestError:
    message = f"HTTP {response.status}: {shown(await response.read())}"
    return RequestError(message, rejected=response.status in _NO_ROOM)


@asynccontextmanager
async def _as_request_errors(url: str) -> AsyncGenerator[None]:
    try:
        yield
    except TimeoutError as error:
        raise RequestError(f"{url} keeps silent: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestError(f"{url}: {error or type(error).__name__}") from None
