"""What /openapi.json says that the routes' own types do not: errors, streams, plain text. Serves nothing."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """`code` is the reason: see docs/api.md."""

    error: ErrorDetail


class HealthAnswer(BaseModel):
    """`reason` says why the status is not "ok"."""

    status: str
    reason: str = ""


_ERRORS = {
    400: "A field or header is wrong, or asks for what is not supported; or the request can never fit",
    401: "An API key is required",
    404: "No such model, or no such path",
    413: "The body is too large",
    429: "Too much is queued already",
    499: "The request was cancelled",
    500: "Internal error",
    503: "Not ready, draining, or a worker was lost",
    504: "The deadline passed",
}

EVERYWHERE = (400, 413, 500)
"""Answers that any route may give: to a bad header, to a body it did not ask for, or of a bug."""
GENERATION = (401, 404, 429, 499, 503, 504)
MODELS = (401, 404)
TEXT_WORK = (401, 404, 504)


def errors(statuses: Sequence[int]) -> Responses:
    return {status: {"model": ErrorAnswer, "description": _ERRORS[status]} for status in statuses}


def event_stream(chunk: type[BaseModel]) -> Responses:
    """A 200 that is, with `stream`, a series of server-sent events whose data are `chunk`s, `[DONE]` last."""
    description = f"The answer; with `stream`, events of {chunk.__name__}, then [DONE]"
    return {200: {"description": description, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def add_document(app: FastAPI) -> None:
    """FastAPI's document, without the 422 that our error handlers never send."""

    def document() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            for path in app.openapi_schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
