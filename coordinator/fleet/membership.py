"""The workers that belong to this coordinator: who may join, who is alive, who gets new work. Event loop only.

register ──► connecting ──► ready ⇄ stalled ──► (draining) ──► gone: its report stream or a Run stream ended
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from coordinator.fleet.values import Role, WorkerInfo, WorkerKey, WorkerLoad, WorkerOutput, WorkerState
from coordinator.fleet.worker import Connection, Worker, WorkerEvents
from coordinator.scheduling.routing import WorkerView
from pdserve.client.wire import PROTOCOL_VERSION
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import ModelInfo

MODEL_FIELDS = ("vocab_size", "context_length", "eos_token_ids", "dtype", "fingerprint")
"""What makes a worker's model the one that the coordinator's files describe."""

Connect = Callable[[WorkerInfo, WorkerEvents], Connection]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`models` are those served here, by name, as the coordinator's own files tell; other workers are refused."""

    models: Mapping[str, ModelInfo]
    stalled_after_s: float


class Changes:
    """Wakes those who wait for the fleet to look different: take `next()` before looking, so that nothing is missed."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> "asyncio.Future[None]":
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def notify(self) -> None:
        if self._next is not None:
            self._next.set_result(None)
            self._next = None


class _Events:
    """Passes a connection's news on to its worker."""

    def __init__(self, fleet: "Fleet", worker: Worker) -> None:
        self._fleet = fleet
        self._worker = worker

    def on_outputs(self, role: Role, outputs: Seq[WorkerOutput]) -> None:
        self._worker.deliver(role, outputs)

    def on_lost(self, error: PdserveError) -> None:
        self._fleet.remove(self._worker, error)


