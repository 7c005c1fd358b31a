"""Puts the scheduling half together from settings: fleet, dispatcher, metrics and the Fleet service."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.fleet.membership import Fleet, FleetConfig
from coordinator.fleet.service import FleetService
from coordinator.fleet.status import StatusSource
from coordinator.fleet.values import WorkerInfo
from coordinator.fleet.worker import WorkerEvents
from coordinator.fleet.worker_clients import ConnectionConfig, WorkerClient
from coordinator.metrics import Metrics
from coordinator.scheduling.admission import QueueBounds
from coordinator.scheduling.dispatcher import Dispatcher, DispatcherConfig
from coordinator.scheduling.placing import PlacingConfig
from coordinator.scheduling.stream import UnreadBound
from pdserve.core.model_info import ModelInfo
from pdserve.serving.settings import CoordinatorSettings


@dataclass(frozen=True, slots=True)
class Scheduling:
    incarnation: int
    fleet: Fleet
    dispatcher: Dispatcher
    metrics: Metrics
    fleet_service: FleetService

    async def close(self) -> None:
        """End what still runs, then let the workers go."""
        await self.dispatcher.close()
        await self.fleet.close()


def build_scheduling(
    models: Mapping[str, ModelInfo], settings: CoordinatorSettings, transports: tuple[str, ...], incarnation: int
) -> Scheduling:
    """Nothing runs before a worker registers through `fleet_service`."""
    connection = ConnectionConfig(incarnation, settings.heartbeat_s)

    def connect(info: WorkerInfo, events: WorkerEvents) -> WorkerClient:
        return WorkerClient(info, connection, events)

    fleet = Fleet(FleetConfig(models, settings.stalled_after_s), connect, time.monotonic)
    metrics = Metrics(frozenset(models), settings.max_deadline_s)
    config = DispatcherConfig(
        incarnation=incarnation,
        bounds=QueueBounds(settings.max_queued_requests, settings.max_queued_tokens),
        placing=PlacingConfig(transports, no_workers_after_s=settings.stalled_after_s),
        unread=UnreadBound(settings.max_unread_tokens, settings.unread_grace_s),
    )
    dispatcher = Dispatcher(config, fleet, metrics)
    status = StatusSource(incarnation, fleet, dispatcher, metrics)
    service = FleetService(incarnation, settings.report_interval_s, fleet, status)
    return Scheduling(incarnation, fleet, dispatcher, metrics, service)
