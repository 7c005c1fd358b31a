"""One registered worker as this coordinator sees it: connection, last load report, and what is in flight there.

A `Hold` is one sequence's presence in one role of a worker. It is entered before the first message that could make the
worker hold anything and left exactly once, however the sequence ends; every count is derived from the holds.
"""

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from coordinator.fleet.values import Denied, Granted, Role, Target, WorkerInfo, WorkerLoad, WorkerOutput, WorkerState
from coordinator.scheduling.routing import WorkerView
from coordinator.sequences import SequenceRequest
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId

_use = itertools.count(1)


class OutputSink(Protocol):
    """Whoever runs a sequence."""

    def on_output(self, role: Role, output: WorkerOutput) -> None: ...

    def on_lost(self, role: Role, error: PdserveError) -> None: ...


class WorkerEvents(Protocol):
    """Called on the event loop."""

    def on_outputs(self, role: Role, outputs: Seq[WorkerOutput]) -> None: ...

    def on_lost(self, error: PdserveError) -> None:
        """A stream broke or could not be opened; at most once, and nothing follows."""
        ...


class Connection(Protocol):
    """What a worker's client offers; see `worker_clients.WorkerClient`."""

    async def start(self) -> None: ...

    async def reserve(
        self, sequence_id: SequenceId, request: SequenceRequest, remaining_s: float
    ) -> Granted | Denied: ...

    def submit_prefill(
        self, sequence_id: SequenceId, request: SequenceRequest, remaining_s: float, target: Target | None
    ) -> None: ...

    def submit_decode(
        self, sequence_id: SequenceId, request: SequenceRequest, remaining_s: float, reservation_id: int
    ) -> None: ...

    def cancel(self, role: Role, sequence_id: SequenceId) -> None: ...

    def close(self) -> None: ...

    async def closed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _OwnWork:
    """What this coordinator has in flight at a worker."""

    prefill_tokens: int = 0
    prefill_blocks: int = 0
    decode_blocks: int = 0
    asked_blocks: int = 0


