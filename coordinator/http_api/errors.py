"""Every failure as OpenAI's error body, whoever raised it: us, FastAPI's validation, or routing."""

import json
import math
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.text.prompts import clean_text
from pdserve.core.errors import ErrorReason, PdserveError, invalid

_REASONS = {413: ErrorReason.PAYLOAD_TOO_LARGE, 504: ErrorReason.DEADLINE_EXCEEDED}
_SHAPES = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
}
_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_body(error: PdserveError) -> dict[str, object]:
    """`{"error": {message, type, param, code}}`; `code` is the reason."""
    return _body(clean_text(error.message), error.codes.openai_type, clean_text(error.param), error.reason.value)


def error_response(error: PdserveError) -> Response:
    """With Retry-After, in whole seconds rounded up, where the error carries a hint."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None and error.codes.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.reason is ErrorReason.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.codes.http_status, headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


def to_json(content: object) -> bytes:
    """Strict JSON: a NaN or infinity is a bug and raises ValueError."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def add_error_handlers(app: FastAPI) -> None:
    handlers = {
        PdserveError: _on_pdserve_error,
        RequestValidationError: _on_validation_error,
        HTTPException: _on_http_exception,
        Exception: _on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _body(message: str, kind: str, param: str, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code}}


async def _on_pdserve_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return error_response(error)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    """The first complaint, without the input it quotes: that may be part of a prompt, or not even valid JSON."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location: Sequence[object] = first["loc"][1:]
    if first["type"] == "json_invalid":
        return error_response(invalid("the body is not valid JSON", ""))
    param = ".".join(str(part) for part in location)
    return error_response(invalid(f"{param or 'the body'} {_SHAPES.get(first['type'], first['msg'])}", param))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in _REASONS:
        return error_response(PdserveError(_REASONS[error.status_code], str(error.detail)))
    if error.status_code not in _ROUTING_CODES:  # FastAPI's 400, of bytes that are no UTF-8 or nest too deeply
        return error_response(invalid("the body is not valid JSON", ""))
    message = clean_text(f"{error.detail}: {request.method} {request.url.path[:200]}")
    body = _body(message, "invalid_request_error", "", _ROUTING_CODES[error.status_code])
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _on_bug(_request: Request, _error: Exception) -> Response:
    """The server logs the traceback; the client learns only that it was not its fault."""
    return error_response(PdserveError(ErrorReason.INTERNAL, "internal error"))
