"""A fleet of real processes for end-to-end tests: started as the launcher starts them, ended by their own pids."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.client.channels import aio_channel
from pdserve.client.client import AsyncClient
from pdserve.client.inference import Delta, Finished, GenerateOptions, Prompt
from pdserve.launch.plan import ChildPlan
from pdserve.launch.process import ChildProcess, Exited, Started, child_command
from pdserve.launch.roles import thread_environment
from pdserve.serving.settings import Settings
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc

START_S = 120.0
WAIT_S = 60.0
POLL_S = 0.05
REPORT_S = 0.2
"""The longest gap between two load reports of one worker."""


COORDINATOR = {"http_port": 0, "grpc_port": 0, "drain_s": 20, "report_interval_s": REPORT_S}


class Service:
    """One process. `started` and `exited` are its only news."""

    def __init__(self, role: str, settings: Settings) -> None:
        self.role = role
        self.name = settings.worker.worker_id or role
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        environment = thread_environment(settings.worker.threads)
        self._process = ChildProcess(ChildPlan(role, self.name, settings, environment), self._publish, child_command)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def info(self) -> dict[str, Any]:
        """What it reported when it was ready; fails if it ended before."""
        await asyncio.wait({self.started, self.exited}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        assert self.started.done(), f"{self.name} did not start"
        return self.started.result()

    def send_signal(self, number: int) -> None:
        if not self.exited.done():
            self._process._process.send_signal(number)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its exit code."""
        self.send_signal(number)
        return await asyncio.wait_for(asyncio.shield(self.exited), WAIT_S)

    def _publish(self, event: Started | Exited) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: Started | Exited) -> None:
        if isinstance(event, Started):
            self.started.set_result(event.info)
        else:
            self.exited.set_result(event.code)


@dataclass(frozen=True)
class Output:
    """One choice, whole."""

    token_ids: tuple[int, ...]
    text: str
    finished: Finished


class Fleet:
    """A coordinator and its workers, of `model` and of `more_models`."""

    def __init__(self, model: Path, settings: dict[str, dict[str, Any]], more_models: Sequence[Path] = ()) -> None:
        self.model = model
        self.models = (model, *more_models)
        self._settings = settings
        self.services: list[Service] = []
        self.http_url = ""
        self.grpc_address = ""

    def settings(self, models: Sequence[Path] = (), **worker: Any) -> Settings:
        """Those of the whole fleet, with a worker's own on top. `models`: by default the fleet's first."""
        loaded = [
            {"source": str(path), "dtype": "float32", **self._settings.get("model", {})}
            for path in models or self.models[:1]
        ]
        sections = {
            "model": loaded[0],
            "coordinator": {**COORDINATOR, **self._settings.get("coordinator", {})},
            "worker": {"num_blocks": 1024, "drain_s": 20, **self._settings.get("worker", {}), **worker},
        }
        others = {name: section for name, section in self._settings.items() if name not in sections}
        return Settings.model_validate({**sections, **others, "more_models": loaded[1:], "log_level": "warning"})

    async def start_coordinator(self) -> Service:
        service = Service("coordinator", self.settings(self.models))
        self.services.append(service)
        info = await service.info()
        self.http_url = f"http://127.0.0.1:{info['http_port']}"
        self.grpc_address = f"127.0.0.1:{info['grpc_port']}"
        self._channel = aio_channel(self.grpc_address)
        self._fleet = fleet_pb2_grpc.FleetStub(self._channel)
        self.client = AsyncClient(self.grpc_address)
        return service

    def launch_worker(self, role: str, name: str, model: Path | None = None, **worker: Any) -> Service:
        """Start a worker; `info()` tells when it has joined. `model`: by default the fleet's first."""
        models = (model or self.model,)
        service = Service(role, self.settings(models, worker_id=name, coordinators=[self.grpc_address], **worker))
        self.services.append(service)
        return service

    async def start_workers(self, roles: Iterable[str]) -> None:
        """Workers in `roles` for each model, named as the launcher names them."""
        roles = list(roles)
        names = [f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]
        prefixes = [f"{path.name}." if len(self.models) > 1 else "" for path in self.models]
        workers = [
            self.launch_worker(role, prefix + name, model)
            for model, prefix in zip(self.models, prefixes, strict=True)
            for role, name in zip(roles, names, strict=True)
        ]
        for worker in workers:
            await worker.info()
        await self.until(lambda status: len(live_workers(status)) >= len(workers))

    def service(self, name: str) -> Service:
        return next(s for s in reversed(self.services) if s.name == name)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def status(self) -> fleet_pb2.FleetStatus:
        return await self._fleet.GetStatus(fleet_pb2.GetStatusRequest(), timeout=10)

    async def until(
        self, condition: Callable[[fleet_pb2.FleetStatus], bool], timeout_s: float = WAIT_S
    ) -> fleet_pb2.FleetStatus:
        """The first status that meets the condition. From outside the processes there is nothing else to wait on."""
        status = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    status = await self.status()
                    if condition(status):
                        return status
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"it did not come to that; last status:\n{status}") from None

    async def until_idle(self) -> fleet_pb2.FleetStatus:
        """Every in-flight count is zero and every pool is as free as at its start, in reports made after this call."""
        await self.until(is_idle)
        await asyncio.sleep(2 * REPORT_S)
        return await self.until(is_idle)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, **options: Any) -> Output:
        """One choice over gRPC, checked to come in order."""
        token_ids: list[int] = []
        text = ""
        finished: Finished | None = None
        async for event in self.client.generate(prompt, GenerateOptions(**options)):
            if isinstance(event, Delta):
                assert finished is None
                assert event.first_index == len(token_ids)
                token_ids += event.token_ids
                text += event.text
            elif isinstance(event, Finished):
                assert finished is None
                finished = event
        assert finished is not None
        assert finished.usage.completion_tokens == len(token_ids)
        return Output(tuple(token_ids), text, finished)

    async def stop(self) -> list[int]:
        """Coordinator first, then the workers, as the launcher does; the exit codes of those that were still there."""
        running = [s for s in self.services if not s.exited.done()]
        if hasattr(self, "client"):
            await self.client.close()
            await self._channel.close()
        codes = [await s.stop() for s in running if s.role == "coordinator"]
        return codes + list(await asyncio.gather(*(s.stop() for s in running if s.role != "coordinator")))

    async def kill(self) -> None:
        """The last resort: leave no process behind."""
        for service in self.services:
            service.send_signal(signal.SIGCONT)
            service.send_signal(signal.SIGKILL)
            await service.exited


