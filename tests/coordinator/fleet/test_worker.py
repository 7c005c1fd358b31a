from dataclasses import dataclass, field, replace

import pytest

from coordinator.fleet.values import Role, WorkerLoad, WorkerOutput, WorkerState
from coordinator.fleet.worker import Hold, Worker
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from tests.support.worker_views import BOTH, info

LOAD = WorkerLoad(
    ledger_version=1,
    step_count=1,
    has_work=False,
    draining=False,
    queued_prefill_tokens=0,
    num_waiting=0,
    num_running=0,
    num_transferring=0,
    num_free_blocks=100,
    num_reserved_blocks=0,
    num_usable_blocks=100,
    num_cached_blocks=0,
)


@dataclass
class Sink:
    outputs: list[WorkerOutput] = field(default_factory=list)
    losses: list[PdserveError] = field(default_factory=list)

    def on_output(self, role: Role, output: WorkerOutput) -> None:
        self.outputs.append(output)

    def on_lost(self, role: Role, error: PdserveError) -> None:
        self.losses.append(error)


def hold(worker: Worker, number: int, role: Role = Role.DECODE, num_tokens: int = 40) -> Hold:
    return Hold(worker, role, SequenceId(1, number), Sink(), num_tokens)


async def test_free_blocks_follow_own_grants_and_ends_between_reports() -> None:
    worker = Worker(info("d0", BOTH), 0.0, lambda: None)
    worker.report(LOAD, 0.0)
    with hold(worker, 1):
        assert worker.view().free_blocks == 90
        worker.report(replace(LOAD, num_reserved_blocks=30), 1.0)  # 10 ours, 20 of others
        assert worker.view().free_blocks == 70
        with hold(worker, 2):
            assert worker.view().free_blocks == 60
        assert worker.view().free_blocks == 70
    assert worker.view().free_blocks == 80


@pytest.mark.parametrize("reported", [0, 10])
async def test_a_report_may_race_with_a_grant(reported: int) -> None:
    worker = Worker(info("d0", BOTH), 0.0, lambda: None)
    with hold(worker, 1) as asked:
        asked.asking = True
        worker.report(replace(LOAD, num_reserved_blocks=reported), 0.0)
        assert worker.view().free_blocks == 100
        asked.asking = False
        assert worker.view().free_blocks == 90


async def test_queued_prefill_tokens_and_room_follow_own_dispatches() -> None:
    worker = Worker(info("p0", BOTH), 0.0, lambda: None)
    worker.report(replace(LOAD, queued_prefill_tokens=100), 0.0)
    with hold(worker, 1, Role.PREFILL):
        view = worker.view()
        assert (view.queued_prefill_tokens, view.prefill_room) == (140, 90)
        worker.report(replace(LOAD, queued_prefill_tokens=15), 1.0)
        assert worker.view().queued_prefill_tokens == 15
    view = worker.view()
    assert (view.queued_prefill_tokens, view.prefill_room) == (0, 100)


async def test_leaving_twice_counts_once_and_a_refusal_not_at_all() -> None:
    released: list[int] = []
    worker = Worker(info("d0", BOTH), 0.0, lambda: released.append(1))
    with hold(worker, 1) as held:
        held.leave()
        held.leave()
        assert not held.held
    with hold(worker, 2) as refused:
        refused.refused = True
    assert (worker.num_releases, len(released)) == (1, 1)
    assert worker.num_in_flight(Role.DECODE) == 0


async def test_outputs_reach_their_sequence_or_are_counted_as_stale() -> None:
    worker = Worker(info("d0", BOTH), 0.0, lambda: None)
    with hold(worker, 1) as held:
        sink = held.sink
        assert isinstance(sink, Sink)
        mine, foreign = WorkerOutput(SequenceId(1, 1)), WorkerOutput(SequenceId(9, 1))
        worker.deliver(Role.DECODE, [mine, foreign])
        worker.deliver(Role.PREFILL, [mine])
        assert sink.outputs == [mine]
        assert worker.num_stale_outputs == 2
        worker.lose(PdserveError(ErrorReason.WORKER_LOST, "gone"))
        assert len(sink.losses) == 1


async def test_health_is_progress() -> None:
    worker = Worker(info("d0", BOTH), 0.0, lambda: None)
    assert worker.state(0.0, 10.0) is WorkerState.CONNECTING
    worker.connection = object()  # type: ignore[assignment]
    busy = replace(LOAD, has_work=True)
    for now_s in range(0, 60, 2):  # a long prefill: no output, but steps
        worker.report(replace(busy, step_count=now_s), float(now_s))
        assert worker.state(now_s + 1.0, 10.0) is WorkerState.READY
    for now_s in range(60, 80, 2):
        worker.report(replace(busy, step_count=58), float(now_s))
    assert worker.state(79.0, 10.0) is WorkerState.STALLED
    worker.report(replace(busy, step_count=59), 80.0)
    assert worker.state(80.0, 10.0) is WorkerState.READY
    assert worker.state(90.1, 10.0) is WorkerState.STALLED  # no report at all
    for now_s in range(91, 120, 2):  # idle: no steps, and none needed
        worker.report(replace(LOAD, step_count=59), float(now_s))
    assert worker.state(120.0, 10.0) is WorkerState.READY
    worker.draining = True
    assert worker.state(120.0, 10.0) is WorkerState.DRAINING
