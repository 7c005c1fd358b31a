"""What happens to every HTTP request before its body is read: arrival time, label, caller, bounds. Parses no body."""

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
    """Refuses callers without a key (under /v1/) and bodies that are too large, before reading them."""

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
        await self._app(scope, _bounded(receive, self._settings.max_body_bytes), send)

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        if not str(scope["path"]).startswith("/v1/"):
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


def _bounded(receive: Receive, max_bytes: int) -> Receive:
    """`receive` for bodies without a declared length."""
    num_received = 0

    async def bounded() -> Message:
        nonlocal num_received
        message = await receive()
        num_received += len(message.get("body", b""))
        if num_received > max_bytes:
            # An HTTPException, because FastAPI turns any other failure to read a body into a 400.
            raise HTTPException(413, _too_large(max_bytes).message)
        return message

    return bounded
