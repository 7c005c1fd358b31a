"""A worker's membership in one coordinator's fleet: register, report load, drain; again after every broken connection.

Knows nothing of what the worker computes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio

from pdserve.client.channels import aio_channel
from pdserve.client.errors import error_from_rpc
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.load import WorkerLoad
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc

logger = logging.getLogger(__name__)
T = TypeVar("T")

RECONNECT_S = 0.5
REFUSED_S = 5.0
MIN_REPORT_GAP_S = 0.02
WARN_AGAIN = 4
"""Attempts to join are warned of when the first failed, the 4th, the 16th, …"""


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
        self.ever_joined = False
        self.refused = False
        self._failed_attempts = 0
        self._warn_at = 1
        self._registration = registration
        self._load = load
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()

    async def run(self) -> bool:
        """Stay registered. True after `leave`; false if the coordinator refused this worker for what it is.

        A refusal is logged, and followed by a pause: what it was compared with may change.
        """
        while not self._leaving.is_set():
            try:
                async with aio_channel(self.address) as channel:
                    await self._member(fleet_pb2_grpc.FleetStub(channel))
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                self.refused = error.reason is ErrorReason.INCOMPATIBLE_PEER
                if self.refused:
                    logger.error("coordinator %s refused this worker: %s", self.address, error)
                    await _wait(self._leaving, REFUSED_S if self.ever_joined else RECONNECT_S)
                    return self._leaving.is_set()
                self._log_failure(error)
            except asyncio.CancelledError:
                # grpc.aio raises it, too, for a stream whose own report generator failed.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                logger.exception("the reports to coordinator %s broke off", self.address)
            self.registered.clear()
            await _wait(self._leaving, RECONNECT_S)
        return True

    async def drain(self, timeout_s: float) -> None:
        """Ask for nothing new, and wait until the coordinator has the last of what it asked for.

        A coordinator that is gone will send nothing new either.
        """
        if not self.registered.is_set():
            return
        try:
            async with aio_channel(self.address) as channel:
                stub = fleet_pb2_grpc.FleetStub(channel)
                await stub.Drain(fleet_pb2.DrainRequest(worker=self._registration.worker), timeout=timeout_s)
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
        response = await self._register(stub)
        if response is None:
            return
        attempts = f" after {self._failed_attempts} failed attempts" if self._failed_attempts else ""
        logger.info("registered with %s%s", self.address, attempts)
        self._failed_attempts, self._warn_at = 0, 1
        self.registered.set()
        self.ever_joined = True
        await stub.ReportLoad(self._reports(response.report_interval_ms / 1000))

    async def _register(self, stub: "fleet_pb2_grpc.FleetAsyncStub") -> fleet_pb2.RegisterResponse | None:
        """None: it is time to leave, before there was an answer."""
        call = asyncio.ensure_future(_answer(stub.Register(self._registration, timeout=10.0)))
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait({call, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            leaving.cancel()
            call.cancel()

    def _log_failure(self, error: PdserveError) -> None:
        if self.registered.is_set():
            dismissed = error.reason is ErrorReason.STALE
            level = logging.INFO if dismissed else logging.WARNING
            logger.log(level, "lost coordinator %s: %s", self.address, error)
            return
        self._failed_attempts += 1
        if self._failed_attempts >= self._warn_at:
            self._warn_at *= WARN_AGAIN
            logger.warning("cannot join coordinator %s (%s), retrying", self.address, error.message)

    async def _reports(self, interval_s: float) -> AsyncIterator[fleet_pb2.LoadReport]:
        while not self._leaving.is_set():
            self._changed.clear()
            report = self._load().to_proto()
            report.worker.CopyFrom(self._registration.worker)
            report.roles_epoch = self._registration.roles_epoch
            yield report
            await asyncio.sleep(MIN_REPORT_GAP_S)
            await _wait(self._changed, interval_s)


async def _answer(call: Awaitable[T]) -> T:
    return await call


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