class Fleet:
    def __init__(self, config: FleetConfig, connect: Connect, clock: Callable[[], float]) -> None:
        self._config = config
        self._connect = connect
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.changes = Changes()

    @property
    def models(self) -> frozenset[str]:
        return frozenset(self._config.models)

    def workers(self) -> list[Worker]:
        """All that registered and are not gone, by name."""
        return [self._workers[name] for name in sorted(self._workers)]

    def find(self, key: WorkerKey) -> Worker | None:
        worker = self._workers.get(key.worker_id)
        return worker if worker is not None and worker.info.key == key else None

    def state(self, worker: Worker) -> WorkerState:
        return worker.state(self._clock(), self._config.stalled_after_s)

    def ready(self, model: str) -> list[Worker]:
        """Workers of the model that may get new work."""
        return [
            worker
            for worker in self.workers()
            if worker.info.model_name == model and self.state(worker) is WorkerState.READY
        ]

    def views(self, model: str) -> list[WorkerView]:
        return [worker.view() for worker in self.ready(model)]

    def register(self, info: WorkerInfo) -> Worker:
        """Take the worker in, in place of any earlier one of its name, and begin to connect to it.

        Raises:
            PdserveError: INCOMPATIBLE_PEER, naming what differs; DRAINING once the fleet is closed.
        """
        if self._closed:
            raise PdserveError(ErrorReason.DRAINING, "the coordinator is stopping")
        _check_itself(info, self._config.models)
        others = [worker.info for worker in self.workers() if worker.info.key.worker_id != info.key.worker_id]
        peers = [other for other in others if other.model_name == info.model_name]
        _check_peers(info, peers)
        _warn_of_other_evaluation(info, peers)
        self._replace(info)
        worker = Worker(info, self._clock(), self.changes.notify)
        self._workers[info.key.worker_id] = worker
        connecting = self._spawn(self._start(worker))
        worker.departed.add_done_callback(lambda _: connecting.cancel())
        logger.info("worker %s registered as %s for %s", info.key, info.pool_name, info.model_name)
        return worker

    def _replace(self, info: WorkerInfo) -> None:
        old = self._workers.get(info.key.worker_id)
        if old is not None:
            name = info.key.worker_id
            self.remove(old, PdserveError(ErrorReason.WORKER_LOST, f"worker {name} was lost: it registered anew"))

    async def _start(self, worker: Worker) -> None:
        connection = self._connect(worker.info, _Events(self, worker))
        try:
            await connection.start()
        except PdserveError as error:
            self.remove(worker, error)
            return
        except Exception as error:
            logger.exception("worker %s: connecting to it failed", worker.info.key)
            self.remove(worker, PdserveError(ErrorReason.INTERNAL, f"connecting to it failed: {type(error).__name__}"))
            return
        if worker.gone:  # removed in the very turn in which the dial succeeded
            connection.close()
            await connection.closed()
            return
        worker.connection = connection
        logger.info("worker %s is live", worker.info.key)
        self.changes.notify()

    def report(self, worker: Worker, load: WorkerLoad) -> None:
        """Take in a load report.

        Raises:
            PdserveError: STALE, if the worker is gone: it must register again.
        """
        if worker.gone:
            raise gone(worker)
        before = self.state(worker), worker.load
        worker.report(load, self._clock())
        if before[0] is not self.state(worker) or before[1] is None or before[1].ledger_version != load.ledger_version:
            self.changes.notify()

    def drain(self, worker: Worker) -> None:
        """Give it nothing new."""
        worker.draining = True
        logger.info("worker %s drains", worker.info.key)
        self.changes.notify()

    def depart(self, worker: Worker) -> None:
        """Its report stream ended."""
        self.remove(worker, PdserveError(ErrorReason.WORKER_LOST, f"worker {worker.info.key.worker_id} left the fleet"))

    def remove(self, worker: Worker, error: PdserveError) -> None:
        """Forget the worker and fail what is in flight there; harmless the second time."""
        if worker.gone:
            return
        if self._workers.get(worker.info.key.worker_id) is worker:
            del self._workers[worker.info.key.worker_id]
        logger.info("worker %s is gone: %s", worker.info.key, error.message)
        worker.lose(error)
        if worker.connection is not None:
            worker.connection.close()
            self._spawn(worker.connection.closed())
        self.changes.notify()

    def _spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Let every worker go; no other may join."""
        self._closed = True
        for worker in self.workers():
            self.remove(worker, PdserveError(ErrorReason.DRAINING, "the coordinator stops"))
        while self._tasks:
            await asyncio.wait(self._tasks)


def gone(worker: Worker) -> PdserveError:
    """What a worker is told that still reports though it was removed."""
    return PdserveError(ErrorReason.STALE, f"no longer part of the fleet: {worker.departed.result().message}")


def _incompatible(info: WorkerInfo, why: str) -> PdserveError:
    return PdserveError(ErrorReason.INCOMPATIBLE_PEER, f"worker {info.key.worker_id} is refused: {why}")


def _check_itself(info: WorkerInfo, models: Mapping[str, ModelInfo]) -> None:
    if abs(info.protocol_version - PROTOCOL_VERSION) > 1:
        raise _incompatible(info, f"protocol_version {info.protocol_version}, the coordinator's is {PROTOCOL_VERSION}")
    if info.model_name not in models:
        served = ", ".join(sorted(models))
        raise _incompatible(info, f"model {info.model_name!r} is not served here (served: {served})")
    for name in MODEL_FIELDS:
        theirs, ours = getattr(info.model, name), getattr(models[info.model_name], name)
        if theirs != ours:
            raise _incompatible(info, f"{name} ({theirs}, {ours}) differs from the coordinator's files of the model")
    missing = {
        "worker_id": not info.key.worker_id,
        "incarnation": not info.key.incarnation,
        "roles": not info.roles,
        "kv_layouts": not info.kv_layouts,
        "control_address": not info.control_address,
        "kv_address": Role.DECODE in info.roles and not info.kv_address,
        "capacity.num_blocks": not info.capacity.num_blocks,
        "capacity.block_size": not info.capacity.block_size,
    }
    for name, is_missing in missing.items():
        if is_missing:
            raise _incompatible(info, f"{name} is missing")


def _check_peers(info: WorkerInfo, peers: Seq[WorkerInfo]) -> None:
    for peer in peers:
        name = peer.key.worker_id
        if info.model.fingerprint != peer.model.fingerprint:
            raise _incompatible(
                info, f"model fingerprint ({info.model.fingerprint}, {peer.model.fingerprint}) differs from {name}'s"
            )
        if not any(layout in peer.kv_layouts for layout in info.kv_layouts):
            fields = ", ".join(info.kv_layouts[0].differences(peer.kv_layouts[0]))
            raise _incompatible(info, f"KV layout differs from {name}'s in {fields}")


def _warn_of_other_evaluation(info: WorkerInfo, peers: Seq[WorkerInfo]) -> None:
    """Such a mix is no reason to refuse: it lasts for as long as a rolling upgrade does."""
    other = next((peer for peer in peers if peer.model.evaluation_id != info.model.evaluation_id), None)
    if other is not None:
        logger.warning(
            "worker %s computes %s otherwise than %s (evaluation ids %s, %s): the same request may get other tokens",
            info.key.worker_id,
            info.model_name,
            other.key.worker_id,
            info.model.evaluation_id or "unknown",
            other.model.evaluation_id or "unknown",
        )
