"""The scheduling half of the coordinator: admits sequences, queues them per model, and runs each in a task of its own.

Implements `coordinator.sequences.SequenceScheduler`. Decisions are admission's, queueing's and routing's; this wires
them to the fleet.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from coordinator.fleet.membership import Fleet
from coordinator.fleet.values import Role
from coordinator.fleet.worker import Worker
from coordinator.metrics import Metrics
from coordinator.scheduling.admission import DepartureRate, QueueBounds, check_pools, check_queue
from coordinator.scheduling.placing import PlacingConfig
from coordinator.scheduling.queueing import FifoQueue, QueueEntry, QueuePolicy
from coordinator.scheduling.sequence_run import RunContext, SequenceRun
from coordinator.scheduling.stream import UnreadBound
from coordinator.scheduling.turnstile import Turnstile
from coordinator.sequences import SequencePhase, SequenceRequest, SequenceStream
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """`incarnation` makes this coordinator's sequence ids unique for ever."""

    incarnation: int
    bounds: QueueBounds
    placing: PlacingConfig
    unread: UnreadBound


class _ModelQueue:
    def __init__(self, policy: QueuePolicy, clock: Callable[[], float]) -> None:
        self.rate = DepartureRate()
        self.turnstile = Turnstile(policy, on_leave=lambda: self.rate.record(clock()))


class Dispatcher:
    def __init__(
        self,
        config: DispatcherConfig,
        fleet: Fleet,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        make_queue: Callable[[], QueuePolicy] = FifoQueue,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._next_sequence = itertools.count(1)
        self._context = RunContext(fleet, metrics, config.placing, clock, self._new_id, config.unread)
        self._queues = {model: _ModelQueue(make_queue(), clock) for model in sorted(fleet.models)}
        self._runs: dict[asyncio.Task[None], SequenceRun] = {}
        self._draining = False
        metrics.watch(self)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_in_flight(self) -> int:
        """Sequences admitted and not yet over, clean-up included."""
        return len(self._runs)

    @property
    def bounds(self) -> QueueBounds:
        return self._config.bounds

    def queues(self) -> dict[str, QueuePolicy]:
        return {model: queue.turnstile.policy for model, queue in self._queues.items()}

    def workers(self) -> list[Worker]:
        return self._fleet.workers()

    def num_in_phase(self, model: str, phase: SequencePhase) -> int:
        return sum(run.request.model == model and run.phase is phase for run in self._runs.values())

    def num_transferring(self, model: str) -> int:
        return sum(run.request.model == model and run.transferring for run in self._runs.values())

    def submit(self, requests: Seq[SequenceRequest]) -> list[SequenceStream]:
        """Queue all or none; see `SequenceScheduler`. Raises also MODEL_NOT_FOUND. Event loop only."""
        entries = [self._entry(request) for request in requests]
        try:
            for model in sorted({request.model for request in requests}):
                self._admit(
                    model, [entry for entry, request in zip(entries, requests, strict=True) if request.model == model]
                )
        except PdserveError as error:
            self._metrics.rejected(requests[0].model, error.reason.value, len(requests))
            raise
        return [self._start(entry, request).stream for entry, request in zip(entries, requests, strict=True)]

    def _entry(self, request: SequenceRequest) -> QueueEntry:
        return QueueEntry(
            key=next(self._next_sequence),
            num_prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
            tenant=request.tenant,
            request_class=request.request_class,
        )

    def _admit(self, model: str, entries: Seq[QueueEntry]) -> None:
        if self._draining:
            raise PdserveError(ErrorReason.DRAINING, "the coordinator is stopping")
        if model not in self._queues:
            raise PdserveError(ErrorReason.MODEL_NOT_FOUND, f"model {model!r} is not served here", param="model")
        now_s = self._clock()
        if any(entry.deadline_s <= now_s for entry in entries):
            raise PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline had passed on arrival in the queue")
        views = self._fleet.views(model)
        check_pools(model, views, entries)
        queue = self._queues[model]
        waiting = list(queue.turnstile.policy)
        try:
            check_queue(waiting, entries, self._config.bounds, views)
        except PdserveError as error:
            error.retry_after_s = queue.rate.retry_after_s(len(waiting), now_s)
            raise

    def _start(self, entry: QueueEntry, request: SequenceRequest) -> SequenceRun:
        turnstile = self._queues[request.model].turnstile
        run = SequenceRun(request, turnstile, turnstile.join(entry), self._context)
        task = asyncio.create_task(run.run(), name=f"sequence {run.stream.id}")
        self._runs[task] = run
        task.add_done_callback(lambda done: self._runs.pop(done, None))
        return run

    def _new_id(self) -> SequenceId:
        return SequenceId(self._config.incarnation, next(self._next_sequence))

    def is_ready(self, model: str) -> bool:
        """Whether a new sequence would be taken in: not while draining, nor without a ready worker of each role."""
        views = self._fleet.views(model)
        return not self._draining and all(any(view.can(role) for view in views) for role in Role)

    def begin_drain(self) -> None:
        """Refuse new sequences; those admitted go on, queued ones too."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every sequence was over in time."""
        deadline_s = self._clock() + timeout_s
        while self._runs and self._clock() < deadline_s:
            await asyncio.wait(list(self._runs), timeout=max(0.0, deadline_s - self._clock()))
        return not self._runs

    async def close(self) -> None:
        """End what still runs with DRAINING, and wait until everything held for it was let go."""
        self.begin_drain()
        for run in list(self._runs.values()):
            run.stop(PdserveError(ErrorReason.DRAINING, "the coordinator stopped before the sequence was finished"))
        while self._runs:
            await asyncio.wait(list(self._runs))
