"""A worker's process from start to drain: load, serve, join fleets, stop. What it computes is its role's `build`."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.client.channels import aio_server, bind
from pdserve.client.wire import PROTOCOL_VERSION, kv_layout_to_proto, model_info_to_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.loading import LoadedEngine
from pdserve.engine.step_loop import Turn
from pdserve.serving.coordinator_link import CoordinatorLink
from pdserve.serving.load import PoolLoad, StageLoad, WorkerLoad
from pdserve.serving.settings import Settings
from pdserve.v1 import fleet_pb2
from pdserve.worker.host import host_identity
from pdserve.worker.loading import load, token_budget
from pdserve.worker.parts import Worker, WorkerParts, make_parts

logger = logging.getLogger(__name__)

Ready = Callable[[dict[str, object]], None]
Build = Callable[[WorkerParts], Worker]
ROLES = {"prefill": fleet_pb2.ROLE_PREFILL, "decode": fleet_pb2.ROLE_DECODE}
REAP_INTERVAL_S = 0.5
STOP_S = 5.0


def run_worker(settings: Settings, ready: Ready, roles: Seq[str], build: Build) -> int:
    """Run one worker until SIGTERM or SIGINT has drained it.

    Returns:
        The process's exit code: 0 after a drain, 1 after a crash of the engine, 2 if a coordinator refused this worker.
    """
    begin_s = time.monotonic()
    loaded = load(settings, tuple(roles))
    process = _Process(settings, roles, loaded, time.monotonic() - begin_s)
    return uvloop.run(process.serve(ready, build))


class _Process:
    """Connects one Worker to signals, sockets and coordinators; lives on the event loop."""

    def __init__(self, settings: Settings, roles: Seq[str], loaded: LoadedEngine, model_load_s: float) -> None:
        self._settings = settings.worker
        self._all_settings = settings
        self._roles = roles
        self._loaded = loaded
        self._model_load_s = model_load_s
        self._draining = False
        self._exit_code = 0
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._links: list[CoordinatorLink] = []

    async def serve(self, ready: Ready, build: Build) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        role = self._roles[0] if len(self._roles) == 1 else "colocated"
        self._parts = make_parts(
            self._all_settings, self._loaded, role, self._publish, self._engine_crashed, self._load_changed
        )
        self._worker = build(self._parts)
        server = aio_server()
        self._worker.add_to_server(server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = bind(server.add_insecure_port, self._settings.host, self._settings.control_port)
        self._worker.engine.start()
        await server.start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._stay_in_fleets(port, ready)
        await self._shut_down(server)
        return self._exit_code

    # --- membership ---------------------------------------------------------------------------------------------------

    async def _stay_in_fleets(self, control_port: int, ready: Ready) -> None:
        """Join every coordinator; return when the worker has drained, or must stop at once."""
        registration = self._registration(control_port)
        self._links = [CoordinatorLink(c, registration, self._load) for c in self._settings.coordinators]
        async with asyncio.TaskGroup() as tasks:
            reaper = tasks.create_task(self._reap())
            for link in self._links:
                tasks.create_task(self._keep(link))
            joined = tasks.create_task(self._announce_ready(ready))
            await self._stop.wait()
            self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            joined.cancel()
            if self._exit_code == 0:
                await self._drain()
            for link in self._links:
                link.leave()
            reaper.cancel()

    async def _announce_ready(self, ready: Ready) -> None:
        for link in self._links:
            await link.registered.wait()
        ready({"worker_id": self._parts.worker_id})

    async def _keep(self, link: CoordinatorLink) -> None:
        """A coordinator's refusal ends this worker only if nobody ever took it; others' streams go on."""
        while not await link.run():
            if all(other.refused for other in self._links) and not any(other.ever_joined for other in self._links):
                self._exit_code = 2
                self._stop.set()

    def _registration(self, control_port: int) -> fleet_pb2.RegisterRequest:
        parts, layout = self._parts, self._loaded.paged_kv.layout
        host = self._settings.advertise_host or self._settings.host
        capacity = fleet_pb2.Capacity(
            num_blocks=parts.ledger.num_usable_blocks,
            block_size=layout.block_size,
            max_batch_size=self._settings.max_batch_size,
            token_budget=token_budget(self._all_settings, self._roles),
            memory_bytes=self._loaded.paged_kv.num_blocks * layout.block_bytes,
        )
        return fleet_pb2.RegisterRequest(
            protocol_version=PROTOCOL_VERSION,
            worker=fleet_pb2.WorkerId(worker_id=parts.worker_id, incarnation=parts.incarnation),
            roles=[ROLES[role] for role in self._roles],
            model_name=self._loaded.model_info.name,
            model=model_info_to_proto(self._loaded.model_info),
            kv_layouts=[kv_layout_to_proto(layout)],
            transports=[t for t in self._all_settings.transfer.transports if t in self._worker.transports],
            control_address=f"{host}:{control_port}",
            kv_address=f"{host}:{self._worker.kv_port}" if self._worker.kv_port else "",
            host=host_identity(),
            capacity=capacity,
        )

    # --- the engine and the services ----------------------------------------------------------------------------------

    def _publish(self, turn: Turn) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, turn)

    def _dispatch(self, turn: Turn) -> None:
        try:
            for service, events, snapshot in zip(self._worker.services, turn.events, turn.snapshots, strict=True):
                service.handle_turn(events, snapshot)
        except Exception:
            logger.critical("a turn's events could not be handled: stopping", exc_info=True)
            self._crash()
        self._load_changed()

    def _engine_crashed(self, _: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._crash)

    def _crash(self) -> None:
        """Whoever cannot account for its blocks must not serve: stop without a drain."""
        self._exit_code = 1
        self._stop.set()
        self._changed.set()

    def _load_changed(self) -> None:
        self._changed.set()
        for link in self._links:
            link.load_changed()

    def _load(self) -> WorkerLoad:
        parts, engine = self._parts, self._worker.engine
        num_cached_blocks = parts.pool.num_cached_blocks
        pool = PoolLoad(
            num_free_blocks=parts.pool.num_empty_blocks,
            num_cached_blocks=num_cached_blocks,
            num_cached_tokens=num_cached_blocks * parts.settings.worker.block_size,
            num_reserved_blocks=parts.ledger.num_reserved_blocks,
            num_usable_blocks=parts.ledger.num_usable_blocks,
            ledger_version=parts.ledger.version,
        )
        return WorkerLoad(
            stage=sum((service.load() for service in self._worker.services), StageLoad()),
            pool=pool,
            step_count=engine.step_count,
            has_work=engine.has_work or engine.has_commands,
            draining=self._draining,
            model_load_s=self._model_load_s,
        )

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            for service in self._worker.services:
                service.reap(time.monotonic())

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def _num_requests(self) -> int:
        return sum(service.num_requests for service in self._worker.services)

    async def _drain(self) -> None:
        """Take nothing new, finish what is here, and at the end of the grace period end the rest with an error."""
        logger.info("draining: %d requests in flight", self._num_requests)
        self._draining = True
        self._load_changed()
        drains = asyncio.gather(*(link.drain(self._settings.drain_s + STOP_S) for link in self._links))
        drains.add_done_callback(lambda _: self._changed.set())
        if not await self._quiet(drains, self._settings.drain_s):
            logger.warning("%d requests did not end in time", self._num_requests)
            for service in self._worker.services:
                service.fail_all(PdserveError(ErrorReason.DRAINING, "the worker stops"))
            await self._quiet(drains, STOP_S)
        drains.cancel()

    async def _quiet(self, drains: "asyncio.Future[list[None]]", timeout_s: float) -> bool:
        """Wait until nothing is left here and every coordinator has the last of what it asked for: outputs may still be
        on their way when nothing is left. Also over once the engine has crashed."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._exit_code != 1 and not (drains.done() and self._num_requests == 0):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _shut_down(self, server: grpc.aio.Server) -> None:
        parts = self._parts
        for service in self._worker.services:
            service.close()
        await server.stop(grace=1.0)
        await asyncio.to_thread(self._worker.engine.stop)
        parts.pool.check_integrity()
        if self._exit_code != 1 and self._num_requests == 0 and parts.pool.num_free_blocks != parts.pool.num_blocks:
            raise RuntimeError(f"{parts.pool.num_blocks - parts.pool.num_free_blocks} blocks were lost")
        await asyncio.to_thread(self._worker.close)
        logger.info("stopped with %d of %d blocks free", parts.pool.num_free_blocks, parts.pool.num_blocks)
