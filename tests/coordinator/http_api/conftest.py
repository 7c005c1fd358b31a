from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from coordinator.auth import authenticator_for
from coordinator.generation.generator import Generator
from coordinator.http_api import build_http_app, serve_http

Serve = Callable[[Generator], AbstractAsyncContextManager[httpx.AsyncClient]]


def app_of(generator: Generator) -> FastAPI:
    return build_http_app(generator, authenticator_for(generator.settings.api_keys), CollectorRegistry())


@pytest.fixture
def serve() -> Serve:
    """A client of the app in process: quick, but answers arrive whole and nobody can hang up."""

    def serving(generator: Generator) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app_of(generator), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    return serving


@pytest.fixture
def serve_on_socket() -> Serve:
    """A real server on a free port, and a client of it."""

    @asynccontextmanager
    async def serving(generator: Generator) -> AsyncIterator[httpx.AsyncClient]:
        server = await serve_http(app_of(generator), "127.0.0.1", 0)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
                yield client
        finally:
            await server.stop(grace_s=1)

    return serving