async def cancel_after(fleet: Fleet, prompt: Sequence[int], num_tokens: int, **options: object) -> None:
    """Read `num_tokens` tokens (0: none) and hang up."""
    stream = fleet.client.generate(prompt, GenerateOptions(**options))  # type: ignore[arg-type]
    received = 0
    async for event in stream:
        received += len(event.token_ids) if isinstance(event, Delta) else 0
        if received >= num_tokens:
            break
    await stream.aclose()  # type: ignore[attr-defined]


def live_workers(status: fleet_pb2.FleetStatus) -> dict[str, fleet_pb2.WorkerStatus]:
    """By name; a colocated worker, in two pools, comes once."""
    return {w.worker.worker_id: w for pool in status.pools for w in pool.workers if w.state == "ready"}


def is_idle(status: fleet_pb2.FleetStatus) -> bool:
    workers = [w for pool in status.pools for w in pool.workers]
    return (
        status.num_in_flight == 0
        and all(queue.num_requests == 0 and queue.num_tokens == 0 for queue in status.queues)
        and all(w.num_in_flight == 0 for w in workers)
        and all(w.load.num_free_blocks + w.load.num_cached_blocks == w.load.num_usable_blocks > 0 for w in workers)
        and all(
            w.load.num_reserved_blocks == w.load.num_waiting == w.load.num_running == w.load.num_transferring == 0
            for w in workers
        )
    )


DISAGGREGATED = ("prefill", "decode")
COLOCATED = ("colocated",)


@asynccontextmanager
async def run_fleet(
    model: Path,
    roles: Iterable[str] = DISAGGREGATED,
    more_models: Sequence[Path] = (),
    /,
    **settings: dict[str, Any],
) -> AsyncIterator[Fleet]:
    """A fleet that is idle again, and stops cleanly, at the end of the block. `roles`: each model's workers."""
    fleet = Fleet(model, settings, more_models)
    try:
        await fleet.start_coordinator()
        await fleet.start_workers(roles)
        yield fleet
        await fleet.until_idle()
        assert set(await fleet.stop()) == {0}
    finally:
        await fleet.kill()
