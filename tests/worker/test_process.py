"""A worker's process around a model without weights, in the test's own process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import decode_service.main
from pdserve.client.channels import aio_server
from pdserve.client.errors import abort_with
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import ModelInfo
from pdserve.engine.ledger import Demand
from pdserve.serving.settings import Settings
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc
from pdserve.worker.process import _Process
from tests.support.fake_engine import FakeRunner, FakeStore
from tests.support.worker_bench import bench_settings

WAIT_S = 20.0


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """Takes everybody until it is told to refuse."""

    def __init__(self) -> None:
        self.refusing = False
        self.refused = asyncio.Event()

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:
        if self.refusing:
            self.refused.set()
            await abort_with(context, PdserveError(ErrorReason.INCOMPATIBLE_PEER, "another model"))
        return fleet_pb2.RegisterResponse(report_interval_ms=20)

    async def ReportLoad(self, request_iterator: Any, context: Any) -> fleet_pb2.ReportLoadResponse:
        async for _ in request_iterator:
            if self.refusing:
                await abort_with(context, PdserveError(ErrorReason.STALE, "restarted"))
        return fleet_pb2.ReportLoadResponse()

    async def Drain(self, request: fleet_pb2.DrainRequest, context: Any) -> fleet_pb2.DrainResponse:
        return fleet_pb2.DrainResponse()


@asynccontextmanager
async def coordinators(*fleets: FakeFleet) -> AsyncIterator[tuple[str, ...]]:
    servers = [aio_server() for _ in fleets]
    ports: list[int] = []
    for server, fleet in zip(servers, fleets, strict=True):
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
    try:
        yield tuple(f"127.0.0.1:{port}" for port in ports)
    finally:
        for server in servers:
            await server.stop(None)


def decode_worker(addresses: tuple[str, ...]) -> tuple[_Process, asyncio.Task[int], asyncio.Event]:
    settings: Settings = bench_settings()
    worker = settings.worker.model_copy(update={"coordinators": addresses, "drain_s": 600.0})
    store = FakeStore(64, 4)
    info = ModelInfo("fake", "f00d", "fake", "float32", 97, 4096, (0,))
    loaded = SimpleNamespace(runner=FakeRunner(4, store=store), paged_kv=store, model_info=info)
    process = _Process(settings.model_copy(update={"worker": worker}), ("decode",), cast(Any, loaded), 0.0)
    ready = asyncio.Event()
    task = asyncio.create_task(process.serve(lambda _: ready.set(), decode_service.main.build))
    return process, task, ready


def reserve(process: _Process, number: int) -> SequenceId:
    sequence_id = SequenceId(7, number)
    service = cast(Any, process._worker.services[0])
    service.requests.reserve(sequence_id, Demand(8, 8), now_s=float("inf"), deadline_s=float("inf"))
    return sequence_id


async def test_it_drains_when_told_and_goes_when_empty() -> None:
    async with coordinators(FakeFleet()) as addresses:
        process, task, ready = decode_worker(addresses)
        await asyncio.wait_for(ready.wait(), WAIT_S)
        sequence_id = reserve(process, 1)
        process._stop.set()
        await asyncio.sleep(0)
        assert not task.done()
        cast(Any, process._worker.services[0]).requests.cancel(sequence_id)
        assert await asyncio.wait_for(task, WAIT_S) == 0


async def test_one_coordinators_refusal_leaves_the_others_streams_alone() -> None:
    fleets = FakeFleet(), FakeFleet()
    async with coordinators(*fleets) as addresses:
        process, task, ready = decode_worker(addresses)
        await asyncio.wait_for(ready.wait(), WAIT_S)
        sequence_id = reserve(process, 1)
        fleets[1].refusing = True
        await asyncio.wait_for(fleets[1].refused.wait(), WAIT_S)
        assert not task.done()
        process._stop.set()
        cast(Any, process._worker.services[0]).requests.cancel(sequence_id)
        assert await asyncio.wait_for(task, WAIT_S) == 0


async def test_a_worker_that_nobody_takes_ends() -> None:
    fleet = FakeFleet()
    fleet.refusing = True
    async with coordinators(fleet) as addresses:
        _, task, ready = decode_worker(addresses)
        assert await asyncio.wait_for(task, WAIT_S) == 2
        assert not ready.is_set()


async def test_an_engine_that_crashes_during_a_drain_ends_the_worker_at_once() -> None:
    async with coordinators(FakeFleet()) as addresses:
        process, task, ready = decode_worker(addresses)
        await asyncio.wait_for(ready.wait(), WAIT_S)
        reserve(process, 1)
        process._stop.set()

        def crash() -> None:
            raise RuntimeError("planted")

        process._worker.engine.post(crash)
        assert await asyncio.wait_for(task, WAIT_S) == 1
