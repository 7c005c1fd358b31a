"""What happens to every HTTP request before its body is read: arrival time, label, caller, bounds. Parses no body."""

import asyncio
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.auth import Authenticator, Caller
from coordinator.http_api.errors import error_response
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.serving.settings import CoordinatorSettings

TIMEOUT_HEADER = "X-Request-Timeout"
LABEL_HEADER = "X-Request-Id"
_LABEL = re.compile(r"[\x21-\x7e]{1,256}")
BODY_TIMEOUT_S = 60.0
"""For a whole body to arrive, unless the request's own deadline comes first."""
OPEN_PATHS = frozenset({"/health", "/livez", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
"""For which no API key is asked: what operators and browsers look at. They show nothing of requests."""
_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?")


@dataclass(frozen=True, slots=True)
class Edge:
    """What is known of a request from its head. `label` is the client's X-Request-Id, or one made here."""

    arrival_s: float
    label: str
    caller: Caller
    timeout_s: float | None


def edge_of(request: Request) -> Edge:
    return cast("Edge", request.scope["state"]["edge"])


class EdgeMiddleware:
    """Refuses callers without a key and bodies that are too large, before reading them."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, settings: CoordinatorSettings, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._settings = settings
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        offered = headers.get(LABEL_HEADER, "")
        label = offered if _LABEL.fullmatch(offered) else uuid.uuid4().hex
        send = _with_label(send, label)
        try:
            self._check_length(headers)
            caller = self._caller(scope, headers)
            edge = Edge(self._clock(), label, caller, _timeout_s(headers.get(TIMEOUT_HEADER)))
        except PdserveError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["edge"] = edge
        # Every body here is JSON; `curl -d` says otherwise, and FastAPI would believe it.
        MutableHeaders(scope=scope)["content-type"] = "application/json"
        body = _Body(receive, self._settings.max_body_bytes, min(edge.timeout_s or BODY_TIMEOUT_S, BODY_TIMEOUT_S))
        await self._app(scope, body.receive, send)

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        if scope["path"] in OPEN_PATHS:
            return Caller()
        return self._authenticator.authenticate(headers.get("authorization"))

    def _check_length(self, headers: Headers) -> None:
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)


def _timeout_s(value: str | None) -> float | None:
    if value is None:
        return None
    if not _SECONDS.fullmatch(value) or float(value) <= 0:
        raise invalid(f"{TIMEOUT_HEADER} must be a positive number of seconds", TIMEOUT_HEADER)
    return float(value)


def _too_large(max_bytes: int) -> PdserveError:
    return PdserveError(ErrorReason.PAYLOAD_TOO_LARGE, f"the body is larger than {max_bytes} bytes")


def _with_label(send: Send, label: str) -> Send:
    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[LABEL_HEADER] = label
        await send(message)

    return labelled


class _Body:
    """`receive` with a bound on the body's bytes, for bodies without a declared length, and on its time."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._until_s = asyncio.get_running_loop().time() + timeout_s
        self._num_received = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:  # what comes now is news of the connection
            return await self._receive()
        # HTTPExceptions, because FastAPI turns any other failure to read a body into a 400.
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(504, f"the body was not complete after {self._timeout_s:g} s") from None
        self._num_received += len(message.get("body", b""))
        if self._num_received > self._max_bytes:
            raise HTTPException(413, _too_large(self._max_bytes).message)
        self._complete = not message.get("more_body", False)
        return message
