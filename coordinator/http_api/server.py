"""Running the HTTP app inside an event loop that somebody else owns, signals included."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp


class HttpServer:
    """A running server. `port` is the one bound."""

    def __init__(self, server: "_QuietServer", port: int, serving: "asyncio.Task[None]") -> None:
        self.port = port
        self._server = server
        self._serving = serving

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new at once; requests still running after `grace_s` are cancelled."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._serving


async def serve_http(app: ASGIApp, host: str, port: int) -> HttpServer:
    """Start serving; port 0 picks a free one.

    Raises:
        OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    await server.wait_started(serving)
    return HttpServer(server, int(listener.getsockname()[1]), serving)


class _QuietServer(uvicorn.Server):
    """Leaves signal handlers alone and tells when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started.set()

    async def wait_started(self, serving: "asyncio.Task[None]") -> None:
        """Raises what `serving` raised if it ended first."""
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait((started, serving), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if serving.done():
            serving.result()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
