"""The fleet's state as one message, for `pdserve status` and dashboards."""

from collections.abc import Mapping

from coordinator.fleet.membership import Fleet
from coordinator.fleet.values import Role, WorkerKey
from coordinator.fleet.worker import Worker
from coordinator.fleet.worker_messages import ROLE_TO_PROTO, worker_key_to_proto
from coordinator.metrics import Metrics
from coordinator.scheduling.dispatcher import Dispatcher
from pdserve.v1 import fleet_pb2


class StatusSource:
    """Reads everything at the moment it is asked."""

    def __init__(self, incarnation: int, fleet: Fleet, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._incarnation = incarnation
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._metrics = metrics

    def status(self, reports: Mapping[WorkerKey, fleet_pb2.LoadReport], uptime_s: float) -> fleet_pb2.FleetStatus:
        """`reports`: the last one of each worker. A worker with both roles is in both pools."""
        return fleet_pb2.FleetStatus(
            coordinator_incarnation=self._incarnation,
            pools=[
                fleet_pb2.PoolStatus(
                    model_name=model,
                    role=ROLE_TO_PROTO[role],
                    workers=[
                        self._worker(worker, role, reports)
                        for worker in self._fleet.workers()
                        if worker.info.model_name == model and role in worker.info.roles
                    ],
                )
                for model in sorted(self._fleet.models)
                for role in Role
            ],
            queues=[self._queue(model) for model in sorted(self._fleet.models)],
            num_in_flight=self._dispatcher.num_in_flight,
            requests_by_outcome=dict(self._metrics.outcomes),
            uptime_s=uptime_s,
            draining=self._dispatcher.draining,
        )

    def _worker(
        self, worker: Worker, role: Role, reports: Mapping[WorkerKey, fleet_pb2.LoadReport]
    ) -> fleet_pb2.WorkerStatus:
        info = worker.info
        return fleet_pb2.WorkerStatus(
            worker=worker_key_to_proto(info.key),
            roles=[ROLE_TO_PROTO[held] for held in Role if held in info.roles],
            model_name=info.model_name,
            control_address=info.control_address,
            state=self._fleet.state(worker).value,
            load=reports.get(info.key),
            num_in_flight=worker.num_in_flight(role),
            transports=info.transports,
            evaluation_id=info.model.evaluation_id,
        )

    def _queue(self, model: str) -> fleet_pb2.QueueStatus:
        policy = self._dispatcher.queues()[model]
        bounds = self._dispatcher.bounds
        return fleet_pb2.QueueStatus(
            model_name=model,
            num_requests=policy.num_requests,
            num_tokens=policy.num_tokens,
            max_requests=bounds.max_requests,
            max_tokens=bounds.max_tokens,
        )
