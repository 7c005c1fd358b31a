"""A worker's membership in one coordinator's fleet: register, report load, drain; again after every broken connection.

Knows nothing of what the worker computes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from pdserve.client.channels import aio_channel
from pdserve.client.errors import error_from_rpc
from pdserve.core.errors import ErrorReason
from pdserve.serving.load import WorkerLoad
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
MIN_REPORT_GAP_S = 0.02


class CoordinatorLink:
    """Keeps one worker registered with one coordinator until `leave`."""

    def __init__(
        self,
        address: str,
        registration: fleet_pb2.RegisterRequest,
        load: Callable[[], WorkerLoad],
    ) -> None:
        self.address = address
        self.registered = asyncio.Event()
        self._registration = registration
        self._load = load
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Stay registered; returns after `leave`.

        Raises:
            PdserveError: INCOMPATIBLE_PEER, if the coordinator refuses this worker for what it is.
        """
        while not self._leaving.is_set():
            try:
                async with aio_channel(self.address) as channel:
                    await self._member(fleet_pb2_grpc.FleetStub(channel))
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if error.reason is ErrorReason.INCOMPATIBLE_PEER:
                    raise error from rpc_error
                if self.registered.is_set():
                    dismissed = error.reason is ErrorReason.STALE
                    logger.log(
                        logging.INFO if dismissed else logging.WARNING, "lost coordinator %s: %s", self.address, error
                    )
            self.registered.clear()
            await _wait(self._leaving, RECONNECT_S)

    async def drain(self) -> None:
        """Ask for nothing new. A coordinator that is gone will send nothing new either."""
        if not self.registered.is_set():
            return
        try:
            async with aio_channel(self.address) as channel:
                stub = fleet_pb2_grpc.FleetStub(channel)
                await stub.Drain(fleet_pb2.DrainRequest(worker=self._registration.worker), timeout=2.0)
        except grpc.aio.AioRpcError as rpc_error:
            logger.warning("could not announce the drain to %s: %s", self.address, error_from_rpc(rpc_error))

    def load_changed(self) -> None:
        """Report soon, rather than when the interval has passed."""
        self._changed.set()

    def leave(self) -> None:
        """End the reports, which ends the membership."""
        self._leaving.set()
        self._changed.set()

    async def _member(self, stub: "fleet_pb2_grpc.FleetAsyncStub") -> None:
        response = await stub.Register(self._registration, wait_for_ready=True, timeout=10.0)
        logger.info("registered with %s", self.address)
        self.registered.set()
        await stub.ReportLoad(self._reports(response.report_interval_ms / 1000))

    async def _reports(self, interval_s: float) -> AsyncIterator[fleet_pb2.LoadReport]:
        while not self._leaving.is_set():
            self._changed.clear()
            report = self._load().to_proto()
            report.worker.CopyFrom(self._registration.worker)
            report.roles_epoch = self._registration.roles_epoch
            yield report
            await asyncio.sleep(MIN_REPORT_GAP_S)
            await _wait(self._changed, interval_s)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