class Hold:
    """A context manager. `worker_done`: the worker holds nothing any more, so that no Cancel is needed; `refused`: it
    never did, so that nothing is given back either; `asking`: not granted yet, so that its blocks don't count while
    the sequence still stands in the queue."""

    def __init__(
        self, worker: "Worker", role: Role, sequence_id: SequenceId, sink: OutputSink, num_tokens: int
    ) -> None:
        self.worker = worker
        self.role = role
        self.sequence_id = sequence_id
        self.sink = sink
        self.num_tokens = num_tokens
        self.num_blocks = worker.info.blocks_for(num_tokens)
        self.worker_done = False
        self.refused = False
        self.asking = False

    @property
    def held(self) -> bool:
        """Entered and not yet left."""
        return self.worker.has(self)

    def __enter__(self) -> "Hold":
        self.worker.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop counting it, and cancel it at the worker unless that is done with it; harmless the second time."""
        self.worker.leave(self)


class Worker:
    """Mutable; event loop only. Once `departed` tells why, the fleet has forgotten it and nothing is sent to it."""

    def __init__(self, info: WorkerInfo, now_s: float, on_release: Callable[[], None]) -> None:
        self.info = info
        self._on_release = on_release
        self.connection: Connection | None = None
        self.departed: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        self.draining = False
        self.num_releases = 0
        self.num_stale_outputs = 0
        self.load: WorkerLoad | None = None
        self.last_report_s = now_s
        self._last_progress_s = now_s
        self._own_at_report = _OwnWork()
        self._last_use = 0
        self._holds: dict[tuple[Role, SequenceId], Hold] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Until nothing of this coordinator's is in flight there, or the worker is gone."""
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait((idle, self.departed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()

    @property
    def gone(self) -> bool:
        return self.departed.done()

    def client(self) -> Connection:
        """Raises: RuntimeError before the worker is connected; no view of it exists then."""
        if self.connection is None:
            raise RuntimeError(f"worker {self.info.key} is not connected")
        return self.connection

    def has(self, hold: Hold) -> bool:
        return self._holds.get((hold.role, hold.sequence_id)) is hold

    def enter(self, hold: Hold) -> None:
        self._last_use = next(_use)
        self._idle.clear()
        self._holds[hold.role, hold.sequence_id] = hold

    def leave(self, hold: Hold) -> None:
        if self._holds.pop((hold.role, hold.sequence_id), None) is None:
            return
        if not self._holds:
            self._idle.set()
        if hold.refused:
            return
        self.num_releases += 1
        if not hold.worker_done and not self.gone and self.connection is not None:
            self.connection.cancel(hold.role, hold.sequence_id)
        self._on_release()

    def num_in_flight(self, role: Role) -> int:
        return sum(held_role is role for held_role, _ in self._holds)

    def deliver(self, role: Role, outputs: Seq[WorkerOutput]) -> None:
        """Give each output to its sequence; those of ended ones are counted and dropped."""
        for output in outputs:
            hold = self._holds.get((role, output.sequence_id))
            if hold is None:
                self.num_stale_outputs += 1
            else:
                hold.sink.on_output(role, output)

    def lose(self, error: PdserveError) -> None:
        """The worker is gone: tell every sequence there. At most once."""
        self.departed.set_result(error)
        for (role, _), hold in list(self._holds.items()):
            hold.sink.on_lost(role, error)

    def report(self, load: WorkerLoad, now_s: float) -> None:
        if self.load is None or load.step_count != self.load.step_count or not load.has_work:
            self._last_progress_s = now_s
        self.load = load
        self.last_report_s = now_s
        self.draining = self.draining or load.draining
        self._own_at_report = self._own_work()

    def state(self, now_s: float, stalled_after_s: float) -> WorkerState:
        """Silent for too long, or no step for too long while work waits, is stalled: health is progress."""
        if self.gone:
            return WorkerState.LOST
        if self.connection is None:
            return WorkerState.CONNECTING
        if now_s - min(self.last_report_s, self._last_progress_s) > stalled_after_s:
            return WorkerState.STALLED
        return WorkerState.DRAINING if self.draining else WorkerState.READY

    def view(self) -> WorkerView:
        """The last report, moved on by what this coordinator began and ended there since; others' share stands."""
        own, then = self._own_work(), self._own_at_report
        usable, foreign, queued, version = self.info.capacity.num_blocks, 0, 0, 0
        if self.load is not None:
            usable, queued = self.load.num_usable_blocks, self.load.queued_prefill_tokens
            version = self.load.ledger_version
            # A report and the answer to a Reserve race: what was being asked for may be in the report or not.
            foreign = max(0, self.load.num_reserved_blocks - then.decode_blocks - then.asked_blocks)
        return WorkerView(
            info=self.info,
            usable_blocks=usable,
            free_blocks=usable - foreign - own.decode_blocks,
            prefill_room=usable - own.prefill_blocks,
            queued_prefill_tokens=max(0, queued + own.prefill_tokens - then.prefill_tokens),
            num_in_flight=len(self._holds),
            last_use=self._last_use,
            ledger_version=version,
            num_releases=self.num_releases,
        )

    def _own_work(self) -> _OwnWork:
        prefills = [hold for (role, _), hold in self._holds.items() if role is Role.PREFILL]
        decodes = [hold for (role, _), hold in self._holds.items() if role is Role.DECODE]
        return _OwnWork(
            prefill_tokens=sum(hold.num_tokens for hold in prefills),
            prefill_blocks=sum(hold.num_blocks for hold in prefills),
            decode_blocks=sum(hold.num_blocks for hold in decodes if not hold.asking),
            asked_blocks=sum(hold.num_blocks for hold in decodes if hold.asking),
        )
