"""The Fleet RPCs: workers register, report and drain here. Translates; what it means is decided in `fleet`."""

import asyncio
import time
from collections.abc import AsyncIterable
from typing import Any

import grpc.aio

from coordinator.fleet.membership import Fleet, gone
from coordinator.fleet.status import StatusSource
from coordinator.fleet.values import WorkerKey
from coordinator.fleet.worker import Worker
from coordinator.fleet.worker_messages import load_from_proto, worker_info_from_proto, worker_key_from_proto
from pdserve.client.errors import abort_with
from pdserve.client.wire import PROTOCOL_VERSION
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc


class FleetService(fleet_pb2_grpc.FleetServicer):
    def __init__(self, incarnation: int, report_interval_s: float, fleet: Fleet, status: StatusSource) -> None:
        self._incarnation = incarnation
        self._report_interval_s = report_interval_s
        self._fleet = fleet
        self._status = status
        self._started_s = time.monotonic()
        self._reports: dict[WorkerKey, fleet_pb2.LoadReport] = {}

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> fleet_pb2.RegisterResponse:
        try:
            self._fleet.register(worker_info_from_proto(request))
        except PdserveError as error:
            await abort_with(context, error)
        return fleet_pb2.RegisterResponse(
            coordinator_incarnation=self._incarnation,
            protocol_version=PROTOCOL_VERSION,
            report_interval_ms=round(self._report_interval_s * 1000),
        )

    async def ReportLoad(
        self,
        request_iterator: AsyncIterable[fleet_pb2.LoadReport],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> fleet_pb2.ReportLoadResponse:
        """The worker belongs to the fleet as long as this runs; STALE tells it to register again."""
        worker: Worker | None = None
        try:
            while (report := await self._next_report(context, worker)) is not None:
                worker = worker or self._known(report.worker)
                self._fleet.report(worker, load_from_proto(report))
                self._reports[worker.info.key] = report
        except PdserveError as error:
            await abort_with(context, error)
        finally:
            if worker is not None:
                self._fleet.depart(worker)
                if self._fleet.find(worker.info.key) is None:
                    self._reports.pop(worker.info.key, None)
        return fleet_pb2.ReportLoadResponse()

    async def _next_report(
        self, context: "grpc.aio.ServicerContext[Any, Any]", worker: Worker | None
    ) -> fleet_pb2.LoadReport | None:
        """None: the worker ended its stream. A worker that is gone meanwhile hears of it at once, as STALE."""
        reading = asyncio.ensure_future(context.read())
        waits = (reading,) if worker is None else (reading, worker.departed)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if worker is not None and worker.gone:
                raise gone(worker)
            message = await reading
        finally:
            reading.cancel()
        return message if isinstance(message, fleet_pb2.LoadReport) else None

    async def Drain(
        self, request: fleet_pb2.DrainRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> fleet_pb2.DrainResponse:
        """Answered when nothing is left there."""
        try:
            worker = self._known(request.worker)
        except PdserveError as error:
            await abort_with(context, error)
        self._fleet.drain(worker)
        await worker.wait_idle()
        return fleet_pb2.DrainResponse()

    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> fleet_pb2.FleetStatus:
        return self._status.status(self._reports, time.monotonic() - self._started_s)

    def _known(self, message: fleet_pb2.WorkerId) -> Worker:
        worker = self._fleet.find(worker_key_from_proto(message))
        if worker is None:
            raise PdserveError(ErrorReason.STALE, f"worker {message.worker_id} is not registered; register again")
        return worker
