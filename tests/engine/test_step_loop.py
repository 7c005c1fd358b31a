import queue
import threading
from collections.abc import Sequence as Seq

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.block_pool import BlockPool, Owner, OwnerKind
from pdserve.engine.events import SequenceFailed, SequenceReleased, TokenSampled
from pdserve.engine.sequence import Chunk
from pdserve.engine.step_loop import EngineThread, StageResources, Turn
from prefill_service.prompt import PrefillJob
from prefill_service.scheduler import PrefillScheduler
from prefill_service.stage import PrefillStage
from tests.support.fake_engine import FakeRunner, make_sequence

WAIT_S = 20.0


class Harness:
    """An engine thread whose turns are read one by one."""

    def __init__(self, runner: FakeRunner) -> None:
        self.turns: queue.Queue[Turn] = queue.Queue()
        self.crashes: queue.Queue[BaseException] = queue.Queue()
        self.pool = BlockPool(64)
        self.stage = PrefillStage(PrefillScheduler(16, 8), StageResources(self.pool, 4, frozenset({0})))
        self.engine = EngineThread(runner, [self.stage], self.turns.put, self.crashes.put)
        self.engine.start()

    def submit(self, number: int, num_tokens: int) -> None:
        job = PrefillJob(make_sequence(number, num_tokens, max_tokens=1), 1e12, 0.0, None)
        self.engine.post(lambda: self.stage.submit(job))

    def events(self, count: int) -> list[object]:
        events: list[object] = []
        while len(events) < count:
            events += self.turns.get(timeout=WAIT_S).events[0]
        return events


def test_work_is_done_and_told_once() -> None:
    harness = Harness(FakeRunner(4))
    harness.submit(1, 40)
    assert [type(e) for e in harness.events(2)] == [TokenSampled, SequenceReleased]
    assert harness.engine.step_count == 3
    harness.engine.stop()
    assert harness.pool.num_free_blocks == 64


def test_a_failing_forward_ends_its_sequences_and_not_the_engine() -> None:
    broken = True

    def fail_once(_: Seq[Chunk]) -> None:
        nonlocal broken
        if broken:
            broken = False
            raise RuntimeError("boom")

    harness = Harness(FakeRunner(4, fail_once))
    harness.submit(1, 5)
    assert [type(e) for e in harness.events(2)] == [SequenceFailed, SequenceReleased]
    harness.submit(2, 5)
    assert [type(e) for e in harness.events(2)] == [TokenSampled, SequenceReleased]
    harness.engine.stop()


def test_call_brings_results_and_errors_back() -> None:
    harness = Harness(FakeRunner(4))
    assert harness.engine.call(threading.get_ident).result(WAIT_S) != threading.get_ident()

    def refuse() -> None:
        raise PdserveError(ErrorReason.STALE, "no")

    with pytest.raises(PdserveError):
        harness.engine.call(refuse).result(WAIT_S)
    assert harness.engine.call(lambda: 5).result(WAIT_S) == 5
    harness.engine.stop()


def test_commands_are_handled_between_steps() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(_: Seq[Chunk]) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    harness = Harness(FakeRunner(4, block))
    harness.submit(1, 40)
    assert entered.wait(WAIT_S)
    future = harness.engine.call(lambda: harness.stage.cancel(make_sequence(1, 1).id))
    assert not future.done()
    assert harness.engine.has_work
    assert harness.engine.has_commands
    leave.set()
    future.result(WAIT_S)
    harness.engine.stop()
    assert harness.engine.step_count == 1
    assert harness.pool.num_free_blocks == 64


def test_a_stage_that_breaks_its_own_rules_ends_the_engine_loudly() -> None:
    harness = Harness(FakeRunner(4))
    sequence = make_sequence(1, 40)
    owner = Owner(OwnerKind.INBOUND, sequence.id)
    harness.engine.call(lambda: harness.pool.allocate(64, owner)).result(WAIT_S)  # behind the ledger's back
    harness.engine.post(lambda: harness.stage.submit(PrefillJob(sequence, 1e12, 0.0, None)))
    assert isinstance(harness.crashes.get(timeout=WAIT_S), RuntimeError)


def test_a_posted_command_that_fails_ends_the_engine_too() -> None:
    harness = Harness(FakeRunner(4))
    harness.engine.post(lambda: harness.pool.free([0], Owner(OwnerKind.INBOUND, make_sequence(1, 1).id)))
    assert isinstance(harness.crashes.get(timeout=WAIT_S), RuntimeError)


def test_a_call_that_breaks_the_rules_ends_the_engine_and_tells_the_caller() -> None:
    harness = Harness(FakeRunner(4))
    future = harness.engine.call(lambda: harness.pool.free([0], Owner(OwnerKind.INBOUND, make_sequence(1, 1).id)))
    with pytest.raises(RuntimeError, match="belongs to None"):
        future.result(WAIT_S)
    assert isinstance(harness.crashes.get(timeout=WAIT_S), RuntimeError)
