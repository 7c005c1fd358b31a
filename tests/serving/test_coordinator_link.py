import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from pdserve.client.channels import aio_server
from pdserve.client.errors import abort_with
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving import coordinator_link
from pdserve.serving.coordinator_link import CoordinatorLink
from pdserve.serving.load import PoolLoad, StageLoad, WorkerLoad
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc

WAIT_S = 20.0


def load() -> WorkerLoad:
    return WorkerLoad(StageLoad(), PoolLoad(1, 0, 1, 0), step_count=0, has_work=False)


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """Counts registrations; `refusals` are used up first."""

    def __init__(self) -> None:
        self.registrations: asyncio.Queue[None] = asyncio.Queue()
        self.reports: asyncio.Queue[fleet_pb2.LoadReport] = asyncio.Queue()
        self.refusals: list[PdserveError] = []

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:
        self.registrations.put_nowait(None)
        if self.refusals:
            await abort_with(context, self.refusals.pop(0))
        return fleet_pb2.RegisterResponse(report_interval_ms=20)

    async def ReportLoad(self, request_iterator: Any, context: Any) -> fleet_pb2.ReportLoadResponse:
        async for report in request_iterator:
            self.reports.put_nowait(report)
        return fleet_pb2.ReportLoadResponse()


@asynccontextmanager
async def linked(fleet: FakeFleet, source: Callable[[], WorkerLoad] = load) -> AsyncIterator[CoordinatorLink]:
    server: grpc.aio.Server = aio_server()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = CoordinatorLink(f"127.0.0.1:{port}", fleet_pb2.RegisterRequest(), source)
    task = asyncio.create_task(link.run())
    try:
        yield link
        link.leave()
        assert await asyncio.wait_for(task, WAIT_S)
    finally:
        task.cancel()
        await server.stop(None)


async def test_reports_flow_until_it_leaves() -> None:
    fleet = FakeFleet()
    async with linked(fleet) as link:
        await asyncio.wait_for(fleet.reports.get(), WAIT_S)
        link.load_changed()
        await asyncio.wait_for(fleet.reports.get(), WAIT_S)


async def test_a_report_that_cannot_be_made_costs_one_registration_not_the_link() -> None:
    fleet, calls = FakeFleet(), 0

    def fail_once() -> WorkerLoad:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("planted")
        return load()

    async with linked(fleet, fail_once):
        for _ in range(2):
            await asyncio.wait_for(fleet.registrations.get(), WAIT_S)


async def test_it_leaves_at_once_while_nobody_answers() -> None:
    link = CoordinatorLink("127.0.0.1:9", fleet_pb2.RegisterRequest(), load)
    task = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    link.leave()
    assert await asyncio.wait_for(task, 5.0)  # a registration is given 10 s


async def test_failed_attempts_are_warned_of_ever_more_rarely_until_one_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_link, "RECONNECT_S", 0.001)
    caplog.set_level(logging.INFO)
    fleet = FakeFleet()
    fleet.refusals = [PdserveError(ErrorReason.DRAINING, "the coordinator is stopping") for _ in range(15)]
    async with linked(fleet) as link:
        await asyncio.wait_for(link.registered.wait(), WAIT_S)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"cannot join coordinator {link.address} (the coordinator is stopping), retrying"] * 2
    assert f"registered with {link.address} after 15 failed attempts" in caplog.messages


async def test_nobody_listening_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(coordinator_link.logger, "warning", lambda text, *args: warnings.put_nowait(text % args))
    link = CoordinatorLink("127.0.0.1:9", fleet_pb2.RegisterRequest(), load)
    task = asyncio.create_task(link.run())
    message = await asyncio.wait_for(warnings.get(), WAIT_S)
    link.leave()
    assert await asyncio.wait_for(task, WAIT_S)
    assert message.startswith("cannot join coordinator 127.0.0.1:9 (UNAVAILABLE: ")


async def test_a_refusal_is_told_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_link, "RECONNECT_S", 0.01)
    fleet = FakeFleet()
    fleet.refusals = [PdserveError(ErrorReason.INCOMPATIBLE_PEER, "another model")]
    server = aio_server()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = CoordinatorLink(f"127.0.0.1:{port}", fleet_pb2.RegisterRequest(), load)
    assert not await asyncio.wait_for(link.run(), WAIT_S)
    assert link.refused
    assert not link.ever_joined
    again = asyncio.create_task(link.run())
    await asyncio.wait_for(fleet.reports.get(), WAIT_S)
    assert link.ever_joined
    link.leave()
    assert await asyncio.wait_for(again, WAIT_S)
    await server.stop(None)
