"""E02: every order of abort, end of sending, end of receiving and a duplicate of each, beside a stream that goes on."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest

from decode_service.entry import DecodeJob
from decode_service.requests import DecodeRequests
from kv_transfer.interfaces import InboundCommit, OutboundEnd
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.engine.block_pool import OwnerKind
from pdserve.engine.events import Event, SequenceReleased
from pdserve.engine.ledger import Demand, Reservation, ReservationLedger
from pdserve.engine.step_loop import EngineThread
from tests.decode_service.test_stage import BLOCK
from tests.decode_service.test_stage import Bench as DecodeBench
from tests.prefill_service.test_stage import Bench as PrefillBench
from tests.support.fake_engine import expected_output, make_sequence


def orders(*events: str) -> Iterator[tuple[str, ...]]:
    """All distinct orders of the events, each twice."""
    return iter(sorted(set(itertools.permutations(events * 2))))


ABORT_AND_SENT = list(orders("abort", "sent", "aborted"))
ABORT_AND_RECEIVED = list(orders("abort", "received", "submit"))


def test_all_orders_are_there() -> None:
    assert len(ABORT_AND_SENT) == len(ABORT_AND_RECEIVED) == 90


@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["queued", "computing", "sending"])
def test_a_prefill_stage_survives_every_order(num_steps: int) -> None:
    for order in ABORT_AND_SENT:
        check_prefill(order, num_steps)


def check_prefill(order: tuple[str, ...], num_steps: int) -> None:
    bench = PrefillBench(budget=8)
    sequence, bystander = make_sequence(1, 20), make_sequence(2, 30)
    bench.submit(sequence)
    for _ in range(num_steps):
        bench.step()
    bench.submit(bystander)
    opened = sequence.id in bench.transfers
    cancelled = PdserveError(ErrorReason.CANCELLED, "")
    handlers: dict[str, Callable[[], object]] = {
        "abort": lambda: bench.stage.cancel(sequence.id),
        "sent": lambda: bench.stage.transfer_ended(OutboundEnd(sequence.id, None, 10, 0.1, "grpc")),
        "aborted": lambda: bench.stage.transfer_ended(OutboundEnd(sequence.id, cancelled, 0, 0.0, "grpc")),
    }
    released = 0
    for event in order:
        if opened or event == "abort":
            handlers[event]()
        released += sum(isinstance(e, SequenceReleased) for e in bench.stage.take_events())
    assert released == 1, order
    assert bench.stage.totals.num_stale >= 1
    expected = expected_output(bystander.token_ids, 1)
    while bench.stage.has_work:
        bench.step()
    assert bystander.token_ids[30:] == expected
    bench.end(bystander)
    bench.assert_empty()


class InlineEngine:
    """An engine thread whose commands run at once."""

    def post(self, function: Callable[[], object]) -> None:
        function()


class DecodeWorker:
    """Ledger, requests and stage of a decode worker, stepped by hand; KV arrives when the test says so."""

    def __init__(self) -> None:
        self.bench = DecodeBench(num_blocks=16)
        self.ledger = ReservationLedger(16, BLOCK, lease_s=10.0)
        self.refused: list[PdserveError] = []
        self.requests = DecodeRequests(
            self.ledger,
            cast("EngineThread", InlineEngine()),
            self.bench.stage,
            lambda _, error: self.refused.append(error),
            ledger_changed=lambda: None,
        )
        self.writing: dict[SequenceId, tuple[int, ...]] = {}

    @property
    def num_held_blocks(self) -> int:
        return self.bench.pool.num_blocks - self.bench.pool.num_free_blocks

    def begin(self, job: DecodeJob) -> int:
        """Reserve, submit, and let a writer in; the reservation's id."""
        num_tokens = len(job.token_ids) + job.sampling.max_tokens
        reservation = self.requests.reserve(job.sequence_id, Demand(num_tokens, num_tokens), 0.0, 1e9)
        assert isinstance(reservation, Reservation)
        self.requests.submit(job, reservation.reservation_id)
        self.requests.begin_inbound(job.sequence_id, reservation.reservation_id, num_blocks=2)
        self.writing[job.sequence_id] = self.bench.stage.allocate_inbound(job.sequence_id, 2)
        return reservation.reservation_id

    def received(self, job: DecodeJob, reservation_id: int) -> None:
        """The writer is done: its blocks are adopted, or given back if that is refused."""
        block_ids = self.writing.pop(job.sequence_id, None)
        if block_ids is not None:
            token = expected_output(job.token_ids, 1)[0]
            commit = InboundCommit(job.sequence_id, reservation_id, block_ids, len(job.token_ids), (token,), 0, 0.0)
            try:
                self.requests.check_live(job.sequence_id, reservation_id)
                self.bench.stage.adopt(commit, OwnerKind.INBOUND, 0.0)
            except PdserveError:
                self.bench.stage.release_inbound(job.sequence_id, block_ids)
        self.requests.inbound_ended(job.sequence_id)

    def step(self) -> None:
        if self.bench.stage.has_work:
            self.settle(self.bench.step())
        self.settle(self.bench.stage.take_events())

    def settle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceReleased):
                self.requests.engine_released(event.sequence_id)


@pytest.mark.parametrize("num_steps", [0, 1, 2], ids=["at once", "after a step", "after two steps"])
def test_a_decode_worker_survives_every_order(num_steps: int) -> None:
    for order in ABORT_AND_RECEIVED:
        check_decode(order, num_steps)


def check_decode(order: tuple[str, ...], num_steps: int) -> None:
    worker = DecodeWorker()
    job, bystander = worker.bench.job(1, [1, 2, 3, 4, 5]), worker.bench.job(2, [7, 8, 9, 1, 2, 3])
    reservation_id = worker.begin(job)
    worker.received(bystander, worker.begin(bystander))
    handlers: dict[str, Callable[[], object]] = {
        "abort": lambda: worker.requests.cancel(job.sequence_id),
        "received": lambda: worker.received(job, reservation_id),
        "submit": lambda: worker.requests.submit(job, reservation_id),
    }
    for event in order:
        handlers[event]()
        worker.settle(worker.bench.stage.take_events())
        for _ in range(num_steps):
            worker.step()
        assert worker.num_held_blocks <= worker.ledger.num_reserved_blocks, "blocks without a reservation"
    assert len(worker.requests) <= 1, order
    while worker.bench.stage.has_work:
        worker.step()
    assert worker.bench.outputs[bystander.sequence_id] == expected_output(bystander.token_ids, 8)[1:], order
    assert worker.requests.num_stale + worker.bench.stage.totals.num_stale >= 2
    assert (len(worker.requests), worker.ledger.num_reserved_blocks) == (0, 0), order
    assert all(error.reason is ErrorReason.STALE for error in worker.refused)
    worker.bench.assert_empty()
