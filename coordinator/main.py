"""The coordinator's process: text models, scheduling, APIs and health, from start to the end of the drain. No torch."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import disable_created_metrics

from coordinator.auth import authenticator_for
from coordinator.generation.generator import Generator
from coordinator.generation.served_model import ServedModels, TextModel, load_text_model
from coordinator.grpc_api import INFERENCE, InferenceService, add_inference_service
from coordinator.http_api.app import build_http_app
from coordinator.http_api.server import HttpServer, serve_http
from coordinator.scheduling.assembly import Scheduling, build_scheduling
from pdserve.client.channels import aio_server, bind
from pdserve.core.errors import PdserveError
from pdserve.core.ids import new_incarnation
from pdserve.core.model_fetch import resolve_model
from pdserve.core.model_files import open_model_files
from pdserve.core.model_files.files import fingerprint
from pdserve.core.model_info import ModelInfo
from pdserve.serving.settings import ModelSettings, Settings
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc

FLEET = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
STOP_GRACE_S = 2.0
HEALTH_RECHECK_S = 1.0

Ready = Callable[[dict[str, object]], None]

logger = logging.getLogger(__name__)


def run(settings: Settings, ready: Ready) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal cuts the drain short.

    Args:
        ready: told {"grpc_port", "http_port"} once, when both are open.

    Returns:
        The process's exit code, 0.

    Raises:
        PdserveError: a model cannot be found or is not supported.
        OSError: a port is taken.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a creation time beside every series tells a dashboard nothing
    models = load_models(settings)
    return uvloop.run(CoordinatorProcess(settings, models).serve(ready))


def load_models(settings: Settings) -> ServedModels:
    """The text side of every model that `settings` names, side by side: each file is read whole for its fingerprint."""
    paths = [resolve_model(model.source, settings.cache_dir) for model in settings.models]
    with ThreadPoolExecutor(thread_name_prefix="load") as threads:
        return ServedModels(threads.map(_load_model, settings.models, paths))


def _load_model(model: ModelSettings, path: Path) -> TextModel:
    try:
        return _read_model(model, path)
    except PdserveError as error:
        raise PdserveError(error.reason, f"cannot serve {model.name}: {error.message}", param=error.param) from error


def _read_model(model: ModelSettings, path: Path) -> TextModel:
    """Tokenizer, template and config; no weights."""
    files = open_model_files(path)
    info = ModelInfo(
        name=model.name,
        fingerprint=fingerprint(files, model.dtype),
        architecture=files.config.architecture,
        dtype=model.dtype,
        vocab_size=files.config.vocab_size,
        context_length=files.config.context_length,
        eos_token_ids=files.config.eos_token_ids,
    )
    return load_text_model(info, files, created_s=int(path.stat().st_mtime))


class _Health(Protocol):
    """grpc_health's asyncio servicer, which has no types."""

    async def set(self, service: str, status: int) -> None: ...

    async def enter_graceful_shutdown(self) -> None: ...


def _health_servicer() -> _Health:
    return health.aio.HealthServicer()  # type: ignore[no-any-return] # pyright: ignore


@dataclass(frozen=True, slots=True)
class _Servers:
    grpc: grpc.aio.Server
    grpc_port: int
    health: _Health
    http: HttpServer


class CoordinatorProcess:
    """One coordinator on the running event loop."""

    def __init__(self, settings: Settings, models: ServedModels) -> None:
        self._settings = settings
        self._models = models
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Drain; asked again: don't wait for streams."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def serve(self, ready: Ready) -> int:
        """Returns once everything is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        scheduling = build_scheduling(
            {model.info.name: model.info for model in self._models},
            self._settings.coordinator,
            self._settings.transfer.transports,
            new_incarnation(),
        )
        generator = Generator(self._models, scheduling.dispatcher, self._settings.coordinator, scheduling.metrics)
        servers = await self._open(scheduling, generator)
        watcher = asyncio.create_task(self._keep_health(servers.health, scheduling), name="health")
        try:
            ready({"grpc_port": servers.grpc_port, "http_port": servers.http.port})
            await self._stop.wait()
        finally:
            watcher.cancel()
            await self._close(scheduling, servers)
            generator.close()
        return 0

    async def _open(self, scheduling: Scheduling, generator: Generator) -> _Servers:
        settings = self._settings.coordinator
        authenticator = authenticator_for(settings.api_keys)
        server = aio_server()
        servicer = _health_servicer()
        add_inference_service(InferenceService(generator, authenticator), server)
        fleet_pb2_grpc.add_FleetServicer_to_server(scheduling.fleet_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflection.enable_server_reflection((INFERENCE, FLEET, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        grpc_port = bind(server.add_insecure_port, settings.host, settings.grpc_port)
        app = build_http_app(generator, authenticator, scheduling.metrics.registry)
        http = await serve_http(app, settings.host, settings.http_port)
        await server.start()
        logger.info("serving HTTP on port %d and gRPC on port %d", http.port, grpc_port)
        return _Servers(server, grpc_port, servicer, http)

    async def _keep_health(self, servicer: _Health, scheduling: Scheduling) -> None:
        """Ready is: a sequence for any model would be taken in. Stalls show by the clock alone, hence the recheck."""
        while True:
            changed = scheduling.fleet.changes.next()
            is_ready = all(scheduling.dispatcher.is_ready(model.info.name) for model in self._models)
            status = health_pb2.HealthCheckResponse
            for name in ("", INFERENCE):
                await servicer.set(name, status.SERVING if is_ready else status.NOT_SERVING)
            await asyncio.wait((changed,), timeout=HEALTH_RECHECK_S)

    async def _close(self, scheduling: Scheduling, servers: _Servers) -> None:
        """Refuse the new, wait for the old, end what is left, then close: nobody's stream is cut without a word."""
        drain_s = self._settings.coordinator.drain_s
        logger.info("draining for up to %.0f s", drain_s)
        began_s = time.monotonic()
        scheduling.dispatcher.begin_drain()
        await servers.health.enter_graceful_shutdown()
        idle = asyncio.create_task(scheduling.dispatcher.wait_idle(drain_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        await scheduling.dispatcher.close()
        await servers.http.stop(STOP_GRACE_S)
        await scheduling.close()
        await servers.grpc.stop(STOP_GRACE_S)
        logger.info("stopped after %.1f s", time.monotonic() - began_s)
